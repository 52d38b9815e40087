//! What the parsers promise, whatever they are given.
//!
//! Each function takes any bytes, has them parsed, and panics if a promise is broken: that nothing panics or overflows,
//! that no line is dropped without a word, that what is printed parses back to the same. The fuzzer (the folder `fuzz`)
//! calls them with what it thinks of, and this crate's tests with what it has found so far, on any toolchain.

mod config;
mod limits;
mod mappings;
mod pages;
mod process;
mod system;
mod talk;

pub use config::config;
pub use limits::{cgroup, ksm_stat, meminfo, pressure, vmstat};
pub use mappings::{maps, smaps};
pub use pages::pagemap;
pub use process::{schedstat, stat, statm, status, syscall};
pub use system::{ksm_files, machine, names};
pub use talk::{control, injector, state_file};

/// A function that panics if a parser breaks a promise on these bytes.
pub type Target = fn(&[u8]);

/// Every target by its name, which is that of its fuzz target and of its folder of inputs too.
pub const TARGETS: [(&str, Target); 20] = [
    ("cgroup", cgroup),
    ("config", config),
    ("control", control),
    ("injector", injector),
    ("ksm_files", ksm_files),
    ("ksm_stat", ksm_stat),
    ("machine", machine),
    ("maps", maps),
    ("meminfo", meminfo),
    ("names", names),
    ("pagemap", pagemap),
    ("pressure", pressure),
    ("schedstat", schedstat),
    ("smaps", smaps),
    ("stat", stat),
    ("state_file", state_file),
    ("statm", statm),
    ("status", status),
    ("syscall", syscall),
    ("vmstat", vmstat),
];
