//! Small processes to work on, and what /proc shows of a process.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of everything a test waits for. Far more than it takes: other programs may use the processors.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Waits until a condition holds.
///
/// # Panics
/// After [`LIMIT`].
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "this did not happen within {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn is_root() -> bool {
    // SAFETY: no arguments, no memory.
    unsafe { libc::geteuid() == 0 }
}

/// Sends a signal to a child that has not been waited for.
pub fn send(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. The pid of a child that has not been waited for is not reused.
    unsafe { libc::kill(pid, signal) };
}

/// The state letter in /proc/PID/stat.
pub fn state(pid: i32) -> u8 {
    let text = fs::read(format!("/proc/{pid}/stat")).unwrap();
    let name_end = text.iter().rposition(|&byte| byte == b')').unwrap();
    text[name_end + 2]
}

/// A field of the file `status` in the directory of a process or thread.
pub fn status_field(dir: &str, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("{dir}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// A counter of /proc/vmstat, 0 if the kernel does not have it.
pub fn vmstat(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

/// What smaps shows of KSM in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Address space under VM_MERGEABLE, bytes.
    pub marked: u64,
    /// Merged memory, bytes.
    pub merged: u64,
}

pub fn marks(pid: i32) -> Marks {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut marks, mut size) = (Marks::default(), 0);
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let bytes = || value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        match name {
            "Size" => size = bytes(),
            "KSM" => marks.merged += bytes(),
            "VmFlags" if value.split_ascii_whitespace().any(|flag| flag == "mg") => marks.marked += size,
            _ => {}
        }
    }
    marks
}

/// None of the processes has a mark or a merged page.
#[track_caller]
pub fn assert_unmarked(pids: &[i32]) {
    for &pid in pids {
        assert_eq!(marks(pid), Marks::default(), "process {pid}");
    }
}

/// Whether PR_SET_MEMORY_MERGE is in effect.
pub fn has_merge_any(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains("ksm_merge_any: yes")
}

/// A python3 program that communicates line by line. Killed when dropped.
pub struct Script {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Script {
    /// Starts it and waits until it prints `ready`.
    #[track_caller]
    pub fn start(text: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 (scripts/setup installs it)");
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut script = Self { child, input, output };
        assert_eq!(script.line(), "ready");
        script
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Reads a line.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Writes a line.
    pub fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that does nothing. Killed when dropped.
pub struct Sleeper(Child);

impl Sleeper {
    pub fn start() -> Self {
        Self(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap())
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child that has ended and has not been waited for.
pub fn zombie() -> Child {
    let child = Command::new("true").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    wait_until("a child becomes a zombie", || state(pid) == b'Z');
    child
}
