//! The settings of a run: the command line overrides the configuration files, which override the defaults.

use crate::config::args::RunArgs;
use crate::config::config_file::parse;
use crate::config::options::{self, Value, Values};
use crate::config::ownership;
use crate::config::scope::{ScopeArgs, explain};
use crate::metrics::MetricsSettings;
use crate::sketch::FleetSettings;
use pagefold_engine::config::{Config, Preset};
use pagefold_engine::governor::Governor;
use pagefold_engine::limits::{GroupLimits, Limits};
use pagefold_engine::placement::policy::{Latencies, Placement};
use pagefold_engine::reserve::ReserveSettings;
use pagefold_engine::units::Permyriad;
use pagefold_host::live::Policies;
use pagefold_host::scope::Selector;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::domain::DomainRules;
use pagefold_host::scope::rule::Rule;
use pagefold_procmem::Roots;
use pagefold_text::exit::{self, Exit};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tracing::debug;

/// Read by a `run` without `--config` and without a scope.
pub const DEFAULT_FILE: &str = "/etc/pagefold/pagefold.toml";

/// How equal pages are to be merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MechanismChoice {
    /// On request where that is possible, otherwise by ksmd.
    #[default]
    Auto,
    Ksmd,
    Request,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The configuration file, if one was read.
    pub file: Option<PathBuf>,
    pub scope: ScopeArgs,
    pub config: Config,
    pub mechanism: MechanismChoice,
    /// Programs that are never touched.
    pub deny: DenyList,
    pub domains: DomainRules,
    /// The processes in each group with limits of its own.
    pub groups: Vec<Rule>,
    pub placement: Policies,
    pub audit: Option<PathBuf>,
    /// What is logged.
    pub log: String,
    pub metrics: MetricsSettings,
    pub history: Option<PathBuf>,
    /// Where what the run learns is kept.
    pub learned: Option<PathBuf>,
    pub fleet: FleetSettings,
}

impl Settings {
    /// Reads the configuration files and puts them together with the command line.
    ///
    /// # Errors
    /// A file cannot be trusted or parsed, or settings contradict each other.
    pub fn of(args: &RunArgs) -> Result<Self, Exit> {
        let is_default = |file: &&Path| args.scope == ScopeArgs::default() && file.exists();
        let file = args.config.as_deref().or_else(|| Some(Path::new(DEFAULT_FILE)).filter(is_default));
        Self::from(args, file)
    }

    /// The same from the files as they are now.
    pub fn reread(&self, args: &RunArgs) -> Result<Self, Exit> {
        let read = Self::from(args, self.file.as_deref())?;
        Ok(Self { config: Config { seed: self.config.seed, ..read.config }, ..read })
    }

    /// The same from this file, or from none.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn from(args: &RunArgs, file: Option<&Path>) -> Result<Self, Exit> {
        let layers = file.map(load).transpose()?.unwrap_or_default();
        Self::of_values(args, file, merged(&layers))
    }

    /// The same from the values of the files.
    ///
    /// # Errors
    /// Settings contradict each other.
    pub fn of_values(args: &RunArgs, file: Option<&Path>, in_file: Values) -> Result<Self, Exit> {
        let scope = match &args.scope {
            given if *given == ScopeArgs::default() => ScopeArgs::of_file(&in_file),
            given => given.clone(),
        };
        let deny = args.deny.apply(deny_list(&in_file));
        let values = in_file.then(args.options.0.clone());
        let config = config(&values).validated().map_err(|error| Exit::new(exit::USAGE, error.to_string()))?;
        let refused =
            |why: String| Exit::new(exit::USAGE, format!("{}: {why}", file.map(ownership::shown).unwrap_or_default()));
        let (groups, limits) = groups(&values).map_err(refused)?;
        let config = Config { groups: limits, ..config };
        Ok(Self {
            file: file.map(Path::to_owned),
            scope,
            config,
            mechanism: mechanism(&values),
            deny,
            domains: domains(&values).map_err(refused)?,
            groups,
            placement: placement(&values)?,
            audit: values.text("file").map(PathBuf::from),
            log: values.text("level").unwrap_or(options::LEVEL).to_owned(),
            // A dry run beside the service would take its place.
            metrics: MetricsSettings::of(if args.dry_run { &args.options.0 } else { &values }),
            history: (if args.dry_run { &args.options.0 } else { &values }).text("path").map(PathBuf::from),
            // It marks nothing, so it learns nothing about marks.
            learned: values.text("learned").filter(|_| !args.dry_run).map(PathBuf::from),
            fleet: FleetSettings::of(if args.dry_run { &args.options.0 } else { &values }),
        })
    }

    /// The sections that differ from `old` and cannot change while a run goes on.
    pub fn fixed_differences(&self, old: &Self) -> Vec<&'static str> {
        let judgement = |settings: &Self| {
            let Config { governor, limits, latencies, reserve, .. } = self.config;
            let groups = self.config.groups.clone();
            Config { governor, limits, groups, latencies, reserve, ..settings.config.clone() }
        };
        [
            ("[scope]", self.scope != old.scope),
            (
                "[run] (except the governor) or [judgement]",
                (judgement(self), self.mechanism) != (judgement(old), old.mechanism),
            ),
            (
                "[domains] (except merge)",
                (self.domains.by_user, &self.domains.rules) != (old.domains.by_user, &old.domains.rules),
            ),
            ("[numa]", (&self.placement, self.config.latencies) != (&old.placement, old.config.latencies)),
            ("[audit]", self.audit != old.audit),
            ("[metrics]", self.metrics != old.metrics),
            ("[history]", (&self.history, &self.learned) != (&old.history, &old.learned)),
            ("[fleet]", self.fleet != old.fleet),
        ]
        .into_iter()
        .filter_map(|(section, differs)| differs.then_some(section))
        .collect()
    }
}

/// The values of one configuration file.
#[derive(Debug)]
pub struct Layer {
    pub path: PathBuf,
    pub values: Values,
}

/// All values; of a key in several files, that of the last one.
pub fn merged(layers: &[Layer]) -> Values {
    layers.iter().fold(Values::default(), |values, layer| values.then(layer.values.clone()))
}

/// Reads a file, and after it FILE.d/*.toml in the order of their names.
pub fn load(path: &Path) -> Result<Vec<Layer>, Exit> {
    let refused = |path: &Path, why: &str| Exit::new(exit::USAGE, format!("{} {why}", ownership::shown(path)));
    let one = |path: &Path| -> Result<Layer, Exit> {
        debug!(target: "files", path = %ownership::shown(path), "reading the configuration");
        let text = ownership::read(path).map_err(|why| refused(path, &why))?;
        let values =
            parse(&text, &ownership::shown(path)).map_err(|error| Exit::new(exit::USAGE, error.to_string()))?;
        Ok(Layer { path: path.to_owned(), values })
    };
    let mut layers = vec![one(path)?];
    let mut additions = path.as_os_str().to_owned();
    additions.push(".d");
    let additions = Path::new(&additions);
    if !additions.exists() {
        return Ok(layers);
    }
    let cannot = |error| refused(additions, &format!("cannot be read: {error}; make it a directory"));
    let mut files = Vec::new();
    for entry in additions.read_dir().map_err(cannot)? {
        let name = entry.map_err(cannot)?.file_name();
        if name.as_encoded_bytes().ends_with(b".toml") && !name.as_encoded_bytes().starts_with(b".") {
            files.push(name);
        }
    }
    // Also when it is empty: another user may have removed a file.
    let real = additions.canonicalize().map_err(cannot)?;
    ownership::directory(&real).map_err(|why| refused(additions, &format!("is a directory that {why}")))?;
    files.sort();
    for name in files {
        layers.push(one(&additions.join(name))?);
    }
    Ok(layers)
}

/// The settings of the judgement, with a seed of their own.
fn config(values: &Values) -> Config {
    let preset = Config::of_preset(parsed::<Preset>(values, "preset").unwrap_or_default());
    let number = |key, default| values.number(key).unwrap_or(default);
    let share = |key| values.number(key).map(|share| Permyriad(u32::try_from(share).unwrap_or(u32::MAX)));
    let nanos = |key, default| number(key, u64::from(default)).try_into().unwrap_or(default);
    Config {
        governor: parsed(values, "governor").unwrap_or(preset.governor),
        only: parsed(values, "only").unwrap_or(preset.only),
        top_share: share("top-share").or(preset.top_share),
        round_ns: values.number("round").or(preset.round_ns),
        levels: values.number("levels").and_then(|levels| usize::try_from(levels).ok()).unwrap_or(preset.levels),
        duplicate_threshold: share("duplicate-threshold").unwrap_or(preset.duplicate_threshold),
        cow_threshold: share("cow-threshold").unwrap_or(preset.cow_threshold),
        lifetime_ns: number("lifetime", preset.lifetime_ns),
        limits: Limits {
            pages_per_process: number("samples-per-second-per-process", preset.limits.pages_per_process),
            pages: number("samples-per-second", preset.limits.pages),
            stops_per_process: number("stops-per-second-per-process", preset.limits.stops_per_process),
            stops: number("stops-per-second", preset.limits.stops),
            moves: number("moves-per-second", preset.limits.moves),
            longest_stop_ns: number("longest-stop", preset.limits.longest_stop_ns),
        },
        latencies: Latencies {
            local_ns: nanos("local-latency", preset.latencies.local_ns),
            remote_ns: nanos("remote-latency", preset.latencies.remote_ns),
        },
        reserve: ReserveSettings {
            keep: parsed(values, "keep").unwrap_or_default(),
            take_back: values.get("take-back") == Some(&Value::Switch(true)),
        },
        seed: seed(),
        ..preset
    }
}

fn mechanism(values: &Values) -> MechanismChoice {
    match values.text("mechanism") {
        Some("ksmd") => MechanismChoice::Ksmd,
        Some("request") => MechanismChoice::Request,
        _ => MechanismChoice::Auto,
    }
}

/// A seed that other processes cannot predict.
pub fn seed() -> u64 {
    RandomState::new().hash_one(0)
}

/// A name, which was checked when it was given.
fn parsed<T: FromStr>(values: &Values, key: &str) -> Option<T> {
    values.text(key)?.parse().ok()
}

fn deny_list(values: &Values) -> DenyList {
    let list = match values.get("programs") {
        Some(_) => DenyList::new(values.list("programs")),
        None => DenyList::default(),
    };
    list.with(&values.list("also"), &values.list("except")).overriding(values.list("override-opt-outs"))
}

fn placement(values: &Values) -> Result<Policies, Exit> {
    let named = |(domain, name): (&String, &String)| Some((domain.clone(), name.parse().ok()?));
    let domains = match values.get("domains") {
        Some(Value::Names(policies)) => policies.iter().filter_map(named).collect(),
        _ => BTreeMap::default(),
    };
    let policies = Policies { default: parsed(values, "placement").unwrap_or_default(), domains };
    let is_local = |placement: &Placement| *placement == Placement::LocalOnly;
    if policies.domains.values().all(|placement| is_local(placement) == is_local(&policies.default)) {
        return Ok(policies);
    }
    let line = "local-only must be set for all trust domains or for none, because the kernel has one switch for all; change \
                placement or [numa.domains]";
    Err(Exit::new(exit::USAGE, line.to_owned()))
}

fn domains(values: &Values) -> Result<DomainRules, String> {
    let rules = rules(values, "rule").iter().map(|rule| selected(rule, "domain"));
    let (by_user, merge) = (values.text("by") == Some("user"), values.text("merge").map(str::to_owned));
    Ok(DomainRules { by_user, rules: rules.collect::<Result<_, _>>()?, merge })
}

/// The groups with limits of their own.
fn groups(values: &Values) -> Result<(Vec<Rule>, Vec<GroupLimits>), String> {
    let group = |rule: &options::Rule| {
        let share = match parsed::<Governor>(&rule.settings, "governor") {
            Some(Governor::Auto) => {
                return Err(format!(
                    "the limits of '{}' have the governor auto, which is for the whole run; choose another",
                    rule.name
                ));
            }
            governor => governor.map(|governor| governor.pace().top),
        };
        let (pages, stops) = (rule.settings.number("samples-per-second"), rule.settings.number("stops-per-second"));
        Ok((selected(rule, "group")?, GroupLimits { share, pages, stops }))
    };
    rules(values, "group").iter().map(group).collect()
}

fn rules<'a>(values: &'a Values, key: &str) -> &'a [options::Rule] {
    match values.get(key) {
        Some(Value::Rules(rules)) => rules,
        _ => &[],
    }
}

/// A rule, with the processes that it selects on this machine.
fn selected(rule: &options::Rule, what: &str) -> Result<Rule, String> {
    let selector = match rule.selector {
        "cgroup" => Selector::Cgroup(rule.value.clone().into()),
        "user" => Selector::User(rule.value.clone()),
        _ => Selector::Exe(rule.value.clone()),
    };
    let matcher = selector
        .resolve(&Roots::default())
        .map_err(|error| format!("the rule for {what} '{}': {}", rule.name, explain(&error).line))?;
    Ok(Rule { name: rule.name.clone(), matcher })
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
