use super::*;
use crate::regions::{LIST_NS, Mapped};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::maps::parse_smaps;
use pagefold_testkit::Script;
use std::fmt::Write;

const A: RegionKey = RegionKey(1);
const B: RegionKey = RegionKey(2);

fn list(mappings: &[(u64, u64, u64, &str)]) -> List {
    let mut text = String::new();
    for (first, end, anonymous_kib, flags) in mappings {
        writeln!(text, "{first:x}000-{end:x}000 rw-p 00000000 00:00 0 ").unwrap();
        writeln!(text, "Anonymous: {anonymous_kib} kB\nVmFlags: {flags}").unwrap();
    }
    List::of(&parse_smaps(text.as_bytes()).unwrap(), ProgramId::of(&own()).unwrap(), 0, 0)
}

fn own() -> Process {
    Process::open(i32::try_from(std::process::id()).unwrap()).unwrap()
}

fn side(regions: &[(RegionKey, u64, u64)], list: List) -> Side {
    let process = own();
    Side {
        space: AddressSpace::of(&process).unwrap(),
        process: Arc::new(process),
        list: Arc::new(list),
        regions: regions.iter().map(|&(key, first, end)| (key, (first, end))).collect(),
    }
}

fn range(take: (RegionKey, u64), pages: u32, keep: Keep) -> MergeRange {
    MergeRange {
        take: PageRun { region: take.0, first: Vpn(take.1), pages },
        keep,
        needs_merged: false,
        needs_own: false,
        keep_mappers: u32::from(keep != Keep::Zero),
    }
}

#[test]
fn only_pages_of_eligible_mappings_may_be_named() {
    let list = list(&[
        (0x10, 0x18, 8, "rd wr"),
        (0x18, 0x20, 8, "rd wr mg"),
        (0x20, 0x24, 8, "rd wr lo"),
        (0x24, 0x28, 8, "rd wr dd"),
        (0x28, 0x30, 0, "rd wr"),
        (0x40, 0x50, 8, "rd wr"),
    ]);
    assert_eq!(list.mapped, [Mapped(0x10, 0x20, true), Mapped(0x20, 0x28, false), Mapped(0x40, 0x50, true)]);
    assert_eq!(list.at(Vpn(0)), (None, 0x10));
    assert_eq!(list.at(Vpn(0x1f)), (Some(true), 1));
    assert_eq!(list.at(Vpn(0x20)), (Some(false), 8));
    assert_eq!(list.at(Vpn(0x28)), (None, 0x18));
    assert_eq!(list.at(Vpn(0x50)), (None, u64::MAX));
    assert!(list.is_fresh(LIST_NS - 1) && !list.is_fresh(LIST_NS));
}

#[test]
fn ranges_are_cut_where_a_mapping_of_either_side_is_excluded() {
    let taken = list(&[(0x10, 0x20, 8, "rd wr"), (0x20, 0x22, 8, "rd wr wf"), (0x22, 0x30, 8, "rd wr")]);
    let kept = list(&[(0x80, 0x88, 8, "rd wr"), (0x98, 0xa0, 8, "rd wr um")]);
    let sides = [side(&[(A, 0x10, 0x30)], taken), side(&[(B, 0x80, 0xa0)], kept)];
    let asked = range((A, 0x10), 32, Keep::Run(B, Vpn(0x80)));
    let mut results = Vec::new();
    assert_eq!(parts(&[asked], &sides, &mut results), [asked.part(0, 8)]);
    let of = |skip, pages, merging| MergeResult { range: asked.part(skip, pages), merging };
    let ineligible = Merging::Ineligible;
    assert_eq!(
        results,
        [of(8, 8, Merging::Untried), of(16, 2, ineligible), of(18, 6, Merging::Untried), of(24, 8, ineligible)]
    );
    let zeros = range((A, 0x10), 32, Keep::Zero);
    results.clear();
    assert_eq!(parts(&[zeros], &sides[..1], &mut results), [zeros.part(0, 16), zeros.part(18, 14)]);
    assert_eq!(results, [MergeResult { range: zeros.part(16, 2), merging: ineligible }]);
    // One page is kept for all taken pages. If it's excluded, nothing merges.
    let one = |page| range((A, 0x10), 4, Keep::Page(B, Vpn(page)));
    results.clear();
    assert_eq!(parts(&[one(0x87), one(0x98)], &sides, &mut results), [one(0x87)]);
    assert_eq!(results, [MergeResult { range: one(0x98), merging: ineligible }]);
}

#[test]
fn pages_outside_of_the_regions_are_not_named() {
    let mapped = || list(&[(0x10, 0x100, 8, "rd wr")]);
    let sides = [side(&[(A, 0x10, 0x30)], mapped()), side(&[(B, 0x80, 0xa0)], mapped())];
    for (first, pages, keep) in [
        (0x0f, 1, Keep::Zero),
        (0x2f, 2, Keep::Zero),
        (u64::MAX, 2, Keep::Zero),
        (0x10, 2, Keep::Run(B, Vpn(0x9f))),
        (0x10, 2, Keep::Run(A, Vpn(0x11))),
        (0x10, 1, Keep::Page(B, Vpn(0xa0))),
    ] {
        let mut results = Vec::new();
        let asked = range((A, first), pages, keep);
        assert_eq!(parts(&[asked], &sides, &mut results), []);
        assert_eq!(results, [untried(&asked)]);
    }
    // Both sides are the same process.
    let asked = range((A, 0x10), 2, Keep::Run(A, Vpn(0x20)));
    assert_eq!(parts(&[asked], &sides[..1], &mut Vec::new()), [asked]);
}

#[test]
fn jobs_are_bounded_and_complete() {
    let ranges = [
        range((A, 0), 3, Keep::Zero),
        range((A, 100), 2 * JOB_PAGES, Keep::Run(B, Vpn(7))),
        range((A, 1 << 20), 1, Keep::Page(B, Vpn(7))),
    ];
    let jobs = jobs(&ranges);
    let pages = |job: &Vec<MergeRange>| job.iter().map(|range| range.take.pages).sum::<u32>();
    assert_eq!(jobs.iter().map(pages).collect::<Vec<_>>(), [JOB_PAGES, JOB_PAGES, 4]);
    let parts: Vec<MergeRange> = jobs.concat();
    let long = ranges[1];
    let (one, two) = (JOB_PAGES - 3, JOB_PAGES);
    assert_eq!(parts, [ranges[0], long.part(0, one), long.part(one, two), long.part(one + two, 3), ranges[2]]);
    assert!(super::jobs(&[]).is_empty());
}

#[test]
fn neighbours_with_the_same_result_are_joined() {
    use Merging::{Differs, Merged};
    let parts = [range((A, 8), 4, Keep::Run(B, Vpn(80))), range((A, 20), 2, Keep::Page(B, Vpn(80)))];
    let results = joined(&parts, &[Merged, Merged, Differs, Merged, Merged, Merged]);
    let of = |part: MergeRange, skip, pages, merging| MergeResult { range: part.part(skip, pages), merging };
    let [first, second] = parts;
    assert_eq!(
        results,
        [of(first, 0, 2, Merged), of(first, 2, 1, Differs), of(first, 3, 1, Merged), of(second, 0, 2, Merged)]
    );
}

#[test]
fn a_side_is_judged_until_its_program_is_replaced() {
    let mut execing = Script::execing();
    let process = Process::open(execing.pid()).unwrap();
    let side = Side {
        space: AddressSpace::of(&process).unwrap(),
        list: Arc::new(List::of(&[], ProgramId::of(&process).unwrap(), 0, 0)),
        process: Arc::new(process),
        regions: BTreeMap::new(),
    };
    assert!(side.is_judged());
    execing.say("");
    assert_eq!(execing.line(), "again");
    assert!(!side.is_judged());
}

#[test]
fn an_abandoned_job_makes_no_further_call() {
    let turn = Turn::default();
    assert!(turn.enter());
    turn.leave();
    assert!(turn.enter() && turn.abandon());
    turn.leave();
    assert!(!turn.enter());
    // A job that waits for a process doesn't hold the kernel's lock, so other jobs needn't wait for it.
    let turn = Turn::default();
    assert!(!turn.abandon() && !turn.enter());
    turn.leave();
    assert!(!turn.enter());
}

/// A set of these pages.
fn pages(numbers: &[u64]) -> PageSet {
    let mut pages = PageSet::default();
    for &number in numbers {
        pages.insert(Vpn(number));
    }
    pages
}

#[test]
fn pages_that_have_to_be_merged_and_are_not_are_left_out() {
    let needy = |keep| MergeRange { needs_merged: true, ..range((A, 0x10), 4, keep) };
    let fit = FitPages { merged: pages(&[0x80, 0x81, 0x83]), ..FitPages::default() };
    let (run, free) = (needy(Keep::Run(B, Vpn(0x80))), range((A, 0x20), 4, Keep::Run(B, Vpn(0x90))));
    let (one, written) = (needy(Keep::Page(B, Vpn(0x83))), needy(Keep::Page(B, Vpn(0x82))));
    let mut results = Vec::new();
    let named = fit.only_fit(&[run, free, one, written, needy(Keep::Zero)], &mut results);
    assert_eq!(named, [run.part(0, 2), run.part(3, 1), free, one, needy(Keep::Zero)]);
    let absent = |range| MergeResult { range, merging: Merging::Absent };
    assert_eq!(results, [absent(run.part(2, 1)), absent(written)]);
}

#[test]
fn pages_to_take_that_others_share_are_left_out() {
    let run = MergeRange { needs_own: true, ..range((A, 0x10), 5, Keep::Run(B, Vpn(0x80))) };
    let fit = FitPages { own: pages(&[0x10, 0x11, 0x13]), ..FitPages::default() };
    let mut results = Vec::new();
    assert_eq!(fit.only_fit(&[run], &mut results), [run.part(0, 2), run.part(3, 1)]);
    let absent = |range| MergeResult { range, merging: Merging::Absent };
    assert_eq!(results, [absent(run.part(2, 1)), absent(run.part(4, 1))]);
}
