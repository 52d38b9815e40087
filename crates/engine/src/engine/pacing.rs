//! Keeps track of the cost of cycles, of how much CPU time reading may take now, and of the wait until the next cycle.

use super::Engine;
use crate::config::Config;
use crate::governor::{Budget, Governor, Pace, WINDOW_NS, period_ns, share_ns};
use crate::host::{Cost, Snapshot};
use crate::limits::Allowance;
use crate::sampling::ladder::matures_ns;

/// While ksmd works, we observe the host at most this often, nanoseconds.
pub(super) const OBSERVE_NS: u64 = 50_000_000;
/// Watching ksmd may take one part in this many of the CPU time that the governor grants.
const OBSERVE_PART: u64 = 10;
/// We assume an observation costs this much until we've measured one, nanoseconds.
const OBSERVE_COST_NS: u64 = 200_000;
/// Reading and ksmd stay within the share of a core over any period of this length, nanoseconds, so that programs never
/// wait long for a CPU.
const SMOOTH_NS: u64 = 1_000_000_000;

/// How much CPU time and how many actions we may spend, and how much we've spent.
#[derive(Debug)]
pub(super) struct Spending {
    /// The governor in force: the configured one, or `Auto`'s choice.
    pub governor: Governor,
    /// Whether we're paused, so that we only watch.
    pub paused: bool,
    /// CPU time of pagefold and ksmd.
    pub total: Budget,
    /// CPU time of reading and of ksmd, without our other work.
    smooth: Budget,
    /// How much we may still do to targets in this second.
    pub allowance: Allowance,
    /// CPU time of all our reading, and of the last cycle's, nanoseconds.
    read_ns: u64,
    last_read_ns: u64,
    /// Whether the last cycle changed targets. Then we can't tell how much of its cost was observing.
    pub changed_targets: bool,
    /// A cycle costs at least this much besides reading, nanoseconds. Grows with the number of processes.
    observe_cost_ns: u64,
}

impl Spending {
    pub fn new(config: &Config) -> Self {
        Self {
            governor: if config.governor == Governor::Auto { Governor::Low } else { config.governor },
            paused: false,
            total: Budget::default(),
            smooth: Budget::default(),
            allowance: Allowance::new(config.limits, &config.groups),
            read_ns: 0,
            last_read_ns: 0,
            changed_targets: false,
            observe_cost_ns: OBSERVE_COST_NS,
        }
    }

    /// Records the CPU time of this cycle's reading.
    pub fn record_reading(&mut self, cpu_ns: u64) {
        self.read_ns += cpu_ns;
        self.last_read_ns = cpu_ns;
        self.changed_targets = false;
    }

    /// CPU time that reading may take now, so that we stay within the share over the governor's window and over
    /// [`SMOOTH_NS`].
    pub fn room_ns(&self, pace: Pace) -> u64 {
        let smooth_ns = share_ns(SMOOTH_NS, pace.top).saturating_sub(self.smooth.spent_ns(SMOOTH_NS));
        self.total.room_ns(pace).min(smooth_ns)
    }

    /// Learns from a whole cycle's CPU time how much observing costs.
    fn record_cycle(&mut self, cycle_ns: u64) {
        let observed_ns = cycle_ns.saturating_sub(self.last_read_ns);
        // If reading took most of the cycle, most of its other CPU time went into judging the samples, not into
        // observing.
        if self.changed_targets || observed_ns <= self.last_read_ns {
            return;
        }
        // We adopt a lower cost at once, but a higher one slowly. Some observations do more, such as counting pages,
        // and we shouldn't observe less often because of them.
        let most_ns = self.observe_cost_ns + self.observe_cost_ns / 4;
        self.observe_cost_ns = observed_ns.min(most_ns).max(OBSERVE_COST_NS / 16);
    }

    /// How long to sleep between two observations of ksmd's work.
    fn observe_ns(&self, pace: Pace) -> u64 {
        // If observing is expensive, it may take up to half of the share, and reading gets the rest.
        let latest_ns = period_ns(self.observe_cost_ns * 2, pace.top).clamp(SMOOTH_NS, WINDOW_NS);
        period_ns(self.observe_cost_ns * OBSERVE_PART, pace.top).clamp(OBSERVE_NS, latest_ns)
    }
}

impl Engine {
    /// Learns from the last cycle's cost. We charge a cycle's whole cost to its samples, so that the levels' shares
    /// cover all our work.
    pub(super) fn record_cost(&mut self, snapshot: &Snapshot) {
        let cycle_ns = snapshot.cost.pagefold_ns.saturating_sub(self.snapshot.cost.pagefold_ns);
        self.spending.record_cycle(cycle_ns);
        // A cycle that counted the saving tells us nothing about the cost of a sample. Counting has its own share.
        if !self.plan.has_counted {
            if self.plan.reading.new_round && !self.plan.reading.foreground {
                self.ladder.record_bottom_cost(self.plan.pages, cycle_ns);
            } else {
                let done = self.plan.read + self.plan.named;
                self.ladder.record_cost(self.plan.effort_for_holes().unwrap_or(done), cycle_ns);
            }
        }
        self.close(snapshot.now_ns, &snapshot.ksm, snapshot.cost);
        self.spending.total.record(snapshot.now_ns, snapshot.cost);
        let reading = Cost { pagefold_ns: self.spending.read_ns, ..snapshot.cost };
        self.spending.smooth.record(snapshot.now_ns, reading);
    }

    /// How long to sleep between two cycles (UKSM's `T_s`) to stay within the share.
    pub(super) fn wait_ns(&self) -> u64 {
        let pace = self.pace();
        if self.spending.paused {
            return pace.round_ns.min(SMOOTH_NS);
        }
        let observe_ns = self.spending.observe_ns(pace);
        if self.plan.reading.foreground {
            if self.spending.room_ns(pace) < OBSERVE_COST_NS || self.plan.pages == 0 {
                return observe_ns;
            }
            let share = u64::from(pace.top.0).clamp(1, 10_000);
            let pages = self.plan.effort_for_holes().unwrap_or(self.plan.pages);
            return self.ladder.sample_ns() * pages / share * (10_000 - share);
        }
        let round_ns = self.ladder.ends_ns(pace).saturating_sub(self.snapshot.now_ns);
        let is_unmarking = self.snapshot.ksm.ours && self.ksmd.marker.unmarking.is_due(self.snapshot.now_ns);
        if self.is_merging() || self.placer.is_busy() || self.room.relief.is_busy() || is_unmarking {
            return observe_ns.min(round_ns.max(OBSERVE_NS));
        }
        round_ns.min(self.is_due_in_ns(pace)).max(OBSERVE_NS.min(pace.round_ns))
    }

    /// Time until the next region is old enough to be read whole, or until we may try again to mark one, nanoseconds.
    /// Only regions that appeared during the run become old enough.
    fn is_due_in_ns(&self, pace: Pace) -> u64 {
        let now_ns = self.snapshot.now_ns;
        let mut soonest_ns = u64::MAX;
        for region in self.table.iter() {
            let at_ns = if region.life.is_worth_marking() {
                region.hold.retry_ns
            } else if region.age.appeared() && region.life.is_surveyed() {
                matures_ns(region, pace, &self.config)
            } else {
                continue;
            };
            if at_ns > now_ns {
                soonest_ns = soonest_ns.min(at_ns - now_ns);
            }
        }
        soonest_ns
    }
}
