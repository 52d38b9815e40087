//! Writes the manual pages and shell completions of `pagefold-lab` into a directory; see pagefold's example of the same
//! name.

#[cfg(test)]
#[path = "../../crates/pagefold/examples/pages/program_tests.rs"]
mod program_tests;
#[allow(dead_code, reason = "part of it is for the page of the configuration file")]
#[path = "../../crates/pagefold/examples/pages/writer.rs"]
mod writer;

use anyhow::{Context, Result};
use std::path::Path;

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("no directory is given; name one")?;
    write(Path::new(&directory))
}

fn write(directory: &Path) -> Result<()> {
    writer::write(directory, program(), &[])
}

fn program() -> clap::Command {
    writer::shown("pagefold-lab", &pagefold_lab::commands::command())
}
