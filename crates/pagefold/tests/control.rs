//! Requests to a running daemon: `pagefold status`, `explain`, `governor`, `pause`, `resume`, and the socket they use.

use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagefold_testkit::holder::Change;
use pagefold_testkit::*;

const SOCKET: &str = "/run/pagefold/control.sock";

#[track_caller]
fn explain(pid: i32) -> Value {
    let explanation = json_of(&["explain", &pid.to_string()]);
    assert_eq!((&explanation["schema"], &explanation["pid"]), (&json!("pagefold.explain/1"), &json!(pid)));
    explanation
}

/// The text that the program prints. Its lines must fit a terminal.
#[track_caller]
fn text_of(args: &[&str]) -> String {
    let text = succeed(args);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    text
}

#[track_caller]
fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

/// Starts a daemon and waits until it answers.
#[track_caller]
fn daemon(pids: &[i32], options: &[&str]) -> Daemon {
    Daemon::on(pids, &[&["--for", "300s"], options].concat()).answering()
}

#[test]
fn status_and_explain_show_what_is_merged_and_why() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let pages = 48 * PAGES_PER_MIB;
    let mut alike = Holder::start(pages);
    alike.change(Change::Write { first: 0, pages, content: 21, step: 0 });
    let mut holders = [alike, Holder::sharing(&victim_binary("holder"), 0, 40, 21)];
    let pids = pids(&holders);
    let daemon = daemon(&pids, &[]);
    wait_until("the memory is merged", || saved_bytes() >= 45 * MIB && status()["busy"] == false);

    wait_until("it is counted what that saves", || {
        status()["saved_bytes"].as_u64().is_some_and(|saved| saved.abs_diff(saved_bytes()) <= MIB)
    });

    let status = status();
    assert_eq!((&status["pid"], &status["dry_run"]), (&json!(daemon.pid()), &json!(false)));
    assert_eq!(status["scope"], format!("--pid {} --pid {}", pids[0], pids[1]));
    assert_eq!((&status["governor"], &status["in_force"]), (&json!("full"), &json!("full")));
    assert_eq!((&status["ksm_driven"], &status["ksm_why"]), (&json!(true), &Value::Null));
    let kind = |kind: &str| bytes(&row(&status["kinds"], "kind", kind)["resident_bytes"]);
    assert!((47 * MIB..52 * MIB).contains(&kind("statically-duplicated")), "{status}");
    assert!((40 * MIB..44 * MIB).contains(&kind("sparse")), "{status}");
    for list in ["kinds", "levels", "next", "processes"] {
        let rows = status[list].as_array().unwrap();
        let sum: u64 = rows.iter().map(|row| bytes(&row["resident_bytes"])).sum();
        assert_eq!(sum, bytes(&status["resident_bytes"]), "{list} in {status}");
    }
    assert_eq!(status["levels"].as_array().unwrap().len(), 4);
    assert_eq!((&status["levels"][0]["share"], &status["levels"][1]["share"]), (&json!(0.95), &json!(0.475)));
    let used = status["used_share"].as_f64().unwrap();
    let cpu = &status["cpu_seconds"];
    let spent = cpu["pagefold"].as_f64().unwrap() + cpu["ksmd"].as_f64().unwrap();
    let span = status["seconds"].as_f64().unwrap().clamp(1.0, 10.0);
    assert!(0.0 < used && used <= spent / span + 0.01, "{used} of {spent} in {span}");

    // All pages of this process have the same content, so they're merged.
    let one = explain(pids[0]);
    let largest = &one["regions"][0];
    assert_eq!((&one["in_scope"], &largest["kind"]), (&json!(true), &json!("statically-duplicated")));
    assert_eq!((&largest["exact"], &largest["mapping"]), (&json!(true), &json!("anonymous")));
    assert!(bytes(&largest["marked_bytes"]) >= 46 * MIB && bytes(&largest["expected_bytes"]) >= 46 * MIB, "{largest}");
    let first = u64::from_str_radix(largest["range"].as_str().unwrap().split('-').next().unwrap(), 16).unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/maps", pids[0])).unwrap();
    assert!(maps.lines().any(|line| line.starts_with(&format!("{first:x}-"))), "{first:x} in {maps}");
    // This process's memory is unique, so it's left alone.
    let other = explain(pids[1]);
    let largest = &other["regions"][0];
    assert_eq!((&largest["kind"], &largest["next"]), (&json!("sparse"), &json!("watch")), "{largest}");
    assert_eq!(bytes(&largest["marked_bytes"]), 0);
    assert!(largest["duplicate_range"][1].as_f64().unwrap() < 0.2, "{largest}");

    // Check the text output as well.
    let kinds = ["statically duplicated", "sparse", "COW-broken", "short-lived"];
    assert_has(&text_of(&["status"]), &[&kinds[..], &["Saves 4", "controlled by this run", "95 %"]].concat());
    assert_has(
        &text_of(&["explain", &pids[0].to_string()]),
        &["100 % duplicate, exactly", " of 4, seen for", "expected to be merged", "ksmd scans again"],
    );
    assert_has(
        &text_of(&["explain", &pids[1].to_string()]),
        &["sparse: ", "read whole once samples show more than 6.0 % duplicate", "Mappings that are always left alone"],
    );

    // Explain both processes together.
    let [first, second] = [pids[0], pids[1]].map(|pid| pid.to_string());
    let both = json_of(&["explain", &first, &second]);
    let rows = both["processes"].as_array().unwrap();
    assert_eq!((rows.len(), &both["processes_outside"]), (2, &json!(0)), "{both}");
    assert!((46 * MIB..50 * MIB).contains(&bytes(&both["saved_bytes"])), "{both}");
    assert!(both["reasons"].as_array().unwrap().iter().any(|row| row["reason"] == "done"), "{both}");
    assert_has(&text_of(&["explain", &first, &second]), &["2 processes with ", "few duplicates", "pagefold explain "]);
    let outside = [Sleeper::start(), Sleeper::start()];
    let [first, second] = outside.each_ref().map(|sleeper| sleeper.pid().to_string());
    assert_fails(&["explain", &first, &second], 5, "2 processes match --pid");

    // The status is shown again and again, until nobody reads it.
    let mut watch = Command::new(program());
    let mut watch = watch.args(["status", "--watch", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut seconds = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap()["seconds"].as_f64();
    let first = seconds();
    assert!(seconds() > first, "{first:?}");
    drop(lines);
    assert!(watch.wait().unwrap().success());

    assert_eq!(ksm.end(daemon, &pids)["knobs_restored"], true);
    assert_intact(&mut holders);
}

#[test]
fn a_governor_takes_effect() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let daemon = daemon(&[idle.pid()], &[]);
    for (name, share) in [("low", 0.2), ("quiet", 0.01), ("medium", 0.5)] {
        let settings = json_of(&["governor", name]);
        assert_eq!(settings["schema"], "pagefold.control/1");
        assert_eq!((&settings["governor"], &settings["in_force"]), (&json!(name), &json!(name)));
        assert_eq!((&settings["allowed_share"], &settings["paused"]), (&json!(share), &json!(false)));
        // A round of the governor `quiet` takes 20 s, and no answer waits for its end.
        let asked = Instant::now();
        let status = status();
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        assert_eq!((&status["governor"], &status["allowed_share"]), (&json!(name), &json!(share)));
        assert_eq!(status["levels"][0]["share"], json!(share));
    }
    let settings = json_of(&["governor", "auto"]);
    assert_eq!(settings["governor"], "auto");
    assert_ne!(settings["in_force"], "auto");
    assert_eq!(text_of(&["governor", "low"]), "In force: governor low, up to 20 % of a core.\n");
    assert_fails(&["governor", "turbo"], 2, "full, medium, low, quiet or auto");
    assert_eq!(status()["governor"], "low");
    daemon.stop();
    ksm.assert_restored();
}

#[test]
fn a_paused_daemon_does_nothing_and_continues_when_resumed() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let exe = ProgramCopy::unique();
    let first = Holder::sharing(&exe, 32, 0, 22);
    let daemon =
        Daemon::start(&["run", "--json", "--governor", "full", "--exe", exe.name(), "--for", "300s"]).answering();
    assert_eq!(text_of(&["pause"]).lines().count(), 1);
    let mut pair = [first, Holder::sharing(&exe, 32, 0, 22)];
    let pids = pids(&pair);
    wait_until("both are in scope", || status()["processes"].as_array().unwrap().len() == 2);
    let before = status();
    assert_eq!(before["paused"], true);
    std::thread::sleep(Duration::from_secs(5));
    assert_unmarked(&pids);
    let after = status();
    assert_eq!(after["pages_read"], before["pages_read"], "it still reads");
    assert_eq!((bytes(&after["marked_bytes"]), bytes(&after["saved_bytes"])), (0, 0));
    assert!(text_of(&["status"]).contains("paused: nothing is read"));
    assert!(text_of(&["explain", &pids[0].to_string()]).contains("Paused: nothing happens"));

    assert!(text_of(&["resume"]).starts_with("Resumed: governor full"));
    wait_until("they are merged", || saved_bytes() >= 31 * MIB);
    // Pause again: merged memory stays merged, even if ksmd had to be stopped.
    json_of(&["pause"]);
    let saved = saved_bytes();
    std::thread::sleep(Duration::from_secs(2));
    assert!(saved_bytes() >= saved, "{} of {saved}", saved_bytes());
    ksm.end(daemon, &pids);
    assert_intact(&mut pair);
}

/// Holds memory that must be left alone, each mapping for a different reason.
const EXCLUDED: &str = r#"
import ctypes, mmap, sys
libc = ctypes.CDLL(None, use_errno=True)
held = []
for advice in (16, 18, None):
    region = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(b"s" * (8 << 20))
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(region)))
    if advice is None: assert libc.mlock(address, ctypes.c_size_t(8 << 20)) == 0
    else: assert libc.madvise(address, ctypes.c_size_t(8 << 20), advice) == 0
    held.append(region)
shared = mmap.mmap(-1, 8 << 20)
shared.write(b"s" * (8 << 20))
print("ready", flush=True)
sys.stdin.readline()
"#;

#[test]
fn explain_shows_why_memory_is_left_alone_in_scope_and_out_of_it() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let (inside, outside) = (Script::start(EXCLUDED), Script::start(EXCLUDED));
    let daemon = daemon(&[inside.pid()], &[]);
    for (pid, in_scope) in [(inside.pid(), true), (outside.pid(), false)] {
        let explanation = explain(pid);
        assert_eq!((&explanation["in_scope"], &explanation["left_alone"]), (&json!(in_scope), &Value::Null));
        assert_eq!(explanation["regions"].as_array().unwrap().is_empty(), !in_scope);
        for (reason, least) in
            [("MADV_DONTDUMP", 8), ("MADV_WIPEONFORK", 8), ("mlock", 8), ("shared mapping", 8), ("no anonymous", 0)]
        {
            let rows = explanation["excluded"].as_array().unwrap();
            let found = rows.iter().filter(|row| row["reason"].as_str().unwrap().contains(reason));
            let most = found.map(|row| bytes(&row["bytes"])).max();
            assert!(most.is_some_and(|most| most >= least * MIB), "{reason}: {most:?} in {explanation}");
        }
        let text = text_of(&["explain", &pid.to_string()]);
        assert_eq!(text.contains("is not in the scope"), !in_scope, "{text}");
        assert!(text.contains("may hold secrets") && text.contains("may hold keys"), "{text}");
    }
    // These processes are left alone as a whole.
    let undumpable = Script::undumpable();
    let text = text_of(&["explain", &undumpable.pid().to_string()]);
    assert_has(&text, &["The whole process is left alone: not dumpable", "(--allow python3", "lets it in)."]);
    let mut ended = zombie();
    let text = text_of(&["explain", &ended.id().to_string()]);
    assert!(text.contains("has ended"), "{text}");
    ended.wait().unwrap();
    assert_fails(&["explain", "2147483646"], 5, "no process 2147483646");
    ksm.end(daemon, &[inside.pid()]);
}

#[test]
fn only_root_is_answered() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let daemon = daemon(&[idle.pid()], &[]);
    let copy = ProgramCopy::of(program(), "pagefold");
    let only_root =
        |args: &[&str]| assert_refused(&as_other_user(copy.name()).args(args).output().unwrap(), 3, "only root");
    let all: [&[&str]; 5] =
        [&["status"], &["explain", &idle.pid().to_string()], &["governor", "low"], &["pause"], &["resume"]];
    for args in all {
        only_root(args);
    }
    // Even if everybody may open the socket, the daemon checks the user of each connection.
    fs::set_permissions(SOCKET, Permissions::from_mode(0o666)).unwrap();
    for args in all {
        only_root(args);
    }
    let status = status();
    assert_eq!((&status["governor"], &status["paused"]), (&json!("full"), &json!(false)), "nothing was changed");
    daemon.stop();
    ksm.assert_restored();
}

#[test]
fn silent_clients_and_clients_that_leave_do_no_harm() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut pair = pair(32, 8, 23);
    let pids = pids(&pair);
    let daemon = daemon(&pids, &[]);
    let silent: Vec<UnixStream> = (0..10).map(|_| UnixStream::connect(SOCKET).unwrap()).collect();
    // These clients don't wait for the answer.
    for _ in 0..20 {
        let mut stream = UnixStream::connect(SOCKET).unwrap();
        // The daemon may close a connection right away if there are too many.
        let _ = stream.write_all(b"{\"schema\":\"pagefold.control/1\",\"request\":\"status\"}\n");
    }
    wait_until("the pair is merged all the same", || saved_bytes() >= 31 * MIB);
    // Silent clients are disconnected after some seconds, or at once if others need their places.
    let mut line = String::new();
    BufReader::new(&silent[0]).read_line(&mut line).unwrap();
    assert!(line.is_empty() || line.contains("no request came"), "{line}");
    let daemon = daemon.answering();
    assert_eq!(status()["paused"], false);
    assert_eq!(ksm.end(daemon, &pids)["knobs_restored"], true);
    assert_intact(&mut pair);
}

#[test]
fn without_a_daemon_a_request_fails_with_one_line() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    let all: [&[&str]; 6] =
        [&["status"], &["status", "--json"], &["explain", &pid], &["governor", "low"], &["pause"], &["resume"]];
    let assert_none_runs =
        || all.iter().for_each(|args| assert_fails(args, 8, "no pagefold is running; start it with sudo"));
    assert_none_runs();
    // This socket is left over from another run.
    fs::create_dir_all("/run/pagefold").unwrap();
    drop(UnixListener::bind(SOCKET).unwrap());
    assert!(Path::new(SOCKET).exists());
    assert_none_runs();
    let killed = daemon(&[idle.pid()], &[]);
    let file = fs::symlink_metadata(SOCKET).unwrap();
    assert!(file.file_type().is_socket());
    assert_eq!((file.mode() & 0o777, file.uid()), (0o600, 0));
    killed.kill();
    assert!(Path::new(SOCKET).exists(), "a killed daemon leaves its socket");
    assert_none_runs();
    daemon(&[idle.pid()], &[]).stop();
    assert!(!Path::new(SOCKET).exists());
    let left = fs::read_dir("/run/pagefold").unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.filter(|name| name.to_string_lossy().starts_with("control")).count(), 0, "nothing is left over");
    assert_none_runs();
    ksm.assert_restored();
}

#[test]
fn a_service_manager_is_told_how_a_run_goes() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let idle = Sleeper::start();
    let mut command = Command::new(program());
    command.args(["run", "--json", "--governor", "full", "--pid", &idle.pid().to_string()]);
    let run = Daemon::of(command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "1000000"));
    let next = || {
        let mut bytes = [0; 500];
        let length = manager.recv(&mut bytes).expect("a message in time");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    assert_eq!(next(), "READY=1");
    // A daemon that is ready must answer.
    assert_eq!(status()["pid"], run.pid());
    let other_than_alive = || std::iter::repeat_with(next).find(|message| !message.starts_with("WATCHDOG")).unwrap();
    let first = other_than_alive();
    assert!(first.starts_with("STATUS=1 process, ") && first.contains(": saved "), "{first}");
    assert_eq!([next(), next()], ["WATCHDOG=1", "WATCHDOG=1"]);
    run.stop();
    let ending = other_than_alive();
    assert!(ending.starts_with("STOPPING=1\n"), "{ending}");
    ksm.assert_restored();
}

#[test]
fn a_dry_run_answers_until_a_real_run_starts() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let dry = daemon(&[idle.pid()], &["--dry-run"]);
    let status_of_dry = status();
    assert_eq!((&status_of_dry["dry_run"], &status_of_dry["ksm_driven"]), (&json!(true), &json!(false)));
    assert_eq!(status_of_dry["ksm_why"], "a dry run changes nothing");
    assert!(text_of(&["status"]).contains("Dry run: "));
    // A second dry run leaves the socket to the first one, and says so.
    let second = Daemon::on(&[idle.pid()], &["--dry-run", "--for", "1s"]).end();
    second.summary();
    assert!(second.errors.contains(&format!("another pagefold (pid {}) serves", dry.pid())), "{}", second.errors);
    assert_eq!(second.errors.lines().count(), 1, "{}", second.errors);
    assert_eq!(status()["pid"], dry.pid());
    // A real run takes the socket over.
    let acting = Daemon::on(&[idle.pid()], &["--for", "300s"]);
    wait_until("it answers", || status()["pid"] == acting.pid());
    dry.stop();
    assert_eq!(status()["pid"], acting.pid());
    acting.stop();
    assert!(!Path::new(SOCKET).exists());
    ksm.assert_restored();
}
