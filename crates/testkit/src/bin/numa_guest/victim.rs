//! The processes whose memory is merged.
//!
//! A victim runs on one node's processors, allocates its memory on that node, and fills it with the same contents as the
//! others. From then on it checks its memory, a part at a time, between the commands that it reads line by line.

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::time::Duration;

const WORDS: usize = 512;
/// Pages checked at a time, and the pause between two parts.
const PART: usize = 64;
const PAUSE: Duration = Duration::from_millis(100);
/// More than the kernel collects before it moves pages between its lists (PAGEVEC_SIZE, 31 in 6.12).
const BATCH: usize = 128;

/// `victim NODE NICE PAGES` prints `ready ADDRESS`, then answers each command with a line.
pub fn main(args: &[String]) {
    let number = |at: usize| args[at].parse::<i64>().expect("a number");
    let (node, nice) = (usize::try_from(number(0)).expect("a node"), i32::try_from(number(1)).expect("a nice value"));
    let pages = usize::try_from(number(2)).expect("a number of pages");
    // SAFETY: no memory is passed.
    assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) }, 0, "nice {nice}");
    keep_to(node);
    // For the allocation only: afterwards the pages may be on any node.
    set_policy(libc::MPOL_BIND, 1 << node);
    let memory = Memory::map(pages, 0);
    memory.fill();
    let batch = Memory::map(BATCH, std::process::id() as usize * 1_000_000);
    batch.fill();
    set_policy(libc::MPOL_DEFAULT, 0);
    say(&format!("ready {}", memory.start.addr()));

    let mut at = 0;
    loop {
        if !input_within(PAUSE) {
            let part = at..(at + PART).min(pages);
            at = if part.end == pages { 0 } else { part.end };
            memory.check(part);
            continue;
        }
        let mut line = String::new();
        // The end of the input.
        if std::io::stdin().lock().read_line(&mut line).expect("a command") == 0 {
            return;
        }
        match line.trim() {
            "check" => memory.check(0..pages),
            // The first reference is recorded, the second activates (mark_page_accessed in mm/swap.c).
            "activate" => [&memory, &batch].into_iter().for_each(|memory| {
                memory.reference();
                memory.reference();
            }),
            "mark" => memory.mark(),
            other => panic!("{other}?"),
        }
        say("done");
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("standard output");
}

fn input_within(time: Duration) -> bool {
    // No command is buffered: each is answered before the next one is sent.
    let mut input = libc::pollfd { fd: std::io::stdin().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which lives through the call.
    let found = unsafe { libc::poll(&raw mut input, 1, i32::try_from(time.as_millis()).expect("a short time")) };
    found > 0
}

/// Runs on this node's processors only.
fn keep_to(node: usize) {
    let cpus = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).expect("a node");
    // SAFETY: all zeros is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for range in cpus.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse().expect("a processor")..=last.parse::<usize>().expect("a processor") {
            // SAFETY: the set is a valid one.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
    }
    // SAFETY: the kernel reads as many bytes as the set has.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) }, 0, "node {node}");
}

pub fn set_policy(mode: i32, nodes: u64) {
    let mask = if nodes == 0 { std::ptr::null() } else { &raw const nodes };
    // SAFETY: the kernel reads 64 bits of the mask, or none.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, 64) };
    assert_eq!(done, 0, "set_mempolicy: {}", std::io::Error::last_os_error());
}

/// Pages that differ in their first words, which are their numbers.
struct Memory {
    start: *mut u64,
    pages: usize,
    /// The number of the first page.
    first: usize,
    /// The content of every page, except for its first word.
    rest: [u64; WORDS],
}

impl Memory {
    fn map(pages: usize, first: usize) -> Self {
        // Multiples of an odd number (the golden ratio in 64 bits): no two words are the same.
        let rest = std::array::from_fn(|word| (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { start: map(pages).cast(), pages, first, rest }
    }

    fn at(&self, page: usize) -> *mut u64 {
        assert!(page < self.pages);
        // SAFETY: within the mapping.
        unsafe { self.start.add(page * WORDS) }
    }

    fn content(&self, page: usize) -> [u64; WORDS] {
        let mut content = self.rest;
        content[0] = (self.first + page) as u64;
        content
    }

    fn fill(&self) {
        for page in 0..self.pages {
            // SAFETY: a page of the mapping.
            unsafe { self.at(page).cast::<[u64; WORDS]>().write_volatile(self.content(page)) };
        }
    }

    /// Ends the program if a byte is wrong.
    fn check(&self, pages: std::ops::Range<usize>) {
        for page in pages {
            let content = self.content(page);
            // Not by Rust's comparison: other processes write to this memory.
            // SAFETY: a page of the mapping, and an array as long.
            let differs = unsafe { libc::memcmp(self.at(page).cast(), content.as_ptr().cast(), size_of_val(&content)) };
            if differs != 0 {
                say(&format!("bad: page {page} has changed"));
                std::process::exit(1);
            }
        }
    }

    /// References the pages, as the kernel does for a read of another process's memory.
    fn reference(&self) {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let mut copy = [0_u64; WORDS];
        for page in 0..self.pages {
            let local = libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: size_of_val(&copy) };
            let remote = libc::iovec { iov_base: self.at(page).cast(), iov_len: size_of_val(&copy) };
            // SAFETY: the kernel writes to `copy` and reads a page of the mapping.
            let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
            assert_eq!(read, 4096, "process_vm_readv: {}", std::io::Error::last_os_error());
        }
    }

    fn mark(&self) {
        // SAFETY: all of the mapping; marking keeps its contents.
        let done = unsafe { libc::madvise(self.start.cast(), self.pages * WORDS * 8, libc::MADV_MERGEABLE) };
        assert_eq!(done, 0, "madvise: {}", std::io::Error::last_os_error());
    }
}

fn map(pages: usize) -> *mut libc::c_void {
    let bytes = pages * WORDS * 8;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    start
}

/// `filler NODE LEFT` takes and locks the node's memory until LEFT MiB are free, prints `ready`, and takes what becomes
/// free there until its input ends.
pub fn filler(args: &[String]) {
    let number = |at: usize| args[at].parse::<u64>().expect("a number");
    let (node, left_kib) = (number(0), number(1) << 10);
    let fill = || {
        set_policy(libc::MPOL_BIND, 1 << node);
        while free_kib(node) > left_kib {
            let (step, length) = (map(64), 64 * WORDS * 8);
            // SAFETY: a mapping of that length.
            assert_eq!(unsafe { libc::mlock(step, length) }, 0, "mlock: {}", std::io::Error::last_os_error());
        }
        set_policy(libc::MPOL_DEFAULT, 0);
    };
    fill();
    say("ready");
    while !input_within(PAUSE) {
        fill();
    }
}

fn free_kib(node: u64) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).expect("a node");
    let value = text.lines().find_map(|line| line.split_once("MemFree:")).expect("MemFree").1;
    value.trim().trim_end_matches(" kB").parse().expect("a number")
}
