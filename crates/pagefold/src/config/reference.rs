//! Generates `packaging/pagefold.toml` from the table of options.
//!
//! The test fails when the file differs from the table. With `PAGEFOLD_BLESS=1` it writes the file instead.

use crate::config::config_file::parse;
use crate::config::options::{Options, SECTIONS, all};
use pagefold_text::figures::wrap;
use std::fmt::Write as _;
use std::path::Path;

const INTRODUCTION: &str = "\
# Which processes pagefold works on, how much CPU time it uses, and what it leaves alone.
#
# Every key is shown with its default or an example. Remove the \"#\" to set it. Files in the directory pagefold.toml.d whose
# names end in .toml are read after this one, in the order of their names. If several files have a key, the last one
# counts; lists are replaced as a whole. Flags on the command line override all files.
#
# Nobody except root may have write access to these files and their directories. See pagefold.toml(5).
";

fn example_file() -> String {
    let mut text = INTRODUCTION.to_owned();
    for section in SECTIONS {
        let _ = write!(text, "\n{}[{}]\n", comment(section.about), section.name);
        for option in section.options {
            let range = option.allowed.range().map_or_else(String::new, |range| format!(": {range}"));
            text += &comment(&format!("{}{range}.", option.help));
            for line in option.in_file().lines() {
                let _ = writeln!(text, "#{line}");
            }
        }
    }
    text
}

fn comment(text: &str) -> String {
    wrap(text, 116).iter().fold(String::new(), |comment, line| comment + "# " + line + "\n")
}

#[test]
fn the_example_file_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/pagefold.toml");
    if std::env::var_os("PAGEFOLD_BLESS").is_some() {
        std::fs::write(&path, example_file()).unwrap();
    } else {
        let is_up_to_date = std::fs::read_to_string(&path).unwrap() == example_file();
        assert!(is_up_to_date, "out of date: PAGEFOLD_BLESS=1 cargo test -p pagefold --lib reference");
    }
}

#[test]
fn the_example_file_sets_nothing_as_shipped_and_every_key_without_its_comments() {
    let example = example_file();
    assert_eq!(parse(&example, "FILE"), Ok(Options::default()));
    // Keys are commented out by "#" without a space, remarks by "# ".
    let uncommented: String = example
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if !key.is_empty() && !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let options = parse(&uncommented, "FILE").unwrap();
    for option in all() {
        assert!((option.written)(&options).is_some(), "{}", option.key);
    }
}
