//! Identifies the program that a process is running, so that we notice an exec.

use crate::file_id::FileId;
use crate::process::{Process, ReadError};
use pagefold_engine::units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Identifies the execution of a program: a hash of the auxiliary vector, which contains addresses that the kernel
/// chooses at random at each exec. A forked child has the same value as its parent until either calls exec. With
/// address randomization off, unrelated processes may have the same value, too. The bytes at `AT_RANDOM` would tell
/// them apart, but reading them takes the lock of the memory map, and Go programs clear them.
pub fn image_of(process: &Process) -> Result<u64, ReadError> {
    // One read is enough: on every kernel the vector has some 20 pairs of words.
    let mut auxv = [0; 2048];
    let length = process
        .open_file("auxv")?
        .read_at(&mut auxv, 0)
        .map_err(|error| ReadError::from_io(process.pid(), "auxv", error))?;
    let mut hash = DefaultHasher::new();
    auxv[..length].hash(&mut hash);
    Ok(hash.finish())
}

/// Whether a process or, if `below` is `task/TID/`, a thread runs a 32-bit program. The first word of its auxiliary
/// vector is a small number. So bytes 4 to 7 are zero if words have 64 bits; else they're the second word, which isn't
/// zero. We don't ask the executable, whose file system may not answer.
///
/// A program can replace the vector (PR_SET_MM), but not the end of its address space, which is below 4 GiB for a
/// 32-bit program. So if the vector looks like a 32-bit one, we read the page map at 4 GiB. Beyond the end this returns
/// nothing and takes no lock (`pagemap_read`, fs/proc/task_mmu.c). So we may only wait for a forger's mmap lock.
pub fn is_32_bit(process: &Process, below: &str) -> bool {
    const BEYOND: u64 = (1 << 32) / PAGE_BYTES * 8;
    let auxv = process.read_file(&format!("{below}auxv")).unwrap_or_default();
    if auxv.get(4..8).is_none_or(|high| high == [0; 4]) {
        return false;
    }
    let Ok(page_map) = process.open_file(&format!("{below}pagemap")) else { return true };
    !matches!(page_map.read_at(&mut [0; 8], BEYOND), Ok(1..))
}

/// The facts by which we judge a process: the execution of its program, its executable, and its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramId {
    pub image: u64,
    pub exe: Option<FileId>,
    pub uid: u32,
}

impl ProgramId {
    /// Takes some microseconds, waits for no lock of the process, and asks no file server.
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        let uid = effective_user(process).map_err(|error| ReadError::from_io(process.pid(), "", error))?;
        Ok(Self { image: image_of(process)?, exe: FileId::of_exe(process), uid })
    }
}

/// The effective user. We take the owner of the directory in /proc, which is this user even if the process isn't
/// dumpable (`task_dump_owner`, fs/proc/base.c).
pub fn effective_user(process: &Process) -> io::Result<u32> {
    Ok(rustix::fs::fstat(process)?.st_uid)
}

/// Compares the address spaces of two processes, in an order that the kernel chooses at boot (kcmp(2)). `Equal` means
/// that both use the same one, as a vfork parent and its child do. `None` if one of them has ended, or we may not read
/// it.
pub fn compare_address_spaces(one: &Process, other: &Process) -> Option<Ordering> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: the call takes numbers only.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one.tid(), other.tid(), KCMP_VM, 0, 0) };
    match order {
        0 => Some(Ordering::Equal),
        1 => Some(Ordering::Less),
        2 => Some(Ordering::Greater),
        _ => None,
    }
}

/// The address space that a process had when we opened this.
#[derive(Clone, Debug)]
pub struct AddressSpace(Arc<File>);

impl AddressSpace {
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        Ok(Self(Arc::new(process.open_file("pagemap")?)))
    }

    /// Whether any process still uses the address space. After an exec nobody does, unless it was shared (vfork). Takes
    /// no lock: we read at an odd position. If the address space is gone, the kernel returns nothing; otherwise it
    /// refuses the position before it takes a lock (`pagemap_read`, fs/proc/task_mmu.c).
    pub fn exists(&self) -> bool {
        !matches!(self.0.read_at(&mut [0; 1], 1), Ok(0))
    }

    /// Waits for the lock of the memory map. Returns whether we got it within `limit`.
    pub fn is_unlocked(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        // Reads the entry of page 0, which takes the lock (`pagemap_read`, fs/proc/task_mmu.c).
        let _ = self.0.read_at(&mut [0; 8], 0);
        begun.elapsed() < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_testkit::{Script, skip_unsupported};
    use std::process::Command;

    #[test]
    fn an_exec_ends_the_address_space_and_changes_the_image() {
        let mut execing = Script::execing();
        let process = Process::open(execing.pid()).unwrap();
        let (space, image) = (AddressSpace::of(&process).unwrap(), image_of(&process).unwrap());
        assert!(space.exists());
        assert_eq!(image_of(&process).unwrap(), image);
        execing.say("");
        assert_eq!(execing.line(), "again");
        assert!(!space.exists());
        assert_ne!(image_of(&process).unwrap(), image);
    }

    #[test]
    fn a_program_that_replaces_its_auxv_stays_a_64_bit_one() {
        let forger = "import ctypes, struct, sys
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
code, stack, data, args = (26, 27), (28,), (45, 46, 47), (48, 49, 50, 51)
value = lambda numbers: [int(fields[number - 3]) for number in numbers]
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
auxv = ctypes.create_string_buffer(struct.pack('<4I', 16, 7, 6, 4096), 16)
words = [*value(code), *value(data), libc.sbrk(0), *value(stack), *value(args), ctypes.addressof(auxv)]
map = struct.pack('<12QIi', *words, 16, -1)
PR_SET_MM, PR_SET_MM_MAP = 35, 14
print('ready', libc.prctl(PR_SET_MM, PR_SET_MM_MAP, map, len(map), 0), flush=True)
sys.stdin.readline()";
        let mut forger = Script::of(Command::new("python3").args(["-c", forger]));
        if forger.line() != "ready 0" {
            return skip_unsupported("this kernel has no PR_SET_MM_MAP");
        }
        let process = Process::open(forger.pid()).unwrap();
        assert_eq!(process.read_file("auxv").unwrap()[4..8], [7, 0, 0, 0]);
        assert!(!is_32_bit(&process, ""));
        assert!(!is_32_bit(&process, &format!("task/{}/", forger.pid())));
    }
}
