//! Marking all memory of the calling process: `prctl(PR_SET_MEMORY_MERGE)`, Linux 6.4 and later.
//!
//! The mark applies to all present and future mappings, is inherited by fork and, from Linux 6.7, kept by exec. Setting
//! it needs neither ptrace nor privileges, but we can't choose regions.

use std::io;

/// `PR_SET_MEMORY_MERGE`, include/uapi/linux/prctl.h.
pub const PR_SET_MEMORY_MERGE: i32 = 67;

/// Marks all memory of this process and of the programs it starts or executes.
///
/// # Errors
/// `EINVAL` from kernels before 6.4 or without KSM.
pub fn set_merge_any() -> io::Result<()> {
    // SAFETY: the operation takes and returns plain numbers and touches no memory of ours.
    match unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1_u64, 0_u64, 0_u64, 0_u64) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
