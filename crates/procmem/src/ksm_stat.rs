//! `/proc/PID/ksm_stat`: whether memory of a process is marked, and how many of its zero pages are merged.

use super::process::{Process, ReadError};
use crate::os::fields::{field, number};
use pagefold_engine::units::Pages;

/// The fields of `/proc/PID/ksm_stat` that we use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmStat {
    /// All present and future memory of the process is marked. `None` before Linux 6.14, which doesn't show it.
    pub merge_any: Option<bool>,
    /// Some memory of the process is marked. `None` before Linux 6.14. To find out, the kernel takes the process's mmap
    /// lock and looks at all mappings (`ksm_process_mergeable`, mm/ksm.c).
    pub mergeable: Option<bool>,
    /// Zero pages merged with the kernel's zero page (shown from Linux 6.10), KiB.
    pub zero_kib: u64,
    /// Pages that map a merged frame other than the zero page.
    pub merging: Pages,
    /// KSM's records (rmap items) of the process's pages.
    pub items: u64,
}

impl KsmStat {
    /// Reads the file. If the kernel doesn't have it, all fields are zero or unknown.
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        match process.read_file("ksm_stat") {
            Ok(text) => Ok(Self::parse(&text)),
            Err(ReadError::Absent { .. }) => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    pub fn merged(&self) -> Pages {
        self.merging + self.zeros()
    }

    pub fn zeros(&self) -> Pages {
        Pages(self.zero_kib / 4)
    }

    /// The fields differ between kernels, and some kernels end the keys with a colon.
    pub fn parse(text: &[u8]) -> Self {
        let zero_pages: u64 = number(text, "ksm_zero_pages").unwrap_or(0);
        Self {
            merge_any: field(text, "ksm_merge_any").map(|word| word == b"yes"),
            mergeable: field(text, "ksm_mergeable").map(|word| word == b"yes"),
            zero_kib: zero_pages.saturating_mul(4),
            // No address space has more pages. A larger number is nonsense, and could overflow sums.
            merging: Pages(number(text, "ksm_merging_pages").unwrap_or(0).min(1 << 45)),
            items: number(text, "ksm_rmap_items").unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_parsed_with_and_without_colons() {
        let stat = KsmStat::parse(b"ksm_rmap_items 3\nksm_zero_pages 12\nksm_merge_any: yes\nksm_mergeable: no\n");
        let merge_any = Some(true);
        let expected = KsmStat { merge_any, mergeable: Some(false), zero_kib: 48, merging: Pages(0), items: 3 };
        assert_eq!(stat, expected);
        let linux_6_12 = b"ksm_rmap_items 3\nksm_zero_pages 0\nksm_merging_pages 5\nksm_process_profit 0\n";
        let expected = KsmStat { merging: Pages(5), items: 3, ..KsmStat::default() };
        assert_eq!(KsmStat::parse(linux_6_12), expected, "the marks are unknown");
        assert_eq!(KsmStat::parse(b"ksm_zero_pages 18446744073709551615\n").zero_kib, u64::MAX);
    }
}
