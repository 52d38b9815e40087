//! Reads other processes through procfs: status, mappings, pages and their contents, limits. Reading leaves the
//! processes as they are: merged and fork-shared pages stay shared, and we trace nobody.
//!
//! - To read another figure from `/proc/PID`, extend the module of its file. Parsers take bytes.
//! - [`os`]: the machine and this process: CPU time, memory pressure and nodes, capabilities, signals, fault injection.

pub mod cgroup;
pub mod charges;
pub mod collapse;
pub mod cpu;
pub mod cursor;
pub mod file_id;
pub mod headroom;
pub mod image;
pub mod kpageflags;
pub mod ksm_stat;
pub mod list;
pub mod mappers;
pub mod maps;
pub mod memory;
pub mod merge_any;
pub mod numa;
pub mod os;
pub mod pagemap;
pub mod process;
pub mod stalls;
pub mod statm;
pub mod status;

use std::path::PathBuf;

/// Where procfs, the cgroups and the file system are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// `/proc`
    pub proc: PathBuf,
    /// `/sys/fs/cgroup`
    pub cgroup: PathBuf,
    /// `/`, below which we look for configuration files that opt out.
    pub files: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), cgroup: "/sys/fs/cgroup".into(), files: "/".into() }
    }
}
