//! The oracle reads every page beforehand, so it knows which pages are worth marking. It bounds every policy's
//! judgement; we don't charge it for reading.

use super::marks::{PageSpan, eligible_mappings};
use pagefold_engine::hash::{Digest, Digester};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{Bytes, Pages, Vpn};
use pagefold_procmem::memory::{PageReader, ReadHow};
use pagefold_procmem::process::Process;
use std::collections::HashMap;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Knowledge {
    /// The spans to mark, for each process in order.
    pub spans: Vec<Vec<PageSpan>>,
    /// The number of private anonymous pages that we read.
    pub read: Pages,
    /// The saving if we merge all duplicates, zero pages included.
    pub savable: Bytes,
}

/// A page that we read.
#[derive(Clone, Copy, Debug)]
struct KnownPage {
    process: usize,
    /// The mapping's number within the process: extents do not cross mappings.
    mapping: usize,
    at: Vpn,
    digest: Digest,
}

impl KnownPage {
    /// The page's process, mapping and extent.
    fn place(&self) -> (usize, usize, u64) {
        (self.process, self.mapping, self.at.extent())
    }
}

/// Reads all private anonymous pages of the processes.
pub fn survey(processes: &[Process]) -> anyhow::Result<Knowledge> {
    let mut reader = PageReader::new();
    let digester = Digester::new(0);
    let mut pages = Vec::new();
    let mut runs = Vec::new();
    for (number, process) in processes.iter().enumerate() {
        for (mapping, detail) in eligible_mappings(process)?.iter().enumerate() {
            runs.clear();
            reader.resident_runs(process, detail.vma.first(), detail.vma.pages(), &mut runs)?;
            reader.read_runs(process, &runs, ReadHow::default(), |view| {
                if let (PageState::Private, Some(bytes)) = (view.state, view.bytes) {
                    let digest = digester.digest(bytes);
                    pages.push(KnownPage { process: number, mapping, at: view.page, digest });
                }
            })?;
        }
    }
    Ok(judge(&pages, processes.len()))
}

/// Picks the 2 MiB extents where at least half of the pages are duplicates (or zero), and joins adjacent extents.
/// `pages` must be in order of process, mapping and address.
fn judge(pages: &[KnownPage], processes: usize) -> Knowledge {
    let mut savable: HashMap<Digest, u64> = HashMap::new();
    for page in pages {
        *savable.entry(page.digest).or_default() += 1;
    }
    // One copy of each content stays, but none of zeros.
    for (digest, copies) in &mut savable {
        *copies -= u64::from(*digest != Digest::ZERO);
    }
    let mut spans: Vec<Vec<PageSpan>> = vec![Vec::new(); processes];
    let mut last_marked = None;
    for extent in pages.chunk_by(|a, b| a.place() == b.place()) {
        if extent.iter().filter(|page| savable[&page.digest] > 0).count() * 2 < extent.len() {
            continue;
        }
        let first = extent[0].at;
        let end = extent[extent.len() - 1].at + 1;
        let (process, mapping, number) = extent[0].place();
        // We don't join spans of two mappings: madvise fails with ENOMEM if there is a hole.
        let joins = last_marked == Some((process, mapping, number.wrapping_sub(1)));
        match spans[process].last_mut() {
            Some(before) if joins => before.pages = Pages(end.0 - before.first.0),
            _ => spans[process].push(PageSpan { first, pages: Pages(end.0 - first.0) }),
        }
        last_marked = Some((process, mapping, number));
    }
    Knowledge { spans, read: Pages(pages.len() as u64), savable: Pages(savable.values().sum()).bytes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(process: usize, mapping: usize, page: u64, digest: u64) -> KnownPage {
        KnownPage { process, mapping, at: Vpn(page), digest: Digest(digest) }
    }

    #[test]
    fn half_duplicate_extents_are_marked_and_neighbours_joined() {
        let pages = [
            // Process 0: an extent of duplicates, a neighbour that is half duplicate, and one with a third.
            page(0, 0, 0, 10),
            page(0, 0, 5, 11),
            page(0, 0, 512, 12),
            page(0, 0, 513, 99),
            page(0, 0, 1024, 13),
            page(0, 0, 1025, 98),
            page(0, 0, 1026, 97),
            // Process 1 has the copies.
            page(1, 0, 3000, 10),
            page(1, 0, 3001, 11),
            page(1, 0, 3002, 12),
            page(1, 0, 3003, 13),
        ];
        let knowledge = judge(&pages, 3);
        assert_eq!(knowledge.spans[0], [PageSpan { first: Vpn(0), pages: Pages(514) }]);
        assert_eq!(knowledge.spans[1], [PageSpan { first: Vpn(3000), pages: Pages(4) }]);
        assert!(knowledge.spans[2].is_empty());
        assert_eq!((knowledge.read, knowledge.savable), (Pages(11), Pages(4).bytes()));
    }

    #[test]
    fn zeros_are_all_savable_and_mappings_are_not_joined() {
        let pages = [
            page(0, 0, 10, 0),
            page(0, 1, 11, 0),
            page(0, 1, 20, 7),
            page(0, 2, 5000, 7),
            page(0, 2, 5001, 8),
            page(0, 2, 5002, 9),
        ];
        let knowledge = judge(&pages, 1);
        assert_eq!(
            knowledge.spans[0],
            [PageSpan { first: Vpn(10), pages: Pages(1) }, PageSpan { first: Vpn(11), pages: Pages(10) }]
        );
        assert_eq!(knowledge.savable, Pages(3).bytes());
    }
}
