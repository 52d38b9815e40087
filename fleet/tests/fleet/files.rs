//! Writes files as hosts do, and runs the program on them.

use pagefold_sketch::{Content, FleetKey, KeyId, Kind, Row, Sketch};
use serde_json::Value;
use std::io::Cursor;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The time at which tests pretend to run: 2027-01-15 08:00 UTC.
pub const NOW: &str = "2027-01-15 08:00:00";
pub const NOW_US: u64 = 1_800_000_000_000_000;
pub const MIB: u64 = 1 << 20;

pub fn key(byte: u8) -> KeyId {
    FleetKey::new([byte; 32]).id()
}

/// A workload that holds the contents with these numbers, each on one page.
pub fn row(workload: &str, held: &[Range<u64>]) -> Row {
    let contents = || held.iter().cloned().flatten();
    let pages = contents().count() as u64;
    Row {
        kind: Kind::Pod,
        workload: workload.into(),
        domain: "default".into(),
        key: key(1),
        time_us: NOW_US - 60_000_000,
        since_us: NOW_US - 120_000_000,
        anonymous_bytes: pages * 4096,
        read_bytes: pages * 4096,
        pages: [pages, 0, 0, 0, 0],
        cpu_millicores: 100,
        host_memory_bytes: 10_000 * MIB,
        host_cpu_millicores: 16_000,
        // The multiplication spreads numbers of one range over all bits, like real contents' digests.
        ..Row::blank(Sketch::of(contents().map(|number| Content(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))))
    }
}

pub fn bytes(host: &str, rows: &[Row]) -> Vec<u8> {
    let rows: Vec<Row> = rows.iter().map(|row| Row { host: host.into(), ..row.clone() }).collect();
    pagefold_sketch::write(Cursor::new(Vec::new()), &rows).unwrap().into_inner()
}

pub fn write(dir: &Path, host: &str, rows: &[Row]) -> PathBuf {
    let path = dir.join(format!("{host}.parquet"));
    std::fs::write(&path, bytes(host, rows)).unwrap();
    path
}

/// Writes two kinds of workloads on each of two hosts, in two trust domains. Put together by kind, they would share far
/// more.
pub fn two_kinds(dir: &Path) {
    for host in 0..2_u64 {
        let of = |kind: u64, number: u64| {
            let own = 1_000_000 * (1 + 10 * host + 4 * kind + number);
            row(
                &format!("{}-{host}-{number}", ["web", "db"][usize::from(kind > 0)]),
                &[kind * 100_000..kind * 100_000 + 20_000, own..own + 6_000],
            )
        };
        let mut rows = vec![of(0, 0), of(1, 0)];
        rows[0].saved_bytes = 3 * MIB;
        rows[0].take_back_bytes = 2 * MIB;
        rows[1].savable_bytes = MIB;
        // The same contents in another trust domain don't count.
        rows.push(Row { domain: "other".into(), ..row(&format!("alien-{host}"), &[0..20_000]) });
        write(dir, &format!("host-{host}"), &rows);
    }
}

pub fn fleet(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold-fleet"));
    command.args(arguments);
    command
}

/// The JSON that a command prints.
pub fn json(command: &str, dir: &Path, more: &[&str]) -> Value {
    let dir = dir.to_str().unwrap();
    let output = fleet(&[command]).args(more).args([dir, "--at", NOW, "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts that the program printed one line on standard error and returned this code. Returns the line.
#[track_caller]
pub fn fails(output: &Output, code: i32) -> String {
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), error.lines().count()), (Some(code), 1), "{error}");
    assert!(error.starts_with("pagefold-fleet: ") && error.contains("; "), "{error}");
    error
}
