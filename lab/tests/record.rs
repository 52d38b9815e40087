//! `pagefold-lab record` on programs whose memory we know to the page.

mod common;

use common::{assert_lab_fails, lab};
use pagefold_engine::host::PageState;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::{ScopeSpec, Selector, resolve};
use pagefold_lab::interrupt::Interrupt;
use pagefold_lab::record::{Deltas, Event, Page, Record, Snapshot, Source, State};
use pagefold_lab::recorder::{Recorder, RecordingOptions};
use pagefold_lab::tenant::{Segment, Tenant, TenantSpec};
use pagefold_procmem::Roots;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::time::Duration;

use pagefold_testkit::*;

const SHARED: u64 = 512;
const ZERO: u64 = 100;
const SAME: u64 = 40;
const TAILS: u64 = 30;

/// Memory with all kinds of segments. Tenants with this specification have the same contents.
fn mixed() -> TenantSpec {
    TenantSpec::new([
        Segment::Shared { pages: SHARED, seed: 3 },
        Segment::Zero { pages: ZERO },
        Segment::Same { pages: SAME, seed: 3 },
        Segment::Tails { pages: TAILS, seed: 3 },
    ])
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_pagefold-lab");

fn tenant() -> Tenant {
    Tenant::start(Path::new(PROGRAM), &mixed()).unwrap()
}

/// Whether recording is possible. Reports a skipped test if not.
fn can_record() -> bool {
    let can_record = fs::File::open("/proc/kpageflags").is_ok();
    if !can_record {
        skip("/proc/kpageflags cannot be opened (not root, or not in this kernel)");
    }
    can_record
}

/// A recording in this process that takes snapshots on request.
struct Recording {
    recorder: Recorder,
    deltas: Deltas,
    state: State,
}

impl Recording {
    fn at(scope: ScopeSpec, anonymous: bool) -> Self {
        let scoped = resolve(&scope, &Roots::default()).unwrap();
        let (every, length) = (Duration::from_millis(1), Duration::from_secs(600));
        let options = RecordingOptions { scope, deny: DenyList::default(), every, length, anonymous };
        let recorder = Recorder::new(options, scoped, Interrupt::default()).unwrap();
        Self { recorder, deltas: Deltas::new(), state: State::default() }
    }

    /// A recording that has all of these processes. If a process unmaps memory as it starts, pagefold leaves it alone
    /// for some seconds.
    fn of_all(pids: &[i32]) -> Self {
        let mut recording = Self::at(ScopeSpec::of_pids(pids.iter().copied()), false);
        wait_until("all processes are recorded", || {
            recording.next().unwrap();
            recording.state.processes.len() == pids.len()
        });
        recording
    }

    fn next(&mut self) -> Option<Snapshot> {
        let snapshot = self.deltas.next(self.recorder.next_snapshot().unwrap()?);
        self.state.apply(&snapshot);
        Some(snapshot)
    }
}

/// The number of the process with this pid.
fn process_of(state: &State, pid: i32) -> u32 {
    *state.processes.iter().find(|(_, row)| row.pid == Some(pid)).unwrap().0
}

/// All pages of a process.
fn pages_of(state: &State, process: u32) -> Vec<Page> {
    let regions = state.regions.values().filter(|held| held.row.process == process);
    regions.flat_map(|held| held.pages.iter().map(|(_, page)| page)).collect()
}

/// The number of copies of each content.
fn copies(pages: &[Page]) -> HashMap<u128, u64> {
    let mut copies = HashMap::new();
    for page in pages {
        *copies.entry(page.digest).or_default() += 1;
    }
    copies
}

/// Asserts that a process has the segments of [`mixed`], and shares them with `other`.
#[track_caller]
fn assert_mixed(pages: &[Page], other: &[Page]) {
    let (own, others) = (copies(pages), copies(other));
    let zeros = own[&0];
    assert!((ZERO..ZERO + 60).contains(&zeros), "{zeros} pages of zeros");
    assert_eq!(own.values().filter(|&&copies| copies == SAME).count(), 1);
    // Common contents: the segments and a little of the program itself.
    let common = own.keys().filter(|digest| others.contains_key(digest)).count() as u64;
    let segments = SHARED + TAILS + 1;
    assert!((segments..segments + 200).contains(&common), "{common} contents in common");
    // Pages that differ only in their last eight bytes.
    let mut alike: HashMap<[u32; 3], BTreeMap<u32, u64>> = HashMap::new();
    for page in pages.iter().filter(|page| page.digest != 0) {
        let [first, second, third, last] = page.parts;
        *alike.entry([first, second, third]).or_default().entry(last).or_default() += 1;
    }
    assert_eq!(alike.values().map(BTreeMap::len).max().unwrap() as u64, TAILS);
}

#[test]
fn a_record_has_all_pages_and_their_changes() {
    if !can_record() {
        return;
    }
    let mut pair = [tenant(), tenant()];
    let pids = pair.each_ref().map(Tenant::pid);
    let mut recording = Recording::of_all(&pids);
    let [one, other] = [0, 1].map(|index| pages_of(&recording.state, process_of(&recording.state, pids[index])));
    assert_mixed(&one, &other);
    assert_mixed(&other, &one);
    assert!(one.iter().all(|page| page.frame.is_some() && (page.digest == 0) == (page.parts == [0; 4])));

    // Only the first byte of the first segment changes. All segments are in the largest mapping; its other pages have
    // no copy in the other tenant.
    let before = recording.state.clone();
    let contents = copies(&other);
    let process = process_of(&before, pids[0]);
    let mine = before.regions.iter().filter(|(_, held)| held.row.process == process);
    let (&segments, held) = mine.max_by_key(|(_, held)| held.pages.len()).unwrap();
    pair[0].damage().unwrap();
    let second = recording.next().unwrap();
    let changed: Vec<(Page, Page)> = second
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Page { region, page, now } if *region == segments => Some((held.pages.get(*page)?, *now)),
            _ => None,
        })
        .filter(|(was, _)| was.digest != 0 && contents.contains_key(&was.digest))
        .collect();
    let [(was, now)] = changed[..] else { panic!("{} pages of the segments changed", changed.len()) };
    let parts: Vec<usize> = (0..4).filter(|&part| was.parts[part] != now.parts[part]).collect();
    assert_eq!((parts, now.state, now.frame == was.frame), (vec![0], PageState::Private, true));
    assert!(now.digest != was.digest && second.events.len() < 100, "{} events", second.events.len());

    // One tenant ends, then the other, which ends the recording.
    let [first_tenant, second_tenant] = pair;
    let gone = process_of(&recording.state, second_tenant.pid());
    drop(second_tenant);
    let third = recording.next().unwrap();
    assert!(third.events.contains(&Event::Exit { process: gone }), "{:?}", third.events);
    drop(first_tenant);
    assert!(recording.next().is_none());
}

#[test]
fn processes_that_enter_the_scope_are_recorded() {
    if !can_record() {
        return;
    }
    // A unique name, so that tenants of other tests aren't in scope.
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("tenant-that-joins");
    fs::copy(PROGRAM, &copy).unwrap();
    let start = || Tenant::start(&copy, &mixed()).unwrap();
    let first = start();
    let mut recording = Recording::at(ScopeSpec(vec![Selector::Exe(copy.display().to_string())]), false);
    assert_eq!(recording.next().map(|_| recording.state.processes.len()), Some(1));
    let second = start();
    wait_until("the second is recorded", || {
        recording.next();
        recording.state.processes.len() == 2
    });
    let row = recording.state.processes[&process_of(&recording.state, second.pid())].clone();
    // The kernel truncates names.
    assert_eq!(row.name.as_deref(), Some("tenant-that-joi"));
    drop([first, second]);
    wait_until("both have ended", || {
        recording.next();
        recording.state.processes.is_empty()
    });
    assert_eq!(recording.state.pages(), 0);
}

#[test]
fn pages_shared_through_fork_stay_shared() {
    if !can_record() {
        return;
    }
    let mut parent = Holder::random(8 * PAGES_PER_MIB);
    let child = parent.fork();
    let mut recording = Recording::of_all(&[parent.pid(), child]);
    for _ in 0..3 {
        recording.next().unwrap();
        let [one, other] =
            [parent.pid(), child].map(|pid| pages_of(&recording.state, process_of(&recording.state, pid)));
        let frames: HashMap<Option<u64>, Page> = other.iter().map(|page| (page.frame, *page)).collect();
        let shared = one.iter().filter(|page| page.state == PageState::Shared && frames.get(&page.frame) == Some(page));
        assert!(shared.count() >= 2000);
    }
}

#[test]
fn merged_pages_stay_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let pair = pair(16, 0, 5);
    let pids = pids(&pair);
    let daemon = Daemon::on(&pids, &["--for", "30s"]);
    wait_until("nearly all memory is saved", || saved_bytes() >= 15 * MIB);
    daemon.stop();
    let saved = saved_bytes();
    let mut recording = Recording::of_all(&pids);
    for _ in 0..2 {
        recording.next().unwrap();
    }
    let [one, other] = [0, 1].map(|index| pages_of(&recording.state, process_of(&recording.state, pids[index])));
    let frames: HashMap<Option<u64>, Page> = other.iter().map(|page| (page.frame, *page)).collect();
    let merged = one.iter().filter(|page| page.state == PageState::Merged && frames.get(&page.frame) == Some(page));
    assert!(merged.count() as u64 >= 15 * PAGES_PER_MIB);
    assert_eq!(saved_bytes(), saved);
    unmerge(&pids);
    ksm.assert_restored();
}

#[test]
fn an_anonymous_record_does_not_identify_processes() {
    if !can_record() {
        return;
    }
    let pair = [tenant(), tenant()];
    let scope = ScopeSpec::of_pids(pair.each_ref().map(Tenant::pid));
    let [mut open, mut hidden] = [false, true].map(|anonymous| Recording::at(scope.clone(), anonymous));
    let shapes = |state: &State| {
        let rows = state.regions.values().map(|held| &held.row);
        let mut shapes: Vec<_> =
            rows.map(|row| (row.process, row.kind.clone(), row.pages, row.first.0 % 512)).collect();
        shapes.sort();
        shapes
    };
    // We take the snapshots one after the other, and a process that has just started may still map memory in between.
    wait_until("both records have the same regions", || {
        open.next().unwrap();
        hidden.next().unwrap();
        shapes(&open.state) == shapes(&hidden.state)
    });
    assert!(hidden.state.processes.values().all(|row| row.pid.is_none() && row.name.is_none()));
    assert_mixed(&pages_of(&hidden.state, 0), &pages_of(&hidden.state, 1));
    let addresses = |state: &State| -> Vec<u64> { state.regions.values().map(|held| held.row.first.0).collect() };
    let (real, shown) = (addresses(&open.state), addresses(&hidden.state));
    assert!(!shown.iter().any(|first| real.contains(first)));
    // Each process has its own shift, frames have one per record, and every record has its own key.
    let frames = |state: &State| pages_of(state, 0).iter().filter_map(|page| page.frame).min().unwrap();
    assert!(frames(&hidden.state) > frames(&open.state));
    let contents = |state: &State| copies(&pages_of(state, 0));
    let (real, shown) = (contents(&open.state), contents(&hidden.state));
    assert_eq!(real.keys().filter(|digest| shown.contains_key(digest)).count(), 1, "only the zero page is common");
}

#[test]
fn the_program_records_until_interrupted() {
    if !can_record() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("pair.parquet");
    fs::write(&file, "a file that is replaced").unwrap();
    let mut pair = [tenant(), tenant()];
    let pids = pair.each_ref().map(Tenant::pid);
    let path = file.to_str().unwrap();
    let args = with_pids(&["record", "--json"], &pids, &["--every", "100ms", "--for", "10m", "-o", path]);
    let mut recording = Daemon::of(std::process::Command::new(PROGRAM).args(&args));
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(100));
        pair[0].damage().unwrap();
        assert!(recording.is_running());
    }
    recording.signal(libc::SIGINT);
    let ended = recording.end();
    assert_eq!(ended.code, Some(0), "{}", ended.errors);
    let summary: Value = serde_json::from_str(&ended.output).unwrap();
    assert_eq!(
        (&summary["schema"], &summary["file_schema"]),
        (&"pagefold.lab.record/1".into(), &"pagefold.record/1".into())
    );
    assert_eq!(summary["file_bytes"], fs::metadata(&file).unwrap().len());
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);

    let record = Record::read(&file).unwrap();
    assert_eq!(
        (record.origin.source.as_str(), record.origin.every_ns, record.origin.anonymous),
        ("live", 100_000_000, false)
    );
    assert!(record.snapshots.len() >= 3, "{} snapshots in two seconds", record.snapshots.len());
    assert_eq!(summary["snapshots"], record.snapshots.len());
    let changes =
        |snapshot: &Snapshot| snapshot.events.iter().filter(|event| matches!(event, Event::Page { .. })).count();
    assert_eq!(summary["pages"], changes(&record.snapshots[0]));
    assert_eq!(summary["changed_pages"], record.snapshots[1..].iter().map(changes).sum::<usize>());
    assert_eq!((&summary["processes"], &summary["left_alone"]), (&2.into(), &Value::Array(vec![])));

    let mut state = State::default();
    state.apply(&record.snapshots[0]);
    let [one, other] = [0, 1].map(|index| pages_of(&state, process_of(&state, pids[index])));
    // The damage may precede the first snapshot.
    let common = copies(&one).keys().filter(|digest| copies(&other).contains_key(digest)).count() as u64;
    assert!(common >= SHARED + TAILS, "{common}");
    let mut damaged = 0;
    for snapshot in &record.snapshots[1..] {
        for event in &snapshot.events {
            let Event::Page { region, page, now } = event else { continue };
            let held = &state.regions[region];
            let Some(was) = held.pages.get(*page).filter(|_| held.row.process == process_of(&state, pids[0])) else {
                continue;
            };
            damaged += usize::from(was.parts[0] != now.parts[0] && was.parts[1..] == now.parts[1..]);
        }
        state.apply(snapshot);
    }
    assert!(damaged > 0);
}

#[test]
fn the_program_prints_a_summary() {
    if !can_record() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("one.parquet");
    let one = tenant();
    let sleeper = Sleeper::start();
    let pids = format!("{},{}", one.pid(), sleeper.pid());
    let path = file.to_str().unwrap();
    let output = lab(&["record", "--pid", &pids, "--deny", "sleep", "--every", "1s", "--for", "2s", "-o", path]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with(&format!("{path}: 3 snapshots of 1 process, ")), "{text}");
    assert!(
        text.contains(&format!("Process {} (sleep) was left alone: on the deny list (sleep).", sleeper.pid())),
        "{text}"
    );
    assert_eq!(Record::read(&file).unwrap().snapshots.len(), 3);
}

#[test]
fn bad_input_is_refused_in_one_line_before_recording() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).display().to_string();
    let good = path("record");
    let sleeper = Sleeper::start();
    let pid = sleeper.pid().to_string();
    let record = |args: &[&str], code, says| assert_lab_fails(&[&["record"], args].concat(), code, says);
    record(&["--pid", &pid], 2, "--output");
    record(&["--pid", &pid, "-o", &good, "--every", "0s"], 2, "it is less than 1ms");
    record(&["--pid", &pid, "-o", &good, "--for", "ever"], 2, "ever");
    record(&["-o", &good], 5, "nothing is in scope");
    record(&["-o", &good, "--pid", "2147483600"], 5, "there is no process 2147483600");
    if can_record() {
        record(&["--pid", &pid, "-o", &good, "--deny", "sleep"], 6, "is left alone: on the deny list (sleep)");
        record(&["--pid", &pid, "-o", place.path().to_str().unwrap()], 1, "is not a file");
        record(&["--pid", &pid, "-o", "/dev/null"], 1, "is not a file");
        record(&["--pid", &pid, "-o", &path("none/record")], 1, "No such file or directory");
        record(&["--pid", &pid, "-o", "/proc/record"], 1, "cannot write /proc/record");
    }
    assert!(!Path::new(&good).exists());
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
}
