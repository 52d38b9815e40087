//! `pagefold config`: checks the configuration files, and shows their settings.

use crate::config::args::RunArgs;
use crate::config::options::{Options, SECTIONS};
use crate::config::ownership::shown;
use crate::config::scope::{NAME_LETTERS, explain, running_programs, script_hint};
use crate::config::settings::{DEFAULT_FILE, DomainSource, Layer, Settings, has_layers, load, merged};
use crate::place;
use anyhow::Result;
use pagefold_engine::config::Config;
use pagefold_host::scope::deny_list::{DenyList, workload_entry};
use pagefold_host::scope::domain::DEFAULT;
use pagefold_host::scope::exe::{Matching, interpreter_of};
use pagefold_host::scope::{ScopeError, Selector};
use pagefold_procmem::Roots;
use pagefold_text::exit::{self, Exit};
use pagefold_text::misspelt::nearest;
use pagefold_text::style::{self, Lines};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Where we look for installed programs.
const DIRECTORIES: [&str; 7] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/libexec"];

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
    /// The same file, with the option that other commands have
    #[arg(long, value_name = "FILE", hide = true, conflicts_with = "file")]
    config: Option<PathBuf>,
}

/// Runs either command, and returns the exit code.
pub fn run(command: &ConfigCommand) -> Result<u8> {
    let (ConfigCommand::Check(args) | ConfigCommand::Show(args)) = command;
    let file = args.config.as_ref().unwrap_or(&args.file);
    let layers = match command {
        // Without any file, the defaults hold.
        ConfigCommand::Show(_) if file == Path::new(DEFAULT_FILE) && !has_layers(file) => Vec::new(),
        _ => load(file)?,
    };
    let options = merged(&layers);
    let settings = Settings::of_options(&RunArgs::default(), Some(file), options.clone())?;
    let mut text = String::new();
    match command {
        ConfigCommand::Show(_) => text = self::text(&layers),
        ConfigCommand::Check(_) if !settings.scope.is_selective() => {
            return Err(without_scope(file).into());
        }
        ConfigCommand::Check(_) => {
            check_run(&settings)?;
            for warning in contradictions(&options) {
                complain!("{}: {warning}", shown(file));
            }
            let installed = installed();
            for layer in &layers {
                text.line(format!("{} is valid", shown(&layer.path)));
                complain_about(layer, &installed);
            }
        }
    }
    style::print(&text)?;
    Ok(exit::OK)
}

/// Warns about names of programs in a file that match nothing on this machine.
fn complain_about(layer: &Layer, installed: &BTreeSet<String>) {
    let mut warnings = scripts(&layer.options);
    for name in programs_of(&layer.options) {
        warnings.extend(doubt(name, installed));
    }
    for warning in warnings {
        complain!("{}: {warning}", shown(&layer.path));
    }
}

fn without_scope(file: &Path) -> Exit {
    let line = format!(
        "{} is valid, but nothing is in scope; set exes, units, vms, containers, pods, cgroups or users in [scope]",
        shown(file)
    );
    Exit::new(exit::NO_SCOPE, line)
}

/// Fails if a run with these settings would fail when it opens its files or looks for processes. It's fine if a
/// selector matches no running process.
fn check_run(settings: &Settings) -> Result<(), Exit> {
    place::of_file("the learned file", settings.learned.as_deref())?;
    if let Some(directory) = &settings.fleet.directory {
        settings.fleet.fleet()?;
        place::of_file("the sketches", Some(&directory.join("sketches")))?;
    }
    place::of_file("the metrics file", settings.metrics.file.as_deref())?;
    place::of_file("the history", settings.history.as_deref())?;
    place::of_file("the audit log", settings.audit.as_deref())?;
    for selector in settings.scope.spec().0 {
        match selector.resolve(&Roots::default()) {
            Ok(_) | Err(ScopeError::NoCgroup(_)) => {}
            // With the exit code NO_SCOPE, the unit's ExecCondition= would skip the service without a message.
            Err(error @ ScopeError::UnknownUser(_)) => {
                return Err(Exit::new(exit::USAGE, explain(&error).to_string()));
            }
            Err(error) => return Err(explain(&error)),
        }
    }
    Ok(())
}

/// Warnings about settings that are valid, but cancel each other out.
fn contradictions(options: &Options) -> Vec<String> {
    let mut warnings = Vec::new();
    let denied = DenyList::new(options.denied.clone().unwrap_or_default());
    for name in options.allowed.iter().flatten() {
        let names = [name.clone().into_bytes(), name.clone().into_bytes()];
        if let Some(entry) = denied.entry_for(&names, |_| Matching::No) {
            warnings.push(format!(
                "the list \"except\" in [deny] has no effect on {name}: \"also\" has {entry}; remove one of them"
            ));
        }
    }
    if let Some(merged) = &options.merged_domain {
        let by_user = options.domains_by == Some(DomainSource::User);
        let is_implied = if by_user { merged.starts_with("user:") } else { merged == DEFAULT };
        if !is_implied && !options.domain_rules.iter().flatten().any(|rule| rule.name == *merged) {
            warnings.push(format!(
                "no rule in [domains] makes the domain {merged}; ksmd merges nothing unless a cgroup's attribute \
                 user.pagefold.domain names it"
            ));
        }
    }
    warnings
}

/// Warnings about names of scripts: the executable of a process that runs a script is the interpreter.
fn scripts(options: &Options) -> Vec<String> {
    let mut warnings = Vec::new();
    let exes = options.exes.iter().flatten().map(String::as_str);
    for name in exes.chain(programs_of_rules(options)).filter(|name| name.starts_with('/')) {
        warnings.extend(script_hint(name));
    }
    for name in options.denied.iter().flatten().filter(|name| name.starts_with('/')) {
        if let Some(interpreter) = interpreter_of(Path::new(name)) {
            warnings.push(format!("{name} is a script, run by {interpreter}; deny it by its base name"));
        }
    }
    warnings
}

fn programs_of_rules(options: &Options) -> Vec<&str> {
    let mut names = Vec::new();
    for rule in [&options.groups, &options.domain_rules].into_iter().flatten().flatten() {
        if let Selector::Exe(name) = &rule.selector {
            names.push(name.as_str());
        }
    }
    names
}

/// The names of programs in a file's options, except in `[deny] programs`, which replaces the default deny list.
fn programs_of(options: &Options) -> Vec<&str> {
    let mut names = Vec::new();
    for list in [&options.exes, &options.denied, &options.allowed] {
        names.extend(list.iter().flatten().map(String::as_str).filter(|name| workload_entry(name).is_none()));
    }
    names.extend(programs_of_rules(options));
    names
}

/// The names of running programs, and of programs in the usual directories.
fn installed() -> BTreeSet<String> {
    let mut names = running_programs();
    for directory in DIRECTORIES {
        for entry in Path::new(directory).read_dir().into_iter().flatten().flatten() {
            names.insert(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names
}

/// A warning if no program of this name is on this machine.
fn doubt(name: &str, installed: &BTreeSet<String>) -> Option<String> {
    if name.starts_with('/') {
        if Path::new(name).exists() {
            return None;
        }
        return Some(format!("there is no {name} on this machine; check the path"));
    }
    let is_here = |known: &String| match name.strip_suffix('*') {
        Some(start) => known.starts_with(start),
        None => known == name,
    };
    if installed.iter().any(is_here) {
        return None;
    }
    let advice = match nearest(name, installed.iter().map(String::as_str), NAME_LETTERS)[..] {
        [nearest] => format!("did you mean {nearest}?"),
        _ => "check the spelling".to_owned(),
    };
    Some(format!("no program {name} is running or in a directory such as /usr/bin; {advice}"))
}

/// Merges the files into the text of one configuration file. A comment after each value shows which file sets it.
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

    #[test]
    fn a_program_that_is_not_here_is_doubted() {
        let here = ["redis-server", "python3.11"].map(str::to_owned).into();
        for known in ["redis-server", "python*", "/bin/sh"] {
            assert_eq!(doubt(known, &here), None, "{known}");
        }
        for (name, advice) in [
            ("redis-sevrer", "; did you mean redis-server?"),
            ("redsi-server", "; did you mean redis-server?"),
            ("ruby*", "; check the spelling"),
            ("nginx", "; check the spelling"),
            ("/no/such/program", "; check the path"),
        ] {
            let doubt = doubt(name, &here).unwrap();
            assert!(doubt.contains(name.trim_end_matches('*')) && doubt.ends_with(advice), "{doubt}");
        }
        let rules = "[[domains.rule]]\nname = \"a\"\nexe = \"x\"\n[[domains.rule]]\nname = \"b\"\nuser = 33\n";
        let named = layer(
            "/1",
            &format!("[scope]\nexes = [\"y\"]\n[deny]\nprograms = [\"n\"]\nalso = [\"z\", \"unit z\"]\n{rules}"),
        );
        assert_eq!(programs_of(&named.options), ["y", "z", "x"]);
    }

    #[test]
    fn scripts_are_doubted_where_they_match_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("gunicorn");
        std::fs::write(&script, "#!/usr/bin/python3\n").unwrap();
        let path = script.display();
        for (text, advice) in [
            (format!("[scope]\nexes = [\"{path}\", \"/bin/sleep\"]\n"), "; select it by --unit"),
            (format!("[[domains.rule]]\nname = \"a\"\nexe = \"{path}\"\n"), "; select it by --unit"),
            (format!("[deny]\nalso = [\"{path}\", \"gunicorn\"]\n"), "; deny it by its base name"),
        ] {
            let [warning] = &scripts(&parse(&text, "a").unwrap())[..] else { panic!("{text}") };
            assert!(
                warning.contains("gunicorn is a script, run by /usr/bin/python3") && warning.contains(advice),
                "{warning}"
            );
        }
    }

    #[test]
    fn what_a_run_would_refuse_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("none/file");
        let refused = |text: &str| {
            let options = parse(text, "a").unwrap();
            check_run(&Settings::of_options(&RunArgs::default(), None, options).unwrap()).unwrap_err()
        };
        let user = refused("[scope]\nusers = [\"nosuchuser\"]\n");
        assert!(user.code == exit::USAGE && user.line.contains("no user nosuchuser"), "{user}");
        assert!(refused("[fleet]\ndirectory = \"/\"\n").line.contains("need the fleet's key"));
        for key in ["[history]\npath", "[history]\nlearned", "[metrics]\ntextfile", "[audit]\nfile"] {
            let error = refused(&format!("{key} = \"{}\"\n", missing.display()));
            assert!(error.code == exit::USAGE && error.line.contains("none/file cannot be created"), "{error}");
        }
        let waiting = "[scope]\nexes = [\"later\"]\nunits = [\"later\"]\ncgroups = [\"/sys/fs/cgroup/later\"]\n";
        let settings = Settings::of_options(&RunArgs::default(), None, parse(waiting, "a").unwrap()).unwrap();
        assert_eq!(check_run(&settings), Ok(()));
    }

    #[test]
    fn settings_that_void_each_other_are_doubted() {
        let warned = |text: &str| contradictions(&parse(text, "a").unwrap()).len();
        let rule = "[[domains.rule]]\nname = \"a\"\nuser = 33\n";
        for (text, warnings) in [
            ("[deny]\nalso = [\"a*\", \"b\"]\nexcept = [\"ab\", \"b\", \"c\"]\n", 2),
            ("[domains]\nmerge = \"a\"\n", 1),
            (&format!("[domains]\nmerge = \"a\"\n{rule}"), 0),
            ("[domains]\nmerge = \"default\"\n", 0),
            ("[domains]\nmerge = \"default\"\nby = \"user\"\n", 1),
            ("[domains]\nmerge = \"user:33\"\nby = \"user\"\n", 0),
        ] {
            assert_eq!(warned(text), warnings, "{text}");
        }
    }

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
