//! `victim stalling KIND` prints `ready ADDR LEN` and waits until it reads a byte. Then it prints `ok`, or `bad:
//! REASON` if its memory has changed. The kind may be followed by a user to become, and then by `marked`, to mark the
//! memory that the victim has in common with others.
//!
//! | kind | what it does |
//! | --- | --- |
//! | `code` | maps executable memory of a FUSE file; a read of its pages never ends |
//! | `locked` | reads such a page through its own `/proc/self/mem`, which holds its mmap lock, while another thread maps memory |
//! | `locking` | like `locked`, but only from the first byte read to the second one; has 8 MiB of memory of its own |
//! | `reading` | reads such a page, and no thread waits for the lock; has 1 MiB in common with others of its kind |
//! | `frame` | after an injected poll(2) has begun, puts such a page in place of the return frame's, so that the injector blocks when it reads the frame. The first byte read ends that, and the victim answers the second one |
//! | `ending` | its main thread writes such a page while it ends. The first byte read lets it end, and the victim answers the second one |
//! | `calling` | makes one call after another. Each reads 2 GiB without checking for signals, then waits a second for such a page, uninterruptibly; with the same 1 MiB |
//! | `late` | computes for ever, with the same 1 MiB. In a cgroup without CPU time its thread doesn't stop in time |
//! | `exec` | executes such a file: nothing can attach to it before the file is read |
//! | `mappings` | has as many mappings as the kernel allows, of a file with a long name and of anonymous memory |
//! | `regions` | has nearly as many small mappings of anonymous memory as we consider |
//! | `churn` | splits and joins just as many mappings all the time |

use crate::checks::{Memory, report};
use crate::system::{WRITABLE, anonymous, map, map_at};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

/// How many mappings the kind `mappings` has: a little less than the default of `vm.max_map_count`.
const MAPPINGS: usize = 65_400;
/// How many mappings the kind `regions` has.
const REGIONS: usize = 16_000;
/// The size in pages of a file. We never answer reads of it.
const FILE_PAGES: usize = 64;
/// How much memory of its own the kind `locking` has.
const OWN_BYTES: usize = 8 << 20;
/// How much common memory the kinds `reading`, `calling` and `late` have.
const COMMON_BYTES: usize = 1 << 20;
/// How long the server lets the kind `calling` wait for a page.
const ANSWER_AFTER: Duration = Duration::from_secs(1);
/// Whether the kind `locking` should begin.
static LOCKING: AtomicBool = AtomicBool::new(false);
/// The address of its own memory.
static OWN: AtomicUsize = AtomicUsize::new(0);
/// The process that serves the file.
static SERVER: AtomicI32 = AtomicI32::new(0);
/// How long threads wait for the others to begin.
const HEAD_START: Duration = Duration::from_millis(200);
/// This address is below all other mappings, so that readers search it first.
const LOW: usize = 0x1000_0000;

pub fn main(kind: &str) {
    let memory = Memory::new();
    let mut mapped = None;
    let done = match kind {
        "code" => stalled_file().map(|file| {
            map_at(LOW, FILE_PAGES * 4096, libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE, file.as_raw_fd());
        }),
        // This begins only after we've printed `ready`, and we map nothing from then on.
        "locked" => stalled_file().map(|file| lock(&file, || std::thread::sleep(HEAD_START))),
        "locking" => stalled_file().map(|file| {
            let own = anonymous(OWN_BYTES).cast::<u64>();
            (0..OWN_BYTES / 8).for_each(|word| unsafe { own.add(word).write(word as u64) });
            OWN.store(own.addr(), Ordering::Relaxed);
            lock(&file, || {
                while !LOCKING.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        }),
        "reading" => stalled_file().map(|file| {
            map_at(LOW, FILE_PAGES * 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd());
        }),
        "frame" => stalled_file().map(|file| {
            let top = touch_stack();
            std::thread::spawn(move || replace_frame(&file, top));
            std::thread::sleep(HEAD_START);
        }),
        "ending" => stalled_file().map(|file| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            map_at(LOW, FILE_PAGES * 4096, access, libc::MAP_PRIVATE, file.as_raw_fd());
        }),
        "calling" => stalled_file().map(|file| {
            map_at(LOW, 4096, WRITABLE, libc::MAP_PRIVATE, file.as_raw_fd());
            mapped = Some(file);
        }),
        "late" => Ok(()),
        "exec" => stalled_file().map(|file| {
            std::thread::spawn(move || {
                let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
                unsafe { libc::execv(path.as_ptr(), [path.as_ptr(), std::ptr::null()].as_ptr()) }
            });
        }),
        "mappings" => mappings(),
        "regions" => {
            regions();
            Ok(())
        }
        "churn" => {
            std::thread::spawn(churn);
            Ok(())
        }
        other => Err(format!("there is no kind {other}")),
    };
    if user().is_some() {
        common_memory(std::env::args().nth(4).is_some());
        become_user();
    }
    drop_capabilities();
    if done.is_err() {
        return report(done);
    }
    if kind == "reading" {
        std::thread::spawn(read_stalled_file);
        std::thread::sleep(HEAD_START);
    }
    memory.announce();
    if let Some(file) = mapped {
        call_for_long(&file);
    }
    if kind == "late" {
        loop {
            std::hint::spin_loop();
        }
    }
    // We read without a buffer, since the C library might map memory for one.
    let read = || unsafe { libc::read(0, [0_u8].as_mut_ptr().cast(), 1) };
    if kind == "ending" {
        std::thread::spawn(move || {
            read();
            end_server();
            read();
            report(memory.check());
            unsafe { libc::_exit(0) }
        });
        // The kernel clears the thread's ID in memory when the thread ends.
        unsafe {
            libc::syscall(libc::SYS_set_tid_address, LOW);
            libc::syscall(libc::SYS_exit, 0);
        }
        return;
    }
    read();
    if kind == "locking" {
        LOCKING.store(true, Ordering::Relaxed);
        read();
        end_server();
        read();
    }
    report(memory.check().and_then(|()| check_own()));
    // We skip destructors, which would wait for threads that never end.
    let _ = std::io::stdout().flush();
    unsafe { libc::_exit(0) };
}

/// Locks the memory map for ever once `wait` has ended. One thread reads the file with the lock held, and another one
/// waits for the lock.
fn lock(file: &File, wait: fn()) {
    map_at(LOW, FILE_PAGES * 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd());
    std::thread::spawn(move || {
        wait();
        read_stalled_file();
    });
    std::thread::spawn(move || {
        wait();
        std::thread::sleep(HEAD_START);
        anonymous(4096) as usize
    });
}

/// Reads the mapped file with the memory map locked for reading, for ever.
fn read_stalled_file() {
    let _ = File::open("/proc/self/mem").unwrap().read_at(&mut [0], LOW as u64);
}

/// Reads from a file without pages, whose zeros the kernel copies without checking for signals. The last part goes to
/// the mapped page, which the server has to provide each time.
fn call_for_long(file: &File) -> ! {
    const PART: usize = 2 << 20;
    const PARTS: usize = 1023;
    let buffer = map(PART, WRITABLE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1);
    let page = LOW as *mut libc::c_void;
    let mut parts = vec![libc::iovec { iov_base: buffer.cast(), iov_len: PART }; PARTS];
    parts.push(libc::iovec { iov_base: page, iov_len: 4096 });
    let count = i32::try_from(parts.len()).unwrap();
    unsafe {
        let holes = libc::memfd_create(c"holes".as_ptr(), 0);
        assert_eq!(libc::ftruncate(holes, 4 << 30), 0);
        loop {
            libc::preadv(holes, parts.as_ptr(), count, 0);
            libc::madvise(page, 4096, libc::MADV_DONTNEED);
            libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED);
        }
    }
}

/// Fails all reads of the file, also those that wait.
fn end_server() {
    unsafe { libc::kill(SERVER.load(Ordering::Relaxed), libc::SIGKILL) };
}

fn check_own() -> Result<(), String> {
    let own = OWN.load(Ordering::Relaxed) as *const u64;
    let intact =
        own.is_null() || (0..OWN_BYTES / 8).all(|word| unsafe { own.add(word).read_volatile() } == word as u64);
    if intact { Ok(()) } else { Err("its own memory changed".into()) }
}

/// Uses more of the stack than this program does later. Returns an address in the page below.
#[inline(never)]
fn touch_stack() -> usize {
    let used = std::hint::black_box([1_u8; 16 << 10]);
    used.as_ptr() as usize - 4096
}

/// Waits until a page of the main thread's stack below `top` is written, and maps the file there. Once it has read a
/// byte, it ends the file's server and maps memory there again.
fn replace_frame(file: &File, top: usize) {
    const PAGES: usize = 32;
    let first = top / 4096 - PAGES;
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let entries = || {
        let mut entries = [[0_u8; 8]; PAGES];
        pagemap.read_exact_at(entries.as_flattened_mut(), first as u64 * 8).unwrap();
        entries
    };
    let before = entries();
    let written = loop {
        if let Some(page) = (0..PAGES).find(|&page| entries()[page] != before[page]) {
            break (first + page) * 4096;
        }
    };
    // Now the injected call has begun.
    std::thread::sleep(Duration::from_millis(50));
    let access = libc::PROT_READ | libc::PROT_WRITE;
    map_at(written, 4096, access, libc::MAP_PRIVATE | libc::MAP_FIXED, file.as_raw_fd());
    unsafe { libc::read(0, [0_u8].as_mut_ptr().cast(), 1) };
    end_server();
    map_at(written, 4096, access, libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS, -1);
}

/// Memory with the same contents in all victims.
fn common_memory(marked: bool) {
    let common = anonymous(COMMON_BYTES);
    for word in 0..COMMON_BYTES / 8 {
        unsafe { common.cast::<u64>().add(word).write((word as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)) };
    }
    if marked {
        assert_eq!(unsafe { libc::madvise(common.cast(), COMMON_BYTES, libc::MADV_MERGEABLE) }, 0);
    }
}

fn user() -> Option<u32> {
    Some(std::env::args().nth(3)?.parse().expect("a user"))
}

/// Becomes the user named on the command line, and stays dumpable.
fn become_user() {
    let Some(user) = user() else { return };
    unsafe {
        assert_eq!(libc::setresuid(user, user, user), 0);
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
    }
}

/// Lets others see that we're dumpable.
fn drop_capabilities() {
    const VERSION_3: u32 = 0x2008_0522;
    let (header, none) = ([VERSION_3, 0], [0_u32; 6]);
    unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
}

/// Maps alternately a file with a path of some 4,000 bytes, and anonymous memory with one page present.
fn mappings() -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    let top = std::env::temp_dir().join(format!("pagefold-long-{}", std::process::id()));
    let mut directory = top.clone();
    for _ in 0..15 {
        directory.push("long".repeat(62));
    }
    fs::create_dir_all(&directory).map_err(failed)?;
    let made = File::create_new(directory.join("name")).and_then(|file| {
        file.set_len(4096)?;
        File::open(directory.join("name"))
    });
    let _ = fs::remove_dir_all(&top);
    let file = made.map_err(failed)?;
    let pages = anonymous(MAPPINGS * 4096) as usize;
    for at in (0..MAPPINGS).map(|number| pages + number * 4096) {
        if at / 4096 % 2 == 0 {
            map_at(at, 4096, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_FIXED, file.as_raw_fd());
        } else {
            unsafe { (at as *mut u64).write(at as u64) };
        }
    }
    Ok(())
}

/// Makes mappings of one page each. Neighbours differ in access, so that the kernel doesn't join them.
fn regions() {
    let pages = anonymous(REGIONS * 4096) as usize;
    for at in (0..REGIONS).map(|number| pages + number * 4096) {
        unsafe {
            (at as *mut u64).write(at as u64);
            if at / 4096 % 2 == 0 {
                libc::mprotect(at as *mut libc::c_void, 4096, libc::PROT_READ);
            }
        }
    }
}

/// Splits and joins mappings like those of [`regions`], different ones each time.
fn churn() {
    let pages = anonymous(REGIONS * 4096) as usize;
    let protect = |at: usize, pages: usize, access| unsafe {
        libc::mprotect(at as *mut libc::c_void, pages * 4096, access);
    };
    for at in (0..REGIONS).map(|number| pages + number * 4096) {
        unsafe { (at as *mut u64).write(at as u64) };
    }
    for round in 0.. {
        for number in (0..REGIONS).filter(|number| (number / 2 + round) % 3 == 0) {
            protect(pages + number * 4096, 1, libc::PROT_READ);
        }
        std::thread::sleep(Duration::from_millis(50));
        protect(pages, REGIONS, libc::PROT_READ | libc::PROT_WRITE);
    }
}

/// A file on a FUSE file system that this process provides, in a mount namespace of its own. We never answer reads.
fn stalled_file() -> Result<File, String> {
    let server =
        File::options().read(true).write(true).open("/dev/fuse").map_err(|error| format!("/dev/fuse: {error}"))?;
    let directory = std::env::temp_dir().join(format!("pagefold-stalling-{}", std::process::id()));
    fs::create_dir(&directory).map_err(|error| error.to_string())?;
    let at = directory.clone();
    let opened = mount(&server, &directory).and_then(move |()| {
        spawn_server(&server)?;
        // The file has the C library's name, since readers search that library first.
        let opened = File::open(at.join("libc.so.6")).map_err(|error| error.to_string());
        unsafe { libc::umount2(path(&at).as_ptr(), libc::MNT_DETACH) };
        opened
    });
    let _ = fs::remove_dir(&directory);
    opened
}

fn path(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

fn mount(server: &File, directory: &Path) -> Result<(), String> {
    let failed = |what: &str| Err(format!("{what}: {}", std::io::Error::last_os_error()));
    unsafe {
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            return failed("unshare");
        }
        let private = libc::MS_REC | libc::MS_PRIVATE;
        libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null());
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = CString::new(options).unwrap();
        let (source, kind) = (c"pagefold-test".as_ptr(), c"fuse".as_ptr());
        if libc::mount(source, path(directory).as_ptr(), kind, 0, options.as_ptr().cast()) != 0 {
            return failed("mounting a FUSE file system");
        }
    }
    Ok(())
}

/// Starts the server, in a process of its own that ends when this one does. If it were a thread, the connection would
/// stay open as long as another thread of the process waits for an answer, and no signal ends that wait.
fn spawn_server(server: &File) -> Result<(), String> {
    match unsafe { libc::fork() } {
        0 => unsafe {
            // Has the same user, so that its parent may end it.
            become_user();
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::close(0);
            libc::close(1);
            serve(server);
            libc::_exit(0)
        },
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        server => {
            SERVER.store(server, Ordering::Relaxed);
            Ok(())
        }
    }
}

/// Answers the requests of the kernel (include/uapi/linux/fuse.h), except reads. The kind `calling` gets zeros, late.
fn serve(mut server: &File) {
    const LOOKUP: u32 = 1;
    const GETATTR: u32 = 3;
    const OPEN: u32 = 14;
    const READ: u32 = 15;
    const INIT: u32 = 26;
    const UNANSWERED: [u32; 4] = [2, 15, 36, 42]; // FORGET, READ, INTERRUPT, BATCH_FORGET
    const SUCCEED: [u32; 2] = [18, 25]; // RELEASE, FLUSH
    let answers_reads = std::env::args().nth(2).is_some_and(|kind| kind == "calling");
    let mut request = vec![0; 1 << 20];
    while let Ok(length @ 40..) = server.read(&mut request) {
        let number = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let (opcode, node) = (number(4), number(16));
        let attributes = |node: u32| {
            let (mode, size) = if node == 1 { (0o40755, 0) } else { (0o100_755, FILE_PAGES as u64 * 4096) };
            let times = [0_u64; 3];
            let words = [u64::from(node), size, 8].into_iter().chain(times).flat_map(u64::to_le_bytes);
            let halves = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0_u32];
            words.chain(halves.into_iter().flat_map(u32::to_le_bytes)).collect::<Vec<u8>>()
        };
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let hour = 3600;
        let (error, body) = match opcode {
            INIT => {
                // The kernel waits uninterruptibly if it reads ahead, a page here, and asynchronously.
                let [ahead, asynchronous] = if answers_reads { [4096, 1] } else { [0, 0] };
                let mut body = [7_u32, 31, ahead, asynchronous, 0, 4096, 1].map(u32::to_le_bytes).concat();
                body.resize(64, 0);
                (0, body)
            }
            LOOKUP => (0, [words(&[2, 0, hour, hour, 0]), attributes(2)].concat()),
            GETATTR => (0, [words(&[hour, 0]), attributes(node)].concat()),
            OPEN => (0, words(&[1, 0])),
            READ if answers_reads => {
                std::thread::sleep(ANSWER_AFTER);
                // The size follows the handle and the offset.
                (0, vec![0; number(56) as usize])
            }
            _ if UNANSWERED.contains(&opcode) => continue,
            _ if SUCCEED.contains(&opcode) => (0, Vec::new()),
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let unique = &request[8..16];
        let total = u32::try_from(16 + body.len()).unwrap();
        let reply = [&total.to_le_bytes(), &error.to_le_bytes(), unique, &body].concat();
        debug_assert!(length >= 40);
        let _ = server.write(&reply);
    }
}
