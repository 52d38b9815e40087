//! Whether the memory below a stack pointer is certainly unused.
//!
//! By the ABI everything from 128 bytes below the stack pointer downwards is unused, because signal handlers run there.
//! Programs whose handlers run elsewhere (`sigaltstack`, as in Go, whose goroutines have stacks of 2 KiB within the heap)
//! need not comply. So a frame is written only below two kinds of stack: the main thread's `[stack]`, and a mapping that
//! also holds the thread's control block above the stack pointer and has an inaccessible mapping directly below. This is
//! how C libraries lay out the stacks of their threads.

use super::ptrace;
use super::ptrace::{Registers, address_of_mut};
use crate::proc::maps::{Vma, parse_maps};
use crate::proc::process::Process;
use std::fs::File;
use std::os::fd::AsRawFd;

/// Room that must be left below the frame, for a handler's frame and a little work.
const ROOM: u64 = 4096;

/// The mappings of a process, for a check during the stop.
#[derive(Debug)]
pub struct StackCheck {
    maps: File,
    /// Linux before 6.11 cannot report a single mapping: all mappings before the stop.
    all: Option<Vec<Vma>>,
}

/// A mapping.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    start: u64,
    end: u64,
    /// Readable and writable; not executable, shared or of a file.
    plain: bool,
    inaccessible: bool,
    main_stack: bool,
}

impl StackCheck {
    /// Opens the mappings of thread `tid`.
    pub fn open(process: &Process, tid: i32) -> Option<Self> {
        let file = format!("task/{tid}/maps");
        let maps = process.open_file(&file).ok()?;
        let mut stack_check = Self { maps, all: None };
        if stack_check.query(0).is_err_and(|errno| errno == libc::ENOTTY) {
            stack_check.all = Some(parse_maps(&process.read_file(&file).ok()?).ok()?);
        }
        Some(stack_check)
    }

    /// Whether `[base, own.rsp - 128)` is unused memory of the stopped thread `tid`. Does not allocate.
    pub fn is_unused(&self, is_main_thread: bool, tid: i32, own: &Registers, base: u64) -> bool {
        let Some(stack) = self.mapping(own.rsp) else { return false };
        if !stack.plain || base < stack.start.saturating_add(ROOM) || own.rsp >= stack.end {
            return false;
        }
        if stack.main_stack {
            return is_main_thread;
        }
        // By the ABI for thread-local storage a thread's control block begins with its own address.
        (own.rsp..stack.end).contains(&own.fs_base)
            && ptrace::peek(tid, own.fs_base) == Ok(own.fs_base)
            && self.mapping(stack.start.wrapping_sub(1)).is_some_and(|below| below.inaccessible)
    }

    fn mapping(&self, addr: u64) -> Option<Mapping> {
        match &self.all {
            None => self.query(addr).ok(),
            Some(all) => all.iter().find(|vma| (vma.start..vma.end).contains(&addr)).map(|vma| Mapping {
                start: vma.start,
                end: vma.end,
                plain: vma.perms.read && vma.perms.write && !vma.perms.exec && !vma.perms.shared && vma.inode == 0,
                inaccessible: !vma.perms.read && !vma.perms.write && !vma.perms.exec,
                main_stack: vma.name == b"[stack]",
            }),
        }
    }

    /// `PROCMAP_QUERY` of Linux 6.11 (fs/proc/task_mmu.c): the mapping that covers an address.
    fn query(&self, addr: u64) -> Result<Mapping, i32> {
        const REQUEST: u64 = 0xc068_6611; // _IOWR('f', 17, struct procmap_query)
        const ANY_ACCESS: u64 = 1 | 2 | 4;
        const PROCMAP_QUERY_LENGTH: u64 = 104;
        const _: () = assert!(size_of::<ProcmapQuery>() == 104);
        const ACCESS_SHARED_FILE: u64 = ANY_ACCESS | 8 | 0x20;
        let mut name = [0_u8; 64];
        let mut query = ProcmapQuery {
            size: PROCMAP_QUERY_LENGTH,
            addr,
            name_size: 64,
            name_addr: address_of_mut(&mut name),
            ..ProcmapQuery::default()
        };
        // SAFETY: the structure and the name it points to outlive the call.
        let result = unsafe { libc::ioctl(self.maps.as_raw_fd(), REQUEST, &raw mut query) };
        if result < 0 {
            // ENAMETOOLONG: a longer name, which is a file's. ENOENT: no mapping.
            return Err(super::Errno::last().0);
        }
        Ok(Mapping {
            start: query.start,
            end: query.end,
            plain: query.flags & ACCESS_SHARED_FILE == 3,
            inaccessible: query.flags & ANY_ACCESS == 0,
            main_stack: name.starts_with(b"[stack]\0"),
        })
    }
}

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_and_the_text_of_maps_agree() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut stack_check = StackCheck::open(&own, own.pid()).unwrap();
        let all = parse_maps(&own.read_file("maps").unwrap()).unwrap();
        if stack_check.all.is_some() {
            return pagefold_testkit::skip_unsupported("PROCMAP_QUERY needs Linux 6.11");
        }
        let stack = all.iter().find(|vma| vma.name == b"[stack]").unwrap().end - 8;
        let here = &raw const stack as u64;
        let code = the_query_and_the_text_of_maps_agree as *const () as u64;
        // For a file with a long path the query fails where the text has a mapping: neither is plain.
        let plain = |mapping: Option<Mapping>| mapping.filter(|mapping| mapping.plain);
        let addresses = [stack, here, code, 0];
        let asked = addresses.map(|addr| plain(stack_check.mapping(addr)));
        stack_check.all = Some(all);
        let read = addresses.map(|addr| plain(stack_check.mapping(addr)));
        assert_eq!(format!("{asked:?}"), format!("{read:?}"));
        assert!(asked[0].unwrap().main_stack && !asked[1].unwrap().main_stack);
        assert!(asked[2].is_none() && asked[3].is_none());
    }
}
