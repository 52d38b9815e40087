//! The configuration file: what may be in it, and what is wrong with it.
//!
//! Pure: text in, settings out. Ranges are those of the command line's options, checked where a value stands so that the
//! line is told. Reading files and putting them together with the command line is done in `settings`.

use pagefold_core::config::{Config, Preset};
use pagefold_core::governor::Governor;
use pagefold_core::placement::policy::Placement;
use pagefold_core::units::Permyriad;
use pagefold_linux::scope::exclude::unfit_entry;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// How long each half of a complaint may be, characters: the file may have anything in it.
const PART_MOST: usize = 300;

/// What a file says. What it does not mention is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    /// Which programs.
    pub scope: Scope,
    /// How hard to search.
    pub run: Run,
    /// What is worth folding.
    pub judgement: Judgement,
    /// Which programs are never touched.
    pub deny: Deny,
    /// How much may be asked of other programs.
    pub limits: Limits,
    /// Who may share memory with whom.
    pub domains: Domains,
    /// Where merged pages live.
    pub numa: Numa,
    /// Where marks are written down.
    pub audit: Audit,
}

/// `[scope]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Scope {
    pub cgroups: Option<Vec<Word>>,
    pub users: Option<Vec<Word>>,
    pub exes: Option<Vec<Word>>,
    pub all: Option<bool>,
}

/// `[run]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(missing_docs)]
pub struct Run {
    #[serde(deserialize_with = "governor")]
    pub governor: Option<Governor>,
    #[serde(deserialize_with = "preset")]
    pub preset: Option<Preset>,
    #[serde(deserialize_with = "top_share")]
    pub top_share: Option<Permyriad>,
    #[serde(deserialize_with = "round")]
    pub round: Option<Duration>,
    #[serde(deserialize_with = "levels")]
    pub levels: Option<usize>,
}

/// `[judgement]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(missing_docs)]
pub struct Judgement {
    #[serde(deserialize_with = "duplicate_threshold")]
    pub duplicate_threshold: Option<Permyriad>,
    #[serde(deserialize_with = "cow_threshold")]
    pub cow_threshold: Option<Permyriad>,
    #[serde(deserialize_with = "lifetime")]
    pub lifetime: Option<Duration>,
}

/// `[deny]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Deny {
    /// Instead of the default list.
    pub programs: Option<Vec<Program>>,
    /// On top of it.
    pub also: Option<Vec<Program>>,
    /// Allowed although the list has them.
    pub except: Option<Vec<Program>>,
}

/// `[limits]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(missing_docs)]
pub struct Limits {
    #[serde(deserialize_with = "rate")]
    pub samples_per_second_per_process: Option<u32>,
    #[serde(deserialize_with = "rate")]
    pub samples_per_second: Option<u32>,
    #[serde(deserialize_with = "rate")]
    pub stops_per_second_per_process: Option<u32>,
    #[serde(deserialize_with = "rate")]
    pub stops_per_second: Option<u32>,
    #[serde(deserialize_with = "rate")]
    pub moves_per_second: Option<u32>,
    #[serde(deserialize_with = "longest_stop")]
    pub longest_stop: Option<Duration>,
}

/// `[domains]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Domains {
    pub by: Option<By>,
    pub rule: Option<Vec<DomainRule>>,
}

/// What tells those apart that no rule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Nothing but their cgroup's attribute.
    CgroupXattr,
    /// Their user.
    User,
}

/// `[[domains.rule]]`
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "RuleFields")]
pub struct DomainRule {
    /// The domain's name.
    pub name: String,
    /// Who belongs to it.
    pub who: Who,
}

/// Who belongs to a domain, as the file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Who {
    Cgroup(String),
    User(String),
    Exe(String),
}

/// `[numa]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(missing_docs)]
pub struct Numa {
    #[serde(deserialize_with = "placement")]
    pub placement: Option<Placement>,
    /// Those of single trust domains, by name.
    #[serde(deserialize_with = "placements")]
    pub domains: Option<BTreeMap<String, Placement>>,
    #[serde(deserialize_with = "latency")]
    pub local_latency: Option<Duration>,
    #[serde(deserialize_with = "latency")]
    pub remote_latency: Option<Duration>,
}

/// `[audit]`
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Audit {
    #[serde(deserialize_with = "absolute")]
    pub file: Option<PathBuf>,
}

/// What is wrong with a file. Displays as one line: file, line, what is wrong; what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file's name, fit to print.
    pub name: String,
    /// Where, from 1.
    pub line: Option<usize>,
    /// What is wrong; what to do.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{} line {line}: {}", self.name, self.message),
            None => write!(f, "{}: {}", self.name, self.message),
        }
    }
}

impl std::error::Error for ConfigError {}

/// Parses a file's text. `name` is what the file is called in an error.
pub fn parse(text: &str, name: &str) -> Result<ConfigFile, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| 1 + text.bytes().take(span.start).filter(|&byte| byte == b'\n').count());
        ConfigError { name: printable(name), line, message: message(error) }
    })
}

impl ConfigFile {
    /// The two together: where both have a key, the later one counts.
    #[must_use]
    pub fn then(self, later: Self) -> Self {
        macro_rules! both {
            ($section:ident, $type:ident { $($key:ident),* }) => {
                $type { $($key: later.$section.$key.or(self.$section.$key)),* }
            };
        }
        Self {
            scope: both!(scope, Scope { cgroups, users, exes, all }),
            run: both!(run, Run { governor, preset, top_share, round, levels }),
            judgement: both!(judgement, Judgement { duplicate_threshold, cow_threshold, lifetime }),
            deny: both!(deny, Deny { programs, also, except }),
            limits: both!(
                limits,
                Limits {
                    samples_per_second_per_process,
                    samples_per_second,
                    stops_per_second_per_process,
                    stops_per_second,
                    moves_per_second,
                    longest_stop
                }
            ),
            domains: both!(domains, Domains { by, rule }),
            numa: both!(numa, Numa { placement, domains, local_latency, remote_latency }),
            audit: both!(audit, Audit { file }),
        }
    }
}

/// The parser's complaint in the program's words: one line.
fn message(mut error: toml::de::Error) -> String {
    let said = error.message().to_owned();
    // Without the text the error displays as its message and the keys that lead to the place.
    error.set_input(None);
    let shown = error.to_string();
    let keys = shown[said.len().min(shown.len())..].trim().strip_prefix("in `").and_then(|keys| keys.strip_suffix('`'));
    let text = match (said.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')), keys) {
        (Some((key, rest)), keys) => {
            // Some errors count the key itself among those that lead to it.
            let section =
                keys.and_then(|keys| keys.strip_suffix(key).map(|keys| keys.trim_end_matches('.')).or(Some(keys)));
            let place = section.filter(|keys| !keys.is_empty()).map(|keys| format!(" in [{keys}]")).unwrap_or_default();
            let known = rest.trim_start_matches(", expected ").trim_start_matches("one of ").replace('`', "");
            format!("unknown key '{key}'{place}; it may be {known}")
        }
        (None, Some(keys)) => format!("{keys}: {}", said.replace('`', "'")),
        (None, None) => said.replace('`', "'"),
    };
    // What is wrong may quote the file at length; what to do has to be told all the same.
    let (what, advice) = text.rsplit_once("; ").unwrap_or((&text, "see pagefold.toml, the commented example"));
    format!("{}; {}", printable(what), printable(advice))
}

/// Without control characters, and not too long.
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

/// Per cent with at most two decimals. Whether it is permitted is the configuration's to say.
pub fn percent(text: &str) -> Result<Permyriad, String> {
    let number: f64 = text.trim_end_matches('%').parse().map_err(|_| format!("'{text}' is no number of per cent"))?;
    if !(0.0..=1e6).contains(&number) {
        return Err(format!("{text} % is out of range"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let permyriad = (number * 100.0).round() as u32;
    Ok(Permyriad(permyriad))
}

// ---- values -----------------------------------------------------------------------------------------------------

/// A value that is a string or a number, as text: per cent, users.
struct Scalar(String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Scalar;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a string")
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }
            fn visit_str<E: de::Error>(self, value: &str) -> Result<Scalar, E> {
                Ok(Scalar(value.to_owned()))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// A path or a name, not empty: an empty cgroup would be that of the whole machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word(pub String);

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Scalar(text) = Scalar::deserialize(deserializer)?;
        if text.is_empty() || text.contains(char::is_control) {
            return Err(de::Error::custom("a name is empty or has a control character; give one that can be"));
        }
        Ok(Self(text))
    }
}

/// An entry of the deny list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(pub String);

impl<'de> Deserialize<'de> for Program {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        match unfit_entry(&name) {
            Some(why) => Err(de::Error::custom(format!("'{name}' {why}"))),
            None => Ok(Self(name)),
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFields {
    name: Word,
    cgroup: Option<Word>,
    user: Option<Word>,
    exe: Option<Word>,
}

impl TryFrom<RuleFields> for DomainRule {
    type Error = String;
    fn try_from(fields: RuleFields) -> Result<Self, String> {
        let RuleFields { name: Word(name), cgroup, user, exe } = fields;
        let who = match (cgroup, user, exe) {
            (Some(Word(path)), None, None) => Who::Cgroup(path),
            (None, Some(Word(user)), None) => Who::User(user),
            (None, None, Some(Word(exe))) => Who::Exe(exe),
            _ => {
                return Err(format!(
                    "the rule for '{name}' must have one of cgroup, user and exe; write a rule for each"
                ));
            }
        };
        Ok(Self { name, who })
    }
}

fn scalar<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
    config: impl FnOnce(&T) -> Config,
) -> Result<Option<T>, D::Error> {
    let Scalar(text) = Scalar::deserialize(deserializer)?;
    let value = parse(&text).map_err(de::Error::custom)?;
    config(&value).validated().map_err(de::Error::custom)?;
    Ok(Some(value))
}

/// A time with its unit, in words.
fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| format!("'{text}' is no time; give one with its unit, as in \"100ms\""))
}

fn ns(time: &Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn governor<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Governor>, D::Error> {
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

fn preset<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Preset>, D::Error> {
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

fn top_share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Permyriad>, D::Error> {
    scalar(deserializer, percent, |&share| Config { top_share: Some(share), ..Config::default() })
}

fn round<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    scalar(deserializer, time, |round| Config { round_ns: Some(ns(round)), ..Config::default() })
}

fn levels<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let number =
        |text: &str| text.parse().map_err(|_| format!("'{text}' is no number of levels; give one from 1 to 8"));
    scalar(deserializer, number, |&levels| Config { levels, ..Config::default() })
}

fn duplicate_threshold<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Permyriad>, D::Error> {
    scalar(deserializer, percent, |&share| Config { duplicate_threshold: share, ..Config::default() })
}

fn cow_threshold<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Permyriad>, D::Error> {
    scalar(deserializer, percent, |&share| Config { cow_threshold: share, ..Config::default() })
}

fn lifetime<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    scalar(deserializer, time, |lifetime| Config { lifetime_ns: ns(lifetime), ..Config::default() })
}

fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    const RATES: RangeInclusive<u32> = 1..=1_000_000_000;
    let Scalar(text) = Scalar::deserialize(deserializer)?;
    match text.parse() {
        Ok(rate) if RATES.contains(&rate) => Ok(Some(rate)),
        _ => {
            Err(de::Error::custom(format!("the rate is {text}; it must be from {} to {}", RATES.start(), RATES.end())))
        }
    }
}

fn longest_stop<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    const STOPS: RangeInclusive<Duration> = Duration::from_micros(100)..=Duration::from_secs(10);
    let Scalar(text) = Scalar::deserialize(deserializer)?;
    let stop = time(&text).map_err(de::Error::custom)?;
    if STOPS.contains(&stop) {
        return Ok(Some(stop));
    }
    Err(de::Error::custom(format!("the longest stop is {text}; it must be from 100 us to 10 s")))
}

fn placement<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Placement>, D::Error> {
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

fn placements<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BTreeMap<String, Placement>>, D::Error> {
    let named = BTreeMap::<String, String>::deserialize(deserializer)?;
    let parsed = named.into_iter().map(|(domain, name)| Ok((domain, name.parse().map_err(de::Error::custom)?)));
    Ok(Some(parsed.collect::<Result<BTreeMap<_, _>, _>>()?).filter(|named| !named.is_empty()))
}

fn latency<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let Scalar(text) = Scalar::deserialize(deserializer)?;
    let latency = time(&text).map_err(de::Error::custom)?;
    if (Duration::from_nanos(1)..=Duration::from_micros(100)).contains(&latency) {
        return Ok(Some(latency));
    }
    Err(de::Error::custom(format!("the latency is {text}; it must be from 1 ns to 100 us")))
}

fn absolute<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let Word(text) = Word::deserialize(deserializer)?;
    if !text.starts_with('/') {
        return Err(de::Error::custom(format!("'{text}' depends on where the run was started; give the whole path")));
    }
    Ok(Some(text.into()))
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
