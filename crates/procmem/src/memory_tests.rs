use super::*;
use pagefold_engine::units::PAGE_SIZE;
use pagefold_testkit::{Forked, Script};
use std::collections::HashMap;
use std::ptr;

/// Anonymous memory of this process, unmapped when dropped.
struct Memory {
    start: *mut u8,
    pages: usize,
}

impl Memory {
    fn new(pages: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(ptr::null_mut(), pages * PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        let memory = Self { start: start.cast(), pages };
        memory.advise(libc::MADV_NOHUGEPAGE);
        // Tests run concurrently in one process: the fork of another test would share these pages.
        memory.advise(libc::MADV_DONTFORK);
        memory
    }

    fn advise(&self, advice: i32) {
        // SAFETY: the range lies in this mapping, and the advice keeps its contents.
        assert_eq!(unsafe { libc::madvise(self.start.cast(), self.pages * PAGE_SIZE, advice) }, 0);
    }

    fn first(&self) -> Vpn {
        Vpn::of_address(self.start as u64)
    }

    fn at(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        // SAFETY: the page is inside the mapping.
        unsafe { self.start.add(page * PAGE_SIZE) }
    }

    /// Fills a page with contents that depend on its index.
    fn fill(&self, page: usize) {
        // SAFETY: the page is inside the mapping and writable; nothing else refers to it.
        unsafe { ptr::copy_nonoverlapping(contents(page).as_ptr(), self.at(page), PAGE_SIZE) }
    }

    fn touch(&self, page: usize) -> u8 {
        // SAFETY: the page is inside the mapping and readable.
        unsafe { ptr::read_volatile(self.at(page)) }
    }

    /// Makes a page permanently unreadable by mapping a page beyond the end of a file over it. A plain munmap would
    /// leave a hole in which another test could map memory.
    fn unmap(&self, page: usize) {
        // SAFETY: the page is inside this mapping, and no test touches it after an empty memfd is mapped over it.
        unsafe {
            let file = libc::memfd_create(c"nothing".as_ptr(), libc::MFD_CLOEXEC);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let at = libc::mmap(self.at(page).cast(), PAGE_SIZE, libc::PROT_READ, flags, file, 0);
            assert_eq!(at, self.at(page).cast());
            libc::close(file);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe { libc::munmap(self.start.cast(), self.pages * PAGE_SIZE) };
    }
}

/// Forks so that the child shares `memory` and no memory of other tests.
fn fork_with(memory: &Memory) -> Forked {
    memory.advise(libc::MADV_DOFORK);
    let child = Forked::start(|| {});
    memory.advise(libc::MADV_DONTFORK);
    child
}

fn contents(page: usize) -> PageBytes {
    let mut bytes = [0u8; PAGE_SIZE];
    bytes.iter_mut().zip(page * 31 + 1..).for_each(|(byte, seed)| *byte = u8::try_from(seed % 251).unwrap());
    bytes
}

fn own() -> Process {
    Process::open(i32::try_from(std::process::id()).unwrap()).unwrap()
}

type Seen = Vec<(Vpn, PageState, Option<PageBytes>)>;

fn read(reader: &mut PageReader, process: &Process, runs: &[(Vpn, u32)], how: ReadHow) -> Result<Seen, ReadError> {
    let mut seen = Vec::new();
    reader.read_runs(process, runs, how, |view| seen.push((view.page, view.state, view.bytes.copied())))?;
    Ok(seen)
}

fn read_own(reader: &mut PageReader, run: (Vpn, u32), contents: Contents, huge: bool) -> Seen {
    read(reader, &own(), &[run], ReadHow { huge, contents, ..ReadHow::default() }).unwrap()
}

#[test]
fn every_page_of_every_run_is_visited_in_order_with_its_contents() {
    let memory = Memory::new(1000);
    let written = |page: usize| page % 7 != 3;
    (0..1000).filter(|&page| written(page)).for_each(|page| memory.fill(page));
    let first = memory.first();
    // Runs longer than a batch, runs that overlap or aren't in order, single pages, an empty run, small and large gaps.
    let runs: Vec<(Vpn, u32)> =
        [(0, 700), (990, 10), (5, 1), (7, 1), (3, 0), (100, 16), (130, 16), (110, 40), (0, 1000)]
            .iter()
            .map(|&(at, pages)| (first + at, pages))
            .collect();
    let seen = read(&mut PageReader::new(), &own(), &runs, ReadHow::default()).unwrap();
    let expected: Seen = runs
        .iter()
        .flat_map(|&(first, pages)| (0..u64::from(pages)).map(move |offset| first + offset))
        .map(|page| {
            let index = usize::try_from(page.0 - first.0).unwrap();
            if written(index) {
                (page, PageState::Private, Some(contents(index)))
            } else {
                (page, PageState::Absent, None)
            }
        })
        .collect();
    assert_eq!(seen.len(), expected.len());
    assert!(seen == expected);
    // Reading mustn't have faulted pages in.
    let mut present = 0;
    PageReader::new().walk(&own(), first, Pages(1000), |_, entry| present += usize::from(entry.present())).unwrap();
    assert_eq!(present, (0..1000).filter(|&page| written(page)).count());
}

#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn zero_and_file_pages_are_told_apart() {
    let mut reader = PageReader::new();
    if !reader.sees_frames() {
        return pagefold_testkit::skip("/proc/kpageflags needs root");
    }
    let memory = Memory::new(3);
    memory.touch(0);
    memory.fill(1);
    let seen = read_own(&mut reader, (memory.first(), 3), Contents::All, true);
    let states: Vec<PageState> = seen.iter().map(|page| page.1).collect();
    assert_eq!(states, [PageState::ZeroMapped, PageState::Private, PageState::Absent]);
    assert_eq!(seen[0].2, None);
    // Without frame flags the zero page counts as shared.
    let mut blind = PageReader { frames: None, files: Vec::new(), batch: Batch::default() };
    let seen = read_own(&mut blind, (memory.first(), 3), Contents::default(), false);
    let states: Vec<PageState> = seen.iter().map(|page| page.1).collect();
    assert_eq!(states, [PageState::Shared, PageState::Private, PageState::Absent]);
    // Program code counts as a page of a file, whether we look for huge pages or not.
    let code = Vpn::of_address(zero_and_file_pages_are_told_apart as *const () as u64);
    for huge in [false, true] {
        let seen = read_own(&mut reader, (code, 1), Contents::All, huge);
        assert_eq!(seen, [(code, PageState::Absent, None)]);
    }
}

/// A batch of all pages whose page table entries we've read.
fn looked_up(process: &Process, memory: &Memory) -> (Files, Batch) {
    let files = Files::open(process).unwrap();
    let mut batch = Batch::default();
    batch.start();
    batch.take(memory.first(), u32::try_from(memory.pages).unwrap());
    batch.look_up(&files, ReadHow::default()).unwrap();
    batch.classify(None, ReadHow::default()).unwrap();
    (files, batch)
}

#[test]
fn pages_unmapped_before_the_read_are_absent_and_the_others_are_read() {
    let process = own();
    for gone in [&[3usize, 7, 8, 63][..], &[0], &[0, 1, 2, 62, 63], &[], &[31]] {
        let memory = Memory::new(64);
        (0..64).for_each(|page| memory.fill(page));
        let (_, mut batch) = looked_up(&process, &memory);
        for &page in gone {
            memory.unmap(page);
        }
        batch.read_private(process.pid()).unwrap();
        let mut index = 0;
        batch.show(&mut |view: PageView<'_>| {
            let expected = if gone.contains(&index) { None } else { Some(contents(index)) };
            assert_eq!(view.bytes.copied(), expected, "page {index}, {gone:?} gone");
            assert_eq!(view.state == PageState::Absent, gone.contains(&index));
            index += 1;
        });
        assert_eq!(index, 64);
    }
}

#[test]
fn shared_pages_unmapped_before_the_read_are_absent() {
    let memory = Memory::new(8);
    (0..8).for_each(|page| memory.fill(page));
    let _child = fork_with(&memory);
    let process = own();
    let (mut files, mut batch) = looked_up(&process, &memory);
    for page in [0, 4, 5] {
        memory.unmap(page);
    }
    batch.read_shared(&mut files, &process, Contents::All).unwrap();
    let mut seen = Vec::new();
    batch.show(&mut |view: PageView<'_>| seen.push(view.bytes.copied()));
    let expected: Vec<_> = (0..8).map(|page| (![0, 4, 5].contains(&page)).then(|| contents(page))).collect();
    assert!(seen == expected);
}

#[test]
fn a_process_that_ended_is_vanished_although_its_files_are_held_open() {
    let memory = Memory::new(4);
    memory.fill(0);
    let child = fork_with(&memory);
    let process = Process::open(child.0).unwrap();
    let mut reader = PageReader::new();
    let run = [(memory.first(), 4)];
    let seen = read(&mut reader, &process, &run, ReadHow { contents: Contents::All, ..ReadHow::default() }).unwrap();
    assert_eq!(seen[0].2, Some(contents(0)));
    let files = Files::open(&process).unwrap();
    files.check(&process, ReadHow::default()).unwrap();
    drop(child);
    assert!(matches!(files.check(&process, ReadHow::default()), Err(ReadError::Vanished { .. })));
    assert!(matches!(read(&mut reader, &process, &run, ReadHow::default()), Err(ReadError::Vanished { .. })));
}

#[test]
fn exec_is_detected() {
    let mut shell = Script::of(std::process::Command::new("sh").args(["-c", "echo; read line; exec sleep 60"]));
    // While it's being executed, it has no auxiliary vector.
    shell.line();
    let process = Process::open(shell.pid()).unwrap();
    let mut reader = PageReader::new();
    let at = reader.hold(&process).unwrap();
    reader.files[at].check(&process, ReadHow::default()).unwrap();
    shell.say("");
    while process.stat().unwrap().comm != b"sleep" {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(matches!(reader.files[at].check(&process, ReadHow::default()), Err(ReadError::Vanished { .. })));
    // The next call reads the new program.
    let maps = crate::maps::parse_maps(&process.read_file("maps").unwrap()).unwrap();
    let stack = maps.iter().find(|vma| vma.name == b"[stack]").unwrap();
    let run = (stack.first(), u32::try_from(stack.pages().0).unwrap());
    let seen = read(&mut reader, &process, &[run], ReadHow::default()).unwrap();
    assert!(seen.iter().any(|page| page.1 == PageState::Private));
}

/// A process that shares its parent's address space, and lives as long as the parent.
extern "C" fn sleep_beside(_: *mut libc::c_void) -> libc::c_int {
    // SAFETY: no memory is passed.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        loop {
            libc::pause();
        }
    }
}

/// After an exec, a process that shared the address space keeps it, though the pid now belongs to another program.
#[test]
fn exec_is_detected_though_another_process_keeps_the_address_space() {
    let memory = Memory::new(4);
    memory.fill(0);
    memory.advise(libc::MADV_DOFORK);
    let child = Forked::start(|| {
        let mut stack = [0_u8; 8_192];
        let sleep: [*const libc::c_char; 3] = [c"sleep".as_ptr(), c"60".as_ptr(), std::ptr::null()];
        // SAFETY: the stack is large enough, and remains until exec; the other process keeps its address space. The
        // strings end with a null, and the list with a null pointer.
        unsafe {
            let top = stack.as_mut_ptr().add(stack.len() - 16).cast();
            let beside = libc::clone(sleep_beside, top, libc::CLONE_VM | libc::SIGCHLD, std::ptr::null_mut());
            assert!(beside > 0);
            libc::raise(libc::SIGSTOP);
            libc::execvp(sleep[0], sleep.as_ptr());
        }
    });
    let process = Process::open(child.0).unwrap();
    let mut reader = PageReader::new();
    let run = [(memory.first(), 4)];
    let how = ReadHow { contents: Contents::All, image: Some(image_of(&process).unwrap()), ..ReadHow::default() };
    assert_eq!(read(&mut reader, &process, &run, how).unwrap()[0].2, Some(contents(0)));
    // SAFETY: the pid is our own child's, and we haven't waited for its end.
    unsafe { libc::kill(child.0, libc::SIGCONT) };
    while process.stat().unwrap().comm != b"sleep" {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // First by the files that we hold, then by new ones.
    for _ in 0..2 {
        assert!(matches!(read(&mut reader, &process, &run, how), Err(ReadError::Vanished { .. })));
    }
    read(&mut reader, &process, &run, ReadHow::default()).unwrap();
}

#[test]
fn empty_parts_of_a_range_are_skipped() {
    let memory = Memory::new(1 << 28);
    for page in [0, 77, 78, 123_456_789, (1 << 28) - 1] {
        memory.fill(page);
    }
    let (first, mut reader) = (memory.first(), PageReader::new());
    let mut probe = Vec::new();
    let scan = Pagemap::open(&own()).unwrap().scan(first, Pages(1), Categories::PRESENT, &mut probe);
    if matches!(scan, Err(ScanError::Absent)) {
        return pagefold_testkit::skip_unsupported("PAGEMAP_SCAN needs Linux 6.7");
    }
    let before = thread_cpu_ns();
    let mut runs = Vec::new();
    reader.resident_runs(&own(), first, Pages(1 << 28), &mut runs).unwrap();
    assert_eq!(runs, [(first, 1), (first + 77, 2), (first + 123_456_789, 1), (first + ((1 << 28) - 1), 1)]);
    // Reading all two gigabytes of pagemap entries takes seconds.
    let ns = thread_cpu_ns() - before;
    assert!(ns < 1_000_000_000, "{ns} ns");
}

/// CPU time of this thread: unlike elapsed time, the same on a busy machine.
fn thread_cpu_ns() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn huge_pages_are_recognised_with_and_without_pagemap_scan() {
    let memory = Memory::new(3 * 512);
    memory.advise(libc::MADV_HUGEPAGE);
    let skip = usize::try_from((512 - memory.first().0 % 512) % 512).unwrap();
    let _ = memory.touch(skip + 512); // before any write: the huge zero page, where there is one
    let mut reader = PageReader::new();
    if !reader.sees_frames() {
        return pagefold_testkit::skip("/proc/kpageflags needs root");
    }
    let how = ReadHow { huge: true, ..ReadHow::default() };
    let zero = read(&mut reader, &own(), &[(memory.first() + (skip + 512 + 9) as u64, 1)], how).unwrap();
    assert!(matches!(zero[0].1, PageState::ZeroMapped | PageState::Absent), "{:?}", zero[0].1);
    (0..512).for_each(|page| memory.fill(skip + page));
    let first = memory.first() + skip as u64;
    let mappings = crate::maps::parse_smaps(&own().read_file("smaps").unwrap()).unwrap();
    let mapping = mappings.iter().rfind(|mapping| mapping.vma.first() <= first).unwrap();
    if mapping.anon_huge_kib < 2048 {
        return pagefold_testkit::skip_unsupported("the kernel gave no huge page");
    }
    let mut flags: HashMap<bool, Vec<bool>> = HashMap::new();
    for scan_absent in [false, true] {
        reader.batch.scan_absent = scan_absent;
        let seen = flags.entry(scan_absent).or_default();
        reader
            .read_runs(&own(), &[(first, 500)], how, |view| {
                assert_eq!(view.bytes, Some(&contents(usize::try_from(view.page.0 - memory.first().0).unwrap())));
                seen.push(view.huge);
            })
            .unwrap();
        assert!(seen.iter().all(|&huge| huge), "scan absent: {scan_absent}");
    }
}
