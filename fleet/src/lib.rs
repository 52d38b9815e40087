//! Reports what the hosts of a fleet hold in common, and plans which workloads to put together. It moves nothing
//! itself.
//!
//! | module | holds |
//! | --- | --- |
//! | [`sources`] | directories and object stores: listing and reading files of sketches |
//! | [`inventory`] | which of these files count, and why others do not |
//! | [`engine`], [`table`] | Apache DataFusion, and the rows of these files as its table |
//! | [`functions`], [`queries`] | theta functions that DataFusion lacks; the SQL, which Apache Spark runs, too |
//! | [`report`] | what hosts and pairs of workloads have in common |
//! | [`rules`] | the operator's rules: together, apart, pinned |
//! | [`fleet`] | makes the planner's fleet from samples and rules |
//! | [`plan`] | the plan as a document: JSON, text, labels for Kubernetes, tags for Proxmox VE |
//! | [`verify`] | compares a plan's promise with what hosts saved afterwards |
//! | [`commands`] | the command line |
#![forbid(unsafe_code)]

pub mod commands;
pub mod engine;
pub mod fleet;
pub mod functions;
pub mod inventory;
pub mod plan;
pub mod queries;
pub mod report;
pub mod rules;
pub mod sources;
pub mod table;
pub mod verify;
