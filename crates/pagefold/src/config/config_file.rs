//! Parses the configuration file: TOML whose sections and keys are those of the table of options.
//!
//! Pure: text in, values out. Reading files, and putting them together with the command line, is left to the
//! callers.

use crate::config::options::{Kind, OPTIONS, OptionSpec, Rule, SECTIONS, Value, Values, name, word};
use std::fmt;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The longest that each half of an error message may be, characters: the file may contain anything.
const PART_MOST: usize = 300;
/// Two names that are nearer (Jaro similarity, 0 to 1) are probably the same name, one of them mistyped. As in clap.
const NEAR: f64 = 0.7;

/// What is wrong with a file. Displays as one line: file, line, what is wrong; what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The file's name, fit to print.
    pub name: String,
    /// Where, from 1.
    pub line: usize,
    /// What is wrong; what to do.
    pub message: String,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} line {}: {}", self.name, self.line, self.message)
    }
}

impl std::error::Error for FileError {}

/// What is wrong, and the offset in the text where it is.
type Problem = (usize, String);
type Entry<'a, 'i> = (&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

/// Parses a file's text. `name` is what an error calls the file.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn parse(text: &str, name: &str) -> Result<Values, FileError> {
    read(text).map_err(|(offset, message)| {
        let line = 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
        // What is wrong may quote the file at length. What to do must be shown all the same.
        let (what, advice) = message.rsplit_once("; ").unwrap_or((&message, "see pagefold.toml(5)"));
        FileError { name: printable(name), line, message: format!("{}; {}", printable(what), printable(advice)) }
    })
}

fn read(text: &str) -> Result<Values, Problem> {
    let file = DeTable::parse(text).map_err(|error| {
        (error.span().map_or(0, |span| span.start), error.message().replace('`', "'").replace("; ", ", "))
    })?;
    let mut values = Values::default();
    for (section, content) in file.get_ref() {
        if !SECTIONS.iter().any(|known| known.name == section.get_ref()) {
            let known = SECTIONS.iter().map(|section| section.name);
            return Err((section.span().start, unknown(section.get_ref(), "", known)));
        }
        for entry in table(section.get_ref(), content)? {
            let (option, value) = read_entry(section.get_ref(), entry)?;
            // The header of a table without entries sets nothing.
            if !matches!(&value, Value::Names(names) if names.is_empty()) {
                values.set(option, value);
            }
        }
    }
    Ok(values)
}

fn read_entry(section: &str, (key, value): Entry<'_, '_>) -> Result<(&'static OptionSpec, Value), Problem> {
    let known = || OPTIONS.iter().filter(|option| option.section == section);
    let Some(option) = known().find(|option| option.key == key.get_ref()) else {
        return Err((key.span().start, unknown(key.get_ref(), section, known().map(|option| option.key))));
    };
    let path = format!("{section}.{}", option.key);
    let named =
        |result: Result<Value, String>| result.map_err(|message| (value.span().start, format!("{path}: {message}")));
    let value = match (&option.kind, value.get_ref()) {
        (Kind::Switch, DeValue::Boolean(switch)) => Value::Switch(*switch),
        (Kind::Switch, _) => named(Err("the value is neither true nor false; write one of them".to_owned()))?,
        (Kind::List(_) | Kind::Programs, DeValue::Array(items)) => {
            let item = |item: &Spanned<DeValue<'_>>| {
                let text = scalar(item.get_ref()).and_then(|text| option.parse(&text));
                text.map_err(|message| (item.span().start, format!("{path}: {message}")))
            };
            let texts = items.iter().map(item).collect::<Result<Vec<_>, _>>()?;
            Value::List(texts.iter().filter_map(|value| value.text().map(str::to_owned)).collect())
        }
        (Kind::List(_) | Kind::Programs, _) => named(Err("the value is not a list; write [\"NAME\", ...]".to_owned()))?,
        (Kind::Names(choices), _) => {
            let entry = |(key, value): Entry<'_, '_>| {
                let text = scalar(value.get_ref()).and_then(|text| name("placement", choices, &text));
                let text =
                    text.map_err(|message| (value.span().start, format!("{path}.{}: {message}", key.get_ref())))?;
                Ok((key.get_ref().to_string(), text))
            };
            Value::Names(table(&path, value)?.into_iter().map(entry).collect::<Result<_, _>>()?)
        }
        (Kind::Rules(settings), DeValue::Array(items)) => {
            Value::Rules(items.iter().map(|item| rule(&path, settings, item)).collect::<Result<_, _>>()?)
        }
        (Kind::Rules(_), _) => named(Err(format!("the value is not a list of rules; begin each with [[{path}]]")))?,
        (Kind::File | Kind::Directory, content) => {
            named(scalar(content).and_then(|text| match option.parse(&text)? {
                Value::Text(path) if !path.starts_with('/') => {
                    Err(format!("'{path}' is a relative path; give an absolute one"))
                }
                value => Ok(value),
            }))?
        }
        (_, content) => named(scalar(content).and_then(|text| option.parse(&text)))?,
    };
    Ok((option, value))
}

/// The entries of a table that is the value of `path`.
fn table<'a, 'i>(path: &str, value: &'a Spanned<DeValue<'i>>) -> Result<Vec<Entry<'a, 'i>>, Problem> {
    match value.get_ref() {
        DeValue::Table(table) => Ok(table.iter().collect()),
        _ => Err((value.span().start, format!("{path} is not a section; begin it with [{path}]"))),
    }
}

/// A rule, which may have these `settings` and must have one of them, if there are any.
fn rule(path: &str, settings: &[&str], item: &Spanned<DeValue<'_>>) -> Result<Rule, Problem> {
    const SELECTORS: [&str; 3] = ["cgroup", "user", "exe"];
    let (mut named, mut selectors, mut set) = (None, Vec::new(), Values::default());
    for (key, value) in table(path, item)? {
        let text = |parse: &dyn Fn(&str) -> Result<Value, String>| {
            let value_of = scalar(value.get_ref()).and_then(|text| parse(&text));
            value_of.map_err(|message| (value.span().start, format!("{path}.{}: {message}", key.get_ref())))
        };
        let word = || text(&|text| word(text).map(Value::Text));
        let setting = OPTIONS.iter().find(|option| option.key == key.get_ref() && settings.contains(&option.key));
        match (SELECTORS.into_iter().find(|selector| selector == key.get_ref()), setting) {
            (Some(selector), _) => selectors.push((selector, word()?)),
            (None, Some(option)) => set.set(option, text(&|text| option.parse(text))?),
            (None, None) if key.get_ref() == "name" => named = Some(word()?),
            (None, None) => {
                let known = ["name"].into_iter().chain(SELECTORS).chain(settings.iter().copied());
                return Err((key.span().start, unknown(key.get_ref(), &format!("[{path}]"), known)));
            }
        }
    }
    let wrong = |message: String| (item.span().start, format!("{path}: {message}"));
    let Some(Value::Text(name)) = named else {
        return Err(wrong("a rule has no name; give it one".to_owned()));
    };
    if set == Values::default() && !settings.is_empty() {
        return Err(wrong(format!("the rule for '{name}' sets nothing; give it one of {}", settings.join(", "))));
    }
    match <[_; 1]>::try_from(selectors) {
        Ok([(selector, Value::Text(value))]) => Ok(Rule { name, selector, value, settings: set }),
        _ => Err(wrong(format!("the rule for '{name}' must have one of cgroup, user and exe; write a rule for each"))),
    }
}

/// A string or a number as text.
fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        _ => Err("the value is neither a string nor a decimal number; write one of them".to_owned()),
    }
}

fn unknown<'a>(key: &str, section: &str, known: impl Iterator<Item = &'a str>) -> String {
    let place = if section.is_empty() { String::new() } else { format!(" in [{section}]") };
    let known: Vec<&str> = known.collect();
    let meant = meant(key, &known).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"));
    format!("unknown key '{}'{place}; it may be {}{meant}", key.replace("; ", ", "), known.join(", "))
}

/// What was probably meant by an unknown key: one of `known`, or the same key of another section.
fn meant(key: &str, known: &[&str]) -> Option<String> {
    let elsewhere = || OPTIONS.iter().find(|option| option.key == key);
    let nearness = |known: &&str| strsim::jaro(key, known);
    let nearest = known.iter().max_by(|a, b| nearness(a).total_cmp(&nearness(b)))?;
    elsewhere()
        .map(|option| format!("{} in [{}]", option.key, option.section))
        .or_else(|| (nearness(nearest) > NEAR).then(|| (*nearest).to_owned()))
}

/// The text without control characters, cut if it is long.
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
