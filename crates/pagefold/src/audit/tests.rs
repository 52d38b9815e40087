use super::*;
use crate::golden;
use pagefold_engine::host::{ChangeResult, Marking, Span, Why};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_text::exit;
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::mpsc::Sender;

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
    let change = pagefold_engine::host::Change { span, why };
    let change = Change::of(owner, &ChangeResult { change, marking });
    if mark { Entry::Mark(change) } else { Entry::Unmark(change) }
}

fn change(uid: u32) -> Change {
    let Entry::Mark(mut change) = entry(true, Why::Asked, Marking::Done(Pages(512))) else { unreachable!() };
    change.owner.uid = Some(uid);
    change
}

#[test]
fn many_changes_to_one_process_share_a_line() {
    let mut changes = Changes::default();
    (0..1_000).for_each(|_| changes.add(change(1)));
    let lines: Vec<Change> = changes.into_iter().collect();
    let rest = serde_json::to_value(&lines[16]).unwrap();
    assert_eq!((lines.len(), &rest["spans"], &rest["done_bytes"]), (17, &984.into(), &(984_u64 * (512 << 12)).into()));
    assert_eq!(serde_json::to_value(&lines[15]).unwrap()["spans"], Value::Null);
}

/// A log whose file system hangs until the sender is dropped.
fn hanging(path: &Path) -> (Audit, Sender<()>) {
    let mut audit = Audit::open(path).unwrap();
    let mut file = audit.file.take().unwrap();
    let (answer, answers) = channel::<()>();
    let serve = move |next| {
        let _ = answers.recv();
        file.serve(next);
    };
    audit.orders.start("test", serve).unwrap();
    (audit, answer)
}

#[test]
fn one_users_lines_displace_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let (mut audit, answer) = hanging(&path);
    let tries = 10_000;
    (0..tries).for_each(|_| audit.write(&Entry::Mark(change(1))));
    let lost = audit.lost();
    assert!(lost > tries / 2, "{lost}");
    audit.write(&Entry::Mark(change(2)));
    assert_eq!(audit.lost(), lost);
    drop(answer);
    assert_eq!(settled(&mut audit), [""; 0]);
    let lines = lines(&path);
    let tail = &lines[lines.len() - 2..];
    assert_eq!((&tail[0]["lost"], &tail[1]["uid"]), (&lost.into(), &2.into()));
    audit.write(&Entry::Mark(change(1)));
    assert_eq!((settled(&mut audit), audit.lost()), (Vec::new(), lost));
}

fn end() -> Entry {
    Entry::End { command: "run", pid: 1, lost: 0 }
}

/// Waits until everything is written, and returns the complaints.
fn settled(audit: &mut Audit) -> Vec<String> {
    audit.finish();
    audit.complaints()
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
        entry(false, Why::CowBroken { lasts_ns: 12_000_000_000 }, Marking::Busy),
        entry(false, Why::MemoryShort, Marking::Refused),
        entry(false, Why::Excluded, Marking::Done(Pages(500))),
        Entry::merged(owner.clone(), Some(9), Pages(512), Pages(256)),
        Entry::merged(owner.clone(), None, Pages(1), Pages(1)),
        Entry::overridden(owner, "its unit sets MemoryKSM=no".to_owned()),
        Entry::Lost { lost: 3 },
        end(),
    ] {
        audit.write_at(&entry, SystemTime::UNIX_EPOCH + Duration::from_millis(1_234_567_890_123));
    }
    assert_eq!(settled(&mut audit), [""; 0]);
    golden::check("audit.jsonl", &fs::read_to_string(&path).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
}

/// The log's file. Call this before the first line is written, since then the thread takes the file.
fn file_of(audit: &mut Audit) -> &mut LogFile {
    audit.file.as_mut().unwrap()
}

#[test]
fn a_line_that_cannot_be_written_is_counted_the_first_reported_and_the_gap_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    file_of(&mut audit).file = OpenOptions::new().append(true).open("/dev/full").unwrap();
    audit.write(&end());
    audit.write(&end());
    let complaints = settled(&mut audit);
    assert!(complaints[0].contains("audit.jsonl") && complaints[0].contains("; "), "{complaints:?}");
    assert_eq!((complaints.len(), audit.lost()), (1, 2));
    audit.reopen();
    audit.write(&end());
    assert_eq!(settled(&mut audit), [""; 0]);
    let lines = lines(&path);
    assert_eq!((&lines[0]["what"], &lines[0]["lost"]), (&"lost".into(), &2.into()));
    assert_eq!((&lines[1]["what"], lines.len(), audit.lost()), (&"end".into(), 2, 2));
}

/// If a file system hangs, the log's thread waits for it, but nobody else does.
#[test]
fn a_log_that_takes_no_lines_delays_nothing_and_tells_how_many_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let (mut audit, answer) = hanging(&path);
    let line = line_of(&end(), SystemTime::now()).len();
    let fit = (ROOM / line) as u64;
    for _ in 0..fit + 7 {
        audit.write(&end());
    }
    assert_eq!(audit.lost(), 7);
    let complaints = audit.complaints();
    assert_eq!(complaints.len(), 1);
    assert!(complaints[0].contains("audit.jsonl takes no more lines; "), "{complaints:?}");
    let began = std::time::Instant::now();
    let complaints = settled(&mut audit);
    assert!((END_LIMIT..END_LIMIT * 10).contains(&began.elapsed()));
    assert!(complaints[0].contains(&format!("its last {fit} lines may be lost")), "{complaints:?}");
    // Now the file system answers again, and the file has been renamed.
    fs::rename(&path, dir.path().join("old")).unwrap();
    audit.reopen();
    drop(answer);
    assert_eq!(audit.orders.flush(Duration::from_secs(60)), 0);
    assert_eq!(lines(&dir.path().join("old")).len() as u64, fit);
    let lines = lines(&path);
    assert_eq!((&lines[0]["what"], &lines[0]["lost"], lines.len()), (&"lost".into(), &7.into(), 1));
}

#[test]
fn a_line_cut_short_does_not_spoil_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    file_of(&mut audit).file.write_all(b"{\"half\":").unwrap();
    file_of(&mut audit).torn = true;
    audit.write(&end());
    audit.write(&end());
    assert_eq!(settled(&mut audit), [""; 0]);
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count(), 2);
    assert_eq!(text.lines().count(), 3);
}

#[test]
fn the_log_is_reopened_by_name_and_never_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let old = dir.path().join("audit.jsonl.1");
    let mut audit = Audit::open(&path).unwrap();
    audit.write(&end());
    assert_eq!(settled(&mut audit), [""; 0]);
    fs::rename(&path, &old).unwrap();
    audit.write(&end());
    audit.reopen();
    audit.write(&end());
    assert_eq!(settled(&mut audit), [""; 0]);
    assert_eq!((lines(&old).len(), lines(&path).len()), (2, 1));
    let mut again = Audit::open(&path).unwrap();
    again.write(&end());
    assert_eq!(settled(&mut again), [""; 0]);
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
