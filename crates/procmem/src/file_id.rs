//! Identifies a file by device and inode, without asking the server of a network or FUSE file system.

use crate::process::Process;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// A file, by device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    /// The executable of a process; `None` if it has none. Asks no file server.
    pub fn of_exe(process: &Process) -> Option<Self> {
        let path = process.path_of("exe");
        Some(Found::of(process.as_fd(), Path::new(&*path), AtFlags::empty()).ok()?.id)
    }
}

/// The kernel's record of a file. Reading it asks no server of a network or FUSE file system.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub id: FileId,
    pub uid: u32,
    pub mode: u32,
    pub mount: u64,
}

impl Found {
    pub fn of_file(file: &fs::File) -> io::Result<Self> {
        Self::of(file.as_fd(), Path::new(""), AtFlags::EMPTY_PATH)
    }

    pub fn of_path(path: &Path) -> io::Result<Self> {
        Self::of(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
    }

    fn of(directory: BorrowedFd<'_>, path: &Path, flags: AtFlags) -> io::Result<Self> {
        let flags = flags | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let stat = statx(directory, path, flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)?;
        Ok(Self {
            id: FileId { device: (stat.stx_dev_major, stat.stx_dev_minor), inode: stat.stx_ino },
            uid: stat.stx_uid,
            mode: u32::from(stat.stx_mode),
            mount: stat.stx_mnt_id,
        })
    }
}
