//! `pagefold doctor`: checks whether `pagefold run` can work on this machine, and shows what to change if it can't.
//!
//! The exit code is 0 if `run` can work, even if there are notes and warnings. Otherwise it's the exit code that `run`
//! would have. If `--fix` fails, the exit code is 1.

mod fix;

use crate::output;
use fix::{Fixed, fix};
use pagefold_host::check::diagnose::{Finding, Severity, examine};
use pagefold_host::check::facts::MachinePaths;
use pagefold_text::exit;
use pagefold_text::style::{self, Lines};
use serde_json::{Value, json};

const SCHEMA: &str = "pagefold.doctor/1";

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print the findings as JSON (schema pagefold.doctor/1)
    #[arg(long)]
    json: bool,
    /// Restore the KSM knobs that an earlier run left changed, because it was killed or pages were merged. If there's
    /// no record of the old values any more, set the kernel's defaults
    #[arg(long)]
    fix: bool,
}

/// Restores knobs if `--fix` is given, examines the machine, and prints the findings.
pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let roots = MachinePaths::default();
    let fixed = if args.fix { Some(fix(&roots)?) } else { None };
    let findings = examine(&roots);
    output::print(args.json, &document(&findings, fixed.as_ref()), |_| {
        list(&findings, fixed.as_ref(), "pagefold", style::colours())
    })?;
    let unfinished = fixed.is_some_and(|fixed| fixed.is_unfinished());
    Ok(if unfinished { exit::FAILURE } else { code(&findings) })
}

/// Prints another program's findings. There's no `--fix` for them.
pub fn print(json: bool, findings: &[Finding], program: &str) -> anyhow::Result<()> {
    output::print(json, &document(findings, None), |_| list(findings, None, program, style::colours()))
}

/// The exit code with which `pagefold run` would end.
fn code(findings: &[Finding]) -> u8 {
    match findings.iter().find(|finding| finding.severity == Severity::Blocker).map(|finding| finding.id) {
        None => exit::OK,
        Some("kernel" | "ksm" | "page-size") => exit::NO_KERNEL_SUPPORT,
        Some("capabilities") => exit::NOT_PERMITTED,
        Some("run" | "advisor" | "programs") => exit::KSM_TAKEN,
        Some(_) => exit::FAILURE,
    }
}

fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
}

fn document(findings: &[Finding], fixed: Option<&Fixed>) -> Value {
    json!({
        "schema": SCHEMA,
        "can_run": worst(findings) != Severity::Blocker,
        "worst": worst(findings),
        "findings": findings,
        "fix": fixed.map(Fixed::json),
    })
}

/// The sign and the colour of a severity.
fn sign(severity: Severity) -> (&'static str, &'static str) {
    match severity {
        Severity::Ok => ("✓", "32"),
        Severity::Note => ("·", "36"),
        Severity::Warning => ("!", "33"),
        Severity::Blocker => ("✗", "31"),
    }
}

/// The findings as text: first a line for each check that is fine, then the problems, the worst last.
fn list(findings: &[Finding], fixed: Option<&Fixed>, program: &str, coloured: bool) -> String {
    let width = findings.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    let mut ordered: Vec<&Finding> = findings.iter().collect();
    ordered.sort_by_key(|finding| finding.severity);
    let mut text = String::new();
    for finding in ordered {
        let (mark, colour) = sign(finding.severity);
        if finding.severity != Severity::Ok {
            text.blank();
        }
        let id = format!("{:width$}", finding.id);
        let mark = paint(mark, colour, coloured);
        text.line(format!(" {mark} {}  {}", paint(&id, "1", coloured), finding.what));
        for (label, line) in [("why:", &finding.why), ("do: ", &finding.todo)] {
            if !line.is_empty() {
                text.line(format!("   {:width$}  {} {line}", "", paint(label, "2", coloured)));
            }
        }
    }
    if let Some(fixed) = fixed {
        text.blank();
        for line in fixed.lines() {
            text.line(format!(" {} {line}", paint("→", "36", coloured)));
        }
    }
    text.blank();
    text.line(verdict(findings, program));
    text
}

fn paint(text: &str, colour: &str, coloured: bool) -> String {
    if coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

fn verdict(findings: &[Finding], program: &str) -> String {
    let mut problems = Vec::new();
    for (severity, one, many) in [
        (Severity::Note, "note", "notes"),
        (Severity::Warning, "warning", "warnings"),
        (Severity::Blocker, "blocker", "blockers"),
    ] {
        let number = findings.iter().filter(|finding| finding.severity == severity).count();
        if number > 0 {
            problems.push(style::count(number, one, many));
        }
    }
    let counts = if problems.is_empty() { "no problems".to_owned() } else { problems.join(", ") };
    match worst(findings) {
        Severity::Blocker => format!("{counts}: `{program} run` cannot work here yet. `{program} scan` can."),
        _ => format!("{counts}: `{program} run` can work here."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    fn findings() -> Vec<Finding> {
        let of = |id, severity, what: &str, why: &str, todo: &str| Finding {
            id,
            severity,
            what: what.into(),
            why: why.into(),
            todo: todo.into(),
        };
        vec![
            of("run", Severity::Blocker, "ksmd runs", "in use", "stop it"),
            of("kernel", Severity::Ok, "Linux", "", ""),
            of("swap", Severity::Note, "no swap", "less room", "add some"),
        ]
    }

    #[test]
    fn the_worst_finding_comes_last_with_its_reason_and_remedy() {
        golden::check("doctor.txt", &list(&findings(), None, "pagefold", false));
        golden::check("doctor.json", &style::json(&document(&findings(), Some(&Fixed::Nothing))).unwrap());
        assert!(list(&findings(), None, "pagefold", true).contains("\x1b[31m✗\x1b[0m"));
        assert_eq!(verdict(&findings()[1..2], "pagefold"), "no problems: `pagefold run` can work here.");
    }

    #[test]
    fn the_code_is_that_of_the_first_blocker() {
        assert_eq!(code(&findings()), exit::KSM_TAKEN);
        assert_eq!(code(&findings()[1..]), exit::OK);
    }
}
