//! The work stays within the limits in every second, and is completed anyway.

mod common;

use common::{MIB, SECOND, config, host, run_on};
use pagefold_core::config::Config;
use pagefold_core::engine::Engine;
use pagefold_core::host::{Actions, Host, Outcome, SamplePlan, Samples, Snapshot};
use pagefold_core::keys::{OwnerKey, RegionKey};
use pagefold_core::limits::Limits;
use pagefold_core::units::Pages;
use pagefold_sim::{SimHost, scenario};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// A host that records what is done to which process, and when.
struct Watched {
    host: SimHost,
    owners: BTreeMap<RegionKey, OwnerKey>,
    pages: Vec<(u64, OwnerKey, u64)>,
    stops: Vec<(u64, OwnerKey, u64)>,
    seen_ns: u64,
}

impl Host for Watched {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let snapshot = self.host.observe()?;
        self.owners.extend(snapshot.regions.iter().map(|view| (view.key, view.owner)));
        self.seen_ns = snapshot.now_ns;
        Ok(snapshot)
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        for run in &plan.runs {
            self.pages.push((self.seen_ns, self.owners[&run.region], run.pages.into()));
        }
        self.host.read(plan)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        let outcome = self.host.apply(actions)?;
        self.stops.extend(outcome.stops.iter().map(|stops| (self.seen_ns, stops.owner, stops.number.into())));
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.host.wait(ns)
    }
}

/// The maximum in any second: for one process, and in total.
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
    let mut host = host();
    scenario::redis(&mut host, 4, Pages(32 * MIB));
    scenario::pairs(&mut host, Pages(32 * MIB), Pages(0));
    scenario::cow_breaker(&mut host, Pages(16 * MIB));
    let (pages, stops, owners) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut watched = Watched { host, owners, pages, stops, seen_ns: 0 };
    let mut engine = Engine::new(Config { limits, ..config() });
    run_on(&mut watched, &mut engine, 120, |watched| watched.host.now_ns(), |_| {});
    let (own, all) = most(&watched.pages);
    assert!(own <= limits.pages_per_process && all <= limits.pages, "pages: {own} of one, {all} in all");
    assert!(
        own * 10 > limits.pages_per_process * 9 && all * 10 > limits.pages * 9,
        "nothing was held back: {own} {all}"
    );
    let (own, all) = most(&watched.stops);
    assert!(own <= limits.stops_per_process && all <= limits.stops, "stops: {own} of one, {all} in all");
    assert!(watched.host.saved().0 > 32 * MIB * 2, "{}", watched.host.saved().0);
}
