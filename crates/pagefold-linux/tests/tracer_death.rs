//! The tracer is killed at every step of an injection, and at random moments: its target must not notice.
//!
//! The targets check for themselves (`examples/home_victim.rs`). `PAGEFOLD_TORTURE=N` makes N kills at random moments
//! instead of a few hundred.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

use pagefold_linux::inject::{Call, InjectError, Injector, Limits, Report};
use pagefold_linux::os::fault;
use pagefold_linux::proc::process::Process;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Every step of an injection, in order.
const POINTS: [&str; 14] = [
    "stopped",
    "options-set",
    "frame-written",
    "registers-set",
    "mask-set",
    "resumed",
    "entry",
    "call-set",
    "called",
    "exit",
    "mask-restored",
    "registers-restored",
    "memory-restored",
    "options-cleared",
];
const KINDS: [&str; 11] = [
    "nanosleep",
    "futex",
    "futex-timeout",
    "poll",
    "epoll",
    "read",
    "sigtimedwait",
    "busy",
    "busy-notrap",
    "pending",
    "thread",
];

fn example() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().and_then(Path::parent).unwrap().join("examples/home_victim")
}

fn worker(fault: &str) -> Injector {
    Injector::spawn(Command::new(example()).arg("worker").env(fault::VARIABLE, fault)).unwrap()
}

struct Victim {
    kind: String,
    child: Child,
    input: UnixStream,
    output: BufReader<ChildStdout>,
    process: Process,
    addr: u64,
    len: u64,
}

impl Victim {
    fn start(kind: &str) -> Self {
        let (input, theirs) = UnixStream::pair().unwrap();
        let mut child = unsafe {
            Command::new(example())
                .arg(kind)
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::piped())
                .pre_exec(|| {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    Ok(())
                })
                .spawn()
                .expect("the victim, built by `cargo test`")
        };
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let mut fields = line.split_whitespace().skip(1);
        let addr = u64::from_str_radix(fields.next().unwrap(), 16).unwrap();
        let len = fields.next().unwrap().parse().unwrap();
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        Self { kind: kind.into(), child, input, output, process, addr, len }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    /// Waits until it is in the middle of a round.
    fn begin(&mut self) {
        self.input.write_all(b"b").unwrap();
        assert_eq!(self.line(), "round", "{}", self.kind);
        let deadline = Instant::now() + Duration::from_secs(10);
        // Its probing thread: the main one, but where that only waits for the end of the round.
        while !self.kind.starts_with("busy") && !self.is_blocked() {
            assert!(Instant::now() < deadline, "{} does not block", self.kind);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn is_blocked(&self) -> bool {
        let waiting = format!("{} ", libc::SYS_recvfrom);
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("syscall")).ok()).any(|call| {
            call.starts_with(|digit: char| digit.is_ascii_digit())
                && !call.starts_with(&waiting)
                && !call.starts_with(&format!("{} ", libc::SYS_write))
        })
    }

    /// Ends the round. Whether the stack below its red zone is as it was.
    fn end(&mut self, what: &str) -> bool {
        self.input.write_all(b"x").unwrap();
        let stack = self.line();
        assert!(stack.starts_with("stack "), "{}, {what}: {stack:?}, {:?}", self.kind, self.child.try_wait());
        assert_eq!(self.line(), "ok", "{}, {what}", self.kind);
        stack == "stack clean"
    }

    fn calls(&self, advice: i32, count: usize) -> Vec<Call> {
        vec![Call::madvise(self.addr, self.len, advice); count]
    }

    fn status(&self, field: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap_or_default();
        let value = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or("none");
        value.trim_start_matches(':').trim().into()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the calls; `None`: the worker died.
fn run(injector: &mut Injector, victim: &Victim, calls: &[Call]) -> Option<Report> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match injector.run(&victim.process, calls, &Limits::default()) {
            Ok(report) => return Some(report),
            Err(InjectError::WorkerGone) => return None,
            // Between two rounds it may be in a bad moment.
            Err(error) if error.is_passing() && Instant::now() < deadline => {}
            Err(error) => panic!("{}: {error}", victim.kind),
        }
    }
}

fn permitted() -> bool {
    let mut victim = Victim::start("read");
    victim.begin();
    match worker("").run(&victim.process, &victim.calls(libc::MADV_MERGEABLE, 1), &Limits::default()) {
        Err(error @ InjectError::Denied { .. }) => println!("SKIP: {error}"),
        Ok(report) if report.results != [Ok(0)] => println!("SKIP: this kernel has no KSM"),
        // A bad moment is for the tests themselves.
        _ => return true,
    }
    false
}

#[test]
fn without_a_death_even_dead_memory_is_as_it_was() {
    if !permitted() {
        return;
    }
    for kind in KINDS {
        let mut victim = Victim::start(kind);
        let mut injector = worker("");
        for count in [1, 30] {
            victim.begin();
            let report = run(&mut injector, &victim, &victim.calls(libc::MADV_MERGEABLE, count)).unwrap();
            assert!(report.results.iter().all(|answer| *answer == Ok(0)) && report.results.len() == count);
            assert_eq!(report.unguarded, 0, "{kind} has a way home");
            assert!(victim.end("no fault"), "{kind}: dead memory was changed");
        }
    }
}

#[test]
fn wherever_the_tracer_dies_its_target_does_not_notice() {
    if !permitted() {
        return;
    }
    for kind in KINDS {
        let mut victim = Victim::start(kind);
        for point in POINTS {
            for passage in [1, 17] {
                let advice = if passage == 1 { libc::MADV_MERGEABLE } else { libc::MADV_UNMERGEABLE };
                let often = matches!(point, "resumed" | "entry" | "call-set" | "called" | "exit");
                if passage > 1 && !often {
                    continue;
                }
                // From the interrupt until their registers are repaired these calls answer EINTR.
                if point == "stopped" && matches!(kind, "epoll" | "sigtimedwait") {
                    continue;
                }
                let fault = format!("{point}@{passage}=kill");
                victim.begin();
                let answer = run(&mut worker(&fault), &victim, &victim.calls(advice, 30));
                assert_eq!(answer, None, "{kind}: {fault} did not kill the worker");
                victim.end(&fault);
                assert_eq!(victim.status("TracerPid"), "0");
            }
        }
        // And twice in the same call, which the first time restarts.
        victim.begin();
        for point in ["exit", "called"] {
            assert_eq!(
                run(&mut worker(&format!("{point}=kill")), &victim, &victim.calls(libc::MADV_MERGEABLE, 1)),
                None
            );
        }
        assert!(run(&mut worker(""), &victim, &victim.calls(libc::MADV_MERGEABLE, 1)).is_some());
        assert_eq!(run(&mut worker("exit=kill"), &victim, &victim.calls(libc::MADV_UNMERGEABLE, 1)), None);
        victim.end("several deaths in one call");
    }
}

/// Pseudo-random numbers (xorshift); the seed is printed with what fails.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn at_any_moment_the_tracer_may_die() {
    if !permitted() {
        return;
    }
    let kills: u32 = std::env::var("PAGEFOLD_TORTURE").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    // Not those whose calls answer EINTR to any interrupt, until that is repaired.
    let kinds = ["futex", "poll", "read", "busy", "large", "thread"];
    let mut victims = kinds.map(Victim::start);
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let (mut early, mut midway) = (0, 0);
    for turn in 0..kills {
        let victim = &mut victims[turn as usize % kinds.len()];
        let advice = if next(&mut seed) % 2 == 0 { libc::MADV_MERGEABLE } else { libc::MADV_UNMERGEABLE };
        let calls = victim.calls(advice, 30);
        let mut injector = worker("");
        let pid = i32::try_from(injector.pid()).unwrap();
        // Connected and warm; then it takes some 300 us to begin with the calls, and those some 300 us more.
        run(&mut injector, victim, &[]).unwrap();
        victim.begin();
        // One that computes is looked at for 2 ms first.
        let first_ns = if matches!(victim.kind.as_ref(), "busy" | "large") { 2_000_000 } else { 0 };
        let delay = Duration::from_nanos(first_ns + next(&mut seed) % 1_500_000);
        let begun = Instant::now();
        let killer = std::thread::spawn(move || {
            while begun.elapsed() < delay {
                std::hint::spin_loop();
            }
            unsafe { libc::kill(pid, libc::SIGKILL) };
        });
        let answer = run(&mut injector, victim, &calls);
        killer.join().unwrap();
        early += u32::from(answer.is_none());
        // Its stack is written only while it is away from home.
        midway += u32::from(!victim.end(&format!("kill {turn} after {delay:?}, {}", victim.kind)));
    }
    println!("{kills} kills: {early} before the answer, {midway} in the middle");
    assert!(midway * 100 > kills, "hardly ever in the middle: {midway} of {kills}");
}

#[test]
fn without_a_way_home_the_death_of_the_tracer_is_the_targets() {
    if !permitted() {
        return;
    }
    let mut victim = Victim::start("heap-stack");
    let mut injector = worker("");
    victim.begin();
    let report = run(&mut injector, &victim, &victim.calls(libc::MADV_MERGEABLE, 30)).unwrap();
    assert_eq!((report.stops, report.unguarded), (1, 1));
    assert!(victim.end("unguarded, no fault"), "nothing is written to such a stack");
    for harmless in ["stopped", "options-set", "registers-restored", "memory-restored", "options-cleared"] {
        victim.begin();
        assert_eq!(
            run(&mut worker(&format!("{harmless}=kill")), &victim, &victim.calls(libc::MADV_MERGEABLE, 1)),
            None
        );
        victim.end(harmless);
    }
    victim.begin();
    assert_eq!(run(&mut worker("exit=kill"), &victim, &victim.calls(libc::MADV_MERGEABLE, 1)), None);
    // It may be dead already.
    let _ = victim.input.write_all(b"x");
    let line = victim.line();
    assert!(!line.starts_with("stack "), "the test cannot fail: {line}");
}

/// What the way home costs: `PAGEFOLD_OTHER_WORKER=PATH` has the `home_victim` of another build inject in turn.
#[test]
fn the_times_of_stops_are_told() {
    if !permitted() {
        return;
    }
    let other = std::env::var_os("PAGEFOLD_OTHER_WORKER").map(PathBuf::from);
    let programs: Vec<PathBuf> = [Some(example()), other].into_iter().flatten().collect();
    for (kind, count) in [("futex", 1), ("futex", 30), ("epoll", 1), ("thread", 1), ("heap-stack", 1)] {
        let mut victim = Victim::start(kind);
        victim.begin();
        let mut workers: Vec<_> = programs
            .iter()
            .map(|path| (Injector::spawn(Command::new(path).arg("worker")).unwrap(), Vec::new(), Vec::new()))
            .collect();
        for _ in 0..300 {
            for (injector, stops, aways) in &mut workers {
                let report = run(injector, &victim, &victim.calls(libc::MADV_MERGEABLE, count)).unwrap();
                assert!(report.results.iter().all(|answer| *answer == Ok(0)) && report.stops >= 1);
                stops.push(report.longest_stop_ns);
                aways.push(report.longest_away_ns);
            }
        }
        assert!(victim.end("300 injections"));
        for ((_, mut stops, mut aways), path) in workers.into_iter().zip(&programs) {
            stops.sort_unstable();
            aways.sort_unstable();
            let us = |sorted: &[u64], permille: usize| sorted[sorted.len() * permille / 1000] / 1000;
            println!(
                "{kind}, {count} calls: stop {} us (p10 {}, p99 {}), away from home {} us (p10 {}, p99 {}): {}",
                us(&stops, 500),
                us(&stops, 100),
                us(&stops, 990),
                us(&aways, 500),
                us(&aways, 100),
                us(&aways, 990),
                path.display()
            );
        }
    }
}
