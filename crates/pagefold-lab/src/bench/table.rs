//! Results as text.

use crate::bench::chart::{self, FIRST_SECONDS};
use crate::bench::experiment::Experiment;
use crate::bench::report::{ExperimentReport, Limit, PolicyRun};
use crate::charts::number;
use pagefold_cli::table::Table;
use pagefold_core::units::Bytes;
use std::fmt::Write;

/// Columns of the text chart.
const CHART_COLUMNS: u32 = 56;

/// Lists the experiments and their claims.
pub fn list(experiments: &[Experiment]) -> String {
    experiments.iter().fold(String::new(), |mut text, experiment| {
        let _ = writeln!(text, "{:<15} {}", experiment.name, experiment.claim);
        text
    })
}

/// Formats a report.
pub fn report(report: &ExperimentReport) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_report(&mut text, report);
    text
}

fn write_report(to: &mut String, report: &ExperimentReport) -> std::fmt::Result {
    let machine = &report.machine;
    writeln!(to, "{}", report.experiment)?;
    writeln!(to, "  {}", report.claim)?;
    writeln!(
        to,
        "  Linux {}, {} processors, {:.0} MiB",
        machine.kernel,
        machine.cpus,
        Bytes(machine.memory_bytes).mib()
    )?;
    let parameters: Vec<String> = report.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
    writeln!(to, "  {}", parameters.join(", "))?;
    if !report.runs.is_empty() {
        writeln!(to, "\n{}", runs(&report.runs))?;
    }
    if report.saved_anything() {
        writeln!(to, "\nsaved over time, {FIRST_SECONDS} to {:.0} s (logarithmic)", chart::last_seconds(&report.runs))?;
        let width = report.runs.iter().map(|run| run.policy.chars().count()).max().unwrap_or(0);
        for (run, line) in report.runs.iter().zip(chart::lines(&report.runs, CHART_COLUMNS)) {
            writeln!(to, "  {:<width$} |{line}|", run.policy)?;
        }
    }
    for (name, values) in [("figures", &report.figures), ("ratios", &report.ratios)] {
        if !values.is_empty() {
            writeln!(to, "\n{name}")?;
            for (name, value) in values {
                writeln!(to, "  {name:<64} {}", number(*value))?;
            }
        }
    }
    if !report.bars.is_empty() {
        writeln!(to)?;
    }
    for bar in &report.bars {
        let required = match bar.bar {
            Limit::AtLeast(limit) => format!("at least {}", number(limit)),
            Limit::AtMost(limit) => format!("at most {}", number(limit)),
        };
        let verdict = if bar.met { "met   " } else { "MISSED" };
        writeln!(to, "{verdict} {}: {}, required {required}", bar.name, number(bar.measured))?;
    }
    for failure in &report.failures {
        writeln!(to, "FAILED {}: {}", failure.policy, failure.error)?;
    }
    Ok(())
}

fn runs(runs: &[PolicyRun]) -> Table {
    let header = [
        "policy",
        "saved MiB",
        "best MiB",
        "CPU s",
        "ksmd CPU s",
        "MiB / CPU s",
        "90 % after s",
        "ksmd s by then",
        "later scans, s each",
        "marked MiB",
        "answers",
    ];
    let mut table = Table::new(header, |column| column > 0);
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
    for run in runs {
        table.add_row([
            run.policy.clone(),
            format!("{:.1}", Bytes(run.saved_bytes).mib()),
            format!("{:.1}", Bytes(run.saved_bytes_max).mib()),
            number(run.cpu_seconds),
            number(run.cpu_ksmd_seconds),
            optional(run.mib_per_cpu_second()),
            optional(run.seconds_to_90_percent),
            optional(run.cpu_ksmd_seconds_to_90_percent),
            optional(run.cpu_ksmd_seconds_per_later_scan),
            optional(run.marked_bytes.map(|bytes| Bytes(bytes).mib())),
            if run.answers_correct.always() { "right".to_owned() } else { format!("{:?}", run.answers_correct) },
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Failure;

    #[test]
    fn text_has_the_claim_savings_bars_and_failures() {
        let mut found = ExperimentReport::new("static-mix", "a claim");
        found.runs.push(PolicyRun {
            policy: "oracle".into(),
            saved_bytes: 7 << 20,
            cpu_seconds: 2.0,
            ..PolicyRun::default()
        });
        found.bar("speed", Limit::AtLeast(2.0), Some(1.0));
        found.failures.push(Failure { policy: "pagefold".into(), error: "no such command".into() });
        let text = report(&found);
        let missed = "MISSED speed: 1.00, required at least 2.00";
        for part in ["a claim", "oracle", "7.0", missed, "FAILED pagefold: no such command"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
