//! `pagefold-xen doctor`: shows whether these guests can share memory, and what to change if they can't.

use super::{ScopeArgs, open};
use pagefold::commands::doctor::Doctor;
use pagefold_engine::units::Pages;
use pagefold_host::check::diagnose::{Finding, blocker, note, ok};
use pagefold_ksm::lock::{LOCK_PATH, holder};
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::human;
use pagefold_xen::guests::{InScope, Selected, in_scope, unfit};
use pagefold_xen::hypervisor::{Hypervisor, Refusal};
use std::path::Path;

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Print the findings as JSON (schema pagefold.doctor/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let (findings, code) = examine(&args.scope)?;
    let doctor = Doctor { findings: &findings, code, program: "pagefold-xen", verbose: true };
    doctor.print(args.json, None)?;
    Ok(code)
}

/// The findings, and the exit code that `run` would have.
fn examine(scope: &ScopeArgs) -> Result<(Vec<Finding>, u8), Exit> {
    let guests = scope.guests()?;
    let mut code = exit::OK;
    let mut findings = Vec::new();
    match open("a look at guests") {
        Ok(mut xen) => {
            findings.push(ok("dom0 of Xen, and its libraries are there").called("xen"));
            judge(&mut xen, &guests, &mut findings, &mut code);
        }
        Err(exit) => {
            code = exit.code;
            let (what, todo) = exit.line.split_once("; ").unwrap_or((&exit.line, ""));
            findings.push(blocker(what, "guests can only be reached from dom0", todo).called("xen"));
        }
    }
    Ok((findings, code))
}

fn judge(xen: &mut impl Hypervisor, guests: &[Selected], findings: &mut Vec<Finding>, code: &mut u8) {
    match xen.memory() {
        Ok(memory) => {
            let [free, saved] = [memory.free, memory.saved].map(|pages: Pages| human(pages.bytes().0));
            let what = format!("the hypervisor can share memory: {saved} saved, {free} free");
            findings.push(ok(what).called("xen-sharing"));
        }
        Err(error) => {
            *code = exit::NO_KERNEL_SUPPORT;
            let todo = "build the hypervisor with EXPERT, UNSUPPORTED and MEM_SHARING; see xen/README.md";
            findings.push(blocker(error.to_string(), "nothing can be shared", todo).called("xen-sharing"));
            return;
        }
    }
    let busy = holder(Path::new(LOCK_PATH)).ok().flatten();
    if let Some(busy) = busy {
        let pid = busy.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        let what = format!("another pagefold{pid} is at work");
        findings.push(note(what, "one can share at a time", "stop it to start another").called("xen-lock"));
    }
    let found = xen.domains().ok().and_then(|domains| in_scope(xen, guests, domains).ok()).unwrap_or_default();
    for selected in guests {
        let alone = std::slice::from_ref(selected);
        if pagefold_xen::guests::missing(alone, &found).is_some() {
            *code = exit::NO_SCOPE;
            let what = format!("there is no guest \"{}\"", printable(selected.guest.as_bytes()));
            findings.push(blocker(what, "nothing is in scope", "look with xl list").called("xen-guest"));
        }
    }
    for guest in &found {
        let (finding, is_fit) = of_guest(xen, guest, busy.is_some());
        findings.push(finding);
        if !is_fit && *code == exit::OK {
            *code = exit::REFUSED;
        }
    }
}

/// Finds out why a guest can't share memory. To ask the hypervisor, we allow sharing for a moment, unless that could
/// disturb another pagefold.
fn of_guest(xen: &mut impl Hypervisor, guest: &InScope, busy: bool) -> (Finding, bool) {
    let who = format!("guest {} ({})", printable(guest.name.as_bytes()), guest.domain.id);
    let refused = match unfit(&guest.domain) {
        Some(why) => Some(why.to_owned()),
        None if busy || guest.domain.shared > Pages(0) => None,
        None => match xen.enable(guest.domain.id) {
            Ok(()) => {
                xen.disable(guest.domain.id);
                None
            }
            Err(refusal @ Refusal::Passthrough) => Some(format!("{refusal}; detach it")),
            Err(refusal) => Some(refusal.to_string()),
        },
    };
    match refused {
        None => (ok(format!("{who}: its memory can be shared")).called("xen-guest"), true),
        Some(why) => {
            let todo = "name other guests; xen/README.md says which";
            (blocker(format!("{who}: {why}"), "its memory cannot be shared", todo).called("xen-guest"), false)
        }
    }
}
