//! UKSM's scanner on hand-made memory: the paper's workloads (section 8.1) at small scale, and invariants.

use super::*;
use pagefold_engine::governor::{Governor, share_ns};
use pagefold_engine::host::Host;
use pagefold_engine::keys::{DomainKey, FamilyKey, NodeKey, OwnerKey};
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::memory::{Backing, Nodes, ProcessNuma};
use pagefold_sim::{Behaviour, Fill, Knobs, Mapping, Process, Replica, SimHost, Writes, content_of_series};
use proptest::prelude::*;
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

struct Rig {
    memory: Memory,
    uksmd: Uksmd,
    now_ns: u64,
    unique: u64,
}

impl Rig {
    fn new(settings: UksmSettings) -> Self {
        let uksmd = Uksmd::new(&Costs::default(), Granularity::new(1), settings);
        Self { memory: Memory::default(), uksmd, now_ns: 0, unique: 0 }
    }

    fn map(&mut self, contents: Vec<u64>) -> u32 {
        let home = NodeKey(u16::try_from(self.unique % 2).unwrap());
        let place = if self.memory.nodes.is_tracked() {
            ProcessNuma { home, ..ProcessNuma::default() }
        } else {
            ProcessNuma::default()
        };
        let owner = self.memory.add_owner(false, DomainKey(0), place);
        let backing = vec![Backing::Private; contents.len()];
        let key = self.memory.map(owner, FamilyKey(0), Vpn(512), (contents, backing), false).0;
        self.memory.place_pages(key);
        key
    }

    fn random(&mut self, pages: u64) -> u32 {
        self.unique += 1;
        let series = 1_000 + self.unique;
        self.map((0..pages).map(|page| content_of_series(series, page)).collect())
    }

    fn run(&mut self, ns: u64) {
        self.now_ns += ns;
        self.uksmd.run_until(&mut self.memory, self.now_ns);
    }

    fn unmap(&mut self, key: u32) {
        self.memory.unmap(key);
        self.uksmd.region_gone(key);
    }

    fn saved(&self) -> u64 {
        self.memory.merged_pages - self.memory.merged_frames + self.memory.zero_merged
    }

    fn level(&self, key: u32) -> usize {
        self.uksmd.regions.get(&key).map_or(0, |region| region.level)
    }

    /// Writes one page of a region after another with its own content.
    fn sweep(&mut self, key: u32, every_ns: u64, for_ns: u64) -> usize {
        let pages = self.memory.region(key).unwrap().len();
        let mut highest = 0;
        for number in 0..for_ns / every_ns {
            self.run(every_ns);
            let page = u32::try_from(number % u64::from(pages)).unwrap();
            let content = self.memory.region(key).unwrap().content[page as usize];
            self.memory.write(key, page, content);
            highest = highest.max(self.level(key));
        }
        highest
    }
}

#[test]
fn a_static_mix_is_merged_within_a_few_rounds() {
    // Section 8.1.1: 4 GiB of each; five seconds there, less than 1 % of a core on average afterwards.
    let mut rig = Rig::new(UksmSettings::default());
    let pages = 1 << 20;
    let same = rig.map(vec![7; 1 << 20]);
    let random = rig.random(pages);
    let mut highest = (0, 0);
    while rig.saved() < pages - 1 {
        rig.run(100 * MS);
        highest = (highest.0.max(rig.level(same)), highest.1.max(rig.level(random)));
        assert!(rig.now_ns < 8 * SECOND, "{} saved", rig.saved());
    }
    assert!(rig.now_ns > 3 * SECOND, "{} ns: climbing takes time", rig.now_ns);
    assert_eq!(highest, (4, 1), "the duplicate region reaches the top level, the random one stays at the bottom");
    let before_ns = rig.uksmd.cpu_ns;
    rig.run(100 * SECOND);
    let after_ns = rig.uksmd.cpu_ns - before_ns;
    assert_eq!(rig.level(same), 1, "all merged, the region returns to the bottom");
    assert!(after_ns <= share_ns(100 * SECOND, Permyriad(21)), "{after_ns} ns in 100 s");
}

#[test]
fn merging_takes_as_long_as_with_the_authors_patch() {
    // Measured in an emulated guest: seconds until 99 % is merged of 98,304 identical pages beside as many random
    // ones.
    for (governor, measured_s) in [(Governor::Full, 3.2), (Governor::Low, 7.5), (Governor::Quiet, 90.0)] {
        let mut rig = Rig::new(UksmSettings::of_governor(governor));
        rig.map(vec![7; 98_304]);
        rig.random(98_304);
        while rig.saved() * 100 < 98_304 * 99 {
            rig.run(100 * MS);
        }
        let found_s = rig.now_ns as f64 / SECOND as f64;
        assert!((measured_s / 1.7..measured_s * 1.7).contains(&found_s), "{governor}: {found_s} s");
    }
}

#[test]
fn pairs_are_found_only_if_pages_are_kept_across_rounds() {
    let saved = |renewal| {
        let mut rig = Rig::new(UksmSettings { renewal, ..UksmSettings::default() });
        for _ in 0..2 {
            rig.map((0..65_536).map(|page| content_of_series(1, page)).collect());
        }
        rig.run(100 * SECOND);
        rig.saved()
    };
    // The patch takes 505 to 530 s: it must visit a page twice to know its full hash, which we don't model.
    assert!(saved(Permyriad(2_500)) > 64_000);
    assert!(saved(Permyriad(0)) < 6_554, "a tenth");
}

#[test]
fn idling_costs_a_fifth_of_a_per_cent() {
    let mut rig = Rig::new(UksmSettings::default());
    rig.random(100_000);
    rig.run(100 * SECOND);
    // Section 1 and figure 9 (b): around 0.2 % of one core. A round's extra sleep takes up to a sixth off.
    let (low, high) = (share_ns(100 * SECOND, Permyriad(16)), share_ns(100 * SECOND, Permyriad(21)));
    assert!((low..high).contains(&rig.uksmd.cpu_ns), "{} ns in 100 s", rig.uksmd.cpu_ns);
    assert_eq!(rig.saved(), 0);
    let counts = rig.uksmd.counts();
    assert!(counts.searches > 10_000 && counts.found == 0 && counts.hashes > counts.searches);
}

#[test]
fn each_level_keeps_to_its_share() {
    let settings = UksmSettings::default();
    assert_eq!([1, 2, 3, 4].map(|level| settings.share(level).0), [20, 2_375, 4_750, 9_500]);
    let mut rig = Rig::new(settings);
    rig.map((0..400_000).map(|page| content_of_series(1, page % 100)).collect());
    let (mut cycle, mut seen) = ((rig.uksmd.state, 0), [0; 5]);
    for _ in 0..8_000 {
        let level = rig.uksmd.level_round.as_ref().map_or(0, |pass| pass.level);
        rig.run(MS);
        let (State::Asleep { until_ns: from_ns }, cpu_ns) = cycle else { unreachable!() };
        match rig.uksmd.state {
            State::Asleep { until_ns } if until_ns != from_ns => {
                // This covers the time from one wake-up to the next.
                let spent_ns = rig.uksmd.cpu_ns - cpu_ns;
                let level = level.max(rig.uksmd.level);
                let may_ns = share_ns(until_ns - from_ns, settings.share(level));
                assert!(level == 0 || spent_ns <= may_ns + 10_000, "level {level}: {spent_ns} of {may_ns}");
                cycle = (rig.uksmd.state, rig.uksmd.cpu_ns);
                seen[level] += 1;
            }
            _ => {}
        }
    }
    assert!(seen[1] > 20 && seen[2] > 0 && seen[3] > 0 && seen[4] > 0, "{seen:?}");
    for governor in [Governor::Full, Governor::Medium, Governor::Low, Governor::Quiet] {
        let settings = UksmSettings::of_governor(governor);
        let mut rig = Rig::new(settings);
        rig.map((0..100_000).map(|page| content_of_series(1, page % 10_000)).collect());
        for _ in 0..20 {
            let before_ns = rig.uksmd.cpu_ns;
            rig.run(10 * SECOND);
            let spent_ns = rig.uksmd.cpu_ns - before_ns;
            assert!(spent_ns <= share_ns(10 * SECOND, settings.top) + 2 * MS, "{governor}: {spent_ns} ns in 10 s");
        }
    }
}

#[test]
fn regions_broken_as_fast_as_merged_are_not_scanned() {
    // Section 8.1.2. The writer goes through the region in 0.2 s.
    let breaker = |cow| {
        let mut rig = Rig::new(UksmSettings { cow, ..UksmSettings::default() });
        let key = rig.map(vec![7; 20_000]);
        let highest = rig.sweep(key, 10_000, 20 * SECOND);
        (highest, rig.uksmd.cpu_ns)
    };
    let (highest, cpu_ns) = breaker(Some(Permyriad(5_000)));
    assert_eq!(highest, 1);
    assert!(cpu_ns <= share_ns(20 * SECOND, Permyriad(21)), "{cpu_ns} ns in 20 s");
    let (highest, more_ns) = breaker(None);
    assert!(highest > 1, "with the filter off it is scanned");
    assert!(more_ns > 4 * cpu_ns, "{more_ns} ns in 20 s, {cpu_ns} with it on");
}

#[test]
fn a_slow_writer_does_not_exclude_a_region() {
    // A page every 10 ms, as in the paper, in a region that takes 200 s to write.
    let mut rig = Rig::new(UksmSettings::default());
    let key = rig.map(vec![7; 20_000]);
    assert!(rig.sweep(key, 10 * MS, 10 * SECOND) > 1);
    assert!(rig.saved() > 18_000, "{} saved", rig.saved());
}

#[test]
fn regions_shorter_lived_than_a_cycle_are_not_sampled() {
    // Section 8.1.3: regions that live for less than two seconds aren't merged.
    let run = |settings: UksmSettings, life_ns: u64| {
        let mut rig = Rig::new(settings);
        rig.random(1_000);
        rig.run(SECOND);
        let mut most = 0;
        for _ in 0..5 {
            let key = rig.map(vec![7; 20_000]);
            rig.run(life_ns);
            most = most.max(rig.saved());
            rig.unmap(key);
            rig.run(life_ns);
        }
        most
    };
    for life_ms in [200, 500, 1_000, 2_000] {
        assert_eq!(run(UksmSettings::default(), life_ms * MS), 0, "lives of {life_ms} ms");
    }
    assert!(run(UksmSettings::default(), 8 * SECOND) > 19_000, "long lives are merged");
    let sensitive = UksmSettings {
        sleep_ns: 20 * MS,
        top: Permyriad(5_000),
        round_ns: 85 * MS,
        life_ns: 0,
        ..UksmSettings::default()
    };
    let most = run(sensitive, 2_000 * MS);
    assert!(most > 10_000, "{most} merged");
}

#[test]
fn zeros_and_forks() {
    let mut rig = Rig::new(UksmSettings::default());
    let zeros = rig.map(vec![0; 3_000]);
    rig.run(10 * SECOND);
    assert_eq!((rig.memory.zero_merged, rig.memory.merged_pages), (3_000, 0));
    let owner = OwnerKey(rig.memory.region(zeros).unwrap().owner);
    rig.memory.fork(owner);
    let random = rig.random(2_000);
    let owner = OwnerKey(rig.memory.region(random).unwrap().owner);
    rig.memory.fork(owner);
    rig.run(60 * SECOND);
    assert_eq!(rig.memory.merged_pages, 0, "pages that share a frame by fork have nothing to merge");
    let mut without = Rig::new(UksmSettings { zero_pages: false, ..UksmSettings::default() });
    without.map(vec![0; 3_000]);
    without.run(10 * SECOND);
    assert_eq!((without.saved(), without.memory.zero_merged), (2_999, 0));
}

#[test]
fn every_page_is_sampled_once_before_any_repeats() {
    let mut region = SampledRegion::new(1_000, 0, 3, 0);
    let mut turns = vec![0; 1_000];
    for round in 0..30 {
        for _ in 0..70 {
            let Some(page) = region.next_page() else { break };
            turns[page as usize] += 1;
        }
        let most = turns.iter().max().unwrap();
        let least = turns.iter().min().unwrap();
        assert!(most - least <= 1, "round {round}");
        region.end_round(0, &UksmSettings::default());
    }
    assert_eq!(turns.iter().sum::<i32>(), 2_000, "no page is sampled in the rest of a round");
    region.resize(10);
    assert_eq!((0..20).filter(|_| region.next_page().is_some()).count(), 10);
}

#[test]
fn regions_move_by_the_thresholds() {
    let settings = UksmSettings::default();
    let verdict = |sampled: u32, found: u32, broken| {
        let mut region = SampledRegion::new(1_000, 0, 3, 0);
        assert!((0..sampled).all(|_| region.next_page().is_some()));
        region.found = found.into();
        region.end_round(broken, &settings)
    };
    assert_eq!(verdict(0, 0, 0), LevelChange::Stay);
    assert_eq!(verdict(100, 9, 0), LevelChange::Down);
    assert_eq!(verdict(100, 10, 4), LevelChange::Up);
    assert_eq!(verdict(100, 10, 5), LevelChange::Down);
    assert_eq!(verdict(1_000, 1_000, 0), LevelChange::Bottom);
}

#[derive(Clone, Debug)]
enum Step {
    Map(u8, u64),
    Unmap(prop::sample::Index),
    Fork(prop::sample::Index),
    Write(prop::sample::Index, u32, u64),
    Drop(prop::sample::Index, u32, bool),
    Run(u64),
}

const PAGES: u32 = 40;

fn step() -> impl Strategy<Value = Step> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        3 => (0u8..4, 1..u64::from(PAGES)).prop_map(|(kind, pages)| Step::Map(kind, pages)),
        1 => at().prop_map(Step::Unmap),
        1 => at().prop_map(Step::Fork),
        6 => (at(), 0..PAGES, 0u64..4).prop_map(|(target, page, content)| Step::Write(target, page, content)),
        2 => (at(), 0..PAGES, any::<bool>()).prop_map(|(target, page, zero)| Step::Drop(target, page, zero)),
        8 => (0u64..4 * SECOND).prop_map(Step::Run),
    ]
}

/// All counters match the memory, and no page maps a free frame.
fn check_counters(rig: &Rig) {
    let mut mapped: BTreeMap<u32, u32> = BTreeMap::new();
    let mut zero_merged = 0;
    for (_, region) in rig.memory.live_regions() {
        for page in 0..region.len() {
            if let Some(frame) = region.merged_frame(page) {
                *mapped.entry(frame).or_default() += 1;
            }
            zero_merged += u64::from(region.backing[page as usize] == Backing::ZeroMerged);
        }
    }
    assert_eq!(rig.memory.zero_merged, zero_merged);
    assert_eq!(rig.memory.merged_pages, mapped.values().map(|&pages| u64::from(pages)).sum::<u64>());
    assert_eq!(rig.memory.merged_frames, mapped.len() as u64);
    for (&frame, &pages) in &mapped {
        assert_eq!(rig.memory.frames[frame as usize].mapped, pages);
    }
    let tree = rig.uksmd.search.merged();
    assert_eq!(rig.memory.known_frames(), tree.len() as u64, "a frame is in the tree or free");
    for (content, &frame) in tree {
        assert_eq!(rig.memory.frames[frame as usize].content, *content);
    }
    assert!(mapped.keys().all(|frame| tree.values().any(|known| known == frame)));
    if rig.memory.nodes.is_tracked() {
        assert_eq!(rig.memory.nodes.used().iter().sum::<u64>(), rig.memory.truth().frames);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn merging_changes_no_page_and_the_counters_match(
        steps in prop::collection::vec(step(), 1..60),
        (seed, by_round, zero_pages, nodes) in (any::<u64>(), any::<bool>(), any::<bool>(), 1usize..4),
    ) {
        let renewal = if by_round { Permyriad(0) } else { Permyriad(2_500) };
        let mut rig = Rig::new(UksmSettings { seed, renewal, zero_pages, ..UksmSettings::default() });
        rig.memory.nodes = Nodes::new(&vec![Pages(300); nodes]);
        let mut expected: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for step in steps {
            let keys: Vec<u32> = expected.keys().copied().collect();
            match step {
                Step::Map(kind, pages) => {
                    let contents: Vec<u64> = (0..pages).map(|page| match kind {
                        0 => 0,
                        1 => 5,
                        2 => page,
                        _ => content_of_series(rig.unique, page),
                    }).collect();
                    rig.unique += 1;
                    expected.insert(rig.map(contents.clone()), contents);
                }
                Step::Unmap(target) if !keys.is_empty() => {
                    expected.remove(target.get(&keys));
                    rig.unmap(*target.get(&keys));
                }
                Step::Fork(target) if (1..8).contains(&keys.len()) => {
                    let parent = rig.memory.region(*target.get(&keys)).unwrap().owner;
                    let child = rig.memory.fork(OwnerKey(parent));
                    for &key in &rig.memory.owners[child.0 as usize].regions {
                        expected.insert(key, rig.memory.region(key).unwrap().content.clone());
                    }
                }
                Step::Write(target, page, content) if !keys.is_empty() => {
                    let contents = expected.get_mut(target.get(&keys)).unwrap();
                    let page = page % u32::try_from(contents.len()).unwrap();
                    rig.memory.write(*target.get(&keys), page, content);
                    contents[page as usize] = content;
                }
                Step::Drop(target, page, zero) if !keys.is_empty() => {
                    let contents = expected.get_mut(target.get(&keys)).unwrap();
                    let page = page % u32::try_from(contents.len()).unwrap();
                    rig.memory.drop_page(*target.get(&keys), page, zero);
                    contents[page as usize] = 0;
                }
                Step::Run(ns) => rig.run(ns),
                Step::Unmap(_) | Step::Fork(_) | Step::Write(..) | Step::Drop(..) => {}
            }
            check_counters(&rig);
            for (key, contents) in &expected {
                prop_assert_eq!(&rig.memory.region(*key).unwrap().content, contents);
            }
        }
        // In such a small memory every round samples every page, so the scanner finds all persistent duplicates.
        rig.run(20 * SECOND);
        check_counters(&rig);
        let truth = rig.memory.truth();
        prop_assert_eq!(truth.savable, truth.zero_frames);
        prop_assert!(truth.zero_frames <= u64::from(!zero_pages));
    }
}

/// All observable results of a run.
fn fingerprint(seed: u64) -> String {
    let mut rig = Rig::new(UksmSettings { seed, ..UksmSettings::default() });
    let key = rig.map((0..3_000).map(|page| content_of_series(1, page % 500)).collect());
    rig.random(3_000);
    rig.sweep(key, 3 * MS, 10 * SECOND);
    format!("{} {} {} {:?}", rig.saved(), rig.uksmd.cpu_ns, rig.uksmd.scanned, rig.uksmd.counts())
}

#[test]
fn the_same_seed_gives_the_same_run() {
    assert_eq!(fingerprint(1), fingerprint(1));
    assert_ne!(fingerprint(1), fingerprint(2));
}

/// UKSM's figures after a minute with half a GiB of pairs, unique pages and rewritten ones, at any granularity.
fn figures(granularity: u32) -> [(&'static str, u64); 4] {
    let knobs = Knobs { granularity, ..Knobs::default() };
    let uksmd = Uksmd::new(&Costs::default(), Granularity::new(granularity), UksmSettings::default());
    let mut sim = SimHost::new(1, Costs::default(), knobs).with_scanner(uksmd);
    let part = |share: u64| Pages((1 << 17) / share / u64::from(granularity));
    let density = vec![Permyriad(8_000)];
    let replica = Replica { template: 1, density, zeros: Permyriad(200), run: 7, shift: 0 };
    let turnover = Behaviour::Turnover { every_ns: 600 * SECOND, writes: Writes::Unique };
    for _ in 0..4 {
        let copies = Mapping::new(part(16), Fill::Replica(replica.clone())).of_family(1);
        let pairs = Mapping::new(part(32), Fill::Series(2)).of_family(2);
        let own = Mapping::new(part(8), Fill::Random).of_family(3).behaving(turnover.clone());
        sim.add(Process::starting_at(0).mapping(copies).mapping(pairs).mapping(own));
    }
    let Ok(()) = sim.wait(60 * SECOND);
    let (ns, comparisons) = (sim.cost().ksmd_ns, sim.counts().comparisons());
    [("time", ns), ("comparisons", comparisons), ("scanned", sim.ksm().scanned), ("saved", sim.saved().0)]
}

#[test]
fn a_granularity_of_eight_gives_the_figures_of_single_pages() {
    // Measured maxima: 6.8 % (pages sampled); the time 1.9 %.
    for ((name, fine), (_, coarse)) in figures(1).into_iter().zip(figures(8)) {
        let error = coarse as f64 / (fine as f64).max(1.0) - 1.0;
        assert!(fine == coarse || error.abs() < 0.1, "{name}: {fine} and {coarse}, {error}");
    }
}
