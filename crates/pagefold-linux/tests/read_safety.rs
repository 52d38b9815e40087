//! Reading must leave merged and fork-shared pages as they are: on the real kernel, with real KSM.
//!
//! ksmd is stopped while we read, and its own counters (pages_sharing) are then brought up to date by nobody. What tells
//! the truth at once are the page tables: kpageflags, smaps' `KSM` and pagemap's exclusive bit.

mod twins;

use pagefold_core::host::PageState;
use pagefold_core::units::{PAGE_SIZE, Pages, Vpn};
use pagefold_linux::proc::maps::parse_smaps;
use pagefold_linux::proc::memory::{Contents, PageReader, ReadHow};
use pagefold_linux::proc::process::Process;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use twins::Twins;

const TWINS: usize = 2048;
const FORKED: usize = 1024;
const PRIVATE: usize = 1024;
const KSM: &str = "/sys/kernel/mm/ksm";

/// KSM for this test alone, put back as it was when dropped, whatever happens.
struct Ksm {
    before: Vec<(&'static str, String)>,
    _lock: File,
}

impl Ksm {
    fn take() -> Option<Self> {
        let lock = File::create("/run/lock/pagefold-ksm.lock").ok()?;
        // SAFETY: the descriptor is open.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
            return None;
        }
        let knobs = ["pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages"];
        let before = knobs
            .into_iter()
            .filter_map(|knob| Some((knob, fs::read_to_string(format!("{KSM}/{knob}")).ok()?.trim().to_owned())))
            .collect();
        if fs::read_to_string(format!("{KSM}/run")).ok()?.trim() != "0" || fs::write(format!("{KSM}/run"), "0").is_err()
        {
            return None;
        }
        Some(Self { before, _lock: lock })
    }

    fn set(knob: &str, value: &str) {
        fs::write(format!("{KSM}/{knob}"), value).unwrap_or_else(|error| panic!("{knob}: {error}"));
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        let _ = fs::write(format!("{KSM}/run"), "2");
        for (knob, value) in &self.before {
            let _ = fs::write(format!("{KSM}/{knob}"), value);
        }
        let _ = fs::write(format!("{KSM}/run"), "0");
    }
}

/// How a process holds its pages, from three sources.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    merged: Pages,
    merged_kib: u64,
    exclusive: u64,
}

fn held(reader: &mut PageReader, process: &Process, twins: &Twins) -> Held {
    let [at, forked, private] = twins.regions;
    let mut exclusive = 0;
    for (first, pages) in [(at, TWINS), (forked, FORKED), (private, PRIVATE)] {
        reader.walk(process, first, Pages(pages as u64), |_, entry| exclusive += u64::from(entry.exclusive())).unwrap();
    }
    let details = parse_smaps(&process.read_file("smaps").unwrap()).unwrap();
    Held {
        merged: reader.census(process, at, Pages(TWINS as u64), false).unwrap().merged,
        merged_kib: details.iter().filter_map(|detail| detail.ksm_kib).sum(),
        exclusive,
    }
}

fn cow_ksm() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("cow_ksm ")).unwrap();
    line.parse().unwrap()
}

fn contents(region: u64, index: usize) -> u64 {
    let index = if region == 1 { index / 2 } else { index } as u64;
    (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ region << 56
}

#[test]
fn reading_leaves_merged_and_shared_pages_alone() {
    let mut reader = PageReader::new();
    if !reader.sees_frames() {
        println!("SKIP: /proc/kpageflags needs root");
        return;
    }
    let Some(_ksm) = Ksm::take() else {
        println!("SKIP: KSM is missing, not ours to set, or running for somebody else");
        return;
    };
    let twins = Twins::start([TWINS, FORKED, PRIVATE]);
    Ksm::set("use_zero_pages", "0");
    Ksm::set("pages_to_scan", "100000");
    Ksm::set("sleep_millisecs", "1");
    Ksm::set("run", "1");
    let before = Instant::now();
    let all = Pages(TWINS as u64);
    while [&twins.parent, &twins.child]
        .iter()
        .any(|process| reader.census(process, twins.regions[0], all, false).unwrap().merged != all)
    {
        assert!(before.elapsed() < Duration::from_secs(30), "ksmd does not merge");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ksm::set("run", "0");
    println!("merged after {:?}", before.elapsed());

    let saved = |reader: &mut PageReader| [&twins.parent, &twins.child].map(|process| held(reader, process, &twins));
    let (at_first, cows) = (saved(&mut reader), cow_ksm());
    assert_eq!(at_first[0].exclusive, PRIVATE as u64);
    let [at, forked, private] = twins.regions;
    let runs: Vec<(Vpn, u32)> = [(at, TWINS), (forked, FORKED), (private, PRIVATE)]
        .iter()
        .flat_map(|&(first, pages)| (0..pages as u64 / 16).map(move |run| (first + run * 16, 16)))
        .collect();
    for wanted in [Contents::Private, Contents::Merged, Contents::All] {
        for process in [&twins.parent, &twins.child] {
            let mut place = 0;
            reader
                .read_runs(process, &runs, ReadHow { huge: true, contents: wanted, ..ReadHow::default() }, |view| {
                    let index = |first: Vpn| usize::try_from(view.page.0 - first.0).unwrap();
                    let (region, index, expected) = match place {
                        place if place < TWINS => (1, index(at), PageState::Merged),
                        place if place < TWINS + FORKED => (2, index(forked), PageState::Shared),
                        // Written by the parent after the fork: the child has nothing there.
                        _ if process.pid() == twins.child.pid() => (3, index(private), PageState::Absent),
                        _ => (3, index(private), PageState::Private),
                    };
                    assert_eq!(view.state, expected, "page {index} of region {region}");
                    let has_bytes = match expected {
                        PageState::Private => true,
                        PageState::Merged => wanted != Contents::Private,
                        PageState::Shared => wanted == Contents::All,
                        PageState::Absent | PageState::ZeroMapped => false,
                    };
                    assert_eq!(view.bytes.is_some(), has_bytes);
                    let mut words = view.bytes.into_iter().flat_map(|bytes| bytes.chunks_exact(8));
                    assert!(words.all(|word| word == contents(region, index).to_ne_bytes()));
                    place += 1;
                })
                .unwrap();
            assert_eq!(place, TWINS + FORKED + PRIVATE);
        }
    }
    assert_eq!(saved(&mut reader), at_first, "reading has changed how pages are held");
    assert_eq!(cow_ksm(), cows, "reading has broken merges");

    // The control: a plain process_vm_readv does what the reader avoids, so the assertions above can fail.
    plain_read(twins.parent.pid(), at, 256);
    plain_read(twins.parent.pid(), forked, 256);
    let [after, _] = saved(&mut reader);
    assert_eq!(after.merged, all - Pages(256));
    assert_eq!(after.exclusive, PRIVATE as u64 + 512);
    if at_first[0].merged_kib > 0 {
        assert_eq!(after.merged_kib + 1024, at_first[0].merged_kib);
    }
    assert!(twins.finish(), "the program's memory has changed");
}

fn plain_read(pid: i32, first: Vpn, pages: usize) {
    let mut bytes = vec![0u8; pages * PAGE_SIZE];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: first.address() as *mut _, iov_len: bytes.len() };
    // SAFETY: the local vector covers `bytes`, borrowed through the call; the remote one is the kernel's to check.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(usize::try_from(read).unwrap(), bytes.len());
}
