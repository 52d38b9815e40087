//! There's no space for the state file.

use super::*;

/// A mount namespace with a small file system mounted on `/run/pagefold`. Removed when dropped.
struct SmallRun(Namespace);

impl SmallRun {
    /// `None` if the namespace can't be made. Reports why.
    fn make() -> Option<Self> {
        let mount = "mkdir -p /run/pagefold && mount -t tmpfs -o size=64k tmpfs /run/pagefold";
        Namespace::make(mount, "a tmpfs cannot be mounted in a mount namespace").map(Self)
    }

    /// A command that runs `pagefold` in the namespace.
    fn pagefold(&self, args: &[impl AsRef<OsStr>]) -> Command {
        let mut command = self.0.command(program());
        command.args(args);
        command
    }

    fn shell(&self, script: &str) -> String {
        let output = self.0.command("sh").args(["-c", script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn fill(&self) {
        self.shell("head -c 1M /dev/zero > /run/pagefold/fill");
        assert_eq!(self.shell("echo x > /run/pagefold/probe && cat /run/pagefold/probe"), "", "it is not full");
    }
}

#[test]
fn no_knob_is_changed_if_the_state_file_cannot_be_written() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(run) = SmallRun::make() else { return };
    let mut holders = pair(COMMON_MIB, 0, 62);
    run.fill();
    let left = Daemon::of(&mut run.pagefold(&with_pids(&["run"], &pids(&holders), &QUICK))).end();
    assert_eq!(left.code, Some(1), "{left:?}");
    assert!(left.errors.contains("ksm-state.json") && left.errors.contains("No space left"), "{left:?}");
    assert!(left.errors.starts_with("pagefold: ") && left.errors.lines().count() == 1, "{left:?}");
    assert!(!run.shell("ls /run/pagefold").contains("json"), "{}", run.shell("ls -l /run/pagefold"));
    ksm.assert_restored();
    assert_unmarked(&pids(&holders));
    assert_unharmed(&mut holders);
}

#[test]
fn everything_is_restored_on_a_full_disk() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(run) = SmallRun::make() else { return };
    let mut holders = pair(COMMON_MIB, 0, 63);
    let pids = pids(&holders);
    for killed in [false, true] {
        let daemon = Daemon::of(&mut run.pagefold(&with_pids(&["run"], &pids, &["--json"])));
        wait_until("nearly all is merged", || saved_bytes() >= COMMON_MIB * MIB / 100 * 95);
        run.fill();
        send(daemon.pid(), if killed { libc::SIGKILL } else { libc::SIGTERM });
        let left = daemon.end();
        if killed {
            output_of(&mut run.pagefold(&["doctor", "--fix"]));
        } else {
            assert_eq!(left.code, Some(0), "{left:?}");
        }
        ksm.assert_knobs_restored_except(&["max_page_sharing"]);
        run.shell("rm /run/pagefold/fill");
        output_of(&mut run.pagefold(&with_pids(&["unmerge"], &pids, &[])));
        ksm.assert_restored();
    }
    assert_unmarked(&pids);
    assert_unharmed(&mut holders);
}
