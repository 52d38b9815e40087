//! Marking and unmarking: the one thing that is done to programs.

use super::{Acting, Event, LiveHost};
use crate::inject::unmerge::{UnfoldError, in_steps, step_of, steps};
use crate::inject::{Call, Limits, Report};
use crate::os::fault;
use crate::proc::maps::VmaDetail;
use crate::proc::process::ReadError;
use crate::scope::exclude::vma_exclusion;
use pagefold_core::host::{Change, ChangeResult, Marking, Outcome, Span, StopSize, Stops, Why};
use pagefold_core::units::{Bytes, PAGE_SIZE, Pages};
use std::collections::BTreeMap;

/// What was done to a program's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The process.
    pub pid: i32,
    /// When it started, clock ticks after boot.
    pub start_time_ticks: u64,
    /// Its name.
    pub name: String,
    /// Its trust domain.
    pub domain: String,
    /// Marked, or unmarked.
    pub mark: bool,
    /// The first address.
    pub first: u64,
    /// How much of the address space was meant.
    pub bytes: Bytes,
    /// Why.
    pub why: Why,
    /// What came of it.
    pub outcome: Marking,
}

/// The calls that change the marks of one process.
#[derive(Debug, Default)]
struct Work {
    calls: Vec<Call>,
    /// For each call, the change that it is part of, and its pages.
    parts: Vec<(usize, Pages)>,
    /// Parts of changes that are so already: marked by the owner, or by us when a retry follows half a batch.
    done: Vec<(usize, Pages)>,
}

impl Work {
    /// What a change takes in the mappings as they are now. `whole` mappings may have grown since they were judged: part
    /// of one would split it.
    /// To unmark it takes a call for each `unmark_step`; without one it is to be marked.
    fn add(&mut self, (at, span, whole): (usize, Span, bool), details: &[VmaDetail], unmark_step: Option<Bytes>) {
        let (low, high) = (span.first, span.first + span.pages.0);
        for detail in details.iter().filter(|detail| vma_exclusion(detail).is_none()) {
            let (first, end) = (detail.vma.first(), detail.vma.first() + detail.vma.pages().0);
            let (mut from, mut to) = (first.max(low), end.min(high));
            if from >= to {
                continue;
            }
            if whole {
                (from, to) = (first, end);
            }
            let (start, end, pages) = (from.address(), to.address(), Pages(to.0 - from.0));
            if detail.flags.has(*b"mg") == unmark_step.is_none() {
                self.done.push((at, pages));
                continue;
            }
            let Some(unmark_step) = unmark_step else {
                self.calls.push(Call::madvise(start, end - start, libc::MADV_MERGEABLE));
                self.parts.push((at, pages));
                continue;
            };
            for (start, bytes) in steps(start, end, unmark_step) {
                self.calls.push(Call::madvise(start, bytes, libc::MADV_UNMERGEABLE));
                self.parts.push((at, Pages(bytes / PAGE_SIZE as u64)));
            }
        }
    }
}

impl LiveHost {
    /// Marks or unmarks spans, the spans of one process together.
    pub(super) fn change(
        &mut self,
        changes: &[Change],
        mark: bool,
        size: StopSize,
        outcome: &mut Outcome,
    ) -> Vec<ChangeResult> {
        let mut results = vec![Marking::Refused; changes.len()];
        let mut by_pid: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (at, Change { span, .. }) in changes.iter().enumerate() {
            if let Some(&pid) = self.region_pids.get(&span.region) {
                by_pid.entry(pid).or_default().push(at);
            }
        }
        for (pid, wanted) in by_pid {
            let Some(target) = self.targets.get_mut(&pid) else { continue };
            // Look again just before acting: mappings may have come, gone or turned into what must not be marked.
            let looked = target.details().and_then(|details| {
                let unmark_step = if mark { None } else { Some(step_of(&target.process)?) };
                Ok((details, unmark_step))
            });
            let (details, unmark_step) = match looked {
                Ok(looked) => looked,
                Err(ReadError::Vanished { .. }) => continue,
                // It may be no more than a moment without memory.
                Err(error) => {
                    self.tell_left_alone(pid, error.to_string());
                    for &at in &wanted {
                        results[at] = Marking::Busy;
                    }
                    continue;
                }
            };
            let mut work = Work::default();
            for &at in &wanted {
                let span = changes[at].span;
                work.add((at, span, target.is_whole(&span)), &details, unmark_step);
            }
            target.look_again();
            self.next_look_ns = 0;
            self.make(pid, &work, mark, size, &mut results, outcome);
            for at in wanted {
                self.tell_changed(pid, &changes[at], mark, results[at]);
            }
        }
        changes.iter().zip(results).map(|(&change, marking)| ChangeResult { change, marking }).collect()
    }

    /// Has a process make its calls.
    fn make(
        &mut self,
        pid: i32,
        work: &Work,
        mark: bool,
        size: StopSize,
        results: &mut [Marking],
        outcome: &mut Outcome,
    ) {
        let Some(target) = self.targets.get(&pid) else { return };
        work.done.iter().for_each(|&(at, pages)| add(&mut results[at], pages));
        let mut report = Report::default();
        let ran = match &mut self.hands {
            Acting::DryRun => {
                work.parts.iter().for_each(|&(at, pages)| add(&mut results[at], pages));
                Ok(())
            }
            Acting::Act { injector, .. } if mark => {
                fault::point("mark");
                let limits = Limits { calls_per_stop: size.marks as usize, ..Limits::default() };
                let ran = injector.run(&target.process, &work.calls, &limits);
                fault::point("marked");
                ran.map(|done| report = done).map_err(UnfoldError::from)
            }
            Acting::Act { injector, .. } => in_steps(&target.process, injector, &self.roots, &work.calls, &mut report),
        };
        if report.stops > 0 {
            outcome.stops.push(Stops {
                owner: target.owner,
                number: report.stops,
                longest_ns: report.longest_stop_ns,
                total_ns: report.total_stop_ns,
            });
        }
        for (&(at, pages), result) in work.parts.iter().zip(&report.results) {
            if result.is_ok() {
                add(&mut results[at], pages);
            }
        }
        match ran {
            Ok(()) => {}
            Err(UnfoldError::Inject(error)) => {
                let marking = if error.is_passing() { Marking::Busy } else { Marking::Refused };
                work.parts.iter().for_each(|&(at, _)| results[at] = marking);
                self.tell_left_alone(pid, error.to_string());
            }
            // No room for more copies.
            Err(_) => work.parts[report.results.len()..].iter().for_each(|&(at, _)| results[at] = Marking::Busy),
        }
    }

    fn tell_changed(&mut self, pid: i32, change: &Change, mark: bool, outcome: Marking) {
        let Some(target) = self.targets.get(&pid) else { return };
        self.events.push(Event::Changed(Changed {
            pid,
            start_time_ticks: target.process.start_time_ticks(),
            name: target.name.clone(),
            domain: self.domains[usize::from(target.domain.0)].clone(),
            mark,
            first: change.span.first.address(),
            bytes: change.span.pages.bytes(),
            why: change.why,
            outcome,
        }));
    }
}

fn add(marking: &mut Marking, pages: Pages) {
    *marking = match marking {
        Marking::Done(done) => Marking::Done(*done + pages),
        Marking::Busy | Marking::Refused => Marking::Done(pages),
    };
}
