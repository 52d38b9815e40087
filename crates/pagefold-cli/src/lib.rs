//! What the command lines of `pagefold` and `pagefold-lab` share.
//!
//! | what | module |
//! | --- | --- |
//! | the table of options: flags, keys, ranges, defaults, help | [`options`] |
//! | flags made from the table | [`flags`]; the selection of processes: [`scope`] |
//! | the configuration file's syntax | [`config_file`] |
//! | exit codes, and errors of one line | [`exit`] |
//! | web pages: the frame, escaping, and how they are written | [`html`] |
//! | text output: sizes, shares, times, colour, tables, progress | [`figures`], [`style`], [`table`], [`progress`] |
//! | standard error, which never delays a daemon | [`messages`]; queues for what may not take it: [`sink`] |
#![forbid(unsafe_code)]

pub mod config_file;
pub mod exit;
pub mod figures;
pub mod flags;
pub mod html;
pub mod messages;
pub mod options;
pub mod progress;
#[cfg(test)]
mod reference;
pub mod scope;
pub mod sink;
pub mod style;
pub mod table;

use clap::Parser;
use clap::error::ErrorKind;
use std::process::ExitCode;

/// Parses the command line.
///
/// # Errors
/// The exit code, after help, version or a usage error has been printed. A usage error is one line on standard error.
pub fn parse<Cli: Parser>() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => {
                // Without a reader there is no help to show.
                let _ = error.print();
                (if error.use_stderr() { exit::USAGE } else { exit::OK }).into()
            }
            _ => {
                let text = error.render().to_string();
                let first = text.split("\n\n").next().unwrap_or_default();
                let what = first.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
                let program = Cli::command().get_name().to_owned();
                messages::complain(&program, &format!("{what}; see {program} --help"));
                exit::USAGE.into()
            }
        }
    })
}

/// Reports the result of a command: an error is one line on standard error.
pub fn finish(program: &str, result: anyhow::Result<u8>) -> ExitCode {
    let code = match result {
        Ok(code) => code,
        Err(error) => {
            messages::complain(program, &format!("{error:#}").replace('\n', " "));
            exit::code_of(&error)
        }
    };
    messages::flush();
    code.into()
}
