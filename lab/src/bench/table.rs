//! Results as text.

use crate::bench::experiment::Experiment;
use crate::bench::report::{Answers, ExperimentReport, Limit, PolicyRun};
use crate::charts::number;
use crate::columns;
use pagefold_engine::units::Bytes;
use pagefold_text::table::Table;
use std::fmt::Write;

pub fn list(experiments: &[Experiment]) -> String {
    let mut text = String::new();
    for experiment in experiments {
        let _ = writeln!(text, "{:<15} {}", experiment.name, experiment.claim);
    }
    text
}

pub fn report(report: &ExperimentReport) -> String {
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = write_report(&mut text, report);
    text
}

fn write_report(to: &mut String, report: &ExperimentReport) -> std::fmt::Result {
    let machine = &report.machine;
    writeln!(to, "{}", report.experiment)?;
    writeln!(to, "  {}", report.claim)?;
    let mib = Bytes(machine.memory_bytes).mib();
    writeln!(to, "  Linux {}, {} processors, {mib:.0} MiB", machine.kernel, machine.cpus)?;
    let parameters: Vec<String> = report.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
    writeln!(to, "  {}", parameters.join(", "))?;
    if !report.runs.is_empty() {
        writeln!(to, "\n{}", runs(&report.runs))?;
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
    columns::table(
        1,
        runs,
        &[
            ("policy", &|run| run.policy.clone()),
            ("saved MiB", &|run| format!("{:.1}", Bytes(run.saved_bytes).mib())),
            ("best MiB", &|run| format!("{:.1}", Bytes(run.saved_bytes_max).mib())),
            ("CPU s", &|run| number(run.cpu_seconds)),
            ("ksmd CPU s", &|run| number(run.cpu_ksmd_seconds)),
            ("MiB / CPU s", &|run| optional(run.mib_per_cpu_second())),
            ("90 % after s", &|run| optional(run.seconds_to_90_percent)),
            ("ksmd s to 90 %", &|run| optional(run.cpu_ksmd_seconds_to_90_percent)),
            ("later scans, s each", &|run| optional(run.cpu_ksmd_seconds_per_later_scan)),
            ("marked MiB", &|run| optional(run.marked_bytes.map(|bytes| Bytes(bytes).mib()))),
            ("answers", &|run| right(run.answers_correct)),
        ],
    )
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), number)
}

fn right(answers: Answers) -> String {
    if answers.always() { "right".to_owned() } else { format!("{answers:?}") }
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
