//! Victims and freezers for the injection tests.
#![allow(dead_code)] // Each test uses its part.

use pagefold_linux::inject::{Call, Errno, InjectError, Limits, Report, inject};
use pagefold_linux::proc::process::Process;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

pub const MERGEABLE: i32 = libc::MADV_MERGEABLE;
pub const UNMERGEABLE: i32 = libc::MADV_UNMERGEABLE;

/// Whether a child may be traced here and KSM is there; says SKIP if not.
pub fn permitted() -> bool {
    let mut victim = Victim::start("idle");
    let answer = victim.mark(MERGEABLE);
    victim.send();
    match answer {
        Err(error @ InjectError::Denied { .. }) => skip(&error.to_string()),
        Ok(Report { results, .. }) if results == [Err(Errno(libc::EINVAL))] => skip("this kernel has no KSM"),
        _ => return true,
    }
    false
}

pub fn skip(why: &str) {
    println!("SKIP: {why}");
}

pub fn example() -> PathBuf {
    // target/PROFILE/deps/inject-HASH -> target/PROFILE/examples/victim
    let own = std::env::current_exe().unwrap();
    own.parent().and_then(Path::parent).unwrap().join("examples/victim")
}

pub struct Victim {
    pub child: Child,
    pub output: BufReader<ChildStdout>,
    pub process: Process,
    pub addr: u64,
    pub len: u64,
    /// Its pid as it sees it.
    pub inner_pid: i32,
}

impl Victim {
    pub fn start(mode: &str) -> Self {
        Self::try_start(&[mode]).unwrap()
    }

    /// Starts a victim with these arguments. The error is why it cannot be what it should.
    pub fn try_start(args: &[&str]) -> Result<Self, String> {
        let mut child = unsafe {
            Command::new(example())
                .args(args)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .pre_exec(|| {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    Ok(())
                })
                .spawn()
                .expect("the victim, built by `cargo test`")
        };
        let mut pid = i32::try_from(child.id()).unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        // In a pid namespace of its own it is a child of its own.
        if let Some(inside) = line.strip_prefix("child ") {
            pid = inside.trim().parse().unwrap();
            line.clear();
            output.read_line(&mut line).unwrap();
        }
        let Some(fields) = line.strip_prefix("ready ") else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(line.trim_start_matches("bad: ").trim().to_owned());
        };
        let mut fields = fields.split_whitespace();
        let addr = u64::from_str_radix(fields.next().unwrap(), 16).unwrap();
        let len = fields.next().unwrap().parse().unwrap();
        let inner_pid = fields.next().map_or(pid, |pid| pid.parse().unwrap());
        let process = Process::open(pid).map_err(|error| error.to_string())?;
        Ok(Self { child, output, process, addr, len, inner_pid })
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub fn calls(&self, advice: i32) -> [Call; 1] {
        [Call::madvise(self.addr, self.len, advice)]
    }

    pub fn mark(&self, advice: i32) -> Result<Report, InjectError> {
        inject(&self.process, &self.calls(advice), &Limits::default())
    }

    /// Marks and unmarks `times` times, seeing to it that it took effect, and leaves the memory marked.
    pub fn mark_often(&self, times: usize) {
        for _ in 0..times {
            for (advice, marked) in [(MERGEABLE, true), (UNMERGEABLE, false), (MERGEABLE, true)] {
                let report = self.mark(advice).unwrap();
                assert_eq!(report.results, [Ok(0)]);
                assert!(report.stops >= 1 && report.longest_stop_ns > 0);
                assert_eq!(self.is_marked(), marked);
            }
        }
    }

    pub fn is_marked(&self) -> bool {
        let tid = self.any_tid();
        let smaps = fs::read_to_string(format!("/proc/{}/task/{tid}/smaps", self.pid())).unwrap();
        let start = format!("{:x}-", self.addr);
        let flags = smaps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find(|line| line.starts_with("VmFlags:"))
            .expect("the victim's memory");
        flags.split_whitespace().any(|flag| flag == "mg")
    }

    pub fn any_tid(&self) -> i32 {
        self.tids().into_iter().max().unwrap()
    }

    pub fn tids(&self) -> Vec<i32> {
        let entries = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    }

    /// Waits until the main thread is blocked in call `nr`, or in its restart.
    pub fn wait_blocked(&self, nr: i64) {
        let (want, restart) = (format!("{nr} "), format!("{} ", libc::SYS_restart_syscall));
        wait_until("the victim is blocked", || {
            fs::read_to_string(format!("/proc/{}/syscall", self.pid()))
                .is_ok_and(|text| text.starts_with(&want) || text.starts_with(&restart))
        });
    }

    pub fn wait_state(&self, state: u8) {
        wait_until("the victim is in the state", || self.process.stat().is_ok_and(|stat| stat.state == state));
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn send(&mut self) {
        self.send_byte(b'x');
    }

    pub fn send_byte(&mut self, byte: u8) {
        // One that is dead cannot take it, and says no more either.
        let _ = self.child.stdin.as_mut().unwrap().write_all(&[byte]);
    }

    pub fn kill(&self, signal: i32) {
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    pub fn expect_ok(&mut self, what: &str) {
        let line = self.line();
        assert_eq!(line, "ok", "{what}");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_micros(300));
    }
}

pub fn pause_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// A field of `status` in the directory of a process or thread.
pub fn status_field(dir: &str, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("{dir}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Writes a 32-bit program that waits, and starts it. The error is why not.
pub fn start_compat(dir: &Path) -> Result<Child, String> {
    let path = dir.join("compat");
    // ELF header, one program header, and: mov eax, 29 (pause); int 0x80; jmp back.
    let mut elf = vec![0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3, 0, 1, 0, 0, 0];
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    elf.extend(words(&[0x0804_8054, 52, 0, 0, 0x0020_0034, 1, 0]));
    elf.extend(words(&[1, 0, 0x0804_8000, 0x0804_8000, 94, 94, 5, 4096]));
    elf.extend([0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7, 0x90]);
    fs::write(&path, elf).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    Command::new(&path).spawn().map_err(|error| format!("32-bit programs: {error}"))
}

/// A control group with a freezer, removed when dropped.
pub struct Freezer {
    dir: PathBuf,
    control: &'static str,
    frozen: &'static str,
    thawed: &'static str,
}

impl Freezer {
    pub fn new(version: u32) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (point, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let wanted = match version {
                1 => kind == "cgroup" && options.split(',').any(|option| option == "freezer"),
                _ => kind == "cgroup2",
            };
            wanted.then(|| PathBuf::from(point))
        })?;
        let dir = mount.join(format!("pagefold-inject-{}", std::process::id()));
        fs::create_dir(&dir).ok()?;
        Some(match version {
            1 => Self { dir, control: "freezer.state", frozen: "FROZEN", thawed: "THAWED" },
            _ => Self { dir, control: "cgroup.freeze", frozen: "1", thawed: "0" },
        })
    }

    pub fn add(&self, pid: i32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    pub fn freeze(&self, on: bool) {
        fs::write(self.dir.join(self.control), if on { self.frozen } else { self.thawed }).unwrap();
    }

    pub fn is_frozen(&self) -> bool {
        match self.control {
            "freezer.state" => fs::read_to_string(self.dir.join("freezer.state")).unwrap().trim() == "FROZEN",
            _ => fs::read_to_string(self.dir.join("cgroup.events")).unwrap().contains("frozen 1"),
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = fs::write(self.dir.join(self.control), self.thawed);
        for _ in 0..200 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            pause_ms(5);
        }
    }
}
