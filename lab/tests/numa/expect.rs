//! The expected results of a scenario, and the report about it.

use crate::guest::Machine;
use crate::model::{Disturbance, MergedBy, Moves, Outcome, PageSnapshot, Scenario};
use std::env;
use std::time::Duration;

/// A scenario, and the result that we expect of it beside the results that we expect of all.
pub struct Case {
    pub scenario: Scenario,
    pub expect: Expect,
}

/// Where the merged pages must be.
pub enum Expect {
    /// The pages may be anywhere.
    Any,
    /// The nodes have these percentages of the pages, within [`POINTS`].
    Shares(Vec<f64>),
    /// All pages are on this node.
    All(usize),
    /// At most this percentage of the pages is on this node.
    AtMost(usize, f64),
    /// Processes of two nodes share no page; the pages saved, in multiples of a process's pages.
    Apart(u64),
    /// The pages may be anywhere, and the last check reports one damaged page.
    Damage,
}

/// Tolerance of a share, in percentage points.
const POINTS: f64 = 2.0;
/// The percentage that counts as all.
const ALL: f64 = 98.0;
/// The percentage of the saved memory that placement may cost.
const SAVED: f64 = 1.0;
/// Pages of the rest of the system that may still move after merging has finished.
const QUIET: u64 = 64;
/// Time limit of a scenario, and of booting; each takes seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the cases in one boot, prints their results, and fails if a result isn't as expected.
#[track_caller]
pub fn run(machine: &Machine, cases: &[Case]) {
    let only = env::var("PAGEFOLD_NUMA").unwrap_or_default();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.scenario.name.contains(&only)).collect();
    if cases.is_empty() {
        return println!("no scenario here has {only} in its name");
    }
    let scenarios: Vec<Scenario> = cases.iter().map(|case| case.scenario.clone()).collect();
    let limit = LIMIT * u32::try_from(cases.len() + 1).unwrap();
    let Some(outcomes) = machine.run(&scenarios, limit) else { return };
    let mut failures = Vec::new();
    for (case, outcome) in cases.iter().zip(&outcomes) {
        println!("{}", line(&case.scenario, outcome));
        failures.extend(case.failures(outcome).into_iter().map(|what| format!("{}: {what}", outcome.name)));
    }
    assert!(failures.is_empty(), "\n{}\n", failures.join("\n"));
}

impl Case {
    /// Lists the expectations that the outcome doesn't meet.
    fn failures(&self, outcome: &Outcome) -> Vec<String> {
        let mut failures = match (&self.expect, &outcome.wrong[..]) {
            (Expect::Damage, [check]) if check == "victim 0: 1 damaged" => Vec::new(),
            (Expect::Damage, wrong) => vec![format!("not found: {wrong:?}")],
            (_, wrong) => wrong.to_vec(),
        };
        let mut must = |so: bool, what: String| {
            if !so {
                failures.push(what);
            }
        };
        let Outcome { before, merged, unmerged, moves, .. } = outcome;
        let pages = self.scenario.pages as u64;
        let victims = &self.scenario.victims;
        // The initial state is as the scenario says.
        for (victim, seen) in victims.iter().zip(&before.victims) {
            let active = if victim.active && !self.scenario.generations {
                seen.active >= pages * 99 / 100
            } else {
                seen.active <= pages / 100
            };
            must(active && seen.by_node[victim.node] == pages, format!("the initial state of {victim:?} is {seen:?}"));
        }
        must(outcome.settled, "merging did not finish".to_owned());
        let Moves { migrated, failed, balanced, .. } = outcome.when_quiet;
        // The kernel may count pages that it migrated just before as balanced since.
        must(migrated.saturating_sub(balanced) <= QUIET, format!("{migrated} pages moved at the end"));
        must(failed <= QUIET, format!("{failed} pages could not be moved at the end"));
        must(moves.killed == 0, format!("{} processes were killed", moves.killed));

        if let MergedBy::Pagefold(_) = self.scenario.merged_by {
            let summary = &outcome.summary;
            must(
                summary["knobs_restored"] == true && summary["stood_down"].is_null(),
                format!("the summary is {summary}"),
            );
            // Unmerging allocates copies on the node of the process.
            let local = local(&self.scenario, unmerged);
            must(
                local >= ALL || self.scenario.disturbance != Disturbance::None,
                format!("{local:.0} % are on their own nodes at the end"),
            );
        }
        for seen in [before, merged, unmerged].into_iter().flat_map(|snapshot| &snapshot.victims) {
            let merged: u64 = seen.merged.iter().sum();
            must(merged == seen.merged_by_smaps, format!("{merged} merged pages, {} by smaps", seen.merged_by_smaps));
        }
        let by_node = shares(merged);
        match &self.expect {
            Expect::Any | Expect::Damage => {}
            Expect::Shares(wanted) => {
                let close = by_node.iter().zip(wanted).all(|(share, wanted)| (share - wanted).abs() <= POINTS);
                must(close, format!("shares {by_node:.1?} instead of {wanted:?}"));
            }
            Expect::All(node) => {
                must(by_node[*node] >= ALL, format!("shares {by_node:.1?}, and not all on node {node}"));
            }
            Expect::AtMost(node, share) => {
                must(by_node[*node] <= *share, format!("shares {by_node:.1?}, node {node} is full"));
            }
            Expect::Apart(_) => must(merged.across == 0, format!("{} pages are shared across nodes", merged.across)),
        }
        let saved = match self.expect {
            Expect::Apart(times) => times * pages,
            _ => (victims.len() as u64 - 1) * pages,
        };
        let off = 100.0 * (merged.saved as f64 - saved as f64).abs();
        must(off <= SAVED * saved as f64, format!("{} pages saved instead of {saved}", merged.saved));

        if let (Disturbance::Offline { node }, Some(disturbed)) = (self.scenario.disturbance, &outcome.disturbed) {
            let left: u64 = disturbed.victims.iter().map(|pages| pages.by_node[node]).sum();
            must(left == 0, format!("{left} pages are on the node that went offline"));
        }
        let still: u64 = unmerged.frames.iter().sum();
        must(still == 0, format!("{still} pages are merged after everything was unmerged"));
        must(outcome.knobs_changed.is_empty(), format!("not restored: {:?}", outcome.knobs_changed));
        failures
    }
}

/// Percentages of the merged pages, by node.
fn shares(snapshot: &PageSnapshot) -> Vec<f64> {
    let all: u64 = snapshot.frames.iter().sum();
    snapshot.frames.iter().map(|&frames| 100.0 * frames as f64 / all.max(1) as f64).collect()
}

/// The result of a scenario, as a line.
fn line(scenario: &Scenario, outcome: &Outcome) -> String {
    let Outcome { name, merged, moves, .. } = outcome;
    format!(
        "{name:<32} {:>8} merged {:?}, saved {}, {:.1} s; migrated {} ({} by NUMA balancing), failed {}; local at the end: {:.0} %",
        format!("{} programs", scenario.victims.len()),
        merged.frames,
        merged.saved,
        outcome.settled_ms as f64 / 1e3,
        moves.migrated,
        moves.balanced,
        moves.failed,
        local(scenario, &outcome.unmerged),
    )
}

/// The percentage of the processes' pages that are on their own nodes.
fn local(scenario: &Scenario, snapshot: &PageSnapshot) -> f64 {
    let victims = scenario.victims.iter().zip(&snapshot.victims);
    let local: u64 = victims.map(|(victim, seen)| seen.by_node[victim.node]).sum();
    100.0 * local as f64 / (scenario.victims.len() * scenario.pages) as f64
}
