use super::*;
use crate::golden;
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

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_line_has_time_process_range_reason_and_result() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    let duplicate = Why::Duplicate { duplicate: Pages(400), resident: Pages(512) };
    let mark = entry(true, duplicate, Marking::Done(Pages(512)));
    let Entry::Mark(change) = &mark else { unreachable!() };
    let owner = change.owner.clone();
    for entry in [
        Entry::Begin { command: "run", version: "0.1.0", pid: 1, scope: "--exe redis-server".to_owned() },
        mark,
        entry(false, Why::CowBroken { ratio: Permyriad(6_000) }, Marking::Busy),
        entry(false, Why::MemoryShort, Marking::Refused),
        entry(false, Why::Excluded, Marking::Done(Pages(500))),
        Entry::merged(owner.clone(), Some(9), Pages(512), Pages(256)),
        Entry::merged(owner.clone(), None, Pages(1), Pages(1)),
        Entry::overridden(owner, "its unit sets MemoryKSM=no".to_owned()),
        end(),
    ] {
        assert_eq!(audit.write_at(&entry, SystemTime::UNIX_EPOCH + Duration::from_millis(1_234_567_890_123)), None);
    }
    golden::check("audit.jsonl", &fs::read_to_string(&path).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
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
