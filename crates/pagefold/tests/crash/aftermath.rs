//! Assertions about the state that a run with a fault leaves behind.

use super::*;
pub use pagefold_testkit::ksm::knobs;
use serde_json::Value;
use std::fs;

/// The state file has the original value of every changed knob, and the lock is free, so the next start can restore
/// them.
#[track_caller]
pub fn assert_recoverable(before: &[(&str, u64)]) {
    let changed: Vec<_> = before.iter().filter(|(knob, value)| number(knob) != *value).collect();
    if !changed.is_empty() {
        let state: Value = serde_json::from_slice(&fs::read(STATE_FILE).expect("a state file")).unwrap();
        for (knob, value) in changed {
            assert_eq!(state["original"][knob], *value, "{state}");
            assert!(state["turned"][knob].is_array(), "{knob} in {state}");
        }
    }
    let lock = pagefold_ksm::lock::holder(Path::new(pagefold_ksm::lock::LOCK_PATH)).unwrap();
    assert_eq!(lock, None);
}

/// The holders are not stopped, not traced, and every byte is right.
#[track_caller]
pub fn assert_unharmed(holders: &mut [Holder]) {
    for holder in holders.iter() {
        let pid = holder.pid();
        // The injector may just be about to release the holder.
        wait_until("it is not traced", || {
            fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("TracerPid:\t0\n")
        });
        wait_until("it is not stopped", || matches!(state(pid), b'S' | b'R'));
    }
    assert_intact(holders);
}

/// Waits until all injectors of this program have ended.
#[track_caller]
pub fn assert_injectors_ended() {
    wait_until("the injector ends by itself", || {
        fs::read_dir("/proc").unwrap().all(|entry| {
            let path = entry.unwrap().path();
            let ours = fs::read_link(path.join("exe")).is_ok_and(|exe| exe == program());
            !ours
                || !fs::read(path.join("cmdline"))
                    .is_ok_and(|line| line.split(|&byte| byte == 0).nth(1) == Some(b"injector"))
        })
    });
}
