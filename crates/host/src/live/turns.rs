//! Shares the time of a pass over processes: whoever has taken less of it comes first, and then whoever has waited
//! longest. If a pass ends early, neither costly processes nor new ones have kept it from those of other users, or from
//! older ones.

use super::machine::elapsed_ns;
use crate::targets::Target;
use pagefold_procmem::stalls::{Origin, PASSES, TimeShares};
use std::time::{Duration, Instant};

/// One pass takes this long at most, not counting the last process, nanoseconds.
const PASS_NS: u64 = 250_000_000;
/// We don't charge anybody for less than this, nanoseconds. Looking at an unchanged process takes 1 us.
const CHARGED_FROM_NS: u64 = 20_000;
/// If changing marks has just taken this much more than a user's or cgroup's part of the time, we change the marks of
/// its other processes last.
const SLOW: Duration = Duration::from_millis(100);

/// The place of a process in the order of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    /// By how much its user or cgroup has exceeded its part of the time.
    excess: Duration,
    since_ns: u64,
    pub(super) pid: i32,
}

impl Turn {
    /// The turn of a process that has waited since `since_ns`.
    pub(super) fn of(target: &Target, since_ns: u64) -> Self {
        Self::by(&PASSES, target.origin, Instant::now(), since_ns, target.pid())
    }

    fn by(shares: &TimeShares, origin: Origin, now: Instant, since_ns: u64, pid: i32) -> Self {
        Self { excess: shares.excess(origin, now), since_ns, pid }
    }
}

/// Whether a process comes last in a pass that isn't in the order of turns, because its user or cgroup was too slow.
pub(super) fn comes_last(target: &Target) -> bool {
    PASSES.excess(target.origin, Instant::now()) > SLOW
}

/// A pass that's under way.
#[derive(Debug)]
pub(super) struct Pass {
    began: Instant,
    /// How much of its time the pass has charged to somebody.
    charged_ns: u64,
}

impl Pass {
    pub(super) fn begin() -> Self {
        Self { began: Instant::now(), charged_ns: 0 }
    }

    pub(super) fn is_over(&self) -> bool {
        elapsed_ns(self.began) > PASS_NS
    }

    /// Charges a user and a cgroup for the time since the last charge. Returns how long the pass has taken so far.
    pub(super) fn charge(&mut self, origin: Origin) -> u64 {
        let now = Instant::now();
        let spent_ns = elapsed_ns(self.began);
        let took_ns = spent_ns - self.charged_ns;
        if took_ns >= CHARGED_FROM_NS {
            PASSES.charge(origin, Duration::from_nanos(took_ns), now);
        }
        self.charged_ns = spent_ns;
        spent_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::units::count;
    use pagefold_procmem::stalls::Share;

    const MS: u64 = 1_000_000;
    const MINUTE_NS: u64 = 60_000 * MS;

    struct Process {
        origin: Origin,
        /// When its last turn was, or when it started.
        since_ns: u64,
        /// The time that its next turn takes.
        cost_ns: u64,
    }

    impl Process {
        fn new(user: u32, since_ns: u64, cost_ns: u64) -> Self {
            Self { origin: Origin { user: Some(Share::User(user)), cgroup: None }, since_ns, cost_ns }
        }
    }

    /// Runs passes for a minute. The first process is user 0's, who starts another one every `each_ns`, with a first
    /// turn of `cost_ns`. The second process is user 1's. Returns how long these two waited at most.
    fn longest_waits(each_ns: u64, cost_ns: u64) -> [u64; 2] {
        let shares = TimeShares::new(Duration::ZERO, Duration::MAX);
        let began = Instant::now();
        let mut now_ns = 0;
        let mut longest = [0; 2];
        let mut processes = vec![Process::new(0, 0, MS), Process::new(1, 0, MS)];
        while now_ns < MINUTE_NS {
            while count(processes.len()) < 2 + now_ns / each_ns {
                processes.push(Process::new(0, now_ns, cost_ns));
            }
            let mut turns = Vec::new();
            for (pid, process) in (0..).zip(&processes) {
                let now = began + Duration::from_nanos(now_ns);
                turns.push(Turn::by(&shares, process.origin, now, process.since_ns, pid));
            }
            turns.sort_unstable();
            let end_ns = now_ns + PASS_NS;
            for turn in turns {
                if now_ns > end_ns {
                    break;
                }
                let at = usize::try_from(turn.pid).unwrap();
                let process = &mut processes[at];
                now_ns += process.cost_ns;
                let cost = Duration::from_nanos(process.cost_ns);
                shares.charge(process.origin, cost, began + Duration::from_nanos(now_ns));
                process.since_ns = now_ns;
                if at >= longest.len() {
                    process.cost_ns = 0;
                }
            }
            now_ns += 10 * MS;
            for (longest, process) in longest.iter_mut().zip(&processes) {
                *longest = now_ns.saturating_sub(process.since_ns).max(*longest);
            }
        }
        longest
    }

    /// Five processes a second with long lists of mappings, and twenty a second whose marks take a while to remove.
    #[test]
    fn new_costly_processes_delay_no_older_one() {
        for (each_ns, cost_ns) in [(200 * MS, 250 * MS), (50 * MS, 70 * MS)] {
            let [own, others] = longest_waits(each_ns, cost_ns);
            assert!(others < 1_000 * MS && own < 30_000 * MS, "{own} {others}");
        }
    }
}
