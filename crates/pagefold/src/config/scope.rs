//! The flags that select processes.

use crate::config::flags::ScopeFlags;
use crate::config::options::Options;
use pagefold_host::scope::{
    ProcessInfo, ScopeError, ScopeSpec, own_pid, resolve, resolve_for_undoing, resolve_for_undoing_again,
};
use pagefold_procmem::Roots;
use pagefold_procmem::process::ReadError;
use pagefold_text::exit::{self, Exit};
use std::collections::BTreeSet;
use std::fmt;

/// The processes in scope. With several flags, a process that matches any of them is in scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ScopeArgs {
    /// These processes (may be repeated, or separated by commas)
    #[arg(long, help_heading = "Scope", value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Vec<i32>,
    /// The selectors that the configuration file also has.
    #[command(flatten)]
    pub selectors: ScopeFlags,
}

impl ScopeArgs {
    /// All processes.
    pub fn all() -> Self {
        Self::of_file(&Options { all: Some(true), ..Options::default() })
    }

    /// The scope in a configuration file.
    pub fn of_file(options: &Options) -> Self {
        let Options { cgroups, users, exes, units, vms, containers, pods, all, .. } = options.clone();
        let selectors = Options { cgroups, users, exes, units, vms, containers, pods, all, ..Options::default() };
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
    /// The scope is empty, or names a process, user, cgroup or program that doesn't exist.
    pub fn resolve(&self) -> Result<Vec<ProcessInfo>, Exit> {
        resolve(&self.spec(), &Roots::default()).map_err(|error| explain(&error))
    }

    /// The processes in scope now, for undoing work on them. Here `--exe` matches programs by name even if other users
    /// can change their files, and `--pid` also covers the descendants.
    ///
    /// # Errors
    /// The same errors as in [`Self::resolve`].
    pub fn resolve_for_undoing(&self) -> Result<Vec<ProcessInfo>, Exit> {
        resolve_for_undoing(&self.spec(), &Roots::default(), &[own_pid()]).map_err(|error| explain(&error))
    }

    /// Resolves a scope for undoing again, to find processes that have started since. `found` are the earlier ones.
    /// Here an empty result isn't an error.
    pub fn resolve_for_undoing_again(&self, found: &BTreeSet<(i32, u64)>) -> Vec<ProcessInfo> {
        resolve_for_undoing_again(&self.spec(), found, &Roots::default(), &[own_pid()])
    }
}

impl fmt::Display for ScopeArgs {
    /// Writes the scope as flags.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spec().to_string())
    }
}

/// The exit code and advice for a scope that we can't resolve.
pub fn explain(error: &ScopeError) -> Exit {
    let (code, advice) = match error {
        ScopeError::Empty => return Exit::new(exit::NO_SCOPE, error.to_string().replace("scope:", "scope;")),
        ScopeError::UnknownPid(_) => (exit::NO_SCOPE, "it may have ended: check with ps"),
        ScopeError::Unreadable { source: ReadError::Denied { .. }, .. } => (exit::NOT_PERMITTED, "run as root"),
        ScopeError::Unreadable { .. } => (exit::FAILURE, "try again, or leave the process out"),
        ScopeError::UnknownUser(_) => (exit::NO_SCOPE, "give a name from /etc/passwd, or a number"),
        ScopeError::NoCgroup(_) => (exit::NO_SCOPE, "give a path below /sys/fs/cgroup"),
        ScopeError::NoMatch(_) => (exit::NO_SCOPE, "check the spelling, or name programs by --pid"),
        ScopeError::NameOnly { .. } => (exit::NO_SCOPE, "name them by --pid, --cgroup or --user"),
        ScopeError::Io { .. } => (exit::FAILURE, "is /proc mounted?"),
    };
    Exit::new(code, format!("{error}; {advice}"))
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
        assert!(Cli::try_parse_from(["x", "--pid", "one"]).is_err());
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
