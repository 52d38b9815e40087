//! The one door through which the fuzzer reaches parsers that are nobody else's business.
//!
//! Nothing here is meant to be used; what the parsers promise is written down in the crate `pagefold-fuzz`.

#![allow(missing_docs)] // thin covers; the parsers behind them have their documentation

use crate::check::facts;
use crate::host::targets;
use crate::inject::thread::{Activity, fitness};
use crate::inject::unmerge;
use crate::inject::{gadget, worker};
use crate::ksm::plain;
use crate::ksm::{self, ksmd};
use crate::proc::pagemap::PageRange;
use crate::proc::{cgroup, headroom, numa};
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

/// A field of `memory.stat`.
pub fn memory_stat(text: &str, name: &str) -> Option<u64> {
    headroom::field(text, name)
}

/// Whether all memory is marked, and the merged zero pages in KiB.
pub fn ksm_stat(text: &[u8]) -> (bool, u64) {
    let stat = unmerge::ksm_stat(text);
    (stat.merge_any, stat.zero_kib)
}

/// A counter or knob in sysfs.
pub fn ksm_number<T: FromStr>(text: &[u8]) -> Option<T> {
    plain(text)?.parse().ok()
}

/// A file in sysfs that names its choices.
pub fn ksm_choice(text: &[u8]) -> Option<&str> {
    ksm::chosen(plain(text)?)
}

pub fn cow_ksm(vmstat: &str) -> u64 {
    ksm::cow_ksm(vmstat)
}

pub fn schedstat(text: &[u8]) -> Option<u64> {
    ksmd::parse_schedstat(text)
}

/// How many numbers a list has, and whether it meets itself.
pub fn list(text: &str) -> (usize, bool) {
    let list = numa::List::parse(text);
    (list.iter().count(), list.meets(&list))
}

/// Processors and nodes that a process may use.
pub fn allowed(status: &[u8]) -> Option<(usize, usize)> {
    numa::allowed(status).map(|(cpus, nodes)| (cpus.iter().count(), nodes.iter().count()))
}

/// A field of a node's meminfo, KiB.
pub fn node_kib(text: &str, name: &str) -> Option<u64> {
    numa::field_kib(text, name)
}

/// What a memory block of 32768 frames that belongs to two nodes is cut into by the zones of `/proc/zoneinfo`: frames, and
/// how many of them.
pub fn block_of_two(zones: &str) -> Vec<(u64, u64)> {
    let block = [0, 1].map(|node| (32_768, 32_768, NodeKey(node)));
    numa::divided(&block, &numa::zones_of(zones)).into_iter().map(|(first, frames, _)| (first, frames)).collect()
}

/// Pages mapped, resident, and of data.
pub fn statm(text: &[u8]) -> Result<[u64; 3], &'static str> {
    targets::Sizes::parse(text).map(|sizes| [sizes.mapped, sizes.resident, sizes.data])
}

/// The pages between two addresses, as PAGEMAP_SCAN gives them.
pub fn page_range(start: u64, end: u64, categories: u64) -> PageRange {
    PageRange::between(start, end, categories)
}

/// What a thread blocks in: call, arguments and program counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    Running,
    Outside,
    In(i64, [u64; 6], u64),
}

/// The activity, and whether a thread in this state would be chosen.
pub fn activity(text: &[u8], state: u8) -> Result<(Blocked, bool), &'static str> {
    let activity = Activity::parse(text)?;
    let blocked = match activity {
        Activity::Running => Blocked::Running,
        Activity::Blocked => Blocked::Outside,
        Activity::Syscall { nr, args, pc } => Blocked::In(nr, args, pc),
    };
    Ok((blocked, fitness(state, activity).is_some()))
}

/// Executable mappings, the vDSO's first.
pub fn executable(maps: &[u8]) -> Vec<(u64, u64)> {
    gadget::executable(maps)
}

/// A request to the injector: whether written and read again it is the same, and how long its answer may take.
pub fn injector_request(line: &[u8]) -> Option<(bool, Duration)> {
    let request: worker::Request = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&request).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some((again.is_some_and(|again| request == again), worker::patience(request.calls.len(), &request.limits)))
}

/// An injector's reply: whether written and read again it is the same.
pub fn injector_reply(line: &[u8]) -> Option<bool> {
    let reply: worker::Reply = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&reply).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some(again.is_some_and(|again| reply == again))
}

/// How many numbers a list like `0-3,8` names.
pub fn count_list(text: &str) -> Option<u32> {
    facts::count_list(text)
}

/// The page size in an auxiliary vector.
pub fn page_size(auxv: &[u8]) -> Option<u64> {
    facts::page_size_in(auxv)
}
