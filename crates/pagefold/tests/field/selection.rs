//! Programs that are hard to find, to ask or to merge. We must list what we leave out, with the reason, and promise
//! only what can be merged.

use crate::*;
use std::path::Path;
use std::process::Command;

const MIB_EACH: u64 = 64;
const PAGES: u64 = MIB_EACH * PAGES_PER_MIB;

/// Buffers registered with io_uring, as databases and proxies have them. The kernel can't merge pinned pages.
#[test]
fn nothing_is_promised_for_pinned_memory() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut programs = [program_with(MIB_EACH), program_with(MIB_EACH), program_with(MIB_EACH)];
    for program in &mut programs {
        program.ask(&format!("pin 0 {PAGES}"));
    }
    let pids = pids_of(&programs);
    let report = scan(&pids);
    assert!(savable_mib(&report) <= 5, "scan promises {} MiB", savable_mib(&report));
    for &pid in &pids {
        let process = row(&report["processes"], "pid", pid);
        let reason = "pinned for I/O (VmPin), which KSM cannot merge";
        let pinned = row(&process["excluded"], "reason", reason)["bytes"].as_u64().unwrap();
        assert!(((MIB_EACH - 1) * MIB..=MIB_EACH * MIB).contains(&pinned), "{process}");
    }
    assert_has(&succeed(&["scan", "--pid", &pids[0].to_string()]), &["MiB  pinned for I/O (VmPin)"]);
    let daemon = run(&pids);
    std::thread::sleep(Duration::from_secs(15));
    let explanation = json_of(&["explain", &pids[0].to_string()]);
    assert_has(&explanation.to_string(), &["pinned"]);
    let expected = |region: &Value| region["expected_bytes"].as_u64().unwrap_or(0);
    let expected: u64 = explanation["regions"].as_array().unwrap().iter().map(expected).sum();
    assert!(expected <= 5 * MIB, "{expected} bytes are expected to be merged");
    // If we marked pages that ksmd can't merge, its records for them would be wasted.
    let metadata = status()["metadata_bytes"].as_u64().unwrap();
    assert!(metadata <= MIB / 2, "{metadata} bytes of records");
    ksm.end(daemon, &pids);
}

/// Containers with user namespaces, started by root.
#[test]
fn scan_counts_in_user_namespaces_what_a_run_merges() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let contained = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]).arg(victim_binary("holder"));
        let mut program = Holder::by(&mut command, PAGES);
        program.write(0, PAGES, COMMON);
        program
    };
    let programs = [contained(), contained()];
    let pids = pids_of(&programs);
    let unmerged = held(&pids);
    let promised = savable_mib(&scan(&pids));
    assert!(promised.abs_diff(MIB_EACH) <= MIB_EACH / 10, "scan promises {promised} MiB of {MIB_EACH}");
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, MIB_EACH * 95 / 100, 20);
    ksm.end(daemon, &pids);
}

/// Browsers are on the deny list, so the printed command must allow this one.
#[test]
fn the_command_that_scan_prints_works_as_it_stands() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = ProgramCopy::of(&victim_binary("holder"), "chromium");
    let browser = || Holder::with_as(&program, PAGES / 2, COMMON);
    let browsers = [browser(), browser()];
    let pids = pids_of(&browsers);
    let unmerged = held(&pids);
    assert_fails(&["scan", "--exe", program.name()], 6, "deny list");
    let text = succeed(&["scan", "--exe", program.name(), "--allow", "chromium", "--deny", "x y*"]);
    let Some((_, printed)) = text.split_once("To save it:") else { panic!("no command in {text}") };
    let printed = printed.trim().lines().next().unwrap();
    let own = Path::new(pagefold_testkit::program()).parent().unwrap();
    let path = format!("{}:{}", own.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command
        .env("PATH", path)
        .args(["-c", &format!("exec {printed} --json --governor full --mechanism {}", mechanism())]);
    let daemon = Daemon::of(&mut command).answering();
    assert_saves(unmerged, &pids, MIB_EACH / 2 * 95 / 100, 20);
    ksm.end(daemon, &pids);
}
