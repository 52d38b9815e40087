//! The laboratory of pagefold: experiments on the real KSM, and the papers' algorithms on recorded memory.
//!
//! | module | holds |
//! | --- | --- |
//! | [`bench`] | experiments that measure pagefold beside KSM alone and beside an oracle |
//! | [`ksm_control`] | KSM, taken for an experiment |
//! | [`interrupt`] | SIGINT and SIGTERM, for every wait |
//! | [`tenant`] | programs with known memory |
//! | [`activity`] | the things that a tenant does by itself |
//! | `dialogue` | programs that answer commands line by line |
//! | [`contents`] | contents of pages and databases |
//! | [`programs`] | the real programs for experiments and records |
//! | [`record`] | the file format of a record: the content of every page, snapshot by snapshot |
//! | [`recorder`] | records of running programs |
//! | [`generate`] | generated records of the papers' workloads |
//! | [`script`], [`replay`], [`table`] | a record as a simulator script, every algorithm on it, the comparison |
//! | [`uksmd`], [`partial_hash`] | UKSM's scanner in virtual time, and its hashes of part of a page |
//! | [`scale`] | simulated memories of up to a tebibyte |
//! | [`sketch_error`] | how well sketches tell the contents that programs have in common |
//! | [`fleet`] | simulated fleets, placed at random, by plan and at best |
//! | [`commands`] | the command line |
#![forbid(unsafe_code)]

pub mod activity;
pub mod bench;
pub mod commands;
pub mod contents;
mod dialogue;
pub mod digests;
pub mod fleet;
pub mod generate;
pub mod interrupt;
pub mod ksm_control;
pub mod partial_hash;
pub mod programs;
pub mod recorder;
pub mod replay;
pub mod scale;
pub mod script;
pub mod sketch_error;
pub mod table;
pub mod tenant;
pub mod uksmd;

pub use pagefold_report::{charts, columns, record};
