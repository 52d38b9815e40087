//! The laboratory's report: experiments' results as files, and a page about them. It traces and measures nothing, so it
//! also runs on other machines than the measurements did.
//!
//! | module | holds |
//! | --- | --- |
//! | [`report`], [`activity`], [`points`], [`latencies`], [`events`] | an experiment's results |
//! | [`results`] | the file of a repetition |
//! | [`metric`] | the names of measured and judged values |
//! | [`measures`], [`claims`], [`summary`] | figures over all repetitions, judged by the claims |
//! | [`policy`] | names of policies |
//! | [`document`], [`charts`], [`columns`] | the page, its pictures and tables |
//! | [`record`], [`density`] | records of memory, and their duplicates |
//! | [`command`] | the command line |
#![forbid(unsafe_code)]

pub mod activity;
pub mod charts;
pub mod claims;
pub mod columns;
pub mod command;
pub mod density;
pub mod document;
pub mod events;
pub mod latencies;
pub mod measures;
pub mod metric;
pub mod points;
pub mod policy;
pub mod record;
pub mod report;
pub mod results;
pub mod summary;
#[cfg(test)]
mod svg_text;
