//! Running programs as a [`Source`] of snapshots: the processes in scope, their mappings, and the content of every
//! page.
//!
//! A snapshot reads all pages that are present and anonymous (about 1 us per page) and changes nothing: merged and
//! fork-shared pages stay shared (see [`pagefold_procmem::memory`]). We don't record memory that pagefold leaves alone.
//! Processes keep running meanwhile, so we read the pages of a snapshot at different instants.
//!
//! An anonymous record has no PIDs and no names. We shift page numbers by a random multiple of 2 MiB for each process,
//! and frames by one for the whole record; order, distances and positions within a huge page stay the same.

use crate::digests::{Digests, Key};
use crate::interrupt::Interrupt;
use crate::record::{MemorySnapshot, Page, ProcessRow, RegionRow, Source};
use pagefold_engine::host::PageState;
use pagefold_engine::keys::{DomainKey, OwnerKey, RegionKey};
use pagefold_engine::units::{EXTENT_PAGES, Vpn};
use pagefold_host::judge::{Judge, ProgramHistory, ScopeRules};
use pagefold_host::regions::Stretch;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::exclude::Exclusion;
use pagefold_host::scope::new_processes::NewProcesses;
use pagefold_host::scope::{ProcessInfo, ScopeError, ScopeSpec};
use pagefold_host::targets::Target;
use pagefold_procmem::Roots;
use pagefold_procmem::cursor::{ReadCursor, ReadRange};
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::memory::{Contents, PageReader, PageView, ReadHow};
use pagefold_procmem::process::ReadError;
use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Pages read between two checks for an interrupt: some tenths of a second.
const PIECE_PAGES: u32 = 1 << 16;
/// Upper bound of shifts, in units of 2 MiB: page numbers stay far from the end of the address space.
const SHIFTS: u64 = 1 << 32;

#[derive(Clone, Debug)]
pub struct RecordingOptions {
    pub scope: ScopeSpec,
    pub deny: DenyList,
    pub every: Duration,
    /// Time from the first snapshot to the last.
    pub length: Duration,
    /// Whether to leave out everything that identifies the processes.
    pub anonymous: bool,
}

/// Reasons why we can't go on recording.
#[derive(Debug, Error)]
pub enum LiveError {
    #[error(transparent)]
    Scope(#[from] ScopeError),
    #[error("cannot read /dev/urandom: {0}; is /dev mounted?")]
    Random(io::Error),
}

pub struct Recorder {
    options: RecordingOptions,
    stop: Interrupt,
    reader: PageReader,
    shows_merged: bool,
    digests: Digests,
    random: File,
    frame_shift: u64,
    new_processes: NewProcesses,
    /// The processes, by ascending number.
    followed: Vec<Followed>,
    next_process: u32,
    next_region: u32,
    began: Option<Instant>,
    /// When the next snapshot is due, counted from the first.
    due: Duration,
    longest_snapshot: Duration,
}

/// A process and its number in the record.
struct Followed {
    target: Target,
    row: ProcessRow,
    /// Whether it has been in a snapshot: then it's in all later ones until it ends.
    recorded: bool,
    shift: u64,
}

impl Recorder {
    /// Records `scoped` and processes that enter the scope later, until the time is up, all have ended, or an
    /// interrupt.
    pub fn new(options: RecordingOptions, scoped: Vec<ProcessInfo>, stop: Interrupt) -> Result<Self, LiveError> {
        let mut random = File::open("/dev/urandom").map_err(LiveError::Random)?;
        let mut key: Key = [0; 192];
        random.read_exact(&mut key).map_err(LiveError::Random)?;
        let frame_shift = shift(&mut random, options.anonymous)?;
        let mut recorder = Self {
            options,
            stop,
            reader: PageReader::new(),
            shows_merged: shows_merged(),
            digests: Digests::new(key),
            random,
            frame_shift,
            new_processes: NewProcesses::new(&Roots::default()),
            followed: Vec::new(),
            next_process: 0,
            next_region: 0,
            began: None,
            due: Duration::ZERO,
            longest_snapshot: Duration::ZERO,
        };
        for scoped in scoped {
            recorder.follow(scoped)?;
        }
        Ok(recorder)
    }

    pub fn longest_snapshot(&self) -> Duration {
        self.longest_snapshot
    }

    /// The processes that we leave alone: PID, name, reason.
    pub fn left_alone(&self) -> impl Iterator<Item = (i32, &str, &Exclusion)> {
        self.followed.iter().filter_map(|Followed { target, .. }| {
            Some((target.pid(), target.info.name.as_str(), target.exclusion.as_ref()?))
        })
    }

    fn follow(&mut self, scoped: ProcessInfo) -> Result<(), LiveError> {
        let process = self.next_process;
        self.next_process += 1;
        let target = Target::new(scoped, OwnerKey(process), DomainKey(0));
        let shift = shift(&mut self.random, self.options.anonymous)?;
        let mut row = ProcessRow { process, pid: None, name: None };
        if !self.options.anonymous {
            row.pid = Some(target.pid());
            row.name = Some(target.info.name.clone());
        }
        self.followed.push(Followed { target, row, recorded: false, shift });
        Ok(())
    }

    /// Adds the processes that have entered the scope.
    fn follow_new_processes(&mut self, now_ns: u64) -> Result<(), LiveError> {
        // A PID selects the process that had it at the start: a later process with that PID isn't in scope.
        let spec = self.options.scope.without_pids();
        if spec.0.is_empty() {
            return Ok(());
        }
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let found = self.new_processes.find(now_ns, &spec, &Roots::default(), |pid| {
            pid == own || self.followed.iter().any(|one| one.target.pid() == pid)
        })?;
        for scoped in found {
            self.follow(scoped)?;
        }
        Ok(())
    }

    /// Takes a snapshot; `None` if interrupted.
    fn take_snapshot(&mut self, now_ns: u64) -> Option<MemorySnapshot> {
        let mut snapshot = MemorySnapshot { time_ns: now_ns, ..MemorySnapshot::default() };
        let mut followed = std::mem::take(&mut self.followed);
        let processes = followed.len() as u64;
        let mut stopped = false;
        followed.retain_mut(|one| {
            if stopped {
                return true;
            }
            let rows = snapshot.processes.len();
            let regions = snapshot.regions.len();
            match self.add_process(one, now_ns, processes, &mut snapshot) {
                Ok(()) => true,
                Err(Halt::Stop) => {
                    stopped = true;
                    true
                }
                Err(Halt::Ended) => {
                    snapshot.processes.truncate(rows);
                    snapshot.regions.truncate(regions);
                    self.new_processes.invalidate();
                    false
                }
            }
        });
        self.followed = followed;
        if stopped { None } else { Some(snapshot) }
    }

    fn add_process(
        &mut self,
        one: &mut Followed,
        now_ns: u64,
        processes: u64,
        snapshot: &mut MemorySnapshot,
    ) -> Result<(), Halt> {
        let Followed { target, row, recorded, shift } = one;
        // We read the mappings every time: reading the pages takes longer anyway.
        target.invalidate();
        let next_region = &mut self.next_region;
        let history = ProgramHistory::default();
        let scope = self.options.scope.clone();
        let mut rules = ScopeRules::new(scope, Roots::default(), self.options.deny.clone());
        let mut judge = Judge::new(&mut rules, &history);
        let refreshed = target.refresh(now_ns, processes, &mut judge, || {
            *next_region += 1;
            RegionKey(*next_region)
        });
        match refreshed {
            Ok(_) => {}
            Err(ReadError::Vanished { .. }) => return Err(Halt::Ended),
            Err(_) => leave_alone(target),
        }
        let mut regions = Vec::with_capacity(target.regions.len());
        for tracked in &target.regions {
            match self.read(target, &tracked.stretch, *shift) {
                Ok(None) => return Err(Halt::Stop),
                Ok(Some(pages)) => regions.push((
                    RegionRow {
                        region: tracked.key.0,
                        process: row.process,
                        kind: tracked.stretch.kind.to_string(),
                        first: tracked.stretch.first + *shift,
                        pages: tracked.stretch.pages,
                    },
                    pages,
                )),
                Err(ReadError::Vanished { .. }) if !target.info.process.is_alive() => return Err(Halt::Ended),
                Err(error) => {
                    regions.clear();
                    // If we leave a region out, it gets a new number when it reappears. After exec all regions are new.
                    match error {
                        ReadError::Vanished { .. } => target.regions.clear(),
                        _ => leave_alone(target),
                    }
                    break;
                }
            }
        }
        *recorded |= target.exclusion.is_none();
        if *recorded {
            snapshot.processes.push(row.clone());
            snapshot.regions.append(&mut regions);
        }
        Ok(())
    }

    /// Reads the pages of a region; `None` if interrupted.
    fn read(&mut self, target: &Target, stretch: &Stretch, shift: u64) -> Result<Option<Vec<(Vpn, Page)>>, ReadError> {
        let how = ReadHow {
            huge: stretch.huge,
            contents: Contents::All,
            unmarked: stretch.marked.0 == 0,
            ..ReadHow::default()
        };
        let range = ReadRange { first: stretch.first, pages: stretch.pages, how };
        let Self { digests, reader, shows_merged, frame_shift, stop, .. } = self;
        let mut cursor = ReadCursor::default();
        let mut pages = Vec::new();
        loop {
            if stop.check().is_err() {
                return Ok(None);
            }
            let more = cursor.read(reader, &target.info.process, &[range], PIECE_PAGES, |view| {
                if let Some(page) = page_of(&view, digests, *shows_merged, *frame_shift) {
                    pages.push((view.page + shift, page));
                }
            })?;
            if !more {
                return Ok(Some(pages));
            }
        }
    }
}

/// A page as we record it; `None` if it's absent.
fn page_of(view: &PageView<'_>, digests: &Digests, shows_merged: bool, frame_shift: u64) -> Option<Page> {
    let state = match view.state {
        PageState::Merged if !shows_merged => PageState::Shared,
        state => state,
    };
    let (digest, parts) = match (state, view.bytes) {
        (PageState::ZeroMapped, _) => Default::default(),
        (PageState::Absent, _) | (_, None) => return None,
        (_, Some(bytes)) => digests.of(bytes),
    };
    Some(Page { state, huge: view.huge, digest, parts, frame: view.frame.map(|frame| frame + frame_shift) })
}

fn leave_alone(target: &mut Target) {
    target.exclusion.get_or_insert(Exclusion::NotReadable);
    target.regions.clear();
}

/// How far we shift a process's addresses in the record, pages: at random, by a multiple of 2 MiB. 0 unless the record
/// is to be anonymous.
fn shift(random: &mut File, anonymous: bool) -> Result<u64, LiveError> {
    if !anonymous {
        return Ok(0);
    }
    let mut bytes = [0; 8];
    random.read_exact(&mut bytes).map_err(LiveError::Random)?;
    Ok(u64::from_ne_bytes(bytes) % SHIFTS * EXTENT_PAGES)
}

/// Why a process isn't in a snapshot, or why we take no snapshot at all.
enum Halt {
    Ended,
    Stop,
}

impl Source for Recorder {
    type Error = LiveError;

    /// Waits until the next snapshot is due, and takes it.
    fn next_snapshot(&mut self) -> Result<Option<MemorySnapshot>, LiveError> {
        let began = *self.began.get_or_insert_with(Instant::now);
        if self.due > self.options.length || self.stop.sleep(self.due.saturating_sub(began.elapsed())).is_err() {
            return Ok(None);
        }
        let now = began.elapsed();
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.follow_new_processes(now_ns)?;
        let first = self.due == Duration::ZERO;
        // We skip snapshots that we've missed.
        self.due = now.max(self.due + self.options.every);
        let snapshot = self.take_snapshot(now_ns);
        self.longest_snapshot = self.longest_snapshot.max(began.elapsed().saturating_sub(now));
        let over = self.followed.is_empty() && !self.options.scope.is_selective();
        Ok(snapshot.filter(|snapshot| first || !over || !snapshot.processes.is_empty()))
    }
}
