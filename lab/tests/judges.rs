//! Injects into programs that others wrote to notice when they're stopped, disturbed or answered wrongly. They judge
//! us.
//!
//! `make attack` installs and runs stress-ng's stressors with `--verify`, the tests of Go's runtime and signals, and a
//! program on the JVM that checks itself while its collectors move everything. Two more judges must be built by hand,
//! as their documentation says, and named, or `make attack` leaves them out. `PAGEFOLD_CRIU` is a tree of CRIU with
//! `test/zdtm/lib` built. `PAGEFOLD_LTP` is a tree of the Linux Test Project with the folders in [`LTP_FOLDERS`] built.

use pagefold_engine::random::Random;
use pagefold_inject::{Call, Limits, inject};
use pagefold_procmem::process::Process;
use pagefold_testkit::Cgroup;
use pagefold_testkit::injection::{MARK, UNMARK};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A judge with all processes that it starts.
struct Judge {
    group: Cgroup,
    child: Child,
    output: tempfile::NamedTempFile,
    random: Random,
    injections: usize,
    refusals: usize,
}

impl Judge {
    fn start(command: &str, dir: &Path) -> Self {
        let group = Cgroup::create("unified").expect("control groups of version 2 are mounted");
        let output = tempfile::NamedTempFile::new().unwrap();
        let joined = format!("echo $$ > {}/cgroup.procs; {command}", group.path().display());
        let child = Command::new("sh")
            .args(["-c", &joined])
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(output.reopen().unwrap())
            .stderr(output.reopen().unwrap())
            .spawn()
            .unwrap();
        Self { group, child, output, random: Random::new(7), injections: 0, refusals: 0 }
    }

    /// Injects once into each of the judge's processes.
    fn disturb(&mut self) {
        for pid in self.group.members() {
            let Ok(process) = Process::open(pid) else { continue };
            let Some(address) = self.anonymous_page(pid) else { continue };
            let advice = if self.random.below(2) == 0 { MARK } else { UNMARK };
            match inject(&process, &[Call::madvise(address, 4096, advice)], &Limits::default()) {
                Ok(_) => self.injections += 1,
                Err(_) => self.refusals += 1,
            }
        }
    }

    /// Chooses a page of anonymous memory that the process may write.
    fn anonymous_page(&mut self, pid: i32) -> Option<u64> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let mut starts = Vec::new();
        for line in maps.lines().filter(|line| line.contains(" rw-p 00000000 00:00 0")) {
            starts.extend(u64::from_str_radix(line.split('-').next()?, 16));
        }
        let chosen = self.random.below(u64::try_from(starts.len().max(1)).unwrap());
        starts.get(usize::try_from(chosen).unwrap()).copied()
    }

    /// Injects until the judge has ended, checks that it found nothing wrong, and returns what it printed.
    #[track_caller]
    fn verdict(mut self, at_least: usize) -> String {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < Duration::from_secs(600), "it doesn't end");
            self.disturb();
            std::thread::sleep(Duration::from_micros(self.random.below(2_000)));
        };
        let said = fs::read_to_string(self.output.path()).unwrap();
        println!("{} injections, {} refusals in {:?}", self.injections, self.refusals, begun.elapsed());
        assert!(status.success(), "{status}: {said}");
        assert!(self.injections >= at_least, "{} injections, {} refusals", self.injections, self.refusals);
        said
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        for pid in self.group.members() {
            // SAFETY: a signal to a process that the judge started.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs stress-ng: make attack"]
fn stress_ng_finds_nothing_wrong() {
    for stressors in [
        "--vm 1 --vm-bytes 64M --madvise 1 --mmap 1 --mmap-bytes 32M",
        "--signal 1 --timer 1 --sigsuspend 1 --sigfd 1 --sigq 1",
        "--futex 1 --sigio 1 --itimer 1 --clock 1 --nanosleep 1",
        "--pipe 1 --poll 1 --epoll 1 --switch 1 --mutex 1 --sem 1",
        "--matrix 1 --cpu 1 --vecmath 1 --memcpy 1",
    ] {
        let said = Judge::start(
            &format!("exec stress-ng {stressors} --verify --timeout 20s --metrics-brief"),
            Path::new("/tmp"),
        )
        .verdict(100);
        assert!(!said.contains("fail:"), "{said}");
    }
}

#[test]
#[ignore = "needs Go: make attack"]
fn the_tests_of_go_pass() {
    let dir = tempfile::tempdir().unwrap();
    for (package, tests) in
        [("os/signal", "."), ("runtime", "Signal|Preempt|GC|Stack|Chan|Timer|Goroutine"), ("time", ".")]
    {
        let program = dir.path().join(package.replace('/', "-"));
        let compiled = Command::new("go").args(["test", "-c", "-o"]).arg(&program).arg(package).status().unwrap();
        assert!(compiled.success(), "{package}");
        let source = output_of(&["go", "list", "-f", "{{.Dir}}", package]);
        let run = format!("exec {} -test.short -test.run '{tests}'", program.display());
        Judge::start(&run, Path::new(source.trim())).verdict(50);
    }
}

/// Some threads write lists of numbers that they can check; others make the collector move these lists.
const JUDGE_OF_THE_JVM: &str = r#"
import java.util.ArrayList;
import java.util.concurrent.atomic.AtomicLong;

class Judge {
    static final AtomicLong checks = new AtomicLong();

    static void check(long seed, long end) {
        while (System.nanoTime() < end) {
            ArrayList<long[]> kept = new ArrayList<>();
            for (int block = 0; block < 400; block++) {
                long[] numbers = new long[500];
                for (int at = 0; at < numbers.length; at++) numbers[at] = seed * 31 + block * 7 + at;
                kept.add(numbers);
                Object garbage = new byte[2000];
            }
            for (int block = 0; block < kept.size(); block++) {
                long[] numbers = kept.get(block);
                for (int at = 0; at < numbers.length; at++) {
                    if (numbers[at] != seed * 31 + block * 7 + at) throw new AssertionError("a number has changed");
                }
            }
            String nothing = null;
            try {
                nothing.length();
                throw new AssertionError("no exception");
            } catch (NullPointerException expected) {
                checks.incrementAndGet();
            }
        }
    }

    public static void main(String[] args) throws Exception {
        long end = System.nanoTime() + 20_000_000_000L;
        ArrayList<Thread> threads = new ArrayList<>();
        AtomicLong failed = new AtomicLong();
        for (int number = 0; number < 6; number++) {
            long seed = number;
            Thread thread = new Thread(() -> check(seed, end));
            thread.setUncaughtExceptionHandler((which, error) -> { error.printStackTrace(); failed.incrementAndGet(); });
            thread.start();
            threads.add(thread);
        }
        while (System.nanoTime() < end) {
            System.gc();
            Thread.sleep(20);
        }
        for (Thread thread : threads) thread.join();
        if (failed.get() > 0 || checks.get() == 0) System.exit(1);
    }
}
"#;

#[test]
#[ignore = "needs a JDK: make attack"]
fn a_program_on_the_jvm_finds_nothing_wrong() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("Judge.java"), JUDGE_OF_THE_JVM).unwrap();
    for collector in ["-XX:+UseG1GC", "-XX:+UseParallelGC", "-XX:+UseZGC"] {
        Judge::start(&format!("exec java -Xmx256m {collector} Judge.java"), dir.path()).verdict(100);
    }
}

/// Runs each of these commands without injecting, and those that pass again as judges. Returns how many those were.
fn judge_those_that_pass(commands: impl Iterator<Item = String>, dir: &Path) -> usize {
    let mut judges = 0;
    for command in commands {
        let alone = Command::new("sh").args(["-c", &command]).current_dir(dir).stdin(Stdio::null()).output().unwrap();
        if !alone.status.success() {
            println!("left out, since it fails alone: {command}");
            continue;
        }
        println!("{command}");
        Judge::start(&command, dir).verdict(0);
        judges += 1;
    }
    judges
}

/// The source tree that this environment variable names.
fn tree(variable: &str) -> PathBuf {
    std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} names no folder")).into()
}

/// Each of these tests prepares something, waits for SIGTERM, and then checks that nothing has changed.
const ZDTM: [&str; 51] = [
    "env00",
    "sigpending",
    "sigaltstack",
    "pthread00",
    "pthread01",
    "pthread_timers",
    "pthread_timers_h",
    "futex",
    "futex-rl",
    "pipe00",
    "pipe01",
    "eventfs00",
    "timerfd",
    "timers",
    "posix_timers",
    "sched_prio00",
    "maps00",
    "maps01",
    "mprotect00",
    "vdso00",
    "vdso01",
    "xids00",
    "sleeping00",
    "sigtrap",
    "rseq00",
    "fpu00",
    "mmx00",
    "sse00",
    "sse20",
    "busyloop00",
    "cow00",
    "cow01",
    "msgque",
    "shm",
    "poll",
    "epoll",
    "inotify00",
    "wait00",
    "zombie00",
    "caps00",
    "sigtrap01",
    "signalfd00",
    "session00",
    "child_subreaper",
    "fdt_shared",
    "file_fown",
    "aio00",
    "membarrier",
    "vfork00",
    "thread_different_uid_gid",
    "pdeath_sig",
];

#[test]
#[ignore = "needs a tree of CRIU"]
fn the_tests_of_criu_pass() {
    let dir = tree("PAGEFOLD_CRIU").join("test/zdtm/static");
    let commands = ZDTM.iter().map(|test| {
        format!(
            "make -s {test}.cleanout; make -s {test}.pid && sleep 1 && make -s {test}.out
             for _ in $(seq 100); do [ -e {test}.out ] && break; sleep 0.1; done
             grep -q PASS {test}.out"
        )
    });
    let judges = judge_those_that_pass(commands, &dir);
    assert!(judges > ZDTM.len() / 2, "{judges}");
}

const LTP_FOLDERS: [&str; 17] = [
    "ptrace",
    "futex",
    "rt_sigaction",
    "rt_sigsuspend",
    "sigaction",
    "signal",
    "kill",
    "nanosleep",
    "clock_nanosleep",
    "sigpending",
    "rt_sigtimedwait",
    "pause",
    "poll",
    "setitimer",
    "timer_settime",
    "madvise",
    "mprotect",
];

/// We leave out tests that count who is woken at a futex whose value stays the same. A stopped thread has left its
/// futex and compares the value when it comes back, so it misses such a wake. With SIGSTOP or a freezer it would, too.
/// We also leave out a wait for a second: relative timeouts start over at each stop, as docs/safety.md says, and with
/// hundreds of stops a second it doesn't end. The tests of `epoll_wait` do both.
const LTP_EXCEPT: [&str; 7] =
    ["futex_wake", "futex_cmp", "futex_wait02", "futex_wait03", "futex_wait07", "futex_waitv", "rt_sigtimedwait01"];

#[test]
#[ignore = "needs a tree of the Linux Test Project"]
fn the_tests_of_ltp_pass() {
    let calls = tree("PAGEFOLD_LTP").join("testcases/kernel/syscalls");
    let mut judges = 0;
    for folder in LTP_FOLDERS {
        let dir = calls.join(folder);
        let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path()).collect();
        names.retain(|path| path.extension().is_none() && path.with_extension("c").exists());
        names.retain(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            !LTP_EXCEPT.iter().any(|except| name.starts_with(except))
        });
        names.sort();
        let commands = names.iter().map(|path| format!("timeout 60 {} -I 1", path.display()));
        judges += judge_those_that_pass(commands, &dir);
    }
    assert!(judges > 30, "{judges}");
}

fn output_of(command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
