//! Marking and unmarking spans of targets.

use super::{Actuator, LiveHost};
use crate::identity::{Marks, Watch};
use crate::scope::exclude::{Exclusion, vma_exclusion};
use crate::targets::Target;
use pagefold_engine::host::{Change, ChangeResult, Marking, Outcome, Span, StopSize};
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages};
use pagefold_inject::unmerge::{UnmergeError, step_bytes, steps, unmark_in_steps};
use pagefold_inject::{Call, InjectError, InjectionReport, Limits};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{VmaDetail, read_smaps};
use pagefold_procmem::os::abandonable::{Job, PATIENCE};
use pagefold_procmem::os::fault;
use pagefold_procmem::process::ReadError;
use std::collections::BTreeMap;

/// The calls that change the marks of one process.
#[derive(Debug, Default)]
struct CallBatch {
    /// The program that we judged.
    program: Option<ProgramId>,
    calls: Vec<Call>,
    /// For each call, the index of its change, and its pages.
    parts: Vec<(usize, Pages)>,
    /// The mappings with huge pages among the marked ones.
    huge: Vec<(u64, u64)>,
    /// Parts already in the requested state: marked by the program itself, or by an earlier try.
    done: Vec<(usize, Pages)>,
}

impl CallBatch {
    /// Adds the calls for a change to the current mappings. If the span covers its region (`whole`), we change its
    /// mappings as a whole even if they've grown since, because marking a part would split them. Without `unmark_step`
    /// we mark; with it, we unmark by one call per step.
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
                self.huge.extend((detail.anon_huge_kib > 0).then_some((detail.vma.start, detail.vma.end)));
                continue;
            };
            for (start, bytes) in steps(start, end, unmark_step) {
                self.calls.push(Call::madvise(start, bytes, libc::MADV_UNMERGEABLE));
                self.parts.push((at, Pages(bytes / PAGE_BYTES)));
            }
        }
    }
}

impl LiveHost {
    /// Marks or unmarks spans, batched by process.
    pub(super) fn change(
        &mut self,
        changes: &[Change],
        mark: bool,
        size: StopSize,
        outcome: &mut Outcome,
    ) -> Vec<ChangeResult> {
        if mark && (self.must_unmark_first() || self.has_foreign_marks()) {
            return changes.iter().map(|&change| ChangeResult { change, marking: Marking::Busy }).collect();
        }
        let mut results = vec![Marking::Refused; changes.len()];
        let mut by_pid: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (at, Change { span, .. }) in changes.iter().enumerate() {
            if let Some(&pid) = self.region_pids.get(&span.region) {
                by_pid.entry(pid).or_default().push(at);
            }
        }
        for (pid, wanted) in by_pid {
            if mark && !self.may_be_marked(pid) {
                for at in wanted {
                    results[at] = Marking::Busy;
                }
                continue;
            }
            let Some(target) = self.targets.get_mut(&pid) else { continue };
            let program = target.program();
            // We read the mappings again just before we act: they may have changed, also into excluded ones.
            let current = target.read(move |process| {
                let unmark_step = if mark { None } else { Some(step_bytes(process)?) };
                Ok((read_smaps(process)?, unmark_step))
            });
            let (details, unmark_step) = match current {
                Ok(current) => current,
                Err(ReadError::Vanished { .. }) => continue,
                // The error may be temporary, such as a lack of memory.
                Err(error) => {
                    if !error.is_late() {
                        self.report_left_alone(pid, error.to_string());
                    }
                    for &at in &wanted {
                        results[at] = Marking::Busy;
                    }
                    continue;
                }
            };
            let mut work = CallBatch { program, ..CallBatch::default() };
            for &at in &wanted {
                let span = changes[at].span;
                work.add((at, span, target.is_whole(&span)), &details, unmark_step);
            }
            work.huge.iter().for_each(|&(start, end)| target.huge.record(start, end));
            target.invalidate();
            self.next_refresh_ns = 0;
            let is_unknown = self.make(pid, &work, mark, size, &mut results, outcome);
            if mark && (is_unknown || wanted.iter().any(|&at| matches!(results[at], Marking::Done(_)))) {
                self.record_marked(pid);
            }
        }
        changes.iter().zip(results).map(|(&change, marking)| ChangeResult { change, marking }).collect()
    }

    /// Whether there are marks that must go before we make others.
    pub(super) fn must_unmark_first(&self) -> bool {
        let must_be_tried = |target: &Target| target.pending.as_ref().is_some_and(|pending| !pending.tried);
        matches!(self.actuator, Actuator::Act { .. }) && self.targets.values().any(must_be_tried)
    }

    /// Whether memory of another trust domain than the one that ksmd merges is still marked, or may be: ksmd would
    /// merge both. As long as that's so, however long it takes, we mark nothing and let ksmd rest.
    pub(super) fn has_foreign_marks(&self) -> bool {
        let Some(merged) = self.merged.filter(|_| matches!(self.actuator, Actuator::Act { .. })) else { return false };
        !self.are_all_looked_at || self.targets.values().any(|target| target.has_foreign_marks(merged))
    }

    /// Looks at a process again just before we mark it. Returns whether it still is the program that we judged, and not
    /// excluded.
    pub(super) fn may_be_marked(&mut self, pid: i32) -> bool {
        let now_ns = self.now_ns();
        let rules = (&self.domain_rules, &mut self.domains, self.merged);
        let (scope, left_out) = ((&self.scope, &self.roots), (&self.deny, &mut self.kept_out));
        let mut watch = Watch::new(scope, left_out, rules, &self.group_rules, &self.programs);
        let Some(target) = self.targets.get_mut(&pid) else { return false };
        let unchanged = !target.notice_exec() && matches!(target.look(now_ns, 1, &mut watch), Ok(false));
        if !unchanged {
            self.next_refresh_ns = 0;
        }
        unchanged && target.may_be_read() && target.pending.is_none()
    }

    /// Records that we've marked memory of a process. If it has executed another program since we judged it, we may
    /// have marked that one in its place.
    pub(super) fn record_marked(&mut self, pid: i32) {
        if !matches!(self.actuator, Actuator::Act { .. }) {
            return;
        }
        let Some(target) = self.targets.get_mut(&pid) else { return };
        if target.notice_exec() {
            target.set_marked();
            target.request_unmark(Exclusion::OtherProgram, Marks::Mappings);
        } else if let Some(program) = target.set_marked() {
            self.programs.marked.insert(program, target.domain);
        }
    }

    /// Makes the calls in a process. Returns whether we may have made some, or make them later, that aren't in the
    /// results.
    fn make(
        &mut self,
        pid: i32,
        work: &CallBatch,
        mark: bool,
        size: StopSize,
        results: &mut [Marking],
        outcome: &mut Outcome,
    ) -> bool {
        let Some(target) = self.targets.get_mut(&pid) else { return false };
        work.done.iter().for_each(|&(at, pages)| add(&mut results[at], pages));
        let mut report = InjectionReport::default();
        let ran = match (&mut self.actuator, &work.program) {
            (Actuator::DryRun, _) => {
                work.parts.iter().for_each(|&(at, pages)| add(&mut results[at], pages));
                Ok(())
            }
            (_, None) => Err(InjectError::OtherProgram { pid }.into()),
            (Actuator::Act { injector, .. }, Some(program)) if mark => {
                fault::point("mark");
                let calls_per_stop = usize::try_from(size.marks).unwrap_or(usize::MAX);
                let limits = Limits { calls_per_stop, ..Limits::default() };
                let ran = injector.run_in(&target.process, program, &work.calls, &limits);
                fault::point("marked");
                ran.map(|done| report = done).map_err(UnmergeError::from)
            }
            (Actuator::Act { injector, .. }, Some(program)) => {
                let (process, roots, injector) = (target.process.clone(), self.roots.clone(), injector.handle());
                let (program, calls) = (*program, work.calls.clone());
                let job = Job::start(move || {
                    let mut report = InjectionReport::default();
                    let ran = unmark_in_steps((&process, &program), &injector, &roots, &calls, &mut report);
                    (report, ran)
                });
                match job.wait(PATIENCE) {
                    Ok((done, ran)) => {
                        report = done;
                        ran
                    }
                    Err(job) => {
                        target.leave(&job.pending);
                        Err(InjectError::WorkerSilent.into())
                    }
                }
            }
        };
        outcome.stops.extend(report.stops_of(target.owner));
        for (&(at, pages), result) in work.parts.iter().zip(&report.results) {
            if result.is_ok() {
                add(&mut results[at], pages);
            }
        }
        match ran {
            Ok(()) => {}
            Err(UnmergeError::Inject(error)) => {
                let marking = if error.is_passing() { Marking::Busy } else { Marking::Refused };
                work.parts.iter().for_each(|&(at, _)| results[at] = marking);
                // The first calls may have been made: the mappings show us.
                let look = |process: &_| {
                    Ok((read_smaps(process).unwrap_or_default(), KsmStat::of(process).unwrap_or_default()))
                };
                let (details, stat) = target.read(look).unwrap_or_default();
                for (call, &(at, pages)) in work.calls.iter().zip(&work.parts) {
                    if is_in_state(&details, (call.args[0], call.args[0] + call.args[1]), mark) {
                        add(&mut results[at], pages);
                    }
                }
                self.report_left_alone(pid, error.to_string());
                // A mapping that has moved isn't among them.
                return error.is_unknown() || mark && stat.mergeable != Some(false);
            }
            // The process's memory limits have no room for more copies.
            Err(_) => work.parts[report.results.len()..].iter().for_each(|&(at, _)| results[at] = Marking::Busy),
        }
        false
    }
}

/// Whether a range is mapped, and all of it marked or all of it not.
fn is_in_state(details: &[VmaDetail], (start, end): (u64, u64), marked: bool) -> bool {
    let mut from = start;
    for detail in details.iter().filter(|detail| detail.vma.end > start && detail.vma.start < end) {
        if detail.vma.start > from || detail.flags.has(*b"mg") != marked {
            return false;
        }
        from = detail.vma.end;
    }
    from >= end
}

fn add(marking: &mut Marking, pages: Pages) {
    *marking = match marking {
        Marking::Done(done) => Marking::Done(*done + pages),
        Marking::Busy | Marking::Refused => Marking::Done(pages),
    };
}
