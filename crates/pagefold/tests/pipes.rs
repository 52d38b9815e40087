//! The daemon's outputs may block: a pipe that nobody reads, a journal that hangs, a disk that doesn't answer. Even
//! then the daemon must answer requests, merge, and end in time.

use pagefold_testkit::*;
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const COMMON_MIB: u64 = 8;
/// The longest time from SIGTERM to the end, including everything that the daemon waits for.
const END_MOST: Duration = Duration::from_secs(30);

fn set_nonblocking(fd: &impl AsRawFd, is: bool) {
    let flags = if is { libc::O_NONBLOCK } else { 0 };
    // SAFETY: no memory is passed.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }, 0);
}

/// Writes until the writer takes no more.
fn fill(mut writer: impl Write + AsRawFd) {
    set_nonblocking(&writer, true);
    let line = [b'x'; 100];
    while writer.write(&line).is_ok() {}
    while writer.write(b"\n").is_ok() {}
    set_nonblocking(&writer, false);
}

/// A full pipe: its read end and its write end.
fn full_pipe() -> (File, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors, which then belong to nobody else.
    let (read, write) = unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    fill(write.try_clone().unwrap());
    (read, write.into())
}

/// A full socket: its read end and its write end.
fn full_socket() -> (UnixStream, OwnedFd) {
    let (read, write) = UnixStream::pair().unwrap();
    fill(write.try_clone().unwrap());
    (read, write.into())
}

/// A socket for datagrams whose queue is full.
fn full_queue(path: &Path) -> UnixDatagram {
    let queue = UnixDatagram::bind(path).unwrap();
    // Each sender has its own limit, too, so we need several.
    loop {
        let sender = UnixDatagram::unbound().unwrap();
        sender.set_nonblocking(true).unwrap();
        if sender.send_to(b"x", path).is_err() {
            return queue;
        }
        while sender.send_to(b"x", path).is_ok() {}
    }
}

/// Two programs to merge, and one that the daemon leaves alone with a message. The configuration is empty.
struct Programs {
    pair: [Holder; 2],
    left_alone: Holder,
    config: ConfigFile,
}

impl Programs {
    fn start(seed: u64) -> Self {
        let agent = ProgramCopy::of(&victim_binary("holder"), "ssh-agent");
        let left_alone = Holder::start_as(&agent, PAGES_PER_MIB);
        Self { pair: pair(COMMON_MIB, 0, seed), left_alone, config: ConfigFile::new("") }
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        let pids = [self.pair[0].pid(), self.pair[1].pid(), self.left_alone.pid()];
        with_pids(&["run"], &pids, &[&["--json", "--for", "300s", "--config", self.config.name()], more].concat())
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(self.args(more));
        command
    }
}

/// Checks that the daemon merges, answers requests and obeys them.
#[track_caller]
fn assert_works() {
    wait_until("nearly all is merged", || saved_bytes() >= COMMON_MIB * MIB / 100 * 95);
    succeed(&["pause"]);
    assert_eq!(status()["paused"], true);
    succeed(&["resume"]);
}

/// Checks that the daemon ends in time after SIGTERM, and that everything is as before.
#[track_caller]
fn assert_ends(daemon: Daemon, ksm: &KsmAtRest, programs: Programs) -> Ended {
    let signalled = Instant::now();
    let ended = daemon.terminate();
    println!("ended {} ms after the signal", signalled.elapsed().as_millis());
    assert!(signalled.elapsed() < END_MOST, "{ended:?}");
    assert_all_restored(ksm, programs);
    ended
}

#[track_caller]
fn assert_all_restored(ksm: &KsmAtRest, mut programs: Programs) {
    ksm.assert_knobs_restored();
    ksm.give_back(&pids(&programs.pair));
    assert_unmarked(&pids(&programs.pair));
    assert_intact(&mut programs.pair);
}

#[test]
fn messages_that_nobody_reads_delay_nothing() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let programs = Programs::start(81);
    let (_unread, errors) = full_pipe();
    let daemon = Daemon::writing_to(&mut programs.command(&[]), None, Some(errors)).answering();
    assert_works();
    assert_ends(daemon, &ksm, programs).summary();
}

#[test]
fn messages_wait_for_a_reader_that_comes_back_and_one_that_is_gone_is_not_missed() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let programs = Programs::start(82);
    let (mut reader, errors) = full_pipe();
    let daemon = Daemon::writing_to(&mut programs.command(&[]), None, Some(errors)).answering();
    assert_works();
    let is_left = format!("process {} (ssh-agent) is left alone", programs.left_alone.pid());
    let mut said = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    wait_until("the messages are read", || {
        let length = reader.read(&mut bytes).unwrap();
        said.extend_from_slice(&bytes[..length]);
        String::from_utf8_lossy(&said).contains(&is_left)
    });
    drop(reader);
    daemon.reload(&programs.config, "nonsense");
    let has_failed = |event: &Value| event["what"] == "error" && event["why"].as_str().unwrap().contains("unchanged");
    wait_until("the file is refused", || status()["events"].as_array().unwrap().iter().any(has_failed));
    assert_ends(daemon, &ksm, programs).summary();
}

/// Standard error is a stream to the journal. Events, and messages to the service manager, are datagrams.
#[test]
fn a_journal_that_hangs_delays_nothing() {
    const MOUNT: &str = "mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/journal";
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(namespace) = Namespace::make(MOUNT, "a tmpfs cannot be mounted in a mount namespace") else { return };
    let inside = namespace.root().join("run/systemd");
    let _journal = full_queue(&inside.join("journal/socket"));
    let _manager = full_queue(&inside.join("notify"));
    let (_unread, errors) = full_socket();
    let stream = File::from(errors.try_clone().unwrap()).metadata().unwrap();
    let programs = Programs::start(83);
    let mut command = namespace.command(program());
    command.args(programs.args(&[])).env("JOURNAL_STREAM", format!("{}:{}", stream.dev(), stream.ino()));
    command.env("NOTIFY_SOCKET", "/run/systemd/notify").env("WATCHDOG_USEC", "1000000");
    let daemon = Daemon::writing_to(&mut command, None, Some(errors)).answering();
    assert_works();
    assert_ends(daemon, &ksm, programs).summary();
}

#[test]
fn a_summary_that_nobody_reads_does_not_delay_the_end() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let programs = Programs::start(84);
    let (_unread, output) = full_pipe();
    let daemon = Daemon::writing_to(&mut programs.command(&[]), Some(output), None).answering();
    assert_works();
    let ended = assert_ends(daemon, &ksm, programs);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.errors.contains("cannot print the summary: nobody reads standard output"), "{ended:?}");
}

/// Asks a daemon to end while its disk doesn't answer. It has to print its summary in time.
#[track_caller]
fn assert_ends_in_time(daemon: &Daemon) {
    let signalled = Instant::now();
    daemon.signal(libc::SIGTERM);
    wait_until("the summary is printed", || daemon.has_printed("pagefold.run/1"));
    println!("the summary is printed {} ms after the signal", signalled.elapsed().as_millis());
    assert!(signalled.elapsed() < END_MOST);
}

#[test]
fn an_audit_log_whose_disk_does_not_answer_delays_nothing_and_lacks_only_the_last_lines() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(disk) = Disk::mount() else { return };
    let programs = Programs::start(85);
    let log = format!("{}/audit.jsonl", disk.mount);
    let lines = || json_lines(&disk.read(&log));
    let count = |lines: &[Value], what: &str| lines.iter().filter(|line| line["what"] == what).count();
    let daemon = Daemon::of(disk.namespace.command(program()).args(programs.args(&["--audit", &log])));
    wait_until("the log begins", || disk.read(&log).ends_with('\n'));
    let frozen = disk.freeze();
    assert_works();
    drop(frozen);
    wait_until("the marks are logged", || count(&lines(), "mark") >= 2);
    assert_eq!(status()["audit_lost"], 0);

    let frozen = disk.freeze();
    assert_ends_in_time(&daemon);
    ksm.assert_knobs_restored();
    drop(frozen);
    let ended = daemon.end();
    assert!(ended.summary()["audit_lost"].as_u64().unwrap() > 0, "{ended:?}");
    assert!(ended.errors.contains("audit.jsonl hangs, and its last "), "{ended:?}");
    let lines = lines();
    assert!(count(&lines, "begin") == 1 && count(&lines, "lost") == 0, "{lines:?}");
    assert_all_restored(&ksm, programs);
}

/// Each of these files has a thread of its own. The learned file is written every three minutes, and at the end.
#[test]
fn state_files_whose_disk_does_not_answer_delay_nothing() {
    const WRITERS: [&str; 4] = ["history", "kept out", "metrics file", "sketches"];
    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(disk) = Disk::mount() else { return };
    // The list of excluded processes always lies there.
    let script = format!(
        "mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/pagefold && mount --bind {} /var/lib/pagefold",
        disk.mount
    );
    output_of(disk.namespace.command("sh").args(["-c", &script]));
    let programs = Programs::start(86);
    let exe = ProgramCopy::unique();
    let mut excluded = Holder::start_as(&exe, PAGES_PER_MIB);
    let key = programs.config.beside("key");
    std::fs::write(&key, KEY).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    let on_disk = |name: &str| format!("{}/{name}", disk.mount);
    let files = ["history", "learned.json", "pagefold.prom"].map(on_disk);
    let options: [[&str; 2]; 8] = [
        ["--exe", exe.name()],
        ["--history", &files[0]],
        ["--learned", &files[1]],
        ["--metrics-file", &files[2]],
        ["--metrics-interval", "1s"],
        ["--sketches", &disk.mount],
        ["--fleet-key", &key],
        ["--fleet-host", "node"],
    ];
    let args = programs.args(options.as_flattened());
    let daemon = Daemon::of(disk.namespace.command(program()).args(args)).answering();
    succeed(&["exclude", "--pid", &excluded.pid().to_string()]);
    let frozen = disk.freeze();
    // The list grows by the child.
    let child = excluded.fork();
    let asked_in_time = || {
        std::thread::sleep(Duration::from_millis(100));
        let asked = Instant::now();
        let status = status();
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
        status["rounds"].as_u64().unwrap()
    };
    wait_until("every writer waits for the disk", || {
        asked_in_time();
        let blocked = blocked_threads(daemon.pid());
        WRITERS.iter().all(|name| blocked.iter().any(|blocked| blocked == name))
    });
    assert_works();
    let rounds = asked_in_time();
    wait_until("cycles go on", || asked_in_time() > rounds + 5);
    drop(frozen);
    let path = |name: &str| format!("{}{}", disk.namespace.root().display(), on_disk(name));
    wait_until("the files are written", || {
        disk.read(&on_disk("kept-out.json")).contains(&child.to_string())
            && ["pagefold.prom", "node.parquet"].iter().all(|name| Path::new(&path(name)).exists())
    });

    let frozen = disk.freeze();
    assert_ends_in_time(&daemon);
    let blocked = blocked_threads(daemon.pid());
    assert!(blocked.iter().any(|name| name == "learned"), "{blocked:?}");
    ksm.assert_knobs_restored();
    drop(frozen);
    daemon.end().summary();
    assert_all_restored(&ksm, programs);
}
