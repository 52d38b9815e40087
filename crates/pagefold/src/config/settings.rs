//! The settings of a run: the command line overrides the configuration files, which override the defaults.

use crate::config::args::RunArgs;
use crate::config::config_file::parse;
use crate::config::flags::DenyFlags;
use crate::config::options::Options;
use crate::config::ownership;
use crate::config::scope::{ScopeArgs, explain};
use crate::config::values::{self, nanos};
use crate::log::LogLevels;
use crate::metrics::MetricsSettings;
use crate::place::is_there;
use crate::sketch::FleetSettings;
use pagefold_engine::config::Config;
use pagefold_engine::governor::Governor;
use pagefold_engine::limits::GroupLimits;
use pagefold_engine::named;
use pagefold_engine::placement::policy::Placement;
use pagefold_host::live::Policies;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::domain::DomainRules;
use pagefold_host::scope::rule::Rule;
use pagefold_host::scope::workload::Workload;
use pagefold_procmem::Roots;
use pagefold_text::exit::{self, Exit};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use tracing::debug;

/// A `run` without `--config` and without a scope reads this file.
pub const DEFAULT_FILE: &str = "/etc/pagefold/pagefold.toml";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MechanismChoice {
    /// On request if the kernel supports it, otherwise by ksmd.
    #[default]
    Auto,
    Ksmd,
    Request,
}

impl MechanismChoice {
    const NAMES: [(&'static str, Self); 3] = [("auto", Self::Auto), ("ksmd", Self::Ksmd), ("request", Self::Request)];
}

named!(MechanismChoice, "mechanism");

/// Where a process's trust domain comes from if no rule matches the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainSource {
    #[default]
    CgroupXattr,
    User,
}

impl DomainSource {
    const NAMES: [(&'static str, Self); 2] = [("cgroup-xattr", Self::CgroupXattr), ("user", Self::User)];
}

named!(DomainSource, "source of domains");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The configuration file, if one was read.
    pub file: Option<PathBuf>,
    pub scope: ScopeArgs,
    pub config: Config,
    pub mechanism: MechanismChoice,
    pub deny: DenyList,
    pub domains: DomainRules,
    /// The groups of processes with limits of their own, in the order of [`Config::groups`].
    pub groups: Vec<Rule>,
    pub placement: Policies,
    pub audit: Option<PathBuf>,
    pub log: LogLevels,
    pub metrics: MetricsSettings,
    pub history: Option<PathBuf>,
    /// The file in which the run records which memory is worth merging.
    pub learned: Option<PathBuf>,
    pub fleet: FleetSettings,
}

impl Settings {
    /// Reads the configuration files and combines them with the command line.
    ///
    /// # Errors
    /// We can't trust or parse a file, or settings contradict each other.
    pub fn of(args: &RunArgs) -> Result<Self, Exit> {
        let default = Path::new(DEFAULT_FILE);
        let file = match &args.config {
            Some(file) => Some(file.as_path()),
            None if args.scope == ScopeArgs::default() && has_layers(default) => Some(default),
            None => None,
        };
        Self::from(args, file)
    }

    /// Reads the settings again, from the files as they are now.
    pub fn reread(&self, args: &RunArgs) -> Result<Self, Exit> {
        let read = Self::from(args, self.file.as_deref())?;
        Ok(Self { config: Config { seed: self.config.seed, ..read.config }, ..read })
    }

    /// Makes the settings from the command line and this file. Without a file, a scope on the command line must still
    /// obey the default file's `[deny]` and `[domains]`.
    ///
    /// # Errors
    /// The same errors as in [`Self::of`].
    pub fn from(args: &RunArgs, file: Option<&Path>) -> Result<Self, Exit> {
        let in_file = match file {
            Some(file) => merged(&load(file)?),
            None if args.scope != ScopeArgs::default() => bounds_of_file()?,
            None => Options::default(),
        };
        Self::of_options(args, file, in_file)
    }

    /// Makes the settings from the command line and the options that the files set.
    ///
    /// # Errors
    /// Settings contradict each other.
    pub fn of_options(args: &RunArgs, file: Option<&Path>, in_file: Options) -> Result<Self, Exit> {
        let scope = if args.scope == ScopeArgs::default() { ScopeArgs::of_file(&in_file) } else { args.scope.clone() };
        let deny = deny_list(&in_file, &args.deny);
        let flags = &*args.options.0;
        let options = in_file.then(flags.clone());
        let mut config = config(&options);
        for group in options.groups.iter().flatten() {
            config.groups.push(group_limits(group, file)?);
        }
        let groups = selected(options.groups.as_deref(), "group", file)?;
        let rules = selected(options.domain_rules.as_deref(), "domain", file)?;
        let by_user = options.domains_by == Some(DomainSource::User);
        // A dry run may run beside the service, whose address and files it must not use. So only its own flags count.
        let outputs = if args.dry_run { flags } else { &options };
        Ok(Self {
            file: file.map(Path::to_owned),
            scope,
            config,
            mechanism: options.mechanism.unwrap_or_default(),
            deny,
            domains: DomainRules { by_user, rules, merge: options.merged_domain.clone() },
            groups,
            placement: placement(&options)?,
            metrics: MetricsSettings::of(outputs),
            history: outputs.history.clone(),
            fleet: FleetSettings::of(outputs),
            // A dry run marks nothing, so it can't learn how well merges last.
            learned: if args.dry_run { None } else { options.learned },
            audit: options.audit,
            log: options.log.unwrap_or_default(),
        })
    }

    /// The sections that have changed since `old`, but can't change during a run.
    pub fn fixed_differences(&self, old: &Self) -> Vec<&'static str> {
        // SIGHUP can change these fields, so we don't compare them.
        let Config { governor, limits, reserve, .. } = old.config;
        let groups = old.config.groups.clone();
        let judgement = Config { governor, limits, groups, reserve, ..self.config.clone() };
        let run = judgement != old.config || self.mechanism != old.mechanism;
        let domains = self.domains.by_user != old.domains.by_user || self.domains.rules != old.domains.rules;
        let mut sections = vec![
            ("[run] (except the governor), [judgement] or [tuning]", run),
            ("[domains] (except merge)", domains),
            ("[numa]", self.placement != old.placement),
            ("[audit]", self.audit != old.audit),
            ("[metrics]", self.metrics != old.metrics),
            ("[history]", self.history != old.history || self.learned != old.learned),
            ("[fleet]", self.fleet != old.fleet),
        ];
        sections.retain(|(_, differs)| *differs);
        sections.into_iter().map(|(section, _)| section).collect()
    }
}

/// The deny list of the default file and the command line, for commands that need no other settings of the file.
///
/// # Errors
/// We can't trust or parse the file.
pub fn deny_list_with(flags: &DenyFlags) -> Result<DenyList, Exit> {
    Ok(deny_list(&bounds_of_file()?, flags))
}

/// The deny list of these options and the command line.
pub fn deny_list(in_file: &Options, flags: &DenyFlags) -> DenyList {
    let programs = in_file.programs.clone().map_or_else(DenyList::default, DenyList::new);
    let workloads = in_file.denied_workloads.iter().flatten().map(|name| Workload::parse(name));
    flags.apply(DenyFlags(Box::new(in_file.clone())).apply(programs.denying(workloads)))
}

/// `[deny]` and `[domains]` of the default file. They hold even if a scope on the command line replaces the rest of the
/// file: an administrator who denies a program or separates domains means every run.
fn bounds_of_file() -> Result<Options, Exit> {
    let default = Path::new(DEFAULT_FILE);
    if !has_layers(default) {
        return Ok(Options::default());
    }
    let file = merged(&load(default)?);
    Ok(Options {
        programs: file.programs,
        denied: file.denied,
        allowed: file.allowed,
        denied_workloads: file.denied_workloads,
        override_opt_outs: file.override_opt_outs,
        domains_by: file.domains_by,
        merged_domain: file.merged_domain,
        domain_rules: file.domain_rules,
        ..Options::default()
    })
}

/// The options in one configuration file.
#[derive(Debug)]
pub struct Layer {
    pub path: PathBuf,
    pub options: Options,
}

/// The options of all files together. If several files set an option, the last one wins.
pub fn merged(layers: &[Layer]) -> Options {
    let mut options = Options::default();
    for layer in layers {
        options = options.then(layer.options.clone());
    }
    options
}

/// FILE.d: we read the files in this directory after FILE.
pub fn additions(path: &Path) -> PathBuf {
    let mut additions = path.as_os_str().to_owned();
    additions.push(".d");
    additions.into()
}

/// Whether FILE or FILE.d exists. If only FILE.d does, we may have lost FILE and what it denied, so [`load`] fails.
pub fn has_layers(path: &Path) -> bool {
    is_there(path) || is_there(&additions(path))
}

/// Reads a file, and then FILE.d/*.toml in the order of their names.
pub fn load(path: &Path) -> Result<Vec<Layer>, Exit> {
    let additions = additions(path);
    let additions = additions.as_path();
    let mut layers = vec![load_one(path)?];
    if !is_there(additions) {
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
    // We check even an empty directory: another user may have removed a file from it.
    let real = additions.canonicalize().map_err(cannot)?;
    ownership::directory(&real).map_err(|why| refused(additions, &format!("is a directory that {why}")))?;
    files.sort();
    for name in files {
        layers.push(load_one(&additions.join(name))?);
    }
    Ok(layers)
}

fn load_one(path: &Path) -> Result<Layer, Exit> {
    let shown = ownership::shown(path);
    debug!(target: "files", path = %shown, "reading the configuration");
    let text = ownership::read(path).map_err(|why| refused(path, &why))?;
    let options = parse(&text, &shown).map_err(|error| Exit::new(exit::USAGE, error))?;
    Ok(Layer { path: path.to_owned(), options })
}

fn refused(path: &Path, why: &str) -> Exit {
    Exit::new(exit::USAGE, format!("{} {why}", ownership::shown(path)))
}

/// The engine's config, with a new random seed. The caller adds the groups.
fn config(options: &Options) -> Config {
    let mut config = Config { seed: seed(), ..Config::of_preset(options.preset.unwrap_or_default()) };
    set(&mut config.governor, options.governor);
    set(&mut config.only, options.only);
    config.top_share = options.top_share.or(config.top_share);
    config.round_ns = options.round.map(nanos).or(config.round_ns);
    set(&mut config.levels, options.levels.and_then(|levels| usize::try_from(levels).ok()));
    set(&mut config.duplicate_threshold, options.duplicate_threshold);
    set(&mut config.cow_threshold, options.cow_threshold);
    set(&mut config.lifetime_ns, options.lifetime.map(nanos));
    set(&mut config.limits.pages_per_process, options.samples_per_second_per_process);
    set(&mut config.limits.pages, options.samples_per_second);
    set(&mut config.limits.stops_per_process, options.stops_per_second_per_process);
    set(&mut config.limits.stops, options.stops_per_second);
    set(&mut config.limits.moves, options.moves_per_second);
    set(&mut config.limits.longest_stop_ns, options.longest_stop.map(nanos));
    set(&mut config.latencies.local_ns, options.local_latency.map(|time| time.subsec_nanos()));
    set(&mut config.latencies.remote_ns, options.remote_latency.map(|time| time.subsec_nanos()));
    set(&mut config.reserve.keep, options.reserve);
    set(&mut config.reserve.take_back, options.take_back);
    config
}

fn set<T>(setting: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *setting = given;
    }
}

/// A seed that other processes can't predict.
pub fn seed() -> u64 {
    RandomState::new().hash_one(0)
}

fn placement(options: &Options) -> Result<Policies, Exit> {
    let default = options.placement.unwrap_or_default();
    let domains = options.placements.clone().unwrap_or_default();
    for &placement in domains.values() {
        if (placement == Placement::LocalOnly) != (default == Placement::LocalOnly) {
            let line = "local-only must be set for all trust domains or for none, because the kernel has one switch for \
                        all; change placement or [numa.domains]";
            return Err(Exit::new(exit::USAGE, line));
        }
    }
    Ok(Policies { default, domains })
}

fn group_limits(group: &values::Rule, file: Option<&Path>) -> Result<GroupLimits, Exit> {
    let Options { governor, samples_per_second: pages, stops_per_second: stops, .. } = group.settings;
    if governor == Some(Governor::Auto) {
        let problem = "have the governor auto, which only works for the whole run; choose another governor";
        return Err(bad_rule(file, &format!("the limits of '{}' {problem}", group.name)));
    }
    Ok(GroupLimits { share: governor.map(|governor| governor.pace().top), pages, stops })
}

/// Resolves the selectors of rules on this machine.
fn selected(rules: Option<&[values::Rule]>, noun: &str, file: Option<&Path>) -> Result<Vec<Rule>, Exit> {
    let mut selected = Vec::new();
    for rule in rules.unwrap_or_default() {
        let name = rule.name.clone();
        let matcher = rule
            .selector
            .resolve(&Roots::default())
            .map_err(|error| bad_rule(file, &format!("the rule for {noun} '{name}': {}", explain(&error).line)))?;
        selected.push(Rule { name, matcher });
    }
    Ok(selected)
}

fn bad_rule(file: Option<&Path>, problem: &str) -> Exit {
    Exit::new(exit::USAGE, format!("{}: {problem}", file.map(ownership::shown).unwrap_or_default()))
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
