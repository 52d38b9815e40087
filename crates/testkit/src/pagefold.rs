//! Runs the program under test, and makes assertions on how the runs end.

use crate::binaries::program;
use crate::process::{LIMIT, send, wait_until};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

pub fn pagefold(args: &[impl AsRef<OsStr>]) -> Output {
    Command::new(program()).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs `pagefold`, which must succeed, and returns its output.
#[track_caller]
pub fn succeed(args: &[impl AsRef<OsStr>]) -> String {
    output_of(Command::new(program()).args(args))
}

/// Runs a program, which must succeed, and returns its output.
#[track_caller]
pub fn output_of(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The output of `pagefold` with these arguments and `--json`.
#[track_caller]
pub fn json_of(args: &[impl AsRef<OsStr>]) -> Value {
    let json = output_of(Command::new(program()).args(args).arg("--json"));
    serde_json::from_str(&json).unwrap()
}

#[track_caller]
pub fn status() -> Value {
    let status = json_of(&["status"]);
    assert_eq!(status["schema"], "pagefold.status/1");
    status
}

#[track_caller]
pub fn row<'a>(list: &'a Value, field: &str, is: impl Into<Value>) -> &'a Value {
    let is = is.into();
    let rows = list.as_array().unwrap();
    rows.iter().find(|row| row[field] == is).unwrap_or_else(|| panic!("no {field} {is} in {list}"))
}

/// Asserts that a text has all these parts, wherever its lines are wrapped.
#[track_caller]
pub fn assert_has(text: &str, parts: &[&str]) {
    let words = unwrapped(text);
    for part in parts {
        assert!(words.contains(&unwrapped(part)), "{part:?} is missing in {text}");
    }
}

fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Asserts that the program fails with this code and prints only one line, on standard error, with the reason and what
/// to do.
#[track_caller]
pub fn assert_fails(args: &[&str], code: i32, says: &str) {
    assert_refused(&pagefold(args), code, says);
}

#[track_caller]
pub fn assert_refused(output: &Output, code: i32, says: &str) {
    assert_failed(output, code, says);
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Like [`assert_fails`], for a program that prints its report although it fails.
#[track_caller]
pub fn assert_failed(output: &Output, code: i32, says: &str) {
    assert_failed_as("pagefold", output, code, says);
}

/// Like [`assert_failed`], for a program of this name.
#[track_caller]
pub fn assert_failed_as(program: &str, output: &Output, code: i32, says: &str) {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.starts_with(&format!("{program}: ")) && error.lines().count() == 1, "{error}");
    assert!(error.contains(says) && error.contains("; "), "{error}");
}

/// Puts `--pid` with these processes between two lists of arguments.
pub fn with_pids(before: &[&str], pids: &[i32], after: &[&str]) -> Vec<String> {
    let mut before = before.to_vec();
    if before.contains(&"run") && !before.iter().chain(after).any(|word| *word == "--governor") {
        // Without this, tests would take longer, and much longer with other work beside them.
        before.extend(["--governor", "full"]);
    }
    let list = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let own = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    [own(&before), vec!["--pid".to_owned(), list], own(after)].concat()
}

/// The mechanism for tests that work with either: ksmd, unless `PAGEFOLD_MECHANISM` is `request`, as in the guest that
/// `scripts/kernel field` runs.
pub fn mechanism() -> &'static str {
    static MECHANISM: LazyLock<String> =
        LazyLock::new(|| std::env::var("PAGEFOLD_MECHANISM").unwrap_or_else(|_| "ksmd".to_owned()));
    &MECHANISM
}

pub fn is_on_request() -> bool {
    mechanism() == "request"
}

/// Gives back all merged memory of the processes, and returns the summary.
#[track_caller]
pub fn unmerge(pids: &[i32]) -> Value {
    let summary = json_of(&with_pids(&["unmerge"], pids, &[]));
    assert_eq!(summary["schema"], "pagefold.unmerge/1");
    summary
}

/// Starts an injector that serves the other end of this socket, just as a service manager does for a connection.
pub fn injector_on(stream: UnixStream) -> Child {
    let input = OwnedFd::from(stream);
    let mut command = Command::new(program());
    command.arg("injector").stdin(input.try_clone().unwrap()).stdout(input).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Parses the complete lines of a file of JSON, such as an audit log.
pub fn json_lines(text: &str) -> Vec<Value> {
    // The last line may be incomplete.
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A configuration file, alone in a directory. Removed when dropped.
pub struct ConfigFile {
    pub dir: tempfile::TempDir,
    pub path: PathBuf,
}

impl ConfigFile {
    pub fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = Self { path: dir.path().join("pagefold.toml"), dir };
        file.write(text);
        file
    }

    pub fn write(&self, text: &str) {
        fs::write(&self.path, text).unwrap();
    }

    /// The file's path as an argument.
    pub fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The path of another file in the directory, as an argument.
    pub fn beside(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }
}

/// A running program, usually `pagefold run`. Gets SIGTERM when dropped.
pub struct Daemon {
    child: Child,
    output: File,
    errors: File,
}

/// The result of a program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub output: String,
    pub errors: String,
}

impl Daemon {
    /// Starts `pagefold run --json` on these processes.
    pub fn on(pids: &[i32], options: &[&str]) -> Self {
        Self::start(&with_pids(&["run", "--json"], pids, options))
    }

    pub fn start(args: &[impl AsRef<OsStr>]) -> Self {
        Self::of(Command::new(program()).args(args))
    }

    /// Starts a command that is, or becomes, the program.
    pub fn of(command: &mut Command) -> Self {
        Self::writing_to(command, None, None)
    }

    /// Like [`Self::of`], but sends standard output or standard error to these files, which [`Self::end`] doesn't read.
    pub fn writing_to(command: &mut Command, to_output: Option<OwnedFd>, to_errors: Option<OwnedFd>) -> Self {
        // We use files, because nobody reads a pipe before the end.
        let output = tempfile::tempfile().unwrap();
        let errors = tempfile::tempfile().unwrap();
        command.stdin(Stdio::null());
        command.stdout(to_output.unwrap_or_else(|| output.try_clone().unwrap().into()));
        command.stderr(to_errors.unwrap_or_else(|| errors.try_clone().unwrap().into()));
        let child = command.spawn().unwrap();
        // Otherwise `command` would keep the program's output open in this process.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Self { child, output, errors }
    }

    /// Waits until the daemon answers requests.
    #[must_use]
    #[track_caller]
    pub fn answering(mut self) -> Self {
        wait_until("the daemon answers", || {
            assert!(self.is_running(), "the daemon has ended: {}", text(&mut self.errors));
            pagefold(&["status"]).status.success()
        });
        self
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn children(&self) -> Vec<i32> {
        children_of(self.pid())
    }

    /// The daemon's injector, started by its only child, and earlier ones that have ended.
    pub fn injectors(&self) -> Vec<i32> {
        self.children().into_iter().flat_map(children_of).collect()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Whether the program's messages so far contain this.
    pub fn has_said(&self, what: &str) -> bool {
        contains(&self.errors, what)
    }

    /// Whether the program's standard output so far contains this.
    pub fn has_printed(&self, what: &str) -> bool {
        contains(&self.output, what)
    }

    pub fn signal(&self, signal: i32) {
        send(self.pid(), signal);
    }

    #[track_caller]
    pub fn end(mut self) -> Ended {
        wait_until("the program ends", || !self.is_running());
        let status = self.child.wait().unwrap();
        Ended {
            code: status.code(),
            signal: std::os::unix::process::ExitStatusExt::signal(&status),
            output: text(&mut self.output),
            errors: text(&mut self.errors),
        }
    }

    /// Gives the daemon another configuration to read.
    pub fn reload(&self, config: &ConfigFile, text: &str) {
        config.write(text);
        self.signal(libc::SIGHUP);
    }

    #[track_caller]
    pub fn terminate(self) -> Ended {
        self.signal(libc::SIGTERM);
        self.end()
    }

    /// Ends the run by SIGTERM, and returns the summary.
    #[track_caller]
    pub fn stop(self) -> Value {
        self.terminate().summary()
    }

    #[track_caller]
    pub fn kill(self) -> Ended {
        self.signal(libc::SIGKILL);
        self.end()
    }
}

/// The processes that a process has started and not yet reaped.
pub fn children_of(pid: i32) -> Vec<i32> {
    // Each thread has a list of its own.
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect::<Vec<_>>()).collect()
}

fn contains(file: &File, what: &str) -> bool {
    let mut bytes = vec![0; 1 << 16];
    // We read from the beginning, without moving the offset at which the program writes.
    let length = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8_lossy(&bytes[..length]).contains(what)
}

fn text(file: &mut File) -> String {
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

impl Ended {
    /// The summary of a run that succeeded.
    #[track_caller]
    pub fn summary(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.errors);
        let summary: Value = serde_json::from_str(&self.output).unwrap();
        assert_eq!(summary["schema"], "pagefold.run/1");
        summary
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.pid(), libc::SIGTERM);
            let end = Instant::now() + LIMIT;
            while matches!(self.child.try_wait(), Ok(None)) {
                if Instant::now() > end {
                    let _ = self.child.kill();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
