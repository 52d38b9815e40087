//! Marks of a target that must go, and the tries to remove them.

use crate::scope::exclude::Exclusion;
use pagefold_engine::units::Bytes;
use pagefold_inject::unmerge::UnmergeError;
use std::sync::Arc;

/// The first and the longest pause after we couldn't remove marks, nanoseconds. The pause doubles each time.
const PAUSE_NS: u64 = 250_000_000;
const PAUSE_MOST_NS: u64 = 10_000_000_000;

/// Which marks of a process must go. Later variants include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Marks {
    /// Marks on excluded mappings. If the process is marked as a whole, we leave them: it, or the administrator, wants
    /// them.
    Excluded,
    /// Marks on all mappings, unless the process is marked as a whole.
    Mappings,
    /// All marks, whoever set them, because somebody has asked for it.
    All,
}

/// Marks of a target that must go, because its memory is excluded now.
#[derive(Clone, Debug)]
pub struct PendingUnmark {
    pub reason: Exclusion,
    pub marks: Marks,
    /// Address space still marked at the last try.
    pub left: Bytes,
    /// Why the last try failed, if one did.
    pub problem: Option<Arc<UnmergeError>>,
    /// Merged memory at the first try, KiB.
    pub(crate) merged_kib: Option<u64>,
    /// Whether we've tried. Others wait for the first try only.
    pub(crate) was_tried: bool,
    pub(crate) next_ns: u64,
    pause_ns: u64,
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
            next_ns: 0,
            pause_ns: PAUSE_NS,
        }
    }

    /// Puts off the next try.
    pub(crate) fn put_off(&mut self, now_ns: u64, problem: UnmergeError) {
        self.try_again_at(now_ns + self.pause_ns, problem);
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_MOST_NS);
    }

    /// Lets us check soon whether the try under way has ended.
    pub(crate) fn wait(&mut self, now_ns: u64, problem: UnmergeError) {
        self.try_again_at(now_ns + PAUSE_NS, problem);
    }

    fn try_again_at(&mut self, next_ns: u64, problem: UnmergeError) {
        self.was_tried = true;
        self.problem = Some(Arc::new(problem));
        self.next_ns = next_ns;
    }
}
