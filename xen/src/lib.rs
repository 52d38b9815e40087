//! Merging on request between Xen's guests, from dom0: a second host of the judgement.
//!
//! | module | what belongs there |
//! | --- | --- |
//! | [`hypervisor`] | the calls to the hypervisor and the toolstack, as a trait, and how they fail |
//! | [`library`] | these calls by the libraries of Xen, loaded at run time. The only unsafe code |
//! | [`sharing`] | the order of calls in which two pages are shared. Pure |
//! | [`guests`] | which guests are in scope, and which are refused; their memory as ranges |
//! | [`ranges`] | which of a guest's frames are populated |
//! | [`host`] | all of it as the core's `Host` |
//! | [`unshare`] | giving guests their own copies again |
//!
//! The hypervisor shares what it is told to share: it compares nothing, and it panics if a frame is named as client that a third
//! guest has as well. Both are the caller's duty, which is why no module but [`sharing`] nominates or shares. The tests run it against a
//! model of the hypervisor that panics where the real one does.

pub mod guests;
pub mod host;
pub mod hypervisor;
pub mod library;
#[cfg(test)]
mod model;
pub mod ranges;
pub mod sharing;
pub mod unshare;
