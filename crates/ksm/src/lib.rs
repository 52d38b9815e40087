//! KSM: its files in sysfs, and the only code that sets its knobs, makes ksmd scan, and restores the knobs.
//!
//! - `files`: reading and writing the files in sysfs. `knobs` and `counters` list them. If a kernel gets a new knob,
//!   start there.
//! - [`lease`]: taking KSM over. `knob_writer` sets its knobs and records every change in the [`state_file`] first,
//!   `restore` restores them. One [`lock`] keeps two programs from driving KSM at once.
//! - [`scan`]: one scan of ksmd, from the kick to the end. [`controller`]: scans, pace and rest, as the daemon orders.
//! - [`request`]: `/dev/ksm`, where the kernel has it: merging the pairs of pages that we ask for, without ksmd.
//! - [`ksmd`]: the kernel thread.

pub mod controller;
mod counters;
mod files;
mod knob_writer;
mod knobs;
pub mod ksmd;
pub mod lease;
pub mod lock;
pub mod request;
mod restore;
pub mod scan;
pub mod state_file;

pub use counters::{KsmCounters, VmEventCounter, VmEvents, cow_ksm};
pub use files::{KSM_ROOT, Ksm, KsmError, plain};
pub use knob_writer::{KnobError, Overridden};
pub use knobs::{Knob, Knobs};
#[cfg(test)]
use pagefold_testkit::ksm_files as fixture;
pub use restore::RestoreOutcome;
