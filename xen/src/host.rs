//! Makes a machine with Xen a [`Host`] for the engine: guests are owners, ranges of their frames are regions, and we
//! share pairs of pages.
//!
//! A frame's number is its page number. This module decides only two things: the order of calls ([`crate::sharing`]),
//! and which memory belongs to which guest.

use crate::guests::{InScope, SelectError, Selected, in_scope, missing, unfit};
use crate::hypervisor::{CallError, DomainId, Gfn, GuestPage, Hypervisor, MachineMemory};
use crate::ranges::{Range, ranges};
use crate::sharing::{Pair, Sharer};
use pagefold::commands::run::progress::LeftAlone;
use pagefold::output::xen::XenView;
use pagefold_engine::hash::{Digest, Digester};
use pagefold_engine::host::{
    Actions, Cost, Host, Keep, KsmView, Mechanism, MemoryView, MergeRange, MergeResult, Merging, Outcome, PageRun,
    PageSample, PageState, RegionView, SamplePlan, Samples, Snapshot,
};
use pagefold_engine::keys::{DomainKey, FamilyKey, KeyCounter, LastingKey, LineageKey, OwnerKey, RegionKey};
use pagefold_engine::region::PageSet;
use pagefold_engine::units::{Pages, Vpn, index};
use rustc_hash::{FxHashMap, FxHasher};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// How long we wait between two looks at the list of guests, nanoseconds.
const LOOK_NS: u64 = 1_000_000_000;
/// How long we wait before we find a guest's ranges again, after its memory has grown or shrunk, nanoseconds.
const RANGES_NS: u64 = 5_000_000_000;
/// Finding ranges may take one part in this many of our time.
const RANGES_PART: u64 = 100;
/// How many pages we read at a time.
const READ_PAGES: usize = 256;
/// How many pages we share before we check again whether the run should end.
const MERGE_PAIRS: usize = 1024;
/// How many pages of zeros we share with one kept page, as for other contents. With more, the hypervisor takes longer
/// to find a page among them.
const ZEROS_MOST: u16 = 255;

/// The clock, and a way to wait.
pub trait Clock {
    /// Nanoseconds since any origin.
    fn now_ns(&self) -> u64;
    /// CPU time of this process, nanoseconds, including the hypervisor's work for it.
    fn cpu_ns(&self) -> u64;
    /// Waits this long, or less if a signal or request comes.
    fn wait(&mut self, ns: u64);
    /// Whether the run is to end.
    fn is_stopped(&self) -> bool;
}

/// Errors after which the host can't continue.
#[derive(Debug, thiserror::Error)]
pub enum XenError {
    /// The scope doesn't make sense, or names a guest that doesn't exist.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The hypervisor didn't tell us something that we need to know.
    #[error("the hypervisor does not answer: {0}")]
    Call(#[from] CallError),
}

/// A guest in scope.
#[derive(Debug)]
pub struct Guest {
    /// Its name, its trust domain, and what the hypervisor says about it.
    pub known: InScope,
    pub owner: OwnerKey,
    /// Why we leave the guest alone. `None` if we don't.
    pub left_alone: Option<String>,
    /// The number of its trust domain.
    pub trust: DomainKey,
    lasting: LastingKey,
    kernel: Option<String>,
    regions: Vec<(RegionKey, Range)>,
    /// How much memory the guest had when we found its ranges, and when we may find these again, nanoseconds.
    ranged: Option<(Pages, u64)>,
    /// Pages that were shared, as far as we know.
    shared: PageSet,
    /// Whether the guest had shared pages before this run. Then any page may be a shared one.
    had_shared: bool,
}

impl Guest {
    /// The guest's number, which we use where processes have a pid.
    pub fn number(&self) -> i32 {
        self.known.domain.id.0.into()
    }

    /// Whether this is still the guest that we found before, and we treat it in the same way.
    fn is_same(&self, found: &InScope) -> bool {
        let known = &self.known.domain;
        let now = &found.domain;
        known.id == now.id && known.uuid == now.uuid && self.known.trust == found.trust && unfit(known) == unfit(now)
    }
}

/// A pair of pages, the number of its range, and its place in that range.
type NamedPair = (Pair, usize, usize);

#[derive(Debug)]
pub struct XenHost<H, C> {
    hypervisor: H,
    clock: C,
    scope: Vec<Selected>,
    /// Whether we share memory. Otherwise it's a dry run.
    acts: bool,
    sharer: Sharer,
    guests: BTreeMap<DomainId, Guest>,
    /// The guests of the regions.
    owners: FxHashMap<RegionKey, DomainId>,
    trusts: Vec<String>,
    region_keys: KeyCounter,
    owner_keys: KeyCounter,
    /// The page of zeros that we keep in each trust domain, and with how many pages we've shared it.
    zeros: FxHashMap<DomainKey, (GuestPage, u16)>,
    views: Vec<RegionView>,
    memory: MachineMemory,
    /// How much was saved when the run began, how often we've shared since, and how many of these shares guests have
    /// undone.
    saved_before: Pages,
    shares: u64,
    undone: u64,
    next_look_ns: u64,
    left_alone: Vec<LeftAlone>,
}

impl<H: Hypervisor, C: Clock> XenHost<H, C> {
    /// A host for these guests. With `acts`, we share their memory.
    ///
    /// # Errors
    /// If one of them doesn't exist, or the hypervisor can't share memory.
    pub fn new(mut hypervisor: H, clock: C, scope: Vec<Selected>, acts: bool) -> Result<Self, XenError> {
        let memory = hypervisor.memory()?;
        let mut host = Self {
            hypervisor,
            clock,
            scope,
            acts,
            sharer: Sharer::new(),
            guests: BTreeMap::new(),
            owners: FxHashMap::default(),
            trusts: Vec::new(),
            region_keys: KeyCounter::default(),
            owner_keys: KeyCounter::default(),
            zeros: FxHashMap::default(),
            views: Vec::new(),
            memory,
            saved_before: memory.saved,
            shares: 0,
            undone: 0,
            next_look_ns: 0,
            left_alone: Vec::new(),
        };
        host.look()?;
        let found: Vec<InScope> = host.guests.values().map(|guest| guest.known.clone()).collect();
        match missing(&host.scope, &found) {
            Some(selected) => Err(SelectError::Unknown(selected.guest.clone()).into()),
            None => Ok(host),
        }
    }

    pub fn guests(&self) -> impl Iterator<Item = &Guest> {
        self.guests.values()
    }

    pub fn guest_of(&self, region: RegionKey) -> Option<&Guest> {
        self.guests.get(self.owners.get(&region)?)
    }

    /// The names of the trust domains, by key.
    pub fn trusts(&self) -> &[String] {
        &self.trusts
    }

    pub fn figures(&self) -> XenView {
        XenView {
            saved_bytes: self.memory.saved.bytes().0,
            frames_bytes: self.memory.frames.bytes().0,
            free_bytes: self.memory.free.bytes().0,
            shared_pages: self.shares,
        }
    }

    /// The guests that we must leave alone, as found since the last [`Self::take_left_alone`].
    pub fn left_alone(&self) -> &[LeftAlone] {
        &self.left_alone
    }

    pub fn take_left_alone(&mut self) -> Vec<LeftAlone> {
        std::mem::take(&mut self.left_alone)
    }

    /// The time of the snapshots.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// The figures of sharing at the end of the run. `None` if the hypervisor doesn't answer any more.
    pub fn close(&mut self) -> Option<KsmView> {
        self.memory = self.hypervisor.memory().ok()?;
        Some(self.view())
    }

    /// CPU time spent so far in the run.
    pub fn cost(&self) -> Cost {
        Cost { pagefold_ns: self.clock.cpu_ns(), ..Cost::default() }
    }

    /// Updates the list of guests.
    fn look(&mut self) -> Result<(), XenError> {
        let domains = self.hypervisor.domains()?;
        let found = in_scope(&mut self.hypervisor, &self.scope, domains)?;
        let mut gone: Vec<DomainId> = self.guests.keys().copied().collect();
        gone.retain(|id| !found.iter().any(|found| self.guests[id].is_same(found)));
        for id in gone {
            self.guests.remove(&id);
            self.owners.retain(|_, owner| *owner != id);
            self.zeros.retain(|_, (page, _)| page.domain != id);
            self.sharer.forget(id);
        }
        for found in found {
            let id = found.domain.id;
            if let Some(guest) = self.guests.get_mut(&id) {
                guest.known = found;
            } else {
                let guest = self.admit(found);
                self.guests.insert(id, guest);
            }
            self.find_ranges(id);
        }
        self.views = self.guests.values().flat_map(views).collect();
        Ok(())
    }

    /// Makes an entry for a guest that's new in scope.
    fn admit(&mut self, known: InScope) -> Guest {
        let id = known.domain.id;
        let refused = match unfit(&known.domain) {
            Some(why) => Some(why.to_owned()),
            None if self.acts => self.hypervisor.enable(id).err().map(|refusal| refusal.to_string()),
            None => None,
        };
        if let Some(why) = &refused {
            self.left_alone.push(known.left_alone(why));
        }
        let guests = &self.guests;
        let owner = self.owner_keys.take(|key| guests.values().any(|guest| guest.owner.0 == key));
        let number = self.trusts.iter().position(|trust| *trust == known.trust);
        let trust = number.unwrap_or(self.trusts.len());
        if trust == self.trusts.len() {
            self.trusts.push(known.trust.clone());
        }
        Guest {
            owner: OwnerKey(owner),
            left_alone: refused,
            trust: DomainKey(u16::try_from(trust).unwrap_or(u16::MAX)),
            lasting: LastingKey(hashed(&known.domain.uuid)),
            kernel: self.hypervisor.kernel(id),
            regions: Vec::new(),
            ranged: None,
            shared: PageSet::default(),
            had_shared: known.domain.shared > Pages(0),
            known,
        }
    }

    /// Finds the ranges of a guest's memory, if it's new or its memory has changed.
    fn find_ranges(&mut self, id: DomainId) {
        let now_ns = self.clock.now_ns();
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let has = guest.known.domain.own + guest.known.domain.shared;
        let is_known = matches!(guest.ranged, Some((had, from_ns)) if had == has || now_ns < from_ns);
        if is_known || guest.left_alone.is_some() {
            return;
        }
        // If this fails, the guest has ended. The next look at the list finds that out.
        let Ok(found) = ranges(&mut self.hypervisor, id, guest.known.domain.most) else { return };
        let took_ns = self.clock.now_ns().saturating_sub(now_ns);
        let pause_ns = took_ns.saturating_mul(RANGES_PART).max(RANGES_NS);
        guest.ranged = Some((has, now_ns.saturating_add(pause_ns)));
        let before = std::mem::take(&mut guest.regions);
        for range in found {
            let key = match before.iter().find(|(_, old)| old.first == range.first) {
                Some(&(key, _)) => key,
                None => RegionKey(self.region_keys.take(|key| self.owners.contains_key(&RegionKey(key)))),
            };
            self.owners.insert(key, id);
            guest.regions.push((key, range));
        }
        for (key, _) in before {
            if !guest.regions.iter().any(|&(kept, _)| kept == key) {
                self.owners.remove(&key);
            }
        }
    }

    fn view(&mut self) -> KsmView {
        let saved = self.memory.saved;
        // This also counts the shares of guests that have ended.
        let undone = (self.saved_before.0 + self.shares).saturating_sub(saved.0);
        self.undone = self.undone.max(undone);
        KsmView {
            shared: self.memory.frames,
            sharing: saved,
            broken: self.undone,
            ours: self.acts,
            ..KsmView::default()
        }
    }

    /// Whether a page is shared. If it was never shared, we needn't ask.
    fn state(&mut self, page: GuestPage) -> PageState {
        let Some(guest) = self.guests.get_mut(&page.domain) else { return PageState::Absent };
        let number = Vpn(page.frame.0);
        if !guest.had_shared && !guest.shared.contains(number) {
            return PageState::Private;
        }
        if matches!(self.hypervisor.sharers(page), Ok(Some(2..))) {
            guest.shared.insert(number);
            PageState::Merged
        } else {
            guest.shared.remove(number);
            PageState::Private
        }
    }

    /// Reads the pages of adjacent runs of one region.
    fn read_pages(&mut self, region: RegionKey, frames: &[Gfn], digester: &Digester, samples: &mut Vec<PageSample>) {
        let Some(&domain) = self.owners.get(&region) else { return };
        let mut digests: Vec<Option<Digest>> = vec![None; frames.len()];
        let read = self.hypervisor.read(domain, frames, &mut |at, bytes| {
            digests[at] = bytes.map(|bytes| digester.digest(bytes));
        });
        if read.is_err() {
            return;
        }
        for (&frame, digest) in frames.iter().zip(digests) {
            let state = match digest {
                Some(_) => self.state(GuestPage { domain, frame }),
                None => PageState::Absent,
            };
            samples.push(PageSample {
                region,
                page: Vpn(frame.0),
                state,
                huge: false,
                digest: digest.unwrap_or_default(),
                active: false,
                lone: false,
                outsiders: false,
                node: None,
            });
        }
    }

    /// Finds a page of a region, if the region still contains it.
    fn page(&self, region: RegionKey, page: Vpn) -> Option<GuestPage> {
        let domain = *self.owners.get(&region)?;
        let (_, range) = self.guests.get(&domain)?.regions.iter().find(|(key, _)| *key == region)?;
        let is_within = range.first.0 <= page.0 && page.0 < range.first.0 + range.pages.0;
        if is_within { Some(GuestPage { domain, frame: Gfn(page.0) }) } else { None }
    }

    fn trust_of(&self, domain: DomainId) -> Option<DomainKey> {
        Some(self.guests.get(&domain)?.trust)
    }

    /// Finds the page to share `take` with. The error is the outcome if there's nothing to share.
    fn pair(&mut self, take: GuestPage, keep: Keep, at: u64) -> Result<Pair, Merging> {
        let trust = self.trust_of(take.domain).ok_or(Merging::Untried)?;
        let kept = match keep {
            Keep::Run(region, first) => self.page(region, first + at).ok_or(Merging::Untried)?,
            Keep::Page(region, page) => self.page(region, page).ok_or(Merging::Untried)?,
            // There's no page of zeros that every guest has, so we keep one of the guests' pages.
            Keep::Zero => match self.zeros.get_mut(&trust) {
                Some((kept, named)) if *named < ZEROS_MOST && *kept != take => {
                    *named += 1;
                    *kept
                }
                _ => {
                    self.zeros.insert(trust, (take, 0));
                    return Err(Merging::Busy);
                }
            },
        };
        // We check the trust domain ourselves, whatever the engine thinks.
        if self.trust_of(kept.domain) == Some(trust) { Ok(Pair { take, keep: kept }) } else { Err(Merging::Ineligible) }
    }

    /// Shares the named pages, batched by pairs of guests.
    fn merge(&mut self, ranges: &[MergeRange]) -> Vec<MergeResult> {
        let mut results: Vec<Vec<Merging>> =
            ranges.iter().map(|range| vec![Merging::Untried; index(range.take.pages)]).collect();
        let mut by_guests: BTreeMap<(DomainId, DomainId), Vec<NamedPair>> = BTreeMap::new();
        let tried = if self.acts { ranges } else { &[] };
        for (number, range) in tried.iter().enumerate() {
            for at in 0..range.take.pages {
                let PageRun { region, first, .. } = range.take;
                let Some(take) = self.page(region, first + u64::from(at)) else { continue };
                match self.pair(take, range.keep, at.into()) {
                    Ok(pair) => {
                        let guests = (pair.keep.domain, pair.take.domain);
                        by_guests.entry(guests).or_default().push((pair, number, index(at)));
                    }
                    Err(merging) => results[number][index(at)] = merging,
                }
            }
        }
        for pairs in by_guests.values().flat_map(|pairs| pairs.chunks(MERGE_PAIRS)) {
            if self.clock.is_stopped() {
                break;
            }
            let named: Vec<Pair> = pairs.iter().map(|&(pair, ..)| pair).collect();
            let merged = self.sharer.merge(&mut self.hypervisor, &named);
            for (&(pair, number, at), merging) in pairs.iter().zip(merged) {
                results[number][at] = merging;
                self.record(pair, merging, ranges[number].keep);
            }
        }
        ranges.iter().zip(&results).flat_map(|(range, pages)| range.results(pages)).collect()
    }

    fn record(&mut self, pair: Pair, merging: Merging, keep: Keep) {
        if matches!(merging, Merging::Merged | Merging::Shared) {
            self.shares += u64::from(merging == Merging::Merged);
            for page in [pair.take, pair.keep] {
                if let Some(guest) = self.guests.get_mut(&page.domain) {
                    guest.shared.insert(Vpn(page.frame.0));
                }
            }
        } else if keep == Keep::Zero {
            // Perhaps the kept page isn't zeros any more, so we choose another one next time.
            self.zeros.retain(|_, (kept, _)| *kept != pair.keep);
        }
    }
}

fn hashed(value: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A guest's regions as the engine sees them. Guests of the same configuration and kernel are a family.
fn views(guest: &Guest) -> Vec<RegionView> {
    let domain = &guest.known.domain;
    let mut views = Vec::new();
    for &(key, range) in &guest.regions {
        views.push(RegionView {
            key,
            owner: guest.owner,
            lasting: guest.lasting,
            lineage: LineageKey(guest.lasting.0),
            family: FamilyKey(hashed(&(domain.most, domain.vcpus, &guest.kernel, range.first))),
            domain: guest.trust,
            first: Vpn(range.first.0),
            pages: range.pages,
            resident: range.pages,
            merged_somewhere: Pages(0),
            marked: Pages(0),
            named: false,
            left_alone: false,
        });
    }
    views
}

impl<H: Hypervisor, C: Clock> Host for XenHost<H, C> {
    type Error = XenError;

    fn observe(&mut self) -> Result<Snapshot, XenError> {
        let now_ns = self.clock.now_ns();
        if now_ns >= self.next_look_ns {
            self.look()?;
            self.next_look_ns = now_ns + LOOK_NS;
        }
        self.memory = self.hypervisor.memory()?;
        let ksm = self.view();
        Ok(Snapshot {
            now_ns,
            regions: self.views.clone(),
            ksm,
            mechanism: Mechanism::Request,
            memory: MemoryView { total: self.memory.total, available: self.memory.free, ..MemoryView::default() },
            cost: self.cost(),
            ..Snapshot::default()
        })
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, XenError> {
        let before_ns = self.clock.cpu_ns();
        let digester = Digester::new(plan.digest_seed);
        let mut samples = Samples::default();
        for runs in plan.runs.chunk_by(|a, b| a.region == b.region) {
            let region = runs[0].region;
            let mut frames = Vec::new();
            for run in runs {
                for page in run.first.0..run.first.0 + u64::from(run.pages) {
                    if self.page(region, Vpn(page)).is_some() {
                        frames.push(Gfn(page));
                    }
                }
            }
            for frames in frames.chunks(READ_PAGES) {
                self.read_pages(region, frames, &digester, &mut samples.pages);
            }
        }
        samples.cpu_ns = self.clock.cpu_ns().saturating_sub(before_ns);
        Ok(samples)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, XenError> {
        Ok(Outcome { merges: self.merge(&actions.merge), ..Outcome::default() })
    }

    fn wait(&mut self, ns: u64) -> Result<(), XenError> {
        self.clock.wait(ns);
        Ok(())
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
