//! The configuration file, the deny list and the audit log of a run.

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use pagefold_testkit::*;

fn log(path: &str) -> Vec<Value> {
    json_lines(&fs::read_to_string(path).unwrap_or_default())
}

fn of_kind(path: &str, what: &str) -> Vec<Value> {
    log(path).into_iter().filter(|line| line["what"] == what).collect()
}

/// The sum of `done_bytes` over these lines of the log.
fn bytes(lines: &[Value]) -> u64 {
    lines.iter().map(|line| line["done_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn a_bad_configuration_is_refused_and_changes_nothing() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("");
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    let args = ["run", "--for", "2s", "--pid", &pid, "--config", config.name()];
    fs::remove_file(&config.path).unwrap();
    assert_fails(&args, 2, "cannot be read");
    config.write("[run]\n\ngoverment = \"full\"\n");
    assert_fails(&args, 2, "pagefold.toml line 3: unknown key 'goverment' in [run]; ");
    config.write("[judgement]\ncow-threshold = 0\n");
    assert_fails(&args, 2, "line 2: judgement.cow-threshold: 0 % is out of range; it must be from 0.01 % to 100 %");
    config.write("");
    fs::set_permissions(&config.path, PermissionsExt::from_mode(0o666)).unwrap();
    assert_fails(&args, 2, "other users may write");
    fs::set_permissions(&config.path, PermissionsExt::from_mode(0o600)).unwrap();
    assert_fails(&["run", "--config", config.name()], 5, "nothing is in scope");
    assert_fails(&["run", "--pid", &pid, "--deny", "bin/vault"], 2, "--deny");
    assert_fails(&["run", "--pid", &pid, "--audit", "/dev/null"], 2, "/dev/null");
    assert_fails(&["unmerge", "--pid", &pid, "--audit", "/no/such/directory/log"], 2, "/no/such/directory");
    ksm.assert_restored();
    assert_unmarked(&[idle.pid()]);
}

#[test]
fn the_file_sets_the_scope_and_the_log_has_every_mark() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("");
    let audit = config.beside("audit.jsonl");
    let old = config.beside("audit.jsonl.1");
    let program_file = ProgramCopy::unique();
    let settings = |governor: &str| {
        format!(
            "[scope]\ncgroups = [\"/no/such\"]\nexes = [\"{}\"]\n[run]\ngovernor = \"{governor}\"\n[audit]\nfile = \"{audit}\"\n",
            program_file.name()
        )
    };
    config.write(&settings("full"));
    // The programs that a file selects needn't be running yet.
    let daemon = Daemon::start(&["run", "--json", "--for", "300s", "--config", config.name()]);
    wait_until("the run has begun", || Path::new(&audit).exists());
    let mut pair = [(); 2].map(|()| Holder::sharing(&program_file, 32, 4, 14));
    wait_until("the pair is merged", || saved_bytes() >= 31 * MIB);
    wait_until("marks are logged", || !of_kind(&audit, "mark").is_empty());
    assert_eq!(fs::metadata(&audit).unwrap().permissions().mode() & 0o7777, 0o600);

    // Rotate the log, and change the governor.
    fs::rename(&audit, &old).unwrap();
    daemon.reload(&config, &settings("low"));
    wait_until("the log is opened again", || Path::new(&audit).exists());
    wait_until("the governor has changed", || status()["governor"] == "low");
    // An invalid file changes nothing. Changes that need a restart are reported.
    daemon.reload(&config, "[run]\ngoverment = 1\n");
    wait_until("the file is refused", || daemon.has_said("the settings are unchanged: "));
    let more =
        "[limits]\nstops-per-second = 3\n[[limits.group]]\nname = \"pair\"\nuser = \"root\"\ngovernor = \"quiet\"\n";
    daemon.reload(&config, &(settings("low") + more + "[domains]\nby = \"user\"\n"));
    let notes = || json_of(&["explain", &pair[0].pid().to_string()])["notes"].clone();
    wait_until("the limits of the group apply", || notes() == json!(["The limits of pair apply to it."]));
    let ended = daemon.terminate();
    assert_eq!(ended.summary()["audit_lost"], 0);
    let stays = "the settings are unchanged: ";
    assert!(ended.errors.lines().any(|line| line.contains(stays) && line.contains("goverment")), "{}", ended.errors);
    assert_has(
        &ended.errors,
        &[
            "there is no cgroup /no/such; waiting for one to start",
            "the governor is now low",
            "the limits have changed",
            "changes to [domains] (except merge) take effect at the next start",
        ],
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
    assert!(bytes(&marks) >= 2 * 31 * MIB, "{marks:?}");
    for mark in &marks {
        let [first, last] = ["first", "last"].map(|key| u64::from_str_radix(mark[key].as_str().unwrap(), 16).unwrap());
        assert!(first % 4096 == 0 && last - first + 1 == mark["bytes"].as_u64().unwrap(), "{mark}");
    }

    // Unmerging is also logged.
    let back = config.beside("back.jsonl");
    succeed(&with_pids(&["unmerge", "--audit", &back], &pids(&pair), &[]));
    let given_back = of_kind(&back, "unmark");
    assert!(given_back.iter().all(|line| line["why"]["kind"] == "asked" && line["outcome"] == "done"));
    assert!(bytes(&given_back) >= 2 * 31 * MIB, "{given_back:?}");
    assert_eq!((&log(&back)[0]["command"], &log(&back).last().unwrap()["lost"]), (&"unmerge".into(), &0.into()));
    assert_intact(&mut pair);
    ksm.assert_restored();
}

#[test]
fn a_run_can_be_made_to_say_what_it_does() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    assert_fails(&["run", "--pid", "1", "--log-level", "loud"], 2, "'loud' is not a level; give info ");
    let config = ConfigFile::new("[log]\nlevel = \"info,scope=debug\"\n");
    let daemon = Daemon::on(&[idle.pid()], &["--for", "300s", "--config", config.name()]).answering();
    let in_scope = format!("pagefold: debug scope: in scope pid={} name=sleep", idle.pid());
    wait_until("it says so", || daemon.has_said(&in_scope));
    assert!(!daemon.has_said("debug ksm: "));
    // After a reload that changes the level, KSM's part logs the end of the run.
    daemon.reload(&config, "[log]\nlevel = \"ksm=debug\"\n");
    wait_until("the level has changed", || daemon.has_said("the log level is now ksm=debug"));
    let ended = daemon.terminate();
    ended.summary();
    assert_has(&ended.errors, &["pagefold: debug ksm: KSM's settings are restored deferred=[] failed=[]"]);
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

#[test]
fn enabled_programs_are_merged_at_once_and_unmerged_when_they_are_disabled() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("");
    let audit = config.beside("audit.jsonl");
    config.write(&format!("[run]\ngovernor = \"full\"\n[audit]\nfile = \"{audit}\"\n"));
    let [first, second] = [ProgramCopy::unique(), ProgramCopy::unique()];
    let mut holders = [&first, &first, &second, &second].map(|exe| Holder::sharing(exe, 32, 4, 15));
    let pids = pids(&holders);
    let call =
        |command: &'static str, exe: &ProgramCopy| succeed(&[command, "--exe", exe.name(), "--config", config.name()]);
    let file = config.beside("pagefold.toml.d/enabled.toml");
    assert_has(&call("enable", &first), &["No pagefold is running. To start one: sudo pagefold run --config "]);
    let written = fs::read_to_string(&file).unwrap();
    call("enable", &first);
    assert_eq!(fs::read_to_string(&file).unwrap(), written, "the second time changes nothing");
    let daemon = Daemon::start(&["run", "--json", "--config", config.name()]).answering();
    wait_until_merged(&pids[..2], 31 * MIB);
    assert_has(&call("enable", &second), &["The running pagefold has read it.", "Saved so far: ", "in 2 processes"]);
    wait_until_merged(&pids, 31 * MIB);
    assert_has(&call("disable", &first), &["unmerged: 2 processes."]);
    assert_unmarked(&pids[..2]);
    assert!(are_merged(&pids[2..], 31 * MIB));
    assert_eq!(status()["scope"], format!("--exe {}", second.name()));
    let disable = ["disable", "--exe", first.name(), "--config", config.name()];
    assert_fails(&disable, 5, "is not enabled");
    // Name the daemon's file by another path.
    let mut disable = Command::new(program());
    disable.current_dir(config.path.parent().unwrap()).args(["disable", second.name(), "--config", "pagefold.toml"]);
    assert_has(&output_of(&mut disable), &["Nothing is in scope any more."]);
    assert!(!Path::new(&file).exists());
    assert_unmarked(&pids);
    for (args, code, says) in [
        (&["enable", "--config", config.name()][..], 2, "no name is given"),
        (&["enable", "--exe", "", "--config", config.name()], 2, "empty"),
        (&["enable", "--user", "no-such-user", "--config", config.name()], 5, "no user no-such-user"),
        (&["enable", "--all"], 2, "--all"),
        (&["enable", "4711"], 2, "; try pagefold run --pid 4711"),
    ] {
        assert_fails(args, code, says);
    }
    daemon.stop();
    let scopes: Vec<Value> = of_kind(&audit, "scope").iter().map(|line| line["scope"].clone()).collect();
    assert_eq!(scopes.len(), 3, "{scopes:?}");
    assert_eq!(scopes[1..], [json!(format!("--exe {}", second.name())), json!("empty")]);

    // A daemon that reads no file, or another one, leaves the configuration as it was.
    let daemon = Daemon::on(&pids, &[]).answering();
    let enable = ["enable", "--exe", first.name(), "--config", config.name()];
    assert_fails(&enable, 1, "has its scope from its command line");
    assert!(!Path::new(&file).exists());
    ksm.end(daemon, &pids);
    assert_intact(&mut holders);
}

/// The runs have a mount namespace of their own, with a file at the default path.
#[test]
fn what_the_file_denies_is_left_alone_whatever_the_command_line_selects() {
    let Some(cgroup) = Cgroup::of_any_version() else { return };
    let idle = Sleeper::start();
    cgroup.add(idle.pid());
    let name = cgroup.path().file_name().unwrap().to_str().unwrap();
    let script = format!(
        "cp -a /etc etc && mkdir -p etc/pagefold && mount --bind etc /etc && \
         printf '[deny]\\nworkloads = [\"{name}\"]\\n' >/etc/pagefold/pagefold.toml"
    );
    let Some(namespace) = Namespace::make(&script, "no mount namespace") else { return };
    let refused = |args: &[&str], code: i32, says: &str| {
        let output = namespace.command(program()).args(with_pids(args, &[idle.pid()], &[])).output().unwrap();
        assert_refused(&output, code, says);
    };
    let denied = format!("on the deny list ({name})");
    refused(&["scan"], 6, &denied);
    refused(&["run", "--dry-run", "--for", "2s"], 6, &denied);
    let file = namespace.root().join("etc/pagefold/pagefold.toml");
    fs::write(&file, "[domains]\nby = \"user\"\nmerge = \"user:4321\"\n").unwrap();
    refused(&["run", "--dry-run", "--for", "2s"], 6, "in trust domain user:0");
    fs::write(&file, "[deny]\nworkload = []\n").unwrap();
    refused(&["scan"], 2, "unknown key 'workload' in [deny]");
}
