//! The rules for consistent records. The writer and the reader enforce them.

use super::{Event, PARTS, Page, RegionRow};
use pagefold_engine::host::PageState;
use rustc_hash::{FxHashMap, FxHashSet};

/// Number of pages in a 64-bit address space.
const PAGES_END: u64 = 1 << 52;

/// The state after the events so far.
#[derive(Debug, Default)]
pub(super) struct Check {
    snapshots: u64,
    time_ns: u64,
    /// Processes, and whether they are still alive.
    processes: FxHashMap<u32, bool>,
    regions: FxHashMap<u32, Bounds>,
    unmapped: FxHashSet<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Bounds {
    process: u32,
    first: u64,
    end: u64,
}

impl Check {
    /// The number of snapshots begun.
    pub(super) fn snapshots(&self) -> u64 {
        self.snapshots
    }

    /// How many processes and regions ever existed.
    pub(super) fn seen(&self) -> (u64, u64) {
        (self.processes.len() as u64, (self.regions.len() + self.unmapped.len()) as u64)
    }

    /// Begins a snapshot and returns its number.
    pub(super) fn begin(&mut self, time_ns: u64) -> Result<i32, String> {
        if time_ns < self.time_ns {
            return Err(format!("time goes back, from {} ns to {time_ns} ns", self.time_ns));
        }
        let number = i32::try_from(self.snapshots).map_err(|_| "there are too many snapshots".to_owned())?;
        i64::try_from(time_ns).map_err(|_| format!("a time of {time_ns} ns is out of range"))?;
        self.time_ns = time_ns;
        self.snapshots += 1;
        Ok(number)
    }

    /// Checks an event and returns the number of its process.
    pub(super) fn event(&mut self, event: &Event) -> Result<u32, String> {
        match event {
            Event::Process(row) => match self.processes.insert(row.process, true) {
                Some(false) => Err(format!("process {} appears again after its end", row.process)),
                _ => Ok(row.process),
            },
            Event::Exit { process } => {
                self.check_alive(*process)?;
                self.processes.insert(*process, false);
                let unmapped = &mut self.unmapped;
                self.regions.retain(|region, bounds| {
                    let stays = bounds.process != *process;
                    if !stays {
                        unmapped.insert(*region);
                    }
                    stays
                });
                Ok(*process)
            }
            Event::Region(row) => self.region(row),
            Event::Unmap { region } => {
                let bounds = self.regions.remove(region).ok_or_else(|| format!("there is no region {region}"))?;
                self.unmapped.insert(*region);
                Ok(bounds.process)
            }
            Event::Page { region, page, now } => {
                let bounds = self.regions.get(region).ok_or_else(|| format!("there is no region {region}"))?;
                if !(bounds.first..bounds.end).contains(&page.0) {
                    return Err(format!("page {} is outside region {region}", page.0));
                }
                check_page(now).map_err(|what| format!("page {} of region {region} {what}", page.0))?;
                Ok(bounds.process)
            }
        }
    }

    fn check_alive(&self, process: u32) -> Result<(), String> {
        if self.processes.get(&process) == Some(&true) { Ok(()) } else { Err(format!("there is no process {process}")) }
    }

    fn region(&mut self, row: &RegionRow) -> Result<u32, String> {
        let RegionRow { region, process, first, pages, .. } = row;
        self.check_alive(*process)?;
        if self.unmapped.contains(region) {
            return Err(format!("region {region} appears again after its end"));
        }
        let end = first.0.checked_add(pages.0).filter(|&end| end <= PAGES_END);
        let end =
            end.ok_or_else(|| format!("region {region} of {} pages from {} is out of range", pages.0, first.0))?;
        match self.regions.insert(*region, Bounds { process: *process, first: first.0, end }) {
            Some(former) if former.process != *process => {
                Err(format!("region {region} moves from process {} to process {process}", former.process))
            }
            _ => Ok(*process),
        }
    }
}

fn check_page(page: &Page) -> Result<(), &'static str> {
    let blank = page.digest == 0 && page.parts == [0; PARTS];
    match page.state {
        PageState::Absent if !blank || page.huge || page.frame.is_some() => Err("is absent but has content"),
        PageState::ZeroMapped if !blank => Err("maps the zero page but has content"),
        _ => Ok(()),
    }
}
