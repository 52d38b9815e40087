//! Surveys of a target's mappings: when a survey is due, and what its result changes.
//!
//! Only smaps shows the flags of mappings and their anonymous pages, and it walks the page tables: some 10 to 60 ns per
//! present page, and meanwhile the kernel holds the mmap lock, for a whole mapping at a time. So we read it only when
//! something cheaper shows a change: statm (1 us through the open file), whose sizes change with nearly every mapping
//! that is created, removed or grows, and from time to time maps (some 20 us), which shows the rest. Each of the three
//! gets its share of a core, for all processes together. Large processes ([`LONG_NS`]) are surveyed more rarely.
//!
//! If a program sets flags on a whole mapping, neither statm nor maps changes. But the program has to run to do that,
//! and its CPU time tells us: some time after a process has run, we survey it again, whatever statm and maps show.

use super::{Marks, Target};
use crate::churn::ChurnDetector;
use crate::regions::{List, follow, stretches};
use crate::scope::exclude::{Exclusion, withdrawal};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::units::{PAGE_BYTES, Pages};
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::os::abandonable::{Job, PATIENCE};
use pagefold_procmem::os::cpu::{process_cpu_ns, thread_cpu_ns};
use pagefold_procmem::pagemap::Pagemap;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::statm::Sizes;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// We count resident pages again if their number has changed by at least this, pages.
const RSS_CHANGE_PAGES: u64 = 256;
/// Surveys after changes may take 1/`CHANGE_SHARE` of the time, for all processes together.
const CHANGE_SHARE: u64 = 100;
/// Surveys for newly locked memory, which may be a secret, may take 1/`LOCK_SHARE` of the time.
const LOCK_SHARE: u64 = 10;
/// While we survey a process, its threads can't map memory. If a survey took this long, nanoseconds, surveys after
/// small changes may only take 1/`FLAGS_SHARE` of the time.
pub(super) const LONG_NS: u64 = 20_000_000;
/// If only the number of resident pages has changed a little, or we leave the process alone, surveys may take
/// 1/`DRIFT_SHARE` of the time.
const DRIFT_SHARE: u64 = 3_333;
/// Checks of the list of mappings may take 1/`MAPS_SHARE` of the time.
const MAPS_SHARE: u64 = 10_000;
/// Shortest time between checks of the list of mappings, nanoseconds.
const MAPS_MIN_NS: u64 = 1_000_000_000;
/// If a process has run we survey its mappings again after this time for changed flags, nanoseconds. These surveys may
/// take 1/`FLAGS_SHARE` of the time if the process has marks, otherwise 1/`UNMARKED_FLAGS_SHARE`. So a survey that
/// waits for the smaller share may become due with the first mark.
pub(super) const FLAGS_NS: u64 = 10_000_000_000;
const FLAGS_SHARE: u64 = 1_000;
const UNMARKED_FLAGS_SHARE: u64 = 20_000;
/// After this time, nanoseconds, we survey even a process that hasn't run, because another process may register its
/// memory with userfaultfd.
const FLAGS_MAX_NS: u64 = 300_000_000_000;

/// We keep the reason for at most this many mappings that we leave alone.
const LEFT_OUT_MOST: usize = 256;

/// The surveys of a process, and the sizes that tell us when one is due.
#[derive(Debug, Default)]
pub(super) struct Surveys {
    pub(super) statm: Option<File>,
    /// Pages mapped at the last refresh.
    pub(super) mapped: u64,
    /// Whether there has been a survey.
    pub(super) are_known: bool,
    pub(super) last: Option<LastSurvey>,
    /// How many merged pages it had, less its part of these pages by Pss, when we last counted the saving.
    pub(super) shared: u64,
    /// Whether the process has locked or unlocked memory since the last survey, or made marked memory secret.
    pub(super) are_locks_new: bool,
    /// The address space has shrunk by at most this many pages since the last survey. It may have grown again.
    dipped: u64,
    /// A survey that hasn't ended yet.
    pub(super) running: Option<RunningSurvey>,
    /// The mappings that the last survey found, until somebody takes them.
    list: Option<List>,
    churn: ChurnDetector,
}

#[derive(Debug)]
pub(super) struct RunningSurvey {
    pub(super) job: Job<Result<Listing, ReadError>>,
    start: SurveyStart,
}

/// The facts that we knew when a survey began.
#[derive(Clone, Copy, Debug)]
struct SurveyStart {
    at_ns: u64,
    cpu_ns: Option<u64>,
    sizes: Sizes,
    shared: u64,
}

/// The result of reading a process's mappings.
#[derive(Debug)]
pub(super) struct Listing {
    /// Hash of the list of mappings.
    maps: u64,
    details: Result<Vec<VmaDetail>, ReadError>,
    /// The CPU time spent on the list of mappings alone, and in all.
    maps_cost_ns: u64,
    cost_ns: u64,
}

/// The state at the last survey, to compare later states with.
#[derive(Debug)]
pub(super) struct LastSurvey {
    start: SurveyStart,
    pub(super) cost_ns: u64,
    /// Hash of the list of mappings.
    maps: u64,
    /// Whether the mappings have changed since the survey.
    has_changed: bool,
    pub(super) next_maps_ns: u64,
}

impl Listing {
    fn of(process: &Process) -> Result<Self, ReadError> {
        let before_ns = thread_cpu_ns();
        // Recent kernels read the list of mappings without the mmap lock. But pagemap takes the lock, as the survey and
        // the injector do, so we find out here if it's held. The survey reports other errors.
        let _ = Pagemap::open(process).and_then(|pagemap| pagemap.is_live());
        let maps = maps_hash(process)?;
        let maps_cost_ns = thread_cpu_ns() - before_ns;
        let details = read_smaps(process);
        Ok(Self { maps, details, maps_cost_ns, cost_ns: thread_cpu_ns() - before_ns })
    }
}

impl LastSurvey {
    /// Whether the next survey is due: the less has changed, the smaller the share of the time that surveys may take.
    fn is_due(&self, now_ns: u64, processes: u64, sizes: &Sizes, target: &Target) -> bool {
        let before = self.start.sizes;
        // Merging changes the process's part of the frames.
        let shared = target.surveys.shared.abs_diff(self.start.shared);
        let drift = sizes.resident.abs_diff(before.resident).max(shared);
        let all_cost_ns = self.cost_ns * processes;
        if target.surveys.are_locks_new {
            return now_ns >= self.start.at_ns + all_cost_ns * LOCK_SHARE;
        }
        if self.has_changed || drift > RSS_CHANGE_PAGES.max(before.resident / 8) {
            let has_grown = sizes.data.saturating_sub(before.data) > before.resident / 8;
            let share = if self.cost_ns < LONG_NS || has_grown { CHANGE_SHARE } else { FLAGS_SHARE };
            return now_ns >= self.start.at_ns + all_cost_ns * share;
        }
        if target.exclusion.is_some() || drift > RSS_CHANGE_PAGES.max(before.resident / 64) {
            return now_ns >= self.start.at_ns + all_cost_ns * DRIFT_SHARE;
        }
        let share = if target.marks.are_set { FLAGS_SHARE } else { UNMARKED_FLAGS_SHARE };
        if !self.flags_are_due(now_ns, processes, share) {
            return false;
        }
        now_ns >= self.start.at_ns + FLAGS_MAX_NS
            || self.start.cpu_ns.is_none()
            || self.start.cpu_ns != process_cpu_ns(target.info.pid())
    }

    /// Whether it's time to look for changed flags.
    fn flags_are_due(&self, now_ns: u64, processes: u64, share: u64) -> bool {
        now_ns >= self.start.at_ns + (self.cost_ns * processes * share).max(FLAGS_NS)
    }
}

impl Target {
    /// Whether the process maps and unmaps all the time.
    pub(super) fn is_churning(&mut self, now_ns: u64, mapped: u64) -> Result<bool, ReadError> {
        let mut churn = std::mem::take(&mut self.surveys.churn);
        let is_churning = churn.check(now_ns, mapped, || Ok(self.sizes()?.mapped));
        self.surveys.churn = churn;
        is_churning
    }

    /// Whether we must survey a process that we'd rather leave alone, because it may have made marked memory secret.
    pub(super) fn marks_must_be_checked(&self, now_ns: u64, processes: u64) -> bool {
        let last = self.surveys.last.as_ref();
        let is_time = last.is_none_or(|last| last.flags_are_due(now_ns, processes, FLAGS_SHARE));
        self.marks.are_set && (self.surveys.are_locks_new || is_time)
    }

    pub(crate) fn note_shared(&mut self, pages: u64) {
        self.surveys.shared = pages;
    }

    /// Surveys the mappings. Returns whether we've learned anything new.
    pub(super) fn survey(
        &mut self,
        now_ns: u64,
        sizes: Sizes,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        self.admit()?;
        self.surveys.are_locks_new = false;
        let cpu_ns = process_cpu_ns(self.info.pid());
        let start = SurveyStart { at_ns: now_ns, cpu_ns, sizes, shared: self.surveys.shared };
        let process = self.info.process.clone();
        // Surveying a large process takes long. Then we adopt the result at a later refresh.
        match Job::start(move || Listing::of(&process)).wait(PATIENCE) {
            Ok(listing) => self.adopt_survey(listing, start, new_key),
            Err(job) => self.keep_surveying(job, start).map(|()| false),
        }
    }

    /// Adopts the result of a survey that was still under way. `None` if there was none, or it hasn't ended yet.
    pub(super) fn poll_survey(&mut self, new_key: impl FnMut() -> RegionKey) -> Option<Result<bool, ReadError>> {
        let RunningSurvey { job, start } = self.surveys.running.take()?;
        match job.poll() {
            Ok(listing) => Some(self.adopt_survey(listing, start, new_key)),
            Err(job) => {
                let _ = self.keep_surveying(job, start);
                None
            }
        }
    }

    /// Leaves a survey running in its own thread.
    fn keep_surveying(
        &mut self,
        mut job: Job<Result<Listing, ReadError>>,
        start: SurveyStart,
    ) -> Result<(), ReadError> {
        if job.pending.is_over() {
            // The survey has failed.
            return Err(self.locked());
        }
        self.leave(&mut job.pending);
        self.surveys.running = Some(RunningSurvey { job, start });
        Ok(())
    }

    /// Adopts the result of a survey. Returns whether we've learned anything new.
    fn adopt_survey(
        &mut self,
        listing: Result<Listing, ReadError>,
        start: SurveyStart,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let Listing { maps, details, maps_cost_ns, cost_ns } = listing?;
        self.surveys.are_known = true;
        let last = self.surveys.last.as_ref();
        let has_regrown = last.is_none_or(|last| start.sizes.mapped >= last.start.sizes.mapped);
        let dipped = std::mem::take(&mut self.surveys.dipped);
        self.surveys.list = match (&details, self.program()) {
            (Ok(details), Some(program)) => Some(List::of(details, program, start.at_ns, cost_ns)),
            _ => None,
        };
        let changed = self.follow_regions(details, if has_regrown { dipped } else { 0 }, new_key)?;
        if self.exclusion.is_none() && self.surveys.churn.is_restless(start.at_ns) {
            self.leave_alone(Exclusion::Restless);
        }
        let next_maps_ns = start.at_ns + (maps_cost_ns * MAPS_SHARE).max(MAPS_MIN_NS);
        self.surveys.last = Some(LastSurvey { start, cost_ns, maps, has_changed: false, next_maps_ns });
        Ok(changed)
    }

    /// Whether the mappings have changed, and surveys haven't used up their share of the time.
    pub(super) fn survey_is_due(&mut self, now_ns: u64, processes: u64, sizes: &Sizes) -> Result<bool, ReadError> {
        if let Some(last) = &mut self.surveys.last {
            let before = last.start.sizes;
            self.surveys.dipped = self.surveys.dipped.max(before.mapped.saturating_sub(sizes.mapped));
            last.has_changed |= sizes.mapped != before.mapped || sizes.data != before.data;
            if !last.has_changed && now_ns >= last.next_maps_ns {
                self.check_maps(now_ns, processes)?;
            }
        }
        let Some(last) = &self.surveys.last else { return Ok(true) };
        Ok(last.is_due(now_ns, processes, sizes, self))
    }

    /// Checks whether the list of mappings has changed.
    fn check_maps(&mut self, now_ns: u64, processes: u64) -> Result<(), ReadError> {
        let (maps, spent_ns) = self.read(|process| {
            let before_ns = thread_cpu_ns();
            let maps = maps_hash(process)?;
            Ok((maps, thread_cpu_ns() - before_ns))
        })?;
        if let Some(last) = &mut self.surveys.last {
            last.has_changed = maps != last.maps;
            last.next_maps_ns = now_ns + (spent_ns * processes * MAPS_SHARE).max(MAPS_MIN_NS);
        }
        Ok(())
    }

    /// Updates the regions; returns whether they've changed. The process has unmapped `replaced` pages and mapped them
    /// again since the last survey: regions of about this size get new keys, even at the same address.
    fn follow_regions(
        &mut self,
        details: Result<Vec<VmaDetail>, ReadError>,
        replaced: u64,
        mut new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let former_exclusion = self.exclusion.take();
        let former_left_out = std::mem::take(&mut self.left_out);
        let details = match details {
            Ok(details) => details,
            Err(ReadError::TooMany { most, .. }) => {
                return Ok(self.leave_unmarked(Exclusion::TooManyMappings { most }, former_exclusion));
            }
            Err(error) => return Err(error),
        };
        let path = self.info.exe.as_deref();
        let exe = match path.and_then(Path::file_name) {
            Some(name) => name.as_encoded_bytes(),
            None => b"",
        };
        let mut program = DefaultHasher::new();
        path.hash(&mut program);
        let left_out = &mut self.left_out;
        let found = stretches(&details, exe, program.finish(), |detail, exclusion| {
            if exclusion != Exclusion::NothingAnonymous && left_out.len() < LEFT_OUT_MOST {
                left_out.push((detail.vma.start, detail.anonymous_kib, exclusion));
            }
        });
        if found.iter().filter(|stretch| stretch.resident > Pages(0)).count() > self.regions_most {
            return Ok(self.leave_unmarked(Exclusion::TooManyInAll, former_exclusion));
        }
        let former = std::mem::take(&mut self.regions);
        self.regions = follow(&former, found, &mut new_key);
        let sizes = replaced.max(1)..=2 * replaced;
        for tracked in &mut self.regions {
            if sizes.contains(&tracked.stretch.pages.0) {
                tracked.key = new_key();
            }
        }
        self.marks.forgotten = Pages(0);
        if self.marks.are_set {
            for detail in &details {
                let Some(reason) = withdrawal(detail) else { continue };
                self.marks.forgotten += Pages(detail.anonymous_kib * 1024 / PAGE_BYTES);
                self.request_unmark(reason, Marks::Excluded);
            }
        }
        Ok(former_exclusion.is_some() || former_left_out != self.left_out || former != self.regions)
    }

    /// Leaves a process alone because we don't know its mappings, or don't keep them. Also has the marks on its
    /// mappings removed.
    fn leave_unmarked(&mut self, why: Exclusion, former: Option<Exclusion>) -> bool {
        if self.marks.are_set {
            self.request_unmark(why.clone(), Marks::Mappings);
        }
        self.surveys.list = None;
        self.exclusion = former;
        self.leave_alone(why)
    }

    /// Forgets the last survey, and a survey that is under way.
    pub(super) fn forget_survey(&mut self) {
        self.left_out.clear();
        self.surveys.running = None;
        self.invalidate();
    }

    /// Makes the next refresh survey the mappings whether or not they have changed.
    pub fn invalidate(&mut self) {
        self.surveys.last = None;
    }

    /// Like [`Self::invalidate`], but the next survey waits until surveys have used less than their share of the time.
    pub(crate) fn set_changed(&mut self) {
        if let Some(last) = &mut self.surveys.last {
            last.has_changed = true;
        }
    }

    /// Makes the next survey due soon, because the process has made marked memory secret, for example by mlock.
    pub(crate) fn note_secrets(&mut self) {
        self.surveys.are_locks_new = true;
    }

    /// The mappings that the last survey found. A second call returns nothing.
    pub(crate) fn take_list(&mut self) -> Option<List> {
        self.surveys.list.take()
    }

    /// When the last survey began. `None` if the next refresh surveys in any case.
    pub(crate) fn surveyed_ns(&self) -> Option<u64> {
        self.surveys.last.as_ref().map(|last| last.start.at_ns)
    }

    pub(super) fn sizes(&mut self) -> Result<Sizes, ReadError> {
        let process = &self.info.process;
        let statm = match &mut self.surveys.statm {
            Some(statm) => statm,
            none => none.insert(process.open_file("statm")?),
        };
        process.fault("statm")?;
        let mut buffer = [0; 256];
        let length =
            statm.read_at(&mut buffer, 0).map_err(|error| ReadError::from_io(process.pid(), "statm", error))?;
        Sizes::parse(&buffer[..length]).map_err(|what| process.malformed("statm", what))
    }
}

fn maps_hash(process: &Process) -> Result<u64, ReadError> {
    let mut maps = DefaultHasher::new();
    process.read_pieces("maps", u64::MAX, |piece| maps.write(piece))?;
    Ok(maps.finish())
}
