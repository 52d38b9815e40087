//! Reads all pages of a process in portions.

use crate::memory::{PageReader, PageView, ReadHow};
use crate::process::{Process, ReadError};
use pagefold_engine::units::{Pages, Vpn};

/// We search page tables in windows of this many pages. Only a search of some 65,536 pages or more skips empty parts.
const WINDOW_PAGES: u64 = 1 << 18;
/// We search at most this many windows for one portion, because a program may reserve terabytes.
const WINDOWS_MOST: u32 = 256;

/// A range of memory, and how to read it.
#[derive(Clone, Copy, Debug)]
pub struct ReadRange {
    pub first: Vpn,
    pub pages: Pages,
    pub how: ReadHow,
}

/// How far we've read the ranges of a process.
#[derive(Clone, Debug, Default)]
pub struct ReadCursor {
    /// Runs of resident pages that we've found but not read yet, in reverse order. `how` says how to read them.
    runs: Vec<(Vpn, u32)>,
    how: ReadHow,
    next: Vpn,
}

impl ReadCursor {
    /// Reads up to `most` resident pages, starting at the cursor. The ranges must ascend. Returns whether anything is
    /// left to read.
    ///
    /// # Errors
    /// The errors of [`PageReader::read_runs`].
    pub fn read(
        &mut self,
        reader: &mut PageReader,
        process: &Process,
        ranges: &[ReadRange],
        most: u32,
        mut visit: impl FnMut(PageView<'_>),
    ) -> Result<bool, ReadError> {
        let mut left = most;
        let mut windows = 0;
        while left > 0 && windows < WINDOWS_MOST {
            if self.runs.is_empty() {
                if !self.find_runs(reader, process, ranges)? {
                    return Ok(false);
                }
                windows += 1;
                continue;
            }
            let runs = self.take_runs(&mut left);
            reader.read_runs(process, &runs, self.how, &mut visit)?;
        }
        Ok(true)
    }

    /// Searches the next window for runs to read. Returns false if no range is left to search.
    fn find_runs(
        &mut self,
        reader: &mut PageReader,
        process: &Process,
        ranges: &[ReadRange],
    ) -> Result<bool, ReadError> {
        let Some(range) = ranges.iter().find(|range| range.first + range.pages.0 > self.next) else {
            return Ok(false);
        };
        let first = range.first.max(self.next);
        let end = (range.first + range.pages.0).min(first + WINDOW_PAGES);
        reader.resident_runs(process, first, Pages(end.0 - first.0), &mut self.runs)?;
        self.runs.reverse();
        self.how = range.how;
        self.next = end;
        Ok(true)
    }

    fn take_runs(&mut self, left: &mut u32) -> Vec<(Vpn, u32)> {
        let mut runs = Vec::new();
        while *left > 0 {
            let Some((first, pages)) = self.runs.pop() else { break };
            let taken = pages.min(*left);
            runs.push((first, taken));
            *left -= taken;
            if taken < pages {
                self.runs.push((first + u64::from(taken), pages - taken));
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::units::{PAGE_BYTES, PAGE_SIZE, count};

    #[test]
    fn portions_have_every_resident_page_once() {
        let memory = vec![1_u8; 41 * PAGE_SIZE];
        let first = Vpn(count(memory.as_ptr().addr()).div_ceil(PAGE_BYTES));
        let how = ReadHow::default();
        let ranges =
            [ReadRange { first, pages: Pages(17), how }, ReadRange { first: first + 20, pages: Pages(20), how }];
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut reader = PageReader::new();
        let mut cursor = ReadCursor::default();
        let mut seen = Vec::new();
        let mut portions = 0;
        while cursor.read(&mut reader, &own, &ranges, 3, |view| seen.push(view.page)).unwrap() {
            portions += 1;
            assert!(seen.len() <= portions * 3);
        }
        let pages: Vec<Vpn> = (0..17).chain(20..40).map(|page| first + page).collect();
        assert_eq!((seen, portions), (pages, 12));
        assert_eq!(memory[0], 1);
    }
}
