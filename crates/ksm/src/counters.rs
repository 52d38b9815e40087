//! The kernel's counters: pages merged and scanned, writes to merged pages, and huge pages that were split.

use pagefold_engine::host::{HugeSplits, KsmView};
use pagefold_engine::units::Pages;
use pagefold_procmem::os::fault;
use pagefold_procmem::os::fields::number;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The counters of KSM in sysfs that we use. `None` where this kernel lacks the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmCounters {
    /// Merged pages, each of which replaces several.
    pub pages_shared: Pages,
    /// How many pages merging saves.
    pub pages_sharing: Pages,
    /// Pages scanned since boot (6.6).
    pub pages_scanned: Option<u64>,
    /// Completed scans since boot, or since `run` was last set to 2.
    pub full_scans: u64,
    /// Pages replaced by the kernel's zero page (6.6).
    pub ksm_zero_pages: Option<Pages>,
}

impl KsmCounters {
    /// The engine's view of KSM. `ours`: we hold KSM's lease. `busy`: an ordered scan hasn't ended.
    pub fn view(&self, ours: bool, busy: bool) -> KsmView {
        KsmView {
            shared: self.pages_shared,
            sharing: self.pages_sharing,
            zero: self.ksm_zero_pages.unwrap_or_default(),
            scanned: self.pages_scanned.unwrap_or(0),
            full_scans: self.full_scans,
            broken: 0,
            splits: HugeSplits::default(),
            ours,
            busy,
        }
    }
}

/// Machine-wide counters of `/proc/vmstat` since boot. 0 where the kernel lacks the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmEvents {
    /// COW breaks of merged pages (`cow_ksm`). Unmerging counts as well.
    pub copies: u64,
    pub splits: HugeSplits,
}

impl VmEvents {
    fn parse(vmstat: &str) -> Self {
        let splits = HugeSplits { pages: event(vmstat, "thp_split_page"), mappings: event(vmstat, "thp_split_pmd") };
        Self { copies: cow_ksm(vmstat), splits }
    }
}

/// Reads [`VmEvents`] from a file that we keep open.
#[derive(Debug)]
pub struct VmEventCounter {
    vmstat: Option<File>,
}

impl VmEventCounter {
    /// Opens the counters under a mount of procfs.
    pub fn open(proc: &Path) -> Self {
        Self { vmstat: File::open(proc.join("vmstat")).ok() }
    }

    /// The counters; `None` if the read fails.
    pub fn read(&self) -> Option<VmEvents> {
        let Some(mut vmstat) = self.vmstat.as_ref() else { return Some(VmEvents::default()) };
        let mut text = String::new();
        fault::io("read:vmstat").ok()?;
        vmstat.seek(SeekFrom::Start(0)).ok()?;
        vmstat.read_to_string(&mut text).ok()?;
        Some(VmEvents::parse(&text))
    }
}

fn event(vmstat: &str, name: &str) -> u64 {
    number(vmstat.as_bytes(), name).unwrap_or(0)
}

pub fn cow_ksm(vmstat: &str) -> u64 {
    event(vmstat, "cow_ksm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cow_breaks_are_read_from_vmstat() {
        assert_eq!(cow_ksm("pgfault 12\nksm_swpin_copy 0\ncow_ksm 345\nzswpin 0\n"), 345);
        assert_eq!(cow_ksm("pgfault 12\ncow_ksm_not 3\ncow_ksm many\n"), 0);
        assert_eq!(VmEventCounter::open(Path::new("/nowhere")).read(), Some(VmEvents::default()));
    }

    #[test]
    fn splits_of_huge_pages_are_read_from_vmstat() {
        let splits = |text| VmEvents::parse(text).splits;
        let text = "thp_split_page 8322\nthp_split_page_failed 5532\nthp_split_pmd 17287\nthp_split_pud 1\n";
        assert_eq!(splits(text), HugeSplits { pages: 8322, mappings: 17287 });
        assert_eq!(splits("cow_ksm 3\n"), HugeSplits::default(), "no transparent huge pages");
    }
}
