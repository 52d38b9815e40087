//! Tests how ksmd behaves on the running kernel, and our control of KSM from taking it over to giving it back.

use pagefold_engine::host::ScanOrder;
use pagefold_ksm::controller::KsmdController;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::{INITIAL_KNOBS, KsmLease, KsmPaths, TakeError, restore_deferred};
use pagefold_ksm::lock::Lock;
use pagefold_ksm::{KSM_ROOT, Knob, Ksm, RestoreOutcome};
use pagefold_testkit::{Holder, KsmAtRest, PAGES_PER_MIB, skip_unsupported, wait_until};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const WHOLE_SCAN: u64 = u32::MAX as u64;
const ENDLESS: u64 = 1 << 31;

/// KSM, and lock and state file for the test's own leases.
struct Fixture {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    paths: KsmPaths,
    _dir: tempfile::TempDir,
    _at_rest: KsmAtRest,
}

impl Fixture {
    fn take() -> Option<Self> {
        let at_rest = KsmAtRest::take()?;
        let ksm = Arc::new(Ksm::open(Path::new(KSM_ROOT)).unwrap());
        let Some(ksmd) = Ksmd::find().unwrap() else {
            skip_unsupported("ksmd is not visible: this is a PID namespace");
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        Some(Self { ksm, ksmd, paths: KsmPaths::in_dir(dir.path()), _dir: dir, _at_rest: at_rest })
    }

    fn take_lease(&self) -> Result<KsmLease, TakeError> {
        KsmLease::take(self.ksm.clone(), &self.paths, &INITIAL_KNOBS)
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

    /// Gives ksmd time to react, then waits until it rests.
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

    /// How many full scans `action` causes.
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

fn controller(lease: &KsmLease) -> KsmdController {
    KsmdController::start(lease, Ksmd::find().unwrap()).unwrap()
}

/// Gives an order and waits until it's done.
#[track_caller]
fn order(controller: &KsmdController, order: ScanOrder) {
    controller.order(order);
    assert!(controller.wait_idle(LIMIT));
}

/// Checks that every knob is restored, or can't be while pages are merged.
#[track_caller]
fn assert_restored(restored: &RestoreOutcome) {
    let RestoreOutcome { overridden, failed, pending, .. } = restored;
    assert!(overridden.is_empty() && failed.is_empty() && pending.is_empty(), "{restored:?}");
}

#[test]
fn ksmd_behaves_as_the_controller_assumes() {
    let Some(fixture) = Fixture::take() else { return };
    let mut sleep = ENDLESS;
    let mut kick = || {
        sleep += 1;
        fixture.write(Knob::SleepMillisecs, sleep);
    };
    let victim = Holder::random(64 * PAGES_PER_MIB);
    fixture.write(Knob::PagesToScan, WHOLE_SCAN);
    kick();
    assert_eq!(fixture.scans_by(|| fixture.write(Knob::Run, 1)), 1, "run 1 wakes a stopped ksmd");
    for _ in 0..3 {
        assert_eq!(fixture.scans_by(&mut kick), 1, "a kick is one scan");
    }
    assert_eq!(fixture.scans_by(|| fixture.write(Knob::Run, 1)), 0, "run 1 again does not wake it");
    let same = fixture.read(Knob::SleepMillisecs);
    assert_eq!(fixture.scans_by(|| fixture.write(Knob::SleepMillisecs, same)), 0, "nor does the same sleep again");
    let end = Instant::now() + LIMIT;
    loop {
        let before = fixture.scans();
        let mut is_during_scan = false;
        let scans = fixture.scans_by(|| {
            kick();
            while fixture.ksmd.rests().unwrap() {
                assert!(Instant::now() < end);
            }
            kick();
            // On a busy machine the scan may already have ended.
            is_during_scan = fixture.scans() == before;
        });
        if is_during_scan {
            assert_eq!(scans, 1, "a kick during a scan is lost");
            break;
        }
    }

    // Paced scanning stops at an empty batch. The next kick completes the scan that it had begun.
    fixture.write(Knob::PagesToScan, 300);
    fixture.write(Knob::SleepMillisecs, 5);
    std::thread::sleep(Duration::from_millis(60));
    fixture.write(Knob::PagesToScan, 0);
    kick();
    fixture.settle();
    let paced = fixture.ksm.pages_scanned().unwrap();
    fixture.assert_ksmd_idle();
    assert_eq!(fixture.ksm.pages_scanned().unwrap(), paced);

    // After run 0 during an endless sleep, run 1 doesn't end the sleep, but a new sleep does.
    fixture.write(Knob::PagesToScan, WHOLE_SCAN);
    kick();
    fixture.settle();
    fixture.write(Knob::Run, 0);
    assert_eq!(fixture.scans_by(|| fixture.write(Knob::Run, 1)), 0);
    assert_eq!(fixture.scans_by(&mut kick), 1);

    // Nothing registered: kicks have no effect, but the first mark wakes ksmd, unless its batch is empty.
    drop(victim);
    assert_eq!(fixture.scans_by(&mut kick), 1, "the scan that drops the process that ended");
    assert_eq!(fixture.scans_by(&mut kick), 0);
    let mut victims = Vec::new();
    assert_eq!(fixture.scans_by(|| victims.push(Holder::random(4 * PAGES_PER_MIB))), 1, "a scan without an order");
    victims.clear();
    assert_eq!(fixture.scans_by(&mut kick), 1);
    assert_eq!(fixture.scans_by(&mut kick), 0);
    fixture.write(Knob::PagesToScan, 0);
    assert_eq!(fixture.scans_by(|| victims.push(Holder::random(4 * PAGES_PER_MIB))), 0);
}

#[test]
fn run_0_takes_effect_even_if_its_writer_is_killed_while_it_waits() {
    let Some(fixture) = Fixture::take() else { return };
    let _victim = Holder::random(256 * PAGES_PER_MIB);
    fixture.write(Knob::PagesToScan, WHOLE_SCAN);
    fixture.write(Knob::SleepMillisecs, ENDLESS);
    fixture.write(Knob::Run, 1);
    fixture.settle();
    // We repeat this, because on a busy machine the scan can end before the writer begins to wait.
    for attempt in 1..=20 {
        // With this many pages, ksmd's second visit takes long enough.
        fixture.write(Knob::SleepMillisecs, ENDLESS + attempt);
        std::thread::sleep(Duration::from_millis(10));
        let scans = fixture.scans();
        let mut writer = Command::new("sh").args(["-c", &format!("echo 0 > {KSM_ROOT}/run")]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let waited = fixture.read(Knob::Run) == 1 && writer.try_wait().unwrap().is_none();
        writer.kill().unwrap();
        writer.wait().unwrap();
        if waited && fixture.read(Knob::Run) == 0 {
            fixture.settle();
            assert_eq!((fixture.read(Knob::Run), fixture.scans()), (0, scans + 1));
            return;
        }
        fixture.settle();
        fixture.write(Knob::Run, 1);
        fixture.settle();
    }
    panic!("no writer was killed while it waited for ksmd");
}

#[test]
fn a_lease_merges_rests_and_restores() {
    let Some(fixture) = Fixture::take() else { return };
    let victim = Holder::duplicated(64 * PAGES_PER_MIB);
    let before = fixture.ksm.knobs().unwrap();
    let lease = fixture.take_lease().unwrap();
    assert!(lease.unavailable().is_empty());
    assert_eq!(fixture.read(Knob::MaxPageSharing), 4096);
    let controller = controller(&lease);
    order(&controller, ScanOrder::KICK);
    for _ in 0..3 {
        let scans = fixture.scans();
        order(&controller, ScanOrder::KICK);
        assert_eq!(fixture.scans() - scans, 1, "one kick, one scan");
    }
    let saved = fixture.ksm.counters().unwrap().pages_sharing.0;
    assert_eq!(saved, 32 * PAGES_PER_MIB, "every second page is saved");
    assert_eq!(controller.status().stood_down, None);
    fixture.assert_ksmd_idle();
    lease.check().unwrap();

    order(&controller, ScanOrder::Pace { pages_to_scan: 500, sleep_ms: 10, thorough: false });
    let scanned = fixture.ksm.pages_scanned().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(fixture.ksm.pages_scanned().unwrap() > scanned + 1000);
    order(&controller, ScanOrder::Rest);
    fixture.settle();
    fixture.assert_ksmd_idle();
    let scans = fixture.scans();
    order(&controller, ScanOrder::KICK);
    assert_eq!(fixture.scans() - scans, 2, "the rest of the paced scan, and one from the beginning");

    let restored = lease.restore(LIMIT);
    assert_eq!(restored.deferred, [(Knob::MaxPageSharing, 256)], "{restored:?}");
    assert_restored(&restored);
    assert_eq!(fixture.ksm.counters().unwrap().pages_sharing.0, saved, "what is merged stays merged");
    fixture.settle();
    fixture.assert_ksmd_idle();
    let after = fixture.ksm.knobs().unwrap();
    assert_eq!((after.run, after.pages_to_scan, after.sleep_millisecs), (0, 100, 20));

    // A second lease still knows the original value.
    let lease = fixture.take_lease().unwrap();
    assert_eq!(lease.restore(LIMIT).deferred, [(Knob::MaxPageSharing, 256)]);
    drop(victim);
    fixture.unmerge();
    let restored = restore_deferred(&fixture.ksm, &fixture.paths).unwrap().unwrap();
    assert_eq!(restored.restored, [(Knob::MaxPageSharing, 256)]);
    assert_eq!(fixture.ksm.knobs().unwrap(), before);
    assert!(!fixture.paths.state.exists());
}

#[test]
fn a_thorough_scan_merges_what_smart_scan_skips() {
    let Some(fixture) = Fixture::take() else { return };
    if fixture.ksm.knobs().unwrap().smart_scan != Some(true) {
        return skip_unsupported("this kernel has no smart_scan (Linux 6.7)");
    }
    let mut victim = Holder::random(32 * PAGES_PER_MIB);
    let lease = fixture.take_lease().unwrap();
    let controller = controller(&lease);
    let kick = |times, thorough| {
        for _ in 0..times {
            order(&controller, ScanOrder::Kick { thorough });
        }
        fixture.ksm.counters().unwrap().pages_sharing.0
    };
    // After 24 visits without a merge, ksmd skips each page eight times.
    assert_eq!(kick(24, false), 0);
    victim.duplicate();
    let pages = 16 * PAGES_PER_MIB;
    assert!(kick(2, false) < pages / 100, "two scans with smart_scan");
    assert_eq!(kick(2, true), pages, "and two without");
    assert_eq!(fixture.read(Knob::SmartScan), 0);
    kick(1, false);
    assert_eq!(fixture.read(Knob::SmartScan), 1);
    let restored = lease.restore(LIMIT);
    assert_restored(&restored);
    drop(victim);
    fixture.settle();
}

#[test]
fn restoring_during_a_scan_returns_within_its_limit_and_is_completed() {
    let Some(fixture) = Fixture::take() else { return };
    let _victim = Holder::random(256 * PAGES_PER_MIB);
    let lease = fixture.take_lease().unwrap();
    let controller = controller(&lease);
    order(&controller, ScanOrder::KICK);
    let is_scanning = (0..20).any(|_| {
        controller.order(ScanOrder::KICK);
        std::thread::sleep(Duration::from_millis(20));
        !controller.idle()
    });
    assert!(is_scanning, "every scan ended within 20 ms");
    let began = Instant::now();
    let restored = lease.restore(Duration::from_millis(5));
    let waited = began.elapsed();
    println!("restore within 5 ms returned after {} us, pending {:?}", waited.as_micros(), restored.pending);
    assert!(restored.pending.contains(&(Knob::Run, 0)), "{restored:?}");
    // The thread keeps the lock until the last knob is restored.
    wait_until("the lock is released", || Lock::try_take(&fixture.paths.lock).is_ok());
    println!("everything was back after {} ms", began.elapsed().as_millis());
    let knobs = fixture.ksm.knobs().unwrap();
    assert_eq!((knobs.run, knobs.pages_to_scan, knobs.sleep_millisecs, knobs.max_page_sharing), (0, 100, 20, 256));
    assert!(!knobs.use_zero_pages && !fixture.paths.state.exists());
    assert!(controller.wait_idle(LIMIT));
    assert_eq!(controller.status().stood_down, None);
    fixture.settle();
    fixture.assert_ksmd_idle();
}
