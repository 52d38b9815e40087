//! All output escapes names that others choose, since they could control the terminal.

use pagefold_testkit::*;
use pagefold_text::escape::is_unsafe;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// This name clears the screen, sets the title, colours text by ESC and by C1 codes, and reverses the rest of the line.
const NAME: &str = "p\x1b[2J\x1b]0;t\x07\u{9b}31m\u{202e}q";

/// Gives its process a command name with control characters and a line end.
const NAMED: &str = "printf 'a\\033[2Jb\\nc' > /proc/$$/comm; echo ready; read line";

#[track_caller]
fn assert_safe(what: &str, output: &Output) {
    for text in [&output.stdout, &output.stderr] {
        let text = std::str::from_utf8(text).unwrap();
        let bad: Vec<char> = text.chars().filter(|&character| character != '\n' && is_unsafe(character)).collect();
        assert!(bad.is_empty(), "{what}: {bad:?} in {text:?}");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.lines().all(|line| line.starts_with("pagefold: ")), "{what}: {errors}");
}

#[test]
fn names_with_escape_sequences_are_escaped_in_every_output() {
    // This test runs and unmerges, which takes KSM's lock and the control socket.
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut process = Script::of(Command::new("sh").args(["-c", NAMED]));
    assert_eq!(process.line(), "ready");
    let pid = process.pid().to_string();
    let Some(group) = Cgroup::create("unified") else { return skip("no cgroups of version 2") };
    let named = group.path().join(NAME);
    fs::create_dir(&named).unwrap();
    fs::write(named.join("cgroup.procs"), &pid).unwrap();
    let path = named.to_str().unwrap();
    let config = tempfile::tempdir().unwrap().path().join(NAME);
    let config = config.to_str().unwrap();
    let run = ["run", "--dry-run", "--for", "1s", "--pid", &pid];
    let mut said = String::new();
    let mut check = |args: &[&str]| {
        let output = pagefold(args);
        assert_safe(&args.join(" "), &output);
        said += &(String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr));
    };
    check(&["scan", "--pid", &pid]);
    check(&["scan", "--json", "--cgroup", path]);
    check(&["scan", "--cgroup", path]);
    check(&run);
    check(&[&run[..], &["--json"]].concat());
    check(&["run", "--config", config]);
    check(&["scan", "--exe", NAME]);
    check(&["scan", "--pid", NAME]);
    check(&["scan", "--cgroup", NAME]);
    check(&["scan", "--user", NAME]);
    // The error message about this attribute names the cgroup.
    cgroup::set_attribute(Path::new(path), "user.pagefold.avoid", "1");
    check(&["scan", "--pid", &pid]);
    check(&["unmerge", "--pid", &pid]);
    check(&["explain", &pid]);
    check(&["doctor"]);
    assert!(said.contains("p\\u{1b}[2J") && said.contains("a\\u{1b}[2Jb\\nc"), "the names are shown: {said}");
    drop(process);
    wait_until("the cgroup is empty", || fs::remove_dir(&named).is_ok());
    ksm.assert_restored();
}
