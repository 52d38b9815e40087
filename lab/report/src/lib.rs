//! The report of the laboratory: results of experiments as files, and one page of them. It traces and measures nothing, so it also runs
//! where the measuring was not done.
//!
//! | module | holds |
//! | --- | --- |
//! | [`report`], [`points`], [`latencies`], [`events`] | what an experiment has measured |
//! | [`results`] | the files of a repetition |
//! | [`measures`], [`claims`], [`summary`] | figures over all repetitions, judged by the claims |
//! | [`document`], [`charts`], [`chart`], [`plot`], [`columns`] | the page, its pictures and tables |
//! | [`record`], [`density`] | records of memory, and where duplicates are in one |
//! | [`command`] | the command line |
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the library of one program: items are documented where their names do not suffice")]

pub mod chart;
pub mod charts;
pub mod claims;
pub mod columns;
pub mod command;
pub mod density;
pub mod document;
pub mod events;
pub mod latencies;
pub mod measures;
pub mod plot;
pub mod points;
pub mod record;
pub mod report;
pub mod results;
pub mod summary;
#[cfg(test)]
mod svg_text;
