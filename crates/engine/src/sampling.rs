//! Decides what to read: the ladder of levels that regions climb, and estimates from their samples.
//!
//! [`census`] is for `pagefold scan`, which samples once and never again.

pub mod census;
pub mod estimate;
pub mod ladder;
