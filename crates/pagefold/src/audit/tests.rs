use super::*;
use crate::golden::{self, NOW};
use pagefold_core::host::{ChangeResult, Marking, Span, Why};
use pagefold_core::keys::RegionKey;
use pagefold_core::units::{Pages, Permyriad, Vpn};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

fn entry(mark: bool, why: Why, marking: Marking) -> Entry {
    let owner = Owner {
        pid: 4711,
        start_time_ticks: 99,
        name: "redis-server".into(),
        exe: None,
        uid: None,
        cgroup: None,
        domain: Some("default".into()),
    };
    let span = Span { region: RegionKey(1), first: Vpn::of_address(0x7f00_0000_0000), pages: Pages(512) };
    Entry::changed(owner, mark, &ChangeResult { change: pagefold_core::host::Change { span, why }, marking })
}

fn end() -> Entry {
    Entry::End { command: "run", pid: 1, lost: 0 }
}

/// The entries that no run on the simulated host makes.
#[test]
fn other_lines_have_their_figures_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    let Entry::Mark(change) = entry(true, Why::Asked, Marking::Done(Pages(512))) else { unreachable!() };
    let owner = change.owner;
    let (first, pages) = (Vpn::of_address(0x7f00_0000_0000), Pages(512));
    let change = pagefold_core::host::Change { span: Span { region: RegionKey(1), first, pages }, why: Why::Excluded };
    let withdrawn = ChangeResult { change, marking: Marking::Busy };
    let begin = Entry::Begin { command: "run", version: "0.1.0", pid: 1, scope: "--exe redis-server".to_owned() };
    for entry in [
        begin,
        entry(false, Why::CowBroken { ratio: Permyriad(6_000) }, Marking::Done(Pages(500))),
        entry(false, Why::MemoryShort, Marking::Refused),
        Entry::withdrawn(owner.clone(), &withdrawn, "on the deny list (redis-server)".to_owned()),
        Entry::merged(owner.clone(), Some(4_712), Pages(300), Pages(256)),
        Entry::overridden(owner, "its unit sets MemoryKSM=no".to_owned()),
        end(),
    ] {
        assert_eq!(audit.write_at(&entry, SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)), None);
    }
    golden::check("audit-other.jsonl", &fs::read_to_string(path).unwrap());
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_line_has_time_process_range_reason_and_result() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_234_567_890_123);
    let duplicate = Why::Duplicate { duplicate: Pages(400), resident: Pages(512) };
    assert_eq!(audit.write_at(&entry(true, duplicate, Marking::Done(Pages(512))), time), None);
    let cow_broken = entry(false, Why::CowBroken { ratio: Permyriad(6_000) }, Marking::Busy);
    assert_eq!(audit.write(&cow_broken), None);
    let lines = lines(&path);
    let wanted = serde_json::json!({
        "schema": "pagefold.audit/1", "time": "2009-02-13T23:31:30.123Z", "what": "mark", "pid": 4711,
        "start_time_ticks": 99, "name": "redis-server", "exe": null, "uid": null, "cgroup": null, "domain": "default",
        "first": "7f0000000000", "last": "7f00001fffff", "bytes": 2 << 20,
        "why": {"kind": "duplicate", "sentence": "400 of its 512 resident pages are zero or have a copy"},
        "outcome": "done", "done_bytes": 2 << 20,
    });
    assert_eq!(lines[0], wanted);
    assert_eq!((&lines[1]["what"], &lines[1]["outcome"]), (&"unmark".into(), &"busy".into()));
    assert_eq!((&lines[1]["why"]["kind"], &lines[1]["done_bytes"]), (&"cow-broken".into(), &0.into()));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn requests_of_a_cycle_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let owner = Owner {
        pid: 7,
        start_time_ticks: 8,
        name: "a".into(),
        exe: None,
        uid: Some(0),
        cgroup: None,
        domain: Some("default".into()),
    };
    let mut audit = Audit::open(&path).unwrap();
    assert_eq!(audit.write(&Entry::merged(owner.clone(), Some(9), Pages(512), Pages(256))), None);
    assert_eq!(audit.write(&Entry::merged(owner, None, Pages(1), Pages(1))), None);
    let lines = lines(&path);
    assert_eq!((&lines[0]["what"], &lines[0]["pid"], &lines[0]["with_pid"]), (&"merge".into(), &7.into(), &9.into()));
    assert_eq!((&lines[0]["bytes"], &lines[0]["done_bytes"]), (&(2 << 20).into(), &(1 << 20).into()));
    assert_eq!(lines[1]["with_pid"], Value::Null);
}

#[test]
fn a_line_that_cannot_be_written_is_counted_and_the_first_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    audit.file = OpenOptions::new().append(true).open("/dev/full").unwrap();
    let complaint = audit.write(&end()).unwrap();
    assert!(complaint.contains("audit.jsonl") && complaint.contains("; "), "{complaint}");
    assert_eq!(audit.write(&end()), None);
    assert_eq!(audit.lost(), 2);
    audit.reopen().unwrap();
    assert_eq!(audit.write(&end()), None);
    assert_eq!((audit.lost(), lines(&path).len()), (2, 1));
}

#[test]
fn a_line_cut_short_does_not_spoil_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    audit.file.write_all(b"{\"half\":").unwrap();
    audit.torn = true;
    assert_eq!(audit.write(&end()), None);
    assert_eq!(audit.write(&end()), None);
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count(), 2);
    assert_eq!(text.lines().count(), 3);
}

#[test]
fn the_log_is_reopened_by_name_and_never_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let (path, old) = (dir.path().join("audit.jsonl"), dir.path().join("audit.jsonl.1"));
    let mut audit = Audit::open(&path).unwrap();
    assert_eq!(audit.write(&end()), None);
    fs::rename(&path, &old).unwrap();
    assert_eq!(audit.write(&end()), None);
    audit.reopen().unwrap();
    assert_eq!(audit.write(&end()), None);
    assert_eq!((lines(&old).len(), lines(&path).len()), (2, 1));
    assert_eq!(Audit::open(&path).unwrap().write(&end()), None);
    assert_eq!(lines(&path).len(), 2);
}

#[test]
fn files_that_others_may_write_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path, says: &str| {
        let error = Audit::open(path).unwrap_err();
        assert_eq!(error.code, exit::USAGE);
        assert!(error.line.contains(says) && error.line.contains("; "), "{}", error.line);
    };
    let set = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let path = dir.path().join("audit.jsonl");
    fs::write(&path, "").unwrap();
    set(&path, 0o620);
    refused(&path, "other users may write");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    refused(&path, "cannot be opened");
    fs::create_dir(dir.path().join("a")).unwrap();
    refused(&dir.path().join("a"), "cannot be opened");
    refused(&dir.path().join("no/such/file"), "cannot be created");
    refused(Path::new("/dev/full"), "regular file");
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    set(&open, 0o1777);
    refused(&open.join("audit.jsonl"), "directory that other users may write");
    fs::create_dir(open.join("below")).unwrap();
    Audit::open(&open.join("below/audit.jsonl")).expect("as below /tmp");
    set(&open, 0o777);
    refused(&open.join("below/audit.jsonl"), "is in a directory that other users may write");
    assert_eq!(fs::read_dir(open.join("below")).unwrap().count(), 1);
}
