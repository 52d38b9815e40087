//! The examples of the documents are accepted as they stand: every command line with `pagefold` in a block of `sh`, and every
//! configuration in a block of `toml`.

use pagefold_testkit::program;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit code of `config check` if the file is valid, but nothing is in scope.
const NOTHING_IN_SCOPE: i32 = 5;

fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.chain([root.join("README.md")]).map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The blocks of a language, each as its lines.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<Vec<&'a str>> {
    let begin = format!("```{language}");
    let mut lines = text.lines();
    let mut blocks = Vec::new();
    while lines.any(|line| line == begin) {
        blocks.push(lines.by_ref().take_while(|line| *line != "```").collect());
    }
    blocks
}

#[test]
fn every_command_of_an_example_is_accepted() {
    let mut seen = 0;
    for (path, text) in documents() {
        for line in blocks(&text, "sh").concat() {
            let line = line.split_once(" #").map_or(line, |(command, _)| command).trim();
            let mut words = line.split_ascii_whitespace();
            if words.next() != Some("pagefold") {
                continue;
            }
            seen += 1;
            // Arguments are parsed in their order, and nothing is done.
            let own = words.take_while(|word| *word != "--");
            let output = Command::new(program()).args(own).arg("--help").output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {line}: {errors}", path.display());
        }
    }
    assert!(seen > 20, "{seen} examples");
    let output = Command::new(program()).args(["run", "--no-such-flag", "--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "a wrong flag would be found");
}

#[test]
fn every_configuration_of_an_example_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("example.toml");
    let check = |text: &str| {
        fs::write(&file, text).unwrap();
        Command::new(program()).args(["config", "check"]).arg(&file).output().unwrap()
    };
    let mut seen = 0;
    for (path, text) in documents() {
        for lines in blocks(&text, "toml") {
            seen += 1;
            let output = check(&lines.join("\n"));
            let errors = String::from_utf8_lossy(&output.stderr);
            let is_valid = matches!(output.status.code(), Some(0 | NOTHING_IN_SCOPE));
            assert!(is_valid, "{}: {}: {errors}", path.display(), lines.join("\n"));
        }
    }
    assert!(seen > 5, "{seen} examples");
    assert_eq!(check("[scope]\nexe = 1\n").status.code(), Some(2), "a wrong key would be found");
}
