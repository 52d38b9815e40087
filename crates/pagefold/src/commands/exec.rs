//! `pagefold exec`: starts a program whose memory KSM may merge, without tracing it.

use anyhow::Result;
use pagefold_cli::exit::{self, Exit};
use pagefold_linux::proc::merge_any::set_merge_any;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What to start.
#[derive(Clone, Debug, clap::Args)]
pub struct ExecArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Becomes the program. Returns only when that fails.
pub fn run(args: &ExecArgs) -> Result<u8> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Exit::new(exit::USAGE, "no program named; give one after exec").into());
    };
    set_merge_any().map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => Exit::new(
            exit::NO_KERNEL_SUPPORT,
            "this kernel cannot let a whole program be merged; use Linux 6.7 or later with CONFIG_KSM",
        ),
        ErrorKind::PermissionDenied => {
            Exit::new(exit::NOT_PERMITTED, "the kernel does not let this user have memory merged; run as root")
        }
        _ => Exit::new(exit::FAILURE, format!("cannot have memory merged: {error}")),
    })?;
    let error = Command::new(program).args(arguments).exec();
    let name = program.to_string_lossy();
    // The shell's codes for a program that cannot be started, which exec stands in for.
    let (code, what) = match error.kind() {
        ErrorKind::NotFound => (exit::NOT_FOUND, "not found; check the name".to_owned()),
        _ => (exit::NOT_EXECUTABLE, format!("cannot be started: {error}")),
    };
    Err(Exit::new(code, format!("{name}: {what}")).into())
}
