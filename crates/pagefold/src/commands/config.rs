//! `pagefold config`: checks the configuration files, and shows their settings.

use crate::config::args::RunArgs;
use crate::config::options::SECTIONS;
use crate::config::ownership::shown;
use crate::config::settings::{DEFAULT_FILE, Layer, Settings, load, merged};
use anyhow::Result;
use pagefold_engine::config::Config;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::{self, Lines};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Subcommand)]
pub enum ConfigCommand {
    /// Check the configuration files without running anything
    #[command(after_help = "Exit codes: 0 valid, 2 invalid or not safely owned, 5 valid but nothing is in scope.")]
    Check(ConfigArgs),
    /// Show which file sets which option, and the defaults of all other options
    Show(ConfigArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub struct ConfigArgs {
    /// The configuration file; the files in FILE.d are read after it
    #[arg(value_name = "FILE", default_value = DEFAULT_FILE)]
    file: PathBuf,
}

/// Runs either command, and returns the exit code.
pub fn run(command: &ConfigCommand) -> Result<u8> {
    let (ConfigCommand::Check(args) | ConfigCommand::Show(args)) = command;
    let layers = load(&args.file)?;
    let settings = Settings::of_options(&RunArgs::default(), Some(&args.file), merged(&layers))?;
    let mut text = String::new();
    match command {
        ConfigCommand::Show(_) => text = self::text(&layers),
        ConfigCommand::Check(_) if !settings.scope.is_selective() => {
            return Err(without_scope(&args.file).into());
        }
        ConfigCommand::Check(_) => {
            for layer in &layers {
                text.line(format!("{} is valid", shown(&layer.path)));
            }
        }
    }
    style::print(&text)?;
    Ok(exit::OK)
}

fn without_scope(file: &Path) -> Exit {
    let line = format!(
        "{} is valid, but nothing is in scope; set exes, units, vms, containers, pods, cgroups or users in [scope]",
        shown(file)
    );
    Exit::new(exit::NO_SCOPE, line)
}

/// A single configuration file with the same settings. A comment names the origin of each value.
fn text(layers: &[Layer]) -> String {
    let preset = Config::of_preset(merged(layers).preset.unwrap_or_default());
    let mut text = String::new();
    for section in SECTIONS {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}[{}]", section.name);
        for option in section.options {
            let set = layers.iter().rev().find_map(|layer| Some((layer, (option.written)(&layer.options)?)));
            let _ = match (set, (option.default_in)(&preset)) {
                (Some((layer, value)), _) => writeln!(text, "{} = {value}  # {}", option.key, shown(&layer.path)),
                (None, Some(default)) => writeln!(text, "{} = {default}  # default", option.key),
                (None, None) => writeln!(text, "#{}  # not set", option.key),
            };
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::config_file::parse;

    fn layer(path: &str, text: &str) -> Layer {
        Layer { path: path.into(), options: parse(text, path).unwrap() }
    }

    #[test]
    fn every_value_is_shown_with_its_origin_and_can_be_read_again() {
        let first = "[scope]\nexes = [\"a \\\"b\\\\\"]\n[run]\ngovernor = \"low\"\npreset = \"sensitive\"\ntop-share = 0.5\n\
            [[domains.rule]]\nname = \"a\"\nuser = 33\n[numa.domains]\n\"a\\u001b\" = \"priority\"\n";
        let layers =
            [layer("/1", first), layer("/2", "[run]\ngovernor = \"quiet\"\n[limits]\nlongest-stop = \"1ms\"\n")];
        let text = text(&layers);
        crate::golden::check("config-show.toml", &text);
        let set = merged(&layers);
        let read = parse(&text, "show").unwrap();
        assert_eq!(read.clone().then(set), read);
    }
}
