//! Records as files: we read valid ones back unchanged, and refuse others.

use super::*;
use pagefold_sketch::seal;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

struct TestDir {
    inner: TempDir,
}

impl TestDir {
    fn new() -> Self {
        // We use memory if possible: writing twenty thousand small files to disk takes half a minute.
        Self { inner: tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.inner.path().join("some.record")
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.inner.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn read_bytes(&self, bytes: &[u8]) -> Result<Record, RecordError> {
        fs::write(self.path(), bytes).unwrap();
        Record::read(&self.path())
    }
}

fn save(record: &Record, path: &Path) -> Written {
    let mut writer = RecordWriter::create(path, &record.origin).unwrap();
    record.snapshots.iter().for_each(|snapshot| writer.write(snapshot).unwrap());
    writer.finish().unwrap()
}

fn process(process: u32) -> Event {
    Event::Process(ProcessRow { process, pid: Some(70), name: Some("proud".into()) })
}

fn region(region: u32, process: u32, first: u64, pages: u64) -> Event {
    let (kind, first, pages) = ("heap".to_owned(), Vpn(first), Pages(pages));
    Event::Region(RegionRow { region, process, kind, first, pages })
}

fn page(region: u32, page: u64, digest: u128) -> Event {
    let now = Page {
        state: PageState::Private,
        huge: page % 2 == 0,
        digest,
        parts: [1, 2, 3, u32::MAX],
        frame: (page % 3 > 0).then_some(page << 20),
    };
    Event::Page { region, page: Vpn(page), now }
}

fn absent(region: u32, page: u64) -> Event {
    let now = Page { state: PageState::Absent, huge: false, digest: 0, parts: [0; PARTS], frame: None };
    Event::Page { region, page: Vpn(page), now }
}

/// A small record with everything in it.
fn small() -> Record {
    let mut events = vec![process(1), process(2), region(1, 1, 100, 50), region(2, 2, 1 << 35, 40)];
    events.extend((100..130).map(|at| page(1, at, u128::from(at) << 77)));
    events.extend((0..20).map(|at| page(2, (1 << 35) + at, u128::MAX - u128::from(at))));
    let states = [PageState::Merged, PageState::Shared, PageState::ZeroMapped];
    for (event, state) in events.iter_mut().rev().zip(states) {
        let Event::Page { now, .. } = event else { unreachable!() };
        now.state = state;
        if state == PageState::ZeroMapped {
            (now.digest, now.parts) = (0, [0; PARTS]);
        }
    }
    let later = vec![Event::Exit { process: 2 }, region(1, 1, 90, 50), page(1, 95, 5), absent(1, 101)];
    let last = vec![Event::Unmap { region: 1 }, Event::Process(ProcessRow { process: 3, pid: None, name: None })];
    Record {
        origin: Origin { source: "live".into(), every_ns: 1_000_000_000, anonymous: false },
        snapshots: [(5, events), (1_000_000_005, later), (1_000_000_005, vec![]), (2_000_000_000, last)]
            .map(|(time_ns, events)| Snapshot { time_ns, events })
            .to_vec(),
    }
}

fn small_bytes(dir: &TestDir) -> Vec<u8> {
    save(&small(), &dir.path());
    fs::read(dir.path()).unwrap()
}

#[test]
fn a_record_is_read_back() {
    let dir = TestDir::new();
    let written = save(&small(), &dir.path());
    assert_eq!(Record::read(&dir.path()).unwrap(), small());
    let bytes = fs::metadata(dir.path()).unwrap().len();
    assert_eq!(written, Written { snapshots: 4, processes: 3, regions: 2, pages: 50, changes: 2, bytes });
    assert_eq!(dir.files(), ["some.record"]);
    // We read the snapshots one by one, and a record without snapshots.
    let mut reader = RecordReader::open(&dir.path()).unwrap();
    assert_eq!(reader.origin(), &small().origin);
    assert_eq!(reader.next().unwrap().unwrap(), small().snapshots[0]);
    assert_eq!(reader.count(), 3);
    let empty = Record { snapshots: vec![], ..small() };
    save(&empty, &dir.path());
    assert_eq!(Record::read(&dir.path()).unwrap(), empty);
}

#[test]
fn several_row_groups_are_read_back() {
    let dir = TestDir::new();
    let mut events = vec![process(1), region(1, 1, 0, 1 << 20)];
    events.extend((0..300_000).map(|at| page(1, at * 3, u128::from(at))));
    let changes: Vec<Event> = (0..100_000).map(|at| page(1, at, 7)).collect();
    let snapshots = vec![Snapshot { time_ns: 0, events }, Snapshot { time_ns: 9, events: changes }];
    let record = Record { snapshots, ..small() };
    let written = save(&record, &dir.path());
    assert_eq!((written.pages, written.changes), (300_000, 100_000));
    assert!(Record::read(&dir.path()).unwrap() == record);
    // About 40 bytes per page.
    assert!(written.bytes < 400_000 * 42, "{}", written.bytes);
}

#[test]
fn a_source_is_written_to_its_end() {
    struct Three(u64);
    impl Source for Three {
        type Error = RecordError;
        fn next_snapshot(&mut self) -> Result<Option<MemorySnapshot>, RecordError> {
            self.0 += 1;
            Ok((self.0 < 4).then(|| MemorySnapshot { time_ns: self.0, ..MemorySnapshot::default() }))
        }
    }
    let dir = TestDir::new();
    assert_eq!(write(&dir.path(), &small().origin, &mut Three(0)).unwrap().snapshots, 3);
    let times: Vec<u64> = Record::read(&dir.path()).unwrap().snapshots.iter().map(|found| found.time_ns).collect();
    assert_eq!(times, [1, 2, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_record_is_read_back(record in arbitrary::record()) {
        let dir = TestDir::new();
        save(&record, &dir.path());
        prop_assert_eq!(Record::read(&dir.path()).unwrap(), record);
    }
}

#[test]
fn an_unfinished_record_leaves_no_file() {
    let dir = TestDir::new();
    fs::write(dir.path(), "the former content").unwrap();
    let mut writer = RecordWriter::create(&dir.path(), &small().origin).unwrap();
    writer.write(&small().snapshots[0]).unwrap();
    assert_eq!(dir.files().len(), 2);
    drop(writer);
    assert_eq!(dir.files(), ["some.record"]);
    assert_eq!(fs::read(dir.path()).unwrap(), b"the former content");
}

#[test]
fn only_regular_files_and_link_targets_are_replaced() {
    let dir = TestDir::new();
    let create = |path: &Path| RecordWriter::create(path, &small().origin).map(drop);
    assert!(matches!(create(dir.inner.path()), Err(RecordError::Occupied { .. })));
    assert!(matches!(create(Path::new("/dev/null")), Err(RecordError::Occupied { .. })));
    assert!(matches!(create(&dir.path().join("below/this")), Err(RecordError::Write { .. })));
    assert!(matches!(create(&dir.inner.path().join("none/this")), Err(RecordError::Write { .. })));
    let link = dir.inner.path().join("link");
    fs::write(dir.path(), "").unwrap();
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    save(&small(), &link);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(Record::read(&dir.path()).unwrap(), small());
}

/// The error for a refused file: one line that says what to do.
#[track_caller]
fn refusal(read: Result<Record, RecordError>) -> RecordError {
    let error = read.expect_err("no record");
    let text = error.to_string();
    assert!(text.contains("; ") && text.lines().count() == 1, "{text}");
    error
}

#[test]
fn foreign_files_are_refused() {
    let dir = TestDir::new();
    assert!(matches!(refusal(Record::read(&dir.path())), RecordError::Absent { .. }));
    assert!(matches!(refusal(Record::read(dir.inner.path())), RecordError::NotAFile { .. }));
    assert!(matches!(refusal(Record::read(Path::new("/dev/zero"))), RecordError::NotAFile { .. }));
    for foreign in [&b""[..], b"P", b"hello", &[0; 5000]] {
        assert!(matches!(refusal(dir.read_bytes(foreign)), RecordError::NotParquet { .. }));
    }
    for cut_off in [&b"PAR1"[..], b"PAR1PAR", b"PAR1 and no end"] {
        assert!(matches!(refusal(dir.read_bytes(cut_off)), RecordError::CutOff { .. }));
    }
    for bare in [&b"PAR1PAR1"[..], b"PAR1\0\0\0\0PAR1", b"PAR1\xff\xff\xff\xffPAR1"] {
        assert!(matches!(refusal(dir.read_bytes(bare)), RecordError::NotARecord { .. }));
    }
}

/// Replaces all occurrences of `what` by `other`, of equal length, and corrects the checksum.
fn altered(bytes: &[u8], what: &str, other: &str) -> Vec<u8> {
    assert_eq!(what.len(), other.len());
    let mut bytes = bytes.to_vec();
    let mut found = 0;
    for at in 0..bytes.len() - what.len() {
        if &bytes[at..at + what.len()] == what.as_bytes() {
            bytes[at..at + what.len()].copy_from_slice(other.as_bytes());
            found += 1;
        }
    }
    assert!(found > 0, "no {what}");
    seal::reseal(&mut bytes).unwrap();
    bytes
}

#[test]
fn other_parquet_files_and_later_versions_are_refused() {
    let dir = TestDir::new();
    let bytes = small_bytes(&dir);
    let refused = |what, other| refusal(dir.read_bytes(&altered(&bytes, what, other)));
    assert!(matches!(refused("pagefold.record/1", "pagefold.record/2"), RecordError::Newer { .. }));
    for (what, other) in [
        ("pagefold.record/1", "pagefold.record/x"),
        ("pagefold.record/1", "external.record/1"),
        ("pagefold.schema", "external.schema"),
        ("pagefold.source", "pagefold.sauce2"),
        ("pagefold.every_ns", "pagefold.never_ns"),
        ("1000000000", "1000.00000"),
        ("false", "falsy"),
        ("part3", "part4"),
        ("first_page", "first_past"),
    ] {
        assert!(matches!(refused(what, other), RecordError::NotARecord { .. }), "{what}");
    }
    // A file without a checksum is a damaged record, or another program's file.
    let mut unsealed = bytes.clone();
    let at = unsealed.windows(8).rposition(|window| window == b"xxh3-64:").unwrap();
    unsealed[at] = b'y';
    assert!(matches!(refusal(dir.read_bytes(&unsealed)), RecordError::Damaged { .. }));
    let others = String::from_utf8_lossy(&unsealed).replace("pagefold", "external");
    assert!(matches!(refusal(dir.read_bytes(others.as_bytes())), RecordError::NotARecord { .. }));
}

/// We neither write nor read inconsistent rows.
#[test]
fn inconsistent_rows_are_refused() {
    let dir = TestDir::new();
    let first = || vec![process(1), region(1, 1, 100, 50)];
    let with = |event: Event| [first(), vec![event]].concat();
    let ended = vec![process(1), Event::Exit { process: 1 }];
    let odd = |state, digest| {
        let now = Page { state, huge: false, digest, parts: [0; PARTS], frame: None };
        Event::Page { region: 1, page: Vpn(100), now }
    };
    let cases = [
        (with(page(2, 100, 1)), "there is no region 2"),
        (with(page(1, 150, 1)), "page 150 is outside region 1"),
        (with(page(1, 99, 1)), "page 99 is outside region 1"),
        (with(odd(PageState::ZeroMapped, 1)), "page 100 of region 1 maps the zero page but has content"),
        (with(region(2, 9, 0, 1)), "there is no process 9"),
        (with(region(2, 1, 1 << 52, 1)), "region 2 of 1 pages from 4503599627370496 is out of range"),
        (with(region(2, 1, 5, u64::MAX)), "region 2 of 18446744073709551615 pages from 5 is out of range"),
        (with(Event::Unmap { region: 2 }), "there is no region 2"),
        (with(Event::Exit { process: 2 }), "there is no process 2"),
        ([ended.clone(), vec![process(1)]].concat(), "process 1 appears again after its end"),
        ([ended, vec![region(1, 1, 0, 1)]].concat(), "there is no process 1"),
        (
            [first(), vec![Event::Unmap { region: 1 }, region(1, 1, 0, 1)]].concat(),
            "region 1 appears again after its end",
        ),
        ([first(), vec![process(2), region(1, 2, 0, 1)]].concat(), "region 1 moves from process 1 to process 2"),
    ];
    for (events, expected) in cases {
        let snapshots = [Snapshot::default(), Snapshot { time_ns: 0, events }];
        let mut writer = RecordWriter::create(&dir.path(), &small().origin).unwrap();
        writer.write(&snapshots[0]).unwrap();
        let written = writer.write(&snapshots[1]);
        assert!(
            matches!(&written, Err(RecordError::Inconsistent { snapshot: 1, what, .. }) if what == expected),
            "{written:?}"
        );
        assert!(matches!(writer.finish(), Err(RecordError::Write { .. })));
        let mut writer = RecordWriter::create(&dir.path(), &small().origin).unwrap();
        for snapshot in &snapshots {
            writer.write_unchecked(snapshot, 0).unwrap();
        }
        writer.finish().unwrap();
        let read = refusal(Record::read(&dir.path()));
        // `write_unchecked` fills in the process of unknown regions.
        assert!(matches!(&read, RecordError::Inconsistent { snapshot: 1, what, .. } if what == expected), "{read}");
    }
}

#[test]
fn wrong_numbers_and_times_are_refused() {
    let dir = TestDir::new();
    let read = |snapshots: &[(u64, i32)]| {
        let mut writer = RecordWriter::create(&dir.path(), &small().origin).unwrap();
        for &(time_ns, shift) in snapshots {
            writer.write_unchecked(&Snapshot { time_ns, events: vec![process(1)] }, shift).unwrap();
        }
        writer.finish().unwrap();
        Record::read(&dir.path())
    };
    assert_eq!(read(&[(1, 0), (1, 0), (2, 0)]).unwrap().snapshots.len(), 3);
    for (snapshots, expected) in [
        (&[(1, 0), (0, 0)][..], "time goes back, from 1 ns to 0 ns"),
        (&[(u64::MAX, 0)], "a time is negative"),
        (&[(1, 0), (2, 1)], "its number is 2, not 1"),
        (&[(1, 0), (2, -1)], "its number is 0, not 1"),
        (&[(1, -5)], "its number is -5, not 0"),
    ] {
        let error = refusal(read(snapshots));
        assert!(matches!(&error, RecordError::Inconsistent { what, .. } if what == expected), "{error}");
    }
    // Unknown values.
    let bytes = small_bytes(&dir);
    for (word, other) in [("merged", "melted"), ("unmap", "unzip")] {
        let error = refusal(dir.read_bytes(&altered(&bytes, word, other)));
        assert!(matches!(&error, RecordError::Inconsistent { what, .. } if what.contains(other)), "{error}");
    }
}

#[test]
fn cut_off_files_are_refused() {
    let dir = TestDir::new();
    let bytes = small_bytes(&dir);
    for length in 0..bytes.len() {
        let error = refusal(dir.read_bytes(&bytes[..length]));
        let expected = if length < 4 {
            matches!(error, RecordError::NotParquet { .. })
        } else {
            matches!(error, RecordError::CutOff { .. })
        };
        assert!(expected, "{length}: {error}");
    }
    for more in [&b"x"[..], b"PAR1 ", &[0; 10_000]] {
        assert!(matches!(refusal(dir.read_bytes(&[&bytes, more].concat())), RecordError::CutOff { .. }));
    }
    for more in [&b"PAR1"[..], &bytes] {
        assert!(matches!(refusal(dir.read_bytes(&[&bytes, more].concat())), RecordError::Damaged { .. }));
    }
}

#[test]
fn damage_anywhere_is_refused() {
    let dir = TestDir::new();
    let bytes = small_bytes(&dir);
    for at in 0..bytes.len() {
        for flip in [0xff, 1 << (at % 8)] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            refusal(dir.read_bytes(&damaged));
        }
    }
}

/// With a corrected checksum, damage leads to another record or an error.
#[test]
fn damage_with_a_correct_checksum_does_not_panic() {
    let dir = TestDir::new();
    let bytes = small_bytes(&dir);
    let mut errors = 0;
    for at in 4..bytes.len() - 4 {
        for flip in [0xff, 0x80, 1 << (at % 7)] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            seal::reseal(&mut damaged).unwrap();
            if let Err(error) = dir.read_bytes(&damaged) {
                refusal(Err(error));
                errors += 1;
            }
        }
    }
    println!("{errors} errors in {} bytes, each changed three times", bytes.len());
    assert!(errors > bytes.len());
}
