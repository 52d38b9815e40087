//! Compile jobs: gcc on sources that we generate once. They run a copy of its compiler proper, so that the jobs'
//! processes have their own path.

use super::working_guest::{compiler_proper, source_text};
use super::{gcc, output_of};
use crate::interrupt::Interrupt;
use anyhow::{Context, ensure};
use pagefold_programs::child::OwnedChild;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The number of different sources. Later jobs repeat them.
const UNITS: usize = 8;
/// Jobs at a time.
const AT_ONCE: usize = 2;

/// The compiler and the sources.
#[derive(Debug)]
pub struct Compiler {
    gcc: PathBuf,
    dir: PathBuf,
    /// The first object of each source: later ones must equal it.
    objects: Mutex<BTreeMap<usize, Vec<u8>>>,
}

/// The time from a job's start to its end, and whether its object was right.
pub type Job = (Duration, bool);

impl Compiler {
    /// Writes sources with this many functions.
    pub fn make(scratch: &Path, functions: u64) -> anyhow::Result<Self> {
        let compiler = Self { gcc: gcc()?, dir: scratch.join("compiler"), objects: Mutex::default() };
        fs::create_dir_all(&compiler.dir)?;
        // We let `cp` copy: while we hold a file open for writing, a child forked meanwhile would keep it busy.
        output_of(Command::new("cp").arg(compiler_proper(&compiler.gcc)?).arg(compiler.path()))?;
        for unit in 0..UNITS {
            fs::write(compiler.dir.join(format!("{unit}.c")), source_text(unit as u64, functions))?;
        }
        Ok(compiler)
    }

    /// The compiler proper, which each job runs.
    pub fn path(&self) -> PathBuf {
        self.dir.join("cc1")
    }

    /// Starts a compiler that waits for its input forever.
    pub fn start_idle(&self) -> anyhow::Result<OwnedChild> {
        let mut idle = Command::new(self.path());
        idle.args(["-quiet", "-", "-o", "/dev/null"]).stdin(Stdio::piped()).process_group(0);
        Ok(OwnedChild(idle.spawn().context("cc1")?))
    }

    /// Runs this many jobs, two at a time. `by`, if not empty, is a command that executes the rest of its arguments.
    pub fn run_all(&self, by: &[&OsStr], jobs: usize, interrupt: &Interrupt) -> anyhow::Result<Vec<Job>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= jobs {
                    return anyhow::Ok(done);
                }
                interrupt.check()?;
                done.push(self.compile(by, number)?);
            }
        };
        thread::scope(|scope| {
            let threads = [(); AT_ONCE].map(|()| scope.spawn(work));
            let mut done = Vec::new();
            for thread in threads {
                done.extend(thread.join().ok().context("a job has panicked")??);
            }
            Ok(done)
        })
    }

    fn compile(&self, by: &[&OsStr], number: usize) -> anyhow::Result<Job> {
        let unit = number % UNITS;
        let object = self.dir.join(format!("{number}.o"));
        let mut line = by.iter().copied().chain([self.gcc.as_os_str()]);
        let mut command = Command::new(line.next().context("no command")?);
        command.args(line).arg("-B").arg(&self.dir).args(["-O1", "-c"]).arg(format!("{unit}.c"));
        command.arg("-o").arg(&object).current_dir(&self.dir).stdin(Stdio::null()).process_group(0);
        let began = Instant::now();
        let mut child = OwnedChild(command.spawn().context("gcc")?);
        let status = child.0.wait()?;
        let took = began.elapsed();
        ensure!(status.success(), "a compile job ended with {status}");
        let bytes = fs::read(&object).with_context(|| object.display().to_string())?;
        fs::remove_file(&object)?;
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let right = *objects.entry(unit).or_insert_with(|| bytes.clone()) == bytes;
        Ok((took, right))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_the_copy_and_give_the_same_objects() {
        let dir = tempfile::tempdir().unwrap();
        let compiler = Compiler::make(dir.path(), 2).unwrap();
        let mut idle = compiler.start_idle().unwrap();
        let jobs = compiler.run_all(&[], UNITS + 1, &Interrupt::default()).unwrap();
        assert!(jobs.len() == UNITS + 1 && jobs.iter().all(|job| job.1), "{jobs:?}");
        assert!(idle.0.try_wait().unwrap().is_none());
        // The check finds an object that differs from the first.
        compiler.objects.lock().unwrap().insert(0, Vec::new());
        assert!(compiler.run_all(&[OsStr::new("env")], 2, &Interrupt::default()).unwrap().iter().any(|job| !job.1));
        drop(idle);
        // gcc runs our copy and not its own.
        fs::write(compiler.path(), "#!/bin/sh\nexit 1\n").unwrap();
        assert!(compiler.run_all(&[], 1, &Interrupt::default()).is_err());
    }
}
