//! The processes in scope: taken hold of, looked at again only when something has changed, let go when they end.
//!
//! smaps is the only source of a mapping's flags and of its anonymous pages, and it walks the page tables: some 10 ns
//! for every page present. So it is read only when something cheaper tells of a change: statm (1 us through the open
//! file), whose sizes change with nearly every mapping that comes, goes or grows, and now and then maps (some 20 us),
//! which shows the rest. Each of the three has its share of a core, for all processes together.

use crate::host::regions::{Tracked, follow, stretches};
use crate::os::abandonable::{Pending, patiently};
use crate::os::cpu::own_cpu_ns;
use crate::proc::maps::{VmaDetail, read_smaps};
use crate::proc::pagemap::Pagemap;
use crate::proc::process::{Process, ReadError};
use crate::scope::Scoped;
use crate::scope::exclude::{DenyList, Exclusion, process_exclusion};
use pagefold_core::host::Span;
use pagefold_core::keys::{DomainKey, OwnerKey, RegionKey};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A process's memory must have changed by this much for its pages to be counted again, pages.
const RSS_CHANGE_PAGES: u64 = 256;
/// Looking at what has changed may take one part in so many of the time, for all processes together.
const CHANGE_SHARE: u64 = 100;
/// The same where nothing has changed but, by a little, how much is resident, or where a process is left alone.
const DRIFT_SHARE: u64 = 3_333;
/// The same for the list of mappings, read on suspicion.
const MAPS_SHARE: u64 = 10_000;
/// The list is read on suspicion at most this often, nanoseconds.
const MAPS_AGAIN_NS: u64 = 1_000_000_000;

/// Glances at a process's size to see whether it maps and unmaps all the time: some 400 us together.
const GLANCES: u32 = 256;
/// It does if its size has gone down so often meanwhile: some 5,000 times a second. Growing programs are not meant.
const SHRINKS: u32 = 2;
/// So it is looked at this often at most, nanoseconds, and left alone for so long since it was last seen to do it.
const GLANCES_AGAIN_NS: u64 = 1_000_000_000;
const RESTLESS_NS: u64 = 10_000_000_000;

/// One process in scope.
#[derive(Debug)]
pub struct Target {
    /// The process.
    pub process: Arc<Process>,
    /// Its key.
    pub owner: OwnerKey,
    /// Its trust domain.
    pub domain: DomainKey,
    /// Its name, fit to print.
    pub name: String,
    /// Its executable.
    pub exe: Option<PathBuf>,
    /// Its effective user, and its cgroup, when it came into scope.
    pub uid: u32,
    /// See `uid`.
    pub cgroup: Option<String>,
    /// Why it is left alone, if it is. Looked at again with its mappings.
    pub exclusion: Option<Exclusion>,
    /// Its regions, ascending.
    pub regions: Vec<Tracked>,
    /// Mappings left alone, and why: first address, anonymous KiB, reason.
    pub left_out: Vec<(u64, u64, Exclusion)>,
    statm: Option<File>,
    seen: Option<Seen>,
    /// Pages by which the address space has been smaller for a while since the last look at the mappings.
    dipped: u64,
    /// A read of its memory that does not come back.
    stuck: Option<Pending>,
    restless: Restless,
}

/// Whether a process maps and unmaps all the time. Reading it and ksmd's passing take its mmap lock over and over, and
/// so does it: a program that maps 200,000 times a second fell to an eighth of its speed while a gigabyte of it was
/// folded, and ksmd to a tenth (6.18).
#[derive(Debug, Default)]
struct Restless {
    /// Its size at the last glance, pages.
    mapped: Option<u64>,
    next_glances_ns: u64,
    until_ns: u64,
}

/// What a look at the mappings found, against which the next changes are measured.
#[derive(Debug)]
struct Seen {
    at_ns: u64,
    /// CPU time it took.
    cost_ns: u64,
    sizes: Sizes,
    maps: u64,
    /// The mappings have changed since.
    changed: bool,
    next_maps_ns: u64,
}

impl Target {
    /// Whether a span is all of its region, as it was at the last look.
    pub(crate) fn is_whole(&self, span: &Span) -> bool {
        self.regions.iter().any(|Tracked { key, stretch }| {
            (*key, stretch.first, stretch.pages) == (span.region, span.first, span.pages)
        })
    }

    /// Takes a process into scope.
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
            seen: None,
            dipped: 0,
            stuck: None,
            restless: Restless::default(),
        }
    }

    /// Whether a read of its memory has not come back yet.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.as_ref().is_some_and(|pending| !pending.is_over())
    }

    /// Notes that a read of its memory does not come back. The next look says so.
    pub(crate) fn get_stuck(&mut self, pending: Pending) {
        self.stuck = Some(pending);
        self.look_again();
    }

    /// Reads what the process may keep locked (see [`crate::os::abandonable`]).
    fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Process) -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, ReadError> {
        if !self.is_stuck() {
            let process = self.process.clone();
            match patiently(|| 0, move || read(&process)) {
                Ok(answer) => return answer,
                Err(pending) => self.stuck = Some(pending),
            }
        }
        let source = io::Error::new(io::ErrorKind::TimedOut, "it keeps its memory map locked");
        Err(ReadError::from_io(self.process.pid(), "smaps", source))
    }

    /// Looks whether the process's mappings have changed, and takes the change in; true if there was one. It is one of
    /// so many `processes` that share the time for this. `Vanished` means that it has ended.
    pub fn look(
        &mut self,
        now_ns: u64,
        processes: u64,
        deny: &DenyList,
        new_key: impl FnMut() -> RegionKey,
    ) -> Result<bool, ReadError> {
        let sizes = self.sizes()?;
        // The memory of a zombie is gone: its mappings read as empty, and so does its size.
        if sizes.resident == 0 && !self.process.is_alive() {
            return Err(ReadError::Vanished { pid: self.process.pid() });
        }
        if self.is_restless(now_ns, &sizes)? {
            let news = self.exclusion != Some(Exclusion::Restless);
            self.exclusion = Some(Exclusion::Restless);
            self.regions.clear();
            self.look_again();
            return Ok(news);
        }
        if let Some(seen) = &mut self.seen {
            self.dipped = self.dipped.max(seen.sizes.mapped.saturating_sub(sizes.mapped));
            seen.changed |= sizes.mapped != seen.sizes.mapped || sizes.data != seen.sizes.data;
        }
        if self.seen.as_ref().is_some_and(|seen| !seen.changed && now_ns >= seen.next_maps_ns) {
            let before_ns = own_cpu_ns();
            let maps = self.read(maps_hash)?;
            let spent_ns = own_cpu_ns() - before_ns;
            if let Some(seen) = &mut self.seen {
                seen.changed = maps != seen.maps;
                seen.next_maps_ns = now_ns + (spent_ns * processes * MAPS_SHARE).max(MAPS_AGAIN_NS);
            }
        }
        if let Some(seen) = &self.seen {
            let drift = sizes.resident.abs_diff(seen.sizes.resident);
            let share = if seen.changed || drift > RSS_CHANGE_PAGES.max(seen.sizes.resident / 8) {
                CHANGE_SHARE
            } else if self.exclusion.is_some() || drift > RSS_CHANGE_PAGES.max(seen.sizes.resident / 64) {
                DRIFT_SHARE
            } else {
                return Ok(false);
            };
            if now_ns < seen.at_ns + seen.cost_ns * processes * share {
                return Ok(false);
            }
        }
        let before_ns = own_cpu_ns();
        let maps = self.read(|process| {
            // The list of mappings needs no lock on recent kernels; this does, as do what follows and the injector. That
            // it may not be read is for others to say.
            let _ = Pagemap::open(process).and_then(|pagemap| pagemap.is_live());
            maps_hash(process)
        })?;
        let back = self.seen.as_ref().is_none_or(|seen| sizes.mapped >= seen.sizes.mapped);
        let dipped = std::mem::take(&mut self.dipped);
        self.take_in(deny, if back { dipped } else { 0 }, new_key)?;
        let cost_ns = own_cpu_ns() - before_ns;
        let next_maps_ns = now_ns + MAPS_AGAIN_NS;
        self.seen = Some(Seen { at_ns: now_ns, cost_ns, sizes, maps, changed: false, next_maps_ns });
        Ok(true)
    }

    /// Whether it maps and unmaps all the time, or has done so lately.
    fn is_restless(&mut self, now_ns: u64, sizes: &Sizes) -> Result<bool, ReadError> {
        let differs = self.restless.mapped.replace(sizes.mapped) != Some(sizes.mapped);
        if differs && now_ns >= self.restless.next_glances_ns {
            self.restless.next_glances_ns = now_ns + GLANCES_AGAIN_NS;
            let (mut before, mut shrinks) = (sizes.mapped, 0);
            for _ in 0..GLANCES {
                let mapped = self.sizes()?.mapped;
                shrinks += u32::from(mapped < before);
                before = mapped;
            }
            if shrinks >= SHRINKS {
                self.restless.until_ns = now_ns + RESTLESS_NS;
            }
        }
        Ok(now_ns < self.restless.until_ns)
    }

    /// Looks at the mappings at the next occasion, whatever has changed.
    pub fn look_again(&mut self) {
        self.seen = None;
    }

    /// The mappings as they are now.
    pub fn details(&mut self) -> Result<Vec<VmaDetail>, ReadError> {
        self.read(read_smaps)
    }

    /// `replaced` pages have been unmapped and mapped again since the last look: regions of about that size are not what
    /// they were, even in the same place.
    fn take_in(
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

/// The fields of `/proc/PID/statm` that pagefold uses, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Address space.
    pub(crate) mapped: u64,
    /// Present pages of any kind.
    pub(crate) resident: u64,
    /// Address space of private writable memory and stacks.
    pub(crate) data: u64,
}

impl Sizes {
    pub(crate) fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(text).map_err(|_| "not ASCII")?;
        let mut words = text.split_ascii_whitespace();
        let mut field = |at| words.nth(at).and_then(|word| word.parse().ok()).ok_or("a field is no number");
        Ok(Self { mapped: field(0)?, resident: field(0)?, data: field(3)? })
    }
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
