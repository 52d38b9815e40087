//! ksmd's manners on the running kernel, and a tenure from taking over to giving back.
//!
//! Each test holds the one lock for its second or two and leaves KSM as a fresh boot shows it, whatever
//! happens. Only children that the tests start are marked.

use pagefold_core::host::ScanOrder;
use pagefold_linux::ksm::controller::Driver;
use pagefold_linux::ksm::ksmd::Ksmd;
use pagefold_linux::ksm::lease::{
    OtherDriver, Places, TakeError, Tenure, TurnError, Wishes, put_back_deferred, recover,
};
use pagefold_linux::ksm::lock::Lock;
use pagefold_linux::ksm::{KSM_ROOT, Knob, Ksm};
use pagefold_linux::proc::cpu::process_cpu_ns;
use pagefold_linux::proc::process::Process;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tests and experiments that turn KSM's knobs take turns by this lock.
const TEST_LOCK_PATH: &str = "/run/lock/pagefold-ksm.lock";
const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
const WHOLE_SCAN: u64 = u32::MAX as u64;
const ENDLESS: u64 = 1 << 31;

/// KSM in our hands; put right at the end on every path.
struct Machine {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    places: Places,
    _dir: tempfile::TempDir,
    _lock: Lock,
}

impl Machine {
    fn take() -> Option<Self> {
        // SAFETY: geteuid only returns a number.
        if unsafe { libc::geteuid() } != 0 {
            println!("SKIP: only root may steer KSM");
            return None;
        }
        let ksm = match Ksm::open(Path::new(KSM_ROOT)) {
            Ok(ksm) => Arc::new(ksm),
            Err(error) => {
                println!("SKIP: {error}");
                return None;
            }
        };
        let Some(ksmd) = Ksmd::find().unwrap() else {
            println!("SKIP: ksmd is not to be seen from here");
            return None;
        };
        let lock = Lock::take_within(Path::new(TEST_LOCK_PATH), Duration::from_secs(600)).unwrap();
        let knobs = ksm.knobs().unwrap();
        if knobs.run != 0 || knobs.advisor_on() || ksm.anything_merged().unwrap() {
            println!("SKIP: KSM is in use on this machine");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        // The tests hold the real lock; tenures take one of their own.
        let places =
            Places { lock: dir.path().join("lock"), state: dir.path().join("state.json"), ..Places::default() };
        Some(Self { ksm, ksmd, places, _dir: dir, _lock: lock })
    }

    fn read(&self, knob: Knob) -> u64 {
        self.ksm.read(knob).unwrap().unwrap()
    }

    fn write(&self, knob: Knob, value: u64) {
        self.ksm.write(knob, value).unwrap();
    }

    fn scans(&self) -> u64 {
        self.ksm.full_scans().unwrap()
    }

    /// Lets ksmd react, then waits until it rests.
    fn settle(&self) {
        let end = Instant::now() + LIMIT;
        loop {
            std::thread::sleep(Duration::from_millis(50));
            if self.ksmd.rests().unwrap() {
                return;
            }
            assert!(Instant::now() < end, "ksmd never came to rest");
        }
    }

    /// Full scans that `action` brings about.
    fn scans_by(&self, action: impl FnOnce()) -> u64 {
        let before = self.scans();
        action();
        self.settle();
        self.scans() - before
    }

    fn assert_ksmd_idle(&self) {
        let before = self.ksmd.cpu_ns().unwrap();
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(self.ksmd.cpu_ns().unwrap() - before, 0, "ksmd at rest uses no CPU");
    }

    fn unmerge(&self) {
        self.write(Knob::Run, 2);
        self.write(Knob::Run, 0);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for (knob, value) in [
            (Knob::Run, 2),
            (Knob::Run, 0),
            (Knob::SleepMillisecs, 20),
            (Knob::PagesToScan, 100),
            (Knob::MaxPageSharing, 256),
            (Knob::UseZeroPages, 0),
            (Knob::SmartScan, 1),
        ] {
            if let Err(error) = self.ksm.write(knob, value) {
                eprintln!("putting {knob} back to {value}: {error}");
            }
        }
    }
}

/// A child that marks memory and holds it until dropped.
struct Victim(Child);

impl Victim {
    /// `mib` MiB, the second half a copy of the first.
    fn pairs(mib: usize) -> Self {
        Self::start("pairs", mib)
    }
    /// `mib` MiB, no page like another.
    fn random(mib: usize) -> Self {
        Self::start("random", mib)
    }
    fn start(kind: &str, mib: usize) -> Self {
        let mut child = again("victim")
            .env("PAGEFOLD_VICTIM", format!("{kind} {mib}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        wait_for_line(&mut child, "marked");
        Self(child)
    }

    /// Makes the second half a copy of the first, in place.
    fn copy(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        wait_for_line(&mut self.0, "copied");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This test program once more, as the ignored test `name`.
fn again(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

fn wait_for_line(child: &mut Child, line: &str) {
    let output = BufReader::new(child.stdout.as_mut().unwrap());
    assert!(output.lines().any(|said| said.unwrap().ends_with(line)), "the child never said {line:?}");
}

#[test]
#[ignore = "not a test: the child of the others"]
fn victim() {
    let Ok(order) = std::env::var("PAGEFOLD_VICTIM") else { return };
    let (kind, mib) = order.split_once(' ').unwrap();
    let words = mib.parse::<usize>().unwrap() * (1 << 20) / 8;
    // SAFETY: a fresh private anonymous mapping, page-aligned, checked for failure, zeroed by the kernel.
    let memory = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), words * 8, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::madvise(at, words * 8, libc::MADV_NOHUGEPAGE), 0);
        std::slice::from_raw_parts_mut(at.cast::<u64>(), words)
    };
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(std::process::id());
    let fresh = if kind == "pairs" { words / 2 } else { words };
    for word in &mut memory[..fresh] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state;
    }
    memory.copy_within(..words - fresh, fresh);
    // SAFETY: the range is the mapping above; merging never changes what it reads as.
    assert_eq!(unsafe { libc::madvise(memory.as_mut_ptr().cast(), words * 8, libc::MADV_MERGEABLE) }, 0);
    println!("marked");
    std::io::stdout().flush().unwrap();
    // Ends with the parent, which holds the other end; until then each line has the second half copied from the first.
    for _ in std::io::stdin().lines() {
        memory.copy_within(..words / 2, words / 2);
        println!("copied");
        std::io::stdout().flush().unwrap();
    }
    std::hint::black_box(&memory);
}

#[test]
fn counters_are_cheap() {
    let Ok(ksm) = Ksm::open(Path::new(KSM_ROOT)) else {
        println!("SKIP: no KSM");
        return;
    };
    let began = Instant::now();
    for _ in 0..10_000 {
        std::hint::black_box(ksm.counters().unwrap());
    }
    let ns = began.elapsed().as_nanos() / 10_000;
    println!("counters(): {ns} ns");
    assert!(ns < 500_000, "{ns} ns");
}

#[test]
fn ksmd_has_the_manners_the_driver_counts_on() {
    let Some(machine) = Machine::take() else { return };
    let mut sleep = ENDLESS;
    let mut kick = || {
        sleep += 1;
        machine.write(Knob::SleepMillisecs, sleep);
    };
    let victim = Victim::random(64);
    machine.write(Knob::PagesToScan, WHOLE_SCAN);
    kick();
    assert_eq!(machine.scans_by(|| machine.write(Knob::Run, 1)), 1, "run 1 wakes a stopped ksmd");
    for _ in 0..3 {
        assert_eq!(machine.scans_by(&mut kick), 1, "a kick is one scan");
    }
    assert_eq!(machine.scans_by(|| machine.write(Knob::Run, 1)), 0, "run 1 again wakes nobody");
    let same = machine.read(Knob::SleepMillisecs);
    assert_eq!(machine.scans_by(|| machine.write(Knob::SleepMillisecs, same)), 0, "nor the same sleep again");
    let lost = machine.scans_by(|| {
        kick();
        let end = Instant::now() + LIMIT;
        while machine.ksmd.rests().unwrap() {
            assert!(Instant::now() < end);
        }
        kick();
    });
    assert_eq!(lost, 1, "a kick during a scan is lost");

    // Paced scanning ends with an empty batch, and the next kick with the scan that was begun.
    machine.write(Knob::PagesToScan, 300);
    machine.write(Knob::SleepMillisecs, 5);
    std::thread::sleep(Duration::from_millis(60));
    machine.write(Knob::PagesToScan, 0);
    kick();
    machine.settle();
    let paced = machine.ksm.pages_scanned().unwrap();
    machine.assert_ksmd_idle();
    assert_eq!(machine.ksm.pages_scanned().unwrap(), paced);

    // run 0 during an endless sleep: run 1 does not end the sleep, a new one does.
    machine.write(Knob::PagesToScan, WHOLE_SCAN);
    kick();
    machine.settle();
    machine.write(Knob::Run, 0);
    assert_eq!(machine.scans_by(|| machine.write(Knob::Run, 1)), 0);
    assert_eq!(machine.scans_by(&mut kick), 1);

    // Nothing registered: no kick is heard, but the first mark wakes ksmd, unless its batch is empty.
    drop(victim);
    assert_eq!(machine.scans_by(&mut kick), 1, "the scan that forgets the dead");
    assert_eq!(machine.scans_by(&mut kick), 0);
    let mut victims = Vec::new();
    assert_eq!(machine.scans_by(|| victims.push(Victim::random(4))), 1, "nobody ordered this one");
    victims.clear();
    assert_eq!(machine.scans_by(&mut kick), 1);
    assert_eq!(machine.scans_by(&mut kick), 0);
    machine.write(Knob::PagesToScan, 0);
    assert_eq!(machine.scans_by(|| victims.push(Victim::random(4))), 0);
}

#[test]
fn run_0_is_obeyed_though_its_writer_was_killed_waiting() {
    let Some(machine) = Machine::take() else { return };
    let _victim = Victim::random(256);
    machine.write(Knob::PagesToScan, WHOLE_SCAN);
    machine.write(Knob::SleepMillisecs, ENDLESS);
    machine.write(Knob::Run, 1);
    machine.settle();
    // The second visit of so many pages takes ksmd a good while.
    machine.write(Knob::SleepMillisecs, ENDLESS + 1);
    std::thread::sleep(Duration::from_millis(10));
    let scans = machine.scans();
    let mut writer = Command::new("sh").args(["-c", &format!("echo 0 > {KSM_ROOT}/run")]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let waited = machine.read(Knob::Run) == 1 && writer.try_wait().unwrap().is_none();
    writer.kill().unwrap();
    writer.wait().unwrap();
    if !waited || machine.read(Knob::Run) == 1 {
        println!("SKIP: the writer did not come to wait ({waited})");
        return;
    }
    machine.settle();
    assert_eq!((machine.read(Knob::Run), machine.scans()), (0, scans + 1));
}

#[test]
fn a_tenure_merges_rests_and_gives_back() {
    let Some(machine) = Machine::take() else { return };
    let victim = Victim::pairs(64);
    let before = machine.ksm.knobs().unwrap();
    let tenure = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default()).unwrap();
    assert!(tenure.not_granted().is_empty());
    assert_eq!(machine.read(Knob::MaxPageSharing), 4096);
    let driver = Driver::start(&tenure, Ksmd::find().unwrap()).unwrap();
    driver.order(ScanOrder::KICK);
    assert!(driver.wait_idle(LIMIT));
    for _ in 0..3 {
        let scans = machine.scans();
        driver.order(ScanOrder::KICK);
        assert!(driver.wait_idle(LIMIT));
        assert_eq!(machine.scans() - scans, 1, "one kick, one scan");
    }
    let saved = machine.ksm.counters().unwrap().pages_sharing.0;
    assert_eq!(saved, 32 * (1 << 20) / PAGE as u64, "every second page is saved");
    println!("a scan of 64 MiB, half merged: {} us", driver.status().last_scan_ns / 1000);
    assert_eq!((driver.status().stood_down, driver.status().empty), (None, 0));
    machine.assert_ksmd_idle();
    let began = Instant::now();
    for _ in 0..1000 {
        tenure.check().unwrap();
    }
    println!("check(): {} ns", began.elapsed().as_nanos() / 1000);
    let began = Instant::now();
    for _ in 0..1000 {
        assert!(machine.ksmd.rests().unwrap());
    }
    println!("rests(): {} ns", began.elapsed().as_nanos() / 1000);
    let began = Instant::now();
    for _ in 0..1000 {
        std::hint::black_box(machine.ksmd.cpu_ns().unwrap());
    }
    println!("cpu_ns(): {} ns", began.elapsed().as_nanos() / 1000);

    driver.order(ScanOrder::Pace { pages_to_scan: 500, sleep_ms: 10, thorough: false });
    assert!(driver.wait_idle(LIMIT));
    let scanned = machine.ksm.pages_scanned().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(machine.ksm.pages_scanned().unwrap() > scanned + 1000);
    driver.order(ScanOrder::Rest);
    assert!(driver.wait_idle(LIMIT));
    machine.settle();
    machine.assert_ksmd_idle();
    let scans = machine.scans();
    driver.order(ScanOrder::KICK);
    assert!(driver.wait_idle(LIMIT));
    assert_eq!(machine.scans() - scans, 2, "the rest of the paced scan, and one from the beginning");

    let restored = tenure.restore(LIMIT);
    assert_eq!(restored.deferred, [(Knob::MaxPageSharing, 256)], "{restored:?}");
    assert!(restored.left.is_empty() && restored.failed.is_empty() && restored.pending.is_empty(), "{restored:?}");
    assert_eq!(machine.ksm.counters().unwrap().pages_sharing.0, saved, "what is merged stays merged");
    machine.settle();
    machine.assert_ksmd_idle();
    let after = machine.ksm.knobs().unwrap();
    assert_eq!((after.run, after.pages_to_scan, after.sleep_millisecs), (0, 100, 20));

    // A second tenure remembers the first owner's value.
    let tenure = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default()).unwrap();
    assert_eq!(tenure.restore(LIMIT).deferred, [(Knob::MaxPageSharing, 256)]);
    drop(victim);
    machine.unmerge();
    let restored = put_back_deferred(&machine.ksm, &machine.places).unwrap().unwrap();
    assert_eq!(restored.put_back, [(Knob::MaxPageSharing, 256)]);
    assert_eq!(machine.ksm.knobs().unwrap(), before);
    assert!(!machine.places.state.exists());
}

#[test]
fn a_thorough_scan_merges_what_smart_scan_passes_over() {
    let Some(machine) = Machine::take() else { return };
    if machine.ksm.knobs().unwrap().smart_scan != Some(true) {
        println!("SKIP: this kernel has no smart_scan (Linux 6.7)");
        return;
    }
    let mut victim = Victim::random(32);
    let tenure = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default()).unwrap();
    let driver = Driver::start(&tenure, Ksmd::find().unwrap()).unwrap();
    let kick = |times, thorough| {
        for _ in 0..times {
            driver.order(ScanOrder::Kick { thorough });
            assert!(driver.wait_idle(LIMIT));
        }
        machine.ksm.counters().unwrap().pages_sharing.0
    };
    // Visited so often without a merge that ksmd is to pass over each page eight times.
    assert_eq!(kick(24, false), 0);
    victim.copy();
    let pages = 16 * (1 << 20) / PAGE as u64;
    assert!(kick(2, false) < pages / 100, "two scans with smart_scan");
    assert_eq!(kick(2, true), pages, "and two without");
    assert_eq!(machine.read(Knob::SmartScan), 0);
    kick(1, false);
    assert_eq!(machine.read(Knob::SmartScan), 1);
    let restored = tenure.restore(LIMIT);
    assert!(restored.left.is_empty() && restored.failed.is_empty() && restored.pending.is_empty(), "{restored:?}");
    drop(victim);
    machine.settle();
}

#[test]
fn giving_back_in_the_middle_of_a_scan_is_bounded_and_still_done() {
    let Some(machine) = Machine::take() else { return };
    let _victim = Victim::random(256);
    let tenure = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default()).unwrap();
    let driver = Driver::start(&tenure, Ksmd::find().unwrap()).unwrap();
    driver.order(ScanOrder::KICK);
    assert!(driver.wait_idle(LIMIT));
    driver.order(ScanOrder::KICK);
    std::thread::sleep(Duration::from_millis(20));
    if driver.idle() {
        println!("SKIP: the scan was over before it could be interrupted");
        return;
    }
    let began = Instant::now();
    let restored = tenure.restore(Duration::from_millis(5));
    let waited = began.elapsed();
    println!("restore within 5 ms returned after {} us, pending {:?}", waited.as_micros(), restored.pending);
    assert!(restored.pending.contains(&(Knob::Run, 0)), "{restored:?}");
    // Until the last knob is back the lock is held; then the next may come.
    let lock = Lock::take_within(&machine.places.lock, LIMIT).unwrap();
    println!("everything was back after {} ms", began.elapsed().as_millis());
    let knobs = machine.ksm.knobs().unwrap();
    assert_eq!((knobs.run, knobs.pages_to_scan, knobs.sleep_millisecs, knobs.max_page_sharing), (0, 100, 20, 256));
    assert!(!knobs.use_zero_pages && !machine.places.state.exists());
    drop(lock);
    machine.settle();
    machine.assert_ksmd_idle();
}

#[test]
#[ignore = "not a test: the child of a_killed_tenure_is_put_right"]
fn holder() {
    let Ok(dir) = std::env::var("PAGEFOLD_HOLDER") else { return };
    let places =
        Places { lock: Path::new(&dir).join("lock"), state: Path::new(&dir).join("state.json"), ..Places::default() };
    let tenure = Tenure::take(Arc::new(Ksm::open(Path::new(KSM_ROOT)).unwrap()), &places, &Wishes::default()).unwrap();
    let driver = Driver::start(&tenure, Ksmd::find().unwrap()).unwrap();
    driver.order(ScanOrder::Pace { pages_to_scan: 10, sleep_ms: 30, thorough: false });
    assert!(driver.wait_idle(LIMIT));
    println!("taken");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().lines().count();
}

#[test]
fn a_killed_tenure_is_put_right() {
    let Some(machine) = Machine::take() else { return };
    let before = machine.ksm.knobs().unwrap();
    let mut child = again("holder")
        .env("PAGEFOLD_HOLDER", machine.places.lock.parent().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_line(&mut child, "taken");
    let held = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
    assert!(process_cpu_ns(&held).unwrap() > 0);
    assert_eq!(machine.read(Knob::Run), 1);
    let taken = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default());
    assert!(matches!(taken, Err(TakeError::Locked { pid: Some(pid) }) if pid == held.pid()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(machine.read(Knob::Run), 1, "the kernel does not put it right by itself");
    let lock = Lock::try_take(&machine.places.lock).unwrap();
    let restored = recover(&machine.ksm, &lock, &machine.places).unwrap().unwrap();
    assert!(restored.is_complete() && restored.left.is_empty(), "{restored:?}");
    assert_eq!(machine.ksm.knobs().unwrap(), before);
}

#[test]
fn others_are_noticed() {
    let Some(machine) = Machine::take() else { return };
    machine.write(Knob::Run, 1);
    let taken = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default());
    assert!(matches!(taken, Err(TakeError::InUse(OtherDriver::Running))));
    machine.write(Knob::Run, 0);
    let tenure = Tenure::take(machine.ksm.clone(), &machine.places, &Wishes::default()).unwrap();
    let driver = Driver::start(&tenure, Ksmd::find().unwrap()).unwrap();
    driver.order(ScanOrder::KICK);
    assert!(driver.wait_idle(LIMIT));
    assert_eq!(driver.status().stood_down, None);
    machine.write(Knob::PagesToScan, 123);
    assert!(matches!(tenure.check(), Err(TurnError::Usurped(usurped)) if usurped.theirs == 123));
    driver.order(ScanOrder::KICK);
    assert!(driver.wait_idle(LIMIT));
    assert!(driver.status().stood_down.is_some());
    assert_eq!(tenure.restore(LIMIT).left.len(), 1);
    assert_eq!((machine.read(Knob::PagesToScan), machine.read(Knob::Run)), (123, 0));
}
