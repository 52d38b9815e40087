//! The configuration file, the deny list and the audit log of a run.

use pagefold_workload::Tenant;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use pagefold_testkit::*;

fn log(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // The last line may be incomplete.
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn of_kind(path: &Path, what: &str) -> Vec<Value> {
    log(path).into_iter().filter(|line| line["what"] == what).collect()
}

#[test]
fn a_bad_configuration_is_refused_and_changes_nothing() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pagefold.toml");
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    let args = ["run", "--for", "2s", "--pid", &pid, "--config", path.to_str().unwrap()];
    assert_fails(&args, 2, "cannot be read");
    fs::write(&path, "[run]\n\ngoverment = \"full\"\n").unwrap();
    assert_fails(&args, 2, "pagefold.toml line 3: unknown key 'goverment' in [run]; ");
    fs::write(&path, "[judgement]\ncow-threshold = 0\n").unwrap();
    assert_fails(&args, 2, "line 2: judgement.cow-threshold: 0 % is out of range; it must be from 0.01 % to 100 %");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    assert_fails(&args, 2, "other users may write");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    assert_fails(&["run", "--config", path.to_str().unwrap()], 5, "nothing is in scope");
    assert_fails(&["run", "--pid", &pid, "--deny", "/usr/bin/vault"], 2, "--deny");
    assert_fails(&["run", "--pid", &pid, "--audit", "/dev/null"], 2, "/dev/null");
    assert_fails(&["unmerge", "--pid", &pid, "--audit", "/no/such/directory/log"], 2, "/no/such/directory");
    ksm.assert_restored();
    assert_unmarked(&[idle.pid()]);
}

#[test]
fn the_file_sets_the_scope_and_the_log_has_every_mark() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let (config, audit, old) = (file("pagefold.toml"), file("audit.jsonl"), file("audit.jsonl.1"));
    let program_file = ProgramCopy::unique();
    let settings = |governor: &str| {
        format!(
            "[scope]\ncgroups = [\"/no/such\"]\nexes = [\"{}\"]\n[run]\ngovernor = \"{governor}\"\n[audit]\nfile = \"{}\"\n",
            program_file.name(),
            audit.display()
        )
    };
    fs::write(&config, settings("full")).unwrap();
    let config_path = config.to_str().unwrap();
    // What a file selects need not be there yet.
    let daemon = Daemon::start(&["run", "--json", "--for", "300s", "--config", config_path]);
    wait_until("the run has begun", || audit.exists());
    let mut pair: Vec<Tenant> = (0..2).map(|_| Tenant::start(&program_file, &spec(32, 4, 14)).unwrap()).collect();
    wait_until("the pair is merged", || saved_bytes() >= 31 * MIB);
    wait_until("marks are logged", || !of_kind(&audit, "mark").is_empty());
    assert_eq!(fs::metadata(&audit).unwrap().permissions().mode() & 0o7777, 0o600);

    // Log rotation, and another governor.
    fs::rename(&audit, &old).unwrap();
    fs::write(&config, settings("low")).unwrap();
    daemon.signal(libc::SIGHUP);
    wait_until("the log is opened again", || audit.exists());
    wait_until("the governor has changed", || status()["governor"] == "low");
    // An invalid file changes nothing, and changes that need a restart are reported.
    fs::write(&config, "[run]\ngoverment = 1\n").unwrap();
    daemon.signal(libc::SIGHUP);
    wait_until("the file is refused", || daemon.has_said("the settings are unchanged: "));
    let more =
        "[limits]\nstops-per-second = 3\n[[limits.group]]\nname = \"pair\"\nuser = \"root\"\ngovernor = \"quiet\"\n";
    fs::write(&config, settings("low") + more + "[domains]\nby = \"user\"\n").unwrap();
    daemon.signal(libc::SIGHUP);
    let notes = || json_of(&["explain", &pair[0].pid().to_string()])["notes"].clone();
    wait_until("the limits of the group apply", || notes() == json!(["The limits of pair apply to it."]));
    daemon.signal(libc::SIGTERM);
    let ended = daemon.end();
    let summary = ended.summary();
    assert_eq!(summary["audit_lost"], 0);
    assert!(ended.errors.contains("there is no cgroup /no/such; waiting for one to start"), "{}", ended.errors);
    assert!(ended.errors.contains("the governor is now low"), "{}", ended.errors);
    let stays = "the settings are unchanged: ";
    assert!(ended.errors.lines().any(|line| line.contains(stays) && line.contains("goverment")), "{}", ended.errors);
    assert!(ended.errors.contains("the limits have changed"), "{}", ended.errors);
    assert!(
        ended.errors.contains("changes of [domains] (except merge) take effect at the next start"),
        "{}",
        ended.errors
    );

    assert_eq!(log(&old)[0]["what"], "begin");
    assert_eq!(log(&audit).last().unwrap()["what"], "end");
    let marks: Vec<Value> = of_kind(&old, "mark").into_iter().chain(of_kind(&audit, "mark")).collect();
    for mark in &marks {
        assert_eq!((&mark["schema"], &mark["uid"]), (&"pagefold.audit/1".into(), &0.into()));
        assert!(pids(&pair).iter().any(|pid| mark["pid"] == *pid), "{mark}");
        assert_eq!(mark["exe"], program_file.name());
        assert_eq!(mark["why"]["kind"], "duplicate", "{mark}");
    }
    let bytes = |lines: &[Value]| lines.iter().map(|line| line["done_bytes"].as_u64().unwrap()).sum::<u64>();
    assert!(bytes(&marks) >= 2 * 31 * MIB, "{marks:?}");
    let addresses =
        |line: &Value| ["first", "last"].map(|key| u64::from_str_radix(line[key].as_str().unwrap(), 16).unwrap());
    assert!(marks.iter().all(|mark| {
        let [first, last] = addresses(mark);
        first % 4096 == 0 && last - first + 1 == mark["bytes"].as_u64().unwrap()
    }));

    // Unmerging is logged too.
    let back = file("back.jsonl");
    succeed(&with_pids(&["unmerge", "--audit", back.to_str().unwrap()], &pids(&pair), &[]));
    let given_back = of_kind(&back, "unmark");
    assert!(given_back.iter().all(|line| line["why"]["kind"] == "asked" && line["outcome"] == "done"));
    assert!(bytes(&given_back) >= 2 * 31 * MIB, "{given_back:?}");
    assert_eq!((&log(&back)[0]["command"], &log(&back).last().unwrap()["lost"]), (&"unmerge".into(), &0.into()));
    assert_intact(&mut pair);
    ksm.assert_restored();
}

#[test]
fn a_program_on_the_deny_list_is_merged_only_if_it_is_allowed() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let agent = ProgramCopy::of(program(), "ssh-agent");
    let agent = Tenant::start(&agent, &spec(1, 0, 1)).unwrap();
    let pid = agent.pid().to_string();
    let dry = |more: &[&str]| pagefold(&[&["run", "--dry-run", "--json", "--for", "1s", "--pid", &pid], more].concat());
    assert_refused(&dry(&[]), 6, "on the deny list (ssh-agent)");
    assert_refused(&dry(&["--allow", "ssh-add"]), 6, "on the deny list (ssh-agent)");
    assert_eq!(dry(&["--allow", "ssh-agent"]).status.code(), Some(0));
    assert_refused(&dry(&["--allow", "ssh-agent", "--deny", "ssh*"]), 6, "on the deny list (ssh*)");
    let scan = |more: &[&str]| pagefold(&[&["scan", "--json", "--pid", &pid], more].concat());
    assert_refused(&scan(&[]), 6, "on the deny list (ssh-agent)");
    assert_eq!(scan(&["--allow", "ssh-agent"]).status.code(), Some(0));

    // Allowed by a file, and then no more.
    let config = dir.path().join("pagefold.toml");
    fs::write(&config, "[deny]\nexcept = [\"ssh-agent\"]\n").unwrap();
    let path = config.to_str().unwrap();
    let idle = Sleeper::start();
    let daemon = Daemon::on(&[agent.pid(), idle.pid()], &["--dry-run", "--for", "300s", "--config", path]).answering();
    let left_alone = || row(&status()["processes"], "pid", agent.pid())["left_alone"].clone();
    assert_eq!(left_alone(), Value::Null, "it is in scope");
    fs::write(&config, "").unwrap();
    daemon.signal(libc::SIGHUP);
    wait_until("it is left alone", || left_alone() == "on the deny list (ssh-agent)");
    daemon.stop();
    assert_unmarked(&[agent.pid()]);
    ksm.assert_restored();
}

#[test]
fn a_run_can_be_made_to_say_what_it_does() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("pagefold.toml");
    let idle = Sleeper::start();
    assert_fails(&["run", "--pid", "1", "--log-level", "loud"], 2, "'loud' is not a level; give info ");
    fs::write(&config, "[log]\nlevel = \"info,scope=debug\"\n").unwrap();
    let path = config.to_str().unwrap();
    let daemon = Daemon::on(&[idle.pid()], &["--for", "300s", "--config", path]).answering();
    let in_scope = format!("pagefold: debug scope: in scope pid={} name=sleep", idle.pid());
    wait_until("it says so", || daemon.has_said(&in_scope));
    assert!(!daemon.has_said("debug ksm: "));
    // The end of a run is said by KSM's part, after a reload.
    fs::write(&config, "[log]\nlevel = \"ksm=debug\"\n").unwrap();
    daemon.signal(libc::SIGHUP);
    wait_until("the level has changed", || daemon.has_said("the log level is now ksm=debug"));
    daemon.signal(libc::SIGTERM);
    let ended = daemon.end();
    ended.summary();
    assert!(
        ended.errors.contains("pagefold: debug ksm: KSM's settings are restored deferred=[] failed=[]"),
        "{ended:?}"
    );
    ksm.assert_restored();
}

#[test]
fn without_a_file_and_a_log_sighup_ends_the_run() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let daemon = Daemon::on(&[idle.pid()], &["--dry-run", "--for", "300s"]).answering();
    daemon.signal(libc::SIGHUP);
    daemon.end().summary();
    ksm.assert_restored();
}
