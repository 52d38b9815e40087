//! Simulated fleets, on a small scale.

mod common;

use common::lab;
use pagefold_lab::fleet::mix::Mix;
use pagefold_lab::fleet::{BAR_MORE, FleetOptions, files, simulate};

const SMALL: FleetOptions = FleetOptions { hosts: 5, per_host: 12, seed: 3, sampled: 256, hours: 3, fill: true };

#[test]
fn a_plan_saves_more_than_chance_and_less_than_the_bound() {
    let outcome = simulate(&Mix::generated(), &SMALL, &|_| ());
    assert!(outcome.random < outcome.planned && (outcome.planned as f64) < outcome.bound, "{outcome:?}");
    assert!(outcome.of_best() > 0.8, "{outcome:?}");
    assert!(outcome.within_error >= 0.6 && outcome.median_error < 0.1, "{outcome:?}");
    let filled = outcome.filled.unwrap();
    assert!(filled.more() >= BAR_MORE, "{filled:?}");
    let day = outcome.day.unwrap();
    assert!(day.planned > day.random && day.by_hour.len() == 3 && day.moves > 0, "{day:?}");
    // Equal seeds, equal fleets.
    let again = simulate(&Mix::generated(), &FleetOptions { hours: 0, fill: false, ..SMALL }, &|_| ());
    assert_eq!((again.random, again.planned, again.moves), (outcome.random, outcome.planned, outcome.moves));
}

#[test]
fn files_are_what_hosts_write() {
    let dir = tempfile::tempdir().unwrap();
    let options = FleetOptions { hosts: 2, per_host: 3, ..SMALL };
    files::write(dir.path(), &Mix::generated(), &options, 1 << 50, &|_| ()).unwrap();
    for host in 0..2 {
        let bytes = std::fs::read(dir.path().join(format!("host-0000{host}.parquet"))).unwrap();
        let file = pagefold_sketch::read(bytes).unwrap();
        assert_eq!((file.host(), file.rows.len()), (Some(format!("host-0000{host}").as_str()), 3));
        assert!(file.rows.iter().all(|row| row.sketch.len() > 4000));
    }
}

#[test]
fn sketches_of_a_record_tell_what_its_programs_have_in_common() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record.parquet");
    let record = record.to_str().unwrap();
    let generated = lab(&["generate", "web-server", "-o", record, "--size", "32", "--for", "2s"]);
    assert!(generated.status.success(), "{generated:?}");
    // The digests of a generated record and the keys are always the same, so the result is, too.
    let output = lab(&["sketch-error", record, "--keys", "100", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{found}");
    let pairs = found["pairs"].as_array().unwrap();
    // Each set is too large for the sketches to count it exactly.
    assert!(pairs.len() == 6 && pairs.iter().all(|pair| pair["smaller"].as_u64() > Some(5000)), "{found}");
    assert!(found["within"].as_f64() >= Some(0.95) && found["median_error"].as_f64() <= Some(0.03), "{found}");
    assert!(found["median_error"].as_f64() > Some(0.001), "{found}");
}

#[test]
fn a_fleet_of_recorded_programs() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record.parquet");
    let record = record.to_str().unwrap();
    let generated = lab(&["generate", "web-server", "-o", record, "--size", "8", "--for", "2s"]);
    assert!(generated.status.success(), "{generated:?}");
    let output = lab(&["fleet", "--record", record, "--hosts", "3", "--per-host", "6", "--hours", "0", "--json"]);
    // Such a small fleet may miss the bars: then the command exits with 1.
    let fleets: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let outcome = &fleets["outcomes"][0];
    assert_eq!((&fleets["schema"], &outcome["workloads"]), (&"pagefold.lab.fleet/1".into(), &18.into()));
    assert!(outcome["planned"].as_u64() >= outcome["random"].as_u64(), "{fleets}");
}
