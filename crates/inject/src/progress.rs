//! The state of an attempt, which its thread shares with the caller through an atomic. We send no messages, because the
//! thread mustn't allocate while registers are borrowed.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Target threads that we can't restore yet.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// How many processes we can't release at this moment ([`super::InjectError::Held`]). Until this is 0, our process must
/// not end.
pub fn held() -> usize {
    HELD.load(Ordering::Acquire)
}

const PREPARING: u8 = 0;
const CALLING: u8 = 1;
const STUCK: u8 = 2;
const ABANDONED: u8 = 3;
const OVER: u8 = 4;

/// Lets either the caller give up or the thread begin to set registers, never both.
#[derive(Debug, Default)]
pub struct AttemptProgress(AtomicU8);

impl AttemptProgress {
    fn change(&self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Begins to set registers. Returns false if the caller has given up.
    pub fn enter(&self) -> bool {
        self.change(PREPARING, CALLING)
    }

    /// Gives up the attempt. Returns false if its thread has begun to set registers.
    pub fn abandon(&self) -> bool {
        self.change(PREPARING, ABANDONED)
    }

    /// Records that we can't restore the thread: its call neither ends nor can be interrupted, or a sibling makes our
    /// reads of its memory wait.
    pub fn get_stuck(&self) {
        if self.change(CALLING, STUCK) {
            HELD.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Records that the thread is restored or dead.
    pub fn leave(&self) {
        if self.0.swap(OVER, Ordering::AcqRel) == STUCK {
            HELD.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub fn is_stuck(&self) -> bool {
        self.0.load(Ordering::Acquire) == STUCK
    }

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
        progress.get_stuck();
        assert!(!progress.is_stuck(), "it's over");
        let progress = AttemptProgress::default();
        progress.get_stuck();
        assert!(progress.abandon() && !progress.enter() && progress.is_abandoned() && !progress.is_stuck());
    }
}
