//! The table of options: everything that can be set both on the command line and in the configuration file.
//!
//! Each row is the only definition of its option. The flags of the command line ([`crate::config::flags`]), the parser of the
//! configuration file ([`crate::config::config_file`]), `packaging/pagefold.toml` and the manual page pagefold.toml(5) are made from it.
//! Defaults and ranges are those of the engine. To add an option, add a row here and read it in [`crate::config::settings`];
//! then `PAGEFOLD_BLESS=1 cargo test -p pagefold --lib reference` writes the example file again.

use pagefold_engine::config::Config;
use pagefold_engine::range;
use pagefold_engine::reserve::Keep;
use pagefold_engine::units::Permyriad;
use pagefold_host::scope::deny_list::unfit_entry;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;
use tracing_subscriber::filter::Targets;

/// A section of the configuration file, which is also a group of flags.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// Its name in the file.
    pub name: &'static str,
    /// The heading of its flags in `--help`.
    pub heading: &'static str,
    /// What it is about: the comment above it in the file.
    pub help: &'static str,
}

#[derive(Clone, Debug)]
pub struct OptionSpec {
    /// The section of the configuration file that has its key.
    pub section: &'static str,
    /// Its key, different from that of every other option.
    pub key: &'static str,
    /// Its flag without the dashes. Empty if it can only be set in the file.
    pub flag: &'static str,
    /// Which values it takes.
    pub kind: Kind,
    /// An example as the file has it, for an option without a default.
    pub example: &'static str,
    /// What it does, in the imperative or as a noun phrase, without a full stop.
    pub help: &'static str,
}

/// Which values an option takes.
#[derive(Clone, Debug)]
pub enum Kind {
    /// One of these names. The first is the default.
    Name(&'static [&'static str]),
    /// A number in a range, with its default.
    Number(Unit, RangeInclusive<u64>, fn(&Config) -> Option<u64>),
    /// On or off. Default: off.
    Switch,
    /// A list of paths, names or numbers. In `--help` a value has this name.
    List(&'static str),
    /// A list of entries of the deny list. The command line adds to it, files replace it.
    Programs,
    /// An absolute path.
    File,
    /// The absolute path of a directory.
    Directory,
    /// A word. In `--help` it has this name.
    Word(&'static str),
    /// A port, or an IP address and a port.
    Address,
    /// An amount of memory ([`Keep`]). Default: `auto`.
    Amount,
    /// A level of the log, or levels by target. Default: [`LEVEL`].
    Levels,
    /// A table from names to one of these.
    Names(&'static [&'static str]),
    /// A list of [`Rule`], which may set these options for what they select.
    Rules(&'static [&'static str]),
}

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Per cent, kept in parts of ten thousand.
    Percent,
    /// A time, kept in nanoseconds.
    Time,
    /// A plain count.
    Count,
}

/// A value that was given for an option and is in its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Number(u64),
    Switch(bool),
    List(Vec<String>),
    Names(BTreeMap<String, String>),
    Rules(Vec<Rule>),
}

/// A rule that selects processes: `[[domains.rule]]` or `[[limits.group]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name: that of the trust domain or of the group.
    pub name: String,
    /// What selects its processes: `cgroup`, `user` or `exe`.
    pub selector: &'static str,
    /// The cgroup, user or program.
    pub value: String,
    /// What it sets for them.
    pub settings: Values,
}

/// The sections, in the order of the file.
pub const SECTIONS: &[Section] = &[
    Section {
        name: "scope",
        heading: "Scope",
        help: "Which processes are in scope. All entries add up. Scope flags on the command line replace this section.",
    },
    Section { name: "run", heading: "CPU time", help: "How much CPU time to use, and how fast to search." },
    Section { name: "judgement", heading: "Judgement", help: "Which memory is worth merging." },
    Section {
        name: "reserve",
        heading: "Reserve",
        help: "Room for what comes back: a write to a merged page takes memory again. See docs/guide.md. Reloaded by SIGHUP.",
    },
    Section {
        name: "deny",
        heading: "Scope",
        help: "Programs that are never touched: base names, or the beginning of one and an asterisk. The default list has \
               key agents, password managers, browsers and the like; see docs/guide.md. Reloaded by SIGHUP.",
    },
    Section {
        name: "limits",
        heading: "Limits",
        help: "What may be done to other processes in a second, whatever the governor allows. Reloaded by SIGHUP.",
    },
    Section {
        name: "domains",
        heading: "Trust domains",
        help: "Memory is merged only within a trust domain, and with ksmd only that of one. The first of these that names one decides: the extended attribute \
               user.pagefold.domain of the process's cgroup or of its nearest ancestor that has one, the rules below in \
               their order, and with by = \"user\" the user of the process. All other processes are in the domain \
               \"default\".",
    },
    Section { name: "numa", heading: "NUMA", help: "Where merged pages live on a machine with several memory nodes." },
    Section {
        name: "audit",
        heading: "Output",
        help: "A log with one line of JSON (schema pagefold.audit/1) for every span of memory that is marked or unmarked.",
    },
    Section {
        name: "log",
        heading: "Output",
        help: "What is written to standard error, which is the journal's if pagefold is a service. Reloaded by SIGHUP.",
    },
    Section {
        name: "metrics",
        heading: "Output",
        help: "Metrics for Prometheus, served over HTTP or written to a file. A dry run ignores this section. See docs/install.md and pagefold-metrics(5).",
    },
    Section {
        name: "history",
        heading: "Output",
        help: "What outlasts a run: what was saved over time, for pagefold top --since, and what was learned. A dry run ignores this section.",
    },
    Section {
        name: "fleet",
        heading: "Fleet",
        help: "Sketches of what each workload holds, so that the workloads of several hosts can be compared. A dry run ignores this section. \
               See fleet/README.md.",
    },
];

/// What the log can be about.
const TARGETS: [&str; 8] = ["cycle", "event", "scope", "read", "inject", "ksm", "control", "files"];
/// What the log has by default.
pub const LEVEL: &str = "info";
const METRICS_INTERVAL_NS: RangeInclusive<u64> = 1_000_000_000..=3_600_000_000_000;
/// Every minute, or once a day.
const SKETCH_INTERVAL_NS: RangeInclusive<u64> = 60_000_000_000..=86_400_000_000_000;
const PLACEMENTS: &[&str] = &["fair", "priority", "local-only", "kernel"];

/// The options, in the order of the file. Columns: section, key, flag, values, example, help.
#[rustfmt::skip]
pub const OPTIONS: &[OptionSpec] = {
    use Kind::{Address, Amount, Directory, File, Levels, List, Name, Names, Number, Programs, Rules, Switch, Word};
    use Unit::{Count, Percent, Time};
    &[
        row("scope", "cgroups", "cgroup", List("PATH"), "[\"/sys/fs/cgroup/system.slice/redis.service\"]",
            "Every process in this cgroup and below it"),
        row("scope", "users", "user", List("USER"), "[\"www-data\", 33]", "Every process of this user (name or number)"),
        row("scope", "exes", "exe", List("PROGRAM"), "[\"redis-server\", \"/usr/bin/qemu-system-x86_64\"]",
            "Every process that runs this program (path or base name)"),
        row("scope", "all", "all", Switch, "false", "Every process of the machine"),
        row("run", "governor", "governor", Name(&["full", "medium", "low", "quiet", "auto"]), "",
            "Share of one core that pagefold and ksmd may use together: full (95 %), medium (50 %), low (20 %), quiet (1 %), \
             or auto, which goes from quiet to full as memory gets scarce"),
        row("run", "preset", "preset", Name(&["default", "sensitive"]), "",
            "Defaults for a purpose; sensitive also merges memory that lives only for seconds"),
        row("run", "mechanism", "mechanism", Name(&["auto", "ksmd", "request"]), "",
            "How equal pages are merged: request (pagefold names them; needs a kernel with /dev/ksm), ksmd (pagefold marks \
             memory, which ksmd searches), or auto, which is request where that is possible"),
        row("run", "top-share", "top-share", Number(Percent, range::TOP_SHARE, |config| config.top_share.map(|share| share.0.into())), "20",
            "Share of one core to use at most, instead of the governor's"),
        row("run", "round", "round", Number(Time, range::ROUND_NS, |config| config.round_ns), "\"4s\"",
            "Length of a sampling round, instead of the governor's"),
        row("run", "levels", "levels", Number(Count, range::LEVELS, |config| Some(config.levels as u64)), "",
            "Levels of the sampling ladder"),
        row("judgement", "only", "only", Name(&["all", "zeros"]), "",
            "Which equal pages to merge: all, or zeros (pages of zeros alone; ksmd also merges other equal pages beside \
             them)"),
        row("judgement", "duplicate-threshold", "duplicate-threshold",
            Number(Percent, range::THRESHOLD, |config| Some(u64::from(config.duplicate_threshold.0))), "",
            "Read a region whole once at least this share of its sampled pages has duplicates"),
        row("judgement", "cow-threshold", "cow-threshold",
            Number(Percent, range::THRESHOLD, |config| Some(u64::from(config.cow_threshold.0))), "",
            "Share of merged pages that are soon written again from which a region is left alone; 100 switches this off"),
        row("judgement", "lifetime", "lifetime", Number(Time, range::LIFETIME_NS, |config| Some(config.lifetime_ns)), "",
            "Age below which a region that appears during the run is left alone; by default also until two rounds have passed"),
        row("reserve", "keep", "reserve", Amount, "",
            "Memory to keep free, with free swap, for merged pages that are written; if less is left, nothing more is merged. \
             A size (2G), a share of memory (10%), or auto: what programs took back in the worst hour of the last day, at \
             least 5 % of memory, at most what is saved"),
        row("reserve", "take-back", "take-back", Switch, "false",
            "While less is left than the reserve, unmerge memory step by step. Each step takes memory; at least half of the \
             reserve is left"),
        row("deny", "programs", "", Programs, "[\"ssh-agent\", \"gpg-agent\", \"vault\"]",
            "The programs never to touch, instead of the default list"),
        row("deny", "also", "deny", Programs, "[\"my-key-server\", \"wallet*\"]",
            "Never touch programs of this name either (base name, or its beginning and an asterisk)"),
        row("deny", "except", "allow", Programs, "[\"chrome-headless\"]",
            "Allow programs of this name although they are on the deny list, or are not dumpable, as those are that have dropped root's rights"),
        row("deny", "override-opt-outs", "override-opt-out", List("NAME"), "[\"batch.service\", \"web1\"]",
            "Merge memory whose owner has opted out, by the name of the unit, virtual machine, cgroup or program"),
        row("limits", "samples-per-second-per-process", "",
            Number(Count, range::PAGES, |config| Some(config.limits.pages_per_process)), "",
            "Pages read in one process"),
        row("limits", "samples-per-second", "", Number(Count, range::PAGES, |config| Some(config.limits.pages)), "",
            "Pages read in all processes together"),
        row("limits", "stops-per-second-per-process", "",
            Number(Count, range::STOPS_PER_PROCESS, |config| Some(config.limits.stops_per_process)), "",
            "Times that one process is stopped"),
        row("limits", "stops-per-second", "", Number(Count, range::STOPS, |config| Some(config.limits.stops)), "",
            "Times that any process is stopped"),
        row("limits", "moves-per-second", "", Number(Count, range::MOVES, |config| Some(config.limits.moves)), "",
            "Merged pages moved to another memory node"),
        row("limits", "longest-stop", "",
            Number(Time, range::LONGEST_STOP_NS, |config| Some(config.limits.longest_stop_ns)), "",
            "How long a process may be stopped at a time"),
        row("limits", "group", "", Rules(&["governor", "samples-per-second", "stops-per-second"]), "\
            name = \"batch\"\ncgroup = \"/sys/fs/cgroup/batch.slice\"\ngovernor = \"quiet\"\nstops-per-second = 5",
            "Limits for some processes together: a name, one of cgroup, user and exe, and one or more of governor (the share of a \
             core that reading them may take, with what it costs to judge them; ksmd's time counts for the run as a whole), \
             samples-per-second and stops-per-second; the first group that matches counts, beside the limits of the run"),
        row("domains", "by", "", Name(&["cgroup-xattr", "user"]), "",
            "What separates processes that no rule names: the cgroup's attribute only, or also the user"),
        row("domains", "merge", "", Word("DOMAIN"), "\"customer-a\"",
            "The one trust domain whose memory ksmd merges, instead of root's; the others are left alone. Merging on request \
             merges each by itself. Reloaded by SIGHUP"),
        row("domains", "rule", "", Rules(&[]), "\
            name = \"customer-a\"\ncgroup = \"/sys/fs/cgroup/machine.slice/a.scope\"\n\
            name = \"web\"\nuser = \"www-data\"\n\
            name = \"caches\"\nexe = \"redis-server\"",
            "A trust domain: its name, and one of cgroup, user and exe"),
        row("numa", "placement", "placement", Name(PLACEMENTS), "",
            "Node of a merged page: fair (where it is used, else an equal part for each node of its sharers), priority (by \
             nice values), local-only (nothing is merged across nodes), kernel (wherever ksmd leaves it)"),
        row("numa", "local-latency", "",
            Number(Time, range::LATENCY_NS, |config| Some(u64::from(config.latencies.local_ns))), "",
            "Time of a memory access to the own node, for the cost of remote pages in status"),
        row("numa", "remote-latency", "",
            Number(Time, range::LATENCY_NS, |config| Some(u64::from(config.latencies.remote_ns))), "",
            "Time of a memory access to the nearest other node"),
        row("numa", "domains", "", Names(PLACEMENTS), "customer-a = \"priority\"",
            "Placement of single trust domains; local-only must be set for all of them or for none"),
        row("audit", "file", "audit", File, "\"/var/log/pagefold/audit.jsonl\"",
            "Append one line of JSON to this file for every span of memory that is marked or unmarked"),
        row("log", "level", "log-level", Levels, "",
            "What to say beside the run's messages: nothing (info), each step (debug), or levels by target (info,ksm=debug). Targets \
             are cycle, event, scope, read, inject, ksm, control and files"),
        row("metrics", "address", "metrics", Address, "\"127.0.0.1:10045\"",
            "Serve metrics to Prometheus at this address, or at this port of 127.0.0.1"),
        row("metrics", "textfile", "metrics-file", File, "\"/run/pagefold/pagefold.prom\"",
            "Write metrics to this file, for the textfile collector of node_exporter"),
        row("metrics", "interval", "metrics-interval", Number(Time, METRICS_INTERVAL_NS, |_| Some(15_000_000_000)), "",
            "Time between two writes of that file"),
        row("history", "path", "history", File, "\"/var/lib/pagefold/history\"",
            "Keep what is saved over time in this file, of 371 KiB: by the minute for a day, by the quarter of an hour for 30 days. \
             The service does so by default"),
        row("history", "learned", "learned", File, "\"/var/lib/pagefold/learned.json\"",
            "Keep verdicts on memory in this file (never contents, nor digests of them), so that the next run does not search all \
             memory again. The service does so by default"),
        row("fleet", "directory", "sketches", Directory, "\"/var/lib/pagefold/sketches\"",
            "Keep a sketch of what each workload holds, and write those of this host to HOST.parquet in this directory (schema \
             pagefold.sketch/1)"),
        row("fleet", "key", "fleet-key", File, "\"/etc/pagefold/fleet.key\"",
            "The key that all hosts of the fleet share: 64 hexadecimal digits, in a file that only root can read"),
        row("fleet", "host", "fleet-host", Word("NAME"), "\"node-17\"",
            "Name of this host in the fleet, instead of its host name"),
        row("fleet", "sketch-interval", "sketch-interval", Number(Time, SKETCH_INTERVAL_NS, |_| Some(3_600_000_000_000)), "",
            "Time between two writes of that file. Reading all memory in scope for it may take longer"),
    ]
};

const fn row(
    section: &'static str,
    key: &'static str,
    flag: &'static str,
    kind: Kind,
    example: &'static str,
    help: &'static str,
) -> OptionSpec {
    OptionSpec { section, key, flag, kind, example, help }
}

impl OptionSpec {
    /// Checks a value given as text: a flag's argument, or a string or number of the file.
    ///
    /// # Errors
    /// What is wrong; what to do.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        match &self.kind {
            Kind::Name(names) => name(self.key, names, text).map(Value::Text),
            Kind::Number(unit, range, _) => unit.parse(text, range).map(Value::Number),
            Kind::Programs => match unfit_entry(text) {
                Some(why) => Err(format!("'{text}' {why}")),
                None => Ok(Value::Text(text.to_owned())),
            },
            Kind::Address => address(text).map(|_| Value::Text(text.to_owned())),
            Kind::Amount => {
                text.parse::<Keep>().map(|_| Value::Text(text.to_owned())).map_err(|error| error.to_string())
            }
            Kind::Levels => levels(text).map(|_| Value::Text(text.to_owned())),
            _ => word(text).map(Value::Text),
        }
    }

    /// The permitted values, for people. Empty where anything goes.
    pub fn range(&self) -> String {
        match &self.kind {
            Kind::Number(unit, range, _) => format!("{} to {}", unit.show(*range.start()), unit.show(*range.end())),
            _ => String::new(),
        }
    }

    /// What can be set, for people.
    pub fn values(&self) -> String {
        match &self.kind {
            Kind::Name(names) => names.join(", "),
            Kind::Number(..) => self.range(),
            Kind::Switch => "true, false".to_owned(),
            Kind::List(_) | Kind::Programs => "list".to_owned(),
            Kind::File | Kind::Directory => "absolute path".to_owned(),
            Kind::Word(_) => "word".to_owned(),
            Kind::Address => "port, or address and port".to_owned(),
            Kind::Amount => "auto, size or share".to_owned(),
            Kind::Levels => "level, or target=level and so on".to_owned(),
            Kind::Names(_) => "table: domain = placement".to_owned(),
            Kind::Rules(_) => "list of tables".to_owned(),
        }
    }

    /// The default with these settings of a preset, if there is one.
    pub fn default_value(&self, preset: &Config) -> Option<Value> {
        match &self.kind {
            Kind::Name(names) => Some(Value::Text(names[0].to_owned())),
            Kind::Number(_, _, default) => default(preset).map(Value::Number),
            Kind::Switch => Some(Value::Switch(false)),
            Kind::Amount => Some(Value::Text(Keep::default().to_string())),
            Kind::Levels => Some(Value::Text(LEVEL.to_owned())),
            _ => None,
        }
    }

    /// The default, or else the example, as a file has it.
    pub fn in_file(&self) -> String {
        self.default_value(&Config::default()).map_or_else(|| self.example.to_owned(), |value| self.written(&value))
    }

    /// A value as a file has it, on one line.
    pub fn written(&self, value: &Value) -> String {
        match (value, &self.kind) {
            (Value::Number(number), Kind::Number(Unit::Percent, ..)) => {
                Unit::Percent.show(*number).trim_end_matches(" %").to_owned()
            }
            (Value::Number(number), Kind::Number(Unit::Time, ..)) => quoted(&Unit::Time.show(*number)),
            (Value::Number(number), _) => number.to_string(),
            (Value::Text(text), _) => quoted(text),
            (Value::Switch(switch), _) => switch.to_string(),
            (Value::List(list), _) => {
                format!("[{}]", list.iter().map(|item| quoted(item)).collect::<Vec<_>>().join(", "))
            }
            (Value::Names(names), _) => {
                let pairs = names.iter().map(|(name, value)| format!("{} = {}", quoted(name), quoted(value)));
                format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
            }
            (Value::Rules(rules), _) => {
                let rule = |rule: &Rule| {
                    let set = |option: &OptionSpec| {
                        Some(format!(", {} = {}", option.key, option.written(rule.settings.get(option.key)?)))
                    };
                    let set: String = OPTIONS.iter().filter_map(set).collect();
                    format!("{{ name = {}, {} = {}{set} }}", quoted(&rule.name), rule.selector, quoted(&rule.value))
                };
                format!("[{}]", rules.iter().map(rule).collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// The default, for people. Empty if there is none.
    pub fn default(&self) -> String {
        match &self.kind {
            Kind::Name(names) => names[0].to_owned(),
            Kind::Number(unit, _, default) => default(&Config::default()).map(|n| unit.show(n)).unwrap_or_default(),
            Kind::Amount => Keep::default().to_string(),
            Kind::Levels => LEVEL.to_owned(),
            _ => String::new(),
        }
    }
}

/// A name out of `names`. `what` is what it names.
pub fn name(what: &str, names: &[&str], text: &str) -> Result<String, String> {
    if names.contains(&text) {
        return Ok(text.to_owned());
    }
    let (last, others) = names.split_last().unwrap_or((&"", &[]));
    Err(format!("there is no {what} '{}'; choose {} or {last}", text.escape_debug(), others.join(", ")))
}

/// Levels of the log, as `info`, or `warn,ksm=debug`.
///
/// # Errors
/// What is wrong; what to do.
pub fn levels(text: &str) -> Result<Targets, String> {
    // Alone, the name of a target means all of its levels. So any word would be one.
    let is_known = |levels: &Targets| levels.iter().all(|(target, _)| TARGETS.contains(&target));
    text.parse().ok().filter(is_known).ok_or_else(|| {
        let shown = text.escape_debug();
        format!("'{shown}' is not a level; give info or debug, or levels by target such as info,ksm=debug")
    })
}

/// A port of the loopback interface, or a numeric address and a port. Names are not looked up.
///
/// # Errors
/// What is wrong; what to do.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let of_loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let parsed = text.parse().ok().or_else(|| text.parse().ok().map(of_loopback));
    parsed.filter(|address| address.port() != 0).ok_or_else(|| {
        format!(
            "'{}' is not an address; give a port, or one such as 127.0.0.1:10045 or [::1]:10045",
            text.escape_debug()
        )
    })
}

/// A path or a name. An empty cgroup would be that of the whole machine.
pub fn word(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(char::is_control) {
        return Err("the name is empty or has a control character; give another one".to_owned());
    }
    Ok(text.to_owned())
}

impl Unit {
    fn parse(self, text: &str, range: &RangeInclusive<u64>) -> Result<u64, String> {
        let number = match self {
            Self::Percent => {
                percent(text).ok_or_else(|| format!("'{text}' is not a percentage; give a number such as 10 or 0.5"))?
            }
            Self::Time => humantime::parse_duration(text)
                .map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
                .map_err(|_| format!("'{text}' is not a time; give a number and a unit, such as 100ms"))?,
            Self::Count => text.parse().map_err(|_| {
                format!("'{text}' is not a valid number; give one from {} to {}", range.start(), range.end())
            })?,
        };
        if range.contains(&number) {
            return Ok(number);
        }
        let (low, high) = (self.show(*range.start()), self.show(*range.end()));
        Err(format!("{} is out of range; it must be from {low} to {high}", self.show(number)))
    }

    /// What a value is called in `--help`.
    pub fn value_name(self) -> &'static str {
        match self {
            Self::Percent => "PERCENT",
            Self::Time => "DURATION",
            Self::Count => "N",
        }
    }

    /// A number with its unit.
    pub fn show(self, number: u64) -> String {
        match self {
            Self::Percent => Permyriad(u32::try_from(number).unwrap_or(u32::MAX)).to_string(),
            Self::Time => humantime::format_duration(Duration::from_nanos(number)).to_string().replace(' ', ""),
            Self::Count => number.to_string(),
        }
    }
}

/// A string of TOML, without control characters.
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

/// Per cent with at most two decimals, in parts of ten thousand.
fn percent(text: &str) -> Option<u64> {
    let number: f64 = text.trim_end_matches('%').trim_end().parse().ok()?;
    // 1e6 % is far beyond any range, and larger numbers are a mistake.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
    (0.0..=1e6).contains(&number).then(|| (number * 100.0).round() as u64)
}

impl Value {
    /// The text of a name or a path.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The values given for options, by key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values(BTreeMap<&'static str, Value>);

impl Values {
    /// Sets the value of an option.
    pub fn set(&mut self, option: &OptionSpec, value: Value) {
        self.0.insert(option.key, value);
    }

    /// Both together. Where both have a value, that of `later` counts.
    #[must_use]
    pub fn then(mut self, later: Self) -> Self {
        self.0.extend(later.0);
        self
    }

    /// Those of one section.
    #[must_use]
    pub fn of_section(&self, section: &str) -> Self {
        let keys = OPTIONS.iter().filter(|option| option.section == section).map(|option| option.key);
        Self(keys.filter_map(|key| Some((key, self.0.get(key)?.clone()))).collect())
    }

    /// The value of an option.
    ///
    /// # Panics
    /// If no option has this key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        assert!(OPTIONS.iter().any(|option| option.key == key), "there is no option {key}");
        self.0.get(key)
    }

    /// The text of a name or a path. Panics like [`Self::get`], as those below.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    /// A number, in the unit in which it is kept.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            Value::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// A list, empty if it was not given.
    pub fn list(&self, key: &str) -> Vec<String> {
        match self.get(key) {
            Some(Value::List(list)) => list.clone(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::config::{Only, Preset};
    use pagefold_engine::governor::Governor;
    use pagefold_engine::placement::policy::Placement;

    #[test]
    fn names_and_defaults_are_those_of_the_core() {
        for option in OPTIONS {
            let Kind::Name(names) = option.kind else { continue };
            let default = names[0];
            match option.key {
                "governor" => assert_eq!(default.parse(), Ok(Governor::default())),
                "preset" => assert_eq!(default.parse(), Ok(Preset::default())),
                "placement" => assert_eq!(default.parse(), Ok(Placement::default())),
                "only" => assert_eq!(default.parse(), Ok(Only::default())),
                _ => {}
            }
            for name in names {
                match option.key {
                    "governor" => assert!(name.parse::<Governor>().is_ok(), "{name}"),
                    "preset" => assert!(name.parse::<Preset>().is_ok(), "{name}"),
                    "placement" => assert!(name.parse::<Placement>().is_ok(), "{name}"),
                    "only" => assert!(name.parse::<Only>().is_ok(), "{name}"),
                    // Of the program, not of the core.
                    key => assert!(["by", "mechanism"].contains(&key), "{key}"),
                }
            }
        }
    }

    #[test]
    fn every_default_is_a_permitted_value_and_keys_differ() {
        let mut keys: Vec<&str> = OPTIONS.iter().map(|option| option.key).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{keys:?}");
        for option in OPTIONS {
            let default = option.default();
            assert!(default.is_empty() != option.example.is_empty(), "{}: a default or an example", option.key);
            assert!(default.is_empty() || option.parse(&default).is_ok(), "{}: {default}", option.key);
            assert!(SECTIONS.iter().any(|section| section.name == option.section));
        }
    }

    #[test]
    fn levels_of_the_log_are_by_known_targets() {
        for good in ["info", "debug", "warn,ksm=debug", "scope", "off,inject=trace"] {
            assert!(levels(good).is_ok(), "{good}");
        }
        for bad in ["loud", "info,kms=debug", "ksm=loud"] {
            assert!(levels(bad).unwrap_err().contains("is not a level; give info or debug"), "{bad}");
        }
    }

    #[test]
    fn a_port_alone_is_of_the_loopback_interface() {
        let is = |text: &str, address_is: &str| assert_eq!(address(text), Ok(address_is.parse().unwrap()));
        is("10045", "127.0.0.1:10045");
        is("0.0.0.0:80", "0.0.0.0:80");
        is("[::1]:65535", "[::1]:65535");
        for bad in ["", "0", "65536", "127.0.0.1", "127.0.0.1:0", "localhost:10045", "[::1]", ":10045", "-1", "1\n2"] {
            let error = address(bad).unwrap_err();
            assert!(error.contains("; give a port") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn percentages_have_two_decimals() {
        assert_eq!((percent("10"), percent("0.2%"), percent("140 %")), (Some(1_000), Some(20), Some(14_000)));
        assert_eq!((percent("ten"), percent("-1"), percent("nan"), percent("1e9")), (None, None, None, None));
    }
}
