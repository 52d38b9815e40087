//! The processes in scope: taken hold of, looked at again only when something has changed, let go when they end.
//!
//! smaps is the only source of a mapping's flags and of its anonymous pages, and it walks the page tables: some 10 ns
//! for every page present. So it is read when the list of mappings (maps, some microseconds) or the process's memory
//! (statm) has changed, and never so often that it takes more than a small share of a core.

use crate::cpu::own_cpu_ns;
use crate::exclude::{DenyList, Exclusion, process_exclusion};
use crate::maps::{VmaDetail, read_smaps};
use crate::process::{Process, ReadError};
use crate::regions::{Tracked, follow, stretches};
use crate::scope::Scoped;
use pagefold_core::host::{OwnerKey, RegionKey};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// A process's memory must have changed by this much for its pages to be counted again, pages.
const RSS_CHANGE_PAGES: u64 = 256;
/// Looking at one process's mappings may take one part in so many of the time.
const LOOK_SHARE: u64 = 200;
/// Mappings are looked at again at most this often, nanoseconds.
const LOOK_AGAIN_NS: u64 = 500_000_000;

/// One process in scope.
#[derive(Debug)]
pub struct Target {
    /// The process.
    pub process: Process,
    /// Its key.
    pub owner: OwnerKey,
    /// Its name, fit to print.
    pub name: String,
    /// Its executable.
    pub exe: Option<PathBuf>,
    /// Why it is left alone, if it is. Looked at again with its mappings.
    pub exclusion: Option<Exclusion>,
    /// Its regions, ascending.
    pub regions: Vec<Tracked>,
    /// Mappings left alone, and why: first address, anonymous KiB, reason.
    pub left_out: Vec<(u64, u64, Exclusion)>,
    seen: Option<Seen>,
    next_look_ns: u64,
}

/// What told us that nothing had changed.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    maps: u64,
    rss: u64,
}

impl Target {
    /// Takes a process into scope.
    pub fn new(scoped: Scoped, owner: OwnerKey) -> Self {
        Self {
            process: scoped.process,
            owner,
            name: scoped.name,
            exe: scoped.exe,
            exclusion: None,
            regions: Vec::new(),
            left_out: Vec::new(),
            seen: None,
            next_look_ns: 0,
        }
    }

    /// Looks whether the process's mappings have changed, and takes the change in. `Vanished` means that it has ended.
    pub fn look(&mut self, now_ns: u64, deny: &DenyList, new_key: impl FnMut() -> RegionKey) -> Result<(), ReadError> {
        if now_ns < self.next_look_ns {
            return Ok(());
        }
        self.next_look_ns = now_ns + LOOK_AGAIN_NS;
        let seen = self.glance()?;
        let changed = self.seen.as_ref().is_none_or(|last| {
            last.maps != seen.maps || last.rss.abs_diff(seen.rss) > RSS_CHANGE_PAGES.max(last.rss / 64)
        });
        if changed {
            self.take_in(now_ns, deny, new_key)?;
            self.seen = Some(seen);
        }
        Ok(())
    }

    /// Looks at the mappings at the next occasion, whatever has changed.
    pub fn look_again(&mut self) {
        self.seen = None;
        self.next_look_ns = 0;
    }

    /// The mappings as they are now.
    pub fn details(&self) -> Result<Vec<VmaDetail>, ReadError> {
        read_smaps(&self.process)
    }

    fn take_in(&mut self, now_ns: u64, deny: &DenyList, new_key: impl FnMut() -> RegionKey) -> Result<(), ReadError> {
        let before_ns = own_cpu_ns();
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
        self.regions = follow(&self.regions, found, new_key);
        let spent_ns = own_cpu_ns() - before_ns;
        self.next_look_ns = now_ns + (spent_ns * LOOK_SHARE).max(LOOK_AGAIN_NS);
        Ok(())
    }

    fn glance(&self) -> Result<Seen, ReadError> {
        let mut maps = DefaultHasher::new();
        self.process.read_file("maps")?.hash(&mut maps);
        let statm = self.process.read_file("statm")?;
        let rss = std::str::from_utf8(&statm)
            .ok()
            .and_then(|text| text.split_ascii_whitespace().nth(1)?.parse().ok())
            .ok_or_else(|| self.process.malformed("statm", "no resident size"))?;
        // The memory of a zombie is gone: its mappings read as empty, and so does its size.
        if rss == 0 && !self.process.is_alive() {
            return Err(ReadError::Vanished { pid: self.process.pid() });
        }
        Ok(Seen { maps: maps.finish(), rss })
    }
}
