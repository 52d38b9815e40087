//! Wrong command lines that people type: each is answered with the line that would have worked, or just works.

use pagefold_testkit::{assert_fails, pagefold};

/// A wrong command line, and the line that we answer with.
const CALLS: &[(&[&str], &str)] = &[
    // misspelt
    (&["scna"], "scan"),
    (&["Status"], "status"),
    (&["scan", "--exat"], "scan --exact"),
    (&["run", "--exe", "redis-server", "--goveror", "low"], "run --exe redis-server --governor low"),
    (&["run", "--dry_run", "redis-server"], "run --dry-run redis-server"),
    (&["stats", "--jsn"], "status --json"),
    (&["config", "chek"], "config check"),
    (&["unmerge", "-pid", "4711"], "unmerge --pid 4711"),
    (&["SCAN"], "scan"),
    (&["tpo"], "top"),
    (&["inlcude", "redis-server"], "include redis-server"),
    (&["governer"], "governor quiet"),
    (&["status", "--jason"], "status --json"),
    (&["scan", "--ptd", "5"], "scan --pid 5"),
    (&["run", "-exe=redis-server"], "run --exe=redis-server"),
    // named differently in other programs
    (&["start", "redis-server"], "run redis-server"),
    (&["merge", "--name", "redis-server"], "run --exe redis-server"),
    (&["list"], "scan"),
    (&["scan", "-p", "4711"], "scan --pid 4711"),
    (&["run", "--service=nginx", "--duration", "60"], "run --unit=nginx --for 60"),
    (&["unmerge", "--docker", "3f0c1d2e9a7b"], "unmerge --container 3f0c1d2e9a7b"),
    (&["version"], "--version"),
    (&["run", "redis-server", "--verbose"], "run redis-server --log-level=debug"),
    (&["config", "validate"], "config check"),
    (&["status", "redis-server"], "explain redis-server"),
    // in the wrong place
    (&["--exe", "redis-server"], "scan --exe redis-server"),
    (&["--json", "scan"], "scan --json"),
    (&["scan", "--json=true"], "scan --json"),
    (&["run", "--pid", "redis-server"], "run --exe redis-server"),
    (&["scan", "--pid=my server"], "scan '--exe=my server'"),
    // words whose nearest command does the opposite
    (&["unexclude", "redis-server"], "include redis-server"),
    (&["unpause"], "resume"),
    (&["run", "--exe", "redis-server", "--disallow", "vault"], "run --exe redis-server --deny vault"),
    // incomplete
    (&["explain"], "explain 4711"),
    (&["exec"], "exec -- ./worker"),
    (&["governor"], "governor quiet"),
    (&["scan", "--html"], "scan --html scan.html"),
];

/// Lines that work as they are, although other programs need a flag for some of these words.
const WORK: &[&[&str]] = &[
    &["scan", "redis-server"],
    &["scan", "4711"],
    &["scan", "/usr/bin/redis-server"],
    &["scan", "4711,4712"],
    &["enable", "redis-server"],
    &["history", "--csv"],
    &["run", "redis-server", "--for", "60"],
    &["top", "--since", "3600"],
    &["run", "--all", "--metrics-interval", "15"],
    &["run", "--pid", "4711", "4712", "4713"],
    &["unmerge", "4711"],
    &["explain", "redis-server"],
    &["include", "redis-server"],
];

/// clap reads the arguments before --help, and --help makes the program do nothing.
#[track_caller]
fn assert_parses(words: &[&str]) {
    let output = pagefold(&[words, &["--help"]].concat());
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_wrong_call_is_answered_with_the_line_that_works() {
    assert!(CALLS.len() >= 20);
    for (wrong, right) in CALLS {
        assert_fails(wrong, 2, &format!("; try pagefold {right}\n"));
        // A shell would pass this as one word.
        let words = right.replace("'--exe=my server'", "--exe=my_server");
        let words: Vec<&str> = words.split(' ').take_while(|word| *word != "--").collect();
        assert_parses(&words);
    }
    for words in WORK {
        assert_parses(words);
    }
}

#[test]
fn what_nobody_can_guess_is_answered_with_the_help_of_the_command() {
    for (wrong, help) in [
        (&["frobnicate"][..], "pagefold --help"),
        (&["run", "--frobnicate"], "pagefold run --help"),
        (&["config", "check", "--frobnicate"], "pagefold config check --help"),
        (&["explain", "-1"], "pagefold explain --help"),
        (&["run", "--exe", "redis-server", "--except", "vault"], "pagefold run --help"),
        (&["unmerge", "--dockr", "a", "--dockr", "b", "--dockr", "c"], "pagefold unmerge --help"),
        (&["run", "--deny", "vault", "redis-server"], "pagefold run --help"),
        (&["run", "redis-server", "--all"], "pagefold run --help"),
    ] {
        assert_fails(wrong, 2, &format!("; see {help}\n"));
    }
}
