//! The cost of `pagefold scan` relative to a bare loop that reads the same pages, and the accuracy of its estimates. We
//! merge nothing, so we leave KSM alone.

use super::{Experiment, ExperimentSetting, mib};
use crate::bench::daemon::{self, Completed};
use crate::bench::frames::open_all;
use crate::bench::marks::eligible_mappings;
use crate::bench::measures::median;
use crate::bench::report::{ExperimentReport, Limit};
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::Context;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use pagefold_engine::random::mix;
use pagefold_engine::sampling::census::choose::Chooser;
use pagefold_engine::units::PAGE_SIZE;
use pagefold_procmem::memory::PageReader;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::process::Process;
use std::io::IoSliceMut;

pub const EXPERIMENT: Experiment = Experiment {
    name: "scan",
    claim: "ours: sampling costs at most 1.5 times as much per page as a bare loop of process_vm_readv over the same pages, and \
            estimates are within their stated error 95 times in 100",
    run,
};

/// Number of samples, each with its own seed.
const SAMPLES: u32 = 20;
/// The bare loop reads this many pages per call.
const CALL_PAGES: usize = 256;
/// Ranges per call (UIO_MAXIOV).
const CALL_PIECES: usize = 1024;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let unit_mib = if setting.quick { 16 } else { 256 };
    report.parameters([("unit_mib", unit_mib), ("samples", u64::from(SAMPLES))]);
    let pages = mib(unit_mib).0;
    let shared = Segment::Shared { pages, seed: 4 };
    let mut tenants = Vec::new();
    for segments in [
        [shared, Segment::Random { pages: 2 * pages, seed: 5 }],
        [Segment::Zero { pages: pages / 2 }, shared],
        [Segment::Pairs { pages, seed: 6 }, Segment::Same { pages, seed: 7 }],
    ] {
        tenants.push(Tenant::start(setting.player, &TenantSpec::new(segments))?);
    }
    let pids: Vec<i32> = tenants.iter().map(Tenant::pid).collect();
    let processes = open_all(pids.iter().copied())?;

    let whole = daemon::scan(setting.program, &pids, &["--exact"], setting.interrupt)?;
    let exact = total(&whole, "/totals/savable_bytes")?;
    let mut within = 0_u32;
    let [mut worst, mut stated, mut fraction, mut cpu] = [0.0_f64; 4];
    let mut bare_ns = Vec::new();
    let mut ascending_ns = Vec::new();
    let mut sampling_ns = Vec::new();
    for seed in 1..=SAMPLES {
        setting.interrupt.check()?;
        let ran = daemon::scan(setting.program, &pids, &["--seed", &seed.to_string()], setting.interrupt)?;
        let error = total(&ran, "/error_bytes")?;
        let off = (total(&ran, "/totals/savable_bytes")? - exact).abs();
        within += u32::from(off <= error);
        worst = worst.max(off);
        stated = stated.max(error);
        let sampled = total(&ran, "/sampled_fraction")?;
        fraction = fraction.max(sampled);
        cpu += ran.cpu_seconds / f64::from(SAMPLES);
        sampling_ns.push(total(&ran, "/cost/reading_ns_per_page")?);
        bare_ns.push(bare_loop(&processes, u64::from(seed), sampled, Order::Random)?);
        ascending_ns.push(bare_loop(&processes, u64::from(seed), sampled, Order::Ascending)?);
    }
    let bare_ns = median(bare_ns);
    let sampling_ns = median(sampling_ns);
    for (name, value) in [
        ("bare_loop_ns_per_page", bare_ns),
        ("bare_loop_ascending_ns_per_page", median(ascending_ns)),
        ("sampling_ns_per_page", sampling_ns),
        ("exact_scan_cpu_seconds", whole.cpu_seconds),
        ("exact_savable_bytes", exact),
        ("sampled_scan_cpu_seconds", cpu),
        ("sampled_fraction_largest", fraction),
        ("stated_error_bytes_largest", stated),
        ("actual_error_bytes_largest", worst),
    ] {
        report.figure(name, value);
    }
    if !setting.quick {
        let relative = Some(sampling_ns / bare_ns);
        report.bar("CPU time per sampled page relative to the bare loop", Limit::AtMost(1.5), relative);
    }
    let name = format!("samples within their stated error, of {SAMPLES}");
    report.bar(name, Limit::AtLeast(19.0), Some(f64::from(within)));
    Ok(())
}

fn total(ran: &Completed, pointer: &str) -> anyhow::Result<f64> {
    let number = ran.summary.pointer(pointer).and_then(serde_json::Value::as_f64);
    number.with_context(|| format!("pagefold scan --json has no number {pointer}"))
}

/// The order of the bare loop's page runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Like a sampler without a plan.
    Random,
    /// Like `pagefold scan`, so neighbouring page tables are still cached.
    Ascending,
}

/// Reads the same sample of resident pages as a scan, without examining them. Returns nanoseconds per page.
fn bare_loop(processes: &[Process], seed: u64, fraction: f64, order: Order) -> anyhow::Result<f64> {
    let mut reader = PageReader::new();
    let chooser = Chooser::new(seed);
    let mut buffer = vec![0; CALL_PAGES * PAGE_SIZE];
    let mut pages = 0;
    let mut cpu_ns = 0;
    for process in processes {
        let mut resident = Vec::new();
        for detail in eligible_mappings(process)? {
            reader.resident_runs(process, detail.vma.first(), detail.vma.pages(), &mut resident)?;
        }
        let mut runs = Vec::new();
        for (number, (first, length)) in (0..).zip(resident) {
            chooser.cut(number, first, length, 0.0, fraction, |first, length, _| runs.push((first, length)));
        }
        if order == Order::Random {
            runs.sort_unstable_by_key(|&(first, _)| mix(first.0 ^ seed));
        }
        let pid = Pid::from_raw(process.pid());
        let before_ns = own_cpu_ns();
        let mut rest = runs.into_iter().peekable();
        while rest.peek().is_some() {
            let mut bytes = 0;
            let mut remote = Vec::new();
            while let Some(&(first, length)) = rest.peek() {
                let len = (length as usize).min(CALL_PAGES) * PAGE_SIZE;
                if bytes + len > buffer.len() || remote.len() == CALL_PIECES {
                    break;
                }
                remote.push(RemoteIoVec { base: usize::try_from(first.address()).unwrap_or(usize::MAX), len });
                bytes += len;
                rest.next();
            }
            process_vm_readv(pid, &mut [IoSliceMut::new(&mut buffer[..bytes])], &remote)?;
            pages += bytes / PAGE_SIZE;
        }
        cpu_ns += own_cpu_ns() - before_ns;
    }
    Ok(cpu_ns as f64 / pages.max(1) as f64)
}
