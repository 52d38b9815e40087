//! Plans which workloads of a fleet to put on one host.
//!
//! The planner is pure: it takes workloads, samples of their contents and the hosts' limits, and returns moves. It uses
//! no file, no clock and no random source. Two programs on one host save the contents that they have in common (Memory
//! Buddies, VEE 2009). We estimate these from coordinated samples: for every workload alike, a content's digest decides
//! whether we sample the content. So two samples have contents in common wherever the two workloads do.
//!
//! | module | holds |
//! | --- | --- |
//! | [`fleet`] | hosts, workloads, samples, and the operator's rules |
//! | [`contents`] | sampled contents that at least two workloads hold, by number |
//! | [`placement`] | which unit is where, what that saves, and how a move would change it |
//! | [`regression`] | corrects estimates from samples by numbers that we know |
//! | [`likeness`] | groups of workloads that hold nearly the same, by banded min-hash |
//! | [`target`] | a placement that saves the most, as if everything could be moved |
//! | [`improve`] | local search, for the units left over |
//! | [`moves`] | the moves to get there: a limited number, with the limits kept after each step |
#![forbid(unsafe_code)]

pub mod contents;
pub mod fleet;
pub mod improve;
pub mod likeness;
pub mod moves;
pub mod placement;
pub mod regression;
pub mod target;

pub use fleet::{Fleet, FleetError, Host, HostId, Sample, Unit, UnitId};
pub use moves::{Move, Plan, Step, plan};
pub use placement::{Placement, Saving};
