//! The targets: processes in scope. A refresh checks the process itself from time to time ([`recheck`]), and surveys
//! its mappings only when they have changed ([`survey`]). [`marks`] knows which memory is marked, and which marks must
//! go.

mod marks;
mod recheck;
mod survey;

pub use self::marks::{Marks, PendingUnmark};

use self::marks::{MarkRecord, UnmergeRequest};
use self::recheck::LastCheck;
use self::survey::Surveys;
use crate::huge_mappings::HugeMappings;
use crate::judge::{Judge, ProgramHistory};
use crate::regions::Tracked;
use crate::scope::ProcessInfo;
use crate::scope::exclude::Exclusion;
use pagefold_engine::host::Span;
use pagefold_engine::keys::{DomainKey, FamilyKey, GroupKey, OwnerKey, RegionKey};
use pagefold_engine::random::mix;
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::os::abandonable::{Job, LIMIT, PATIENCE, Pending, run_abandonable};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::{Origin, READS, Refusal};
use pagefold_procmem::statm::Sizes;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tracing::debug;

/// If we read a list of mappings in the background, the list may be this old when we use it.
const LISTING_FRESH: Duration = Duration::from_secs(10);

/// One process in scope.
#[derive(Debug)]
pub struct Target {
    /// The process as of the last check.
    pub info: ProcessInfo,
    /// The process's key in the engine.
    pub owner: OwnerKey,
    /// The trust domain, which doesn't change while memory of the process is marked.
    pub domain: DomainKey,
    /// The group whose limits apply to the process.
    pub group: Option<GroupKey>,
    /// One sentence for each rule that applies to the process, or seems to apply but doesn't.
    pub notes: Vec<String>,
    /// Why we leave the process alone, if we do.
    pub exclusion: Option<Exclusion>,
    /// Regions, by ascending address.
    pub regions: Vec<Tracked>,
    /// The user and the cgroup of the process, as of the last check.
    pub(crate) origin: Origin,
    /// We leave the process alone if it has more regions than this.
    pub(crate) regions_most: usize,
    /// The first mappings that we leave alone: first address, anonymous KiB, reason.
    pub left_out: Vec<(u64, u64, Exclusion)>,
    /// Where the process had huge pages before we marked its memory.
    pub(crate) huge: HugeMappings,
    /// Marks that must go.
    pub pending: Option<PendingUnmark>,
    pub(crate) request: UnmergeRequest,
    /// When we last refreshed the process, or found it, nanoseconds.
    pub(crate) refreshed_ns: u64,
    /// When the process came into scope, nanoseconds. `None` if it was in scope when the run began.
    pub(crate) appeared_ns: Option<u64>,
    /// Whether we don't survey the process yet, because similar processes died young.
    pub on_probation: bool,
    check: LastCheck,
    marks: MarkRecord,
    surveys: Surveys,
    /// A read of the process's memory that hasn't returned in time.
    late_read: Option<Pending>,
    /// If [`Self::mappings_now`] started the late read: receives the mappings, and when they were read.
    listing: Option<Receiver<Result<Listed, ReadError>>>,
}

type Listed = (Vec<VmaDetail>, Instant);

impl Target {
    /// Makes a target of a process that has come into scope.
    pub fn new(info: ProcessInfo, owner: OwnerKey, domain: DomainKey) -> Self {
        Self {
            origin: Origin::of(&info.process),
            info,
            owner,
            domain,
            group: None,
            notes: Vec::new(),
            exclusion: None,
            regions: Vec::new(),
            regions_most: usize::MAX,
            left_out: Vec::new(),
            huge: HugeMappings::default(),
            pending: None,
            request: UnmergeRequest::default(),
            refreshed_ns: 0,
            appeared_ns: None,
            on_probation: false,
            check: LastCheck::default(),
            marks: MarkRecord::default(),
            surveys: Surveys::default(),
            late_read: None,
            listing: None,
        }
    }

    pub fn pid(&self) -> i32 {
        self.info.pid()
    }

    /// If a fork runs the same executable, gives it what we've found out about the file, such as links that led to it.
    pub(crate) fn share_exe(&self, child: &mut ProcessInfo) {
        if child.stat.only_forked && child.exe == self.info.exe {
            child.exe.clone_from(&self.info.exe);
        }
    }

    /// Whether a span covers the whole of its region, as of the last survey.
    pub(crate) fn is_whole(&self, span: &Span) -> bool {
        let region = self.regions.iter().find(|tracked| tracked.key == span.region);
        region.is_some_and(|tracked| tracked.stretch.first == span.first && tracked.stretch.pages == span.pages)
    }

    /// Whether we know the process's mappings, or know that we leave the process alone.
    pub fn is_known(&self) -> bool {
        self.surveys.are_known || self.exclusion.is_some()
    }

    /// Whether we only list the process, because it matches by name only, or has left the scope.
    pub(crate) fn is_stranger(&self) -> bool {
        self.info.distrust.is_some() || self.exclusion == Some(Exclusion::OutOfScope)
    }

    /// Whether we mustn't begin another read now: one hasn't returned yet, or has returned late a short while ago.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.late_read.as_ref().is_some_and(|pending| !pending.is_over())
            || self.surveys.running.is_some()
            || READS.is_in_force(&self.info.process)
    }

    /// Whether a read of the process's memory makes no progress, or earlier reads have stalled again and again.
    pub(crate) fn is_blocked(&mut self) -> bool {
        let survey = self.surveys.running.as_mut().map(|survey| &mut survey.job.pending);
        self.late_read.iter_mut().chain(survey).any(Pending::is_stuck) || READS.pause(&self.info.process) > LIMIT
    }

    /// Whether we may read the process's memory now. A verdict from before an exec doesn't count.
    pub(crate) fn may_be_read(&self) -> bool {
        !self.has_timed_out() && !self.is_excluded() && self.exclusion.is_none() && !self.runs_another_program()
    }

    /// Whether we may look up which of the process's pages are merged. That reads no contents, so we also do it while
    /// we leave the process alone but keep its marks, unless reads of it fail.
    pub(crate) fn may_be_counted(&self) -> bool {
        let is_kept = match &self.exclusion {
            None => !self.is_excluded(),
            Some(Exclusion::Stuck | Exclusion::NotReadable) => false,
            Some(why) => self.marks.are_set && !why.withdraws_marks(),
        };
        is_kept && !self.has_timed_out() && !self.runs_another_program()
    }

    /// Records that a read of the process's memory hasn't returned in time.
    pub(crate) fn set_timed_out(&mut self, mut pending: Pending) {
        debug!(target: "read", pid = self.pid(), "a read does not return; its thread is left behind");
        self.leave(&mut pending);
        self.late_read = Some(pending);
        self.invalidate();
    }

    /// Makes a read that may block on the process, such as on its mmap lock (see
    /// [`pagefold_procmem::os::abandonable`]).
    pub(crate) fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Arc<Process>) -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, ReadError> {
        self.admit()?;
        let process = self.info.process.clone();
        run_abandonable(move || read(&process)).unwrap_or_else(|pending| {
            self.set_timed_out(pending);
            Err(self.locked())
        })
    }

    /// The process's mappings. If reading them takes long, we go on in the background, and a later call returns them.
    pub(crate) fn mappings_now(&mut self) -> Result<Vec<VmaDetail>, ReadError> {
        self.mappings_by(read_smaps)
    }

    fn mappings_by(
        &mut self,
        read: impl FnOnce(&Process) -> Result<Vec<VmaDetail>, ReadError> + Send + 'static,
    ) -> Result<Vec<VmaDetail>, ReadError> {
        self.admit()?;
        let late = self.listing.take().and_then(|listing| listing.try_recv().ok());
        if let Some(Ok((details, at))) = late {
            if at.elapsed() < LISTING_FRESH {
                return Ok(details);
            }
        }
        let process = self.info.process.clone();
        match Job::start(move || Ok((read(&process)?, Instant::now()))).wait(PATIENCE) {
            Ok(listed) => listed.map(|(details, _)| details),
            Err(job) => {
                let (listing, pending) = job.leave();
                self.listing = Some(listing);
                self.set_timed_out(pending);
                Err(self.locked())
            }
        }
    }

    /// Abandons a thread that's busy with the process. This counts as a stall of the process only if the process itself
    /// has kept the thread waiting for long enough: other processes may have used up our patience, or the injector's
    /// time.
    pub(crate) fn leave(&self, pending: &mut Pending) {
        if !pending.waits_for_target() {
            return;
        }
        if pending.idle() < PATIENCE {
            READS.hold(&self.info.process, pending.alive());
        } else {
            READS.give_up(&self.info.process, pending.alive());
        }
    }

    /// Whether we may read the process now.
    pub(crate) fn admit(&self) -> Result<(), ReadError> {
        match READS.admit(&self.info.process) {
            Ok(()) if !self.has_timed_out() => Ok(()),
            Ok(()) | Err(Refusal::Stalled) => Err(self.locked()),
            Err(Refusal::OthersStalled) => {
                let why = "other programs of its user or cgroup keep their memory maps locked";
                Err(self.not_read(io::ErrorKind::ResourceBusy, why))
            }
        }
    }

    fn locked(&self) -> ReadError {
        let late = self.late_read.as_ref();
        let computes = late.is_some_and(|pending| !pending.is_over() && !pending.waits_for_target());
        let why = if computes { "reading it takes long" } else { "it keeps its memory map locked" };
        self.not_read(io::ErrorKind::TimedOut, why)
    }

    fn not_read(&self, kind: io::ErrorKind, why: &str) -> ReadError {
        ReadError::from_io(self.pid(), "smaps", io::Error::new(kind, why))
    }

    /// Checks the process again if it's time, and surveys its mappings again if they've changed; returns whether we've
    /// learned anything new. `processes` is the number of targets that share the time for this.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process has ended.
    pub fn refresh(
        &mut self,
        now_ns: u64,
        processes: u64,
        judge: &mut Judge<'_>,
        mut new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let sizes = self.sizes_of_living()?;
        self.surveys.mapped = sizes.mapped;
        let changed = self.notice_exec();
        if let Some(surveyed) = self.poll_survey(&mut new_key) {
            return surveyed;
        }
        if let Some(mut pending) = self.late_read.take_if(|pending| !pending.is_over()) {
            self.leave(&mut pending);
            self.late_read = Some(pending);
        }
        if self.is_blocked() {
            return Err(self.locked());
        }
        if self.has_timed_out() {
            return Ok(changed);
        }
        match self.refresh_now(now_ns, processes, sizes, judge, new_key) {
            Ok(more) => Ok(changed || more),
            // We report a late read only once the process counts as blocked.
            Err(error) if error.is_late() => Ok(changed),
            Err(error) => Err(error),
        }
    }

    /// The process's sizes. If the thread whose file we've kept open has ended, we read another thread's.
    fn sizes_of_living(&mut self) -> Result<Sizes, ReadError> {
        match self.sizes() {
            // A zombie has no memory: its mappings read as empty and its sizes as zero.
            Ok(Sizes { resident: 0, .. }) | Err(ReadError::Vanished { .. }) => {}
            sizes => return sizes,
        }
        if !self.info.process.is_alive() {
            return Err(ReadError::Vanished { pid: self.pid() });
        }
        self.surveys.statm = None;
        self.sizes()
    }

    fn refresh_now(
        &mut self,
        now_ns: u64,
        processes: u64,
        sizes: Sizes,
        judge: &mut Judge<'_>,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let mut changed = false;
        let is_checked = self.check_is_due(now_ns);
        if is_checked {
            changed |= self.recheck(now_ns, processes, judge)?;
        }
        self.on_probation = !self.is_excluded() && !self.surveys.are_known && self.may_end_soon(now_ns, judge.history);
        // We may have shown another reason while we couldn't read the process.
        changed |= self.show_excluded();
        if self.is_excluded() || self.on_probation {
            return Ok(changed);
        }
        let is_due = if self.is_churning(now_ns, sizes.mapped)? {
            changed |= self.leave_alone(Exclusion::Restless);
            self.set_changed();
            self.marks_must_be_checked(now_ns, processes)
        } else {
            self.survey_is_due(now_ns, processes, &sizes)?
        };
        if !is_due {
            return Ok(changed);
        }
        if !is_checked {
            changed |= self.recheck(now_ns, processes, judge)?;
            if self.is_excluded() {
                return Ok(changed);
            }
        }
        Ok(self.survey(now_ns, sizes, new_key)? || changed)
    }

    /// Whether a survey of the process isn't worth it yet, because similar processes died young. A fork of a marked
    /// program may have inherited the marks, so we always survey it.
    fn may_end_soon(&self, now_ns: u64, history: &ProgramHistory) -> bool {
        let (Some(since_ns), Some(family)) = (self.appeared_ns, self.family()) else { return false };
        let from_ns = history.lifetimes.worth_from_ns(family, history.mechanism).unwrap_or(0);
        if now_ns >= since_ns + from_ns {
            return false;
        }
        let is_marked = self.image().is_some_and(|image| history.marked.domain(image).is_some());
        // An exec leaves no inherited marks.
        !is_marked || self.info.process.stat().is_ok_and(|stat| !stat.only_forked)
    }

    /// The family of similar processes: they run the same program and map about as much. `None` before the first check.
    pub(crate) fn family(&self) -> Option<FamilyKey> {
        Some(FamilyKey(mix(self.image()? ^ u64::from(self.surveys.mapped.max(1).ilog2()))))
    }

    /// Leaves the process alone. Returns whether that's new. If something is marked and the reason doesn't withdraw
    /// marks, we also keep the regions, because such a reason may go away.
    pub(crate) fn leave_alone(&mut self, why: Exclusion) -> bool {
        let keeps_marks = self.marks.are_set && !why.withdraws_marks();
        let mut changed = self.exclusion.as_ref() != Some(&why);
        if !keeps_marks {
            let regions = std::mem::take(&mut self.regions);
            changed |= !regions.is_empty();
            self.marks.note_forgotten(&regions);
        }
        if changed {
            debug!(target: "scope", pid = self.pid(), name = %self.info.name, "left alone: {why}");
        }
        self.exclusion = Some(why);
        changed
    }

    /// Forgets the process's mappings and regions, and why we left its memory alone.
    fn forget_memory(&mut self) {
        self.exclusion = None;
        let regions = std::mem::take(&mut self.regions);
        self.marks.note_forgotten(&regions);
        self.forget_survey();
    }
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
