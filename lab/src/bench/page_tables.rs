//! Counts merged pages in the targets' page tables. When COW breaks a merge, KSM's counters lag, since ksmd only
//! notices on its next scan. Page tables change at once.

use crate::bench::marks::{PageSpan, eligible_spans};
use crate::bench::sampling::SamplingThread;
use pagefold_engine::units::Pages;
use pagefold_procmem::pagemap::{Pagemap, PagemapEntry};
use pagefold_procmem::process::Process;
pub use pagefold_report::points::PageTableSample;
use std::time::Duration;

/// Time between two samples. A sample takes about 20 ms for 2 GiB.
const INTERVAL: Duration = Duration::from_secs(1);

/// Page table entries read per call.
const ENTRIES: usize = 4096;

/// The bytes saved, as a mean over time.
pub fn mean_saved_bytes(samples: &[PageTableSample]) -> f64 {
    let mut area = 0.0;
    let mut seconds = 0.0;
    for pair in samples.windows(2) {
        let between = pair[1].seconds - pair[0].seconds;
        area += between * f64::midpoint(pair[0].saved_bytes as f64, pair[1].saved_bytes as f64);
        seconds += between;
    }
    if seconds > 0.0 { area / seconds } else { 0.0 }
}

/// Starts sampling the mappings that these processes have now.
pub fn watch(processes: &[Process]) -> anyhow::Result<SamplingThread<PageTableSample>> {
    let mut mappings = Vec::new();
    for process in processes {
        mappings.push((Pagemap::open(process)?, eligible_spans(process)?));
    }
    let mut frames = Vec::new();
    Ok(SamplingThread::start(INTERVAL, move |began| {
        let seconds = began.elapsed().as_secs_f64();
        Ok(PageTableSample { seconds, ..take_sample(&mappings, &mut frames)? })
    }))
}

fn take_sample(mappings: &[(Pagemap, Vec<PageSpan>)], frames: &mut Vec<u64>) -> anyhow::Result<PageTableSample> {
    frames.clear();
    let mut entries = vec![0; ENTRIES];
    for (pagemap, spans) in mappings {
        for span in spans {
            let mut done = 0;
            while done < span.pages.0 {
                let now = usize::try_from(span.pages.0 - done)?.min(ENTRIES);
                pagemap.read(span.first + done, &mut entries[..now])?;
                for &entry in &entries[..now] {
                    frames.extend(shared_frame(PagemapEntry(entry)));
                }
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
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_over_time() {
        let sample = |seconds, saved_bytes| PageTableSample { seconds, saved_bytes, ..PageTableSample::default() };
        assert_eq!(mean_saved_bytes(&[sample(0.0, 0), sample(1.0, 100), sample(3.0, 100)]), 250.0 / 3.0);
        assert_eq!(mean_saved_bytes(&[]), 0.0);
        assert_eq!(mean_saved_bytes(&[sample(1.0, 5)]), 0.0);
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
