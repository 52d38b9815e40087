//! `holder PAGES` holds memory and changes it page by page on command.
//!
//! It prints the number of its first page, then reads commands from standard input, one per line, and answers each with
//! a number. `write FIRST PAGES CONTENT STEP`, `drop FIRST PAGES` and `mark FIRST PAGES` answer 0. `fork` answers the
//! child's pid; with `FIRST PAGES CONTENT` the child writes these pages first, with `PAGES CONTENT` it maps pages with
//! ascending contents right below its memory. `check` answers how many pages don't hold the content written to them. The
//! program ends when its input does.
//!
//! After `watch` it checks its memory all the time, part by part, while no command comes.
//!
//! `time` answers the number of its pages, and then, on a line for each page, how many cycles a write to it takes.
//!
//! `try FIRST PAGES ADVICE` (madvise) and `prctl OPTION VALUE` answer what the call returns, or 1000 and its error.
//!
//! These commands change its identity, or how it uses its memory: `advise FIRST PAGES ADVICE`, `lock FIRST PAGES`, `pin
//! FIRST PAGES` (as buffers of io_uring), `register FIRST PAGES` (userfaultfd, write protection), `map FILE` (all of
//! its memory becomes a private mapping of it), `files COUNT` (that many mappings of a file), `shared PAGES
//! CONTENT` and `hugetlb PAGES CONTENT` (another mapping, of a memfd or of hugetlb pages, with ascending contents), `dumpable 0|1`, `user ID`
//! (and group; stays dumpable), `group ID`, `sleep` (uninterruptibly, for ever) and `exec PAGES PROGRAM` (the new
//! program, a copy of this one, answers with its first page).

use pagefold_testkit::holder::fill;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;

const PAGE: usize = 4096;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
/// Inaccessible pages on either side of the memory, which keep it from becoming part of a neighbouring mapping.
const FENCE: usize = 512;
/// How many pages we check at a time.
const PART: usize = 64;

fn main() {
    let pages: usize = std::env::args().nth(1).and_then(|word| word.parse().ok()).expect("usage: holder PAGES");
    let length = pages * PAGE;
    // SAFETY: a fresh private mapping, checked for failure. We make its middle accessible, which is page-aligned,
    // zeroed by the kernel and never unmapped.
    let (start, bytes) = unsafe {
        let (flags, all) = (PRIVATE | libc::MAP_NORESERVE, length + 2 * FENCE * PAGE);
        let start = libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let start = start.byte_add(FENCE * PAGE);
        assert_eq!(libc::mprotect(start, length, libc::PROT_READ | libc::PROT_WRITE), 0);
        assert_eq!(libc::madvise(start, length, libc::MADV_NOHUGEPAGE), 0);
        (start, std::slice::from_raw_parts_mut(start.cast::<u8>(), length))
    };
    let mut written: Vec<Option<u64>> = vec![None; pages];
    let mut damaged = 0;
    // The next page to check.
    let mut watched: Option<usize> = None;
    answer(start as u64 / PAGE as u64);
    let mut lines = std::io::stdin().lines();
    loop {
        while let Some(first) = watched.filter(|_| !has_input()) {
            let end = (first + PART).min(pages);
            damaged += check(&bytes[first * PAGE..end * PAGE], &mut written[first..end]);
            watched = Some(if end == pages { 0 } else { end });
        }
        let Some(line) = lines.next() else { break };
        let line = line.expect("a command");
        if let Some((pages, program)) = line.strip_prefix("exec ").and_then(|rest| rest.split_once(' ')) {
            let error = std::process::Command::new(program).arg(pages).exec();
            panic!("exec: {error}");
        }
        if let Some(path) = line.strip_prefix("map ") {
            map(start, length, path);
            written.fill(None);
            answer(0);
            continue;
        }
        let mut words = line.split(' ');
        let command = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.map(|word| word.parse().expect("a number")).collect();
        let range = || {
            let [first, pages] = [numbers[0], numbers[1]].map(|number| usize::try_from(number).expect("a page"));
            assert!(first + pages <= written.len());
            (first, pages)
        };
        let advise = |advice| {
            let (first, pages) = range();
            // SAFETY: within the mapping, and nobody uses a reference to it during the call. Marking doesn't change
            // what the pages read as; dropped pages read as zeros afterwards.
            assert_eq!(unsafe { libc::madvise(start.byte_add(first * PAGE), pages * PAGE, advice) }, 0, "{line}");
            0
        };
        let done = match (command, numbers.as_slice()) {
            ("write", &[_, _, content, step]) => {
                let (first, pages) = range();
                for (page, number) in (first..first + pages).zip(0..) {
                    fill(&mut bytes[page * PAGE..][..PAGE], content + number * step);
                    written[page] = Some(content + number * step);
                }
                0
            }
            ("drop", [_, _]) => {
                advise(libc::MADV_DONTNEED);
                let (first, pages) = range();
                written[first..first + pages].fill(None);
                0
            }
            ("mark", [_, _]) => advise(libc::MADV_MERGEABLE),
            ("advise", &[_, _, kind]) => advise(i32::try_from(kind).expect("an advice")),
            ("try", &[_, _, kind]) => {
                let (first, pages) = range();
                let kind = i32::try_from(kind).expect("an advice");
                // SAFETY: within the mapping, and nobody uses a reference to it during the call, which marks or unmarks.
                result_of(unsafe { libc::madvise(start.byte_add(first * PAGE), pages * PAGE, kind) })
            }
            ("prctl", &[option, value]) => {
                let option = i32::try_from(option).expect("an option");
                // SAFETY: numbers only.
                result_of(unsafe { libc::prctl(option, value, 0, 0, 0) })
            }
            ("lock", [_, _]) => {
                let (first, pages) = range();
                // SAFETY: within the mapping; locking changes no contents.
                assert_eq!(unsafe { libc::mlock(start.byte_add(first * PAGE), pages * PAGE) }, 0, "{line}");
                0
            }
            ("pin", [_, _]) => {
                let (first, pages) = range();
                pin(start as u64 + (first * PAGE) as u64, (pages * PAGE) as u64);
                0
            }
            ("files", &[count]) => {
                map_files(count);
                0
            }
            ("shared", &[pages, content]) => {
                // SAFETY: the name ends with a zero.
                let file = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC) };
                map_more(std::ptr::null_mut(), pages, content, libc::MAP_SHARED, file);
                0
            }
            ("hugetlb", &[pages, content]) => {
                map_more(std::ptr::null_mut(), pages, content, PRIVATE | libc::MAP_HUGETLB, -1);
                0
            }
            ("register", [_, _]) => {
                let (first, pages) = range();
                register(start as u64 + (first * PAGE) as u64, (pages * PAGE) as u64);
                0
            }
            ("dumpable", &[dumpable]) => {
                // SAFETY: numbers only.
                assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable, 0, 0, 0) }, 0);
                0
            }
            ("user", &[id]) => {
                let id = u32::try_from(id).expect("a user");
                // SAFETY: numbers only; the program has one thread. Changing the user clears the dumpable attribute.
                unsafe {
                    assert_eq!(libc::setresgid(id, id, id), 0);
                    assert_eq!(libc::setresuid(id, id, id), 0);
                    assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
                }
                0
            }
            ("group", &[id]) => {
                let id = u32::try_from(id).expect("a group");
                // SAFETY: numbers only; the program has one thread.
                unsafe {
                    assert_eq!(libc::setresgid(id, id, id), 0);
                    assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
                }
                0
            }
            ("sleep", []) => {
                answer(0);
                sleep_uninterruptibly();
                continue;
            }
            ("time", []) => {
                let cycles: Vec<u64> = bytes.chunks_exact_mut(PAGE).map(time_of_write).collect();
                answer(pages as u64);
                cycles.into_iter().for_each(answer);
                continue;
            }
            ("fork", []) => fork(|| {}),
            ("fork", &[pages, content]) => {
                let length = usize::try_from(pages).expect("a length") * PAGE;
                assert!(length < FENCE * PAGE);
                fork(|| map_more(start.wrapping_byte_sub(length), pages, content, PRIVATE, -1))
            }
            ("fork", &[_, _, content]) => {
                let (first, pages) = range();
                fork(|| {
                    for (page, number) in (first..first + pages).zip(0..) {
                        fill(&mut bytes[page * PAGE..][..PAGE], content + number);
                    }
                })
            }
            ("watch", []) => {
                watched = Some(0);
                0
            }
            ("check", []) => {
                damaged += check(bytes, &mut written);
                damaged
            }
            _ => panic!("unknown command {line}"),
        };
        answer(done);
    }
    std::hint::black_box(bytes);
}

/// What a call returned, or 1000 and the number of its error.
fn result_of(returned: i32) -> u64 {
    let error = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    u64::try_from(if returned < 0 { 1000 + error } else { returned }).expect("a number")
}

/// Counts pages that don't have the content written to them. Counts each only once.
fn check(bytes: &[u8], written: &mut [Option<u64>]) -> u64 {
    let (mut expected, mut damaged) = ([0; PAGE], 0);
    for (page, content) in bytes.chunks_exact(PAGE).zip(written) {
        let Some(number) = *content else { continue };
        fill(&mut expected, number);
        if page != expected {
            *content = None;
            damaged += 1;
        }
    }
    damaged
}

/// Whether a command comes within a moment. We can poll: the input buffer is empty, because the next command is only
/// sent after we've answered.
fn has_input() -> bool {
    let mut input = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which lives through the call.
    unsafe { libc::poll(&raw mut input, 1, 100) > 0 }
}

/// How many cycles a write to a page takes. The write doesn't change the content.
fn time_of_write(page: &mut [u8]) -> u64 {
    use std::arch::x86_64::{_mm_lfence, _mm_mfence, _rdtsc};
    let last = &raw mut page[PAGE - 1];
    // SAFETY: a byte of the page, to which we hold a reference. The instructions are part of x86-64.
    #[allow(unused_unsafe)]
    unsafe {
        // We read first to get the address into the TLB: then a write without a page fault is fast.
        let byte = last.read_volatile();
        _mm_mfence();
        _mm_lfence();
        let begun = _rdtsc();
        _mm_lfence();
        last.write_volatile(byte);
        _mm_mfence();
        _mm_lfence();
        _rdtsc() - begun
    }
}

/// Starts a child that makes this change and then holds its memory; returns its pid.
fn fork(change: impl FnOnce()) -> u64 {
    // SAFETY: the program has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the calls concern the child alone, which does nothing else until it's killed with its parent.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            change();
            loop {
                libc::pause();
            }
        }
    }
    u64::try_from(pid).expect("fork")
}

fn answer(number: u64) {
    println!("{number}");
    std::io::stdout().flush().expect("standard output");
}

/// Registers memory for write protection by userfaultfd.
fn register(start: u64, length: u64) {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    let (mut api, mut range) = ([0xaa_u64, 0, 0], [start, length, 2, 0]);
    // SAFETY: both requests read and write structs of three and four words. We never close the descriptor: that would
    // undo the registration.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
        let fd = i32::try_from(fd).expect("a descriptor");
        assert_eq!(libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()), 0, "{}", std::io::Error::last_os_error());
        assert_eq!(libc::ioctl(fd, UFFDIO_REGISTER, range.as_mut_ptr()), 0, "{}", std::io::Error::last_os_error());
    }
}

/// Pins memory for good, as registered buffers of io_uring, at most 1 GiB each.
fn pin(start: u64, length: u64) {
    const REGISTER_BUFFERS: u32 = 0;
    const LARGEST: u64 = 1 << 30;
    let mut parameters = [0_u8; 120];
    let buffers = (0..length).step_by(1 << 30).map(|from| [start + from, LARGEST.min(length - from)]);
    let buffers: Vec<[u64; 2]> = buffers.collect();
    // SAFETY: both calls read and write what they're given: the parameters' struct of 120 bytes, and as many iovecs as we
    // say. Pinning changes no contents. The descriptor stays open.
    unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr());
        assert!(ring >= 0, "{}", std::io::Error::last_os_error());
        let call = libc::SYS_io_uring_register;
        let registered = libc::syscall(call, ring, REGISTER_BUFFERS, buffers.as_ptr(), buffers.len());
        assert_eq!(registered, 0, "{}", std::io::Error::last_os_error());
    }
}

/// Replaces the memory by a private mapping of a file.
fn map(start: *mut libc::c_void, length: usize, path: &str) {
    let file = File::open(path).expect("the file");
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: exactly our own mapping, and nobody uses a reference to it during the call.
    let mapped = unsafe { libc::mmap(start, length, access, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped, start, "{}", std::io::Error::last_os_error());
}

/// Maps more memory, which we never unmap, and gives its pages ascending contents. At an address, it replaces a part of
/// the fence.
fn map_more(at: *mut libc::c_void, pages: u64, content: u64, flags: i32, file: i32) {
    let length = usize::try_from(pages).expect("a length") * PAGE;
    let flags = if at.is_null() { flags } else { flags | libc::MAP_FIXED };
    // SAFETY: a fresh mapping, checked for failure, that nobody else uses; the fence is ours, and nobody uses it. The
    // kernel zeroes the memory.
    let bytes = unsafe {
        if file >= 0 {
            assert_eq!(libc::ftruncate(file, i64::try_from(length).expect("a length")), 0);
        }
        let start = libc::mmap(at, length, libc::PROT_READ | libc::PROT_WRITE, flags, file, 0);
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        std::slice::from_raw_parts_mut(start.cast::<u8>(), length)
    };
    for (page, number) in bytes.chunks_exact_mut(PAGE).zip(0..) {
        fill(page, content + number);
    }
}

/// Maps `count` parts of a file with gaps between them, so that the kernel can't join the mappings.
fn map_files(count: u64) {
    // SAFETY: the name ends with a zero; the new descriptor is ours alone.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"files".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(2 * count * PAGE as u64).expect("a sparse file");
    for number in 0..count {
        let offset = i64::try_from(2 * number * PAGE as u64).expect("an offset");
        // SAFETY: a fresh mapping, which nobody uses.
        let mapped = unsafe {
            let (access, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), PAGE, access, flags, file.as_raw_fd(), offset)
        };
        assert_ne!(mapped, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    }
}

/// Sleeps like the parent of a vfork, so that neither a stop nor a signal other than SIGKILL reaches it.
fn sleep_uninterruptibly() {
    // SAFETY: the child makes only system calls and never returns; it ends with its parent.
    unsafe {
        if libc::syscall(libc::SYS_clone, libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
}
