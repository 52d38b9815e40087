//! What cycles cost, how much CPU time reading may take now, and how long to wait until the next cycle.

use super::Engine;
use crate::governor::{Pace, WINDOW_NS, period_ns, share_ns};
use crate::host::{Cost, Snapshot};
use crate::sampling::ladder::matures_ns;

/// While ksmd works, we observe the host at least this often, nanoseconds.
const OBSERVE_NS: u64 = 50_000_000;
/// Watching ksmd may take this fraction of the governor's share of a core.
const OBSERVE_PART: u64 = 10;
/// We assume an observation costs this much until we've measured one, nanoseconds.
pub(super) const OBSERVE_COST_NS: u64 = 200_000;
/// Reading and ksmd stay within the share over this time, so that programs never wait long, nanoseconds.
const SMOOTH_NS: u64 = 1_000_000_000;

impl Engine {
    /// Learns from the last cycle's cost. We charge a cycle's whole cost to its samples, so that shares cover
    /// everything.
    pub(super) fn record_cost(&mut self, snapshot: &Snapshot) {
        let cycle_ns = snapshot.cost.pagefold_ns.saturating_sub(self.snapshot.cost.pagefold_ns);
        // If reading took most of the cycle, judging the samples took most of the rest.
        let observed_ns = |reading_ns| cycle_ns.checked_sub(reading_ns).filter(|&observed_ns| observed_ns > reading_ns);
        if let Some(observed_ns) = self.reading_ns.and_then(observed_ns) {
            // We follow a lower cost at once, but a higher one slowly: now and then an observation does more, such as
            // counting pages, and we shouldn't observe less often because of that.
            let most_ns = self.observe_cost_ns + self.observe_cost_ns / 4;
            self.observe_cost_ns = observed_ns.min(most_ns).max(OBSERVE_COST_NS / 16);
        }
        let read = std::mem::take(&mut self.read);
        // Counting the saving has its own share and tells us nothing about the cost of a sample.
        let has_counted = std::mem::take(&mut self.has_counted);
        if self.reading.new_round && !self.reading.foreground && !has_counted {
            self.ladder.record_bottom_cost(self.planned, cycle_ns);
        } else if !has_counted {
            self.ladder.record_cost(read, cycle_ns);
        }
        self.ledger.observe(snapshot.now_ns, &snapshot.ksm, self.exited(&snapshot.ksm), snapshot.cost);
        self.budget.record(snapshot.now_ns, snapshot.cost);
        self.smooth.record(snapshot.now_ns, Cost { pagefold_ns: self.read_ns, ..snapshot.cost });
    }

    /// CPU time that reading may take now, so that we stay within the share over the governor's window and over a short
    /// time.
    pub(super) fn room_ns(&self, pace: Pace) -> u64 {
        let smooth_ns = share_ns(SMOOTH_NS, pace.top).saturating_sub(self.smooth.spent_ns(SMOOTH_NS));
        self.budget.room_ns(pace).min(smooth_ns)
    }

    /// How long to sleep between two cycles (UKSM's `T_s`) to stay within the share.
    pub(super) fn wait_ns(&self) -> u64 {
        let pace = self.pace();
        // Observing leaves half of the share to reading.
        let latest_ns = period_ns(self.observe_cost_ns * 2, pace.top).clamp(SMOOTH_NS, WINDOW_NS);
        let observe_ns = period_ns(self.observe_cost_ns * OBSERVE_PART, pace.top).clamp(OBSERVE_NS, latest_ns);
        let round_ns = self.ladder.ends_ns(pace).saturating_sub(self.snapshot.now_ns);
        if self.paused {
            return pace.round_ns.min(SMOOTH_NS);
        }
        if self.reading.foreground {
            if self.room_ns(pace) < OBSERVE_COST_NS || self.planned == 0 {
                return observe_ns;
            }
            let share = u64::from(pace.top.0).clamp(1, 10_000);
            return self.ladder.sample_ns() * self.planned / share * (10_000 - share);
        }
        if self.is_merging()
            || self.placer.is_busy()
            || self.relief.is_busy()
            || self.snapshot.ksm.ours && self.marker.is_unmarking()
        {
            return observe_ns.min(round_ns.max(OBSERVE_NS));
        }
        round_ns.min(self.matures_in_ns(pace)).max(OBSERVE_NS.min(pace.round_ns))
    }

    /// Time until the next region is old enough to be read whole, nanoseconds. Only regions that appeared during the
    /// run count.
    fn matures_in_ns(&self, pace: Pace) -> u64 {
        let now_ns = self.snapshot.now_ns;
        let surveyed = self.table.iter().filter(|region| region.age.appeared() && region.life.is_surveyed());
        let ages = surveyed.map(|region| matures_ns(region, pace, &self.config));
        ages.filter(|&at_ns| at_ns > now_ns).min().map_or(u64::MAX, |at_ns| at_ns - now_ns)
    }
}
