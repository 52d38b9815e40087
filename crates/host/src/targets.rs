//! The targets: processes in scope. We survey one again only when its mappings have changed.
//!
//! Only smaps shows the flags of mappings and their anonymous pages, and it walks the page tables: some 10 ns per
//! present page. So we read it only when something cheaper shows a change: statm (1 us through the open file), whose
//! sizes change with nearly every mapping that is created, removed or grows, and from time to time maps (some 20 us),
//! which shows the rest. Each of the three gets its share of a core, for all processes together.
//!
//! If a program sets flags on a whole mapping, neither statm nor maps changes. But the program has to run for it, and
//! its CPU time tells us: we survey a process that has run again after a while, whatever else shows. CPU time also
//! tells us when to look at the process itself again: [`super::identity`].

use super::restless::Restless;
use crate::huge_mappings::HugeMappings;
use crate::identity::{Identity, Marks, PendingUnmark, Programs, Watch};
use crate::regions::{List, Tracked, follow, stretches};
use crate::scope::Scoped;
use crate::scope::exclude::{Exclusion, withdrawal};
use crate::scope::exe::Exe;
use pagefold_engine::host::Span;
use pagefold_engine::keys::{DomainKey, FamilyKey, GroupKey, OwnerKey, RegionKey};
use pagefold_engine::random::mix;
use pagefold_inject::unmerge::Unmerged;
use pagefold_procmem::image::AddressSpace;
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::os::abandonable::{Job, LIMIT, PATIENCE, Pending, advance, run_abandonable};
use pagefold_procmem::os::cpu::{own_cpu_ns, process_cpu_ns, thread_cpu_ns};
use pagefold_procmem::pagemap::Pagemap;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::{READS, Refusal};
use pagefold_procmem::statm::Sizes;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tracing::debug;

/// We count resident pages again if their number has changed by at least this, pages.
const RSS_CHANGE_PAGES: u64 = 256;
/// Surveys after changes may take 1/`CHANGE_SHARE` of the time, for all processes together.
const CHANGE_SHARE: u64 = 100;
/// The same if only the number of resident pages has changed a little, or we leave the process alone.
const DRIFT_SHARE: u64 = 3_333;
/// The same for checks of the list of mappings.
const MAPS_SHARE: u64 = 10_000;
/// Shortest time between checks of the list of mappings, nanoseconds.
const MAPS_MIN_NS: u64 = 1_000_000_000;
/// If a process has run we survey its mappings again after this time for changed flags, nanoseconds. These surveys may
/// take 1/`FLAGS_SHARE` of the time if something is marked in it, otherwise 1/`UNMARKED_FLAGS_SHARE`: with the first
/// mark a postponed survey becomes due.
const FLAGS_NS: u64 = 10_000_000_000;
const FLAGS_SHARE: u64 = 1_000;
const UNMARKED_FLAGS_SHARE: u64 = 20_000;
/// The same for any process, because another one may register its memory with userfaultfd, nanoseconds.
const FLAGS_MAX_NS: u64 = 300_000_000_000;

/// For this many mappings left alone we keep the reason.
const LEFT_OUT_MOST: usize = 256;

/// One process in scope.
#[derive(Debug)]
pub struct Target {
    pub process: Arc<Process>,
    /// The process's key in the core.
    pub owner: OwnerKey,
    pub domain: DomainKey,
    /// Safe to print.
    pub name: String,
    pub exe: Option<Exe>,
    /// Effective user.
    pub uid: u32,
    pub cgroup: Option<String>,
    /// The selector that brought it in: a position in [`ScopeSpec`](crate::scope::ScopeSpec).
    pub selected_by: Option<usize>,
    /// The group whose limits it shares.
    pub group: Option<GroupKey>,
    /// A sentence for each rule that applies to it, or seems to and doesn't.
    pub notes: Vec<String>,
    /// Why we leave the process alone, if we do. Updated with its mappings.
    pub exclusion: Option<Exclusion>,
    /// Regions, ascending.
    pub regions: Vec<Tracked>,
    /// The first mappings left alone, and why: first address, anonymous KiB, reason.
    pub left_out: Vec<(u64, u64, Exclusion)>,
    /// Where it had huge pages.
    pub(super) huge: HugeMappings,
    /// Marks that must go.
    pub pending: Option<PendingUnmark>,
    /// What the last request to unmerge it has done.
    pub(super) unmerged: Unmerged,
    /// Whether it's out of scope, and only here until it's unmerged.
    pub(super) only_to_unmerge: bool,
    /// When it came into scope, if that was after the run began, nanoseconds.
    pub(super) appeared_ns: Option<u64>,
    /// Whether we've surveyed it.
    pub(super) known: bool,
    /// Whether we've looked for marks of an earlier run.
    pub(super) marks_sought: bool,
    /// Whether we don't survey it yet, because others like it ended soon.
    pub young: bool,
    pub(super) identity: Identity,
    pub(super) space: Option<AddressSpace>,
    statm: Option<File>,
    /// Pages mapped at the last refresh.
    mapped: u64,
    surveyed: Option<Surveyed>,
    /// Since the last survey, the address space was at some time smaller by this many pages.
    dipped: u64,
    /// A read of its memory that hasn't returned in time.
    late: Option<Pending>,
    /// A survey that hasn't ended yet, and what we knew when it began.
    surveying: Option<(Job<Result<Listed, ReadError>>, Began)>,
    /// The mappings that the last survey found, until somebody takes them.
    list: Option<List>,
    restless: Restless,
}

/// What we knew when a survey began.
#[derive(Clone, Copy, Debug)]
struct Began {
    at_ns: u64,
    /// The process's CPU time.
    cpu_ns: Option<u64>,
    sizes: Sizes,
}

#[derive(Debug)]
struct Listed {
    /// Hash of the list of mappings.
    maps: u64,
    details: Result<Vec<VmaDetail>, ReadError>,
    cost_ns: u64,
}

/// The state at the last survey, to compare later states with.
#[derive(Debug)]
struct Surveyed {
    began: Began,
    /// CPU time of the survey.
    cost_ns: u64,
    /// Hash of the list of mappings.
    maps: u64,
    /// Whether the mappings have changed since.
    changed: bool,
    next_maps_ns: u64,
}

impl Target {
    /// Whether a span covers its whole region as of the last survey.
    pub(crate) fn is_whole(&self, span: &Span) -> bool {
        self.regions.iter().any(|Tracked { key, stretch }| {
            (*key, stretch.first, stretch.pages) == (span.region, span.first, span.pages)
        })
    }

    /// Whether we know its mappings, or know that we leave it alone.
    pub fn is_known(&self) -> bool {
        self.known || self.exclusion.is_some()
    }

    /// Makes a target of a process that has come into scope.
    pub fn new(scoped: Scoped, owner: OwnerKey, domain: DomainKey) -> Self {
        let named = scoped.is_named();
        Self {
            process: Arc::new(scoped.process),
            owner,
            domain,
            name: scoped.name,
            exe: scoped.exe,
            uid: scoped.uid,
            cgroup: scoped.cgroup,
            selected_by: scoped.selected_by,
            group: None,
            notes: Vec::new(),
            exclusion: None,
            regions: Vec::new(),
            left_out: Vec::new(),
            huge: HugeMappings::default(),
            pending: None,
            unmerged: Unmerged::default(),
            only_to_unmerge: false,
            appeared_ns: None,
            known: false,
            marks_sought: false,
            young: false,
            identity: Identity::new(named),
            space: None,
            statm: None,
            mapped: 0,
            surveyed: None,
            dipped: 0,
            late: None,
            surveying: None,
            list: None,
            restless: Restless::default(),
        }
    }

    /// Whether we may read nothing more now: a read of its memory hasn't returned, or didn't return in time a while
    /// ago.
    pub(crate) fn is_late(&self) -> bool {
        self.late.as_ref().is_some_and(|pending| !pending.is_over())
            || self.surveying.is_some()
            || READS.is_in_force(&self.process)
    }

    /// Whether a read of its memory makes no progress, or that has happened again and again.
    pub(crate) fn is_stuck(&mut self) -> bool {
        let surveying = self.surveying.as_mut().map(|(job, _)| &mut job.pending);
        self.late.iter_mut().chain(surveying).any(Pending::is_stuck) || READS.pause(&self.process) > LIMIT
    }

    /// Whether we may read its memory now. A verdict on the program before an exec doesn't count.
    pub(crate) fn may_be_read(&self) -> bool {
        !self.is_late() && !self.is_barred() && self.exclusion.is_none() && !self.runs_another_program()
    }

    /// Records that a read of its memory hasn't returned in time.
    pub(crate) fn set_late(&mut self, pending: Pending) {
        debug!(target: "read", pid = self.process.pid(), "a read does not return; its thread is left behind");
        READS.give_up(&self.process, pending.alive());
        self.late = Some(pending);
        self.invalidate();
    }

    /// Makes a read that may block on the process, such as on its mmap lock (see [`pagefold_procmem::os::abandonable`]).
    pub(super) fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Process) -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, ReadError> {
        self.admit()?;
        let process = self.process.clone();
        run_abandonable(move || read(&process)).unwrap_or_else(|pending| {
            self.set_late(pending);
            Err(self.locked())
        })
    }

    /// Leaves a thread behind that is busy with the process.
    pub(super) fn leave(&self, pending: &Pending) {
        if pending.is_asleep() && !READS.is_in_force(&self.process) {
            READS.give_up(&self.process, pending.alive());
        }
    }

    /// Whether we may read the process now.
    pub(super) fn admit(&self) -> Result<(), ReadError> {
        match READS.admit(&self.process) {
            Ok(()) if !self.is_late() => Ok(()),
            Ok(()) | Err(Refusal::Stalled) => Err(self.locked()),
            Err(Refusal::OthersStalled) => {
                let why = "other programs of its user or cgroup keep their memory maps locked";
                Err(self.not_read(io::ErrorKind::ResourceBusy, why))
            }
        }
    }

    fn locked(&self) -> ReadError {
        self.not_read(io::ErrorKind::TimedOut, "it keeps its memory map locked")
    }

    fn not_read(&self, kind: io::ErrorKind, why: &str) -> ReadError {
        ReadError::from_io(self.process.pid(), "smaps", io::Error::new(kind, why))
    }

    /// Looks at the process again if it's time, and surveys its mappings again if they've changed; returns whether
    /// we've learned anything new. `processes` is the number of targets that share the time for this.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process has ended.
    pub fn refresh(
        &mut self,
        now_ns: u64,
        processes: u64,
        watch: &mut Watch<'_>,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let sizes = self.sizes()?;
        // A zombie has no memory: its mappings read as empty and its sizes as zero.
        if sizes.resident == 0 && !self.process.is_alive() {
            return Err(ReadError::Vanished { pid: self.process.pid() });
        }
        self.mapped = sizes.mapped;
        let changed = self.notice_exec();
        if let Some((job, began)) = self.surveying.take() {
            match job.poll() {
                Ok(listed) => return self.adopt(listed, began, new_key),
                Err(job) => _ = self.keep_surveying(job, began),
            }
        }
        if self.is_stuck() {
            return Err(self.locked());
        }
        if self.is_late() {
            return Ok(changed);
        }
        match self.refresh_now(now_ns, processes, sizes, watch, new_key) {
            Ok(more) => Ok(changed || more),
            // We don't report it before it's stuck.
            Err(error) if error.is_late() => Ok(changed),
            Err(error) => Err(error),
        }
    }

    fn refresh_now(
        &mut self,
        now_ns: u64,
        processes: u64,
        sizes: Sizes,
        watch: &mut Watch<'_>,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let mut changed = false;
        let looked = self.look_is_due(now_ns);
        if looked {
            changed |= self.look(now_ns, processes, watch)?;
        }
        self.young = !self.is_barred() && !self.known && self.is_young(now_ns, watch.programs());
        // While we couldn't read it, we showed that as the reason.
        changed |= self.show_barred();
        if self.is_barred() || self.young {
            return Ok(changed);
        }
        let mut restless = std::mem::take(&mut self.restless);
        let is_restless = restless.check(now_ns, sizes.mapped, || Ok(self.sizes()?.mapped));
        self.restless = restless;
        if is_restless? {
            self.invalidate();
            return Ok(self.leave_alone(Exclusion::Restless) || changed);
        }
        if !self.survey_is_due(now_ns, processes, &sizes)? {
            return Ok(changed);
        }
        if !looked {
            changed |= self.look(now_ns, processes, watch)?;
            if self.is_barred() {
                return Ok(changed);
            }
        }
        self.admit()?;
        let began = Began { at_ns: now_ns, cpu_ns: process_cpu_ns(self.process.pid()), sizes };
        let process = self.process.clone();
        // Surveying a large process takes long. We adopt the result later.
        match Job::start(move || Listed::of(&process)).wait(PATIENCE) {
            Ok(listed) => Ok(self.adopt(listed, began, new_key)? || changed),
            Err(job) => self.keep_surveying(job, began).map(|()| changed),
        }
    }

    /// Leaves a survey running in its own thread.
    fn keep_surveying(&mut self, job: Job<Result<Listed, ReadError>>, began: Began) -> Result<(), ReadError> {
        if job.pending.is_over() {
            // It has failed.
            return Err(self.locked());
        }
        self.leave(&job.pending);
        self.surveying = Some((job, began));
        Ok(())
    }

    /// Adopts the result of a survey. Returns whether we've learned anything new.
    fn adopt(
        &mut self,
        listed: Result<Listed, ReadError>,
        began: Began,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let Listed { maps, details, cost_ns } = listed?;
        self.known = true;
        let regrown = self.surveyed.as_ref().is_none_or(|surveyed| began.sizes.mapped >= surveyed.began.sizes.mapped);
        let dipped = std::mem::take(&mut self.dipped);
        let program = self.program();
        self.list =
            details.as_ref().ok().zip(program).map(|(list, program)| List::of(list, program, began.at_ns, cost_ns));
        let changed = self.survey(details, if regrown { dipped } else { 0 }, new_key)?;
        let next_maps_ns = began.at_ns + MAPS_MIN_NS;
        self.surveyed = Some(Surveyed { began, cost_ns, maps, changed: false, next_maps_ns });
        Ok(changed)
    }

    /// Whether it isn't worth a survey yet, because others like it ended soon. A fork of a marked program may have
    /// inherited the marks, so we always survey it.
    fn is_young(&self, now_ns: u64, programs: &Programs) -> bool {
        let (Some(since_ns), Some(family)) = (self.appeared_ns, self.family()) else { return false };
        let from_ns = programs.lifetimes.worth_from_ns(family, programs.mechanism).unwrap_or(0);
        let is_marked = self.image().is_some_and(|image| programs.marked.contains_key(&image));
        let has_own_memory = || self.process.stat().is_ok_and(|stat| !stat.only_forked);
        now_ns < since_ns + from_ns && (!is_marked || has_own_memory())
    }

    /// The processes that it's like: they run the same program and map about as much. `None` before the first look.
    pub(super) fn family(&self) -> Option<FamilyKey> {
        Some(FamilyKey(mix(self.image()? ^ u64::from(self.mapped.max(1).ilog2()))))
    }

    /// Whether the mappings have changed and the share of the time allows a survey.
    fn survey_is_due(&mut self, now_ns: u64, processes: u64, sizes: &Sizes) -> Result<bool, ReadError> {
        if let Some(surveyed) = &mut self.surveyed {
            self.dipped = self.dipped.max(surveyed.began.sizes.mapped.saturating_sub(sizes.mapped));
            let before = surveyed.began.sizes;
            surveyed.changed |= sizes.mapped != before.mapped || sizes.data != before.data;
        }
        if self.surveyed.as_ref().is_some_and(|surveyed| !surveyed.changed && now_ns >= surveyed.next_maps_ns) {
            let before_ns = own_cpu_ns();
            let maps = self.read(maps_hash)?;
            let spent_ns = own_cpu_ns() - before_ns;
            if let Some(surveyed) = &mut self.surveyed {
                surveyed.changed = maps != surveyed.maps;
                surveyed.next_maps_ns = now_ns + (spent_ns * processes * MAPS_SHARE).max(MAPS_MIN_NS);
            }
        }
        if let Some(surveyed) = &self.surveyed {
            let Began { at_ns, cpu_ns, sizes: before } = surveyed.began;
            let drift = sizes.resident.abs_diff(before.resident);
            let share = if surveyed.changed || drift > RSS_CHANGE_PAGES.max(before.resident / 8) {
                CHANGE_SHARE
            } else if self.exclusion.is_some() || drift > RSS_CHANGE_PAGES.max(before.resident / 64) {
                DRIFT_SHARE
            } else {
                let share = if self.identity.is_marked() { FLAGS_SHARE } else { UNMARKED_FLAGS_SHARE };
                let wait_ns = (surveyed.cost_ns * processes * share).max(FLAGS_NS);
                let has_run = || cpu_ns.is_none() || cpu_ns != process_cpu_ns(self.process.pid());
                let is_due = now_ns >= at_ns + wait_ns;
                return Ok(is_due && (now_ns >= at_ns + FLAGS_MAX_NS || has_run()));
            };
            return Ok(now_ns >= at_ns + surveyed.cost_ns * processes * share);
        }
        Ok(true)
    }

    /// Leaves the process alone. Returns whether that's new. In case the reason passes, we keep its marks and know its
    /// regions for as long.
    pub(super) fn leave_alone(&mut self, why: Exclusion) -> bool {
        let keeps_marks = self.identity.is_marked() && !why.withdraws_marks();
        let mut changed = self.exclusion.as_ref() != Some(&why);
        if !keeps_marks {
            changed |= !std::mem::take(&mut self.regions).is_empty();
        }
        if changed {
            debug!(target: "scope", pid = self.process.pid(), name = %self.name, "left alone: {why}");
        }
        self.exclusion = Some(why);
        changed
    }

    /// Forgets what we know about its memory.
    pub(super) fn forget_memory(&mut self) {
        self.exclusion = None;
        self.regions.clear();
        self.forget_survey();
    }

    /// Forgets the last survey, and one that is under way.
    pub(super) fn forget_survey(&mut self) {
        self.left_out.clear();
        self.surveying = None;
        self.invalidate();
    }

    /// Makes the next refresh survey the mappings whether or not they have changed.
    pub fn invalidate(&mut self) {
        self.surveyed = None;
    }

    /// The same, but only once the share of the time allows.
    pub(super) fn set_changed(&mut self) {
        if let Some(surveyed) = &mut self.surveyed {
            surveyed.changed = true;
        }
    }

    /// The mappings that the last survey found. You can take them once.
    pub(super) fn take_list(&mut self) -> Option<List> {
        self.list.take()
    }

    /// When the last survey began, if it still holds.
    pub(super) fn surveyed_ns(&self) -> Option<u64> {
        self.surveyed.as_ref().map(|surveyed| surveyed.began.at_ns)
    }

    /// Updates the regions; returns whether they've changed. The process has unmapped `replaced` pages and mapped them
    /// again since the last survey: regions of about this size get new keys, even at the same address.
    fn survey(
        &mut self,
        details: Result<Vec<VmaDetail>, ReadError>,
        replaced: u64,
        mut new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let before = (self.exclusion.take(), std::mem::take(&mut self.left_out));
        let details = match details {
            Ok(details) => details,
            Err(ReadError::TooMany { most, .. }) => {
                // We don't know the flags of all of them, so none of its marks may stay.
                let why = Exclusion::TooManyMappings { most };
                if self.identity.is_marked() {
                    self.request_unmark(why.clone(), Marks::Mappings);
                }
                let had_regions = !std::mem::take(&mut self.regions).is_empty();
                let is_new = before.0.as_ref() != Some(&why);
                self.exclusion = Some(why);
                return Ok(had_regions || is_new);
            }
            Err(error) => return Err(error),
        };
        let exe = self.exe.as_deref().and_then(|exe| exe.file_name()).map_or(&b""[..], |name| name.as_encoded_bytes());
        let mut program = DefaultHasher::new();
        self.exe.as_deref().hash(&mut program);
        let left_out = &mut self.left_out;
        let found = stretches(&details, exe, program.finish(), |detail, exclusion| {
            if exclusion != Exclusion::NothingAnonymous && left_out.len() < LEFT_OUT_MOST {
                left_out.push((detail.vma.start, detail.anonymous_kib, exclusion));
            }
        });
        let former = std::mem::take(&mut self.regions);
        self.regions = follow(&former, found, &mut new_key);
        let sizes = replaced.max(1)..=2 * replaced;
        for tracked in self.regions.iter_mut().filter(|tracked| sizes.contains(&tracked.stretch.pages.0)) {
            tracked.key = new_key();
        }
        if let Some(reason) = details.iter().find_map(withdrawal).filter(|_| self.identity.is_marked()) {
            self.request_unmark(reason, Marks::Excluded);
        }
        Ok(before.0.is_some() || before.1 != self.left_out || former != self.regions)
    }

    fn sizes(&mut self) -> Result<Sizes, ReadError> {
        let statm = match &mut self.statm {
            Some(statm) => statm,
            none => none.insert(self.process.open_file("statm")?),
        };
        self.process.fault("statm")?;
        let mut buffer = [0; 256];
        let length =
            statm.read_at(&mut buffer, 0).map_err(|error| ReadError::from_io(self.process.pid(), "statm", error))?;
        Sizes::parse(&buffer[..length]).map_err(|what| self.process.malformed("statm", what))
    }
}

impl Listed {
    fn of(process: &Process) -> Result<Self, ReadError> {
        let before_ns = thread_cpu_ns();
        // Recent kernels read the list of mappings without the mmap lock. This read takes it, as the survey and the
        // injector do, so we find a locked map here. The survey reports other errors.
        let _ = Pagemap::open(process).and_then(|pagemap| pagemap.is_live());
        let (maps, details) = (maps_hash(process)?, read_smaps(process));
        Ok(Self { maps, details, cost_ns: thread_cpu_ns() - before_ns })
    }
}

fn maps_hash(process: &Process) -> Result<u64, ReadError> {
    let (mut maps, mut file) = (DefaultHasher::new(), process.open_file("maps")?);
    let mut buffer = vec![0; 16 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(maps.finish()),
            Ok(read) => maps.write(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::from_io(process.pid(), "maps", error)),
        }
        advance();
    }
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
