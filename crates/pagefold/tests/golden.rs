//! The golden files of the command line: the help of every command, and the answers to wrong calls by a user without
//! rights.

use pagefold_testkit::{ProgramCopy, as_other_user, golden, is_root, program};
use std::fmt::Write;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The calls, each followed by its exit code and output.
const CALLS: &str = include_str!("../golden/calls.txt");

#[track_caller]
fn check(name: &str, text: &str) {
    golden::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name), text);
}

fn output_of(command: &mut Command, words: &[&str]) -> Output {
    command.args(words).env("COLUMNS", "100").stdin(Stdio::null()).output().unwrap()
}

/// Lists the words of every visible command from this one down.
fn commands<'a>(command: &'a clap::Command, above: &[&'a str], found: &mut Vec<Vec<&'a str>>) {
    found.push(above.to_vec());
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        commands(below, &[above, &[below.get_name()]].concat(), found);
    }
}

#[test]
fn every_command_has_its_help() {
    let (command, mut all) = (pagefold::command(), Vec::new());
    commands(&command, &[], &mut all);
    for words in all {
        let [short, long] = ["-h", "--help"].map(|flag| {
            let output = output_of(&mut Command::new(program()), &[&words[..], &[flag]].concat());
            assert!(output.status.success() && output.stderr.is_empty(), "{words:?}");
            String::from_utf8(output.stdout).unwrap()
        });
        let more = if long == short { String::new() } else { format!("\n-- with --help\n{long}") };
        check(&format!("help/{}.txt", [&["pagefold"], &words[..]].concat().join("-")), &(short + &more));
    }
}

#[test]
fn a_wrong_call_ends_with_its_code_and_a_line() {
    let copy = ProgramCopy::of(program(), "pagefold");
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    for (name, text) in [
        ("good.toml", "[scope]\nexes = [\"sh\"]\n[run]\ngovernor = \"low\"\n"),
        ("empty.toml", ""),
        ("key.toml", "[scope]\nexe = 1\n"),
        ("value.toml", "[run]\ngovernor = \"turbo\"\n"),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let mut text = String::new();
    for call in CALLS.lines().filter_map(|line| line.strip_prefix("$ pagefold")) {
        let mut command = if is_root() { as_other_user(&*copy) } else { Command::new(&*copy) };
        let words: Vec<&str> = call.split_whitespace().collect();
        let output = output_of(command.current_dir(dir.path()), &words);
        let code = output.status.code().unwrap();
        let _ = writeln!(text, "$ pagefold{call}\n[{code}]");
        text += &String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    }
    check("calls.txt", &text);
}
