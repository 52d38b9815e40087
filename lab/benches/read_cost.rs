//! Measures the cost of checking the state of pages before reading them: compares `PageReader` with a bare
//! process_vm_readv loop over the same runs. Run `cargo bench --bench read_cost`.

use pagefold_engine::random::Random;
use pagefold_engine::units::{PAGE_SIZE, Vpn};
use pagefold_procmem::memory::{PageReader, ReadHow};
use pagefold_procmem::process::Process;
use pagefold_testkit::Holder;
use pagefold_testkit::holder::Change;
use std::hint::black_box;
use std::time::Instant;

const PAGES: u64 = 128 << 10;
const READ_PAGES: u64 = 16 << 10;

fn main() {
    let mut holder = Holder::start(PAGES);
    holder.change(Change::Write { first: 0, pages: PAGES, content: 1, step: 1 });
    let target = Process::open(holder.pid()).unwrap();
    let first = Vpn(holder.first);
    let mut reader = PageReader::new();
    let mut random = Random::new(1);
    for length in [1u64, 4, 8, 16, 64, 512] {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..31 {
            let runs: Vec<(Vpn, u32)> = (0..READ_PAGES / length)
                .map(|_| (first + random.below(PAGES / length) * length, u32::try_from(length).unwrap()))
                .collect();
            times[0].push(ns_per_page(|| bare(target.pid(), &runs)));
            times[1].push(ns_per_page(|| read(&mut reader, &target, &runs, false)));
            times[2].push(ns_per_page(|| read(&mut reader, &target, &runs, true)));
        }
        let ratios = [1, 2].map(|which| {
            median(times[which].iter().zip(&times[0]).map(|(ours, bare)| ours / bare).collect::<Vec<_>>())
        });
        let [bare, plain, huge] = times.map(median);
        println!(
            "runs of {length:3}: bare {bare:5.0} ns a page, reader {plain:5.0} (x {:.2}), with huge pages checked {huge:5.0} (x {:.2})",
            ratios[0], ratios[1]
        );
    }
    assert!(holder.is_intact());
}

fn ns_per_page(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64 / READ_PAGES as f64
}

fn read(reader: &mut PageReader, target: &Process, runs: &[(Vpn, u32)], huge: bool) {
    let mut read = 0;
    let how = ReadHow { huge, ..ReadHow::default() };
    reader.read_runs(target, runs, how, |view| read += u64::from(black_box(view.bytes).is_some())).unwrap();
    assert_eq!(read, READ_PAGES);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Reads 256 pages per call into one buffer, as the reader does.
fn bare(pid: i32, runs: &[(Vpn, u32)]) {
    thread_local!(static BUFFER: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; 512 * PAGE_SIZE]));
    BUFFER.with_borrow_mut(|buffer| {
        let per_call = (256 / runs[0].1.min(256)) as usize;
        for runs in runs.chunks(per_call) {
            let remote: Vec<libc::iovec> = runs
                .iter()
                .map(|&(first, pages)| libc::iovec {
                    iov_base: first.address() as *mut _,
                    iov_len: pages as usize * PAGE_SIZE,
                })
                .collect();
            let wanted: usize = remote.iter().map(|piece| piece.iov_len).sum();
            let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: wanted };
            // SAFETY: at most 512 pages are wanted, which the buffer has; the remote addresses are the kernel's to
            // check.
            let read = unsafe {
                libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0)
            };
            assert_eq!(usize::try_from(read).unwrap(), wanted);
            black_box(&mut *buffer);
        }
    });
}
