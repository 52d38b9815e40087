//! Removing the marks of memory that is excluded now, or whose process has moved to another trust domain.
//!
//! The engine does not decide on this and need not know the region any more: it happens at each refresh of the targets,
//! also while the run is paused or has given KSM up, before anything else is marked.

use super::{Actuator, Event, LiveHost};
use crate::host::targets::Target;
use crate::inject::unmerge::{UnmergeError, step_bytes, steps, unmark_in_steps};
use crate::inject::{Call, InjectionReport, Injector};
use crate::os::abandonable::{Job, PATIENCE};
use crate::proc::Roots;
use crate::proc::image::ProgramId;
use crate::proc::ksm_stat::KsmStat;
use crate::proc::maps::{VmaDetail, read_marked, read_smaps};
use crate::proc::process::{Process, ReadError};
use crate::scope::exclude::withdrawal;
use pagefold_core::host::{Change, ChangeResult, Marking, Span, Why};
use pagefold_core::keys::RegionKey;
use pagefold_core::units::{Bytes, PAGE_SIZE, Pages, Vpn};
use std::sync::Arc;

/// Time that one refresh spends on this at most, but for the last mapping, nanoseconds.
const PASS_NS: u64 = 250_000_000;
/// The key of a region that the engine does not know.
const NO_REGION: RegionKey = RegionKey(0);

impl LiveHost {
    /// Removes marks that must go, as far as the targets can be stopped and have room for the copies. Returns whether any
    /// target has changed.
    pub(super) fn withdraw_marks(&mut self, now_ns: u64) -> bool {
        if matches!(self.actuator, Actuator::DryRun) {
            return false;
        }
        let is_due = |target: &Target| target.pending.as_ref().is_some_and(|pending| now_ns >= pending.next_ns);
        let due: Vec<i32> = self.targets.iter().filter(|(_, target)| is_due(target)).map(|(&pid, _)| pid).collect();
        let mut changed = false;
        for pid in due {
            if self.now_ns() > now_ns + PASS_NS {
                // What is left is pending without having been tried, so nothing is marked meanwhile.
                self.next_refresh_ns = 0;
                break;
            }
            changed |= self.withdraw_from(pid, now_ns);
        }
        changed
    }

    fn withdraw_from(&mut self, pid: i32, now_ns: u64) -> bool {
        let Some(target) = self.targets.get_mut(&pid) else { return false };
        let Actuator::Act { injector, .. } = &self.actuator else { return false };
        let (job, is_new) = match self.unmarking.remove(&pid) {
            Some(job) => (job, false),
            None => match (target.admit(), &target.pending) {
                (Ok(()), Some(pending)) => {
                    let job = withdraw_job(&target.process, pending.whole, injector, &self.roots);
                    (Job::start(job), true)
                }
                (Err(error), _) => {
                    target.put_off(now_ns, error.to_string());
                    return false;
                }
                (_, None) => return false,
            },
        };
        let found = match job.wait(PATIENCE) {
            Ok(Ok(found)) => found,
            // The next refresh removes it.
            Ok(Err(ReadError::Vanished { .. })) => return false,
            Ok(Err(error)) => {
                target.put_off(now_ns, error.to_string());
                return false;
            }
            Err(job) => {
                target.leave(&job.pending);
                target.put_off(now_ns, "it has not ended yet".to_owned());
                if !job.pending.is_over() {
                    self.unmarking.insert(pid, job);
                }
                return false;
            }
        };
        let Some(Withdrawn { left, span: (start, end), calls, report, ran }) = found else {
            // A job that began earlier may have been for other marks.
            if is_new {
                target.set_settled();
            }
            return is_new;
        };
        target.set_pending_left(left);
        let done = calls.iter().zip(&report.results).filter(|(_, result)| result.is_ok()).map(|(call, _)| call.args[1]);
        let done = Pages(done.sum::<u64>() / PAGE_SIZE as u64);
        self.withdrawn.stops.extend(report.stops_of(target.owner));
        let span =
            Span { region: NO_REGION, first: Vpn::of_address(start), pages: Pages((end - start) / PAGE_SIZE as u64) };
        let problem = match ran {
            Ok(()) => report.results.iter().find_map(|result| result.err()).map(|errno| errno.to_string()),
            Err(error) => Some(error.to_string()),
        };
        let marking = if done == Pages(0) && problem.is_some() { Marking::Busy } else { Marking::Done(done) };
        let result = ChangeResult { change: Change { span, why: Why::Excluded }, marking };
        if marking != Marking::Busy {
            self.withdrawn.unmarked.push(result);
        }
        let reason = target.pending.as_ref().map(|pending| pending.reason.to_string()).unwrap_or_default();
        match problem {
            Some(problem) => target.put_off(now_ns, problem),
            // The next mapping at once, or the same if it has changed meanwhile.
            None => self.next_refresh_ns = 0,
        }
        self.events.push(Event::Withdrawn { pid, result, reason });
        true
    }
}

/// One mapping that was to be unmarked.
#[derive(Debug)]
pub(super) struct Withdrawn {
    /// Address space that was marked before.
    left: Bytes,
    span: (u64, u64),
    calls: Vec<Call>,
    report: InjectionReport,
    ran: Result<(), UnmergeError>,
}

/// Unmarks one mapping. `None`: none is left.
pub(super) type WithdrawJob = Job<Result<Option<Withdrawn>, ReadError>>;

fn withdraw_job(
    process: &Arc<Process>,
    whole: bool,
    injector: &Injector,
    roots: &Roots,
) -> impl FnOnce() -> Result<Option<Withdrawn>, ReadError> + Send + 'static {
    let (process, roots, injector) = (process.clone(), roots.clone(), injector.handle());
    move || {
        let program = ProgramId::of(&process);
        let details = if whole { read_marked(&process)? } else { read_smaps(&process)? };
        // All memory of such a process is marked because it, or the administrator, wants so.
        let by_itself = KsmStat::of(&process)?.merge_any;
        let program = program?;
        let found = spans(&details, whole && !by_itself, by_itself);
        let Some(&span) = found.first() else { return Ok(None) };
        let left = Bytes(found.iter().map(|(start, end)| end - start).sum());
        let step = step_bytes(&process)?;
        let calls: Vec<Call> =
            steps(span.0, span.1, step).map(|(at, bytes)| Call::madvise(at, bytes, libc::MADV_UNMERGEABLE)).collect();
        let mut report = InjectionReport::default();
        let ran = unmark_in_steps((&process, &program), &injector, &roots, &calls, &mut report);
        Ok(Some(Withdrawn { left, span, calls, report, ran }))
    }
}

/// The marked mappings that must be unmarked: all, or those that are excluded. None in a process that marks by itself.
fn spans(details: &[VmaDetail], whole: bool, by_itself: bool) -> Vec<(u64, u64)> {
    let marked = details.iter().filter(|detail| !by_itself && detail.flags.has(*b"mg"));
    marked
        .filter(|detail| whole || withdrawal(detail).is_some())
        .map(|detail| (detail.vma.start, detail.vma.end))
        .collect()
}
