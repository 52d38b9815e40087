//! Giving up every right that is not needed, before anything of another program is read.
//!
//! A process keeps a list of capabilities and loses all others from every set: effective, permitted, inheritable,
//! ambient and bounding. With `no_new_privs` on top, no program it starts gets more than it has, so none of it comes
//! back. See capabilities(7) and, for what execve makes of it, `cap_bprm_creds_from_file` in security/commoncap.c
//! (Linux 6.12). What each is kept for, and what fails without it, is measured in docs/privileges.md.
//!
//! Capabilities belong to threads, and new threads inherit them: give up before the first is started.

pub use caps::Capability;
use caps::errors::CapsError;
use caps::{CapSet, CapsHashSet};
use thiserror::Error;

/// What reading other programs' memory takes, and so all that the daemon keeps: KSM's own files need no more than the
/// user root.
pub const READING: [Capability; 3] = [
    // Page tables and memory of others: PTRACE_MODE_READ and PTRACE_MODE_ATTACH.
    Capability::CAP_SYS_PTRACE,
    // Frame numbers in pagemap, by which merged pages are told; since Linux 4.2.
    Capability::CAP_SYS_ADMIN,
    // /proc/PID/pagemap, mem and the like have mode 0400 and belong to the target's user.
    Capability::CAP_DAC_READ_SEARCH,
];

/// What placing pages on memory nodes takes beside that: `move_pages` of pages that several programs map.
pub const PLACING: Capability = Capability::CAP_SYS_NICE;

/// What making other programs' calls takes.
pub const INJECTING: [Capability; 3] = [
    // PTRACE_SEIZE.
    Capability::CAP_SYS_PTRACE,
    // PTRACE_O_SUSPEND_SECCOMP.
    Capability::CAP_SYS_ADMIN,
    // /proc/PID/task/TID/syscall has mode 0400 and belongs to the target's user.
    Capability::CAP_DAC_READ_SEARCH,
];

/// Why rights could not be given up.
#[derive(Debug, Error)]
pub enum PrivilegeError {
    /// The kernel refused.
    #[error("cannot give up capabilities: {0}")]
    Caps(#[from] CapsError),
    /// The kernel refused.
    #[error("cannot give up gaining rights by execve: {0}")]
    NoNewPrivs(std::io::Error),
    /// It seemed to work and did not.
    #[error("capabilities are left that were given up: {0:?}")]
    Left(Vec<Capability>),
}

/// Those of `needed` that this thread does not have.
pub fn missing(needed: &[Capability]) -> Result<Vec<Capability>, PrivilegeError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    Ok(needed.iter().copied().filter(|capability| !permitted.contains(capability)).collect())
}

/// Leaves this thread `kept`, as far as it has them, and nothing else, for good.
pub fn keep_only(kept: &[Capability]) -> Result<(), PrivilegeError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet = kept.iter().copied().filter(|capability| permitted.contains(capability)).collect();
    // First what takes a right that is given up below. Where that right is missing, no_new_privs keeps the bounding
    // set from giving anything back.
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
    no_new_privs()?;
    let left = caps::read(None, CapSet::Permitted)?;
    let left: Vec<Capability> = left.difference(&kept).copied().collect();
    if left.is_empty() { Ok(()) } else { Err(PrivilegeError::Left(left)) }
}

fn no_new_privs() -> Result<(), PrivilegeError> {
    let (on, unused): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, on, unused, unused, unused) } == 0 {
        return Ok(());
    }
    Err(PrivilegeError::NoNewPrivs(std::io::Error::last_os_error()))
}

/// Keeps this process out of core dumps and away from debuggers without rights: it holds pages of other programs.
pub fn keep_from_dumps() {
    let (off, unused): (libc::c_ulong, libc::c_ulong) = (0, 0);
    // SAFETY: numbers only. It cannot fail with these.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, off, unused, unused, unused) };
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
