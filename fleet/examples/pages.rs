//! Writes the manual pages and shell completions of `pagefold-fleet` into a directory; see pagefold's example of the
//! same name.

#[cfg(test)]
#[path = "../../crates/pagefold/examples/pages/program_tests.rs"]
mod program_tests;
#[cfg(test)]
#[allow(dead_code, reason = "parts of it are for other tests")]
#[path = "../../crates/testkit/src/skip.rs"]
mod skip;
#[allow(dead_code, reason = "part of it is for the page of the configuration file")]
#[path = "../../crates/pagefold/examples/pages/writer.rs"]
mod writer;

use anyhow::{Context, Result};
#[cfg(test)]
use skip::skip;
use std::path::Path;

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("no directory is given; name one")?;
    write(Path::new(&directory))
}

fn write(directory: &Path) -> Result<()> {
    writer::write(directory, program(), &[])
}

fn program() -> clap::Command {
    writer::shown("pagefold-fleet", &pagefold_fleet::commands::command())
}
