//! Governors: how much CPU time we may use, and when (UKSM section 7).
//!
//! A governor sets three things: the share of one core that pagefold and ksmd may use together, the time of a global
//! round, and the CPU time that a saved page may cost. The share holds over any period of [`WINDOW_NS`]: we check how
//! much both have spent before we read or order anything.

use crate::host::{Cost, MemoryView};
use crate::named;
use crate::units::Permyriad;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A governor's share holds over this period, nanoseconds.
pub const WINDOW_NS: u64 = 10_000_000_000;
/// We combine observations that are closer together than this, nanoseconds.
const OBSERVE_NS: u64 = 20_000_000;

/// How fast we work: a share of a core, a round time, and a price for a saved page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Governor {
    /// 1 % of a core, rounds of 20 s, at most 25 us of CPU time for a saved page.
    Quiet,
    /// 20 % of a core, rounds of 8 s, at most 50 us for a saved page.
    Low,
    /// 50 % of a core, rounds of 4 s, at most 100 us for a saved page.
    Medium,
    /// 95 % of a core, rounds of 2 s, at most 200 us for a saved page.
    Full,
    /// One of the other governors, chosen by how scarce memory is and how long programs wait for a CPU.
    #[default]
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The share of one core that pagefold and ksmd may use together (UKSM `p`).
    pub top: Permyriad,
    /// The time of a global round (UKSM `t`), nanoseconds.
    pub round_ns: u64,
    /// A saved page may cost at most this much CPU time, nanoseconds.
    pub price_ns: u64,
}

impl Governor {
    pub const NAMES: [(&'static str, Self); 5] = [
        ("full", Self::Full),
        ("medium", Self::Medium),
        ("low", Self::Low),
        ("quiet", Self::Quiet),
        ("auto", Self::Auto),
    ];

    pub fn pace(self) -> Pace {
        let (top, seconds, price_us) = match self {
            Self::Full => (9_500, 2, 200),
            Self::Medium => (5_000, 4, 100),
            Self::Low | Self::Auto => (2_000, 8, 50),
            Self::Quiet => (100, 20, 25),
        };
        Pace { top: Permyriad(top), round_ns: seconds * 1_000_000_000, price_ns: price_us * 1_000 }
    }

    /// The governor that `Auto` chooses while `current` is in force.
    ///
    /// With plenty of memory that's `Low`. We take the worse of two signs that memory is scarce. One is how long
    /// programs wait for memory, where the kernel reports it (PSI). The other is how little is still available
    /// (ksmtuned starts KSM below 20 %). The governor rises at once, and falls only when memory is clearly less scarce,
    /// so that it doesn't flap.
    ///
    /// While the programs we merge wait for a CPU (`cpu_pressure`), the governor yields to them: each per cent of that
    /// time counts as one per cent less scarcity. If memory is as scarce as can be, it doesn't yield, because the
    /// programs wait for memory, too.
    #[must_use]
    pub fn chosen(current: Self, memory: &MemoryView, cpu_pressure: Option<Permyriad>) -> Self {
        let waiting = cpu_pressure.map_or(0, |pressure| u64::from(pressure.0) / 100);
        let scarce = match Self::scarcity(memory).max(LEAST) {
            100.. => 100,
            scarce => scarce.saturating_sub(waiting),
        };
        let wanted = Self::of_scarcity(scarce);
        if wanted >= current { wanted } else { current.min(Self::of_scarcity(scarce + SLACK)) }
    }

    /// How scarce memory is, from 0 (plenty) to 100 (programs wait for it).
    fn scarcity(memory: &MemoryView) -> u64 {
        // Programs that wait a tenth of the time are in trouble.
        let waiting = memory.pressure.map_or(0, |pressure| u64::from(pressure.0) / 10);
        let free = (memory.available.0 * 100).checked_div(memory.total.0).unwrap_or(100);
        // 0 at 60 % available, 100 at 20 %.
        let short = (60_u64.saturating_sub(free)) * 100 / 40;
        waiting.max(short).min(100)
    }

    fn of_scarcity(scarcity: u64) -> Self {
        match scarcity {
            0..=24 => Self::Quiet,
            25..=49 => Self::Low,
            50..=99 => Self::Medium,
            _ => Self::Full,
        }
    }
}

/// `Auto` only goes back to a lower governor once scarcity is this many percentage points below the lower one's limit.
const SLACK: u64 = 10;
/// `Auto` assumes that memory is at least this scarce. So it chooses `Low` until programs wait for a CPU more than a
/// fifth of the time, and again once they wait less than a tenth.
const LEAST: u64 = 35;

named!(Governor, "governor");

/// CPU time spent recently, and how much we may still spend.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    /// Observations: the time, and the CPU time spent until then.
    observations: VecDeque<(u64, u64)>,
}

impl Budget {
    /// Records the CPU time spent so far.
    pub fn record(&mut self, now_ns: u64, cost: Cost) {
        let spent_ns = cost.total_ns();
        if self.observations.is_empty() {
            // The CPU clocks start at 0 with the run, so this counts the CPU time of starting up, too.
            self.observations.push_back((now_ns, 0));
        }
        let several = self.observations.len() > 1;
        match self.observations.back_mut() {
            Some(last) if several && now_ns < last.0 + OBSERVE_NS => last.1 = spent_ns,
            _ => self.observations.push_back((now_ns, spent_ns)),
        }
        // We keep one observation older than the window, to subtract from.
        while self.observations.len() > 2 && self.observations[1].0 + WINDOW_NS <= now_ns {
            self.observations.pop_front();
        }
    }

    /// CPU time spent in the last `window_ns`, nanoseconds. We count from the last observation before the window began,
    /// so this may be slightly too much, never too little.
    pub fn spent_ns(&self, window_ns: u64) -> u64 {
        let Some(&(now_ns, spent_ns)) = self.observations.back() else { return 0 };
        let from = now_ns.saturating_sub(window_ns);
        let before = self.observations.iter().rev().find(|&&(at_ns, _)| at_ns <= from).or(self.observations.front());
        spent_ns - before.map_or(0, |&(_, before_ns)| before_ns.min(spent_ns))
    }

    /// CPU time that we may spend now, nanoseconds.
    pub fn room_ns(&self, pace: Pace) -> u64 {
        share_ns(WINDOW_NS, pace.top).saturating_sub(self.spent_ns(WINDOW_NS))
    }
}

/// A share of a period, nanoseconds.
pub fn share_ns(time_ns: u64, share: Permyriad) -> u64 {
    time_ns / 10_000 * u64::from(share.0)
}

/// How long a period must be for `cpu_ns` to be this share of it, nanoseconds: the inverse of [`share_ns`].
pub fn period_ns(cpu_ns: u64, share: Permyriad) -> u64 {
    cpu_ns * 10_000 / u64::from(share.0.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Pages;

    fn memory(available: u64) -> MemoryView {
        MemoryView { total: Pages(100), available: Pages(available), ..MemoryView::default() }
    }

    #[test]
    fn auto_follows_free_memory_without_flapping() {
        let steps = [(90, Governor::Low), (49, Governor::Low), (30, Governor::Medium), (15, Governor::Full)];
        let mut governor = Governor::Quiet;
        for (available, expected) in steps {
            governor = Governor::chosen(governor, &memory(available), None);
            assert_eq!(governor, expected, "{available} % free");
        }
        // The governor stays when memory is slightly less scarce, and falls when it's clearly less scarce.
        assert_eq!(Governor::chosen(Governor::Full, &memory(21), None), Governor::Full);
        assert_eq!(Governor::chosen(Governor::Full, &memory(28), None), Governor::Medium);
        assert_eq!(Governor::chosen(Governor::Full, &memory(90), None), Governor::Low);
    }

    #[test]
    fn auto_yields_to_programs_that_wait_for_a_cpu_until_memory_is_as_scarce_as_can_be() {
        let chosen = |available, share| Governor::chosen(Governor::Quiet, &memory(available), Some(Permyriad(share)));
        assert_eq!(
            [0, 2_400, 2_600, 6_000].map(|share| chosen(30, share)),
            [Governor::Medium, Governor::Medium, Governor::Low, Governor::Quiet]
        );
        assert_eq!(chosen(20, 10_000), Governor::Full);
    }

    #[test]
    fn auto_is_low_with_plenty_of_memory_and_quiet_while_programs_wait_for_a_cpu() {
        let chosen = |current, share| Governor::chosen(current, &memory(90), Some(Permyriad(share)));
        assert_eq!(chosen(Governor::Quiet, 0), Governor::Low);
        assert_eq!(chosen(Governor::Low, 1_900), Governor::Low);
        assert_eq!(chosen(Governor::Low, 2_100), Governor::Quiet);
        assert_eq!(chosen(Governor::Quiet, 1_500), Governor::Quiet);
        assert_eq!(chosen(Governor::Quiet, 900), Governor::Low);
    }

    #[test]
    fn auto_follows_pressure_where_the_kernel_reports_it() {
        let waiting = |share| MemoryView { pressure: Some(Permyriad(share)), ..memory(90) };
        assert_eq!(Governor::chosen(Governor::Quiet, &waiting(0), None), Governor::Low);
        assert_eq!(Governor::chosen(Governor::Quiet, &waiting(600), None), Governor::Medium);
        assert_eq!(Governor::chosen(Governor::Quiet, &waiting(1_000), None), Governor::Full);
        assert_eq!(Governor::chosen(Governor::Quiet, &MemoryView::default(), None), Governor::Low);
    }

    #[test]
    fn names_are_parsed_and_printed() {
        for (name, governor) in Governor::NAMES {
            assert_eq!(name.parse::<Governor>().unwrap(), governor);
            assert_eq!(governor.to_string(), name);
        }
        let error = "turbo".parse::<Governor>().unwrap_err().to_string();
        assert!(error.contains("full, medium, low, quiet or auto"), "{error}");
    }

    #[test]
    fn the_share_holds_over_every_window() {
        // Spends as much as possible at every step of a fixed clock, then checks every period of ten seconds.
        let pace = Governor::Low.pace();
        let mut budget = Budget::default();
        let (mut spent, mut observations) = (0, Vec::new());
        for step in 0..1_000_u64 {
            let now_ns = step * 73_000_000;
            budget.record(now_ns, Cost { pagefold_ns: spent / 3, ksmd_ns: spent - spent / 3, ..Cost::default() });
            observations.push((now_ns, spent));
            spent += budget.room_ns(pace).min(30_000_000);
        }
        for (at, &(from_ns, before)) in observations.iter().enumerate() {
            let inside = observations[at..].iter().take_while(|&&(now_ns, _)| now_ns <= from_ns + WINDOW_NS);
            let most = inside.map(|&(_, spent)| spent - before).max().unwrap();
            assert!(most <= share_ns(WINDOW_NS, pace.top), "{most} from {from_ns}");
        }
        assert!(spent > 1_000 * 73_000_000 / 10_000 * 1_700, "{spent}");
    }
}
