//! `/proc/kpagecount`: how many page table entries map each frame. Needs root.

use crate::kpageflags::KpageFlags;
use std::io;
use std::path::Path;

/// How often each frame is mapped, on the whole machine.
pub fn mappers_of(frames: &[u64]) -> io::Result<Vec<u32>> {
    mappers_at(Path::new("/proc/kpagecount"), frames)
}

fn mappers_at(file: &Path, frames: &[u64]) -> io::Result<Vec<u32>> {
    let mut mappers = vec![0; frames.len()];
    // The file has one word per frame, like kpageflags.
    let mut words = KpageFlags::open_at(file)?;
    words.look_up(frames.iter().copied(), |at, word| mappers[at] = u32::try_from(word.0).unwrap_or(u32::MAX))?;
    Ok(mappers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_in_the_order_of_the_frames() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kpagecount");
        std::fs::write(&file, [7_u64, 1, u64::MAX, 3].map(u64::to_ne_bytes).concat()).unwrap();
        assert_eq!(mappers_at(&file, &[3, 0, 2, 99]).unwrap(), [3, 7, u32::MAX, 0]);
        assert!(mappers_at(&dir.path().join("gone"), &[1]).is_err());
    }
}
