//! Merging on request between Xen's guests, from dom0. Besides Linux, Xen is the second host that the engine runs on.
//!
//! | module | contents |
//! | --- | --- |
//! | [`hypervisor`] | the calls to the hypervisor and the toolstack, as a trait, and how they fail |
//! | [`library`] | these calls through Xen's libraries, loaded at run time. The only unsafe code |
//! | [`sharing`] | the order of calls that shares two pages. Pure |
//! | [`guests`] | which guests are in scope, and which ones we refuse |
//! | [`ranges`] | which of a guest's frames are populated |
//! | [`host`] | all of this as the engine's `Host` |
//! | [`backend`] | all of this as the daemon's `Backend`, and the exit codes of errors |
//! | [`unshare`] | giving guests their own copies again |
//!
//! The hypervisor shares whatever we tell it to share. It compares nothing, and it panics if we name a frame as client
//! that a third guest has, too. Both checks are up to us, so only [`sharing`] nominates and shares. The tests run it
//! against a model of the hypervisor that panics where the real one does.

pub mod backend;
pub mod guests;
pub mod host;
pub mod hypervisor;
pub mod library;
#[cfg(test)]
mod model;
pub mod ranges;
pub mod sharing;
pub mod unshare;
