//! Attempts that do not return while they prepare: a read of the target's memory, or attaching to it, blocks.
//!
//! Their threads cannot be ended. So there is one at a time in a process, it is not tried again before a pause that grows to
//! hours, and the number of such threads has a limit, which is lower for processes in which an attempt has got stuck before: they
//! do not keep others from being tried.

use super::InjectError;
use crate::proc::process::Process;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// While there are as many stuck threads, nothing is attempted.
const THREADS_MOST: usize = 64;
/// The same in processes in which an attempt has got stuck before.
const THREADS_AGAIN: usize = 16;
/// The pause after the first attempt that got stuck. Each following one is longer by [`PAUSE_FACTOR`].
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const PAUSE_FACTOR: u32 = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(6 * 3600);
/// Processes remembered. Those whose pause ends first are forgotten beyond that.
const REMEMBERED: usize = 1024;

static STUCK: Mutex<Register> = Mutex::new(Register(BTreeMap::new()));

fn register() -> MutexGuard<'static, Register> {
    STUCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Held by the thread of an attempt.
#[derive(Clone, Debug, Default)]
pub struct Alive(Arc<()>);

/// Refuses an attempt that would likely get stuck as well, or for which there is no thread left.
pub fn admit(process: &Process) -> Result<Alive, InjectError> {
    let pid = process.pid();
    match register().admit(process.key(), Instant::now()) {
        Refusal::None => Ok(Alive::default()),
        Refusal::Paused => Err(InjectError::TimedOut { pid, what: "accept a tracer".into() }),
        Refusal::NoThread => Err(InjectError::Busy { pid }),
    }
}

/// Records that the attempt of `alive` was given up while its thread is still under way.
pub fn give_up(process: &Process, alive: &Alive) {
    register().give_up(process.key(), Arc::downgrade(&alive.0), Instant::now());
}

#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    None,
    Paused,
    NoThread,
}

#[derive(Debug)]
struct Entry {
    thread: Weak<()>,
    pause: Duration,
    until: Instant,
}

#[derive(Debug)]
struct Register(BTreeMap<(i32, u64), Entry>);

impl Register {
    fn admit(&self, key: (i32, u64), now: Instant) -> Refusal {
        let entry = self.0.get(&key);
        if entry.is_some_and(|entry| entry.thread.strong_count() > 0 || now < entry.until) {
            return Refusal::Paused;
        }
        let threads = self.0.values().filter(|entry| entry.thread.strong_count() > 0).count();
        let most = if entry.is_some() { THREADS_AGAIN } else { THREADS_MOST };
        if threads < most { Refusal::None } else { Refusal::NoThread }
    }

    fn give_up(&mut self, key: (i32, u64), thread: Weak<()>, now: Instant) {
        let pause = self.0.get(&key).map_or(FIRST_PAUSE, |entry| (entry.pause * PAUSE_FACTOR).min(LONGEST_PAUSE));
        self.0.insert(key, Entry { thread, pause, until: now + pause });
        while self.0.len() > REMEMBERED {
            // A thread that has not returned is still counted.
            let over = self.0.iter().filter(|(_, entry)| entry.thread.strong_count() == 0);
            let Some((&key, _)) = over.min_by_key(|(_, entry)| entry.until) else { break };
            self.0.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_hours_and_threads_are_limited() {
        let mut register = Register(BTreeMap::new());
        let mut now = Instant::now();
        let mut last = Duration::ZERO;
        for _ in 0..10 {
            register.give_up((1, 1), Weak::new(), now);
            let until = register.0[&(1, 1)].until;
            assert!(until - now >= last);
            last = until - now;
            assert_eq!(register.admit((1, 1), now + last / 2), Refusal::Paused);
            assert_eq!(register.admit((1, 1), until), Refusal::None);
            now = until;
        }
        assert_eq!(last, LONGEST_PAUSE);
        let threads: Vec<_> = (0..THREADS_MOST).map(|_| Arc::new(())).collect();
        for (pid, thread) in (10..).zip(&threads[..THREADS_AGAIN]) {
            register.give_up((pid, 1), Arc::downgrade(thread), now);
        }
        assert_eq!(register.admit((10, 1), now + LONGEST_PAUSE * 2), Refusal::Paused, "one at a time");
        assert_eq!(register.admit((1, 1), now), Refusal::NoThread);
        assert_eq!(register.admit((5, 1), now), Refusal::None, "another process");
        for (pid, thread) in (100..).zip(&threads[THREADS_AGAIN..]) {
            register.give_up((pid, 1), Arc::downgrade(thread), now);
        }
        assert_eq!(register.admit((5, 1), now), Refusal::NoThread);
        drop(threads);
        assert_eq!(register.admit((1, 1), now), Refusal::None);
        for pid in 0..2000 {
            register.give_up((pid, 2), Weak::new(), now);
        }
        assert!(register.0.len() <= REMEMBERED);
    }
}
