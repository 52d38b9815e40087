//! What pagefold's Parquet files have in common: a checksum over the whole file ([`seal`]), and decoding that turns panics of the
//! parquet crate into errors ([`guarded`]).
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "items are documented where their names do not suffice")]

mod guarded;
pub mod seal;

pub use guarded::{guarded, one_line};
