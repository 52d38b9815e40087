//! Runs a scenario.

use crate::model::{Disturbance, MergedBy, Moves, Outcome, Scenario};
use crate::pages::{Extent, Nodes, PAGE, tree_ns};
use crate::programs::Programs;
use pagefold_testkit::ksm;
use pagefold_testkit::{Daemon, number, vmstat, with_pids};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PAGEFOLD: &str = "/bin/pagefold";
const KSM: &str = "/sys/kernel/mm/ksm";
/// We only set this for KSM alone; every other knob has its default.
const PAGES_TO_SCAN: u64 = 4_000;

const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Merging is finished when nothing has happened for this long: two of pagefold's rounds.
const QUIET: Duration = Duration::from_secs(4);
/// The same time for KSM alone, which never pauses.
const QUIET_KSM: Duration = Duration::from_secs(1);
/// Time limits for merging to finish, and for the first merge or two scans: nothing can be merged before the second
/// scan ends.
const LIMIT: Duration = Duration::from_secs(90);
const FIRST_LIMIT: Duration = Duration::from_secs(45);
/// pagefold is idle when it uses less than this fraction of a processor.
const BUSY: u128 = 5;
/// Pages of other processes that may be merged or moved meanwhile.
const NEGLIGIBLE: u64 = 16;

fn knobs() -> Vec<(String, String)> {
    let advisor = fs::read_to_string(format!("{KSM}/advisor_mode")).unwrap_or_default().trim().to_owned();
    let numbers = ksm::knobs().into_iter().map(|(name, value)| (name.to_owned(), value.to_string()));
    numbers.chain([("advisor_mode".to_owned(), advisor)]).collect()
}

pub fn run(scenario: &Scenario) -> Outcome {
    assert_eq!(number("pages_shared"), 0, "pages are merged before {}", scenario.name);
    let knobs_before = knobs();
    let killed = vmstat("oom_kill");
    crate::write_if_there("/sys/kernel/mm/lru_gen/enabled", if scenario.generations { "7" } else { "0" });
    let mut programs = Programs::start(scenario);
    let mut wrong = programs.check();
    let nodes = Nodes::read();
    let before = nodes.snapshot(&programs.extents);

    let steps = if scenario.disturbance == Disturbance::ClockSteps { Some(ClockSteps::start()) } else { None };
    let meter = Meter::start();
    let merger = Merger::start(&scenario.merged_by, &mut programs);
    let settled = meter.wait_until_quiet(&merger);
    let after_merge = nodes.snapshot(&programs.extents);
    wrong.extend(programs.check());

    let disturbed = match scenario.disturbance {
        Disturbance::Offline { node } => {
            wrong.extend(take_offline(node).err());
            // pagefold must notice, and continue.
            meter.wait_until_quiet(&merger);
            let snapshot = Nodes::read().snapshot(&programs.extents);
            wrong.extend(programs.check());
            Some(snapshot)
        }
        _ => None,
    };
    let summary = merger.end(&programs, &mut wrong);
    drop(steps);
    wrong.extend(programs.check());
    let unmerged = Nodes::read().snapshot(&programs.extents);
    if scenario.disturbance == Disturbance::Damage {
        damage(&programs.extents[0]);
        wrong.extend(programs.check());
    }
    drop(programs);
    if let Disturbance::Offline { node } = scenario.disturbance {
        set_online(node, "online_movable").expect("it was online before");
    }
    rest();
    let mut knobs_changed = Vec::new();
    for ((name, now), (_, before)) in knobs().into_iter().zip(knobs_before) {
        if now != before {
            knobs_changed.push(format!("{name}: {before}, then {now}"));
        }
    }
    let mut moves = settled.moves;
    moves.killed = vmstat("oom_kill") - killed;
    Outcome {
        name: scenario.name.clone(),
        before,
        merged: after_merge,
        settled_ms: settled.ms,
        settled: settled.in_time,
        moves,
        when_quiet: settled.when_quiet,
        disturbed,
        summary,
        unmerged,
        knobs_changed,
        wrong,
    }
}

/// Steps of the clock (`CLOCK_REALTIME`), until dropped.
struct ClockSteps {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ClockSteps {
    fn start() -> Self {
        const TEN_YEARS: i64 = 10 * 365 * 24 * 3600;
        let over = Arc::new(AtomicBool::new(false));
        let is_over = over.clone();
        let thread = std::thread::spawn(move || {
            for step in [-TEN_YEARS, TEN_YEARS].into_iter().cycle() {
                let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: `now` outlives the calls; the clock is an emulated machine's.
                let set = unsafe {
                    libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now);
                    now.tv_sec += step;
                    libc::clock_settime(libc::CLOCK_REALTIME, &raw const now)
                };
                assert_eq!(set, 0, "the clock cannot be set");
                if step > 0 && is_over.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::sleep(CHECK_INTERVAL);
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for ClockSteps {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join).transpose().expect("the clock can be set");
    }
}

/// The merger: ksmd alone, or pagefold.
enum Merger {
    Ksm,
    Pagefold(Daemon),
}

impl Merger {
    fn start(merged_by: &MergedBy, programs: &mut Programs) -> Self {
        match merged_by {
            MergedBy::Ksm => {
                set("pages_to_scan", &PAGES_TO_SCAN.to_string());
                programs.mark();
                set("run", "1");
                Self::Ksm
            }
            MergedBy::Pagefold(options) => {
                let mut command = Command::new(PAGEFOLD);
                command.args(with_pids(&["run", "--json"], &programs.pids(), &[])).args(options);
                Self::Pagefold(Daemon::of(&mut command))
            }
        }
    }

    fn cpu_ns(&self) -> u64 {
        match self {
            Self::Ksm => 0,
            Self::Pagefold(daemon) => tree_ns(daemon.pid()),
        }
    }

    /// Ends merging and unmerges everything. Returns pagefold's summary.
    fn end(self, programs: &Programs, wrong: &mut Vec<String>) -> Value {
        let Self::Pagefold(mut daemon) = self else {
            rest();
            set("pages_to_scan", "100");
            return Value::Null;
        };
        if !daemon.is_running() {
            wrong.push("pagefold run ended too early".to_owned());
        }
        let ended = daemon.terminate();
        print!("{}", ended.errors);
        if ended.code != Some(0) {
            wrong.push(format!("pagefold run: {ended:?}"));
        }
        let args = with_pids(&["unmerge"], &programs.pids(), &[]);
        let unmerged = Command::new(PAGEFOLD).args(args).output().expect(PAGEFOLD);
        if !unmerged.status.success() {
            let errors = String::from_utf8_lossy(&unmerged.stderr);
            wrong.push(format!("pagefold unmerge: {}: {errors}", unmerged.status));
        }
        serde_json::from_str(&ended.output).unwrap_or(Value::String(ended.output))
    }
}

fn set(knob: &str, value: &str) {
    crate::write(&format!("{KSM}/{knob}"), value);
}

/// Stops ksmd, and gives every process its own copies. This also makes ksmd drop the processes, which it would
/// otherwise keep until its next scan.
fn rest() {
    set("run", "2");
    set("run", "0");
}

/// Measures moves since its start.
struct Meter {
    began: Instant,
    moves: Moves,
}

struct Settled {
    ms: u64,
    in_time: bool,
    moves: Moves,
    when_quiet: Moves,
}

impl Meter {
    fn start() -> Self {
        Self { began: Instant::now(), moves: moves() }
    }

    /// Waits until nothing merges and nothing moves any more, and pagefold is idle.
    fn wait_until_quiet(&self, merger: &Merger) -> Settled {
        let began = Instant::now();
        let quiet_time = if matches!(merger, Merger::Ksm) { QUIET_KSM } else { QUIET };
        let scans = number("full_scans");
        let mut seen = activity();
        let mut since = Instant::now();
        let mut cpu_then = merger.cpu_ns();
        let mut moves_then = moves();
        let mut settled = self.settled();
        let mut happened = false;
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            let now = activity();
            if now.abs_diff(seen) > NEGLIGIBLE {
                seen = now;
                since = Instant::now();
                cpu_then = merger.cpu_ns();
                moves_then = moves();
                settled = self.settled();
                happened = true;
            }
            if since.elapsed() >= quiet_time {
                let cpu_ns = merger.cpu_ns();
                let moves = moves();
                let busy = u128::from(cpu_ns - cpu_then) > since.elapsed().as_nanos() / BUSY;
                // Nothing is merged before the second scan.
                let enough = number("pages_sharing") > NEGLIGIBLE || number("full_scans") >= scans + 2;
                settled.in_time = !busy && (enough || began.elapsed() >= FIRST_LIMIT);
                settled.when_quiet = less(moves, moves_then);
                since = Instant::now();
                cpu_then = cpu_ns;
                moves_then = moves;
            }
            if settled.in_time || began.elapsed() >= LIMIT {
                if !happened {
                    settled.ms = self.ms();
                }
                return settled;
            }
        }
    }

    fn ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).expect("a short time")
    }

    /// The result if nothing happens from now on.
    fn settled(&self) -> Settled {
        Settled { ms: self.ms(), in_time: false, moves: less(moves(), self.moves), when_quiet: Moves::default() }
    }
}

/// Pages merged or moved, without those that the kernel's NUMA balancing moves.
fn activity() -> u64 {
    let balanced = vmstat("numa_pages_migrated");
    number("pages_sharing") + vmstat("pgmigrate_success") - balanced
}

fn moves() -> Moves {
    // The kernel counts a page first as migrated and then as migrated by balancing. We read them in the
    // reverse order, so that we never see more pages migrated by balancing than migrated at all.
    let balanced = vmstat("numa_pages_migrated");
    Moves { migrated: vmstat("pgmigrate_success"), failed: vmstat("pgmigrate_fail"), balanced, killed: 0 }
}

fn less(now: Moves, before: Moves) -> Moves {
    Moves {
        migrated: now.migrated - before.migrated,
        failed: now.failed - before.failed,
        balanced: now.balanced - before.balanced,
        killed: now.killed - before.killed,
    }
}

/// Writes a byte into the middle of a process's memory.
fn damage(victim: &Extent) {
    let memory = File::options().write(true).open(format!("/proc/{}/mem", victim.pid)).expect("a victim's memory");
    memory.write_at(b"?", victim.start + victim.pages as u64 / 2 * PAGE + 99).expect("a write");
}

fn take_offline(node: usize) -> Result<(), String> {
    set_online(node, "offline")
}

fn set_online(node: usize, state: &str) -> Result<(), String> {
    let dir = format!("/sys/devices/system/node/node{node}");
    let blocks = fs::read_dir(&dir).map_err(|error| format!("{dir}: {error}"))?;
    for block in blocks.filter_map(Result::ok) {
        let name = block.file_name().to_string_lossy().into_owned();
        if name.strip_prefix("memory").is_some_and(|number| number.parse::<u64>().is_ok()) {
            let path = format!("{dir}/{name}/state");
            crate::try_write(&path, state).map_err(|error| format!("{state} to {path}: {error}"))?;
        }
    }
    Ok(())
}
