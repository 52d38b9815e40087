//! Counts how much merging saves the processes in scope, by frames.
//!
//! KSM's own counters don't show that. They cover the whole machine, they still count unmapped and written pages until
//! ksmd's next scan, and they count each child of a fork. So once in a while we look up which merged frames our
//! processes map now. A page that maps a frame with `n` mappers holds `1/n` of it (as Pss counts). If nothing had been
//! merged, the `f` processes forked from each other that map it at the same address would hold `u` frames: one for each
//! that had a frame of its own when we read it, and one for the others, who share it through fork.
//!
//! ```text
//! saved            = sum over pages of u/f - 1/n
//! returns at worst = sum over pages of 1   - 1/n
//! ```
//!
//! If a relative that we don't merge keeps the fork-shared frame, merging the others doesn't free it, and `u` only
//! counts the relatives' own frames. If KSM kept that very frame as the merged one, the figure is too low. (With ksmd
//! we only mark such pages along with others.)
//!
//! Once pages are merged, we can't tell how relatives came to share a frame. If relatives wrote the same contents after
//! the fork, and ksmd merged these pages before we read them, we take them for sharers by fork.
//!
//! For a process's merged zeros we take ksmd's count, or the number of pages that held zeros when we read them and map
//! the zero page now, whichever is more.
//!
//! Up to [`PAGES_MOST`] present pages, we look up every page that may be merged. With more, we look up runs of pages at
//! regular distances, at the same addresses in every process, so that we compare relatives. In memory that's nearly
//! empty, the runs are longer instead of rarer: one page that stands for thousands would spoil everybody's figure.

use crate::host::{ChangeResult, Counted, Marking, MergedSample, PageRun, PageState};
use crate::keys::{LineageKey, OwnerKey};
use crate::region::Region;
use crate::region::table::RegionTable;
use crate::units::{Pages, Vpn, count, whole};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// We look up at most this many present pages in one count.
pub const PAGES_MOST: u64 = 1 << 14;
/// Looking up addresses without pages costs little. We look up this many addresses at most.
const ADDRESSES_MOST: u64 = 16 * PAGES_MOST;
/// In nearly empty memory, we count at most this many addresses for each present page. Longer holes cost next to
/// nothing, as the kernel skips them.
const ADDRESSES_PER_PAGE: u64 = 64;
/// The length of the runs that we look up if there are more pages.
const RUN_PAGES: u64 = 16;
/// We assume that looking up a page costs this much, nanoseconds, and this much more if the page is merged.
const PAGE_NS: u64 = 60;
const MERGED_NS: u64 = 900;
/// We assume that asking for a process's merged zeros costs this much, nanoseconds.
const PROCESS_NS: u64 = 5_000;
/// Counting may take one part in this many of a core, and a quarter of that while nothing changes.
const SHARE: u64 = 2_000;
/// If KSM's figure has grown by more than a quarter plus this many pages since the last count, we don't know the
/// saving.
const LITTLE_MERGED: u64 = 2_048;
/// A frame with this many mappers has one of the few contents that are all over the place. KSM's default
/// `max_page_sharing` is higher.
const MANY_MAPPERS: u32 = 128;
/// The shortest and the longest time between two counts, nanoseconds.
const PAUSE_NS: u64 = 250_000_000;
const PAUSE_MOST_NS: u64 = 60_000_000_000;
/// While we're reading, we pause at least this long, nanoseconds.
const READING_PAUSE_NS: u64 = 10_000_000_000;
/// We count early once more than `ENDED_MIN` pages and more than one part in `ENDED_PART` of the saving have ended:
/// counting may then take `EARLY_SHARES` times its share. If we can't tell whether so much has ended, we don't know the
/// saving until then. We also count early after merging, if KSM's figure has changed by so much.
const ENDED_MIN: f64 = 16.0;
const ENDED_PART: f64 = 100.0;
const EARLY_SHARES: u64 = 8;
/// If fewer than this many sharers of a frame were left when we counted, all may have ended since.
const FEW_SHARERS: u32 = 8;

/// How much merging saves now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saving {
    /// How many more frames the processes would hold if nothing had been merged.
    pub saved: Pages,
    /// The merged pages of the processes.
    pub merged: Pages,
    /// The frames that the processes would need if programs wrote every page that shares a merged frame.
    pub returns_at_worst: Pages,
    pub counted_ns: u64,
    /// KSM's own figure for the whole machine at that time.
    pub machine: Pages,
    /// We looked up one page in this many.
    pub one_in: u64,
    pub parts: FxHashMap<OwnerKey, Part>,
}

/// A process's part of the saving, pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    saved: f64,
    /// Merged zeros, which aren't resident.
    zeros: f64,
    /// How much less is saved once the process has ended: of two processes with equal pages, each has half of the
    /// saving, but all of it ends with either process.
    loss: f64,
    /// The part of the loss on pages with fewer sharers than [`FEW_SHARERS`].
    doubtful: f64,
}

impl Part {
    fn add(&mut self, saved: f64, loss: f64, is_doubtful: bool) {
        self.saved += saved;
        self.loss += loss;
        if is_doubtful {
            self.doubtful += loss;
        }
    }
}

impl Saving {
    pub fn of(&self, owner: OwnerKey) -> Pages {
        Pages(whole(self.part(owner).saved.round()))
    }

    pub fn zeros_of(&self, owner: OwnerKey) -> Pages {
        Pages(whole(self.part(owner).zeros.round()))
    }

    fn part(&self, owner: OwnerKey) -> Part {
        self.parts.get(&owner).copied().unwrap_or_default()
    }

    /// Takes out the saving that ends with a process that has ended or left the scope. The parts of processes that
    /// shared its frames are only right again at the next count.
    fn forget(&mut self, owner: OwnerKey) -> Option<Part> {
        let part = self.parts.remove(&owner)?;
        let left = (1.0 - part.loss / (self.saved.0 as f64).max(part.loss).max(1.0)).max(0.0);
        for pages in [&mut self.saved, &mut self.merged, &mut self.returns_at_worst] {
            *pages = Pages(whole(pages.0 as f64 * left));
        }
        Some(part)
    }
}

/// What has ended since the last count.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    /// How many pages' saving has ended as far as we know, and by how many that may be wrong.
    pages: f64,
    doubtful: f64,
    /// How many processes have ended or left the scope.
    processes: u32,
}

/// What we're doing besides counting.
#[derive(Clone, Copy, Debug)]
pub struct Activity {
    /// Whether we're reading, marking, merging or moving.
    pub busy: bool,
    /// Whether we're reading regions whole.
    pub reading: bool,
}

/// Counts the saving now and then.
#[derive(Debug, Default)]
pub struct SavingCounter {
    latest: Option<Saving>,
    /// When we last counted or tried to, and how long to pause after that, nanoseconds.
    tried_ns: Option<u64>,
    pause_ns: u64,
    /// Whether we were merging at the last plan, and whether merging has ended since the last count.
    was_busy: bool,
    has_settled: bool,
    /// Whether memory has been written, mapped or unmapped since the last count, as far as we know.
    has_changed: bool,
    ended: Ended,
    /// How many pages this cycle's plan looks up, if it counts the saving.
    asking: Option<u64>,
    one_in: u64,
    /// The number of counts so far. Each begins at another page.
    counts: u64,
    /// KSM's counter when the run began, if the host can't look up frames.
    machine_before: Option<Pages>,
}

impl SavingCounter {
    /// The latest count, `None` before the first one.
    pub fn latest(&self) -> Option<&Saving> {
        self.latest.as_ref()
    }

    /// The latest count. `None` if KSM has merged much since, so that we'd show too little, or if we can't tell how
    /// many merges have ended, so that we'd show too much. `machine` is KSM's figure now.
    pub fn known(&self, machine: Pages) -> Option<&Saving> {
        let saving = self.latest()?;
        let has_merged = machine.0 > saving.machine.0 + saving.machine.0 / 4 + LITTLE_MERGED;
        if has_merged || self.is_much(self.ended.doubtful) {
            return None;
        }
        Some(saving)
    }

    fn is_much(&self, pages: f64) -> bool {
        let saved = self.latest().map_or(Pages(0), |saving| saving.saved);
        pages > ENDED_MIN.max(saved.0 as f64 / ENDED_PART)
    }

    /// Removes processes that have ended or left the scope from the latest count.
    pub fn forget(&mut self, owners: &FxHashSet<OwnerKey>) {
        if let Some(saving) = &mut self.latest {
            for &owner in owners {
                let Some(part) = saving.forget(owner) else { continue };
                self.ended.processes += 1;
                self.ended.pages += part.loss;
                // The first one's loss is certain. The others' partners may have gone before them.
                if self.ended.processes >= FEW_SHARERS {
                    self.ended.doubtful += part.loss;
                } else if self.ended.processes > 1 {
                    self.ended.doubtful += part.doubtful;
                }
            }
        }
    }

    /// Notes memory that was unmarked, and may have been merged.
    pub fn note_unmarked(&mut self, table: &RegionTable, results: &[ChangeResult]) {
        for result in results {
            let Marking::Done(pages) = result.marking else { continue };
            let span = result.change.span;
            let merged = table.at(span.region, span.first).map_or(pages, Region::merged_at_most);
            self.ended.doubtful += pages.min(merged).0 as f64;
        }
    }

    /// Whether this cycle's plan counts the saving.
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Adopts KSM's counter if the host can't look up frames. Our part of it is the increase since the first call.
    pub fn adopt_counter(&mut self, machine: Pages, now_ns: u64) {
        let before = *self.machine_before.get_or_insert(machine);
        let saved = machine.saturating_sub(before);
        let returns_at_worst = machine;
        self.adopt(Saving { saved, returns_at_worst, counted_ns: now_ns, machine, one_in: 1, ..Saving::default() });
    }

    /// Nothing on the whole machine is merged.
    pub fn adopt_none(&mut self, now_ns: u64) {
        self.adopt(Saving { counted_ns: now_ns, one_in: 1, ..Saving::default() });
    }

    fn adopt(&mut self, saving: Saving) {
        self.latest = Some(saving);
        self.ended = Ended::default();
    }

    /// Makes the next plan count the saving, whatever else goes on.
    pub fn count_now(&mut self) {
        self.tried_ns = None;
    }

    /// Memory was written, mapped or unmapped, so the saving may differ.
    pub fn note_change(&mut self) {
        self.has_changed = true;
    }

    /// The pages to look up for the next count; none if it isn't due yet. Counts follow quickly once we're done
    /// merging, or once merges have ended. They're rarer while nothing changes.
    pub fn plan(&mut self, table: &RegionTable, now_ns: u64, activity: Activity, machine: Pages) -> Vec<PageRun> {
        self.asking = None;
        self.has_settled |= self.was_busy && !activity.busy;
        self.was_busy = activity.busy;
        let pause_ns = self.pause_ns(activity, machine);
        if self.tried_ns.is_some_and(|tried_ns| now_ns < tried_ns + pause_ns) {
            return Vec::new();
        }
        self.tried_ns = Some(now_ns);
        self.has_settled = false;
        self.has_changed = false;
        let mut present = 0;
        let mut addresses = 0;
        let mut lengths: FxHashMap<(LineageKey, Vpn), u64> = FxHashMap::default();
        for region in table.iter() {
            let pages: u64 = region.mergeable_runs().iter().map(|(_, pages)| pages.0).sum();
            present += pages.min(region.resident().0);
            let counted = pages.min(region.resident().0.max(1) * ADDRESSES_PER_PAGE);
            addresses += counted;
            if counted < pages {
                let length = RUN_PAGES * (pages / counted).next_power_of_two();
                let longest = lengths.entry((region.view.lineage, region.view.first)).or_default();
                *longest = length.max(*longest);
            }
        }
        self.one_in = present.div_ceil(PAGES_MOST).max(addresses.div_ceil(ADDRESSES_MOST)).max(1);
        self.counts += 1;
        let mut runs = Vec::new();
        let mut asked = 0;
        for region in table.iter() {
            let run_pages = lengths.get(&(region.view.lineage, region.view.first)).copied().unwrap_or(RUN_PAGES);
            for (first, pages) in region.mergeable_runs() {
                let end = first + pages.0;
                let mut at = first;
                while let Some((start, length)) = self.next_run(at, end, run_pages) {
                    asked += length / (run_pages / RUN_PAGES);
                    runs.push(region.run(start, Pages(length)));
                    at = start + length;
                }
            }
        }
        self.asking = Some(asked);
        runs
    }

    /// How long to pause after the last count. A count takes some milliseconds, so while we're reading we pause for at
    /// least [`READING_PAUSE_NS`].
    fn pause_ns(&self, activity: Activity, machine: Pages) -> u64 {
        let counted = self.latest().map_or(Pages(0), |saving| saving.machine);
        let has_merged = self.has_settled && self.is_much(machine.0.abs_diff(counted.0) as f64);
        let early_ns = (self.pause_ns / EARLY_SHARES).max(PAUSE_NS);
        if self.is_much(self.ended.pages + self.ended.doubtful) || has_merged && !activity.reading {
            return early_ns;
        }
        let is_quiet = !activity.busy && !self.has_settled && !self.has_changed;
        let pause_ns = if is_quiet { (4 * self.pause_ns).min(PAUSE_MOST_NS) } else { self.pause_ns };
        if activity.reading { pause_ns.max(READING_PAUSE_NS) } else { pause_ns }
    }

    /// The next pages to look up in a range, in runs of `length`. The choice only depends on `length` and the
    /// addresses, so it's the same in relatives.
    fn next_run(&self, from: Vpn, end: Vpn, length: u64) -> Option<(Vpn, u64)> {
        if from >= end {
            return None;
        }
        if self.one_in == 1 {
            return Some((from, (end.0 - from.0).min(u64::from(u32::MAX))));
        }
        let number = from.0 / length;
        let wait = (self.counts % self.one_in + self.one_in - number % self.one_in) % self.one_in;
        let start = from.0.max((number + wait) * length);
        let stop = ((number + wait + 1) * length).min(end.0);
        if start >= stop {
            return None;
        }
        Some((Vpn(start), stop - start))
    }

    /// Records the pages we looked up. `counted` is `None` if the host couldn't count. `machine` is KSM's own figure.
    pub fn record(
        &mut self,
        table: &RegionTable,
        merged: &[MergedSample],
        counted: Option<&Counted>,
        machine: Pages,
        now_ns: u64,
    ) {
        let Some(asked) = self.asking.take() else { return };
        let zeros = counted.map_or(0, |counted| counted.zeros.len());
        let others = counted.map_or(0, |counted| counted.others.len());
        let merged_ns = count(merged.len() + others) * MERGED_NS;
        let cost_ns = asked * PAGE_NS + merged_ns + count(zeros) * PROCESS_NS;
        self.pause_ns = (cost_ns * SHARE).clamp(PAUSE_NS, PAUSE_MOST_NS);
        let Some(counted) = counted else { return };
        let mut sum = Sum { weight: self.one_in as f64, ..Sum::default() };
        sum.count_frames(table, merged, counted);
        sum.count_zeros(table, counted);
        self.adopt(Saving {
            saved: Pages(whole(sum.saved.round())),
            merged: Pages(whole(sum.merged)),
            returns_at_worst: Pages(whole(sum.returns.round())),
            counted_ns: now_ns,
            machine,
            one_in: self.one_in,
            parts: sum.parts,
        });
    }
}

/// A count of the saving, pages.
#[derive(Debug, Default)]
struct Sum {
    /// How many pages each looked-up page stands for.
    weight: f64,
    saved: f64,
    merged: f64,
    returns: f64,
    parts: FxHashMap<OwnerKey, Part>,
}

impl Sum {
    /// Adds the merged pages that aren't zeros.
    fn count_frames(&mut self, table: &RegionTable, merged: &[MergedSample], counted: &Counted) {
        let mut families: FxHashMap<(LineageKey, Vpn, u64), Relatives> = FxHashMap::default();
        let mut last = None;
        for sample in merged {
            last = table.near(last, sample.region, sample.page);
            let Some(region) = last else { continue };
            families.entry((region.view.lineage, sample.page, copy_of(sample))).or_default().add(region, sample.page);
        }
        note_sharers(table, counted, &mut families);
        for sample in merged {
            last = table.near(last, sample.region, sample.page);
            let Some(region) = last else { continue };
            let family = families[&(region.view.lineage, sample.page, copy_of(sample))];
            // More pages may map the frame than when the host counted its mappers.
            let held = 1.0 / f64::from(sample.mappers).max(family.all);
            let saved = self.weight * (family.unmerged_frames() / family.all - held);
            self.saved += saved;
            self.returns += self.weight * (1.0 - held);
            self.merged += if sample.mappers > 1 { self.weight } else { 0.0 };
            let is_lost = if family.all > 1.0 { region.usage.own.contains(sample.page) } else { sample.mappers > 1 };
            let loss = if is_lost { self.weight } else { 0.0 };
            let part = self.parts.entry(region.view.owner).or_default();
            part.add(saved, loss, sample.mappers < FEW_SHARERS);
        }
    }

    /// Adds the merged zeros.
    fn count_zeros(&mut self, table: &RegionTable, counted: &Counted) {
        let zeros = zeros_of(table, counted, self.weight);
        let mut families: FxHashMap<LineageKey, Zeros> = FxHashMap::default();
        for zeros in zeros.values() {
            let family = families.entry(zeros.lineage).or_default();
            family.split += zeros.split;
            // Relatives share the zeros that their parent had, so we count the largest number only.
            family.merged = family.merged.max(zeros.merged);
            family.sum += zeros.most();
        }
        for (owner, zeros) in zeros {
            let family = &families[&zeros.lineage];
            let saved = zeros.most() * family.most() / family.sum.max(1.0);
            self.saved += saved;
            self.returns += zeros.most();
            self.merged += zeros.most();
            let part = self.parts.entry(owner).or_default();
            part.add(saved, saved, family.sum > zeros.most());
            part.zeros = zeros.most();
        }
    }
}

/// The relatives that map a merged frame at the same address.
#[derive(Clone, Copy, Debug)]
struct Relatives {
    all: f64,
    /// How many of the relatives had a frame of their own.
    own: f64,
    /// When we first saw the oldest relative with a frame of its own, and the oldest other one, nanoseconds.
    oldest_own_ns: u64,
    oldest_other_ns: u64,
    /// Whether somebody else still maps the frame that they shared through fork, as far as we know.
    is_frame_kept: bool,
}

impl Default for Relatives {
    fn default() -> Self {
        Self { all: 0.0, own: 0.0, oldest_own_ns: u64::MAX, oldest_other_ns: u64::MAX, is_frame_kept: false }
    }
}

impl Relatives {
    fn add(&mut self, region: &Region, page: Vpn) {
        self.all += 1.0;
        self.is_frame_kept |= region.usage.outside.contains(page) && !looks_merged_with_others(region);
        if region.usage.own.contains(page) {
            self.own += 1.0;
            self.oldest_own_ns = self.oldest_own_ns.min(region.seen_ns);
        } else {
            self.oldest_other_ns = self.oldest_other_ns.min(region.seen_ns);
        }
    }

    /// How many more frames the relatives would hold if nothing were merged. A relative younger than a frame's owner
    /// may have been forked from that owner since, and would share the frame.
    fn unmerged_frames(&self) -> f64 {
        let is_another_shared = self.oldest_other_ns <= self.oldest_own_ns && !self.is_frame_kept;
        self.own + f64::from(u8::from(is_another_shared))
    }
}

/// Whether an earlier run merged pages of a region with those of processes outside its family. If not, they share these
/// pages through fork. Where the kernel doesn't show which pages are merged, it still shows how many.
fn looks_merged_with_others(region: &Region) -> bool {
    let merged = region.view.merged_somewhere;
    merged > Pages(0) && 2 * merged.0 >= region.usage.outside.len().0
}

/// Identifies the content of a merged page, by its frame's number. KSM keeps several frames of a content that more than
/// `max_page_sharing` pages have (`stable_node_dup`), so we take all frames with many mappers for one content.
fn copy_of(sample: &MergedSample) -> u64 {
    if sample.mappers < MANY_MAPPERS { sample.frame } else { u64::MAX }
}

/// Notes which frames some relatives still share through fork: a relative's page is `Shared`, or the relative isn't
/// marked there, has no frame of its own, and samples don't show that it holds other contents.
fn note_sharers(table: &RegionTable, counted: &Counted, families: &mut FxHashMap<(LineageKey, Vpn, u64), Relatives>) {
    let mut shared: FxHashSet<(LineageKey, Vpn)> = FxHashSet::default();
    let mut last = None;
    for sample in counted.others.iter().filter(|sample| sample.state == PageState::Shared) {
        last = table.near(last, sample.region, sample.page);
        shared.extend(last.map(|region| (region.view.lineage, sample.page)));
    }
    let mut pages: Vec<_> = families.keys().copied().collect();
    pages.sort_unstable();
    for region in table.iter().filter(|region| region.relatives.is_some()) {
        if region.is_marked_whole() || region.is_named() || region.survey.is_mostly_unique() {
            continue;
        }
        let lineage = region.view.lineage;
        let from = pages.partition_point(|&(other, page, _)| (other, page) < (lineage, region.view.first));
        let to = pages.partition_point(|&(other, page, _)| (other, page) < (lineage, region.end()));
        for &(_, page, _) in &pages[from..to] {
            if !region.is_marked(page) && !region.usage.own.contains(page) {
                shared.insert((lineage, page));
            }
        }
    }
    for (&(lineage, page, _), family) in families {
        family.is_frame_kept |= shared.contains(&(lineage, page));
    }
}

/// The merged zeros of a process, or of relatives.
#[derive(Clone, Copy, Debug, Default)]
struct Zeros {
    lineage: LineageKey,
    /// Pages that held zeros when we read them and map the zero page now: they were merged, or their huge page was
    /// split.
    split: f64,
    /// ksmd's count.
    merged: f64,
    /// For relatives: the sum of all their zeros.
    sum: f64,
}

impl Zeros {
    fn most(&self) -> f64 {
        self.split.max(self.merged)
    }
}

fn zeros_of(table: &RegionTable, counted: &Counted, weight: f64) -> BTreeMap<OwnerKey, Zeros> {
    let mut zeros: BTreeMap<OwnerKey, Zeros> = BTreeMap::new();
    for (&owner, &(lineage, pages)) in &counted.zeros {
        zeros.insert(owner, Zeros { lineage, merged: pages.0 as f64, ..Zeros::default() });
    }
    let mut last = None;
    for sample in counted.others.iter().filter(|sample| sample.state == PageState::ZeroMapped) {
        last = table.near(last, sample.region, sample.page);
        let Some(region) = last.filter(|region| region.usage.own.contains(sample.page)) else { continue };
        let of_owner = zeros.entry(region.view.owner).or_default();
        of_owner.lineage = region.view.lineage;
        of_owner.split += weight;
    }
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{RegionView, StateSample};
    use crate::keys::{NodeKey, RegionKey};
    use crate::region::{PageSet, Region, test_view};

    const IDLE: Activity = Activity { busy: false, reading: false };
    const BUSY: Activity = Activity { busy: true, reading: false };
    const READING: Activity = Activity { busy: true, reading: true };

    /// Processes with one region each, all of it marked, by their lineages.
    fn table(lineages: &[u64], pages: u64) -> RegionTable {
        let mut views = Vec::new();
        for (key, &lineage) in (1..).zip(lineages) {
            let view = test_view(key, 1_000, pages);
            views.push(RegionView { owner: OwnerKey(key), lineage: LineageKey(lineage), marked: Pages(pages), ..view });
        }
        let mut table = RegionTable::default();
        table.update(&views, 5, |view| Region::new(view, 0, false, 5));
        table
    }

    fn sample(region: u32, page: Vpn, frame: u64, mappers: u32) -> MergedSample {
        MergedSample { region: RegionKey(region), page, frame, node: NodeKey(0), charged: false, mappers }
    }

    fn count_at(table: &RegionTable, merged: &[MergedSample], zeros: &Counted) -> Saving {
        let mut counter = SavingCounter::default();
        counter.plan(table, 1, IDLE, Pages(0));
        counter.record(table, merged, Some(zeros), Pages(0), 1);
        counter.latest().unwrap().clone()
    }

    #[test]
    fn a_frame_is_saved_for_each_page_but_one_and_for_relatives_only_once() {
        // Two parents with four children each, as page maps show them once their pages are merged.
        let lineages: Vec<u64> = (0..10).map(|process| process / 5).collect();
        let table = table(&lineages, 100);
        let merged: Vec<_> =
            (1..=10).flat_map(|region| (0..100).map(move |page| sample(region, Vpn(1_000 + page), page, 10))).collect();
        let saving = count_at(&table, &merged, &Counted::default());
        assert_eq!((saving.saved, saving.merged, saving.returns_at_worst), (Pages(100), Pages(1_000), Pages(900)));
        assert_eq!(saving.of(OwnerKey(1)), Pages(10));
        // The same pages in unrelated processes, or at other addresses.
        let strangers: Vec<u64> = (0..10).collect();
        let strangers = self::table(&strangers, 100);
        assert_eq!(count_at(&strangers, &merged, &Counted::default()).saved, Pages(900));
        let moved: Vec<_> = merged
            .iter()
            .map(|page| sample(page.region.0, page.page + u64::from(page.region.0), page.frame, 10))
            .collect();
        assert_eq!(count_at(&table, &moved, &Counted::default()).saved, Pages(900));
    }

    /// Notes that the relatives in these slots have frames of their own.
    fn own(table: &mut RegionTable, slots: std::ops::Range<u32>, pages: u64) {
        for region in table.iter_mut() {
            region.relatives = Some(0);
            if slots.contains(&(region.view.key.0 - 1)) {
                region.usage.own = PageSet::default();
                for page in 0..pages {
                    region.usage.own.insert(Vpn(1_000 + page));
                }
            }
        }
    }

    #[test]
    fn relatives_count_by_the_frames_they_had_before() {
        // Six relatives: two share a frame, and four have written the page.
        let mut table = table(&[1; 6], 100);
        own(&mut table, 2..6, 100);
        let merged: Vec<_> =
            (1..=6).flat_map(|region| (0..100).map(move |page| sample(region, Vpn(1_000 + page), page, 6))).collect();
        assert_eq!(count_at(&table, &merged, &Counted::default()).saved, Pages(400));
        // ksmd hasn't visited one of the two, so it keeps their frame.
        let left = StateSample { region: RegionKey(1), page: Vpn(1_000), state: PageState::Shared };
        let kept = Counted { others: vec![left], ..Counted::default() };
        let mut rest = merged.clone();
        rest.remove(0);
        for page in rest.iter_mut().filter(|page| page.page == Vpn(1_000)) {
            page.mappers = 5;
        }
        assert_eq!(count_at(&table, &rest, &kept).saved, Pages(399));
        // Region 1 isn't marked. Once its samples show other contents, it doesn't keep the frame.
        for region in table.iter_mut().filter(|region| region.view.key == RegionKey(1)) {
            region.view.marked = Pages(0);
        }
        rest.retain(|page| page.region != RegionKey(1));
        for page in &mut rest {
            page.mappers = 5;
        }
        assert_eq!(count_at(&table, &rest, &Counted::default()).saved, Pages(300));
        for region in table.iter_mut().filter(|region| region.view.key == RegionKey(1)) {
            region.survey.tally.sampled = 100;
        }
        assert_eq!(count_at(&table, &rest, &Counted::default()).saved, Pages(400));
    }

    /// KSM keeps several frames of a content that so many pages have.
    #[test]
    fn relatives_with_different_frames_of_one_content_share_one_by_fork() {
        let table = table(&[1, 1, 2], 200);
        let frame = |region: u32, page| u64::from(region) + page / 128;
        let page = |region| (0..200).map(move |page| sample(region, Vpn(1_000 + page), frame(region, page), 150));
        let merged: Vec<_> = (1..=3).flat_map(page).collect();
        let saved = count_at(&table, &merged, &Counted::default()).saved;
        assert_eq!(saved, Pages(396), "two programs with 200 frames each, and 600 pages in 4 frames");
    }

    #[test]
    fn zeros_that_ksmd_does_not_count_are_those_we_have_read() {
        let mut table = table(&[1, 2], 100);
        own(&mut table, 0..1, 60);
        let mut others = Vec::new();
        for (region, page) in (1..=2).flat_map(|region| (0..80).map(move |page| (RegionKey(region), Vpn(1_000 + page))))
        {
            others.push(StateSample { region, page, state: PageState::ZeroMapped });
        }
        let zeros = [(OwnerKey(1), (LineageKey(1), Pages(20)))].into();
        let saving = count_at(&table, &[], &Counted { zeros, others });
        assert_eq!((saving.saved, saving.returns_at_worst), (Pages(60), Pages(60)));
        assert_eq!(saving.of(OwnerKey(1)), Pages(60));
    }

    #[test]
    fn what_programs_out_of_scope_map_is_theirs() {
        let table = table(&[1], 100);
        let merged: Vec<_> = (0..100).map(|page| sample(1, Vpn(1_000 + page), page, 2)).collect();
        assert_eq!(
            count_at(&table, &merged, &Counted::default()).saved,
            Pages(50),
            "half of each frame, as Pss has it"
        );
        let alone: Vec<_> = (0..100).map(|page| sample(1, Vpn(1_000 + page), page, 1)).collect();
        let saving = count_at(&table, &alone, &Counted::default());
        assert_eq!((saving.saved, saving.merged), (Pages(0), Pages(0)), "the others have ended");
    }

    #[test]
    fn relatives_have_their_zeros_in_common() {
        let table = table(&[1, 1, 2], 100);
        let zeros = [(1, 1, 40), (2, 1, 60), (3, 2, 7)];
        let zeros = zeros.map(|(owner, lineage, pages)| (OwnerKey(owner), (LineageKey(lineage), Pages(pages))));
        let saving = count_at(&table, &[], &Counted { zeros: zeros.into(), ..Counted::default() });
        assert_eq!((saving.saved, saving.returns_at_worst), (Pages(67), Pages(107)));
        assert_eq!(saving.of(OwnerKey(2)), Pages(36));
    }

    #[test]
    fn of_much_memory_the_same_addresses_are_looked_up_in_every_process() {
        let pages = 10 * PAGES_MOST;
        let table = table(&[1, 1, 2, 3], pages);
        let mut counter = SavingCounter::default();
        let runs = counter.plan(&table, 1, IDLE, Pages(0));
        let asked: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        assert!((PAGES_MOST * 9 / 10..=PAGES_MOST * 11 / 10).contains(&asked), "{asked}");
        let of = |key| runs.iter().filter(move |run| run.region == RegionKey(key)).map(|run| run.first);
        assert!(of(1).eq(of(2)) && of(1).eq(of(4)));
        // In all four processes, the first three quarters are merged.
        let mut merged = Vec::new();
        for run in &runs {
            for page in run.first.0..run.first.0 + u64::from(run.pages) {
                if page < 1_000 + pages * 3 / 4 {
                    merged.push(sample(run.region.0, Vpn(page), page, 4));
                }
            }
        }
        counter.record(&table, &merged, Some(&Counted::default()), Pages(0), 1);
        let saved = counter.latest().unwrap().saved.0 as f64;
        let truth = (pages * 3 / 4 * 2) as f64;
        assert!((saved / truth - 1.0).abs() < 0.02, "{saved} of {truth}");
        assert!(counter.plan(&table, 2, IDLE, Pages(0)).is_empty(), "not twice at once");
        assert!(!counter.plan(&table, 2 + PAUSE_MOST_NS, IDLE, Pages(0)).is_empty());
    }

    /// A terabyte is marked, of which 16 GiB are present: all in the first 16 GiB.
    #[test]
    fn a_marked_giant_without_much_memory_leaves_others_their_samples() {
        let guest = test_view(1, 1 << 30, 1 << 18);
        let giant = RegionView { resident: Pages(1 << 22), ..test_view(2, 0, 1 << 28) };
        let mut table = RegionTable::default();
        let views = [guest, giant].map(|view| RegionView { marked: view.pages, ..view });
        table.update(&views, 5, |view| Region::new(view, 0, false, 5));
        let mut counter = SavingCounter::default();
        counter.plan(&table, 1, IDLE, Pages(0));
        assert!(counter.one_in <= 1_200, "{} before we've sampled the giant", counter.one_in);
        for region in table.iter_mut() {
            for _ in 0..32 {
                region.next_run();
            }
            region.survey.has_present = region.view.key == guest.key || region.view.first < Vpn(1 << 22);
        }
        counter.count_now();
        let runs = counter.plan(&table, 2, IDLE, Pages(0));
        assert!(counter.one_in <= 300, "{}", counter.one_in);
        assert!(runs.iter().all(|run| run.region == guest.key || run.first < Vpn(1 << 22)));
        let asked: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        assert!((10_000..=ADDRESSES_MOST).contains(&asked), "{asked}");
    }

    /// A program marks 20 mappings of 256 GiB with one page each, beside a pair with 64 MiB in common.
    #[test]
    fn nearly_empty_marked_memory_does_not_spoil_the_figure() {
        let common = 4 * PAGES_MOST;
        let pair = [1, 2].map(|key| RegionView { owner: OwnerKey(key), ..test_view(key, 1 << 42, common) });
        let sparse = |key: u32| RegionView { resident: Pages(1), ..test_view(key, u64::from(key) << 27, 1 << 26) };
        let mut views: Vec<_> = pair.into_iter().chain((3..23).map(sparse)).collect();
        for view in &mut views {
            view.marked = view.pages;
        }
        let mut table = RegionTable::default();
        table.update(&views, 5, |view| Region::new(view, 0, false, 5));
        let mut counter = SavingCounter::default();
        let mut seen = 0;
        for time in 0..9 {
            counter.count_now();
            let runs = counter.plan(&table, time, IDLE, Pages(0));
            assert_eq!(counter.one_in, 9);
            assert!(runs.len() < 10_000 && counter.asking.unwrap() <= ADDRESSES_MOST);
            seen += runs.iter().filter(|run| run.region.0 > 2 && run.first.0 % (1 << 27) == 0).count();
            let mut merged = Vec::new();
            for run in &runs {
                let pages = if run.region.0 > 2 { 0..0 } else { run.first.0..run.first.0 + u64::from(run.pages) };
                merged.extend(pages.map(|page| sample(run.region.0, Vpn(page), page, 2)));
            }
            counter.record(&table, &merged, Some(&Counted::default()), Pages(0), time);
            let saved = counter.latest().unwrap().saved.0;
            assert!(saved.abs_diff(common) * 100 < common, "{saved} of {common}");
        }
        assert_eq!(seen, 20, "each page of the sparse ones is looked up once in nine counts");
    }

    #[test]
    fn the_last_count_of_a_run_waits_for_nothing() {
        let table = table(&[1, 2], 100);
        let mut counter = SavingCounter::default();
        assert!(!counter.plan(&table, 1, READING, Pages(0)).is_empty(), "the first one doesn't wait either");
        counter.record(&table, &[], Some(&Counted::default()), Pages(0), 1);
        assert!(counter.plan(&table, 2 + PAUSE_NS, READING, Pages(0)).is_empty(), "reading goes first");
        counter.count_now();
        assert!(!counter.plan(&table, 2 + PAUSE_NS, READING, Pages(0)).is_empty());
    }

    #[test]
    fn what_merges_now_and_then_is_not_counted_each_time() {
        const COUNTED: Pages = Pages(10_000);
        let table = table(&[1, 2], 10_000);
        let merged: Vec<_> = (0..10_000).map(|page| sample(1, Vpn(1_000 + page), page, 2)).collect();
        let mut counter = SavingCounter::default();
        counter.plan(&table, 1, IDLE, COUNTED);
        counter.record(&table, &merged, Some(&Counted::default()), COUNTED, 1);
        let early_ns = 2 + counter.pause_ns / EARLY_SHARES;
        assert!(early_ns > 1_000_000_000, "{early_ns}");
        assert!(counter.plan(&table, 2, BUSY, COUNTED + Pages(20)).is_empty());
        assert!(counter.plan(&table, early_ns, IDLE, COUNTED + Pages(20)).is_empty(), "few have merged");
        assert!(!counter.plan(&table, early_ns, IDLE, COUNTED + Pages(200)).is_empty());
    }

    #[test]
    fn a_host_that_could_not_tell_leaves_the_last_count() {
        let table = table(&[1, 2], 100);
        let mut counter = SavingCounter::default();
        counter.plan(&table, 1, IDLE, Pages(0));
        counter.record(&table, &[], None, Pages(0), 1);
        assert_eq!(counter.latest(), None);
    }

    #[test]
    fn the_count_loses_who_has_gone_and_is_unknown_while_much_is_merged() {
        let part = |pages| Part { saved: pages, loss: pages, doubtful: pages, zeros: 0.0 };
        let parts = [(OwnerKey(1), part(6_000.0)), (OwnerKey(2), part(2_000.0))].into_iter().collect();
        let (saved, merged, machine) = (Pages(8_000), Pages(12_000), Pages(8_000));
        let returns_at_worst = saved;
        let saving = Saving { saved, merged, returns_at_worst, machine, parts, ..Saving::default() };
        let mut counter = SavingCounter { latest: Some(saving), ..SavingCounter::default() };
        assert!(counter.known(Pages(12_000)).is_some() && counter.known(Pages(12_100)).is_none());
        counter.forget(&FxHashSet::from_iter([OwnerKey(1), OwnerKey(3)]));
        let left = counter.latest().unwrap();
        assert_eq!([left.saved, left.merged, left.returns_at_worst], [2_000, 3_000, 2_000].map(Pages));
        assert!(counter.known(machine).is_some(), "what ended with the first one is certain");
        counter.forget(&FxHashSet::from_iter([OwnerKey(2)]));
        assert_eq!(counter.latest().unwrap().saved, Pages(0));
        assert!(counter.known(machine).is_none());
    }
}
