//! Small processes to work on, and readers of a process's files in /proc.

use crate::skip::{skip, skip_unsupported};
use pagefold_procmem::os::fields::{self, field, number};
use pagefold_procmem::process::Process;
use pagefold_programs::child::OwnedChild;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a test waits for anything. Far more than needed, because other programs may use the processors.
pub const LIMIT: Duration = Duration::from_secs(180);

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

/// A command that runs as a user without any privilege.
pub fn as_other_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.uid(65534).gid(65534);
    command
}

/// Whether PID 2 is a kernel thread. If not, reports that.
pub fn has_kernel_threads() -> bool {
    let has = fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n");
    if !has {
        skip_unsupported("PID 2 is no kernel thread: this is a PID namespace");
    }
    has
}

/// Sends a signal to a child that we haven't waited for.
pub fn send(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. We haven't waited for the child, so its pid isn't reused.
    unsafe { libc::kill(pid, signal) };
}

/// The state letter in /proc/PID/stat.
pub fn state(pid: i32) -> u8 {
    Process::open(pid).and_then(|process| process.stat()).unwrap().state
}

pub fn tids(pid: i32) -> Vec<i32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// The names of a process's threads that wait uninterruptibly, as for a disk.
pub fn blocked_threads(pid: i32) -> Vec<String> {
    let mut names = Vec::new();
    for tid in tids(pid) {
        let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap_or_default();
        if Process::open(tid).and_then(|thread| thread.stat()).is_ok_and(|stat| stat.state == b'D') {
            names.push(name.trim().to_owned());
        }
    }
    names
}

/// A field of the file `status` in the directory of a process or thread.
pub fn status_field(dir: &str, name: &str) -> Option<String> {
    let status = fs::read(format!("{dir}/status")).ok()?;
    Some(String::from_utf8_lossy(field(&status, name)?).into_owned())
}

/// A value in KiB of a file like `/proc/PID/status`.
#[track_caller]
pub fn kib(path: &str, name: &str) -> u64 {
    fields::kib(&fs::read(path).unwrap(), name).unwrap_or_else(|error| panic!("{name} in {path}: {error}"))
}

/// How many bytes of frames the anonymous memory of these processes takes. A frame that several share is divided among
/// them (Pss). Ended processes count 0.
pub fn held(pids: &[i32]) -> u64 {
    let rollups = pids.iter().filter_map(|pid| fs::read(format!("/proc/{pid}/smaps_rollup")).ok());
    rollups.map(|rollup| fields::kib(&rollup, "Pss_Anon").unwrap_or(0) << 10).sum()
}

pub fn exists(pid: i32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap()
}

/// Whether we can read other processes' pages. If not, reports why.
#[track_caller]
pub fn can_read_pages() -> bool {
    let can = fs::File::open("/proc/kpageflags").is_ok();
    if !can {
        skip("/proc/kpageflags cannot be opened: not root, or not in this kernel");
    }
    can
}

/// A counter of /proc/vmstat. 0 if the kernel lacks it.
pub fn vmstat(name: &str) -> u64 {
    number(&fs::read("/proc/vmstat").unwrap(), name).unwrap_or(0)
}

/// Whether the kernel makes huge pages, at least where a program asks for them.
pub fn has_huge_pages() -> bool {
    let modes = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    !modes.is_empty() && !modes.contains("[never]")
}

/// How much of a process is marked and merged, going by its smaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Address space under VM_MERGEABLE, bytes.
    pub marked: u64,
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

/// Asserts that none of the processes has a mark or a merged page.
#[track_caller]
pub fn assert_unmarked(pids: &[i32]) {
    for &pid in pids {
        assert_eq!(marks(pid), Marks::default(), "process {pid}");
    }
}

/// Whether at least this much of each process is merged.
pub fn are_merged(pids: &[i32], bytes: u64) -> bool {
    pids.iter().all(|&pid| marks(pid).merged >= bytes)
}

#[track_caller]
pub fn wait_until_merged(pids: &[i32], bytes: u64) {
    wait_until("they are merged", || are_merged(pids, bytes));
}

/// Waits at most `limit` until nothing of a process is marked or merged. If that takes longer, `still` is the word for
/// the process's state in the failure's message.
#[track_caller]
pub fn wait_until_unmarked(pid: i32, limit: Duration, still: &str) {
    let began = Instant::now();
    while marks(pid) != Marks::default() {
        assert!(began.elapsed() < limit, "still {still}: {:?}", marks(pid));
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("unmarked after {:.1} s", began.elapsed().as_secs_f64());
}

/// Traces a process, like a debugger that only watches, until dropped.
pub struct Tracer {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Tracer {
    /// Begins to trace a process of one thread.
    pub fn of(pid: i32) -> Self {
        let (seized, is_seized) = channel();
        let (end, ends) = channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: no memory is passed. The kernel detaches the process when this thread ends.
            let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
            seized.send(result).unwrap();
            let _ = ends.recv();
        });
        assert_eq!(is_seized.recv().unwrap(), 0, "process {pid} cannot be traced");
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether PR_SET_MEMORY_MERGE is in effect for a process.
pub fn has_merge_any(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains("ksm_merge_any: yes")
}

/// A program that communicates line by line. Killed when dropped.
pub struct Script {
    pub child: OwnedChild,
    pub input: Box<dyn Write + Send>,
    pub output: BufReader<ChildStdout>,
}

impl Script {
    /// Starts a python3 program and waits until it prints `ready`.
    #[track_caller]
    pub fn start(text: &str) -> Self {
        let mut script = Self::of(Command::new("python3").args(["-c", text]));
        assert_eq!(script.line(), "ready");
        script
    }

    /// Starts a process that becomes another program when we send it a line, and then prints `again`.
    #[track_caller]
    pub fn execing() -> Self {
        let text = "echo ready; read line; exec sh -c 'echo again; read line'";
        let mut script = Self::of(Command::new("sh").args(["-c", text]));
        assert_eq!(script.line(), "ready");
        script
    }

    /// Starts a process that isn't dumpable, and so is protected from other processes.
    #[track_caller]
    pub fn undumpable() -> Self {
        Self::start(
            "import ctypes, sys\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nprint('ready', flush=True)\nsys.stdin.readline()",
        )
    }

    #[track_caller]
    pub fn of(command: &mut Command) -> Self {
        let mut child = spawn(command.stdin(Stdio::piped()));
        let input = child.0.stdin.take().unwrap();
        Self::new(child, Box::new(input))
    }

    /// Starts a program whose standard input is a socket.
    #[track_caller]
    pub fn with_socket(command: &mut Command) -> Self {
        let (theirs, ours) = UnixStream::pair().unwrap();
        Self::new(spawn(command.stdin(OwnedFd::from(theirs))), Box::new(ours))
    }

    fn new(mut child: OwnedChild, input: Box<dyn Write + Send>) -> Self {
        let output = BufReader::new(child.0.stdout.take().unwrap());
        Self { child, input, output }
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.0.wait().unwrap()
    }
}

#[track_caller]
fn spawn(command: &mut Command) -> OwnedChild {
    let child = command.stdout(Stdio::piped()).spawn();
    OwnedChild(child.unwrap_or_else(|error| panic!("{command:?}: {error} (scripts/setup installs what tests need)")))
}

/// A process that does nothing. Killed when dropped.
pub struct Sleeper(OwnedChild);

impl Sleeper {
    pub fn start() -> Self {
        Self(OwnedChild(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap()))
    }

    pub fn pid(&self) -> i32 {
        self.0.pid()
    }
}

/// A forked child of this process. Killed and waited for when dropped.
pub struct Forked(pub i32);

impl Forked {
    /// Forks a child that runs `act`, which must be safe after a fork, and then stops itself.
    pub fn start(act: impl FnOnce()) -> Self {
        // SAFETY: the child makes only the caller's calls and system calls.
        match unsafe { libc::fork() } {
            0 => {
                act();
                loop {
                    // SAFETY: no memory is passed.
                    unsafe { libc::raise(libc::SIGSTOP) };
                }
            }
            pid => {
                assert!(pid > 0);
                // SAFETY: waits for our own child to stop.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WUNTRACED) };
                Self(pid)
            }
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: the pid is our own child's, and we haven't waited for it before.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// A child that has ended, and that nobody has waited for.
pub fn zombie() -> Child {
    let child = Command::new("true").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    wait_until("a child becomes a zombie", || state(pid) == b'Z');
    child
}
