//! Python interpreters with the same data: with numpy and pandas, or without packages for small machines.

use super::{Answering, find, need};
use anyhow::{Context, bail, ensure};
use pagefold_core::random::finalize;
use pagefold_workload::Dialogue;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(120);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const SOURCE: &str = include_str!("held.py");
const PLAIN_SOURCE: &str = include_str!("held_plain.py");
/// Numeric columns of the table.
const COLUMNS: u64 = 7;
const SEED: u64 = 0x0070_7974_686f;

/// An interpreter with numpy and pandas.
#[derive(Clone, Debug)]
pub struct PythonTools {
    python: PathBuf,
}

impl PythonTools {
    /// Finds one, the distribution's first because its packages install there, or names the packages to install.
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

/// A file of which interpreters without packages hold the bytes, and objects made from them.
#[derive(Debug)]
pub struct PlainPython {
    python: PathBuf,
    dir: PathBuf,
}

impl PlainPython {
    /// The interpreter, and the modules that it loads: what an emulated machine needs.
    pub fn files() -> anyhow::Result<(PathBuf, Vec<PathBuf>)> {
        let python = Self::python()?;
        let list = "import sys, zlib; print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', 0)), sep='\\n')";
        let output = Command::new(&python).args(["-I", "-S", "-c", list]).output().context("python3")?;
        ensure!(output.status.success(), "python3 ended with {}", output.status);
        let files = String::from_utf8(output.stdout).context("python3 names a module that is not UTF-8")?;
        Ok((python, files.lines().map(PathBuf::from).collect()))
    }

    /// Writes the file.
    pub fn make(scratch: &Path, mebibytes: u64) -> anyhow::Result<Self> {
        let data = Self { python: Self::python()?, dir: scratch.to_owned() };
        let mut file = BufWriter::new(File::create(data.file())?);
        (0..mebibytes << 17).try_for_each(|word| file.write_all(&finalize(SEED + word).to_le_bytes()))?;
        file.flush().context("writing the data")?;
        Ok(data)
    }

    pub fn start(&self, instance: usize) -> anyhow::Result<Answering> {
        let mut command = Command::new(&self.python);
        command.args(["-I", "-S", "-c", PLAIN_SOURCE]).arg(self.file());
        let log = self.dir.join(format!("python-{instance}.log"));
        let mut dialogue = Dialogue::start(&mut command, Some(&log))?;
        dialogue.ready(READY_LIMIT)?;
        Ok(Answering { name: "python", dialogue, question: "check", limit: ANSWER_LIMIT })
    }

    /// Debian's, since another one may be a script that chooses a version.
    fn python() -> anyhow::Result<PathBuf> {
        need("/usr/bin/python3", "python3")
    }

    fn file(&self) -> PathBuf {
        self.dir.join("data")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Target;

    #[test]
    fn plain_interpreters_with_the_same_file_answer_alike() {
        let (python, files) = PlainPython::files().unwrap();
        assert!(python.is_absolute() && files.iter().any(|file| file.ends_with("encodings/utf_8.py")), "{files:?}");
        let scratch = tempfile::tempdir().unwrap();
        let data = PlainPython::make(scratch.path(), 1).unwrap();
        let answers = [0, 1].map(|instance| data.start(instance).unwrap().check().unwrap());
        assert!(answers[0].starts_with("1049 ") && answers[0] == answers[1], "{answers:?}");
    }
}
