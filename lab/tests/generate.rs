//! `pagefold-lab generate`: its records, its output and refused arguments.

mod common;

use common::{assert_lab_fails, lab};
use pagefold_lab::generate::GENERATORS;
use pagefold_lab::record::{Event, Record};
use std::fs;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a small record and returns the output.
#[track_caller]
fn generate(name: &str, file: &Path, more: &[&str]) -> String {
    let output = lab(&[&["generate", name, "-o", text(file), "--size", "2", "--for", "5s"], more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_workload_gives_a_record() {
    let dir = tempfile::tempdir().unwrap();
    for generator in GENERATORS {
        let file = dir.path().join(generator.name);
        let output_text = generate(generator.name, &file, &[]);
        assert!(
            output_text.starts_with(&format!("{}: 6 snapshots of ", generator.name))
                && output_text.lines().count() == 1,
            "{output_text}"
        );
        let record = Record::read(&file).unwrap();
        assert_eq!((record.origin.source.as_str(), record.origin.every_ns), (generator.name, 1_000_000_000));
        assert_eq!(record.snapshots.len(), 6);
        let regions = record.snapshots[0].events.iter().filter_map(|event| match event {
            Event::Region(row) => Some(row.pages.0),
            _ => None,
        });
        assert!(regions.map(|pages| assert_eq!(pages, 512)).count() > 0);
    }
}

#[test]
fn options_are_obeyed_and_the_seed_determines_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let [one, same, other] = ["one", "same", "other"].map(|name| dir.path().join(name));
    let options = ["--guests", "3", "--every", "500ms", "--json", "--seed"];
    let output_text = generate("database", &one, &[&options[..], &["7"]].concat());
    let summary: serde_json::Value = serde_json::from_str(&output_text).unwrap();
    assert_eq!(summary["schema"], "pagefold.lab.generate/1");
    assert_eq!((&summary["workload"], &summary["seed"]), (&"database".into(), &7.into()));
    assert_eq!((&summary["snapshots"], &summary["processes"]), (&11.into(), &3.into()));
    assert_eq!(summary["bytes"], fs::metadata(&one).unwrap().len());
    assert!(summary["first_pages"].as_u64().unwrap() > 1_200 && summary["changed_pages"].as_u64().unwrap() > 0);
    generate("database", &same, &[&options[..], &["7"]].concat());
    generate("database", &other, &[&options[..], &["8"]].concat());
    assert_eq!(fs::read(&one).unwrap(), fs::read(&same).unwrap());
    assert_ne!(fs::read(&one).unwrap(), fs::read(&other).unwrap());
}

#[test]
fn the_list_has_all_generators() {
    let output = lab(&["generate", "--list"]);
    let output_text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert_eq!(output_text.lines().count(), GENERATORS.len());
    assert!(
        GENERATORS
            .iter()
            .all(|generator| output_text.contains(generator.name) && output_text.contains(generator.about)),
        "{output_text}"
    );
}

#[test]
fn invalid_arguments_are_refused_in_one_line_and_leave_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("record");
    let to = ["-o", text(&file)];
    let refuses = |args: &[&str], message| assert_lab_fails(&[&["generate"], args, &to].concat(), 2, message);
    refuses(&["compile-everything"], "choose kernel-build, web-server, database, ");
    refuses(&[], "NAME");
    refuses(&["database", "--size", "0"], "0 pages each; choose at least 256");
    refuses(&["database", "--size", "18446744073709551615"], "choose at least 256 and at most 4194304 in all");
    refuses(&["database", "--guests", "0"], "0 guests or programs; choose 1 to 64");
    refuses(&["database", "--every", "0s"], "choose at least 1 ms");
    refuses(&["database", "--for", "1s", "--every", "2s"], "no more than the length");
    refuses(&["database", "--for", "sometime"], "--for");
    assert_lab_fails(&["generate", "database"], 2, "--output");
    assert_lab_fails(&["generate", "database", "--list"], 2, "--list");
    let nowhere = dir.path().join("no/such/place");
    assert_lab_fails(&["generate", "database", "--size", "1", "--for", "1s", "-o", text(&nowhere)], 1, "cannot write");
    assert_lab_fails(
        &["generate", "database", "--size", "1", "--for", "1s", "-o", text(dir.path())],
        1,
        "is not a file",
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
