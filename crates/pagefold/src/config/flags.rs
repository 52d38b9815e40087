//! The flags of the options in the table, for clap.

use crate::config::options::{Kind, OPTIONS, OptionSpec, SECTIONS, Value, Values};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use pagefold_host::scope::deny_list::DenyList;
use std::fmt::Write;
use std::path::Path;

/// Defines a type that holds the values given by the flags of some sections.
macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident: $sections:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub Values);

        impl Args for $name {
            fn augment_args(command: Command) -> Command {
                of_sections(&$sections).map(argument).fold(command, Command::arg)
            }
            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
                Ok(Self(values(&$sections, matches)))
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
    /// What a run does with the processes in scope.
    RunFlags: ["run", "judgement", "reserve", "numa", "audit", "log", "metrics", "history", "fleet"];
    /// The audit log.
    AuditFlags: ["audit"];
}

impl DenyFlags {
    /// The list with these changes.
    pub fn apply(&self, list: DenyList) -> DenyList {
        list.with(&self.0.list("also"), &self.0.list("except")).overriding(self.0.list("override-opt-outs"))
    }
}

impl AuditFlags {
    /// The log's path, if there is to be a log.
    pub fn path(&self) -> Option<&Path> {
        self.0.text("file").map(Path::new)
    }
}

fn of_sections<'a>(sections: &'a [&str]) -> impl Iterator<Item = &'static OptionSpec> + use<'a> {
    OPTIONS.iter().filter(|option| !option.flag.is_empty() && sections.contains(&option.section))
}

fn argument(option: &'static OptionSpec) -> Arg {
    let heading = SECTIONS.iter().find(|section| section.name == option.section).map(|section| section.heading);
    let mut help = option.help.to_owned();
    if !option.range().is_empty() {
        let _ = write!(help, " ({})", option.range());
    }
    if !option.default().is_empty() {
        let _ = write!(help, " [default: {}]", option.default());
    }
    let argument = Arg::new(option.key).long(option.flag).help(help).help_heading(heading);
    let value = match &option.kind {
        Kind::Switch => return argument.action(ArgAction::SetTrue),
        Kind::Number(unit, ..) => unit.value_name(),
        Kind::List(name) | Kind::Word(name) => name,
        Kind::File => "FILE",
        Kind::Directory => "DIRECTORY",
        Kind::Address => "ADDRESS",
        Kind::Amount => "AMOUNT",
        Kind::Levels => "LEVELS",
        _ => "NAME",
    };
    let is_list = matches!(option.kind, Kind::List(_) | Kind::Programs);
    argument
        .value_name(value)
        .action(if is_list { ArgAction::Append } else { ArgAction::Set })
        .value_parser(|text: &str| option.parse(text))
}

fn values(sections: &[&str], matches: &ArgMatches) -> Values {
    let mut values = Values::default();
    for option in of_sections(sections) {
        match option.kind {
            Kind::Switch if matches.get_flag(option.key) => values.set(option, Value::Switch(true)),
            Kind::Switch => {}
            Kind::List(_) | Kind::Programs => {
                let given = matches.get_many::<Value>(option.key).into_iter().flatten();
                let list: Vec<String> = given.filter_map(|value| value.text().map(str::to_owned)).collect();
                if !list.is_empty() {
                    values.set(option, Value::List(list));
                }
            }
            _ => {
                if let Some(value) = matches.get_one::<Value>(option.key) {
                    values.set(option, value.clone());
                }
            }
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

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
        assert_eq!(list.entry_for(b"mine-2", || true), Some("mine*"));
        assert_eq!((list.entry_for(b"vault", || true), list.entry_for(b"tor", || true)), (None, None));
        assert_eq!(list.entry_for(b"ssh-agent", || true), Some("ssh-agent"));
        for bad in ["", "/usr/bin/vault", "a*b", "**"] {
            assert!(Cli::try_parse_from(["x", "--deny", bad]).is_err(), "{bad}");
            assert!(Cli::try_parse_from(["x", "--allow", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn flags_without_a_value_given_set_nothing() {
        assert_eq!(Cli::try_parse_from(["x"]).unwrap().run, RunFlags::default());
        let run = Cli::try_parse_from(["x", "--levels", "3", "--round", "2s"]).unwrap().run.0;
        assert_eq!((run.number("levels"), run.number("round")), (Some(3), Some(2_000_000_000)));
        assert_eq!(run.text("governor"), None);
    }

    #[test]
    fn help_shows_ranges_and_defaults() {
        let help = <Cli as clap::CommandFactory>::command().render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in ["[default: full]", "(1 to 8) [default: 4]", "(0.2 % to 100 %)", "(0s to 1h) [default: 100ms]"] {
            assert!(help.contains(part), "{part} is missing in {help}");
        }
    }
}
