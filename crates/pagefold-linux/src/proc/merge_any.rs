//! Letting KSM merge a whole process, from within: `prctl(PR_SET_MEMORY_MERGE)`, Linux 6.4 and later.
//!
//! It marks every mapping the process has and will have, and is inherited by fork and, from 6.7, through exec. No
//! tracing and no privilege is needed, but the choice of regions is lost: all of them are marked.

use std::io;

/// `PR_SET_MEMORY_MERGE`, include/uapi/linux/prctl.h.
pub const PR_SET_MEMORY_MERGE: i32 = 67;
/// `PR_GET_MEMORY_MERGE`.
pub const PR_GET_MEMORY_MERGE: i32 = 68;

/// Lets KSM merge the memory of this process and of what it starts or becomes.
///
/// `EINVAL` means a kernel before 6.4 or without KSM.
pub fn set_merge_any() -> io::Result<()> {
    prctl(PR_SET_MEMORY_MERGE, 1).map(drop)
}

/// Whether KSM may merge all of this process.
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
