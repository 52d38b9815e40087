//! If owners have opted out of merging, only `--override-opt-out` lets their memory be merged.

use pagefold_testkit::*;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const PAGES: u64 = 8 * PAGES_PER_MIB;
/// The daemon rereads files after ten seconds and looks at processes every two seconds. We add time for a busy machine.
const SOON: Duration = Duration::from_secs(25);

/// A process with the same contents as all others of the test.
fn holder() -> Holder {
    Holder::with(PAGES, 0x0917_0001)
}

/// A process that runs a program of this name, with these arguments.
fn shell_as(program: &Path, arguments: &[&str]) -> Script {
    let mut script = Script::of(Command::new(program).args(["-c", "echo ready; read line", "sh"]).args(arguments));
    assert_eq!(script.line(), "ready");
    script
}

#[test]
fn a_machine_that_is_not_to_be_merged_is_left_alone() {
    if !is_root() {
        return skip("needs root");
    }
    let qemu = ProgramCopy::of(Path::new("/bin/sh"), "qemu-system-x86_64");
    let says_no = shell_as(&qemu, &["-machine", "q35,mem-merge=off", "-m", "1G"]);
    let says_yes = shell_as(&qemu, &["-machine", "q35,mem-merge=off", "-M", "mem-merge=on"]);
    let other = shell_as(Path::new("/bin/sh"), &["-machine", "q35,mem-merge=off"]);
    let (no, yes, other) = (says_no.pid().to_string(), says_yes.pid().to_string(), other.pid().to_string());
    let reason = "its command line has -machine mem-merge=off";
    assert_fails(&["scan", "--pid", &no], 6, reason);
    succeed(&["scan", "--pid", &yes]);
    succeed(&["scan", "--pid", &other]);
    let both = json_of(&["scan", "--pid", &no, "--pid", &yes]);
    let left_out = |pid: &str| &row(&both["processes"], "pid", pid.parse::<i32>().unwrap())["left_out"];
    assert!(left_out(&no) == reason && left_out(&yes).is_null(), "{both}");
    assert_eq!(both["excluded"].as_array().unwrap().iter().filter(|row| row["reason"] == reason).count(), 1, "{both}");
    // Overriding by name works for a program that only root can change.
    succeed(&["scan", "--pid", &no, "--override-opt-out", "qemu-system-x86_64"]);
    fs::set_permissions(qemu.parent().unwrap(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    assert_fails(&["scan", "--pid", &no, "--override-opt-out", "qemu-system-x86_64"], 6, reason);
    assert_fails(&["scan", "--pid", &no, "--override-opt-out", ""], 2, "--override-opt-out");
}

/// The cgroup of a systemd unit, and its file. Both are removed when dropped.
struct Unit {
    name: String,
    cgroup: PathBuf,
    file: PathBuf,
    /// Directories that we made for the cgroup and the file, the innermost first.
    made: Vec<PathBuf>,
}

impl Unit {
    /// A unit without a file. `None` if version 2 of control groups isn't mounted.
    fn create() -> Option<Self> {
        let root = Cgroup::create("unified")?.path().parent()?.to_owned();
        let name = format!("pagefold-test-{}.service", std::process::id());
        let (slice, transient) = (root.join("system.slice"), PathBuf::from("/run/systemd/transient"));
        let made = [&transient, Path::new("/run/systemd"), &slice].into_iter().filter(|path| !path.exists());
        let made = made.map(Path::to_owned).collect();
        let unit = Self { cgroup: slice.join(&name), file: transient.join(&name), name, made };
        fs::create_dir_all(&unit.cgroup).unwrap();
        fs::create_dir_all(&transient).unwrap();
        Some(unit)
    }

    fn write(&self, setting: &str) {
        fs::write(&self.file, format!("[Service]\nType=simple\n{setting}\n")).unwrap();
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
        let members = fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default();
        let root = self.cgroup.parent().and_then(Path::parent).unwrap().join("cgroup.procs");
        members.lines().for_each(|pid| drop(fs::write(&root, pid)));
        let end = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.cgroup).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.made.iter().for_each(|path| drop(fs::remove_dir(path)));
    }
}

#[test]
fn a_unit_that_opts_out_after_it_was_marked_is_unmarked_and_can_be_overridden() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(unit) = Unit::create() else { return skip_unsupported("version 2 of control groups is not mounted") };
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    let qemu = ProgramCopy::of(Path::new("/bin/sh"), "kvm");
    let machine = shell_as(&qemu, &["-object", "memory-backend-ram,id=ram,merge=off"]);
    let (mut one, mut other, mut member) = (holder(), holder(), holder());
    fs::write(unit.cgroup.join("cgroup.procs"), member.pid().to_string()).unwrap();
    unit.write("MemoryKSM=yes");
    let pids = [one.pid(), other.pid(), member.pid(), machine.pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full"]);
    wait_until_merged(&pids[..3], 7 * MIB);
    let left_alone = |pid: i32| row(&status()["processes"], "pid", pid)["left_alone"].clone();
    assert_eq!(left_alone(machine.pid()), "its command line has -object merge=off");
    assert!(left_alone(member.pid()).is_null());
    unit.write("MemoryKSM=no");
    wait_until_unmarked(member.pid(), SOON, "marked");
    let reason = format!("its unit {} has MemoryKSM=no ({})", unit.name, unit.file.display());
    assert_eq!(left_alone(member.pid()), reason);
    assert_has(&succeed(&["status"]), &["MemoryKSM=no"]);
    assert_has(&succeed(&["explain", &member.pid().to_string()]), &["MemoryKSM=no"]);
    assert!(are_merged(&pids[..2], 7 * MIB), "the others stay merged");
    assert!(one.is_intact() && other.is_intact() && member.is_intact());
    let summary = daemon.stop();
    assert!(summary["left_alone"].as_array().unwrap().iter().any(|row| row["reason"] == reason.as_str()), "{summary}");
    // We override the opt-out, and the daemon logs that once.
    let options = ["--governor", "full", "--override-opt-out", &unit.name, "--audit", log.to_str().unwrap()];
    let daemon = Daemon::on(&pids, &options);
    wait_until_merged(&pids[..3], 7 * MIB);
    let notes = succeed(&["explain", &member.pid().to_string()]);
    assert_has(&notes, &["overridden: its unit"]);
    assert_has(&daemon.terminate().errors, &["is merged because of --override-opt-out: its unit"]);
    let lines = json_lines(&fs::read_to_string(&log).unwrap());
    let overrides: Vec<Value> = lines.into_iter().filter(|line| line["what"] == "override").collect();
    assert_eq!(overrides.len(), 1, "{overrides:?}");
    assert_eq!((&overrides[0]["pid"], &overrides[0]["why"]["sentence"]), (&member.pid().into(), &reason.into()));
    assert!(member.is_intact());
    ksm.give_back(&pids);
}
