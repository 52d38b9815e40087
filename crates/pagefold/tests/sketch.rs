//! `pagefold sketch` and runs with sketches, on processes for which we know the contents of every page. KSM isn't
//! needed.

use pagefold_engine::units::whole;
use pagefold_sketch::{Estimate, FleetKey, Kind, Row, SketchFile};
use pagefold_testkit::injection::Victim;
use pagefold_testkit::*;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct Fleet {
    dir: TempDir,
}

impl Fleet {
    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        fs::write(&key, format!("{}\n", Self::KEY)).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn word(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn sketch(&self, pids: &[i32], more: &[&str]) -> (Value, SketchFile) {
        let (key, out) = (self.word("key"), self.word("out.parquet"));
        let args = [&["--key", &key, "-o", &out, "--host", "node-1"], more].concat();
        let summary = json_of(&with_pids(&["sketch"], pids, &args));
        (summary, read(&self.path("out.parquet")))
    }
}

fn read(path: &Path) -> SketchFile {
    let file = pagefold_sketch::read(fs::read(path).unwrap()).unwrap();
    let key = Fleet::KEY.parse::<FleetKey>().unwrap().id();
    assert!(file.rows.iter().all(|row| row.key == key));
    file
}

fn row<'a>(file: &'a SketchFile, workload: &str) -> &'a Row {
    file.rows.iter().find(|row| row.workload == workload).unwrap_or_else(|| panic!("no {workload} in {file:?}"))
}

fn pages(estimate: Estimate) -> u64 {
    whole(estimate.contents)
}

/// A process of this program: `contents` contents from number `from` on, `copies` pages of each, and pages of zeros.
fn holding(program: &ProgramCopy, from: u64, contents: u64, copies: u64, zeros: u64) -> Holder {
    let mut holder = Holder::start_as(program, contents * copies + zeros);
    for copy in 0..copies {
        holder.write(copy * contents, contents, from);
    }
    holder.zero(contents * copies, zeros);
    holder
}

fn copy_of_holder(name: &str) -> ProgramCopy {
    ProgramCopy::of(&victim_binary("holder"), name)
}

#[track_caller]
fn refused(args: &[String], code: i32, says: &str) {
    assert_refused(&pagefold(args), code, says);
}

const PAGE: u64 = 4096;

#[test]
fn what_workloads_hold_is_sketched_to_the_page() {
    if !can_read_pages() {
        return;
    }
    let fleet = Fleet::new();
    let (alpha, beta) = (copy_of_holder("alpha"), copy_of_holder("beta"));
    let first = holding(&alpha, 1 << 40, 2000, 2, 300);
    let second = holding(&beta, (1 << 40) + 1500, 1500, 1, 100);
    let (summary, file) = fleet.sketch(&[first.pid(), second.pid()], &[]);
    assert_eq!(file.rows.len(), 2);
    assert_eq!((file.host(), summary["host"].as_str()), (Some("node-1"), Some("node-1")));
    let (a, b) = (row(&file, "alpha"), row(&file, "beta"));
    assert_eq!((a.kind, a.domain.as_str()), (Kind::Process, "default"));
    // Programs also have some other pages: stacks, relocated data, the heap.
    let own = 100;
    let near = |found: u64, expected: u64, what: &str| {
        assert!((expected..expected + own).contains(&found), "{what}: {found}, not {expected}");
    };
    near(a.read_bytes / PAGE, 4300, "pages of alpha");
    near(a.zero_bytes / PAGE, 300, "zeros of alpha");
    near(a.pages[1], 4000, "pages with one copy");
    near(a.savable_bytes / PAGE, 2299, "savable in alpha");
    near(pages(a.sketch.contents()), 2000, "contents of alpha");
    near(b.pages[0], 1500, "single pages of beta");
    near(pages(a.sketch.common(&b.sketch)), 500, "in common");
    assert_eq!((a.anonymous_bytes, a.came_bytes, a.went_bytes), (a.read_bytes, 0, 0));
    assert!(a.since_us <= a.time_us && a.host_memory_bytes > 1 << 28 && a.host_cpu_millicores >= 1000);
    // Only root may read the file, and in another run the same contents have the same digests.
    assert_eq!(fs::metadata(fleet.path("out.parquet")).unwrap().permissions().mode() & 0o7777, 0o600);
    let (_, again) = fleet.sketch(&[second.pid()], &[]);
    near(pages(row(&again, "beta").sketch.common(&b.sketch)), 1500, "in another run");
}

#[test]
fn pages_that_are_shared_through_fork_are_held_once_and_stay_shared() {
    if !can_read_pages() {
        return;
    }
    let fleet = Fleet::new();
    let program = copy_of_holder("forked");
    let mut holder = holding(&program, 1 << 41, 3000, 1, 0);
    let child = holder.fork();
    let rollup = format!("/proc/{child}/smaps_rollup");
    let before = kib(&rollup, "Private_Dirty");
    let (_, file) = fleet.sketch(&[holder.pid(), child], &[]);
    let row = row(&file, "forked");
    assert!((3000..3200).contains(&(row.read_bytes / PAGE)), "{row:?}");
    assert!(row.savable_bytes / PAGE < 100, "{row:?}");
    assert!(kib(&rollup, "Private_Dirty") < before + 400, "nothing was copied");
    assert!(holder.is_intact());
}

#[test]
fn what_is_left_alone_is_in_no_sketch() {
    if !can_read_pages() {
        return;
    }
    let fleet = Fleet::new();
    let (seen, denied) = (copy_of_holder("seen"), copy_of_holder("secret-keeper"));
    let (first, second) = (holding(&seen, 1 << 42, 1000, 1, 0), holding(&denied, 1 << 42, 1000, 1, 0));
    let (_, file) = fleet.sketch(&[first.pid(), second.pid()], &["--deny", "secret*"]);
    assert_eq!(file.rows.iter().map(|row| row.workload.as_str()).collect::<Vec<_>>(), ["seen"]);
    let (key, out) = (fleet.word("key"), fleet.word("none.parquet"));
    let args = ["--deny", "secret*", "--key", &key, "-o", &out];
    refused(&with_pids(&["sketch"], &[second.pid()], &args), 6, "nothing in scope may be read");
    assert!(!fleet.path("none.parquet").exists());
}

#[test]
fn each_wrong_argument_has_its_line() {
    let fleet = Fleet::new();
    let pid = i32::try_from(std::process::id()).unwrap();
    let (key, out) = (fleet.word("key"), fleet.word("out.parquet"));
    let none = fleet.word("none/out.parquet");
    for (args, code, says) in [
        (vec!["-o", out.as_str()], 2, "need the fleet's key"),
        (vec!["-o", &out, "--key", "/etc/hostname"], 2, "hostname is"),
        (vec!["-o", &none, "--key", &key], 2, "cannot be created"),
        (vec!["-o", "/", "--key", &key], 2, "has no name"),
        (vec!["-o", &out, "--key", &key, "--host", "a/b"], 2, "is no name"),
    ] {
        refused(&with_pids(&["sketch"], &[pid], &args), code, says);
    }
}

/// The first pass takes about ten seconds, since reading may only take 0.08 % of a core.
#[test]
fn a_run_keeps_sketches_and_replaces_their_file() {
    // This run doesn't use KSM, but it'd replace the control socket of another test's daemon.
    let Some(_ksm) = KsmAtRest::take() else { return };
    if !can_read_pages() {
        return;
    }
    let fleet = Fleet::new();
    let program = copy_of_holder("kept");
    let holder = holding(&program, 1 << 43, 2000, 1, 50);
    let (key, dir) = (fleet.word("key"), fleet.dir.path().to_str().unwrap().to_owned());
    let flags = ["--dry-run", "--sketches", &dir, "--fleet-key", &key, "--fleet-host", "node-2", "--for", "300s"];
    let run = Daemon::on(&[holder.pid()], &flags);
    let file = fleet.path("node-2.parquet");
    wait_until("the sketches are written", || file.exists());
    let written = read(&file);
    let row = row(&written, "kept");
    assert_eq!(row.host, "node-2");
    assert!((2050..2200).contains(&(row.read_bytes / PAGE)), "{row:?}");
    run.stop();
    // No other file is left, not even the new one that is renamed.
    let mut names: Vec<_> = fleet.dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["key", "node-2.parquet"]);
}

/// If a program locks its memory map while we read it for its sketch, no request waits for that program.
#[test]
fn a_program_that_stalls_while_it_is_read_delays_no_request() {
    let Some(_ksm) = KsmAtRest::take() else { return };
    if !can_read_pages() {
        return;
    }
    let mut victim = match Victim::try_start(&["stalling", "locking"]) {
        Ok(victim) => victim,
        Err(why) => return skip_unsupported(why),
    };
    let fleet = Fleet::new();
    let (key, dir) = (fleet.word("key"), fleet.dir.path().to_str().unwrap().to_owned());
    let flags = ["--dry-run", "--sketches", &dir, "--fleet-key", &key, "--fleet-host", "node-3"];
    let run = Daemon::on(&[victim.pid()], &flags).answering();
    wait_until("its memory is known", || status()["resident_bytes"].as_u64().unwrap() >= 8 * MIB);
    // Sketching reads about 2 MiB a second, so most of the 8 MiB are still unread.
    std::thread::sleep(Duration::from_secs(1));
    victim.send();
    wait_until("it is locked", || tids(victim.pid()).iter().any(|&tid| state(tid) == b'D'));
    // The program's sketch ends with the pages that have been read so far.
    let (began, file) = (Instant::now(), fleet.path("node-3.parquet"));
    while !file.exists() {
        let asked = Instant::now();
        assert!(pagefold(&["status"]).status.success());
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        assert!(began.elapsed() < Duration::from_secs(120), "there is no sketch");
        std::thread::sleep(Duration::from_millis(200));
    }
    let written = read(&file);
    println!("{:.1} s: {} rows", began.elapsed().as_secs_f64(), written.rows.len());
    assert!(written.rows.iter().any(|row| row.read_bytes < row.anonymous_bytes), "{written:?}");
    run.stop();
    victim.send();
}
