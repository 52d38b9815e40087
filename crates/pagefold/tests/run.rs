//! `pagefold run`, `exec` and `unmerge` on the real kernel, with processes that check every byte of their memory.

use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pagefold_testkit::*;

fn most(bytes: u64) -> u64 {
    bytes / 100 * 95
}

fn bytes(summary: &Value, field: &str) -> u64 {
    summary[field].as_u64().unwrap_or_else(|| panic!("{field} in {summary}"))
}

#[track_caller]
fn wait_for_saving(of: u64) {
    wait_until("nearly all is saved", || saved_bytes() >= most(of));
}

/// Waits until the run has ordered a scan, which is in progress.
#[track_caller]
fn wait_for_kick() {
    wait_until("a kick is in progress", || number("pages_to_scan") == KICK && number("run") == 1);
}

/// Unmerges everything and checks that all is as it was before.
#[track_caller]
fn give_back(ksm: &KsmAtRest, holders: &mut [Holder]) {
    let pids = pids(holders);
    ksm.give_back(&pids);
    assert_unmarked(&pids);
    assert_intact(holders);
}

#[track_caller]
fn wait_until_begun() {
    wait_until("the run has begun", || Path::new(STATE_FILE).exists());
}

/// Runs `pagefold doctor` with these arguments, and checks that its output has all these parts.
#[track_caller]
fn doctor(args: &[&str], parts: &[&str]) {
    let output = pagefold(&[&["doctor"], args].concat());
    assert_has(&String::from_utf8_lossy(&output.stdout), parts);
}

/// Merges until this much is saved and nothing is left to do. Returns the run's summary.
fn merged(holders: &mut [Holder], savable: u64) -> Value {
    let daemon = Daemon::on(&pids(holders), &[]).answering();
    wait_until("all is merged", || {
        assert_intact(holders);
        saved_bytes() >= savable && status()["busy"] == false
    });
    daemon.signal(libc::SIGINT);
    daemon.end().summary()
}

/// The most time that the default governor may take for most of the saving.
const FIRST_SAVING: Duration = Duration::from_secs(60);

#[test]
fn by_default_nine_tenths_are_merged_within_a_minute_by_a_fifth_of_a_core() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(96, 32, 7);
    let pids = pids(&pair);
    let before = saved_bytes();
    let began = Instant::now();
    let daemon = Daemon::on(&pids, &["--governor", "auto"]).answering();
    wait_until("nine tenths are merged", || saved_bytes() >= before + 96 * MIB / 10 * 9);
    let took = began.elapsed();
    let seconds = &status()["cpu_seconds"];
    let cpu: f64 = ["pagefold", "injector", "ksmd"].iter().map(|part| seconds[part].as_f64().unwrap()).sum();
    println!("nine tenths after {took:?}, {cpu:.2} CPU s");
    assert!(took < FIRST_SAVING, "{took:?}");
    // The run may spend a second's share at once, and starting takes some time, too.
    assert!(cpu < (took.as_secs_f64() + 2.0) / 4.0, "{cpu} s in {took:?}");
    assert_intact(&mut pair);
    daemon.stop();
    ksm.give_back(&pids);
}

#[test]
fn two_identical_processes_are_merged_and_get_everything_back() {
    let Some(ksm) = KsmAtRest::take() else { return };
    // The kernel may still count merged zero pages although nothing is merged.
    let miscounted = saved_bytes();
    let mut pair = pair(48, 24, 1);
    let pids = pids(&pair);
    let savable = 48 * MIB;
    assert_intact(&mut pair);
    let summary = merged(&mut pair, miscounted + most(savable));
    assert_intact(&mut pair);

    let saved = bytes(&summary, "saved_bytes");
    // Two processes of one program have little other memory in common.
    assert!((most(savable)..savable + 2 * MIB).contains(&saved), "saved {saved} of {savable}");
    assert!(saved.abs_diff(saved_bytes()) <= MIB, "the kernel counts {}", saved_bytes());
    // `merged_pages` counts each saved page, and the page that it was merged into.
    assert!(bytes(&summary, "merged_pages") * 4096 >= 2 * most(savable), "{summary}");
    let marked = bytes(&summary, "marked_bytes");
    let found: u64 = pids.iter().map(|&pid| marks(pid).marked).sum();
    assert!(marked.abs_diff(found) <= MIB, "{marked} marked, and {found} by smaps");
    for &pid in &pids {
        // What's marked includes unique memory in the same mapping as the common memory.
        let Marks { marked, merged } = marks(pid);
        assert!((most(savable)..savable + 30 * MIB).contains(&marked), "{marked}");
        assert!(merged >= most(savable), "{merged}");
    }
    assert!(bytes(&summary, "metadata_bytes") >= 2 * most(savable) / 64);
    let seconds = summary["seconds"].as_f64().unwrap();
    let reached = summary["seconds_to_90_percent"].as_f64().unwrap();
    assert!(0.0 < reached && reached <= seconds, "{reached} of {seconds}");
    for part in ["pagefold", "ksmd"] {
        let cpu = summary["cpu_seconds"][part].as_f64().unwrap();
        assert!(0.0 < cpu && cpu <= 2.0 * seconds, "{part}: {cpu}");
    }
    let (longest, total) = (summary["longest_stop_us"].as_f64().unwrap(), summary["total_stop_us"].as_f64().unwrap());
    assert!(0.0 < longest && longest <= total && bytes(&summary, "stops") >= 2, "{summary}");
    assert!(bytes(&summary, "marked_spans") >= 2 && bytes(&summary, "scans") >= 2, "{summary}");
    assert!(bytes(&summary, "pages_read") * 4096 >= savable, "{summary}");
    assert_eq!(summary["processes"], 2);
    assert_eq!(summary["scope"], format!("--pid {} --pid {}", pids[0], pids[1]));
    assert_eq!((&summary["dry_run"], &summary["expected_bytes"]), (&json!(false), &json!(0)));
    assert_eq!((&summary["governor"], &summary["stood_down"]), (&json!("full"), &Value::Null));
    assert_eq!(summary["left_alone"], json!([]));
    // All knobs are restored, except the one that can't be written while pages are merged.
    assert_eq!(summary["knobs_restored"], true);
    assert_eq!(summary["knobs_deferred"], json!({ "max_page_sharing": 256 }));
    ksm.assert_knobs_restored_except(&["max_page_sharing"]);
    assert!(Path::new(STATE_FILE).exists());

    let back = unmerge(&pids);
    assert!(bytes(&back, "given_back_bytes") >= 2 * most(savable), "{back}");
    assert_eq!(bytes(&back, "unmarked_bytes"), found);
    assert_eq!((bytes(&back, "still_saved_bytes"), &back["knobs_deferred"]), (miscounted, &json!({})));
    assert_unmarked(&pids);
    assert_intact(&mut pair);
    ksm.assert_restored();
    // There's nothing left to unmerge.
    assert_eq!(bytes(&unmerge(&pids), "given_back_bytes"), 0);
}

#[test]
fn a_dry_run_changes_nothing_and_its_estimate_is_right() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(32, 16, 2);
    let pids = pids(&pair);
    let mut daemon = Daemon::on(&pids, &["--dry-run", "--for", "4s"]);
    while daemon.is_running() {
        assert_unmarked(&pids);
        ksm.assert_restored();
        std::thread::sleep(Duration::from_millis(50));
    }
    let summary = daemon.end().summary();
    assert_unmarked(&pids);
    assert_intact(&mut pair);
    ksm.assert_restored();
    assert_eq!((&summary["dry_run"], &summary["saved_bytes"]), (&json!(true), &json!(0)));
    assert_eq!((&summary["stops"], &summary["scans"]), (&json!(0), &json!(0)));
    // Both copies of the common memory are duplicates.
    let (marked, expected) = (bytes(&summary, "marked_bytes"), bytes(&summary, "expected_bytes"));
    let duplicate = 64 * MIB;
    assert!((most(duplicate)..duplicate + 2 * MIB).contains(&expected), "{expected}");
    assert!((expected..duplicate + 44 * MIB).contains(&marked), "{marked}");
}

/// The run has a /run of its own that disappears with it, as in a container.
#[test]
fn the_knobs_of_a_killed_run_with_a_run_directory_of_its_own_are_restored_by_doctor() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(96, 0, 12);
    let pids = pids(&pair);
    let script = "mount -t tmpfs own /run && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(program()).args(with_pids(&["run", "--json"], &pids, &[]));
    let daemon = Daemon::of(&mut command);
    wait_for_kick();
    assert!(!Path::new(STATE_FILE).exists());
    // While the run goes on, doctor must not take anything from it.
    doctor(&["--fix"], &[&format!("held by process {}", daemon.pid())]);
    assert_eq!(daemon.kill().code, None);
    assert_eq!((number("run"), number("use_zero_pages")), (1, 1), "the knobs are as the run left them");
    doctor(&[], &["its state file is not here", "pagefold doctor --fix"]);
    succeed(&["doctor", "--fix"]);
    ksm.assert_knobs_restored_except(&["max_page_sharing"]);
    assert_intact(&mut pair);
    give_back(&ksm, &mut pair);
}

#[test]
fn a_process_that_starts_later_is_matched_by_its_cgroup_or_its_name() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(cgroup) = Cgroup::of_any_version() else { return };
    let exe = ProgramCopy::unique();
    for scope in [["--cgroup", cgroup.path.to_str().unwrap()], ["--exe", exe.name()]] {
        let first = Holder::sharing(&exe, 32, 8, 5);
        cgroup.add(first.pid());
        let daemon = Daemon::start(&[&["run", "--json", "--governor", "full", "--for", "300s"], &scope[..]].concat());
        wait_until_begun();
        std::thread::sleep(Duration::from_secs(1));
        let (second, outsider) = (Holder::sharing(&exe, 32, 8, 5), Holder::sharing(&victim_binary("holder"), 32, 8, 5));
        cgroup.add(second.pid());
        wait_for_saving(32 * MIB);
        let summary = daemon.stop();
        assert_eq!(summary["processes"], 2);
        assert_unmarked(&[outsider.pid()]);
        if scope[0] == "--exe" {
            // The base name also matches and, for undoing, so does a file that others can change.
            let name = exe.file_name().unwrap().to_str().unwrap();
            std::fs::set_permissions(&*exe, PermissionsExt::from_mode(0o777)).unwrap();
            assert_fails(&["run", "--for", "1s", "--exe", name], 5, "can be changed by users other than root");
            succeed(&["unmerge", "--exe", name]);
        }
        give_back(&ksm, &mut [first, second, outsider]);
    }
}

#[test]
fn a_run_ends_when_all_named_processes_have_ended() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let last = Holder::with(PAGES_PER_MIB, 8);
    let daemon = Daemon::on(&[last.pid()], &[]);
    wait_until_begun();
    drop(last);
    assert_eq!(daemon.end().summary()["processes"], 0);
    ksm.assert_restored();
}

#[test]
fn a_run_stands_down_when_another_program_writes_a_knob() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(48, 0, 9);
    let pids = pids(&pair);
    let daemon = Daemon::on(&pids, &["--for", "6s"]);
    wait_until("KSM is controlled by the run", || number("run") == 1);
    write_knob("pages_to_scan", "777");
    let ended = daemon.end();
    let summary = ended.summary();
    let why = summary["stood_down"].as_str().unwrap();
    assert!(why.contains("another program changed pages_to_scan") && why.contains("777"), "{why}");
    assert!(ended.errors.contains("this run no longer controls KSM"), "{}", ended.errors);
    assert_eq!(number("pages_to_scan"), 777, "the other program's value stays");
    ksm.assert_knobs_restored_except(&["pages_to_scan", "max_page_sharing"]);
    unmerge(&pids);
    assert_eq!(number("pages_to_scan"), 777);
    ksm.assert_knobs_restored_except(&["pages_to_scan"]);
    write_knob("pages_to_scan", "100");
    give_back(&ksm, &mut pair);
}

#[test]
fn ksm_that_another_program_uses_is_left_alone() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(32, 0, 10);
    let pids = pids(&pair);
    let named = format!("{},{}", pids[0], pids[1]);
    let run = ["run", "--pid", &named, "--for", "2s"];

    write_knob("run", "1");
    assert_fails(&run, 7, "run is 1");
    assert_eq!(number("run"), 1);
    ksm.assert_knobs_restored_except(&["run"]);
    write_knob("run", "0");

    if Path::new("/sys/kernel/mm/ksm/advisor_mode").exists() {
        write_knob("advisor_mode", "scan-time");
        let before = number("pages_to_scan");
        assert_fails(&run, 7, "advisor is on");
        assert_eq!((number("pages_to_scan"), advisor_is_off()), (before, false));
        write_knob("advisor_mode", "none");
        write_knob("pages_to_scan", "100");
    } else {
        skip_unsupported("the advisor needs Linux 6.8");
    }
    assert_unmarked(&pids);
    ksm.assert_restored();

    let daemon = Daemon::on(&pids, &["--for", "300s"]);
    wait_until("KSM is controlled by the run", || number("run") == 1);
    let by = format!("another pagefold (pid {})", daemon.pid());
    assert_fails(&run, 7, &by);
    wait_for_saving(32 * MIB);
    let summary = daemon.stop();
    assert_eq!((&summary["stood_down"], &summary["knobs_restored"]), (&Value::Null, &json!(true)));
    give_back(&ksm, &mut pair);
}

#[test]
fn a_program_started_by_exec_is_merged_without_a_stop() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let exe = victim_binary("holder");
    let mut pair = [(); 2].map(|()| {
        let mut command = Command::new(program());
        let mut holder = Holder::by(command.args(["exec", "--"]).arg(&exe), 40 * PAGES_PER_MIB);
        holder.write(0, 32 * PAGES_PER_MIB, 11 << 32);
        holder
    });
    let pids = pids(&pair);
    for &pid in &pids {
        assert!(has_merge_any(pid));
        assert!(marks(pid).marked >= 40 * MIB, "{:?}", marks(pid));
    }
    let mut daemon = Daemon::on(&pids, &["--for", "300s"]);
    wait_for_saving(32 * MIB);
    assert!(daemon.is_running());
    assert_intact(&mut pair);
    let summary = daemon.stop();
    assert_eq!((&summary["stops"], &summary["longest_stop_us"]), (&json!(0), &json!(0.0)), "{summary}");
    assert_intact(&mut pair);
    give_back(&ksm, &mut pair);
    assert!(!pids.iter().any(|&pid| has_merge_any(pid)), "new memory would still be marked");
}

#[test]
fn exec_becomes_the_program() {
    let Some(_ksm) = KsmAtRest::take() else { return };
    // The program prints PR_GET_MEMORY_MERGE of itself and of a child that it forks.
    let script = "import ctypes, os
set = ctypes.CDLL(None).prctl(68, 0, 0, 0, 0)
if os.fork() == 0: os._exit(ctypes.CDLL(None).prctl(68, 0, 0, 0, 0))
print(os.getpid(), set, os.waitstatus_to_exitcode(os.wait()[1]))";
    let child = Command::new(program())
        .args(["exec", "--", "python3", "-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{pid} 1 1\n"));
    // exec passes on the exit code, arguments that look like flags, and death by a signal.
    assert_eq!(pagefold(&["exec", "sh", "-c", "exit 41"]).status.code(), Some(41));
    assert_eq!(pagefold(&["exec", "--", "echo", "--json", "-x"]).stdout, b"--json -x\n");
    let killed = pagefold(&["exec", "sh", "-c", "kill -9 $$"]).status;
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed), Some(9));
    assert_fails(&["exec", "--", "no-such-program-here"], 127, "not found");
    assert_fails(&["exec", "/no/such/program"], 127, "not found");
    let output = pagefold(&["exec", "/etc/passwd"]);
    assert_eq!(output.status.code(), Some(126));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("pagefold: /etc/passwd: cannot be executed") && error.lines().count() == 1, "{error}");
    assert_eq!(pagefold(&["exec"]).status.code(), Some(2));
}

#[test]
fn a_restart_costs_no_second_search_and_nothing_is_unmerged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(128, 16, 9);
    let pids = pids(&pair);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("learned.json");
    let start = || Daemon::on(&pids, &["--learned", path.to_str().unwrap()]).answering();
    let daemon = start();
    wait_until("all is merged", || saved_bytes() >= most(128 * MIB) && status()["busy"] == false);
    let first = daemon.stop();
    let saved = saved_bytes();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("pagefold.learned/2") && text.contains("\"judged\":true"), "{text}");
    let broken = vmstat("cow_ksm");

    let daemon = start();
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        assert!(saved_bytes() >= most(saved), "{} of {saved}", saved_bytes());
        std::thread::sleep(Duration::from_millis(50));
    }
    wait_until("it's at rest", || status()["busy"] == false);
    let second = daemon.stop();
    let [before, after] = [&first, &second].map(|summary| bytes(summary, "pages_read"));
    assert!(after * 5 <= before, "{after} pages read after the restart, {before} before");
    assert_eq!((bytes(&second, "stops"), bytes(&second, "scans")), (0, 0), "{second}");
    // The only new COW copies are of pages that the programs write anyway.
    assert!(vmstat("cow_ksm") - broken < 256, "{} copies", vmstat("cow_ksm") - broken);
    println!("{before} pages read by the first run, {after} by the second");

    // If the file can't be used, the run says so in one line and does without the file.
    std::fs::write(&path, "{\"schema\":").unwrap();
    let ended = start().terminate();
    assert_eq!(ended.errors.matches("is damaged").count(), 1, "{}", ended.errors);
    assert_eq!(ended.code, Some(0));
    give_back(&ksm, &mut pair);
}

#[test]
fn memory_of_a_frozen_process_is_given_back_after_it_is_thawed() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(32, 0, 15);
    let pids = pids(&pair);
    let Some(freezer) = Freezer::of_any_version() else { return };
    let daemon = Daemon::on(&pids, &["--for", "300s"]);
    wait_for_saving(32 * MIB);
    daemon.stop();
    freezer.freeze_process(pids[0]);
    let output = pagefold(&with_pids(&["unmerge", "--json"], &pids, &[]));
    assert_failed(&output, 6, "frozen");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(summary["processes"][0]["failed"].as_str().unwrap().contains("frozen"), "{summary}");
    assert_eq!(summary["processes"][1]["failed"], Value::Null);
    assert_unmarked(&pids[1..]);
    assert!(marks(pids[0]).marked >= most(32 * MIB));
    drop(freezer);
    give_back(&ksm, &mut pair);
}
