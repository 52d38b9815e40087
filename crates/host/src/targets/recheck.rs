//! Checks of a target: every [`RECHECK_MIN_NS`], or more rarely if there are many, we read again the facts that our
//! verdict on the process rests on.
//!
//! A process changes its user, executable, program and dumpable attribute only while it runs, and its CPU time shows us
//! at little cost that it hasn't run. Its cgroup and the cgroup's attributes can be changed by others, so we read them
//! each time. If a change excludes the process, or moves it to another trust domain, we unmark its memory before we
//! mark anything else. After an exec we start from scratch.

use super::marks::MarkRecord;
use super::{Marks, Target};
use crate::huge_mappings::HugeMappings;
use crate::judge::{Judge, Verdict};
use crate::scope::dumpable::{Dumpable, dumpable, would_ask};
use crate::scope::exclude::{Exclusion, may_run_qemu};
use crate::scope::exe::Exe;
use crate::scope::opt_out::OptOut;
use crate::scope::{CgroupInfo, ProcessInfo, cgroups_of, opt_out_qemu};
use pagefold_engine::keys::{DomainKey, LineageKey};
use pagefold_procmem::image::{AddressSpace, ProgramId, image_of};
use pagefold_procmem::os::cpu::{own_cpu_ns, process_cpu_ns};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::Origin;
use std::path::PathBuf;
use std::sync::Arc;

/// Shortest time between two checks of a process, nanoseconds.
const RECHECK_MIN_NS: u64 = 2_000_000_000;
/// Checks may take 1/`RECHECK_SHARE` of the time: with about a hundred processes or more, we check each less often, but
/// still every `RECHECK_NS` as long as checks take no more than 1/`RECHECK_MOST_SHARE`.
const RECHECK_SHARE: u64 = 500;
const RECHECK_NS: u64 = 10_000_000_000;
const RECHECK_MOST_SHARE: u64 = 100;
/// We count at most this much for one check, nanoseconds, so that no process can make its own checks rare. Most take 30
/// to 150 us.
const RECHECK_COST_MOST_NS: u64 = 200_000;

/// The facts that we knew at the last check.
#[derive(Debug, Default)]
pub(super) struct LastCheck {
    /// Absent before our first check of a program.
    program: Option<CheckedProgram>,
    next_ns: u64,
    /// Why we leave the process as a whole alone.
    excluded: Option<Exclusion>,
    /// The program's exclusion by the deny list, if it's on it.
    denied: Option<Exclusion>,
    /// The trust domain at the last check. The target's own `domain` doesn't change while memory is marked.
    pub(super) domain: DomainKey,
    /// Opt-outs that the administrator has overridden, and the ones among them that we haven't reported yet.
    overridden: Vec<OptOut>,
    unreported: Vec<OptOut>,
}

#[derive(Debug)]
struct CheckedProgram {
    image: u64,
    /// The address space of the process. `None` if we mustn't read the process. After an exec, this address space is
    /// gone.
    space: Option<AddressSpace>,
    /// The dumpable attribute as we see it from outside. If it's unknown, we've asked the process itself, maybe some
    /// time ago.
    dumpable: Dumpable,
    command_line: CommandLine,
    /// The process's CPU time before the last check. If it's the same now, the process hasn't run, and needn't be
    /// checked. `None`: check it anyway.
    cpu_ns: Option<u64>,
}

/// The command line of a program, if we've read it.
#[derive(Clone, Copy, Debug)]
enum CommandLine {
    /// We haven't read the command line.
    Unread,
    /// We've read the command line, and found this opt-out or none.
    Read(Option<&'static str>),
}

impl CheckedProgram {
    /// Reads a process and its program. May block on the process. `known` is the image and the command line that we
    /// read last.
    fn read(
        process: &Arc<Process>,
        known: Option<(u64, CommandLine)>,
        cpu_ns: Option<u64>,
    ) -> Result<(ProcessInfo, Self), ReadError> {
        let space = AddressSpace::of(process).ok();
        let mut info = ProcessInfo::of(process)?;
        info.read_width()?;
        let dumpable = dumpable(&info)?;
        let image = match image_of(process) {
            Err(ReadError::Denied { .. }) => 0,
            other => other?,
        };
        let command_line = match known {
            // A command line belongs to one execution of a program.
            Some((of, CommandLine::Read(option))) if of == image && image != 0 => CommandLine::Read(option),
            _ if may_run_qemu(&info) => CommandLine::Read(opt_out_qemu::of_process(process)?),
            _ => CommandLine::Unread,
        };
        Ok((info, Self { image, space, dumpable, command_line, cpu_ns }))
    }
}

impl LastCheck {
    /// Makes the next refresh check the process, and judge it even if it hasn't run.
    pub(super) fn expire(&mut self) {
        self.next_ns = 0;
        if let Some(program) = &mut self.program {
            program.cpu_ns = None;
        }
    }

    fn set_overridden(&mut self, overridden: Vec<OptOut>) {
        if self.overridden != overridden {
            self.unreported.clone_from(&overridden);
            self.overridden = overridden;
        }
    }
}

/// The time between two checks of a process, if checking all processes takes `all_ns`.
fn recheck_ns(all_ns: u64) -> u64 {
    (all_ns * RECHECK_SHARE).clamp(RECHECK_MIN_NS, RECHECK_NS).max(all_ns * RECHECK_MOST_SHARE)
}

impl Target {
    /// The cgroups that can limit its memory: the mount point and the directory in each hierarchy.
    pub(crate) fn limiting(&self) -> &[(PathBuf, PathBuf)] {
        if self.check.program.is_some() { &self.info.cgroups.limiting } else { &[] }
    }

    /// Makes the next refresh check the process and judge it again.
    pub fn judge_again(&mut self) {
        self.check.expire();
        self.invalidate();
    }

    /// Forgets that the process's program was denied, because the deny list has changed.
    pub(crate) fn forget_denial(&mut self) {
        self.check.denied = None;
        self.judge_again();
    }

    /// The key of the processes that may share memory with this one through fork: they run the same program, since the
    /// same exec.
    pub(crate) fn lineage(&self) -> LineageKey {
        match self.image() {
            Some(image) if image != 0 => LineageKey(image),
            _ => LineageKey(self.owner.0.into()),
        }
    }

    /// The program as of the last check.
    pub(crate) fn image(&self) -> Option<u64> {
        self.check.program.as_ref().map(|program| program.image)
    }

    /// The program that our verdict is about; `None` before the first check.
    pub(crate) fn program(&self) -> Option<ProgramId> {
        let exe = self.info.exe.as_ref().and_then(Exe::id);
        Some(ProgramId { image: self.image()?, exe, uid: self.info.uid() })
    }

    /// The address space of that program.
    pub(crate) fn space(&self) -> Option<&AddressSpace> {
        self.check.program.as_ref()?.space.as_ref()
    }

    pub(super) fn check_is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.check.next_ns
    }

    /// Whether we leave the process as a whole alone.
    pub(crate) fn is_excluded(&self) -> bool {
        self.check.excluded.is_some()
    }

    /// Shows the reason if we leave the process as a whole alone. Returns whether that changes the reason shown.
    pub(super) fn show_excluded(&mut self) -> bool {
        let is_news = self.is_excluded() && self.exclusion != self.check.excluded;
        if is_news {
            self.exclusion.clone_from(&self.check.excluded);
        }
        is_news
    }

    /// Forgets everything if the process is running a different program than at the last check; returns whether it is.
    pub(crate) fn notice_exec(&mut self) -> bool {
        let has_executed = self.runs_another_program();
        if has_executed {
            self.forget_program();
        }
        has_executed
    }

    pub(super) fn runs_another_program(&self) -> bool {
        self.space().is_some_and(|space| !space.exists())
    }

    fn forget_program(&mut self) {
        // The image may change without an exec, because a process can replace its auxv (PR_SET_MM). Then its marks
        // remain.
        if !self.space().is_some_and(AddressSpace::exists) {
            self.marks = MarkRecord::default();
            self.pending = None;
        }
        self.check = LastCheck::default();
        self.listing = None;
        self.huge = HugeMappings::default();
        self.info.exe = None;
        self.forget_memory();
    }

    /// Checks the process, and judges it if anything may have changed. Returns whether anything has.
    pub(crate) fn recheck(&mut self, now_ns: u64, processes: u64, judge: &mut Judge<'_>) -> Result<bool, ReadError> {
        let before_ns = own_cpu_ns();
        let changed = self.recheck_now(judge);
        let spent_ns = (own_cpu_ns() - before_ns).min(RECHECK_COST_MOST_NS);
        self.check.next_ns = now_ns + recheck_ns(spent_ns * processes);
        changed
    }

    fn recheck_now(&mut self, judge: &mut Judge<'_>) -> Result<bool, ReadError> {
        let cgroups = judge.cgroup_info(cgroups_of(&self.info.process)?);
        let cpu_ns = process_cpu_ns(self.info.pid());
        if !self.may_have_changed(&cgroups, cpu_ns) {
            return Ok(false);
        }
        let known = self.check.program.as_ref().map(|program| (program.image, program.command_line));
        let (mut info, mut program) = self.read(move |process| CheckedProgram::read(process, known, cpu_ns))?;
        info.cgroups = cgroups;
        info.by_pid = self.info.by_pid;
        let mut changed = self.notice_other_program(&mut info, &mut program);
        if let Some(exe) = &info.exe {
            let _ = exe.trust();
        }
        let former = self.domain_when_marked(program.image, judge.history);
        let option = match program.command_line {
            CommandLine::Read(option) => option,
            CommandLine::Unread => None,
        };
        let is_new = self.check.program.is_none();
        let mut verdict = judge.judge(&mut info, program.dumpable, option, is_new);
        match &verdict.excluded {
            // A denied program stays denied: it may call itself something else by now, and a link by which the deny
            // list knew it may lead elsewhere.
            None => verdict.excluded.clone_from(&self.check.denied),
            Some(Exclusion::DenyListed { .. }) => self.check.denied.clone_from(&verdict.excluded),
            Some(_) => {}
        }
        if is_new || self.info.uid() != info.uid() || self.info.cgroups != info.cgroups {
            self.origin = Origin::of(&info.process);
        }
        self.info = info;
        self.check.program = Some(program);
        changed |= self.adopt_verdict(verdict, former);
        Ok(changed)
    }

    /// Whether the last verdict may no longer hold: the process has run, somebody has changed its cgroups, or we must
    /// ask the process again.
    fn may_have_changed(&self, cgroups: &CgroupInfo, cpu_ns: Option<u64>) -> bool {
        let Some(program) = &self.check.program else { return true };
        let has_run = program.cpu_ns.is_none() || program.cpu_ns != cpu_ns;
        let may_pass = self.check.excluded.as_ref().is_some_and(Exclusion::may_pass);
        has_run
            || may_pass
            || *self.info.cgroups != *cgroups
            || program.dumpable == Dumpable::Unknown && would_ask(&self.info.process)
    }

    /// If the process has begun to run another program, forgets the last one and returns true. Otherwise we go on with
    /// the executable that we first saw: we found out then whether it's trusted, and its file may have been replaced
    /// since.
    fn notice_other_program(&mut self, info: &mut ProcessInfo, program: &mut CheckedProgram) -> bool {
        let id = self.info.exe.as_ref().and_then(Exe::id);
        let is_same_file = id == info.exe.as_ref().and_then(Exe::id);
        if self.image().is_some_and(|image| image != program.image || !is_same_file) {
            self.forget_program();
            return true;
        }
        if is_same_file && self.info.exe.is_some() {
            info.exe.clone_from(&self.info.exe);
        }
        if let Some(last) = &self.check.program {
            if program.space.is_none() {
                program.space.clone_from(&last.space);
            }
            if self.info.status.pinned_kib != info.status.pinned_kib {
                self.set_changed();
            }
            self.surveys.are_locks_new |= self.info.status.locked_kib != info.status.locked_kib;
        }
        false
    }

    /// Adopts a verdict. `former` is the domain that the process's memory was marked in. Returns whether anything has
    /// changed.
    fn adopt_verdict(&mut self, verdict: Verdict, former: Option<DomainKey>) -> bool {
        let Verdict { domain, domain_name, mut excluded, overridden, group, notes } = verdict;
        let mut changed = self.group != group;
        self.group = group;
        self.notes = notes;
        self.check.domain = domain;
        let has_moved = former.is_some_and(|former| former != domain);
        if has_moved && excluded.is_none() {
            excluded = Some(Exclusion::MovedDomain { to: domain_name });
        }
        if !has_moved && self.domain != domain {
            self.domain = domain;
            self.forget_memory();
            changed = true;
        } else if let Some(former) = former {
            self.domain = former;
        }
        self.check.set_overridden(if excluded.is_none() { overridden } else { Vec::new() });
        self.exclude(excluded) || changed
    }

    /// Leaves the process as a whole alone, or stops doing so. Returns whether that changed anything.
    fn exclude(&mut self, excluded: Option<Exclusion>) -> bool {
        let is_new = self.check.excluded != excluded;
        match &excluded {
            Some(reason) => {
                self.leave_alone(reason.clone());
                if is_new {
                    self.forget_survey();
                }
                let marks = if matches!(reason, Exclusion::KeptOut { .. }) { Marks::All } else { Marks::Mappings };
                // There may be marks that we don't know of, set by an earlier run or by the process itself.
                let may_be_marked = self.marks.are_set || is_new && marks == Marks::All;
                if reason.withdraws_marks() && may_be_marked {
                    self.request_unmark(reason.clone(), marks);
                }
            }
            None if is_new => {
                // The survey also finds the regions that we've kept.
                self.exclusion = None;
                self.invalidate();
                self.pending = self.pending.take().filter(|pending| pending.reason == Exclusion::OtherProgram);
            }
            None => {}
        }
        self.check.excluded = excluded;
        is_new
    }

    /// The overridden opt-outs that we haven't reported yet.
    pub(crate) fn take_overridden(&mut self) -> Vec<OptOut> {
        std::mem::take(&mut self.check.unreported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_of_many_processes_become_rarer_but_not_rarer_than_they_must() {
        let of = |processes: u64, us: u64| recheck_ns(processes * us * 1_000) / 1_000_000;
        assert_eq!([of(1, 80), of(50, 80)], [2_000, 2_000]);
        assert_eq!([of(128, 80), of(1_000, 80), of(2_000, 80)], [5_120, 10_000, 16_000]);
    }
}
