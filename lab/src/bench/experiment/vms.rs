//! Virtual machines that start one after another (UKSM): how much we save by the time the last one is up, and how much
//! the kernel swaps out if there's less memory than they need.

use super::{Experiment, ExperimentSetting, PolicySequence, need_memory};
use crate::bench::metric;
use crate::bench::policy::{KSM, KsmPaced, Marks, NoMerging, Pagefold, Policy, SUBJECT, Stage};
use crate::bench::report::{Answers, ExperimentReport, Limit, PolicyRun};
use crate::programs::{GuestWork, MemoryLimit, QEMU, WorkingGuest, WorkingGuests, ZramSwap, scratch, swapped_out};
use anyhow::{Context, ensure};
use pagefold_engine::units::{Bytes, Pages};
use pagefold_procmem::os::fields::kib;
use pagefold_procmem::process::Process;
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

#[derive(Clone, Copy, Debug)]
struct Sizes {
    guests: usize,
    memory_mib: u64,
    /// The time between two starts.
    every: Duration,
    /// The machines' limit together. The kernel swaps out the rest.
    limit_mib: Option<u64>,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (guests, memory_mib, every) = if setting.quick { (2, 192, 2) } else { (10, 512, 8) };
    report.parameters([("guests", guests), ("guest_mib", memory_mib), ("seconds_between", every)]);
    if !setting.quick {
        need_memory(guests * NEEDED_MIB)?;
    }
    let sizes =
        Sizes { guests: usize::try_from(guests)?, memory_mib, every: Duration::from_secs(every), limit_mib: None };
    let peers = KSM_PAGES.map(|pages| KsmPaced { pages, seconds: 0 });
    let policies: [&dyn Policy; 3] = [&peers[0], &peers[1], &ours()];
    run_all(setting, report, if setting.quick { &policies[1..] } else { &policies }, &sizes)?;
    report.compare(SUBJECT);
    let saved = |run: &PolicyRun| (run.policy.clone(), Bytes(run.saved_bytes).mib());
    let rows = report.runs.iter().map(saved).collect();
    let subtitle = format!("MiB; {guests} machines of {memory_mib} MiB, one each {every} s");
    report.picture("saved when the last machine is up", subtitle, rows);
    if !setting.quick {
        let default = peers[0].name();
        let (saved, cpu) = (report.ratio(metric::SAVED_VS, &default), report.ratio(metric::CPU_VS, &default));
        report.bar(metric::VMS_SAVED, Limit::AtLeast(3.0), saved);
        report.bar(metric::VMS_CPU, Limit::AtMost(1.0), cpu);
    }
    Ok(())
}

fn run_overcommitted(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (guests, memory_mib, every, limit_mib) = if setting.quick { (2, 192, 2, 360) } else { (10, 512, 8, 1_400) };
    report.parameters([
        ("guests", guests),
        ("guest_mib", memory_mib),
        ("seconds_between", every),
        ("limit_mib", limit_mib),
    ]);
    if !setting.quick {
        need_memory(guests * NEEDED_MIB)?;
    }
    ensure!(ZramSwap::is_possible(), "needs a kernel with zram");
    let swap = ZramSwap::make((guests * memory_mib) << 20)?;
    let every = Duration::from_secs(every);
    let sizes = Sizes { guests: usize::try_from(guests)?, memory_mib, every, limit_mib: Some(limit_mib) };
    let policies: [&dyn Policy; 3] =
        [&NoMerging { seconds: 0 }, &KsmPaced { pages: KSM_PAGES[1], seconds: 0 }, &ours()];
    run_all(setting, report, if setting.quick { &policies[1..] } else { &policies }, &sizes)?;
    drop(swap);
    report.compare(SUBJECT);
    let seconds = |policy: &str| report.figure_of(metric::VMS_SECONDS, [policy]);
    let seconds_of_ksm = seconds(SUBJECT).zip(seconds(KSM)).map(|(ours, theirs)| ours / theirs);
    let swapped = |policy: &str| report.figure_of(metric::VMS_SWAPPED, [policy]);
    let rows = report.runs.iter().filter_map(|run| Some((run.policy.clone(), swapped(&run.policy)?))).collect();
    let most = swapped(SUBJECT);
    report.picture("swapped out until all are up", format!("MiB; {guests} machines below {limit_mib} MiB"), rows);
    if !setting.quick {
        report.bar(metric::VMS_SWAPPED, Limit::AtMost(0.0), most);
        report.bar(metric::VMS_SECONDS_OF_KSM, Limit::AtMost(0.76), seconds_of_ksm);
        report.bar(metric::VMS_CPU_OF_KSM, Limit::AtMost(0.5), report.ratio(metric::CPU_VS, KSM));
    }
    Ok(())
}

/// Starts the machines under each policy.
fn run_all(
    setting: &ExperimentSetting<'_>,
    report: &mut ExperimentReport,
    policies: &[&dyn Policy],
    sizes: &Sizes,
) -> anyhow::Result<()> {
    let scratch = scratch()?;
    // A path of its own, so pagefold can find the machines by it.
    let mut image = WorkingGuests::make(scratch.path(), sizes.memory_mib, GuestWork::Web)?.with_own_emulator()?;
    let mut expected = None;
    let mut sequence = PolicySequence::take(setting)?;
    for &policy in policies {
        let name = name_of(policy);
        // QEMU marks the guests' memory by default. `mem-merge=off` opts them out, and we tell pagefold to override
        // that.
        image.set_merge(policy.marks() == Marks::Everything);
        let up =
            sequence.conduct(report, &name, &name, |stage| start_all(stage, policy, &image, sizes, &mut expected))?;
        let Some(Up { seconds, held_mib, swapped }) = up else { continue };
        report.figure(metric::VMS_SECONDS.of([&name]), seconds);
        report.figure(format!("{name}: MiB of the machines when all are up"), held_mib);
        if sizes.limit_mib.is_some() {
            report.figure(metric::VMS_SWAPPED.of([&name]), swapped.bytes().mib());
        }
    }
    Ok(())
}

/// pagefold, overriding the guests' opt-out (`mem-merge=off`).
fn ours() -> Pagefold {
    Pagefold::new(0).with(&["--override-opt-out", QEMU])
}

/// The name leaves out the options about the guests.
fn name_of(by: &dyn Policy) -> String {
    if is_ours(&by.name()) { SUBJECT.to_owned() } else { by.name() }
}

/// The results once all machines are up.
struct Up {
    seconds: f64,
    /// Their anonymous memory, MiB.
    held_mib: f64,
    /// Pages that the whole machine has swapped out meanwhile.
    swapped: Pages,
}

/// Starts the machines under a policy. Returns the results until all are up.
fn start_all(
    stage: &mut Stage<'_>,
    policy: &dyn Policy,
    image: &WorkingGuests,
    sizes: &Sizes,
    expected: &mut Option<String>,
) -> anyhow::Result<Up> {
    let interrupt = stage.setting.interrupt;
    let limit = sizes.limit_mib.map(|mib| MemoryLimit::make(mib << 20)).transpose()?;
    let start = |number| {
        let guest = image.start(number)?;
        limit.iter().try_for_each(|limit| limit.add(guest.pid()))?;
        anyhow::Ok(guest)
    };
    let swapped_before = swapped_out()?;
    let began = Instant::now();
    // Before the policy, since pagefold doesn't start with nothing in scope.
    let mut guests = vec![start(0)?];
    wait_until_executed(&guests[0], image)?;
    stage.merge(policy, &["--exe", &image.emulator().to_string_lossy()])?;
    for (number, due) in (1..sizes.guests).zip(1..) {
        interrupt.sleep((sizes.every * due).saturating_sub(began.elapsed()))?;
        guests.push(start(number)?);
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
    let mut held_mib = 0.0;
    for guest in &guests {
        let process = Process::open(guest.pid())?;
        let anonymous = kib(&process.read_file("smaps_rollup")?, "Anonymous").map_err(anyhow::Error::msg);
        held_mib += anonymous.context("smaps_rollup")? as f64 / 1024.0;
    }
    let mut agree = || -> anyhow::Result<bool> {
        let sums = guests.iter_mut().map(WorkingGuest::sum).collect::<anyhow::Result<Vec<_>>>()?;
        let right = expected.get_or_insert_with(|| sums[0].clone());
        Ok(sums.iter().all(|sum| sum == right))
    };
    let during = agree()?;
    if let Some(limit) = &limit {
        // Unmerging needs room for the copies.
        limit.lift()?;
    }
    // The sampling stopped once all machines were up.
    stage.end()?;
    stage.run.answers_correct = Answers { before: true, during, after: agree()? };
    Ok(Up { seconds: stage.run.seconds, held_mib, swapped })
}

/// Waits until a machine's process runs the emulator instead of the program that starts it.
fn wait_until_executed(guest: &WorkingGuest, image: &WorkingGuests) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(10);
    let (exe, began) = (format!("/proc/{}/exe", guest.pid()), Instant::now());
    while std::fs::read_link(&exe).with_context(|| exe.clone())? != image.emulator() {
        ensure!(began.elapsed() < LIMIT, "the emulator does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
