//! The report on all results in a directory. It starts with pagefold's losses.

use crate::charts::{Bar, Curve, Lines, Scale, bars, number};
use crate::claims::{CLAIMS, Verdict};
use crate::density::Density;
use crate::document::{Document, Grid};
use crate::latencies::Histogram;
use crate::measures::{EFFECTS, Measures, QUANTITIES, Quantity, Spread, is_peer, ratio};
use crate::points::thinned;
use crate::policy::{PEERS, colours, is_ours};
use crate::report::{ExperimentReport, Limit, Picture, PolicyRun, without_round};
use crate::results::Finished;
use pagefold_engine::units::Bytes;
use std::collections::BTreeMap;

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

/// All repetitions of an experiment.
struct Repetitions<'a> {
    name: &'a str,
    reports: Vec<&'a ExperimentReport>,
}

pub fn document(all: &[Finished], density: Option<&Density>) -> Document {
    let mut experiments: Vec<Repetitions<'_>> = Vec::new();
    for Finished { report, .. } in all {
        match experiments.last_mut().filter(|last| last.name == report.experiment) {
            Some(last) => last.reports.push(report),
            None => experiments.push(Repetitions { name: &report.experiment, reports: vec![report] }),
        }
    }
    let quick = all.iter().any(|one| one.options.quick);
    let mut losses: Vec<Loss> = experiments.iter().flat_map(Repetitions::losses).collect();
    losses.sort_by(|a, b| b.factor.total_cmp(&a.factor));
    let mut page = Document::new("pagefold measured against its peers");
    page.text(&conditions(all));
    if quick {
        page.text("A quick run: it shows that everything works. Speeds mean nothing, and no claim is judged.");
    }
    page.heading("Where pagefold loses");
    if losses.is_empty() {
        page.text("Nowhere in these measurements.");
    } else {
        page.text(
            "Missed targets, and every quantity in which a peer is better by more than 5 % (memory saved: 1 %), worst first. The \
             oracle knows beforehand where duplicates are, and is no peer.",
        );
        let rows = losses.iter().map(|loss| {
            let factor = if loss.factor.is_finite() { number(loss.factor) } else { "–".to_owned() };
            [loss.experiment.clone(), loss.what.clone(), loss.ours.clone(), loss.other.clone(), factor]
        });
        let heads = ["experiment", "what", "pagefold", "peer or target", "times worse"];
        page.table(&Grid::new(4, heads, rows.collect()));
    }
    page.heading("Claim by claim");
    let reports: Vec<&ExperimentReport> = all.iter().map(|one| &one.report).collect();
    let (mut rows, mut counts) = (Vec::new(), [0; 3]);
    for claim in &CLAIMS {
        let found = claim.measured(&reports, quick);
        counts[found.verdict as usize] += 1;
        rows.push(
            [claim.id, claim.what, claim.paper, &found.peers, &found.ours, &found.verdict.to_string()]
                .map(str::to_owned),
        );
    }
    let [met, missed, open] =
        [Verdict::Met, Verdict::Missed, Verdict::NotMeasured].map(|verdict| counts[verdict as usize]);
    page.text(&format!(
        "Claims of the KSM tree's message (K), UKSM (U), CMD (C) and nuKSM (N). The verdict is on this project's targets for the \
         experiment, which are listed below with it, and for K1 to K3 and U3 on the paper's value: {met} met, {missed} missed, {open} not measured."
    ));
    page.table(&Grid::new(6, ["", "claim", "paper", "peers here", "pagefold here", "verdict"], rows));
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
         medians, with the least and the greatest in brackets. CPU time is that of ksmd and pagefold together; getting there and \
         staying there are apart, so that nothing depends on how long a policy was watched.",
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
    /// The policies, in the order of the runs.
    fn policies(&self) -> Vec<&str> {
        let mut policies = Vec::new();
        for run in self.reports.iter().flat_map(|report| &report.runs) {
            if !policies.contains(&run.policy.as_str()) {
                policies.push(run.policy.as_str());
            }
        }
        policies
    }

    fn runs<'s>(&'s self, policy: &'s str) -> impl Iterator<Item = &'s PolicyRun> {
        self.reports.iter().filter_map(move |report| report.run(policy))
    }

    fn spread(&self, policy: &str, of: impl Fn(&Measures) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.reports.iter().filter_map(|report| of(&Measures::in_report(report, policy)?)))
    }

    fn effect(&self, policy: &str, of: impl Fn(&PolicyRun) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.runs(policy).filter_map(of))
    }

    /// Whether we can compare savings: not if memory comes and goes, or if COW breaks merges.
    fn compares(&self) -> bool {
        let runs = || self.reports.iter().flat_map(|report| &report.runs);
        runs().any(|run| !run.curve.is_empty()) && runs().all(|run| run.in_page_tables.is_empty())
    }

    /// For each set of programs, the experiment's first pagefold policy beside it, and each peer.
    fn pairs(&self) -> Vec<(&str, &str)> {
        if !self.compares() {
            return Vec::new();
        }
        let policies = self.policies();
        let set = |policy: &str| self.runs(policy).next().map_or("", |run| &run.set).to_owned();
        let beside = |peer: &str| policies.iter().copied().find(|own| is_ours(own) && set(own) == set(peer));
        policies.iter().filter(|peer| is_peer(peer)).filter_map(|&peer| Some((beside(peer)?, peer))).collect()
    }

    fn losses(&self) -> Vec<Loss> {
        let mut losses: Vec<Loss> = self.targets().into_iter().filter_map(|target| target.loss(self.name)).collect();
        for (own, peer) in self.pairs() {
            losses.extend(QUANTITIES.iter().filter_map(|quantity| self.loss(own, peer, quantity)));
        }
        for failure in self.reports.iter().flat_map(|report| &report.failures) {
            losses.push(Loss {
                experiment: self.name.to_owned(),
                what: format!("not measured: {}", failure.policy),
                ours: failure.error.clone(),
                other: "–".to_owned(),
                factor: f64::INFINITY,
            });
        }
        losses
    }

    fn loss(&self, own: &str, peer: &str, quantity: &Quantity) -> Option<Loss> {
        let value = |policy: &str| self.spread(policy, quantity.of);
        let theirs = value(peer)?;
        let tolerance = if quantity.more_is_better { TOLERANCE_OF_SAVINGS } else { TOLERANCE };
        let factor = match ratio(&self.reports, own, peer, quantity) {
            Some(ratio) if quantity.more_is_better => 1.0 / ratio.median,
            Some(ratio) => ratio.median,
            // The peer gets there, and pagefold doesn't.
            None if quantity.is_reached && value(own).is_none() => f64::INFINITY,
            None => return None,
        };
        (factor > tolerance).then(|| Loss {
            experiment: self.name.to_owned(),
            what: format!("{}, {own}", quantity.name),
            ours: value(own).map_or_else(|| "not reached".to_owned(), |own| own.to_string()),
            other: format!("{theirs}, {peer}"),
            factor,
        })
    }

    /// The targets, over all repetitions.
    fn targets(&self) -> Vec<Target<'_>> {
        let mut targets: Vec<Target<'_>> = Vec::new();
        for bar in self.reports.iter().flat_map(|report| &report.bars) {
            match targets.iter_mut().find(|target| target.name == bar.name) {
                Some(target) => {
                    target.measured.push(bar.measured);
                    target.met &= bar.met;
                }
                None => {
                    targets.push(Target {
                        name: &bar.name,
                        limit: bar.bar,
                        measured: vec![bar.measured],
                        met: bar.met,
                    });
                }
            }
        }
        targets
    }

    fn describe(&self, page: &mut Document) {
        let first = self.reports[0];
        let parameters = first.parameters.iter().map(|(name, value)| format!("{} {value}", name.replace('_', " ")));
        page.heading(self.name);
        page.text(&first.claim);
        let repeated = format!("repetitions {}", self.reports.len());
        page.text(&parameters.chain([repeated]).collect::<Vec<_>>().join(", "));
        let or_none = |spread: Option<Spread>| spread.map_or_else(|| "–".to_owned(), |spread| spread.to_string());
        let row = |policy: &str| {
            let value = |of: fn(&Measures) -> Option<f64>| or_none(self.spread(policy, of));
            vec![
                policy.to_owned(),
                value(|measures| Some(measures.saved_mib)),
                value(|measures| measures.seconds_to[0]),
                value(|measures| measures.seconds_to[1]),
                value(|measures| measures.seconds_to[2]),
                value(|measures| measures.cpu_to[1]),
                value(|measures| measures.cpu_to[2]),
                value(|measures| measures.percent_after),
                value(|measures| measures.mib_per_cpu_second),
            ]
        };
        let measured = |policy: &&str| self.spread(policy, |measures| Some(measures.saved_mib)).is_some();
        let policies: Vec<&str> = self.policies().into_iter().filter(measured).collect();
        if !policies.is_empty() {
            let heads = vec![
                "policy",
                "MiB saved",
                "s to 50 %",
                "s to 90 %",
                "s to 99 %",
                "CPU s to 90 %",
                "CPU s to 99 %",
                "% of a core afterwards",
                "MiB/CPU s to 90 %",
            ];
            let mut grid = Grid { heads, texts: 1, rows: policies.iter().map(|policy| row(policy)).collect() };
            for (head, of) in EFFECTS {
                let values: Vec<Option<Spread>> = policies.iter().map(|policy| self.effect(policy, of)).collect();
                if values.iter().flatten().any(|value| value.max > 0.0) {
                    grid.add_column(head, values.into_iter().map(or_none));
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
                if !self.points(policies[0]).next().is_none_or(<[_]>::is_empty) {
                    page.picture(&self.cpu_over_time(&policies));
                }
            }
            self.saved_per_cpu_second(&policies).iter().for_each(|svg| page.picture(svg));
        }
        self.own_pictures().iter().for_each(|svg| page.picture(svg));
        self.own_curves().iter().for_each(|svg| page.picture(svg));
        let ratios = self.pairs().into_iter().flat_map(|(own, peer)| {
            QUANTITIES.iter().filter_map(move |quantity| {
                let ratio = ratio(&self.reports, own, peer, quantity)?;
                Some([quantity.name.to_owned(), own.to_owned(), peer.to_owned(), ratio.to_string()])
            })
        });
        let ratios: Vec<[String; 4]> = ratios.collect();
        if !ratios.is_empty() {
            page.text("Ratios, each taken within a repetition:");
            page.table(&Grid::new(3, ["quantity", "pagefold", "peer", "pagefold / peer"], ratios));
        }
        let targets: Vec<[String; 4]> = self.targets().iter().map(Target::row).collect();
        if !targets.is_empty() {
            page.table(&Grid::new(1, ["target", "measured", "required", "verdict"], targets));
        }
        let mut figures = BTreeMap::<&str, Vec<f64>>::new();
        for (name, value) in self.reports.iter().flat_map(|report| &report.figures) {
            figures.entry(name).or_default().push(*value);
        }
        let (tails, others): (Vec<_>, Vec<_>) = figures.into_iter().partition(|(name, _)| tail(name).is_some());
        describe_latencies(page, &tails);
        self.tails().iter().for_each(|svg| page.picture(svg));
        if !others.is_empty() {
            let rows = others.into_iter().map(|(name, values)| [name.to_owned(), or_none(Spread::of(values))]);
            page.folded("other figures", &Grid::new(1, ["other figures", ""], rows.collect()));
        }
    }

    /// The experiment's own bar charts, with the medians of the repetitions.
    fn own_pictures(&self) -> Vec<String> {
        let of_repetitions = |picture: &Picture, name: &str| {
            let pictures = self.reports.iter().flat_map(|report| &report.pictures);
            let rows = pictures.filter(|other| other.title == picture.title).flat_map(|other| &other.rows);
            Spread::of(rows.filter(|row| row.0 == name).map(|row| row.1))
        };
        let drawn = self.reports[0].pictures.iter().filter(|picture| !picture.rows.is_empty()).map(|picture| {
            let colours = colours(picture.rows.iter().map(|(name, _)| name.as_str()));
            let rows =
                picture.rows.iter().zip(colours).filter_map(|((name, _), colour)| {
                    Some(Bar::of_spread(name, of_repetitions(picture, name)?, colour))
                });
            bars(&format!("{}: {}", self.name, picture.title), &picture.subtitle, &rows.collect::<Vec<_>>())
        });
        drawn.collect()
    }

    /// The experiment's own curves. Curves whose names begin with the same word share a picture.
    fn own_curves(&self) -> Vec<String> {
        let mut pictures = BTreeMap::<&str, Vec<Curve>>::new();
        for (name, points) in &self.reports[0].curves {
            let (of, label) = name.split_once(' ').unwrap_or((name, ""));
            let curves = pictures.entry(of).or_default();
            let colour = PEERS[curves.len() % PEERS.len()];
            // If curves coincide, the wider ones below stay visible.
            let width = u32::try_from(PEERS.len().saturating_sub(curves.len())).unwrap_or(0).max(1);
            curves.push(Curve { label: label.to_owned(), colour, width, points: points.clone(), ..Curve::default() });
        }
        let draw = |(of, curves): (&str, Vec<Curve>)| {
            let points = || curves.iter().flat_map(|curve| &curve.points);
            let up = ("(logarithmic)".to_owned(), Scale::logarithmic(points().map(|point| point.1)));
            let right = ("rounds".to_owned(), Scale::linear(points().map(|point| point.0)));
            Lines { title: format!("{}: {of}", self.name), up, right, curves }.draw()
        };
        pictures.into_iter().map(draw).collect()
    }

    /// The raw samples of a policy, for each repetition.
    fn points(&self, policy: &str) -> impl Iterator<Item = &[crate::points::SamplerPoint]> {
        self.reports.iter().filter_map(move |report| Some(report.run(policy)?.points.as_slice()))
    }

    /// One curve for each run. The legend only has a policy's first.
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

    /// The time axis.
    fn seconds(&self) -> (String, Scale) {
        let runs = self.reports.iter().flat_map(|report| &report.runs);
        let last = runs.map(|run| run.seconds).fold(10.0 * FIRST_SECONDS, f64::max);
        ("seconds (logarithmic)".to_owned(), Scale::Logarithmic { first: FIRST_SECONDS, last })
    }

    fn saved_over_time(&self, policies: &[&str]) -> String {
        let label = |policy: &str| {
            let at = self.spread(policy, |measures| measures.seconds_to[1]);
            at.map_or_else(|| format!("{policy}: never 90 %"), |at| format!("{policy}: 90 % after {at} s"))
        };
        let curves = self.curves(policies, true, label, |run| {
            // If we read page tables, they say more than KSM's counters.
            let raw = run.in_page_tables.is_empty() && !run.curve.is_empty() && !run.points.is_empty();
            let saved = if raw { thinned(&run.points) } else { run.curve.clone() };
            saved.into_iter().map(|(at, saved)| (at, Bytes(saved).mib())).collect()
        });
        let most = Scale::linear(curves.iter().flat_map(|curve| &curve.points).map(|point| point.1));
        let title = format!("{}: memory saved over time", self.name);
        Lines { title, up: ("MiB saved".to_owned(), most), right: self.seconds(), curves }.draw()
    }

    fn cpu_over_time(&self, policies: &[&str]) -> String {
        let label = |policy: &str| {
            let spent = Spread::of(self.points(policy).filter_map(|points| Some(points.last()?.cpu_seconds())));
            format!("{policy}: {} CPU s at the end", spent.map_or_else(|| "–".to_owned(), |spent| spent.to_string()))
        };
        let curves = self.curves(policies, false, label, |run| {
            // We keep all points at the start, which the logarithmic axis shows best.
            let (start, rest) = run.points.split_at(run.points.len().min(POINTS / 4));
            let kept =
                start.iter().chain(rest.iter().step_by(rest.len().div_ceil(POINTS).max(1))).chain(run.points.last());
            kept.map(|point| (point.seconds, point.cpu_seconds())).collect()
        });
        let last = curves.iter().flat_map(|curve| &curve.points).map(|point| point.1).fold(1.0, f64::max);
        let up = ("CPU seconds (logarithmic)".to_owned(), Scale::Logarithmic { first: FIRST_CPU_SECONDS, last });
        let title = format!("{}: CPU of ksmd and pagefold over time", self.name);
        Lines { title, up, right: self.seconds(), curves }.draw()
    }

    /// For each server and time, a picture of all latencies over all rounds and repetitions.
    fn tails(&self) -> Vec<String> {
        let mut pictures = BTreeMap::<(&str, &str), BTreeMap<&str, Histogram>>::new();
        for one in self.reports.iter().flat_map(|report| &report.latencies) {
            let policies = pictures.entry((&one.server, &one.when)).or_default();
            policies.entry(without_round(&one.policy)).or_default().add(&one.histogram);
        }
        let picture = |((server, when), policies): ((&str, &str), BTreeMap<&str, Histogram>)| {
            let curves: Vec<Curve> = policies
                .iter()
                .zip(colours(policies.keys().copied()))
                .map(|((policy, histogram), colour)| Curve {
                    label: format!("{policy}: {} requests", histogram.count()),
                    colour,
                    width: if is_ours(policy) { 3 } else { 2 },
                    points: histogram.tail(),
                    ..Curve::default()
                })
                .collect();
            let points = || curves.iter().flat_map(|curve| &curve.points);
            Lines {
                title: format!("{}: latencies of {server} {when}", self.name),
                up: ("microseconds (logarithmic)".to_owned(), Scale::logarithmic(points().map(|point| point.1))),
                right: (
                    "one of so many requests takes longer (logarithmic)".to_owned(),
                    Scale::logarithmic(points().map(|point| point.0)),
                ),
                curves,
            }
            .draw()
        };
        pictures.into_iter().map(picture).collect()
    }

    fn saved_per_cpu_second(&self, policies: &[&str]) -> Option<String> {
        let rows = policies.iter().zip(colours(policies.iter().copied())).filter_map(|(policy, colour)| {
            let spread = self.spread(policy, |measures| measures.mib_per_cpu_second)?;
            Some(Bar::of_spread(policy, spread, colour))
        });
        let rows: Vec<Bar> = rows.collect();
        let subtitle = "MiB per CPU second of ksmd and pagefold, until 90 % was saved; policies that did not reach it are left out";
        (!rows.is_empty()).then(|| bars(&format!("{}: memory saved per CPU second", self.name), subtitle, &rows))
    }
}

/// A required value over all repetitions.
struct Target<'a> {
    name: &'a str,
    limit: Limit,
    measured: Vec<f64>,
    met: bool,
}

impl Target<'_> {
    fn spread(&self) -> String {
        Spread::of(self.measured.iter().copied()).map_or_else(|| "–".to_owned(), |spread| spread.to_string())
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
        [self.name.to_owned(), self.spread(), self.required(), verdict.to_string()]
    }

    fn loss(&self, experiment: &str) -> Option<Loss> {
        if self.met {
            return None;
        }
        let middle = Spread::of(self.measured.iter().copied()).map_or(f64::NAN, |spread| spread.median);
        let factor = match self.limit {
            Limit::AtLeast(limit) => limit / middle,
            Limit::AtMost(limit) => middle / limit,
        };
        let factor = if factor.is_finite() { factor.max(1.0) } else { f64::INFINITY };
        let (what, ours) = (format!("target: {}", self.name), self.spread());
        Some(Loss { experiment: experiment.to_owned(), what, ours, other: self.required(), factor })
    }
}

/// The parts of a figure's name such as `ksm p99 us while folding`: the policy, the percentile, and the rest.
fn tail(name: &str) -> Option<(&str, f64, &str)> {
    let (before, rest) = name.split_once(" us")?;
    let (policy, percentile) = before.rsplit_once(" p")?;
    let percentile = percentile.parse().ok().filter(|percentile| (0.0..=100.0).contains(percentile))?;
    Some((policy, percentile, rest.trim()))
}

/// Latencies as a table with a column for each percentile, and as bars for the highest percentile.
fn describe_latencies(page: &mut Document, figures: &[(&str, Vec<f64>)]) {
    let tails = || figures.iter().filter_map(|(name, values)| Some((tail(name)?, Spread::of(values.iter().copied())?)));
    let mut percentiles: Vec<f64> = tails().map(|((_, percentile, _), _)| percentile).collect();
    percentiles.sort_by(f64::total_cmp);
    percentiles.dedup();
    let Some(&highest) = percentiles.last() else { return };
    let mut rows: Vec<(String, String, f64, Spread)> = tails()
        .map(|((policy, percentile, when), spread)| (policy.to_owned(), when.to_owned(), percentile, spread))
        .collect();
    rows.sort_by(|a, b| (&a.1, &a.0).cmp(&(&b.1, &b.0)).then(a.2.total_cmp(&b.2)));
    let named =
        |policy: &str, when: &str| if when.is_empty() { policy.to_owned() } else { format!("{policy}, {when}") };
    let table = rows.iter().map(|(policy, when, percentile, spread)| {
        [policy.clone(), when.clone(), format!("p{percentile}"), spread.to_string()]
    });
    page.table(&Grid::new(2, ["latency", "when", "percentile", "us"], table.collect()));
    let highest_rows: Vec<_> =
        rows.iter().filter(|(_, _, percentile, _)| percentile.total_cmp(&highest).is_eq()).collect();
    let drawn = highest_rows.iter().zip(colours(highest_rows.iter().map(|(policy, ..)| policy.as_str())));
    let drawn = drawn.map(|((policy, when, _, spread), colour)| Bar::of_spread(&named(policy, when), *spread, colour));
    page.picture(&bars(&format!("latency, p{highest}"), "microseconds", &drawn.collect::<Vec<_>>()));
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
        // Of the shares of savable memory, pagefold reaches the first.
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
