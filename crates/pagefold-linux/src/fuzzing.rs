//! Private parsers, exposed for the crate `pagefold-fuzz` only, which states their properties.

#![allow(missing_docs)] // thin wrappers of documented functions

use crate::check::facts;
use crate::inject::thread::{Activity, fitness};
use crate::inject::{gadget, worker};
use crate::ksm::plain;
use crate::ksm::{self, ksmd};
use crate::os::number_list::NumberList;
use crate::os::{self, fields};
use crate::proc::ksm_stat::KsmStat;
use crate::proc::pagemap::PageRange;
use crate::proc::statm::Sizes;
use crate::proc::{self, cgroup, headroom};
use crate::scope::{opt_out, opt_out_qemu, opt_out_unit};
use pagefold_core::keys::NodeKey;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Controllers and path of each line.
pub fn cgroups(text: &[u8]) -> Vec<(String, String)> {
    cgroup::parse_cgroups(text).into_iter().map(|cgroup| (cgroup.controllers, cgroup.path)).collect()
}

/// Mount and directory of each cgroup that may limit memory.
pub fn memory_cgroups(text: &[u8], root: &Path) -> Vec<(PathBuf, PathBuf)> {
    cgroup::parse_cgroups(text).iter().filter_map(|cgroup| headroom::group_dir(cgroup, root)).collect()
}

/// Bytes available.
pub fn available(meminfo: &str) -> Option<u64> {
    headroom::available(meminfo)
}

/// A field of `memory.stat`, bytes.
pub fn memory_stat(text: &str, name: &str) -> Option<u64> {
    fields::number(text.as_bytes(), name).ok()
}

/// Whether all memory is marked, and merged zero pages in KiB.
pub fn ksm_stat(text: &[u8]) -> (bool, u64) {
    let stat = KsmStat::parse(text);
    (stat.merge_any, stat.zero_kib)
}

/// The number in a counter or knob in sysfs.
pub fn ksm_number<T: FromStr>(text: &[u8]) -> Option<T> {
    plain(text)?.parse().ok()
}

/// The selected word in a file in sysfs that lists alternatives.
pub fn ksm_choice(text: &[u8]) -> Option<&str> {
    fields::chosen(plain(text)?)
}

/// The opt-out on QEMU's command line, with the same text in each file that it names.
pub fn qemu_opts_out(text: &[u8]) -> Option<&'static str> {
    opt_out_qemu::of_arguments(text, |_| Some(text.to_vec()))
}

/// Whether the configuration of a virtual machine of Proxmox VE opts out.
pub fn guest_opts_out(text: &[u8]) -> bool {
    opt_out::guest_denies(text)
}

/// Whether the file of a service opts out.
pub fn service_opts_out(text: &[u8]) -> bool {
    opt_out_unit::memory_ksm(text, "Service") == Some(opt_out_unit::Setting::No)
}

pub fn cow_ksm(vmstat: &str) -> u64 {
    ksm::cow_ksm(vmstat)
}

pub fn schedstat(text: &[u8]) -> Option<u64> {
    ksmd::parse_schedstat(text)
}

/// The number of elements of a list, and whether it overlaps itself.
pub fn list(text: &str) -> (usize, bool) {
    NumberList::parse(text).map_or((0, false), |list| (list.iter().count(), list.meets(&list)))
}

/// The numbers of processors and memory nodes allowed for a process.
pub fn allowed(status: &[u8]) -> Option<(usize, usize)> {
    proc::numa::allowed(status).map(|(cpus, nodes)| (cpus.iter().count(), nodes.iter().count()))
}

/// A field of a node's meminfo, KiB.
pub fn node_kib(text: &str, name: &str) -> Option<u64> {
    fields::kib(text.as_bytes(), name).ok()
}

/// The parts into which the zones of `/proc/zoneinfo` divide a memory block of 32768 frames that spans two nodes: first
/// frame and number of frames.
pub fn block_of_two(zones: &str) -> Vec<(u64, u64)> {
    let block = [0, 1].map(|node| (32_768, 32_768, NodeKey(node)));
    os::numa::divided(&block, &os::numa::zones_of(zones))
        .into_iter()
        .map(|(first, frames, _)| (first, frames))
        .collect()
}

/// Mapped, resident and data pages.
pub fn statm(text: &[u8]) -> Result<[u64; 3], &'static str> {
    Sizes::parse(text).map(|sizes| [sizes.mapped, sizes.resident, sizes.data])
}

/// The pages between two addresses, as PAGEMAP_SCAN gives them.
pub fn page_range(start: u64, end: u64, categories: u64) -> PageRange {
    PageRange::between(start, end, categories)
}

/// What a thread does: the system call it blocks in with number, arguments and program counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    Running,
    Outside,
    In(i64, [u64; 6], u64),
}

/// The activity of a thread, and whether the injector would choose a thread in this state.
pub fn activity(text: &[u8], state: u8) -> Result<(Blocked, bool), &'static str> {
    let activity = Activity::parse(text)?;
    let blocked = match activity {
        Activity::Running => Blocked::Running,
        Activity::Blocked => Blocked::Outside,
        Activity::Syscall { nr, args, pc } => Blocked::In(nr, args, pc),
    };
    Ok((blocked, fitness(state, activity).is_some()))
}

/// Executable mappings, the vDSO first.
pub fn executable(maps: &[u8]) -> Vec<(u64, u64)> {
    gadget::executable(maps).iter().map(|code| (code.start, code.end)).collect()
}

/// Parses a request to the injector: whether printing and parsing it again gives the same, and its time limit.
pub fn injector_request(line: &[u8]) -> Option<(bool, Duration)> {
    let request: worker::Request = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&request).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some((again.is_some_and(|again| request == again), worker::reply_limit(request.calls.len(), &request.limits)))
}

/// Parses a reply of the injector: whether printing and parsing it again gives the same.
pub fn injector_reply(line: &[u8]) -> Option<bool> {
    let reply: worker::Reply = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&reply).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some(again.is_some_and(|again| reply == again))
}

/// The number of elements in a list like `0-3,8`.
pub fn count_list(text: &str) -> Option<u32> {
    u32::try_from(NumberList::parse(text)?.len()).ok().filter(|&count| count > 0)
}

/// The page size in an auxiliary vector.
pub fn page_size(auxv: &[u8]) -> Option<u64> {
    facts::page_size_in(auxv)
}
