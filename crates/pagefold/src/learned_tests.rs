use super::*;
use pagefold_engine::config::Config;
use pagefold_engine::host::Snapshot;
use pagefold_engine::keys::{FamilyKey, LastingKey};
use pagefold_engine::learned::{LearnedFamily, LearnedRegion};
use pagefold_engine::region::LeaveAlone;
use pagefold_engine::sampling::estimate::Tally;
use pagefold_engine::units::{Pages, Permyriad, Vpn};
use pagefold_testkit::{Disk, blocked_threads, wait_until};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn learned() -> Learned {
    Learned {
        families: vec![LearnedFamily { family: FamilyKey(u64::MAX), lives_ns: vec![2, 5] }],
        regions: vec![LearnedRegion {
            process: LastingKey(7),
            family: FamilyKey(8),
            first: Vpn(1_000),
            pages: Pages(500),
            resident: Pages(490),
            visited: Pages(490),
            judged: true,
            left_over: Permyriad(3),
            tally: Tally::default(),
            sampled: 3,
            marks: vec![(Vpn(1_000), Pages(500), Pages(490), Pages(400))],
            hold: Some(LeaveAlone::CowBroken),
            hold_ns: 900,
            pause_ns: 0,
        }],
        ..Learned::default()
    }
}

fn document(boot_id: &str) -> Vec<u8> {
    let (schema, boot_id) = (SCHEMA.to_owned(), boot_id.to_owned());
    serde_json::to_vec(&Document { schema, boot_id, written_ns: 100, learned: learned() }).unwrap()
}

fn own_boot() -> String {
    boot_id(&Roots::default().proc).unwrap()
}

fn new() -> (tempfile::TempDir, LearnedFile) {
    let dir = tempfile::tempdir().unwrap();
    let file = LearnedFile::open(&dir.path().join("learned.json")).unwrap();
    (dir, file)
}

#[test]
fn what_was_written_is_read_back_with_the_time_that_has_passed() {
    let parsed = parse(&document("boot"), "boot", 400).unwrap().unwrap();
    let mut expected = learned();
    expected.regions[0].hold_ns = 600;
    assert_eq!(parsed, expected);
    assert_eq!(parse(&document("an earlier one"), "boot", 400), Ok(None));
    let (_dir, file) = new();
    assert_eq!(file.read(), Ok(None));
    file.write(&document(&own_boot())).unwrap();
    assert_eq!(file.read().unwrap().unwrap().families, learned().families);
    let metadata = fs::metadata(&file.0.path).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(!file.0.beside.exists());
}

#[test]
fn anything_else_in_its_place_is_refused_in_one_line_and_replaced() {
    let (dir, file) = new();
    let refused = |why: &str| {
        let line = file.read().unwrap_err();
        assert!(line.contains(why) && !line.contains('\n'), "{line}");
    };
    let elsewhere = dir.path().join("elsewhere");
    fs::write(&elsewhere, document(&own_boot())).unwrap();
    symlink(&elsewhere, &file.0.path).unwrap();
    refused("is a symbolic link");
    file.write(b"new").unwrap();
    assert_eq!(fs::read(&elsewhere).unwrap(), document(&own_boot()), "the link was replaced, not followed");
    refused("is damaged");
    let text = String::from_utf8(document(&own_boot())).unwrap();
    fs::write(&file.0.path, text.replace("learned/2", "learned/3")).unwrap();
    refused("is of another version");
    fs::write(&file.0.path, document(&own_boot())).unwrap();
    fs::set_permissions(&file.0.path, fs::Permissions::from_mode(0o666)).unwrap();
    refused("other users may write");
    fs::set_permissions(&file.0.path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(file.read().unwrap().is_some());
    std::fs::OpenOptions::new().write(true).open(&file.0.path).unwrap().set_len(LENGTH_MOST + 1).unwrap();
    refused("is too long");
    fs::remove_file(&file.0.path).unwrap();
    fs::create_dir(&file.0.path).unwrap();
    refused("is not a regular file");
    fs::remove_dir(&file.0.path).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&file.0.path).status().unwrap();
    assert!(made.success());
    refused("is not a regular file");
}

#[test]
fn a_disk_without_room_loses_nothing_but_what_is_written() {
    let (_dir, file) = new();
    file.write(&document(&own_boot())).unwrap();
    let full = LearnedFile(Place { beside: PathBuf::from("/proc/no-room"), ..file.0.clone() });
    let line = full.write(b"more").unwrap_err();
    assert!(line.starts_with("cannot write the learned file ") && line.ends_with("(pagefold tries again)"), "{line}");
    assert!(file.read().unwrap().is_some());
}

/// We can read a `pagefold.learned/2` file that an earlier version wrote.
#[test]
fn a_file_of_before_is_read() {
    let kept = include_bytes!("../golden/kept/learned-2.json");
    let learned = parse(kept, "boot", 0).unwrap().unwrap();
    crate::golden::check("learned.txt", &format!("{learned:#?}\n"));
    let document = Document { schema: SCHEMA.to_owned(), boot_id: "boot".to_owned(), written_ns: 0, learned };
    assert!(serde_json::to_vec(&document).unwrap() == kept, "of another form: keep a file of the new one, too");
}

proptest! {
    #[test]
    fn no_bytes_break_the_parser(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes, "boot", 0);
    }

    /// If bytes of a file have changed, we either refuse the file, or can still adopt its contents.
    #[test]
    fn no_damage_breaks_the_parser_or_an_engine(at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>()) {
        let mut bytes = document("boot");
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes.truncate(bytes.len() - cut.index(8) / 7 * cut.index(bytes.len()));
        if let Ok(Some(learned)) = parse(&bytes, "boot", u64::MAX) {
            let mut engine = Engine::new(Config::default());
            engine.adopt(learned);
            engine.plan(Snapshot::default());
        }
    }
}

/// The main loop only calls `keep`.
#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn a_disk_that_does_not_answer_delays_no_cycle() {
    let Some(disk) = Disk::mount() else { return };
    let path = format!("{}/learned.json", disk.mount);
    let start = || LearnedWriter::start_thread(LearnedFile::open(path.as_ref()).unwrap()).unwrap();
    let mut writer = disk.namespace.run(start);
    let engine = Engine::new(Config::default());
    let own_pid = i32::try_from(std::process::id()).unwrap();
    let frozen = disk.freeze();
    for round in 1..=4 {
        writer.last = learned();
        let began = Instant::now();
        writer.keep(&engine, round * INTERVAL_NS);
        assert!(began.elapsed() < Duration::from_millis(250), "{:?}", began.elapsed());
        wait_until("the thread waits for the disk", || blocked_threads(own_pid).contains(&"learned".to_owned()));
    }
    drop(frozen);
    drop(writer);
    assert!(disk.read(&path).contains(SCHEMA));
}
