//! What the papers claim, and what measures it here.

use crate::measures::{Measures, Spread, is_peer};
use crate::plot::is_ours;
use crate::report::{ExperimentReport, PolicyRun};
use std::fmt;

/// A claim of a paper.
pub struct Claim {
    pub id: &'static str,
    /// What was measured.
    pub what: &'static str,
    /// What the paper gives.
    pub paper: &'static str,
    pub here: Here,
}

/// What measures a claim here.
pub enum Here {
    Experiment {
        name: &'static str,
        ours: &'static [Cell],
        peers: &'static [Cell],
        judge: Judge,
    },
    /// No experiment does; this says what there is instead.
    Not(&'static str),
}

/// A value to show: what it is, and where it comes from.
pub struct Cell(&'static str, Value);

enum Value {
    /// A quantity of the first policy of pagefold, or of each peer.
    Measure(fn(&Measures) -> Option<f64>),
    /// A figure of the experiment.
    Figure(&'static str),
    /// What was measured for a target whose name begins with this.
    Bar(&'static str),
}

/// How it is judged.
pub enum Judge {
    /// By all targets of the experiment whose names begin with one of these; with an empty one by all targets.
    Targets(&'static [&'static str]),
    /// By the first of our values, against the paper's.
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

const SECONDS_TO_99: Value = Value::Measure(|measures| measures.seconds_to[2]);
const MIB_PER_CPU_SECOND: Value = Value::Measure(|measures| measures.mib_per_cpu_second);
const MIB_PER_SECOND: Value = Value::Measure(|measures| Some(0.9 * measures.saved_mib / measures.seconds_to[1]?));
const CPU_AFTER: Value = Value::Measure(|measures| measures.percent_after);

/// The claims, in the order of the papers: the KSM tree's message, UKSM, CMD, nuKSM.
pub const CLAIMS: [Claim; 23] = [
    Claim {
        id: "K1",
        what: "Worst case: two programs of 1 GiB (here a quarter) whose pages differ from each other in the last 8 bytes only",
        paper: "96 s to merge, 10 MB/s; further copies 34 s, 30 MB/s",
        here: Here::Experiment {
            name: "tails",
            ours: &[Cell("MiB/s", MIB_PER_SECOND)],
            peers: &[Cell("MiB/s", MIB_PER_SECOND)],
            judge: Judge::AtLeast(10.0),
        },
    },
    Claim {
        id: "K2",
        what: "Best case: all pages of 1 GiB are identical (here: 2 GiB, beside 2 GiB of random pages)",
        paper: "4 s, 256 MB/s",
        here: Here::Experiment {
            name: "static-mix",
            ours: &[Cell("MiB/s", MIB_PER_SECOND)],
            peers: &[Cell("MiB/s", MIB_PER_SECOND)],
            judge: Judge::AtLeast(244.0),
        },
    },
    Claim {
        id: "K3",
        what: "Reading a word of every page, before and after merging",
        paper: "as fast in the worst case, about 4 times as fast in the best",
        here: Here::Experiment {
            name: "tails",
            ours: &[
                Cell(
                    "times as fast in the worst case",
                    Value::Figure("worst case: speed of reading when merged, times that before"),
                ),
                Cell("in the best", Value::Figure("best case: speed of reading when merged, times that before")),
            ],
            peers: &[],
            judge: Judge::AtLeast(1.0),
        },
    },
    Claim {
        id: "K4",
        what: "12 GiB allocated on a machine with 4 GiB",
        paper: "fits",
        here: Here::Experiment {
            name: "overcommit",
            ours: &[Cell("times a limit of 512 MiB", Value::Bar("memory of programs that fit"))],
            peers: &[Cell("MiB with KSM", Value::Figure("ksm-1000/20ms: MiB of programs that fit"))],
            judge: Judge::Targets(&["memory of programs that fit"]),
        },
    },
    Claim {
        id: "U1",
        what: "Static mix: one content beside random pages (there 4 GiB of each, here half)",
        paper: "merged in 5 s, by KSM in 611, 95, 61 s at 100, 1000, 2000 pages per 20 ms; 8.3, 12.6, 11.5 times KSM's MB per CPU second",
        here: Here::Experiment {
            name: "static-mix",
            ours: &[
                Cell("s to 99 %", SECONDS_TO_99),
                Cell("MiB/CPU s to 90 %", MIB_PER_CPU_SECOND),
                Cell("% of a core afterwards", CPU_AFTER),
            ],
            peers: &[
                Cell("s to 99 %", SECONDS_TO_99),
                Cell("MiB/CPU s to 90 %", MIB_PER_CPU_SECOND),
                Cell("% of a core afterwards", CPU_AFTER),
            ],
            judge: Judge::Targets(&[""]),
        },
    },
    Claim {
        id: "U2",
        what: "One content of which a page is rewritten with the same content every 10 ms",
        paper: "left alone by default; with the filter off and equal CPU, KSM saves a third to a fifth",
        here: Here::Experiment {
            name: "cow-breaker",
            ours: &[
                Cell("share merged at the end, by default", Value::Figure("default: share merged at the end")),
                Cell(
                    "times KSM's savings at equal CPU, filter off (least)",
                    Value::Bar("average savings with the filter off"),
                ),
            ],
            peers: &[],
            judge: Judge::Targets(&[""]),
        },
    },
    Claim {
        id: "U3",
        what: "Short-lived: 500 MB of one content, mapped for T and unmapped for T",
        paper: "ignored by default; tuned, almost all is merged at T = 0.2 s, where KSM at half a core merges none below 2 s",
        here: Here::Experiment {
            name: "short-lived",
            ours: &[
                Cell(
                    "s, smallest T at which half is merged, sensitive",
                    Value::Figure("smallest T at which half is merged, sensitive, s"),
                ),
                Cell("share merged by default, at best", Value::Bar("default: share merged at best")),
            ],
            peers: &[Cell("share merged by KSM at T = 2 s", Value::Figure("share merged, ksm-2000/20ms, T = 2 s"))],
            judge: Judge::AtMost(0.25),
        },
    },
    Claim {
        id: "U4",
        what: "25 virtual machines of 512 MB, started 10 s apart",
        paper: "3 times what KSM, and 2 times what XLH has merged when all are up",
        here: Here::Experiment {
            name: "vms",
            ours: &[
                Cell("times what KSM by default has saved when all of ten are up", Value::Bar("saved when all are up")),
                Cell("times its CPU time", Value::Bar("CPU time until then")),
            ],
            peers: &[],
            judge: Judge::Targets(&["saved when all are up", "CPU time until then"]),
        },
    },
    Claim {
        id: "U5",
        what: "40 virtual machines of 1 GB, overcommitted",
        paper: "no swap (KSM: 1.3 GB), half of KSM's CPU, up in 420 s instead of 550",
        here: Here::Experiment {
            name: "vms-overcommitted",
            ours: &[
                Cell("MiB swapped out", Value::Bar("MiB swapped out until all are up")),
                Cell("of KSM's time", Value::Bar("time until all are up relative to KSM")),
                Cell("of KSM's CPU time", Value::Bar("CPU time until then relative to KSM")),
            ],
            peers: &[Cell("MiB swapped out by KSM", Value::Figure("ksm-1000/20ms: MiB swapped out until all are up"))],
            judge: Judge::Targets(&[""]),
        },
    },
    Claim {
        id: "U6",
        what: "Three WordPress containers under load",
        paper: "61 % of the anonymous memory; CPU mostly below 1 %, at most 3 %",
        here: Here::Experiment {
            name: "containers",
            ours: &[
                Cell("of the anonymous memory", Value::Bar("anonymous memory on average")),
                Cell("% of a core in the median second", Value::Bar("CPU of pagefold and ksmd in the median second")),
                Cell("% in the busiest second", Value::Bar("CPU of pagefold and ksmd in the busiest second")),
            ],
            peers: &[Cell(
                "of the anonymous memory with KSM",
                Value::Figure("ksm-1000/20ms: anonymous memory on average relative to no merging"),
            )],
            judge: Judge::Targets(&["anonymous memory on average", "CPU of pagefold and ksmd"]),
        },
    },
    Claim {
        id: "U7",
        what: "Desktop: PDF viewer, browser, image editor",
        paper: "415, 27 and 39 MB within 2, 5 and 1 s",
        here: Here::Not("browsers are on the list of programs that are left alone, and no experiment runs the others"),
    },
    Claim {
        id: "U8",
        what: "Hashing only as much of a page as is needed",
        paper: "5.9 times as fast as full hashes on pages that differ everywhere, 2.5 times on identical ones; mostly below 100 of 1024 words",
        here: Here::Experiment {
            name: "hash",
            ours: &[
                Cell(
                    "times its full hash, paper's form",
                    Value::Bar("random: speed of paper32 relative to its full hash"),
                ),
                Cell(
                    "times its full hash, by cache lines",
                    Value::Bar("random: speed of lines relative to its full hash"),
                ),
            ],
            peers: &[],
            judge: Judge::Targets(&["random: speed of"]),
        },
    },
    Claim {
        id: "U9",
        what: "Cost to other programs (SPEC CPU there; here what a neighbour notices)",
        paper: "below 3.0 % on a shared core, 1.5 % otherwise",
        here: Here::Experiment {
            name: "neighbours",
            ours: &[
                Cell("of undisturbed, p99 of a server while merging", Value::Bar("99th percentile while merging")),
                Cell("at rest", Value::Bar("99th percentile at rest")),
            ],
            peers: &[
                Cell("KSM while merging", Value::Figure("ksm-1000/20ms p99 of undisturbed while merging, median")),
                Cell("KSM at rest", Value::Figure("ksm-1000/20ms p99 of undisturbed at rest, median")),
            ],
            judge: Judge::Targets(&["99th percentile"]),
        },
    },
    Claim {
        id: "U10",
        what: "Nothing to merge",
        paper: "0.2 % of a core",
        here: Here::Experiment {
            name: "idle",
            ours: &[Cell("% of a core", Value::Bar("CPU of pagefold and ksmd watching"))],
            peers: &[],
            judge: Judge::Targets(&["CPU of pagefold and ksmd watching"]),
        },
    },
    Claim {
        id: "U11",
        what: "Governors full, medium, low, quiet",
        paper: "95 % and 2 s; each next one half the CPU and twice the round; quiet 1 % and 20 s",
        here: Here::Experiment {
            name: "governors",
            ours: &[
                Cell("% of a core, full, over 1 s", Value::Figure("full: largest share of a core over 1 s, per cent")),
                Cell("% quiet, over 10 s", Value::Figure("quiet: largest share of a core over 10 s, per cent")),
            ],
            peers: &[],
            judge: Judge::Targets(&[""]),
        },
    },
    Claim {
        id: "C1",
        what: "Comparisons of pages with trees for each class, against two trees",
        paper: "57-71 % by address, 56-86 % by write count, 56-77 % by sub-page writes",
        here: Here::Experiment {
            name: "classes",
            ours: &[
                Cell("by address", Value::Bar("comparisons, of ksm's, at most, cmd-address")),
                Cell("by write count", Value::Bar("comparisons, of ksm's, at most, cmd-pagecount")),
                Cell("by sub-page writes", Value::Bar("comparisons, of ksm's, at most, cmd-subpage")),
            ],
            peers: &[],
            judge: Judge::Targets(&["comparisons, of ksm's, at most"]),
        },
    },
    Claim {
        id: "C2",
        what: "Sharing found with trees for each class",
        paper: "39-92 %, 87-100 %, 98-121 % of KSM's",
        here: Here::Experiment {
            name: "classes",
            ours: &[
                Cell("by address", Value::Bar("sharing on average, of ksm's, at least, cmd-address")),
                Cell("by write count", Value::Bar("sharing on average, of ksm's, at least, cmd-pagecount")),
                Cell("by sub-page writes", Value::Bar("sharing on average, of ksm's, at least, cmd-subpage")),
            ],
            peers: &[],
            judge: Judge::Targets(&["sharing on average, of ksm's, at least"]),
        },
    },
    Claim {
        id: "C3",
        what: "Share of futile comparisons (84 % in KSM)",
        paper: "4.8, 6.4, 12.2 points lower",
        here: Here::Experiment {
            name: "classes",
            ours: &[
                Cell("by address", Value::Bar("points fewer futile comparisons on average, cmd-address")),
                Cell("by write count", Value::Bar("points fewer futile comparisons on average, cmd-pagecount")),
                Cell("by sub-page writes", Value::Bar("points fewer futile comparisons on average, cmd-subpage")),
            ],
            peers: &[],
            judge: Judge::Targets(&["points fewer futile comparisons on average"]),
        },
    },
    Claim {
        id: "N1",
        what: "Fairness of two identical programs on two nodes: least slowdown by greatest",
        paper: "0.70-0.85 under KSM, 0.94-0.99 under nuKSM",
        here: Here::Experiment {
            name: "numa",
            ours: &[Cell("least of five programs (modelled)", Value::Bar("smallest fairness of the five programs"))],
            peers: &[],
            judge: Judge::Targets(&["smallest fairness of the five programs"]),
        },
    },
    Claim {
        id: "N2",
        what: "Which copy to keep: nodes with equal shares",
        paper: "difference of run times from 46 % down to 4 %",
        here: Here::Experiment {
            name: "numa",
            ours: &[Cell(
                "points off an even share",
                Value::Bar("pagefold: largest deviation of local pages from an even share"),
            )],
            peers: &[],
            judge: Judge::Targets(&["pagefold: largest deviation of local pages from an even share"]),
        },
    },
    Claim {
        id: "N3",
        what: "Shares of local pages by priority 10:1, 5:1, 1:1, 1:5, 1:10",
        paper: "91:9, 83:17, 50:50, 17:83, 9:91",
        here: Here::Experiment {
            name: "numa",
            ours: &[Cell("points off the wanted shares", Value::Bar("priority: largest deviation"))],
            peers: &[],
            judge: Judge::Targets(&["priority: largest deviation"]),
        },
    },
    Claim {
        id: "N4",
        what: "Forests instead of two trees",
        paper: "comparisons and scan time fall with the number of trees; no sharing is lost",
        here: Here::Experiment {
            name: "forests",
            ours: &[
                Cell("of the comparisons of one tree, with 1,800", Value::Bar("comparisons with 1,800 trees")),
                Cell("of the time of a scan", Value::Bar("time of a scan with 1,800 trees")),
                Cell("pairs lost", Value::Bar("pairs not merged")),
            ],
            peers: &[],
            judge: Judge::Targets(&["comparisons", "time of a scan", "pairs not merged"]),
        },
    },
    Claim {
        id: "N5",
        what: "Responsiveness: 2 GiB more every 15 s on a node of 180 GiB",
        paper: "KSM runs out of memory at 900 s, nuKSM finishes",
        here: Here::Experiment {
            name: "forests",
            ours: &[Cell(
                "s until memory runs out (2400: never)",
                Value::Bar("race: s until memory runs out, pagefold"),
            )],
            peers: &[
                Cell("s, ksm", Value::Figure("race: ksm, s until memory runs out (2400 stands for never)")),
                Cell("s, nuksm", Value::Figure("race: nuksm, s until memory runs out (2400 stands for never)")),
            ],
            judge: Judge::Targets(&["race"]),
        },
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
    /// `reports` are all repetitions of all experiments. Quick ones are not judged.
    pub fn measured(&self, reports: &[&ExperimentReport], quick: bool) -> Measured {
        let (name, ours, peers, judge) = match &self.here {
            Here::Not(why) => {
                let ours = format!("not measured here: {why}");
                return Measured { peers: "–".to_owned(), ours, verdict: Verdict::NotMeasured };
            }
            Here::Experiment { name, ours, peers, judge } => (name, ours, peers, judge),
        };
        let own: Vec<&ExperimentReport> = reports.iter().copied().filter(|report| report.experiment == *name).collect();
        if own.is_empty() {
            let ours = format!("not measured here: needs the experiment {name}");
            return Measured { peers: "–".to_owned(), ours, verdict: Verdict::NotMeasured };
        }
        let first = own.iter().flat_map(|report| &report.runs).map(|run| &run.policy).find(|policy| is_ours(policy));
        let mut named: Vec<&str> = Vec::new();
        for PolicyRun { policy, .. } in own.iter().flat_map(|report| &report.runs) {
            if is_peer(policy) && !named.contains(&policy.as_str()) {
                named.push(policy);
            }
        }
        let text = |cells: &[Cell], policy: Option<&str>| {
            let shown =
                cells.iter().filter_map(|Cell(what, from)| Some(format!("{} {what}", from.value(&own, policy)?)));
            shown.collect::<Vec<_>>().join(", ")
        };
        let theirs =
            named.iter().map(|policy| (*policy, text(peers, Some(policy)))).filter(|(_, text)| !text.is_empty());
        let mut theirs: Vec<String> = match peers {
            [Cell(_, Value::Measure(_)), ..] => theirs.map(|(policy, text)| format!("{policy}: {text}")).collect(),
            _ => vec![text(peers, None)],
        };
        theirs.retain(|text| !text.is_empty());
        let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
        Measured {
            peers: or(theirs.join("; "), "–"),
            ours: or(text(ours, first.map(String::as_str)), "see the targets of the experiment"),
            verdict: if quick { Verdict::NotMeasured } else { judge.verdict(ours, &own, first.map(String::as_str)) },
        }
    }
}

impl Value {
    fn value(&self, reports: &[&ExperimentReport], policy: Option<&str>) -> Option<Spread> {
        let values = reports.iter().filter_map(|report| match self {
            Self::Measure(of) => of(&Measures::in_report(report, policy?)?),
            Self::Figure(name) => report.figures.get(*name).copied(),
            Self::Bar(name) => Some(report.bars.iter().find(|bar| bar.name.starts_with(name))?.measured),
        });
        Spread::of(values)
    }
}

impl Judge {
    fn verdict(&self, ours: &[Cell], reports: &[&ExperimentReport], policy: Option<&str>) -> Verdict {
        let first = || ours.first().and_then(|Cell(_, from)| from.value(reports, policy)).map(|value| value.median);
        let met = match self {
            Self::Targets(names) => {
                let judged = |name: &str| names.iter().any(|start| name.starts_with(start));
                let bars = reports.iter().flat_map(|report| &report.bars).filter(|bar| judged(&bar.name));
                let met: Vec<bool> = bars.map(|bar| bar.met).collect();
                if met.is_empty() { None } else { Some(met.iter().all(|&met| met)) }
            }
            Self::AtLeast(limit) => first().map(|value| value >= *limit),
            Self::AtMost(limit) => first().map(|value| value <= *limit),
        };
        match met {
            // Something that should have been measured was not.
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
    }

    #[test]
    fn verdicts_follow_the_targets_of_all_repetitions() {
        let idle = claim("U10");
        assert_eq!(idle.measured(&[], false).verdict, Verdict::NotMeasured);
        assert_eq!(claim("U7").measured(&[], false).verdict, Verdict::NotMeasured);
        let report = |percent| {
            let mut report = ExperimentReport::new("idle", "");
            let name = "CPU of pagefold and ksmd watching 8.00 GiB, per cent of a core";
            report.bar(name, Limit::AtMost(0.2), Some(percent));
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
        // By the paper's value.
        let mut short = ExperimentReport::new("short-lived", "");
        assert_eq!(claim("U3").measured(&[&short], false).verdict, Verdict::NotMeasured);
        for (seconds, verdict) in [(0.25, Verdict::Met), (0.5, Verdict::Missed)] {
            short.figure("smallest T at which half is merged, sensitive, s", seconds);
            assert_eq!(claim("U3").measured(&[&short], false).verdict, verdict);
        }
        // Targets that were not judged.
        assert_eq!(idle.measured(&[&ExperimentReport::new("idle", "")], false).verdict, Verdict::NotMeasured);
    }
}
