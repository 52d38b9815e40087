//! `/proc/kpageflags`: the flags of each frame of the machine. Needs root. Bits are as in the kernel's
//! Documentation/admin-guide/mm/pagemap.rst.

use super::pagemap::{PagemapEntry, pread_words};
use crate::os::fault;
use pagefold_engine::units::{PAGE_BYTES, PAGE_SIZE, Vpn, count};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameFlags(pub u64);

impl FrameFlags {
    /// The page is on the active list of page reclaim. Kernels with MGLRU set this flag on no page.
    pub const fn active(self) -> bool {
        self.0 & (1 << 6) != 0
    }
    /// The page is anonymous, or belongs to shared memory or a tmpfs, rather than to a file on disk.
    pub const fn swap_backed(self) -> bool {
        self.0 & (1 << 14) != 0
    }
    pub const fn hugetlb(self) -> bool {
        self.0 & (1 << 17) != 0
    }
    pub const fn ksm(self) -> bool {
        self.0 & (1 << 21) != 0
    }
    /// Part of a transparent huge page, of any size.
    pub const fn thp(self) -> bool {
        self.0 & (1 << 22) != 0
    }
    /// The zero page, small or huge.
    pub const fn zero_page(self) -> bool {
        self.0 & (1 << 24) != 0
    }
}

/// Flags by frame number, for the whole machine.
#[derive(Debug)]
pub struct KpageFlags {
    file: File,
    scratch: Vec<u64>,
    order: Vec<(u64, usize)>,
}

/// Whether we can recognise merged pages: we may read kpageflags, and its KSM flag is correct. Linux 6.12 (seen on
/// 6.12.95) sets the flag on every anonymous page, because `stable_page_flags` tests two bits and every anonymous page
/// has one of them. So we test, once, whether a page of our own has the flag.
pub fn shows_merged() -> bool {
    static SHOWS: OnceLock<bool> = OnceLock::new();
    *SHOWS.get_or_init(|| {
        // If we can't test our own page, we trust the flag.
        KpageFlags::open().is_ok_and(|flags| !matches!(own_page_is_merged(&flags.file), Ok(Some(true))))
    })
}

/// Whether the flag is set on a page of our own; `None` if its frame number is hidden.
fn own_page_is_merged(flags: &File) -> io::Result<Option<bool>> {
    // We write the buffer to make its pages present. It's long enough to contain a whole page.
    let memory = vec![1_u8; 2 * PAGE_SIZE];
    let page = Vpn::of_address(count(memory.as_ptr().addr()) + PAGE_BYTES);
    let mut word = [0];
    pread_words(&File::open("/proc/self/pagemap")?, &mut word, page.0 * 8)?;
    let Some(frame) = PagemapEntry(word[0]).pfn() else { return Ok(None) };
    pread_words(flags, &mut word, frame * 8)?;
    drop(std::hint::black_box(memory));
    Ok(Some(FrameFlags(word[0]).ksm()))
}

/// We read across gaps up to this length between frames: that's cheaper than another call (measured 0.6 us for one
/// frame, 0.1 us for each additional one).
const NEAR_FRAMES: u64 = 5;

const LONGEST_READ: u64 = 512;

impl KpageFlags {
    /// Opens the kpageflags of this machine. Needs root.
    pub fn open() -> io::Result<Self> {
        Self::open_at(Path::new("/proc/kpageflags"))
    }

    /// Opens another file that has one word per frame, like kpagecount.
    pub fn open_at(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?, scratch: Vec::new(), order: Vec::new() })
    }

    /// Looks up the flags of frames. Calls `visit` by ascending frame, with the frame's position in `frames` and its
    /// flags. Reads frames that are equal or close together with one call.
    pub fn look_up(
        &mut self,
        frames: impl IntoIterator<Item = u64>,
        mut visit: impl FnMut(usize, FrameFlags),
    ) -> io::Result<()> {
        self.order.clear();
        self.order.extend(frames.into_iter().zip(0..));
        self.order.sort_unstable();
        let mut rest = self.order.as_slice();
        while let Some(&(first, _)) = rest.first() {
            let mut last = first;
            let mut near = 0;
            while let Some(&(frame, _)) = rest.get(near) {
                if frame - last > NEAR_FRAMES || frame - first >= LONGEST_READ {
                    break;
                }
                last = frame;
                near += 1;
            }
            let length = usize::try_from(last - first + 1).unwrap_or(1);
            self.scratch.clear();
            self.scratch.resize(length, 0);
            // Frames beyond the end of memory have no flags: the read ends early, and zeros remain.
            fault::io("read:kpageflags")?;
            pread_words(&self.file, &mut self.scratch, first * 8)?;
            for &(frame, position) in &rest[..near] {
                let at = usize::try_from(frame - first).unwrap_or(0);
                visit(position, FrameFlags(self.scratch[at]));
            }
            rest = &rest[near..];
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "kpageflags_tests.rs"]
mod tests;
