//! Private parsers, exposed only for `pagefold-fuzz`, which tests them.

use crate::ksm_stat::KsmStat;
use crate::os::fields;
use crate::os::numa::FrameSpan;
use crate::os::number_list::NumberList;
use crate::pagemap::PageRange;
use crate::statm::Sizes;
use crate::{cgroup, headroom, numa, os};
use pagefold_engine::keys::NodeKey;
use std::path::{Path, PathBuf};

pub fn cgroups(text: &[u8]) -> Vec<(String, String)> {
    cgroup::parse_cgroups(text).into_iter().map(|cgroup| (cgroup.controllers, cgroup.path)).collect()
}

/// Mount and directory of each cgroup that may limit memory.
pub fn memory_cgroups(text: &[u8], root: &Path) -> Vec<(PathBuf, PathBuf)> {
    cgroup::parse_cgroups(text).iter().filter_map(|cgroup| headroom::group_dir(cgroup, root)).collect()
}

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

/// The number of elements of a list, and whether the list meets itself, as any but an empty one does.
pub fn list(text: &str) -> (usize, bool) {
    let list = NumberList::parse(text).unwrap_or_default();
    (list.iter().count(), list.meets(&list))
}

/// How many processors and memory nodes a process may use.
pub fn allowed(status: &[u8]) -> Option<(usize, usize)> {
    let (cpus, nodes) = numa::allowed(status)?;
    Some((cpus.iter().count(), nodes.iter().count()))
}

/// A field of a node's meminfo, KiB.
pub fn node_kib(text: &str, name: &str) -> Option<u64> {
    fields::kib(text.as_bytes(), name).ok()
}

/// Divides a memory block of 32768 frames that spans two nodes along the zones of `/proc/zoneinfo`. Returns the first
/// frame and the number of frames of each part.
pub fn block_of_two(zones: &str) -> Vec<(u64, u64)> {
    let block = [0, 1].map(|node| FrameSpan { first: 32_768, frames: 32_768, node: NodeKey(node) });
    let parts = os::numa::divided(&block, &os::numa::zones_of(zones));
    parts.into_iter().map(|part| (part.first, part.frames)).collect()
}

/// Mapped, resident and data pages.
pub fn statm(text: &[u8]) -> Result<[u64; 3], &'static str> {
    let Sizes { mapped, resident, data } = Sizes::parse(text)?;
    Ok([mapped, resident, data])
}

/// The pages between two addresses, as PAGEMAP_SCAN gives them.
pub fn page_range(start: u64, end: u64, categories: u64) -> PageRange {
    PageRange::between(start, end, categories)
}

/// The number of elements in a list like `0-3,8`.
pub fn count_list(text: &str) -> Option<u32> {
    u32::try_from(NumberList::parse(text)?.len()).ok().filter(|&count| count > 0)
}
