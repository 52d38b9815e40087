//! Exclusion rules: which processes and mappings we leave alone, and why.
//!
//! We read facts first and judge them separately, so you can test rules without a process. CONTRIBUTING.md says what to
//! change to add a rule.

use super::deny_list::DenyList;
use super::dumpable::{Dumpable, ask_inside, dumpable};
use super::exe::Distrust;
use super::opt_out::{self, OptOut};
use super::{ProcessInfo, opt_out_qemu};
use pagefold_engine::host::Mechanism;
use pagefold_ksm::request::DEVICE;
use pagefold_procmem::maps::VmaDetail;
use pagefold_procmem::process::ReadError;
use pagefold_text::escape::printable;
use std::fmt;
use std::path::Path;

/// Why we leave a process or a mapping alone. Displayed as one line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Exclusion {
    KernelThread,
    /// Ended but not reaped.
    Zombie,
    /// The process isn't dumpable: it has chosen so, or has changed its user.
    NotDumpable,
    /// Only the process itself can tell whether it's dumpable, and we can't ask it now.
    DumpableUnknown,
    /// Another process, such as a debugger, traces it; we couldn't set marks anyway.
    Traced {
        /// Thread ID of the tracer.
        by: i32,
    },
    /// The program is on the deny list.
    DenyListed {
        entry: String,
    },
    /// The owner of the process has opted out.
    OptedOut(OptOut),
    /// An administrator has unmerged the process while pagefold was running, and hasn't included it again.
    KeptOut {
        /// The user ID of this administrator.
        by: u32,
    },
    /// A selector names the executable, which users other than root could change.
    Untrusted(Distrust),
    /// The process has left the scope: it has changed its user, executable or cgroup.
    OutOfScope,
    /// The process has moved to another trust domain, and we haven't yet removed all marks that we made in the old one.
    MovedDomain {
        to: String,
    },
    /// The process is in a trust domain other than the one that ksmd merges.
    OtherDomain {
        own: String,
        merged: String,
    },
    /// There are too many trust domains to assign one to the process.
    NoDomain,
    /// The process executed another program while we were marking its memory.
    OtherProgram,
    /// The kernel doesn't let us read the process.
    NotReadable,
    /// The process holds its mmap lock, so our reads of it don't return.
    Stuck,
    /// The process shares its address space with another one (CLONE_VM), and we count the memory there.
    SameMemory {
        with: i32,
    },
    /// The process runs a 32-bit program, which we can't mark from outside, and hasn't marked all its memory itself.
    Bits32,
    /// The process has too many mappings that KSM could merge: reading them would take too much memory.
    TooManyMappings {
        /// How many mappings we consider at most.
        most: usize,
    },
    /// All processes together, or all of one user or cgroup, have more regions than we can keep track of.
    TooManyInAll,
    /// The process maps and unmaps memory all the time, and our reads would slow it down.
    Restless,
    /// Shared memory or a shared file mapping.
    Shared,
    /// Another kind of mapping that KSM never merges.
    Unmergeable(&'static str),
    ShadowStack,
    /// Provided by the kernel: `[vdso]`, `[vvar]`, `[vsyscall]`.
    Special,
    /// MADV_DONTDUMP on less than [`BULK_BYTES`]: programs keep secrets out of core dumps this way.
    DontDump,
    /// MADV_WIPEONFORK: programs keep keys from child processes this way.
    WipeOnFork,
    /// mlock: used for secrets and for latency.
    Locked,
    /// Pinned for I/O (VFIO, RDMA, buffers of io_uring): KSM merges no page that somebody else refers to.
    Pinned,
    /// Registered with userfaultfd: another program fills missing pages, and a merge would lose write protection.
    UserFault,
    /// No anonymous pages.
    NothingAnonymous,
}

impl Exclusion {
    /// Whether KSM can't merge such memory, whoever asks.
    pub fn is_out_of_reach(&self) -> bool {
        matches!(self, Self::Shared | Self::Unmergeable(_) | Self::Pinned)
    }

    /// Whether earlier marks must go, so that KSM can't merge the memory any more. With other reasons we just don't
    /// read or mark the memory for now.
    pub fn withdraws_marks(&self) -> bool {
        matches!(
            self,
            Self::NotDumpable
                | Self::DenyListed { .. }
                | Self::OptedOut(_)
                | Self::KeptOut { .. }
                | Self::Untrusted(_)
                | Self::OutOfScope
                | Self::MovedDomain { .. }
                | Self::OtherDomain { .. }
                | Self::NoDomain
                | Self::OtherProgram
                | Self::TooManyMappings { .. }
                | Self::TooManyInAll
                | Self::DontDump
                | Self::WipeOnFork
                | Self::Locked
                | Self::Pinned
                | Self::UserFault
        )
    }

    /// Why we leave a process alone if we can't read it. Returns errors that aren't about this process alone.
    pub fn of_unreadable(error: ReadError) -> Result<Self, ReadError> {
        match error {
            ReadError::Denied { .. } => Ok(Self::NotReadable),
            ReadError::TooMany { most, .. } => Ok(Self::TooManyMappings { most }),
            error if error.is_late() => Ok(Self::Stuck),
            error => Err(error),
        }
    }

    /// Whether the reason can go away while the process doesn't run.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::DumpableUnknown | Self::Traced { .. } | Self::NotReadable)
    }
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KernelThread => "kernel thread",
            Self::Zombie => "has ended",
            Self::NotDumpable => "not dumpable: its memory is private",
            Self::DumpableUnknown => {
                "could not be asked yet whether its memory is private (PR_GET_DUMPABLE); if it is stopped or frozen, \
                 let it run"
            }
            Self::OptedOut(opt_out) => return write!(f, "{opt_out}"),
            Self::KeptOut { by } => return write!(f, "unmerged by request of uid {by}"),
            Self::OtherProgram => "ran another program while it was being marked",
            Self::Untrusted(why) => {
                return write!(f, "{}; select it by {}", why.clause("its executable"), why.ways());
            }
            Self::OutOfScope => "no longer in scope",
            Self::MovedDomain { to } => {
                return write!(f, "moving to trust domain {}: its old marks must go first", printable(to.as_bytes()));
            }
            Self::OtherDomain { own, merged } => {
                let (own, merged) = (printable(own.as_bytes()), printable(merged.as_bytes()));
                return write!(f, "in trust domain {own}; ksmd merges one domain, {merged} ([domains] merge)");
            }
            Self::NoDomain => "there are too many trust domains to give it one",
            Self::Traced { by } => return write!(f, "traced by process {by}"),
            Self::DenyListed { entry } => return write!(f, "on the deny list ({})", printable(entry.as_bytes())),
            Self::Bits32 => "a 32-bit program, which cannot be marked from outside; start it by pagefold exec",
            Self::TooManyMappings { most } => return write!(f, "has more than {most} mappings that KSM could merge"),
            Self::TooManyInAll => "with other processes, has more mappings than pagefold can track",
            Self::NotReadable => "cannot be read",
            Self::Stuck => "keeps its memory map locked",
            Self::SameMemory { with } => return write!(f, "its memory is that of process {with}, and counted there"),
            Self::Restless => "maps and unmaps memory all the time and would be slowed down",
            Self::Shared => "shared mapping, which KSM never merges",
            Self::Unmergeable(kind) => return write!(f, "{kind}, which KSM never merges"),
            Self::ShadowStack => "shadow stack",
            Self::Special => "provided by the kernel",
            Self::DontDump => "kept out of core dumps (MADV_DONTDUMP): may hold secrets",
            Self::WipeOnFork => "kept from child processes (MADV_WIPEONFORK): may hold keys",
            Self::Locked => "locked in memory (mlock): may hold secrets",
            Self::Pinned => "pinned for I/O (VmPin), which KSM cannot merge",
            Self::UserFault => "registered with userfaultfd, which a merge would disturb",
            Self::NothingAnonymous => "no anonymous pages",
        })
    }
}

/// Whether a process runs a program whose command line may have an opt-out.
pub(crate) fn may_run_qemu(info: &ProcessInfo) -> bool {
    !info.stat.is_zombie() && opt_out_qemu::is_qemu(&info.program())
}

/// The rule that excludes a process, if any. `dumpable` is its attribute as we see it from outside.
pub fn judge_process(info: &ProcessInfo, dumpable: Dumpable, deny: &DenyList) -> Option<Exclusion> {
    if info.stat.kernel_thread {
        Some(Exclusion::KernelThread)
    } else if info.stat.is_zombie() {
        Some(Exclusion::Zombie)
    } else if dumpable == Dumpable::No && !deny.allows(info) {
        Some(Exclusion::NotDumpable)
    } else if info.status.tracer != 0 {
        Some(Exclusion::Traced { by: info.status.tracer })
    } else if let Some(entry) = deny.denies(info) {
        Some(Exclusion::DenyListed { entry })
    } else if !info.is_readable {
        Some(Exclusion::NotReadable)
    } else {
        None
    }
}

/// Why we must leave a process in scope alone, if we must; `other_domain` is the reason if only another trust domain is
/// merged. We read the process again, because it may have changed since we found it.
pub fn process_exclusion(
    found: &ProcessInfo,
    deny: &DenyList,
    other_domain: Option<Exclusion>,
) -> Result<Option<Exclusion>, ReadError> {
    let mut info = ProcessInfo::of(&found.process)?;
    info.cgroups = found.cgroups.clone();
    info.distrust.clone_from(&found.distrust);
    let dumpable = dumpable(&info)?;
    info.read_width()?;
    let mechanism = if Path::new(DEVICE).exists() { Mechanism::Request } else { Mechanism::Ksmd };
    let option = if may_run_qemu(&info) { opt_out_qemu::of_process_in_time(&info.process)? } else { None };
    match judge_opt_outs(&info, option, deny).excluding {
        Some(opt_out) => Ok(Some(Exclusion::OptedOut(opt_out))),
        None => Ok(exclusion_of(&info, other_domain, dumpable, mechanism, deny)),
    }
}

/// The opt-outs of a process, judged.
pub(crate) struct OptOuts {
    /// The opt-out that excludes the process.
    pub(crate) excluding: Option<OptOut>,
    /// The opt-outs that the administrator has overridden.
    pub(crate) overridden: Vec<OptOut>,
}

/// Judges the opt-outs by the cgroups of a process and by the option on its command line.
pub(crate) fn judge_opt_outs(info: &ProcessInfo, option: Option<&'static str>, deny: &DenyList) -> OptOuts {
    if let Some(cgroup) = &info.cgroups.unreadable {
        // We can't read the cgroup's limits and trust domain either, so nobody can override this.
        let unknown = OptOut::Unknown { cgroup: cgroup.clone() };
        return OptOuts { excluding: Some(unknown), overridden: Vec::new() };
    }
    let program = if info.is_trusted() { Some(info.program()) } else { None };
    let mut all = info.cgroups.opt_outs.clone();
    if let Some(option) = option {
        all.push(opt_out::by_command_line(option, info.cgroups.path.as_deref()));
    }
    let mut judged = OptOuts { excluding: None, overridden: Vec::new() };
    for opt_out in all {
        if deny.overrides(&opt_out, program.as_deref()) {
            judged.overridden.push(opt_out);
        } else {
            judged.excluding.get_or_insert(opt_out);
        }
    }
    judged
}

/// Why we must leave a process in scope alone, if we must, by facts that we've just read. Opt-outs are judged before
/// this. Asking for the dumpable attribute may stop the process, so that comes last.
pub(crate) fn exclusion_of(
    info: &ProcessInfo,
    other_domain: Option<Exclusion>,
    dumpable: Dumpable,
    mechanism: Mechanism,
    deny: &DenyList,
) -> Option<Exclusion> {
    if let Some(why) = &info.distrust {
        return Some(Exclusion::Untrusted(why.clone()));
    }
    if other_domain.is_some() {
        return other_domain;
    }
    let by_rule = judge_process(info, dumpable, deny);
    if by_rule.is_some() {
        return by_rule;
    }
    // The injector knows no 32-bit calls: it can neither mark such a process nor ask whether it's dumpable. If we merge
    // on request, we mark nothing, and must ask only if it's root's process or we can't tell from outside.
    if info.needs_exec && (mechanism == Mechanism::Ksmd || info.uid() == 0 || dumpable == Dumpable::Unknown) {
        return Some(Exclusion::Bits32);
    }
    if deny.allows(info) {
        return None;
    }
    let answer = match dumpable {
        // The process has marked its memory itself, so ksmd merges it whatever we do.
        Dumpable::Unknown if info.is_32_bit && mechanism == Mechanism::Ksmd => Dumpable::Yes,
        Dumpable::Unknown => ask_inside(info),
        known => known,
    };
    match answer {
        Dumpable::Yes => None,
        Dumpable::No => Some(Exclusion::NotDumpable),
        Dumpable::Unknown => Some(Exclusion::DumpableUnknown),
    }
}

/// If a mapping with MADV_DONTDUMP is at least this large before marks split it, we assume that its size is the reason,
/// not secrets: databases keep their buffer pools out of core dumps (InnoDB does), and hypervisors guest memory. Keys
/// take kilobytes, and are locked as well.
pub const BULK_BYTES: u64 = 32 << 20;

/// Why we must remove the mark of a mapping. `None` if we needn't, or there is no mark.
pub(crate) fn withdrawal(detail: &VmaDetail) -> Option<Exclusion> {
    if !detail.flags.has(*b"mg") {
        return None;
    }
    vma_exclusion(detail).filter(Exclusion::withdraws_marks)
}

/// Why we must leave a mapping alone, if we must. We first check whether KSM can't merge the mapping
/// (`vma_ksm_compatible` in the kernel's mm/ksm.c; device memory comes first), and then whether we shouldn't.
///
/// smaps shows DAX only for mappings with MAP_SYNC. For other DAX mappings MADV_MERGEABLE succeeds without effect, and
/// the `mg` flag doesn't appear.
pub fn vma_exclusion(detail: &VmaDetail) -> Option<Exclusion> {
    static RULES: [(&[u8; 2], Exclusion); 14] = [
        (b"pf", Exclusion::Unmergeable("device memory (VM_PFNMAP)")),
        (b"io", Exclusion::Unmergeable("device registers (VM_IO)")),
        (b"ht", Exclusion::Unmergeable("hugetlb pages")),
        (b"mm", Exclusion::Unmergeable("driver mapping (VM_MIXEDMAP)")),
        (b"sh", Exclusion::Shared),
        (b"ms", Exclusion::Shared),
        (b"de", Exclusion::Unmergeable("driver mapping (VM_DONTEXPAND)")),
        (b"dp", Exclusion::Unmergeable("droppable memory")),
        (b"sf", Exclusion::Unmergeable("file on persistent memory")),
        (b"ss", Exclusion::ShadowStack),
        (b"uw", Exclusion::UserFault),
        (b"um", Exclusion::UserFault),
        (b"wf", Exclusion::WipeOnFork),
        (b"lo", Exclusion::Locked),
    ];
    if detail.vma.is_special() {
        return Some(Exclusion::Special);
    }
    for (flag, exclusion) in &RULES {
        if detail.flags.has(**flag) {
            return Some(exclusion.clone());
        }
    }
    if detail.is_pinned() && detail.anonymous_kib > 0 {
        return Some(Exclusion::Pinned);
    }
    if detail.flags.has(*b"dd") && detail.original_bytes < BULK_BYTES {
        return Some(Exclusion::DontDump);
    }
    if detail.anonymous_kib == 0 {
        return Some(Exclusion::NothingAnonymous);
    }
    None
}

#[cfg(test)]
#[path = "exclude_tests.rs"]
mod tests;
