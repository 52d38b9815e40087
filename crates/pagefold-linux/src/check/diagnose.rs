//! Findings of `pagefold doctor`: what the facts about the machine mean for pagefold, and what to do.
//!
//! Each check judges some of [`MachineFacts`] and makes one finding. To add one, write a function and list it in [`judge`].

use crate::check::facts::{Cgroups, Fact, MachineFacts, MachinePaths, Release};
use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing to do.
    Ok,
    /// Worth knowing, without consequences for pagefold.
    Note,
    /// pagefold runs, with a feature missing or at a higher cost.
    Warning,
    /// `pagefold run` cannot work.
    Blocker,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable identifier.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// The state found.
    pub what: String,
    /// Why that matters. Empty for [`Severity::Ok`].
    pub why: String,
    /// What to do. Empty for [`Severity::Ok`].
    pub todo: String,
}

/// Reads the facts about the machine and judges them.
pub fn examine(roots: &MachinePaths) -> Vec<Finding> {
    judge(&MachineFacts::gather(roots))
}

/// Makes all findings.
pub fn judge(facts: &MachineFacts) -> Vec<Finding> {
    let checks = [
        kernel,
        ksm,
        run,
        advisor,
        programs,
        lock,
        state,
        capabilities,
        page_monitor,
        ksm_stat,
        ptrace,
        seccomp,
        huge_pages,
        map_count,
        nodes,
        swap,
        pressure,
        cgroups,
        page_size,
    ];
    checks.iter().map(|check| check(facts)).collect()
}

/// Oldest supported kernel: PR_SET_MEMORY_MERGE and general_profit.
const OLDEST: Release = Release(6, 4);
/// First kernel with inheritance through exec, `KSM:` in smaps and PAGEMAP_SCAN.
const FULL: Release = Release(6, 7);

type Check = Finding;

fn finding(severity: Severity, id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Check {
    Finding { id, severity, what: what.into(), why: why.to_owned(), todo: todo.to_owned() }
}

fn ok(id: &'static str, what: impl Into<String>) -> Check {
    finding(Severity::Ok, id, what, "", "")
}

fn note(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Check {
    finding(Severity::Note, id, what, why, todo)
}

fn warning(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Check {
    finding(Severity::Warning, id, what, why, todo)
}

fn blocker(id: &'static str, what: impl Into<String>, why: &str, todo: &str) -> Check {
    finding(Severity::Blocker, id, what, why, todo)
}

fn kernel(facts: &MachineFacts) -> Check {
    let name = format!("Linux {}", facts.release_text);
    match facts.release {
        Fact::Is(release) if release >= FULL => ok("kernel", name),
        Fact::Is(release) if release >= OLDEST => note(
            "kernel",
            format!("{name}, older than {FULL}"),
            "the mark set by `pagefold exec` is lost at the next exec, and reading page tables costs more",
            "nothing, or install a newer kernel",
        ),
        Fact::Is(_) => blocker(
            "kernel",
            format!("{name}, older than {OLDEST}"),
            "KSM lacks counters that pagefold needs",
            "install a newer kernel",
        ),
        _ => warning("kernel", "the kernel version cannot be read", "its features are not known", "mount /proc"),
    }
}

fn ksm(facts: &MachineFacts) -> Check {
    match &facts.ksm {
        Fact::Is((_, counters)) => {
            let pages = counters.pages_sharing.0 + counters.ksm_zero_pages.unwrap_or_default().0;
            let saved = pagefold_core::units::Pages(pages).bytes().mib();
            ok(
                "ksm",
                if pages == 0 {
                    "KSM is available, nothing is merged".into()
                } else {
                    format!("KSM saves {saved:.1} MiB")
                },
            )
        }
        Fact::Absent => blocker(
            "ksm",
            "the kernel has no KSM, or one too old",
            "KSM merges the pages; without it pagefold can only measure (`pagefold scan`)",
            "use a kernel built with CONFIG_KSM=y; in a container, make /sys visible",
        ),
        Fact::Denied => {
            blocker("ksm", "KSM's files cannot be read", "access to /sys/kernel/mm/ksm is denied", "run as root")
        }
        Fact::Malformed(what) => blocker(
            "ksm",
            format!("KSM's files cannot be parsed: {what}"),
            "pagefold needs them to control KSM",
            "report this as a bug",
        ),
    }
}

fn run(facts: &MachineFacts) -> Check {
    let Fact::Is((knobs, counters)) = &facts.ksm else { return ok("run", "ksmd: see ksm") };
    let ours = facts.lock_holder.known().is_some();
    let merged = counters.pages_sharing.0 > 0;
    match knobs.run {
        1 if ours => ok("run", "ksmd is driven by a running pagefold"),
        1 => blocker(
            "run",
            "ksmd is running already (run is 1)",
            "an administrator or another program drives KSM, or left it running; the kernel does not show which",
            "if it is not needed: echo 0 > /sys/kernel/mm/ksm/run",
        ),
        _ if merged && !ours => note(
            "run",
            "ksmd is stopped, with pages still merged",
            "they stay merged until they are written, and max_page_sharing cannot be set meanwhile",
            "nothing; or, to unmerge all: echo 2 > /sys/kernel/mm/ksm/run, then 0",
        ),
        _ => ok("run", "ksmd is stopped"),
    }
}

fn advisor(facts: &MachineFacts) -> Check {
    match facts.ksm.known() {
        Some((knobs, _)) if knobs.advisor_on() => blocker(
            "advisor",
            format!("the kernel's advisor is on ({})", knobs.advisor_mode.as_deref().unwrap_or("?")),
            "it sets pages_to_scan and refuses other writes to it",
            "echo none > /sys/kernel/mm/ksm/advisor_mode",
        ),
        _ => ok("advisor", "the kernel's advisor is off"),
    }
}

fn programs(facts: &MachineFacts) -> Check {
    let running = facts.programs.known().map(Vec::as_slice).unwrap_or_default();
    let named = running.iter().map(|(pid, name)| format!("{name} (pid {pid})")).collect::<Vec<_>>().join(", ");
    if running.iter().any(|(_, name)| name == "ksmtuned") {
        blocker(
            "programs",
            format!("{named} is running"),
            "ksmtuned sets the same knobs as pagefold",
            "systemctl disable --now ksmtuned",
        )
    } else if !running.is_empty() {
        warning(
            "programs",
            format!("{named} is running"),
            "it marks memory of other programs, which every ksmd scan then includes",
            "stop it, or keep those programs out of pagefold's scope",
        )
    } else if let Fact::Is(_) = facts.programs {
        ok("programs", "no other program uses KSM")
    } else {
        note("programs", "the process list cannot be read", "programs that drive KSM are not detected", "mount /proc")
    }
}

fn lock(facts: &MachineFacts) -> Check {
    match &facts.lock_holder {
        Fact::Is(holder) => {
            let pid = holder.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            note(
                "lock",
                format!("another pagefold drives KSM{pid}"),
                "only one can run at a time",
                "see pagefold status",
            )
        }
        Fact::Absent => ok("lock", "no other pagefold is running"),
        Fact::Denied => note("lock", "the lock file cannot be read", "another pagefold may be running", "run as root"),
        Fact::Malformed(what) => {
            warning("lock", format!("the lock: {what}"), "a run must take the lock", "remove that file")
        }
    }
}

fn state(facts: &MachineFacts) -> Check {
    match &facts.state {
        Fact::Absent => ok("state", "no earlier run left knobs changed"),
        Fact::Is(found) if found.holder_alive => ok("state", "the running pagefold has saved KSM's knobs"),
        Fact::Is(found) if !found.this_boot => ok("state", "a state file of an earlier boot, which is obsolete"),
        Fact::Is(found) => {
            let knobs = found.state.turned.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            if found.state.holder.is_some() {
                warning(
                    "state",
                    format!("a run that was killed left these knobs changed: {knobs}"),
                    "ksmd may be scanning without need",
                    "pagefold doctor --fix (the next run does it too)",
                )
            } else {
                note(
                    "state",
                    format!("knobs not yet restored: {knobs}"),
                    "the kernel allows it only while nothing is merged",
                    "pagefold doctor --fix, once nothing is merged",
                )
            }
        }
        Fact::Denied => note("state", "the state file cannot be read", "a crashed run is not detected", "run as root"),
        Fact::Malformed(what) => blocker(
            "state",
            what.clone(),
            "the original values of KSM's knobs are not known",
            "check the knobs, then remove that file",
        ),
    }
}

/// The capabilities that merging needs: bit, name, purpose.
const CAPABILITIES: [(u32, &str, &str); 3] = [
    (2, "CAP_DAC_READ_SEARCH", "to read other users' /proc entries"),
    (19, "CAP_SYS_PTRACE", "to read and mark other users' processes"),
    (21, "CAP_SYS_ADMIN", "to read frame numbers and to mark processes under a seccomp filter"),
];

fn capabilities(facts: &MachineFacts) -> Check {
    let (Fact::Is(held), Fact::Is(uid)) = (&facts.capabilities, &facts.uid) else {
        return warning(
            "capabilities",
            "our capabilities cannot be read",
            "missing ones show only when something fails",
            "mount /proc",
        );
    };
    let has = |bit: u32| held >> bit & 1 == 1;
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(bit, ..)| !has(*bit)).collect();
    let listed = missing.iter().map(|(_, name, what)| format!("{name} {what}")).collect::<Vec<_>>().join("; ");
    // KSM's files belong to root and have mode 0644.
    let may_steer = *uid == 0 || has(1);
    match (may_steer, missing.is_empty()) {
        (true, true) => ok("capabilities", "all capabilities that pagefold needs"),
        (true, false) => {
            blocker("capabilities", format!("missing: {listed}"), "run, unmerge and demo need them", "grant them")
        }
        (false, _) => blocker(
            "capabilities",
            "this user must not control KSM",
            "its files belong to root, and reading other users' processes needs capabilities",
            "run as root",
        ),
    }
}

fn page_monitor(facts: &MachineFacts) -> Check {
    match (&facts.frames_visible, &facts.page_flags) {
        (Fact::Is(true), Fact::Is(())) => ok("page-monitor", "frame numbers and page flags are visible"),
        (Fact::Absent, _) | (_, Fact::Absent) => warning(
            "page-monitor",
            "the kernel was built without CONFIG_PROC_PAGE_MONITOR",
            "single merged pages cannot be recognised",
            "use a kernel built with it",
        ),
        _ => warning(
            "page-monitor",
            "frame numbers or page flags are hidden from us",
            "single merged pages cannot be recognised",
            "run as root with CAP_SYS_ADMIN",
        ),
    }
}

fn ksm_stat(facts: &MachineFacts) -> Check {
    match facts.ksm_stat {
        Fact::Is(()) => ok("ksm-stat", "merged pages are counted per process"),
        _ => note("ksm-stat", "no /proc/PID/ksm_stat", "savings are not counted per process", "nothing"),
    }
}

fn ptrace(facts: &MachineFacts) -> Check {
    match facts.ptrace_scope {
        Fact::Is(3) => warning(
            "ptrace",
            "ptrace is disabled until the next boot (yama ptrace_scope is 3)",
            "running programs cannot be marked",
            "start programs with `pagefold exec`, or boot with kernel.yama.ptrace_scope below 3",
        ),
        Fact::Is(scope @ 1..) => ok("ptrace", format!("ptrace is allowed with CAP_SYS_PTRACE (scope {scope})")),
        Fact::Is(0) | Fact::Absent => ok("ptrace", "ptrace is allowed"),
        _ => note("ptrace", "yama's ptrace_scope cannot be read", "marking may be refused", "nothing"),
    }
}

fn seccomp(facts: &MachineFacts) -> Check {
    match facts.seccomp {
        Fact::Is(0) | Fact::Absent => ok("seccomp", "no filter on pagefold itself"),
        _ => warning(
            "seccomp",
            "pagefold itself runs under a seccomp filter",
            "the kernel then refuses to suspend the filter of a target for the call that marks it",
            "run it outside the container, or with seccomp=unconfined",
        ),
    }
}

fn huge_pages(facts: &MachineFacts) -> Check {
    let Fact::Is(mode) = &facts.huge_pages else { return ok("huge-pages", "no transparent huge pages") };
    let zero = facts.ksm.known().is_some_and(|(knobs, _)| knobs.use_zero_pages);
    if mode == "always" && !zero {
        note(
            "huge-pages",
            "transparent huge pages are set to always, and use_zero_pages is 0",
            "recent kernels then merge at a tenth of the speed, and a merge splits a huge page",
            "`pagefold run` sets use_zero_pages; if you drive KSM yourself, set it to 1",
        )
    } else {
        ok("huge-pages", format!("transparent huge pages: {mode}"))
    }
}

/// Below this limit, splitting large mappings leaves programs too few.
const FEW_MAPS: u64 = 16_384;

fn map_count(facts: &MachineFacts) -> Check {
    match facts.max_map_count {
        Fact::Is(count) if count < FEW_MAPS => warning(
            "map-count",
            format!("a process can have only {count} mappings"),
            "marking part of a mapping splits it, so large mappings are marked whole or not at all",
            "sysctl vm.max_map_count=65530",
        ),
        Fact::Is(count) => ok("map-count", format!("{count} mappings per process")),
        _ => {
            note("map-count", "vm.max_map_count cannot be read", "the kernel's default of 65530 is assumed", "nothing")
        }
    }
}

fn nodes(facts: &MachineFacts) -> Check {
    let across = facts.ksm.known().and_then(|(knobs, _)| knobs.merge_across_nodes);
    match (facts.nodes.known().copied().unwrap_or(1), across) {
        (count @ 2.., Some(true)) => note(
            "nodes",
            format!("{count} NUMA nodes, merged across nodes"),
            "a merged page is remote for programs on all nodes but one",
            "nothing: `pagefold run` places merged pages; --placement local-only does not merge across nodes and saves less",
        ),
        (count @ 2.., _) => ok("nodes", format!("{count} NUMA nodes, not merged across nodes")),
        _ => ok("nodes", "one NUMA node"),
    }
}

fn swap(facts: &MachineFacts) -> Check {
    match facts.swap_total_kib {
        Fact::Is(0) | Fact::Absent => note(
            "swap",
            "no swap",
            "writes to merged pages need memory again, which may be used otherwise by then",
            "leave part of the saved memory free, or add swap",
        ),
        Fact::Is(kib) => ok("swap", format!("{} MiB of swap", kib / 1024)),
        _ => note("swap", "the size of swap cannot be read", "there may be none", "nothing"),
    }
}

fn pressure(facts: &MachineFacts) -> Check {
    match facts.pressure {
        Fact::Is(()) => ok("pressure", "memory pressure is measured"),
        _ => note(
            "pressure",
            "no pressure stall information",
            "the automatic governor uses available memory only",
            "boot with psi=1",
        ),
    }
}

fn cgroups(facts: &MachineFacts) -> Check {
    match facts.cgroups {
        Cgroups::Unified => ok("cgroups", "cgroups, version 2"),
        Cgroups::Hybrid => ok("cgroups", "cgroups, versions 1 and 2"),
        Cgroups::Legacy => {
            note("cgroups", "cgroups, version 1 only", "a frozen program cannot be marked until it thaws", "nothing")
        }
        Cgroups::Missing => note("cgroups", "no cgroups", "--cgroup finds nothing", "mount /sys/fs/cgroup"),
    }
}

fn page_size(facts: &MachineFacts) -> Check {
    match facts.page_size {
        Fact::Is(4096) => ok("page-size", "pages of 4 KiB"),
        Fact::Is(size) => blocker(
            "page-size",
            format!("pages of {} KiB", size / 1024),
            "pagefold supports pages of 4 KiB only",
            "use a kernel with 4 KiB pages",
        ),
        _ => note("page-size", "the page size cannot be read", "4 KiB is assumed", "mount /proc"),
    }
}

#[cfg(test)]
#[path = "diagnose_tests.rs"]
mod tests;
