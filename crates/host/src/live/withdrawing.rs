//! Removes the marks of memory that is excluded now, or whose process has moved to another trust domain.
//!
//! The engine doesn't decide on this and need not know the region any more. We do it at each refresh of the targets,
//! also while the run is paused or has given KSM up, before we mark anything else.

use super::{Actuator, Event, LiveHost};
use crate::identity::Marks;
use crate::scope::exclude::withdrawal;
use crate::targets::Target;
use pagefold_engine::host::{Change, ChangeResult, Marking, Span, Why};
use pagefold_engine::keys::RegionKey;
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn};
use pagefold_inject::unmerge::{MarkState, UnmergeError, step_bytes, unmark_in_steps};
use pagefold_inject::{Call, InjectionReport, Injector};
use pagefold_procmem::Roots;
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{read_marked, read_smaps};
use pagefold_procmem::os::abandonable::{Job, PATIENCE};
use pagefold_procmem::process::{Process, ReadError};
use std::sync::Arc;

/// One refresh spends this long on it at most, not counting the last process, nanoseconds.
const PASS_NS: u64 = 250_000_000;
/// If a process is marked again each time, we put it off after this many tries in a row.
const TRIES: u32 = 5;
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
    /// No mark is left.
    Settled,
}

impl LiveHost {
    /// Removes marks that must go, as far as we can stop the targets and they have room for the copies. Returns whether
    /// any target has changed.
    pub(super) fn withdraw_marks(&mut self, now_ns: u64) -> bool {
        if matches!(self.actuator, Actuator::DryRun) {
            return false;
        }
        let is_due = |target: &Target| target.pending.as_ref().is_some_and(|pending| now_ns >= pending.next_ns);
        let due: Vec<i32> = self.targets.iter().filter(|(_, target)| is_due(target)).map(|(&pid, _)| pid).collect();
        let mut changed = false;
        for pid in due {
            let mut came = Try::Again;
            for _ in 0..TRIES {
                if self.now_ns() > now_ns + PASS_NS {
                    // The remaining ones are pending and not tried yet, so we mark nothing meanwhile.
                    self.next_refresh_ns = 0;
                    return changed;
                }
                came = self.withdraw_from(pid, now_ns);
                changed |= came != Try::Nothing;
                if came != Try::Again {
                    break;
                }
            }
            if let (Try::Again, Some(target)) = (came, self.targets.get_mut(&pid)) {
                target.put_off(
                    now_ns,
                    UnmergeError::Left { pid, why: "its memory is marked again each time".to_owned() },
                );
            }
        }
        changed
    }

    fn withdraw_from(&mut self, pid: i32, now_ns: u64) -> Try {
        let Some(target) = self.targets.get_mut(&pid) else { return Try::Nothing };
        let Actuator::Act { injector, .. } = &self.actuator else { return Try::Nothing };
        let (came, is_new) = match self.unmarking.remove(&pid) {
            // We waited for it when it began.
            Some(job) => (job.poll(), false),
            None => match (target.admit(), &target.pending) {
                (Ok(()), Some(pending)) => {
                    let job = withdraw_job(&target.process, pending.marks, injector, &self.roots);
                    (Job::start(job).wait(PATIENCE), true)
                }
                (Err(error), _) => {
                    target.put_off(now_ns, error.into());
                    return Try::Nothing;
                }
                (_, None) => return Try::Nothing,
            },
        };
        let found = match came {
            Ok(Ok(found)) => found,
            // The next refresh removes it.
            Ok(Err(ReadError::Vanished { .. })) => return Try::Nothing,
            Ok(Err(error)) => {
                target.put_off(now_ns, error.into());
                return Try::Nothing;
            }
            Err(job) => {
                target.leave(&job.pending);
                if job.pending.is_over() {
                    // It has failed.
                    target.put_off(now_ns, UnmergeError::UnderWay { pid, name: target.name.clone() });
                } else {
                    target.wait(now_ns, UnmergeError::UnderWay { pid, name: target.name.clone() });
                    self.unmarking.insert(pid, job);
                }
                return Try::Nothing;
            }
        };
        let Withdrawn { state, calls, report, ran } = found;
        if calls.is_empty() {
            target.count_unmerged(state.merged_kib, Pages(0), 0);
            // A job that began earlier may have been for other marks.
            if is_new {
                target.set_settled();
                return Try::Settled;
            }
            return Try::Again;
        }
        target.set_pending_left(state.marked_bytes());
        self.withdrawn.stops.extend(report.stops_of(target.owner));
        let pending = target.pending.as_ref();
        let reason = pending.map(|pending| pending.reason.to_string()).unwrap_or_default();
        let is_requested = pending.is_some_and(|pending| pending.marks == Marks::All);
        let why = if is_requested { Why::Asked } else { Why::Excluded };
        let refused = report.results.iter().find_map(|result| result.err()).map(|errno| errno.to_string());
        let problem = match ran {
            Ok(()) => refused.map(|why| UnmergeError::Left { pid, why }),
            Err(error) => Some(error),
        };
        let mut unmarked = Pages(0);
        // In the order of the mappings.
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
                self.withdrawn.unmarked.push(result);
            }
            self.events.push(Event::Withdrawn { pid, result, reason: reason.clone() });
            if !was_tried {
                // Nor did we try the ones after it.
                break;
            }
        }
        target.count_unmerged(state.merged_kib, unmarked, report.longest_stop_ns);
        match problem {
            Some(problem) => {
                target.put_off(now_ns, problem);
                Try::Changed
            }
            None => Try::Again,
        }
    }
}

/// The marks that we wanted to remove, and the results.
#[derive(Debug)]
pub(super) struct Withdrawn {
    /// The marks before.
    state: MarkState,
    /// The calls that remove them. Empty if no mark is left.
    calls: Vec<Call>,
    report: InjectionReport,
    ran: Result<(), UnmergeError>,
}

pub(super) type WithdrawJob = Job<Result<Withdrawn, ReadError>>;

fn withdraw_job(
    process: &Arc<Process>,
    marks: Marks,
    injector: &Injector,
    roots: &Roots,
) -> impl FnOnce() -> Result<Withdrawn, ReadError> + Send + 'static {
    let (process, roots, injector) = (process.clone(), roots.clone(), injector.handle());
    move || {
        let program = ProgramId::of(&process);
        let state = mark_state(&process, marks)?;
        let program = program?;
        let calls = state.calls(step_bytes(&process)?);
        let mut report = InjectionReport::default();
        let ran = unmark_in_steps((&process, &program), &injector, &roots, &calls, &mut report);
        Ok(Withdrawn { state, calls, report, ran })
    }
}

/// The marks of a process that we want to remove.
fn mark_state(process: &Process, marks: Marks) -> Result<MarkState, ReadError> {
    let details = match marks {
        Marks::Mappings | Marks::All => read_marked(process)?,
        Marks::Excluded => {
            let mut details = read_smaps(process)?;
            details.retain(|detail| withdrawal(detail).is_some());
            details
        }
    };
    let stat = KsmStat::of(process)?;
    if stat.merge_any && marks < Marks::All {
        return Ok(MarkState::new(&[], KsmStat { merge_any: false, ..stat }));
    }
    Ok(MarkState::new(&details, stat))
}
