//! Finds unused memory on a thread's stack for a return frame. By the ABI everything below the red zone (128 bytes
//! below the stack pointer) is unused, because signal handlers run there. Programs need not comply: one whose handlers
//! run elsewhere (`sigaltstack`) may run a coroutine on a local array, with live data below its stack pointer. So we
//! write a frame only onto pages that nobody has ever written to (their pagemap entry is zero), with such a page on
//! both sides. And we use only two kinds of stack: the main thread's `[stack]`, and mappings that look like a C
//! library's thread stack, with the thread's control block above the stack pointer and an inaccessible mapping directly
//! below.
//!
//! Afterwards these pages hold zeros, and the next frame goes there again, unless a page next to them has changed: a
//! program that has begun to use this part of its stack would have touched such a page.

use super::ptrace;
use super::ptrace::{Registers, address_of_mut};
use pagefold_engine::units::{PAGE_BYTES, PAGE_SIZE, count};
use pagefold_procmem::maps::{MAPPINGS_MOST, Names, Vma, each_mapping};
use pagefold_procmem::os::locked;
use pagefold_procmem::process::{Process, ProcessKey};
use std::collections::HashMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex};

/// The bytes below the stack pointer that a leaf function may use.
const RED_ZONE: u64 = 128;
/// We leave this much room below a frame, at most, for a handler that runs there.
const HANDLER_BYTES: u64 = 64 << 10;
/// How many pages we inspect at once: as many as one page table maps. We look first at pages whose page table is
/// already in use, since they won't get a huge page.
const WINDOW: usize = 512;
/// For how many processes we remember the pages of earlier frames, and how many pages of each.
const PROCESSES_KEPT: usize = 1024;
const PAGES_KEPT: usize = 64;

type PagesByProcess = HashMap<ProcessKey, Vec<u64>>;

/// The addresses of pages that have held return frames, by process.
static USED: LazyLock<Mutex<PagesByProcess>> = LazyLock::new(Mutex::default);

/// The files that show the mappings of a process, opened before the stop.
#[derive(Debug)]
pub struct StackCheck {
    maps: File,
    pagemap: File,
    /// The process's pages in [`USED`].
    used: Vec<u64>,
    /// All private anonymous mappings, listed before the stop. `None` if the kernel lets us query a single mapping
    /// (Linux 6.11).
    all: Option<Vec<Vma>>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    start: u64,
    end: u64,
    /// Readable and writable, private and anonymous, not executable.
    plain: bool,
    inaccessible: bool,
    main_stack: bool,
}

impl StackCheck {
    /// Opens the files of thread `tid`. Call this before the stop.
    pub fn open(process: &Process, tid: i32) -> Option<Self> {
        let file = format!("task/{tid}/maps");
        let maps = process.open_file(&file).ok()?;
        let pagemap = process.open_file(&format!("task/{tid}/pagemap")).ok()?;
        let used = locked(&USED);
        let used = used.get(&process.key()).cloned().unwrap_or_default();
        let mut stack_check = Self { maps, pagemap, used, all: None };
        if stack_check.query(0).is_err_and(|errno| errno == libc::ENOTTY) {
            let mut all = Vec::new();
            let listed = each_mapping(process.open_file(&file).ok()?, Names::Special, |vma| {
                // Not a stack.
                if vma.inode != 0 || vma.perms.shared {
                    return ControlFlow::Continue(());
                }
                all.push(vma);
                if all.len() < MAPPINGS_MOST { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            listed.ok()?;
            stack_check.all = Some(all);
        }
        Some(stack_check)
    }

    /// Finds `bytes` of unused memory on the stack of the stopped thread `tid` and returns its end. `None` if there's
    /// none, or if we don't know this kind of stack. Doesn't allocate.
    pub fn unused(&self, is_main_thread: bool, tid: i32, own: &Registers, bytes: u64) -> Option<u64> {
        let stack = self.mapping(own.rsp)?;
        if !stack.plain || own.rsp >= stack.end || !self.is_stack_of_thread(&stack, is_main_thread, tid, own) {
            return None;
        }
        let needed = usize::try_from(bytes.div_ceil(PAGE_BYTES)).ok()?;
        let end = page_of(own.rsp.checked_sub(RED_ZONE)?);
        // The main thread's stack needs no room for handlers, because it grows by itself.
        let room = if stack.main_stack { 0 } else { ((end - stack.start) / 4).min(HANDLER_BYTES) };
        let low = page_of(stack.start + room) + PAGE_BYTES;
        let window = count(WINDOW) * PAGE_BYTES;
        let same_table = (end & !(window - 1)).max(low);
        for &page in &self.used {
            if (low..end).contains(&page) {
                let found = self.unused_in(tid, page, page + count(needed) * PAGE_BYTES, needed);
                if found.is_some() {
                    return found;
                }
            }
        }
        for (start, end) in [(same_table, end), (low, same_table.min(low + window))] {
            let found = self.unused_in(tid, start, end, needed);
            if found.is_some() {
                return found;
            }
        }
        self.unused_below(tid, &stack, own.rsp, needed)
    }

    /// Makes the main thread's stack grow, as a deeper call would, and finds unused memory in the new pages.
    fn unused_below(&self, tid: i32, stack: &Mapping, rsp: u64, needed: usize) -> Option<u64> {
        if !stack.main_stack {
            return None;
        }
        // We leave room for a page on each side. Reading by ptrace, unlike `process_vm_readv`, makes a stack grow.
        let lowest = stack.start.checked_sub(count(needed + 3) * PAGE_BYTES)?;
        ptrace::peek(tid, lowest).ok()?;
        let grown = self.mapping(rsp)?;
        self.unused_in(tid, grown.start + PAGE_BYTES, stack.start, needed)
    }

    /// Finds the lowest `needed` unused pages in `[start, end)` and returns their end.
    fn unused_in(&self, tid: i32, start: u64, end: u64, needed: usize) -> Option<u64> {
        /// A pagemap entry of zeros: the page is neither present nor swapped out, and isn't marked as a guard or by
        /// userfaultfd.
        const UNTOUCHED: [u8; 8] = [0; 8];
        let pages = usize::try_from(end.checked_sub(start)? / PAGE_BYTES).ok()?.min(WINDOW);
        // Entry 0 is for the page below `start`, the last one for the page above.
        let mut entries = [[0_u8; 8]; WINDOW + 2];
        let entries = &mut entries[..pages + 2];
        self.pagemap.read_exact_at(entries.as_flattened_mut(), (start / PAGE_BYTES - 1) * 8).ok()?;
        let first = (1..=(pages + 1).checked_sub(needed)?).find(|&first| {
            let has_margins = entries[first - 1] == UNTOUCHED && entries[first + needed] == UNTOUCHED;
            has_margins
                && (first..first + needed).all(|entry| {
                    let addr = start + count(entry - 1) * PAGE_BYTES;
                    entries[entry] == UNTOUCHED || self.used.contains(&addr) && is_zero(tid, addr)
                })
        })?;
        Some(start + count(first - 1 + needed) * PAGE_BYTES)
    }

    fn is_stack_of_thread(&self, stack: &Mapping, is_main_thread: bool, tid: i32, own: &Registers) -> bool {
        if stack.main_stack {
            return is_main_thread;
        }
        // By the ABI for thread-local storage, a thread's control block begins with its own address.
        (own.rsp..stack.end).contains(&own.fs_base)
            && ptrace::peek(tid, own.fs_base) == Ok(own.fs_base)
            && self.mapping(stack.start.wrapping_sub(1)).is_some_and(|below| below.inaccessible)
    }

    /// Remembers the pages of our return frame at `[base, base + bytes)`, which we've zeroed again.
    pub fn remember(process: &Process, base: u64, bytes: u64) {
        let mut used = locked(&USED);
        if used.len() >= PROCESSES_KEPT {
            used.clear();
        }
        let pages = used.entry(process.key()).or_default();
        for page in (page_of(base)..base + bytes).step_by(PAGE_SIZE) {
            if !pages.contains(&page) && pages.len() < PAGES_KEPT {
                pages.push(page);
            }
        }
    }

    fn mapping(&self, addr: u64) -> Option<Mapping> {
        let Some(all) = &self.all else { return self.query(addr).ok() };
        let vma = all.iter().find(|vma| (vma.start..vma.end).contains(&addr))?;
        Some(Mapping {
            start: vma.start,
            end: vma.end,
            plain: vma.perms.read && vma.perms.write && !vma.perms.exec && !vma.perms.shared && vma.inode == 0,
            inaccessible: !vma.perms.read && !vma.perms.write && !vma.perms.exec,
            main_stack: vma.name == b"[stack]",
        })
    }

    /// Finds the mapping that covers an address: `PROCMAP_QUERY` of Linux 6.11 (fs/proc/task_mmu.c).
    fn query(&self, addr: u64) -> Result<Mapping, i32> {
        const REQUEST: libc::Ioctl = 0xc068_6611_u32 as libc::Ioctl; // _IOWR('f', 17, struct procmap_query)
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
            // ENAMETOOLONG: a longer name, so it's a file's mapping. ENOENT: no mapping.
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

fn page_of(addr: u64) -> u64 {
    addr & !(PAGE_BYTES - 1)
}

/// Whether a page of the stopped thread holds only zeros.
fn is_zero(tid: i32, addr: u64) -> bool {
    let mut page = [1; PAGE_SIZE];
    ptrace::read(tid, addr, &mut page).is_ok() && page == [0; PAGE_SIZE]
}

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
        let all = pagefold_procmem::maps::parse_maps(&own.read_file("maps").unwrap()).unwrap();
        if stack_check.all.is_some() {
            return pagefold_testkit::skip_unsupported("PROCMAP_QUERY needs Linux 6.11");
        }
        let stack = all.iter().find(|vma| vma.name == b"[stack]").unwrap().end - 8;
        let here = &raw const stack as u64;
        let code = the_query_and_the_text_of_maps_agree as *const () as u64;
        // For a file with a long path the query fails, but the text lists the mapping. Either way it isn't plain.
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
