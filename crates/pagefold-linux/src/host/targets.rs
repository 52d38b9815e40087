//! The targets: processes in scope, surveyed again only when their mappings have changed.
//!
//! smaps is the only source of the flags of mappings and of their anonymous pages, and it walks the page tables: some
//! 10 ns per present page. So it is read only when something cheaper shows a change: statm (1 us through the open file),
//! whose sizes change with nearly every mapping that is created, removed or grows, and from time to time maps (some
//! 20 us), which shows the rest. Each of the three has its share of a core, for all processes together.

use super::restless::Restless;
use crate::host::regions::{Tracked, follow, stretches};
use crate::os::abandonable::{Pending, run_abandonable};
use crate::os::cpu::own_cpu_ns;
use crate::proc::maps::{VmaDetail, read_smaps};
use crate::proc::pagemap::Pagemap;
use crate::proc::process::{Process, ReadError};
use crate::proc::statm::Sizes;
use crate::scope::Scoped;
use crate::scope::deny_list::DenyList;
use crate::scope::exclude::{Exclusion, process_exclusion};
use pagefold_core::host::Span;
use pagefold_core::keys::{DomainKey, OwnerKey, RegionKey};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Resident pages are counted again if their number has changed by at least this, pages.
const RSS_CHANGE_PAGES: u64 = 256;
/// Surveys after changes may take 1/`CHANGE_SHARE` of the time, for all processes together.
const CHANGE_SHARE: u64 = 100;
/// The same if only the number of resident pages has changed a little, or the process is left alone.
const DRIFT_SHARE: u64 = 3_333;
/// The same for checks of the list of mappings.
const MAPS_SHARE: u64 = 10_000;
/// Shortest time between checks of the list of mappings, nanoseconds.
const MAPS_MIN_NS: u64 = 1_000_000_000;

/// One process in scope.
#[derive(Debug)]
pub struct Target {
    /// The process.
    pub process: Arc<Process>,
    /// Key of the process in the core.
    pub owner: OwnerKey,
    /// Trust domain.
    pub domain: DomainKey,
    /// Name, safe to print.
    pub name: String,
    /// Executable.
    pub exe: Option<PathBuf>,
    /// Effective user when it came into scope.
    pub uid: u32,
    /// Cgroup when it came into scope.
    pub cgroup: Option<String>,
    /// Why the process is left alone, if it is. Updated with its mappings.
    pub exclusion: Option<Exclusion>,
    /// Regions, ascending.
    pub regions: Vec<Tracked>,
    /// Mappings left alone, and why: first address, anonymous KiB, reason.
    pub left_out: Vec<(u64, u64, Exclusion)>,
    statm: Option<File>,
    surveyed: Option<Surveyed>,
    /// Pages by which the address space has been smaller at some time since the last survey.
    dipped: u64,
    /// A read of its memory that does not return.
    stuck: Option<Pending>,
    restless: Restless,
}

/// The state at the last survey of the mappings, to which later states are compared.
#[derive(Debug)]
struct Surveyed {
    at_ns: u64,
    /// CPU time of the survey.
    cost_ns: u64,
    sizes: Sizes,
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

    /// Makes a target of a process that has come into scope.
    pub fn new(scoped: Scoped, owner: OwnerKey, domain: DomainKey) -> Self {
        Self {
            process: Arc::new(scoped.process),
            owner,
            domain,
            name: scoped.name,
            exe: scoped.exe,
            uid: scoped.uid,
            cgroup: scoped.cgroup,
            exclusion: None,
            regions: Vec::new(),
            left_out: Vec::new(),
            statm: None,
            surveyed: None,
            dipped: 0,
            stuck: None,
            restless: Restless::default(),
        }
    }

    /// Whether a read of its memory has not returned yet.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.as_ref().is_some_and(|pending| !pending.is_over())
    }

    /// Records that a read of its memory does not return. The next survey reports it.
    pub(crate) fn set_stuck(&mut self, pending: Pending) {
        self.stuck = Some(pending);
        self.invalidate();
    }

    /// Makes a read that may block on the mmap lock of the process (see [`crate::os::abandonable`]).
    fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Process) -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, ReadError> {
        if !self.is_stuck() {
            let process = self.process.clone();
            match run_abandonable(|| 0, move || read(&process)) {
                Ok(answer) => return answer,
                Err(pending) => self.stuck = Some(pending),
            }
        }
        let source = io::Error::new(io::ErrorKind::TimedOut, "it keeps its memory map locked");
        Err(ReadError::from_io(self.process.pid(), "smaps", source))
    }

    /// Surveys the mappings again if they have changed; returns whether it did. `processes` is the number of targets that
    /// share the time for this.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process has ended.
    pub fn refresh(
        &mut self,
        now_ns: u64,
        processes: u64,
        deny: &DenyList,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let sizes = self.sizes()?;
        // A zombie has no memory: its mappings read as empty and its sizes as zero.
        if sizes.resident == 0 && !self.process.is_alive() {
            return Err(ReadError::Vanished { pid: self.process.pid() });
        }
        let mut restless = std::mem::take(&mut self.restless);
        let is_restless = restless.check(now_ns, sizes.mapped, || Ok(self.sizes()?.mapped));
        self.restless = restless;
        if is_restless? {
            let changed = self.exclusion != Some(Exclusion::Restless);
            self.exclusion = Some(Exclusion::Restless);
            self.regions.clear();
            self.invalidate();
            return Ok(changed);
        }
        if !self.survey_is_due(now_ns, processes, &sizes)? {
            return Ok(false);
        }
        let before_ns = own_cpu_ns();
        let maps = self.read(|process| {
            // Recent kernels read the list of mappings without the mmap lock. This read takes it, as the survey and the
            // injector do, so a locked map is found here. Other errors are reported by the survey.
            let _ = Pagemap::open(process).and_then(|pagemap| pagemap.is_live());
            maps_hash(process)
        })?;
        let regrown = self.surveyed.as_ref().is_none_or(|surveyed| sizes.mapped >= surveyed.sizes.mapped);
        let dipped = std::mem::take(&mut self.dipped);
        self.survey(deny, if regrown { dipped } else { 0 }, new_key)?;
        let cost_ns = own_cpu_ns() - before_ns;
        let next_maps_ns = now_ns + MAPS_MIN_NS;
        self.surveyed = Some(Surveyed { at_ns: now_ns, cost_ns, sizes, maps, changed: false, next_maps_ns });
        Ok(true)
    }

    /// Whether the mappings have changed and the share of the time allows a survey.
    fn survey_is_due(&mut self, now_ns: u64, processes: u64, sizes: &Sizes) -> Result<bool, ReadError> {
        if let Some(surveyed) = &mut self.surveyed {
            self.dipped = self.dipped.max(surveyed.sizes.mapped.saturating_sub(sizes.mapped));
            surveyed.changed |= sizes.mapped != surveyed.sizes.mapped || sizes.data != surveyed.sizes.data;
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
            let drift = sizes.resident.abs_diff(surveyed.sizes.resident);
            let share = if surveyed.changed || drift > RSS_CHANGE_PAGES.max(surveyed.sizes.resident / 8) {
                CHANGE_SHARE
            } else if self.exclusion.is_some() || drift > RSS_CHANGE_PAGES.max(surveyed.sizes.resident / 64) {
                DRIFT_SHARE
            } else {
                return Ok(false);
            };
            return Ok(now_ns >= surveyed.at_ns + surveyed.cost_ns * processes * share);
        }
        Ok(true)
    }

    /// Makes the next refresh survey the mappings whether or not they have changed.
    pub fn invalidate(&mut self) {
        self.surveyed = None;
    }

    /// Reads the mappings.
    pub fn details(&mut self) -> Result<Vec<VmaDetail>, ReadError> {
        self.read(read_smaps)
    }

    /// Reads exclusion and mappings and updates the regions. `replaced` pages have been unmapped and mapped again since the
    /// last survey: regions of about that size get new keys, even at the same address.
    fn survey(
        &mut self,
        deny: &DenyList,
        replaced: u64,
        mut new_key: impl FnMut() -> RegionKey,
    ) -> Result<(), ReadError> {
        self.exclusion = process_exclusion(&self.process, deny)?;
        self.left_out.clear();
        if self.exclusion.is_some() {
            self.regions.clear();
            return Ok(());
        }
        let details = self.details()?;
        let exe = self.exe.as_deref().and_then(|exe| exe.file_name()).map_or(&b""[..], |name| name.as_encoded_bytes());
        let mut program = DefaultHasher::new();
        self.exe.hash(&mut program);
        let left_out = &mut self.left_out;
        let found = stretches(&details, exe, program.finish(), |detail, exclusion| {
            if exclusion != Exclusion::NothingAnonymous {
                left_out.push((detail.vma.start, detail.anonymous_kib, exclusion));
            }
        });
        self.regions = follow(&self.regions, found, &mut new_key);
        let sizes = replaced.max(1)..=2 * replaced;
        for tracked in self.regions.iter_mut().filter(|tracked| sizes.contains(&tracked.stretch.pages.0)) {
            tracked.key = new_key();
        }
        Ok(())
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

fn maps_hash(process: &Process) -> Result<u64, ReadError> {
    let mut maps = DefaultHasher::new();
    process.read_file("maps")?.hash(&mut maps);
    Ok(maps.finish())
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
