//! How far an attempt is, told by its thread to its caller without a message: the thread must not allocate then.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Threads of targets that wait for us to be able to restore them.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// How many processes cannot be let go at this moment ([`super::InjectError::Held`]). While it is not zero, this
/// process must not end.
pub fn held() -> usize {
    HELD.load(Ordering::Acquire)
}

const PREPARING: u8 = 0;
const CALLING: u8 = 1;
const STUCK: u8 = 2;
const ABANDONED: u8 = 3;

/// Decides between a caller that gives up and a thread that begins to set registers.
#[derive(Debug, Default)]
pub struct AttemptProgress(AtomicU8);

impl AttemptProgress {
    fn turn(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// From here on nobody may give up. False: somebody has.
    pub fn enter(&self) -> bool {
        self.turn(PREPARING, CALLING)
    }

    /// Gives up an attempt that has not begun to call. False: it has.
    pub fn abandon(&self) -> bool {
        self.turn(PREPARING, ABANDONED)
    }

    /// The call does not end and cannot be broken off.
    pub fn get_stuck(&self) {
        if self.turn(CALLING, STUCK) {
            HELD.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The thread is restored, or dead.
    pub fn leave(&self) {
        if self.is_stuck() {
            HELD.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Whether the call does not end.
    pub fn is_stuck(&self) -> bool {
        self.0.load(Ordering::Acquire) == STUCK
    }

    /// Whether the caller has given up.
    pub fn is_abandoned(&self) -> bool {
        self.0.load(Ordering::Acquire) == ABANDONED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_of_caller_and_thread_decides() {
        let progress = AttemptProgress::default();
        assert!(progress.enter() && !progress.abandon() && !progress.is_abandoned());
        progress.leave();
        let progress = AttemptProgress::default();
        progress.get_stuck();
        assert!(progress.abandon() && !progress.enter() && progress.is_abandoned() && !progress.is_stuck());
    }
}
