//! The command line of a program: parsing it, and reporting how a command ends.

use crate::exit::{self, Exit};
use crate::messages;
use crate::usage;
use clap::Parser;
use clap::error::ErrorKind;
use std::process::ExitCode;

/// Parses the command line. On failure, prints the help, the version or a usage error (one line on standard error), and
/// returns the exit code.
pub fn parse<Cli: Parser>() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => {
                // If nobody can read the help, there's nothing more to do.
                let _ = error.print();
                (if error.use_stderr() { exit::USAGE } else { exit::OK }).into()
            }
            _ => {
                let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
                messages::complain(Cli::command().get_name(), &usage::line::<Cli>(&error, &words));
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
            code_of(&error)
        }
    };
    messages::flush();
    code.into()
}

/// The exit code of an error: the one of the first [`Exit`] in its chain, or [`exit::FAILURE`].
pub fn code_of(error: &anyhow::Error) -> u8 {
    error.chain().find_map(|cause| cause.downcast_ref::<Exit>()).map_or(exit::FAILURE, |exit| exit.code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_code_survives_context() {
        let error = Err::<(), _>(Exit::new(exit::REFUSED, "no")).context("while trying").unwrap_err();
        assert_eq!(code_of(&error), exit::REFUSED);
        assert_eq!(code_of(&anyhow::anyhow!("whatever")), exit::FAILURE);
    }
}
