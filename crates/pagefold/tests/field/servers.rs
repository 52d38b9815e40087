//! Databases, search servers and job runners.

use crate::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A redis-server in a directory. It loads the dump that is there.
struct Redis {
    server: OwnedChild,
    dir: PathBuf,
}

impl Redis {
    fn start(dir: &Path) -> Self {
        fs::create_dir_all(dir).unwrap();
        // Debian has the server in redis-tools, as redis-check-rdb. The name we start it by selects what it does.
        let program = dir.join("redis-server");
        if !program.exists() {
            symlink("/usr/bin/redis-check-rdb", &program).unwrap();
        }
        let mut command = Command::new(program);
        command.args(["--port", "0", "--unixsocket", "socket", "--save", "", "--logfile", "log"]);
        command.args(["--enable-debug-command", "yes"]).current_dir(dir).stdin(Stdio::null());
        let server = OwnedChild(command.spawn().expect("redis-check-rdb, of redis-tools"));
        let redis = Self { server, dir: dir.to_owned() };
        wait_until("redis answers", || redis.cli(&["PING"]).output().unwrap().stdout == b"PONG\n");
        redis
    }

    fn cli(&self, words: &[&str]) -> Command {
        let mut command = Command::new("redis-cli");
        command.arg("-s").arg(self.dir.join("socket")).args(words);
        command
    }

    #[track_caller]
    fn ask(&self, words: &[&str]) -> String {
        output_of(&mut self.cli(words)).trim().to_owned()
    }

    /// A figure of `INFO persistence`.
    #[track_caller]
    fn figure(&self, name: &str) -> u64 {
        let info = self.ask(&["INFO", "persistence"]);
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {name} in {info}")).trim().parse().unwrap()
    }

    /// Replaces a quarter of the values.
    fn write(&self) {
        let script = format!("for i = 0, {} do redis.call('SET', 'key:' .. i, string.rep(i, 200)) end", KEYS / 4);
        self.ask(&["EVAL", &script, "0"]);
    }
}

/// The number of keys of a [`Redis`], with values of 1 KiB.
const KEYS: u64 = 24 << 10;
const DATA_MIB: u64 = KEYS / 1_024;

/// redis #1823 and #8974: a child of the server writes a snapshot while the server goes on. Meanwhile only written
/// pages are copied.
#[test]
#[ignore = "long; make field runs it"]
fn redis_saves_a_right_snapshot_of_merged_memory_and_copies_only_what_is_written() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let servers = ["one", "two"].map(|name| Redis::start(&dir.path().join(name)));
    for server in &servers {
        server.ask(&["DEBUG", "POPULATE", &KEYS.to_string(), "key", "1024"]);
    }
    let digest = servers[0].ask(&["DEBUG", "DIGEST"]);
    let pids: Vec<i32> = servers.iter().map(|server| server.server.pid()).collect();
    let unmerged = held(&pids);
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, DATA_MIB * 90 / 100, 20);
    for server in &servers {
        server.ask(&["CONFIG", "SET", "rdb-key-save-delay", "20"]);
        server.ask(&["BGSAVE"]);
        server.write();
        assert_eq!(server.figure("rdb_bgsave_in_progress"), 1, "the snapshot was written too soon");
    }
    for server in &servers {
        wait_until("the snapshot is written", || server.figure("rdb_bgsave_in_progress") == 0);
        let copied = server.figure("rdb_last_cow_size") / MIB;
        assert!(copied <= DATA_MIB / 2, "{copied} MiB were copied, and {} MiB written", DATA_MIB / 4);
        assert_ne!(server.ask(&["DEBUG", "DIGEST"]), digest);
    }
    assert_eq!(servers[0].ask(&["DEBUG", "DIGEST"]), servers[1].ask(&["DEBUG", "DIGEST"]));
    assert_saves(unmerged, &pids, DATA_MIB * 80 / 100, 25);
    let copy = dir.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(servers[0].dir.join("dump.rdb"), copy.join("dump.rdb")).unwrap();
    assert_eq!(Redis::start(&copy).ask(&["DEBUG", "DIGEST"]), digest, "the snapshot is wrong");
    ksm.end(daemon, &pids);
}

/// PostgreSQL: shared buffers, which KSM can't merge, and backends with the same private caches (fhir-server #32).
#[test]
#[ignore = "long; make field runs it"]
fn backends_share_their_caches_beside_shared_buffers() {
    const BUFFERS: u64 = 24 * MIB;
    /// Two servers with three backends of 8 MiB.
    const SAVABLE_MIB: u64 = 5 * 8;
    let Some(ksm) = KsmAtRest::take() else { return };
    let start = || Script::of(Command::new("python3").arg(format!("{SOURCES}/postmaster.py")));
    let mut servers = [start(), start()];
    for server in &mut servers {
        assert_eq!(server.line(), "ready");
    }
    let mut pids = Vec::new();
    for server in &servers {
        pids.push(server.pid());
        pids.extend(descendants(server.pid()));
    }
    let report = scan(&pids);
    let promised = savable_mib(&report);
    assert!((SAVABLE_MIB..SAVABLE_MIB + 40).contains(&promised), "scan promises {promised} MiB");
    for &pid in &pids {
        let excluded = &row(&report["processes"], "pid", pid)["excluded"];
        let shared = row(excluded, "reason", "shared mapping, which KSM never merges")["bytes"].as_u64().unwrap();
        assert!(shared >= BUFFERS, "{excluded}");
    }
    let unmerged = held(&pids);
    let daemon = run(&pids);
    assert_saves(unmerged, &pids, SAVABLE_MIB, 20);
    servers.iter_mut().for_each(assert_answers);
    ksm.end(daemon, &pids);
}

/// elasticsearch #97975, ClickHouse #5369: a search server with nearly as many mappings as the kernel allows. Marking
/// parts of its heap must not use up the mappings that are left.
#[test]
#[ignore = "long; make field runs it"]
fn a_server_close_to_the_limit_of_mappings_can_still_map() {
    /// This many parts of each heap have copies elsewhere. Parts without copies lie between them.
    const PARTS: u64 = 30;
    const PART_MIB: u64 = 2;
    const PART: u64 = PART_MIB * PAGES_PER_MIB;
    /// Only larger mappings are marked in part.
    const HEAP: u64 = 1_100 * PAGES_PER_MIB;
    /// How many mappings the server may still make, and how many it makes later.
    const LEFT: usize = 40;
    const LATER: usize = 30;
    let Some(ksm) = KsmAtRest::take() else { return };
    let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if most > 1 << 17 {
        return skip_unsupported("vm.max_map_count is far above the kernel's default");
    }
    let mut servers = [(); 3].map(|()| Holder::start(HEAP));
    for server in &mut servers {
        let aligned = server.first.next_multiple_of(PART) - server.first;
        for part in 0..PARTS {
            let first = aligned + 2 * part * PART;
            server.write(first, PART, COMMON + part * PART);
            let own = u64::try_from(server.pid()).unwrap() << 32 | first;
            server.write(first + PART, PART, own);
        }
    }
    let pid = servers[0].pid();
    let mappings = || fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count();
    let files = most - mappings() - LEFT;
    servers[0].ask(&format!("files {files}"));
    let pids = pids_of(&servers);
    let unmerged = held(&pids);
    let daemon = run(&pids);
    // The other two servers can still merge with each other.
    assert_saves(unmerged, &pids, PARTS * PART_MIB * 95 / 100, 60);
    std::thread::sleep(Duration::from_secs(10));
    println!("{} MiB saved, {} mappings", saved_mib(unmerged, &pids), mappings());
    servers[0].ask(&format!("files {LATER}"));
    assert!(servers.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}

/// openshift/release #32680: jobs took longer with KSM. Jobs that soon end aren't worth a pause.
#[test]
#[ignore = "long; make field runs it"]
fn jobs_that_soon_end_are_not_paused_beside_runners_that_stay() {
    const RUNNER_MIB: u64 = 32;
    const JOB: u64 = 8 * PAGES_PER_MIB;
    const ROUNDS: u64 = 40;
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = ProgramCopy::of(&victim_binary("holder"), "runner");
    let mut runners = [(); 2].map(|()| Holder::with_as(&program, RUNNER_MIB * PAGES_PER_MIB, COMMON));
    let pids = pids_of(&runners);
    let unmerged = held(&pids);
    let scope = ["run", "--json", "--governor", "full", "--mechanism", mechanism(), "--exe", program.name()];
    let daemon = Daemon::start(&scope).answering();
    assert_saves(unmerged, &pids, RUNNER_MIB * 98 / 100, 20);
    let stops = || status()["stops"].as_u64().unwrap();
    let before = stops();
    for _ in 0..ROUNDS {
        let mut jobs = [(); 2].map(|()| Holder::with_as(&program, JOB, COMMON << 1));
        std::thread::sleep(Duration::from_millis(200));
        assert!(jobs.iter_mut().all(Holder::is_intact));
    }
    let stops = stops() - before;
    println!("{stops} pauses in {} jobs", 2 * ROUNDS);
    assert!(stops <= ROUNDS / 4, "{stops} pauses in {} jobs", 2 * ROUNDS);
    assert!(saved_mib(unmerged, &pids) >= RUNNER_MIB * 98 / 100);
    assert!(runners.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &pids);
}
