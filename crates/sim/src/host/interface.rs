//! The calls that pagefold makes ([`Host`]). Each costs CPU time, during which virtual time passes.

use super::SimHost;
use crate::content::{digest, line_digest};
use pagefold_engine::hash::Digest;
use pagefold_engine::host::{
    Actions, Change, ChangeResult, Counted, Host, Marking, Mechanism, Outcome, PageRun, PageSample, PageState,
    RegionView, SamplePlan, Samples, ScanOrder, Snapshot, Span, Stops,
};
use pagefold_engine::keys::{LastingKey, LineageKey, OwnerKey, RegionKey};
use pagefold_engine::region::RUN_PAGES;
use pagefold_engine::units::{Pages, Vpn, whole};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

/// How often we refresh our list of processes at most, nanoseconds. This and the next three are as in the live host.
const REFRESH_NS: u64 = 250_000_000;
/// Refreshes of unchanged processes may take one part in this many of our time.
const REFRESH_PART: u64 = 3_333;
/// We survey processes with marked memory again after this time, to notice if flags have changed, nanoseconds.
const SURVEY_NS: u64 = 10_000_000_000;
/// These surveys may take one part in this many of our time.
const SURVEY_PART: u64 = 1_000;

/// What pagefold knows of the processes, and when it's due to be refreshed.
#[derive(Debug, Default)]
pub(super) struct Refreshed {
    next_ns: u64,
    next_survey_ns: u64,
    /// For each process: [`Owner::changes`](crate::memory::Owner::changes) at the last survey.
    changes: FxHashMap<OwnerKey, u64>,
}

impl SimHost {
    fn view(&mut self, key: u32, owner: u32, price_ns: &mut u64) -> Option<RegionView> {
        let region = self.memory.region(key)?;
        let pages = Pages(u64::from(region.len()));
        let marked = Pages(region.marks.pages());
        let on_request = self.knobs.mechanism == Mechanism::Request;
        let merged_somewhere = if self.knobs.shows_lone { Pages(0) } else { region.merged() };
        let (counted_ns, mut resident, _) = self.residents.get(&key).copied().unwrap_or_default();
        if counted_ns == 0 || self.now_ns >= counted_ns + self.knobs.resident_age_ns {
            let mut there = 0;
            let mut parts = 0.0;
            for page in 0..region.len() {
                let mappers = self.memory.mappers(region, page);
                if mappers > 0 {
                    there += 1;
                    parts += 1.0 / f64::from(mappers);
                }
            }
            resident = Pages(there);
            let held = Pages(whole(parts));
            *price_ns += self.granularity.scale(pages.0 * self.costs.count_page_ns);
            self.residents.insert(key, (self.now_ns.max(1), resident, held));
        }
        Some(RegionView {
            key: RegionKey(key),
            owner: OwnerKey(owner),
            lasting: LastingKey(owner.into()),
            family: region.family,
            lineage: LineageKey(self.memory.owners[owner as usize].lineage.into()),
            domain: self.memory.owners[owner as usize].domain,
            first: Vpn(region.first),
            pages,
            resident,
            marked: if on_request { Pages(0) } else { marked },
            merged_somewhere,
            named: on_request && marked > Pages(0),
            left_alone: self.memory.owners[owner as usize].left_alone,
        })
    }

    /// What it costs to refresh our knowledge of the processes, if that's due. (We show regions as they are even if it
    /// isn't.)
    fn refresh_ns(&mut self, owners: &[OwnerKey]) -> u64 {
        let mut cost_ns = self.costs.observe_ns;
        if self.now_ns < self.refreshed.next_ns {
            return cost_ns;
        }
        let all = owners.len() as u64;
        let surveys = self.now_ns >= self.refreshed.next_survey_ns;
        self.refreshed.next_ns = self.now_ns + (all * self.costs.refresh_owner_ns * REFRESH_PART).max(REFRESH_NS);
        let mut surveyed_ns = 0;
        for owner in owners {
            let record = &self.memory.owners[owner.0 as usize];
            let survey_ns = self.costs.survey_owner_ns + record.regions.len() as u64 * self.costs.survey_region_ns;
            cost_ns += if self.refreshed.changes.insert(*owner, record.changes) == Some(record.changes) {
                // Of the unchanged processes we only survey those with marked memory, which are the ones on ksmd's
                // list.
                surveyed_ns += if surveys && record.registered { survey_ns } else { 0 };
                self.costs.refresh_owner_ns
            } else {
                survey_ns
            };
        }
        if surveys {
            self.refreshed.next_survey_ns = self.now_ns + (surveyed_ns * SURVEY_PART).max(SURVEY_NS);
        }
        cost_ns + surveyed_ns
    }

    /// Whether a page in this state may be shared through fork. A kernel that hides lone merged pages calls fork-shared
    /// pages merged as well.
    fn may_be_forked(&self, state: PageState) -> bool {
        state == PageState::Shared || state == PageState::Merged && !self.knobs.shows_lone
    }

    /// The digest of a content by only some of its lines. `None` if we need the whole page.
    fn weak_digest(&self, content: u64, plan: &SamplePlan) -> Option<Digest> {
        let weak = line_digest(content, plan.digest_seed, plan.lines?, self.knobs.alike);
        let is_enough = weak != Digest::ZERO && !plan.colliding.contains(&weak);
        is_enough.then_some(weak)
    }

    /// What it costs to read a page, or to hash this many lines of it.
    fn read_page_ns(&self, lines: Option<u32>) -> u64 {
        let costs = &self.costs;
        let Some(lines) = lines else { return costs.read_page_ns };
        costs.hash_page_ns + (u64::from(lines) * costs.hash_line_ns).min(costs.hash_whole_ns)
    }

    /// Samples one run. Returns the cost in nanoseconds.
    fn read_run(&self, run: &PageRun, plan: &SamplePlan, samples: &mut Vec<PageSample>) -> u64 {
        let Some(region) = self.memory.region(run.region.0) else { return 0 };
        let mut looked_at = 0;
        let mut read = 0;
        let mut looked_up = 0;
        let mut whole = 0;
        let several = self.memory.nodes.is_tracked();
        let asked = plan.activity.contains(&run.region);
        let family = plan.forked.get(&run.region);
        for number in run.first.0..run.first.0.saturating_add(u64::from(run.pages)) {
            let Some(offset) = region.offset(Vpn(number)) else { continue };
            let merged = region.merged_frame(offset).map(|frame| self.memory.frames[frame as usize]);
            // If only one process maps a merged page, pagemap shows an exclusive page. Only kpageflags says that it's
            // merged.
            let lone = merged.is_some_and(|frame| frame.mapped == 1);
            let state = if lone { PageState::Private } else { self.memory.state(region, offset) };
            looked_at += 1;
            let is_read = state.is_read(family.is_some());
            let mut outsiders = false;
            if let Some(family) = family.filter(|family| !family.is_empty() && self.may_be_forked(state)) {
                outsiders = self.memory.has_outsiders(region, offset, family);
                looked_at += family.len() as u64;
                looked_up += 1;
            }
            read += u64::from(is_read);
            let mut found = Digest::ZERO;
            if is_read {
                let content = region.content[offset as usize];
                let weak = self.weak_digest(content, plan);
                whole += u64::from(weak.is_none() && plan.lines.is_some());
                found = weak.unwrap_or_else(|| digest(content, plan.digest_seed));
            }
            let private = state == PageState::Private;
            let huge = private && region.is_huge(offset);
            looked_up += u64::from(private && asked);
            let in_use = || region.active || region.reads.get(offset as usize).is_some_and(|&reads| reads > 1);
            samples.push(PageSample {
                region: run.region,
                page: Vpn(number),
                state,
                huge,
                digest: found,
                active: private && asked && in_use(),
                lone: lone && asked && self.knobs.shows_lone,
                outsiders,
                node: if several && private { self.memory.node_of(region, offset) } else { None },
            });
        }
        let costs = &self.costs;
        let run_ns = if plan.lines.is_none() { costs.read_run_ns } else { costs.hash_run_ns };
        let read_ns = self.read_page_ns(plan.lines);
        let started = if read > 0 { run_ns } else { 0 };
        // If a run is longer than a sample, we read all of its real pages.
        let times =
            if u64::from(run.pages) > RUN_PAGES { self.granularity.get() } else { self.granularity.samples(u64::MAX) };
        let pages_ns = looked_at * costs.pagemap_ns
            + looked_up * costs.kpageflags_ns
            + read * read_ns
            + whole * costs.hash_whole_ns;
        times * (started + pages_ns)
    }

    /// Marks or unmarks spans, with one stop for each process.
    fn change_marks(&mut self, changes: &[Change], mark: bool, outcome: &mut Outcome) -> Vec<ChangeResult> {
        let mut stops: BTreeMap<u32, (bool, u64)> = BTreeMap::new();
        let mut results = Vec::with_capacity(changes.len());
        for &change in changes {
            let span = &change.span;
            let Some((owner, range)) = self.target(span) else {
                results.push(ChangeResult { change, marking: Marking::Refused });
                continue;
            };
            let (busy, stop_ns) =
                stops.entry(owner).or_insert_with(|| (self.stream.chance(self.knobs.busy), self.costs.stop_ns));
            if *busy {
                results.push(ChangeResult { change, marking: Marking::Busy });
                continue;
            }
            *stop_ns += self.costs.inject_ns;
            let marking = Marking::Done(Pages(u64::from(range.end - range.start)));
            results.push(ChangeResult { change, marking });
            if mark {
                if let Some(region) = self.memory.region_mut(span.region.0) {
                    region.marks.add(range);
                }
                self.ksmd.register(&mut self.memory, owner, self.now_ns);
            } else {
                let copied = self.memory.unmerge(span.region.0, &range);
                *stop_ns += self.granularity.scale(copied * self.costs.unmerge_page_ns);
            }
        }
        for (owner, (busy, stop_ns)) in stops {
            if !busy {
                let owner = OwnerKey(owner);
                outcome.stops.push(Stops::one(owner, stop_ns));
            }
            self.spend(stop_ns);
        }
        results
    }

    /// The process that we stop for a span, and the part of the span that exists.
    fn target(&self, span: &Span) -> Option<(u32, Range<u32>)> {
        let region = self.memory.region(span.region.0)?;
        let place = |page: u64| u32::try_from(page.clamp(region.first, region.end()) - region.first).ok();
        let range = place(span.first.0)?..place(span.first.0.saturating_add(span.pages.0))?;
        (!range.is_empty() && !self.memory.owners[region.owner as usize].untouchable).then_some((region.owner, range))
    }
}

impl Host for SimHost {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let mut live: Vec<(u32, u32)> = self.memory.live_regions().map(|(key, region)| (key, region.owner)).collect();
        live.retain(|&(_, owner)| self.memory.shows_regions(owner));
        let mut price_ns = 0;
        let mut owners: Vec<OwnerKey> = Vec::new();
        let mut regions = Vec::with_capacity(live.len());
        let mut held: BTreeMap<OwnerKey, Pages> = BTreeMap::new();
        for (key, owner) in live {
            if owners.last() != Some(&OwnerKey(owner)) {
                owners.push(OwnerKey(owner));
            }
            regions.extend(self.view(key, owner, &mut price_ns));
            let (_, _, of_region) = self.residents.get(&key).copied().unwrap_or_default();
            *held.entry(OwnerKey(owner)).or_default() += of_region;
        }
        price_ns += self.refresh_ns(&owners);
        let (now_ns, ksm) = (self.now_ns, self.ksm_as_observed());
        let (nodes, owners, places_ns) = self.observe_nodes(&owners);
        self.spend(price_ns + places_ns);
        let (mechanism, memory, cost) = (self.knobs.mechanism, self.free, self.cost());
        let hashes_lines = mechanism == Mechanism::Request;
        let (limits, groups) = (self.observe_limits(), self.groups.clone());
        Ok(Snapshot {
            now_ns,
            regions,
            is_starting: self.is_starting,
            ksm,
            mechanism,
            shows_frames: true,
            shows_lone: self.knobs.shows_lone,
            hashes_lines,
            memory,
            cpu_pressure: None,
            limits,
            groups,
            held: Arc::new(held),
            foreign_marks: self.foreign_marks,
            cost,
            nodes,
            owners,
        })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        let mut pages = Vec::with_capacity(plan.runs.iter().map(|run| run.pages as usize).sum());
        let mut unread = BTreeSet::new();
        let mut cpu_ns = 0;
        for runs in plan.runs.chunk_by(|a, b| a.region == b.region) {
            let is_late = self.is_late();
            if !pages.is_empty() && (is_late || !unread.is_empty()) {
                unread.insert(runs[0].region);
                continue;
            }
            for run in runs {
                cpu_ns += self.read_run(run, plan, &mut pages);
                self.record_read(run);
            }
        }
        let mut merged = Vec::new();
        let mut others = Vec::new();
        let mut inspecting_ns = 0;
        for run in &plan.inspect {
            inspecting_ns += self.find_merged_pages(run, plan.charged_to, &mut merged, &mut others);
        }
        // pagefold paces its counts by the number of pages. If simulated pages are coarse, pagefold counts more often,
        // so each count must be cheaper.
        cpu_ns += if plan.count { inspecting_ns } else { self.granularity.scale(inspecting_ns) };
        self.spend(cpu_ns);
        let counted = plan.count.then(|| Counted { zeros: self.merged_zeros(), others });
        Ok(Samples { pages, unread, merged, counted, cpu_ns })
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        let mut outcome = Outcome::default();
        outcome.unmarked = self.change_marks(&actions.unmark, false, &mut outcome);
        outcome.marked = self.change_marks(&actions.mark, true, &mut outcome);
        self.merge_ranges(&actions.merge, &mut outcome);
        self.move_frames(&actions.moves, &mut outcome);
        if self.ours {
            self.ksmd.order(actions.scan, self.now_ns);
        } else if actions.scan != ScanOrder::Keep {
            self.ignored_orders += 1;
        }
        Ok(outcome)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.advance(ns);
        Ok(())
    }
}
