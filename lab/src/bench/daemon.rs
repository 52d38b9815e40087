//! Runs pagefold as a subprocess and measures its CPU time from outside.

use crate::interrupt::Interrupt;
use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_procmem::cpu::process_cpu_ns;
use pagefold_procmem::os::cpu::reaped_children_cpu_ns;
use pagefold_procmem::os::fields::kib;
use pagefold_procmem::process::Process;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

/// We let a subprocess exceed its limit by this much, for starting, ending and a last ksmd scan.
const GRACE: Duration = Duration::from_secs(60);

/// The result of a subprocess that succeeded.
#[derive(Clone, Debug)]
pub struct Completed {
    /// CPU time of the subprocess and of the children it waited for.
    pub cpu_seconds: f64,
    /// The standard output, parsed as JSON.
    pub summary: Value,
}

/// Starts `pagefold run` on these processes, at full speed unless an option names a governor.
pub fn run<T: ToString>(program: &Path, pids: &[i32], options: &[T]) -> anyhow::Result<Running> {
    let mut arguments = arguments("run", pids, options);
    if !arguments.iter().any(|argument| argument == "--governor") {
        arguments.extend(["--governor", "full"].map(str::to_owned));
    }
    Running::start(program, &arguments)
}

/// Runs `pagefold scan` on these processes.
pub fn scan(program: &Path, pids: &[i32], options: &[&str], interrupt: &Interrupt) -> anyhow::Result<Completed> {
    json_of(program, &arguments("scan", pids, options), Duration::from_secs(300), interrupt)
}

fn arguments<T: ToString>(subcommand: &str, pids: &[i32], options: &[T]) -> Vec<String> {
    let mut arguments = vec![subcommand.to_owned()];
    for pid in pids {
        arguments.extend(["--pid".to_owned(), pid.to_string()]);
    }
    arguments.extend(options.iter().map(ToString::to_string));
    arguments.push("--json".to_owned());
    arguments
}

/// Runs a command to completion and parses its output as JSON.
fn json_of(program: &Path, arguments: &[String], limit: Duration, interrupt: &Interrupt) -> anyhow::Result<Completed> {
    Running::start(program, arguments)?.finish(limit, interrupt)
}

/// A running subprocess, terminated on drop. No other child may end meanwhile: the kernel adds up the CPU time of all
/// children that we've waited for.
#[derive(Debug)]
pub struct Running {
    child: Child,
    name: String,
    /// Threads that read standard output and standard error.
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

    /// Returns a meter of its CPU time while it runs.
    pub fn meter(&self) -> anyhow::Result<Meter> {
        Ok(Meter { main: Process::open(i32::try_from(self.child.id())?)?, usage: BTreeMap::new() })
    }

    /// Returns whether it has ended on its own.
    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Terminates it and waits for the result.
    pub fn end(mut self, interrupt: &Interrupt) -> anyhow::Result<Completed> {
        self.terminate();
        self.finish(GRACE, interrupt)
    }

    /// Waits for the end and parses the output.
    fn finish(mut self, limit: Duration, interrupt: &Interrupt) -> anyhow::Result<Completed> {
        let ended = self.wait(limit, interrupt);
        let cpu_ns = reaped_children_cpu_ns().saturating_sub(self.cpu_before_ns);
        let name = &self.name;
        let status = ended.with_context(|| name.clone())?;
        let [output, errors] = self.pipes.take().context("the subprocess was already waited for")?.map(text);
        ensure!(status.success(), "{name} ended with {status}: {}", errors.trim());
        let summary = serde_json::from_str(&output).with_context(|| format!("{name} did not write a JSON document"))?;
        Ok(Completed { cpu_seconds: Duration::from_nanos(cpu_ns).as_secs_f64(), summary })
    }

    fn terminate(&mut self) {
        // A child keeps its pid until we wait for it.
        if let (Ok(None), Ok(pid)) = (self.child.try_wait(), i32::try_from(self.child.id())) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }

    /// Waits for the end. When interrupted or late, we terminate the process, give it time to restore KSM, then kill
    /// it.
    fn wait(&mut self, limit: Duration, interrupt: &Interrupt) -> anyhow::Result<ExitStatus> {
        let child = &mut self.child;
        let waited = interrupt.wait(limit, || anyhow::Ok(child.try_wait()?));
        match waited {
            Ok(Some(status)) => Ok(status),
            late => {
                self.terminate();
                pagefold_programs::child::end_child(&mut self.child, Duration::from_secs(30));
                late?;
                bail!("did not end within {limit:?}")
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.terminate();
        pagefold_programs::child::end_child(&mut self.child, Duration::from_secs(30));
    }
}

/// Measures the CPU time and memory of a daemon, its children and theirs from outside, by the kernel's counts for each
/// process.
#[derive(Debug)]
pub struct Meter {
    main: Process,
    /// Usage by pid and start time, so that a child still counts after its end.
    usage: BTreeMap<(i32, u64), Usage>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    cpu_ns: u64,
    peak_bytes: u64,
}

impl Meter {
    /// Reads the daemon and its children. A process may have ended; we keep its last reading.
    pub fn read(&mut self) {
        // The injector is a grandchild.
        let mut processes = children(&self.main);
        let below: Vec<Process> = processes.iter().flat_map(children).collect();
        processes.extend(below);
        for process in processes.iter().chain([&self.main]) {
            let usage = self.usage.entry(process.key()).or_default();
            if let Ok(ns) = process_cpu_ns(process) {
                usage.cpu_ns = ns;
            }
            if let Ok(kib) = kib(&process.read_file("status").unwrap_or_default(), "VmHWM") {
                usage.peak_bytes = kib << 10;
            }
        }
    }

    /// The CPU time so far. We miss the time that a child spends between the last reading and its end.
    pub fn cpu_seconds(&self) -> f64 {
        Duration::from_nanos(self.usage.values().map(|usage| usage.cpu_ns).sum()).as_secs_f64()
    }

    /// The peaks of resident memory so far (`VmHWM`), added up over the daemon and its children. Shared pages count in
    /// each process, and the peaks needn't coincide, so the processes never took more than this at one time.
    pub fn peak_bytes(&self) -> u64 {
        self.usage.values().map(|usage| usage.peak_bytes).sum()
    }
}

/// The children of a process's first thread, which starts them; empty if the kernel doesn't list them.
pub fn children(of: &Process) -> Vec<Process> {
    let pid = of.pid();
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|pid| Process::open(pid.parse().ok()?).ok()).collect()
}

fn collect(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // We still show output read before an error.
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

    fn shell(script: &str, limit: Duration) -> anyhow::Result<Completed> {
        let arguments = ["-c".to_owned(), script.to_owned()];
        json_of(Path::new("/bin/sh"), &arguments, limit, &Interrupt::default())
    }

    #[test]
    fn output_is_parsed_and_failures_give_a_reason() {
        let ran = shell(r#"echo '{"saved": 7}'"#, GRACE).unwrap();
        assert_eq!(ran.summary["saved"], 7);
        let error = shell("echo no scope >&2; exit 2", GRACE).unwrap_err();
        assert!(format!("{error:#}").contains("no scope"), "{error:#}");
        assert!(format!("{:#}", shell("echo hello", GRACE).unwrap_err()).contains("JSON"));
    }

    #[test]
    fn a_meter_counts_a_daemon_and_its_children_even_after_they_end() {
        let busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{busy}' & wait; exec sleep 600");
        let running = Running::start(Path::new("/bin/sh"), &["-c".to_owned(), script]).unwrap();
        let mut meter = running.meter().unwrap();
        let (end, mut most, mut peak) = (std::time::Instant::now() + Duration::from_secs(20), 0.0_f64, 0);
        while most < 0.02 && std::time::Instant::now() < end {
            meter.read();
            let now = meter.cpu_seconds();
            assert!(now >= most);
            most = now;
            // This counts both shells; each has more than 256 KiB.
            peak = peak.max(meter.peak_bytes());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(most >= 0.02, "{most}");
        // The shell ends on request without having written anything.
        assert!(running.end(&Interrupt::default()).is_err());
        meter.read();
        assert!(meter.cpu_seconds() >= most);
        assert!(meter.peak_bytes() >= peak && (512 << 10..64 << 20).contains(&peak), "{peak}");
    }

    #[test]
    fn a_late_subprocess_is_terminated() {
        let error = shell("exec sleep 600", Duration::from_millis(50)).unwrap_err();
        assert!(format!("{error:#}").contains("did not end"), "{error:#}");
    }
}
