//! What is merged, by the targets' page tables. KSM's own counters lag where pages are un-shared again: ksmd notices a
//! broken copy only when it passes the next time. Page tables know at once.

use pagefold_core::units::Pages;
use pagefold_linux::inject::mark::PageSpan;
use pagefold_linux::proc::pagemap::{Pagemap, PagemapEntry};
use pagefold_linux::proc::process::Process;
use pagefold_linux::scope::eligible::eligible_spans;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks. One takes some 20 ms for 2 GiB.
const INTERVAL: Duration = Duration::from_secs(1);

/// Entries read by one call.
const ENTRIES: usize = 4096;

/// One look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PageTableSample {
    /// Since the start.
    pub seconds: f64,
    /// Pages that share their frame. Targets that were never forked have no others than merged ones.
    pub merged_pages: u64,
    /// Frames that this saves.
    pub saved_bytes: u64,
}

/// The most that was merged at any time, and the mean over the time of what was saved.
pub fn most_and_mean(looks: &[PageTableSample]) -> (u64, f64) {
    let most = looks.iter().map(|look| look.merged_pages).max().unwrap_or(0);
    let area: f64 = looks
        .windows(2)
        .map(|pair| {
            (pair[1].seconds - pair[0].seconds) * f64::midpoint(pair[0].saved_bytes as f64, pair[1].saved_bytes as f64)
        })
        .sum();
    let seconds = looks.last().map_or(0.0, |last| last.seconds - looks[0].seconds);
    (most, if seconds > 0.0 { area / seconds } else { 0.0 })
}

/// A thread that looks until it is told to end.
#[derive(Debug)]
pub struct PageTables {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<Vec<PageTableSample>>>>,
}

impl PageTables {
    /// Starts looking at the mappings that these processes have now.
    pub fn watch(processes: &[Process]) -> anyhow::Result<Self> {
        let mut places = Vec::new();
        for process in processes {
            places.push((Pagemap::open(process)?, eligible_spans(process)?));
        }
        let end = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&end);
        let began = Instant::now();
        let thread = std::thread::spawn(move || {
            let (mut looks, mut frames) = (Vec::new(), Vec::new());
            loop {
                let last = told.load(Ordering::Acquire);
                let seconds = began.elapsed().as_secs_f64();
                looks.push(PageTableSample { seconds, ..look(&places, &mut frames)? });
                if last {
                    return Ok(looks);
                }
                std::thread::park_timeout(INTERVAL);
            }
        });
        Ok(Self { end, thread: Some(thread) })
    }

    /// Takes a last look and returns them all; never none.
    pub fn finish(mut self) -> anyhow::Result<Vec<PageTableSample>> {
        self.end.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return Ok(Vec::new()) };
        thread.thread().unpark();
        thread.join().map_err(|_| anyhow::anyhow!("a thread that reads page tables panicked"))?
    }
}

impl Drop for PageTables {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
    }
}

fn look(places: &[(Pagemap, Vec<PageSpan>)], frames: &mut Vec<u64>) -> anyhow::Result<PageTableSample> {
    frames.clear();
    let mut entries = vec![0; ENTRIES];
    for (pagemap, stretches) in places {
        for stretch in stretches {
            let mut done = 0;
            while done < stretch.pages.0 {
                let now = usize::try_from(stretch.pages.0 - done)?.min(ENTRIES);
                pagemap.read(stretch.first + done, &mut entries[..now])?;
                frames.extend(entries[..now].iter().filter_map(|&entry| shared_frame(PagemapEntry(entry))));
                done += now as u64;
            }
        }
    }
    let merged_pages = frames.len() as u64;
    frames.sort_unstable();
    frames.dedup();
    let saved_bytes = Pages(merged_pages - frames.len() as u64).bytes().0;
    Ok(PageTableSample { seconds: 0.0, merged_pages, saved_bytes })
}

fn shared_frame(entry: PagemapEntry) -> Option<u64> {
    if entry.file_or_shared() || entry.exclusive() { None } else { entry.pfn() }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    #[test]
    fn means_are_over_time_and_the_most_is_a_moment() {
        let look = |seconds, saved_bytes, merged_pages| PageTableSample { seconds, merged_pages, saved_bytes };
        assert_eq!(most_and_mean(&[look(0.0, 0, 0), look(1.0, 100, 9), look(3.0, 100, 4)]), (9, 250.0 / 3.0));
        assert_eq!(most_and_mean(&[]), (0, 0.0));
        assert_eq!(most_and_mean(&[look(1.0, 5, 5)]), (5, 0.0));
    }

    #[test]
    fn only_shared_anonymous_frames_count() {
        let present = 1 << 63;
        assert_eq!(shared_frame(PagemapEntry(present | 7)), Some(7));
        for other in [0, 7, present | 1 << 56 | 7, present | 1 << 61 | 7] {
            assert_eq!(shared_frame(PagemapEntry(other)), None);
        }
    }
}
