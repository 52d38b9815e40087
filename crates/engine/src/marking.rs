//! Decides what to mark and what to unmark.

mod budget;
pub mod cow_breaks;
pub mod extents;
pub mod lifetimes;
pub mod marker;
pub mod profit;
pub mod unmarking;
