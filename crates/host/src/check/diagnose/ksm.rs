//! Findings about KSM and about other programs that use it.

use super::{Finding, blocker, note, ok, warning};
use crate::check::facts::{Fact, FoundState, KSMTUNED, MachineFacts, Release, VIRT_HANDLER};
use crate::check::users::sentence;
use pagefold_engine::units::Pages;
use pagefold_ksm::Knob;
use pagefold_ksm::request::Carrier;

/// Oldest supported kernel: it has PR_SET_MEMORY_MERGE and general_profit.
const OLDEST: Release = Release(6, 4);
/// First kernel where PR_SET_MEMORY_MERGE survives exec, and that has `KSM:` in smaps and PAGEMAP_SCAN.
const FULL: Release = Release(6, 7);

pub(super) fn kernel(facts: &MachineFacts) -> Finding {
    let name = format!("Linux {}", facts.release_text);
    match facts.release {
        Fact::Is(release) if release >= FULL => ok(name),
        Fact::Is(release) if release >= OLDEST => note(
            format!("{name}, older than {FULL}"),
            "the mark set by `pagefold exec` is lost at the next exec, and reading page tables costs more",
            "nothing, or install a newer kernel",
        ),
        Fact::Is(_) => blocker(
            format!("{name}, older than {OLDEST}"),
            "KSM lacks counters that pagefold needs",
            "install a newer kernel",
        ),
        _ => warning("the kernel version cannot be read", "its features are unknown", "mount /proc"),
    }
}

pub(super) fn ksm(facts: &MachineFacts) -> Finding {
    match &facts.ksm {
        Fact::Is((_, counters)) => {
            let counted = counters.pages_sharing + counters.ksm_zero_pages.unwrap_or_default();
            ok(match facts.saved {
                _ if counted == Pages(0) => "KSM is available, nothing is merged".to_owned(),
                Some(saved) => format!("KSM saves {:.1} MiB", saved.bytes().mib()),
                None => format!(
                    "KSM counts {:.1} MiB saved, less if programs have forked: pages that children share count again",
                    counted.bytes().mib()
                ),
            })
        }
        Fact::Absent => blocker(
            "the kernel has no KSM, or one too old",
            "KSM merges the pages; without it pagefold can only measure (`pagefold scan`)",
            "use a kernel built with CONFIG_KSM=y; in a container, make /sys visible",
        ),
        Fact::Denied => blocker("KSM's files cannot be read", "access to /sys/kernel/mm/ksm is denied", "run as root"),
        Fact::Malformed(what) => blocker(
            format!("KSM's files cannot be parsed: {what}"),
            "pagefold needs them to control KSM",
            "report this as a bug",
        ),
    }
}

pub(super) fn request(facts: &MachineFacts) -> Finding {
    let unmerges = facts.ksm.known().is_some_and(|(knobs, _)| knobs.run == 2);
    let without = "pagefold uses ksmd, which has to find the duplicates again, at a multiple of the cost";
    match &facts.request {
        Fact::Is(_) if unmerges => {
            note("merging on request: refused by the kernel while run is 2", without, "echo 0 > /sys/kernel/mm/ksm/run")
        }
        Fact::Is(Carrier::Series) => ok("merging on request: supported by this kernel"),
        Fact::Is(Carrier::Module) => ok("merging on request: supported by the module ksm_request"),
        Fact::Absent if facts.request_module == Fact::Is(()) => note(
            "merging on request: the module ksm_request is installed but not loaded",
            without,
            "modprobe ksm_request; if the kernel refuses it, dmesg says why",
        ),
        Fact::Absent => ok("merging on request: not in this kernel, so pagefold uses ksmd \
             (Debian: apt install ./pagefold-dkms_*.deb linux-headers-$(uname -r))"),
        Fact::Denied => note(
            "merging on request: /dev/ksm cannot be opened",
            without,
            "run as root; a service needs DeviceAllow=/dev/ksm rw",
        ),
        Fact::Malformed(what) => note(
            format!("merging on request: {what}"),
            without,
            "install the kernel patches or the module that came with this version of pagefold",
        ),
    }
}

pub(super) fn run(facts: &MachineFacts) -> Finding {
    let Fact::Is((knobs, counters)) = &facts.ksm else { return ok("see the finding `ksm`") };
    let ours = facts.lock_holder.known().is_some();
    let merged = counters.pages_sharing.0 > 0;
    match knobs.run {
        1 if ours => ok("ksmd is driven by a running pagefold"),
        1 if killed(facts).is_some_and(|found| found.state.is_ours(Knob::Run, 1)) => {
            ok("ksmd still runs for a pagefold that was killed")
        }
        1 if !knobs.orphaned().is_empty() && facts.state == Fact::Absent => blocker(
            "ksmd is running already (run is 1)",
            "a pagefold whose files are not visible here drives it, or has left it running",
            "see the finding `state`",
        ),
        1 if facts.lock_holder == Fact::Denied => blocker(
            "ksmd is running already (run is 1)",
            "a running pagefold may drive it, but its lock file cannot be read",
            "run as root to see whether pagefold drives it",
        ),
        1 if virt_handler(facts).is_some() => blocker(
            "ksmd is running already (run is 1)",
            "virt-handler, KubeVirt's agent on this node, may have set it",
            "remove ksmConfiguration from the KubeVirt resource, or leave KSM to KubeVirt",
        ),
        1 => blocker(
            "ksmd is running already (run is 1)",
            "an administrator or another program controls KSM, or left it running; the kernel does not tell which",
            "if it is not needed: echo 0 > /sys/kernel/mm/ksm/run",
        ),
        _ if merged && !ours => note(
            "ksmd is stopped, with pages still merged",
            "they stay merged until they are written, and max_page_sharing cannot be set meanwhile",
            "nothing; or, to unmerge all: echo 2 > /sys/kernel/mm/ksm/run, then 0",
        ),
        _ => ok("ksmd is stopped"),
    }
}

pub(super) fn advisor(facts: &MachineFacts) -> Finding {
    match facts.ksm.known() {
        Some((knobs, _)) if knobs.advisor_on() => blocker(
            format!("the kernel's advisor is on ({})", knobs.advisor_mode.as_deref().unwrap_or("?")),
            "it sets pages_to_scan and refuses other writes to it",
            "echo none > /sys/kernel/mm/ksm/advisor_mode",
        ),
        _ => ok("the kernel's advisor is off"),
    }
}

pub(super) fn programs(facts: &MachineFacts) -> Finding {
    let (Fact::Is(running), Fact::Is(users)) = (&facts.programs, &facts.users) else {
        return note("the process list cannot be read", "programs that use KSM are not detected", "mount /proc");
    };
    if let Some((pid, name)) = running.iter().find(|(_, name)| name == KSMTUNED) {
        return blocker(
            format!("{name} (pid {pid}) is running"),
            "it sets the same knobs as pagefold, by the host's free memory, also on Proxmox VE",
            "systemctl disable --now ksmtuned",
        );
    }
    // If pagefold is running, it counts as having marked all processes that haven't marked themselves, so we leave
    // these out. Before Linux 6.14 the kernel doesn't tell them apart, and we show all.
    let is_running = facts.lock_holder.known().is_some();
    let mut others = users.clone();
    others.retain(|user| user.is_marked_by_itself != Some(false) || !is_running);
    if others.is_empty() {
        let Some(pid) = virt_handler(facts) else { return ok("no other program uses KSM") };
        return note(
            format!("virt-handler (pid {pid}) is running"),
            "KubeVirt's agent sets the same knobs as pagefold if ksmConfiguration selects this node",
            "nothing, unless ksmConfiguration is set",
        );
    }
    let is_known = others.iter().all(|user| user.is_marked_by_itself.is_some());
    let by_itself = others.iter().filter(|user| user.is_marked_by_itself == Some(true)).count();
    let who = match others.len() - by_itself {
        _ if !is_known => {
            "who marked it: MemoryKSM=, pagefold exec, QEMU for its guests, or pagefold; only Linux 6.14 and later tells"
        }
        0 => "who marked it: MemoryKSM= in a unit, pagefold exec, or the program itself, each for a whole process",
        others if others == users.len() => {
            "who marked it: QEMU for its guests (mem-merge), or an earlier run of pagefold"
        }
        _ => "who marked it: MemoryKSM=, pagefold exec, QEMU for its guests, or an earlier run of pagefold",
    };
    note(
        format!("KSM is used by {}", sentence(&others)),
        "ksmd scans all memory that is marked, also outside of pagefold's scope",
        &format!("nothing, if that is intended ({who})"),
    )
}

fn virt_handler(facts: &MachineFacts) -> Option<i32> {
    facts.programs.known()?.iter().find(|(_, name)| name == VIRT_HANDLER).map(|(pid, _)| *pid)
}

/// The state file of a run that was killed since boot. The next run begins by restoring KSM's settings from it.
fn killed(facts: &MachineFacts) -> Option<&FoundState> {
    facts.state.known().filter(|found| found.this_boot && !found.holder_alive && found.state.holder.is_some())
}

pub(super) fn lock(facts: &MachineFacts) -> Finding {
    const ONE: &str = "only one can drive KSM at a time";
    match (&facts.lock_holder, &facts.state) {
        (Fact::Is(holder), _) => {
            let pid = holder.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            blocker(format!("pagefold is running already{pid}"), ONE, "nothing: see pagefold status")
        }
        (Fact::Absent, Fact::Is(FoundState { holder_alive: true, state, .. })) => {
            let pid = state.holder.map(|holder| holder.pid).unwrap_or_default();
            blocker(format!("pagefold is running already (pid {pid}), with another lock file"), ONE, "stop that one")
        }
        (Fact::Absent, _) => ok("no other pagefold is running"),
        (Fact::Denied, _) => note("the lock file cannot be read", "another pagefold may be running", "run as root"),
        (Fact::Malformed(what), _) => {
            warning(format!("the lock file is unusable: {what}"), "pagefold run must take the lock", "remove that file")
        }
    }
}

pub(super) fn state(facts: &MachineFacts) -> Finding {
    match &facts.state {
        Fact::Absent => {
            let orphaned = facts.ksm.known().map(|(knobs, _)| knobs.orphaned()).unwrap_or_default();
            if orphaned.is_empty() || facts.lock_holder.known().is_some() {
                return ok("no earlier run left knobs changed");
            }
            let knobs = orphaned.iter().map(|(knob, value)| format!("{knob} {value}")).collect::<Vec<_>>().join(", ");
            warning(
                format!("pagefold has set {knobs}, but its state file is not here: it had a /run of its own"),
                "the original values are not known, and ksmd may be scanning without need",
                "if no container runs pagefold, set the kernel's defaults: pagefold doctor --fix",
            )
        }
        Fact::Is(found) if found.holder_alive => ok("the running pagefold has saved KSM's knobs"),
        Fact::Is(found) if !found.this_boot => ok("a state file of an earlier boot, which is obsolete"),
        Fact::Is(found) => {
            let knobs = found.state.turned.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            if found.state.holder.is_some() {
                warning(
                    format!("a run was killed and left KSM's settings changed: {knobs}"),
                    "ksmd may be scanning without need",
                    "nothing if pagefold starts again: `run` recovers by itself. Otherwise: pagefold doctor --fix",
                )
            } else {
                note(
                    format!("knobs not yet restored: {knobs}"),
                    "the kernel only accepts the original values while nothing is merged",
                    "pagefold doctor --fix, once nothing is merged",
                )
            }
        }
        Fact::Denied => note("the state file cannot be read", "a crashed run is not detected", "run as root"),
        Fact::Malformed(what) => blocker(
            what.clone(),
            "the original values of KSM's knobs are not known",
            "check the knobs, then remove that file",
        ),
    }
}
