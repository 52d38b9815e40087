//! Local search: moves units that share little to hosts where they share more, or exchanges them for others.
//!
//! A greedy placement leaves some units over, which no host with room was good for. These are few, so we can try
//! several hosts for each.

use crate::fleet::{HostId, UnitId};
use crate::placement::Placement;
use pagefold_engine::units::count;

const PASSES: u32 = 4;
/// We leave a unit alone if it shares at least this fraction of its contents.
const CONTENT: (u64, u64) = (9, 10);
/// For an exchange we try this many units of the other host: the ones that share the least there.
const PARTNERS: usize = 12;

/// How many contents we may look up for each content that a unit holds. Without a limit, a few hosts with thousands of
/// workloads could take hours.
const LOOK_UPS: u64 = 64;

/// The count of looked-up contents at which a search that begins now must end.
pub(crate) fn most_look_ups(placement: &Placement<'_>) -> u64 {
    let units = placement.fleet().unit_ids();
    let held: usize = units.map(|unit| placement.contents().of_unit(unit).len()).sum();
    placement.looked_up() + LOOK_UPS * count(held)
}

/// Improves a placement. `candidates` names hosts that may suit a unit.
pub fn improve(placement: &mut Placement<'_>, candidates: impl Fn(UnitId) -> Vec<HostId>) {
    let fleet = placement.fleet();
    let most = most_look_ups(placement);
    for _ in 0..PASSES {
        let before = placement.saved();
        for unit in fleet.unit_ids() {
            if fleet.unit(unit).pinned {
                continue;
            }
            if placement.looked_up() > most {
                return;
            }
            let held = placement.contents().pages(unit);
            let shared = placement.loss(unit);
            if shared * CONTENT.1 >= held * CONTENT.0 {
                continue;
            }
            for host in candidates(unit) {
                if placement.host_of(unit) != Some(host) && try_host(placement, unit, host) {
                    break;
                }
            }
        }
        if placement.saved() == before {
            return;
        }
    }
}

/// Moves a unit to a host, or exchanges it for a unit of that host, if that saves more.
fn try_host(placement: &mut Placement<'_>, unit: UnitId, host: HostId) -> bool {
    let Some(from) = placement.host_of(unit) else { return false };
    let gain = placement.gain(unit, host);
    let loss = placement.loss(unit);
    if gain > loss && placement.fits(unit, host) {
        placement.remove(unit);
        placement.add(unit, host);
        return true;
    }
    let fleet = placement.fleet();
    let mut partners = Vec::new();
    for &other in placement.units_on(host) {
        if !fleet.unit(other).pinned {
            partners.push((placement.loss(other), other));
        }
    }
    partners.sort_unstable();
    for (loss_other, other) in partners.into_iter().take(PARTNERS) {
        // First we compare an upper bound of the gain, which is cheap. It includes the pages that the two units share
        // with each other, which they'd lose.
        if gain + placement.gain(other, from) > loss + loss_other && exchange(placement, unit, other) {
            return true;
        }
    }
    false
}

/// Exchanges two units, if they fit and the exchange saves more.
fn exchange(placement: &mut Placement<'_>, one: UnitId, other: UnitId) -> bool {
    let (Some(here), Some(there)) = (placement.host_of(one), placement.host_of(other)) else { return false };
    let before = placement.saved();
    placement.remove(one);
    placement.remove(other);
    let fits = placement.fits(one, there) && placement.fits(other, here);
    if fits {
        placement.add(one, there);
        placement.add(other, here);
        if placement.saved() > before {
            return true;
        }
        placement.remove(one);
        placement.remove(other);
    }
    placement.add(one, here);
    placement.add(other, there);
    false
}
