//! Finds out which workloads have pages of the same content, for the web page. We don't count pages that are merged
//! already, since the scan reads only one page of each merged frame.

use super::survey::Survey;
use pagefold_engine::hash::Digest;
use pagefold_engine::units::index;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// We show at most this many workloads: a phone has no room for more columns.
const SHOWN: usize = 6;

/// The page contents that we've read, and the workloads that hold them.
#[derive(Debug, Default)]
pub struct Contents {
    /// Workloads, and programs that belong to none.
    groups: Groups,
    pages: Vec<(u64, usize)>,
}

/// Groups of processes: the groups' names, and for each process the index of its group.
#[derive(Debug, Default)]
pub struct Groups {
    pub names: Vec<String>,
    pub of_process: Vec<usize>,
}

impl Groups {
    pub fn of(names: impl Iterator<Item = String>) -> Self {
        let mut groups = Self::default();
        let mut numbers = BTreeMap::new();
        for name in names {
            let next = groups.names.len();
            let number = *numbers.entry(name.clone()).or_insert(next);
            if number == next {
                groups.names.push(name);
            }
            groups.of_process.push(number);
        }
        groups
    }
}

/// How much of each workload's memory has a copy in each other workload, or in itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    pub names: Vec<String>,
    /// In row `a` and column `b`: how many pages of workload `a` have a copy in workload `b`, or if `a` is `b`, have
    /// another copy in `a` itself. `None` if we've only read a sample and found no such page in it.
    pub pages: Vec<Vec<Option<u64>>>,
    /// Whether we've read every page. If not, there may be more shared pages than these.
    pub exact: bool,
}

impl Contents {
    pub fn new(survey: &Survey) -> Self {
        let names = survey.processes.iter().map(|process| process.scoped.workload_or_name());
        Self { groups: Groups::of(names), pages: Vec::new() }
    }

    /// Adds a frame that these processes map. We don't count zeros as copies of each other: KSM merges them with the
    /// zero page.
    pub fn add(&mut self, digest: Digest, processes: impl Iterator<Item = u32>) {
        if digest == Digest::ZERO {
            return;
        }
        let mut holders: Vec<usize> = processes.map(|process| self.groups.of_process[index(process)]).collect();
        holders.sort_unstable();
        holders.dedup();
        self.pages.extend(holders.into_iter().map(|workload| (digest.0, workload)));
    }

    pub fn matrix(mut self, exact: bool) -> Matrix {
        self.pages.sort_unstable();
        self.pages = copied(&self.pages);
        let mut copies = vec![0_u64; self.groups.names.len()];
        for page in &self.pages {
            copies[page.1] += 1;
        }
        let mut shown: Vec<usize> = (0..copies.len()).filter(|&number| copies[number] > 0).collect();
        shown.sort_by_key(|&number| Reverse(copies[number]));
        shown.truncate(SHOWN);
        let mut pages = vec![vec![0_u64; shown.len()]; shown.len()];
        for same in self.pages.chunk_by(|one, other| one.0 == other.0) {
            let mut held = vec![0_u64; shown.len()];
            for page in same {
                if let Some(at) = shown.iter().position(|&number| number == page.1) {
                    held[at] += 1;
                }
            }
            for (row, &own) in held.iter().enumerate() {
                for (column, &others) in held.iter().enumerate() {
                    if others > u64::from(row == column) {
                        pages[row][column] += own;
                    }
                }
            }
        }
        let known = |pages: Vec<u64>| pages.into_iter().map(|pages| (exact || pages > 0).then_some(pages)).collect();
        Matrix {
            names: shown.iter().map(|&number| self.groups.names[number].clone()).collect(),
            pages: pages.into_iter().map(known).collect(),
            exact,
        }
    }
}

/// The pages whose content occurs more than once.
fn copied(pages: &[(u64, usize)]) -> Vec<(u64, usize)> {
    let mut copied = Vec::new();
    for same in pages.chunk_by(|one, other| one.0 == other.0).filter(|same| same.len() > 1) {
        copied.extend_from_slice(same);
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_counts_wherever_its_content_is() {
        let contents = || {
            let names = ["web", "web", "db", "idle"].map(str::to_owned);
            let mut contents = Contents { groups: Groups::of(names.into_iter()), pages: Vec::new() };
            // Web holds content 7 twice, in two frames; the database holds it once.
            contents.add(Digest(7), [0].into_iter());
            contents.add(Digest(7), [1].into_iter());
            contents.add(Digest(7), [2].into_iter());
            // Two processes of web share one frame.
            contents.add(Digest(8), [0, 1].into_iter());
            contents.add(Digest::ZERO, [0].into_iter());
            contents.add(Digest::ZERO, [3].into_iter());
            contents
        };
        let matrix = contents().matrix(true);
        assert_eq!(matrix.names, ["web", "db"]);
        assert_eq!(matrix.pages, [[Some(2), Some(2)], [Some(1), Some(0)]]);
        assert_eq!(contents().matrix(false).pages[1], [Some(1), None], "not found is unknown");
    }
}
