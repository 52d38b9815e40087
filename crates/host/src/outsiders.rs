//! Finds out whether outsiders map a page that's shared through fork. These are processes that we don't know as members
//! of its family, because they're out of scope or we leave them alone.

use crate::check::facts::Release;
use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::memory::{PageReader, PageView};
use pagefold_procmem::process::{Process, ReadError};
use std::sync::{Arc, OnceLock};

/// We read a page map across gaps up to this length: at 33 ns a page that's cheaper than another call.
const BRIDGE_PAGES: u64 = 20;

/// Whether a page in this state may be shared through fork. On Linux 6.12 it may seem merged, because kpageflags shows
/// the KSM flag on every anonymous page.
pub(crate) fn may_be_forked(state: PageState) -> bool {
    state == PageState::Shared || state == PageState::Merged && !shows_merged()
}

/// Whether kpagecount is exact in huge pages. Since Linux 6.15 it may show averages (`CONFIG_NO_PAGE_MAPCOUNT`).
fn counts_each_page() -> bool {
    static COUNTS: OnceLock<bool> = OnceLock::new();
    *COUNTS.get_or_init(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
        release.is_ok_and(|text| Release::parse(&text).is_some_and(|release| release < Release(6, 15)))
    })
}

/// A page that's shared through fork.
#[derive(Debug)]
pub(crate) struct SharedPage {
    pub(crate) page: Vpn,
    pub(crate) frame: u64,
    /// The index of the page's sample.
    pub(crate) at: usize,
    /// How many members of the page's family map the frame.
    pub(crate) members: u32,
}

impl SharedPage {
    /// `None` if we can't tell how many processes map the page. With `takes_averages`, the average of its huge page is
    /// good enough.
    pub(crate) fn of(view: &PageView<'_>, at: usize, takes_averages: bool) -> Option<Self> {
        if view.compound && !takes_averages && !counts_each_page() {
            return None;
        }
        Some(Self { page: view.page, frame: view.frame?, at, members: 0 })
    }
}

/// A mapping of a family.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) process: Arc<Process>,
    pub(crate) first: Vpn,
    pub(crate) end: Vpn,
}

impl Member {
    /// Adds 1 to `members` of each page whose frame this member maps at the same address. The pages ascend.
    pub(crate) fn count(&self, reader: &mut PageReader, shared: &mut [SharedPage]) -> Result<(), ReadError> {
        let from = shared.partition_point(|page| page.page < self.first);
        let to = shared.partition_point(|page| page.page < self.end);
        for near in shared[from..to].chunk_by_mut(|one, next| next.page.0 - one.page.0 <= BRIDGE_PAGES) {
            let first = near[0].page;
            let pages = Pages(near[near.len() - 1].page.0 - first.0 + 1);
            let mut at = 0;
            reader.walk(&self.process, first, pages, |page, entry| {
                at += near[at..].iter().take_while(|next| next.page < page).count();
                let found = near.get_mut(at).filter(|next| next.page == page && entry.pfn() == Some(next.frame));
                if let Some(found) = found {
                    found.members += 1;
                }
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "outsiders_tests.rs"]
mod tests;
