//! Findings about our access to other processes.

use super::{Finding, blocker, note, ok, warning};
use crate::check::facts::{Fact, MachineFacts};

/// The capabilities that merging needs: bit, name, purpose.
const CAPABILITIES: [(u32, &str, &str); 3] = [
    (2, "CAP_DAC_READ_SEARCH", "to read other users' /proc entries"),
    (19, "CAP_SYS_PTRACE", "to read and mark other users' processes"),
    (21, "CAP_SYS_ADMIN", "to read frame numbers and to mark processes under a seccomp filter"),
];

pub(super) fn capabilities(facts: &MachineFacts) -> Finding {
    let (Fact::Is(held), Fact::Is(uid)) = (&facts.capabilities, &facts.uid) else {
        return warning(
            "our capabilities cannot be read",
            "a missing capability shows only when something fails",
            "mount /proc",
        );
    };
    let has = |bit: u32| held >> bit & 1 == 1;
    let missing: Vec<_> = CAPABILITIES.iter().filter(|(bit, ..)| !has(*bit)).collect();
    let listed = missing.iter().map(|(_, name, what)| format!("{name} {what}")).collect::<Vec<_>>().join("; ");
    // KSM's files belong to root and have mode 0644.
    let may_steer = *uid == 0 || has(1);
    match (may_steer, missing.is_empty()) {
        (true, true) => ok("this process has all capabilities that pagefold needs"),
        (true, false) => blocker(format!("missing: {listed}"), "run, unmerge and demo need them", "grant them"),
        (false, _) => blocker(
            "this user may not control KSM",
            "KSM's files belong to root, and reading other users' processes needs capabilities",
            "run as root",
        ),
    }
}

pub(super) fn page_monitor(facts: &MachineFacts) -> Finding {
    match (&facts.frames_visible, &facts.page_flags) {
        (Fact::Is(true), Fact::Is(())) => ok("frame numbers and page flags are visible"),
        (Fact::Absent, _) | (_, Fact::Absent) => warning(
            "the kernel was built without CONFIG_PROC_PAGE_MONITOR",
            "pagefold cannot tell which pages are merged",
            "use a kernel built with it",
        ),
        _ => warning(
            "frame numbers or page flags are hidden from us",
            "pagefold cannot tell which pages are merged",
            "run as root with CAP_SYS_ADMIN",
        ),
    }
}

pub(super) fn ksm_stat(facts: &MachineFacts) -> Finding {
    match facts.ksm_stat {
        Fact::Is(()) => ok("merged pages are counted per process"),
        _ => note("no /proc/PID/ksm_stat", "savings are not counted per process", "nothing"),
    }
}

pub(super) fn ptrace(facts: &MachineFacts) -> Finding {
    match facts.ptrace_scope {
        Fact::Is(3) => blocker(
            "ptrace is disabled until the next boot (yama ptrace_scope is 3)",
            "nobody may read other programs' memory, or mark it",
            "boot with kernel.yama.ptrace_scope below 3; to have ksmd merge a program's memory all the same, start it with `pagefold exec`",
        ),
        Fact::Is(scope @ 1..) => ok(format!("ptrace is allowed with CAP_SYS_PTRACE (yama ptrace_scope is {scope})")),
        Fact::Is(0) | Fact::Absent => ok("ptrace is allowed"),
        _ => note("yama's ptrace_scope cannot be read", "marking may be refused", "nothing"),
    }
}

pub(super) fn seccomp(facts: &MachineFacts) -> Finding {
    match facts.seccomp {
        Fact::Is(0) | Fact::Absent => ok("no seccomp filter on pagefold itself"),
        _ => warning(
            "pagefold itself runs under a seccomp filter",
            "the kernel won't let it suspend the seccomp filters of other programs, so those that have one can't be marked",
            "run it outside the container, or with seccomp=unconfined",
        ),
    }
}
