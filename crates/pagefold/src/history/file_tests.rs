use super::*;
use pagefold_text::exit;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use tempfile::TempDir;

const NOW: u64 = 1_790_000_000;
const DAY: u64 = 86_400;

fn moment(time: u64) -> Moment {
    Moment { time, pid: 7, saved_bytes: time - NOW / 2, available_bytes: u64::MAX, ..Moment::default() }
}

fn new() -> (TempDir, HistoryFile, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history");
    let (file, said) = HistoryFile::open(&path).unwrap();
    assert_eq!(said, None);
    (dir, file, path)
}

fn times(path: &Path, since: u64, now: u64) -> Vec<u64> {
    read(path, Duration::from_secs(since), now).unwrap().iter().map(|moment| moment.time).collect()
}

#[test]
fn a_day_is_kept_by_the_minute_and_a_month_by_the_quarter_of_an_hour() {
    let (_dir, file, path) = new();
    // This was written when the clock said the year 3000, into slots that we now need.
    file.write(&moment(NOW + 1_000 * 365 * DAY)).unwrap();
    for minute in 0..40 * 1_440 {
        file.write(&moment(NOW + minute * 60)).unwrap();
    }
    let end = NOW + (40 * 1_440 - 1) * 60;
    assert_eq!(fs::metadata(&path).unwrap().len(), LENGTH);
    assert_eq!(times(&path, 600, end), (0..=10).map(|back| end - 600 + back * 60).collect::<Vec<_>>());
    assert_eq!(times(&path, DAY - 60, end).len(), 1_440);
    let all = times(&path, 400 * DAY, end);
    assert!((1_440 + 2_780..=1_440 + 2_880).contains(&all.len()), "{}", all.len());
    assert!((30 * DAY - 1_800..=30 * DAY).contains(&(end - all[0])) && all.is_sorted());
    assert_eq!(read(&path, Duration::ZERO, end).unwrap(), [moment(end)]);
    // If the clock goes back by an hour, the later moments are hidden.
    assert_eq!(times(&path, 60, end - 3_600).len(), 4);
}

#[test]
fn what_was_written_outlasts_the_daemon_and_a_torn_slot_is_empty() {
    let (_dir, file, path) = new();
    file.write(&moment(NOW)).unwrap();
    file.write(&moment(NOW + 1_000)).unwrap();
    let torn = OpenOptions::new().write(true).open(&path).unwrap();
    torn.write_all_at(&[1, 2, 3], offset(slots(NOW)[0]) + 40).unwrap();
    torn.write_all_at(&[1], offset(slots(NOW)[1])).unwrap();
    assert_eq!(times(&path, DAY, NOW + 2_000), [NOW + 1_000]);
    assert_eq!(HistoryFile::open(&path).unwrap().1, None);
    assert_eq!(contents(&open(&path, false).unwrap()).unwrap().1, [0; 0], "they were emptied");
    assert_eq!(times(&path, DAY, NOW + 2_000), [NOW + 1_000]);
}

#[test]
fn anything_else_in_its_place_is_named_and_started_anew() {
    let (dir, file, path) = new();
    let victim = dir.path().join("victim");
    let whole = fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[SLOT..].fill(7);
    let torn = whole[..100].to_vec();
    let foreign = [b"P", &whole[1..]].concat();
    let long = [&whole[..], b"x"].concat();
    // Moments in slots that belong to other times.
    let mut moved = whole.clone();
    for slot in 1..4 {
        moved[slot * SLOT..][..SLOT].copy_from_slice(&encode(&moment(NOW)));
    }
    for (planted, says) in [
        (&damaged, "is damaged in 4320 places"),
        (&moved, "is damaged in "),
        (&torn, "is not a history: it has 100 bytes"),
        (&long, "it has 380249 bytes"),
        (&Vec::new(), "it has 0 bytes"),
    ] {
        fs::write(&path, planted).unwrap();
        assert!(read(&path, Duration::MAX, NOW).is_err());
        let (_, said) = HistoryFile::open(&path).unwrap();
        let said = said.unwrap();
        assert!(
            said.contains(says) && said.ends_with("; pagefold begins a new one") && said.lines().count() == 1,
            "{said}"
        );
        assert!(times(&path, DAY, NOW).is_empty());
    }
    // If somebody names a file with other contents at the start, we mustn't overwrite that file.
    let refused = |why: &str| {
        let error = HistoryFile::open(&path).unwrap_err();
        assert!(error.code == exit::USAGE && error.line.contains(why), "{error}");
    };
    fs::write(&path, &foreign).unwrap();
    refused("has other contents, which pagefold would replace; name a new file");
    assert_eq!(fs::read(&path).unwrap(), foreign);
    fs::write(&victim, &whole).unwrap();
    fs::remove_file(&path).unwrap();
    symlink(&victim, &path).unwrap();
    refused("is not a regular file");
    // During a run we replace the link instead of following it.
    let said = file.write(&moment(NOW)).unwrap_err();
    assert!(said.contains("is a symbolic link; pagefold begins a new one"), "{said}");
    assert_eq!(fs::read(&victim).unwrap(), whole);
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    assert_eq!(times(&path, DAY, NOW), [NOW], "the moment was written all the same");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o137, 0);
    // A pipe in the file's place must not make us wait.
    fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(read(&path, Duration::MAX, NOW).unwrap_err().to_string().contains("is not a regular file"));
    assert!(file.write(&moment(NOW)).unwrap_err().contains("is not a regular file"));
    fs::remove_file(&path).unwrap();
    file.write(&moment(NOW)).unwrap();
    assert_eq!(times(&path, DAY, NOW), [NOW], "it was removed meanwhile");
}

#[test]
fn what_cannot_be_written_is_said_and_no_more() {
    let (dir, file, path) = new();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let said = file.write(&moment(NOW)).unwrap_err();
    assert!(said.contains("cannot write the history") && said.contains("; "), "{said}");
    for (path, says) in [(Path::new("/"), "has no name"), (&dir.path().join("none/history"), "cannot be created")] {
        let error = HistoryFile::open(path).unwrap_err();
        assert!(error.code == exit::USAGE && error.line.contains(says) && error.line.contains("; "), "{error}");
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(HistoryFile::open(&path).unwrap_err().line.contains("would be in a directory that other users may write"));
}

/// The non-zero parts, with their offsets, of a `pagefold.history/1` file that an earlier version wrote.
const KEPT: &str = include_str!("../../golden/kept/history-1.txt");

fn moments() -> [Moment; 3] {
    let of = |time, saved: u64| Moment {
        time,
        pid: 4_711,
        dry_run: saved == 3,
        saved_bytes: saved << 20,
        expected_bytes: saved << 21,
        marked_bytes: saved << 22,
        resident_bytes: saved << 23,
        available_bytes: u64::MAX,
        pagefold_ns: saved * 1_000_000_000,
        ksmd_ns: saved * 70_000_000,
    };
    [of(NOW, 1), of(NOW + 60, 2), of(NOW + 7_200, 3)]
}

#[test]
fn a_file_of_before_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history");
    let mut bytes = vec![0; usize::try_from(LENGTH).unwrap()];
    for line in KEPT.lines() {
        let (at, words) = line.split_once(' ').unwrap();
        let at: usize = at.parse().unwrap();
        let digits = (0..words.len()).step_by(2).map(|digit| u8::from_str_radix(&words[digit..digit + 2], 16).unwrap());
        for (place, byte) in bytes[at..].iter_mut().zip(digits) {
            *place = byte;
        }
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(read(&path, Duration::from_secs(DAY), NOW + 7_200).unwrap(), moments());
    let (_dir, file, written) = new();
    for moment in moments() {
        file.write(&moment).unwrap();
    }
    assert!(fs::read(written).unwrap() == bytes, "of another form: keep a file of the new one, too");
}
