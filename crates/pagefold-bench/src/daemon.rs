//! pagefold itself, as a subprocess whose CPU time is the system's account of it and not its own.

use crate::interrupt::Interrupt;
use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_linux::cpu::reaped_children_cpu_ns;
use serde_json::Value;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a subprocess may take beyond the time it was given: starting, ending, a last scan of ksmd.
const GRACE: Duration = Duration::from_secs(60);

/// A subprocess that has ended well.
#[derive(Clone, Debug)]
pub struct Ran {
    /// CPU time of it and of the children it waited for.
    pub cpu_seconds: f64,
    /// Its standard output: JSON.
    pub summary: Value,
}

/// `pagefold run` on these processes for this time.
pub fn run(program: &Path, pids: &[i32], time: Duration, interrupt: &Interrupt) -> anyhow::Result<Ran> {
    let mut arguments = vec!["run".to_owned()];
    arguments.extend(scope(pids));
    arguments.extend(["--for".to_owned(), format!("{}s", time.as_secs()), "--json".to_owned()]);
    json_of(program, &arguments, time + GRACE, interrupt)
}

/// `pagefold scan` on these processes.
pub fn scan(program: &Path, pids: &[i32], options: &[&str], interrupt: &Interrupt) -> anyhow::Result<Ran> {
    let mut arguments = vec!["scan".to_owned()];
    arguments.extend(scope(pids));
    arguments.extend(options.iter().map(|&option| option.to_owned()));
    arguments.push("--json".to_owned());
    json_of(program, &arguments, Duration::from_secs(300), interrupt)
}

fn scope(pids: &[i32]) -> impl Iterator<Item = String> {
    pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()])
}

/// Runs a command and reads its JSON. While it runs no other child may end: the system counts all together.
fn json_of(program: &Path, arguments: &[String], limit: Duration, interrupt: &Interrupt) -> anyhow::Result<Ran> {
    let name = format!("{} {}", program.display(), arguments.join(" "));
    let cpu_before_ns = reaped_children_cpu_ns();
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| name.clone())?;
    let (output, errors) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let ended = wait(&mut child, limit, interrupt);
    let cpu_ns = reaped_children_cpu_ns().saturating_sub(cpu_before_ns);
    let status = ended.with_context(|| name.clone())?;
    let (output, errors) = (text(output), text(errors));
    ensure!(status.success(), "{name} ended with {status}: {}", errors.trim());
    let summary = serde_json::from_str(&output).with_context(|| format!("{name} did not write one JSON document"))?;
    Ok(Ran { cpu_seconds: Duration::from_nanos(cpu_ns).as_secs_f64(), summary })
}

/// Waits for the end; asks for it when interrupted or late, so that KSM is given back, and insists if need be.
fn wait(child: &mut Child, limit: Duration, interrupt: &Interrupt) -> anyhow::Result<ExitStatus> {
    let waited = interrupt.wait(limit, || Ok(child.try_wait()?));
    if let Ok(Some(status)) = waited {
        return Ok(status);
    }
    if let Ok(pid) = i32::try_from(child.id()) {
        // It is a child not waited for yet: the pid is still its own.
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    crate::tenant::end_child(child, Duration::from_secs(30));
    waited?;
    bail!("not ended after {limit:?}")
}

fn collect(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // What was read before an error is still worth showing.
            let _ = from.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn text(from: JoinHandle<Vec<u8>>) -> String {
    String::from_utf8_lossy(&from.join().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> anyhow::Result<Ran> {
        let arguments = ["-c".to_owned(), script.to_owned()];
        json_of(Path::new("/bin/sh"), &arguments, limit, &Interrupt::default())
    }

    #[test]
    fn output_is_read_and_failures_say_why() {
        let ran = shell(r#"echo '{"saved": 7}'"#, GRACE).unwrap();
        assert_eq!(ran.summary["saved"], 7);
        let error = shell("echo no scope >&2; exit 2", GRACE).unwrap_err();
        assert!(format!("{error:#}").contains("no scope"), "{error:#}");
        assert!(format!("{:#}", shell("echo hello", GRACE).unwrap_err()).contains("JSON"));
    }

    #[test]
    fn a_late_one_is_ended() {
        let error = shell("exec sleep 600", Duration::from_millis(50)).unwrap_err();
        assert!(format!("{error:#}").contains("not ended"), "{error:#}");
    }
}
