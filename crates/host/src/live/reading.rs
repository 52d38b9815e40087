//! Reads all pages of a process in portions, for callers other than the engine.
//!
//! The same rules hold as for samples: we read only regions, and none of a process that we leave alone. Merged and
//! shared pages stay shared, and we read on a thread that we may abandon.

use super::LiveHost;
use crate::regions::Tracked;
use pagefold_engine::hash::{PageBytes, is_zero};
use pagefold_engine::host::{Mechanism, PageState};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::Pages;
use pagefold_procmem::cursor::{ReadCursor, ReadRange};
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::memory::{Contents, ReadHow};
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::process::Process;
use std::sync::Arc;

/// Makes a digest of a page that isn't all zeros.
pub type Digest = Arc<dyn Fn(&PageBytes) -> u64 + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Only zeros.
    Zeros,
    /// Anything else, as a digest.
    Digest(u64),
}

/// A page that was read.
#[derive(Clone, Copy, Debug)]
pub struct PageContent {
    /// Private, merged or shared.
    pub state: PageState,
    /// The page's frame number, if we can see it. Pages with equal numbers are the same memory.
    pub frame: Option<u64>,
    pub content: Content,
}

/// The result of reading a portion.
#[derive(Debug)]
pub enum Progress {
    /// These pages were read, and more are left.
    More(Vec<PageContent>),
    /// These pages were the last ones.
    Done(Vec<PageContent>),
    /// The process has ended, or executed another program, or we can't read it now.
    Ended,
    /// We leave the process alone now, so the caller should forget the pages that it got earlier.
    LeftAlone,
}

impl LiveHost {
    /// Reads about `most` pages of a process, starting at the cursor. Also returns the CPU time spent, nanoseconds.
    pub fn read_contents(
        &mut self,
        owner: OwnerKey,
        cursor: &mut ReadCursor,
        most: u64,
        digest: &Digest,
    ) -> (Progress, u64) {
        let before_ns = own_cpu_ns();
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let progress = self.read_portion(owner, cursor, most, digest);
        (progress, own_cpu_ns().saturating_sub(before_ns))
    }

    fn read_portion(&mut self, owner: OwnerKey, cursor: &mut ReadCursor, most: u32, digest: &Digest) -> Progress {
        let by_marks = self.mechanism() == Mechanism::Ksmd;
        let Some(target) = self.targets.values_mut().find(|target| target.owner == owner) else {
            return Progress::Ended;
        };
        match &target.exclusion {
            Some(exclusion) if exclusion.withdraws_marks() => return Progress::LeftAlone,
            Some(_) => return Progress::Ended,
            None if !target.may_be_read() => return Progress::Ended,
            None => {}
        }
        let image = target.image();
        let mut ranges = Vec::new();
        for Tracked { stretch, .. } in &target.regions {
            let unmarked = by_marks && stretch.marked == Pages(0);
            let how = ReadHow { contents: Contents::All, unmarked, image, ..ReadHow::default() };
            ranges.push(ReadRange { first: stretch.first, pages: stretch.pages, how });
        }
        let process = target.info.process.clone();
        let digest = digest.clone();
        let mut moved = std::mem::take(cursor);
        let mut reader = self.reader.take().unwrap_or_default();
        let read = run_abandonable(move || {
            let mut pages = Vec::new();
            let read = moved.read(&mut reader, &process, &ranges, most, |view| {
                let Some(bytes) = view.bytes else { return };
                let content = if is_zero(bytes) { Content::Zeros } else { Content::Digest(digest(bytes)) };
                pages.push(PageContent { state: view.state, frame: view.frame, content });
            });
            (reader, moved, pages, read)
        });
        match read {
            Ok((reader, moved, pages, read)) => {
                self.reader = Some(reader);
                *cursor = moved;
                match read {
                    Ok(true) => Progress::More(pages),
                    Ok(false) => Progress::Done(pages),
                    Err(_) => Progress::Ended,
                }
            }
            Err(pending) => {
                target.set_timed_out(pending);
                self.schedule.next_ns = 0;
                Progress::Ended
            }
        }
    }

    /// KSM's `pages_sharing` and `pages_shared`: the pages that merging saves on this machine, and the merged frames.
    pub fn merged_pages(&self) -> (Pages, Pages) {
        let view = self.machine.ksm_view().unwrap_or_default();
        (view.sharing, view.shared)
    }

    /// How many pages of a target KSM has merged into the zero page. 0 if it has ended or we can't read it now.
    pub fn merged_zeros(&mut self, process: &Process) -> Pages {
        match self.targets.get_mut(&process.pid()) {
            Some(target) if target.info.process.key() == process.key() => {
                let stat = target.read(|process| KsmStat::of(process));
                stat.map(|stat| stat.zeros()).unwrap_or_default()
            }
            _ => Pages(0),
        }
    }
}
