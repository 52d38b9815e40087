//! `/proc/kpagecgroup`: the inode number of the memory cgroup that each frame is charged to. Needs root.
//!
//! Frames stay charged to a cgroup after its removal. The kernel then shows the nearest ancestor that still exists
//! (`page_cgroup_ino`, mm/memcontrol.c), and its limit applies to them.

use super::kpageflags::KpageFlags;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

/// We look up at most this many cgroups: the given one and its descendants.
const CGROUPS_MOST: usize = 16_384;

/// The frames charged to one cgroup and its descendants.
#[derive(Debug)]
pub struct Charges {
    /// We read kpagecgroup like kpageflags, because it has one word per frame, too.
    words: KpageFlags,
    cgroups: HashSet<u64>,
}

impl Charges {
    /// Opens kpagecgroup to look up frames charged to the cgroup with this directory, or to one below.
    pub fn of(dir: &Path) -> io::Result<Self> {
        Self::at(Path::new("/proc/kpagecgroup"), dir)
    }

    fn at(file: &Path, dir: &Path) -> io::Result<Self> {
        Ok(Self { words: KpageFlags::open_at(file)?, cgroups: inodes_below(dir)? })
    }

    /// Whether each of the frames is charged to one of these cgroups.
    pub fn look_up(&mut self, frames: &[u64]) -> io::Result<Vec<bool>> {
        let mut charged = vec![false; frames.len()];
        let cgroups = &self.cgroups;
        self.words.look_up(frames.iter().copied(), |at, word| charged[at] = cgroups.contains(&word.0))?;
        Ok(charged)
    }
}

/// The inode numbers of a directory and all directories below.
fn inodes_below(dir: &Path) -> io::Result<HashSet<u64>> {
    let mut inodes = HashSet::new();
    inodes.insert(fs::metadata(dir)?.ino());
    let mut left: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        // We can't list a directory that somebody has just removed, or one nested so deep that its path is too long. We
        // must still count the frames of the other cgroups.
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries.map_while(Result::ok) {
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_dir && inodes.len() < CGROUPS_MOST {
                inodes.insert(entry.ino());
                left.push(entry.path());
            }
        }
    }
    Ok(inodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags, mkdirat, open, openat};

    fn nest_beyond_the_longest_path(dir: &Path) {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let name = "n".repeat(255);
        let mut at = open(dir, flags, Mode::empty()).unwrap();
        for _ in 0..17 {
            mkdirat(&at, &name, Mode::RWXU).unwrap();
            at = openat(&at, &name, flags, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn frames_of_a_cgroup_and_those_below_are_found() {
        let root = tempfile::tempdir().unwrap();
        for dir in ["pod/one/deep", "pod/two", "other"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let inode = |dir: &str| fs::metadata(root.path().join(dir)).unwrap().ino();
        let words = [inode("pod"), inode("other"), inode("pod/one/deep"), 0, inode("pod/two"), inode("pod/one")];
        let file = root.path().join("kpagecgroup");
        fs::write(&file, words.map(u64::to_ne_bytes).concat()).unwrap();
        let charged =
            |dir: &str| Charges::at(&file, &root.path().join(dir)).unwrap().look_up(&[5, 0, 1, 2, 3, 4, 99]).unwrap();
        assert_eq!(charged("pod"), [true, true, false, true, false, true, false]);
        nest_beyond_the_longest_path(&root.path().join("pod"));
        assert_eq!(charged("pod"), [true, true, false, true, false, true, false]);
        assert_eq!(charged("pod/one"), [true, false, false, true, false, false, false]);
        assert!(Charges::at(&file, &root.path().join("gone")).is_err());
    }
}
