//! Other processes as procfs shows them: status, mappings, pages and their contents, limits.

pub(crate) mod cgroup;
pub(crate) mod charges;
pub mod collapse;
pub mod cpu;
pub mod headroom;
pub(crate) mod image;
pub mod kpageflags;
pub(crate) mod ksm_stat;
pub mod list;
pub mod maps;
pub mod memory;
pub mod merge_any;
pub mod numa;
pub mod pagemap;
pub mod process;
pub(crate) mod stalls;
pub(crate) mod statm;
pub mod status;

use std::path::PathBuf;

/// Where procfs, the cgroups and the file system are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// `/proc`
    pub proc: PathBuf,
    /// `/sys/fs/cgroup`
    pub cgroup: PathBuf,
    /// `/`, for the files in which owners opt out.
    pub files: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), cgroup: "/sys/fs/cgroup".into(), files: "/".into() }
    }
}
