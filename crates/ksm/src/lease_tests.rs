//! Tests taking KSM over and restoring it, on copies of KSM's directory.

use super::*;
use crate::{Overridden, fixture};
use pagefold_procmem::process::Process;
use std::process::Command;
use tempfile::TempDir;

struct Stage {
    dir: TempDir,
    paths: KsmPaths,
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(&dir.path().join("ksm"));
        Self { paths: KsmPaths::in_dir(dir.path()), dir }
    }
    fn root(&self) -> PathBuf {
        self.dir.path().join("ksm")
    }
    fn ksm(&self) -> Arc<Ksm> {
        Arc::new(Ksm::open(&self.root()).unwrap())
    }
    fn take(&self) -> Result<KsmLease, TakeError> {
        KsmLease::take(self.ksm(), &self.paths, &[&INITIAL_KNOBS[..], &[(Knob::SmartScan, 0)]].concat())
    }
    fn set(&self, name: &str, value: &str) {
        fixture::set(&self.root(), name, value);
    }
    fn get(&self, name: &str) -> String {
        fixture::get(&self.root(), name)
    }
    fn all(&self) -> Vec<String> {
        Knob::ALL.into_iter().map(|knob| self.get(knob.file_name())).collect()
    }
    fn saved(&self) -> Option<State> {
        State::load(&self.paths.state).unwrap()
    }
    /// Ends a lease, and leaves knobs and state file as a killed run would.
    fn crash(&self, lease: KsmLease) {
        let (knobs, mut kept) = (self.all(), self.saved().unwrap());
        drop(lease);
        let mut child = Command::new("true").spawn().unwrap();
        kept.holder = Some(Holder { pid: i32::try_from(child.id()).unwrap(), start_time_ticks: 1 });
        child.wait().unwrap();
        kept.save(&self.paths.state).unwrap();
        for (knob, value) in Knob::ALL.into_iter().zip(knobs) {
            self.set(knob.file_name(), &value);
        }
    }
}

const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn a_lease_restores_every_knob() {
    let stage = Stage::new();
    let before = stage.all();
    let lease = stage.take().unwrap();
    assert_eq!((stage.get("max_page_sharing"), stage.get("use_zero_pages")), ("4096".into(), "1".into()));
    assert_eq!(stage.get("smart_scan"), "0");
    lease.writer().set(Knob::PagesToScan, 5000).unwrap();
    lease.writer().set(Knob::Run, 1).unwrap();
    lease.check().unwrap();
    let kept = stage.saved().unwrap();
    assert_eq!(kept.original[&Knob::MaxPageSharing], 256);
    assert!(kept.is_ours(Knob::PagesToScan, 5000) && kept.holder.unwrap().is_alive(Path::new("/proc")).unwrap());
    let restored = lease.restore(LIMIT);
    assert!(restored.is_complete(), "{restored:?}");
    assert_eq!(restored.restored.first(), Some(&(Knob::Run, 0)), "ksmd is stopped first");
    assert_eq!(restored.restored.len(), 5);
    assert_eq!(stage.all(), before);
    assert_eq!(stage.saved(), None);
    drop(stage.take().unwrap());
    assert_eq!(stage.all(), before, "dropping restores too");
}

#[test]
fn there_is_one_lease_at_a_time() {
    let stage = Stage::new();
    let lease = stage.take().unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(matches!(stage.take(), Err(TakeError::Lock(LockError::Held { pid: Some(pid) })) if pid == own));
    assert!(lease.restore(LIMIT).is_complete());
    drop(stage.take().unwrap());
}

#[test]
fn ksm_in_use_is_left_alone() {
    for (name, value, by) in [
        ("run", "1", OtherDriver::Running),
        ("advisor_mode", "none [scan-time]", OtherDriver::Advisor { mode: "scan-time".into() }),
    ] {
        let stage = Stage::new();
        stage.set(name, value);
        let before = stage.all();
        assert!(matches!(stage.take(), Err(TakeError::InUse(other)) if other == by));
        assert_eq!(stage.all(), before);
        assert_eq!(stage.saved(), None);
    }
    let mut stage = Stage::new();
    stage.paths.proc_root = stage.dir.path().join("proc");
    let at = stage.paths.proc_root.join("77");
    std::fs::create_dir_all(&at).unwrap();
    std::fs::write(at.join("stat"), "77 (ksmtuned) S 1 0 0 0 -1 0 0 0 0 0 3 4 0 0 25 5 1 0 9 0 0\n").unwrap();
    let status = "Tgid:\t77\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapPrm:\t0\n";
    std::fs::write(at.join("status"), status).unwrap();
    let by = other_driver(&stage.ksm(), &stage.paths.proc_root).unwrap();
    assert_eq!(by, Some(OtherDriver::Program { name: "ksmtuned".into(), pid: 77 }));
}

#[test]
fn a_knob_that_another_program_changed_is_left_alone() {
    let stage = Stage::new();
    let lease = stage.take().unwrap();
    lease.writer().set(Knob::PagesToScan, 5000).unwrap();
    stage.set("pages_to_scan", "777");
    let overridden = Overridden { knob: Knob::PagesToScan, ours: 5000, found: 777 };
    assert!(matches!(lease.check(), Err(KnobError::Overridden(found)) if found == overridden));
    assert!(matches!(lease.writer().set(Knob::Run, 1), Err(KnobError::Overridden(_))), "no other knob is set either");
    stage.set("pages_to_scan", "5000");
    assert!(lease.check().is_err(), "an overridden lease stays overridden");
    stage.set("pages_to_scan", "777");
    let restored = lease.restore(LIMIT);
    assert_eq!(restored.overridden, [overridden]);
    assert!(restored.is_complete());
    assert_eq!((stage.get("pages_to_scan"), stage.get("max_page_sharing")), ("777".into(), "256".into()));
    assert_eq!(stage.saved(), None);
}

#[test]
fn a_ksmd_that_another_program_started_keeps_running() {
    let stage = Stage::new();
    let lease = stage.take().unwrap();
    stage.set("run", "1");
    assert!(matches!(lease.check(), Err(KnobError::Overridden(Overridden { knob: Knob::Run, ours: 0, found: 1 }))));
    assert!(lease.restore(LIMIT).is_complete());
    assert_eq!(stage.get("run"), "1");
}

#[test]
fn the_next_run_restores_what_a_crashed_run_changed() {
    let stage = Stage::new();
    let before = stage.all();
    let lease = stage.take().unwrap();
    lease.writer().set(Knob::SleepMillisecs, (1 << 31) + 5).unwrap();
    lease.writer().set(Knob::Run, 1).unwrap();
    stage.crash(lease);
    assert_ne!(stage.all(), before);
    stage.set("sleep_millisecs", &((1_u64 << 31) + 99).to_string()); // a kick, which is not recorded
    let lease = stage.take().unwrap();
    assert_eq!(stage.saved().unwrap().original[&Knob::MaxPageSharing], 256);
    drop(lease);
    assert_eq!(stage.all(), before);
}

#[test]
fn recovery_leaves_what_was_changed_since_the_crash() {
    let stage = Stage::new();
    let lease = stage.take().unwrap();
    lease.writer().set(Knob::PagesToScan, 5000).unwrap();
    stage.crash(lease);
    stage.set("pages_to_scan", "777");
    let restored = restore_deferred(&stage.ksm(), &stage.paths).unwrap().unwrap();
    assert_eq!(restored.overridden.len(), 1);
    assert_eq!((stage.get("pages_to_scan"), stage.get("use_zero_pages")), ("777".into(), "0".into()));
    assert!(restore_deferred(&stage.ksm(), &stage.paths).unwrap().is_none());
}

#[test]
fn a_state_of_another_boot_is_ignored() {
    let stage = Stage::new();
    stage.crash(stage.take().unwrap());
    let mut kept = stage.saved().unwrap();
    kept.boot_id = "an earlier one".into();
    kept.save(&stage.paths.state).unwrap();
    let changed = stage.all();
    assert!(restore_deferred(&stage.ksm(), &stage.paths).unwrap().is_none());
    assert_eq!((stage.all(), stage.saved()), (changed, None));
}

#[test]
fn a_living_holder_with_another_lock_is_respected() {
    let stage = Stage::new();
    stage.crash(stage.take().unwrap());
    let child = pagefold_testkit::OwnedChild(Command::new("sleep").arg("60").spawn().unwrap());
    let pid = child.pid();
    let start_time_ticks = Process::open(pid).unwrap().start_time_ticks();
    let mut kept = stage.saved().unwrap();
    kept.holder = Some(Holder { pid, start_time_ticks });
    kept.save(&stage.paths.state).unwrap();
    let taken = stage.take();
    drop(child);
    assert!(matches!(taken, Err(TakeError::Busy { pid: busy }) if busy == pid));
    drop(stage.take().unwrap());
}

#[test]
fn what_had_to_be_deferred_keeps_its_first_value() {
    let stage = Stage::new();
    let lease = stage.take().unwrap();
    // We need a knob that can't be written. A copy of KSM's directory can't return EBUSY as the kernel does, so we use
    // a folder.
    let file = stage.root().join("max_page_sharing");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let restored = lease.restore(LIMIT);
    assert_eq!(restored.failed.len(), 1, "{restored:?}");
    assert_eq!(restored.failed[0].0, Knob::MaxPageSharing);
    std::fs::remove_dir(&file).unwrap();
    stage.set("max_page_sharing", "4096");
    let kept = stage.saved().unwrap();
    assert_eq!((kept.holder, kept.turned.len()), (None, 1));
    assert_eq!(restore_deferred(&stage.ksm(), &stage.paths).unwrap().unwrap().restored, [(Knob::MaxPageSharing, 256)]);
    assert_eq!((stage.get("max_page_sharing"), stage.saved()), ("256".into(), None));
}

#[test]
fn no_knob_is_set_that_cannot_be_recorded() {
    let mut stage = Stage::new();
    std::fs::write(stage.dir.path().join("file"), "").unwrap();
    stage.paths.state = stage.dir.path().join("file/ksm-state.json");
    let before = stage.all();
    assert!(matches!(stage.take(), Err(TakeError::State(_))));
    assert_eq!(stage.all(), before);
}

#[test]
fn a_malformed_state_is_an_error_with_its_path() {
    let stage = Stage::new();
    std::fs::create_dir_all(stage.paths.state.parent().unwrap()).unwrap();
    std::fs::write(&stage.paths.state, "{").unwrap();
    let error = stage.take().unwrap_err();
    assert!(matches!(error, TakeError::State(StateError::Malformed { .. })));
    assert!(error.to_string().contains("ksm-state.json"));
}

#[test]
fn a_stopped_and_unmerged_ksm_is_not_unmerged_again() {
    let stage = Stage::new();
    stage.set("run", "2");
    let lease = stage.take().unwrap();
    lease.writer().set(Knob::Run, 1).unwrap();
    assert_eq!(lease.restore(LIMIT).restored.first(), Some(&(Knob::Run, 0)));
}

#[test]
fn knobs_that_an_older_kernel_lacks_are_unavailable() {
    let stage = Stage::new();
    std::fs::remove_file(stage.root().join("smart_scan")).unwrap();
    let lease = stage.take().unwrap();
    assert_eq!(lease.unavailable(), [(Knob::SmartScan, 0)]);
    assert!(lease.restore(LIMIT).is_complete());
}
