//! Programs whose runtime manages their memory: Java, Python, Go and JavaScript.

use crate::*;
use pagefold_testkit::cgroup::start_in;
use pagefold_testkit::holder::Change;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The program `Service.java`, compiled.
struct Service(tempfile::TempDir);

impl Service {
    fn compile() -> Self {
        let dir = tempfile::tempdir().unwrap();
        output_of(Command::new("javac").arg("-d").arg(dir.path()).arg(format!("{SOURCES}/Service.java")));
        Self(dir)
    }

    /// Starts it with a heap of this size, all of it touched at the start.
    fn start(&self, heap_mib: u64, collector: &str) -> Script {
        self.start_by(&mut Command::new("java"), heap_mib, collector)
    }

    /// Like [`Self::start`], but `pagefold exec` marks all memory from the start.
    fn start_marked(&self, heap_mib: u64, collector: &str) -> Script {
        self.start_by(Command::new(program()).args(["exec", "--", "java"]), heap_mib, collector)
    }

    fn start_by(&self, command: &mut Command, heap_mib: u64, collector: &str) -> Script {
        command.args([&format!("-Xms{heap_mib}m"), &format!("-Xmx{heap_mib}m"), "-XX:+AlwaysPreTouch", collector]);
        let mut service = Script::of(command.arg("-cp").arg(self.0.path()).args(["Service", "8"]));
        assert_eq!(service.line(), "ready");
        service
    }
}

/// How many services run, with which heap, and how much memory they may hold after some time.
const SERVICES: usize = 3;
const HEAP_MIB: u64 = 512;
const MERGED_MIB: u64 = 250;
const MERGED_AFTER: Duration = Duration::from_secs(75);

fn pids_of_scripts(scripts: &[Script]) -> Vec<i32> {
    scripts.iter().map(Script::pid).collect()
}

/// elasticsearch #16937, zookeeper #301, spark-kubernetes-operator #476: most of such a heap is zeros.
#[test]
#[ignore = "long; make field runs it"]
fn heaps_of_jvms_touched_in_advance_stay_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = Service::compile();
    let mut services = [(); SERVICES].map(|()| program.start(HEAP_MIB, "-XX:+UseG1GC"));
    let pids = pids_of_scripts(&services);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    let began = Instant::now();
    std::thread::sleep(MERGED_AFTER);
    let mut most = 0;
    loop {
        let held = held(&pids) / MIB;
        most = most.max(held);
        assert!(held <= MERGED_MIB, "{held} of {} MiB after {:?}", unmerged / MIB, began.elapsed());
        if began.elapsed() >= duration() {
            break;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    println!("at most {most} of {} MiB", unmerged / MIB);
    services.iter_mut().for_each(assert_answers);
    ksm.end(daemon, &pids);
}

/// How late the services' threads wake up while their heaps are merged, microseconds: the 99th percentile of each
/// service, and the median of these.
fn pauses(services: &mut [Script; SERVICES]) -> u64 {
    let mut pauses = services.each_mut().map(|service| {
        service.say("pauses");
        service.line().parse().unwrap()
    });
    pauses.sort_unstable();
    pauses[SERVICES / 2]
}

/// Merges the heaps by pagefold, or by ksmd alone, and returns the pauses and how much memory is held, MiB.
fn pauses_while_merging(program: &Service, by_pagefold: bool) -> (u64, u64) {
    let ksm = KsmAtRest::take().unwrap();
    let start = if by_pagefold { Service::start } else { Service::start_marked };
    let mut services = [(); SERVICES].map(|()| start(program, HEAP_MIB, "-XX:+UseG1GC"));
    let pids = pids_of_scripts(&services);
    pauses(&mut services);
    let daemon = by_pagefold.then(|| run(&pids));
    if !by_pagefold {
        // What ksmtuned sets when memory is short.
        write_knob("pages_to_scan", "1250");
        write_knob("use_zero_pages", "1");
        write_knob("run", "1");
    }
    std::thread::sleep(MERGED_AFTER);
    let measured = (pauses(&mut services), held(&pids) / MIB);
    services.iter_mut().for_each(assert_answers);
    if let Some(daemon) = daemon {
        ksm.end(daemon, &pids);
    }
    measured
}

#[test]
#[ignore = "long; make field runs it"]
fn pauses_of_jvms_are_no_longer_than_with_ksm() {
    const PAIRS: usize = 5;
    if KsmAtRest::take().is_none() || is_on_request() {
        return;
    }
    let program = Service::compile();
    let mut percents = [0; PAIRS];
    for percent in &mut percents {
        let [(ours, our_mib), (ksms, ksms_mib)] = [true, false].map(|ours| pauses_while_merging(&program, ours));
        println!("99 % of pauses: {ours} us ({our_mib} MiB held), beside ksmd alone {ksms} us ({ksms_mib} MiB)");
        *percent = ours * 100 / ksms;
    }
    percents.sort_unstable();
    println!("in percent: {percents:?}");
    assert!(percents[PAIRS / 2] <= 100, "{percents:?}");
}

/// The heap of ZGC, which is recommended for game servers, is a shared mapping (see jdk11u #5). Search servers lock
/// theirs (elasticsearch #13116).
#[test]
#[ignore = "long; make field runs it"]
fn heaps_that_are_left_alone_are_not_promised() {
    const HEAP_MIB: u64 = 64;
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = Service::compile();
    let mut services = [(); 2].map(|()| program.start(HEAP_MIB, "-XX:+UseZGC"));
    let mut locked = [program_with(HEAP_MIB), program_with(HEAP_MIB)];
    for server in &mut locked {
        server.ask(&format!("lock 0 {}", server.pages));
    }
    let mut pids = pids_of_scripts(&services);
    pids.extend(pids_of(&locked));
    let report = scan(&pids);
    assert!(savable_mib(&report) <= HEAP_MIB / 2, "scan promises {} MiB", savable_mib(&report));
    for (pid, reason) in pids.iter().zip(["shared mapping", "shared mapping", "locked", "locked"]) {
        let excluded = row(&report["processes"], "pid", *pid)["excluded"].as_array().unwrap();
        let because = |row: &&Value| row["reason"].as_str().unwrap().starts_with(reason);
        let bytes = excluded.iter().find(because).map_or(0, |row| row["bytes"].as_u64().unwrap());
        assert!(bytes >= HEAP_MIB * MIB, "{bytes} bytes because of {reason}: {excluded:?}");
    }
    let unmerged = held(&pids);
    let daemon = run(&pids);
    std::thread::sleep(Duration::from_secs(5));
    let saved = saved_mib(unmerged, &pids);
    assert!(saved <= savable_mib(&report), "{saved} MiB saved, more than promised");
    for (pid, reason) in pids.iter().zip(["shared mapping", "shared mapping", "locked", "locked"]) {
        assert_has(&succeed(&["explain", &pid.to_string()]), &[reason]);
    }
    services.iter_mut().for_each(assert_answers);
    assert!(locked.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}

/// A gunicorn that loads its application before it forks.
struct Gunicorn {
    master: OwnedChild,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Gunicorn {
    const WORKERS: usize = 4;

    fn start(model_mib: u64, cgroup: &Cgroup) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let mut command = Command::new("gunicorn");
        command.args([
            "--preload",
            "--workers",
            &Self::WORKERS.to_string(),
            "--log-level",
            "error",
            "--chdir",
            SOURCES,
        ]);
        command.arg("--bind").arg(format!("unix:{}", socket.display())).arg("service:answer");
        command.env("MODEL_MIB", model_mib.to_string()).env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        start_in(&mut command, cgroup.path());
        let gunicorn = Self { master: OwnedChild(command.spawn().expect("gunicorn")), socket, _dir: dir };
        wait_until("all workers run", || gunicorn.workers().len() == Self::WORKERS);
        wait_until("it accepts connections", || UnixStream::connect(&gunicorn.socket).is_ok());
        gunicorn
    }

    fn workers(&self) -> Vec<i32> {
        descendants(self.master.pid())
    }

    /// Asks for the checksum of the model.
    fn checksum(&self) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let Some((_, checksum)) = answer.split_once("\r\n\r\n") else { panic!("{answer:?}") };
        checksum.to_owned()
    }

    fn replace_workers(&self) {
        let old = self.workers();
        send(self.master.pid(), libc::SIGHUP);
        wait_until("the workers are replaced", || {
            let workers = self.workers();
            workers.len() == Self::WORKERS && workers.iter().all(|worker| !old.contains(worker))
        });
    }
}

impl Drop for Gunicorn {
    fn drop(&mut self) {
        send(self.master.pid(), libc::SIGTERM);
        self.master.end(Duration::from_secs(10));
    }
}

/// gunicorn #3178 and #1640, frappe #21474: two masters hold the same model, which their workers share by fork, and
/// garbage collection gives each worker copies of its own.
#[test]
#[ignore = "long; make field runs it"]
fn gunicorns_keep_one_model_when_their_workers_are_replaced() {
    const MODEL_MIB: u64 = 160;
    /// The servers may hold this much after merging, of some 473 MiB before.
    const MERGED: u64 = 315 * MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(cgroup) = Cgroup::of_any_version() else { return };
    let servers = [Gunicorn::start(MODEL_MIB, &cgroup), Gunicorn::start(MODEL_MIB, &cgroup)];
    let checksum = servers[0].checksum();
    let ask_all = || {
        for _ in 0..4 * Gunicorn::WORKERS {
            assert!(servers.iter().all(|server| server.checksum() == checksum));
        }
    };
    ask_all();
    let unmerged = held(&cgroup.members());
    let scope =
        ["run", "--json", "--governor", "full", "--mechanism", mechanism(), "--cgroup", cgroup.path.to_str().unwrap()];
    let daemon = Daemon::start(&scope).answering();
    assert_saves(unmerged, &cgroup.members(), (unmerged - MERGED) / MIB, 25);
    ask_all();
    servers.iter().for_each(Gunicorn::replace_workers);
    ask_all();
    assert_saves(unmerged, &cgroup.members(), MODEL_MIB, 25);
    ksm.end(daemon, &cgroup.members());
}

/// golang #42330, kvm-guest-drivers-windows #556: Go's scavenger and a guest's balloon give memory back page by page,
/// and take it again.
#[test]
#[ignore = "long; make field runs it"]
fn memory_that_is_given_back_and_taken_again_is_counted_and_merged_again() {
    const MIB_EACH: u64 = 48;
    /// Every other piece of this size is given back.
    const PIECE: u64 = PAGES_PER_MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut heaps = [program_with(MIB_EACH), program_with(MIB_EACH)];
    let pids = pids_of(&heaps);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, MIB_EACH * 98 / 100, 20);
    let pieces = || (0..MIB_EACH * PAGES_PER_MIB).step_by(2 * usize::try_from(PIECE).unwrap());
    for heap in &mut heaps {
        for first in pieces() {
            heap.change(Change::Drop { first, pages: PIECE });
        }
    }
    assert_says("half of it is given back", MIB_EACH / 2 * MIB);
    assert!(held(&pids) <= (MIB_EACH / 2 + 2) * MIB, "{} MiB are held", held(&pids) / MIB);
    for heap in &mut heaps {
        for first in pieces() {
            heap.write(first, PIECE, COMMON + first);
        }
    }
    assert_saves(unmerged, &pids, MIB_EACH * 98 / 100, 60);
    assert!(heaps.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}

/// A chromium with one page, which checks its 24 MiB of data all the time.
struct Tab {
    browser: OwnedChild,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Tab {
    fn open() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut command = Command::new("chromium");
        command.args(["--headless=new", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]);
        // Root can't use the sandbox.
        command.args(["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]);
        command.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
        command.arg(format!("file://{SOURCES}/page.html"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let tab = Self { browser: OwnedChild(command.spawn().expect("chromium")), log, _dir: dir };
        wait_until("the page has its data", || tab.checks() > 0);
        tab
    }

    /// How often the page has found its data intact.
    fn checks(&self) -> usize {
        let log = fs::read_to_string(&self.log).unwrap();
        assert!(!log.contains("\"damaged\""), "{log}");
        log.matches("\"intact\"").count()
    }

    fn pids(&self) -> Vec<i32> {
        [&[self.browser.pid()], &descendants(self.browser.pid())[..]].concat()
    }
}

impl Drop for Tab {
    fn drop(&mut self) {
        send(self.browser.pid(), libc::SIGTERM);
        self.browser.end(Duration::from_secs(10));
    }
}

/// betterwright #76: browsers that show the same page.
#[test]
#[ignore = "long; make field runs it"]
fn browsers_with_the_same_page_share_its_data() {
    const DATA_MIB: u64 = 24;
    let Some(ksm) = KsmAtRest::take() else { return };
    let tabs = [Tab::open(), Tab::open()];
    let pids = [tabs[0].pids(), tabs[1].pids()].concat();
    let unmerged = held(&pids);
    let daemon =
        Daemon::on(&pids, &["--governor", "full", "--mechanism", mechanism(), "--allow", "chromium"]).answering();
    assert_saves(unmerged, &pids, DATA_MIB, 60);
    let checks = tabs.each_ref().map(Tab::checks);
    wait_until("both pages go on", || tabs[0].checks() > checks[0] + 2 && tabs[1].checks() > checks[1] + 2);
    ksm.end(daemon, &pids);
}
