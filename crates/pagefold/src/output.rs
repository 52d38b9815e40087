//! Rows that several commands print.

pub mod placement;
