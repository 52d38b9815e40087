//! Scripts: steps that map memory and write page contents, recorded or generated elsewhere.

use crate::memory::ProcessNuma;
use pagefold_engine::keys::{DomainKey, FamilyKey, OwnerKey, RegionKey};
use pagefold_engine::units::{Pages, Vpn};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// One step. Processes and regions have numbers of the script's own, which the script never reuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A process starts, with nothing mapped.
    Start {
        process: u32,
    },
    /// A process exits, and its regions with it.
    Exit {
        process: u32,
    },
    /// A process maps a region, with all pages absent.
    Map {
        process: u32,
        region: u32,
        family: FamilyKey,
        first: Vpn,
        pages: Pages,
    },
    Unmap {
        region: u32,
    },
    /// A page is written. Has its new content (0 for zeros), the quarters written (one bit each), and the eighth of
    /// physical memory that it's in.
    Write {
        region: u32,
        page: Vpn,
        content: u64,
        parts: u8,
        eighth: u8,
    },
    /// A page is freed, or the zero page is mapped there.
    Drop {
        region: u32,
        page: Vpn,
        zero: bool,
    },
}

/// Steps with their times in nanoseconds, ascending.
pub type Script = Arc<[(u64, Step)]>;

#[derive(Debug)]
pub(crate) struct ScriptRun {
    script: Script,
    next: usize,
    owners: FxHashMap<u32, OwnerKey>,
    regions: FxHashMap<u32, RegionKey>,
}

impl ScriptRun {
    pub(crate) fn new(script: Script) -> Self {
        Self { script, next: 0, owners: FxHashMap::default(), regions: FxHashMap::default() }
    }

    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.script.get(self.next).map(|&(at_ns, _)| at_ns)
    }

    fn due(&mut self, now_ns: u64) -> Option<Step> {
        let &(at_ns, step) = self.script.get(self.next)?;
        (at_ns <= now_ns).then(|| {
            self.next += 1;
            step
        })
    }
}

impl crate::SimHost {
    /// Runs a script in virtual time, alongside everything else.
    pub fn play(&mut self, script: Script) {
        let player = ScriptRun::new(script);
        let next_ns = player.next_ns();
        self.scripts.push(player);
        if let Some(next_ns) = next_ns {
            self.schedule_script(next_ns, self.scripts.len() - 1);
        }
    }

    /// Runs the steps of a script that are due.
    pub(crate) fn step(&mut self, number: usize) {
        let now_ns = self.now_ns();
        while let Some(step) = self.scripts[number].due(now_ns) {
            self.take_step(number, step);
        }
        if let Some(next_ns) = self.scripts[number].next_ns() {
            self.schedule_script(next_ns, number);
        }
    }

    fn take_step(&mut self, number: usize, step: Step) {
        let player = &mut self.scripts[number];
        match step {
            Step::Start { process } => {
                let owner = self.memory.add_owner(false, DomainKey::default(), ProcessNuma::default());
                player.owners.insert(process, owner);
            }
            Step::Exit { process } => {
                if let Some(owner) = player.owners.remove(&process) {
                    self.exit(owner);
                }
            }
            Step::Map { process, region, family, first, pages } => {
                let Some(&owner) = player.owners.get(&process) else { return };
                let key = self.map_empty(owner, family, first, pages);
                self.scripts[number].regions.insert(region, key);
            }
            Step::Unmap { region } => {
                if let Some(key) = player.regions.remove(&region) {
                    self.unmap(key);
                }
            }
            Step::Write { region, page, content, parts, eighth } => {
                let Some(&key) = player.regions.get(&region) else { return };
                let Some(there) = self.memory.region_mut(key.0) else { return };
                let Some(offset) = there.offset(page) else { return };
                if eighth > 0 || !there.eighths.is_empty() {
                    there.eighths.resize(there.content.len(), 0);
                    there.eighths[offset as usize] = eighth;
                }
                self.memory.write_parts(key.0, offset, content, parts);
            }
            Step::Drop { region, page, zero } => {
                let Some(&key) = player.regions.get(&region) else { return };
                if let Some(offset) = self.memory.region(key.0).and_then(|region| region.offset(page)) {
                    self.memory.drop_page(key.0, offset, zero);
                }
            }
        }
    }
}
