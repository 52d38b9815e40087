//! The types of options: how we read each from a flag or a file, and how we write it to a file.

use crate::config::args::seconds;
use crate::config::config_file::{Given, Problem, Source};
use crate::config::options::{Options, all};
use crate::config::settings::{DomainSource, MechanismChoice};
use crate::log::LogLevels;
use pagefold_engine::config::{Only, Preset};
use pagefold_engine::governor::Governor;
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::reserve::Keep;
use pagefold_engine::units::Permyriad;
use pagefold_host::scope::Selector;
use pagefold_host::scope::deny_list::unfit_entry;
use pagefold_host::scope::workload::Workload;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Which values of its type an option accepts.
#[derive(Debug)]
pub enum Allowed {
    Any,
    Count(RangeInclusive<u64>),
    /// Parts of ten thousand.
    Share(RangeInclusive<u64>),
    /// Nanoseconds.
    Time(RangeInclusive<u64>),
    List,
    /// A list of entries of the deny list.
    Programs,
    /// A list of names of pods.
    Pods,
    /// A list of workloads, each as we show it.
    Workloads,
    /// Rules that may set these options for the processes they select.
    Rules(&'static [&'static str]),
}

impl Allowed {
    /// The range of a number, as we show it to users.
    pub fn range(&self) -> Option<String> {
        match self {
            Self::Count(range) | Self::Share(range) | Self::Time(range) => {
                Some(format!("{} to {}", self.show(*range.start()), self.show(*range.end())))
            }
            _ => None,
        }
    }

    fn show(&self, number: u64) -> String {
        match self {
            Self::Share(_) => share(number).to_string(),
            Self::Time(_) => humantime::format_duration(Duration::from_nanos(number)).to_string().replace(' ', ""),
            _ => number.to_string(),
        }
    }

    /// Parses a number into the unit of the range.
    fn number(&self, text: &str) -> Result<u64, String> {
        let expected = self.range().unwrap_or_default();
        let number = match self {
            Self::Share(_) => {
                percent(text).ok_or_else(|| format!("'{text}' is not a percentage; give a number such as 10 or 0.5"))?
            }
            Self::Time(range) => seconds(text).map(nanos).map_err(|_| {
                format!("'{text}' is not a time; give a number and a unit, such as {}", self.show(*range.end()))
            })?,
            _ => text.parse().map_err(|_| format!("'{text}' is not a valid number; give one from {expected}"))?,
        };
        match self {
            Self::Count(range) | Self::Share(range) | Self::Time(range) if !range.contains(&number) => {
                Err(format!("{} is out of range; it must be from {expected}", self.show(number)))
            }
            _ => Ok(number),
        }
    }
}

/// A type that options can have.
pub trait Value: Sized {
    /// Reads a value. `None` if the value sets nothing, like an empty table.
    fn read(source: &Source<'_>) -> Result<Option<Self>, Problem>;

    /// The value in the file's syntax, on one line.
    fn written(&self) -> String;
}

/// A type whose values are one word or number.
trait Scalar: Sized {
    /// Parses a flag's argument, or a string or number of the file.
    ///
    /// # Errors
    /// The problem and the advice.
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String>;

    /// The value in the file's syntax.
    fn format(&self) -> String;
}

impl<T: Scalar> Value for T {
    fn read(source: &Source<'_>) -> Result<Option<Self>, Problem> {
        match T::parse(&source.text()?, source) {
            Ok(value) => Ok(Some(value)),
            Err(message) => Err(source.problem(&message)),
        }
    }

    fn written(&self) -> String {
        self.format()
    }
}

impl<T: Scalar> Value for Vec<T> {
    fn read(source: &Source<'_>) -> Result<Option<Self>, Problem> {
        let mut values = Vec::new();
        for item in source.items("the value is not a list; write [\"NAME\", ...]")? {
            values.extend(T::read(&item)?);
        }
        Ok(Some(values))
    }

    fn written(&self) -> String {
        let items: Vec<String> = self.iter().map(T::format).collect();
        format!("[{}]", items.join(", "))
    }
}

impl Value for BTreeMap<String, Placement> {
    fn read(source: &Source<'_>) -> Result<Option<Self>, Problem> {
        let mut placements = Self::new();
        for (key, value) in source.table()? {
            if let Some(placement) = Placement::read(&source.entry(key.get_ref(), value))? {
                placements.insert(key.get_ref().to_string(), placement);
            }
        }
        Ok(Some(placements).filter(|placements| !placements.is_empty()))
    }

    fn written(&self) -> String {
        let entries: Vec<String> =
            self.iter().map(|(domain, placement)| format!("{} = {}", quoted(domain), placement.format())).collect();
        format!("{{ {} }}", entries.join(", "))
    }
}

/// A rule that selects processes: `[[domains.rule]]` or `[[limits.group]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The name of the trust domain or the group.
    pub name: String,
    pub selector: Selector,
    /// The options that the rule sets for the selected processes.
    pub settings: Options,
}

impl Value for Vec<Rule> {
    fn read(source: &Source<'_>) -> Result<Option<Self>, Problem> {
        let advice = format!("the value is not a list of rules; begin each with [[{}]]", source.path);
        source.items(&advice)?.iter().map(Rule::read).collect::<Result<_, _>>().map(Some)
    }

    fn written(&self) -> String {
        let rules: Vec<String> = self.iter().map(Rule::written).collect();
        format!("[{}]", rules.join(", "))
    }
}

impl Rule {
    fn read(source: &Source<'_>) -> Result<Self, Problem> {
        let settable = match source.allowed {
            Allowed::Rules(keys) => keys,
            _ => &[][..],
        };
        let mut name = None;
        let mut selectors = Vec::new();
        let mut settings = Options::default();
        for (key, value) in source.table()? {
            let entry = source.entry(key.get_ref(), value);
            match &**key.get_ref() {
                "name" => name = String::read(&entry)?,
                kind if Selector::NAMED.contains(&kind) => {
                    let selector = String::read(&entry)?.and_then(|name| Selector::named(kind, name));
                    if let Some(why) = selector.as_ref().and_then(Selector::unfit) {
                        return Err(entry.problem(&format!("the name {why}")));
                    }
                    selectors.extend(selector);
                }
                other => {
                    let Some(option) = all().find(|option| option.key == other && settable.contains(&other)) else {
                        let known = [&["name"], &Selector::NAMED[..], settable].concat();
                        return Err(Problem::unknown(key, &format!(" in [[{}]]", source.path), &known));
                    };
                    (option.read)(&mut settings, &Source { allowed: &option.allowed, ..entry })?;
                }
            }
        }
        let Some(name) = name else { return Err(source.problem("a rule has no name; give it one")) };
        if settings == Options::default() && !settable.is_empty() {
            let settable = settable.join(", ");
            return Err(source.problem(&format!("the rule for '{name}' sets nothing; give it one of {settable}")));
        }
        match <[Selector; 1]>::try_from(selectors) {
            Ok([selector]) => Ok(Self { name, selector, settings }),
            Err(_) => Err(source.problem(&format!(
                "the rule for '{name}' must have exactly one of {}; write a rule for each",
                Selector::NAMED.join(", ")
            ))),
        }
    }

    fn written(&self) -> String {
        let selected = quoted(&self.selector.value());
        let mut text = format!("{{ name = {}, {} = {selected}", quoted(&self.name), self.selector.kind());
        for option in all() {
            if let Some(value) = (option.written)(&self.settings) {
                let _ = write!(text, ", {} = {value}", option.key);
            }
        }
        text + " }"
    }
}

impl Scalar for bool {
    fn parse(text: &str, _: &Source<'_>) -> Result<Self, String> {
        text.parse().map_err(|_| "the value is neither true nor false; write true or false".to_owned())
    }

    fn format(&self) -> String {
        self.to_string()
    }
}

impl Scalar for String {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        let unfit = match source.allowed {
            Allowed::Programs => unfit_entry(text),
            Allowed::Pods => Selector::named("pod", text.to_owned()).and_then(|pod| pod.unfit()),
            Allowed::Workloads => Workload::parse(text).unfit(),
            _ => None,
        };
        if let Some(why) = unfit {
            return Err(format!("'{text}' {why}"));
        }
        // An empty path of a cgroup would select the whole machine.
        if !matches!(source.allowed, Allowed::Programs) && (text.is_empty() || text.contains(char::is_control)) {
            return Err("the name is empty or has a control character; give another one".to_owned());
        }
        Ok(text.to_owned())
    }

    fn format(&self) -> String {
        quoted(self)
    }
}

impl Scalar for Selector {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        let (kind, name) = text.split_once(' ').unwrap_or((text, ""));
        let name = <String as Scalar>::parse(name, source)?;
        let kinds = Self::NAMED.join(", ");
        let selector = Self::named(kind, name)
            .ok_or_else(|| format!("'{text}' has an unknown kind; write a name after one of {kinds}"))?;
        match selector.unfit() {
            Some(why) => Err(format!("'{text}' {why}")),
            None => Ok(selector),
        }
    }

    fn format(&self) -> String {
        quoted(&format!("{} {}", self.kind(), self.value()))
    }
}

impl Scalar for PathBuf {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        let path = Self::from(<String as Scalar>::parse(text, source)?);
        // The service doesn't run in the directory where the administrator wrote the file.
        if matches!(source.given, Given::File(_)) && path.is_relative() {
            return Err(format!("'{text}' is a relative path; give an absolute one"));
        }
        Ok(path)
    }

    fn format(&self) -> String {
        quoted(&self.to_string_lossy())
    }
}

impl Scalar for SocketAddr {
    /// Parses a port (of the loopback interface), or a numeric address and a port. We don't look up host names.
    fn parse(text: &str, _: &Source<'_>) -> Result<Self, String> {
        let port = text.parse::<u16>();
        match port.map(|port| Self::from((Ipv4Addr::LOCALHOST, port))).or_else(|_| text.parse()) {
            Ok(address) if address.port() != 0 => Ok(address),
            _ => {
                let text = text.escape_debug();
                Err(format!("'{text}' is not an address; give a port, or an address like 127.0.0.1:80 or [::1]:80"))
            }
        }
    }

    fn format(&self) -> String {
        quoted(&self.to_string())
    }
}

impl Scalar for u64 {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        source.allowed.number(text)
    }

    fn format(&self) -> String {
        self.to_string()
    }
}

impl Scalar for Permyriad {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        source.allowed.number(text).map(share)
    }

    fn format(&self) -> String {
        self.to_string().trim_end_matches(" %").to_owned()
    }
}

impl Scalar for Duration {
    fn parse(text: &str, source: &Source<'_>) -> Result<Self, String> {
        // A flag's number is in seconds, as in sleep(1). In a file it may be meant in any unit.
        if matches!(source.given, Given::File(_)) && text.parse::<f64>().is_ok() {
            return Err(format!("{text} has no unit; write \"{text}s\" for seconds, \"{text}ms\" for milliseconds"));
        }
        source.allowed.number(text).map(Self::from_nanos)
    }

    fn format(&self) -> String {
        quoted(&humantime::format_duration(*self).to_string().replace(' ', ""))
    }
}

macro_rules! parsed {
    ($($type:ty),*) => {$(
        impl Scalar for $type {
            fn parse(text: &str, _: &Source<'_>) -> Result<Self, String> {
                text.parse().map_err(|error: <Self as FromStr>::Err| error.to_string())
            }

            fn format(&self) -> String {
                quoted(&self.to_string())
            }
        }
    )*};
}

parsed!(Governor, Preset, MechanismChoice, Only, Keep, DomainSource, Placement, LogLevels);

/// The text as a string of TOML, with control characters escaped.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// Parses a percentage, rounded to two decimals, into parts of ten thousand.
fn percent(text: &str) -> Option<u64> {
    let number: f64 = text.trim_end_matches('%').trim_end().parse().ok()?;
    // No range goes as far as 1e6 %, so a larger number is a mistake.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
    (0.0..=1e6).contains(&number).then(|| (number * 100.0).round() as u64)
}

fn share(parts: u64) -> Permyriad {
    Permyriad(u32::try_from(parts).unwrap_or(u32::MAX))
}

/// A time in nanoseconds, at most `u64::MAX` (584 years).
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_the_loopback_interface() {
        let source = Source { path: String::new(), given: Given::Flag(&[]), allowed: &Allowed::Any };
        for (text, address) in
            [("10045", "127.0.0.1:10045"), ("0.0.0.0:80", "0.0.0.0:80"), ("[::1]:65535", "[::1]:65535")]
        {
            assert_eq!(SocketAddr::parse(text, &source), Ok(address.parse().unwrap()));
        }
        for bad in ["", "0", "65536", "127.0.0.1", "127.0.0.1:0", "localhost:10045", "[::1]", ":10045", "-1", "1\n2"] {
            let error = SocketAddr::parse(bad, &source).unwrap_err();
            assert!(error.contains("; give a port") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn percentages_have_two_decimals() {
        assert_eq!((percent("10"), percent("0.2%"), percent("140 %")), (Some(1_000), Some(20), Some(14_000)));
        assert_eq!((percent("ten"), percent("-1"), percent("nan"), percent("1e9")), (None, None, None, None));
    }
}
