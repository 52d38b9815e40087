//! Programs start, fork, rewrite their memory, give it back, and end, in any ordinary order. Soon after the last of
//! these events we must save nearly all that can be saved, show the right figure, and hold nothing without a reason.

mod common;

use common::{MIB, Machine, SECOND, config};
use pagefold_engine::config::Config;
use pagefold_engine::decision::{Reason, Verb};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Host;
use pagefold_engine::keys::{LimitKey, OwnerKey, RegionKey};
use pagefold_engine::random::Random;
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, Replica, SimHost, content_of_series};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const MS: u64 = 1_000_000;
/// The last event comes before this time, milliseconds.
const EVENTS_MS: u64 = 90_000;
/// How long a new process may be there before we find it, nanoseconds.
const UNSEEN_NS: u64 = 4_000_000_000;

/// What programs of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// The same pages, as far as the shorter one's memory goes.
    Equal,
    /// Half of their pages, in short runs.
    Half,
    /// The same pages, and a mapping of zeros beside them.
    ZerosBeside,
    /// All their pages have one content.
    Same,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Start,
    Exit,
    Fork,
    /// Writes all its memory: `Load` with its group's contents, `Diverge` with its own, `Touch` with the old ones.
    Load,
    Diverge,
    Touch,
    /// Gives half of its memory back, and a second later writes the same there again.
    Discard,
    Return,
}

#[derive(Clone, Debug)]
struct Program {
    group: u64,
    memory: Memory,
    mib: u64,
    is_huge: bool,
    /// Its events, with their times in milliseconds. A `Start` after an `Exit` starts its successor.
    events: Vec<(u64, Event)>,
}

impl Program {
    fn happens(&self, among: &[Event]) -> bool {
        self.events.iter().any(|(_, event)| among.contains(event))
    }

    fn rewrites(&self) -> bool {
        self.happens(&[Event::Load, Event::Diverge, Event::Touch, Event::Discard])
    }
}

#[derive(Clone, Debug)]
struct History {
    on_request: bool,
    governor: Governor,
    /// Whether one cgroup has all programs, and a limit that's far away.
    is_limited: bool,
    programs: Vec<Program>,
}

impl History {
    fn random(seed: u64) -> Self {
        let mut random = Random::for_purpose(seed, 0x000a_441a_7a15);
        let on_request = random.below(3) == 0;
        let governor = *random.pick(&[Governor::Full, Governor::Full, Governor::Medium, Governor::Auto]);
        let mut history = Self { on_request, governor, is_limited: random.below(4) == 0, programs: Vec::new() };
        let count = 2 + random.below(5);
        for group in 1..=count.div_ceil(3) {
            let memory = *random.pick(&[Memory::Equal, Memory::Equal, Memory::Half, Memory::ZerosBeside, Memory::Same]);
            let mib = *random.pick(&[2, 8, 16, 32, 64]);
            // Merging splits huge pages, which only pays if most of their pages are duplicates.
            let is_huge = memory != Memory::Half && random.below(8) == 0;
            for _ in 0..3.min(count - 3 * (group - 1)) {
                // Programs with half of their pages in common are equally large: we don't mark much sparser memory.
                let may_differ = memory != Memory::Half && !is_huge && governor != Governor::Auto;
                let mib = if may_differ && random.below(4) == 0 { (2 * mib).min(64) } else { mib };
                // We don't wake ksmd for fewer than 1,024 rewritten pages.
                let events = events(&mut random, mib >= 16 && !is_huge);
                history.programs.push(Program { group, memory, mib, is_huge, events });
            }
        }
        history
    }
}

fn events(random: &mut Random, may_rewrite: bool) -> Vec<(u64, Event)> {
    let start = if random.below(3) == 0 { 0 } else { random.below(60_000) };
    let mut events = vec![(start, Event::Start)];
    if random.below(4) == 0 {
        // A template forks soon after its start.
        for _ in 0..=random.below(4) {
            events.push((start + random.below(5_000), Event::Fork));
        }
    } else if random.below(6) == 0 {
        events.push((later(random, start), Event::Fork));
    }
    if may_rewrite && random.below(3) == 0 {
        let event = *random.pick(&[Event::Load, Event::Diverge, Event::Touch, Event::Discard]);
        let at = later(random, start);
        events.push((at, event));
        if event == Event::Discard {
            events.push((at + 1_000, Event::Return));
        }
    }
    if random.below(4) == 0 {
        let at = later(random, start);
        events.push((at, Event::Exit));
        if random.below(4) > 0 {
            events.push((later(random, at), Event::Start));
        }
    }
    events.sort_by_key(|&(at, _)| at);
    events
}

/// A time after this one, milliseconds.
fn later(random: &mut Random, from: u64) -> u64 {
    from + 1 + random.below(EVENTS_MS.saturating_sub(from).clamp(1, 40_000))
}

/// Two machines with the same history. The engine runs on one of them.
struct Twins {
    merged: Machine,
    plain: SimHost,
    history: History,
    /// The processes of each program.
    owners: BTreeMap<usize, Vec<OwnerKey>>,
    /// The number of writes so far.
    writes: u64,
    /// The contents that were discarded.
    discarded: BTreeMap<(RegionKey, Vpn), u64>,
    /// Processes that the engine hasn't been told of yet, by the time when it will be, nanoseconds.
    unseen: BTreeMap<u64, OwnerKey>,
    random: Random,
}

impl Twins {
    fn new(seed: u64, history: &History) -> Self {
        let knobs = if history.on_request { Knobs::requested() } else { Knobs::driven() };
        let host = || SimHost::new(seed, Costs::default(), knobs);
        let merged = Machine::with(host(), Config { seed, governor: history.governor, ..config() });
        Self {
            merged,
            plain: host(),
            history: history.clone(),
            owners: BTreeMap::new(),
            writes: 0,
            discarded: BTreeMap::new(),
            unseen: BTreeMap::new(),
            random: Random::for_purpose(seed, 0x05ee_21a7e),
        }
    }

    fn change<T>(&mut self, mut change: impl FnMut(&mut SimHost) -> T) -> T {
        change(&mut self.plain);
        change(&mut self.merged)
    }

    fn run_until(&mut self, at_ns: u64) {
        while let Some(next) = self.unseen.first_entry().filter(|next| *next.key() <= at_ns) {
            let (seen_ns, owner) = next.remove_entry();
            self.merged.run_until(seen_ns, |_| {});
            self.merged.host.set_out_of_scope(owner, false);
        }
        self.merged.run_until(at_ns, |_| {});
        let Ok(()) = self.plain.wait(self.merged.now_ns() - self.plain.now_ns());
    }

    /// As on a real host, it takes some time until we find a new process.
    fn hide(&mut self, owner: OwnerKey) {
        if self.merged.now_ns() > 0 {
            self.merged.host.set_out_of_scope(owner, true);
            let seen_ns = self.merged.now_ns() + 1 + self.random.below(UNSEEN_NS);
            self.unseen.insert(seen_ns, owner);
        }
    }

    fn happen(&mut self, number: usize, event: Event) {
        let program = self.history.programs[number].clone();
        let owners = self.owners.get(&number).cloned().unwrap_or_default();
        self.writes += 1;
        let own = self.writes << 32;
        match (event, owners.first()) {
            (Event::Start, _) => {
                let owner = self.change(|host| host.add(process(&program, host.now_ns())));
                self.hide(owner);
                self.owners.insert(number, vec![owner]);
            }
            (Event::Exit, _) => {
                for owner in owners {
                    self.change(|host| host.exit(owner));
                }
                self.owners.remove(&number);
            }
            (_, None) => {}
            (Event::Fork, Some(&parent)) => {
                let child = self.change(|host| host.fork(parent));
                self.hide(child);
                self.owners.entry(number).or_default().push(child);
            }
            (Event::Load, Some(&owner)) => self.write(owner, |page, _| content_of_series(100 + program.group, page)),
            (Event::Diverge, Some(&owner)) => self.write(owner, |page, old| content_of_series(own | old >> 32, page)),
            (Event::Touch, Some(&owner)) => self.write(owner, |_, old| old),
            (Event::Discard, Some(&owner)) => self.discard(owner),
            (Event::Return, Some(_)) => {
                for ((region, page), content) in std::mem::take(&mut self.discarded) {
                    self.change(|host| host.write(region, page, content));
                }
            }
        }
        if self.history.is_limited {
            let all: Vec<OwnerKey> = self.owners.values().flatten().copied().collect();
            let pages = Pages(self.plain.truth().frames * 4);
            self.change(|host| host.limit(LimitKey(1), pages, &all));
        }
    }

    /// Writes to each page of a process, by its number and its old content.
    fn write(&mut self, owner: OwnerKey, content: impl Fn(u64, u64) -> u64) {
        self.change(|host| {
            for (region, first, pages) in mappings(host, owner) {
                for page in 0..pages {
                    let (old, _) = host.page(region, first + page).unwrap();
                    host.write(region, first + page, content(page, old));
                }
            }
        });
    }

    fn discard(&mut self, owner: OwnerKey) {
        for (region, first, pages) in mappings(&self.plain, owner) {
            for page in 0..pages / 2 {
                let (old, _) = self.plain.page(region, first + page).unwrap();
                self.discarded.insert((region, first + page), old);
                self.change(|host| host.discard(region, first + page));
            }
        }
    }

    /// How many pages could be saved among the programs that never rewrite anything. We may leave the memory of the
    /// others alone for a while: merges that last for less than 45 s don't pay.
    fn savable(&self) -> u64 {
        let mut frames = 0;
        let mut contents = BTreeSet::new();
        for (&number, owners) in &self.owners {
            if self.history.programs[number].rewrites() {
                continue;
            }
            // Children share all frames with their parent.
            for (region, first, pages) in mappings(&self.plain, owners[0]) {
                frames += pages;
                contents.extend((0..pages).map(|page| self.plain.page(region, first + page).unwrap().0));
            }
        }
        contents.remove(&0);
        frames - contents.len() as u64
    }

    /// Whether we can tell which frames relatives would share without merging. We can't if they rewrite what they
    /// share, or share pages that are merged with other pages of their own. The engine's `saving.rs` explains why.
    fn is_countable(&self) -> bool {
        let is_plain = |program: &Program| {
            !program.rewrites()
                && matches!(program.memory, Memory::Equal | Memory::Half | Memory::ZerosBeside)
                && !program.is_huge
        };
        self.history.programs.iter().all(|program| !program.happens(&[Event::Fork]) || is_plain(program))
    }
}

/// The mappings of a process: their keys, first pages and lengths.
fn mappings(host: &SimHost, owner: OwnerKey) -> Vec<(RegionKey, Vpn, u64)> {
    let mut mappings = Vec::new();
    for region in host.regions_of(owner) {
        let span = host.span_of(region).unwrap();
        mappings.push((region, span.first, span.pages.0));
    }
    mappings
}

fn process(program: &Program, now_ns: u64) -> Process {
    let pages = Pages(program.mib * MIB);
    let series = program.group;
    let fill = match program.memory {
        Memory::Equal | Memory::ZerosBeside => Fill::Series(series),
        Memory::Same => Fill::Same(series),
        Memory::Half => Fill::Replica(Replica {
            template: series,
            density: vec![Permyriad(5_000)],
            zeros: Permyriad(0),
            run: 7,
            shift: 0,
        }),
    };
    let mut mappings = vec![Mapping::new(pages, fill)];
    if program.memory == Memory::ZerosBeside {
        mappings.push(Mapping::new(pages, Fill::Zeros));
    }
    let mut process = Process::starting_at(now_ns);
    for mapping in mappings {
        process = process.mapping(if program.is_huge { mapping.huge() } else { mapping });
    }
    process
}

/// Lives through a history. Returns what's wrong in the end, nothing if all is well.
fn complaints(seed: u64, history: &History) -> Vec<String> {
    let mut twins = Twins::new(seed, history);
    let mut events: Vec<(u64, usize, Event)> = Vec::new();
    for (number, program) in history.programs.iter().enumerate() {
        events.extend(program.events.iter().map(|&(at, event)| (at, number, event)));
    }
    events.sort_by_key(|&(at, number, _)| (at, number));
    for (at_ms, number, event) in events {
        twins.run_until(at_ms * MS);
        twins.happen(number, event);
    }
    let rest_s = match history.governor {
        Governor::Full => 180,
        Governor::Medium => 300,
        _ => 600,
    };
    twins.run_until(twins.merged.now_ns() + rest_s * SECOND);
    let mut wrong = Vec::new();
    let truth = twins.plain.truth().frames - twins.merged.truth().frames;
    let savable = twins.savable();
    if truth * 100 < savable * 90 {
        wrong.push(format!("saved {truth} of {savable} pages"));
    }
    let engine = &twins.merged.engine;
    let shown = engine.saving().map_or(0, |saving| saving.saved.0);
    // We look up one page in a few if there are many.
    let sampled = engine.saving().map_or(1, |saving| saving.one_in).min(4) - 1;
    let most = truth * (2 + sampled) / 100 + 512 * sampled + 8;
    if twins.is_countable() && shown.abs_diff(truth) > most {
        wrong.push(format!("shows {shown} of {truth} pages"));
    }
    for change in engine.decisions().iter() {
        let is_held = matches!(change.to.reason, Reason::Unmerged | Reason::TakenBack | Reason::Relieved);
        if is_held {
            wrong.push(format!("{:?} was held: {:?}", change.owner, change.to));
        }
    }
    let rewrites = history.programs.iter().any(Program::rewrites);
    for region in engine.regions() {
        let decision = region.decision;
        let is_written = matches!(decision.reason, Reason::CowBroken(_) | Reason::Volatile);
        let is_busy = matches!(decision.verb, Verb::Wait | Verb::Read | Verb::Mark | Verb::Merge);
        if is_written && !rewrites || is_busy && !is_written {
            wrong.push(format!("{:?} isn't done: {decision:?}", region.view.owner));
        }
    }
    for (region, times) in &twins.merged.log.marked {
        if *times > 3 {
            wrong.push(format!("{region:?} was marked {times} times"));
        }
    }
    wrong
}

fn check(seeds: Range<u64>) {
    let mut failed = Vec::new();
    for seed in seeds {
        let history = History::random(seed);
        let wrong = complaints(seed, &history);
        if !wrong.is_empty() {
            println!("{seed}: {wrong:?}, {history:?}");
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn whatever_comes_first_is_merged_in_the_end() {
    check(0..24);
}

#[test]
#[ignore = "takes some minutes"]
fn whatever_comes_first_is_merged_in_the_end_by_many_seeds() {
    check(24..2_000);
}
