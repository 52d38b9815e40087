//! Parses the configuration file: TOML with the sections and keys of the table of options.
//!
//! The parser does no I/O: text in, options out. Callers read the files and combine them with the command line.

use crate::config::options::{OptionSpec, Options, SECTIONS, Section, all};
use crate::config::values::Allowed;
use pagefold_text::misspelt::nearest;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// We cut the problem and the advice in an error message to this many characters each, because they may quote the file.
const PART_MOST: usize = 300;
/// When we look for a misspelt key, one letter in this many may be wrong. We list all keys anyway.
const LETTERS: usize = 2;

/// Keys that have moved to `[tuning]`, by their former section. The next release won't read them there any more.
const MOVED: [(&str, &[&str]); 3] = [
    ("run", &["top-share", "round", "levels"]),
    ("judgement", &["duplicate-threshold", "cow-threshold", "lifetime"]),
    ("numa", &["local-latency", "remote-latency"]),
];

/// An error at an offset in the text.
#[derive(Debug)]
pub struct Problem {
    offset: usize,
    pub message: String,
}

impl Problem {
    /// The error that `key` isn't one of the `known` keys. `place` says where the key is.
    pub fn unknown(key: &Spanned<DeString<'_>>, place: &str, known: &[&str]) -> Self {
        let name = key.get_ref();
        let meant = meant(name, known).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"));
        let name = name.replace("; ", ", ");
        let known = known.join(", ");
        Self { offset: key.span().start, message: format!("unknown key '{name}'{place}; it may be {known}{meant}") }
    }
}

/// A value that somebody gave for an option.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// A flag's arguments, or "true" for a switch.
    Flag(&'a [String]),
    File(&'a Spanned<DeValue<'a>>),
}

/// A value with its origin and the permitted values.
#[derive(Debug)]
pub struct Source<'a> {
    /// The flag as in `--help`, or the key with its section.
    pub path: String,
    pub given: Given<'a>,
    pub allowed: &'a Allowed,
}

impl<'a> Source<'a> {
    pub fn problem(&self, message: &str) -> Problem {
        let path = &self.path;
        match self.given {
            Given::Flag(words) => {
                let message = format!("invalid value '{}' for '{path}': {message}", words.concat());
                Problem { offset: 0, message }
            }
            Given::File(value) => Problem { offset: value.span().start, message: format!("{path}: {message}") },
        }
    }

    pub fn text(&self) -> Result<String, Problem> {
        match self.given {
            Given::Flag(words) => Ok(words.concat()),
            Given::File(value) => match value.get_ref() {
                DeValue::String(text) => Ok(text.to_string()),
                DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
                DeValue::Float(number) => Ok(number.as_str().to_owned()),
                DeValue::Boolean(switch) => Ok(switch.to_string()),
                _ => Err(self.problem("the value must be a string or a decimal number")),
            },
        }
    }

    /// The items of a list, or the error `no_list` if the value isn't a list.
    pub fn items(&self, no_list: &str) -> Result<Vec<Self>, Problem> {
        let items: Vec<Given<'a>> = match self.given {
            Given::Flag(words) => words.chunks(1).map(Given::Flag).collect(),
            Given::File(value) => {
                let items = value.get_ref().as_array().ok_or_else(|| self.problem(no_list))?;
                items.iter().map(Given::File).collect()
            }
        };
        Ok(items.into_iter().map(|given| Self { path: self.path.clone(), given, allowed: self.allowed }).collect())
    }

    pub fn table(&self) -> Result<&'a DeTable<'a>, Problem> {
        match self.given {
            Given::File(value) => value.get_ref().as_table(),
            Given::Flag(_) => None,
        }
        .ok_or_else(|| Problem {
            message: format!("{} is not a section; begin it with [{0}]", self.path),
            ..self.problem("")
        })
    }

    #[must_use]
    pub fn entry(&self, key: &str, value: &'a Spanned<DeValue<'a>>) -> Self {
        Self { path: format!("{}.{key}", self.path), given: Given::File(value), allowed: self.allowed }
    }
}

/// Parses a file's text. `name` stands for the file in error messages.
///
/// # Errors
/// One line about the first error: the file, the line, the problem, and the advice.
pub fn parse(text: &str, name: &str) -> Result<Options, String> {
    read(text).map_err(|Problem { offset, message }| {
        let line = 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
        // The problem may be a long quote from the file. We shorten it separately from the advice, which must stay
        // readable.
        let (wrong, advice) = message.rsplit_once("; ").unwrap_or((&message, "see pagefold.toml(5)"));
        format!("{} line {line}: {}; {}", printable(name), printable(wrong), printable(advice))
    })
}

fn read(text: &str) -> Result<Options, Problem> {
    let file = DeTable::parse(text).map_err(|error| Problem {
        offset: error.span().map_or(0, |span| span.start),
        message: error.message().replace('`', "'").replace("; ", ", "),
    })?;
    let mut options = Options::default();
    for (name, value) in file.get_ref() {
        let Some(section) = SECTIONS.iter().find(|section| section.name == name.get_ref()) else {
            let known: Vec<&str> = SECTIONS.iter().map(|section| section.name).collect();
            return Err(Problem::unknown(name, "", &known));
        };
        let source = Source { path: section.name.to_owned(), given: Given::File(value), allowed: &Allowed::Any };
        for (key, value) in source.table()? {
            let Some(option) = find(section.name, key.get_ref()) else {
                return Err(Problem::unknown(key, &format!(" in [{}]", section.name), &keys(section)));
            };
            let source = Source { allowed: &option.allowed, ..source.entry(option.key, value) };
            (option.read)(&mut options, &source)?;
        }
    }
    Ok(options)
}

fn find(section: &str, key: &str) -> Option<&'static OptionSpec> {
    let has_moved = MOVED.iter().any(|(former, keys)| *former == section && keys.contains(&key));
    let section = if has_moved { "tuning" } else { section };
    all().find(|option| option.section == section && option.key == key)
}

fn keys(section: &Section) -> Vec<&'static str> {
    section.options.iter().map(|option| option.key).collect()
}

/// The key that the user probably meant by an unknown one: the same key in another section, or one of `known`.
fn meant(key: &str, known: &[&str]) -> Option<String> {
    if let Some(section) = SECTIONS.iter().find(|section| keys(section).contains(&key)) {
        return Some(format!("{key} in [{}]", section.name));
    }
    nearest(key, known.iter().copied(), LETTERS).first().map(|&key| key.to_owned())
}

/// The text without control characters, cut if it's too long.
fn printable(text: &str) -> String {
    let mut line = String::new();
    for (at, c) in text.chars().enumerate() {
        if at == PART_MOST {
            return line + "...";
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
#[path = "config_file_tests.rs"]
mod tests;
