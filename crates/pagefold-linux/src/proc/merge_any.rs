//! Marking all memory of the calling process: `prctl(PR_SET_MEMORY_MERGE)`, Linux 6.4 and later.
//!
//! It applies to all present and future mappings, is inherited by fork and, from Linux 6.7, kept by exec. It needs
//! neither ptrace nor a privilege, but regions cannot be chosen.

use std::io;

/// `PR_SET_MEMORY_MERGE`, include/uapi/linux/prctl.h.
pub const PR_SET_MEMORY_MERGE: i32 = 67;
/// `PR_GET_MEMORY_MERGE`.
pub const PR_GET_MEMORY_MERGE: i32 = 68;

/// Marks all memory of this process and of the programs it starts or executes.
///
/// # Errors
/// `EINVAL` from kernels before 6.4 or without KSM.
pub fn set_merge_any() -> io::Result<()> {
    prctl(PR_SET_MEMORY_MERGE, 1).map(drop)
}

/// Whether all memory of this process is marked.
pub fn is_merge_any() -> io::Result<bool> {
    prctl(PR_GET_MEMORY_MERGE, 0).map(|set| set == 1)
}

fn prctl(operation: i32, value: u64) -> io::Result<i32> {
    // SAFETY: both operations take and return plain numbers and touch no memory of ours.
    match unsafe { libc::prctl(operation, value, 0_u64, 0_u64, 0_u64) } {
        -1 => Err(io::Error::last_os_error()),
        set => Ok(set),
    }
}
