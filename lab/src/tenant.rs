//! Tenants: processes that hold exactly the memory that their [`TenantSpec`] describes, and can check every byte of it.
//!
//! The tenant fills its memory, prints `ready` and then answers commands line by line ([`serve`](mod@serve)). It ends when
//! its standard input closes, so it never outlives the process that started it.

use crate::dialogue::{Dialogue, READY};
use anyhow::{Context, bail, ensure};
use pagefold_engine::units::Pages;
use serde::de::DeserializeOwned;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub mod memory;
pub mod serve;
mod spec;

pub use spec::{Segment, TenantSpec};

/// How long an answer may take. Filling 4 GiB takes seconds on a busy machine. A tenant that takes a minute has been
/// stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How long a tenant may take to end by itself.
const QUIT_LIMIT: Duration = Duration::from_secs(2);

/// A running tenant. Dropping it ends the process.
#[derive(Debug)]
pub struct Tenant(Dialogue);

/// The result of a check of a tenant's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is as the tenant wrote it.
    Intact,
    /// The number of pages that differ.
    Damaged(Pages),
}

impl Tenant {
    /// Starts a tenant and waits until its memory is filled. `program` must call [`crate::activity::serve`] for its
    /// subcommand `tenant`.
    pub fn start(program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        Self::start_by(&[], program, spec)
    }

    /// Like [`Self::start`], but through a command that executes the program, such as `taskset -c 0`.
    pub fn start_by(by: &[&str], program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        let mut words: Vec<&OsStr> = by.iter().map(OsStr::new).collect();
        words.push(program.as_os_str());
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["tenant", "--spec"]).arg(serde_json::to_string(spec)?);
        let tenant = Self(Dialogue::start(&mut command, None)?);
        let first = tenant.0.line(ANSWER_LIMIT)?;
        ensure!(first == READY, "the tenant printed {first:?} instead of {READY}");
        Ok(tenant)
    }

    pub fn pid(&self) -> i32 {
        self.0.pid()
    }

    /// Has the tenant compare every byte of its memory with the one that it wrote.
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

    /// Has the tenant read one word in each of its first `pages` pages, like a program that uses its memory.
    pub fn touch(&mut self, pages: Pages) -> anyhow::Result<()> {
        self.ask(&format!("touch {}", pages.0))?;
        Ok(())
    }

    /// Has the tenant read for `time` in each segment, one word at a time, where each word determines the next one's
    /// place. Returns nanoseconds per read, for each segment.
    pub fn chase(&mut self, time: Duration) -> anyhow::Result<Vec<f64>> {
        let answer = self.ask(&format!("chase {}", time.as_millis()))?;
        serde_json::from_str(&answer).with_context(|| format!("the tenant answered {answer:?} to chase"))
    }

    /// Has the tenant write to every page without changing it, which undoes every merge.
    pub fn break_copies(&mut self) -> anyhow::Result<()> {
        self.ask("cow")?;
        Ok(())
    }

    /// Has the tenant change one byte, to test the checks.
    pub fn damage(&mut self) -> anyhow::Result<()> {
        self.ask("damage")?;
        Ok(())
    }

    /// Starts the activity in the tenant's spec.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        let answer = self.ask("begin")?;
        ensure!(answer == "ok", "the tenant answered {answer:?} to begin");
        Ok(())
    }

    /// The counters of the tenant's activity so far. `None` if it has none.
    pub fn counters<C: DeserializeOwned>(&mut self) -> anyhow::Result<Option<C>> {
        serde_json::from_str(&self.ask("counters")?).context("cannot parse the tenant's counters")
    }

    fn ask(&mut self, command: &str) -> anyhow::Result<String> {
        self.0.ask(command, ANSWER_LIMIT)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.0.end(QUIT_LIMIT);
    }
}
