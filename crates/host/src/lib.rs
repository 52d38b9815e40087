//! The live machine behind the engine's `Host` interface: targets and their regions, samples, marks and moves.
//!
//! | module | holds |
//! | --- | --- |
//! | [`scope`] | which processes are in scope, which of them and which mappings we exclude, trust domains |
//! | [`judge`] | the rules of a run, and the verdict that they give on a process |
//! | [`live`], [`targets`], [`regions`] | the machine behind the `Host` interface, its processes and their memory |
//! | [`check`] | whether this machine is fit for pagefold (`pagefold doctor`) |
//! | [`os`] | sockets that systemd passes on, waking the main loop, namespaces |
//!
//! - To exclude something new, add a rule in [`scope::exclude`].
//! - For a new finding of `pagefold doctor`, add the fact in [`check::facts`] and its meaning in [`check::diagnose`].

pub mod check;
mod churn;
mod huge_mappings;
pub mod judge;
pub mod live;
mod marked;
pub mod os;
mod outsiders;
pub mod regions;
mod sampling;
pub mod scope;
pub mod targets;
pub mod unmerger;
