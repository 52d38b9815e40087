//! Sketches: what workloads hold, as far as it takes to tell what they have in common.
//!
//! - [`key`]: the fleet's key, and contents of pages as digests under it.
//! - [`count`]: counting the contents of one workload, page by page.
//! - [`sketch`]: the sketch that comes of it, and estimates of what two have in common.
//! - [`row`], [`file`]: a workload with its sketch, and the Parquet file of a host's workloads (schema `pagefold.sketch/1`).
//! - [`seal`], [`guarded`]: for all Parquet files of pagefold, a checksum over the whole file, and decoding that turns panics of the
//!   parquet crate into errors.
//!
//! Pure: no file is opened here, and no clock read. A file may come from anybody: what is wrong with it is an error, never a panic.
#![forbid(unsafe_code)]

pub mod count;
mod decode;
mod error;
pub mod file;
mod guarded;
pub mod key;
mod layout;
pub mod row;
pub mod seal;
pub mod sketch;

pub use count::{Counted, Counter};
pub use error::SketchError;
pub use file::{SCHEMA, SketchFile, read, write};
pub use guarded::{guarded, one_line};
pub use key::{Content, FleetKey, KeyError, KeyId};
pub use row::{Kind, Row};
pub use sketch::{Estimate, Sketch};
