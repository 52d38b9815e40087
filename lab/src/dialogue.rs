//! Programs that answer commands line by line on standard input and output.

use anyhow::{Context, bail, ensure};
use pagefold_programs::child::OwnedChild;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The line that a program prints when all its data is in memory.
pub(crate) const READY: &str = "ready";

/// A process that answers commands. Killed when dropped.
#[derive(Debug)]
pub struct Dialogue {
    child: OwnedChild,
    /// `None` once we've asked the program to end.
    commands: Option<ChildStdin>,
    lines: Receiver<String>,
    log: Option<PathBuf>,
}

impl Dialogue {
    /// Starts the program. Its standard error goes to `log`, or to our own.
    pub fn start(command: &mut Command, log: Option<&Path>) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        if let Some(log) = log {
            command.stderr(File::create(log).with_context(|| log.display().to_string())?);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A process group of its own keeps Ctrl-C from it: we end our programs ourselves.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let (Some(commands), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{name} has no standard input or output");
        };
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // We read bytes, because a console may print anything before its program starts.
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child: OwnedChild(child), commands: Some(commands), lines, log: log.map(Path::to_owned) })
    }

    /// Waits until the program is ready and returns the lines it printed before that.
    pub fn ready(&mut self, limit: Duration) -> anyhow::Result<Vec<String>> {
        let end = Instant::now() + limit;
        let mut before = Vec::new();
        loop {
            match self.line(end.saturating_duration_since(Instant::now())) {
                Ok(line) if line == READY => return Ok(before),
                Ok(line) => before.push(line),
                Err(error) => return Err(error.context(before.join("\n"))),
            }
        }
    }

    /// Sends a line and waits for the line that answers it.
    pub fn ask(&mut self, line: &str, limit: Duration) -> anyhow::Result<String> {
        let commands = self.commands.as_mut().context("the program has been asked to end")?;
        writeln!(commands, "{line}").with_context(|| self.ended())?;
        let answer = self.line(limit)?;
        ensure!(!answer.is_empty(), "process {} sent an empty answer to {line}", self.pid());
        Ok(answer)
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// Closes the program's standard input, which asks it to end. Kills it if it's still running after `limit`.
    pub(crate) fn end(&mut self, limit: Duration) {
        drop(self.commands.take());
        self.child.end(limit);
    }

    pub(crate) fn line(&self, limit: Duration) -> anyhow::Result<String> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow::anyhow!("process {} has not answered for {limit:?}", self.pid()),
            RecvTimeoutError::Disconnected => anyhow::anyhow!(self.ended()),
        })
    }

    fn ended(&self) -> String {
        let text = self.log.as_ref().and_then(|log| fs::read(log).ok()).unwrap_or_default();
        format!("process {} has ended {}", self.pid(), String::from_utf8_lossy(&text).trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// A shell that runs this script, and the directory of its log.
    fn shell(script: &str) -> (Dialogue, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let dialogue = Dialogue::start(Command::new("sh").args(["-c", script]), Some(&dir.path().join("log"))).unwrap();
        (dialogue, dir)
    }

    #[test]
    fn a_program_becomes_ready_and_answers() {
        let (mut dialogue, _dir) = shell("echo first; echo ready; while read -r line; do echo \"$line!\"; done");
        assert_eq!(dialogue.ready(Duration::from_secs(20)).unwrap(), ["first"]);
        assert_eq!(dialogue.ask("hello", Duration::from_secs(20)).unwrap(), "hello!");
    }

    #[test]
    fn ended_and_silent_programs_are_errors() {
        let (mut ended, _dir) = shell("echo no such module >&2; exit 1");
        let error = ended.ready(Duration::from_secs(20)).unwrap_err();
        assert!(format!("{error:#}").contains("no such module"), "{error:#}");
        let (mut silent, _dir) = shell("exec sleep 600");
        let error = silent.ready(Duration::from_millis(50)).unwrap_err();
        assert!(format!("{error:#}").contains("has not answered"), "{error:#}");
        let (mut empty, _dir) = shell("echo ready; read -r line; echo");
        empty.ready(Duration::from_secs(20)).unwrap();
        assert!(empty.ask("sum", Duration::from_secs(20)).is_err());
    }
}
