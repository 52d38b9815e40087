//! Tenants: programs that hold memory exactly as told and can vouch for every byte of it.
//!
//! A tenant is the program itself, run again with the hidden subcommand `tenant --spec JSON`
//! ([`crate::tenant_main`]). It fills anonymous memory, says `ready` and then answers commands line by line. It ends
//! when its standard input does, so it never outlives whoever started it.

use crate::live::{Counters, Live};
use anyhow::{Context, bail, ensure};
use pagefold_core::units::Pages;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long a tenant may take for an answer. Filling 4 GiB takes a few seconds on a busy machine; a tenant that takes
/// a minute has been stopped by somebody.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How long a tenant may take to end by itself.
const QUIT_LIMIT: Duration = Duration::from_secs(2);

/// The memory of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// The segments, each an allocation of its own.
    pub segments: Vec<Segment>,
    /// What it does by itself once told to begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<Live>,
}

impl TenantSpec {
    /// A tenant of these segments.
    pub fn new(segments: impl IntoIterator<Item = Segment>) -> Self {
        Self { segments: segments.into_iter().collect(), live: None }
    }

    /// The same, doing something once told to begin.
    #[must_use]
    pub fn living(self, live: Live) -> Self {
        Self { live: Some(live), ..self }
    }

    /// All its pages.
    pub fn pages(&self) -> Pages {
        self.segments.iter().map(|segment| segment.pages()).sum()
    }
}

/// Memory filled in one way. Equal kinds with equal seeds hold equal contents in all tenants, but for `Random`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Segment {
    /// All pages alike.
    Same {
        /// Pages.
        pages: u64,
        /// Which content.
        seed: u64,
    },
    /// Contents that nothing else holds, in whatever tenant.
    Random {
        /// Pages.
        pages: u64,
        /// Which contents; the tenant's pid goes in too.
        seed: u64,
    },
    /// Zeros, written, so that each has a frame of its own.
    Zero {
        /// Pages.
        pages: u64,
    },
    /// Contents that differ from each other and are the same in every tenant: tenants with it are twins.
    Shared {
        /// Pages.
        pages: u64,
        /// Which contents.
        seed: u64,
    },
    /// Every content exactly twice, half the segment apart.
    Pairs {
        /// Pages.
        pages: u64,
        /// Which contents.
        seed: u64,
    },
    /// Pages alike but for their last eight bytes, which are the page's index: the worst case of a comparison.
    Tails {
        /// Pages.
        pages: u64,
        /// Which contents.
        seed: u64,
    },
}

impl Segment {
    /// Its length.
    pub const fn pages(self) -> Pages {
        match self {
            Self::Same { pages, .. }
            | Self::Random { pages, .. }
            | Self::Zero { pages }
            | Self::Shared { pages, .. }
            | Self::Pairs { pages, .. }
            | Self::Tails { pages, .. } => Pages(pages),
        }
    }
}

/// A running tenant. Ended when dropped.
#[derive(Debug)]
pub struct Tenant {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

/// What a tenant answers to `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is what was written.
    Intact,
    /// So many pages are not.
    Damaged(Pages),
}

impl Tenant {
    /// Starts one and waits until its memory is filled. `program` is one that calls [`crate::tenant_main`].
    pub fn start(program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        Self::start_by(&[], program, spec)
    }

    /// The same by way of a command that becomes the program, like `taskset -c 0`.
    pub fn start_by(by: &[&str], program: &Path, spec: &TenantSpec) -> anyhow::Result<Self> {
        let first = by.first().map_or(program.as_os_str(), OsStr::new);
        let rest = by.iter().skip(1).map(OsStr::new).chain((!by.is_empty()).then_some(program.as_os_str()));
        let mut child = Command::new(first)
            .args(rest)
            .args(["tenant", "--spec"])
            .arg(serde_json::to_string(spec)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // In a group of its own: an interrupt from the terminal is for the experiment, which ends its tenants.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {} {} as a tenant", by.join(" "), program.display()))?;
        let commands = child.stdin.take();
        let output = child.stdout.take().context("a tenant without output")?;
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
        ensure!(first == "ready", "a tenant said {first:?} instead of ready");
        Ok(tenant)
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    /// Compares every byte of its memory with what was written.
    pub fn verify(&mut self) -> anyhow::Result<Verdict> {
        let answer = self.ask("verify")?;
        match answer.split_once(' ') {
            None if answer == "ok" => Ok(Verdict::Intact),
            Some(("BAD", pages)) => Ok(Verdict::Damaged(Pages(pages.parse().context("an answer to verify")?))),
            _ => bail!("a tenant answered {answer:?} to verify"),
        }
    }

    /// Reads one word in each of its first `pages` pages, as a program that uses its memory does.
    pub fn touch(&mut self, pages: Pages) -> anyhow::Result<()> {
        self.ask(&format!("touch {}", pages.0)).map(drop)
    }

    /// Writes to every page what it holds already: undoes every merge and changes nothing.
    pub fn break_copies(&mut self) -> anyhow::Result<()> {
        self.ask("cow").map(drop)
    }

    /// Damages one byte, for tests of those who check.
    pub fn damage(&mut self) -> anyhow::Result<()> {
        self.ask("damage").map(drop)
    }

    /// Begins what its spec says it does by itself.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        let answer = self.ask("begin")?;
        ensure!(answer == "ok", "a tenant answered {answer:?} to begin");
        Ok(())
    }

    /// What it has done by itself.
    pub fn counters(&mut self) -> anyhow::Result<Counters> {
        serde_json::from_str(&self.ask("counters")?).context("a tenant's counters")
    }

    fn ask(&mut self, command: &str) -> anyhow::Result<String> {
        let pid = self.pid();
        let commands = self.commands.as_mut().context("the tenant has been told to end")?;
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

/// Waits for a child that has been asked to end, and kills it by its pid if it does not.
pub(crate) fn end_child(child: &mut Child, limit: Duration) {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            _ => return,
        }
    }
    // Both fail only when it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_survives_its_json() {
        let spec = TenantSpec::new([
            Segment::Same { pages: 3, seed: 1 },
            Segment::Random { pages: 4, seed: u64::MAX },
            Segment::Zero { pages: 5 },
            Segment::Shared { pages: 6, seed: 2 },
            Segment::Pairs { pages: 7, seed: 3 },
            Segment::Tails { pages: 8, seed: 4 },
        ]);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<TenantSpec>(&json).unwrap(), spec);
        assert!(!json.contains("live"));
        for live in [Live::Breaker { every_us: 1 }, Live::ShortLived { pages: 2, seed: 3, life_us: 4, mergeable: true }]
        {
            let spec = TenantSpec::new([]).living(live);
            assert_eq!(serde_json::from_str::<TenantSpec>(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
        }
        assert_eq!(spec.pages(), Pages(33));
    }

    #[test]
    fn a_spec_with_unknown_parts_is_refused() {
        for text in [
            r#"{"segments":[{"same":{"pages":1}}]}"#,
            r#"{"segments":[{"sane":{"pages":1,"seed":2}}]}"#,
            r#"{"segments":[{"zero":{"pages":1,"seed":2}}]}"#,
            r#"{"segments":[],"more":1}"#,
            r#"{"segments":[{"zero":{"pages":-1}}]}"#,
            r#"{"segments":[],"live":{"breaker":{}}}"#,
        ] {
            assert!(serde_json::from_str::<TenantSpec>(text).is_err(), "{text}");
        }
    }
}
