//! What is generated from the table of options: a table in `docs/commands.md`, and `packaging/pagefold.toml`.
//!
//! The tests fail when the files differ from the table of options. With `PAGEFOLD_BLESS=1` they write the files instead.

use crate::config_file::parse;
use crate::figures::wrap;
use crate::options::{Kind, OPTIONS, SECTIONS, Values};
use std::fmt::Write as _;
use std::path::Path;

/// Enclose the table in `docs/commands.md`.
const BEGIN: &str = "<!-- Generated from the table of options: see docs/contributing.md -->\n";
const END: &str = "<!-- End of the generated part -->\n";

const INTRODUCTION: &str = "\
# Which processes pagefold works on, how much CPU time it uses, and what it leaves alone.
#
# Every key is shown with its default or an example. Remove the \"#\" to set it. Files in the directory pagefold.toml.d whose
# names end in .toml are read after this one, in the order of their names. If several files have a key, the last one
# counts; lists are replaced as a whole. Flags on the command line override all files.
#
# Only root may be able to write this file, those files, and the directories that they are in. See docs/commands.md.
";

fn table() -> String {
    let mut text = "| flag | key | values | default | meaning |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for option in OPTIONS {
        let flag = if option.flag.is_empty() { String::new() } else { format!("`--{}`", option.flag) };
        let values = match &option.kind {
            Kind::Name(_) | Kind::Switch => format!("`{}`", option.values().replace(", ", "`, `")),
            _ => option.values(),
        };
        let default = if option.default().is_empty() { String::new() } else { format!("`{}`", option.default()) };
        let (section, key) = (option.section, option.key);
        let _ = writeln!(text, "| {flag} | `{section}.{key}` | {values} | {default} | {} |", option.help);
    }
    text
}

fn example_file() -> String {
    let mut text = INTRODUCTION.to_owned();
    for section in SECTIONS {
        let _ = write!(text, "\n{}[{}]\n", comment(section.help), section.name);
        for option in OPTIONS.iter().filter(|option| option.section == section.name) {
            let range = if option.range().is_empty() { String::new() } else { format!(": {}", option.range()) };
            let about = comment(&format!("{}{range}.", option.help));
            match &option.kind {
                Kind::Rules(_) => {
                    let _ = write!(text, "{about}");
                    for rule in option.example.split("\nname").map(|rule| rule.trim_start_matches("name")) {
                        let rule = format!("[[{}.{}]]\nname{rule}", section.name, option.key);
                        rule.lines().for_each(|line| text.extend(["#", line, "\n"]));
                    }
                }
                Kind::Names(_) => {
                    let _ = write!(text, "\n{about}[{}.{}]\n#{}\n", section.name, option.key, option.example);
                }
                _ => {
                    let _ = writeln!(text, "{about}#{} = {}", option.key, option.in_file());
                }
            }
        }
    }
    text
}

fn comment(text: &str) -> String {
    wrap(text, 116).iter().fold(String::new(), |comment, line| comment + "# " + line + "\n")
}

/// Compares a file of the repository with what it should be, or writes it.
fn check(path: &str, expected: impl FnOnce(&str) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    let found = std::fs::read_to_string(&path).unwrap();
    let expected = expected(&found);
    if std::env::var_os("PAGEFOLD_BLESS").is_some() {
        std::fs::write(&path, expected).unwrap();
    } else {
        assert!(
            found == expected,
            "{} is out of date: PAGEFOLD_BLESS=1 cargo test -p pagefold-cli reference",
            path.display()
        );
    }
}

#[test]
fn the_table_in_the_documentation_is_up_to_date() {
    check("docs/commands.md", |found| {
        let (before, rest) = found.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        format!("{before}{BEGIN}{}{END}{after}", table())
    });
}

#[test]
fn the_example_file_is_up_to_date() {
    check("packaging/pagefold.toml", |_| example_file());
}

#[test]
fn the_example_file_sets_nothing_as_shipped_and_every_key_without_its_comments() {
    let example = example_file();
    assert_eq!(parse(&example, "FILE"), Ok(Values::default()));
    // Keys are commented out by "#" without a space, remarks by "# ".
    let all: String = example
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if !key.is_empty() && !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let values = parse(&all, "FILE").unwrap();
    for option in OPTIONS {
        assert!(values.get(option.key).is_some(), "{}", option.key);
    }
}
