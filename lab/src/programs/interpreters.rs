//! Interpreters of several languages, without packages. Each holds the bytes of the same file, and objects made from
//! them.

use super::{Answering, need, output_of};
use anyhow::Context;
use pagefold_engine::random::finalize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

const SEED: u64 = 0x0070_7974_686f;

#[derive(Debug)]
pub struct Language {
    pub name: &'static str,
    /// Debian's interpreter, since another one may be a script that chooses a version.
    interpreter: &'static str,
    package: &'static str,
    /// The arguments before the program's text on the command line, and between the text and the file.
    before: &'static [&'static str],
    after: &'static [&'static str],
    source: &'static str,
}

pub const NODE: Language = Language {
    name: "node",
    interpreter: "/usr/bin/node",
    package: "nodejs",
    before: &["-e"],
    after: &[],
    source: include_str!("held_plain.js"),
};

pub const PHP: Language = Language {
    name: "php",
    interpreter: "/usr/bin/php",
    package: "php-cli",
    before: &["-d", "memory_limit=-1", "-r"],
    after: &["--"],
    source: include_str!("held_plain.php"),
};

pub const PYTHON: Language = Language {
    name: "python",
    interpreter: "/usr/bin/python3",
    package: "python3",
    before: &["-I", "-S", "-c"],
    after: &[],
    source: include_str!("held_plain.py"),
};

pub const RUBY: Language = Language {
    name: "ruby",
    interpreter: "/usr/bin/ruby",
    package: "ruby",
    before: &["-e"],
    after: &[],
    source: include_str!("held_plain.rb"),
};

impl Language {
    fn interpreter(&self) -> anyhow::Result<PathBuf> {
        need(self.interpreter, self.package)
    }
}

/// Python's interpreter and the modules that it loads: an emulated machine needs them.
pub fn python_files() -> anyhow::Result<(PathBuf, Vec<PathBuf>)> {
    let python = PYTHON.interpreter()?;
    let list =
        "import sys, zlib; print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', 0)), sep='\\n')";
    let files = output_of(Command::new(&python).args(["-I", "-S", "-c", list]))?;
    Ok((python, files.lines().map(PathBuf::from).collect()))
}

/// The file whose bytes the interpreters hold.
#[derive(Debug)]
pub struct HeldFile {
    dir: PathBuf,
}

impl HeldFile {
    pub fn make(scratch: &Path, mebibytes: u64) -> anyhow::Result<Self> {
        let held = Self { dir: scratch.to_owned() };
        let mut file = BufWriter::new(File::create(held.path())?);
        for word in 0..mebibytes << 17 {
            file.write_all(&finalize(SEED + word).to_le_bytes())?;
        }
        file.flush().context("writing the data")?;
        Ok(held)
    }

    /// Starts an interpreter that reads and holds the file.
    pub fn start(&self, language: &Language, instance: usize) -> anyhow::Result<Answering> {
        let mut command = Command::new(language.interpreter()?);
        command.args(language.before).arg(language.source).args(language.after).arg(self.path());
        Answering::interpreter(language.name, &mut command, &self.dir, instance)
    }

    pub fn path(&self) -> PathBuf {
        self.dir.join("data")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::Target;

    #[test]
    fn plain_interpreters_with_the_same_file_answer_alike() {
        let (python, files) = python_files().unwrap();
        assert!(python.is_absolute() && files.iter().any(|file| file.ends_with("encodings/utf_8.py")), "{files:?}");
        let scratch = tempfile::tempdir().unwrap();
        let data = HeldFile::make(scratch.path(), 1).unwrap();
        let answers = [0, 1].map(|instance| data.start(&PYTHON, instance).unwrap().check().unwrap());
        assert!(answers[0].starts_with("1049 ") && answers[0] == answers[1], "{answers:?}");
    }
}
