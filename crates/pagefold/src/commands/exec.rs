//! `pagefold exec`: starts a program whose memory KSM may merge. PR_SET_MEMORY_MERGE makes all of the program's memory
//! mergeable, so we needn't trace the program.

use anyhow::Result;
use pagefold_procmem::merge_any::set_merge_any;
use pagefold_text::exit::{self, Exit};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[derive(Clone, Debug, clap::Args)]
pub struct ExecArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Executes the program in place of this process. Returns only if that fails.
pub fn run(args: &ExecArgs) -> Result<u8> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Exit::new(exit::USAGE, "no program given; name one after exec").into());
    };
    set_merge_any().map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => Exit::new(
            exit::NO_KERNEL_SUPPORT,
            "this kernel cannot make a whole process mergeable; use Linux 6.7 or later with CONFIG_KSM",
        ),
        ErrorKind::PermissionDenied => {
            Exit::new(exit::NOT_PERMITTED, "the kernel does not permit this user to make memory mergeable; run as root")
        }
        _ => Exit::new(exit::FAILURE, format!("cannot make the process mergeable: {error}")),
    })?;
    let error = Command::new(program).args(arguments).exec();
    let name = program.to_string_lossy();
    // A shell exits with the same codes if it can't start a program.
    let (code, what) = match error.kind() {
        ErrorKind::NotFound => (exit::NOT_FOUND, "not found; check the name".to_owned()),
        _ => (exit::NOT_EXECUTABLE, format!("cannot be executed: {error}")),
    };
    Err(Exit::new(code, format!("{name}: {what}")).into())
}
