//! The table of options: everything that both the command line and the configuration file can set.
//!
//! Each row is the only definition of its option. From it we make the field of [`Options`], the flag
//! ([`crate::config::flags`]), the key of the configuration file ([`crate::config::config_file`]),
//! `packaging/pagefold.toml` and the manual page pagefold.toml(5). Ranges and defaults come from the engine. To add an
//! option, add a row here with its default, and read the option in [`crate::config::settings`]. Then
//! `PAGEFOLD_BLESS=1 cargo test -p pagefold --lib reference` rewrites the example file.

use crate::config::config_file::{Problem, Source};
use crate::config::settings::{DomainSource, MechanismChoice};
use crate::config::values::Allowed::{self, Any, Count, List, Pods, Programs, Rules, Share, Time, Workloads};
use crate::config::values::{Rule, Value};
use crate::log::LogLevels;
use pagefold_engine::config::{Config, Only, Preset};
use pagefold_engine::governor::Governor;
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::range;
use pagefold_engine::reserve::Keep;
use pagefold_engine::units::{Permyriad, count};
use pagefold_host::scope::deny_list::DEFAULT_DENIED;
use pagefold_host::scope::{ScopeSpec, Selector};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// A section of the configuration file, which is also a group of flags.
#[derive(Debug)]
pub struct Section {
    pub name: &'static str,
    /// The comment above the section in the file.
    pub about: &'static str,
    pub options: &'static [OptionSpec],
}

#[derive(Debug)]
pub struct OptionSpec {
    pub section: &'static str,
    /// The heading in `--help` that lists the option's flag.
    pub heading: &'static str,
    /// The key in the file. No two options have the same key, even in different sections.
    pub key: &'static str,
    /// The flag and the name of its value, as in `--help`. Switches lack the value name; some options lack the flag.
    pub usage: &'static str,
    pub allowed: Allowed,
    /// An example in the file's syntax: a value, or whole lines. Empty if the default can serve as the example.
    pub example: &'static str,
    /// The default under a preset's settings, in the file's syntax.
    pub default_in: fn(&Config) -> Option<String>,
    /// A description in the imperative or as a noun phrase, without a full stop.
    pub help: &'static str,
    /// Parses a given value and sets the option.
    pub read: fn(&mut Options, &Source<'_>) -> Result<(), Problem>,
    /// The option's value in the file's syntax, on one line, if it's set.
    pub written: fn(&Options) -> Option<String>,
}

/// Defines [`Options`] and [`SECTIONS`]. A row has the key, usage, field, type, permitted values, an example or default
/// (or both), and the help text.
macro_rules! options {
    ($preset:ident; $($section:literal $heading:literal $about:literal {$(
        $key:literal $usage:literal $field:ident: $type:ty, $allowed:expr, $($example:literal)? $(= $default:expr)?,
        $help:literal;
    )*})*) => {
        /// The options that one source sets: a configuration file, all files together, or the command line.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Options {
            $($(#[doc = $help] pub $field: Option<$type>,)*)*
        }

        impl Options {
            /// Combines both. Where both set an option, `later` wins.
            #[must_use]
            pub fn then(self, later: Self) -> Self {
                Self { $($($field: later.$field.or(self.$field),)*)* }
            }
        }

        /// The sections, in the order of the file.
        pub static SECTIONS: &[Section] = &[$(Section { name: $section, about: $about, options: &[$(OptionSpec {
            section: $section,
            heading: $heading,
            key: $key,
            usage: $usage,
            allowed: $allowed,
            example: concat!($($example)?),
            help: $help,
            read: |options, source| {
                options.$field = <$type>::read(source)?;
                Ok(())
            },
            written: |options| options.$field.as_ref().map(Value::written),
            default_in: |$preset| {
                let _: &Config = $preset;
                None::<$type>$(.or(Option::from($default)))?.map(|default| default.written())
            },
        }),*] }),*];
    };
}

options! {
    preset;
    "scope" "Scope"
        "Which processes are in scope: any that match an entry. Scope flags on the command line replace this section. \
         Reloaded by SIGHUP." {
        "cgroups" "--cgroup <PATH>" cgroups: Vec<String>, List, "[\"/sys/fs/cgroup/system.slice/redis.service\"]",
            "Processes in this cgroup and below it";
        "users" "--user <USER>" users: Vec<String>, List, "[\"www-data\", 33]",
            "Processes of this user (name or number)";
        "exes" "--exe <PROGRAM>" exes: Vec<String>, List, "[\"redis-server\", \"/usr/bin/qemu-system-x86_64\"]",
            "Processes that run this program (path or base name)";
        "units" "--unit <NAME>" units: Vec<String>, List, "[\"nginx.service\", \"batch.slice\"]",
            "Processes of this systemd unit and below it (.service may be left out)";
        "vms" "--vm <NAME>" vms: Vec<String>, List, "[\"web1\", 104]",
            "This virtual machine: libvirt's name or Proxmox VE's number";
        "containers" "--container <NAME>" containers: Vec<String>, List, "[\"web1\", \"3f0c1d2e9a7b\"]",
            "Processes of this container: its name (Docker, Podman, nerdctl, LXC or nspawn), or at least 12 digits of its ID (also \
             containerd or CRI-O)";
        "pods" "--pod <NAME>" pods: Vec<String>, Pods, "[\"shop/cart-*\"]",
            "Processes of this Kubernetes pod: NAMESPACE/NAME (an asterisk at the end matches any rest), or at least 12 \
             characters of its UID";
        "enabled" "SELECTOR" enabled: Vec<Selector>, List, "[\"exe redis-server\", \"unit nginx.service\"]",
            "Selectors that pagefold enable has added: each a kind (exe, unit, vm, container, pod, cgroup or user) and a name";
        "all" "--all" all: bool, Any, = false, "All processes on the machine";
    }
    "run" "CPU time" "How much CPU time to use, and how to merge." {
        "governor" "--governor <NAME>" governor: Governor, Any, = preset.governor,
            "Share of one core for pagefold and ksmd together: full (95 %), medium (50 %), low (20 %), quiet (1 %), \
             or auto (low, but more as memory gets scarce, and quiet while programs in scope wait for a CPU)";
        "preset" "--preset <NAME>" preset: Preset, Any, = Preset::default(),
            "Set of defaults: default, or sensitive (also merges memory that lives only for seconds)";
        "mechanism" "--mechanism <NAME>" mechanism: MechanismChoice, Any, = MechanismChoice::default(),
            "How to merge equal pages: request (pagefold gives the kernel pairs of pages; needs a kernel with /dev/ksm), \
             ksmd (pagefold marks memory, and ksmd finds equal pages in it), or auto (request if the kernel supports it)";
    }
    "judgement" "Judgement" "Which memory is worth merging." {
        "only" "--only <NAME>" only: Only, Any, = preset.only,
            "Which equal pages to merge: all, or zeros (we mark only memory with enough pages of zeros, but ksmd also \
             merges other equal pages there)";
    }
    "reserve" "Reserve"
        "Headroom for COW: a write to a merged page needs memory for a copy. See docs/guide.md. Reloaded by SIGHUP." {
        "keep" "--reserve <AMOUNT>" reserve: Keep, Any, = preset.reserve.keep,
            "Memory (including swap) to keep free for writes to merged pages; merging stops when less is free. A size \
             (2G), a share of memory (10%), or auto: the memory that such writes took in the worst hour (halved every \
             hour), at least 5 % of memory, but never more than the memory saved";
        "take-back" "--take-back" take_back: bool, Any, = preset.reserve.take_back,
            "When free memory is below the reserve, unmerge step by step what ksmd has merged. Unmerging itself takes \
             memory, so each step keeps at least half of the reserve free";
    }
    "deny" "Scope"
        "Programs that pagefold never touches, by base name, prefix with an asterisk, or path (a link stands for its \
         target). The default list has key agents, password managers, browsers and the like; see docs/guide.md. This \
         section also applies if the command line selects processes. Reloaded by SIGHUP." {
        "programs" "NAME" programs: Vec<String>, Programs, "[\"ssh-agent\", \"gpg-agent\", \"vault\"]" = denied(),
            "Programs never to touch; replaces the default list";
        "also" "--deny <NAME>" denied: Vec<String>, Programs, "[\"my-key-server\", \"wallet*\"]",
            "Never touch these programs either (in addition to the deny list): a base name, a prefix followed by *, a \
             path, or a workload as for --allow";
        "except" "--allow <NAME>" allowed: Vec<String>, Programs, "[\"chrome-headless\"]",
            "Merge these programs even if they're on the deny list or non-dumpable (daemons that drop root become \
             non-dumpable). Names of programs have no effect in containers. 'container web1', 'pod shop/cart-0', 'vm web1' \
             or 'unit web.service' allows a workload with all its programs";
        "workloads" "NAME" denied_workloads: Vec<String>, Workloads, "[\"vault.service\", \"vm web1\", \"container vault\"]",
            "Never touch these units, virtual machines, containers and pods, named as pagefold top shows them";
        "override-opt-outs" "--override-opt-out <NAME>" override_opt_outs: Vec<String>, List,
            "[\"batch.service\", \"web1\"]",
            "Merge memory even if its owner opted out: name the unit, virtual machine, cgroup or program";
    }
    "limits" "Limits"
        "Limits on pagefold's work on other processes, even if the governor allows more. Reloaded by SIGHUP." {
        "samples-per-second-per-process" "N" samples_per_second_per_process: u64, Count(range::PAGES),
            = preset.limits.pages_per_process, "The most pages per second that we read from one process";
        "samples-per-second" "N" samples_per_second: u64, Count(range::PAGES), = preset.limits.pages,
            "The most pages per second that we read from all processes together";
        "stops-per-second-per-process" "N" stops_per_second_per_process: u64, Count(range::STOPS_PER_PROCESS),
            = preset.limits.stops_per_process, "How many times per second we may stop one process";
        "stops-per-second" "N" stops_per_second: u64, Count(range::STOPS),
            = preset.limits.stops, "How many times per second we may stop processes, counting all of them";
        "moves-per-second" "N" moves_per_second: u64, Count(range::MOVES), = preset.limits.moves,
            "The most merged pages per second that we move to another memory node";
        "longest-stop" "DURATION" longest_stop: Duration, Time(range::LONGEST_STOP_NS),
            = Duration::from_nanos(preset.limits.longest_stop_ns), "The longest time for which we stop a process";
        "group" "list of tables" groups: Vec<Rule>, Rules(&["governor", "samples-per-second", "stops-per-second"]), "\
            [[limits.group]]\nname = \"batch\"\ncgroup = \"/sys/fs/cgroup/batch.slice\"\ngovernor = \"quiet\"\nstops-per-second = 5",
            "Limits for a group of processes. Give a name, one selector (cgroup, user, exe, unit, vm, container or pod), \
             and at least one limit (governor, samples-per-second or stops-per-second). The governor bounds pagefold's \
             CPU time for the group, not ksmd's. A process is in the first group that matches; the run's own limits \
             apply as well";
    }
    "domains" "Trust domains"
        "Memory is merged only within a trust domain, and ksmd merges only one domain. A process gets its domain \
         from the first of these that names one: the extended attribute user.pagefold.domain of its cgroup, or of \
         the nearest ancestor that has one; the rules below, in order; with by = \"user\", its user. All other \
         processes are in the domain \"default\"." {
        "by" "NAME" domains_by: DomainSource, Any, = DomainSource::default(),
            "Domain of processes without such an attribute or rule: cgroup-xattr (the domain \"default\"), or user (a domain \
             for each user)";
        "merge" "DOMAIN" merged_domain: String, Any, "\"customer-a\"",
            "The one trust domain that ksmd merges, instead of root's; all others are left alone. Merging on request \
             ignores this and merges within each domain. Reloaded by SIGHUP";
        "rule" "list of tables" domain_rules: Vec<Rule>, Rules(&[]), "\
            [[domains.rule]]\nname = \"customer-a\"\ncgroup = \"/sys/fs/cgroup/machine.slice/a.scope\"\n\
            [[domains.rule]]\nname = \"web\"\nuser = \"www-data\"\n\
            [[domains.rule]]\nname = \"caches\"\nexe = \"redis-server\"",
            "A trust domain: its name, and one of cgroup, user, exe, unit, vm, container and pod";
    }
    "numa" "NUMA" "Where merged pages live on machines with several memory nodes." {
        "placement" "--placement <NAME>" placement: Placement, Any, = Placement::default(),
            "Memory node for merged pages: fair (the node that uses a page; if several do, we split the pages evenly), \
             priority (split by nice values), local-only (never merge across nodes), or kernel (where ksmd leaves \
             them)";
        "domains" "table of NAME" placements: BTreeMap<String, Placement>, Any,
            "[numa.domains]\ncustomer-a = \"priority\"",
            "Placement by trust domain. local-only must be set for all domains or for none";
    }
    "audit" "Output"
        "A log with one line of JSON (schema pagefold.audit/1) for every span of memory that is marked or unmarked." {
        "file" "--audit <FILE>" audit: PathBuf, Any, "\"/var/log/pagefold/audit.jsonl\"",
            "Append one line of JSON to this file for every span of memory that is marked or unmarked";
    }
    "log" "Output" "What to write to standard error, which goes to the journal in a service. Reloaded by SIGHUP." {
        "level" "--log-level <LEVELS>" log: LogLevels, Any, = LogLevels::default(),
            "Log level: info (only the run's own messages), debug (also each step), or a level for each target \
             (such as info,ksm=debug). Targets are cycle, decision, event, scope, read, inject, ksm, control and files";
    }
    "metrics" "Output"
        "Metrics for Prometheus, over HTTP or in a file. Dry runs ignore this section. See docs/install.md and \
         pagefold-metrics(5)." {
        "address" "--metrics <ADDRESS>" metrics: SocketAddr, Any, "\"127.0.0.1:10045\"",
            "Serve metrics to Prometheus at this address, or at this port of 127.0.0.1";
        "textfile" "--metrics-file <FILE>" metrics_file: PathBuf, Any, "\"/run/pagefold/pagefold.prom\"",
            "Write metrics to this file, for node_exporter's textfile collector";
        "interval" "--metrics-interval <DURATION>" metrics_interval: Duration, Time(METRICS_INTERVAL_NS),
            = METRICS_INTERVAL, "Time between two writes of the metrics file";
    }
    "history" "Output"
        "Files that outlive a run: the savings over time, for pagefold top --since, and which memory is worth merging, for \
         the next run. Dry runs ignore this section." {
        "path" "--history <FILE>" history: PathBuf, Any, "\"/var/lib/pagefold/history\"",
            "Record savings in this file (371 KiB), which keeps a figure for each minute of the last day and each quarter \
             hour of the last 30 days. The service does so by default";
        "learned" "--learned <FILE>" learned: PathBuf, Any, "\"/var/lib/pagefold/learned.json\"",
            "Record in this file which memory is worth merging (no contents, no digests), so that the next run needn't \
             search all memory again. The service does so by default";
    }
    "fleet" "Fleet"
        "Sketches (samples of keyed page digests) of each workload's memory, to compare the workloads of several \
         hosts. Dry runs ignore this section. See fleet/README.md." {
        "directory" "--sketches <DIRECTORY>" sketches: PathBuf, Any, "\"/var/lib/pagefold/sketches\"",
            "Write a sketch of each workload's memory to HOST.parquet in this directory, for pagefold-fleet (schema \
             pagefold.sketch/1)";
        "key" "--fleet-key <FILE>" fleet_key: PathBuf, Any, "\"/etc/pagefold/fleet.key\"",
            "File with the key that all hosts of the fleet share: 64 hexadecimal digits, readable by root only";
        "host" "--fleet-host <NAME>" fleet_host: String, Any, "\"node-17\"",
            "This host's name in the fleet, instead of its host name";
        "sketch-interval" "--sketch-interval <DURATION>" sketch_interval: Duration, Time(SKETCH_INTERVAL_NS),
            = SKETCH_INTERVAL, "Time between two writes of the sketches (longer if reading all memory takes longer)";
    }
    "tuning" "Tuning"
        "Parameters of the papers' algorithms. Governors and presets set most of them together, and there's rarely a \
         reason to change one alone." {
        "top-share" "--top-share <PERCENT>" top_share: Permyriad, Share(range::TOP_SHARE), "20",
            "Limit on CPU time, as a share of one core; replaces the governor's (UKSM p)";
        "round" "--round <DURATION>" round: Duration, Time(range::ROUND_NS),
            "\"4s\"" = preset.round_ns.map(Duration::from_nanos),
            "Length of a sampling round, which overrides the governor's (t in the UKSM paper)";
        "levels" "--levels <N>" levels: u64, Count(range::LEVELS),
            = count(preset.levels), "Levels of the sampling ladder (UKSM N)";
        "duplicate-threshold" "--duplicate-threshold <PERCENT>" duplicate_threshold: Permyriad, Share(range::THRESHOLD),
            = preset.duplicate_threshold,
            "Read a region whole if at least this share of its sampled pages are duplicates (UKSM V_dup)";
        "cow-threshold" "--cow-threshold <PERCENT>" cow_threshold: Permyriad, Share(range::THRESHOLD),
            = preset.cow_threshold,
            "Don't merge a region if at least this share of its pages change between two visits; 100 also merges where \
             programs soon write merged pages (UKSM V_cow)";
        "lifetime" "--lifetime <DURATION>" lifetime: Duration, Time(range::LIFETIME_NS),
            = Duration::from_nanos(preset.lifetime_ns),
            "The age at which we merge a region that appeared during the run (UKSM V_life). Regions of unknown families \
             must also be older than two rounds, except with the preset sensitive";
        "local-latency" "DURATION" local_latency: Duration, Time(range::LATENCY_NS),
            = Duration::from_nanos(preset.latencies.local_ns.into()),
            "Time of a memory access to the process's own node (status derives the cost of remote pages from it)";
        "remote-latency" "DURATION" remote_latency: Duration, Time(range::LATENCY_NS),
            = Duration::from_nanos(preset.latencies.remote_ns.into()),
            "Time of a memory access to the nearest other node";
    }
}

const METRICS_INTERVAL_NS: RangeInclusive<u64> = 1_000_000_000..=3_600_000_000_000;
/// From once a minute to once a day.
const SKETCH_INTERVAL_NS: RangeInclusive<u64> = 60_000_000_000..=86_400_000_000_000;
/// Metrics are written this often by default.
pub const METRICS_INTERVAL: Duration = Duration::from_secs(15);
/// Sketches are written this often by default.
pub const SKETCH_INTERVAL: Duration = Duration::from_secs(3_600);

fn denied() -> Vec<String> {
    DEFAULT_DENIED.iter().map(|&name| name.to_owned()).collect()
}

/// All options, in the order of the file.
pub fn all() -> impl Iterator<Item = &'static OptionSpec> {
    SECTIONS.iter().flat_map(|section| section.options)
}

impl Options {
    /// The scope that these options select, plus the processes `pids`.
    pub fn scope(&self, pids: &[i32]) -> ScopeSpec {
        let names = [
            ("cgroup", &self.cgroups),
            ("user", &self.users),
            ("exe", &self.exes),
            ("unit", &self.units),
            ("vm", &self.vms),
            ("container", &self.containers),
            ("pod", &self.pods),
        ];
        let names = names.map(|(kind, names)| (kind, names.as_deref().unwrap_or_default()));
        let mut spec = ScopeSpec::of(pids, &names, self.all == Some(true));
        spec.0.extend(self.enabled.iter().flatten().cloned());
        spec
    }
}

impl OptionSpec {
    /// The flag without its dashes, if the option has a flag.
    pub fn flag(&self) -> Option<&'static str> {
        self.usage.strip_prefix("--")?.split(' ').next()
    }

    /// Whether `--help` and the manual omit the flag. Tuning flags are deprecated and work for one more release.
    pub fn is_hidden(&self) -> bool {
        self.section == "tuning"
    }

    /// The name of the option's value. A switch has none.
    pub fn value_name(&self) -> Option<&'static str> {
        let name = if self.usage.starts_with("--") { self.usage.split_once(' ')?.1 } else { self.usage };
        Some(name.trim_matches(['<', '>']))
    }

    /// The default as we show it to users, without quotes.
    pub fn default(&self) -> Option<String> {
        (self.default_in)(&Config::default()).map(|default| default.trim_matches('"').to_owned())
    }

    /// The option with its example, or else its default, as lines of a configuration file.
    pub fn in_file(&self) -> String {
        if self.example.contains('\n') {
            return self.example.to_owned();
        }
        let default = (self.default_in)(&Config::default()).unwrap_or_default();
        format!("{} = {}", self.key, if self.example.is_empty() { &default } else { self.example })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_a_key_of_its_own_and_a_default_or_an_example() {
        let mut keys: Vec<&str> = all().map(|option| option.key).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{keys:?}");
        for option in all() {
            let is_number = ["N", "PERCENT", "DURATION"].contains(&option.value_name().unwrap_or_default());
            assert_eq!(option.allowed.range().is_some(), is_number, "{}", option.key);
            assert!(option.default().is_some() || !option.example.is_empty(), "{}", option.key);
        }
    }
}
