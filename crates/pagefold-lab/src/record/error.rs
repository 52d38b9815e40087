//! Errors of reading and writing records. Each message is one line: what failed and why; what to do.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum RecordError {
    /// The file does not exist.
    #[error("there is no file {}; make one with pagefold-lab record", path.display())]
    Absent { path: PathBuf },
    /// The input path is not a regular file.
    #[error("{} is not a file; give a record made by pagefold-lab record", path.display())]
    NotAFile { path: PathBuf },
    /// The file cannot be read.
    #[error("cannot read {}: {source}; check the file and its permissions", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file is not Parquet.
    #[error("{} is not a Parquet file; give a record made by pagefold-lab record", path.display())]
    NotParquet { path: PathBuf },
    /// The file begins as Parquet but does not end as such.
    #[error("{} is cut off, or something follows its end; copy it again, or record again", path.display())]
    CutOff { path: PathBuf },
    /// The checksum or encoding is wrong.
    #[error("{} is damaged ({what}); copy it again, or record again", path.display())]
    Damaged { path: PathBuf, what: String },
    /// The file is Parquet but not a record.
    #[error("{} is a Parquet file but not a record ({what}); give one that pagefold-lab record wrote", path.display())]
    NotARecord { path: PathBuf, what: String },
    /// The record was written by a later version.
    #[error("{} is a record of schema {schema}, which this version does not know; use a newer pagefold-lab", path.display())]
    Newer { path: PathBuf, schema: String },
    /// The events contradict each other.
    #[error("{} is inconsistent in snapshot {snapshot}: {what}; record again", path.display())]
    Inconsistent { path: PathBuf, snapshot: u64, what: String },
    /// The output path exists and is not a regular file.
    #[error("{} exists and is not a file; choose another name", path.display())]
    Occupied { path: PathBuf },
    /// The output file cannot be written.
    #[error("cannot write {}: {what}; choose a writable directory with enough space", path.display())]
    Write {
        path: PathBuf,
        /// The error of the system or of the Parquet writer.
        what: String,
    },
}
