//! Python interpreters that hold the same table in numpy and pandas.

use super::{Answering, find};
use anyhow::{Context, bail};
use pagefold_engine::random::finalize;
use pagefold_workload::Dialogue;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(120);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const SOURCE: &str = include_str!("held.py");
/// Numeric columns of the table.
const COLUMNS: u64 = 7;
const SEED: u64 = 0x0070_7974_686f;

/// An interpreter with numpy and pandas.
#[derive(Clone, Debug)]
pub struct PythonTools {
    python: PathBuf,
}

impl PythonTools {
    /// Finds an interpreter, or names the packages to install. Tries the distribution's first because its packages
    /// install there.
    pub fn find() -> anyhow::Result<Self> {
        let has_packages = |python: &PathBuf| {
            let mut import = Command::new(python);
            import.args(["-c", "import numpy, pandas"]).stdin(Stdio::null()).stderr(Stdio::null());
            import.status().is_ok_and(|status| status.success())
        };
        let Some(python) = [Some("/usr/bin/python3".into()), find("python3")].into_iter().flatten().find(has_packages)
        else {
            bail!("no python3 with numpy and pandas: install python3-numpy and python3-pandas (Debian's names)");
        };
        Ok(Self { python })
    }
}

/// The table, and the amount of each interpreter's own data.
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
        writeln!(
            table,
            "number,name,{}",
            (0..COLUMNS).map(|column| format!("c{column}")).collect::<Vec<_>>().join(",")
        )?;
        for row in 0..rows {
            let cell = |column: u64| finalize(SEED + row * COLUMNS + column);
            write!(table, "{row},name-{}", cell(0) % 1000)?;
            for column in 0..COLUMNS {
                write!(table, ",{}", cell(column) >> 16)?;
            }
            writeln!(table)?;
        }
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
        let mut dialogue = Dialogue::start(&mut command, Some(&self.dir.join(format!("python-{instance}.log"))))?;
        dialogue.ready(READY_LIMIT)?;
        Ok(Answering { name: "python", dialogue, question: "check", limit: ANSWER_LIMIT })
    }

    fn table(&self) -> PathBuf {
        self.dir.join("table.csv")
    }
}
