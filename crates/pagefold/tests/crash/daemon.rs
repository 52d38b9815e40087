//! Runs of the program with a fault injected, and assertions on what they leave.

use super::*;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time limit of everything that is tested here.
const LIMIT: Duration = Duration::from_secs(60);

/// A run of the program. Killed when dropped.
pub struct Faulty {
    child: Child,
    output: File,
    errors: File,
    faults: tempfile::NamedTempFile,
}

/// The result of a run.
#[derive(Debug)]
pub struct Left {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub output: String,
    pub errors: String,
    /// The faults that were injected.
    pub faults: String,
}

impl Faulty {
    /// `pagefold run` on these processes.
    pub fn run(pids: &[i32], options: &[&str], fault: &str) -> Self {
        Self::start(&with_pids(&["run"], pids, options), fault)
    }

    pub fn start(args: &[impl AsRef<std::ffi::OsStr>], fault: &str) -> Self {
        Self::command(Command::new(program()).args(args), fault)
    }

    pub fn command(command: &mut Command, fault: &str) -> Self {
        let (output, errors) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let faults = tempfile::NamedTempFile::new().unwrap();
        let child = command
            .env(fault::VARIABLE, fault)
            .env(fault::SEEN_VARIABLE, faults.path())
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(errors.try_clone().unwrap())
            .spawn()
            .unwrap();
        Self { child, output, errors, faults }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(self) -> Left {
        self.end_within(LIMIT)
    }

    #[track_caller]
    pub fn end_within(mut self, limit: Duration) -> Left {
        let end = Instant::now() + limit;
        let status: ExitStatus = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "it has not ended within {limit:?}: {}", text(&mut self.errors));
            std::thread::sleep(Duration::from_millis(2));
        };
        Left {
            code: status.code(),
            signal: status.signal(),
            output: text(&mut self.output),
            errors: text(&mut self.errors),
            faults: fs::read_to_string(self.faults.path()).unwrap(),
        }
    }

    /// It is killed by its fault: a point that is never reached is not tested.
    #[track_caller]
    pub fn assert_killed(self, point: &str) {
        let left = self.end();
        assert_eq!(left.signal, Some(libc::SIGKILL), "{point} was never reached: {left:?}");
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn text(file: &mut File) -> String {
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

const KNOBS: [&str; 7] = [
    "run",
    "pages_to_scan",
    "sleep_millisecs",
    "max_page_sharing",
    "use_zero_pages",
    "merge_across_nodes",
    "smart_scan",
];

pub fn knobs() -> Vec<(&'static str, u64)> {
    KNOBS
        .iter()
        .filter(|knob| Path::new("/sys/kernel/mm/ksm").join(knob).exists())
        .map(|&knob| (knob, number(knob)))
        .collect()
}

/// The state file has the original value of every changed knob, and the lock is free: the next start can restore them.
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
    let lock = pagefold_linux::ksm::lock::holder(Path::new(pagefold_linux::ksm::lock::LOCK_PATH)).unwrap();
    assert_eq!(lock, None);
}

/// The tenants are not stopped, not traced, and every byte is right.
#[track_caller]
pub fn assert_unharmed(tenants: &mut [Tenant]) {
    for tenant in tenants.iter() {
        let pid = tenant.pid();
        // The injector may be about to release it.
        wait_until("it is not traced", || {
            fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("TracerPid:\t0\n")
        });
        wait_until("it is not stopped", || matches!(state(pid), b'S' | b'R'));
    }
    assert_intact(tenants);
}

/// All injectors of this program end.
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
