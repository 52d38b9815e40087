//! Targets built so that an injection might harm them or let them escape.
//!
//! `PAGEFOLD_ATTACKS` is the number of injections, spread over all kinds (default: 20,000; `make attack`: a million).
//! `PAGEFOLD_ATTACK_KIND` names one kind, which then gets them all.
//!
//! The torture test has victims for everything else: every blocking call and its restart block, `io_uring` waits,
//! restartable sequences, 2,000 threads, vector registers, all actions of seccomp filters, job control, frozen cgroups,
//! vforks and execs, namespaces, each disturbed by signals.
//!
//! The kinds `coroutines`, `alternate-stacks` and `page-faults` act like the runtimes of Go, the JVM, Lua and Boost
//! (stacks in the heap, preemption by a signal that changes the instruction pointer, handlers on alternate stacks,
//! safepoints by page faults). The lab's `judges.rs` injects into programs that others wrote.

#[path = "torture/tally.rs"]
mod tally;

use pagefold_inject::{Errno, Limits, inject};
use pagefold_procmem::process::Process;
use pagefold_testkit::injection::*;
use pagefold_testkit::{Cgroup, Freezer, skip_unsupported, wait_until};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tally::Tally;

/// Where a target is while we attack it.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Anywhere,
    /// The victim's child is the target.
    Parent,
    /// In a cgroup that may use a tenth of a CPU.
    Throttled,
    /// In a cgroup that we freeze and thaw all the time.
    Freezing,
}
use Place::{Anywhere, Freezing, Parent, Throttled};

struct Kind {
    name: &'static str,
    /// MODE in the victim's command line, `victim hostile MODE`.
    mode: &'static str,
    place: Place,
    /// This kind's share of the injections.
    share: u32,
    /// One injection in this many gives the target no time to stop. The target mustn't notice that either.
    hurried: u64,
    /// False: we refuse to inject into it.
    willing: bool,
}

const fn kind(name: &'static str, share: u32) -> Kind {
    Kind { name, mode: name, place: Anywhere, share, hurried: 32, willing: true }
}

const KINDS: [Kind; 21] = [
    kind("code-swap", 10),
    kind("trapped-calls", 10),
    kind("breakpoints", 10),
    Kind { hurried: 1, ..kind("epoll", 5) },
    kind("coroutines", 10),
    kind("local-coroutines", 10),
    kind("alternate-stacks", 10),
    kind("local-alternate-stacks", 10),
    kind("lazy-stack", 5),
    kind("extended-states", 10),
    kind("shadow-stack", 3),
    kind("userfaultfd", 5),
    kind("users", 5),
    // We refuse this one only after all attempts, which takes long, so it gets few.
    Kind { willing: false, ..kind("io-uring", 2) },
    kind("page-faults", 10),
    kind("forged-faults", 10),
    kind("emulator", 5),
    Kind { willing: false, ..kind("dispatch", 5) },
    Kind { mode: "emulator", place: Parent, willing: false, ..kind("emulated", 2) },
    Kind { mode: "epoll", place: Throttled, ..kind("throttled", 1) },
    Kind { mode: "coroutines", place: Freezing, ..kind("frozen", 3) },
];

/// The outcome of the attacks on one kind.
#[derive(Default)]
struct Outcome {
    tally: Tally,
    /// The longest request, with all its attempts.
    longest: Duration,
    harm: Option<String>,
    absent: String,
}

impl Outcome {
    fn has_ended(&self) -> bool {
        self.tally.count("Vanished") + self.tally.count("Zombie") > 0
    }
}

/// Keeps a target in the cgroup that its place asks for, until `over`.
fn in_group(place: Place, pid: i32, over: &AtomicBool) -> Result<(), String> {
    let wait = || {
        while !over.load(Relaxed) {
            pause_ms(2);
        }
    };
    match place {
        Freezing => {
            let freezer = Freezer::create(2).ok_or("control groups of version 2 are not mounted")?;
            freezer.add(pid);
            while !over.load(Relaxed) {
                freezer.freeze(true);
                pause_ms(3);
                freezer.freeze(false);
                pause_ms(5);
            }
        }
        Throttled => {
            // The period is short, so that the test spends little time waiting for it to end.
            let group = Cgroup::create("unified").filter(|group| group.path().join("cpu.max").exists());
            let (group, settings): (_, &[_]) = match group {
                Some(group) => (group, &[("cpu.max", "1000 10000")]),
                None => (
                    Cgroup::create("cpu").ok_or("no control group limits CPU time")?,
                    &[("cpu.cfs_period_us", "10000"), ("cpu.cfs_quota_us", "1000")],
                ),
            };
            for (file, value) in settings {
                group.set(file, value);
            }
            group.add(pid);
            wait();
        }
        Anywhere | Parent => wait(),
    }
    Ok(())
}

fn attack(kind: &Kind, count: usize, seed: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let mut victim = match Victim::try_start(&["hostile", kind.mode]) {
        Ok(victim) => victim,
        Err(reason) => return Outcome { harm: Some(reason), ..outcome },
    };
    let mut child = None;
    if kind.place == Parent {
        let children = format!("/proc/{0}/task/{0}/children", victim.pid());
        wait_until("the child runs", || {
            let pids = std::fs::read_to_string(&children).unwrap_or_default();
            child = pids.trim().parse().ok().and_then(|pid| Process::open(pid).ok());
            child.is_some()
        });
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (pid, over) = (victim.pid(), &over);
        let group = scope.spawn(move || in_group(kind.place, pid, over));
        let process = child.as_ref().unwrap_or(&victim.process);
        let mut random = pagefold_engine::random::Random::new(seed);
        let limits = [Limits::default(), Limits { stop_ns: 1, ..Limits::default() }];
        for _ in 0..count {
            let calls = victim.calls([MARK, UNMARK][usize::from(random.below(2) == 0)], 1);
            let begun = Instant::now();
            let result = inject(process, &calls, &limits[usize::from(random.below(kind.hurried) == 0)]);
            outcome.longest = outcome.longest.max(begun.elapsed());
            outcome.tally.record(&result);
            if let Ok(report) = result {
                // Documented: EINTR if signals interrupt unmerging at every attempt.
                let right = |result: &Result<u64, Errno>| matches!(result, Ok(0) | Err(Errno(libc::EINTR)));
                if !report.results.iter().all(right) {
                    outcome.harm = Some(format!("the calls answered {:?}", report.results));
                }
            }
            if outcome.has_ended() {
                break;
            }
            std::thread::sleep(Duration::from_micros(random.below(150)));
        }
        over.store(true, Relaxed);
        if let Err(what) = group.join().unwrap() {
            outcome.absent = what;
        }
    });
    // A stuck target never answers, so we wait on another thread, with a time limit.
    let (said, verdict) = channel();
    let pid = victim.pid();
    victim.send();
    let reader = std::thread::spawn(move || said.send(victim.line()).map(|()| victim));
    let line = verdict.recv_timeout(Duration::from_secs(30)).unwrap_or_else(|_| {
        pagefold_testkit::send(pid, libc::SIGKILL);
        "it does not answer".to_owned()
    });
    drop(reader.join().unwrap());
    let said_too_early = outcome.has_ended() && !line.starts_with("bad: ");
    match line.strip_prefix("ok absent: ").or_else(|| line.strip_prefix("bad: skip: ")) {
        _ if line.is_empty() => outcome.harm = Some("it has died".to_owned()),
        _ if said_too_early => outcome.harm = Some("it has ended by itself".to_owned()),
        Some(absent) => absent.clone_into(&mut outcome.absent),
        None if line == "ok" => {}
        None => outcome.harm = Some(line),
    }
    outcome
}

fn print(name: &str, outcome: &Outcome) {
    let [p50, p99, max] = outcome.tally.stops_us([500, 990, 1000]);
    println!(
        "{name:24} {:>8} {:>8} {:>6} {p50:>7} {p99:>7} {max:>8} {:>9.1}  {}",
        outcome.tally.made + outcome.tally.failed(),
        outcome.tally.made,
        u32::from(outcome.harm.is_some()),
        outcome.longest.as_secs_f64() * 1e3,
        outcome.tally.errors(),
    );
    if !outcome.absent.is_empty() {
        skip_unsupported(format!("{name}: {}", outcome.absent));
    }
}

#[test]
fn no_hostile_target_is_harmed_or_escapes() {
    const WORKERS: usize = 3;
    if !can_inject() {
        return;
    }
    let total = std::env::var("PAGEFOLD_ATTACKS").map_or(20_000, |text| text.parse().expect("a number"));
    let only = std::env::var("PAGEFOLD_ATTACK_KIND").ok();
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| only.as_ref().is_none_or(|only| only == kind.name)).collect();
    let shares: u32 = kinds.iter().map(|kind| kind.share).sum();
    let seed = u64::from(std::process::id());
    let (next, begun) = (AtomicUsize::new(0), Instant::now());
    let outcomes = std::thread::scope(|scope| {
        let work = || {
            let mut outcomes = Vec::new();
            while let Some(&kind) = kinds.get(next.fetch_add(1, Relaxed)) {
                let count = total * kind.share as usize / shares as usize;
                let begun = Instant::now();
                outcomes.push((kind, attack(kind, count, seed)));
                println!("{}: {:.1} s", kind.name, begun.elapsed().as_secs_f64());
            }
            outcomes
        };
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
    });
    println!("{:24} {:>8} {:>8} {:>6} {:>7} {:>7} {:>8} {:>9}", "", "", "", "", "stop us", "", "", "longest");
    println!(
        "{:24} {:>8} {:>8} {:>6} {:>7} {:>7} {:>8} {:>9}  refused",
        "kind", "requests", "made", "harmed", "p50", "p99", "max", "ms"
    );
    let (mut all, mut failures) = (Outcome::default(), Vec::new());
    for (kind, outcome) in &outcomes {
        print(kind.name, outcome);
        if let Some(harm) = &outcome.harm {
            failures.push(format!("{}: {harm}", kind.name));
        } else if kind.willing && outcome.tally.made == 0 && outcome.absent.is_empty() {
            failures.push(format!("{}: no call was made", kind.name));
        }
        all.tally.add(&outcome.tally);
        all.longest = all.longest.max(outcome.longest);
    }
    print("all", &all);
    println!("{} harmed in {:.0} s", failures.len(), begun.elapsed().as_secs_f64());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
