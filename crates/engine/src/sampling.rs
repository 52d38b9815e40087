//! What to read: the ladder of levels that regions climb, and what their samples say.
//!
//! [`census`] is for `pagefold scan`, which samples once and does not return.

pub mod census;
pub mod estimate;
pub mod ladder;
