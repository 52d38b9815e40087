//! Reading must leave merged and fork-shared pages as they are: on the real kernel, with real KSM.
//!
//! ksmd is stopped while we read pages, so KSM's counters (pages_sharing) wouldn't show a page that reading has
//! unmerged. The page tables show it at once: kpageflags, smaps' `KSM` and the exclusive bit of pagemap.

use pagefold_engine::host::PageState;
use pagefold_engine::units::{PAGE_SIZE, Pages, Vpn};
use pagefold_procmem::maps::parse_smaps;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::process::Process;
use pagefold_testkit::holder::{Change, fill};
use pagefold_testkit::{Holder, KsmAtRest, vmstat, wait_until, write_knob};

/// The holder's pages in order: every content twice, merged; shared with a child by fork; private.
const MERGED: u64 = 2048;
const FORKED: u64 = 1024;
const PRIVATE: u64 = 1024;
const PAGES: u64 = MERGED + FORKED + PRIVATE;

/// The content of a page of the holder.
fn content(page: u64) -> u64 {
    1 + if page < MERGED { page % (MERGED / 2) } else { page }
}

/// Counts of a process's merged and exclusive pages, from three sources.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    merged: u64,
    merged_kib: u64,
    exclusive: u64,
}

fn merged(reader: &mut PageReader, process: &Process, first: Vpn) -> u64 {
    let run = (first, u32::try_from(MERGED).unwrap());
    let mut merged = 0;
    reader.merged_frames(process, &[run], false, |_, _| merged += 1).unwrap();
    merged
}

fn held(reader: &mut PageReader, process: &Process, first: Vpn) -> Held {
    let mut exclusive = 0;
    reader.walk(process, first, Pages(PAGES), |_, entry| exclusive += u64::from(entry.exclusive())).unwrap();
    let details = parse_smaps(&process.read_file("smaps").unwrap()).unwrap();
    Held {
        merged: merged(reader, process, first),
        merged_kib: details.iter().filter_map(|detail| detail.ksm_kib).sum(),
        exclusive,
    }
}

#[test]
fn reading_leaves_merged_and_shared_pages_alone() {
    let Some(_ksm) = KsmAtRest::take() else { return };
    let mut reader = PageReader::new();
    assert!(reader.sees_frames(), "/proc/kpageflags can be read by root");
    let mut holder = Holder::start(PAGES);
    let half = MERGED / 2;
    for first in [0, half] {
        holder.change(Change::Write { first, pages: half, content: content(0), step: 1 });
    }
    holder.change(Change::Write { first: MERGED, pages: FORKED, content: content(MERGED), step: 1 });
    holder.mark(0, MERGED);
    let child = Process::open(holder.fork()).unwrap();
    let private = MERGED + FORKED;
    holder.change(Change::Write { first: private, pages: PRIVATE, content: content(private), step: 1 });
    let (parent, first) = (Process::open(holder.pid()).unwrap(), Vpn(holder.first));

    for (knob, value) in [("pages_to_scan", "100000"), ("sleep_millisecs", "1"), ("run", "1")] {
        write_knob(knob, value);
    }
    wait_until("ksmd merges", || [&parent, &child].iter().all(|process| merged(&mut reader, process, first) == MERGED));
    write_knob("run", "0");

    let both = |reader: &mut PageReader| [&parent, &child].map(|process| held(reader, process, first));
    let (before, breaks) = (both(&mut reader), vmstat("cow_ksm"));
    assert_eq!(before[0].exclusive, PRIVATE);
    let runs: Vec<(Vpn, u32)> = (0..PAGES / 16).map(|run| (first + run * 16, 16)).collect();
    let mut expected_bytes = [0; PAGE_SIZE];
    for wanted in [Contents::Private, Contents::Merged, Contents::All] {
        for process in [&parent, &child] {
            let mut next = 0;
            let how = ReadHow { huge: true, contents: wanted, ..ReadHow::default() };
            reader
                .read_runs(process, &runs, how, |view| {
                    let page = view.page.0 - first.0;
                    assert_eq!(page, next, "every page once, in order");
                    next += 1;
                    let expected = match page {
                        _ if page < MERGED => PageState::Merged,
                        _ if page < private => PageState::Shared,
                        // Written by the parent after the fork: the child has nothing there.
                        _ if process.pid() == child.pid() => PageState::Absent,
                        _ => PageState::Private,
                    };
                    assert_eq!(view.state, expected, "page {page}");
                    let has_bytes = match expected {
                        PageState::Private => true,
                        PageState::Merged => wanted != Contents::Private,
                        PageState::Shared => wanted == Contents::All,
                        PageState::Absent | PageState::ZeroMapped => false,
                    };
                    assert_eq!(view.bytes.is_some(), has_bytes);
                    fill(&mut expected_bytes, content(page));
                    assert!(view.bytes.is_none_or(|bytes| bytes[..] == expected_bytes[..]), "page {page}");
                })
                .unwrap();
            assert_eq!(next, PAGES);
        }
    }
    let mut found = Vec::new();
    reader.private_pages(&parent, &runs, |page| found.push(page.0 - first.0)).unwrap();
    assert!(found.into_iter().eq(private..PAGES), "only pages of its own");
    assert_eq!(both(&mut reader), before, "reading has changed how pages are held");
    assert_eq!(vmstat("cow_ksm"), breaks, "reading has unmerged pages");

    // The control: a plain process_vm_readv unshares pages, so the assertions above can fail.
    plain_read(parent.pid(), first, 256);
    plain_read(parent.pid(), first + MERGED, 256);
    let [after, _] = both(&mut reader);
    assert_eq!(after.merged, MERGED - 256);
    assert_eq!(after.exclusive, PRIVATE + 512);
    if before[0].merged_kib > 0 {
        assert_eq!(after.merged_kib + 1024, before[0].merged_kib);
    }
    assert!(holder.is_intact(), "the holder's memory has changed");
}

fn plain_read(pid: i32, first: Vpn, pages: usize) {
    let mut bytes = vec![0u8; pages * PAGE_SIZE];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: first.address() as *mut _, iov_len: bytes.len() };
    // SAFETY: the local vector covers `bytes`, borrowed through the call; the remote one is the kernel's to check.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(usize::try_from(read).unwrap(), bytes.len());
}
