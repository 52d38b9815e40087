//! Text output of comparisons.

use crate::columns;
use crate::replay::{Algorithm, Outcome};
use pagefold_engine::units::Bytes;
use serde::Serialize;
use std::fmt;

/// Several algorithms on one record.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `pagefold.lab.replay/1`.
    pub schema: &'static str,
    pub record: String,
    pub source: String,
    pub seconds: f64,
    /// Maximum number of pages present at one time.
    pub pages: u64,
    /// Pages left out because programs already share them by fork.
    pub forked: u64,
    /// Savable pages over time (seconds).
    pub savable: Vec<(f64, u64)>,
    pub outcomes: Vec<Outcome>,
}

impl Comparison {
    /// The reference of the comparison: `ksm`, if present.
    pub fn ksm(&self) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| outcome.algorithm == Algorithm::Ksm)
    }
}

fn mib(pages: f64) -> String {
    format!("{:.1}", pages / 256.0)
}

fn and(number: u64, more: u64, name: &str) -> String {
    if more == 0 { number.to_string() } else { format!("{number} + {more} {name}") }
}

fn of(part: f64, whole: Option<f64>) -> String {
    match whole {
        Some(whole) if whole > 0.0 => format!("{:.1} %", 100.0 * part / whole),
        _ => "-".to_owned(),
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let savable: f64 = self.savable.iter().map(|&(_, pages)| pages as f64).sum();
        writeln!(
            f,
            "{} ({}): {:.0} s, {:.0} MiB; on average {} MiB of it could be saved",
            self.record,
            self.source,
            self.seconds,
            Bytes(self.pages * 4096).mib(),
            mib(savable / self.savable.len().max(1) as f64)
        )?;
        if self.forked > 0 {
            writeln!(f, "{} pages shared by fork are left out: merging them saves nothing", self.forked)?;
        }
        let ksm = self.ksm();
        let table = columns::table(
            1,
            &self.outcomes,
            &[
                ("algorithm", &|outcome| outcome.algorithm.to_string()),
                ("MiB saved", &|outcome| mib(outcome.saved as f64)),
                ("on average", &|outcome| mib(outcome.saved_mean)),
                ("of ksm's", &|outcome| of(outcome.saved_mean, ksm.map(|ksm| ksm.saved_mean))),
                ("records", &|outcome| format!("{:.1}", Bytes(outcome.metadata_bytes).mib())),
                ("comparisons", &|outcome| and(outcome.comparisons(), outcome.hash_comparisons, "of hashes")),
                ("of ksm's", &|outcome| of(outcome.comparisons() as f64, ksm.map(|ksm| ksm.comparisons() as f64))),
                ("futile", &|outcome| format!("{:.1} %", 100.0 * outcome.futile_rate)),
                ("depth", &|outcome| format!("{:.1}", outcome.depth)),
                ("scanned", &|outcome| and(outcome.scanned, outcome.read, "read")),
                ("CPU s", &|outcome| format!("{:.2}", outcome.cpu_seconds)),
                ("of ksm's", &|outcome| of(outcome.cpu_seconds, ksm.map(|ksm| ksm.cpu_seconds))),
            ],
        );
        writeln!(f, "\n{table}")?;
        for outcome in &self.outcomes {
            if outcome.trees.len() < 2 {
                continue;
            }
            let most = outcome.trees.iter().max().copied().unwrap_or(0);
            let all = outcome.trees.iter().sum::<u64>();
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
