//! Looking without touching: what `pagefold scan` costs beside a bare loop that reads the same pages, and how good its
//! samples are. Nothing is merged, so KSM is not taken.

use super::{Experiment, Setting, mib};
use crate::daemon::{self, Ran};
use crate::marking::eligible;
use crate::record::{Limit, Report};
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::Context;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use pagefold_core::units::{PAGE_SIZE, Pages};
use pagefold_linux::cpu::own_cpu_ns;
use pagefold_linux::memory::PageReader;
use pagefold_linux::process::Process;
use std::io::IoSliceMut;

/// See the module's opening.
pub const EXPERIMENT: Experiment = Experiment {
    name: "scan",
    claim: "ours: a whole scan costs at most twice a bare loop of process_vm_readv per page, and a sampled one is within \
            the error it states 95 times in 100",
    run,
};

/// Samples taken, each with a seed of its own.
const SAMPLES: u32 = 20;
/// The loop and the whole scan take turns so many times; the fastest of each counts.
const TURNS: u32 = 3;
/// Pages that the bare loop reads by one call.
const CALL_PAGES: usize = 256;

fn run(setting: &Setting<'_>, report: &mut Report) -> anyhow::Result<()> {
    let unit_mib = if setting.quick { 16 } else { 256 };
    report.parameters.extend([("unit_mib", unit_mib), ("samples", u64::from(SAMPLES))]);
    let pages = mib(unit_mib).0;
    let twins = Segment::Shared { pages, seed: 4 };
    let tenants = [
        Tenant::start(setting.player, &TenantSpec::new([twins, Segment::Random { pages: 2 * pages, seed: 5 }]))?,
        Tenant::start(setting.player, &TenantSpec::new([Segment::Zero { pages: pages / 2 }, twins]))?,
        Tenant::start(
            setting.player,
            &TenantSpec::new([Segment::Pairs { pages, seed: 6 }, Segment::Same { pages, seed: 7 }]),
        )?,
    ];
    let pids = tenants.each_ref().map(Tenant::pid);
    let processes = pids.iter().map(|&pid| Process::open(pid)).collect::<Result<Vec<_>, _>>()?;

    let (mut bare_ns, mut scan_ns, mut exact) = (f64::MAX, f64::MAX, 0.0);
    for _ in 0..TURNS {
        let (pages, cpu_ns) = bare_loop(&processes)?;
        bare_ns = bare_ns.min(cpu_ns as f64 / pages.0 as f64);
        let ran = daemon::scan(setting.program, &pids, &["--exact"], setting.interrupt)?;
        scan_ns = scan_ns.min(ran.cpu_seconds * 1e9 / pages.0 as f64);
        exact = total(&ran, "/totals/savable_bytes")?;
    }
    let (mut within, mut worst, mut stated, mut cpu) = (0_u32, 0.0_f64, 0.0_f64, 0.0);
    let mut fraction: f64 = 0.0;
    for seed in 1..=SAMPLES {
        setting.interrupt.check()?;
        let ran = daemon::scan(setting.program, &pids, &["--seed", &seed.to_string()], setting.interrupt)?;
        let error = total(&ran, "/error_bytes")?;
        let off = (total(&ran, "/totals/savable_bytes")? - exact).abs();
        within += u32::from(off <= error);
        worst = worst.max(off);
        stated = stated.max(error);
        fraction = fraction.max(total(&ran, "/sampled_fraction")?);
        cpu += ran.cpu_seconds / f64::from(SAMPLES);
    }
    let figures = [
        ("bare_loop_ns_per_page", bare_ns),
        ("exact_scan_ns_per_page", scan_ns),
        ("exact_savable_bytes", exact),
        ("sampled_scan_cpu_seconds", cpu),
        ("sampled_fraction_largest", fraction),
        ("stated_error_bytes_largest", stated),
        ("actual_error_bytes_largest", worst),
    ];
    report.figures.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    if !setting.quick {
        report.bar("CPU per page of a whole scan, of the bare loop's", Limit::AtMost(2.0), Some(scan_ns / bare_ns));
    }
    // Of 20 samples that are right 95 times in 100, fewer than 17 come in one case of 60.
    report.bar(
        format!("samples of {SAMPLES} within their stated error"),
        Limit::AtLeast(17.0),
        Some(f64::from(within)),
    );
    Ok(())
}

fn total(ran: &Ran, pointer: &str) -> anyhow::Result<f64> {
    let number = ran.summary.pointer(pointer).and_then(serde_json::Value::as_f64);
    number.with_context(|| format!("pagefold scan --json has no number {pointer}"))
}

/// Reads every resident page and looks at none. Returns the pages and the CPU time.
fn bare_loop(processes: &[Process]) -> anyhow::Result<(Pages, u64)> {
    let mut reader = PageReader::new();
    let mut buffer = vec![0; CALL_PAGES * PAGE_SIZE];
    let (mut pages, mut cpu_ns) = (0, 0);
    for process in processes {
        let mut runs = Vec::new();
        for detail in eligible(process)? {
            reader.resident_runs(process, detail.vma.first(), detail.vma.pages(), &mut runs)?;
        }
        let pid = Pid::from_raw(process.pid());
        let before_ns = own_cpu_ns();
        for (first, length) in runs {
            let (mut at, end) = (first.0, first.0 + u64::from(length));
            while at < end {
                let count = usize::try_from(end - at)?.min(CALL_PAGES);
                let length = count * PAGE_SIZE;
                let remote = RemoteIoVec { base: usize::try_from(at)? * PAGE_SIZE, len: length };
                process_vm_readv(pid, &mut [IoSliceMut::new(&mut buffer[..length])], &[remote])?;
                at += count as u64;
                pages += count as u64;
            }
        }
        cpu_ns += own_cpu_ns() - before_ns;
    }
    Ok((Pages(pages), cpu_ns))
}
