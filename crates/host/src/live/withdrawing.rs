//! Removes the marks of memory that is excluded now, or whose process has moved to another trust domain.
//!
//! The engine doesn't decide about such marks, and may not know the region any more. We remove them at each refresh of
//! the targets, before we mark anything else, and even while the run is paused or has given KSM up.

use super::turns::{Pass, Turn};
use super::{Event, LiveHost};
use crate::scope::exclude::withdrawal;
use crate::targets::{Marks, PendingUnmark};
use pagefold_engine::host::{Change, ChangeResult, Marking, Outcome, Span, Why};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn};
use pagefold_inject::unmerge::{
    CALLS_MOST, MarkState, UnmergeError, copy_inherited, is_ended_by, step_bytes, unmark_in_steps,
};
use pagefold_inject::{Batch, Call, InjectionReport, Injector, Limits};
use pagefold_procmem::Roots;
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{read_marked, read_smaps};
use pagefold_procmem::os::abandonable::{Job, PATIENCE};
use pagefold_procmem::process::{Process, ReadError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The key for regions that the engine doesn't know.
const NO_REGION: RegionKey = RegionKey(0);

/// The result of one try to remove the marks of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Try {
    /// We did nothing: the process has ended, can't be read now, or is still being unmarked.
    Nothing,
    /// We did something. There is more to do, later.
    Changed,
    /// We did something. We check at once whether all marks are gone.
    Again,
    /// No mark that must go is left.
    Settled,
}

/// The removal of marks that must go: results, and tries that haven't ended.
#[derive(Debug, Default)]
pub(super) struct Withdrawing {
    /// The tries to remove marks that haven't ended yet, by pid.
    pub(super) jobs: BTreeMap<i32, WithdrawJob>,
    /// Marks that we withdrew and the engine hasn't accounted for yet.
    pub(super) outcome: Outcome,
}

type WithdrawJob = Job<Result<Withdrawal, ReadError>>;

/// The marks that we wanted to remove, and the results.
#[derive(Debug)]
pub(super) struct Withdrawal {
    /// The marks before we removed any.
    state: MarkState,
    /// The calls that remove the marks, or the first [`CALLS_MOST`] of them. Empty if no mark is left.
    calls: Vec<Call>,
    report: InjectionReport,
    /// Merged pages that we copied although they weren't marked: the process shared them through fork.
    copied: Pages,
    ran: Result<(), UnmergeError>,
}

impl LiveHost {
    /// Removes marks that must go, where we can stop the target and its memory limits have room for the copies. Returns
    /// whether any target has changed.
    pub(super) fn withdraw_marks(&mut self, now_ns: u64) -> bool {
        if self.actuator.is_none() {
            return false;
        }
        let mut pass = Pass::begin();
        let mut changed = false;
        for Turn { pid, .. } in self.turns(now_ns) {
            let Some(origin) = self.targets.get(&pid).map(|target| target.origin) else { continue };
            let mut result = Try::Again;
            while result == Try::Again && !pass.is_over() {
                result = self.withdraw_from(pid, now_ns);
                changed |= result != Try::Nothing;
            }
            pass.charge(origin);
            if pass.is_over() {
                // We go on at once, because we mark nothing as long as there are marks that we haven't tried to remove.
                self.schedule.next_ns = 0;
                break;
            }
        }
        changed
    }

    /// The processes whose marks must go now, in the order in which we try them. An untried process has waited since
    /// the first pass that found it, any other since its next try was due.
    fn turns(&mut self, now_ns: u64) -> Vec<Turn> {
        let mut turns = Vec::new();
        for target in self.targets.values_mut().filter(|target| target.unmark_is_due(now_ns)) {
            let since_ns = target.waits_to_unmark_since(now_ns);
            turns.push(Turn::of(target, since_ns));
        }
        turns.sort_unstable();
        turns
    }

    fn withdraw_from(&mut self, pid: i32, now_ns: u64) -> Try {
        let is_new = !self.withdrawing.jobs.contains_key(&pid);
        let Some(withdrawal) = self.try_to_withdraw(pid, now_ns) else { return Try::Nothing };
        let Some(target) = self.targets.get_mut(&pid) else { return Try::Nothing };
        let Withdrawal { state, calls, report, copied, ran } = withdrawal;
        if calls.is_empty() && ran.is_ok() {
            target.count_unmerged(state.merged_kib, Pages(0), 0);
            target.request.done.given_back.0 += copied.bytes().0;
            // The job may have begun earlier, for marks other than the ones that must go now.
            if is_new {
                target.set_settled();
                return Try::Settled;
            }
            return Try::Again;
        }
        let is_cut = calls.len() == CALLS_MOST;
        let mut is_shrinking = false;
        if let Some(pending) = &mut target.pending {
            // Calls that were cut off don't count as a pass. We go on at once only if much less memory is marked than
            // at the last try: the process may mark it again.
            let mut asked = 0;
            for call in &calls {
                asked += call.args[1];
            }
            is_shrinking = is_cut && (!pending.was_tried || state.marked_bytes().0 + asked / 2 <= pending.left.0);
            pending.was_tried = true;
            if !calls.is_empty() {
                pending.is_ended = is_ended_by(&calls, &report.results);
            }
            pending.left = state.marked_bytes();
        }
        self.withdrawing.outcome.stops.extend(report.stops_of(target.owner));
        let unmarked = self.report_withdrawn(pid, &state, &calls, &report);
        let Some(target) = self.targets.get_mut(&pid) else { return Try::Nothing };
        target.count_unmerged(state.merged_kib, unmarked, report.longest_stop_ns);
        let refused = report.results.iter().find_map(|result| result.err());
        let problem = match (ran, refused) {
            (Ok(()), None) if is_shrinking => return Try::Again,
            (Ok(()), None) if is_cut => UnmergeError::Left { pid, why: "it goes on marking memory".to_owned() },
            (Ok(()), None) if target.set_unmarked(now_ns) => return Try::Again,
            (Ok(()), None) => return Try::Changed,
            (Ok(()), Some(errno)) => UnmergeError::Left { pid, why: errno.to_string() },
            (Err(error), _) => error,
        };
        target.put_off(now_ns, problem);
        Try::Changed
    }

    /// Tries to remove marks of a process, or checks whether an earlier try has ended. `None` if we did nothing, or if
    /// the earlier try hasn't ended.
    fn try_to_withdraw(&mut self, pid: i32, now_ns: u64) -> Option<Withdrawal> {
        let target = self.targets.get_mut(&pid)?;
        let injector = &self.actuator.as_ref()?.injector;
        let tried = if let Some(job) = self.withdrawing.jobs.remove(&pid) {
            // We waited for the job when it began, and now only check whether it has ended.
            job.poll()
        } else {
            if let Err(error) = target.admit() {
                target.put_off(now_ns, error.into());
                return None;
            }
            let pending = target.pending.as_ref()?;
            let job = withdraw_job(&target.info.process, pending, injector, &self.rules.roots);
            Job::start(job).wait(PATIENCE)
        };
        match tried {
            Ok(Ok(withdrawal)) => return Some(withdrawal),
            // The process has ended. The next refresh removes the target.
            Ok(Err(ReadError::Vanished { .. })) if !target.info.process.is_alive() => {}
            // The error may be `Vanished` although the process is alive: we've read another of its threads, which has
            // ended.
            Ok(Err(error)) => target.put_off(now_ns, error.into()),
            Err(mut job) => {
                target.leave(&mut job.pending);
                let problem = UnmergeError::UnderWay { pid, name: target.info.name.clone() };
                if job.pending.is_over() {
                    // The job has failed.
                    target.put_off(now_ns, problem);
                } else {
                    target.wait(now_ns, problem);
                    self.withdrawing.jobs.insert(pid, job);
                }
            }
        }
        None
    }

    /// Reports the results of the calls by mapping. Returns how many pages were unmarked.
    fn report_withdrawn(&mut self, pid: i32, state: &MarkState, calls: &[Call], report: &InjectionReport) -> Pages {
        let pending = self.targets.get(&pid).and_then(|target| target.pending.as_ref());
        let reason = pending.map(|pending| pending.reason.to_string()).unwrap_or_default();
        let is_requested = pending.is_some_and(|pending| pending.marks == Marks::All);
        let why = if is_requested { Why::Asked } else { Why::Excluded };
        let mut unmarked = Pages(0);
        // The calls are in the order of the mappings.
        let mut made = calls.iter().zip(&report.results).peekable();
        for &(start, end) in &state.marked {
            let was_tried = made.peek().is_some();
            let mut done = Pages(0);
            while let Some((call, result)) = made.next_if(|(call, _)| (start..end).contains(&call.args[0])) {
                if result.is_ok() {
                    done += Pages(call.args[1] / PAGE_BYTES);
                }
            }
            unmarked += done;
            let pages = Pages((end - start) / PAGE_BYTES);
            let span = Span { region: NO_REGION, first: Vpn::of_address(start), pages };
            let marking = if done == Pages(0) { Marking::Busy } else { Marking::Done(done) };
            let result = ChangeResult { change: Change { span, why }, marking };
            if marking != Marking::Busy {
                self.withdrawing.outcome.unmarked.push(result);
            }
            self.events.push(Event::Withdrawn { pid, result, reason: reason.clone() });
            if !was_tried {
                // We haven't tried the calls for later mappings, either.
                break;
            }
        }
        unmarked
    }
}

fn withdraw_job(
    process: &Arc<Process>,
    pending: &PendingUnmark,
    injector: &Injector,
    roots: &Roots,
) -> impl FnOnce() -> Result<Withdrawal, ReadError> + Send + 'static {
    let process = process.clone();
    let PendingUnmark { marks, was_tried, is_ended, .. } = *pending;
    let roots = roots.clone();
    let injector = injector.handle();
    move || {
        let program = ProgramId::of(&process)?;
        // A marking call that we stopped waiting for may still be made. So we first make the injector wait for its end.
        let made =
            injector.run_first(Batch { process: &process, program: &program, calls: &[], limits: &Limits::default() });
        let mut state = mark_state(&process, marks)?;
        if is_ended || !was_tried && state.shows_no_marks() {
            state.assume_not_marked_as_a_whole();
        }
        let calls: Vec<Call> = state.calls(step_bytes(&process)?).take(CALLS_MOST).collect();
        let mut report = InjectionReport::default();
        if let Err(error) = made {
            return Ok(Withdrawal { state, calls, report, copied: Pages(0), ran: Err(error.into()) });
        }
        let mut copied = Pages(0);
        let mut ran = unmark_in_steps(&process, &program, &injector, &roots, &calls, &mut report);
        if marks == Marks::All && calls.is_empty() {
            match copy_inherited(&process, &roots) {
                Ok(pages) => copied = pages,
                Err(error) => ran = Err(error),
            }
        }
        Ok(Withdrawal { state, calls, report, copied, ran })
    }
}

/// The marks of a process that we want to remove.
fn mark_state(process: &Process, marks: Marks) -> Result<MarkState, ReadError> {
    let mut details = match marks {
        Marks::Mappings | Marks::All => read_marked(process)?,
        Marks::Excluded => {
            let mut details = read_smaps(process)?;
            details.retain(|detail| withdrawal(detail).is_some());
            details
        }
    };
    let mut stat = KsmStat::of(process)?;
    if marks < Marks::All {
        if stat.merge_any == Some(true) {
            details.clear();
        }
        stat.merge_any = Some(false);
    }
    Ok(MarkState::new(&details, stat))
}
