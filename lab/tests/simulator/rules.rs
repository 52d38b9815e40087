//! KSM's rules, one test each.

use pagefold_engine::host::{Actions, Host, Marking, PageRun, PageState, SamplePlan, ScanOrder, Span};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::units::{Bytes, Pages, Permyriad, Vpn};
use pagefold_sim::{Behaviour, Costs, Fill, Knobs, Mapping, Process, SimHost, Writes};

const MS: u64 = 1_000_000;

fn host(knobs: Knobs) -> SimHost {
    SimHost::new(7, Costs::default(), knobs)
}

fn add(sim: &mut SimHost, mapping: Mapping) -> (OwnerKey, RegionKey) {
    let owner = sim.add(Process::starting_at(0).mapping(mapping));
    (owner, sim.regions_of(owner)[0])
}

fn order(sim: &mut SimHost, merge: ScanOrder) {
    sim.apply(&Actions { scan: merge, ..Actions::default() }).unwrap();
}

fn mark(sim: &mut SimHost, region: RegionKey) -> Marking {
    let span = sim.span_of(region).unwrap();
    sim.apply(&Actions { mark: vec![span.into()], ..Actions::default() }).unwrap().marked[0].marking
}

fn unmark(sim: &mut SimHost, region: RegionKey) {
    let span = sim.span_of(region).unwrap();
    sim.apply(&Actions { unmark: vec![span.into()], ..Actions::default() }).unwrap();
}

fn scan(sim: &mut SimHost) {
    let before = sim.ksm().full_scans;
    order(sim, ScanOrder::KICK);
    while sim.is_scanning() {
        sim.wait(MS).unwrap();
    }
    assert_eq!(sim.ksm().full_scans, before + 1, "a kick must be exactly one full scan");
}

fn scans(sim: &mut SimHost, number: usize) {
    (0..number).for_each(|_| scan(sim));
}

fn add_marked(sim: &mut SimHost, pages: u64, fill: Fill) -> (OwnerKey, RegionKey) {
    let (owner, region) = add(sim, Mapping::new(Pages(pages), fill));
    assert_eq!(mark(sim, region), Marking::Done(Pages(pages)));
    (owner, region)
}

/// A machine with one process that has marked its memory.
fn marked(knobs: Knobs, pages: u64, fill: Fill) -> (SimHost, OwnerKey) {
    let mut sim = host(knobs);
    let (owner, _) = add_marked(&mut sim, pages, fill);
    (sim, owner)
}

/// Two processes with the same 100 pages, marked.
fn pairs(knobs: Knobs) -> (SimHost, [(OwnerKey, RegionKey); 2]) {
    let mut sim = host(knobs);
    let copies = [(); 2].map(|()| add_marked(&mut sim, 100, Fill::Series(1)));
    (sim, copies)
}

#[test]
fn a_merge_takes_two_scans_and_saves_exactly_the_copies() {
    let (mut sim, _) = pairs(Knobs::default());
    assert_eq!(sim.truth().savable, 100);
    scan(&mut sim);
    assert_eq!(sim.merged_pages(), Pages(0), "the first visit only stores checksums");
    scan(&mut sim);
    let ksm = sim.ksm();
    assert_eq!((ksm.shared, ksm.sharing), (Pages(100), Pages(100)));
    assert_eq!((sim.merged_pages(), sim.saved()), (Pages(200), Pages(100)));
    assert_eq!((sim.truth().frames, sim.truth().savable), (100, 0));
    assert_eq!(ksm.scanned, 400);
}

#[test]
fn nothing_happens_without_marks_or_while_ksmd_is_stopped() {
    let mut sim = host(Knobs::default());
    let (_, region) = add(&mut sim, Mapping::new(Pages(50), Fill::Same(1)));
    order(&mut sim, ScanOrder::KICK);
    assert!(!sim.is_scanning(), "ksmd stays idle: nothing is registered");
    order(&mut sim, ScanOrder::Rest);
    mark(&mut sim, region);
    sim.wait(1_000 * MS).unwrap();
    assert_eq!((sim.cost().ksmd_ns, sim.ksm().scanned), (0, 0));
}

#[test]
fn the_first_mark_wakes_a_running_ksmd() {
    let mut sim = host(Knobs::default());
    let (_, region) = add(&mut sim, Mapping::new(Pages(50), Fill::Same(1)));
    order(&mut sim, ScanOrder::KICK);
    mark(&mut sim, region);
    sim.wait(1_000 * MS).unwrap();
    assert_eq!(sim.ksm().full_scans, 1);
}

#[test]
fn only_marked_spans_merge() {
    let mut sim = host(Knobs::default());
    let (_, region) = add(&mut sim, Mapping::new(Pages(100), Fill::Same(1)));
    let whole = sim.span_of(region).unwrap();
    let piece = |first: u64, pages| Span { region, first: whole.first + first, pages: Pages(pages) };
    let beyond = Span { first: Vpn(whole.first.0 - 5), pages: Pages(8), ..whole };
    let gone = Span { region: RegionKey(99), ..whole };
    let marks = [piece(10, 5), piece(90, 50), beyond, gone, piece(15, 0)].map(Into::into).to_vec();
    let outcome = sim.apply(&Actions { mark: marks, ..Actions::default() }).unwrap();
    let done = |pages| Marking::Done(Pages(pages));
    let markings: Vec<_> = outcome.marked.iter().map(|result| result.marking).collect();
    assert_eq!(markings, [done(5), done(10), done(3), Marking::Refused, Marking::Refused]);
    assert_eq!(outcome.stops.len(), 1, "all spans of a process need one stop");
    assert_eq!(sim.observe().unwrap().regions[0].marked, Pages(18));
    scans(&mut sim, 2);
    assert_eq!(sim.merged_pages(), Pages(18));
    let merged = |page| sim.page(region, whole.first + page).unwrap().1 == PageState::Merged;
    assert!(merged(10) && merged(14) && !merged(15) && !merged(89) && merged(99) && merged(2) && !merged(3));
}

#[test]
fn a_write_breaks_a_merge_and_the_counters_lag() {
    let (mut sim, [(_, region), _]) = pairs(Knobs::default());
    scans(&mut sim, 2);
    let page = sim.span_of(region).unwrap().first;
    let (content, _) = sim.page(region, page).unwrap();
    assert!(sim.write(region, page, content));
    assert_eq!(sim.page(region, page), Some((content, PageState::Private)));
    assert_eq!((sim.cow_breaks(), sim.saved(), sim.truth().savable), (1, Pages(99), 1));
    assert_eq!(sim.ksm().sharing, Pages(100), "ksmd has not visited it yet");
    // The content and its checksum are unchanged: the next visit merges it again.
    scan(&mut sim);
    assert_eq!((sim.ksm().sharing, sim.saved()), (Pages(100), Pages(100)));
    sim.write(region, page, 77);
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.saved()), (Pages(100), Pages(99), Pages(99)));
}

#[test]
fn unmarking_gives_every_page_its_own_copy_back() {
    let (mut sim, [(_, region), (_, other)]) = pairs(Knobs::default());
    scans(&mut sim, 2);
    unmark(&mut sim, region);
    assert_eq!((sim.saved(), sim.truth().frames, sim.merged_pages()), (Pages(0), 200, Pages(100)));
    assert_eq!(sim.page(region, sim.span_of(region).unwrap().first).unwrap().1, PageState::Private);
    assert_eq!(sim.observe().unwrap().regions[0].marked, Pages(0));
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing), (Pages(100), Pages(0)));
    unmark(&mut sim, other);
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.merged_pages()), (Pages(0), Pages(0)));
    assert_eq!(sim.metadata(), Bytes(0));
}

#[test]
fn zeros_map_the_zero_page_if_enabled_and_form_chains_otherwise() {
    for use_zero_pages in [true, false] {
        let mut sim = host(Knobs { use_zero_pages, ..Knobs::default() });
        let (_, region) = add(&mut sim, Mapping::new(Pages(600), Fill::Zeros));
        let (_, untouched) = add(&mut sim, Mapping::new(Pages(10), Fill::Untouched));
        assert_eq!((sim.truth().savable, sim.truth().frames, sim.truth().zero_mapped), (600, 600, 10));
        mark(&mut sim, region);
        mark(&mut sim, untouched);
        scans(&mut sim, 2);
        let ksm = sim.ksm();
        if use_zero_pages {
            assert_eq!((ksm.zero, ksm.shared, sim.truth().frames), (Pages(600), Pages(0), 0));
            let page = sim.span_of(region).unwrap().first;
            assert_eq!(sim.page(region, page), Some((0, PageState::ZeroMapped)));
            let visited = sim.ksm().scanned;
            scan(&mut sim);
            assert_eq!(sim.ksm().scanned, visited, "zero pages do not count as scanned");
            assert_eq!(sim.metadata(), Bytes(2 * 48));
            sim.write(region, page, 5);
            assert_eq!((sim.ksm().zero, sim.saved()), (Pages(599), Pages(599)));
            unmark(&mut sim, region);
            assert_eq!((sim.truth().frames, sim.ksm().zero), (600, Pages(0)));
        } else {
            // 600 pages, at most 256 to a frame.
            assert_eq!((ksm.zero, ksm.shared, ksm.sharing), (Pages(0), Pages(3), Pages(597)));
        }
    }
}

#[test]
fn a_volatile_page_never_merges() {
    let (mut sim, [(_, region), (_, other)]) = pairs(Knobs::default());
    let page = sim.span_of(region).unwrap().first;
    for round in 0..6 {
        // The two pages are equal at every scan, and different from the scan before.
        sim.write(region, page, 1_000 + round);
        sim.write(other, page, 1_000 + round);
        scan(&mut sim);
    }
    assert_eq!(sim.saved(), Pages(99));
    assert_eq!(sim.page(region, page).unwrap().1, PageState::Private);
}

#[test]
fn a_kick_during_a_scan_is_lost() {
    let (mut sim, _) = marked(Knobs::default(), 10_000, Fill::Random);
    order(&mut sim, ScanOrder::KICK);
    sim.wait(MS).unwrap();
    assert!(sim.is_scanning());
    order(&mut sim, ScanOrder::KICK);
    order(&mut sim, ScanOrder::Rest);
    assert!(sim.is_scanning() && sim.ksm().busy, "a scan cannot be aborted");
    sim.wait(1_000 * MS).unwrap();
    assert!(!sim.ksm().busy);
    assert_eq!((sim.ksm().full_scans, sim.lost_kicks()), (1, 1));
    let spent_ns = sim.cost().ksmd_ns;
    assert!((10_000 * 1_200..10_000 * 1_300).contains(&spent_ns), "{spent_ns}");
    scan(&mut sim);
}

#[test]
fn a_scan_takes_time_and_processes_continue_meanwhile() {
    let (mut sim, _) = marked(Knobs::default(), 10_000, Fill::Random);
    order(&mut sim, ScanOrder::KICK);
    let began_ns = sim.now_ns();
    let mut scanned = 0;
    while sim.is_scanning() {
        sim.wait(MS).unwrap();
        assert!(sim.ksm().scanned > scanned);
        scanned = sim.ksm().scanned;
    }
    let took_ns = sim.now_ns() - began_ns;
    assert!(took_ns.abs_diff(sim.cost().ksmd_ns) <= MS, "{took_ns}");
}

#[test]
fn a_process_marked_during_a_scan_waits_for_the_next() {
    let mut sim = host(Knobs::default());
    let (_, region) = add(&mut sim, Mapping::new(Pages(1_000), Fill::Random));
    let (_, late) = add(&mut sim, Mapping::new(Pages(10), Fill::Random));
    mark(&mut sim, region);
    order(&mut sim, ScanOrder::KICK);
    sim.wait(MS / 2).unwrap();
    assert!(sim.is_scanning());
    mark(&mut sim, late);
    sim.wait(100 * MS).unwrap();
    assert_eq!(sim.ksm().scanned, 1_000);
    scan(&mut sim);
    assert_eq!(sim.ksm().scanned, 2_010);
}

#[test]
fn pacing_scans_in_batches_and_repeating_it_has_no_effect() {
    let (mut sim, _) = marked(Knobs::default(), 1_000, Fill::Random);
    let pace = ScanOrder::Pace { pages_to_scan: 100, sleep_ms: 20, thorough: false };
    order(&mut sim, pace);
    assert!(sim.is_scanning() && !sim.ksm().busy, "takes effect at once");
    for millisecond in 0..100 {
        sim.wait(MS).unwrap();
        order(&mut sim, pace);
        assert!(sim.ksm().scanned <= (millisecond / 20 + 1) * 100);
    }
    assert_eq!(sim.ksm().scanned, 500);
    // A kick wakes ksmd, but its batch ends where the current scan ends.
    order(&mut sim, ScanOrder::KICK);
    sim.wait(100 * MS).unwrap();
    assert_eq!((sim.ksm().scanned, sim.ksm().full_scans), (1_000, 1));
    sim.wait(1_000 * MS).unwrap();
    assert_eq!(sim.ksm().scanned, 1_000);
}

#[test]
fn an_exited_process_costs_memory_until_the_next_scan() {
    let (mut sim, [(owner, _), _]) = pairs(Knobs::default());
    scans(&mut sim, 2);
    sim.exit(owner);
    assert_eq!((sim.truth().frames, sim.saved()), (100, Pages(0)));
    assert_eq!((sim.ksm().sharing, sim.unreaped()), (Pages(100), 1), "counters lag and records stay");
    assert_eq!(sim.metadata(), Bytes(64 * 300 + 2 * 48));
    sim.wait(60_000 * MS).unwrap();
    assert_eq!(sim.unreaped(), 1, "time alone frees nothing");
    scan(&mut sim);
    assert_eq!((sim.ksm().sharing, sim.unreaped()), (Pages(0), 0));
    assert_eq!(sim.metadata(), Bytes(64 * 200 + 48));
}

#[test]
fn smart_scan_skips_one_two_four_then_eight_visits() {
    let (mut sim, _) = marked(Knobs::default(), 1, Fill::Random);
    let visited: Vec<bool> = (0..27)
        .map(|_| {
            let before = sim.ksm().scanned;
            scan(&mut sim);
            sim.ksm().scanned > before
        })
        .collect();
    let expected = "vvvv-v--v----v--------v----";
    assert_eq!(visited.iter().map(|visit| if *visit { 'v' } else { '-' }).collect::<String>(), expected);
}

#[test]
fn a_new_duplicate_misses_a_skipped_page() {
    let mut sim = host(Knobs::default());
    let (_, old) = add(&mut sim, Mapping::new(Pages(1), Fill::Series(4)));
    let (_, new) = add(&mut sim, Mapping::new(Pages(1), Fill::Series(4)));
    mark(&mut sim, old);
    scans(&mut sim, 13);
    mark(&mut sim, new);
    scans(&mut sim, 3);
    assert_eq!(sim.saved(), Pages(0), "both were visited, but never in the same scan");
    scans(&mut sim, 8);
    assert_eq!(sim.saved(), Pages(0), "the new one is skipped whenever the old one is not");
    let mut sim = host(Knobs { smart_scan: false, ..Knobs::default() });
    let regions = [(); 2].map(|()| add(&mut sim, Mapping::new(Pages(1), Fill::Series(4))).1);
    mark(&mut sim, regions[0]);
    scans(&mut sim, 13);
    mark(&mut sim, regions[1]);
    scans(&mut sim, 2);
    assert_eq!(sim.saved(), Pages(1));
}

#[test]
fn chains_make_unrelated_pages_costly() {
    let random_page_ns = |max_page_sharing| {
        let mut sim = host(Knobs { max_page_sharing, smart_scan: false, ..Knobs::default() });
        add_marked(&mut sim, 65_536, Fill::Same(1));
        add_marked(&mut sim, 1_000, Fill::Random);
        scans(&mut sim, 3);
        assert_eq!(sim.ksm().shared.0, 65_536 / u64::from(max_page_sharing));
        let before_ns = sim.cost().ksmd_ns;
        scan(&mut sim);
        (sim.cost().ksmd_ns - before_ns - 65_536 * 300) / 1_000
    };
    let (short, long) = (random_page_ns(65_536), random_page_ns(256));
    assert_eq!(random_page_ns(256), long);
    assert!(long.abs_diff(short + 256 * 38) < 100, "256 full frames at 38 ns each: {short} and {long}");
}

#[test]
fn a_full_chain_grows_by_pairs() {
    let (mut sim, _) = marked(Knobs { max_page_sharing: 4, ..Knobs::default() }, 9, Fill::Same(1));
    scans(&mut sim, 4);
    // Four to a frame; the ninth finds all full and no partner.
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.saved()), (Pages(2), Pages(6), Pages(6)));
    assert_eq!(sim.truth().savable, 2);
}

#[test]
fn forks_can_exceed_the_sharing_limit() {
    let (mut sim, owner) = marked(Knobs { max_page_sharing: 4, ..Knobs::default() }, 4, Fill::Same(1));
    scans(&mut sim, 2);
    let child = sim.fork(owner);
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.truth().frames), (Pages(1), Pages(7), 1));
    add_marked(&mut sim, 2, Fill::Same(1));
    scans(&mut sim, 2);
    assert_eq!((sim.ksm().shared, sim.truth().frames), (Pages(2), 2), "no room for others");
    sim.exit(owner);
    sim.exit(child);
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.truth().frames), (Pages(1), Pages(1), 1));
    assert_eq!(sim.metadata(), Bytes(64 * 3 + 48));
    add_marked(&mut sim, 3, Fill::Same(1));
    scans(&mut sim, 3);
    assert_eq!((sim.ksm().shared, sim.truth().frames), (Pages(1), 2), "two join, one finds it full");
}

#[test]
fn the_kept_frame_is_merged_for_fork_sharers_too() {
    let (mut sim, owner) = marked(Knobs::default(), 2, Fill::Same(1));
    scan(&mut sim);
    let child = sim.fork(owner);
    let copy = sim.regions_of(child)[0];
    scan(&mut sim);
    // ksmd kept the second page's frame: the child maps it without a second visit.
    let first = sim.span_of(copy).unwrap().first;
    let held = [first, first + 1].map(|page| sim.page(copy, page).unwrap().1);
    assert_eq!(held, [PageState::Private, PageState::Merged]);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.truth().frames), (Pages(1), Pages(2), 2));
    scan(&mut sim);
    assert_eq!((sim.ksm().shared, sim.ksm().sharing, sim.truth().frames), (Pages(1), Pages(3), 1));
}

#[test]
fn fork_shares_frames_and_a_child_of_merged_pages_is_counted_when_visited() {
    let (mut sim, [(owner, region), _]) = pairs(Knobs::default());
    let page = sim.span_of(region).unwrap().first;
    let child = sim.fork(owner);
    assert_eq!((sim.truth().frames, sim.page(region, page).unwrap().1), (200, PageState::Shared));
    let copy = sim.regions_of(child)[0];
    sim.write(copy, page, 3);
    assert_eq!(sim.truth().frames, 201);
    assert_eq!(sim.page(region, page).unwrap().1, PageState::Private, "its relative has gone");
    scans(&mut sim, 2);
    assert_eq!((sim.truth().frames, sim.truth().savable), (101, 0));
    let grandchild = sim.fork(child);
    assert_eq!((sim.truth().frames, sim.ksm().sharing.0), (101, 199));
    scan(&mut sim);
    assert_eq!(sim.ksm().sharing, Pages(298));
    sim.exit(grandchild);
    scan(&mut sim);
    assert_eq!(sim.ksm().sharing, Pages(199));
}

#[test]
fn a_merge_splits_the_huge_page() {
    let mut sim = host(Knobs::default());
    let (_, region) = add(&mut sim, Mapping::new(Pages(1_100), Fill::Random).huge());
    let first = sim.span_of(region).unwrap().first;
    let same = sim.page(region, first).unwrap().0;
    sim.write(region, first + 1, same);
    let huge = |sim: &mut SimHost, page| {
        let run = PageRun { region, first: first + page, pages: 1 };
        sim.read(&SamplePlan { runs: vec![run], digest_seed: 1, ..SamplePlan::default() }).unwrap().pages[0].huge
    };
    assert!(huge(&mut sim, 5) && huge(&mut sim, 600) && !huge(&mut sim, 1_050), "no huge page at the short end");
    mark(&mut sim, region);
    scans(&mut sim, 2);
    assert!(!huge(&mut sim, 5) && huge(&mut sim, 600));
}

#[test]
fn reading_shows_states_and_duplicates_and_costs_less_in_runs() {
    let mut sim = host(Knobs::default());
    let (_, one) = add(&mut sim, Mapping::new(Pages(64), Fill::Series(1)));
    let (_, two) = add(&mut sim, Mapping::new(Pages(64), Fill::Series(1)));
    let (_, zeros) = add(&mut sim, Mapping::new(Pages(1), Fill::Zeros));
    let (_, empty) = add(&mut sim, Mapping::new(Pages(8), Fill::Random).resident(Permyriad(0)));
    let run = |sim: &SimHost, region, pages| PageRun { region, first: sim.span_of(region).unwrap().first, pages };
    let mut runs = vec![run(&sim, one, 8), run(&sim, two, 8), run(&sim, zeros, 1), run(&sim, empty, 1)];
    runs.push(PageRun { region: RegionKey(99), first: Vpn(0), pages: 3 });
    runs.push(PageRun { first: Vpn(runs[0].first.0 + 62), ..runs[0] });
    let plan = SamplePlan { runs, digest_seed: 5, ..SamplePlan::default() };
    let samples = sim.read(&plan).unwrap();
    let pages = samples.pages;
    assert_eq!(pages.len(), 8 + 8 + 1 + 1 + 2, "what is not there is left out");
    assert!(pages[..8].iter().zip(&pages[8..16]).all(|(a, b)| a.digest == b.digest));
    assert!(pages[..8].windows(2).all(|pair| pair[0].digest != pair[1].digest));
    assert_eq!((pages[16].digest.0, pages[16].state), (0, PageState::Private));
    assert_eq!(pages[17].state, PageState::Absent);
    let other = sim.read(&SamplePlan { digest_seed: 6, ..plan.clone() }).unwrap().pages;
    assert_ne!(other[0].digest, pages[0].digest);
    let mut cost_of = |runs| sim.read(&SamplePlan { runs, digest_seed: 5, ..SamplePlan::default() }).unwrap().cpu_ns;
    let first = plan.runs[0].first;
    let singles = cost_of((0..8).map(|page| PageRun { region: one, first: first + page, pages: 1 }).collect());
    assert!(cost_of(vec![plan.runs[0]]) * 3 < singles * 2);
    assert!(cost_of(vec![plan.runs[3]]) < 100);
    assert!(sim.cost().pagefold_ns > 2 * samples.cpu_ns && sim.now_ns() == sim.cost().pagefold_ns);
}

#[test]
fn busy_and_untouchable_processes_are_distinguished() {
    let mut sim = host(Knobs { busy: Permyriad(10_000), ..Knobs::default() });
    let (_, region) = add(&mut sim, Mapping::new(Pages(10), Fill::Random));
    assert_eq!(mark(&mut sim, region), Marking::Busy);
    let owner = sim.add(Process::starting_at(0).untouchable().mapping(Mapping::new(Pages(10), Fill::Random)));
    let region = sim.regions_of(owner)[0];
    assert_eq!(mark(&mut sim, region), Marking::Refused);
    assert!(sim.observe().unwrap().regions.iter().all(|view| view.marked == Pages(0)));
}

#[test]
fn orders_are_ignored_while_another_program_controls_ksm() {
    let (mut sim, _) = pairs(Knobs::default());
    sim.set_ours(false);
    assert!(!sim.observe().unwrap().ksm.ours);
    order(&mut sim, ScanOrder::KICK);
    assert!(!sim.is_scanning() && sim.ignored_orders() == 1);
    sim.set_ours(true);
    scan(&mut sim);
}

#[test]
fn processes_start_exit_and_write_at_their_times() {
    let mut sim = host(Knobs::default());
    let churn = Behaviour::Churn { per_second: Permyriad(1_000), writes: Writes::Unique };
    let breaker = Behaviour::CowBreaker { every_ns: 10 * MS };
    let process = Process::starting_at(50 * MS).exiting_at(2_050 * MS);
    let process = process.mapping(Mapping::new(Pages(1_000), Fill::Same(1)).behaving(churn));
    let owner = sim.add(process.mapping(Mapping::new(Pages(300), Fill::Same(1)).behaving(breaker)));
    sim.wait(49 * MS).unwrap();
    assert!(sim.observe().unwrap().regions.is_empty());
    sim.wait(2 * MS).unwrap();
    let regions = sim.regions_of(owner);
    assert_eq!(sim.observe().unwrap().regions.len(), 2);
    for region in &regions {
        mark(&mut sim, *region);
    }
    scans(&mut sim, 2);
    assert!(sim.merged_pages() > Pages(1_200));
    let before = sim.cow_breaks();
    sim.wait(1_000 * MS).unwrap();
    // 100 by the breaker; 100 by the churn, minus the writes that hit a page twice.
    let broken = sim.cow_breaks() - before;
    assert!((185..=200).contains(&broken), "{broken}");
    let contents = sim.truth().contents;
    assert!((85..=110).contains(&contents), "the breaker changes nothing: {contents}");
    sim.wait(1_000 * MS).unwrap();
    assert!(sim.observe().unwrap().regions.is_empty());
    assert_eq!(sim.truth().frames, 0);
}

#[test]
fn a_remapped_region_is_a_new_region() {
    let mut sim = host(Knobs::default());
    let owner = pagefold_sim::scenario::short_lived(&mut sim, Pages(100), 50 * MS);
    let mut lives = Vec::new();
    for _ in 0..40 {
        let now = sim.regions_of(owner);
        assert_eq!(now.len(), usize::from(sim.now_ns() / (50 * MS) % 2 == 0));
        if let Some(&region) = now.first().filter(|region| !lives.contains(*region)) {
            mark(&mut sim, region);
            order(&mut sim, ScanOrder::KICK);
            lives.push(region);
        }
        let rest = 10 * MS - sim.now_ns() % (10 * MS);
        sim.wait(rest).unwrap();
    }
    assert_eq!(lives.len(), 4);
    assert_eq!(sim.saved(), Pages(0), "no life sees two scans");
}
