//! How much memory the parsers take for files in `/proc` that targets have blown up: 100 MB of each, far more than the
//! kernel lets a process cause. We don't count the text itself. The bound is 1 MiB, except for parsers that collect
//! names or lines: their bound is the memory that they take today, so that it doesn't grow. We also let each of their
//! allocations fail.
#![allow(unsafe_code, reason = "an allocator that counts and fails")]

use pagefold_procmem::cgroup::parse_cgroups;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{parse_maps, parse_smaps};
use pagefold_procmem::os::pressure::{parse_meminfo, parse_pressure};
use pagefold_procmem::process::Stat;
use pagefold_procmem::status::Status;
use std::alloc::{GlobalAlloc, Layout, System};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MIB: usize = 1 << 20;
const BYTES: usize = 100_000_000;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
/// Allocations until one fails.
static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);

// SAFETY: we pass all requests on to the system's allocator unchanged, or fail.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        MOST.fetch_max(held, Relaxed);
        if LEFT.fetch_sub(1, Relaxed) == 0 {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps this function's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps this function's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most memory that a call holds at once, apart from what was held before.
fn most_held(call: impl FnOnce()) -> usize {
    let before = HELD.load(Relaxed);
    MOST.store(before, Relaxed);
    call();
    MOST.load(Relaxed) - before
}

fn repeated(text: &str) -> Vec<u8> {
    text.as_bytes().iter().copied().cycle().take(BYTES / text.len() * text.len()).collect()
}

/// The text with one very long part.
fn long(before: &str, byte: u8, after: &str) -> Vec<u8> {
    [before.as_bytes(), &vec![byte; BYTES], after.as_bytes()].concat()
}

/// Mappings with names of this length, as many as make up the text.
fn mappings(name: usize, counters: &str) -> Vec<u8> {
    let mut text = Vec::with_capacity(BYTES);
    let name = "n".repeat(name);
    for at in (1_u64..).take_while(|at| at * 2 < 1 << 35) {
        let line = format!("{:x}000-{:x}000 rw-p 00000000 00:00 0 /{name}\n{counters}", 2 * at, 2 * at + 1);
        if text.len() + line.len() > BYTES {
            break;
        }
        text.extend(line.bytes());
    }
    text
}

type Parse = fn(&[u8]);

const COUNTERS: &str = "Rss: 4 kB\nAnonymous: 4 kB\nVmFlags: rd wr mr mw me ac\n";

fn maps(text: &[u8]) {
    drop(parse_maps(text));
}

fn smaps(text: &[u8]) {
    drop(parse_smaps(text));
}

fn stat(text: &[u8]) {
    drop(Stat::parse(text));
}

fn status(text: &[u8]) {
    drop(Status::parse(text));
}

fn cgroup(text: &[u8]) {
    drop(parse_cgroups(text));
}

#[test]
fn parsers_take_little_memory_for_any_text() {
    const NAMES: usize = 1_400;
    let meminfo: Parse = |text| _ = parse_meminfo(text);
    let pressure: Parse = |text| _ = parse_pressure(text);
    let ksm_stat: Parse = |text| _ = KsmStat::parse(text);
    // The bound in MiB.
    let cases: [(&str, Parse, Vec<u8>, usize); 16] = [
        ("maps, as many mappings as are permitted", maps, mappings(NAMES, ""), 128),
        ("maps, short lines", maps, mappings(1, ""), 512),
        ("maps, one line", maps, long("1000-2000 rw-p 0 00:00 0 /", b'n', "\n"), 128),
        ("smaps, as many mappings as are permitted", smaps, mappings(NAMES, COUNTERS), 160),
        ("smaps, short lines", smaps, mappings(1, COUNTERS), 384),
        ("smaps, flags", smaps, long("1000-2000 rw-p 0 00:00 0 \nVmFlags:", b' ', "rd\n"), 1),
        ("stat, parentheses", stat, long("1 (", b')', ") S 1 1"), 128),
        ("stat, numbers", stat, long("1 (a) S", b' ', "1"), 1),
        ("status, fields", status, repeated("Uid:\t1\t2\t3\t4\n"), 1),
        ("status, one field", status, long("Name:\t", b'n', "\nUid:\t1\t2\t3\t4\n"), 1),
        ("cgroup, many groups", cgroup, repeated("0:cpu,memory:/group\n"), 768),
        ("cgroup, one group", cgroup, long("0::/", b'g', "\n"), 128),
        ("meminfo", meminfo, repeated("MemTotal: 1 kB\nMemAvailable: 1 kB\n"), 1),
        ("pressure", pressure, repeated("some avg10=1.00 avg60=1.00 avg300=1.00 total=1\n"), 1),
        ("ksm_stat", ksm_stat, repeated("ksm_zero_pages 1\nksm_merge_any: no\n"), 1),
        ("ksm_stat, one line", ksm_stat, long("ksm_zero_pages ", b'1', "\n"), 1),
    ];
    let mut broken = Vec::new();
    for (name, parse, text, most_mib) in &cases {
        let held = most_held(|| parse(text));
        println!("{name}: {:.1} MiB", held as f64 / MIB as f64);
        if held > most_mib * MIB {
            broken.push(format!("{name}: {} MiB, not {most_mib}", held.div_ceil(MIB)));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Makes each allocation of each parser fail once, in a process of its own: we start this test program again, with the
/// case and the allocation in its environment. It must end by abort, as if it had been killed, and not crash, stall or
/// go on with half of the text.
#[test]
fn an_allocation_that_fails_ends_the_process() {
    const CASE: &str = "PAGEFOLD_FAILING_ALLOCATION";
    let cases: [(&str, Parse, String); 5] = [
        ("maps", maps, "1000-2000 rw-p 00000000 00:00 0 /name\n3000-4000 rw-p 00000000 00:00 0 [heap]\n".repeat(9)),
        ("smaps", smaps, format!("1000-2000 rw-p 00000000 00:00 0 /name\n{COUNTERS}").repeat(9)),
        ("stat", stat, "1 (a name) S 1 1 1 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 1 0 5 1 1 1".to_owned()),
        ("status", status, "Name:\ta name\nUid:\t1\t2\t3\t4\nThreads:\t1\n".to_owned()),
        ("cgroup", cgroup, "1:cpu,memory:/group\n0::/another\n".to_owned()),
    ];
    if let Ok(text) = std::env::var(CASE) {
        let (case, at) = text.split_once(' ').unwrap();
        let (_, parse, text) = &cases[case.parse::<usize>().unwrap()];
        let at = at.parse().unwrap();
        LEFT.store(at, Relaxed);
        parse(text.as_bytes());
        LEFT.store(usize::MAX, Relaxed);
        return;
    }
    for (number, (name, ..)) in cases.iter().enumerate() {
        let failed = (0..).take_while(|at| {
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", "an_allocation_that_fails_ends_the_process"]).env(CASE, format!("{number} {at}"));
            let ended = again.output().unwrap().status;
            assert!(ended.success() || ended.signal() == Some(6), "{name}, allocation {at}: {ended}");
            !ended.success()
        });
        println!("{name}: {} allocations", failed.count());
    }
}
