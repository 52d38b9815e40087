//! How long we yield the CPU to one tenant.
//!
//! While the programs that we merge wait for a CPU, the governor `auto` lets us do little, for all tenants. But a
//! tenant's tasks wait whenever there are more of them than its weight, CPU set or number of processors lets run at
//! once. So nobody could tell a busy neighbour from one who means to keep us from merging. A tenant that is the only
//! one to wait holds us back for ten minutes, and a sixth of the time in the long run. We yield without limit if a
//! second tenant waits too, or if there's only one tenant: it slows down nobody else's merging.

use pagefold_engine::units::Permyriad;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tenant that waits for at least this share of the time holds us back.
const HOLDS: Permyriad = Permyriad(1_000);
/// How long a tenant alone may hold us back at a stretch, nanoseconds. While it doesn't, it gets back 1/`REGAIN` of the
/// time that passes. Once it has used up all, it must get back all before it holds us back again.
const HELD_MOST_NS: u64 = 600_000_000_000;
const REGAIN: u64 = 5;
/// If we haven't looked for longer than this, nanoseconds, we don't know who held us back since.
const UNSEEN_NS: u64 = 60_000_000_000;

#[derive(Debug, Default)]
pub(super) struct Yielding {
    /// The tenants that have held us back.
    accounts: BTreeMap<PathBuf, Account>,
    looked_ns: Option<u64>,
}

#[derive(Debug, Default)]
struct Account {
    held_ns: u64,
    is_used_up: bool,
}

impl Yielding {
    /// The CPU pressure that we yield to. `waiting` has the highest one of each tenant with programs that we merge.
    pub(super) fn pressure(&mut self, now_ns: u64, waiting: &BTreeMap<&Path, Permyriad>) -> Permyriad {
        let mut highest: Option<(&Path, Permyriad)> = None;
        let mut second = Permyriad(0);
        for (&tenant, &pressure) in waiting {
            match highest {
                Some((_, so_far)) if pressure <= so_far => second = second.max(pressure),
                _ => {
                    second = highest.map_or(second, |(_, so_far)| so_far);
                    highest = Some((tenant, pressure));
                }
            }
        }
        let Some((tenant, pressure)) = highest else { return Permyriad(0) };
        let past_ns = self.looked_ns.map_or(0, |looked_ns| now_ns.saturating_sub(looked_ns)).min(UNSEEN_NS);
        self.looked_ns = Some(now_ns);
        let holds_alone = waiting.len() > 1 && pressure >= HOLDS && second < HOLDS;
        if holds_alone && !self.accounts.contains_key(tenant) {
            self.accounts.insert(tenant.to_owned(), Account::default());
        }
        self.accounts.retain(|path, account| {
            if holds_alone && path == tenant && !account.is_used_up {
                account.held_ns += past_ns;
                account.is_used_up = account.held_ns >= HELD_MOST_NS;
                return true;
            }
            account.held_ns = account.held_ns.saturating_sub(past_ns / REGAIN);
            account.held_ns > 0
        });
        let is_used_up = self.accounts.get(tenant).is_some_and(|account| account.is_used_up);
        if holds_alone && is_used_up { second } else { pressure }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const QUIET: (&str, u32) = ("b", 300);

    /// In how many of these seconds we yield to a pressure of at least `HOLDS`.
    fn yielded(yielding: &mut Yielding, from: u64, seconds: u64, waiting: &[(&str, u32)]) -> u64 {
        let waiting: BTreeMap<_, _> =
            waiting.iter().map(|&(path, share)| (Path::new(path), Permyriad(share))).collect();
        (from..from + seconds).map(|second| u64::from(yielding.pressure(second * SECOND, &waiting) >= HOLDS)).sum()
    }

    #[test]
    fn one_tenant_holds_us_back_for_ten_minutes_and_then_a_sixth_of_the_time() {
        let mut yielding = Yielding::default();
        let busy = [("a", 9_000), QUIET];
        assert_eq!(yielded(&mut yielding, 0, 600, &busy), 600);
        assert_eq!(yielded(&mut yielding, 600, 3_000, &busy), 0, "the next fifty minutes are the others'");
        let long = 10 * 3_600;
        let share = yielded(&mut yielding, 3_600, long, &busy);
        assert!((long / 7..=long / 6 + 60).contains(&share), "{share} s");
        // While the first tenant's account is used up, we yield to the second tenant's pressure.
        let waiting = BTreeMap::from([(Path::new("a"), Permyriad(9_000)), (Path::new("b"), Permyriad(300))]);
        let mut yielding = Yielding::default();
        yielded(&mut yielding, 0, 700, &busy);
        assert_eq!(yielding.pressure(701 * SECOND, &waiting), Permyriad(300));
    }

    #[test]
    fn pauses_of_a_moment_gain_nothing() {
        let mut yielding = Yielding::default();
        let mut held = 0;
        for minute in 0..60 {
            held += yielded(&mut yielding, 60 * minute, 55, &[("a", 9_000), QUIET]);
            yielded(&mut yielding, 60 * minute + 55, 5, &[("a", 0), QUIET]);
        }
        assert!(held < 1_100, "{held} s of an hour");
    }

    #[test]
    fn we_yield_as_long_as_two_tenants_wait_or_there_is_only_one() {
        for waiting in [&[("a", 9_000), ("b", 1_500), ("c", 0)][..], &[("a", 9_000)]] {
            let mut yielding = Yielding::default();
            assert_eq!(yielded(&mut yielding, 0, 7_200, waiting), 7_200);
            assert!(yielding.accounts.is_empty());
        }
        assert_eq!(Yielding::default().pressure(0, &BTreeMap::new()), Permyriad(0));
    }

    #[test]
    fn a_neighbour_who_waits_now_and_then_is_never_ignored() {
        let mut yielding = Yielding::default();
        for half_hour in 0..48 {
            assert_eq!(yielded(&mut yielding, 1_800 * half_hour, 300, &[("a", 9_000), QUIET]), 300);
            assert_eq!(yielded(&mut yielding, 1_800 * half_hour + 300, 1_500, &[("a", 0), QUIET]), 0);
        }
        // Another tenant that waits alone meanwhile has an account of its own.
        yielded(&mut yielding, 86_400, 700, &[("a", 9_000), QUIET]);
        assert_eq!(yielded(&mut yielding, 87_100, 500, &[("a", 0), ("b", 9_000)]), 500);
    }
}
