//! `pagefold doctor`: checks whether `pagefold run` can work on this machine, and what to change if it cannot.
//!
//! The exit code is 0 if `run` can work, also with notes and warnings, otherwise the exit code that `run` would have. If
//! `--fix` fails it is 1.

use pagefold_cli::exit::{self, Exit};
use pagefold_cli::style;
use pagefold_linux::check::diagnose::{Finding, Severity, examine};
use pagefold_linux::check::facts::MachinePaths;
use pagefold_linux::ksm::RestoreOutcome;
use pagefold_linux::ksm::lease::{KsmPaths, TakeError, restore_deferred, restore_orphaned};
use pagefold_linux::ksm::lock::LockError;
use pagefold_linux::ksm::{Ksm, KsmError};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::Arc;

/// The version of the `--json` form.
const SCHEMA: &str = "pagefold.doctor/1";

/// Arguments of `pagefold doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print the findings as JSON (schema pagefold.doctor/1)
    #[arg(long)]
    json: bool,
    /// Restore the KSM knobs that an earlier run left changed because it was killed or pages were merged. If its record of
    /// them is lost, set the kernel's defaults
    #[arg(long)]
    fix: bool,
}

/// Restores knobs if `--fix` is given, examines the machine, and prints the findings.
pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let roots = MachinePaths::default();
    let fixed = if args.fix { Some(fix(&roots)?) } else { None };
    let code = report(&examine(&roots), fixed.as_ref(), args.json)?;
    let unfinished = fixed.is_some_and(|fixed| fixed.is_unfinished());
    Ok(if unfinished { exit::FAILURE } else { code })
}

/// The result of `--fix`.
#[derive(Debug)]
pub enum Fixed {
    /// No knob was left changed.
    Nothing,
    /// Another pagefold is using KSM.
    InUse(String),
    /// These knobs were restored, or could not be.
    Done(RestoreOutcome),
}

impl Fixed {
    fn is_unfinished(&self) -> bool {
        matches!(self, Self::Done(restored) if !restored.failed.is_empty() || !restored.pending.is_empty())
    }

    fn lines(&self) -> Vec<String> {
        let restored = match self {
            Self::Nothing => return vec!["no knob to restore".to_owned()],
            Self::InUse(who) => return vec![format!("no knob restored: {who}")],
            Self::Done(restored) => restored,
        };
        let mut lines = Vec::new();
        lines.extend(restored.restored.iter().map(|(knob, value)| format!("{knob} restored to {value}")));
        lines.extend(restored.deferred.iter().map(|(knob, value)| {
            format!("{knob} can be set back to {value} only when no page is merged; try again then")
        }));
        lines.extend(
            restored
                .overridden
                .iter()
                .map(|other| format!("{} was set to {} by another program, and stays so", other.knob, other.found)),
        );
        lines.extend(restored.pending.iter().map(|(knob, value)| {
            format!("{knob} cannot be set back to {value} while ksmd is in a scan; try again later")
        }));
        lines.extend(restored.failed.iter().map(|(knob, why)| format!("cannot restore {knob}: {why}")));
        lines
    }

    fn json(&self) -> Value {
        match self {
            Self::Nothing => json!({ "done": true, "lines": self.lines() }),
            Self::InUse(who) => json!({ "done": false, "held_by": who, "lines": self.lines() }),
            Self::Done(restored) => {
                let pairs = |pairs: &[_]| -> Value {
                    pairs.iter().map(|(knob, value)| json!({ "knob": knob, "value": value })).collect()
                };
                json!({
                    "done": restored.is_complete(),
                    "put_back": pairs(&restored.restored),
                    "deferred": pairs(&restored.deferred),
                    "pending": pairs(&restored.pending),
                    "left": restored.overridden.iter().map(|other| json!({ "knob": other.knob, "value": other.found })).collect::<Vec<_>>(),
                    "failed": restored.failed.iter().map(|(knob, why)| json!({ "knob": knob, "why": why })).collect::<Vec<_>>(),
                    "lines": self.lines(),
                })
            }
        }
    }
}

fn fix(roots: &MachinePaths) -> anyhow::Result<Fixed> {
    let ksm = match Ksm::open(&roots.sys.join("kernel/mm/ksm")) {
        Ok(ksm) => Arc::new(ksm),
        // Without KSM no knob can have been changed. The findings report that it is missing.
        Err(KsmError::Absent { .. }) => return Ok(Fixed::Nothing),
        Err(error) => return Err(error.into()),
    };
    let paths = KsmPaths { lock: roots.lock.clone(), state: roots.state.clone(), proc_root: roots.proc.clone() };
    let restored = match restore_deferred(&ksm, &paths) {
        Ok(None) => restore_orphaned(&ksm, &paths),
        other => other,
    };
    match restored {
        Ok(None) => Ok(Fixed::Nothing),
        Ok(Some(restored)) => Ok(Fixed::Done(restored)),
        Err(held @ (TakeError::Locked { .. } | TakeError::Busy { .. })) => Ok(Fixed::InUse(held.to_string())),
        Err(denied @ TakeError::Lock(LockError::Denied { .. })) => {
            Err(Exit::new(exit::NOT_PERMITTED, format!("{denied}; run as root")).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Prints the findings and the result of `--fix`, and returns the exit code.
pub fn report(findings: &[Finding], fixed: Option<&Fixed>, as_json: bool) -> anyhow::Result<u8> {
    let text = if as_json { style::json(&document(findings, fixed))? } else { list(findings, fixed, style::colours()) };
    style::print(&text)?;
    Ok(code(findings))
}

/// The exit code that `pagefold run` would have.
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

/// The findings as text: what is in order first, one line each, then the problems, the worst last.
fn list(findings: &[Finding], fixed: Option<&Fixed>, coloured: bool) -> String {
    let paint = |text: &str, colour: &str| {
        if coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    };
    let width = findings.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    let mut ordered: Vec<&Finding> = findings.iter().collect();
    ordered.sort_by_key(|finding| finding.severity);
    let mut text = String::new();
    for finding in ordered {
        let (mark, colour) = sign(finding.severity);
        if finding.severity != Severity::Ok {
            text.push('\n');
        }
        let id = format!("{:width$}", finding.id);
        let _ = writeln!(text, " {} {}  {}", paint(mark, colour), paint(&id, "1"), finding.what);
        for (label, line) in [("why:", &finding.why), ("do: ", &finding.todo)] {
            if !line.is_empty() {
                let _ = writeln!(text, "   {:width$}  {} {line}", "", paint(label, "2"));
            }
        }
    }
    if let Some(fixed) = fixed {
        text.push('\n');
        for line in fixed.lines() {
            let _ = writeln!(text, " {} {line}", paint("→", "36"));
        }
    }
    let _ = writeln!(text, "\n{}", verdict(findings));
    text
}

fn verdict(findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let others = [
        (Severity::Note, "note", "notes"),
        (Severity::Warning, "warning", "warnings"),
        (Severity::Blocker, "blocker", "blockers"),
    ];
    let others = others.map(|(severity, one, many)| (count(severity), one, many));
    let others: Vec<String> = others
        .into_iter()
        .filter(|(number, ..)| *number > 0)
        .map(|(number, one, many)| style::count(number, one, many))
        .collect();
    let counts = if others.is_empty() { "no problems".to_owned() } else { others.join(", ") };
    match worst(findings) {
        Severity::Blocker => format!("{counts}: `pagefold run` cannot work here yet. `pagefold scan` can."),
        _ => format!("{counts}: `pagefold run` can work here."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_linux::ksm::Knob;
    use pagefold_linux::ksm::Overridden;

    fn findings() -> Vec<Finding> {
        let of = |id, severity, what: &str, why: &str, todo: &str| Finding {
            id,
            severity,
            what: what.into(),
            why: why.into(),
            todo: todo.into(),
        };
        vec![
            of("run", Severity::Blocker, "ksmd runs", "somebody", "stop it"),
            of("kernel", Severity::Ok, "Linux", "", ""),
            of("swap", Severity::Note, "no swap", "less room", "add some"),
        ]
    }

    #[test]
    fn the_worst_finding_comes_last_with_its_reason_and_remedy() {
        let text = list(&findings(), None, false);
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part:?} is missing in {text}"));
        assert!(at("✓ kernel  Linux") < at("· swap    no swap"));
        assert!(at("no swap") < at("✗ run     ksmd runs"));
        assert!(at("ksmd runs") < at("why: somebody") && at("why: somebody") < at("do:  stop it"));
        assert!(text.ends_with("1 note, 1 blocker: `pagefold run` cannot work here yet. `pagefold scan` can.\n"));
        assert!(!text.contains('\x1b'));
        assert!(list(&findings(), None, true).contains("\x1b[31m✗\x1b[0m"));
        assert_eq!(verdict(&findings()[1..2]), "no problems: `pagefold run` can work here.");
    }

    #[test]
    fn the_code_is_that_of_the_first_blocker() {
        assert_eq!(code(&findings()), exit::KSM_TAKEN);
        assert_eq!(code(&findings()[1..]), exit::OK);
    }

    #[test]
    fn json_has_a_schema_and_every_finding() {
        let document = document(&findings(), Some(&Fixed::Nothing));
        assert_eq!(document["schema"], SCHEMA);
        assert_eq!((&document["can_run"], &document["worst"]), (&json!(false), &json!("blocker")));
        let run =
            json!({ "id": "run", "severity": "blocker", "what": "ksmd runs", "why": "somebody", "todo": "stop it" });
        assert_eq!(document["findings"][0], run);
        assert_eq!(document["fix"]["done"], json!(true));
    }

    #[test]
    fn every_result_of_a_fix_is_shown() {
        let restored = RestoreOutcome {
            restored: vec![(Knob::Run, 0)],
            deferred: vec![(Knob::MaxPageSharing, 256)],
            overridden: vec![Overridden { knob: Knob::PagesToScan, ours: 1, found: 2 }],
            failed: vec![(Knob::SmartScan, "refused".into())],
            pending: vec![(Knob::SleepMillisecs, 20)],
        };
        let fixed = Fixed::Done(restored);
        let text = list(&[], Some(&fixed), false);
        for part in [
            "run restored to 0",
            "max_page_sharing can be set back to 256",
            "pages_to_scan was set to 2",
            "cannot restore smart_scan",
            "sleep_millisecs cannot be set back to 20",
        ] {
            assert!(text.contains(part), "{part}");
        }
        assert!(fixed.is_unfinished());
        assert_eq!(fixed.json()["deferred"], json!([{ "knob": "max_page_sharing", "value": 256 }]));
    }
}
