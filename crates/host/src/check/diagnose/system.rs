//! Findings about the memory and the configuration of the machine.

use super::{Finding, blocker, note, ok, warning};
use crate::check::facts::{Cgroups, Fact, MachineFacts};

pub(super) fn huge_pages(facts: &MachineFacts) -> Finding {
    let Fact::Is(mode) = &facts.huge_pages else { return ok("no transparent huge pages") };
    let zero = facts.ksm.known().is_some_and(|(knobs, _)| knobs.use_zero_pages);
    if mode == "always" && !zero {
        note(
            "transparent huge pages are set to always, and use_zero_pages is 0",
            "recent kernels then merge at a tenth of the speed, and each merge splits a huge page",
            "`pagefold run` sets use_zero_pages; if you drive KSM yourself, set it to 1",
        )
    } else {
        ok(format!("transparent huge pages: {mode}"))
    }
}

pub(super) fn khugepaged(facts: &MachineFacts) -> Finding {
    const TODO: &str = "echo 0 > /sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none";
    let why = "such a huge page takes memory again for the zero pages that KSM had merged";
    match (facts.huge_pages.known().map(String::as_str), &facts.max_ptes_none) {
        (Some("always"), Fact::Is(pages @ 1..)) => warning(
            format!("khugepaged makes huge pages where up to {pages} of 512 pages are empty or zero"),
            why,
            TODO,
        ),
        (Some("madvise"), Fact::Is(pages @ 1..)) => note(
            format!(
                "for programs that ask, khugepaged makes huge pages where up to {pages} of 512 pages are empty or zero"
            ),
            why,
            TODO,
        ),
        _ => ok("khugepaged makes no huge pages of empty or zero pages"),
    }
}

/// If `vm.max_map_count` is lower than this, splitting large mappings leaves programs too few mappings.
const FEW_MAPS: u64 = 16_384;

pub(super) fn map_count(facts: &MachineFacts) -> Finding {
    match facts.max_map_count {
        Fact::Is(count) if count < FEW_MAPS => warning(
            format!("a process can have only {count} mappings"),
            "marking part of a mapping splits it, so large mappings are marked whole or not at all",
            "sysctl vm.max_map_count=65530",
        ),
        Fact::Is(count) => ok(format!("{count} mappings per process")),
        _ => note("vm.max_map_count cannot be read", "the kernel's default of 65530 is assumed", "nothing"),
    }
}

pub(super) fn nodes(facts: &MachineFacts) -> Finding {
    let across = facts.ksm.known().and_then(|(knobs, _)| knobs.merge_across_nodes);
    match (facts.nodes.known().copied().unwrap_or(1), across) {
        (count @ 2.., Some(true)) => note(
            format!("{count} NUMA nodes, merged across nodes"),
            "a merged page is remote for programs on all nodes but one",
            "nothing: `pagefold run` places merged pages; --placement local-only does not merge across nodes and saves less",
        ),
        (count @ 2.., _) => ok(format!("{count} NUMA nodes, not merged across nodes")),
        _ => ok("one NUMA node"),
    }
}

pub(super) fn swap(facts: &MachineFacts) -> Finding {
    match facts.swap_total_kib {
        Fact::Is(0) | Fact::Absent => note(
            "no swap",
            "writing to merged pages takes memory again, which others may be using by that time",
            "leave part of the saved memory free, or add swap",
        ),
        Fact::Is(kib) => ok(format!("{} MiB of swap", kib / 1024)),
        _ => note("the size of swap cannot be read", "there may be none", "nothing"),
    }
}

pub(super) fn pressure(facts: &MachineFacts) -> Finding {
    match facts.pressure {
        Fact::Is(()) => ok("memory pressure is measured"),
        _ => note(
            "no pressure stall information",
            "the automatic governor sees how much memory is available, not whether tasks wait for it",
            "boot with psi=1",
        ),
    }
}

pub(super) fn cgroups(facts: &MachineFacts) -> Finding {
    match facts.cgroups {
        Cgroups::Unified => ok("cgroups, version 2"),
        Cgroups::Hybrid => ok("cgroups, versions 1 and 2"),
        Cgroups::Legacy => {
            note("cgroups, version 1 only", "a frozen program cannot be marked until it thaws", "nothing")
        }
        Cgroups::Missing => note("no cgroups", "--cgroup finds nothing", "mount /sys/fs/cgroup"),
    }
}

pub(super) fn page_size(facts: &MachineFacts) -> Finding {
    match facts.page_size {
        Fact::Is(4096) => ok("pages of 4 KiB"),
        Fact::Is(size) => blocker(
            format!("pages of {} KiB", size / 1024),
            "pagefold supports pages of 4 KiB only",
            "use a kernel with 4 KiB pages",
        ),
        _ => note("the page size cannot be read", "4 KiB is assumed", "mount /proc"),
    }
}
