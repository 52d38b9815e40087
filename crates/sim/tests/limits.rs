//! The engine's work stays within the limits in any second, and still gets done.

mod common;

use common::{MIB, Machine, SECOND, config, host};
use pagefold_engine::config::Config;
use pagefold_engine::keys::{GroupKey, OwnerKey};
use pagefold_engine::limits::{GroupLimits, Limits};
use pagefold_engine::units::Pages;
use pagefold_sim::scenario;
use std::collections::BTreeMap;

/// How much was done in any second at most, for one process and in total.
fn most(done: &[(u64, OwnerKey, u64)]) -> (u64, u64) {
    let (mut own, mut all) = (0, 0);
    for (at, &(from_ns, _, _)) in done.iter().enumerate() {
        let mut each: BTreeMap<OwnerKey, u64> = BTreeMap::new();
        for &(_, owner, number) in done[at..].iter().take_while(|&&(at_ns, _, _)| at_ns < from_ns + SECOND) {
            *each.entry(owner).or_default() += number;
        }
        all = all.max(each.values().sum());
        own = own.max(each.values().copied().max().unwrap_or(0));
    }
    (own, all)
}

#[test]
fn limits_hold_in_every_second_and_everything_is_merged() {
    let limits = Limits { pages_per_process: 3_000, pages: 8_000, stops_per_process: 1, stops: 2, ..Limits::default() };
    let mut sim = Machine::with(host(), Config { limits, ..config() });
    scenario::redis(&mut sim, 4, Pages(32 * MIB));
    scenario::pairs(&mut sim, Pages(32 * MIB), Pages(0));
    scenario::cow_breaker(&mut sim, Pages(16 * MIB));
    sim.run(120);
    let (own, all) = most(&sim.log.pages);
    assert!(own <= limits.pages_per_process && all <= limits.pages, "pages: {own} of one, {all} in all");
    assert!(
        own * 10 > limits.pages_per_process * 9 && all * 10 > limits.pages * 9,
        "nothing was held back: {own} {all}"
    );
    let (own, all) = most(&sim.log.stops);
    assert!(own <= limits.stops_per_process && all <= limits.stops, "stops: {own} of one, {all} in all");
    assert!(sim.saved().0 > 32 * MIB * 2, "{}", sim.saved().0);
}

#[test]
fn a_group_keeps_its_limits_and_is_merged_with_the_others() {
    let group = GroupLimits { pages: Some(2_000), stops: Some(1), share: None };
    let mut sim = Machine::with(host(), Config { groups: vec![group], ..config() });
    let owners = scenario::redis(&mut sim, 4, Pages(32 * MIB));
    let members = &owners[..2];
    sim.set_groups(members.iter().map(|&owner| (owner, GroupKey(0))).collect());
    sim.run(120);
    let of_group = |done: &[(u64, OwnerKey, u64)]| -> Vec<_> {
        done.iter().copied().filter(|(_, owner, _)| members.contains(owner)).collect()
    };
    let (_, pages) = most(&of_group(&sim.log.pages));
    assert!((1_500..=2_000).contains(&pages), "{pages} pages of the group");
    let (_, stops) = most(&of_group(&sim.log.stops));
    assert_eq!(stops, 1, "stops of the group");
    assert!(most(&sim.log.pages).0 > 4_000, "others are held back, too");
    assert!(sim.saved().0 > 32 * MIB * 2, "{}", sim.saved().0);
}
