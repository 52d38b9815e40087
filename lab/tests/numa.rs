//! Placement on emulated machines with several NUMA nodes: the guests' own kernels merge, and an independent reader
//! (the example `numa_guest`) finds the node of every page.
//!
//! Every scenario is a line in a table. `PAGEFOLD_NUMA=TEXT` runs only the scenarios with TEXT in their names, and
//! `PAGEFOLD_NUMA_KEEP=DIR` keeps the guests' consoles and results in DIR. `PAGEFOLD_NUMA_KERNEL` names a kernel to use
//! instead of Debian's; on a kernel from `scripts/kernel host`, pagefold merges on request.

mod common;
#[path = "numa/expect.rs"]
mod expect;
#[path = "numa/guest.rs"]
mod guest;
#[path = "numa/model.rs"]
mod model;

use expect::{Case, Expect, run};
use guest::{Machine, Node};
use model::{Disturbance, MergedBy, Scenario, Victim};

/// Pages of each process: more than pagefold migrates at a time.
const PAGES: usize = 4_608;

/// A process on this node that hasn't referenced its pages.
fn idle(node: usize) -> Victim {
    Victim { node, nice: 0, active: false, confined: false }
}

fn active(node: usize) -> Victim {
    Victim { active: true, ..idle(node) }
}

fn nice(node: usize, nice: i32) -> Victim {
    Victim { nice, ..idle(node) }
}

/// A process whose cgroup allows it memory of its node only.
fn confined(node: usize) -> Victim {
    Victim { confined: true, ..idle(node) }
}

fn case(merged_by: MergedBy, name: &str, victims: &[Victim], expect: Expect) -> Case {
    let (name, victims) = (name.to_owned(), victims.to_vec());
    let scenario =
        Scenario { name, merged_by, victims, pages: PAGES, disturbance: Disturbance::None, generations: false };
    Case { scenario, expect }
}

fn ksm(victims: &[Victim]) -> Case {
    case(MergedBy::Ksm, "ksm", victims, Expect::Any)
}

/// `pagefold run` with a placement policy, or with none for `default`.
fn placed(policy: &str, name: &str, victims: &[Victim], expect: Expect) -> Case {
    let options = if policy == "default" { vec![] } else { vec!["--placement".to_owned(), policy.to_owned()] };
    case(MergedBy::Pagefold(options), &format!("{policy}: {name}"), victims, expect)
}

fn with(disturbance: Disturbance, case: Case) -> Case {
    Case { scenario: Scenario { disturbance, ..case.scenario }, ..case }
}

fn by_generations(case: Case) -> Case {
    Case { scenario: Scenario { generations: true, ..case.scenario }, ..case }
}

/// Shares of the merged pages by node, in percent.
fn shares<const N: usize>(shares: [f64; N]) -> Expect {
    Expect::Shares(shares.to_vec())
}

#[test]
fn two_processes_on_two_nodes_are_placed_by_the_policy() {
    let even = || shares([50.0, 50.0]);
    let damaged = with(Disturbance::Damage, ksm(&[idle(0), idle(1)]));
    run(
        &Machine::of(&[384, 384]),
        &[
            ksm(&[idle(0), idle(1)]),
            Case { expect: Expect::Damage, ..damaged },
            placed("default", "both idle", &[idle(0), idle(1)], even()),
            placed("kernel", "no placement", &[idle(0), idle(1)], Expect::Any),
            placed("fair", "both active", &[active(0), active(1)], even()),
            placed("fair", "first active", &[active(0), idle(1)], Expect::All(0)),
            placed("fair", "second active", &[idle(0), active(1)], Expect::All(1)),
            by_generations(placed("fair", "activity is unknown", &[active(0), idle(1)], even())),
            placed("local-only", "nothing in common", &[idle(0), idle(1)], Expect::Apart(0)),
            with(Disturbance::ClockSteps, placed("fair", "the clock is stepped", &[idle(0), idle(1)], even())),
        ],
    );
}

/// The five configurations of the nuKSM thesis, section 5.3: 10:1 to 1:10.
#[test]
fn nice_values_decide_the_shares() {
    let pair = |first, second| [nice(0, first), nice(1, second)];
    run(
        &Machine::of(&[384, 384]),
        &[
            placed("priority", "10:1", &pair(-20, -11), shares([90.9, 9.1])),
            placed("priority", "5:1", &pair(-20, -16), shares([83.3, 16.7])),
            placed("priority", "1:1", &pair(-20, -20), shares([50.0, 50.0])),
            placed("priority", "1:5", &pair(-16, -20), shares([16.7, 83.3])),
            placed("priority", "1:10", &pair(-11, -20), shares([9.1, 90.9])),
            // 1 - 1/12, 1 - 10/12 and 1 - 1/12, together 2.
            placed("priority", "three", &[nice(0, -20), nice(1, -11), nice(0, -20)], shares([91.7, 8.3])),
        ],
    );
}

#[test]
fn three_and_four_processes_on_two_nodes_are_placed_by_the_policy() {
    let (three, four) = ([idle(0), idle(1), idle(0)], [idle(0), idle(1), idle(0), idle(1)]);
    run(
        &Machine::of(&[512, 512]),
        &[
            ksm(&three),
            placed("fair", "three", &three, shares([50.0, 50.0])),
            placed("fair", "three, one active", &[idle(0), active(1), idle(0)], Expect::All(1)),
            ksm(&four),
            placed("fair", "four", &four, shares([50.0, 50.0])),
            placed("local-only", "four", &four, Expect::Apart(2)),
        ],
    );
}

/// Two distant pairs of nodes.
#[test]
fn processes_on_four_nodes_are_placed_by_the_policy() {
    let machine = Machine {
        distances: vec![vec![10, 12, 30, 32], vec![12, 10, 32, 30], vec![30, 32, 10, 12], vec![32, 30, 12, 10]],
        ..Machine::of(&[384, 256, 256, 256])
    };
    let all = [idle(0), idle(1), idle(2), idle(3)];
    run(
        &machine,
        &[
            ksm(&all),
            placed("fair", "all idle", &all, shares([25.0; 4])),
            placed("kernel", "no placement", &all, Expect::Any),
            placed("fair", "two active", &[idle(0), active(1), active(2), idle(3)], shares([0.0, 50.0, 50.0, 0.0])),
            placed("local-only", "nothing in common", &all, Expect::Apart(0)),
        ],
    );
}

/// The kernel's memory blocks have 128 MiB. One block belongs half to the first node and half to the second. The
/// processes' memory on the first node is in this block.
#[test]
fn a_memory_block_of_two_nodes_is_divided_correctly() {
    let machine = Machine { parameters: "movablecore=240M", ..Machine::of(&[192, 320]) };
    // KSM alone would place everything on the first node.
    run(&machine, &[placed("fair", "both idle", &[idle(1), idle(0)], shares([50.0, 50.0]))]);
}

#[test]
fn pages_go_only_to_nodes_with_room() {
    run(
        &Machine::of(&[384, 768]),
        &[
            // KSM alone would place everything on the last process's node.
            placed("fair", "the last is confined", &[idle(0), confined(1)], Expect::All(1)),
            placed("fair", "the first is confined", &[confined(0), idle(1)], Expect::All(0)),
            // The second node has room for half of the pages, but not if a 32nd of its 768 MiB must stay free. Once all
            // memory saved by merging is free again, at most 6 MiB of the half's 9 MiB fit.
            with(
                Disturbance::Full { node: 1, left_mib: 12 },
                placed("fair", "a node is nearly full", &[idle(1), idle(0)], Expect::AtMost(1, 38.0)),
            ),
        ],
    );
}

#[test]
fn a_node_that_goes_offline_is_left_alone() {
    let machine = Machine { nodes: vec![Node::of(512), Node::module(384)], ..Machine::of(&[]) };
    run(
        &machine,
        &[with(
            Disturbance::Offline { node: 1 },
            placed("fair", "a node goes offline", &[idle(0), idle(1)], shares([50.0, 50.0])),
        )],
    );
}
