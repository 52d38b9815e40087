//! Tests the controller with a thread that reacts to kicks as ksmd does, on a copy of KSM's directory.

use super::*;
use crate::lease::{INITIAL_KNOBS, KsmPaths};
use crate::scan::WHOLE_SCAN;
use crate::{Ksm, fixture};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use tempfile::TempDir;

/// What the simulated ksmd should do, and how many scans it has made.
#[derive(Default)]
struct Behaviour {
    quit: AtomicBool,
    /// How many kicks it should lose.
    lost: AtomicU32,
    /// How long a scan should take.
    scan_ms: AtomicU32,
    scans: AtomicU32,
}

struct Stage {
    dir: TempDir,
    lease: Option<KsmLease>,
    behaviour: Arc<Behaviour>,
    ksmd: Option<JoinHandle<()>>,
}

impl Stage {
    fn new(scanned: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("ksm");
        fixture::fresh(&root);
        fixture::set(&root, "pages_scanned", scanned);
        fixture::set(&root, "full_scans", "00000000");
        let paths = KsmPaths::in_dir(dir.path());
        set_state(&dir, 'S');
        let lease = KsmLease::take(Arc::new(Ksm::open(&root).unwrap()), &paths, &INITIAL_KNOBS).unwrap();
        let behaviour = Arc::new(Behaviour::default());
        let ksmd = {
            let (behaviour, path) = (behaviour.clone(), dir.path().to_owned());
            std::thread::spawn(move || simulate(&path, &behaviour))
        };
        Self { dir, lease: Some(lease), behaviour, ksmd: Some(ksmd) }
    }
    fn controller(&self) -> KsmdController {
        let ksmd = Ksmd::find_at(&self.dir.path().join("proc")).unwrap();
        assert!(ksmd.is_some());
        KsmdController::start(self.lease.as_ref().unwrap(), ksmd).unwrap()
    }
    fn get(&self, name: &str) -> String {
        fixture::get(&self.dir.path().join("ksm"), name)
    }
    fn scans(&self) -> u32 {
        self.behaviour.scans.load(Ordering::SeqCst)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        drop(self.lease.take());
        self.behaviour.quit.store(true, Ordering::SeqCst);
        drop(self.ksmd.take().map(JoinHandle::join));
    }
}

fn set_state(dir: &TempDir, state: char) {
    let at = dir.path().join("proc/31");
    std::fs::create_dir_all(&at).unwrap();
    write_state(&at.join("stat"), state);
}

fn write_state(path: &PathBuf, state: char) {
    let text = format!("31 (ksmd) {state} 2 0 0 0 -1 2097216 0 0 0 0 3 4 0 0 25 5 1 0 9 0 0\n");
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    file.write_all_at(text.as_bytes(), 0).unwrap();
}

/// Simulates ksmd: waits until `sleep_millisecs` changes while `run` is 1, or `run` becomes 1. If `pages_to_scan` is
/// endless, it then makes a scan.
fn simulate(dir: &std::path::Path, behaviour: &Behaviour) {
    // We read a file again if its writer has just truncated it.
    let knob = |name: &str| -> u64 {
        loop {
            if let Ok(value) = fixture::get(&dir.join("ksm"), name).parse() {
                return value;
            }
        }
    };
    let stat = dir.join("proc/31/stat");
    let counter = OpenOptions::new().write(true).open(dir.join("ksm/full_scans")).unwrap();
    let mut slept_with = knob("sleep_millisecs");
    let mut ran = false;
    while !behaviour.quit.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_micros(200));
        let runs = knob("run") == 1;
        let kicked = runs && (!ran || knob("sleep_millisecs") != slept_with);
        ran = runs;
        if !kicked {
            continue;
        }
        let lost = behaviour.lost.load(Ordering::SeqCst);
        if lost > 0 {
            behaviour.lost.store(lost - 1, Ordering::SeqCst);
        } else if knob("pages_to_scan") == WHOLE_SCAN {
            write_state(&stat, 'R');
            std::thread::sleep(Duration::from_millis(behaviour.scan_ms.load(Ordering::SeqCst).into()));
            let scans = behaviour.scans.fetch_add(1, Ordering::SeqCst) + 1;
            counter.write_all_at(format!("{scans:08}").as_bytes(), 0).unwrap();
        }
        slept_with = knob("sleep_millisecs");
        write_state(&stat, 'S');
    }
}

const LIMIT: Duration = Duration::from_secs(30);

/// Gives an order and waits until it's done.
#[track_caller]
fn order(controller: &KsmdController, order: ScanOrder) {
    controller.order(order);
    assert!(controller.wait_idle(LIMIT));
}

#[test]
fn the_first_kick_after_unknown_scanning_is_two() {
    let stage = Stage::new("12345");
    let controller = stage.controller();
    order(&controller, ScanOrder::KICK);
    assert_eq!(stage.scans(), 2, "one to finish the scan under way, one from the beginning");
    order(&controller, ScanOrder::KICK);
    assert_eq!(stage.scans(), 3);
}

#[test]
fn a_lost_kick_is_repeated() {
    let stage = Stage::new("0");
    let controller = stage.controller();
    stage.behaviour.lost.store(1, Ordering::SeqCst);
    order(&controller, ScanOrder::KICK);
    assert_eq!(stage.scans(), 1);
    assert_eq!(stage.behaviour.lost.load(Ordering::SeqCst), 0);
}

#[test]
fn with_nothing_registered_a_kick_ends_empty() {
    let stage = Stage::new("0");
    let controller = stage.controller();
    stage.behaviour.lost.store(100, Ordering::SeqCst);
    order(&controller, ScanOrder::KICK);
    assert_eq!(controller.status().stood_down, None);
    assert_eq!(stage.scans(), 0);
}

#[test]
fn orders_do_not_wait_and_the_latest_wins() {
    let stage = Stage::new("0");
    stage.behaviour.scan_ms.store(1500, Ordering::SeqCst);
    let controller = stage.controller();
    controller.order(ScanOrder::KICK);
    let end = Instant::now() + LIMIT;
    while stage.get("run") != "1" {
        assert!(Instant::now() < end);
    }
    let before = Instant::now();
    controller.order(ScanOrder::KICK);
    controller.order(ScanOrder::Pace { pages_to_scan: 700, sleep_ms: 40, thorough: false });
    assert!(before.elapsed() < Duration::from_secs(1), "an order does not wait for the scan");
    assert!(!controller.idle());
    assert!(controller.wait_idle(LIMIT));
    assert_eq!(stage.scans(), 1, "the second kick was replaced");
    assert_eq!((stage.get("pages_to_scan"), stage.get("sleep_millisecs")), ("700".into(), "40".into()));
    order(&controller, ScanOrder::Rest);
    assert_eq!(stage.get("pages_to_scan"), "0");
    assert!(stage.get("sleep_millisecs").parse::<u64>().unwrap() >= ENDLESS_SLEEP);
}

#[test]
fn resting_before_the_first_scan_changes_nothing() {
    let stage = Stage::new("0");
    let controller = stage.controller();
    order(&controller, ScanOrder::Rest);
    assert_eq!((stage.get("run"), stage.get("pages_to_scan")), ("0".into(), "100".into()));
    controller.order(ScanOrder::Keep);
    assert!(controller.idle());
}
