//! Properties that the parsers keep for any input.
//!
//! Each function parses arbitrary bytes and panics if a parser violates a property: nothing panics or overflows, no
//! line is dropped silently, printed values parse back to the same. The fuzz targets call them with generated inputs,
//! and the tests with the inputs found so far, on any toolchain.

mod config;
mod limits;
mod mappings;
mod pages;
mod process;
mod sketches;
mod system;
mod talk;

pub use config::config;
pub use limits::{cgroup, ksm_stat, meminfo, pressure, vmstat};
pub use mappings::{maps, smaps};
pub use pages::pagemap;
pub use process::{opt_outs, schedstat, stat, statm, status, syscall};
pub use sketches::sketches;
pub use system::{ksm_files, machine, names};
pub use talk::{control, injector, state_file};

/// A function that panics if a parser violates a property on these bytes.
pub type Target = fn(&[u8]);

/// Every target by name, which is also the name of its fuzz target and of its folder of inputs.
pub const TARGETS: [(&str, Target); 22] = [
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
    ("opt_outs", opt_outs),
    ("pagemap", pagemap),
    ("pressure", pressure),
    ("schedstat", schedstat),
    ("sketches", sketches),
    ("smaps", smaps),
    ("stat", stat),
    ("state_file", state_file),
    ("statm", statm),
    ("status", status),
    ("syscall", syscall),
    ("vmstat", vmstat),
];
