//! Writes the manual pages and shell completions of `pagefold` into a directory that must be empty or not exist. Most
//! are made from the definition that `--help` shows, pagefold.toml(5) from the table of options, and pagefold-json(5)
//! and pagefold-metrics(5) from [`pagefold::reference`].

mod file;
mod writer;

use anyhow::{Context, Result};
#[cfg(test)]
use pagefold_testkit::skip;
use std::path::Path;

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("no directory is given; name one")?;
    write(Path::new(&directory))
}

fn write(directory: &Path) -> Result<()> {
    writer::write(directory, program(), &pagefold::reference::TABLES)?;
    for (name, page) in file::pages() {
        page.to_writer(&mut writer::create(&directory.join(format!("pagefold/share/man/man5/{name}.5")))?)?;
    }
    Ok(())
}

fn program() -> clap::Command {
    writer::shown("pagefold", &pagefold::command())
}

#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod tests;
