//! A handle of a running tenant.
//!
//! The tenant fills its memory, prints `ready` and then answers commands line by line ([`crate::serve`]). It ends when
//! its standard input closes, so it never outlives the process that started it.

use crate::spec::{ActivityCounters, TenantSpec};
use anyhow::{Context, bail, ensure};
use pagefold_core::units::Pages;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Time limit for an answer. Filling 4 GiB takes a few seconds on a busy machine; a tenant that takes a minute has been
/// stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for a tenant to end by itself.
const QUIT_LIMIT: Duration = Duration::from_secs(2);

/// A running tenant. Dropping it ends the process.
#[derive(Debug)]
pub struct Tenant {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

/// The result of a check of a tenant's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is as written.
    Intact,
    /// The number of pages that differ.
    Damaged(Pages),
}

impl Tenant {
    /// Starts a tenant and waits until its memory is filled. `program` is an executable whose subcommand `tenant` calls
    /// [`crate::serve`].
    pub fn start(program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        Self::start_by(&[], program, spec)
    }

    /// Starts a tenant through a command that executes the program, such as `taskset -c 0`.
    pub fn start_by(by: &[&str], program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        let first = by.first().map_or(program.as_os_str(), OsStr::new);
        let rest = by.iter().skip(1).map(OsStr::new).chain((!by.is_empty()).then_some(program.as_os_str()));
        let mut child = Command::new(first)
            .args(rest)
            .args(["tenant", "--spec"])
            .arg(serde_json::to_string(spec)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A process group of its own: the terminal interrupts only the parent, which ends its tenants.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {} {} as a tenant", by.join(" "), program.display()))?;
        let commands = child.stdin.take();
        let output = child.stdout.take().context("the tenant has no standard output")?;
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let tenant = Self { child, commands, answers };
        let first = tenant.answer()?;
        ensure!(first == "ready", "the tenant printed {first:?} instead of ready");
        Ok(tenant)
    }

    /// The process ID.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    /// Has the tenant compare every byte of its memory with what was written.
    pub fn verify(&mut self) -> anyhow::Result<Verdict> {
        let answer = self.ask("verify")?;
        match answer.split_once(' ') {
            None if answer == "ok" => Ok(Verdict::Intact),
            Some(("BAD", pages)) => {
                Ok(Verdict::Damaged(Pages(pages.parse().context("cannot parse the answer to verify")?)))
            }
            _ => bail!("the tenant answered {answer:?} to verify"),
        }
    }

    /// Has the tenant read one word in each of its first `pages` pages, as a program that uses its memory does.
    pub fn touch(&mut self, pages: Pages) -> anyhow::Result<()> {
        self.ask(&format!("touch {}", pages.0)).map(drop)
    }

    /// Has the tenant write to every page without changing it, which undoes every merge.
    pub fn break_copies(&mut self) -> anyhow::Result<()> {
        self.ask("cow").map(drop)
    }

    /// Has the tenant change one byte, to test the checks.
    pub fn damage(&mut self) -> anyhow::Result<()> {
        self.ask("damage").map(drop)
    }

    /// Starts the activity of its spec.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        let answer = self.ask("begin")?;
        ensure!(answer == "ok", "the tenant answered {answer:?} to begin");
        Ok(())
    }

    /// What its activity has done so far.
    pub fn counters(&mut self) -> anyhow::Result<ActivityCounters> {
        serde_json::from_str(&self.ask("counters")?).context("cannot parse the tenant's counters")
    }

    fn ask(&mut self, command: &str) -> anyhow::Result<String> {
        let pid = self.pid();
        let commands = self.commands.as_mut().context("the tenant has been asked to end")?;
        writeln!(commands, "{command}")
            .and_then(|()| commands.flush())
            .with_context(|| format!("tenant {pid} has ended"))?;
        self.answer()
    }

    fn answer(&self) -> anyhow::Result<String> {
        let pid = self.pid();
        self.answers.recv_timeout(ANSWER_LIMIT).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow::anyhow!("tenant {pid} has not answered for {ANSWER_LIMIT:?}"),
            RecvTimeoutError::Disconnected => anyhow::anyhow!("tenant {pid} has ended"),
        })
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // End of input means quit.
        drop(self.commands.take());
        end_child(&mut self.child, QUIT_LIMIT);
    }
}

/// Waits for a child that has been asked to end, and kills it if it is still running after `limit`.
pub fn end_child(child: &mut Child, limit: Duration) {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            _ => return,
        }
    }
    // Both fail only if it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}
