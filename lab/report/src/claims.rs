//! The papers' claims, and the experiments that measure them here.

use crate::measures::{Measures, Spread, is_peer};
use crate::metric::{self, Key, Metric};
use crate::policy::{KSM, is_ours};
use crate::report::{ExperimentReport, PolicyRun};
use std::fmt;

pub struct Claim {
    pub id: &'static str,
    pub what: &'static str,
    pub paper: &'static str,
    /// The experiment that measures the claim here. Empty if none does.
    pub experiment: &'static str,
    /// Why no experiment measures it.
    pub unmeasured: &'static str,
    ours: &'static [Cell],
    peers: &'static [Cell],
    judge: Judge,
}

/// An empty claim, to fill in.
const CLAIM: Claim =
    Claim { id: "", what: "", paper: "", experiment: "", unmeasured: "", ours: &[], peers: &[], judge: Judge::Shown };

/// A value to show: its source, and its description after the unit.
pub struct Cell(Value, &'static str);

enum Value {
    /// A quantity of pagefold's first policy, or of each peer, and its unit.
    Measure(fn(&Measures) -> Option<f64>, &'static str),
    Figure(Key<'static>),
    /// The value measured for a target.
    Target(Key<'static>),
}

const fn figure(metric: Metric, of: &'static [&'static str], what: &'static str) -> Cell {
    Cell(Value::Figure(Key(metric, of)), what)
}

/// A target for a metric, for all things that it was measured of.
const fn target(metric: Metric, what: &'static str) -> Cell {
    target_of(metric, &[], what)
}

const fn target_of(metric: Metric, of: &'static [&'static str], what: &'static str) -> Cell {
    Cell(Value::Target(Key(metric, of)), what)
}

pub enum Judge {
    /// By the targets that we show for pagefold. Things that a metric was measured of don't matter.
    Shown,
    /// By all targets of the experiment.
    AllTargets,
    /// By these targets, for all things that they were measured of.
    Targets(&'static [Metric]),
    /// By this target, for these things that it was measured of.
    Target(Metric, &'static [&'static str]),
    /// Our first value must be at least this value of the paper.
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    Missed,
    NotMeasured,
}

impl fmt::Display for Verdict {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::NotMeasured => "not measured",
        })
    }
}

const SECONDS_TO_99: Value = Value::Measure(|measures| measures.seconds_to[2], "s to 99 %");
const MIB_PER_CPU_SECOND: Value = Value::Measure(|measures| measures.mib_per_cpu_second, "MiB/CPU s to 90 %");
const MIB_PER_SECOND: Value =
    Value::Measure(|measures| Some(0.9 * measures.saved_mib / measures.seconds_to[1]?), "MiB/s");
const CPU_AFTER: Value = Value::Measure(|measures| measures.percent_after, "% of a core afterwards");

/// The claims, in the order of the papers: the KSM tree's message, UKSM, CMD, nuKSM.
pub const CLAIMS: [Claim; 23] = [
    Claim {
        id: "K1",
        what: "Worst case: two programs of 1 GiB (here a quarter) whose pages differ from each other in the last 8 bytes only",
        paper: "96 s to merge, 10 MB/s; further copies 34 s, 30 MB/s",
        experiment: "tails",
        ours: &[Cell(MIB_PER_SECOND, "")],
        peers: &[Cell(MIB_PER_SECOND, "")],
        judge: Judge::AtLeast(10.0),
        ..CLAIM
    },
    Claim {
        id: "K2",
        what: "Best case: all pages of 1 GiB are identical (here: 2 GiB, beside 2 GiB of random pages)",
        paper: "4 s, 256 MB/s",
        experiment: "static-mix",
        ours: &[Cell(MIB_PER_SECOND, "")],
        peers: &[Cell(MIB_PER_SECOND, "")],
        judge: Judge::AtLeast(244.0),
        ..CLAIM
    },
    Claim {
        id: "K3",
        what: "Reading a word of every page, before and after merging",
        paper: "as fast in the worst case, about 4 times as fast in the best",
        experiment: "tails",
        ours: &[
            figure(metric::READING_SPEED, &[metric::WORST_CASE], " in the worst case"),
            figure(metric::READING_SPEED, &[metric::BEST_CASE], " in the best"),
        ],
        judge: Judge::AtLeast(1.0),
        ..CLAIM
    },
    Claim {
        id: "K4",
        what: "12 GiB allocated on a machine with 4 GiB",
        paper: "fits",
        experiment: "overcommit",
        ours: &[target(metric::FITTING_OF_LIMIT, " a limit of 512 MiB")],
        peers: &[figure(metric::FITTING_MEMORY, &[KSM], " with KSM")],
        ..CLAIM
    },
    Claim {
        id: "U1",
        what: "Static mix: one content beside random pages (there 4 GiB of each, here half)",
        paper: "merged in 5 s, by KSM in 611, 95, 61 s at 100, 1000, 2000 pages per 20 ms; 8.3, 12.6, 11.5 times KSM's MB per CPU second",
        experiment: "static-mix",
        ours: &[Cell(SECONDS_TO_99, ""), Cell(MIB_PER_CPU_SECOND, ""), Cell(CPU_AFTER, "")],
        peers: &[Cell(SECONDS_TO_99, ""), Cell(MIB_PER_CPU_SECOND, ""), Cell(CPU_AFTER, "")],
        judge: Judge::AllTargets,
        ..CLAIM
    },
    Claim {
        id: "U2",
        what: "One content of which a page is rewritten with the same content every 10 ms",
        paper: "left alone by default; with the filter off and equal CPU, KSM saves a third to a fifth",
        experiment: "cow-breaker",
        ours: &[
            figure(metric::MERGED_AT_END, &[], "share merged at the end, by default"),
            target(metric::SAVED_UNFILTERED, " KSM's savings at equal CPU, filter off (least)"),
        ],
        judge: Judge::AllTargets,
        ..CLAIM
    },
    Claim {
        id: "U3",
        what: "Short-lived: 500 MB of one content, mapped for T and unmapped for T",
        paper: "ignored by default; tuned, almost all is merged at T = 0.2 s, where KSM at half a core merges none below 2 s",
        experiment: "short-lived",
        ours: &[
            figure(metric::SMALLEST_LIFETIME, &[], ", smallest T at which half is merged, sensitive"),
            target(metric::MERGED_AT_BEST, "share merged by default, at best"),
        ],
        peers: &[figure(metric::SHARE_MERGED, &[metric::KSM_FOR_2_S], "share merged by KSM at T = 2 s")],
        judge: Judge::AtMost(0.25),
        ..CLAIM
    },
    Claim {
        id: "U4",
        what: "25 virtual machines of 512 MB, started 10 s apart",
        paper: "3 times what KSM, and 2 times what XLH has merged when all are up",
        experiment: "vms",
        ours: &[
            target(metric::VMS_SAVED, " what KSM by default has saved when all of ten are up"),
            target(metric::VMS_CPU, " its CPU time"),
        ],
        ..CLAIM
    },
    Claim {
        id: "U5",
        what: "40 virtual machines of 1 GB, overcommitted",
        paper: "no swap (KSM: 1.3 GB), half of KSM's CPU, up in 420 s instead of 550",
        experiment: "vms-overcommitted",
        ours: &[
            target(metric::VMS_SWAPPED, " swapped out"),
            target(metric::VMS_SECONDS_OF_KSM, "of KSM's time"),
            target(metric::VMS_CPU_OF_KSM, "of KSM's CPU time"),
        ],
        peers: &[figure(metric::VMS_SWAPPED, &[KSM], " swapped out by KSM")],
        judge: Judge::AllTargets,
        ..CLAIM
    },
    Claim {
        id: "U6",
        what: "Three WordPress containers under load",
        paper: "61 % of the anonymous memory; CPU mostly below 1 %, at most 3 %",
        experiment: "containers",
        ours: &[
            target(metric::MEMORY_OF_UNMERGED, "of the anonymous memory"),
            target(metric::CPU_MEDIAN_SECOND, " in the median second"),
            target(metric::CPU_BUSIEST_SECOND, " in the busiest second"),
        ],
        peers: &[figure(metric::MEMORY_OF_UNMERGED, &[KSM], "of the anonymous memory with KSM")],
        ..CLAIM
    },
    Claim {
        id: "U7",
        what: "Desktop: PDF viewer, browser, image editor",
        paper: "415, 27 and 39 MB within 2, 5 and 1 s",
        unmeasured: "browsers are on the list of programs that are left alone, and no experiment runs the others",
        ..CLAIM
    },
    Claim {
        id: "U8",
        what: "Hashing only as much of a page as is needed",
        paper: "5.9 times as fast as full hashes on pages that differ everywhere, 2.5 times on identical ones; mostly below 100 of 1024 words",
        experiment: "hash",
        ours: &[
            target_of(metric::HASH_SPEED, &[metric::PAPER32], " its full hash, paper's form"),
            target_of(metric::HASH_SPEED, &[metric::LINES], " its full hash, by cache lines"),
        ],
        judge: Judge::Targets(&[metric::HASH_SPEED, metric::HASH_SPEED_OF_XXH64]),
        ..CLAIM
    },
    Claim {
        id: "U9",
        what: "Cost to other programs (SPEC CPU there; here what a neighbour notices)",
        paper: "below 3.0 % on a shared core, 1.5 % otherwise",
        experiment: "neighbours",
        ours: &[
            target_of(metric::P99_LIMIT, &[metric::WHILE_MERGING], "of undisturbed, p99 of a server while merging"),
            target_of(metric::P99_LIMIT, &[metric::AT_REST], "at rest"),
        ],
        peers: &[
            figure(metric::P99_OF_UNDISTURBED, &[KSM, "", metric::WHILE_MERGING, metric::MEDIAN], "KSM while merging"),
            figure(metric::P99_OF_UNDISTURBED, &[KSM, "", metric::AT_REST, metric::MEDIAN], "KSM at rest"),
        ],
        ..CLAIM
    },
    Claim {
        id: "U10",
        what: "Nothing to merge",
        paper: "0.2 % of a core",
        experiment: "idle",
        ours: &[target(metric::CPU_WATCHING, "")],
        ..CLAIM
    },
    Claim {
        id: "U11",
        what: "Governors full, medium, low, quiet",
        paper: "95 % and 2 s; each next one half the CPU and twice the round; quiet 1 % and 20 s",
        experiment: "governors",
        ours: &[
            figure(metric::LARGEST_SHARE, &[metric::FULL, "1"], ", full, over 1 s"),
            figure(metric::LARGEST_SHARE, &[metric::QUIET, "10"], ", quiet, over 10 s"),
        ],
        judge: Judge::AllTargets,
        ..CLAIM
    },
    Claim {
        id: "C1",
        what: "Comparisons of pages with trees for each class, against two trees",
        paper: "57-71 % by address, 56-86 % by write count, 56-77 % by sub-page writes",
        experiment: "classes",
        ours: &[
            target_of(metric::CLASS_COMPARISONS, &[metric::CMD_ADDRESS], "by address"),
            target_of(metric::CLASS_COMPARISONS, &[metric::CMD_PAGECOUNT], "by write count"),
            target_of(metric::CLASS_COMPARISONS, &[metric::CMD_SUBPAGE], "by sub-page writes"),
        ],
        ..CLAIM
    },
    Claim {
        id: "C2",
        what: "Sharing found with trees for each class",
        paper: "39-92 %, 87-100 %, 98-121 % of KSM's",
        experiment: "classes",
        ours: &[
            target_of(metric::CLASS_SHARING, &[metric::CMD_ADDRESS], "by address"),
            target_of(metric::CLASS_SHARING, &[metric::CMD_PAGECOUNT], "by write count"),
            target_of(metric::CLASS_SHARING, &[metric::CMD_SUBPAGE], "by sub-page writes"),
        ],
        ..CLAIM
    },
    Claim {
        id: "C3",
        what: "Share of futile comparisons (84 % in KSM)",
        paper: "4.8, 6.4, 12.2 points lower",
        experiment: "classes",
        ours: &[
            target_of(metric::CLASS_FUTILE, &[metric::CMD_ADDRESS], "by address"),
            target_of(metric::CLASS_FUTILE, &[metric::CMD_PAGECOUNT], "by write count"),
            target_of(metric::CLASS_FUTILE, &[metric::CMD_SUBPAGE], "by sub-page writes"),
        ],
        ..CLAIM
    },
    Claim {
        id: "N1",
        what: "Fairness of two identical programs on two nodes: least slowdown by greatest",
        paper: "0.70-0.85 under KSM, 0.94-0.99 under nuKSM",
        experiment: "numa",
        ours: &[target(metric::FAIRNESS_SMALLEST, "least of five programs (modelled)")],
        ..CLAIM
    },
    Claim {
        id: "N2",
        what: "Which copy to keep: nodes with equal shares",
        paper: "difference of run times from 46 % down to 4 %",
        experiment: "numa",
        ours: &[target_of(metric::OFF_EVEN_SHARE, &[""], " off an even share")],
        judge: Judge::Target(metric::OFF_EVEN_SHARE, &[""]),
        ..CLAIM
    },
    Claim {
        id: "N3",
        what: "Shares of local pages by priority 10:1, 5:1, 1:1, 1:5, 1:10",
        paper: "91:9, 83:17, 50:50, 17:83, 9:91",
        experiment: "numa",
        ours: &[target(metric::OFF_PRIORITY, " off the wanted shares")],
        ..CLAIM
    },
    Claim {
        id: "N4",
        what: "Forests instead of two trees",
        paper: "comparisons and scan time fall with the number of trees; no sharing is lost",
        experiment: "forests",
        ours: &[
            target(metric::TREES_COMPARISONS, "of the comparisons of one tree, with 1,800"),
            target(metric::TREES_SCAN, "of the time of a scan"),
            target(metric::TREES_UNMERGED, "pairs lost"),
        ],
        judge: Judge::Targets(&[
            metric::TREES_OFF_LAW,
            metric::TREES_COMPARISONS,
            metric::TREES_SCAN,
            metric::TREES_UNMERGED,
        ]),
        ..CLAIM
    },
    Claim {
        id: "N5",
        what: "Responsiveness: 2 GiB more every 15 s on a node of 180 GiB",
        paper: "KSM runs out of memory at 900 s, nuKSM finishes",
        experiment: "forests",
        ours: &[target(metric::RACE_LIMIT, " until memory runs out (2400: never)")],
        peers: &[
            figure(metric::RACE, &["ksm", metric::RACE_NEVER], ", ksm"),
            figure(metric::RACE, &["nuksm", metric::RACE_NEVER], ", nuksm"),
        ],
        ..CLAIM
    },
];

/// A claim as measured: peers here, pagefold here, and the verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    pub peers: String,
    pub ours: String,
    pub verdict: Verdict,
}

impl Claim {
    /// `reports` are all repetitions of all experiments. We don't judge quick runs.
    pub fn measured(&self, reports: &[&ExperimentReport], quick: bool) -> Measured {
        let Self { experiment, unmeasured, ours, peers, judge, .. } = self;
        let mut own = reports.to_vec();
        own.retain(|report| report.experiment == *experiment);
        if own.is_empty() {
            let needs = format!("needs the experiment {experiment}");
            let why = if experiment.is_empty() { unmeasured } else { needs.as_str() };
            let ours = format!("not measured here: {why}");
            return Measured { peers: "–".to_owned(), ours, verdict: Verdict::NotMeasured };
        }
        let mut subject: Option<&str> = None;
        let mut named: Vec<&str> = Vec::new();
        for report in &own {
            for PolicyRun { policy, .. } in &report.runs {
                if is_ours(policy) {
                    subject.get_or_insert(policy);
                } else if is_peer(policy) && !named.contains(&policy.as_str()) {
                    named.push(policy);
                }
            }
        }
        let theirs = if let [Cell(Value::Measure(..), _), ..] = peers {
            let mut texts = Vec::new();
            for policy in named {
                let text = shown(peers, &own, Some(policy));
                if !text.is_empty() {
                    texts.push(format!("{policy}: {text}"));
                }
            }
            texts.join("; ")
        } else {
            shown(peers, &own, None)
        };
        Measured {
            peers: text_or(theirs, "–"),
            ours: text_or(shown(ours, &own, subject), "see the targets of the experiment"),
            verdict: if quick { Verdict::NotMeasured } else { judge.verdict(ours, &own, subject) },
        }
    }
}

fn text_or(text: String, other: &str) -> String {
    if text.is_empty() { other.to_owned() } else { text }
}

/// The values of the cells that have one.
fn shown(cells: &[Cell], reports: &[&ExperimentReport], policy: Option<&str>) -> String {
    let mut texts = Vec::new();
    for Cell(from, what) in cells {
        if let Some(value) = from.value(reports, policy) {
            texts.push(format!("{value} {}{what}", from.unit()));
        }
    }
    texts.join(", ")
}

impl Value {
    fn value(&self, reports: &[&ExperimentReport], policy: Option<&str>) -> Option<Spread> {
        let values = reports.iter().filter_map(|report| match self {
            Self::Measure(of, _) => of(&Measures::in_report(report, policy?)?),
            Self::Figure(key) => report.figures.get(&key.to_string()).copied(),
            Self::Target(key) => Some(report.bars.iter().find(|bar| key.is(&bar.name))?.measured),
        });
        Spread::of(values)
    }

    fn unit(&self) -> &'static str {
        match self {
            Self::Measure(_, unit) => unit,
            Self::Figure(key) | Self::Target(key) => key.0.unit,
        }
    }
}

impl Judge {
    fn is_by(&self, ours: &[Cell], name: &str) -> bool {
        match self {
            Self::Shown => ours.iter().any(|Cell(from, _)| match from {
                Value::Target(Key(metric, _)) => Key(*metric, &[]).is(name),
                _ => false,
            }),
            Self::AllTargets => true,
            Self::Targets(metrics) => metrics.iter().any(|&metric| Key(metric, &[]).is(name)),
            Self::Target(metric, of) => Key(*metric, of).is(name),
            Self::AtLeast(_) | Self::AtMost(_) => false,
        }
    }

    fn verdict(&self, ours: &[Cell], reports: &[&ExperimentReport], policy: Option<&str>) -> Verdict {
        let first = ours.first().and_then(|Cell(from, _)| from.value(reports, policy));
        let mut met = match self {
            Self::AtLeast(limit) => first.map(|value| value.median >= *limit),
            Self::AtMost(limit) => first.map(|value| value.median <= *limit),
            Self::Shown | Self::AllTargets | Self::Targets(_) | Self::Target(..) => None,
        };
        for report in reports {
            for bar in &report.bars {
                if self.is_by(ours, &bar.name) {
                    met = Some(met.unwrap_or(true) && bar.met);
                }
            }
        }
        match met {
            // A measurement is missing.
            Some(true) if reports.iter().any(|report| !report.failures.is_empty()) => Verdict::NotMeasured,
            Some(true) => Verdict::Met,
            Some(false) => Verdict::Missed,
            None => Verdict::NotMeasured,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Failure, Limit};

    fn claim(id: &str) -> &'static Claim {
        CLAIMS.iter().find(|claim| claim.id == id).unwrap()
    }

    #[test]
    fn every_claim_has_a_row() {
        let ids: Vec<&str> = CLAIMS.iter().map(|claim| claim.id).collect();
        let expected = [("K", 4), ("U", 11), ("C", 3), ("N", 5)];
        let expected = expected.iter().flat_map(|&(paper, count)| (1..=count).map(move |row| format!("{paper}{row}")));
        assert_eq!(ids, expected.collect::<Vec<_>>());
        for claim in &CLAIMS {
            let is_measured = crate::results::NAMES.contains(&claim.experiment);
            assert!(is_measured == claim.unmeasured.is_empty(), "{}", claim.id);
        }
    }

    #[test]
    fn verdicts_follow_the_targets_of_all_repetitions() {
        let idle = claim("U10");
        assert_eq!(idle.measured(&[], false).verdict, Verdict::NotMeasured);
        assert_eq!(claim("U7").measured(&[], false).verdict, Verdict::NotMeasured);
        let report = |percent| {
            let mut report = ExperimentReport::new("idle", "");
            report.bar(metric::CPU_WATCHING.of(["8.00 GiB"]), Limit::AtMost(0.2), Some(percent));
            report.bar("another", Limit::AtMost(0.0), Some(1.0));
            report
        };
        let (good, bad) = (report(0.1), report(0.3));
        let found = idle.measured(&[&good], false);
        assert_eq!((found.ours.as_str(), found.verdict), ("0.1000 % of a core", Verdict::Met));
        let found = idle.measured(&[&good, &bad], false);
        assert_eq!((found.ours.as_str(), found.verdict), ("0.2000 (0.1000..0.3000) % of a core", Verdict::Missed));
        let mut failed = good.clone();
        failed.failures.push(Failure { policy: "p".into(), error: "e".into() });
        assert_eq!(idle.measured(&[&failed], false).verdict, Verdict::NotMeasured);
        assert_eq!(idle.measured(&[&bad], true).verdict, Verdict::NotMeasured);
        // U3 is judged by the paper's value.
        let mut short = ExperimentReport::new("short-lived", "");
        assert_eq!(claim("U3").measured(&[&short], false).verdict, Verdict::NotMeasured);
        for (seconds, verdict) in [(0.25, Verdict::Met), (0.5, Verdict::Missed)] {
            short.figure(metric::SMALLEST_LIFETIME, seconds);
            assert_eq!(claim("U3").measured(&[&short], false).verdict, verdict);
        }
        // Targets that we didn't judge.
        assert_eq!(idle.measured(&[&ExperimentReport::new("idle", "")], false).verdict, Verdict::NotMeasured);
    }
}
