//! Charts of experiments, with those of hashes.

mod hash;

use crate::bench::report::ExperimentReport;

/// Draws an experiment's charts and returns their file names and contents.
pub fn charts(report: &ExperimentReport) -> Vec<(String, String)> {
    let mut charts = pagefold_report::plot::charts(report);
    if report.experiment == "hash" {
        charts.extend(hash::charts(report));
    }
    charts
}
