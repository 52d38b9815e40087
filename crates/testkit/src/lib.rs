//! Helpers that pagefold's integration tests share.
//!
//! | module | holds |
//! | --- | --- |
//! | [`skip`](mod@skip) | how a test reports that it can't run on this machine |
//! | [`binaries`] | where the programs under test and the victims are; builds them on demand |
//! | [`browser`] | opens the pages of reports in a browser |
//! | [`pagefold`](mod@pagefold) | runs of the program under test, and assertions on how they end |
//! | [`ksm`] | KSM's knobs and counters, and the fixture that takes KSM for one test |
//! | [`process`] | small processes to work on, and readers of a process's files in /proc |
//! | [`ksm_files`] | a directory like KSM's in sysfs |
//! | [`cgroup`] | a test's own control groups, and freezers |
//! | [`limit`] | control groups that limit memory |
//! | [`namespace`] | mount namespaces, and file systems that we can freeze |
//! | [`holder`], [`shuffler`], [`injection`] | handles of the victims `holder`, `shuffler` and `victim` |
//! | [`faults`] | the points at which tests make pagefold fail or die |
//! | [`golden`] | texts that we keep as files and compare |
//! | [`guest`] | emulated machines |
//!
//! The victims are this crate's binaries, in `src/bin`:
//!
//! | program | what it does |
//! | --- | --- |
//! | `holder` | holds memory with given contents, page by page |
//! | `shuffler` | rewrites, moves, forks and checks its memory all the time |
//! | `victim` | is in a state that matters for injection, and checks that it notices nothing |
//! | `guest_init` | the `/init` of emulated machines: runs a command |
#![allow(clippy::missing_panics_doc, reason = "helpers of tests: they panic to fail the test")]

pub mod binaries;
pub mod browser;
pub mod cgroup;
pub mod faults;
pub mod golden;
pub mod guest;
pub mod holder;
pub mod injection;
pub mod ksm;
pub mod ksm_files;
pub mod limit;
pub mod namespace;
pub mod pagefold;
pub mod process;
pub mod shuffler;
pub mod skip;

pub use binaries::{ProgramCopy, program, victim_binary};
pub use browser::Browser;
pub use cgroup::{Cgroup, Freezer};
pub use holder::{Holder, assert_intact, pair, pids};
pub use ksm::{KICK, KsmAtRest, KsmLock, STATE_FILE, advisor_is_off, number, saved_bytes, write_knob};
pub use namespace::{Disk, Namespace};
pub use pagefold::{
    ConfigFile, Daemon, Ended, assert_failed, assert_failed_as, assert_fails, assert_has, assert_refused, children_of,
    injector_on, is_on_request, json_lines, json_of, mechanism, output_of, pagefold, row, status, succeed, unmerge,
    with_pids,
};
pub use pagefold_programs::child::OwnedChild;
pub use process::{
    Forked, Marks, Script, Sleeper, Tracer, are_merged, as_other_user, assert_unmarked, blocked_threads,
    can_read_pages, exists, has_huge_pages, has_kernel_threads, has_merge_any, held, is_root, kib, marks, send, state,
    status_field, tids, vmstat, wait_until, wait_until_merged, wait_until_unmarked, zombie,
};
pub use shuffler::Shuffler;
pub use skip::{skip, skip_unsupported};

pub const MIB: u64 = 1 << 20;
pub const PAGES_PER_MIB: u64 = 256;
