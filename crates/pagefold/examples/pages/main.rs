//! Writes the manual pages and shell completions of `pagefold` into a directory, which must be empty or not exist. They are made from
//! the definition that `--help` shows, and pagefold.toml(5) from the table of options.

mod file;
mod writer;

use anyhow::{Context, Result};
use std::path::Path;

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("no directory is given; name one")?;
    write(Path::new(&directory))
}

fn write(directory: &Path) -> Result<()> {
    writer::write(directory, program())?;
    let mut file = writer::create(&directory.join("pagefold/share/man/man5/pagefold.toml.5"))?;
    Ok(file::page().to_writer(&mut file)?)
}

fn program() -> clap::Command {
    writer::shown("pagefold", &pagefold::command())
}

#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod tests;
