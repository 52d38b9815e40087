//! Which workloads of a fleet to put on one host.
//!
//! Pure: workloads, samples of their contents and the hosts' limits in, moves out. No file, no clock, no random source.
//! What two programs save on one host is what they hold in common (Memory Buddies, VEE 2009). It is judged from
//! coordinated samples: which contents are sampled is decided by their digests, the same way for every workload, so the
//! samples of two workloads meet wherever the workloads do.
//!
//! | module | holds |
//! | --- | --- |
//! | [`fleet`] | hosts, workloads, samples, and what the operator rules |
//! | [`contents`] | sampled contents that at least two workloads hold, by number |
//! | [`placement`] | who is where, what that saves, and what a move would change |
//! | [`regression`] | what samples say, corrected by what is known |
//! | [`likeness`] | groups of workloads that hold nearly the same, by banded min-hash |
//! | [`target`] | a placement that saves the most, as if everything could be moved |
//! | [`improve`] | local search, for what is left over |
//! | [`moves`] | the way there: at most so many moves, the limits kept after each |
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
