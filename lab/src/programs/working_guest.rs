//! Emulated guests that boot, rest and then repeat some work, to record how their memory changes.
//!
//! All have the same system and work: a compiler on the same sources, or a web server on the same site.
//! [`super::GuestImage`] restores its guests from a snapshot, but each of these boots.

use super::{gcc, output_of};
use crate::contents::printable;
use crate::dialogue::Dialogue;
use anyhow::{Context, bail, ensure};
use pagefold_programs::emulator::{Emulator, Image, kernel_for};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const BOOT_LIMIT: Duration = Duration::from_secs(240);
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

const INIT: &str = include_str!("working-guest-init");

/// Sources of the build and functions in each.
const UNITS: u64 = 48;
const FUNCTIONS: u64 = 24;
/// Headers that every C library has.
const HEADERS: &str = "stdio.h stdlib.h string.h math.h time.h signal.h unistd.h pthread.h \
    netdb.h poll.h regex.h search.h termios.h wchar.h ctype.h locale.h";

/// Files of the site, 4 to 64 KiB each.
const SITE_FILES: u64 = 400;
const SEED: u64 = 0x6775_6573;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestWork {
    Build,
    Web,
}

#[derive(Debug)]
pub struct WorkingGuests {
    emulator: Emulator,
    kernel: PathBuf,
    dir: PathBuf,
    memory_mib: u64,
    work: GuestWork,
    merge: bool,
}

impl WorkingGuests {
    pub fn make(scratch: &Path, memory_mib: u64, work: GuestWork) -> anyhow::Result<Self> {
        let emulator = Emulator::find()?;
        let kernel = kernel_for("nodes")?;
        let guests = Self { emulator, kernel, dir: scratch.join("working-guests"), memory_mib, work, merge: false };
        let root = guests.emulator.image(guests.dir.join("root")).with_init(INIT, &["dev", "proc", "tmp", "work"])?;
        match work {
            GuestWork::Build => put_sources(&guests.dir, &root)?,
            GuestWork::Web => put_site(&root)?,
        }
        root.pack(&guests.dir.join("initrd"))?;
        Ok(guests)
    }

    /// Gives the emulator its own path, so that experiments can tell its machines from others.
    pub fn with_own_emulator(mut self) -> anyhow::Result<Self> {
        self.emulator = self.emulator.copied_to(&self.dir.join("emulator"))?;
        Ok(self)
    }

    pub fn emulator(&self) -> &Path {
        self.emulator.path()
    }

    /// Makes QEMU mark the memory of the machines that we start from now on, as it does by default, or leave it alone.
    pub fn set_merge(&mut self, merge: bool) {
        self.merge = merge;
    }

    /// Starts a guest without waiting for its boot.
    pub fn start(&self, instance: usize) -> anyhow::Result<WorkingGuest> {
        let mut command = self.emulator.command(&self.dir);
        let work = match self.work {
            GuestWork::Build => "build",
            GuestWork::Web => "web",
        };
        command
            .args(["-machine", if self.merge { "q35,mem-merge=on" } else { "q35,mem-merge=off" }])
            .args(["-cpu", "qemu64,-cx16", "-accel", "tcg,tb-size=64"])
            .args(["-m", &self.memory_mib.to_string(), "-serial", "stdio"])
            .arg("-kernel")
            .arg(&self.kernel)
            .args(["-initrd", "initrd"])
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 mitigations=off rootfstype=ramfs work={work}")]);
        let guest = Dialogue::start(&mut command, Some(&self.dir.join(format!("guest-{instance}.log"))))?;
        Ok(WorkingGuest { guest, instance })
    }
}

#[derive(Debug)]
pub struct WorkingGuest {
    guest: Dialogue,
    instance: usize,
}

impl WorkingGuest {
    pub fn pid(&self) -> i32 {
        self.guest.pid()
    }

    pub fn ready(&mut self) -> anyhow::Result<()> {
        self.guest.ready(BOOT_LIMIT).map(drop).context("booting a guest")
    }

    /// A checksum of the files that all guests have. The guest computes it.
    pub fn sum(&mut self) -> anyhow::Result<String> {
        self.guest.ask("sum", ANSWER_LIMIT)
    }

    /// Starts the work. The order of requests differs between guests.
    pub fn work(&mut self) -> anyhow::Result<()> {
        let answer = self.guest.ask(&format!("work {}", self.instance + 1), ANSWER_LIMIT)?;
        ensure!(answer == "working", "a guest answers {answer:?}");
        Ok(())
    }

    /// The number of sources that it compiled or files that it served. 0 is an error.
    pub fn done(&mut self) -> anyhow::Result<u64> {
        let answer = self.guest.ask("count", ANSWER_LIMIT)?;
        let done = answer.parse().with_context(|| format!("a guest answers {answer:?} to count"))?;
        if done == 0 {
            bail!("a guest has done no work ({}): record for longer", self.guest.ask("log", ANSWER_LIMIT)?);
        }
        Ok(done)
    }
}

pub(super) fn compiler_proper(gcc: &Path) -> anyhow::Result<PathBuf> {
    let compiler = PathBuf::from(output_of(Command::new(gcc).arg("-print-prog-name=cc1"))?.trim());
    ensure!(compiler.is_absolute(), "{} does not print the path of cc1: install gcc", gcc.display());
    Ok(compiler)
}

/// Adds the compiler proper and preprocessed sources, which need no headers.
fn put_sources(dir: &Path, root: &Image) -> anyhow::Result<()> {
    let gcc = gcc()?;
    root.put_program(&compiler_proper(&gcc)?, "bin/cc1")?;
    for unit in 0..UNITS {
        let source = dir.join("unit.c");
        fs::write(&source, source_text(unit, FUNCTIONS))?;
        let output = root.path(format!("work/{unit:02}.i"));
        output_of(Command::new(&gcc).args(["-E", "-P"]).arg(&source).arg("-o").arg(output))?;
    }
    Ok(())
}

/// A C source that includes some headers and defines this many functions.
pub(super) fn source_text(unit: u64, functions: u64) -> String {
    let mut text = String::new();
    for (at, header) in (0..).zip(HEADERS.split(' ')) {
        if (unit + at) % 3 != 0 {
            let _ = writeln!(text, "#include <{header}>");
        }
    }
    for function in 0..functions {
        let a = unit * 31 + function * 7 + 1;
        let b = unit * 17 + function * 13 + 3;
        let _ = writeln!(
            text,
            "struct s{function} {{ long a[{a}]; char name[{b}]; struct s{function} *next; }};\n\
             long f{function}(struct s{function} *list, long key) {{\n\
             \tlong sum = {a};\n\
             \tfor (; list; list = list->next) {{\n\
             \t\tfor (int i = 0; i < {a}; i++) {{\n\
             \t\t\tif (list->a[i] % {b} == key) sum += list->a[i] * {a}; else sum ^= list->a[{a} - 1 - i] << (i % 7);\n\
             \t\t}}\n\
             \t\tif (list->name[key % {b}] == 'x') return sum;\n\
             \t}}\n\
             \treturn sum;\n}}"
        );
    }
    text
}

/// Adds files of printable characters, each with unique pages and a partial last page.
fn put_site(root: &Image) -> anyhow::Result<()> {
    for number in 0..SITE_FILES {
        let length = 4_096 + usize::try_from(number * 7_919 % 61_440)?;
        fs::write(root.path(format!("work/{number:03}")), printable(SEED, number, length))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile_and_differ() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("unit.c");
        for unit in [0, 1, UNITS - 1] {
            fs::write(&source, source_text(unit, FUNCTIONS)).unwrap();
            let output = Command::new("cc").args(["-fsyntax-only", "-Wall", "-Werror"]).arg(&source).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        assert_ne!(source_text(0, FUNCTIONS), source_text(1, FUNCTIONS));
    }
}
