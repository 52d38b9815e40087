//! What can be wrong with a record. Each error is one line: what is wrong; what to do.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why there is no record.
#[derive(Debug, Error)]
pub enum RecordError {
    /// There is no such file.
    #[error("there is no file {}; make one with pagefold-lab record", path.display())]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// It is a directory, a pipe or the like.
    #[error("{} is not a file; give a record made by pagefold-lab record", path.display())]
    NotAFile {
        /// What it is instead of the file.
        path: PathBuf,
    },
    /// The system does not let it be read.
    #[error("cannot read {}: {source}; look at the file and who may read it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is something else altogether.
    #[error("{} is not a Parquet file; give a record made by pagefold-lab record", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// It begins as Parquet and does not end so.
    #[error("{} is cut off, or something follows its end; copy it again, or record anew", path.display())]
    CutOff {
        /// The file.
        path: PathBuf,
    },
    /// It is not as it was written.
    #[error("{} is damaged ({what}); copy it again, or record anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        what: String,
    },
    /// It is Parquet, and no record.
    #[error("{} is a Parquet file and no record ({what}); give one that pagefold-lab record wrote", path.display())]
    NotARecord {
        /// The file.
        path: PathBuf,
        /// How that shows.
        what: String,
    },
    /// It is by a later version.
    #[error("{} is a record of schema {schema}, which this pagefold does not know; use a newer one", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        schema: String,
    },
    /// What it says cannot be.
    #[error("{} makes no sense in snapshot {snapshot}: {what}; record anew", path.display())]
    Senseless {
        /// The file.
        path: PathBuf,
        /// The snapshot, from 0.
        snapshot: u64,
        /// What cannot be.
        what: String,
    },
    /// What is there already is no file, and is left as it is.
    #[error("{} is there already and is not a file; give another name", path.display())]
    Occupied {
        /// What is there.
        path: PathBuf,
    },
    /// It cannot be written.
    #[error("cannot write {}: {what}; give a file in a directory that may be written to, with room for it", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system, or of what writes Parquet.
        what: String,
    },
}
