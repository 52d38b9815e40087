//! Errors from reading and writing records. Each message is one line: the failure and its cause; the remedy.

use pagefold_sketch::seal::SealError;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum RecordError {
    #[error("there is no file {}; make one with pagefold-lab record", path.display())]
    Absent { path: PathBuf },
    #[error("{} is not a file; give a record made by pagefold-lab record", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot read {}: {source}; check the file and its permissions", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a Parquet file; give a record made by pagefold-lab record", path.display())]
    NotParquet { path: PathBuf },
    #[error("{} is cut off, or something follows its end; copy it again, or record again", path.display())]
    CutOff { path: PathBuf },
    #[error("{} is damaged ({what}); copy it again, or record again", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{} is a Parquet file but not a record ({what}); give one that pagefold-lab record wrote", path.display())]
    NotARecord { path: PathBuf, what: String },
    #[error("{} is a record of schema {schema}, which this version does not know; use a newer pagefold-lab", path.display())]
    Newer { path: PathBuf, schema: String },
    #[error("{} is inconsistent in snapshot {snapshot}: {what}; record again", path.display())]
    Inconsistent { path: PathBuf, snapshot: u64, what: String },
    #[error("{} exists and is not a file; choose another name", path.display())]
    Occupied { path: PathBuf },
    #[error("cannot write {}: {what}; choose a writable directory with enough space", path.display())]
    Write {
        path: PathBuf,
        /// The error of the system or of the Parquet writer.
        what: String,
    },
}

impl RecordError {
    pub(super) fn of_seal(error: SealError, path: &Path) -> Self {
        let path = path.to_owned();
        match error {
            SealError::Read(source) => Self::Read { path, source },
            SealError::NotParquet => Self::NotParquet { path },
            SealError::CutOff => Self::CutOff { path },
            SealError::NoChecksum { ours: false } => Self::NotARecord { path, what: error.to_string() },
            SealError::NoChecksum { ours: true } | SealError::Wrong => Self::Damaged { path, what: error.to_string() },
        }
    }
}
