//! After a cycle, each region's decision says what the next cycle will do if nothing else changes. A decision keeps its
//! time until its verb or reason changes, and the log has each change.

mod common;

use common::{Log, MIB, Machine, SECOND, config, host, process_of, requested, tenants};
use pagefold_engine::config::Config;
use pagefold_engine::decision::{Decision, DecisionLog, Reason, Verb};
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Host, MemoryView};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::reserve::{Keep, ReserveSettings};
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::{Fill, Mapping, Process, SimHost, scenario};
use proptest::prelude::*;

/// A region, where it ends, and the decision on it.
struct Decided {
    key: RegionKey,
    first: Vpn,
    end: Vpn,
    decision: Decision,
    /// Whether its samples showed an older mapping with equal pages at equal offsets.
    has_kin: bool,
}

fn decided(engine: &Engine) -> Vec<Decided> {
    let mut decided = Vec::new();
    for (state, region) in engine.state().regions.iter().zip(engine.regions()) {
        decided.push(Decided {
            key: region.view.key,
            first: state.first,
            end: state.first + state.pages.0,
            decision: state.decision,
            has_kin: region.survey.kin.found().is_some(),
        });
    }
    decided
}

impl Decided {
    fn holds(&self, key: RegionKey, page: Vpn) -> bool {
        key == self.key && (self.first..self.end).contains(&page)
    }

    /// Checks the decision against the next cycle, which began at `now_ns`. Work that waits until it pays may be done
    /// early, together with regions that are being read (`being_read`). A young region may be merged early if samples
    /// show that it's kin to an older one.
    fn check(&self, log: &Log, next: &Self, being_read: bool, now_ns: u64) {
        let Self { decision, key, first, .. } = self;
        let may_be_joined = matches!(decision.reason, Reason::DoesNotPay { .. } | Reason::AwaitsNewcomers);
        let is_kin = decision.reason == Reason::TooYoung && next.has_kin;
        let is_over = decision.until_ns.is_some_and(|until_ns| now_ns >= until_ns);
        let is_due = is_over || is_kin || being_read && may_be_joined;
        let then = &next.decision;
        let marked = log.actions.mark.iter().any(|change| self.holds(change.span.region, change.span.first));
        let read: u64 =
            log.runs.iter().filter(|run| self.holds(run.region, run.first)).map(|run| u64::from(run.pages)).sum();
        let named = log.actions.merge.iter().any(|range| self.holds(range.take.region, range.take.first));
        let said = format!("{decision:?} of {key:?} at {first:?}, then {then:?}, {read} pages read at {now_ns}");
        match decision.verb {
            Verb::Leave => assert!(!marked && read == 0 && !named, "{said}"),
            Verb::Sample | Verb::Merge | Verb::Watch => assert!(!marked, "{said}"),
            Verb::Wait => assert!(!marked || is_due, "{said}"),
            // Once we've read a region to its end, we mark it at once.
            Verb::Read | Verb::Mark => {}
        }
        match (decision.verb, then.verb) {
            (Verb::Leave, after) => assert_eq!(after, Verb::Leave, "{said}"),
            // We don't read a whole region before its time, and we don't forget that a region has to be read or marked.
            (Verb::Wait, Verb::Read | Verb::Mark) => assert!(is_due, "{said}"),
            (Verb::Read | Verb::Mark, Verb::Sample) => panic!("{said}"),
            _ => {}
        }
        // Once a decision's time is over, another decision replaces it, or it gets a new end.
        if is_over {
            assert!(!then.is_like(decision) || then.until_ns != decision.until_ns, "{said}");
        }
    }

    /// Checks the decision's time: it stays as long as verb and reason do. If the decision replaced the `old` one at
    /// `now_ns`, the log must have the change.
    fn check_since(&self, old: Option<&Self>, log: &DecisionLog, now_ns: u64) {
        let decision = &self.decision;
        let said = format!("{decision:?} of {:?} at {:?}, observed at {now_ns}", self.key, self.first);
        match old {
            None => assert!(decision.since_ns <= now_ns, "{said}"),
            Some(old) if decision.is_like(&old.decision) => {
                assert_eq!(decision.since_ns, old.decision.since_ns, "{said}");
            }
            Some(old) => {
                assert_eq!(decision.since_ns, now_ns, "{said}");
                let is_logged =
                    log.iter().rev().take_while(|change| change.to.since_ns == now_ns).any(|change| {
                        change.first == self.first && change.from == old.decision && change.to == *decision
                    });
                assert!(is_logged, "{said}, after {old:?}", old = old.decision);
            }
        }
    }
}

/// Runs the engine, and checks each cycle against the decisions before it. Returns the verbs seen.
fn run_checked(host: SimHost, config: Config, seconds: u64) -> Vec<Verb> {
    let mut sim = Machine::with(host, config);
    let mut verbs = Vec::new();
    let mut before: Vec<Decided> = Vec::new();
    while sim.now_ns() < seconds * SECOND {
        let began_ns = sim.now_ns();
        let wait_ns = sim.cycle();
        let after = decided(&sim.engine);
        let being_read = before.iter().chain(&after).any(|region| region.decision.verb <= Verb::Mark);
        for new in &after {
            let old = before.iter().find(|old| new.key == old.key && new.first == old.first && new.end == old.end);
            if let Some(old) = old {
                old.check(&sim.log, new, being_read, began_ns);
            }
            new.check_since(old, sim.engine.decisions(), sim.log.seen_ns);
        }
        // A cycle may have no time to read. Otherwise it reads some of the regions that are to be read whole, or names
        // their pages by position.
        let to_read: Vec<&Decided> = before.iter().filter(|region| region.decision.verb == Verb::Read).collect();
        let is_tried = |region: &&Decided| {
            let is_read = sim.log.runs.iter().any(|run| region.holds(run.region, run.first));
            is_read || sim.log.actions.merge.iter().any(|range| region.holds(range.take.region, range.take.first))
        };
        if !to_read.is_empty() && !sim.log.runs.is_empty() {
            assert!(to_read.iter().any(is_tried), "none of the regions to be read is read at {began_ns}");
        }
        verbs.extend(after.iter().map(|new| new.decision.verb));
        verbs.sort_unstable();
        verbs.dedup();
        before = after;
        let Ok(()) = sim.wait(wait_ns.max(1_000_000));
    }
    verbs
}

#[test]
fn decisions_come_true_on_a_machine_with_memory_of_each_kind() {
    for governor in [Governor::Full, Governor::Medium, Governor::Quiet] {
        let mut host = host();
        scenario::redis(&mut host, 3, Pages(48 * MIB));
        scenario::idle(&mut host, Pages(64 * MIB));
        let refusing = Process::starting_at(0).untouchable().mapping(Mapping::new(Pages(16 * MIB), Fill::Series(9)));
        host.add(refusing);
        let other = Process::starting_at(20 * SECOND).mapping(Mapping::new(Pages(16 * MIB), Fill::Series(9)));
        host.add(other);
        let verbs = run_checked(host, Config { governor, ..config() }, 90);
        let seen = [Verb::Read, Verb::Mark, Verb::Merge, Verb::Watch, Verb::Leave];
        if governor == Governor::Full {
            assert!(seen.iter().all(|verb| verbs.contains(verb)), "only {verbs:?}");
        }
    }
}

#[test]
fn decisions_come_true_while_memory_is_short() {
    let mut host = host();
    scenario::redis(&mut host, 3, Pages(48 * MIB));
    host.set_memory(MemoryView { total: Pages(4_096 * MIB), available: Pages(8 * MIB), ..MemoryView::default() });
    let reserve = ReserveSettings { keep: Keep::Fixed(Pages(100 * MIB)), ..ReserveSettings::default() };
    let verbs = run_checked(host, Config { reserve, ..config() }, 30);
    assert!(verbs.contains(&Verb::Wait) && !verbs.contains(&Verb::Mark), "{verbs:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn decisions_come_true_with_any_processes(tenants in tenants(), on_request: bool) {
        let mut host = if on_request { requested() } else { host() };
        for tenant in tenants {
            host.add(process_of(tenant));
        }
        run_checked(host, config(), 40);
    }
}

#[test]
fn memory_with_too_few_duplicates_for_a_mark_is_not_called_scattered() {
    let mut sim = Machine::new(host());
    for pages in [2, 8, 15] {
        for _ in 0..2 {
            sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(pages), Fill::Series(pages))));
        }
    }
    sim.run(30);
    let reasons: Vec<Reason> = decided(&sim.engine).iter().map(|region| region.decision.reason).collect();
    assert_eq!(reasons, [Reason::TooSmall; 6]);
}
