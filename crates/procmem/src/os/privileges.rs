//! Drops all capabilities that we don't need, before we read any other process.
//!
//! We keep a list of capabilities and drop all others from every set: effective, permitted, inheritable, ambient and
//! bounding. With `no_new_privs`, programs that we start can't gain more, so dropped capabilities don't come back. See
//! capabilities(7) and `cap_bprm_creds_from_file` in security/commoncap.c (Linux 6.12). docs/privileges.md lists why we
//! keep each capability and what fails without it.
//!
//! Capabilities belong to threads, and new threads inherit them: drop them before starting threads.

pub use caps::Capability;
use caps::errors::CapsError;
use caps::{CapSet, CapsHashSet};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;
use thiserror::Error;

/// Capabilities for reading other processes. The daemon keeps these and, if its options need them, the additional ones
/// below. For KSM's files it only needs to be the user root.
pub const READING: [Capability; 3] = [
    // Page tables and memory: PTRACE_MODE_READ and PTRACE_MODE_ATTACH.
    Capability::CAP_SYS_PTRACE,
    // Frame numbers in pagemap, without which we can't recognise merged pages; since Linux 4.2.
    Capability::CAP_SYS_ADMIN,
    // /proc/PID/pagemap, mem and the like have mode 0400 and belong to the target's user.
    Capability::CAP_DAC_READ_SEARCH,
];

/// Additional capability for placement on memory nodes: `move_pages` of pages that several processes map.
pub const PLACING: Capability = Capability::CAP_SYS_NICE;

/// Additional capability for putting huge pages together again: `process_madvise`.
pub const COLLAPSING: Capability = Capability::CAP_SYS_NICE;

/// Additional capability for merging on request: /dev/ksm needs the same as `process_madvise`.
pub const REQUESTING: Capability = Capability::CAP_SYS_NICE;

pub const INJECTING: [Capability; 3] = [
    // PTRACE_SEIZE.
    Capability::CAP_SYS_PTRACE,
    // PTRACE_O_SUSPEND_SECCOMP.
    Capability::CAP_SYS_ADMIN,
    // /proc/PID/task/TID/syscall has mode 0400 and belongs to the target's user.
    Capability::CAP_DAC_READ_SEARCH,
];

/// Why we couldn't drop capabilities.
#[derive(Debug, Error)]
pub enum PrivilegeError {
    #[error("cannot drop capabilities: {0}")]
    Caps(#[from] CapsError),
    #[error("cannot set no_new_privs: {0}")]
    NoNewPrivs(std::io::Error),
    /// We still have these capabilities although dropping them reported success.
    #[error("capabilities remain after they were dropped: {0:?}")]
    Left(Vec<Capability>),
}

/// The capabilities of `needed` that this thread lacks.
pub fn missing(needed: &[Capability]) -> Result<Vec<Capability>, PrivilegeError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    Ok(needed.iter().copied().filter(|capability| !permitted.contains(capability)).collect())
}

/// Permanently drops all capabilities of this thread but `kept`.
pub fn keep_only(kept: &[Capability]) -> Result<(), PrivilegeError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet = kept.iter().copied().filter(|capability| permitted.contains(capability)).collect();
    // We drop the bounding set first: that needs CAP_SETPCAP, which we drop below. If we don't have CAP_SETPCAP, the
    // bounding set stays, but with no_new_privs it can't give us anything back.
    if permitted.contains(&Capability::CAP_SETPCAP) {
        caps::raise(None, CapSet::Effective, Capability::CAP_SETPCAP)?;
        for capability in caps::read(None, CapSet::Bounding)?.difference(&kept) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)?;
    set_no_new_privs(true).map_err(|error| PrivilegeError::NoNewPrivs(error.into()))?;
    let left = caps::read(None, CapSet::Permitted)?;
    let left: Vec<Capability> = left.difference(&kept).copied().collect();
    if left.is_empty() { Ok(()) } else { Err(PrivilegeError::Left(left)) }
}

/// Makes us non-dumpable (no core dumps, no debuggers without privileges), because our memory holds pages of other
/// processes.
pub fn keep_from_dumps() {
    // This can't fail.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
