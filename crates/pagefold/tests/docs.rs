//! pagefold accepts the examples in our documents as they are: every command line with `pagefold` in a block of `sh`,
//! and every configuration in a block of `toml`. Links lead somewhere, and the tests that safety.md names exist.

use pagefold_testkit::program;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The exit code of `config check` if the file is valid, but nothing is in scope.
const NOTHING_IN_SCOPE: i32 = 5;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The files below a folder with this extension, except for build products and hidden files.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
    }
    files
}

fn documents(folder: &Path) -> Vec<(PathBuf, String)> {
    files(folder, "md").into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The code blocks in a language, each as a list of lines.
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
    for (path, text) in documents(&root()) {
        for line in blocks(&text, "sh").concat() {
            let line = line.split_once(" #").map_or(line, |(command, _)| command).trim();
            let mut words = line.split_ascii_whitespace();
            if words.next() != Some("pagefold") {
                continue;
            }
            seen += 1;
            // clap parses the arguments before --help, and --help makes the program do nothing.
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
    for (path, text) in documents(&root()) {
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

/// A text without its code blocks.
fn prose(text: &str) -> String {
    let parts = text.split("```");
    parts.step_by(2).collect()
}

/// A heading's name as links use it.
fn anchor(heading: &str) -> String {
    let letters = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = letters.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Checks the links of these documents, and returns their number.
fn check_links(documents: Vec<(PathBuf, String)>) -> usize {
    let mut seen = 0;
    for (path, text) in documents {
        for link in prose(&text).split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            if link.contains("://") {
                continue;
            }
            seen += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let to = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(to.exists(), "{}: {link}", path.display());
            if !heading.is_empty() {
                let target = prose(&fs::read_to_string(to).unwrap());
                let headings: BTreeSet<String> =
                    target.lines().filter(|line| line.starts_with('#')).map(anchor).collect();
                assert!(headings.contains(heading), "{}: {link}", path.display());
            }
        }
    }
    seen
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let seen = check_links(documents(&root()));
    assert!(seen > 50, "{seen} links");
}

#[test]
fn every_link_leads_somewhere_in_the_installed_documents() {
    let dir = tempfile::tempdir().unwrap();
    let destination = format!("DESTDIR={}", dir.path().display());
    let output = Command::new("make").args(["install-documents", &destination]).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen = check_links(documents(dir.path()));
    assert!(seen > 20, "{seen} links");
}

/// safety.md names tests as `a/b.rs`, the end of a path, or as `a/b.rs::name`, a test in that file.
#[test]
fn every_test_that_a_promise_names_exists() {
    let sources = files(&root(), "rs");
    let safety = fs::read_to_string(root().join("docs/safety.md")).unwrap();
    let mut seen = 0;
    for name in safety.split('`').skip(1).step_by(2) {
        let (file, test) = name.split_once("::").unwrap_or((name, ""));
        if Path::new(file).extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        seen += 1;
        let mut found = sources.iter().filter(|path| path.ends_with(file));
        let is_there =
            found.any(|path| test.is_empty() || fs::read_to_string(path).unwrap().contains(&format!("fn {test}(")));
        assert!(is_there, "{name}");
    }
    assert!(seen > 50, "{seen} tests");
}
