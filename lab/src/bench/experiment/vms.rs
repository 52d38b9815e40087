//! Virtual machines that start one after another (UKSM): how much we save by the time the last one is up, and how much
//! the kernel swaps out if there's less memory than they need.

use super::{Experiment, ExperimentSetting, PolicySequence, need_memory, quotient};
use crate::bench::frames::{Held, open_all};
use crate::bench::metric;
use crate::bench::policy::{KSM, KsmPaced, Marks, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit};
use crate::programs::{GuestWork, MemoryLimit, QEMU, WorkingGuest, WorkingGuests, ZramSwap, scratch, swapped_out};
use anyhow::{Context, ensure};
use pagefold_engine::units::{Bytes, Pages};
use pagefold_report::policy::is_ours;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "vms",
    claim: "UKSM: of virtual machines of 512 MB started one after the other, three times as much is saved as by KSM with its defaults when \
            the last one is up, for no more CPU time",
    run,
};

pub const OVERCOMMITTED: Experiment = Experiment {
    name: "vms-overcommitted",
    claim: "UKSM: where virtual machines need more memory than there is, nothing is swapped out, for half of KSM's CPU time, and all are up \
            in 0.76 of the time (here ten below a limit, with swap space on zram)",
    run: run_overcommitted,
};

/// The kernel's default, and a common setting: pages each 20 ms.
const KSM_PAGES: [u64; 2] = [100, 1000];
/// Per guest, at most, including room to unmerge all of them at once.
const NEEDED_MIB: u64 = 600;

sizes! {
    guests: usize = 10, quick 2, as "guests";
    memory_mib: u64 = 512, quick 192, as "guest_mib";
    /// Seconds between two starts.
    every: u64 = 8, quick 2, as "seconds_between";
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let peers = KSM_PAGES.map(|pages| KsmPaced { pages, seconds: 0 });
    let Sizes { guests, memory_mib, every } = run_all(setting, report, &[&peers[0], &peers[1], &ours()], None)?;
    let mut rows = Vec::new();
    for run in &report.runs {
        rows.push((run.policy.clone(), Bytes(run.saved_bytes).mib()));
    }
    let subtitle = format!("MiB; {guests} machines of {memory_mib} MiB, one each {every} s");
    report.picture("saved when the last machine is up", subtitle, rows);
    if !setting.quick {
        let default = peers[0].name();
        report.bar(metric::VMS_SAVED, Limit::AtLeast(3.0), report.ratio(metric::SAVED_VS, &default));
        report.bar(metric::VMS_CPU, Limit::AtMost(1.0), report.ratio(metric::CPU_VS, &default));
    }
    Ok(())
}

fn run_overcommitted(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    ensure!(ZramSwap::is_possible(), "needs a kernel with zram");
    let limit_mib = if setting.quick { 360 } else { 1_400 };
    report.parameters([("limit_mib", limit_mib)]);
    let ksm = KsmPaced { pages: KSM_PAGES[1], seconds: 0 };
    let policies: [&dyn Policy; 3] = [&NoMerging { seconds: 0 }, &ksm, &ours()];
    let Sizes { guests, .. } = run_all(setting, report, &policies, Some(limit_mib))?;
    let mut rows = Vec::new();
    for run in &report.runs {
        if let Some(swapped) = report.figure_of(metric::VMS_SWAPPED, [&run.policy]) {
            rows.push((run.policy.clone(), swapped));
        }
    }
    report.picture("swapped out until all are up", format!("MiB; {guests} machines below {limit_mib} MiB"), rows);
    if !setting.quick {
        let most = report.figure_of(metric::VMS_SWAPPED, [SUBJECT]);
        report.bar(metric::VMS_SWAPPED, Limit::AtMost(0.0), most);
        let seconds = report.figure_of(metric::VMS_SECONDS, [SUBJECT]);
        let of_ksm = quotient(seconds, report.figure_of(metric::VMS_SECONDS, [KSM]));
        report.bar(metric::VMS_SECONDS_OF_KSM, Limit::AtMost(0.76), of_ksm);
        report.bar(metric::VMS_CPU_OF_KSM, Limit::AtMost(0.5), report.ratio(metric::CPU_VS, KSM));
    }
    Ok(())
}

/// Starts the machines under each policy. If their memory has a limit in total, the kernel swaps out the rest.
fn run_all(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    policies: &[&dyn Policy; 3],
    limit_mib: Option<u64>,
) -> anyhow::Result<Sizes> {
    let sizes = Sizes::of(setting, report);
    let guests = sizes.guests as u64;
    if !setting.quick {
        need_memory(guests * NEEDED_MIB)?;
    }
    let _swap = limit_mib.map(|_| ZramSwap::make((guests * sizes.memory_mib) << 20)).transpose()?;
    let scratch = scratch()?;
    // A path of its own, so pagefold can find the machines by it.
    let mut image = WorkingGuests::make(scratch.path(), sizes.memory_mib, GuestWork::Web)?.with_own_emulator()?;
    let mut expected = None;
    let mut sequence = PolicySequence::take(setting)?;
    for &by in if setting.quick { &policies[1..] } else { policies } {
        // The name leaves out the options about the guests.
        let name = if is_ours(&by.name()) { SUBJECT.to_owned() } else { by.name() };
        // QEMU marks the guests' memory by default. `mem-merge=off` opts them out, and we tell pagefold to override
        // that.
        image.set_merge(by.marks() == Marks::Everything);
        let up = sequence
            .conduct(report, &name, &name, |stage| start_all(stage, by, &image, sizes, limit_mib, &mut expected))?;
        let Some(Up { seconds, held_mib, swapped }) = up else { continue };
        report.figure(metric::VMS_SECONDS.of([&name]), seconds);
        report.figure(format!("{name}: MiB of the machines when all are up"), held_mib);
        if limit_mib.is_some() {
            report.figure(metric::VMS_SWAPPED.of([&name]), swapped.bytes().mib());
        }
    }
    report.compare(SUBJECT);
    Ok(sizes)
}

/// pagefold, overriding the guests' opt-out (`mem-merge=off`).
fn ours() -> Pagefold {
    Pagefold::new(0).with(&["--override-opt-out", QEMU])
}

/// The results once all machines are up.
struct Up {
    seconds: f64,
    /// The anonymous memory of the machines, MiB.
    held_mib: f64,
    /// Pages that the whole machine has swapped out meanwhile.
    swapped: Pages,
}

/// Starts the machines under a policy. Returns the results until all are up.
fn start_all(
    stage: &mut Stage<'_>,
    by: &dyn Policy,
    image: &WorkingGuests,
    sizes: Sizes,
    limit_mib: Option<u64>,
    expected: &mut Option<String>,
) -> anyhow::Result<Up> {
    let interrupt = stage.setting.interrupt;
    let limit = limit_mib.map(|mib| MemoryLimit::make(mib << 20)).transpose()?;
    let swapped_before = swapped_out()?;
    let began = Instant::now();
    let mut due = Duration::ZERO;
    let mut guests = Vec::new();
    for number in 0..sizes.guests {
        interrupt.sleep(due.saturating_sub(began.elapsed()))?;
        due += Duration::from_secs(sizes.every);
        let guest = image.start(number)?;
        if let Some(limit) = &limit {
            limit.add(guest.pid())?;
        }
        guests.push(guest);
        // pagefold doesn't start with nothing in scope.
        if number == 0 {
            wait_until_executed(&guests[0], image)?;
            stage.merge(by, &["--exe", &image.emulator().to_string_lossy()])?;
        }
    }
    for guest in &mut guests {
        interrupt.check()?;
        guest.ready()?;
    }
    stage.stop_sampling()?;
    let swapped = swapped_out()?.saturating_sub(swapped_before);
    if let Some(limit) = &limit {
        ensure!(limit.kills()? == 0, "the kernel has killed a machine: it could not swap out enough of them in time");
    }
    let held = Held::by(&open_all(guests.iter().map(WorkingGuest::pid))?)?;
    let during = agree(&mut guests, expected)?;
    if let Some(limit) = &limit {
        // Unmerging needs room for the copies.
        limit.lift()?;
    }
    // The sampling stopped once all machines were up.
    stage.end()?;
    stage.run.answers_correct = Answers { before: true, during, after: agree(&mut guests, expected)? };
    Ok(Up { seconds: stage.run.seconds, held_mib: held.by_processes, swapped })
}

/// Whether all machines have the same sum as the first one that we asked.
fn agree(guests: &mut [WorkingGuest], expected: &mut Option<String>) -> anyhow::Result<bool> {
    let mut agree = true;
    for guest in guests {
        let sum = guest.sum()?;
        agree &= *expected.get_or_insert_with(|| sum.clone()) == sum;
    }
    Ok(agree)
}

/// Waits until a machine's process runs the emulator instead of the program that starts it.
fn wait_until_executed(guest: &WorkingGuest, image: &WorkingGuests) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(10);
    let exe = format!("/proc/{}/exe", guest.pid());
    let began = Instant::now();
    while std::fs::read_link(&exe).with_context(|| exe.clone())? != image.emulator() {
        ensure!(began.elapsed() < LIMIT, "the emulator does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
