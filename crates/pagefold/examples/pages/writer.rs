//! Writes the manual pages and shell completions of a program, from the definition that `--help` shows.

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

pub const SOURCE: &str = concat!("pagefold ", env!("CARGO_PKG_VERSION"));

/// Writes a directory with the program's name. Its files have the same paths as below /usr/local.
pub fn write(directory: &Path, program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    let share = directory.join(&name).join("share");
    for (shell, path) in [
        (Shell::Bash, format!("bash-completion/completions/{name}")),
        (Shell::Zsh, format!("zsh/site-functions/_{name}")),
        (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
    ] {
        clap_complete::generate(shell, &mut program.clone(), &name, &mut create(&share.join(path))?);
    }
    let mut program = program.disable_help_subcommand(true);
    program.build();
    page(&program, &share.join("man/man1"), None)
}

pub fn create(path: &Path) -> Result<File> {
    let parent = path.parent().unwrap_or(path);
    let created = fs::create_dir_all(parent).and_then(|()| File::create(path));
    created.with_context(|| format!("cannot create {}", path.display()))
}

/// A command line without its hidden subcommands.
pub fn shown(name: &'static str, program: &Command) -> Command {
    let about = program.get_about().cloned().unwrap_or_default();
    let after_help = program.get_after_help().cloned().unwrap_or_default();
    Command::new(name)
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .subcommand_required(true)
        .about(about)
        .after_help(after_help)
        .subcommands(program.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()).cloned())
}

fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

/// Writes the pages of a command and its subcommands.
fn page(command: &Command, directory: &Path, parent: Option<&Command>) -> Result<()> {
    let name = page_name(command);
    let others = parent.into_iter().chain(command.get_subcommands()).map(page_name);
    for subcommand in command.get_subcommands() {
        page(subcommand, directory, Some(command))?;
    }
    let man = Man::new(command.clone()).source(SOURCE).manual("pagefold manual");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut end = Roff::new();
    if let Some(codes) = command.get_after_help() {
        end.control("SH", ["EXIT STATUS"]);
        end.text([roman(codes.to_string().trim_start_matches("Exit codes: "))]);
    }
    let files = ["pagefold.toml", "pagefold-json", "pagefold-metrics"].map(|file| (file.to_owned(), "5"));
    see_also(&mut end, others.map(|other| (other, "1")).chain(files));
    end.to_writer(&mut text)?;
    create(&directory.join(format!("{name}.1")))?.write_all(&text)?;
    Ok(())
}

/// The last section, which lists related pages with their sections.
pub fn see_also(roff: &mut Roff, pages: impl Iterator<Item = (String, &'static str)>) {
    roff.control("SH", ["SEE ALSO"]);
    let mut line = Vec::new();
    for (name, section) in pages {
        line.push(roman(if line.is_empty() { "" } else { ", " }));
        line.extend([bold(name), roman(format!("({section})"))]);
    }
    roff.text(line);
}
