//! Programs that answer line by line over their standard input and output.

use anyhow::{Context, bail, ensure};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The line by which a program says that it holds everything it is to hold.
const READY: &str = "ready";

/// A program that we started, its messages in a log file. Killed by its pid when dropped.
#[derive(Debug)]
pub struct Dialogue {
    child: Child,
    commands: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Dialogue {
    /// Starts it. Its standard error goes to `log`.
    pub fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(log).with_context(|| log.display().to_string())?)
            // Not in our group: an interrupt from the terminal is for the experiment, which ends its programs.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let (Some(commands), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{name} without input or output");
        };
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Bytes, since a console says anything before the program on it does.
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, commands, lines, log: log.to_owned() })
    }

    /// Waits until it is ready, and returns what it said before.
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

    /// Says a line and waits for the line that answers it.
    pub fn ask(&mut self, line: &str, limit: Duration) -> anyhow::Result<String> {
        writeln!(self.commands, "{line}").with_context(|| self.ended())?;
        let answer = self.line(limit)?;
        ensure!(!answer.is_empty(), "process {} answered nothing to {line}", self.pid());
        Ok(answer)
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    fn line(&self, limit: Duration) -> anyhow::Result<String> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow::anyhow!("process {} says nothing for {limit:?}", self.pid()),
            RecvTimeoutError::Disconnected => anyhow::anyhow!(self.ended()),
        })
    }

    fn ended(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        format!("process {} has ended: {}", self.pid(), String::from_utf8_lossy(&text).trim())
    }
}

impl Drop for Dialogue {
    fn drop(&mut self) {
        // Killed, not asked to end: it has nothing to save. Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// With the directory of its log, to be kept as long.
    fn shell(script: &str) -> (Dialogue, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let dialogue = Dialogue::start(Command::new("sh").args(["-c", script]), &dir.path().join("log")).unwrap();
        (dialogue, dir)
    }

    #[test]
    fn it_is_ready_and_answers() {
        let (mut dialogue, _dir) = shell("echo first; echo ready; while read -r line; do echo \"$line!\"; done");
        assert_eq!(dialogue.ready(Duration::from_secs(20)).unwrap(), ["first"]);
        assert_eq!(dialogue.ask("hello", Duration::from_secs(20)).unwrap(), "hello!");
    }

    #[test]
    fn one_that_ends_or_is_silent_is_an_error() {
        let (mut ended, _dir) = shell("echo no such module >&2; exit 1");
        let error = ended.ready(Duration::from_secs(20)).unwrap_err();
        assert!(format!("{error:#}").contains("no such module"), "{error:#}");
        let (mut silent, _dir) = shell("exec sleep 600");
        let error = silent.ready(Duration::from_millis(50)).unwrap_err();
        assert!(format!("{error:#}").contains("says nothing"), "{error:#}");
        let (mut empty, _dir) = shell("echo ready; read -r line; echo");
        empty.ready(Duration::from_secs(20)).unwrap();
        assert!(empty.ask("sum", Duration::from_secs(20)).is_err());
    }
}
