//! Kills the tracer at every step of an injection, and at random moments. The target mustn't notice.
//!
//! The targets (`victim registers KIND` of pagefold-testkit) check themselves. `PAGEFOLD_TORTURE=N` makes N kills at
//! random moments instead of a few hundred.

use pagefold_engine::random::Random;
use pagefold_inject::{Call, InjectError, InjectionReport, Injector, Limits};
use pagefold_procmem::os::fault;
use pagefold_testkit::guest::{Tools, run_guest};
use pagefold_testkit::injection::{self, MARK, UNMARK, can_inject, run_unchecked};
use pagefold_testkit::{send, victim_binary, wait_until};
use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;
use std::process::Command;
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

fn worker(fault: &str) -> Injector {
    Injector::spawn(Command::new(victim_binary("victim")).arg("worker").env(fault::VARIABLE, fault)).unwrap()
}

/// A victim with a probing thread that blocks or computes in rounds.
struct Victim {
    kind: String,
    victim: injection::Victim,
}

impl Deref for Victim {
    type Target = injection::Victim;

    fn deref(&self) -> &injection::Victim {
        &self.victim
    }
}

impl DerefMut for Victim {
    fn deref_mut(&mut self) -> &mut injection::Victim {
        &mut self.victim
    }
}

impl Victim {
    fn start(kind: &str) -> Self {
        Self { kind: kind.into(), victim: injection::Victim::try_start(&["registers", kind]).unwrap() }
    }

    /// Begins a round and waits until the probing thread is in the middle of it.
    fn begin(&mut self) {
        self.send_byte(b'b');
        assert_eq!(self.line(), "round", "{}", self.kind);
        if !self.kind.starts_with("busy") {
            wait_until("the victim blocks", || self.is_blocked());
        }
    }

    /// Whether the probing thread is blocked in a call. (The thread that waits for the end of the round always is.)
    fn is_blocked(&self) -> bool {
        let others = [libc::SYS_recvfrom, libc::SYS_write].map(|nr| format!("{nr} "));
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("syscall")).ok()).any(|call| {
            call.starts_with(|digit: char| digit.is_ascii_digit())
                && !others.iter().any(|other| call.starts_with(other))
        })
    }

    /// Ends the round and checks that the victim noticed nothing, and that its stack below the red zone is as it was.
    fn end(&mut self, what: &str) {
        self.send();
        let stack = self.line();
        assert_eq!(stack, "stack clean", "{}, {what}: {:?}", self.kind, self.victim.program.child.0.try_wait());
        assert_eq!(self.line(), "ok", "{}, {what}", self.kind);
    }

    /// Counts the return frames that dead tracers have left at the end of a page in the victim's private memory.
    fn frames(&self) -> usize {
        const MAGIC2: [u8; 4] = 0x4650_5845_u32.to_le_bytes();
        let memory = self.process.open_file("mem").unwrap();
        let present = self.process.open_file("pagemap").unwrap();
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        let mut frames = 0;
        for line in maps.lines().filter(|line| line.contains(" rw-p ") && line.contains(" 00:00 0 ")) {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [start, end] = [start, end].map(|addr| u64::from_str_radix(addr, 16).unwrap());
            for addr in (start..end.min(start + (32 << 20))).step_by(4096) {
                let (mut entry, mut page) = ([0; 8], [0; 4096]);
                present.read_exact_at(&mut entry, addr / 4096 * 8).unwrap();
                if entry[7] & 0x80 != 0 && memory.read_exact_at(&mut page, addr).is_ok() {
                    frames += usize::from(page[4096 - 128..].windows(4).any(|word| word == MAGIC2));
                }
            }
        }
        frames
    }
}

/// Runs the calls. `None`: the injector died.
fn run(injector: &mut Injector, victim: &Victim, calls: &[Call]) -> Option<InjectionReport> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match run_unchecked(injector, &victim.process, calls, &Limits::default()) {
            Ok(report) => return Some(report),
            Err(InjectError::WorkerGone) => return None,
            // Between two rounds the victim may be at a moment when we can't stop it.
            Err(error) if error.is_passing() && Instant::now() < deadline => {}
            Err(error) => panic!("{}: {error}", victim.kind),
        }
    }
}

#[test]
fn without_a_death_even_unused_memory_is_as_it_was() {
    if !can_inject() {
        return;
    }
    for kind in KINDS {
        let mut victim = Victim::start(kind);
        let mut injector = worker("");
        for count in [1, 30] {
            victim.begin();
            let report = run(&mut injector, &victim, &victim.calls(MARK, count)).unwrap();
            assert!(report.results.iter().all(|answer| *answer == Ok(0)) && report.results.len() == count);
            assert_eq!(report.unguarded, 0, "{kind} has a return frame");
            victim.end("no fault");
            assert_eq!(victim.frames(), 0, "{kind}: its memory was changed");
        }
    }
}

#[test]
fn a_target_does_not_notice_at_which_step_its_tracer_dies() {
    if can_inject() {
        die_at_every_step(&KINDS);
    }
}

/// Kills the tracers of victims of these kinds at every step.
fn die_at_every_step(kinds: &[&str]) {
    for &kind in kinds {
        let mut victim = Victim::start(kind);
        for point in POINTS {
            for passage in [1, 17] {
                let advice = if passage == 1 { MARK } else { UNMARK };
                let often = matches!(point, "resumed" | "entry" | "call-set" | "called" | "exit");
                if passage > 1 && !often {
                    continue;
                }
                // These calls return EINTR until we've repaired their registers, which we do right after this point.
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
        // We also die twice in the same call: after the first death it restarts.
        victim.begin();
        for point in ["exit", "called"] {
            assert_eq!(run(&mut worker(&format!("{point}=kill")), &victim, &victim.calls(MARK, 1)), None);
        }
        assert!(run(&mut worker(""), &victim, &victim.calls(MARK, 1)).is_some());
        assert_eq!(run(&mut worker("exit=kill"), &victim, &victim.calls(UNMARK, 1)), None);
        victim.end("several deaths in one call");
    }
}

/// Linux 6.15 to 7.0 (6.16 here) look for a frame's second magic number at the full size of the state, which ends
/// behind MPX on this guest. If the number isn't there, they lose the vector registers. QEMU reports all features as in
/// use, so this test can't show that a frame is complete if they aren't. The unit tests of `return_frame` do.
#[test]
fn kernels_that_check_the_full_size_of_the_state_restore_it() {
    let Some(tools) = Tools::find("sigreturn") else { return };
    let own = std::env::current_exe().unwrap();
    let command = ["/bin/test", "--ignored", "--exact", "within_a_guest", "--nocapture"];
    let command = ("command.json", serde_json::to_vec(&command).unwrap());
    let image = tools.image(&[("test", &own), ("victim", &victim_binary("victim"))], &[command]);
    let ended = run_guest(&tools, &image, Duration::from_secs(600), |qemu| {
        qemu.args(["-cpu", "max,-pku", "-m", "512M", "-append", "console=ttyS0 quiet panic=-1 mitigations=off"]);
    });
    println!("took {:?}", ended.took);
    let passed = ended.console.contains("test result: ok. 1 passed");
    assert!(passed && ended.results.contains("exit status: 0"), "{}: {}", ended.status, ended.console);
}

#[test]
#[ignore = "is run in an emulated machine, by the test above"]
fn within_a_guest() {
    die_at_every_step(&["futex"]);
}

#[test]
fn a_target_does_not_notice_when_its_tracer_dies_at_a_random_moment() {
    if !can_inject() {
        return;
    }
    let kills: u32 = std::env::var("PAGEFOLD_TORTURE").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    // We leave out kinds whose calls return EINTR after any interrupt until we've repaired their registers.
    let kinds = ["futex", "poll", "read", "busy", "large", "thread"];
    let mut victims = kinds.map(Victim::start);
    let mut frames = kinds.map(|_| 0);
    let mut random = Random::new(1);
    let (mut early, mut midway) = (0, 0);
    for turn in 0..kills {
        let victim = &mut victims[turn as usize % kinds.len()];
        let advice = if random.next() % 2 == 0 { MARK } else { UNMARK };
        let calls = victim.calls(advice, 30);
        let mut injector = worker("");
        let pid = i32::try_from(injector.pid()).unwrap();
        // We send an empty batch to connect to the injector and warm it up. After that it takes some 300 us until the
        // calls begin, and the calls take some 300 us more.
        run(&mut injector, victim, &[]).unwrap();
        victim.begin();
        // The injector first observes a computing thread for 2 ms.
        let first_ns = if matches!(victim.kind.as_ref(), "busy" | "large") { 2_000_000 } else { 0 };
        let delay = Duration::from_nanos(first_ns + random.next() % 1_500_000);
        let begun = Instant::now();
        let killer = std::thread::spawn(move || {
            while begun.elapsed() < delay {
                std::hint::spin_loop();
            }
            send(pid, libc::SIGKILL);
        });
        let answer = run(&mut injector, victim, &calls);
        killer.join().unwrap();
        early += u32::from(answer.is_none());
        // The stack must be clean: we only write there while we need the return frame.
        victim.end(&format!("kill {turn} after {delay:?}, {}", victim.kind));
        // A frame that is still there shows that the tracer died while it needed the frame.
        let left = victim.frames();
        midway += u32::from(left > frames[turn as usize % kinds.len()]);
        frames[turn as usize % kinds.len()] = left;
    }
    println!("{kills} kills: {early} before the answer, {midway} in the middle");
    assert!(midway * 100 > kills, "hardly ever in the middle: {midway} of {kills}");
}

#[test]
fn without_a_return_frame_a_target_dies_with_its_tracer() {
    if !can_inject() {
        return;
    }
    let mut victim = Victim::start("heap-stack");
    let mut injector = worker("");
    victim.begin();
    let report = run(&mut injector, &victim, &victim.calls(MARK, 30)).unwrap();
    assert_eq!((report.stops, report.unguarded), (1, 1));
    victim.end("unguarded, no fault");
    assert_eq!(victim.frames(), 0, "nothing is written to such a stack");
    for harmless in ["stopped", "options-set", "registers-restored", "memory-restored", "options-cleared"] {
        victim.begin();
        assert_eq!(run(&mut worker(&format!("{harmless}=kill")), &victim, &victim.calls(MARK, 1)), None);
        victim.end(harmless);
    }
    victim.begin();
    assert_eq!(run(&mut worker("exit=kill"), &victim, &victim.calls(MARK, 1)), None);
    // The victim may be dead already.
    victim.send();
    let line = victim.line();
    assert!(!line.starts_with("stack "), "the test cannot fail: {line}");
}
