//! Text output of comparisons.

use crate::replay::{Algorithm, Outcome};
use pagefold_cli::table::Table;
use pagefold_core::units::{Bytes, Pages};
use serde::Serialize;
use std::fmt;

/// Several algorithms on one record.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `pagefold.lab.replay/1`.
    pub schema: &'static str,
    /// The record's name.
    pub record: String,
    /// The record's origin.
    pub source: String,
    /// Replayed time, seconds.
    pub seconds: f64,
    /// Maximum number of pages present at one time.
    pub pages: u64,
    /// Pages left out because they are already shared by fork.
    pub forked: u64,
    /// Savable pages over time (seconds).
    pub savable: Vec<(f64, u64)>,
    /// Results of each algorithm.
    pub outcomes: Vec<Outcome>,
}

impl Comparison {
    /// The reference of the comparison: `ksm`, if present.
    pub fn ksm(&self) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| outcome.algorithm == Algorithm::Ksm)
    }
}

fn mib(pages: f64) -> String {
    format!("{:.1}", pages / Pages(1 << 8).0 as f64)
}

fn of(part: f64, whole: Option<f64>) -> String {
    match whole {
        Some(whole) if whole > 0.0 => format!("{:.1} %", 100.0 * part / whole),
        _ => "-".to_owned(),
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let savable =
            self.savable.iter().map(|&(_, pages)| pages as f64).sum::<f64>() / self.savable.len().max(1) as f64;
        writeln!(
            f,
            "{} ({}): {:.0} s, {:.0} MiB, of which {} MiB could be saved on average",
            self.record,
            self.source,
            self.seconds,
            Bytes(self.pages * 4096).mib(),
            mib(savable)
        )?;
        if self.forked > 0 {
            writeln!(f, "{} pages shared by fork are left out: merging them saves nothing", self.forked)?;
        }
        let header = [
            "algorithm",
            "MiB saved",
            "on average",
            "of ksm's",
            "records",
            "comparisons",
            "of ksm's",
            "futile",
            "depth",
            "scanned",
            "CPU s",
            "of ksm's",
        ];
        let mut table = Table::new(header, |column| column > 0);
        let ksm = self.ksm();
        for outcome in &self.outcomes {
            let comparisons = outcome.comparisons();
            let steps = if outcome.hash_comparisons > 0 {
                format!("{comparisons} + {} of hashes", outcome.hash_comparisons)
            } else {
                comparisons.to_string()
            };
            table.add_row([
                outcome.algorithm.to_string(),
                mib(outcome.saved as f64),
                mib(outcome.saved_mean),
                of(outcome.saved_mean, ksm.map(|ksm| ksm.saved_mean)),
                format!("{:.1}", Bytes(outcome.metadata_bytes).mib()),
                steps,
                of(comparisons as f64, ksm.map(|ksm| ksm.comparisons() as f64)),
                format!("{:.1} %", 100.0 * outcome.futile_rate),
                format!("{:.1}", outcome.depth),
                if outcome.read > 0 {
                    format!("{} + {} read", outcome.scanned, outcome.read)
                } else {
                    outcome.scanned.to_string()
                },
                format!("{:.2}", outcome.cpu_seconds),
                of(outcome.cpu_seconds, ksm.map(|ksm| ksm.cpu_seconds)),
            ]);
        }
        writeln!(f, "\n{table}")?;
        let classed = |outcome: &&Outcome| outcome.trees.len() > 1;
        for outcome in self.outcomes.iter().filter(classed) {
            let (most, all) = (outcome.trees.iter().max().copied().unwrap_or(0), outcome.trees.iter().sum::<u64>());
            let used = outcome.trees.iter().filter(|&&pages| pages > 0).count();
            writeln!(
                f,
                "{}: {used} of {} trees used, the largest has {} of all pages; {} unwritten pages not compared again",
                outcome.algorithm,
                outcome.trees.len(),
                of(most as f64, Some(all as f64)),
                outcome.spared
            )?;
        }
        Ok(())
    }
}
