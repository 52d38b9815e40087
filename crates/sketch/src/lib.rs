//! Sketches of workloads' contents. From any two sketches we estimate how much the workloads have in common.
//!
//! - [`key`]: the fleet's key, and digests of pages under that key.
//! - [`count`]: counts the contents of one workload, page by page.
//! - [`sketch`]: the resulting sketch, and estimates of how many contents two sketches share.
//! - [`row`], [`file`]: a workload with its sketch, and the Parquet file of a host's workloads (schema
//!   `pagefold.sketch/1`).
//! - [`seal`], [`guarded`]: for all our Parquet files, a checksum over the whole file, and decoding that turns panics
//!   of the parquet crate into errors.
//!
//! We open no file here, and read no clock. A file may come from anybody, so any fault in it is an error, never a
//! panic.
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
