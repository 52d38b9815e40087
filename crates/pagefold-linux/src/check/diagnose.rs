//! What a machine's facts mean for pagefold, and what to do about it.
//!
//! Pure judgement over [`Facts`]: each check looks at one matter and says one thing about it.

use crate::check::facts::{Cgroups, Fact, Facts, Release, Roots};
use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing is lost.
    Note,
    /// pagefold runs, with something missing or at a cost.
    Warning,
    /// `pagefold run` cannot work like this.
    Blocker,
}

/// One thing found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The matter, a stable short name.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What is so.
    pub what: String,
    /// Why that matters. Empty when all is well.
    pub why: String,
    /// What to do. Empty when there is nothing to do.
    pub todo: String,
}

/// Looks at the machine and judges it.
pub fn examine(roots: &Roots) -> Vec<Finding> {
    judge(&Facts::gather(roots))
}

/// Judges facts.
pub fn judge(facts: &Facts) -> Vec<Finding> {
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

/// The oldest kernel supported: PR_SET_MEMORY_MERGE and general_profit.
const OLDEST: Release = Release(6, 4);
/// From here on: inheritance through exec, `KSM:` in smaps, PAGEMAP_SCAN.
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

fn kernel(facts: &Facts) -> Check {
    let name = format!("Linux {}", facts.release_text);
    match facts.release {
        Fact::Is(release) if release >= FULL => ok("kernel", name),
        Fact::Is(release) if release >= OLDEST => note(
            "kernel",
            format!("{name}, older than {FULL}"),
            "`pagefold exec` loses its mark at the next exec, and looking at page tables costs more",
            "nothing, or a newer kernel",
        ),
        Fact::Is(_) => blocker(
            "kernel",
            format!("{name}, older than {OLDEST}"),
            "KSM lacks the counters that pagefold steers by",
            "install a newer kernel",
        ),
        _ => warning("kernel", "the kernel's version is not to be read", "what it can do is guessed", "mount /proc"),
    }
}

fn ksm(facts: &Facts) -> Check {
    match &facts.ksm {
        Fact::Is((_, counters)) => {
            let pages = counters.pages_sharing.0 + counters.ksm_zero_pages.unwrap_or_default().0;
            let saved = pagefold_core::units::Pages(pages).bytes().mib();
            ok(
                "ksm",
                if pages == 0 { "KSM is there, nothing merged".into() } else { format!("KSM saves {saved:.1} MiB") },
            )
        }
        Fact::Absent => blocker(
            "ksm",
            "the kernel has no KSM, or one too old",
            "KSM is what merges pages; without it pagefold can only look (`pagefold scan`)",
            "use a kernel built with CONFIG_KSM=y; in a container, make /sys visible",
        ),
        Fact::Denied => {
            blocker("ksm", "KSM's files may not be read", "a policy hides /sys/kernel/mm/ksm", "run as root")
        }
        Fact::Malformed(what) => blocker(
            "ksm",
            format!("KSM's files are not understood: {what}"),
            "pagefold steers by them",
            "report this as a bug",
        ),
    }
}

fn run(facts: &Facts) -> Check {
    let Fact::Is((knobs, counters)) = &facts.ksm else { return ok("run", "ksmd: see ksm") };
    let ours = facts.lock_holder.known().is_some();
    let merged = counters.pages_sharing.0 > 0;
    match knobs.run {
        1 if ours => ok("run", "ksmd is driven by a running pagefold"),
        1 => blocker(
            "run",
            "ksmd is running already (run is 1)",
            "somebody else drives KSM, or left it running; the kernel does not tell who",
            "if nobody needs it: echo 0 > /sys/kernel/mm/ksm/run",
        ),
        _ if merged && !ours => note(
            "run",
            "ksmd is stopped, with pages still merged",
            "they stay merged for as long as nobody writes to them, but max_page_sharing cannot be set meanwhile",
            "nothing; or, to unmerge all: echo 2 > /sys/kernel/mm/ksm/run, then 0",
        ),
        _ => ok("run", "ksmd is at rest"),
    }
}

fn advisor(facts: &Facts) -> Check {
    match facts.ksm.known() {
        Some((knobs, _)) if knobs.advisor_on() => blocker(
            "advisor",
            format!("the kernel's advisor is on ({})", knobs.advisor_mode.as_deref().unwrap_or("?")),
            "it sets pages_to_scan by itself and refuses that anybody else does",
            "echo none > /sys/kernel/mm/ksm/advisor_mode",
        ),
        _ => ok("advisor", "the kernel's advisor is off"),
    }
}

fn programs(facts: &Facts) -> Check {
    let running = facts.programs.known().map(Vec::as_slice).unwrap_or_default();
    let named = running.iter().map(|(pid, name)| format!("{name} (pid {pid})")).collect::<Vec<_>>().join(", ");
    if running.iter().any(|(_, name)| name == "ksmtuned") {
        blocker(
            "programs",
            format!("{named} is running"),
            "ksmtuned turns the same knobs by its own rules",
            "systemctl disable --now ksmtuned",
        )
    } else if !running.is_empty() {
        warning(
            "programs",
            format!("{named} is running"),
            "it marks memory of programs of its own choice, which every scan then walks",
            "stop it, or leave those programs to it",
        )
    } else if let Fact::Is(_) = facts.programs {
        ok("programs", "no other program uses KSM")
    } else {
        note("programs", "other programs are not to be seen", "one that drives KSM would go unnoticed", "mount /proc")
    }
}

fn lock(facts: &Facts) -> Check {
    match &facts.lock_holder {
        Fact::Is(holder) => {
            let pid = holder.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            note(
                "lock",
                format!("another pagefold drives KSM{pid}"),
                "there can be one at a time",
                "talk to it: pagefold status",
            )
        }
        Fact::Absent => ok("lock", "no other pagefold is running"),
        Fact::Denied => note("lock", "the lock may not be looked at", "another pagefold may be running", "run as root"),
        Fact::Malformed(what) => {
            warning("lock", format!("the lock: {what}"), "it must be taken before a run", "remove that file")
        }
    }
}

fn state(facts: &Facts) -> Check {
    match &facts.state {
        Fact::Absent => ok("state", "no earlier run left anything turned"),
        Fact::Is(found) if found.holder_alive => ok("state", "KSM's knobs are kept safe by the running pagefold"),
        Fact::Is(found) if !found.this_boot => ok("state", "a state file of an earlier boot, which means nothing now"),
        Fact::Is(found) => {
            let knobs = found.state.turned.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            if found.state.holder.is_some() {
                warning(
                    "state",
                    format!("a run that was killed left turned: {knobs}"),
                    "ksmd may be scanning to nobody's benefit",
                    "pagefold doctor --fix (the next run does it too)",
                )
            } else {
                note(
                    "state",
                    format!("still to be put back: {knobs}"),
                    "the kernel allows it only while nothing is merged",
                    "pagefold doctor --fix, once nothing is merged",
                )
            }
        }
        Fact::Denied => {
            note("state", "the state file may not be read", "a crashed run would go unnoticed", "run as root")
        }
        Fact::Malformed(what) => blocker(
            "state",
            what.clone(),
            "how KSM's knobs stood cannot be told",
            "check the knobs, then remove that file",
        ),
    }
}

/// The capabilities that folding needs: bit, name, what for.
const CAPABILITIES: [(u32, &str, &str); 3] = [
    (2, "CAP_DAC_READ_SEARCH", "to read other users' /proc entries"),
    (19, "CAP_SYS_PTRACE", "to read and mark other users' programs"),
    (21, "CAP_SYS_ADMIN", "to see frames and to mark programs under a seccomp filter"),
];

fn capabilities(facts: &Facts) -> Check {
    let (Fact::Is(held), Fact::Is(uid)) = (&facts.capabilities, &facts.uid) else {
        return warning("capabilities", "our own rights are not to be read", "what fails will say so", "mount /proc");
    };
    let has = |bit: u32| held >> bit & 1 == 1;
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(bit, ..)| !has(*bit)).collect();
    let listed = missing.iter().map(|(_, name, what)| format!("{name} {what}")).collect::<Vec<_>>().join("; ");
    // KSM's files belong to root and have mode 0644.
    let may_steer = *uid == 0 || has(1);
    match (may_steer, missing.is_empty()) {
        (true, true) => ok("capabilities", "all rights that pagefold uses"),
        (true, false) => {
            blocker("capabilities", format!("missing: {listed}"), "run, unmerge and demo refuse without", "grant them")
        }
        (false, _) => blocker(
            "capabilities",
            "KSM may not be steered by this user",
            "its files belong to root; reading other users' programs needs more rights too",
            "run as root",
        ),
    }
}

fn page_monitor(facts: &Facts) -> Check {
    match (&facts.frames_visible, &facts.page_flags) {
        (Fact::Is(true), Fact::Is(())) => ok("page-monitor", "page maps show frames and flags"),
        (Fact::Absent, _) | (_, Fact::Absent) => warning(
            "page-monitor",
            "the kernel was built without CONFIG_PROC_PAGE_MONITOR",
            "which pages are merged cannot be told one by one",
            "use a kernel built with it",
        ),
        _ => warning(
            "page-monitor",
            "page maps hide frames or flags from us",
            "which pages are merged cannot be told one by one",
            "run as root with CAP_SYS_ADMIN",
        ),
    }
}

fn ksm_stat(facts: &Facts) -> Check {
    match facts.ksm_stat {
        Fact::Is(()) => ok("ksm-stat", "merged pages are counted per process"),
        _ => note("ksm-stat", "no /proc/PID/ksm_stat", "savings are not told per process", "nothing"),
    }
}

fn ptrace(facts: &Facts) -> Check {
    match facts.ptrace_scope {
        Fact::Is(3) => warning(
            "ptrace",
            "ptrace is forbidden for all until the next boot (yama ptrace_scope is 3)",
            "running programs cannot be marked",
            "start programs by `pagefold exec`, or boot with kernel.yama.ptrace_scope below 3",
        ),
        Fact::Is(scope @ 1..) => ok("ptrace", format!("ptrace is allowed with CAP_SYS_PTRACE (scope {scope})")),
        Fact::Is(0) | Fact::Absent => ok("ptrace", "ptrace is allowed"),
        _ => note("ptrace", "yama's ptrace_scope is not to be read", "marking may be refused", "nothing"),
    }
}

fn seccomp(facts: &Facts) -> Check {
    match facts.seccomp {
        Fact::Is(0) | Fact::Absent => ok("seccomp", "no filter on pagefold itself"),
        _ => warning(
            "seccomp",
            "pagefold itself runs under a seccomp filter",
            "the kernel then refuses to lift a target's filter for the one call that marks it",
            "run it outside of the container, or with seccomp=unconfined",
        ),
    }
}

fn huge_pages(facts: &Facts) -> Check {
    let Fact::Is(mode) = &facts.huge_pages else { return ok("huge-pages", "no transparent huge pages") };
    let zero = facts.ksm.known().is_some_and(|(knobs, _)| knobs.use_zero_pages);
    if mode == "always" && !zero {
        note(
            "huge-pages",
            "huge pages are always used, and use_zero_pages is 0",
            "recent kernels then merge at a tenth of the speed; and a merge splits a huge page",
            "`pagefold run` sets use_zero_pages; if you drive KSM yourself, set it to 1",
        )
    } else {
        ok("huge-pages", format!("transparent huge pages: {mode}"))
    }
}

/// Below this, splitting large mappings leaves programs too few.
const FEW_MAPS: u64 = 16_384;

fn map_count(facts: &Facts) -> Check {
    match facts.max_map_count {
        Fact::Is(count) if count < FEW_MAPS => warning(
            "map-count",
            format!("a process may have only {count} mappings"),
            "marking part of a mapping splits it, so large ones will be marked whole or not at all",
            "sysctl vm.max_map_count=65530",
        ),
        Fact::Is(count) => ok("map-count", format!("{count} mappings a process")),
        _ => note("map-count", "vm.max_map_count is not to be read", "the kernel's usual 65530 is assumed", "nothing"),
    }
}

fn nodes(facts: &Facts) -> Check {
    let across = facts.ksm.known().and_then(|(knobs, _)| knobs.merge_across_nodes);
    match (facts.nodes.known().copied().unwrap_or(1), across) {
        (count @ 2.., Some(true)) => note(
            "nodes",
            format!("{count} NUMA nodes, merged across"),
            "a merged page is far from all but one node's programs",
            "nothing: `pagefold run` gives every node its share; --placement local-only keeps nodes apart and saves less",
        ),
        (count @ 2.., _) => ok("nodes", format!("{count} NUMA nodes, kept apart")),
        _ => ok("nodes", "one NUMA node"),
    }
}

fn swap(facts: &Facts) -> Check {
    match facts.swap_total_kib {
        Fact::Is(0) | Fact::Absent => note(
            "swap",
            "no swap",
            "memory that was saved and then given away is missing when programs write to merged pages",
            "leave part of what is saved free, or add swap",
        ),
        Fact::Is(kib) => ok("swap", format!("{} MiB of swap", kib / 1024)),
        _ => note("swap", "swap is not to be read", "it may be missing", "nothing"),
    }
}

fn pressure(facts: &Facts) -> Check {
    match facts.pressure {
        Fact::Is(()) => ok("pressure", "memory pressure is measured"),
        _ => note(
            "pressure",
            "no pressure stall information",
            "the automatic governor goes by free memory alone",
            "boot with psi=1",
        ),
    }
}

fn cgroups(facts: &Facts) -> Check {
    match facts.cgroups {
        Cgroups::Unified => ok("cgroups", "cgroups, version 2"),
        Cgroups::Hybrid => ok("cgroups", "cgroups, version 1 with version 2 beside"),
        Cgroups::Legacy => {
            note("cgroups", "cgroups, version 1 only", "a frozen program cannot be marked until it thaws", "nothing")
        }
        Cgroups::Missing => note("cgroups", "no cgroups", "--cgroup finds nothing", "mount /sys/fs/cgroup"),
    }
}

fn page_size(facts: &Facts) -> Check {
    match facts.page_size {
        Fact::Is(4096) => ok("page-size", "pages of 4 KiB"),
        Fact::Is(size) => blocker(
            "page-size",
            format!("pages of {} KiB", size / 1024),
            "pagefold knows pages of 4 KiB only",
            "use a kernel with 4 KiB pages",
        ),
        _ => note("page-size", "the page size is not to be read", "4 KiB is assumed", "mount /proc"),
    }
}

#[cfg(test)]
#[path = "diagnose_tests.rs"]
mod tests;
