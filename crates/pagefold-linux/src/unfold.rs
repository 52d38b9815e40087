//! Giving memory back: unmarks what is marked in a process, so that every merged page gets its own copy again.
//!
//! The kernel makes the copies within the system call, in the target's own time, under its mmap lock
//! (`unmerge_ksm_pages`, mm/ksm.c). So it is done in steps short enough for the target not to notice.

use crate::headroom::headroom;
use crate::inject::{Call, InjectError, Injector, Limits};
use crate::maps::{VmaDetail, read_smaps};
use crate::merge_any::PR_SET_MEMORY_MERGE;
use crate::process::{Process, ReadError};
use crate::scope::Roots;
use pagefold_core::units::Bytes;
use thiserror::Error;

/// Address space unmarked by one call. At about a gigabyte a second that copying takes, 8 ms of the target's time.
const STEP_BYTES: u64 = 8 << 20;
/// Calls between two looks at the room left.
const BATCH: usize = 8;
/// Room to leave, for what the process and its neighbours allocate meanwhile.
const MARGIN_BYTES: u64 = 32 << 20;
/// Rounds of unmarking before giving up on mappings that keep changing or calls that signals keep cutting short.
const ROUNDS: u32 = 5;

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfolded {
    /// Address space unmarked.
    pub unmarked: Bytes,
    /// Memory that has its own copy again. Zero pages count only where the kernel tells of them (6.10).
    pub given_back: Bytes,
    /// The longest stop of the target, nanoseconds.
    pub longest_stop_ns: u64,
}

/// Why it could not be done, or not wholly.
#[derive(Debug, Error)]
pub enum UnfoldError {
    /// The process cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The process cannot be stopped for it.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// Its copies would not fit into its memory limits.
    #[error("process {pid} has room for {:.0} MiB only, and {:.0} MiB are wanted at a time; raise the limit of its cgroup or free memory, and unmerge again", left.mib(), wanted.mib())]
    NoRoom {
        /// The process.
        pid: i32,
        /// What its limits leave.
        left: Bytes,
        /// What the next step may take, and a margin.
        wanted: Bytes,
    },
    /// The kernel refused, or the mappings kept changing.
    #[error("process {pid} could not take all of its memory back: {why}")]
    Left {
        /// The process.
        pid: i32,
        /// The system's word.
        why: String,
    },
}

/// A range of addresses cut into what one call may unmark: where each piece begins, and its bytes.
pub(crate) fn steps(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = usize::try_from(STEP_BYTES).unwrap_or(usize::MAX);
    (start..end).step_by(step).map(move |at| (at, STEP_BYTES.min(end - at)))
}

/// The room that a process's memory limits must leave for this much to be unmarked.
pub(crate) fn room_for(copies: Bytes) -> Bytes {
    Bytes(copies.0 + MARGIN_BYTES)
}

/// Unmarks all that is marked in a process, as far as its memory limits leave room for it.
pub fn unfold(process: &Process, injector: &mut Injector, roots: &Roots) -> Result<Unfolded, UnfoldError> {
    let (pid, stat) = (process.pid(), process.stat()?);
    // Without memory there is nothing marked either: whoever names one has to hear that it is the wrong one.
    if stat.kernel_thread {
        return Err(InjectError::KernelThread { pid }.into());
    }
    if matches!(stat.state, b'Z' | b'X') {
        return Err(InjectError::Zombie { pid }.into());
    }
    let before = State::of(process)?;
    let mut done = Unfolded { unmarked: before.marked_bytes(), ..Unfolded::default() };
    let mut state = before.clone();
    let mut why = String::new();
    for _ in 0..ROUNDS {
        let calls = state.calls();
        if calls.is_empty() {
            break;
        }
        let limits = Limits { calls_per_stop: 1, ..Limits::default() };
        for batch in calls.chunks(BATCH) {
            let wanted = room_for(Bytes(BATCH as u64 * STEP_BYTES));
            let left = headroom(process, &roots.proc, &roots.cgroup)?;
            if left < wanted {
                return Err(UnfoldError::NoRoom { pid: process.pid(), left, wanted });
            }
            let report = injector.run(process, batch, &limits)?;
            done.longest_stop_ns = done.longest_stop_ns.max(report.longest_stop_ns);
            if let Some(errno) = report.results.iter().find_map(|result| result.as_ref().err()) {
                why = errno.to_string();
            }
        }
        state = State::of(process)?;
    }
    done.given_back = Bytes(before.merged_kib.saturating_sub(state.merged_kib) * 1024);
    if state.calls().is_empty() {
        return Ok(done);
    }
    Err(UnfoldError::Left { pid: process.pid(), why })
}

/// What is marked and merged in a process.
#[derive(Clone, Debug)]
struct State {
    merge_any: bool,
    marked: Vec<(u64, u64)>,
    merged_kib: u64,
}

impl State {
    fn of(process: &Process) -> Result<Self, ReadError> {
        let details = read_smaps(process)?;
        let stat = match process.read_file("ksm_stat") {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(ReadError::Absent { .. }) => String::new(),
            Err(error) => return Err(error),
        };
        let marked = details.iter().filter(|detail| detail.flags.has(*b"mg"));
        let merged_kib: u64 = details.iter().filter_map(|detail: &VmaDetail| detail.ksm_kib).sum();
        Ok(Self {
            merge_any: field(&stat, "ksm_merge_any") == Some("yes"),
            marked: marked.map(|detail| (detail.vma.start, detail.vma.end)).collect(),
            merged_kib: merged_kib
                + field(&stat, "ksm_zero_pages").and_then(|pages| pages.parse().ok()).unwrap_or(0) * 4,
        })
    }

    fn marked_bytes(&self) -> Bytes {
        Bytes(self.marked.iter().map(|(start, end)| end - start).sum())
    }

    fn calls(&self) -> Vec<Call> {
        let calls = |&(start, end): &(u64, u64)| {
            steps(start, end).map(|(at, bytes)| Call::madvise(at, bytes, libc::MADV_UNMERGEABLE))
        };
        // Last, and by then with nothing left to copy: no marking of what is to come.
        let end = self.merge_any.then(|| Call::prctl(PR_SET_MEMORY_MERGE, [0; 4]));
        self.marked.iter().flat_map(calls).chain(end).collect()
    }
}

/// A field of `/proc/PID/ksm_stat`, `name value` or `name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once([':', ' '])?;
        (key == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_a_field_are_read() {
        let text = "ksm_rmap_items 3\nksm_zero_pages 12\nksm_merge_any: yes\n";
        assert_eq!(field(text, "ksm_zero_pages"), Some("12"));
        assert_eq!(field(text, "ksm_merge_any"), Some("yes"));
        assert_eq!(field(text, "ksm"), None);
    }

    #[test]
    fn large_mappings_are_unmarked_in_steps() {
        let state = State { merge_any: false, marked: vec![(0x1000, 0x1000 + STEP_BYTES + 4096)], merged_kib: 0 };
        let lengths: Vec<u64> = state.calls().iter().map(|call| call.args[1]).collect();
        assert_eq!(lengths, [STEP_BYTES, 4096]);
    }
}
