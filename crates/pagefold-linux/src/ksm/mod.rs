//! KSM: its files, and the one way to take it over, to order scans from ksmd, and to give it back.
//!
//! - [`files`](Ksm): counters and knobs in sysfs. A new knob of KSM begins there.
//! - [`lease`]: taking KSM over, with the values of its knobs kept in a [`state_file`] and under a [`lock`].
//! - [`controller`]: scans on order, paced scanning, rest.
//! - [`experiment`]: taking KSM for measurements.
//! - [`ksmd`]: the kernel thread.

pub mod controller;
pub mod experiment;
mod files;
mod knob_writer;
pub mod ksmd;
pub mod lease;
pub mod lock;
mod scan;
pub mod state_file;

#[cfg(test)]
pub(crate) use files::fixture;
pub use files::{Breaks, KSM_ROOT, Knob, Knobs, Ksm, KsmCounters, KsmError, chosen};
pub(crate) use files::{cow_ksm, plain};
