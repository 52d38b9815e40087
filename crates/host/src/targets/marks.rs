//! The marks on a target's memory (madvise with MADV_MERGEABLE): whether there are any, and which must go.

use super::Target;
use crate::judge::ProgramHistory;
use crate::regions::Tracked;
use crate::scope::exclude::Exclusion;
use pagefold_engine::keys::DomainKey;
use pagefold_engine::units::{Bytes, Pages};
use pagefold_inject::unmerge::{UnmergeError, Unmerged};
use std::sync::Arc;

/// The first and the longest pause after we couldn't remove marks, nanoseconds. The pause doubles each time.
const PAUSE_NS: u64 = 250_000_000;
const PAUSE_MOST_NS: u64 = 10_000_000_000;

/// If a process is marked again each time, we give up after this many tries in a row.
pub(super) const PASSES: u32 = 5;

/// Which marks of a process must go. Later variants include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Marks {
    /// Marks on excluded mappings. If the process is marked as a whole we leave its marks, because the process or the
    /// administrator wants them.
    Excluded,
    /// Marks on all mappings, unless the process is marked as a whole.
    Mappings,
    /// All marks, whoever set them, because somebody has asked us to unmerge the process.
    All,
}

/// Marks of a target that must go, because its memory is excluded now.
#[derive(Clone, Debug)]
pub struct PendingUnmark {
    pub reason: Exclusion,
    pub marks: Marks,
    /// Address space still marked at the last try.
    pub left: Bytes,
    /// Why the last try to remove them failed, if it did.
    pub problem: Option<Arc<UnmergeError>>,
    /// Merged memory at the first try, KiB.
    pub(crate) merged_kib: Option<u64>,
    /// Whether we've tried to remove them. We make no new marks on any process before the first try.
    pub(crate) was_tried: bool,
    /// Whether the last try has ended the marking of the process as a whole.
    pub(crate) is_ended: bool,
    pub(crate) next_ns: u64,
    pause_ns: u64,
    /// How many tries in a row have removed all marks that they found.
    passes: u32,
}

impl PendingUnmark {
    pub(crate) fn new(reason: Exclusion, marks: Marks) -> Self {
        Self {
            reason,
            marks,
            left: Bytes(0),
            problem: None,
            merged_kib: None,
            was_tried: false,
            is_ended: false,
            next_ns: 0,
            pause_ns: PAUSE_NS,
            passes: 0,
        }
    }

    /// Notes that the last try failed.
    fn fail(&mut self, problem: UnmergeError) {
        self.was_tried = true;
        self.problem = Some(Arc::new(problem));
    }
}

/// Marks that we've set, found and removed.
#[derive(Debug, Default)]
pub(super) struct MarkRecord {
    /// Whether this run, or an earlier one, has marked some memory of the process, or of its parent before the fork.
    pub(super) are_set: bool,
    /// Whether we've removed all marks since.
    pub(super) are_cleared: bool,
    /// How many pages may still be merged in regions that we've forgotten, because we leave the process alone and have
    /// yet to unmark them.
    pub(super) forgotten: Pages,
}

impl MarkRecord {
    /// Notes that we forget regions, maybe before they're unmarked.
    pub(super) fn note_forgotten(&mut self, regions: &[Tracked]) {
        if !self.are_set {
            return;
        }
        for Tracked { stretch, .. } in regions {
            self.forgotten += stretch.marked.min(stretch.resident);
        }
    }
}

/// A request to unmerge a process.
#[derive(Debug, Default)]
pub(crate) struct UnmergeRequest {
    /// The work done for the last request.
    pub(crate) done: Unmerged,
    /// Whether the process is out of scope, and a target only until it's unmerged.
    pub(crate) is_only_reason: bool,
}

impl Target {
    pub(crate) fn set_marked(&mut self) {
        self.marks.are_set = true;
        self.marks.are_cleared = false;
    }

    /// Records that nothing is marked any more, and makes the next refresh judge the process again.
    fn set_cleared(&mut self) {
        self.marks.are_set = false;
        self.marks.are_cleared = true;
        self.marks.forgotten = Pages(0);
        self.check.expire();
    }

    /// How many pages outside of our regions may be merged, until we've unmarked them.
    pub(crate) fn forgotten(&self) -> Pages {
        self.marks.forgotten
    }

    /// Whether the process has marked memory and is outside the merged trust domain, or was when we marked the memory.
    pub(crate) fn has_foreign_marks(&self, merged: DomainKey) -> bool {
        self.marks.are_set && (self.domain != merged || self.check.domain != merged)
    }

    /// The trust domain that the process was in when this run or an earlier one marked its memory. A fork may have been
    /// marked as part of its parent. `None` if its memory wasn't marked.
    pub(super) fn domain_when_marked(&mut self, image: u64, history: &ProgramHistory) -> Option<DomainKey> {
        if self.marks.are_set {
            return Some(self.domain);
        }
        if self.marks.are_cleared {
            return None;
        }
        let domain = history.marked.domain(image);
        self.marks.are_set = domain.is_some();
        domain
    }

    /// Unmarks the whole process, because this user asked for it.
    pub(crate) fn unmerge(&mut self, by: u32) {
        self.request.done = Unmerged::default();
        self.pending = Some(PendingUnmark::new(Exclusion::KeptOut { by }, Marks::All));
    }

    /// Counts the work done for a request to unmerge. `merged_kib`: how much of the memory is still merged.
    pub(crate) fn count_unmerged(&mut self, merged_kib: u64, unmarked: Pages, longest_stop_ns: u64) {
        let Some(pending) = self.pending.as_mut().filter(|pending| pending.marks == Marks::All) else { return };
        let before_kib = *pending.merged_kib.get_or_insert(merged_kib);
        let done = &mut self.request.done;
        done.given_back = Bytes(before_kib.saturating_sub(merged_kib).saturating_mul(1024));
        done.unmarked = Bytes(done.unmarked.0 + unmarked.bytes().0);
        done.longest_stop_ns = done.longest_stop_ns.max(longest_stop_ns);
    }

    /// Whether marks must go, and it's time for the next try.
    pub(crate) fn unmark_is_due(&self, now_ns: u64) -> bool {
        self.pending.as_ref().is_some_and(|pending| now_ns >= pending.next_ns)
    }

    /// Since when the marks that must go could have been removed. At the first call, that's now.
    pub(crate) fn waits_to_unmark_since(&mut self, now_ns: u64) -> u64 {
        let Some(pending) = &mut self.pending else { return now_ns };
        if pending.next_ns == 0 {
            pending.next_ns = now_ns;
        }
        pending.next_ns
    }

    /// Puts off the next try to remove marks.
    pub(crate) fn put_off(&mut self, now_ns: u64, problem: UnmergeError) {
        if let Some(pending) = &mut self.pending {
            pending.fail(problem);
            pending.next_ns = now_ns + pending.pause_ns;
            pending.pause_ns = (pending.pause_ns * 2).min(PAUSE_MOST_NS);
            pending.passes = 0;
        }
    }

    /// Records that a try has removed all the marks that it found. Returns whether to search for more at once. If the
    /// process is marked again each time, its own program does that, and the marks we made are gone. Then we stop. But
    /// if the memory must never be merged, or somebody wants it unmerged, we try again later.
    pub(crate) fn set_unmarked(&mut self, now_ns: u64) -> bool {
        let Some(pending) = &mut self.pending else { return false };
        pending.passes += 1;
        if pending.passes < PASSES {
            return true;
        }
        if pending.marks == Marks::Mappings {
            self.set_settled();
        } else {
            let why = "its memory is marked again each time".to_owned();
            self.put_off(now_ns, UnmergeError::Left { pid: self.pid(), why });
        }
        false
    }

    /// Makes us check soon whether the try under way to remove marks has ended.
    pub(crate) fn wait(&mut self, now_ns: u64, problem: UnmergeError) {
        if let Some(pending) = &mut self.pending {
            pending.fail(problem);
            pending.next_ns = now_ns + PAUSE_NS;
        }
    }

    /// Records that we've removed all marks that had to go.
    pub(crate) fn set_settled(&mut self) {
        match self.pending.take() {
            Some(pending) if pending.marks > Marks::Excluded => self.set_cleared(),
            _ => self.set_changed(),
        }
    }

    pub(crate) fn request_unmark(&mut self, reason: Exclusion, marks: Marks) {
        if self.pending.as_ref().is_none_or(|pending| marks > pending.marks) {
            self.pending = Some(PendingUnmark::new(reason, marks));
        }
    }
}
