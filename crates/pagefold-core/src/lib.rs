//! The judgement of pagefold: which memory is worth folding, when, and what came of it.
//!
//! Everything here is pure. There is no clock, file, environment or random source: time and seeds
//! are arguments, processes and regions are opaque keys. A [`host::Host`] (the live machine, or the
//! simulated one) observes, reads and acts; this crate plans, judges and accounts.
#![forbid(unsafe_code)]

pub mod census;
pub mod churn;
pub mod classes;
pub mod config;
pub mod engine;
pub mod estimate;
pub mod extent;
pub mod governor;
pub mod hash;
pub mod host;
pub mod index;
pub mod ladder;
pub mod ledger;
pub mod lifetimes;
pub mod limits;
pub mod marker;
pub mod merge;
pub mod permutation;
pub mod placement;
pub mod placer;
pub mod region;
pub mod report;
pub mod slots;
pub mod units;
