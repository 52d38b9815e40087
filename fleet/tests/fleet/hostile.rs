//! The program names files that don't count and leaves them out. On bad input it ends with one line.

use crate::files::{NOW, NOW_US, bytes, fails, fleet, json, key, row, text, two_kinds, write};
use pagefold_sketch::Row;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

const HOUR_US: u64 = 3_600_000_000;

#[test]
fn what_does_not_count_is_named() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let clean = json("report", dir.path(), &[]);
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let good = bytes("x", &[row("w", &[0..9000])]);
    put("half.parquet", &good[..good.len() / 2]);
    put("empty.parquet", b"");
    put("text.parquet", b"not a table");
    put(".being-written.parquet.tmp", &good[..100]);
    let mut damaged = good.clone();
    damaged[2000] ^= 1;
    put("damaged.parquet", &damaged);
    let at = |time_us: u64| [Row { time_us, since_us: time_us, ..row("w", &[0..9000]) }];
    write(dir.path(), "ahead", &at(NOW_US + HOUR_US));
    write(dir.path(), "gone", &at(NOW_US - 100 * HOUR_US));
    std::fs::create_dir(dir.path().join("yesterday")).unwrap();
    put("yesterday/host-0.parquet", &bytes("host-0", &at(NOW_US - HOUR_US)));
    put("for-another.parquet", &bytes("host-0", &at(NOW_US)));
    write(dir.path(), "other-key", &[Row { key: key(2), ..row("w", &[0..9000]) }]);
    write(dir.path(), "nothing", &[]);
    std::fs::create_dir(dir.path().join("directory.parquet")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("zero.parquet")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("dangling.parquet")).unwrap();
    let report = json("report", dir.path(), &[]);
    assert_eq!((&report["hosts"], &report["pairs"]), (&clean["hosts"], &clean["pairs"]));
    assert_eq!(report["older_files"], 1);
    let left_out: BTreeMap<String, String> = report["left_out"]
        .as_array()
        .unwrap()
        .iter()
        .map(|left| {
            let file = left["file"].as_str().unwrap().rsplit('/').next().unwrap();
            (file.trim_end_matches(".parquet").to_owned(), left["why"].as_str().unwrap().to_owned())
        })
        .collect();
    for (name, why) in [
        ("half", "is cut off"),
        ("empty", "is not a Parquet file"),
        ("text", "is not a Parquet file"),
        ("damaged", "checksum"),
        ("ahead", "clock is wrong"),
        ("gone", "host is gone"),
        ("for-another", "is not named after its host (HOST.parquet)"),
        ("other-key", "was made under the key"),
        ("nothing", "has no workload"),
    ] {
        assert!(left_out.get(name).is_some_and(|found| found.contains(why)), "{name}: {left_out:?}");
    }
    assert_eq!(left_out.len(), 9, "{left_out:?}");
    // The caller can choose the key.
    let other = json("report", dir.path(), &["--key", &key(2).to_string()]);
    assert_eq!(other["hosts"].as_array().unwrap().len(), 1);
}

#[test]
fn what_is_no_file_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let clean = json("report", dir.path(), &[]);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
    // Reading a pipe would wait for ever. A link to a directory may lead to the whole machine, or round in a circle.
    assert!(Command::new("mkfifo").arg(dir.path().join("pipe.parquet")).status().unwrap().success());
    link("/", "machine");
    link("/", "machine.parquet");
    link(".", "circle");
    link("host-0.parquet", "again.parquet");
    // Directories may be deep, too.
    let mut deep = dir.path().to_owned();
    for _ in 0..14 {
        deep.push("d".repeat(250));
        std::fs::create_dir(&deep).unwrap();
    }
    let report = json("report", dir.path(), &[]);
    for part in ["hosts", "pairs", "left_out", "older_files"] {
        assert_eq!(report[part], clean[part], "{part}");
    }
}

#[test]
fn names_of_files_are_only_names() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let good = bytes("x", &[row("w", &[0..9000])]);
    for name in [&b"\x1b]0;title\x07\n  all is.parquet well.parquet"[..], b"\xff\xfe.parquet", b"x\x9b31m.parquet"] {
        std::fs::write(dir.path().join(std::ffi::OsStr::from_bytes(name)), &good[..100]).unwrap();
    }
    let looks_like_rows = format!("evil is fine{}host-0    9  999 GiB{}", " ".repeat(80), " ".repeat(200));
    std::fs::write(dir.path().join("evil.parquet"), bytes(&looks_like_rows, &[row("w", &[0..9000])])).unwrap();
    let report = json("report", dir.path(), &[]);
    assert_eq!((report["hosts"].as_array().unwrap().len(), report["left_out"].as_array().unwrap().len()), (2, 4));
    let output = fleet(&["report", dir.path().to_str().unwrap(), "--at", NOW]).output().unwrap();
    let text = text(&output.stdout);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert!(
        !text.contains("\n  all") && text.contains("evil.parquet of host evil is fine host-0 9 999 GiB is"),
        "{text:?}"
    );
}

#[test]
fn names_of_hosts_are_only_names() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a b", "[x]", "*", "%41", "ö?#", "..x"] {
        write(dir.path(), name, &[row("w'; DROP TABLE sketches; --", &[0..100])]);
    }
    let report = json("report", dir.path(), &[]);
    assert_eq!(report["hosts"].as_array().unwrap().len(), 6, "{report}");
    assert_eq!(report["pairs"].as_array().unwrap().len(), 14);
    assert_eq!(report["left_out"].as_array().unwrap().len(), 0, "{report}");
}

/// Workloads with the longest names that all hold the same, so that queries meet each name in each content of each
/// workload.
#[test]
fn long_names_end_nothing() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let common = row("", &[0..20_000]);
    let rows = (0..1000).map(|number| Row {
        workload: format!("{number:04}").repeat(256),
        domain: "d".repeat(1024),
        ..common.clone()
    });
    write(dir.path(), "long", &rows.collect::<Vec<_>>());
    for arguments in [&["report", "--pairs", "1000"][..], &["plan"]] {
        let output = fleet(arguments).args([dir.path().to_str().unwrap(), "--at", NOW]).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stdout).lines().all(|line| line.chars().count() < 400));
    }
}

#[test]
fn the_most_that_hosts_may_say_is_added_up() {
    let dir = tempfile::tempdir().unwrap();
    let most = 1 << 50;
    for host in ["a", "b", "c", "d", "e"] {
        let of = |number: u64| Row {
            anonymous_bytes: most,
            saved_bytes: most,
            take_back_bytes: most,
            cpu_millicores: most,
            ..row(&format!("w{number}"), &[])
        };
        write(dir.path(), host, &(0..4096).map(of).collect::<Vec<_>>());
    }
    let report = json("report", dir.path(), &[]);
    for host in report["hosts"].as_array().unwrap() {
        let sums =
            ["anonymous_bytes", "saved_bytes", "take_back_bytes", "cpu_millicores"].map(|name| host[name].as_u64());
        assert_eq!(sums, [Some(most * 4096); 4], "{host}");
    }
    // The sums over hosts don't fit into 64 bits.
    let here = dir.path().to_str().unwrap();
    let file = dir.path().join("plan.json");
    std::fs::write(&file, json("plan", dir.path(), &[]).to_string()).unwrap();
    for arguments in [&["report"][..], &["plan"], &["verify", file.to_str().unwrap()]] {
        let output = fleet(arguments).args([here, "--at", NOW]).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_plan_may_promise_anything() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let file = dir.path().join("plan.json");
    let plan = json("plan", dir.path(), &[]);
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut plan = plan.clone();
        plan["hosts"].as_array_mut().unwrap().iter_mut().for_each(change);
        std::fs::write(&file, plan.to_string()).unwrap();
        fleet(&["verify", file.to_str().unwrap(), dir.path().to_str().unwrap(), "--at", NOW]).output().unwrap()
    };
    let output = with(&|host| host["saved_bytes"] = u64::MAX.into());
    assert!(output.status.success() && text(&output.stdout).contains("16384 PiB promised"), "{output:?}");
    assert!(fails(&with(&|host| host["host"] = "a\nb".into()), 1).contains("control character"));
}

#[test]
fn bad_input_ends_with_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().to_str().unwrap();
    let run = |arguments: &[&str]| fleet(arguments).output().unwrap();
    assert!(fails(&run(&["report", here]), 5).contains("no usable sketch"));
    std::fs::write(dir.path().join("x.parquet"), b"PAR1").unwrap();
    assert!(fails(&run(&["plan", here]), 5).contains("is cut off"));
    assert!(fails(&run(&["report", "/nowhere"]), 1).contains("cannot read /nowhere"));
    assert!(fails(&run(&["report", "ftp://x/y"]), 1).contains("scheme"));
    assert!(fails(&run(&["report", "s3://"]), 1).contains("s3"));
    for arguments in [
        &["report"][..],
        &["report", here, "--key", "1"],
        &["report", here, "--max-age", "soon"],
        &["report", here, "--pairs", "-1"],
        &["plan", here, "--memory", "101"],
        &["plan", here, "--json", "--proxmox"],
        &["verify", here],
        &["move"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    two_kinds(dir.path());
    let rules = dir.path().join("rules");
    std::fs::write(&rules, vec![b'#'; 2 << 20]).unwrap();
    assert!(fails(&run(&["plan", here, "--at", NOW, "--rules", rules.to_str().unwrap()]), 2).contains("bytes"));
    for deep in
        ["[".repeat(1 << 20), format!("pinned = {}", "[".repeat(1 << 19)), "a.".repeat(1 << 19), "{a=".repeat(1 << 18)]
    {
        std::fs::write(&rules, deep).unwrap();
        fails(&run(&["plan", here, "--at", NOW, "--rules", rules.to_str().unwrap()]), 2);
        fails(&run(&["verify", rules.to_str().unwrap(), here, "--at", NOW]), 1);
    }
    std::fs::write(&rules, "[".repeat(1 << 20) + &"{\"hosts\":".repeat(1 << 20)).unwrap();
    fails(&run(&["verify", rules.to_str().unwrap(), here, "--at", NOW]), 1);
    let output = run(&["plan", here, "--at", NOW, "--rules", "/dev/zero"]);
    fails(&output, output.status.code().unwrap());
}
