//! What an experiment found, as it is written to JSON.

use crate::bench::page_tables::PageTableSample;
use crate::bench::sampler::{SamplerPoint, reached, thinned};
use crate::programs::Target;
use pagefold_workload::{ActivityCounters, Lifetime};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;

/// The schema's name and version.
pub const SCHEMA: &str = "pagefold.bench/1";

/// An experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct ExperimentReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Its name.
    pub experiment: &'static str,
    /// The claim it measures, and whose it is.
    pub claim: &'static str,
    /// Where.
    pub machine: MachineDescription,
    /// Sizes and times that were asked for.
    pub parameters: BTreeMap<&'static str, u64>,
    /// One entry for each policy that could be measured.
    pub runs: Vec<PolicyRun>,
    /// Figures that belong to no policy, by name with their unit.
    pub figures: BTreeMap<String, f64>,
    /// Curves that are no policy's, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub curves: BTreeMap<String, Vec<(f64, f64)>>,
    /// pagefold's figures divided by the peers'.
    pub ratios: BTreeMap<String, f64>,
    /// What was asked of the figures.
    pub bars: Vec<BarResult>,
    /// Policies that could not be measured, and why.
    pub failures: Vec<Failure>,
    /// Figures to be drawn beside each other.
    #[serde(skip)]
    pub pictures: Vec<Picture>,
}

/// Figures to be drawn beside each other.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// The end of the file's name.
    pub name: &'static str,
    /// What it shows.
    pub title: String,
    /// The unit, and what else must be known.
    pub subtitle: String,
    /// Names and figures.
    pub rows: Vec<(String, f64)>,
}

impl ExperimentReport {
    /// An empty one.
    pub fn new(experiment: &'static str, claim: &'static str) -> Self {
        Self {
            schema: SCHEMA,
            experiment,
            claim,
            machine: MachineDescription::this(),
            parameters: BTreeMap::new(),
            runs: Vec::new(),
            figures: BTreeMap::new(),
            curves: BTreeMap::new(),
            ratios: BTreeMap::new(),
            bars: Vec::new(),
            failures: Vec::new(),
            pictures: Vec::new(),
        }
    }

    /// Adds a figure.
    pub fn figure(&mut self, name: impl Into<String>, value: f64) {
        self.figures.insert(name.into(), value);
    }

    /// The run of a policy.
    pub fn run(&self, policy: &str) -> Option<&PolicyRun> {
        self.runs.iter().find(|run| run.policy == policy)
    }

    /// Whether any policy is known to have saved anything at some time: otherwise there is nothing to draw.
    pub fn saved_anything(&self) -> bool {
        self.runs.iter().any(|run| run.saved_bytes_max > 0 && !run.curve.is_empty())
    }

    /// Whether everything was measured and every bar met.
    pub fn passed(&self) -> bool {
        self.failures.is_empty() && self.bars.iter().all(|bar| bar.met)
    }

    /// Works out `subject`'s figures against those of every other policy.
    pub fn compare(&mut self, subject: &str) {
        let Some(own) = self.run(subject).cloned() else { return };
        for peer in self.runs.iter().filter(|run| run.policy != subject) {
            let mut put = |what: &str, own: Option<f64>, peers: Option<f64>| {
                if let (Some(own), Some(peers)) = (own, peers.filter(|peers| *peers > 0.0)) {
                    self.ratios.insert(format!("{what}_vs_{}", peer.policy), own / peers);
                }
            };
            put("saved", Some(own.saved_bytes as f64), Some(peer.saved_bytes as f64));
            put("cpu", Some(own.cpu_seconds), Some(peer.cpu_seconds));
            put("saved_per_cpu_second", own.mib_per_cpu_second(), peer.mib_per_cpu_second());
            put("seconds_to_90_percent", own.seconds_to_90_percent, peer.seconds_to_90_percent);
            // Over a fixed time a peer's scans after its merges weigh most; this leaves them out (and pagefold's own CPU).
            let (own, peers) = (own.cpu_ksmd_seconds_to_90_percent, peer.cpu_ksmd_seconds_to_90_percent);
            put("cpu_ksmd_to_90_percent", own, peers);
        }
    }

    /// Adds a bar on a ratio or figure, if it could be measured.
    pub fn bar(&mut self, name: impl Into<String>, bar: Limit, measured: Option<f64>) {
        if let Some(measured) = measured {
            let met = match bar {
                Limit::AtLeast(limit) => measured >= limit,
                Limit::AtMost(limit) => measured <= limit,
            };
            self.bars.push(BarResult { name: name.into(), bar, measured, met });
        }
    }

    /// Adds the bar that every run must meet: the data of all targets is right at all times.
    pub fn bar_on_answers(&mut self) {
        if !self.runs.is_empty() {
            let right = self.runs.iter().filter(|run| run.answers_correct.always()).count();
            let share = right as f64 / self.runs.len() as f64;
            self.bar(
                "share of runs in which all targets answered correctly throughout",
                Limit::AtLeast(1.0),
                Some(share),
            );
        }
    }
}

/// The machine.
#[derive(Clone, Debug, Serialize)]
pub struct MachineDescription {
    /// The kernel's release.
    pub kernel: String,
    /// The processor's name.
    pub cpu: String,
    /// Processors.
    pub cpus: usize,
    /// Memory.
    pub memory_bytes: u64,
    /// `transparent_hugepage/enabled`.
    pub transparent_hugepages: String,
    /// The version of pagefold.
    pub pagefold: &'static str,
}

impl MachineDescription {
    /// Memory that can be had without swapping, by the kernel's estimate; zero where it does not tell.
    pub fn available_mib() -> u64 {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
        line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) / 1024
    }

    /// This one. What cannot be read is empty or zero.
    pub fn this() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let field = |path: &str, name: &str| {
            let text = text(path);
            let value = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            value.trim_start_matches([' ', '\t', ':']).to_owned()
        };
        let memory_kib = field("/proc/meminfo", "MemTotal:");
        Self {
            kernel: text("/proc/sys/kernel/osrelease"),
            cpu: field("/proc/cpuinfo", "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_kib.trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) * 1024,
            transparent_hugepages: pagefold_linux::ksm::chosen(&text("/sys/kernel/mm/transparent_hugepage/enabled"))
                .unwrap_or_default()
                .to_owned(),
            pagefold: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// What came of a policy.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyRun {
    /// The policy.
    pub policy: String,
    /// Saved at the end.
    pub saved_bytes: u64,
    /// Saved at the best moment.
    pub saved_bytes_max: u64,
    /// CPU time, ksmd's and pagefold's.
    pub cpu_seconds: f64,
    /// CPU time of pagefold and its children.
    pub cpu_pagefold_seconds: f64,
    /// CPU time of ksmd.
    pub cpu_ksmd_seconds: f64,
    /// How long it was watched.
    pub seconds: f64,
    /// When it had saved 90 % of what it saved at the end.
    pub seconds_to_90_percent: Option<f64>,
    /// What ksmd had spent by then.
    pub cpu_ksmd_seconds_to_90_percent: Option<f64>,
    /// What ksmd spends on each further scan of all that is marked, when nothing is left to merge.
    pub cpu_ksmd_seconds_per_later_scan: Option<f64>,
    /// Memory marked, where we marked it.
    pub marked_bytes: Option<u64>,
    /// What merging all that is equal would save, where every page was read.
    pub savable_bytes: Option<u64>,
    /// Whether the targets hold the right data.
    pub answers_correct: Answers,
    /// Seconds and bytes saved.
    pub curve: Vec<(f64, u64)>,
    /// What is merged by the targets' page tables, where those were read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub in_page_tables: Vec<PageTableSample>,
    /// The lives of memory that came and went meanwhile.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lives: Vec<Lifetime>,
    /// Where the pages of each program are, on a machine with several memory nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<Placed>,
    /// All that was sampled.
    #[serde(skip)]
    pub points: Vec<SamplerPoint>,
    /// What targets had done by themselves before and after.
    #[serde(skip)]
    pub counters: Vec<(ActivityCounters, ActivityCounters)>,
    /// What pagefold says itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<serde_json::Value>,
}

impl PolicyRun {
    /// Takes in what was sampled.
    pub fn take_in(&mut self, points: &[SamplerPoint]) {
        let Some(last) = points.last() else { return };
        self.saved_bytes = last.saved_bytes;
        self.saved_bytes_max = points.iter().map(|point| point.saved_bytes).max().unwrap_or(0);
        self.cpu_ksmd_seconds = last.ksmd_seconds;
        self.cpu_seconds = self.cpu_ksmd_seconds + self.cpu_pagefold_seconds;
        self.seconds = last.seconds;
        let most = reached(points, 0.9, self.saved_bytes);
        self.seconds_to_90_percent = most.map(|point| point.seconds);
        self.cpu_ksmd_seconds_to_90_percent = most.map(|point| point.ksmd_seconds);
        self.curve = thinned(points);
        self.points = points.to_vec();
    }

    /// Takes in what the targets' page tables showed, which is truer than KSM's counters where copies are broken.
    pub fn take_looks(&mut self, looks: Vec<PageTableSample>) {
        let Some(last) = looks.last() else { return };
        self.saved_bytes = last.saved_bytes;
        self.saved_bytes_max = looks.iter().map(|look| look.saved_bytes).max().unwrap_or(0);
        self.curve = looks.iter().map(|look| (look.seconds, look.saved_bytes)).collect();
        let most = looks.iter().find(|look| look.saved_bytes as f64 >= 0.9 * last.saved_bytes.max(1) as f64);
        (self.seconds_to_90_percent, self.cpu_ksmd_seconds_to_90_percent) = (most.map(|look| look.seconds), None);
        self.in_page_tables = looks;
    }

    /// The first moment at which `share` of `whole` bytes were saved.
    pub fn reaching(&self, share: f64, whole: u64) -> Option<SamplerPoint> {
        reached(&self.points, share, whole)
    }

    /// MiB saved at most within so many seconds.
    pub fn saved_mib_within(&self, seconds: f64) -> f64 {
        let in_time = self.curve.iter().take_while(|&&(at, _)| at <= seconds).map(|&(_, bytes)| bytes);
        in_time.max().unwrap_or(0) as f64 / 1_048_576.0
    }

    /// What a second of CPU time saved.
    pub fn mib_per_cpu_second(&self) -> Option<f64> {
        (self.cpu_seconds > 0.0).then(|| self.saved_bytes as f64 / 1_048_576.0 / self.cpu_seconds)
    }
}

/// The placement of a program's pages after merging, on a machine with several memory nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The node where it runs.
    pub home: usize,
    /// The kernel's distances from there to each node: 10 to its own.
    pub distances: Vec<u32>,
    /// Merged pages on each node.
    pub merged: Vec<u64>,
    /// The node of each page in the order of addresses, merged or not: one base-36 digit each.
    pub pages: String,
}

impl Placed {
    /// The digit of a node.
    pub fn digit(node: usize) -> Option<char> {
        char::from_digit(u32::try_from(node).ok()?, 36)
    }

    /// The share of its merged pages on its own node.
    pub fn local_share(&self) -> Option<f64> {
        let all: u64 = self.merged.iter().sum();
        (all > 0).then(|| self.merged.get(self.home).copied().unwrap_or(0) as f64 / all as f64)
    }
}

/// Whether all targets answered as at the first check of the experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// Before anything was marked.
    pub before: bool,
    /// With the pages merged.
    pub during: bool,
    /// With everything given back.
    pub after: bool,
}

impl Answers {
    /// All three.
    pub fn always(self) -> bool {
        self.before && self.during && self.after
    }
}

/// The answers of all targets, in order. An answer that fails counts as wrong, and is told on stderr.
pub fn answers(targets: &mut [Box<dyn Target>]) -> Vec<Option<String>> {
    let check = |target: &mut Box<dyn Target>| match target.check() {
        Ok(answer) => Some(answer),
        Err(error) => {
            eprintln!("{} {}: {error:#}", target.name(), target.pid());
            None
        }
    };
    targets.iter_mut().map(check).collect()
}

/// Whether these answers are the expected ones.
pub fn agree(expected: &[Option<String>], answers: &[Option<String>]) -> bool {
    expected == answers && answers.iter().all(Option::is_some)
}

/// What is asked of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Not below.
    AtLeast(f64),
    /// Not above.
    AtMost(f64),
}

/// A figure and what is asked of it.
#[derive(Clone, Debug, Serialize)]
pub struct BarResult {
    /// What.
    pub name: String,
    /// What is asked.
    pub bar: Limit,
    /// What was measured.
    pub measured: f64,
    /// Whether that is enough.
    pub met: bool,
}

/// A policy that could not be measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The policy.
    pub policy: String,
    /// Why.
    pub error: String,
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    fn run(policy: &str, saved_bytes: u64, ksmd: f64) -> PolicyRun {
        PolicyRun {
            policy: policy.into(),
            saved_bytes,
            cpu_ksmd_seconds: ksmd,
            cpu_seconds: ksmd,
            ..PolicyRun::default()
        }
    }

    #[test]
    fn a_run_takes_its_figures_from_the_points() {
        let point = |seconds, saved_bytes, ksmd_seconds| SamplerPoint {
            seconds,
            saved_bytes,
            ksmd_seconds,
            ..SamplerPoint::default()
        };
        let mut run = PolicyRun { cpu_pagefold_seconds: 0.5, ..PolicyRun::default() };
        run.take_in(&[point(0.0, 0, 0.0), point(1.0, 95, 0.25), point(2.0, 120, 0.75), point(3.0, 100, 1.0)]);
        assert_eq!((run.saved_bytes, run.saved_bytes_max), (100, 120));
        assert_eq!((run.cpu_seconds, run.seconds), (1.5, 3.0));
        assert_eq!((run.seconds_to_90_percent, run.cpu_ksmd_seconds_to_90_percent), (Some(1.0), Some(0.25)));
        let mut nothing = PolicyRun::default();
        nothing.take_in(&[point(0.0, 0, 0.0)]);
        assert_eq!((nothing.seconds_to_90_percent, nothing.mib_per_cpu_second()), (None, None));
    }

    #[test]
    fn page_tables_are_believed_over_counters() {
        let look = |seconds, saved_bytes| PageTableSample { seconds, saved_bytes, merged_pages: 0 };
        let mut run = PolicyRun { seconds_to_90_percent: Some(0.1), ..run("p", 7, 1.0) };
        run.take_looks(Vec::new());
        assert_eq!(run.saved_bytes, 7);
        run.take_looks(vec![look(0.0, 0), look(1.0, 100), look(2.0, 50)]);
        assert_eq!((run.saved_bytes, run.saved_bytes_max, run.seconds_to_90_percent), (50, 100, Some(1.0)));
        assert_eq!(run.curve, [(0.0, 0), (1.0, 100), (2.0, 50)]);
        run.take_looks(vec![look(0.0, 0)]);
        assert_eq!(run.seconds_to_90_percent, None);
    }

    #[test]
    fn ratios_are_the_subjects_over_the_peers_and_bars_can_fail() {
        let mut report = ExperimentReport::new("x", "y");
        report.runs = vec![run("pagefold", 100 << 20, 2.0), run("peer", 200 << 20, 40.0), run("none", 0, 0.0)];
        report.compare("pagefold");
        assert_eq!(report.ratios["saved_vs_peer"], 0.5);
        assert_eq!(report.ratios["cpu_vs_peer"], 0.05);
        assert_eq!(report.ratios["saved_per_cpu_second_vs_peer"], 10.0);
        assert!(
            !report.ratios.contains_key("saved_vs_none")
                && !report.ratios.contains_key("seconds_to_90_percent_vs_peer")
        );
        report.bar("few", Limit::AtMost(0.05), Some(0.05));
        report.bar("unknown", Limit::AtMost(0.05), None);
        assert!(report.passed() && report.bars.len() == 1);
        report.bar("many", Limit::AtLeast(1.0), Some(0.99));
        assert!(!report.passed());
    }

    #[test]
    fn wrong_and_missing_answers_do_not_agree() {
        let right = [Some("a".to_owned()), Some("b".to_owned())];
        assert!(agree(&right, &right.clone()));
        assert!(!agree(&right, &[Some("a".to_owned()), Some("c".to_owned())]));
        assert!(!agree(&[None], &[None]));
        let mut report = ExperimentReport::new("x", "y");
        report.runs.push(PolicyRun::default());
        report.bar_on_answers();
        assert!(!report.passed());
    }

    #[test]
    fn the_json_has_the_schemas_names() {
        let mut report = ExperimentReport::new("x", "y");
        report.runs.push(PolicyRun { curve: vec![(0.5, 7)], ..run("p", 1, 1.0) });
        report.bar("b", Limit::AtLeast(2.0), Some(1.0));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["schema"], "pagefold.bench/1");
        assert_eq!(json["runs"][0]["curve"], serde_json::json!([[0.5, 7]]));
        assert_eq!(json["bars"][0]["bar"], serde_json::json!({"at_least": 2.0}));
        assert_eq!(json["bars"][0]["met"], false);
        for field in ["experiment", "claim", "machine", "ratios"] {
            assert!(!json[field].is_null(), "{field}");
        }
        for field in ["saved_bytes", "cpu_seconds", "cpu_pagefold_seconds", "cpu_ksmd_seconds"] {
            assert!(json["runs"][0][field].is_number(), "{field}");
        }
    }
}
