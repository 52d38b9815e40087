//! Hosts replace their files at any time, also while a query runs.

use crate::files::{NOW_US, key, row, two_kinds, write};
use pagefold_fleet::engine::Engine;
use pagefold_fleet::fleet::Workloads;
use pagefold_fleet::inventory::{Inventory, Terms};
use pagefold_fleet::report::Report;
use pagefold_fleet::sources::{Source, survey};
use pagefold_sketch::Row;
use std::path::Path;
use std::time::Duration;

/// Makes the report, and changes the files between looking at them and reading them.
fn report_after(dir: &Path, change: impl Fn()) -> (Report, Workloads) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let sources = [Source::open(dir.to_str().unwrap()).unwrap()];
        let seen = survey(&sources, |_, _| ()).await.unwrap();
        let terms = Terms { key: None, now_us: NOW_US, max_age: Duration::from_hours(24) };
        let inventory = Inventory::of(seen, terms);
        let engine = Engine::open(&sources, &inventory, 256 << 20).await.unwrap();
        change();
        let report = Report::of(&engine, &inventory, 20).await.unwrap();
        (report, Workloads::of(&engine, &|_| ()).await.unwrap())
    })
}

fn hosts_of(report: &Report) -> Vec<&str> {
    report.hosts.iter().map(|host| host.host.as_str()).collect()
}

#[test]
fn a_newer_file_counts() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let newer = || {
        let rows: Vec<Row> = (0..30).map(|number| row(&format!("w{number}"), &[number..number + 9000])).collect();
        write(dir.path(), "host-0", &rows);
    };
    let (report, workloads) = report_after(dir.path(), newer);
    assert_eq!((hosts_of(&report), report.hosts[0].workloads), (vec!["host-0", "host-1"], 30));
    assert!(report.left_out.is_empty() && workloads.workloads.len() == 33, "{:?}", report.left_out);
}

#[test]
fn what_a_file_has_become_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.parquet"));
    let put = |name: &str, bytes: &[u8]| std::fs::write(path(name), bytes).unwrap();
    let names = ["gone", "half", "old", "other-host", "other-key", "pipe", "link", "directory", "long"];
    two_kinds(dir.path());
    for name in names {
        write(dir.path(), name, &[row("w", &[0..9000])]);
    }
    let change = || {
        let good = std::fs::read(path("half")).unwrap();
        put("half", &good[..good.len() / 2]);
        std::fs::rename(path("gone"), dir.path().join("elsewhere")).unwrap();
        std::fs::copy(path("host-0"), path("other-host")).unwrap();
        let long_ago = NOW_US - 100 * 3_600_000_000;
        write(dir.path(), "old", &[Row { time_us: long_ago, since_us: long_ago, ..row("w", &[0..9000]) }]);
        write(dir.path(), "other-key", &[Row { key: key(2), ..row("w", &[0..9000]) }]);
        for name in ["pipe", "link", "directory"] {
            std::fs::remove_file(path(name)).unwrap();
        }
        assert!(std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        std::os::unix::fs::symlink("host-0.parquet", path("link")).unwrap();
        std::fs::create_dir(path("directory")).unwrap();
        // The file is sparse, so it takes no space.
        std::fs::File::options().write(true).open(path("long")).unwrap().set_len(1 << 40).unwrap();
    };
    let (report, workloads) = report_after(dir.path(), change);
    assert_eq!(hosts_of(&report), ["host-0", "host-1"]);
    assert_eq!(workloads.workloads.len(), 6);
    let why = |name: &str| {
        let left = report.left_out.iter().find(|left| left.host.as_deref() == Some(name));
        left.map_or("nothing", |left| &left.why)
    };
    for (name, says) in [
        ("gone", "cannot be read"),
        ("half", "is cut off"),
        ("old", "the host is gone"),
        ("other-host", "is not named after its host (HOST.parquet)"),
        ("other-key", "was made under the key"),
        ("pipe", "not a regular file"),
        ("link", "symbolic link"),
        ("directory", "not a regular file"),
        ("long", "bytes, more than"),
    ] {
        assert!(why(name).contains(says), "{name}: {}", why(name));
    }
    // Each file is listed once, however often queries asked for it.
    assert_eq!(report.left_out.len(), names.len(), "{:?}", report.left_out);
}
