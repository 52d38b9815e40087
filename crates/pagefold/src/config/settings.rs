//! What is in force: the command line first, then the configuration files, then the defaults.

use crate::commands::run::RunArgs;
use crate::config::file::{By, ConfigFile, Program, Scope, Who, Word, parse};
use crate::config::ownership;
use crate::config::scope_args::ScopeArgs;
use crate::exit::{self, Exit};
use pagefold_core::config::Config;
use pagefold_core::limits::Limits;
use pagefold_core::placement::policy::{Latencies, Placement};
use pagefold_linux::host::live::Policies;
use pagefold_linux::proc::Roots;
use pagefold_linux::scope::domain::{DomainRule, DomainRules, Selector};
use pagefold_linux::scope::exclude::DenyList;
use pagefold_linux::scope::user_id;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Read by a `run` that is told neither a file nor a scope.
const DEFAULT_FILE: &str = "/etc/pagefold/pagefold.toml";

/// What a run goes by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The file that was read, if one was. Those in its directory of additions go with it.
    pub file: Option<PathBuf>,
    /// Which programs.
    pub scope: ScopeArgs,
    /// The judgement's settings.
    pub config: Config,
    /// Programs that are never touched.
    pub deny: DenyList,
    /// Who may share memory with whom.
    pub domains: DomainRules,
    /// Where merged pages live.
    pub placement: Policies,
    /// The audit log.
    pub audit: Option<PathBuf>,
}

impl Settings {
    /// Puts them together.
    pub fn of(args: &RunArgs) -> Result<Self, Exit> {
        let is_default = |file: &&Path| args.scope == ScopeArgs::default() && file.exists();
        let file = args.config.as_deref().or_else(|| Some(Path::new(DEFAULT_FILE)).filter(is_default));
        let said = file.map(load).transpose()?.unwrap_or_default();
        Self::from(args, file, &said)
    }

    /// The same of the file as it is now.
    pub fn again(&self, args: &RunArgs) -> Result<Self, Exit> {
        let said = self.file.as_deref().map(load).transpose()?.unwrap_or_default();
        let read = Self::from(args, self.file.as_deref(), &said)?;
        Ok(Self { config: Config { seed: self.config.seed, ..read.config }, ..read })
    }

    fn from(args: &RunArgs, file: Option<&Path>, said: &ConfigFile) -> Result<Self, Exit> {
        let from_file = args.scope == ScopeArgs::default();
        let config = args
            .judgement
            .over(said)
            .config()
            .and_then(|config| Config { limits: limits(said), latencies: latencies(said), ..config }.validated())
            .map_err(|error| Exit::new(exit::USAGE, error.to_string()))?;
        Ok(Self {
            file: file.map(Path::to_owned),
            scope: if from_file { scope_of(&said.scope) } else { args.scope.clone() },
            config,
            deny: args.deny.on(deny_list(said)),
            domains: domains(said).map_err(|why| {
                Exit::new(exit::USAGE, format!("{}: {why}", file.map(ownership::shown).unwrap_or_default()))
            })?,
            placement: placement(args, said)?,
            audit: args.audit.clone().or_else(|| said.audit.file.clone()),
        })
    }

    /// What differs from `old` that a run cannot take in while it goes on.
    pub fn fixed_differences(&self, old: &Self) -> Vec<&'static str> {
        let judgement = |settings: &Self| {
            let Config { governor, limits, latencies, .. } = self.config;
            Config { governor, limits, latencies, ..settings.config.clone() }
        };
        [
            ("[scope]", self.scope != old.scope),
            ("[run] but for the governor, or [judgement]", judgement(self) != judgement(old)),
            ("[domains]", self.domains != old.domains),
            ("[numa]", (&self.placement, self.config.latencies) != (&old.placement, old.config.latencies)),
            ("[audit]", self.audit != old.audit),
        ]
        .into_iter()
        .filter_map(|(section, differs)| differs.then_some(section))
        .collect()
    }
}

/// Reads a file and those in its directory of additions: FILE.d/*.toml, in the order of their names.
fn load(path: &Path) -> Result<ConfigFile, Exit> {
    let refused = |path: &Path, why: &str| Exit::new(exit::USAGE, format!("{} {why}", ownership::shown(path)));
    let one = |path: &Path| -> Result<ConfigFile, Exit> {
        let text = ownership::read(path).map_err(|why| refused(path, &why))?;
        parse(&text, &ownership::shown(path)).map_err(|error| Exit::new(exit::USAGE, error.to_string()))
    };
    let mut merged = one(path)?;
    let mut additions = path.as_os_str().to_owned();
    additions.push(".d");
    let additions = Path::new(&additions);
    if !additions.exists() {
        return Ok(merged);
    }
    let cannot = |error| refused(additions, &format!("cannot be read: {error}; make it a directory of files"));
    let mut files = Vec::new();
    for entry in additions.read_dir().map_err(cannot)? {
        let name = entry.map_err(cannot)?.file_name();
        if name.as_encoded_bytes().ends_with(b".toml") && !name.as_encoded_bytes().starts_with(b".") {
            files.push(name);
        }
    }
    // Also when it is empty: what is not there was perhaps taken away by somebody else.
    let real = additions.canonicalize().map_err(cannot)?;
    ownership::directory(&real).map_err(|why| refused(additions, &format!("is a directory that {why}")))?;
    files.sort();
    for name in files {
        merged = merged.then(one(&additions.join(name))?);
    }
    Ok(merged)
}

fn deny_list(said: &ConfigFile) -> DenyList {
    let names = |programs: &Option<Vec<Program>>| {
        programs.iter().flatten().map(|Program(name)| name.clone()).collect::<Vec<_>>()
    };
    let list = match &said.deny.programs {
        Some(_) => DenyList::new(names(&said.deny.programs)),
        None => DenyList::default(),
    };
    list.with(&names(&said.deny.also), &names(&said.deny.except))
}

fn limits(said: &ConfigFile) -> Limits {
    let (said, usual) = (&said.limits, Limits::default());
    let rate = |said: Option<u32>, usual| said.map_or(usual, u64::from);
    Limits {
        pages_per_process: rate(said.samples_per_second_per_process, usual.pages_per_process),
        pages: rate(said.samples_per_second, usual.pages),
        stops_per_process: rate(said.stops_per_second_per_process, usual.stops_per_process),
        stops: rate(said.stops_per_second, usual.stops),
        moves: rate(said.moves_per_second, usual.moves),
        longest_stop_ns: said
            .longest_stop
            .map_or(usual.longest_stop_ns, |stop| u64::try_from(stop.as_nanos()).unwrap_or(u64::MAX)),
    }
}

fn latencies(said: &ConfigFile) -> Latencies {
    let usual = Latencies::default();
    let ns = |said: Option<Duration>, usual| said.map_or(usual, |time| u32::try_from(time.as_nanos()).unwrap_or(usual));
    Latencies {
        local_ns: ns(said.numa.local_latency, usual.local_ns),
        remote_ns: ns(said.numa.remote_latency, usual.remote_ns),
    }
}

fn placement(args: &RunArgs, said: &ConfigFile) -> Result<Policies, Exit> {
    let policies = Policies {
        default: args.placement.or(said.numa.placement).unwrap_or_default(),
        domains: said.numa.domains.clone().unwrap_or_default(),
    };
    let local = |placement: &Placement| *placement == Placement::LocalOnly;
    if policies.domains.values().all(|placement| local(placement) == local(&policies.default)) {
        return Ok(policies);
    }
    let line = "local-only is for all trust domains or for none, because the kernel has one switch for it; change \
                placement or [numa.domains]";
    Err(Exit::new(exit::USAGE, line.to_owned()))
}

fn domains(said: &ConfigFile) -> Result<DomainRules, String> {
    let mut rules = Vec::new();
    for rule in said.domains.rule.iter().flatten() {
        let selector = match &rule.who {
            Who::Cgroup(path) => Selector::cgroup(Path::new(path), &Roots::default()),
            Who::User(user) => Selector::User(user_id(user).map_err(|error| {
                format!(
                    "{error}, whom the rule for domain '{}' names; give a name from /etc/passwd, or a number",
                    rule.name
                )
            })?),
            Who::Exe(exe) => Selector::Exe(exe.clone()),
        };
        rules.push(DomainRule { name: rule.name.clone(), selector });
    }
    Ok(DomainRules { by_user: said.domains.by == Some(By::User), rules })
}

/// The scope of a configuration file.
fn scope_of(scope: &Scope) -> ScopeArgs {
    let words = |words: &Option<Vec<Word>>| words.iter().flatten().map(|Word(word)| word.clone()).collect::<Vec<_>>();
    ScopeArgs {
        pid: Vec::new(),
        cgroup: words(&scope.cgroups).into_iter().map(PathBuf::from).collect(),
        user: words(&scope.users),
        exe: words(&scope.exes),
        all: scope.all.unwrap_or(false),
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
