//! `pagefold unmerge` while a daemon runs, which then keeps the processes out, and `pagefold include`. Also tests
//! programs that lock their memory map.

use pagefold_testkit::injection::Victim;
use pagefold_testkit::*;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// Memory that each holder has in common with others.
const COMMON_MIB: u64 = 32;
/// How much of that memory must be merged at least.
const MERGED: u64 = 31 * MIB;
/// Long enough for several rounds with governor full.
const A_WHILE: Duration = Duration::from_secs(6);

fn same(seed: u64, number: usize) -> Vec<Holder> {
    (0..number).map(|_| Holder::sharing(&victim_binary("holder"), COMMON_MIB, 2, seed)).collect()
}

/// The reason why the daemon leaves a process alone.
fn left_alone(pid: i32) -> Option<String> {
    let status = status();
    let row = status["processes"].as_array().unwrap().iter().find(|row| row["pid"] == pid)?;
    row["left_alone"].as_str().map(str::to_owned)
}

#[test]
fn a_running_daemon_unmerges_a_process_and_keeps_it_out_until_it_is_included() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let audit = dir.path().join("audit.jsonl");
    let mut holders = same(90, 3);
    let pids = pids(&holders);
    let flags = ["--governor", "full", "--audit", audit.to_str().unwrap()];
    let daemon = Daemon::on(&pids, &flags).answering();
    wait_until_merged(&pids, MERGED);

    let began = Instant::now();
    let summary = unmerge(&pids[..1]);
    let took = began.elapsed();
    println!("unmerged after {took:?}: {summary}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_unmarked(&pids[..1]);
    let given_back = summary["given_back_bytes"].as_u64().unwrap();
    assert!((MERGED..=(COMMON_MIB + 2) * MIB).contains(&given_back), "{summary}");
    assert_eq!(summary["processes"].as_array().unwrap().len(), 1);
    assert_eq!(summary["processes"][0]["pid"], pids[0]);
    assert_eq!(summary["processes"][0]["failed"], Value::Null);
    assert!(summary["unmarked_bytes"].as_u64().unwrap() >= MERGED);
    assert_eq!(summary["kept_out"], format!("--pid {}", pids[0]));
    assert_intact(&mut holders);

    // The process stays out, and the others stay merged.
    std::thread::sleep(A_WHILE);
    assert_unmarked(&pids[..1]);
    assert!(are_merged(&pids[1..], MERGED));
    assert_eq!(left_alone(pids[0]).as_deref(), Some("unmerged by request of uid 0"));
    assert_eq!(left_alone(pids[1]), None);
    assert_eq!(status()["kept_out"], json!([{ "selector": format!("--pid {}", pids[0]), "uid": 0 }]));
    let selector = format!("--pid {}", pids[0]);
    assert_has(
        &succeed(&["status"]),
        &[&format!("kept out  {selector}: 1 process now"), "unmerged by request of uid 0"],
    );
    let explained = succeed(&["explain", &pids[0].to_string()]);
    assert_has(&explained, &["unmerged by request of uid 0", &format!("pagefold include {selector}")]);
    let lines = std::fs::read_to_string(&audit).unwrap();
    let unmarked =
        lines.lines().filter(|line| line.contains("\"unmark\"") && line.contains("unmerged by request of uid 0"));
    let unmarked: Vec<Value> = unmarked.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!unmarked.is_empty() && unmarked.iter().all(|line| line["pid"] == pids[0]), "{lines}");
    assert!(unmarked.iter().all(|line| line["why"]["kind"] == "asked" && line["outcome"] == "done"), "{lines}");

    // The second time there's nothing to do.
    let text = succeed(&["unmerge", "--pid", &pids[0].to_string()]);
    assert_has(
        &text,
        &["Unmerged 0 B in 1 process.", &format!("Not merged again, until you run: pagefold include {selector}")],
    );

    let included = json_of(&["include", "--pid", &pids[0].to_string()]);
    assert_eq!(included["schema"], "pagefold.include/1");
    assert_eq!(included["processes"][0]["pid"], pids[0]);
    wait_until_merged(&pids, MERGED);
    assert_eq!((left_alone(pids[0]), &status()["kept_out"]), (None, &json!([])));
    assert_fails(&["include", "--pid", &pids[0].to_string()], 5, "is kept out");
    assert_eq!(daemon.stop()["knobs_restored"], true);
    assert_intact(&mut holders);
    ksm.give_back(&pids);
}

/// Naming a process also covers its descendants, even those that it starts later.
#[test]
fn children_of_a_process_that_is_kept_out_are_kept_out() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let exe = ProgramCopy::of(&program, "kept-out-holder");
    let mut holders = [(); 3].map(|()| Holder::with_as(&exe, 16 * PAGES_PER_MIB, 7 << 40));
    let own: Vec<i32> = holders.iter().map(Holder::pid).collect();
    let daemon = Daemon::start(&["run", "--json", "--exe", exe.name(), "--governor", "full"]).answering();
    wait_until_merged(&own, 15 * MIB);
    let before = holders[0].fork();
    let summary = json_of(&["unmerge", "--pid", &own[0].to_string()]);
    let done: Vec<i64> =
        summary["processes"].as_array().unwrap().iter().map(|row| row["pid"].as_i64().unwrap()).collect();
    assert_eq!(done.len(), 2, "{summary}");
    assert!(done.contains(&i64::from(before)), "{summary}");
    let after = holders[0].fork();
    wait_until("its new child is in scope", || left_alone(after).is_some());
    for child in [before, after] {
        assert_eq!(left_alone(child).as_deref(), Some("unmerged by request of uid 0"));
    }
    std::thread::sleep(A_WHILE);
    assert_unmarked(&[own[0], before, after]);
    assert!(are_merged(&own[1..], 15 * MIB));
    let is_kept =
        || fs::read_to_string("/var/lib/pagefold/kept-out.json").is_ok_and(|text| text.contains(&format!("{after},")));
    wait_until("a crash would keep the new child out", is_kept);
    daemon.stop();
    assert!(holders.iter_mut().all(Holder::is_intact));
    unmerge(&own);
    ksm.assert_restored();
}

/// The list of excluded processes and containers outlives the daemon, whether the daemon has written it or the command
/// itself.
#[test]
fn what_is_excluded_stays_out_after_a_restart_until_it_is_included() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let (group, id) = cgroup::container();
    let mut holders = same(96, 4);
    let pids = pids(&holders);
    group.add(pids[0]);
    let selectors = [["--container".to_owned(), id[..12].to_owned()], ["--pid".to_owned(), pids[1].to_string()]];
    let command = |name: &'static str, at: usize| {
        let [flag, value] = &selectors[at];
        json_of(&[name, flag, value])
    };
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, MERGED);
    let began = Instant::now();
    let summary = command("exclude", 0);
    let took = began.elapsed();
    println!("excluded after {took:?}: {summary}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_unmarked(&pids[..1]);
    assert_eq!((&summary["by_daemon"], &summary["not_kept"]), (&json!(true), &Value::Null));
    daemon.kill();

    // Exclude the second process without a daemon.
    let summary = command("exclude", 1);
    assert_eq!(summary["by_daemon"], false);
    assert_eq!(summary["kept_out"], selectors[1].join(" "));
    assert_unmarked(&pids[..2]);
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids[2..], MERGED);
    std::thread::sleep(A_WHILE);
    assert_unmarked(&pids[..2]);
    assert_eq!(left_alone(pids[1]).as_deref(), Some("unmerged by request of uid 0"));
    assert_eq!(status()["kept_out"].as_array().unwrap().len(), 2);
    command("include", 0);
    daemon.stop();
    assert_eq!(command("include", 1)["processes"][0]["pid"], pids[1]);
    assert_fails(&["include", "--pid", &pids[1].to_string()], 5, "is kept out");

    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, MERGED);
    ksm.end(daemon, &pids);
    assert_intact(&mut holders);
}

/// The daemon also unmerges processes out of its scope: here, memory that a program has marked itself.
#[test]
fn processes_out_of_scope_are_unmerged_by_the_daemon() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = same(92, 2);
    let pids = pids(&holders);
    let mut outsider = Holder::duplicated(8 * PAGES_PER_MIB);
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, MERGED);
    wait_until("the outsider is merged, too", || marks(outsider.pid()).merged >= 7 * MIB);
    let summary = unmerge(&[outsider.pid()]);
    assert!(summary["given_back_bytes"].as_u64().unwrap() >= 7 * MIB, "{summary}");
    assert_unmarked(&[outsider.pid()]);
    assert!(outsider.is_intact());
    assert_eq!(status()["processes"].as_array().unwrap().len(), 2, "it is no target any more");
    assert!(are_merged(&pids, MERGED));
    ksm.end(daemon, &pids);
    assert_intact(&mut holders);
}

#[test]
fn bad_requests_change_nothing_and_say_why() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = same(93, 2);
    let pids = pids(&holders);
    assert_fails(&["include", "--pid", &pids[0].to_string()], 5, "is kept out");
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, MERGED);
    assert_fails(&["unmerge", "--pid", "2147483646"], 5, "no process 2147483646");
    assert_fails(&["unmerge", "--exe", "no-such-program"], 5, "no process matches --exe no-such-program");
    assert_fails(&["unmerge"], 5, "nothing is in scope");
    assert_fails(&["unmerge", "--user", "no-such-user"], 5, "no user no-such-user");
    assert_fails(&["unmerge", "--pid", &pids[0].to_string(), "--audit", "/run/pagefold-log"], 2, "omit --audit");
    assert_fails(&["include", "--exe", "no-such-program"], 5, "nothing that matches --exe no-such-program is kept out");
    let copy = ProgramCopy::of(program(), "pagefold");
    for command in ["unmerge", "include"] {
        let refused = as_other_user(copy.name()).args([command, "--pid", &pids[0].to_string()]).output().unwrap();
        assert_refused(&refused, 3, "root");
    }
    assert_eq!(status()["kept_out"], json!([]));
    assert!(are_merged(&pids, MERGED));
    ksm.end(daemon, &pids);
    assert_intact(&mut holders);
}

/// If the daemon is killed while it unmerges, one line says so, and then the same command works without a daemon.
#[test]
fn the_death_of_the_daemon_is_reported_in_one_line() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = same(94, 2);
    let pids = pids(&holders);
    let mut command = Command::new(program());
    command.args(with_pids(&["run", "--json", "--governor", "full"], &pids, &[]));
    let daemon = Daemon::of(command.env(pagefold_procmem::os::fault::VARIABLE, "unmarked=kill")).answering();
    wait_until_merged(&pids, MERGED);
    let output = pagefold(&with_pids(&["unmerge"], &pids, &[]));
    assert_refused(&output, 1, "some of the processes may still be merged: run pagefold unmerge again");
    assert_eq!(daemon.end().signal, Some(libc::SIGKILL));
    unmerge(&pids);
    assert_unmarked(&pids);
    assert_intact(&mut holders);
    succeed(&["doctor", "--fix"]);
    ksm.assert_restored();
}

/// One program has locked its memory map, and two others haven't.
#[test]
fn a_program_that_locks_its_memory_map_keeps_no_other_one_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut victim = match Victim::try_start(&["stalling", "locking"]) {
        Ok(victim) => victim,
        Err(why) => return skip(why),
    };
    // Large address spaces come last.
    let mut holders = [(); 2].map(|()| Holder::start(288 * PAGES_PER_MIB));
    for holder in &mut holders {
        holder.write(0, COMMON_MIB * PAGES_PER_MIB, 95 << 32);
    }
    let innocent = pids(&holders);
    let all = [&[victim.pid()], &innocent[..]].concat();
    let [first, second] = [victim.pid(), innocent[0]].map(|pid| kib(&format!("/proc/{pid}/status"), "VmSize"));
    assert!(first < second, "it is tried first: {first} and {second} KiB");
    let daemon = Daemon::on(&all, &["--governor", "full"]).answering();
    wait_until_merged(&innocent, MERGED);
    wait_until("ksmd rests", || status()["busy"] == false);
    daemon.stop();
    victim.send();
    wait_until("it is locked", || tids(victim.pid()).iter().any(|&tid| state(tid) == b'D'));
    let began = Instant::now();
    let mut command = Daemon::start(&with_pids(&["unmerge", "--json"], &all, &[]));
    for &pid in &innocent {
        wait_until_unmarked(pid, Duration::from_secs(5), "marked beside a locked program");
    }
    let innocent_after = began.elapsed();
    while command.is_running() {
        assert!(began.elapsed() < Duration::from_secs(20), "the command does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("the others unmerged after {innocent_after:?}, ended after {:?}", began.elapsed());
    let ended = command.end();
    assert_eq!(ended.code, Some(6), "{ended:?}");
    let name = format!("process {} (victim) keeps its memory map locked; ", victim.pid());
    assert!(ended.errors.contains(&name) && ended.errors.lines().count() == 1, "{ended:?}");
    let summary: Value = serde_json::from_str(&ended.output).unwrap();
    assert_eq!(row(&summary["processes"], "pid", innocent[0])["failed"], Value::Null, "{summary}");
    assert!(row(&summary["processes"], "pid", victim.pid())["failed"].is_string(), "{summary}");
    assert_intact(&mut holders);
    drop(victim);
    drop(holders);
    // Without the locked program, ksmd scans, and the deferred knob is restored.
    ksm.give_back(&[Sleeper::start().pid()]);
}
