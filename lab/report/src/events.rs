//! Merging's effects on memory, by the kernel's own counters: copies of merged pages, and huge pages split.

use anyhow::Context;
use pagefold_procmem::os::fields::number;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Enough for all of vmstat: 3970 bytes on Linux 6.18.
const VMSTAT_BYTES: usize = 32 << 10;

/// Counters of `/proc/vmstat` for the whole machine. `None` if this kernel doesn't have the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelEvents {
    /// Merged pages that the kernel copied because a program wrote them, or because they were unmerged (`cow_ksm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cow_breaks: Option<u64>,
    /// Huge pages split (`thp_split_page`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_pages: Option<u64>,
    /// Mappings of huge pages split, with or without the page (`thp_split_pmd`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_mappings: Option<u64>,
}

impl KernelEvents {
    fn parse(vmstat: &[u8]) -> Self {
        Self {
            cow_breaks: number(vmstat, "cow_ksm").ok(),
            split_pages: number(vmstat, "thp_split_page").ok(),
            split_mappings: number(vmstat, "thp_split_pmd").ok(),
        }
    }

    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            cow_breaks: difference(self.cow_breaks, before.cow_breaks),
            split_pages: difference(self.split_pages, before.split_pages),
            split_mappings: difference(self.split_mappings, before.split_mappings),
        }
    }
}

fn difference(now: Option<u64>, then: Option<u64>) -> Option<u64> {
    Some(now?.saturating_sub(then?))
}

/// Reads [`KernelEvents`].
#[derive(Debug)]
pub struct EventReader {
    vmstat: File,
}

impl EventReader {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Ok(Self { vmstat: File::open(path).with_context(|| path.display().to_string())? })
    }

    pub fn read(&self) -> anyhow::Result<KernelEvents> {
        let mut text = vec![0; VMSTAT_BYTES];
        let length = self.vmstat.read_at(&mut text, 0).context("cannot read vmstat")?;
        Ok(KernelEvents::parse(&text[..length]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_the_kernel_lacks_are_absent_and_not_zero() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmstat");
        std::fs::write(&path, "thp_split_page 30\nthp_split_page_failed 7\nthp_split_pud 2\ncow_ksm 1000\n").unwrap();
        let reader = EventReader::open(&path).unwrap();
        let before = reader.read().unwrap();
        assert_eq!(before, KernelEvents { cow_breaks: Some(1000), split_pages: Some(30), split_mappings: None });
        std::fs::write(&path, "thp_split_page 31\nthp_split_pmd 5\ncow_ksm 1512\n").unwrap();
        let since = reader.read().unwrap().since(before);
        assert_eq!(since, KernelEvents { cow_breaks: Some(512), split_pages: Some(1), split_mappings: None });
        let json = serde_json::to_value(since).unwrap();
        assert_eq!(json, serde_json::json!({"cow_breaks": 512, "split_pages": 1}));
        assert!(EventReader::open(&dir.path().join("none")).is_err());
    }
}
