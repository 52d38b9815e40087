//! Real programs that experiments start in a scratch directory and end with it.

mod compiler;
mod interpreters;
mod java;
mod mariadb;
mod memcached;
mod memory_limit;
mod observed;
mod prefork;
mod python;
mod qemu;
mod redis;
mod service;
mod subjects;
mod wordpress;
mod working_guest;
mod zram;

pub use compiler::{Compiler, Job};
pub use interpreters::{HeldFile, Language, NODE, PHP, PYTHON, RUBY, python_files};
pub use java::{Java, JavaProgram, JavaTools};
pub use mariadb::{MariaDb, MariaDbData};
pub use memcached::{Memcached, MemcachedData};
pub use memory_limit::MemoryLimit;
pub use observed::{Notes, Observed};
pub use prefork::{Prefork, php_fpm};
pub use python::{PythonData, PythonTools};
pub use qemu::{GuestImage, GuestTools};
pub use redis::{Redis, RedisData};
pub use service::Service;
pub use subjects::{SUBJECTS, Subject, Subjects};
pub use wordpress::{Site, Visitor, WordPress};
pub use working_guest::{GuestWork, WorkingGuest, WorkingGuests};
pub use zram::{ZramSwap, swapped_out};

use crate::dialogue::Dialogue;
use crate::tenant::{Tenant, Verdict};
use anyhow::{Context, bail, ensure};
use pagefold_procmem::process::Process;
use pagefold_programs::child::OwnedChild;
pub(crate) use pagefold_programs::emulator::{QEMU, find, need};
use pagefold_report::activity::ActivityCounters;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Collects the answers of all targets in order. If one fails, its answer is `None`, and we print the reason to stderr.
pub fn answers(targets: &mut [Box<dyn Target>]) -> Vec<Option<String>> {
    let mut answers = Vec::new();
    for target in targets {
        let answer = target.check();
        if let Err(error) = &answer {
            eprintln!("{} {}: {error:#}", target.name(), target.pid());
        }
        answers.push(answer.ok());
    }
    answers
}

/// A program whose memory an experiment merges.
pub trait Target {
    /// The program's name in reports.
    fn name(&self) -> &str;

    fn pid(&self) -> i32;

    /// Queries all its data. The answer must be the same before, during and after an experiment.
    fn check(&mut self) -> anyhow::Result<String>;

    /// Counters of its own activity, if it has any.
    fn counters(&mut self) -> anyhow::Result<Option<ActivityCounters>> {
        Ok(None)
    }

    /// The addresses of a heap that we should leave alone, if it has one.
    fn heap(&self) -> Option<Range<u64>> {
        None
    }
}

impl Target for Tenant {
    fn name(&self) -> &'static str {
        "tenant"
    }

    fn pid(&self) -> i32 {
        Self::pid(self)
    }

    fn check(&mut self) -> anyhow::Result<String> {
        match self.verify()? {
            Verdict::Intact => Ok("every byte as written".to_owned()),
            Verdict::Damaged(pages) => bail!("tenant {}: {} pages are damaged", Self::pid(self), pages.0),
        }
    }

    fn counters(&mut self) -> anyhow::Result<Option<ActivityCounters>> {
        crate::activity::counters(self).map(Some)
    }
}

/// Creates a directory for the data of experiments, and deletes it when the result is dropped.
pub(crate) fn scratch() -> anyhow::Result<TempDir> {
    tempfile::Builder::new().prefix("pagefold-lab-").tempdir().context("cannot create a scratch directory")
}

/// Removes a cgroup whose members have ended. One that's still ending keeps it busy for a moment.
fn remove_cgroup(path: &Path) {
    for _ in 0..100 {
        if fs::remove_dir(path).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("cannot remove {}", path.display());
}

/// Runs a command to its end, and returns its output.
fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {} {}", said.trim(), errors.trim());
    String::from_utf8(output.stdout).context(name)
}

fn gcc() -> anyhow::Result<PathBuf> {
    find("gcc").map_or_else(|| need("gcc", "gcc"), Ok)
}

/// All that's in a directory, by name. Nothing if we can't read it.
fn entries(dir: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        paths.push(entry.path());
    }
    paths.sort();
    paths
}

/// Waits until processes that nobody else waits for have ended: their memory is free then.
fn wait_for_ends(processes: &[Process], limit: Duration) {
    let end = Instant::now() + limit;
    while processes.iter().any(Process::is_alive) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program that we check by asking a question. Its answer must always be the same.
#[derive(Debug)]
pub struct Answering {
    name: &'static str,
    dialogue: Dialogue,
    question: &'static str,
    limit: Duration,
}

impl Answering {
    /// Starts an interpreter, and waits until it holds its data.
    fn interpreter(name: &'static str, command: &mut Command, dir: &Path, instance: usize) -> anyhow::Result<Self> {
        let mut dialogue = Dialogue::start(command, Some(&dir.join(format!("{name}-{instance}.log"))))?;
        dialogue.ready(Duration::from_secs(120))?;
        Ok(Self { name, dialogue, question: "check", limit: Duration::from_secs(60) })
    }
}

impl Target for Answering {
    fn name(&self) -> &'static str {
        self.name
    }

    fn pid(&self) -> i32 {
        self.dialogue.pid()
    }

    fn check(&mut self) -> anyhow::Result<String> {
        self.dialogue.ask(self.question, self.limit)
    }
}

/// A server process with its output in a log file. Dropping it kills the server, without an orderly shutdown: its data
/// is a copy that goes with the scratch directory.
#[derive(Debug)]
struct Server {
    child: OwnedChild,
    log: PathBuf,
}

impl Server {
    fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        Self::start_with(command, Stdio::null(), log)
    }

    fn start_with(command: &mut Command, input: Stdio, log: &Path) -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt;
        let output = File::create(log).with_context(|| log.display().to_string())?;
        let child = command
            .stdin(input)
            .stdout(output.try_clone()?)
            .stderr(output)
            // A separate process group: on Ctrl-C the experiment ends its servers itself.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
        Ok(Self { child: OwnedChild(child), log: log.to_owned() })
    }

    fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// Polls `ready` until it returns a value. Fails after `limit` or if the server ends.
    fn wait_ready<T>(&mut self, limit: Duration, mut ready: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Some(found) = ready() {
                return Ok(found);
            }
            if let Some(status) = self.child.0.try_wait()? {
                bail!("a server ended while starting ({status}); its log ends with:\n{}", self.log_end());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("a server is not ready after {limit:?}; its log ends with:\n{}", self.log_end())
    }

    fn log_end(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_ends_at_once_is_reported_with_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut server =
            Server::start(Command::new("sh").args(["-c", "echo no such option; exit 3"]), &dir.path().join("log"))
                .unwrap();
        let error = server.wait_ready(Duration::from_secs(20), || None::<()>).unwrap_err().to_string();
        assert!(error.contains("no such option"), "{error}");
    }
}
