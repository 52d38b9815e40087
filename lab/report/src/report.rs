//! The result of an experiment, as written to JSON.

use crate::activity::{ActivityCounters, Lifetime};
use crate::events::KernelEvents;
use crate::latencies::Latencies;
use crate::metric::{self, Metric};
use crate::points::PageTableSample;
use crate::points::{SamplerPoint, reached, thinned};
use pagefold_engine::units::{Bytes, Pages};
use pagefold_procmem::os::fields::{chosen, field};
use pagefold_procmem::os::pressure::parse_meminfo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// The schema's name and version.
pub const SCHEMA: &str = "pagefold.bench/1";

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExperimentReport {
    pub schema: String,
    pub experiment: String,
    /// The claim that the experiment measures, and its source.
    pub claim: String,
    pub machine: MachineDescription,
    /// Sizes and times of the experiment.
    pub parameters: BTreeMap<String, u64>,
    /// One entry for each policy measured.
    pub runs: Vec<PolicyRun>,
    /// Other figures. Each key is a name that includes the unit.
    pub figures: BTreeMap<String, f64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub curves: BTreeMap<String, Vec<(f64, f64)>>,
    /// pagefold's figures divided by the peers'.
    pub ratios: BTreeMap<String, f64>,
    /// Required values, and whether they were met.
    pub bars: Vec<BarResult>,
    pub failures: Vec<Failure>,
    /// Bar charts special to the experiment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<Picture>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies: Vec<Latencies>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Picture {
    pub title: String,
    /// The unit and other conditions.
    pub subtitle: String,
    /// The bars: names and values.
    pub rows: Vec<(String, f64)>,
}

impl ExperimentReport {
    pub fn new(experiment: &str, claim: &str) -> Self {
        let experiment = experiment.to_owned();
        let claim = claim.to_owned();
        let machine = MachineDescription::this();
        Self { schema: SCHEMA.to_owned(), experiment, claim, machine, ..Self::default() }
    }

    /// Adds sizes and times of the experiment.
    pub fn parameters(&mut self, parameters: impl IntoIterator<Item = (&'static str, u64)>) {
        for (name, value) in parameters {
            self.parameters.insert(name.to_owned(), value);
        }
    }

    /// Adds a figure. Leaves out one that isn't a number: JSON has none.
    pub fn figure(&mut self, name: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.figures.insert(name.into(), value);
        }
    }

    pub fn put_ratio(&mut self, name: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.ratios.insert(name.into(), value);
        }
    }

    /// Adds a bar chart: its title, the unit and other conditions, and the bars.
    pub fn picture(&mut self, title: &str, subtitle: impl Into<String>, rows: Vec<(String, f64)>) {
        self.pictures.push(Picture { title: title.to_owned(), subtitle: subtitle.into(), rows });
    }

    pub fn ratio(&self, metric: Metric, peer: &str) -> Option<f64> {
        self.ratios.get(&metric.of([peer])).copied()
    }

    pub fn figure_of<const N: usize>(&self, metric: Metric, what: [&str; N]) -> Option<f64> {
        self.figures.get(&metric.of(what)).copied()
    }

    pub fn run(&self, policy: &str) -> Option<&PolicyRun> {
        self.runs.iter().find(|run| run.policy == policy)
    }

    /// Whether any policy saved anything; otherwise there is nothing to draw.
    pub fn saved_anything(&self) -> bool {
        self.runs.iter().any(|run| run.saved_bytes_max > 0 && !run.curve.is_empty())
    }

    pub fn passed(&self) -> bool {
        self.failures.is_empty() && self.bars.iter().all(|bar| bar.met)
    }

    /// Computes the ratios of `subject`'s figures to every other policy's.
    pub fn compare(&mut self, subject: &str) {
        let Some(own) = self.run(subject) else { return };
        let mut ratios = Vec::new();
        for peer in &self.runs {
            if peer.policy == subject {
                continue;
            }
            for (metric, of) in COMPARED {
                match (of(own), of(peer)) {
                    (Some(own), Some(peers)) if peers > 0.0 => ratios.push((metric.of([&peer.policy]), own / peers)),
                    _ => {}
                }
            }
        }
        self.ratios.extend(ratios);
    }

    /// Adds a bar for a ratio or figure, if we measured it.
    pub fn bar(&mut self, name: impl Into<String>, bar: Limit, measured: Option<f64>) {
        if let Some(measured) = measured {
            let met = match bar {
                Limit::AtLeast(limit) => measured >= limit,
                Limit::AtMost(limit) => measured <= limit,
            };
            self.bars.push(BarResult { name: name.into(), bar, measured, met });
        }
    }

    /// Adds the bar that the targets' data is intact throughout every run.
    pub fn bar_on_answers(&mut self) {
        if !self.runs.is_empty() {
            let right = self.runs.iter().filter(|run| run.answers_correct.always()).count();
            let share = right as f64 / self.runs.len() as f64;
            self.bar("share of runs in which all targets always answered correctly", Limit::AtLeast(1.0), Some(share));
        }
    }
}

type Compared = (Metric, fn(&PolicyRun) -> Option<f64>);

/// The figures of a run that we divide by its peers'.
const COMPARED: [Compared; 5] = [
    (metric::SAVED_VS, |run| Some(run.saved_bytes as f64)),
    (metric::CPU_VS, |run| Some(run.cpu_seconds)),
    (metric::SAVED_PER_CPU_SECOND_VS, PolicyRun::mib_per_cpu_second),
    (metric::SECONDS_TO_90_PERCENT_VS, |run| run.seconds_to_90_percent),
    // This leaves out a peer's scans after its merges, which weigh most over a fixed time (and pagefold's own CPU
    // time).
    (metric::CPU_KSMD_TO_90_PERCENT_VS, |run| run.cpu_ksmd_seconds_to_90_percent),
];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MachineDescription {
    pub kernel: String,
    pub cpu: String,
    pub cpus: usize,
    pub memory_bytes: u64,
    /// `transparent_hugepage/enabled`.
    pub transparent_hugepages: String,
    pub pagefold: String,
}

impl MachineDescription {
    /// Available memory by the kernel's estimate (`MemAvailable`), MiB; zero if unknown.
    pub fn available_mib() -> u64 {
        Self::memory().1.bytes().0 >> 20
    }

    /// All memory, and the available part; zero if unknown.
    fn memory() -> (Pages, Pages) {
        let (total, available, _) = parse_meminfo(&fs::read("/proc/meminfo").unwrap_or_default()).unwrap_or_default();
        (total, available)
    }

    /// Describes this machine. Unreadable values are empty or zero.
    pub fn this() -> Self {
        let cpus = text("/proc/cpuinfo");
        let cpu = field(cpus.as_bytes(), "model name").map(String::from_utf8_lossy);
        let hugepages = text("/sys/kernel/mm/transparent_hugepage/enabled");
        Self {
            kernel: text("/proc/sys/kernel/osrelease"),
            cpu: cpu.unwrap_or_default().trim_start_matches(": ").to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: Self::memory().0.bytes().0,
            transparent_hugepages: chosen(&hugepages).unwrap_or_default().to_owned(),
            pagefold: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// A file's text; empty if we can't read it.
fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The name of a policy's run in a round, for experiments that take turns.
pub fn in_round(policy: &str, round: u64) -> String {
    if round == 1 { policy.to_owned() } else { format!("{policy}{ROUND}{round}") }
}

/// Whether a run is from a later round: the first round stands for its policy.
pub fn is_of_later_round(policy: &str) -> bool {
    policy.contains(ROUND)
}

/// The policy of a run, without its round.
pub fn without_round(policy: &str) -> &str {
    policy.split_once(ROUND).map_or(policy, |(policy, _)| policy)
}

const ROUND: &str = ", round ";

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyRun {
    /// The policy's name, ending with the set of programs if there are several.
    pub policy: String,
    /// The programs beside the policy, as the end of its name. We can only compare runs with the same set.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub set: String,
    /// Memory saved at the end.
    pub saved_bytes: u64,
    /// The most memory saved at any time.
    pub saved_bytes_max: u64,
    pub cpu_seconds: f64,
    /// CPU time of pagefold and its children.
    pub cpu_pagefold_seconds: f64,
    pub cpu_ksmd_seconds: f64,
    /// How long we sampled it.
    pub seconds: f64,
    /// Time until the policy had saved 90 % of its final saving.
    pub seconds_to_90_percent: Option<f64>,
    /// CPU time of ksmd until then.
    pub cpu_ksmd_seconds_to_90_percent: Option<f64>,
    /// CPU time of ksmd for each further scan, once nothing is left to merge.
    pub cpu_ksmd_seconds_per_later_scan: Option<f64>,
    /// Memory marked, if the experiment marked it.
    pub marked_bytes: Option<u64>,
    /// Memory that merging all duplicates would save, if known.
    pub savable_bytes: Option<u64>,
    /// A note for reading the figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// The kernel's counts until the last sample, on the whole machine.
    pub events: KernelEvents,
    /// The peak memory of pagefold and its children, added up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_peak_bytes: Option<u64>,
    /// Merged memory that the programs took back by writing to it. Absent if we can't tell this from unmerged memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_back_bytes: Option<u64>,
    /// Whether the targets' data was intact.
    pub answers_correct: Answers,
    /// Bytes saved over time, in seconds.
    pub curve: Vec<(f64, u64)>,
    /// Merged pages by the targets' page tables, if we read these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub in_page_tables: Vec<PageTableSample>,
    /// Lifetimes of short-lived memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lives: Vec<Lifetime>,
    /// The placement of each program's pages, on a machine with several memory nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<Placed>,
    /// The raw samples, 20 a second.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<SamplerPoint>,
    /// When it began, after we set the peers' marks.
    #[serde(skip)]
    pub began: Option<Instant>,
    /// The targets' activity counters before and after.
    #[serde(skip)]
    pub counters: Vec<(ActivityCounters, ActivityCounters)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<serde_json::Value>,
}

impl PolicyRun {
    /// Records which programs it ran beside.
    pub fn beside(&mut self, set: &str) {
        self.policy += set;
        set.clone_into(&mut self.set);
    }

    pub fn set_samples(&mut self, points: &[SamplerPoint]) {
        let Some(last) = points.last() else { return };
        self.saved_bytes = last.saved_bytes;
        self.saved_bytes_max = points.iter().map(|point| point.saved_bytes).max().unwrap_or(0);
        self.cpu_ksmd_seconds = last.ksmd_seconds;
        self.cpu_seconds = self.cpu_ksmd_seconds + self.cpu_pagefold_seconds;
        self.seconds = last.seconds;
        self.events = last.events;
        self.pagefold_peak_bytes = if last.daemon_peak_bytes > 0 { Some(last.daemon_peak_bytes) } else { None };
        self.taken_back_bytes =
            if self.has_unmarked() { None } else { last.events.cow_breaks.map(|pages| Pages(pages).bytes().0) };
        let most = reached(points, 0.9, self.saved_bytes);
        self.seconds_to_90_percent = most.map(|point| point.seconds);
        self.cpu_ksmd_seconds_to_90_percent = most.map(|point| point.ksmd_seconds);
        self.curve = thinned(points);
        self.points = points.to_vec();
    }

    /// Sets the samples, and pagefold's CPU time by its own clock: the time of ended children would include the
    /// programs it runs beside.
    pub fn set_own_samples(&mut self, points: &[SamplerPoint]) {
        self.cpu_pagefold_seconds = points.last().map_or(0.0, |last| last.daemon_seconds);
        self.set_samples(points);
    }

    /// Forgets the savings over time if memory comes and goes: KSM's counters include vanished memory until the next
    /// ksmd scan, so they mean nothing.
    pub fn forget_curve(&mut self) {
        self.curve = Vec::new();
        self.seconds_to_90_percent = None;
        self.cpu_ksmd_seconds_to_90_percent = None;
    }

    /// Whether pagefold has unmarked memory, which also makes copies of merged pages. Without a summary it hasn't.
    fn has_unmarked(&self) -> bool {
        self.summary.as_ref().is_some_and(|summary| summary["unmarked_bytes"] != 0)
    }

    /// Sets the savings from samples of the targets' page tables. If COW breaks merges, they're more accurate than
    /// KSM's counters.
    pub fn set_page_table_samples(&mut self, samples: Vec<PageTableSample>) {
        let Some(last) = samples.last() else { return };
        self.saved_bytes = last.saved_bytes;
        self.saved_bytes_max = samples.iter().map(|sample| sample.saved_bytes).max().unwrap_or(0);
        self.curve = samples.iter().map(|sample| (sample.seconds, sample.saved_bytes)).collect();
        let most = samples.iter().find(|sample| sample.saved_bytes as f64 >= 0.9 * last.saved_bytes.max(1) as f64);
        self.seconds_to_90_percent = most.map(|sample| sample.seconds);
        self.cpu_ksmd_seconds_to_90_percent = None;
        self.in_page_tables = samples;
    }

    /// The first sample with at least `share` of `whole` bytes saved.
    pub fn reaching(&self, share: f64, whole: u64) -> Option<SamplerPoint> {
        reached(&self.points, share, whole)
    }

    /// The most memory saved within the first `seconds`, MiB.
    pub fn saved_mib_within(&self, seconds: f64) -> f64 {
        let in_time = self.curve.iter().take_while(|&&(at, _)| at <= seconds);
        let most = in_time.map(|&(_, bytes)| bytes).max().unwrap_or(0);
        Bytes(most).mib()
    }

    /// The most memory saved on the curve, bytes. `None` without a curve.
    pub fn most_saved(&self) -> Option<u64> {
        self.curve.iter().map(|&(_, bytes)| bytes).max()
    }

    /// MiB saved for each second of CPU time.
    pub fn mib_per_cpu_second(&self) -> Option<f64> {
        if self.cpu_seconds > 0.0 { Some(Bytes(self.saved_bytes).mib() / self.cpu_seconds) } else { None }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The node that it runs on.
    pub home: usize,
    /// The kernel's distances from there to each node (10 to itself).
    pub distances: Vec<u32>,
    /// The number of merged pages on each node.
    pub merged: Vec<u64>,
    /// The node of each page by address, merged or not: one base-36 digit each.
    pub pages: String,
}

impl Placed {
    /// The digit that stands for a node.
    pub fn digit(node: usize) -> Option<char> {
        char::from_digit(u32::try_from(node).ok()?, 36)
    }

    /// The share of its merged pages on its own node.
    pub fn local_share(&self) -> Option<f64> {
        let all: u64 = self.merged.iter().sum();
        let local = self.merged.get(self.home).copied().unwrap_or(0);
        if all > 0 { Some(local as f64 / all as f64) } else { None }
    }
}

/// Whether all targets gave the same answers as at the first check of the experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// The answers before we marked anything.
    pub before: bool,
    /// The answers while pages were merged.
    pub during: bool,
    /// The answers after we unmerged everything.
    pub after: bool,
}

impl Answers {
    pub fn always(self) -> bool {
        self.before && self.during && self.after
    }
}

pub fn agree(expected: &[Option<String>], answers: &[Option<String>]) -> bool {
    expected == answers && answers.iter().all(Option::is_some)
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BarResult {
    pub name: String,
    pub bar: Limit,
    pub measured: f64,
    pub met: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    pub policy: String,
    pub error: String,
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
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
    fn figures_of_a_run_come_from_its_samples() {
        let point = |seconds, saved_bytes, ksmd_seconds| SamplerPoint {
            seconds,
            saved_bytes,
            ksmd_seconds,
            ..SamplerPoint::default()
        };
        let mut run = PolicyRun { cpu_pagefold_seconds: 0.5, ..PolicyRun::default() };
        run.set_samples(&[point(0.0, 0, 0.0), point(1.0, 95, 0.25), point(2.0, 120, 0.75), point(3.0, 100, 1.0)]);
        assert_eq!((run.saved_bytes, run.saved_bytes_max), (100, 120));
        assert_eq!((run.cpu_seconds, run.seconds), (1.5, 3.0));
        assert_eq!((run.seconds_to_90_percent, run.cpu_ksmd_seconds_to_90_percent), (Some(1.0), Some(0.25)));
        let mut nothing = PolicyRun::default();
        nothing.set_samples(&[point(0.0, 0, 0.0)]);
        assert_eq!((nothing.seconds_to_90_percent, nothing.mib_per_cpu_second()), (None, None));
    }

    #[test]
    fn page_tables_take_precedence_over_counters() {
        let sample = |seconds, saved_bytes| PageTableSample { seconds, saved_bytes, merged_pages: 0 };
        let mut run = PolicyRun { seconds_to_90_percent: Some(0.1), ..run("p", 7, 1.0) };
        run.set_page_table_samples(Vec::new());
        assert_eq!(run.saved_bytes, 7);
        run.set_page_table_samples(vec![sample(0.0, 0), sample(1.0, 100), sample(2.0, 50)]);
        assert_eq!((run.saved_bytes, run.saved_bytes_max, run.seconds_to_90_percent), (50, 100, Some(1.0)));
        assert_eq!(run.curve, [(0.0, 0), (1.0, 100), (2.0, 50)]);
        run.set_page_table_samples(vec![sample(0.0, 0)]);
        assert_eq!(run.seconds_to_90_percent, None);
    }

    #[test]
    fn ratios_are_subject_over_peer_and_bars_can_fail() {
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
    fn the_json_follows_the_schema() {
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
