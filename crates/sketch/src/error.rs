//! Why we refuse a file. Each text is a clause that continues a sentence about the file.

use std::io;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum SketchError {
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
    #[error("cannot be written: {0}")]
    Write(String),
    #[error("is not a Parquet file")]
    NotParquet,
    #[error("is cut off, or something follows its end")]
    CutOff,
    #[error("is damaged: {0}")]
    Damaged(String),
    #[error("is not a file of sketches: {0}")]
    Foreign(String),
    #[error("has the schema {0}, which this version does not know")]
    Newer(String),
    #[error("has {found} {what}, and one host has at most {most}")]
    TooMuch { what: &'static str, found: u64, most: u64 },
    #[error("is inconsistent in row {row}: {what}")]
    Row { row: usize, what: String },
}
