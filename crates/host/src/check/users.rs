//! Finds the processes that use KSM: their memory is merged or may be merged, whoever marked it.

use pagefold_engine::ledger::METADATA_BYTES_PER_PAGE;
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn, count};
use pagefold_procmem::image::image_of;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::list::pids;
use pagefold_procmem::maps::read_smaps;
use pagefold_procmem::memory::PageReader;
use pagefold_procmem::os::abandonable::{Job, LIMIT, run_abandonable};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_text::escape::printable;
use pagefold_text::style::human;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// A finding lists at most this many processes.
const NAMED_MOST: usize = 4;
/// If there are more merged pages than this, we don't count the saving: looking up a page takes about a microsecond.
const COUNTED_MOST: u64 = 1 << 22;

/// A process that uses KSM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmUser {
    pub pid: i32,
    pub name: String,
    pub merged_bytes: u64,
    pub metadata_bytes: u64,
    /// Whether the process's memory is marked as a whole, because the process, its parent or its service manager has
    /// asked the kernel for that. `None` before Linux 6.14, which doesn't say it.
    #[serde(skip)]
    pub is_marked_by_itself: Option<bool>,
}

/// The processes that use KSM, the largest first. Ends after `limit` with the ones found so far. We don't see processes
/// that we may not read.
pub fn ksm_users(proc: &Path, limit: Duration) -> Result<Vec<KsmUser>, ReadError> {
    let began = Instant::now();
    let mut users = Vec::new();
    for pid in pids(proc)? {
        if began.elapsed() > limit {
            break;
        }
        let Ok(process) = Process::open_at(proc, pid) else { continue };
        // The process may hold its mmap lock, which the kernel needs for this read.
        if let Ok(Ok(Some(user))) = run_abandonable(move || KsmUser::of(&process)) {
            users.push(user);
        }
    }
    users.sort_by_key(|user| (u64::MAX - user.merged_bytes, user.pid));
    Ok(users)
}

impl KsmUser {
    fn of(process: &Process) -> Result<Option<Self>, ReadError> {
        let stat = KsmStat::of(process)?;
        // When marks are removed, the kernel counts the unmerged pages as merged until ksmd's next scan.
        let is_marked_by_itself = stat.merge_any == Some(true);
        let has_marks = is_marked_by_itself || stat.mergeable != Some(false);
        if !has_marks || stat.items == 0 && stat.merged() == Pages(0) && !is_marked_by_itself {
            return Ok(None);
        }
        Ok(Some(Self {
            pid: process.pid(),
            name: printable(&process.stat()?.comm),
            merged_bytes: stat.merged().bytes().0,
            metadata_bytes: stat.items.saturating_mul(METADATA_BYTES_PER_PAGE),
            is_marked_by_itself: stat.merge_any,
        }))
    }
}

/// Lists processes with their merged memory, for a finding.
pub fn sentence(users: &[KsmUser]) -> String {
    let mut names = Vec::new();
    for user in users.iter().take(NAMED_MOST) {
        names.push(format!("{} (pid {}) {}", user.name, user.pid, human(user.merged_bytes)));
    }
    let mut text = names.join(", ");
    if users.len() > NAMED_MOST {
        text = format!("{text} and {} more", users.len() - NAMED_MOST);
    }
    let merged = human(users.iter().map(|user| user.merged_bytes).sum());
    let metadata = human(users.iter().map(|user| user.metadata_bytes).sum());
    format!("{text}; {merged} merged in all, for which the kernel keeps {metadata} of metadata")
}

/// How much more memory these processes would hold if nothing were merged, in frames. Forks that map a frame at the
/// same address count once, because they'd share the page anyway. `None` if we can't tell, or there are too many pages.
pub fn saved(proc: &Path, users: &[KsmUser]) -> Option<Pages> {
    let merged = users.iter().map(|user| user.merged_bytes).sum::<u64>();
    if users.is_empty() || merged / PAGE_BYTES > COUNTED_MOST {
        return None;
    }
    let mut mappings = Vec::new();
    let mut zeros: BTreeMap<u64, Pages> = BTreeMap::new();
    for user in users.iter().filter(|user| user.merged_bytes > 0) {
        // A process that has just ended has no memory.
        let Ok(process) = Process::open_at(proc, user.pid) else { continue };
        let found = Job::start(move || Merged::of(&process)).wait(LIMIT).ok()?.ok()?;
        let most = zeros.entry(found.family).or_default();
        *most = found.zeros.max(*most);
        mappings.extend(found.pages.iter().map(|&(frame, page)| (frame, page, found.family)));
    }
    Some(Pages(saved_frames(mappings)) + zeros.into_values().sum())
}

/// The merged pages of a process.
struct Merged {
    /// Equal for processes forked from each other.
    family: u64,
    /// Each page with its frame.
    pages: Vec<(u64, Vpn)>,
    zeros: Pages,
}

impl Merged {
    fn of(process: &Process) -> Result<Self, ReadError> {
        let mut reader = PageReader::new();
        let mut runs = Vec::new();
        for detail in read_smaps(process)? {
            if detail.anonymous_kib > 0 && detail.ksm_kib != Some(0) {
                runs.push((detail.vma.first(), u32::try_from(detail.vma.pages().0).unwrap_or(u32::MAX)));
            }
        }
        let mut pages = Vec::new();
        reader.merged_frames(process, &runs, false, |page, frame| pages.push((frame, page)))?;
        Ok(Self { family: image_of(process)?, pages, zeros: KsmStat::of(process)?.zeros() })
    }
}

/// How many frames merging saves. Each mapping is a frame, the page that maps it, and the family of the page's process.
fn saved_frames(mut mappings: Vec<(u64, Vpn, u64)>) -> u64 {
    mappings.sort_unstable();
    mappings.dedup();
    let frames = mappings.chunk_by(|a, b| a.0 == b.0).count();
    count(mappings.len() - frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relatives_that_map_a_frame_at_one_address_count_once() {
        let page = Vpn;
        // Two families of three processes each map one frame, and a single process maps another one twice.
        let forks = [7, 7, 7, 8, 8, 8].map(|family| (1, page(5), family));
        let twice = [(2, page(5), 9), (2, page(6), 9)];
        assert_eq!(saved_frames([&forks[..], &twice[..]].concat()), 2);
        assert_eq!(saved_frames(forks[..3].to_vec()), 0);
    }

    #[test]
    fn users_are_found_by_what_is_merged_and_named_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let add = |pid: i32, comm: &str, ksm_stat: &str| {
            let process = dir.path().join(pid.to_string());
            std::fs::create_dir(&process).unwrap();
            let numbers = "0 ".repeat(60);
            std::fs::write(process.join("stat"), format!("{pid} ({comm}) S 1 {numbers}")).unwrap();
            std::fs::write(process.join("ksm_stat"), ksm_stat).unwrap();
        };
        add(2, "small", "ksm_rmap_items 512\nksm_merging_pages 256\nksm_merge_any: yes\n");
        add(3, "nothing", "ksm_rmap_items 0\nksm_merging_pages 0\nksm_merge_any: no\nksm_mergeable: no\n");
        add(4, "large", "ksm_rmap_items 1024\nksm_merging_pages 512\nksm_zero_pages 256\nksm_merge_any: no\n");
        add(5, "marked", "ksm_rmap_items 0\nksm_merging_pages 0\nksm_merge_any: yes\n");
        let users = ksm_users(dir.path(), Duration::MAX).unwrap();
        assert_eq!(users.iter().map(|user| user.pid).collect::<Vec<_>>(), [4, 2, 5]);
        assert_eq!(
            sentence(&users),
            "large (pid 4) 3 MiB, small (pid 2) 1 MiB, marked (pid 5) 0 B; 4 MiB merged in all, for which the \
             kernel keeps 96 KiB of metadata"
        );
    }
}
