//! Python interpreters that hold the same table in numpy and pandas.

use super::{Answering, find, output_of};
use anyhow::{Context, bail};
use pagefold_engine::random::finalize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("held.py");
/// Numeric columns of the table.
const COLUMNS: u64 = 7;
const SEED: u64 = 0x0070_7974_686f;

#[derive(Clone, Debug)]
pub struct PythonTools {
    python: PathBuf,
}

impl PythonTools {
    /// Finds an interpreter, or names the packages to install. Tries the distribution's first because its packages
    /// install there.
    pub fn find() -> anyhow::Result<Self> {
        for python in std::iter::once("/usr/bin/python3".into()).chain(find("python3")) {
            if output_of(Command::new(&python).args(["-c", "import numpy, pandas"])).is_ok() {
                return Ok(Self { python });
            }
        }
        bail!("no python3 with numpy and pandas: install python3-numpy and python3-pandas (Debian's names)")
    }
}

/// The shared table, and the amount of data that each interpreter has for itself.
#[derive(Debug)]
pub struct PythonData {
    python: PathBuf,
    dir: PathBuf,
    own_mib: u64,
}

impl PythonData {
    /// Writes a table of `rows` rows, which take 72 bytes each in memory.
    pub fn make(tools: PythonTools, scratch: &Path, rows: u64, own_mib: u64) -> anyhow::Result<Self> {
        let data = Self { python: tools.python, dir: scratch.to_owned(), own_mib };
        let mut table = BufWriter::new(File::create(data.table())?);
        write!(table, "number,name")?;
        for column in 0..COLUMNS {
            write!(table, ",c{column}")?;
        }
        for row in 0..rows {
            let first = SEED + row * COLUMNS;
            write!(table, "\n{row},name-{}", finalize(first) % 1000)?;
            for column in 0..COLUMNS {
                write!(table, ",{}", finalize(first + column) >> 16)?;
            }
        }
        writeln!(table)?;
        table.flush().context("writing the table")?;
        Ok(data)
    }

    pub fn start(&self, instance: usize) -> anyhow::Result<Answering> {
        let mut command = Command::new(&self.python);
        command
            .args(["-c", SOURCE])
            .arg(self.table())
            .args([instance.to_string(), self.own_mib.to_string()])
            .current_dir(&self.dir);
        Answering::interpreter("python", &mut command, &self.dir, instance)
    }

    fn table(&self) -> PathBuf {
        self.dir.join("table.csv")
    }
}
