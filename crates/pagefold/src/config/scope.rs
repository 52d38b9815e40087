//! The flags that select processes.

use crate::config::flags::ScopeFlags;
use crate::config::options::Options;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};
use pagefold_host::scope::exe::interpreter_of;
use pagefold_host::scope::workload::{self, WorkloadKind};
use pagefold_host::scope::{
    ProcessInfo, ScopeError, ScopeSpec, Selector, own_pid, resolve_each, resolve_for_undoing, resolve_for_undoing_again,
};
use pagefold_procmem::Roots;
use pagefold_procmem::os::peer::own_uid;
use pagefold_procmem::process::ReadError;
use pagefold_text::escape::{printable, shell_word};
use pagefold_text::exit::{self, Exit};
use pagefold_text::misspelt::nearest;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// When we look for a misspelt name, one letter in this many may be wrong.
pub const NAME_LETTERS: usize = 4;

/// The processes in scope. With several flags, a process that matches any of them is in scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeArgs {
    pub pid: Vec<i32>,
    /// The selectors that can also be set in the configuration file.
    pub selectors: ScopeFlags,
}

/// With these options we refuse programs named without a flag: the user may have meant the word as an option's value.
const NOT_BESIDE: [&str; 5] = ["all", "config", "also", "except", "override-opt-outs"];

/// The scope as clap reads it.
#[derive(clap::Args)]
struct ScopeWords {
    /// A pid (as with --pid), or a program (as with --exe)
    ///
    /// A number is a pid. Anything else is a program: the path or the base name of its executable.
    #[arg(help_heading = "Scope", value_name = "PID|PROGRAM")]
    targets: Vec<String>,
    /// These processes (may be repeated, or separated by commas)
    #[arg(long, help_heading = "Scope", value_name = "PID", value_delimiter = ',', value_parser = pid, hide_short_help = true)]
    pid: Vec<i32>,
    #[command(flatten)]
    selectors: ScopeFlags,
}

impl Args for ScopeArgs {
    fn augment_args(command: Command) -> Command {
        ScopeWords::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        ScopeWords::augment_args_for_update(command)
    }
}

impl FromArgMatches for ScopeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let ScopeWords { targets, pid: pids, selectors } = ScopeWords::from_arg_matches(matches)?;
        let mut scope = Self { pid: pids, selectors };
        let is_given = |id: &&str| {
            matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
        };
        if let (Some(target), true) = (targets.first(), NOT_BESIDE.iter().any(is_given)) {
            let way = if is_pids(target) { "name processes by --pid" } else { "name programs by --exe" };
            let problem = format!("'{target}' may be a selector or the value of an option; {way}");
            return Err(Error::raw(ErrorKind::ArgumentConflict, problem));
        }
        for target in targets {
            if !is_pids(&target) {
                scope.selectors.0.exes.get_or_insert_default().push(target);
                continue;
            }
            for word in target.split(',') {
                let pid = pid(word).map_err(|problem| format!("invalid value '{word}': {problem}"));
                scope.pid.push(pid.map_err(|problem| Error::raw(ErrorKind::ValueValidation, problem))?);
            }
        }
        for exe in scope.selectors.0.exes.iter_mut().flatten() {
            // We keep a link's own name: it may lead to another version tomorrow.
            let Some((directory, name)) = exe.rsplit_once('/') else { continue };
            if let (false, Ok(directory)) = (exe.starts_with('/'), Path::new(directory).canonicalize()) {
                *exe = directory.join(name).to_string_lossy().into_owned();
            }
        }
        Ok(scope)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn is_pids(target: &str) -> bool {
    target.bytes().all(|byte| byte.is_ascii_digit() || byte == b',')
}

/// The flag `--pid` of `unmerge`, `exclude` and `include`, which also selects the processes' descendants.
pub fn with_descendants(pid: Arg) -> Arg {
    pid.help("These processes and all their descendants (may be repeated, or separated by commas)")
}

/// Parses a pid.
///
/// # Errors
/// The text isn't a number above 0.
pub fn pid(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(pid @ 1..) => Ok(pid),
        _ => Err("a pid is a number above 0".to_owned()),
    }
}

impl ScopeArgs {
    pub fn all() -> Self {
        Self::of_file(&Options { all: Some(true), ..Options::default() })
    }

    /// The scope in a configuration file.
    pub fn of_file(options: &Options) -> Self {
        let Options { cgroups, users, exes, units, vms, containers, pods, enabled, all, .. } = options.clone();
        let selectors =
            Options { cgroups, users, exes, units, vms, containers, pods, enabled, all, ..Options::default() };
        Self { pid: Vec::new(), selectors: ScopeFlags(Box::new(selectors)) }
    }

    /// The scope as a specification that we can resolve again and again.
    pub fn spec(&self) -> ScopeSpec {
        self.selectors.0.scope(&self.pid)
    }

    /// Whether new processes can enter the scope.
    pub fn is_selective(&self) -> bool {
        self.spec().is_selective()
    }

    /// The processes that are in scope now.
    ///
    /// # Errors
    /// The scope is empty, or a selector names a process, user, cgroup or program that doesn't exist.
    pub fn resolve(&self) -> Result<Vec<ProcessInfo>, Exit> {
        resolve_each(&self.spec(), &Roots::default()).map_err(|error| explain(&error))
    }

    /// The processes in scope now, for undoing work on them. Here `--exe` matches programs by name even if other users
    /// can change their files, and `--pid` also covers the descendants.
    ///
    /// # Errors
    /// The same errors as in [`Self::resolve`].
    pub fn resolve_for_undoing(&self) -> Result<Vec<ProcessInfo>, Exit> {
        resolve_for_undoing(&self.spec(), &Roots::default(), &[own_pid()]).map_err(|error| explain(&error))
    }

    /// Resolves the scope for undoing once more, to find processes that have started since. `found` has the processes
    /// of earlier calls. An empty result isn't an error here.
    pub fn resolve_for_undoing_again(&self, found: &BTreeSet<(i32, u64)>) -> Vec<ProcessInfo> {
        resolve_for_undoing_again(&self.spec(), found, &Roots::default(), &[own_pid()])
    }
}

impl fmt::Display for ScopeArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spec().to_string())
    }
}

/// The exit code and advice for a scope that we can't resolve.
pub fn explain(error: &ScopeError) -> Exit {
    explain_to(error, own_uid() == 0)
}

fn explain_to(error: &ScopeError, is_root: bool) -> Exit {
    let needs_root = !is_root && matches!(error, ScopeError::NoMatch(scope) if scope.contains("--exe "));
    if let (Some(hint), false) = (hint(error), needs_root) {
        return Exit::new(exit::NO_SCOPE, format!("{error}; {hint}"));
    }
    let (code, advice) = match error {
        ScopeError::Empty => return Exit::new(exit::NO_SCOPE, error.to_string().replace("scope:", "scope;")),
        ScopeError::UnknownPid(_) => (exit::NO_SCOPE, "it may have ended: check with ps"),
        ScopeError::Unreadable { source: ReadError::Denied { .. }, .. } => (exit::NOT_PERMITTED, "run as root"),
        error if error.is_for_lack_of_files() => {
            (exit::FAILURE, "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=)")
        }
        ScopeError::Unreadable { .. } => (exit::FAILURE, "try again, or leave the process out"),
        ScopeError::UnknownUser(_) => (exit::NO_SCOPE, "give a name from /etc/passwd, or a number"),
        ScopeError::NoCgroup(name) if is_unit(name) => {
            return Exit::new(exit::NO_SCOPE, format!("{error}; try --unit {}", shell_word(name)));
        }
        ScopeError::NoCgroup(_) => (exit::NO_SCOPE, "give a path below /sys/fs/cgroup"),
        ScopeError::NoMatch(scope) if scope == "--all" => {
            return Exit::new(
                exit::NO_SCOPE,
                "nothing to look at yet: no other process runs here; start a program first",
            );
        }
        ScopeError::NoMatch(scope) => match scope.strip_prefix("--exe ") {
            Some(name) if is_unit(name) => {
                return Exit::new(exit::NO_SCOPE, format!("{error}; try --unit {name}"));
            }
            _ if needs_root => {
                (exit::NOT_PERMITTED, "run as root: only root sees which programs other users' processes run")
            }
            // The cgroup exists, or we'd have another error.
            _ if scope.starts_with("--cgroup ") && !scope.contains(" --") => {
                (exit::NO_SCOPE, "the cgroup is empty: start a program in it first")
            }
            _ => (exit::NO_SCOPE, "check the spelling: pagefold scan shows running programs"),
        },
        ScopeError::NameOnly { ways, .. } => {
            return Exit::new(exit::NO_SCOPE, format!("{error}; name them by {ways}"));
        }
        ScopeError::Io { .. } => (exit::FAILURE, "is /proc mounted?"),
    };
    Exit::new(code, format!("{error}; {advice}"))
}

/// Why one selector may match no process although it seems right, and another way to select the processes.
pub fn hint(error: &ScopeError) -> Option<String> {
    let ScopeError::NoMatch(scope) = error else { return None };
    let (flag, name) = scope.split_once(' ').filter(|(_, name)| !name.contains(" --"))?;
    let kind = flag.strip_prefix("--")?;
    if let Some(hint) = script_hint(name).filter(|_| kind == "exe").or_else(|| meant(kind, name)) {
        return Some(hint);
    }
    match flag {
        "--container" => Some(
            "names come from the files of root's Docker, Podman, CRI-O and nerdctl, and from the cgroups of LXC and \
             nspawn; at least 12 digits of the ID always work"
                .to_owned(),
        ),
        "--pod" => Some(
            "names are those in /var/log/pods, as NAMESPACE/NAME; at least 12 characters of the UID always work"
                .to_owned(),
        ),
        _ => None,
    }
}

/// What a selector that matches nothing probably meant: the same name of another kind, or a similar name of this kind.
fn meant(kind: &str, name: &str) -> Option<String> {
    if (kind, name) == ("exe", "all") {
        return Some("all processes are --all".to_owned());
    }
    // For a name of another kind we never suggest a program: anybody can give a program any name.
    let kinds = ["unit", "vm", "container", "pod"];
    if let Some(other) = kinds.into_iter().find(|&other| other != kind && running(other).contains(name)) {
        return Some(format!("try --{other} {name}"));
    }
    let names = running(kind);
    match nearest(name, names.iter().map(String::as_str), NAME_LETTERS)[..] {
        [nearest] if nearest != name => Some(format!("did you mean --{kind} {nearest}?")),
        _ => None,
    }
}

/// The names of running programs, or of running workloads of this kind, as words for a shell.
fn running(kind: &str) -> BTreeSet<String> {
    let names = match (WorkloadKind::of_name(kind), kind) {
        (Some(kind), _) => workload::running(kind, &Roots::default().proc),
        (None, "exe") => running_programs(),
        _ => BTreeSet::new(),
    };
    let shown = |name: &String| shell_word(&printable(name.trim_end_matches(".service").as_bytes()));
    names.iter().map(shown).collect()
}

/// The names by which running programs can be selected.
pub fn running_programs() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let all = ScopeSpec(vec![Selector::All]);
    for process in resolve_for_undoing(&all, &Roots::default(), &[own_pid()]).unwrap_or_default() {
        names.insert(String::from_utf8_lossy(&process.program()).into_owned());
        names.insert(process.name);
    }
    names
}

/// If this path leads to a script: why it selects no process, and what would.
pub fn script_hint(path: &str) -> Option<String> {
    let interpreter = interpreter_of(Path::new(path))?;
    Some(format!("{path} is a script, run by {interpreter}; select it by --unit, --container, --cgroup or --user"))
}

/// Whether `name` is the name of a unit, rather than a path or a list of flags.
fn is_unit(name: &str) -> bool {
    !name.contains([' ', '/']) && [".service", ".scope", ".slice"].iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        scope: ScopeArgs,
    }

    #[test]
    fn pids_repeat_and_separate_by_commas() {
        let cli = Cli::try_parse_from(["x", "--pid", "1,2", "--pid", "3", "--user", "root"]).unwrap();
        assert_eq!(cli.scope.to_string(), "--pid 1 --pid 2 --pid 3 --user root");
        assert!(Cli::try_parse_from(["x", "--pid", "0"]).is_err());
        assert!(Cli::try_parse_from(["x", "0"]).is_err());
        assert!(Cli::try_parse_from(["x", "--pid", "one"]).is_err());
    }

    #[test]
    fn a_cgroup_without_processes_is_said_to_be_empty() {
        let advice = |scope: &str| explain_to(&ScopeError::NoMatch(scope.into()), true).line;
        assert!(advice("--cgroup /a").ends_with("; the cgroup is empty: start a program in it first"));
        assert!(advice("--cgroup /a --exe b").contains("; check the spelling"));
    }

    #[test]
    fn a_script_is_said_to_be_run_by_its_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("gunicorn");
        let path = script.to_str().unwrap();
        for (text, interpreter) in [
            ("#!/usr/bin/python3 -I\nimport sys\n", "/usr/bin/python3"),
            ("#! /usr/bin/env -S python3 -I\n", "python3"),
            ("#!/bin/sh", "/bin/sh"),
        ] {
            std::fs::write(&script, text).unwrap();
            let line = explain(&ScopeError::NoMatch(format!("--exe {path}"))).line;
            let hint = format!(
                "{path} is a script, run by {interpreter}; select it by --unit, --container, --cgroup or --user"
            );
            assert_eq!(line, format!("no process matches --exe {path}; {hint}"));
        }
        for text in ["\x7fELF", "", "#!", "#!\n/bin/sh"] {
            std::fs::write(&script, text).unwrap();
            assert_eq!(script_hint(path), None, "{text:?}");
        }
    }

    #[test]
    fn names_of_containers_and_pods_have_a_source() {
        let line = |scope: &str| explain_to(&ScopeError::NoMatch(scope.into()), true).line;
        assert!(line("--container web").ends_with("at least 12 digits of the ID always work"));
        assert!(line("--pod 'shop/cart-*'").ends_with("at least 12 characters of the UID always work"));
        let (scope, why) = ("--exe a".to_owned(), "b".to_owned());
        let elsewhere = ScopeError::NameOnly { scope, why, ways: "--container or --pod" };
        assert_eq!(explain(&elsewhere).line, "no process matches --exe a: b; name them by --container or --pod");
    }

    #[test]
    fn words_without_a_flag_are_pids_and_programs() {
        let given = |words: &[&str]| Cli::try_parse_from([&["x"], words].concat()).unwrap().scope;
        let words = given(&["4711", "redis-server", "/usr/bin/qemu", "--pid", "1", "2"]);
        let flags = given(&["--pid", "1,4711,2", "--exe", "redis-server", "--exe", "/usr/bin/qemu"]);
        assert_eq!(words, flags);
    }

    #[test]
    fn a_unit_in_place_of_something_else_is_recognized() {
        for error in [ScopeError::NoCgroup("a.slice".into()), ScopeError::NoMatch("--exe a.slice".into())] {
            assert!(explain(&error).line.ends_with("; try --unit a.slice"), "{error}");
        }
        let several = ScopeError::NoMatch("--exe a --exe b.service".into());
        assert!(explain_to(&several, true).line.contains("; check the spelling"));
        let hidden = explain_to(&several, false);
        assert!(hidden.code == exit::NOT_PERMITTED && hidden.line.contains("; run as root"), "{hidden}");
    }

    #[test]
    fn a_process_that_cannot_be_read_is_reported_with_the_reason() {
        let source = ReadError::Denied { pid: 7, file: "stat".to_owned() };
        let error = explain(&ScopeError::Unreadable { pid: 7, source });
        assert_eq!(error.code, exit::NOT_PERMITTED);
        assert_eq!(error.line, "process 7 cannot be read: not permitted to read /proc/7/stat; run as root");
    }

    #[test]
    fn no_scope_is_an_error_of_its_own() {
        let error = ScopeArgs::default().resolve().unwrap_err();
        assert_eq!(error.code, exit::NO_SCOPE);
        assert!(error.line.contains("nothing is in scope; select"), "{}", error.line);
    }
}
