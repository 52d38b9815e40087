//! The report on all results in a directory. It starts with pagefold's losses.

use crate::charts::{Bar, Curve, Lines, Scale, bars, number};
use crate::claims::{CLAIMS, Measured, Verdict};
use crate::density::Density;
use crate::document::{Document, Grid};
use crate::latencies::Histogram;
use crate::measures::{EFFECTS, Measures, QUANTITIES, Quantity, Spread, is_peer, ratio};
use crate::points::thinned;
use crate::policy::{PEERS, colours, is_ours};
use crate::report::{BarResult, ExperimentReport, Limit, PolicyRun, without_round};
use crate::results::Finished;
use pagefold_engine::units::Bytes;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A ratio above this counts as a loss. Times vary from run to run.
const TOLERANCE: f64 = 1.05;
/// Memory saved varies less.
const TOLERANCE_OF_SAVINGS: f64 = 1.01;
/// Points of a drawn curve.
const POINTS: usize = 400;
/// The start of an axis of time: samples are 50 ms apart.
const FIRST_SECONDS: f64 = 0.1;
/// The start of an axis of CPU seconds.
const FIRST_CPU_SECONDS: f64 = 0.01;

type Column = (&'static str, fn(&Measures) -> Option<f64>);

/// The columns of an experiment's table, after the policy.
const COLUMNS: [Column; 8] = [
    ("MiB saved", |measures| Some(measures.saved_mib)),
    ("s to 50 %", |measures| measures.seconds_to[0]),
    ("s to 90 %", |measures| measures.seconds_to[1]),
    ("s to 99 %", |measures| measures.seconds_to[2]),
    ("CPU s to 90 %", |measures| measures.cpu_to[1]),
    ("CPU s to 99 %", |measures| measures.cpu_to[2]),
    ("% of a core afterwards", |measures| measures.percent_after),
    ("MiB/CPU s to 90 %", |measures| measures.mib_per_cpu_second),
];

struct Repetitions<'a> {
    name: &'a str,
    reports: Vec<&'a ExperimentReport>,
}

pub fn document(all: &[Finished], density: Option<&Density>) -> Document {
    let mut experiments: Vec<Repetitions<'_>> = Vec::new();
    for Finished { report, .. } in all {
        match experiments.last_mut() {
            Some(last) if last.name == report.experiment => last.reports.push(report),
            _ => experiments.push(Repetitions { name: &report.experiment, reports: vec![report] }),
        }
    }
    let quick = all.iter().any(|one| one.options.quick);
    let mut page = Document::new("pagefold measured against its peers");
    page.text(&conditions(all));
    if quick {
        page.text("A quick run: it shows that everything works. Speeds mean nothing, and no claim is judged.");
    }
    describe_losses(&experiments, &mut page);
    describe_claims(all, quick, &mut page);
    for experiment in &experiments {
        experiment.describe(&mut page);
    }
    if let Some(density) = density {
        page.heading("Where duplicates are");
        page.text(&density.describe());
        page.picture(&density.draw());
        page.folded("processes", &density.processes());
    }
    page
}

fn conditions(all: &[Finished]) -> String {
    let Some(first) = all.first() else { return "Nothing has been measured.".to_owned() };
    let machine = &first.report.machine;
    let repetitions = all.iter().map(|one| one.repetition).max().unwrap_or(0);
    format!(
        "Written by pagefold-lab report. {}, {} processors, {:.1} GiB, Linux {}, huge pages: {}. At most {repetitions} repetition{} of each experiment{}. Values are \
         medians, with the least and the greatest in brackets. CPU time is the sum of ksmd's and pagefold's; getting \
         there and staying there are apart, so that nothing depends on how long a policy was watched.",
        machine.cpu,
        machine.cpus,
        Bytes(machine.memory_bytes).mib() / 1024.0,
        // The rest of the version names one build.
        machine.kernel.split('-').next().unwrap_or_default(),
        machine.transparent_hugepages,
        if repetitions == 1 { "" } else { "s" },
        first.options.seed.map_or_else(String::new, |seed| format!(", in an order shuffled with the seed {seed}")),
    )
}

fn describe_losses(experiments: &[Repetitions<'_>], page: &mut Document) {
    page.heading("Where pagefold loses");
    let mut losses = Vec::new();
    for experiment in experiments {
        losses.extend(experiment.losses());
    }
    if losses.is_empty() {
        return page.text("Nowhere in these measurements.");
    }
    page.text(
        "Missed targets, and every quantity in which a peer is better by more than 5 % (memory saved: 1 %), worst first. The \
         oracle knows beforehand where duplicates are, and is no peer.",
    );
    losses.sort_by(|a, b| b.factor.total_cmp(&a.factor));
    let mut rows = Vec::new();
    for Loss { experiment, what, ours, other, factor } in losses {
        let factor = if factor.is_finite() { number(factor) } else { "–".to_owned() };
        rows.push([experiment, what, ours, other, factor]);
    }
    page.table(&Grid::new(4, ["experiment", "what", "pagefold", "peer or target", "times worse"], rows));
}

fn describe_claims(all: &[Finished], quick: bool, page: &mut Document) {
    page.heading("Claim by claim");
    let reports: Vec<&ExperimentReport> = all.iter().map(|one| &one.report).collect();
    let mut rows = Vec::new();
    let mut counts = [0; 3];
    for claim in &CLAIMS {
        let Measured { peers, ours, verdict } = claim.measured(&reports, quick);
        counts[verdict as usize] += 1;
        rows.push([claim.id, claim.what, claim.paper, &peers, &ours, &verdict.to_string()].map(str::to_owned));
    }
    // The counts are in the order of `Verdict`.
    let [met, missed, open] = counts;
    page.text(&format!(
        "Claims of the KSM tree's message (K), UKSM (U), CMD (C) and nuKSM (N). The verdict is on this project's targets for the \
         experiment, which are listed below with it, and for K1 to K3 and U3 on the paper's value: {met} met, {missed} missed, {open} not measured."
    ));
    page.table(&Grid::new(6, ["", "claim", "paper", "peers here", "pagefold here", "verdict"], rows));
}

/// A loss: pagefold does worse than a peer, or than required.
struct Loss {
    experiment: String,
    what: String,
    ours: String,
    other: String,
    /// How much worse, as a ratio of at least 1.
    factor: f64,
}

impl Repetitions<'_> {
    fn all_runs(&self) -> impl Iterator<Item = &PolicyRun> {
        self.reports.iter().flat_map(|report| &report.runs)
    }

    fn runs(&self, policy: &str) -> impl Iterator<Item = &PolicyRun> {
        self.reports.iter().filter_map(move |report| report.run(policy))
    }

    /// The policies, in the order of the runs.
    fn policies(&self) -> Vec<&str> {
        let mut policies = Vec::new();
        for run in self.all_runs() {
            if !policies.contains(&run.policy.as_str()) {
                policies.push(run.policy.as_str());
            }
        }
        policies
    }

    fn set(&self, policy: &str) -> &str {
        match self.runs(policy).next() {
            Some(run) => &run.set,
            None => "",
        }
    }

    fn spread(&self, policy: &str, of: impl Fn(&Measures) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.reports.iter().filter_map(|report| of(&Measures::in_report(report, policy)?)))
    }

    fn effect(&self, policy: &str, of: impl Fn(&PolicyRun) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs(policy).filter_map(of))
    }

    /// Whether we can compare savings: not if memory comes and goes, or if COW breaks merges.
    fn compares(&self) -> bool {
        self.all_runs().any(|run| !run.curve.is_empty()) && self.all_runs().all(|run| run.in_page_tables.is_empty())
    }

    /// For each set of programs, the experiment's first pagefold policy beside it, and each peer.
    fn pairs(&self) -> Vec<(&str, &str)> {
        let mut pairs = Vec::new();
        if !self.compares() {
            return pairs;
        }
        let policies = self.policies();
        for &peer in &policies {
            if !is_peer(peer) {
                continue;
            }
            let own = policies.iter().find(|own| is_ours(own) && self.set(own) == self.set(peer));
            if let Some(&own) = own {
                pairs.push((own, peer));
            }
        }
        pairs
    }

    fn losses(&self) -> Vec<Loss> {
        let mut losses = Vec::new();
        for target in self.targets() {
            losses.extend(target.loss(self.name));
        }
        for (own, peer) in self.pairs() {
            for quantity in &QUANTITIES {
                losses.extend(self.loss(own, peer, quantity));
            }
        }
        for report in &self.reports {
            for failure in &report.failures {
                losses.push(Loss {
                    experiment: self.name.to_owned(),
                    what: format!("not measured: {}", failure.policy),
                    ours: failure.error.clone(),
                    other: "–".to_owned(),
                    factor: f64::INFINITY,
                });
            }
        }
        losses
    }

    fn loss(&self, own: &str, peer: &str, quantity: &Quantity) -> Option<Loss> {
        let theirs = self.spread(peer, quantity.of)?;
        let ours = self.spread(own, quantity.of);
        let factor = match ratio(&self.reports, own, peer, quantity) {
            Some(ratio) if quantity.more_is_better => 1.0 / ratio.median,
            Some(ratio) => ratio.median,
            // The peer gets there, and pagefold doesn't.
            None if quantity.is_reached && ours.is_none() => f64::INFINITY,
            None => return None,
        };
        let tolerance = if quantity.more_is_better { TOLERANCE_OF_SAVINGS } else { TOLERANCE };
        if factor <= tolerance {
            return None;
        }
        let ours = match ours {
            Some(ours) => ours.to_string(),
            None => "not reached".to_owned(),
        };
        Some(Loss {
            experiment: self.name.to_owned(),
            what: format!("{}, {own}", quantity.name),
            ours,
            other: format!("{theirs}, {peer}"),
            factor,
        })
    }

    fn targets(&self) -> Vec<Target<'_>> {
        let mut targets: Vec<Target<'_>> = Vec::new();
        for report in &self.reports {
            for BarResult { name, bar, measured, met } in &report.bars {
                match targets.iter_mut().find(|target| target.name == name) {
                    Some(target) => {
                        target.measured.push(*measured);
                        target.met &= met;
                    }
                    None => targets.push(Target { name, limit: *bar, measured: vec![*measured], met: *met }),
                }
            }
        }
        targets
    }

    fn describe(&self, page: &mut Document) {
        let first = self.reports[0];
        page.heading(self.name);
        page.text(&first.claim);
        let mut parameters = String::new();
        for (name, value) in &first.parameters {
            let _ = write!(parameters, "{} {value}, ", name.replace('_', " "));
        }
        page.text(&format!("{parameters}repetitions {}", self.reports.len()));
        self.describe_policies(page);
        self.draw_pictures(page);
        self.draw_curves(page);
        self.describe_ratios(page);
        let targets: Vec<[String; 4]> = self.targets().iter().map(Target::row).collect();
        if !targets.is_empty() {
            page.table(&Grid::new(1, ["target", "measured", "required", "verdict"], targets));
        }
        self.describe_figures(page);
    }

    fn describe_policies(&self, page: &mut Document) {
        let mut policies = self.policies();
        policies.retain(|policy| self.spread(policy, |measures| Some(measures.saved_mib)).is_some());
        if policies.is_empty() {
            return;
        }
        let mut grid = Grid { heads: vec!["policy"], texts: 1, rows: Vec::new() };
        for policy in &policies {
            grid.rows.push(vec![(*policy).to_owned()]);
        }
        for (head, of) in COLUMNS {
            grid.add_column(head, policies.iter().map(|policy| shown(self.spread(policy, of))));
        }
        for (head, of) in EFFECTS {
            let mut cells = Vec::new();
            let mut highest = 0.0_f64;
            for policy in &policies {
                let value = self.effect(policy, of);
                cells.push(shown(value));
                if let Some(value) = value {
                    highest = highest.max(value.max);
                }
            }
            if highest > 0.0 {
                grid.add_column(head, cells.into_iter());
            }
        }
        page.table(&grid);
        for policy in &policies {
            if let Some(remark) = self.runs(policy).find_map(|run| run.remark.as_deref()) {
                page.text(&format!("{policy}: {remark}"));
            }
        }
        if self.reports.iter().any(|report| report.saved_anything()) {
            page.picture(&self.saved_over_time(&policies));
            if self.runs(policies[0]).next().is_some_and(|run| !run.points.is_empty()) {
                page.picture(&self.cpu_over_time(&policies));
            }
        }
        self.draw_saved_per_cpu_second(&policies, page);
    }

    fn describe_ratios(&self, page: &mut Document) {
        let mut rows = Vec::new();
        for (own, peer) in self.pairs() {
            for quantity in &QUANTITIES {
                if let Some(ratio) = ratio(&self.reports, own, peer, quantity) {
                    rows.push([quantity.name, own, peer, &ratio.to_string()].map(str::to_owned));
                }
            }
        }
        if !rows.is_empty() {
            page.text("Ratios, each taken within a repetition:");
            page.table(&Grid::new(3, ["quantity", "pagefold", "peer", "pagefold / peer"], rows));
        }
    }

    fn describe_figures(&self, page: &mut Document) {
        let mut figures = BTreeMap::<&str, Vec<f64>>::new();
        for report in &self.reports {
            for (name, value) in &report.figures {
                figures.entry(name).or_default().push(*value);
            }
        }
        let mut latencies = Vec::new();
        let mut others = Vec::new();
        for (name, values) in figures {
            let spread = Spread::of(values);
            match (tail(name), spread) {
                (Some((policy, percentile, when)), Some(spread)) => latencies.push((when, policy, percentile, spread)),
                (Some(_), None) => {}
                (None, spread) => others.push([name.to_owned(), shown(spread)]),
            }
        }
        describe_latencies(page, latencies);
        self.draw_tails(page);
        if !others.is_empty() {
            page.folded("other figures", &Grid::new(1, ["other figures", ""], others));
        }
    }

    /// Draws the experiment's own bar charts, with the medians of the repetitions.
    fn draw_pictures(&self, page: &mut Document) {
        for picture in &self.reports[0].pictures {
            let mut rows = Vec::new();
            for (name, _) in &picture.rows {
                rows.push((name.clone(), self.bar(&picture.title, name)));
            }
            if !rows.is_empty() {
                let title = format!("{}: {}", self.name, picture.title);
                page.picture(&bars(&title, &picture.subtitle, &coloured(&rows)));
            }
        }
    }

    /// A bar of one of the experiment's own charts.
    fn bar(&self, title: &str, name: &str) -> Option<Spread> {
        let mut values = Vec::new();
        for report in &self.reports {
            for picture in &report.pictures {
                for (bar, value) in &picture.rows {
                    if picture.title == title && bar == name {
                        values.push(*value);
                    }
                }
            }
        }
        Spread::of(values)
    }

    /// Draws the experiment's own curves. Curves whose names begin with the same word share a picture.
    fn draw_curves(&self, page: &mut Document) {
        let mut pictures = BTreeMap::<&str, Vec<Curve>>::new();
        for (name, points) in &self.reports[0].curves {
            let (of, label) = name.split_once(' ').unwrap_or((name, ""));
            let curves = pictures.entry(of).or_default();
            let colour = PEERS[curves.len() % PEERS.len()];
            // If curves coincide, the wider ones below stay visible.
            let width = u32::try_from(PEERS.len().saturating_sub(curves.len())).unwrap_or(0).max(1);
            curves.push(Curve { label: label.to_owned(), colour, width, points: points.clone(), ..Curve::default() });
        }
        for (of, curves) in pictures {
            let up = ("(logarithmic)".to_owned(), Scale::logarithmic(heights(&curves)));
            let right = ("rounds".to_owned(), Scale::linear(positions(&curves)));
            page.picture(&Lines { title: format!("{}: {of}", self.name), up, right, curves }.draw());
        }
    }

    /// Makes a curve for each run. The legend only has the first one of each policy.
    fn curves(
        &self,
        policies: &[&str],
        stays: bool,
        label: impl Fn(&str) -> String,
        points: impl Fn(&PolicyRun) -> Vec<(f64, f64)>,
    ) -> Vec<Curve> {
        let mut curves = Vec::new();
        for (policy, colour) in policies.iter().zip(colours(policies.iter().copied())) {
            for (at, run) in self.runs(policy).enumerate() {
                let label = if at == 0 { label(policy) } else { String::new() };
                let width = if is_ours(policy) { 3 } else { 2 };
                // We draw repetitions thinner.
                let width = if self.reports.len() > 1 { width - 1 } else { width };
                curves.push(Curve { label, colour, width, stays, points: points(run) });
            }
        }
        curves
    }

    fn seconds(&self) -> (String, Scale) {
        let mut last: f64 = 10.0 * FIRST_SECONDS;
        for run in self.all_runs() {
            last = last.max(run.seconds);
        }
        ("seconds (logarithmic)".to_owned(), Scale::Logarithmic { first: FIRST_SECONDS, last })
    }

    fn saved_over_time(&self, policies: &[&str]) -> String {
        let curves = self.curves(policies, true, |policy| self.saving_label(policy), saving);
        let up = ("MiB saved".to_owned(), Scale::linear(heights(&curves)));
        Lines { title: format!("{}: memory saved over time", self.name), up, right: self.seconds(), curves }.draw()
    }

    fn saving_label(&self, policy: &str) -> String {
        match self.spread(policy, |measures| measures.seconds_to[1]) {
            Some(at) => format!("{policy}: 90 % after {at} s"),
            None => format!("{policy}: never 90 %"),
        }
    }

    fn cpu_over_time(&self, policies: &[&str]) -> String {
        let curves = self.curves(policies, false, |policy| self.cpu_label(policy), cpu_time);
        let mut last = 1.0_f64;
        for height in heights(&curves) {
            last = last.max(height);
        }
        let up = ("CPU seconds (logarithmic)".to_owned(), Scale::Logarithmic { first: FIRST_CPU_SECONDS, last });
        let title = format!("{}: CPU of ksmd and pagefold over time", self.name);
        Lines { title, up, right: self.seconds(), curves }.draw()
    }

    fn cpu_label(&self, policy: &str) -> String {
        let spent = self.effect(policy, |run| Some(run.points.last()?.cpu_seconds()));
        format!("{policy}: {} CPU s at the end", shown(spent))
    }

    /// For each server and time, draws all latencies over all rounds and repetitions.
    fn draw_tails(&self, page: &mut Document) {
        let mut pictures = BTreeMap::<(&str, &str), BTreeMap<&str, Histogram>>::new();
        for report in &self.reports {
            for one in &report.latencies {
                let policies = pictures.entry((&one.server, &one.when)).or_default();
                policies.entry(without_round(&one.policy)).or_default().add(&one.histogram);
            }
        }
        for ((server, when), policies) in pictures {
            let mut curves = Vec::new();
            for ((policy, histogram), colour) in policies.iter().zip(colours(policies.keys().copied())) {
                let label = format!("{policy}: {} requests", histogram.count());
                let width = if is_ours(policy) { 3 } else { 2 };
                curves.push(Curve { label, colour, width, points: histogram.tail(), ..Curve::default() });
            }
            let title = format!("{}: latencies of {server} {when}", self.name);
            let up = ("microseconds (logarithmic)".to_owned(), Scale::logarithmic(heights(&curves)));
            let right = "one of so many requests takes longer (logarithmic)".to_owned();
            let right = (right, Scale::logarithmic(positions(&curves)));
            page.picture(&Lines { title, up, right, curves }.draw());
        }
    }

    fn draw_saved_per_cpu_second(&self, policies: &[&str], page: &mut Document) {
        let mut values = Vec::new();
        for &policy in policies {
            values.push((policy.to_owned(), self.spread(policy, |measures| measures.mib_per_cpu_second)));
        }
        let rows = coloured(&values);
        if !rows.is_empty() {
            let title = format!("{}: memory saved per CPU second", self.name);
            let subtitle = "MiB per CPU second of ksmd and pagefold, until 90 % was saved; policies that did not reach it are left out";
            page.picture(&bars(&title, subtitle, &rows));
        }
    }
}

fn shown(spread: Option<Spread>) -> String {
    match spread {
        Some(spread) => spread.to_string(),
        None => "–".to_owned(),
    }
}

/// The bars of names that have values. A name without one keeps its colour.
fn coloured(rows: &[(String, Option<Spread>)]) -> Vec<Bar> {
    let colours = colours(rows.iter().map(|(name, _)| name.as_str()));
    let mut bars = Vec::new();
    for ((name, value), colour) in rows.iter().zip(colours) {
        if let Some(spread) = value {
            bars.push(Bar::of_spread(name, *spread, colour));
        }
    }
    bars
}

fn positions(curves: &[Curve]) -> Vec<f64> {
    let mut positions = Vec::new();
    for curve in curves {
        positions.extend(curve.points.iter().map(|point| point.0));
    }
    positions
}

fn heights(curves: &[Curve]) -> Vec<f64> {
    let mut heights = Vec::new();
    for curve in curves {
        heights.extend(curve.points.iter().map(|point| point.1));
    }
    heights
}

/// MiB saved over time.
fn saving(run: &PolicyRun) -> Vec<(f64, f64)> {
    // If we read page tables, they say more than KSM's counters.
    let raw = run.in_page_tables.is_empty() && !run.curve.is_empty() && !run.points.is_empty();
    let saved = if raw { thinned(&run.points) } else { run.curve.clone() };
    saved.into_iter().map(|(at, saved)| (at, Bytes(saved).mib())).collect()
}

/// CPU seconds over time.
fn cpu_time(run: &PolicyRun) -> Vec<(f64, f64)> {
    // We keep all points at the start, which the logarithmic axis shows best.
    let (start, rest) = run.points.split_at(run.points.len().min(POINTS / 4));
    let thinned = rest.iter().step_by(rest.len().div_ceil(POINTS).max(1));
    let kept = start.iter().chain(thinned).chain(run.points.last());
    kept.map(|point| (point.seconds, point.cpu_seconds())).collect()
}

/// A required value over all repetitions.
struct Target<'a> {
    name: &'a str,
    limit: Limit,
    measured: Vec<f64>,
    met: bool,
}

impl Target<'_> {
    fn spread(&self) -> Option<Spread> {
        Spread::of(self.measured.iter().copied())
    }

    fn required(&self) -> String {
        match self.limit {
            // Just more than nothing.
            Limit::AtLeast(limit) if limit > 0.0 && limit < 1e-300 => "above 0".to_owned(),
            Limit::AtLeast(limit) => format!("at least {}", number(limit)),
            Limit::AtMost(limit) => format!("at most {}", number(limit)),
        }
    }

    fn row(&self) -> [String; 4] {
        let verdict = if self.met { Verdict::Met } else { Verdict::Missed };
        [self.name.to_owned(), shown(self.spread()), self.required(), verdict.to_string()]
    }

    fn loss(&self, experiment: &str) -> Option<Loss> {
        if self.met {
            return None;
        }
        let factor = match (self.spread(), self.limit) {
            (Some(spread), Limit::AtLeast(limit)) => limit / spread.median,
            (Some(spread), Limit::AtMost(limit)) => spread.median / limit,
            (None, _) => f64::NAN,
        };
        Some(Loss {
            experiment: experiment.to_owned(),
            what: format!("target: {}", self.name),
            ours: shown(self.spread()),
            other: self.required(),
            factor: if factor.is_finite() { factor.max(1.0) } else { f64::INFINITY },
        })
    }
}

/// The parts of a figure's name such as `ksm p99 us while folding`: the policy, the percentile, and the rest.
fn tail(name: &str) -> Option<(&str, f64, &str)> {
    let (before, rest) = name.split_once(" us")?;
    let (policy, percentile) = before.rsplit_once(" p")?;
    let percentile: f64 = percentile.parse().ok()?;
    if !(0.0..=100.0).contains(&percentile) {
        return None;
    }
    Some((policy, percentile, rest.trim()))
}

/// Latencies (the time of the measurement, policy, percentile and microseconds) as a table, and as bars for the highest
/// percentile.
fn describe_latencies(page: &mut Document, mut latencies: Vec<(&str, &str, f64, Spread)>) {
    if latencies.is_empty() {
        return;
    }
    latencies.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2)));
    let mut highest = 0.0_f64;
    for latency in &latencies {
        highest = highest.max(latency.2);
    }
    let mut rows = Vec::new();
    let mut drawn = Vec::new();
    for (when, policy, percentile, spread) in latencies {
        rows.push([policy.to_owned(), when.to_owned(), format!("p{percentile}"), spread.to_string()]);
        if percentile >= highest {
            let name = if when.is_empty() { policy.to_owned() } else { format!("{policy}, {when}") };
            drawn.push((name, Some(spread)));
        }
    }
    page.table(&Grid::new(2, ["latency", "when", "percentile", "us"], rows));
    page.picture(&bars(&format!("latency, p{highest}"), "microseconds", &coloured(&drawn)));
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn latencies_are_recognized_by_their_names() {
        assert_eq!(tail("ksm p99.9 us while folding"), Some(("ksm", 99.9, "while folding")));
        assert_eq!(tail("pagefold --governor low p50 us"), Some(("pagefold --governor low", 50.0, "")));
        for other in
            ["default: us to write a page", "the latest write, us late", "ksm p101 us", "ksm pages us", "p50 us"]
        {
            assert_eq!(tail(other), None, "{other}");
        }
    }

    #[test]
    fn a_target_is_lost_by_its_ratio_to_the_limit() {
        let loss = |limit, measured: &[f64], met| {
            let target = Target { name: "t", limit, measured: measured.to_vec(), met };
            target.loss("e").map(|loss| (loss.ours, loss.other, loss.factor))
        };
        assert_eq!(loss(Limit::AtMost(2.0), &[1.0], true), None);
        let found = loss(Limit::AtMost(2.0), &[3.0, 5.0, 4.0], false);
        assert_eq!(found, Some(("4.00 (3.00..5.00)".to_owned(), "at most 2.00".to_owned(), 2.0)));
        assert_eq!(loss(Limit::AtLeast(5.0), &[0.0], false).unwrap().2, f64::INFINITY);
        // The median is within the limit, but not every value is.
        assert_eq!(loss(Limit::AtMost(2.0), &[1.0, 1.0, 3.0], false).unwrap().2, 1.0);
    }

    #[test]
    fn only_runs_beside_the_same_programs_are_compared() {
        let run = |policy: &str, set: &str, mib: u64| {
            let curve = vec![(0.5, 0), (1.0, mib << 20)];
            let mut run = PolicyRun { policy: policy.to_owned(), curve, ..PolicyRun::default() };
            run.beside(set);
            run
        };
        let mut report = ExperimentReport::new("numa", "");
        report.runs = vec![
            run("ksm", "", 64),
            run("pagefold", "", 64),
            run("ksm", ", three programs", 128),
            run("pagefold", ", three programs", 128),
            run("ksm", ", four programs", 192),
        ];
        let losses = |report: &ExperimentReport| {
            let losses = Repetitions { name: "numa", reports: vec![report] }.losses();
            losses.into_iter().map(|loss| format!("{}; {}", loss.what, loss.other)).collect::<Vec<_>>()
        };
        assert_eq!(losses(&report), [""; 0]);
        report.runs[3].curve[1].1 /= 2;
        let found = losses(&report);
        assert_eq!(found[0], "memory saved, pagefold, three programs; 128, ksm, three programs");
        // Of the shares of savable memory, pagefold only reaches the first.
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn without_results_there_is_nothing_to_lose() {
        let text = document(&[], None).html();
        assert!(
            text.contains("Nothing has been measured.") && text.contains("0 met, 0 missed, 23 not measured"),
            "{text}"
        );
    }
}
