//! Properties of every run: no process ever sees a page change through merging, all counters match the memory, and the
//! same seed gives the same run.

use crate::memory::{Backing, ItemState, Memory, NONE};
use crate::{Behaviour, Classes, Costs, Fill, Forest, Knobs, Mapping, Process, SimHost, Writes};
use pagefold_engine::host::{
    Actions, Host, Keep, Mechanism, MergeRange, Merging, Move, PageRun, PageState, SamplePlan, ScanOrder, Span,
};
use pagefold_engine::keys::{NodeKey, OwnerKey, RegionKey};
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use proptest::prelude::*;
use std::collections::BTreeMap;

const PAGES: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Start(u8, u16),
    Exit(prop::sample::Index),
    Fork(prop::sample::Index),
    Write(prop::sample::Index, u64, u64),
    Mark(prop::sample::Index, u64, u64),
    Unmark(prop::sample::Index, u64, u64),
    Order(u8),
    Merge(prop::sample::Index, u64, u32, prop::sample::Index, u64, u8),
    Wait(u64),
    Move(prop::sample::Index, u64, u16),
    Home(prop::sample::Index, u16),
    Remove(u16),
    Restore(u16),
    Read(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        2 => (0u8..5, 0u16..4).prop_map(|(kind, node)| Step::Start(kind, node)),
        1 => at().prop_map(Step::Exit),
        1 => at().prop_map(Step::Fork),
        5 => (at(), 0..PAGES, 0u64..4).prop_map(|(target, page, content)| Step::Write(target, page, content)),
        4 => (at(), 0..PAGES, 0..PAGES).prop_map(|(target, page, pages)| Step::Mark(target, page, pages)),
        2 => (at(), 0..PAGES, 0..PAGES).prop_map(|(target, page, pages)| Step::Unmark(target, page, pages)),
        5 => (0u8..3).prop_map(Step::Order),
        6 => (at(), 0..PAGES, 1u32..20, at(), 0..PAGES, 0u8..3).prop_map(|(take, first, pages, keep, from, kind)| {
            Step::Merge(take, first, pages, keep, from, kind)
        }),
        5 => (0u64..400_000).prop_map(Step::Wait),
        4 => (at(), 0..PAGES, 0u16..4).prop_map(|(target, page, node)| Step::Move(target, page, node)),
        1 => (at(), 0u16..4).prop_map(|(target, node)| Step::Home(target, node)),
        1 => (0u16..4).prop_map(Step::Remove),
        1 => (0u16..4).prop_map(Step::Restore),
        1 => at().prop_map(Step::Read),
    ]
}

/// The host under test, and the content that every page must have.
struct Rig {
    sim: SimHost,
    nodes: u16,
    owners: Vec<OwnerKey>,
    expected: BTreeMap<(RegionKey, Vpn), u64>,
}

impl Rig {
    fn adopt(&mut self, owner: OwnerKey) {
        self.owners.push(owner);
        for key in self.sim.regions_of(owner) {
            let span = self.sim.span_of(key).unwrap();
            for page in span.first.0..span.first.0 + span.pages.0 {
                let (content, _) = self.sim.page(key, Vpn(page)).unwrap();
                self.expected.insert((key, Vpn(page)), content);
            }
        }
    }

    fn span(&self, target: prop::sample::Index, page: u64, pages: u64) -> Option<Span> {
        let keys: Vec<RegionKey> = self.owners.iter().flat_map(|&owner| self.sim.regions_of(owner)).collect();
        let whole = (!keys.is_empty()).then(|| self.sim.span_of(*target.get(&keys)))??;
        Some(Span { first: whole.first + page, pages: Pages(pages), ..whole })
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Start(kind, node) => {
                let fill = match kind {
                    0 => Fill::Series(1),
                    1 => Fill::Same(1),
                    2 => Fill::Zeros,
                    3 => Fill::Untouched,
                    _ => Fill::Random,
                };
                let process = Process::starting_at(0).at_home_on(node % self.nodes);
                let owner = self.sim.add(process.mapping(Mapping::new(Pages(PAGES), fill)));
                self.adopt(owner);
            }
            Step::Exit(target) if !self.owners.is_empty() => {
                let owner = self.owners.remove(target.index(self.owners.len()));
                for key in self.sim.regions_of(owner) {
                    self.expected.retain(|(region, _), _| *region != key);
                }
                self.sim.exit(owner);
            }
            Step::Fork(target) if !self.owners.is_empty() && self.owners.len() < 12 => {
                let child = self.sim.fork(*target.get(&self.owners));
                self.adopt(child);
            }
            Step::Write(target, page, content) => {
                if let Some(span) = self.span(target, page, 1) {
                    assert!(self.sim.write(span.region, span.first, content));
                    self.expected.insert((span.region, span.first), content);
                }
            }
            Step::Mark(target, page, pages) => {
                self.apply(|actions, span| actions.mark.push(span.into()), target, page, pages);
            }
            Step::Unmark(target, page, pages) => {
                self.apply(|actions, span| actions.unmark.push(span.into()), target, page, pages);
            }
            Step::Order(kind) => {
                let scan = match kind {
                    0 => ScanOrder::KICK,
                    1 => ScanOrder::Rest,
                    _ => ScanOrder::Pace { pages_to_scan: 7, sleep_ms: 0, thorough: false },
                };
                self.sim.apply(&Actions { scan, ..Actions::default() }).unwrap();
            }
            Step::Merge(take, first, pages, keep, from, kind) => {
                let take = self.span(take, first, 1);
                let keep = self.span(keep, from, 1);
                if let (Some(take), Some(keep)) = (take, keep) {
                    self.merge(PageRun { region: take.region, first: take.first, pages }, keep, kind);
                }
            }
            Step::Wait(ns) => self.sim.wait(ns).unwrap(),
            Step::Move(target, page, node) => {
                if let Some(span) = self.span(target, page, 1) {
                    self.move_page(span.region, span.first, NodeKey(node));
                }
            }
            Step::Home(target, node) if !self.owners.is_empty() => {
                self.sim.set_home(*target.get(&self.owners), node % self.nodes);
            }
            Step::Remove(node) => {
                if self.sim.remove_node(node) {
                    let left = self
                        .expected
                        .keys()
                        .filter(|(region, page)| self.sim.node_of(*region, *page) == Some(NodeKey(node)));
                    assert_eq!(left.count(), 0, "frames left on offline node {node}");
                }
            }
            Step::Restore(node) => self.sim.restore_node(node),
            Step::Read(target) => self.read(target),
            Step::Exit(_) | Step::Fork(_) | Step::Home(..) => {}
        }
    }

    /// Asks to move a page's frame to a node. Checks that only a merged frame moves, and only to that node.
    fn move_page(&mut self, region: RegionKey, page: Vpn, node: NodeKey) {
        let before = self.sim.node_of(region, page);
        let was_merged = self.sim.page(region, page).unwrap().1 == PageState::Merged;
        let moves = vec![Move { region, page, node }];
        let outcome = self.sim.apply(&Actions { moves, ..Actions::default() }).unwrap();
        assert!(outcome.moved == 0 || was_merged, "moved a frame that is not merged");
        let is_merged = self.sim.page(region, page).unwrap().1 == PageState::Merged;
        // An earlier order may still be running, and ksmd may change the page meanwhile.
        if is_merged && was_merged && !self.sim.is_scanning() {
            let wanted = if outcome.moved == 1 { Some(node) } else { before };
            assert_eq!(self.sim.node_of(region, page), wanted);
        }
    }

    /// Merges a range on request, and checks the report.
    fn merge(&mut self, take: PageRun, keep: Span, kind: u8) {
        let keep = match kind {
            0 => Keep::Run(keep.region, keep.first),
            1 => Keep::Page(keep.region, keep.first),
            _ => Keep::Zero,
        };
        let range = MergeRange { take, keep, needs_merged: false, needs_own: false, keep_mappers: 0 };
        let outcome = self.sim.apply(&Actions { merge: vec![range], ..Actions::default() }).unwrap();
        let mut next = 0;
        for result in &outcome.merges {
            let pages = result.range.take.pages;
            assert_eq!(result.range, range.part(next, pages), "results follow one another");
            next += pages;
            for number in 0..pages {
                let part = result.range.part(number, 1);
                let page = self.sim.page(part.take.region, part.take.first);
                match (result.merging, part.keep.first()) {
                    (Merging::Merged, None) => assert_eq!(page, Some((0, PageState::ZeroMapped))),
                    (Merging::Merged, Some((region, kept))) => {
                        assert_eq!(page.unwrap().1, PageState::Merged);
                        assert_eq!(page, self.sim.page(region, kept));
                    }
                    (Merging::Differs, None) => assert_ne!(page.unwrap().0, 0),
                    (Merging::Differs, Some((region, kept))) => {
                        assert_ne!(page.unwrap().0, self.sim.page(region, kept).unwrap().0);
                    }
                    _ => {}
                }
            }
        }
        assert_eq!(next, range.take.pages, "every page has a result");
    }

    /// Checks the samples of a read against the memory.
    fn read(&mut self, target: prop::sample::Index) {
        let Some(Span { region, first, .. }) = self.span(target, 0, PAGES) else { return };
        let run = PageRun { region, first: Vpn(first.0), pages: u32::try_from(PAGES).unwrap() };
        let (memory, _) = self.sim.parts();
        let found = memory.region(region.0).unwrap();
        let several = memory.nodes.is_tracked();
        let nodes: Vec<_> = (0..found.len()).map(|page| memory.node_of(found, page).filter(|_| several)).collect();
        let frames: Vec<_> = (0..found.len()).filter_map(|page| found.merged_frame(page)).map(u64::from).collect();
        let plan = SamplePlan { runs: vec![run], inspect: vec![run], ..SamplePlan::default() };
        let samples = self.sim.read(&plan).unwrap();
        for (sample, node) in samples.pages.iter().zip(nodes) {
            assert_eq!(sample.node, node.filter(|_| sample.state == PageState::Private));
            assert!(!sample.active, "activity was not requested");
        }
        assert_eq!(samples.merged.iter().map(|sample| sample.frame).collect::<Vec<_>>(), frames);
    }

    fn apply(&mut self, put: fn(&mut Actions, Span), target: prop::sample::Index, page: u64, pages: u64) {
        let mut actions = Actions::default();
        if let Some(span) = self.span(target, page, pages) {
            put(&mut actions, span);
        }
        self.sim.apply(&actions).unwrap();
    }

    fn check(&self, may_fork: bool) {
        for (&(region, page), &content) in &self.expected {
            assert_eq!(self.sim.page(region, page).unwrap().0, content, "page {page:?} of {region:?} changed");
        }
        check_counters(&self.sim);
        if !may_fork {
            // Without merging, every present page would have a frame of its own.
            let truth = self.sim.truth();
            let untouched = truth.zero_mapped - self.sim.ksm().zero.0;
            let before = self.expected.len() as u64 - untouched;
            assert_eq!(
                before - truth.frames,
                self.sim.saved().0,
                "saved differs from the frames before minus the frames after"
            );
        }
    }
}

/// Recounts frames, records and KSM's counters, and compares.
fn check_counters(sim: &SimHost) {
    let (memory, ksmd) = sim.parts();
    let mut mapped = vec![0u32; memory.frames.len()];
    let mut hung = vec![0u32; memory.frames.len()];
    let (mut items, mut unshared, mut zero_merged) = (0, 0, 0);
    for (_, region) in memory.live_regions() {
        for page in 0..region.len() {
            if let Some(frame) = region.merged_frame(page) {
                mapped[frame as usize] += 1;
            }
            zero_merged += u64::from(region.backing[page as usize] == Backing::ZeroMerged);
        }
        for item in region.items.iter().filter(|item| item.is_live()) {
            items += 1;
            unshared += u64::from(item.state == ItemState::Unshared);
            if item.frame != NONE {
                hung[item.frame as usize] += 1;
            }
        }
    }
    for owner in &memory.owners {
        items += owner.stale_items;
        unshared += owner.stale_unshared;
        owner.stale_frames.iter().for_each(|&frame| hung[frame as usize] += 1);
    }
    let (mut shared, mut sharing) = (0, 0);
    for (index, frame) in memory.frames.iter().enumerate() {
        assert_eq!((frame.mapped, frame.items), (mapped[index], hung[index]), "frame {index}: {frame:?}");
        if frame.items > 0 && !frame.pruned {
            shared += 1;
            sharing += u64::from(frame.items) - 1;
        }
    }
    assert_eq!((ksmd.items, ksmd.unshared), (items, unshared));
    assert_eq!((ksmd.trees.shared, ksmd.trees.sharing), (shared, sharing));
    assert_eq!(memory.zero_merged, zero_merged);
    assert_eq!(memory.merged_pages, mapped.iter().map(|&mapped| u64::from(mapped)).sum::<u64>());
    assert_eq!(memory.merged_frames, mapped.iter().filter(|&&mapped| mapped > 0).count() as u64);
    ksmd.trees.check_counters(memory);
    check_nodes(memory);
}

/// Recounts the frames on each node, and compares.
fn check_nodes(memory: &Memory) {
    if !memory.nodes.is_tracked() {
        let kept = |region: &crate::memory::Region| region.reads.len() + region.tracked_nodes();
        assert_eq!(memory.live_regions().map(|(_, region)| kept(region)).sum::<usize>(), 0);
        return;
    }
    let mut used = vec![0; memory.nodes.used().len()];
    let mut shares: BTreeMap<u32, NodeKey> = BTreeMap::new();
    for (_, region) in memory.live_regions() {
        for page in 0..region.len() {
            let Some(node) = memory.node_of(region, page) else { continue };
            match region.backing[page as usize] {
                Backing::Private => used[usize::from(node.0)] += 1,
                Backing::Forked => {
                    let known = shares.insert(region.frame[page as usize], node);
                    assert!(known.is_none_or(|known| known == node), "a frame on two nodes");
                    used[usize::from(node.0)] += u64::from(known.is_none());
                }
                _ => {}
            }
        }
    }
    for frame in memory.frames.iter().filter(|frame| frame.mapped > 0) {
        used[usize::from(frame.node.0)] += 1;
    }
    assert_eq!(memory.nodes.used(), used);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn merging_changes_no_page_and_the_counters_match(
        steps in prop::collection::vec(step(), 1..120),
        knobs in (any::<bool>(), any::<bool>(), 2u32..6, any::<bool>()),
        (nodes, node_pages, merge_across_nodes) in (1u16..5, 20u64..400, any::<bool>()),
        (forest, merge_any, on_request) in (0usize..8, any::<bool>(), any::<bool>()),
    ) {
        let (use_zero_pages, smart_scan, max_page_sharing, may_fork) = knobs;
        let forests = [
            Forest::Checksum { trees: 3 },
            Forest::Classes(Classes::Address),
            Forest::Classes(Classes::PageCount),
            Forest::Classes(Classes::SubPages),
        ];
        let forest = forests.get(forest).copied().unwrap_or_default();
        let merge_across_nodes = merge_across_nodes || forest != Forest::Kernel;
        let mechanism = if on_request && forest == Forest::Kernel { Mechanism::Request } else { Mechanism::Ksmd };
        let knobs = Knobs {
            use_zero_pages, smart_scan, max_page_sharing, merge_across_nodes, forest, merge_any, mechanism,
            ..Knobs::default()
        };
        let sim = SimHost::new(1, Costs::default(), knobs).with_nodes(&vec![Pages(node_pages); nodes.into()]);
        let mut rig = Rig { sim, nodes, owners: Vec::new(), expected: BTreeMap::new() };
        for step in steps {
            if may_fork || !matches!(step, Step::Fork(_)) {
                rig.take(&step);
                rig.check(may_fork);
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_run(seed in any::<u64>()) {
        prop_assert_eq!(fingerprint(seed), fingerprint(seed));
        prop_assert_ne!(fingerprint(seed), fingerprint(seed.wrapping_add(1)));
    }
}

#[test]
fn a_page_marked_again_during_a_scan_has_left_the_unstable_tree() {
    // Unmarks a page and marks it again, at many points of the scan. At some of them the page is in the unstable tree.
    for waits in 0..80 {
        let mut sim = SimHost::new(1, Costs::default(), Knobs::default());
        let mut add = || sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(1), Fill::Same(1))));
        let (one, other) = (add(), add());
        let span = |sim: &SimHost, owner| sim.span_of(sim.regions_of(owner)[0]).unwrap().into();
        let pace = ScanOrder::Pace { pages_to_scan: 1, sleep_ms: 1, thorough: false };
        let both = vec![span(&sim, one), span(&sim, other)];
        sim.apply(&Actions { mark: both, scan: pace, ..Actions::default() }).unwrap();
        sim.wait(waits * 100_000).unwrap();
        let again = vec![span(&sim, one)];
        sim.apply(&Actions { unmark: again.clone(), ..Actions::default() }).unwrap();
        sim.apply(&Actions { mark: again, ..Actions::default() }).unwrap();
        for _ in 0..20 {
            sim.wait(1_000_000).unwrap();
            check_counters(&sim);
        }
        assert_eq!(sim.saved(), Pages(1));
    }
}

/// Everything that we can observe of a run with random events.
fn fingerprint(seed: u64) -> String {
    use std::fmt::Write as _;
    let knobs = Knobs { busy: Permyriad(2_000), ..Knobs::default() };
    let mut sim = SimHost::new(seed, Costs::default(), knobs);
    let churn = Behaviour::Churn { per_second: Permyriad(3_000), writes: Writes::Duplicate { series: 5, size: 9 } };
    let mapping = Mapping::new(Pages(600), Fill::Series(5)).behaving(churn).resident(Permyriad(8_000));
    let short = Mapping::new(Pages(60), Fill::Random).behaving(Behaviour::ShortLived { life_ns: 30_000_000 });
    for start in 0..3 {
        let process = Process::starting_at(start * 70_000_000).exiting_at(400_000_000 + start);
        sim.add(process.mapping(mapping.clone()).mapping(short.clone()));
    }
    let mut log = String::new();
    for _ in 0..60 {
        let snapshot = sim.observe().unwrap();
        let whole =
            |view: &pagefold_engine::host::RegionView| Span { region: view.key, first: view.first, pages: view.pages };
        let spans = snapshot.regions.iter().map(|view| whole(view).into());
        let actions = Actions { mark: spans.collect(), scan: ScanOrder::KICK, ..Actions::default() };
        let outcome = sim.apply(&actions).unwrap();
        sim.wait(10_000_000).unwrap();
        write!(log, "{snapshot:?}{outcome:?}{:?}{}", sim.truth(), sim.cow_breaks()).unwrap();
    }
    log
}
