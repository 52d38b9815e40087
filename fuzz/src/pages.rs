//! Page tables: `/proc/PID/pagemap`, PAGEMAP_SCAN and `/proc/kpageflags`.

use pagefold_procmem::kpageflags::{FrameFlags, KpageFlags};
use pagefold_procmem::pagemap::{Categories, PageRange, PagemapEntry};
use std::path::Path;

/// Entries, ranges and frames from arbitrary words: a private page is present, mapped once and anonymous; only present
/// pages have frames; a range contains the pages between its addresses; and we look up each frame once, in ascending
/// order.
pub fn pagemap(bytes: &[u8]) {
    let words: Vec<u64> =
        bytes.chunks_exact(8).filter_map(|word| word.try_into().ok().map(u64::from_le_bytes)).collect();
    let entries = words.iter().map(|&word| PagemapEntry(word));
    for entry in entries.clone() {
        assert!(!entry.private() || entry.present() && entry.exclusive() && !entry.file_or_shared());
        assert!(entry.pfn().is_none_or(|pfn| entry.present() && pfn != 0 && pfn < 1 << 55));
    }
    for triple in words.chunks_exact(3) {
        let (start, end, categories) = (triple[0], triple[1], triple[2]);
        let range = PageRange::between(start, end, categories);
        assert!(range.pages.0 <= (1 << 52) && range.pages.0 <= end / 4096);
        assert!(range.pages.0 == 0 || range.first.address() <= start && start < end);
        let both = Categories::PRESENT.or(Categories::HUGE);
        assert!(!range.categories.has(both) || range.categories.has(Categories::PRESENT));
    }
    let frames: Vec<u64> = entries.filter_map(PagemapEntry::pfn).collect();
    // An endless file of zeros, like kpageflags beyond the end of memory.
    let Ok(mut flags) = KpageFlags::open_at(Path::new("/dev/zero")) else { return };
    let mut seen = vec![false; frames.len()];
    let mut last = 0;
    let looked = flags.look_up(frames.iter().copied(), |at, flags| {
        assert_eq!(flags, FrameFlags(0));
        assert!(!std::mem::replace(&mut seen[at], true) && frames[at] >= last);
        last = frames[at];
    });
    assert!(looked.is_err() || seen.iter().all(|&seen| seen));
}
