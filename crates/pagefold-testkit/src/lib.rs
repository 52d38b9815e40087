//! What the end-to-end tests have in common: the program, KSM in one test's hands, programs to fold, looks at /proc.
#![allow(dead_code, reason = "each test file uses a part of it")]

use pagefold_workload::{Segment, Tenant, TenantSpec, Verdict};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
pub const PAGES_PER_MIB: u64 = 256;
/// Where the program keeps what it has to put back.
pub const STATE_FILE: &str = "/run/pagefold/ksm-state.json";
/// `pages_to_scan` while a kick is under way.
pub const KICK: u64 = u32::MAX as u64;

/// How long anything may take that must happen. Far more than it does: other programs may have the cores.
const LIMIT: Duration = Duration::from_secs(40);

// ---- the program ------------------------------------------------------------------------------------------------

pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| match option_env!("CARGO_BIN_EXE_pagefold") {
        Some(program) => program.into(),
        // In the tests of pagefold-lab: target/debug/deps/TEST is one folder below it.
        None => std::env::current_exe().unwrap().parent().unwrap().with_file_name("pagefold"),
    });
    &PROGRAM
}

pub fn pagefold(args: &[&str]) -> Output {
    Command::new(program()).args(args).stdin(Stdio::null()).output().unwrap()
}

/// The program must fail with this code and say why in one line: what is wrong; what to do.
#[track_caller]
pub fn fails(args: &[&str], code: i32, says: &str) {
    is_refusal(&pagefold(args), code, says);
}

#[track_caller]
pub fn is_refusal(output: &Output, code: i32, says: &str) {
    is_failure(output, code, says);
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A failure that does not keep the program from telling what else it did.
#[track_caller]
pub fn is_failure(output: &Output, code: i32, says: &str) {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.starts_with("pagefold: ") && error.lines().count() == 1, "{error}");
    assert!(error.contains(says) && error.contains("; "), "{error}");
}

pub fn with_pids<'a>(before: &[&'a str], pids: &[i32], after: &[&'a str]) -> Vec<String> {
    let list = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let own = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    [own(before), vec!["--pid".to_owned(), list], own(after)].concat()
}

/// `pagefold run`, while it runs. Told to end when dropped.
pub struct Daemon {
    child: Child,
    output: File,
    errors: File,
}

/// What is left of one.
pub struct Ended {
    pub code: Option<i32>,
    pub output: String,
    pub errors: String,
}

impl Daemon {
    /// `pagefold run --json` on these processes.
    pub fn on(pids: &[i32], options: &[&str]) -> Self {
        Self::start(&with_pids(&["run", "--json"], pids, options))
    }

    pub fn start(args: &[impl AsRef<std::ffi::OsStr>]) -> Self {
        Self::of(Command::new(program()).args(args))
    }

    /// By a command that comes to be it.
    pub fn of(command: &mut Command) -> Self {
        // Files, not pipes: nobody reads until the end, and a full pipe would stop it.
        let (output, errors) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(errors.try_clone().unwrap());
        Self { child: command.spawn().unwrap(), output, errors }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// The processes that it has started.
    pub fn children(&self) -> Vec<i32> {
        let pid = self.pid();
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        text.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn signal(&self, signal: i32) {
        send(self.pid(), signal);
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(mut self) -> Ended {
        wait_until("the daemon ends", || !self.is_running());
        let text = |file: &mut File| {
            let mut text = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            text
        };
        Ended {
            code: self.child.wait().unwrap().code(),
            output: text(&mut self.output),
            errors: text(&mut self.errors),
        }
    }

    /// Tells it to end, and waits for that.
    #[track_caller]
    pub fn told_to_end(self) -> Value {
        self.signal(libc::SIGTERM);
        self.end().summary()
    }
}

impl Ended {
    /// The summary of a run that ended well.
    #[track_caller]
    pub fn summary(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.errors);
        let summary: Value = serde_json::from_str(&self.output).unwrap();
        assert_eq!(summary["schema"], "pagefold.run/1");
        summary
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.pid(), libc::SIGTERM);
            let end = Instant::now() + LIMIT;
            while matches!(self.child.try_wait(), Ok(None)) {
                if Instant::now() > end {
                    let _ = self.child.kill();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Gives everything back, and returns the summary.
#[track_caller]
pub fn unmerge(pids: &[i32]) -> Value {
    let args = with_pids(&["unmerge", "--json"], pids, &[]);
    let output = pagefold(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["schema"], "pagefold.unmerge/1");
    summary
}

// ---- KSM --------------------------------------------------------------------------------------------------------

pub fn number(file: &str) -> u64 {
    let text = fs::read_to_string(format!("/sys/kernel/mm/ksm/{file}")).unwrap();
    // The kernel's count of zero pages may be below zero.
    u64::try_from(text.trim().parse::<i64>().unwrap()).unwrap_or(0)
}

pub fn write_knob(file: &str, value: &str) {
    let path = format!("/sys/kernel/mm/ksm/{file}");
    let written = OpenOptions::new().write(true).open(path).and_then(|mut knob| knob.write_all(value.as_bytes()));
    if let Err(error) = written {
        eprintln!("{file}: {error}");
    }
}

/// Bytes that KSM saves, machine-wide.
pub fn saved_bytes() -> u64 {
    (number("pages_sharing") + number("ksm_zero_pages")) * 4096
}

/// Every knob as the kernel ships it, by which the tests know KSM at rest.
const REST: [(&str, u64); 7] = [
    ("run", 0),
    ("pages_to_scan", 100),
    ("sleep_millisecs", 20),
    ("max_page_sharing", 256),
    ("use_zero_pages", 0),
    ("merge_across_nodes", 1),
    ("smart_scan", 1),
];

pub fn advisor_is_off() -> bool {
    // Kernels before 6.8 have none.
    fs::read_to_string("/sys/kernel/mm/ksm/advisor_mode").map_or(true, |mode| mode.contains("[none]"))
}

/// Nobody else's test drives KSM meanwhile.
pub struct KsmLock(#[expect(dead_code, reason = "held, not used")] File);

impl KsmLock {
    pub fn take() -> Self {
        let file = OpenOptions::new().create(true).append(true).open("/run/lock/pagefold-ksm.lock").unwrap();
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
        Self(file)
    }
}

/// KSM at rest, with nothing merged, in the hands of this test alone. Back at rest when dropped, whatever happened.
pub struct KsmAtRest {
    before: Vec<(&'static str, u64)>,
    _lock: KsmLock,
}

impl KsmAtRest {
    /// `None`, with the reason, where KSM cannot be used.
    pub fn take() -> Option<Self> {
        // SAFETY: no arguments, no memory.
        if unsafe { libc::geteuid() } != 0 {
            println!("SKIP: not root");
            return None;
        }
        if !Path::new("/sys/kernel/mm/ksm/smart_scan").exists() {
            println!("SKIP: this kernel has no KSM, or one before 6.7");
            return None;
        }
        if Command::new("python3").arg("--version").output().is_err() {
            println!("SKIP: there is no python3");
            return None;
        }
        let lock = KsmLock::take();
        // Left by a run whose programs ended before they had their memory back: the note outlives the last merged page.
        if Path::new(STATE_FILE).exists() {
            pagefold(&["doctor", "--fix"]);
        }
        let before = REST.map(|(knob, _)| (knob, number(knob))).to_vec();
        let odd: Vec<_> = before.iter().filter(|found| !REST.contains(found)).collect();
        if !odd.is_empty() || number("pages_shared") != 0 || !advisor_is_off() {
            println!("SKIP: KSM is in use, or its knobs are not the kernel's: {odd:?}");
            return None;
        }
        Some(Self { before, _lock: lock })
    }

    /// Every knob but these stands as before the test.
    #[track_caller]
    pub fn knobs_are_back_but(&self, but: &[&str]) {
        for (knob, value) in self.before.iter().filter(|(knob, _)| !but.contains(knob)) {
            assert_eq!(number(knob), *value, "{knob}");
        }
        assert!(advisor_is_off());
    }

    /// All is as before the test, and nothing is left to put back.
    #[track_caller]
    pub fn is_back(&self) {
        self.knobs_are_back_but(&[]);
        assert_eq!(number("pages_shared"), 0);
        assert!(!Path::new(STATE_FILE).exists());
    }
}

impl Drop for KsmAtRest {
    fn drop(&mut self) {
        // After a test that went well there is nothing to do.
        if self.before.iter().all(|(knob, value)| number(knob) == *value)
            && number("pages_shared") == 0
            && advisor_is_off()
        {
            return;
        }
        if !advisor_is_off() {
            write_knob("advisor_mode", "none");
        }
        write_knob("run", "2");
        for (knob, value) in &self.before {
            write_knob(knob, &value.to_string());
        }
        let _ = fs::remove_file(STATE_FILE);
    }
}

// ---- programs to fold -------------------------------------------------------------------------------------------

/// Memory that all with the same `seed` have in common, and some that nobody shares.
pub fn spec(common_mib: u64, own_mib: u64, seed: u64) -> TenantSpec {
    let common = Segment::Shared { pages: common_mib * PAGES_PER_MIB, seed };
    let own = Segment::Random { pages: own_mib * PAGES_PER_MIB, seed };
    TenantSpec::new(if own_mib == 0 { vec![common] } else { vec![common, own] })
}

pub fn tenant(spec: &TenantSpec) -> Tenant {
    Tenant::start(program(), spec).unwrap()
}

pub fn twins(common_mib: u64, own_mib: u64, seed: u64) -> [Tenant; 2] {
    let spec = spec(common_mib, own_mib, seed);
    [tenant(&spec), tenant(&spec)]
}

pub fn pids(tenants: &[Tenant]) -> Vec<i32> {
    tenants.iter().map(Tenant::pid).collect()
}

/// Every byte is what was written.
#[track_caller]
pub fn are_intact(tenants: &mut [Tenant]) {
    for tenant in tenants {
        assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    }
}

/// A python3 program that is spoken to line by line. Killed when dropped.
pub struct Script {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Script {
    /// Starts it and waits until it says `ready`.
    #[track_caller]
    pub fn start(text: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut script = Self { child, input, output };
        assert_eq!(script.line(), "ready");
        script
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

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

/// A program that does nothing. Killed when dropped.
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

/// A program that has ended and that nobody has waited for.
pub fn zombie() -> Child {
    let child = Command::new("true").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    wait_until("a zombie", || state(pid) == b'Z');
    child
}

/// A cgroup of the test's own. What is in it goes to the root cgroup when it is dropped.
pub struct Cgroup {
    pub path: PathBuf,
    root: PathBuf,
}

impl Cgroup {
    /// `None`, with the reason, where this hierarchy is not mounted.
    pub fn make(hierarchy: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup").join(hierarchy);
        let path = root.join(format!("pagefold-test-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&path) {
            println!("SKIP: no cgroup in {}: {error}", root.display());
            return None;
        }
        Some(Self { path, root })
    }

    pub fn add(&self, pid: i32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    pub fn set(&self, file: &str, value: &str) {
        fs::write(self.path.join(file), value).unwrap();
    }

    pub fn says(&self, file: &str, words: &str) -> bool {
        fs::read_to_string(self.path.join(file)).unwrap().contains(words)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join("freezer.state"), "THAWED");
        let _ = fs::write(self.path.join("cgroup.freeze"), "0");
        let members = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in members.lines() {
            let _ = fs::write(self.root.join("cgroup.procs"), pid);
        }
        // A member that is just ending holds it for a moment.
        let end = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.path).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

// ---- looks ------------------------------------------------------------------------------------------------------

#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn send(pid: i32, signal: i32) {
    // SAFETY: no memory is passed. The pid is of a child of ours that nobody has waited for yet.
    unsafe { libc::kill(pid, signal) };
}

/// The state letter in /proc/PID/stat.
pub fn state(pid: i32) -> u8 {
    let text = fs::read(format!("/proc/{pid}/stat")).unwrap();
    let name_end = text.iter().rposition(|&byte| byte == b')').unwrap();
    text[name_end + 2]
}

/// What smaps tells of KSM in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Address space under VM_MERGEABLE, bytes.
    pub marked: u64,
    /// Merged, bytes.
    pub merged: u64,
}

pub fn marks(pid: i32) -> Marks {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut marks, mut size) = (Marks::default(), 0);
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kib = || value.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        match name {
            "Size" => size = kib() << 10,
            "KSM" => marks.merged += kib() << 10,
            "VmFlags" if value.split_ascii_whitespace().any(|flag| flag == "mg") => marks.marked += size,
            _ => {}
        }
    }
    marks
}

/// No mark is left on any of them, and nothing is merged.
#[track_caller]
pub fn are_unmarked(pids: &[i32]) {
    for &pid in pids {
        assert_eq!(marks(pid), Marks::default(), "process {pid}");
    }
}

pub fn has_merge_any(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains("ksm_merge_any: yes")
}
