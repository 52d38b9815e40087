//! pagefold itself, as a subprocess whose CPU time is the system's account of it and not its own.

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_linux::os::cpu::reaped_children_cpu_ns;
use pagefold_linux::os::interrupt::Interrupt;
use pagefold_linux::proc::cpu::process_cpu_ns;
use pagefold_linux::proc::process::Process;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
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

/// `pagefold run` on these processes, until it is told to end.
pub fn run(program: &Path, pids: &[i32], options: &[String]) -> anyhow::Result<Running> {
    let mut arguments = vec!["run".to_owned()];
    arguments.extend(scope(pids));
    arguments.extend_from_slice(options);
    arguments.push("--json".to_owned());
    Running::start(program, &arguments)
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

/// Runs a command to its end and reads its JSON.
fn json_of(program: &Path, arguments: &[String], limit: Duration, interrupt: &Interrupt) -> anyhow::Result<Ran> {
    Running::start(program, arguments)?.finish(limit, interrupt)
}

/// A subprocess. While it runs no other child may end: the system counts all together. Dropped, it is told to end.
#[derive(Debug)]
pub struct Running {
    child: Child,
    name: String,
    /// Standard output and standard error, until they are read.
    pipes: Option<[JoinHandle<Vec<u8>>; 2]>,
    cpu_before_ns: u64,
}

impl Running {
    fn start(program: &Path, arguments: &[String]) -> anyhow::Result<Self> {
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
        let pipes = Some([collect(child.stdout.take()), collect(child.stderr.take())]);
        Ok(Self { child, name, pipes, cpu_before_ns })
    }

    /// What measures its CPU time while it runs.
    pub fn meter(&self) -> anyhow::Result<Meter> {
        Ok(Meter { main: Process::open(i32::try_from(self.child.id())?)?, spent_ns: BTreeMap::new() })
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Tells it to end, and waits until it has.
    pub fn end(mut self, interrupt: &Interrupt) -> anyhow::Result<Ran> {
        self.terminate();
        self.finish(GRACE, interrupt)
    }

    /// Waits for its end and reads what it wrote.
    fn finish(mut self, limit: Duration, interrupt: &Interrupt) -> anyhow::Result<Ran> {
        let ended = self.wait(limit, interrupt);
        let cpu_ns = reaped_children_cpu_ns().saturating_sub(self.cpu_before_ns);
        let name = &self.name;
        let status = ended.with_context(|| name.clone())?;
        let [output, errors] = self.pipes.take().context("a subprocess that was waited for")?.map(text);
        ensure!(status.success(), "{name} ended with {status}: {}", errors.trim());
        let summary =
            serde_json::from_str(&output).with_context(|| format!("{name} did not write one JSON document"))?;
        Ok(Ran { cpu_seconds: Duration::from_nanos(cpu_ns).as_secs_f64(), summary })
    }

    fn terminate(&mut self) {
        // A child that has not been waited for keeps its pid.
        if let (Ok(None), Ok(pid)) = (self.child.try_wait(), i32::try_from(self.child.id())) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }

    /// Waits for the end; asks for it when interrupted or late, so that KSM is given back, and insists if need be.
    fn wait(&mut self, limit: Duration, interrupt: &Interrupt) -> anyhow::Result<ExitStatus> {
        let child = &mut self.child;
        let waited = interrupt.wait(limit, || anyhow::Ok(child.try_wait()?));
        match waited {
            Ok(Some(status)) => Ok(status),
            late => {
                self.terminate();
                pagefold_workload::end_child(&mut self.child, Duration::from_secs(30));
                late?;
                bail!("not ended after {limit:?}")
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.terminate();
        pagefold_workload::end_child(&mut self.child, Duration::from_secs(30));
    }
}

/// Measures the CPU time of a daemon and its children from outside, by the system's clocks of them.
#[derive(Debug)]
pub struct Meter {
    main: Process,
    /// By process, so that what a child spent stays when it has ended.
    spent_ns: BTreeMap<(i32, u64), u64>,
}

impl Meter {
    /// So far. What a child spends between the last look and its end is missed.
    pub fn cpu_seconds(&mut self) -> f64 {
        let main = &self.main;
        let children = children(main.pid()).into_iter().filter_map(|pid| Process::open(pid).ok());
        for process in children.collect::<Vec<_>>().iter().chain([main]) {
            // It may have ended; what it had spent by the last look is kept.
            if let Ok(ns) = process_cpu_ns(process) {
                self.spent_ns.insert((process.pid(), process.start_time_ticks()), ns);
            }
        }
        Duration::from_nanos(self.spent_ns.values().sum()).as_secs_f64()
    }
}

/// The children of a process's first thread, which is the one that starts them. None where the kernel does not tell.
fn children(pid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
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
    fn a_meter_counts_a_daemon_and_its_children_also_ended_ones() {
        let busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{busy}' & wait; exec sleep 600");
        let running = Running::start(Path::new("/bin/sh"), &["-c".to_owned(), script]).unwrap();
        let mut meter = running.meter().unwrap();
        let (end, mut most) = (std::time::Instant::now() + Duration::from_secs(20), 0.0_f64);
        while most < 0.02 && std::time::Instant::now() < end {
            let now = meter.cpu_seconds();
            assert!(now >= most);
            most = now;
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(most >= 0.02, "{most}");
        // Told to end, it ends; it has written nothing.
        assert!(running.end(&Interrupt::default()).is_err());
        assert!(meter.cpu_seconds() >= most);
    }

    #[test]
    fn a_late_one_is_ended() {
        let error = shell("exec sleep 600", Duration::from_millis(50)).unwrap_err();
        assert!(format!("{error:#}").contains("not ended"), "{error:#}");
    }
}
