//! Finds two pieces of the target's own code that let a thread return without its tracer ([`super::return_frame`]). At
//! the first, `syscall; ret`, the thread makes the calls. The second is the function by which signal handlers return
//! (`__restore_rt` of glibc and musl, `sigreturn__sigaction` of Go).
//!
//! We search the executable mappings of files, and only pages that are mapped. Searching glibc takes a millisecond, so
//! we remember the result per file, and use it in other processes where the page is mapped.

use super::code::Code;
use super::ptrace;
use pagefold_procmem::maps::{Names, Vma, each_mapping};
use pagefold_procmem::os::locked;
use pagefold_procmem::process::{Process, ProcessKey};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// `syscall; ret`.
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15,%rax; syscall` and `mov $15,%eax; syscall`: `rt_sigreturn`.
const SIGRETURN: [&[u8]; 2] = [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];
/// How many bytes we search in one mapping, and in all mappings of a process. Both pieces are in the first megabyte of
/// glibc, musl and Go programs. In larger files there may be none.
const MAPPING_BYTES: u64 = 8 << 20;
const PROCESS_BYTES: u64 = 32 << 20;
/// How many executable mappings of files we consider in one process.
const MAPPINGS: usize = 1024;
/// If we don't find both pieces in a process, we search it again after this time: more pages may be mapped by then.
const SEARCH_AGAIN: Duration = Duration::from_secs(10);
/// How many files, and how many processes, the cache holds. When there are more, we drop all of that kind.
const CACHED: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trampoline {
    /// `syscall; ret`.
    pub syscall: u64,
    pub sigreturn: u64,
}

impl Trampoline {
    /// Checks, during the stop, whether the code is still there. Doesn't allocate.
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

/// Where the pieces are in a file's mapping: offsets from its start.
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
    processes: HashMap<ProcessKey, (Option<Trampoline>, Instant)>,
}

fn cache() -> MutexGuard<'static, Cache> {
    static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
    locked(&CACHE)
}

/// Finds both pieces in the code of a thread's process. `None` if one is absent or not mapped: then we make the calls
/// without a return frame.
pub fn find(process: &Process, tid: i32, code: &Code) -> Option<Trampoline> {
    let key = process.key();
    match cache().processes.get(&key) {
        Some((Some(found), _)) => return Some(*found),
        Some((None, at)) if at.elapsed() < SEARCH_AGAIN => return None,
        _ => {}
    }
    let maps = process.open_file(&format!("task/{tid}/maps")).ok()?;
    let mut syscall = None;
    let mut sigreturn = None;
    let mut left = PROCESS_BYTES;
    for vma in by_likelihood(maps)? {
        let pieces = pieces_of(&vma, code, &mut left)?;
        syscall = syscall.or(pieces.syscall.map(|offset| vma.start + offset));
        sigreturn = sigreturn.or(pieces.sigreturn.map(|offset| vma.start + offset));
        if syscall.is_some() && sigreturn.is_some() {
            break;
        }
    }
    let found = match (syscall, sigreturn) {
        (Some(syscall), Some(sigreturn)) => Some(Trampoline { syscall, sigreturn }),
        _ => None,
    };
    let mut cache = cache();
    if cache.processes.len() >= CACHED {
        cache.processes.clear();
    }
    cache.processes.insert(key, (found, Instant::now()));
    found
}

/// Drops the cached result for a process whose code has changed, most likely by an exec.
pub fn forget(process: &Process) {
    cache().processes.remove(&process.key());
}

/// The executable mappings of files, the C library's first.
fn by_likelihood(maps: impl std::io::Read) -> Option<Vec<Vma>> {
    let mut libc = Vec::new();
    let mut others = Vec::new();
    each_mapping(maps, Names::All, |mut vma| {
        if vma.inode != 0 && vma.perms.read && vma.perms.exec && !vma.perms.write {
            let found = if is_libc(&vma.name) { &mut libc } else { &mut others };
            if found.len() < MAPPINGS {
                vma.name = Vec::new();
                found.push(vma);
            }
        }
        ControlFlow::Continue(())
    })
    .ok()?;
    libc.append(&mut others);
    Some(libc)
}

fn is_libc(name: &[u8]) -> bool {
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    file.starts_with(b"libc.") || file.starts_with(b"libc-") || file.starts_with(b"ld-musl")
}

/// Finds the pieces in a mapping. `None`: the memory is gone.
fn pieces_of(vma: &Vma, code: &Code, left: &mut u64) -> Option<Pieces> {
    let key = (vma.device, vma.inode, vma.offset, vma.end - vma.start);
    // We check cached pieces again: the file may have been overwritten in place, or the page may not be mapped here.
    let seen = cache().files.get(&key).copied().unwrap_or_default().those_in(code, vma.start);
    if seen.is_complete() {
        return Some(seen);
    }
    let bytes = (vma.end - vma.start).min(MAPPING_BYTES);
    if bytes > *left {
        return Some(seen);
    }
    *left -= bytes;
    let pieces = search(code, vma.start, bytes)?.or(seen);
    let mut cache = cache();
    if cache.files.len() >= CACHED {
        cache.files.clear();
    }
    let known = cache.files.entry(key).or_default();
    *known = pieces.or(*known);
    Some(pieces)
}

impl Pieces {
    fn is_complete(self) -> bool {
        self.syscall.is_some() && self.sigreturn.is_some()
    }

    fn or(self, other: Self) -> Self {
        Self { syscall: self.syscall.or(other.syscall), sigreturn: self.sigreturn.or(other.sigreturn) }
    }

    /// Keeps only the pieces that really are in the mapping that begins at `start`.
    fn those_in(self, code: &Code, start: u64) -> Self {
        Self {
            syscall: self.syscall.filter(|offset| is_any_at(code, start + offset, &[SYSCALL_RET])),
            sigreturn: self.sigreturn.filter(|offset| is_any_at(code, start + offset, &SIGRETURN)),
        }
    }
}

fn is_any_at(code: &Code, at: u64, pieces: &[&[u8]]) -> bool {
    pieces.iter().any(|piece| {
        let mut bytes = [0; 16];
        let bytes = &mut bytes[..piece.len()];
        code.read(bytes, at) && bytes == *piece
    })
}

fn search(code: &Code, start: u64, bytes: u64) -> Option<Pieces> {
    let mut pieces = Pieces::default();
    let searched = code.search(start..start + bytes, false, |at, here| {
        let syscall = position(here, SYSCALL_RET);
        let sigreturn = SIGRETURN.iter().find_map(|piece| position(here, piece));
        pieces = pieces.or(Pieces {
            syscall: syscall.map(|found| at + length_of(found) - start),
            sigreturn: sigreturn.map(|found| at + length_of(found) - start),
        });
        if pieces.is_complete() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    if searched.is_ok() { Some(pieces) } else { None }
}

/// Can't truncate: `usize` has 64 bits here.
fn length_of(bytes: usize) -> u64 {
    u64::from_ne_bytes(bytes.to_ne_bytes())
}

fn position(bytes: &[u8], piece: &[u8]) -> Option<usize> {
    // SAFETY: both ranges are valid for reading; the result points into the first or is null.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), piece.as_ptr().cast(), piece.len()) };
    if found.is_null() { None } else { Some(found.addr() - bytes.as_ptr().addr()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn own() -> (Process, Code) {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let code = Code::open(&own, own.pid()).unwrap();
        (own, code)
    }

    #[test]
    fn pieces_are_found_in_this_process_and_remembered() {
        let (own, code) = own();
        let found = find(&own, own.pid(), &code).unwrap();
        assert_eq!(find(&own, own.pid(), &code), Some(found));
        let memory = own.open_file("mem").unwrap();
        let mut bytes = [0; 9];
        memory.read_exact_at(&mut bytes, found.sigreturn).unwrap();
        assert!(SIGRETURN.iter().any(|piece| bytes.starts_with(piece)));
        memory.read_exact_at(&mut bytes, found.syscall).unwrap();
        assert!(bytes.starts_with(SYSCALL_RET));
        forget(&own);
        assert_eq!(find(&own, own.pid(), &code), Some(found), "by the file's entry");
    }

    #[test]
    fn pieces_across_reads_are_found() {
        const READ: usize = 128 << 10;
        let (_, code) = own();
        let mut bytes = vec![0x90; 2 * READ + 8192];
        let page = bytes.as_ptr().align_offset(4096);
        let at = page + READ - 4;
        bytes[at..][..SIGRETURN[0].len()].copy_from_slice(SIGRETURN[0]);
        bytes[at + 54..][..SYSCALL_RET.len()].copy_from_slice(SYSCALL_RET);
        let pieces = search(&code, bytes[page..].as_ptr() as u64, 2 * READ as u64).unwrap();
        assert_eq!(pieces.sigreturn, Some(READ as u64 - 4));
        assert_eq!(pieces.syscall, Some(READ as u64 + 50));
    }
}
