//! The flags of the options in the table, for clap.

use crate::config::config_file::{Given, Source};
use crate::config::options::{OptionSpec, Options, all};
use crate::config::values::Allowed;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use pagefold_host::scope::deny_list::DenyList;
use pagefold_procmem::Roots;
use pagefold_text::escape::{printable, shell_word};
use std::fmt::{self, Write};

/// Defines a type for the flags of some sections.
macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident: $sections:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub Box<Options>);

        impl Args for $name {
            fn augment_args(command: Command) -> Command {
                command.args(of_sections(&$sections).map(argument))
            }
            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
                let mut options = Box::default();
                for option in of_sections(&$sections) {
                    read(&mut options, option, matches)?;
                }
                Ok(Self(options))
            }
            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    )*};
}

flags! {
    /// Selectors of processes.
    ScopeFlags: ["scope"];
    /// Changes to the deny list.
    DenyFlags: ["deny"];
    /// Options for a run's work on the processes in scope.
    RunFlags: ["run", "judgement", "reserve", "numa", "audit", "log", "metrics", "history", "fleet", "tuning"];
    /// The audit log.
    AuditFlags: ["audit"];
}

impl fmt::Display for DenyFlags {
    /// Writes the changes as flags, each after a space.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { denied, allowed, override_opt_outs, .. } = &*self.0;
        for (flag, names) in [("deny", denied), ("allow", allowed), ("override-opt-out", override_opt_outs)] {
            for name in names.iter().flatten() {
                write!(f, " --{flag} {}", shell_word(&printable(name.as_bytes())))?;
            }
        }
        Ok(())
    }
}

impl DenyFlags {
    /// Applies these changes to a deny list.
    pub fn apply(&self, list: DenyList) -> DenyList {
        let Options { denied, allowed, override_opt_outs, .. } = &*self.0;
        let roots = Roots::default();
        list.with(denied.as_deref().unwrap_or_default(), allowed.as_deref().unwrap_or_default(), &roots)
            .overriding(override_opt_outs.clone().unwrap_or_default())
    }
}

/// The options of these sections that have flags.
fn of_sections(sections: &[&str]) -> impl Iterator<Item = &'static OptionSpec> {
    all().filter(|option| option.flag().is_some() && sections.contains(&option.section))
}

/// The flags that `-h` shows, so that its output fits a screen. `--help` shows all.
const COMMON: [&str; 7] = ["--cgroup", "--user", "--unit", "--vm", "--container", "--pod", "--governor"];

/// A help text up to its first parenthesis, colon or semicolon.
fn short(help: &str) -> &str {
    let end = [" (", ": ", "; "].iter().filter_map(|mark| help.find(mark)).min();
    &help[..end.unwrap_or(help.len())]
}

fn argument(option: &OptionSpec) -> Arg {
    let mut help = option.help.to_owned();
    if let Some(range) = option.allowed.range() {
        let _ = write!(help, " ({range})");
    }
    let is_common = COMMON.iter().any(|flag| option.usage.split(' ').next() == Some(*flag));
    let argument = Arg::new(option.key)
        .long(option.flag())
        .help_heading(option.heading)
        .hide(option.is_hidden())
        .hide_short_help(!is_common)
        .help(short(option.help));
    let Some(value_name) = option.value_name() else { return argument.action(ArgAction::SetTrue).long_help(help) };
    if let Some(default) = option.default() {
        let _ = write!(help, " [default: {default}]");
    }
    let is_list = matches!(option.allowed, Allowed::List | Allowed::Pods | Allowed::Programs);
    argument.action(if is_list { ArgAction::Append } else { ArgAction::Set }).value_name(value_name).long_help(help)
}

fn read(options: &mut Options, option: &OptionSpec, matches: &ArgMatches) -> Result<(), Error> {
    if matches.value_source(option.key) != Some(ValueSource::CommandLine) {
        return Ok(());
    }
    let words: Vec<String> = match option.value_name() {
        Some(_) => matches.get_many(option.key).unwrap_or_default().cloned().collect(),
        None => vec!["true".to_owned()],
    };
    let source = Source { path: option.usage.to_owned(), given: Given::Flag(&words), allowed: &option.allowed };
    (option.read)(options, &source).map_err(|problem| Error::raw(ErrorKind::ValueValidation, problem.message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use pagefold_host::scope::exe::Matching;
    use pagefold_text::table::spaced;
    use std::time::Duration;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        deny: DenyFlags,
        #[command(flatten)]
        run: RunFlags,
    }

    #[test]
    fn names_on_the_deny_list_can_be_allowed_and_others_denied() {
        let cli = Cli::try_parse_from(["x", "--deny", "mine*", "--allow", "vault", "--allow", "tor"]).unwrap();
        let list = cli.deny.apply(DenyList::default());
        let denied = |name: &str| {
            let matches = |asked: &[u8]| if asked == name.as_bytes() { Matching::Yes } else { Matching::No };
            list.entry_for(&[name.into(), name.into()], matches)
        };
        assert_eq!(denied("mine-2"), Some("mine*"));
        assert_eq!((denied("vault"), denied("tor")), (None, None));
        assert_eq!(denied("ssh-agent"), Some("ssh-agent"));
        assert_eq!(cli.deny.to_string(), " --deny 'mine*' --allow vault --allow tor");
        for bad in ["", "bin/vault", "a*b", "**"] {
            assert!(Cli::try_parse_from(["x", "--deny", bad]).is_err(), "{bad}");
            assert!(Cli::try_parse_from(["x", "--allow", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn flags_without_a_value_given_set_nothing() {
        assert_eq!(Cli::try_parse_from(["x"]).unwrap().run, RunFlags::default());
        let run = Cli::try_parse_from(["x", "--levels", "3", "--round", "2s"]).unwrap().run.0;
        assert_eq!((run.levels, run.round, run.governor), (Some(3), Some(Duration::from_secs(2)), None));
    }

    #[test]
    fn help_shows_ranges_and_defaults() {
        let help = <Cli as clap::CommandFactory>::command().render_long_help().to_string();
        let help = spaced(&help);
        for part in ["(1s to 1h) [default: 15s]", "[default: auto]"] {
            assert!(help.contains(part), "{part} is missing in {help}");
        }
        assert!(!help.contains("--levels"), "a parameter of the papers");
    }
}
