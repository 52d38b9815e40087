//! The flags that select processes.

use crate::exit::{self, Exit};
use pagefold_linux::proc::Roots;
use pagefold_linux::scope::exclude::{DenyList, unfit_entry};
use pagefold_linux::scope::{ScopeError, ScopeSpec, Scoped, resolve};
use std::path::PathBuf;

const PROGRAMS: &str = "Which programs";

/// The processes in scope. Several flags add up.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ScopeArgs {
    /// These processes (may be repeated, or separated by commas)
    #[arg(long, help_heading = PROGRAMS, value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Vec<i32>,
    /// Every process in this cgroup and below it
    #[arg(long, help_heading = PROGRAMS, value_name = "PATH")]
    pub cgroup: Vec<PathBuf>,
    /// Every process of this user (name or number)
    #[arg(long, help_heading = PROGRAMS, value_name = "USER")]
    pub user: Vec<String>,
    /// Every process running this program (path, or just its name)
    #[arg(long, help_heading = PROGRAMS, value_name = "PROGRAM")]
    pub exe: Vec<String>,
    /// Every process on the machine
    #[arg(long, help_heading = PROGRAMS)]
    pub all: bool,
}

/// Changes to the deny list.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DenyArgs {
    /// Also leave programs of this name alone: a base name, or a prefix and an asterisk
    #[arg(long, help_heading = PROGRAMS, value_name = "NAME", value_parser = program)]
    pub deny: Vec<String>,
    /// Remove this name from the deny list
    #[arg(long, help_heading = PROGRAMS, value_name = "NAME", value_parser = program)]
    pub allow: Vec<String>,
}

impl DenyArgs {
    /// Applies the changes to a list.
    pub fn on(&self, list: DenyList) -> DenyList {
        list.with(&self.deny, &self.allow)
    }
}

fn program(name: &str) -> Result<String, String> {
    match unfit_entry(name) {
        Some(why) => Err(format!("it {why}")),
        None => Ok(name.to_owned()),
    }
}

impl ScopeArgs {
    /// The scope as a specification that can be resolved again later.
    pub fn spec(&self) -> ScopeSpec {
        ScopeSpec {
            pids: self.pid.clone(),
            cgroups: self.cgroup.clone(),
            users: self.user.clone(),
            exes: self.exe.clone(),
            all: self.all,
        }
    }

    /// Whether new processes can enter the scope.
    pub fn is_selective(&self) -> bool {
        self.all || !(self.cgroup.is_empty() && self.user.is_empty() && self.exe.is_empty())
    }

    /// The processes that are in scope now.
    ///
    /// # Errors
    ///
    /// If the scope is empty, or names a process, user, cgroup or program that does not exist.
    pub fn resolve(&self) -> Result<Vec<Scoped>, Exit> {
        resolve(&self.spec(), &Roots::default()).map_err(|error| explain(&error))
    }
}

/// The exit code and advice for a scope that cannot be resolved.
pub fn explain(error: &ScopeError) -> Exit {
    let (code, advice) = match error {
        ScopeError::Empty => return Exit::new(exit::NO_SCOPE, error.to_string().replace("scope:", "scope;")),
        ScopeError::UnknownPid(_) => (exit::NO_SCOPE, "it may have ended: look with ps"),
        ScopeError::UnknownUser(_) => (exit::NO_SCOPE, "give a name from /etc/passwd, or a number"),
        ScopeError::NoCgroup(_) => (exit::NO_SCOPE, "give a path below /sys/fs/cgroup"),
        ScopeError::NoMatch(_) => (exit::NO_SCOPE, "check the spelling, or name programs by --pid"),
        ScopeError::Avoided { .. } => (exit::REFUSED, "remove the attribute from the cgroup, or leave the process out"),
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
        let spec = cli.scope.spec();
        assert_eq!(spec.pids, [1, 2, 3]);
        assert_eq!(spec.users, ["root"]);
        assert!(Cli::try_parse_from(["x", "--pid", "0"]).is_err());
        assert!(Cli::try_parse_from(["x", "--pid", "one"]).is_err());
    }

    #[test]
    fn deny_and_allow_change_the_deny_list() {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            deny: DenyArgs,
        }
        let cli = Cli::try_parse_from(["x", "--deny", "mine*", "--allow", "vault", "--allow", "tor"]).unwrap();
        let list = cli.deny.on(DenyList::default());
        assert_eq!(list.entry_for(b"mine-2"), Some("mine*"));
        assert_eq!((list.entry_for(b"vault"), list.entry_for(b"tor")), (None, None));
        assert_eq!(list.entry_for(b"ssh-agent"), Some("ssh-agent"));
        for bad in ["", "/usr/bin/vault", "a*b", "**"] {
            assert!(Cli::try_parse_from(["x", "--deny", bad]).is_err(), "{bad}");
            assert!(Cli::try_parse_from(["x", "--allow", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_scope_is_an_error_of_its_own() {
        let error = ScopeArgs::default().resolve().unwrap_err();
        assert_eq!(error.code, exit::NO_SCOPE);
        assert!(error.line.contains("nothing is in scope; select"), "{}", error.line);
    }
}
