//! Mappings, operations on them, and the model of their contents.

use crate::content::{Content, WORDS};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub const PAGE: usize = 4096;
/// How much address space we keep for each mapping. It's more than the mapping needs, so a hole follows.
const SLOT: usize = 32 << 20;
/// The maximum length of a mapping, pages.
pub const MOST: usize = 4096;

/// The read-only mapping, and the number of faults in it.
static GUARD_START: AtomicUsize = AtomicUsize::new(0);
static GUARD_BYTES: AtomicUsize = AtomicUsize::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// A difference between memory and model.
#[derive(Debug)]
pub struct Damage(pub String);

/// Address space reserved for the mappings.
pub struct Arena {
    start: usize,
    free: Vec<usize>,
}

impl Arena {
    pub fn new(slots: usize) -> Self {
        let length = (slots + 1) * SLOT;
        let start = map(ptr::null_mut(), length, libc::PROT_NONE, libc::MAP_NORESERVE).next_multiple_of(SLOT);
        Self { start, free: (0..slots).collect() }
    }

    /// A free slot, chosen by `random`.
    fn take(&mut self, random: u64) -> usize {
        let at = usize::try_from(random >> 1).unwrap_or(0) % self.free.len();
        self.start + self.free.swap_remove(at) * SLOT
    }

    /// Frees the slot of a mapping, and reserves its address space.
    fn give_back(&mut self, start: usize) {
        map(start as *mut _, SLOT, libc::PROT_NONE, libc::MAP_NORESERVE | libc::MAP_FIXED);
        self.free.push((start - self.start) / SLOT);
    }
}

fn map(at: *mut libc::c_void, bytes: usize, protection: i32, flags: i32) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a mapping at an address of the kernel's choosing, or over a slot of the arena that nothing refers to.
    let start = unsafe { libc::mmap(at, bytes, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    start.addr()
}

pub struct Region {
    pub start: usize,
    pub pages: Vec<Content>,
    read_only: bool,
    /// Whether a part was replaced. To the kernel the rest and the part are several mappings, which mremap(2) may
    /// refuse.
    pub split: bool,
    huge: bool,
    salt: u64,
}

impl Region {
    pub fn map(arena: &mut Arena, random: u64, pages: usize, huge: bool, salt: u64) -> Self {
        let start = arena.take(random);
        let region = Self { start, pages: vec![Content::ZERO; pages], read_only: false, split: false, huge, salt };
        region.map_at(0, pages);
        region
    }

    /// Maps fresh memory in place of a part of the mapping.
    fn map_at(&self, first: usize, pages: usize) {
        let (at, bytes) = (self.start + first * PAGE, pages * PAGE);
        map(at as *mut _, bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED);
        if self.huge {
            // Fails if the kernel has no huge pages, which the caller has checked.
            // SAFETY: the advice keeps the contents.
            unsafe { libc::madvise(at as *mut _, bytes, libc::MADV_HUGEPAGE) };
        }
    }

    fn at(&self, page: usize) -> *mut u64 {
        assert!(page < self.pages.len());
        (self.start + page * PAGE) as *mut u64
    }

    /// Call this before a write. If the mapping is read-only, returns the number of faults so far.
    fn expect_fault(&self) -> Option<u64> {
        self.read_only.then(|| FAULTS.load(Ordering::SeqCst))
    }

    /// Call this after the write. A read-only mapping must have had one fault, whose handler has made it writable.
    fn faulted(&mut self, before: Option<u64>) -> Result<(), Damage> {
        let Some(before) = before else { return Ok(()) };
        self.read_only = false;
        match FAULTS.load(Ordering::SeqCst) - before {
            1 => Ok(()),
            faults => Err(Damage(format!("a write to memory that is read-only gave {faults} faults"))),
        }
    }

    pub fn write(&mut self, page: usize, content: Content) -> Result<(), Damage> {
        let (at, before) = (self.at(page), self.expect_fault());
        for (word, value) in content.words(self.salt).enumerate() {
            // SAFETY: a word of a page of the mapping.
            unsafe { at.add(word).write_volatile(value) };
        }
        self.pages[page] = content;
        self.faulted(before)
    }

    /// Writes a content that differs from the present one in a word. Also restores a word that was replaced before.
    pub fn replace_word(&mut self, page: usize, content: Content) -> Result<(), Damage> {
        let (at, before) = (self.at(page), self.expect_fault());
        let all = |content: Content| content.words(self.salt);
        for word in
            [self.pages[page].replaced_word(), content.replaced_word()].into_iter().flatten().map(|(word, _)| word)
        {
            let value = all(content).nth(word).unwrap_or(0);
            // SAFETY: a word of a page of the mapping.
            unsafe { at.add(word).write_volatile(value) };
        }
        self.pages[page] = content;
        self.faulted(before)
    }

    /// Rewrites a page with its own content, which unmerges it and changes nothing.
    pub fn rewrite(&mut self, page: usize) -> Result<(), Damage> {
        let (at, before) = (self.at(page), self.expect_fault());
        // SAFETY: a word of a page of the mapping.
        unsafe { at.write_volatile(at.read_volatile()) };
        self.faulted(before)
    }

    /// Compares every byte of a page with the model.
    pub fn check(&self, page: usize) -> Result<(), Damage> {
        let at = self.at(page);
        let mut wrong = None;
        let mut count = 0;
        for (word, expected) in self.pages[page].words(self.salt).enumerate() {
            // SAFETY: a word of a page of the mapping.
            let found = unsafe { at.add(word).read_volatile() };
            if found != expected {
                count += 1;
                wrong = wrong.or(Some((word, expected, found)));
            }
        }
        let Some((word, expected, found)) = wrong else { return Ok(()) };
        let (pid, content) = (std::process::id(), self.pages[page]);
        Err(Damage(format!(
            "process {pid}: page {page} of {} at {at:p} ({content:?}): expected {expected:#018x} in word {word}, \
             found {found:#018x}; {count} of {WORDS} words are wrong",
            self.pages.len()
        )))
    }

    pub fn check_all(&self) -> Result<usize, Damage> {
        (0..self.pages.len()).try_for_each(|page| self.check(page))?;
        Ok(self.pages.len())
    }

    // ---- operations -------------------------------------------------------------------------------------

    /// Makes the mapping read-only until somebody writes to it. At most one mapping at a time is read-only.
    pub fn protect(&mut self) {
        GUARD_START.store(self.start, Ordering::SeqCst);
        GUARD_BYTES.store(self.pages.len() * PAGE, Ordering::SeqCst);
        self.protect_as(libc::PROT_READ);
        self.read_only = true;
    }

    pub fn is_protected(&self) -> bool {
        self.read_only
    }

    pub fn unprotect(&mut self) {
        if self.read_only {
            self.protect_as(libc::PROT_READ | libc::PROT_WRITE);
            self.read_only = false;
        }
    }

    fn protect_as(&self, protection: i32) {
        // SAFETY: all of the mapping, which we access only by raw pointers.
        let done = unsafe { libc::mprotect(self.start as *mut _, self.pages.len() * PAGE, protection) };
        assert_eq!(done, 0, "mprotect: {}", std::io::Error::last_os_error());
    }

    /// Makes the mapping shorter, or longer with zeros. The error is errno.
    pub fn resize(&mut self, pages: usize) -> Result<(), i32> {
        self.unprotect();
        let old = self.pages.len() * PAGE;
        // The slot is large enough, but we have to unmap the part of its reservation that we grow into.
        if pages > self.pages.len() {
            // SAFETY: reserved address space that nothing refers to.
            unsafe { libc::munmap((self.start + old) as *mut _, pages * PAGE - old) };
        }
        // SAFETY: all of the mapping, which doesn't move.
        let moved = unsafe { libc::mremap(self.start as *mut _, old, pages * PAGE, 0) };
        let error = std::io::Error::last_os_error();
        let done = moved != libc::MAP_FAILED;
        let length = if done { pages } else { self.pages.len() };
        let (end, hole) = (self.start + length * PAGE, SLOT - length * PAGE);
        map(end as *mut _, hole, libc::PROT_NONE, libc::MAP_NORESERVE | libc::MAP_FIXED);
        self.pages.resize(length, Content::ZERO);
        if done { Ok(()) } else { Err(error.raw_os_error().unwrap_or(0)) }
    }

    /// Moves the mapping to another slot. The error is errno.
    pub fn relocate(&mut self, arena: &mut Arena, random: u64) -> Result<(), i32> {
        self.unprotect();
        let (from, to, bytes) = (self.start, arena.take(random), self.pages.len() * PAGE);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: all of the mapping, to a free slot; only `self.start` refers to it.
        let moved = unsafe { libc::mremap(from as *mut _, bytes, bytes, flags, to) };
        if moved == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            arena.give_back(to);
            return Err(error);
        }
        self.start = to;
        arena.give_back(from);
        Ok(())
    }

    /// Unmaps a part of the mapping and maps zeros there.
    pub fn replace(&mut self, first: usize, pages: usize) {
        self.unprotect();
        let (at, bytes) = ((self.start + first * PAGE) as *mut _, pages * PAGE);
        // SAFETY: a part of the mapping, to which no reference exists.
        let done = unsafe { libc::munmap(at, bytes) };
        assert_eq!(done, 0, "munmap: {}", std::io::Error::last_os_error());
        self.map_at(first, pages);
        self.split = true;
        self.pages[first..first + pages].fill(Content::ZERO);
    }

    pub fn unmap(self, arena: &mut Arena) {
        // SAFETY: all of the mapping, to which no reference exists.
        let done = unsafe { libc::munmap(self.start as *mut _, self.pages.len() * PAGE) };
        assert_eq!(done, 0, "munmap: {}", std::io::Error::last_os_error());
        arena.give_back(self.start);
    }

    /// madvise(2) for a part. The error is errno.
    pub fn advise(&self, first: usize, pages: usize, advice: i32) -> Result<(), i32> {
        // SAFETY: a part of the mapping, which we access only by raw pointers.
        let done = unsafe { libc::madvise(self.at(first).cast(), pages * PAGE, advice) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
    }

    /// Gives a part back to the kernel: it reads as zeros afterwards.
    pub fn discard(&mut self, first: usize, pages: usize) {
        assert_eq!(self.advise(first, pages, libc::MADV_DONTNEED), Ok(()), "MADV_DONTNEED");
        self.pages[first..first + pages].fill(Content::ZERO);
    }
}

/// Installs the handler that counts faults of the read-only mapping and makes it writable.
pub fn catch_faults() {
    extern "C" fn caught(_signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel passes a valid siginfo.
        let at = unsafe { (*info).si_addr() }.addr();
        let (start, bytes) = (GUARD_START.load(Ordering::SeqCst), GUARD_BYTES.load(Ordering::SeqCst));
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let inside = (start..start + bytes).contains(&at);
        // SAFETY: all of the read-only mapping, which we access only by raw pointers.
        if !inside || unsafe { libc::mprotect(start as *mut _, bytes, writable) } != 0 {
            // SAFETY: the kernel passes a valid context.
            let registers = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
            let [rip, rsp, rax] =
                [libc::REG_RIP, libc::REG_RSP, libc::REG_RAX].map(|at| registers[usize::try_from(at).unwrap_or(0)]);
            // SAFETY: the kernel passes a valid siginfo.
            let code = unsafe { (*info).si_code };
            // Printing may allocate; the process ends anyway.
            println!(
                "bad: an unexpected fault: address {at:x}, code {code}, rip {rip:x}, rsp {rsp:x}, rax {rax:x}, \
                 guard {start:x} {bytes:x}, {}",
                std::io::Error::last_os_error()
            );
            // SAFETY: no memory is passed.
            unsafe { libc::_exit(3) };
        }
        FAULTS.fetch_add(1, Ordering::SeqCst);
    }
    // SAFETY: all zeros is a sigaction; the handler has the signature of SA_SIGINFO.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = caught as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
    }
}
