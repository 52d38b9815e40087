//! Two pieces of the target's own code by which a thread returns without its tracer ([`super::return_frame`]): `syscall;
//! ret`, at which the calls are made, and the function by which signal handlers return (`__restore_rt` of glibc and musl,
//! `sigreturn__sigaction` of Go).
//!
//! Searched in the executable mappings of files, once per file: searching glibc takes a millisecond.

use super::ptrace;
use crate::proc::maps::{Vma, parse_maps};
use crate::proc::process::Process;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// `syscall; ret`.
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15,%rax; syscall` and `mov $15,%eax; syscall`: `rt_sigreturn`.
const SIGRETURN: [&[u8]; 2] = [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];
/// Bytes searched in one mapping, and in all of one process. Both pieces are in the first megabyte of glibc, musl and Go
/// programs; larger files may have none.
const MAPPING_BYTES: u64 = 8 << 20;
const PROCESS_BYTES: u64 = 32 << 20;
const CHUNK_BYTES: usize = 128 << 10;
/// Cache entries of each kind. Beyond that all are dropped and found again.
const CACHED: usize = 1024;

/// The addresses in one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trampoline {
    /// `syscall; ret`.
    pub syscall: u64,
    /// `rt_sigreturn`.
    pub sigreturn: u64,
}

impl Trampoline {
    /// Checks during the stop whether the code is still there. Does not allocate.
    pub fn is_there(self, tid: i32) -> bool {
        let mut code = [0_u8; 16];
        for (half, at) in code.chunks_exact_mut(8).zip([self.sigreturn, self.sigreturn.wrapping_add(8)]) {
            let Ok(word) = ptrace::peek(tid, at) else { return false };
            half.copy_from_slice(&word.to_le_bytes());
        }
        SIGRETURN.iter().any(|piece| code.starts_with(piece))
            && ptrace::peek(tid, self.syscall).is_ok_and(|word| word.to_le_bytes().starts_with(SYSCALL_RET))
    }
}

/// The pieces in a mapping of a file, as offsets from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pieces {
    syscall: Option<u64>,
    sigreturn: Option<u64>,
}

/// Device, inode, offset and length of a mapping.
type MappingKey = ((u32, u32), u64, u64, u64);

#[derive(Default)]
struct Cache {
    files: HashMap<MappingKey, Pieces>,
    processes: HashMap<(i32, u64), Trampoline>,
}

fn cache() -> MutexGuard<'static, Cache> {
    static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Finds the two pieces in the memory of thread `tid`. `None`: absent or unreadable; the calls are then made without a
/// return frame.
pub fn find(process: &Process, tid: i32) -> Option<Trampoline> {
    let key = (process.pid(), process.start_time_ticks());
    if let Some(found) = cache().processes.get(&key) {
        return Some(*found);
    }
    let memory = process.open_file(&format!("task/{tid}/mem")).ok()?;
    let maps = parse_maps(&process.read_file(&format!("task/{tid}/maps")).ok()?).ok()?;
    let (mut syscall, mut sigreturn) = (None, None);
    let mut left = PROCESS_BYTES;
    for vma in by_likelihood(&maps) {
        let pieces = pieces_of(vma, &memory, &mut left);
        syscall = syscall.or(pieces.syscall.map(|offset| vma.start + offset));
        sigreturn = sigreturn.or(pieces.sigreturn.map(|offset| vma.start + offset));
        if let (Some(syscall), Some(sigreturn)) = (syscall, sigreturn) {
            let found = Trampoline { syscall, sigreturn };
            let mut cache = cache();
            if cache.processes.len() >= CACHED {
                cache.processes.clear();
            }
            cache.processes.insert(key, found);
            return Some(found);
        }
    }
    None
}

/// Drops what was found: the code has changed, most likely by an exec.
pub fn forget(process: &Process) {
    cache().processes.remove(&(process.pid(), process.start_time_ticks()));
}

/// The executable mappings of files, the C library's first.
fn by_likelihood(maps: &[Vma]) -> Vec<&Vma> {
    let is_libc = |vma: &Vma| {
        let file = vma.name.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        file.starts_with(b"libc.") || file.starts_with(b"libc-") || file.starts_with(b"ld-musl")
    };
    let mut found: Vec<&Vma> =
        maps.iter().filter(|vma| vma.inode != 0 && vma.perms.read && vma.perms.exec && !vma.perms.write).collect();
    found.sort_by_key(|vma| !is_libc(vma));
    found
}

fn pieces_of(vma: &Vma, memory: &File, left: &mut u64) -> Pieces {
    let key = (vma.device, vma.inode, vma.offset, vma.end - vma.start);
    let seen = cache().files.get(&key).copied();
    // The file may have been overwritten in place since.
    if let Some(pieces) = seen.filter(|pieces| pieces.are_in(memory, vma.start)) {
        return pieces;
    }
    let bytes = (vma.end - vma.start).min(MAPPING_BYTES);
    if bytes > *left {
        return Pieces::default();
    }
    *left -= bytes;
    let pieces = search(memory, vma.start, bytes);
    let mut cache = cache();
    if cache.files.len() >= CACHED {
        cache.files.clear();
    }
    cache.files.insert(key, pieces);
    pieces
}

impl Pieces {
    fn are_in(self, memory: &File, start: u64) -> bool {
        let holds = |offset: Option<u64>, any_of: &[&[u8]]| {
            let mut code = [0; 16];
            offset.is_none_or(|offset| {
                memory
                    .read_at(&mut code, start + offset)
                    .is_ok_and(|_| any_of.iter().any(|piece| code.starts_with(piece)))
            })
        };
        holds(self.syscall, &[SYSCALL_RET]) && holds(self.sigreturn, &SIGRETURN)
    }
}

fn search(memory: &File, start: u64, bytes: u64) -> Pieces {
    let mut pieces = Pieces::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < bytes && (pieces.syscall.is_none() || pieces.sigreturn.is_none()) {
        let wanted = usize::try_from(bytes - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        // Unreadable (beyond the file's end, a device): nothing more is found.
        let Ok(read @ 1..) = memory.read_at(&mut chunk[..wanted], start + at) else { break };
        let here = &chunk[..read];
        pieces.syscall = pieces.syscall.or_else(|| position(here, SYSCALL_RET).map(|found| at + length_of(found)));
        pieces.sigreturn = pieces
            .sigreturn
            .or_else(|| SIGRETURN.iter().find_map(|piece| position(here, piece)).map(|found| at + length_of(found)));
        if read < wanted || wanted < CHUNK_BYTES {
            break;
        }
        // Overlapping, for a piece across two chunks.
        at += length_of(read) - 16;
    }
    pieces
}

/// A length in memory fits: both types have 64 bits here.
fn length_of(bytes: usize) -> u64 {
    u64::from_ne_bytes(bytes.to_ne_bytes())
}

fn position(bytes: &[u8], piece: &[u8]) -> Option<usize> {
    // SAFETY: both ranges are valid for reading; the result points into the first or is null.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), piece.as_ptr().cast(), piece.len()) };
    (!found.is_null()).then(|| found.addr() - bytes.as_ptr().addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_found_in_this_process_and_remembered() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let found = find(&own, own.pid()).unwrap();
        assert_eq!(find(&own, own.pid()), Some(found));
        let memory = own.open_file("mem").unwrap();
        let mut code = [0; 9];
        memory.read_exact_at(&mut code, found.sigreturn).unwrap();
        assert!(SIGRETURN.iter().any(|piece| code.starts_with(piece)));
        memory.read_exact_at(&mut code, found.syscall).unwrap();
        assert!(code.starts_with(SYSCALL_RET));
        forget(&own);
        assert_eq!(find(&own, own.pid()), Some(found), "by the file's entry");
    }

    #[test]
    fn pieces_across_chunks_are_found() {
        let mut bytes = vec![0x90; CHUNK_BYTES + 100];
        bytes[CHUNK_BYTES - 4..][..SIGRETURN[0].len()].copy_from_slice(SIGRETURN[0]);
        bytes[CHUNK_BYTES + 50..][..SYSCALL_RET.len()].copy_from_slice(SYSCALL_RET);
        let own = File::open("/proc/self/mem").unwrap();
        let pieces = search(&own, bytes.as_ptr() as u64, bytes.len() as u64);
        assert_eq!(pieces.sigreturn, Some(CHUNK_BYTES as u64 - 4));
        assert_eq!(pieces.syscall, Some(CHUNK_BYTES as u64 + 50));
    }
}
