//! Merges the pairs of pages that the engine asks for, if the kernel merges on request (`/dev/ksm`).
//!
//! We stop a process to mark its memory, but not to make a request, so it runs on between our last check and the merge.
//! So we keep each call to the kernel short, and check just before it that the processes still have the address spaces
//! that we judged. The kernel marks whole mappings, not only the pages, so we record processes as marked before the
//! first call: if a mapping becomes excluded later, or at that very moment, we find it and unmark it as we do with
//! other marks ([`super::withdrawing`]).

use super::LiveHost;
use super::turns::{Pass, comes_last};
use crate::regions::List;
use crate::scope::exclude::withdrawal;
use pagefold_engine::host::{Keep, MergeRange, MergeResult, Merging, Outcome, PageRun};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::region::PageSet;
use pagefold_engine::units::Vpn;
use pagefold_ksm::request::{Kept, Merged, Range, RequestDevice};
use pagefold_procmem::image::{AddressSpace, image_of};
use pagefold_procmem::maps::read_smaps;
use pagefold_procmem::memory::PageReader;
use pagefold_procmem::os::abandonable::{Job, LIMIT, advance};
use pagefold_procmem::os::cpu::thread_cpu_ns;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// We check a process again before a job if our last check is older than this, nanoseconds.
const CHECK_NS: u64 = 10_000_000;
/// A job has at most this many pages, which take some 50 ms.
const JOB_PAGES: u32 = 16_384;
/// Once a pass has used up its time, we only try pairs of processes with at least this many pages: merging these takes
/// as long as the checks before it, up to a millisecond. If we skipped relatives by fork here, merging the others would
/// save nothing.
const MANY_PAGES: u32 = 256;
/// How long we wait for a job that doesn't sleep.
const COMPUTING_MOST: Duration = LIMIT;
/// How long a job waits for a process's mmap lock. The process can keep the lock for any time.
const ANY_TIME: Duration = Duration::MAX;

/// The state of merging on request.
#[derive(Debug, Default)]
pub(super) struct Requesting {
    /// The device, if we merge on request.
    pub(super) device: Option<Arc<RequestDevice>>,
    /// Recent lists of mappings, by pid.
    pub(super) lists: BTreeMap<i32, Arc<List>>,
    /// A job that didn't end in time because it's in a call to the kernel. It may hold KSM's lock, so we start no other
    /// job until it has ended.
    late: Option<Late>,
}

#[derive(Debug)]
struct Late {
    job: Job<Result<Merged, ReadError>>,
    pids: Vec<i32>,
}

/// Whether a job is in a call to the kernel, may make more calls, and has made any.
#[derive(Debug, Default)]
struct Turn {
    state: AtomicU8,
    has_begun: AtomicBool,
}

impl Turn {
    const OUTSIDE: u8 = 0;
    const INSIDE: u8 = 1;
    const ABANDONED: u8 = 2;

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Begins a call, unless we've abandoned the job.
    fn enter(&self) -> bool {
        let enters = self.change(Self::OUTSIDE, Self::INSIDE);
        self.has_begun.fetch_or(enters, Ordering::SeqCst);
        enters
    }

    /// Ends a call, if one is under way.
    fn leave(&self) {
        self.change(Self::INSIDE, Self::OUTSIDE);
    }

    /// Lets no more calls begin. Returns whether a call is under way.
    fn abandon(&self) -> bool {
        self.state.swap(Self::ABANDONED, Ordering::SeqCst) == Self::INSIDE
    }

    /// Whether an abandoned job may have made a call.
    fn may_have_called(&self) -> bool {
        self.has_begun.load(Ordering::SeqCst)
    }
}

/// One of the two processes of a job.
#[derive(Debug)]
struct Side {
    process: Arc<Process>,
    space: AddressSpace,
    list: Arc<List>,
    /// The process's regions: first page and end.
    regions: BTreeMap<RegionKey, (u64, u64)>,
}

impl Side {
    /// Whether the process still has the address space that we judged, and runs the same program: after an exec, others
    /// may still have the address space (CLONE_VM). If somebody holds its mmap lock, we wait for the lock here: the
    /// request itself would keep KSM's lock while it waits.
    fn is_judged(&self) -> bool {
        self.space.is_unlocked(ANY_TIME);
        self.space.exists() && image_of(&self.process).is_ok_and(|image| image == self.list.program.image)
    }

    /// Whether all these pages are within the region.
    fn has(&self, region: RegionKey, first: Vpn, pages: u32) -> bool {
        let end = first.0.checked_add(pages.into());
        self.regions.get(&region).is_some_and(|span| span.0 <= first.0 && end.is_some_and(|end| end <= span.1))
    }
}

/// The processes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    /// The process whose pages are replaced, which frees their frames.
    take: i32,
    /// The process whose pages replace them. `None`: the kernel's zero page does.
    keep: Option<i32>,
}

impl Pair {
    /// The pids of both processes, or one if they're the same.
    fn pids(self) -> Vec<i32> {
        let mut pids = vec![self.take];
        pids.extend(self.keep.filter(|&keep| keep != self.take));
        pids
    }
}

/// The last check of whether we may ask the kernel to merge pages of a process.
#[derive(Clone, Copy, Debug)]
struct NameCheck {
    at_ns: u64,
    may_be_named: bool,
}

/// Some ranges set conditions on pages (`needs_merged`, `needs_own`). These pages fulfil them.
#[derive(Debug, Default)]
struct FitPages {
    /// Merged pages of the process whose pages stay.
    merged: PageSet,
    /// Pages to replace that only their own process maps.
    own: PageSet,
}

/// Which pages we look for: ones that nobody else maps, or merged ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Own,
    Merged,
}

/// The result of a range that we didn't try to merge.
pub(super) fn untried(range: &MergeRange) -> MergeResult {
    MergeResult { range: *range, merging: Merging::Untried }
}

impl LiveHost {
    /// Merges ranges of pages, batched by pairs of processes.
    pub(super) fn merge(&mut self, ranges: &[MergeRange], outcome: &mut Outcome) {
        let now_ns = self.now_ns();
        self.requesting.lists.retain(|_, list| list.is_fresh(now_ns));
        if ranges.is_empty() {
            return;
        }
        self.end_late_merge();
        let is_free = self.actuator.is_some() && self.requesting.late.is_none() && !self.must_unmark_first();
        let device = match &self.requesting.device {
            Some(device) if is_free => device.clone(),
            _ => {
                outcome.merges.extend(ranges.iter().map(untried));
                return;
            }
        };
        let mut by_pair: BTreeMap<Pair, Vec<MergeRange>> = BTreeMap::new();
        for range in ranges {
            match self.pair_of(range) {
                Some(pair) => by_pair.entry(pair).or_default().push(*range),
                None => outcome.merges.push(untried(range)),
            }
        }
        let mut in_turn: Vec<(Pair, Vec<MergeRange>)> = by_pair.into_iter().collect();
        in_turn.sort_by_cached_key(|(pair, _)| self.targets.get(&pair.take).is_some_and(comes_last));
        let mut checks = BTreeMap::new();
        let mut pass = Pass::begin();
        for (pair, ranges) in in_turn {
            let origin = self.targets.get(&pair.take).map(|target| target.origin).unwrap_or_default();
            let pages: u32 = ranges.iter().map(|range| range.take.pages).sum();
            let mut is_skipped = pages < MANY_PAGES && pass.is_over();
            for job in jobs(&ranges) {
                if is_skipped {
                    outcome.merges.extend(job.iter().map(untried));
                    continue;
                }
                let begun = outcome.merges.len();
                if let Err(merging) = self.merge_pair(&device, pair, &job, &mut checks, &mut outcome.merges) {
                    outcome.merges.extend(job.iter().map(|&range| MergeResult { range, merging }));
                }
                is_skipped = outcome.merges[begun..]
                    .iter()
                    .all(|result| matches!(result.merging, Merging::Differs | Merging::Untried));
            }
            pass.charge(origin);
        }
    }

    /// If a late request has ended, records its processes as marked. We also judge them again, which finds the memory
    /// that the kernel marked for the request.
    pub(super) fn end_late_merge(&mut self) {
        let Some(late) = self.requesting.late.take_if(|late| late.job.pending.is_over()) else { return };
        for pid in late.pids {
            self.record_marked(pid);
            if let Some(target) = self.targets.get_mut(&pid) {
                target.judge_again();
            }
            self.schedule.next_ns = 0;
        }
    }

    fn pair_of(&self, range: &MergeRange) -> Option<Pair> {
        let keep = match range.keep.first() {
            Some((region, _)) => Some(*self.regions.pids.get(&region)?),
            None => None,
        };
        Some(Pair { take: *self.regions.pids.get(&range.take.region)?, keep })
    }

    /// Merges pages of a pair of processes. If we tried nothing, returns the reason.
    fn merge_pair(
        &mut self,
        device: &Arc<RequestDevice>,
        pair: Pair,
        ranges: &[MergeRange],
        checks: &mut BTreeMap<i32, NameCheck>,
        results: &mut Vec<MergeResult>,
    ) -> Result<(), Merging> {
        let pids = pair.pids();
        for &pid in &pids {
            if !self.may_be_named(pid, checks) {
                return Err(Merging::Untried);
            }
        }
        let mut sides = Vec::new();
        for &pid in &pids {
            sides.push(self.side(pid).ok_or(Merging::Untried)?);
        }
        // We check the trust domain again, whatever the engine has checked: it may have changed since the engine's
        // snapshot.
        let domain = self.targets.get(&pair.take).ok_or(Merging::Untried)?.domain;
        if pids.iter().any(|pid| self.targets.get(pid).is_none_or(|target| target.domain != domain)) {
            return Err(Merging::Ineligible);
        }
        let mut parts = parts(ranges, &sides, results);
        if let Some(keep) = pair.keep {
            let Some(pages) = self.look_up(pair.take, keep, &parts) else {
                results.extend(parts.iter().map(untried));
                return Ok(());
            };
            parts = pages.only_fit(&parts, results);
        }
        if parts.is_empty() {
            return Ok(());
        }
        let are_recorded = pids.iter().all(|&pid| self.record_program(pid));
        for &pid in &pids {
            self.record_marked(pid);
        }
        let must_unmark = |pid: &i32| self.targets.get(pid).is_none_or(|target| target.pending.is_some());
        if !are_recorded || pids.iter().any(must_unmark) {
            results.extend(parts.iter().map(untried));
            return Ok(());
        }
        let turn = Arc::new(Turn::default());
        let job = Job::start(merge_job(device.clone(), sides, parts.clone(), turn.clone()));
        match job.wait(COMPUTING_MOST) {
            Ok(Ok(merged)) => {
                results.extend(joined(&parts, &merged.pages));
                self.note_named(&pids, &parts);
                if let Some(error) = merged.error {
                    self.report_refusal(pair, &error);
                }
            }
            // A process has ended. The next refresh removes its target.
            Ok(Err(_)) => results.extend(parts.iter().map(untried)),
            Err(job) => {
                let is_inside = turn.abandon();
                let merging = if is_inside || turn.may_have_called() { Merging::Unknown } else { Merging::Untried };
                results.extend(parts.iter().map(|&range| MergeResult { range, merging }));
                // The next surveys find out which of the processes keeps its mmap lock.
                for &pid in &pids {
                    if let Some(target) = self.targets.get_mut(&pid) {
                        target.invalidate();
                    }
                    checks.insert(pid, NameCheck { at_ns: 0, may_be_named: false });
                }
                self.schedule.next_ns = 0;
                if is_inside {
                    self.requesting.late = Some(Late { job, pids });
                    return Ok(());
                }
            }
        }
        // If a process has just called exec, we may have marked its new program.
        for &pid in &pids {
            self.record_marked(pid);
        }
        Ok(())
    }

    /// Records that the kernel has marked the mappings of these ranges. The next survey would find them, but until then
    /// we'd take merged pages for fork-shared ones on Linux 6.12.
    fn note_named(&mut self, pids: &[i32], parts: &[MergeRange]) {
        let mut named = BTreeSet::new();
        for part in parts {
            named.insert(part.take.region);
            named.extend(part.keep.first().map(|(region, _)| region));
        }
        for pid in pids {
            let Some(target) = self.targets.get_mut(pid) else { continue };
            for tracked in &mut target.regions {
                if named.contains(&tracked.key) {
                    tracked.stretch.marked = tracked.stretch.pages;
                }
            }
        }
    }

    /// Finds the pages that fulfil the conditions of ranges: the programs may have written pages or forked since the
    /// engine last saw them. `None` if we can't find out.
    fn look_up(&mut self, take: i32, keep: i32, parts: &[MergeRange]) -> Option<FitPages> {
        let mut merged = Vec::new();
        let mut own = Vec::new();
        for part in parts {
            let run = match part.keep {
                Keep::Run(_, first) => (first, part.take.pages),
                Keep::Page(_, page) => (page, 1),
                Keep::Zero => continue,
            };
            if part.needs_merged {
                merged.push(run);
            }
            if part.needs_own {
                own.push((part.take.first, part.take.pages));
            }
        }
        Some(FitPages {
            merged: self.find_pages(keep, merged, Wanted::Merged)?,
            own: self.find_pages(take, own, Wanted::Own)?,
        })
    }

    fn find_pages(&mut self, pid: i32, runs: Vec<(Vpn, u32)>, wanted: Wanted) -> Option<PageSet> {
        let mut found = PageSet::default();
        if runs.is_empty() {
            return Some(found);
        }
        let looked = self.targets.get_mut(&pid)?.read(move |process| {
            let mut reader = PageReader::new();
            match wanted {
                Wanted::Own => reader.private_pages(process, &runs, |page| _ = found.insert(page))?,
                Wanted::Merged => reader.merged_frames(process, &runs, true, |page, _| _ = found.insert(page))?,
            }
            Ok(found)
        });
        looked.ok()
    }

    /// Whether we may ask the kernel to merge pages of a process now. Checks the process again, unless we've just done
    /// so.
    fn may_be_named(&mut self, pid: i32, checks: &mut BTreeMap<i32, NameCheck>) -> bool {
        let now_ns = self.now_ns();
        match checks.get(&pid) {
            Some(last) if !last.may_be_named => return false,
            Some(last) if now_ns < last.at_ns + CHECK_NS => return self.requesting.late.is_none(),
            _ => {}
        }
        let may_be_named = self.requesting.late.is_none() && self.may_be_marked(pid);
        checks.insert(pid, NameCheck { at_ns: now_ns, may_be_named });
        may_be_named
    }

    /// Collects the facts that a job needs about a process. `None` if we can't read it now.
    fn side(&mut self, pid: i32) -> Option<Side> {
        let list = self.list_of(pid)?;
        let target = self.targets.get(&pid)?;
        let mut regions = BTreeMap::new();
        for tracked in &target.regions {
            let first = tracked.stretch.first.0;
            regions.insert(tracked.key, (first, first + tracked.stretch.pages.0));
        }
        Some(Side { process: target.info.process.clone(), space: target.space()?.clone(), list, regions })
    }

    /// The mappings of a process, read again if our list is too old.
    fn list_of(&mut self, pid: i32) -> Option<Arc<List>> {
        let now_ns = self.now_ns();
        let target = self.targets.get_mut(&pid)?;
        let program = target.program()?;
        // The regions are from the last survey, so the list must not be older.
        let surveyed_ns = target.surveyed_ns().unwrap_or(0);
        if let Some(list) = self.requesting.lists.get(&pid) {
            if list.program == program && surveyed_ns <= list.at_ns && list.is_fresh(now_ns) {
                return Some(list.clone());
            }
        }
        let read = target.read(|process| {
            let before_ns = thread_cpu_ns();
            Ok((read_smaps(process)?, thread_cpu_ns() - before_ns))
        });
        match read {
            Ok((details, cost_ns)) => {
                if details.iter().any(|detail| withdrawal(detail).is_some()) {
                    target.note_secrets();
                }
                let list = Arc::new(List::of(&details, program, now_ns, cost_ns));
                self.requesting.lists.insert(pid, list.clone());
                Some(list)
            }
            Err(error) => {
                if !error.is_late() && !matches!(error, ReadError::Vanished { .. }) {
                    self.report_left_alone(pid, error.to_string());
                }
                None
            }
        }
    }

    fn report_refusal(&mut self, pair: Pair, error: &std::io::Error) {
        match error.raw_os_error() {
            // The process has ended. The next refresh removes it.
            Some(libc::ESRCH) => {}
            Some(libc::EBUSY) => {
                self.stand_down("the kernel does not merge on request while run is 2".to_owned());
            }
            _ => {
                let with = match pair.keep {
                    Some(keep) if keep != pair.take => format!(" with those of process {keep}"),
                    _ => String::new(),
                };
                self.report_left_alone(pair.take, format!("its pages cannot be merged{with}: {error}"));
            }
        }
    }
}

fn jobs(ranges: &[MergeRange]) -> Vec<Vec<MergeRange>> {
    let mut jobs = Vec::new();
    let mut job = Vec::new();
    let mut room = JOB_PAGES;
    for &range in ranges {
        let mut skip = 0;
        while skip < range.take.pages {
            let pages = room.min(range.take.pages - skip);
            job.push(range.part(skip, pages));
            skip += pages;
            room -= pages;
            if room == 0 {
                jobs.push(std::mem::take(&mut job));
                room = JOB_PAGES;
            }
        }
    }
    if !job.is_empty() {
        jobs.push(job);
    }
    jobs
}

/// Returns the parts of ranges that we may ask the kernel to merge, and adds the results of all other parts. `sides`
/// begins with the process whose pages are replaced, and ends with the process whose pages replace them.
fn parts(ranges: &[MergeRange], sides: &[Side], results: &mut Vec<MergeResult>) -> Vec<MergeRange> {
    let mut parts = Vec::new();
    let (Some(taken), Some(kept)) = (sides.first(), sides.last()) else { return parts };
    for range in ranges {
        let PageRun { region, first, pages } = range.take;
        let is_known = taken.has(region, first, pages)
            && match range.keep {
                Keep::Run(region, first) => kept.has(region, first, pages),
                Keep::Page(region, page) => kept.has(region, page, 1),
                Keep::Zero => true,
            };
        if !is_known {
            results.push(untried(range));
            continue;
        }
        let mut skip = 0;
        while skip < pages {
            let (may_take, taken_for) = taken.list.at(first + u64::from(skip));
            let (may_keep, kept_for) = match range.keep {
                Keep::Run(_, first) => kept.list.at(first + u64::from(skip)),
                Keep::Page(_, page) => (kept.list.at(page).0, u64::MAX),
                Keep::Zero => (Some(true), u64::MAX),
            };
            let length = taken_for.min(kept_for).min(u64::from(pages - skip));
            let length = u32::try_from(length).unwrap_or(pages - skip);
            let part = range.part(skip, length);
            match (may_take, may_keep) {
                (Some(true), Some(true)) => parts.push(part),
                (Some(false), _) | (_, Some(false)) => {
                    results.push(MergeResult { range: part, merging: Merging::Ineligible });
                }
                _ => results.push(untried(&part)),
            }
            skip += length;
        }
    }
    parts
}

impl FitPages {
    /// Returns the parts whose pages fulfil their conditions, and adds the results of all other parts.
    fn only_fit(&self, parts: &[MergeRange], results: &mut Vec<MergeResult>) -> Vec<MergeRange> {
        let mut named = Vec::new();
        for part in parts {
            let mut merging = Vec::new();
            for at in 0..part.take.pages {
                let is_fit = self.are_fit(part.part(at, 1));
                merging.push(if is_fit { Merging::Untried } else { Merging::Absent });
            }
            for result in part.results(&merging) {
                match result.merging {
                    Merging::Absent => results.push(result),
                    _ => named.push(result.range),
                }
            }
        }
        named
    }

    /// Whether both pages of a one-page range fulfil its conditions.
    fn are_fit(&self, page: MergeRange) -> bool {
        let Some((_, kept)) = page.keep.first() else { return true };
        let is_own = self.own.contains(page.take.first);
        (!page.needs_merged || self.merged.contains(kept)) && (!page.needs_own || is_own)
    }
}

/// Makes the request. Ends early if we abandon it, or if one of the processes executes another program.
fn merge_job(
    device: Arc<RequestDevice>,
    sides: Vec<Side>,
    parts: Vec<MergeRange>,
    turn: Arc<Turn>,
) -> impl FnOnce() -> Result<Merged, ReadError> + Send + 'static {
    move || {
        let pidfds = sides.iter().map(|side| side.process.pidfd()).collect::<Result<Vec<_>, _>>()?;
        let (Some(&taken), Some(&kept)) = (pidfds.first(), pidfds.last()) else { return Ok(Merged::default()) };
        let mut ranges = Vec::new();
        for part in &parts {
            let kept = match part.keep {
                Keep::Run(_, first) => Kept::Run(kept, first.address()),
                Keep::Page(_, page) => Kept::Page(kept, page.address()),
                Keep::Zero => Kept::Zero,
            };
            let PageRun { first, pages, .. } = part.take;
            let keep_mappers = part.keep_mappers;
            ranges.push(Range { process: taken, address: first.address(), pages, kept, keep_mappers });
        }
        Ok(device.merge(&ranges, || {
            turn.leave();
            advance();
            sides.iter().all(Side::is_judged) && turn.enter()
        }))
    }
}

/// Joins the results of single pages: neighbours with the same result make one range.
fn joined(parts: &[MergeRange], pages: &[Merging]) -> Vec<MergeResult> {
    let mut rest = pages;
    let mut results = Vec::new();
    for part in parts {
        let (own, others) = rest.split_at((part.take.pages as usize).min(rest.len()));
        rest = others;
        results.extend(part.results(own));
    }
    results
}

#[cfg(test)]
#[path = "requesting_tests.rs"]
mod tests;
