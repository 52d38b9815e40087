//! `pagefold-lab programs`: the list, a record and refused arguments.

mod common;

use common::{assert_lab_fails, lab};
use pagefold_engine::host::PageState;
use pagefold_lab::record::{Event, Record};

use pagefold_testkit::KsmAtRest;

#[test]
fn the_list_starts_nothing_and_unknown_programs_are_refused() {
    let output = lab(&["programs", "--list"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for name in ["redis", "mariadb", "python", "java", "guests-build", "guests-web"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{text}");
    }
    assert_lab_fails(&["programs", "emacs", "-o", "/tmp/x"], 2, "choose redis, mariadb, ");
    assert_lab_fails(&["programs", "redis"], 2, "--output");
    assert_lab_fails(&["programs", "redis", "--every", "0s", "-o", "/tmp/x"], 2, "less than 1ms");
}

#[test]
fn servers_are_recorded_while_their_data_changes() {
    // The command waits for KSM by itself; this skips the test where KSM is unavailable.
    let Some(ksm) = KsmAtRest::take() else { return };
    drop(ksm);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("redis.parquet");
    let output = lab(&["programs", "redis", "--for", "7s", "-o", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record = Record::read(&file).unwrap();
    let (first, later) = record.snapshots.split_first().unwrap();
    let names = first.events.iter().filter_map(|event| match event {
        Event::Process(row) => row.name.as_deref(),
        _ => None,
    });
    assert_eq!(names.collect::<Vec<_>>(), ["redis-server"; 3]);
    let states = record.snapshots.iter().flat_map(|snapshot| &snapshot.events).filter_map(|event| match event {
        Event::Page { now, .. } => Some(now.state),
        _ => None,
    });
    assert!(states.clone().count() > 10_000);
    assert!(states.into_iter().all(|state| state != PageState::Merged), "nothing is merged meanwhile");
    // Each server changes a twentieth of its keys after five seconds.
    let changes = |from: u64, to: u64| -> usize {
        let within = later.iter().filter(|snapshot| (from..to).contains(&(snapshot.time_ns / 1_000_000_000)));
        within.map(|snapshot| snapshot.events.len()).sum()
    };
    assert!(changes(5, 8) > 3_000, "{} changes when keys change", changes(5, 8));
    assert!(changes(1, 5) < changes(5, 8) / 2, "{} changes before", changes(1, 5));
}
