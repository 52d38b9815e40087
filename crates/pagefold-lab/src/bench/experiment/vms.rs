//! Virtual machines that are started one after the other (UKSM): what is saved when the last one is up.

use super::{Experiment, ExperimentSetting, PolicySequence};
use crate::bench::daemon;
use crate::bench::policy::{Policy, SUBJECT};
use crate::bench::report::{Answers, ExperimentReport, Limit, MachineDescription, PolicyRun};
use crate::bench::sampler::Sampler;
use crate::programs::{GuestWork, QEMU, WorkingGuest, WorkingGuests, scratch};
use anyhow::{Context, ensure};
use pagefold_core::units::Bytes;
use pagefold_linux::ksm::Knob;
use pagefold_linux::os::fields::kib;
use pagefold_linux::proc::process::Process;
use std::time::{Duration, Instant};

pub const EXPERIMENT: Experiment = Experiment {
    name: "vms",
    claim: "UKSM: of virtual machines of 512 MB started one after the other, three times as much is saved as by KSM with its defaults when \
            the last one is up, for no more CPU time",
    run,
};

/// The kernel's default, and what is commonly configured: pages each 20 ms.
const KSM_PAGES: [u64; 2] = [100, 1000];
/// Of each guest, at most, with what unmerging all of them at once takes.
const NEEDED_MIB: u64 = 600;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    guests: usize,
    memory_mib: u64,
    /// The time between two starts.
    every: Duration,
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (guests, memory_mib, every) = if setting.quick { (2, 192, 2) } else { (10, 512, 8) };
    report.parameters([("guests", guests), ("guest_mib", memory_mib), ("seconds_between", every)]);
    if !setting.quick {
        let (needed, free) = (guests * NEEDED_MIB, MachineDescription::available_mib());
        ensure!(free >= needed, "needs {needed} MiB of memory, but only {free} MiB are available");
    }
    let sizes = Sizes { guests: usize::try_from(guests)?, memory_mib, every: Duration::from_secs(every) };
    let scratch = scratch()?;
    // A path of its own: pagefold finds the machines by it.
    let mut image = WorkingGuests::make(scratch.path(), sizes.memory_mib, GuestWork::Web)?.with_own_emulator()?;
    let peers = KSM_PAGES.map(|pages| (Policy::KsmPaced { pages, seconds: 0 }.to_string(), Some(pages)));
    let mut expected = None;
    let mut sequence = PolicySequence::take(setting)?;
    for (name, pages) in peers.iter().cloned().chain([(SUBJECT.to_owned(), None)]) {
        if !setting.wants(&name) || (setting.quick && pages == Some(KSM_PAGES[0])) {
            continue;
        }
        eprintln!("{}: {name}", report.experiment);
        // QEMU marks the guests' memory by default, and mem-merge=off is their owner's no, which pagefold is told to override.
        image.set_merge(pages.is_some());
        match start_all(&mut sequence, &name, pages, &image, &sizes, &mut expected) {
            Ok((run, held)) => {
                report.figure(format!("{name}: seconds until all are up"), run.seconds);
                report.figure(format!("{name}: MiB of the machines when all are up"), held);
                report.runs.push(run);
            }
            Err(error) => {
                // It may have failed at any point.
                sequence.control.unmerge()?;
                sequence.failed(report, name, &error)?;
            }
        }
    }
    drop(sequence);
    report.compare(SUBJECT);
    report.bar_on_answers();
    let saved = |run: &PolicyRun| (run.policy.clone(), Bytes(run.saved_bytes).mib());
    let rows = report.runs.iter().map(saved).collect();
    let subtitle = format!("MiB; {guests} machines of {memory_mib} MiB, one each {every} s");
    report.picture("vms", "saved when the last machine is up", subtitle, rows);
    if !setting.quick {
        let default = &peers[0].0;
        let (saved, cpu) = (report.ratio(&format!("saved_vs_{default}")), report.ratio(&format!("cpu_vs_{default}")));
        report.bar("saved when all are up relative to KSM's default", Limit::AtLeast(3.0), saved);
        report.bar("CPU time until then relative to KSM's default", Limit::AtMost(1.0), cpu);
    }
    Ok(())
}

/// Starts the machines under KSM with a number of pages each 20 ms, or under pagefold. Returns what was measured until all were up,
/// and their anonymous memory then, MiB.
fn start_all(
    sequence: &mut PolicySequence<'_>,
    name: &str,
    ksm_pages: Option<u64>,
    image: &WorkingGuests,
    sizes: &Sizes,
    expected: &mut Option<String>,
) -> anyhow::Result<(PolicyRun, f64)> {
    let (setting, interrupt) = (sequence.setting, sequence.setting.interrupt);
    sequence.control.kernel_defaults()?;
    let began = Instant::now();
    // Before the policy, since pagefold does not start with nothing in scope.
    let mut guests = vec![image.start(0)?];
    let sampler = Sampler::start()?;
    let daemon = if let Some(pages) = ksm_pages {
        sequence.control.set(Knob::PagesToScan, pages)?;
        sequence.control.set(Knob::Run, 1)?;
        None
    } else {
        wait_until_executed(&guests[0], image)?;
        let options = ["--exe".to_owned(), image.emulator().display().to_string()];
        let options: Vec<String> = options.into_iter().chain(["--override-opt-out", QEMU].map(str::to_owned)).collect();
        let daemon = daemon::run(setting.program, &[], &options)?;
        sampler.watch(daemon.meter()?);
        Some(daemon)
    };
    for (number, due) in (1..sizes.guests).zip(1..) {
        interrupt.sleep((sizes.every * due).saturating_sub(began.elapsed()))?;
        guests.push(image.start(number)?);
    }
    for guest in &mut guests {
        interrupt.check()?;
        guest.ready()?;
    }
    let points = sampler.finish()?;
    let mut held = 0.0;
    for guest in &guests {
        let process = Process::open(guest.pid())?;
        let anonymous = kib(&process.read_file("smaps_rollup")?, "Anonymous").map_err(anyhow::Error::msg);
        held += anonymous.context("smaps_rollup")? as f64 / 1024.0;
    }
    let mut agree = || -> anyhow::Result<bool> {
        let sums = guests.iter_mut().map(WorkingGuest::sum).collect::<anyhow::Result<Vec<_>>>()?;
        let right = expected.get_or_insert_with(|| sums[0].clone());
        Ok(sums.iter().all(|sum| sum == right))
    };
    let during = agree()?;
    let summary = daemon.map(|daemon| daemon.end(interrupt)).transpose()?.map(|ran| ran.summary);
    sequence.control.unmerge()?;
    let mut run = PolicyRun { policy: name.to_owned(), summary, ..PolicyRun::default() };
    // By its own clock, and no longer than until all are up.
    run.cpu_pagefold_seconds = points.last().map_or(0.0, |last| last.daemon_seconds);
    run.set_samples(&points);
    run.answers_correct = Answers { before: true, during, after: agree()? };
    Ok((run, held))
}

/// Waits until a machine's process runs the emulator, and no longer the program that starts it.
fn wait_until_executed(guest: &WorkingGuest, image: &WorkingGuests) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(10);
    let (exe, began) = (format!("/proc/{}/exe", guest.pid()), Instant::now());
    while std::fs::read_link(&exe).with_context(|| exe.clone())? != image.emulator() {
        ensure!(began.elapsed() < LIMIT, "the emulator does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
