//! Writes the manual pages and shell completions of a program, from the definition that `--help` shows.

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use pagefold_text::style::Lines;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

pub const SOURCE: &str = concat!("pagefold ", env!("CARGO_PKG_VERSION"));

/// A table for manual pages: its title, its pages, and its rows.
type Table = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

/// The daemon's page. It's the only one in section 8; the other commands' pages are in section 1.
const DAEMON: &str = "pagefold-run";

/// Writes the files into a directory with the program's name, with the paths that they have below /usr/local.
pub fn write(directory: &Path, program: Command, tables: &[Table]) -> Result<()> {
    let name = program.get_name().to_owned();
    let share = directory.join(&name).join("share");
    for (shell, path) in [
        (Shell::Bash, format!("bash-completion/completions/{name}")),
        (Shell::Zsh, format!("zsh/site-functions/_{name}")),
        (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
    ] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut program.clone(), &name, &mut script);
        create(&share.join(path))?.write_all(with_names(std::str::from_utf8(&script)?).as_bytes())?;
    }
    let mut program = program.disable_help_subcommand(true);
    program.build();
    page(&program, &share.join("man"), None, tables)
}

/// Changes a completion script to complete names of running workloads, not files. In bash's script, the line before
/// `compgen` has the option.
fn with_names(script: &str) -> String {
    let mut text = String::new();
    let mut before = "";
    for line in script.lines() {
        let mut changed = line.to_owned();
        for kind in ["unit", "vm", "container", "pod"] {
            let names = format!("(pagefold complete {kind} 2>/dev/null)");
            if before.trim() == format!("--{kind})") {
                changed = line.replace("compgen -f", &format!("compgen -W \"${names}\" --"));
            } else if line.starts_with(&format!("'*--{kind}=")) {
                changed = line.replace(":_default'", &format!(":{{compadd -- ${{(f)\"${names}\"}}}}'"));
            } else if line.contains(&format!(" -l {kind} ")) {
                changed = format!("{line} -f -a '{names}'");
            }
        }
        text.line(changed);
        before = line;
    }
    text
}

pub fn create(path: &Path) -> Result<File> {
    let parent = path.parent().unwrap_or(path);
    let created = fs::create_dir_all(parent).and_then(|()| File::create(path));
    created.with_context(|| format!("cannot create {}", path.display()))
}

/// A command line without its hidden subcommands.
pub fn shown(name: &'static str, program: &Command) -> Command {
    let about = program.get_about().cloned().unwrap_or_default();
    let after_help = program.get_after_help().or(program.get_after_long_help()).cloned().unwrap_or_default();
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

fn section(name: &str) -> &'static str {
    if name == DAEMON { "8" } else { "1" }
}

/// Writes the pages of a command and its subcommands.
fn page(command: &Command, directory: &Path, parent: Option<&Command>, tables: &[Table]) -> Result<()> {
    let name = page_name(command);
    let number = section(&name);
    let others = parent.into_iter().chain(command.get_subcommands()).map(page_name);
    for subcommand in command.get_subcommands() {
        page(subcommand, directory, Some(command), tables)?;
    }
    let man = Man::new(command.clone()).section(number).source(SOURCE).manual("pagefold manual");
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
    if let Some(help) = command.get_after_long_help() {
        examples(&mut end, &help.to_string());
    }
    for (title, _, rows) in tables.iter().filter(|(_, pages, _)| pages.contains(&name.as_str())) {
        end.control("SH", [*title]);
        for (item, meaning) in *rows {
            end.control("TP", []).text([bold(*item)]).text([roman(format!("{meaning}."))]);
        }
    }
    if let Some(codes) = command.get_after_help() {
        end.control("SH", ["EXIT STATUS"]);
        end.text([roman(codes.to_string().trim_start_matches("Exit codes: "))]);
    }
    let files = ["pagefold.toml", "pagefold-json", "pagefold-metrics"].map(|file| (file.to_owned(), "5"));
    let others = others.map(|other| {
        let number = section(&other);
        (other, number)
    });
    see_also(&mut end, others.chain(files));
    end.to_writer(&mut text)?;
    // clap_mangen takes all commands to be in the same section.
    let daemon = DAEMON.replace('-', "\\-");
    let text = String::from_utf8(text)?.replace(&format!("{daemon}(1)"), &format!("{daemon}(8)"));
    create(&directory.join(format!("man{number}/{name}.{number}")))?.write_all(text.as_bytes())?;
    Ok(())
}

/// The examples at the end of a command's help: command lines, each with a description in the line below.
fn examples(roff: &mut Roff, help: &str) {
    let Some(examples) = help.strip_prefix("Examples:\n") else { return };
    roff.control("SH", ["EXAMPLES"]);
    for line in examples.lines() {
        match line.strip_prefix("      ") {
            Some(meaning) => roff.text([roman(meaning)]),
            None => roff.control("TP", []).text([bold(line.trim_start())]),
        };
    }
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
