//! How long one tenant's limits may keep ksmd from merging anything.
//!
//! While a cgroup may exceed its limit, ksmd rests, for all programs. A tenant can cause that again and again: it lowers
//! and raises a limit in cgroups delegated to it, or its programs grow and shrink. So each tenant has a budget of such
//! time. If a tenant overdraws it, ksmd no longer rests for its limits. So that this is safe, its limited cgroups get no
//! headroom, and we unmark their memory: who overdraws merges nothing for a while, and others go on.
//!
//! A limit that's lowered once, or a program that grows for minutes, needs some surveys of a few seconds each.

use crate::keys::LimitKey;
use crate::region::hold::LEAVE_NS;
use std::collections::{BTreeMap, BTreeSet};

/// A tenant's limits may hold ksmd for this long at once, nanoseconds, and one part in `PART` of the time.
const MOST_NS: u64 = 120_000_000_000;
const PART: u64 = 10;
/// We charge at most this much at once, nanoseconds: if we look less often, nobody knows how long ksmd was held.
const CHARGED_MOST_NS: u64 = 10_000_000_000;
/// We merge nothing of a tenant for `LEAVE_NS`, and twice as long each time, but this often at most.
const DOUBLINGS: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// How long the tenant's limits have held ksmd, less one part in `PART` of the time since, nanoseconds.
    spent_ns: u64,
    /// Until when the tenant counts as overdrawn, nanoseconds, and how often it has overdrawn.
    until_ns: u64,
    times: u32,
}

impl Account {
    fn rest_ns(&self) -> u64 {
        LEAVE_NS << self.times.min(DOUBLINGS)
    }
}

/// The accounts of tenants. A tenant is given by [`crate::host::LimitView::tenant`].
#[derive(Debug, Default)]
pub struct HoldBudget {
    accounts: BTreeMap<LimitKey, Account>,
    charged_ns: u64,
}

impl HoldBudget {
    /// Charges the time since the last call to the tenants that have held ksmd since.
    pub fn charge(&mut self, now_ns: u64, holding: &BTreeSet<LimitKey>) {
        let passed_ns = now_ns.saturating_sub(self.charged_ns);
        self.charged_ns = now_ns;
        for &tenant in holding {
            self.accounts.entry(tenant).or_default().spent_ns += passed_ns.min(CHARGED_MOST_NS);
        }
        for account in self.accounts.values_mut() {
            account.spent_ns = account.spent_ns.saturating_sub(passed_ns / PART);
            if account.spent_ns > MOST_NS && now_ns >= account.until_ns {
                *account = Account { spent_ns: 0, until_ns: now_ns + account.rest_ns(), times: account.times + 1 };
            }
        }
        // If a tenant overdraws again soon after a rest, the next rest is longer.
        self.accounts.retain(|_, account| {
            let is_remembered = account.times > 0 && now_ns < account.until_ns + account.rest_ns();
            account.spent_ns > 0 || is_remembered
        });
    }

    pub fn is_overdrawn(&self, tenant: LimitKey, now_ns: u64) -> bool {
        self.accounts.get(&tenant).is_some_and(|account| now_ns < account.until_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    /// Lets a tenant hold ksmd for `held` of each 20 seconds. Returns in which seconds it became overdrawn.
    fn overdrawn(held: u64, seconds: u64) -> Vec<u64> {
        let mut budget = HoldBudget::default();
        let mut found = Vec::new();
        let mut was_overdrawn = false;
        for second in 1..=seconds {
            let holds = second % 20 < held && !was_overdrawn;
            budget.charge(second * S, &holds.then_some(LimitKey(1)).into_iter().collect());
            let is_overdrawn = budget.is_overdrawn(LimitKey(1), second * S);
            assert!(!budget.is_overdrawn(LimitKey(2), second * S));
            if is_overdrawn && !was_overdrawn {
                found.push(second);
            }
            was_overdrawn = is_overdrawn;
        }
        found
    }

    #[test]
    fn who_holds_ksmd_too_long_is_overdrawn_for_longer_each_time() {
        assert_eq!(overdrawn(2, 100_000), [], "a tenth of the time");
        assert_eq!(overdrawn(20, 200), [134]);
        let times = overdrawn(10, 30_000);
        let rests: Vec<u64> = times.windows(2).map(|pair| (pair[1] - pair[0]) / 3_600).collect();
        assert_eq!(rests, [1, 2, 4], "{times:?}");
    }

    #[test]
    fn old_accounts_are_forgotten() {
        let mut budget = HoldBudget::default();
        budget.charge(S, &BTreeSet::new());
        budget.charge(2 * S, &BTreeSet::from([LimitKey(1)]));
        budget.charge(5 * S, &BTreeSet::new());
        assert_eq!(budget.accounts.len(), 1);
        budget.charge(15 * S, &BTreeSet::new());
        assert_eq!(budget.accounts.len(), 0);
    }
}
