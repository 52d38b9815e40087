//! `pagefold doctor`: checks whether `pagefold run` can work on this machine, and shows what to change if it can't.
//!
//! The exit code is the one that `run` would end with if processes were in scope: 0 if `run` can work, even with notes
//! and warnings. If `--fix` fails, the exit code is 1.

mod fix;

use crate::config::args::RunArgs;
use crate::config::settings::{MechanismChoice, Settings};
use crate::output;
use crate::preflight;
use fix::{Fixed, fix};
use pagefold_host::check::diagnose::{Finding, Severity, blocker, examine};
use pagefold_host::check::facts::MachinePaths;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::{self, Lines};
use serde_json::{Value, json};
use std::cmp::Reverse;

const SCHEMA: &str = "pagefold.doctor/1";

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print the findings as JSON (schema pagefold.doctor/1)
    #[arg(long)]
    json: bool,
    /// Restore the KSM knobs that an earlier run could not, because it was killed or because pages were still merged.
    /// If the record of the old values is lost, set the kernel's defaults
    #[arg(long)]
    fix: bool,
    /// Print only which knobs --fix restored or could not restore, and check nothing else
    #[arg(long, short, requires = "fix", conflicts_with_all = ["json", "verbose"])]
    quiet: bool,
    /// Also show notes, and the checks that found no problem
    #[arg(long, short)]
    verbose: bool,
}

/// Restores knobs if `--fix` is given, examines the machine, and prints the findings.
pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let roots = MachinePaths::default();
    let fixed = if args.fix { Some(fix(&roots)?) } else { None };
    match &fixed {
        Some(fixed) if args.quiet => {
            let mut text = String::new();
            for line in fixed.news() {
                text.line(line);
            }
            style::print(&text)?;
            return Ok(if fixed.is_unfinished() { exit::FAILURE } else { exit::OK });
        }
        _ => {}
    }
    let mut findings = examine(&roots);
    let mut code = code(&findings);
    // `run` reads the configuration first. If it refuses that, its exit code counts, whatever else we've found.
    let refusal = match Settings::of(&RunArgs::default()) {
        Err(exit) => Some(("config", "pagefold does not start with such a configuration", exit)),
        Ok(settings) if code == exit::OK => {
            let refused = demanded_device(&settings).err();
            refused.map(|exit| ("request", "the configuration demands merging on request", exit))
        }
        Ok(_) => None,
    };
    if let Some((id, why, exit)) = refusal {
        let (what, todo) = exit.line.rsplit_once("; ").unwrap_or((&exit.line, "see pagefold config check"));
        findings.push(blocker(what, why, todo).called(id));
        code = exit.code;
    }
    let doctor = Doctor { findings: &findings, code, program: "pagefold", verbose: args.verbose };
    doctor.print(args.json, fixed.as_ref())?;
    let unfinished = fixed.is_some_and(|fixed| fixed.is_unfinished());
    Ok(if unfinished { exit::FAILURE } else { code })
}

/// Opens /dev/ksm if the configuration demands merging on request.
fn demanded_device(settings: &Settings) -> Result<(), Exit> {
    if settings.mechanism == MechanismChoice::Request {
        preflight::request_device(settings.mechanism, settings.placement.default, &*preflight::ksm()?)?;
    }
    Ok(())
}

/// Findings in the order in which `pagefold run` checks for them, with its exit codes. The first blocker decides.
const CODES: [(&str, u8); 9] = [
    ("capabilities", exit::NOT_PERMITTED),
    ("ksm", exit::NO_KERNEL_SUPPORT),
    ("kernel", exit::NO_KERNEL_SUPPORT),
    ("page-size", exit::NO_KERNEL_SUPPORT),
    ("lock", exit::KSM_TAKEN),
    ("state", exit::FAILURE),
    ("advisor", exit::KSM_TAKEN),
    ("programs", exit::KSM_TAKEN),
    ("run", exit::KSM_TAKEN),
];

/// The exit code with which `pagefold run` would end.
fn code(findings: &[Finding]) -> u8 {
    let blocks = |id| findings.iter().any(|finding| finding.id == id && finding.severity == Severity::Blocker);
    let otherwise = if worst(findings) == Severity::Blocker { exit::FAILURE } else { exit::OK };
    CODES.iter().find(|(id, _)| blocks(*id)).map_or(otherwise, |(_, code)| *code)
}

#[derive(Debug)]
pub struct Doctor<'a> {
    pub findings: &'a [Finding],
    /// The exit code that `run` would have.
    pub code: u8,
    /// The program whose `run` we mean: pagefold or pagefold-xen.
    pub program: &'a str,
    /// Whether to show notes and the checks that found no problem.
    pub verbose: bool,
}

fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
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

fn paint(text: &str, colour: &str, coloured: bool) -> String {
    if coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

impl Doctor<'_> {
    pub fn print(&self, json: bool, fixed: Option<&Fixed>) -> anyhow::Result<()> {
        output::print(json, &self.document(fixed), |_| self.text(fixed, style::colours()))
    }

    fn document(&self, fixed: Option<&Fixed>) -> Value {
        json!({
            "schema": SCHEMA,
            "can_run": worst(self.findings) != Severity::Blocker,
            "exit_code": self.code,
            "worst": worst(self.findings),
            "findings": self.findings,
            "fix": fixed.map(Fixed::json),
        })
    }

    /// The text: the knobs that we restored, the verdict, and then the findings, the worst first.
    fn text(&self, fixed: Option<&Fixed>, coloured: bool) -> String {
        let mut ordered: Vec<&Finding> = self.findings.iter().collect();
        ordered.sort_by_key(|finding| Reverse(finding.severity));
        if !self.verbose {
            ordered.retain(|finding| finding.severity >= Severity::Warning);
        }
        let width = ordered.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
        let mut text = String::new();
        if let Some(fixed) = fixed {
            for line in fixed.lines() {
                text.line(format!(" {} {line}", paint("→", "36", coloured)));
            }
            text.blank();
        }
        text.line(self.verdict());
        for (at, finding) in ordered.iter().enumerate() {
            let (mark, colour) = sign(finding.severity);
            if finding.severity != Severity::Ok || at == 0 {
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
        let notes = self.number(Severity::Note);
        if !self.verbose && notes > 0 {
            text.blank();
            text.line(format!("{}: see --verbose.", style::count(notes, "note", "notes")));
        }
        text
    }

    fn number(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    fn verdict(&self) -> String {
        let mut problems = Vec::new();
        for (severity, one, many) in
            [(Severity::Blocker, "blocker", "blockers"), (Severity::Warning, "warning", "warnings")]
        {
            let number = self.number(severity);
            if number > 0 {
                problems.push(style::count(number, one, many));
            }
        }
        let counts = if problems.is_empty() { "no problems".to_owned() } else { problems.join(", ") };
        let Self { program, code, .. } = self;
        let mut blockers = self.findings.iter().filter(|finding| finding.severity == Severity::Blocker);
        match worst(self.findings) {
            Severity::Blocker if blockers.all(|finding| finding.id == "lock") => {
                format!("A pagefold is running here. Another `{program} run` would end with exit code {code}.")
            }
            Severity::Blocker => {
                format!("`{program} run` cannot work here (exit code {code}): {counts}. `{program} scan` can.")
            }
            _ => format!("`{program} run` can work here: {counts}."),
        }
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
    fn the_worst_finding_comes_first_with_its_reason_and_remedy() {
        let findings = findings();
        let doctor = Doctor { findings: &findings, code: 7, program: "pagefold", verbose: false };
        let verbose = Doctor { verbose: true, ..doctor };
        let text = [doctor.text(Some(&Fixed::Nothing), false), verbose.text(None, false)].join("\n-- --verbose --\n\n");
        golden::check("doctor.txt", &text);
        golden::check("doctor.json", &style::json(&doctor.document(Some(&Fixed::Nothing))).unwrap());
        assert!(doctor.text(None, true).contains("\x1b[31m✗\x1b[0m"));
        let fine = Doctor { findings: &findings[1..2], ..verbose };
        assert_eq!(fine.verdict(), "`pagefold run` can work here: no problems.");
    }

    #[test]
    fn the_code_is_that_of_the_first_check_that_fails_in_a_run() {
        assert_eq!(code(&findings()), exit::KSM_TAKEN);
        assert_eq!(code(&findings()[1..]), exit::OK);
        let denied = blocker("no", "", "").called("capabilities");
        assert_eq!(code(&[findings(), vec![denied]].concat()), exit::NOT_PERMITTED);
    }
}
