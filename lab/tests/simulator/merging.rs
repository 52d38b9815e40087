//! Merging on request: how the simulated kernel handles the pages that it gets.

use pagefold_engine::host::{Actions, Host, Keep, Mechanism, MergeRange, Merging, PageRun, PageState, ScanOrder};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};

const SECOND: u64 = 1_000_000_000;

fn host() -> SimHost {
    SimHost::new(7, Costs::default(), Knobs::requested())
}

/// A process with one region, and that region.
fn add(host: &mut SimHost, pages: u64, fill: Fill) -> (OwnerKey, RegionKey) {
    let owner = host.add(Process::starting_at(0).mapping(Mapping::new(Pages(pages), fill)));
    (owner, host.regions_of(owner)[0])
}

fn page(host: &SimHost, region: RegionKey, number: u64) -> Vpn {
    host.span_of(region).unwrap().first + number
}

/// A range: the region, the first page and the number of pages to take, and the pages to keep.
fn range(host: &SimHost, (region, first, pages): (RegionKey, u64, u32), keep: Keep) -> MergeRange {
    MergeRange {
        take: PageRun { region, first: page(host, region, first), pages },
        keep,
        needs_merged: false,
        needs_own: false,
        keep_mappers: 0,
    }
}

fn run_of(host: &SimHost, region: RegionKey, first: u64) -> Keep {
    Keep::Run(region, page(host, region, first))
}

fn page_of(host: &SimHost, region: RegionKey, number: u64) -> Keep {
    Keep::Page(region, page(host, region, number))
}

/// Merges a range; returns the results with their numbers of pages.
fn merge(host: &mut SimHost, take: (RegionKey, u64, u32), keep: Keep) -> Vec<(Merging, u32)> {
    let asked = range(host, take, keep);
    let Ok(outcome) = host.apply(&Actions { merge: vec![asked], ..Actions::default() });
    outcome.merges.iter().map(|result| (result.merging, result.range.take.pages)).collect()
}

#[test]
fn runs_of_equal_pages_are_merged_without_marks_or_scans() {
    let mut host = host();
    let (_, one) = add(&mut host, 100, Fill::Series(1));
    let (_, two) = add(&mut host, 100, Fill::Series(1));
    assert_eq!(host.observe().unwrap().mechanism, Mechanism::Request);
    let keep = run_of(&host, one, 0);
    assert_eq!(merge(&mut host, (two, 0, 100), keep), [(Merging::Merged, 100)]);
    assert_eq!((host.saved(), host.ksm().shared, host.ksm().sharing), (Pages(100), Pages(100), Pages(100)));
    assert_eq!(merge(&mut host, (two, 0, 100), keep), [(Merging::Shared, 100)]);
    let cost = host.cost();
    assert_eq!((cost.ksmd_ns, host.ksm().scanned, host.ksm().full_scans), (0, 0, 0));
    assert!(cost.pagefold_ns > 0);
    let named: Vec<bool> = host.observe().unwrap().regions.iter().map(|region| region.named).collect();
    assert_eq!(named, [true, true], "the kernel marks both mappings");
}

#[test]
fn one_page_is_kept_for_many() {
    let mut host = host();
    let (_, one) = add(&mut host, 50, Fill::Same(1));
    let keep = page_of(&host, one, 10);
    // The kept page is in the range itself.
    let results = merge(&mut host, (one, 0, 50), keep);
    assert_eq!(results, [(Merging::Merged, 10), (Merging::Shared, 1), (Merging::Merged, 39)]);
    assert_eq!((host.saved(), host.ksm().shared), (Pages(49), Pages(1)));
}

#[test]
fn each_page_has_its_own_result() {
    let mut host = host();
    let (_, one) = add(&mut host, 8, Fill::Series(1));
    let (_, two) = add(&mut host, 8, Fill::Series(1));
    let (_, zeros) = add(&mut host, 8, Fill::Untouched);
    for number in [2, 3] {
        let at = page(&host, two, number);
        host.write(two, at, 99);
    }
    let keep = run_of(&host, one, 0);
    let results = merge(&mut host, (two, 0, 10), keep);
    assert_eq!(results, [(Merging::Merged, 2), (Merging::Differs, 2), (Merging::Merged, 4), (Merging::Absent, 2)]);
    let keep = run_of(&host, zeros, 0);
    assert_eq!(merge(&mut host, (two, 0, 8), keep), [(Merging::Absent, 8)]);
}

#[test]
fn zeros_are_merged_with_the_zero_page_whatever_use_zero_pages_says() {
    let mut host = host();
    let (_, zeros) = add(&mut host, 6, Fill::Zeros);
    let at = page(&host, zeros, 4);
    host.write(zeros, at, 5);
    let results = merge(&mut host, (zeros, 0, 6), Keep::Zero);
    assert_eq!(results, [(Merging::Merged, 4), (Merging::Differs, 1), (Merging::Merged, 1)]);
    assert_eq!((host.saved(), host.ksm().zero), (Pages(5), Pages(5)));
    let results = merge(&mut host, (zeros, 0, 6), Keep::Zero);
    assert_eq!(results, [(Merging::Shared, 4), (Merging::Differs, 1), (Merging::Shared, 1)]);
}

#[test]
fn a_page_with_all_the_sharers_it_may_have_is_full() {
    let mut host = SimHost::new(7, Costs::default(), Knobs { max_page_sharing: 16, ..Knobs::requested() });
    let (_, one) = add(&mut host, 40, Fill::Same(1));
    let keep = page_of(&host, one, 0);
    let results = merge(&mut host, (one, 1, 39), keep);
    assert_eq!(results, [(Merging::Merged, 15), (Merging::Full, 24)]);
    // We name another page instead.
    let keep = page_of(&host, one, 16);
    let results = merge(&mut host, (one, 17, 23), keep);
    assert_eq!(results, [(Merging::Merged, 15), (Merging::Full, 8)]);
    assert_eq!((host.saved(), host.ksm().shared), (Pages(30), Pages(2)));
}

#[test]
fn a_merged_page_can_be_given_another_frame() {
    let mut host = host();
    let (_, one) = add(&mut host, 4, Fill::Same(1));
    let (left, right) = (page_of(&host, one, 0), page_of(&host, one, 2));
    merge(&mut host, (one, 1, 1), left);
    merge(&mut host, (one, 3, 1), right);
    assert_eq!(host.saved(), Pages(2));
    assert_eq!(merge(&mut host, (one, 2, 2), left), [(Merging::Merged, 2)]);
    assert_eq!((host.saved(), host.ksm().shared, host.ksm().sharing), (Pages(3), Pages(1), Pages(3)));
}

#[test]
fn what_is_shared_by_fork_can_be_merged() {
    let mut host = host();
    let (parent, one) = add(&mut host, 10, Fill::Series(1));
    let (_, two) = add(&mut host, 10, Fill::Series(1));
    let child = host.fork(parent);
    let copy = host.regions_of(child)[0];
    let keep = run_of(&host, one, 0);
    assert_eq!(merge(&mut host, (copy, 0, 10), keep), [(Merging::Shared, 10)], "one frame already");
    // Once we keep the frame, it's merged for parent and child.
    assert_eq!(merge(&mut host, (two, 0, 10), keep), [(Merging::Merged, 10)]);
    let at = page(&host, copy, 0);
    assert_eq!((host.page(copy, at).unwrap().1, host.truth().frames), (PageState::Merged, 10));
    assert_eq!(host.ksm().sharing, Pages(10), "the child has no records");
}

#[test]
fn processes_that_exit_leave_nothing_behind_while_ksmd_rests() {
    let mut host = host();
    let (owners, regions): (Vec<_>, Vec<_>) = (0..3).map(|_| add(&mut host, 20, Fill::Series(1))).unzip();
    let keep = run_of(&host, regions[0], 0);
    for &region in &regions[1..] {
        merge(&mut host, (region, 0, 20), keep);
    }
    assert_eq!((host.saved(), host.ksm().sharing), (Pages(40), Pages(40)));
    host.exit(owners[0]);
    assert_eq!((host.saved(), host.ksm().shared, host.ksm().sharing), (Pages(20), Pages(20), Pages(20)));
    for &owner in &owners[1..] {
        host.exit(owner);
    }
    assert_eq!((host.ksm().shared, host.ksm().sharing, host.unreaped()), (Pages(0), Pages(0), 0));
    assert_eq!((host.metadata().0, host.cost().ksmd_ns), (0, 0));
}

#[test]
fn a_record_outlives_a_write_until_the_page_is_merged_again() {
    let mut host = host();
    let (_, one) = add(&mut host, 2, Fill::Same(1));
    let keep = page_of(&host, one, 0);
    merge(&mut host, (one, 1, 1), keep);
    let (at, content) = (page(&host, one, 1), host.page(one, page(&host, one, 1)).unwrap().0);
    host.write(one, at, 3);
    assert_eq!((host.saved(), host.ksm().sharing, host.cow_breaks()), (Pages(0), Pages(1), 1));
    assert_eq!(merge(&mut host, (one, 1, 1), keep), [(Merging::Differs, 1)]);
    host.write(one, at, content);
    assert_eq!(merge(&mut host, (one, 1, 1), keep), [(Merging::Merged, 1)]);
    assert_eq!((host.saved(), host.ksm().shared, host.ksm().sharing), (Pages(1), Pages(1), Pages(1)));
}

#[test]
fn what_must_not_be_asked_is_not_tried() {
    let mut host = host();
    let mut start = |process: Process| {
        let owner = host.add(process.mapping(Mapping::new(Pages(10), Fill::Series(1))));
        (owner, host.regions_of(owner)[0])
    };
    let (_, one) = start(Process::starting_at(0).in_domain(1));
    let (other, two) = start(Process::starting_at(0).in_domain(1));
    let (_, stranger) = start(Process::starting_at(0).in_domain(2));
    let (_, untouchable) = start(Process::starting_at(0).in_domain(1).untouchable());
    let untried = [(Merging::Untried, 10)];
    let (kept, of_stranger, of_untouchable, of_other) =
        (run_of(&host, one, 0), run_of(&host, stranger, 0), run_of(&host, untouchable, 0), run_of(&host, two, 0));
    assert_eq!(merge(&mut host, (stranger, 0, 10), kept), untried, "another trust domain");
    assert_eq!(merge(&mut host, (one, 0, 10), of_stranger), untried);
    assert_eq!(merge(&mut host, (untouchable, 0, 10), kept), untried);
    assert_eq!(merge(&mut host, (one, 0, 10), of_untouchable), untried);
    let overlapping = run_of(&host, one, 3);
    assert_eq!(merge(&mut host, (one, 0, 10), overlapping), untried, "both sides overlap");
    assert_eq!(merge(&mut host, (one, 0, 3), overlapping), [(Merging::Differs, 3)]);
    let taken = range(&host, (two, 0, 10), kept);
    host.exit(other);
    let Ok(outcome) = host.apply(&Actions { merge: vec![taken], ..Actions::default() });
    assert_eq!(outcome.merges[0].merging, Merging::Untried, "the process has exited");
    assert_eq!(merge(&mut host, (one, 0, 10), of_other), untried);
    host.set_ours(false);
    assert_eq!(merge(&mut host, (one, 0, 10), Keep::Zero), untried, "a dry run");
    assert_eq!(host.saved(), Pages(0));
}

#[test]
fn pages_in_use_can_be_merged_later() {
    let mut host = SimHost::new(7, Costs::default(), Knobs { busy: Permyriad(5_000), ..Knobs::requested() });
    let (_, one) = add(&mut host, 1_000, Fill::Zeros);
    for _ in 0..20 {
        let results = merge(&mut host, (one, 0, 1_000), Keep::Zero);
        assert!(
            results.iter().all(|(merging, _)| matches!(merging, Merging::Merged | Merging::Shared | Merging::Busy))
        );
    }
    assert_eq!(host.saved(), Pages(1_000));
}

#[test]
fn pages_on_two_nodes_are_ineligible_if_they_must_not_be_merged() {
    let knobs = Knobs { merge_across_nodes: false, ..Knobs::requested() };
    let mut host = SimHost::new(7, Costs::default(), knobs).with_nodes(&[Pages(100), Pages(100)]);
    let regions = [0, 0, 1].map(|node| {
        let process = Process::starting_at(0).at_home_on(node).mapping(Mapping::new(Pages(5), Fill::Series(1)));
        let owner = host.add(process);
        host.regions_of(owner)[0]
    });
    let keep = run_of(&host, regions[0], 0);
    assert_eq!(merge(&mut host, (regions[2], 0, 5), keep), [(Merging::Ineligible, 5)]);
    assert_eq!(merge(&mut host, (regions[1], 0, 5), keep), [(Merging::Merged, 5)]);
}

#[test]
fn the_kept_page_decides_the_node() {
    let mut host = SimHost::new(7, Costs::default(), Knobs::requested()).with_nodes(&[Pages(100), Pages(100)]);
    let regions = [0, 1].map(|node| {
        let process = Process::starting_at(0).at_home_on(node).mapping(Mapping::new(Pages(5), Fill::Series(1)));
        let owner = host.add(process);
        host.regions_of(owner)[0]
    });
    let keep = run_of(&host, regions[1], 0);
    merge(&mut host, (regions[0], 0, 5), keep);
    assert_eq!(host.frames_by_node(), [Pages(0), Pages(5)]);
}

#[test]
fn ksmd_may_run_beside_and_merges_with_what_was_merged_on_request() {
    let mut host = host();
    let regions: Vec<RegionKey> = (0..3).map(|_| add(&mut host, 20, Fill::Series(1)).1).collect();
    let keep = run_of(&host, regions[0], 0);
    merge(&mut host, (regions[1], 0, 20), keep);
    // Naming a page of the third region marks it, and ksmd merges it.
    merge(&mut host, (regions[2], 0, 1), keep);
    for _ in 0..3 {
        let Ok(_) = host.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() });
        let Ok(()) = host.wait(SECOND);
    }
    assert_eq!((host.saved(), host.ksm().shared, host.ksm().sharing), (Pages(40), Pages(20), Pages(40)));
}

#[test]
fn a_page_costs_what_was_measured() {
    // Nanoseconds in User Mode Linux: in long runs, and one by one in no order.
    let cost_of = |runs: u32, of: fn(&SimHost, RegionKey, u64) -> Keep, fill: Fill, zero: bool| {
        let mut host = host();
        let (_, one) = add(&mut host, 2_048, fill.clone());
        let (_, two) = add(&mut host, 2_048, fill);
        let ranges = (0..2_048 / runs).map(|number| {
            let first = u64::from(number * runs);
            let keep = if zero { Keep::Zero } else { of(&host, one, first) };
            range(&host, (two, first, runs), keep)
        });
        let merge: Vec<MergeRange> = ranges.collect();
        let before_ns = host.cost().pagefold_ns;
        let Ok(_) = host.apply(&Actions { merge, ..Actions::default() });
        assert_eq!(host.saved(), Pages(2_048));
        (host.cost().pagefold_ns - before_ns) / 2_048
    };
    let about =
        |found: u64, measured: u64| assert!(found.abs_diff(measured) * 20 <= measured, "{found}, not {measured}");
    about(cost_of(2_048, run_of, Fill::Series(1), false), 1_460);
    about(cost_of(1, run_of, Fill::Series(1), false), 3_000);
    about(cost_of(2_048, run_of, Fill::Zeros, true), 500);
}
