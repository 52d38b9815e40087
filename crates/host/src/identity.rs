//! The identity of a target: the facts that our verdict on a process rests on, read again every [`RECHECK_MIN_NS`].
//!
//! A process changes its user, executable, program and dumpable attribute only while it runs, and its CPU time shows us
//! at little cost that it hasn't run. Others change its cgroup and the cgroup's attributes, so we read them each time.
//! If a change excludes the process, or moves it to another trust domain, we unmark its memory before we mark anything
//! else. After an exec we start from scratch.

use crate::huge_mappings::HugeMappings;
use crate::scope::deny_list::DenyList;
use crate::scope::domain::{DomainRules, Domains, NO_DOMAIN};
use crate::scope::dumpable::{Dumpable, would_ask};
use crate::scope::exclude::{Exclusion, ProcessFacts, exclusion_of, judge_opt_outs};
use crate::scope::exe::Exe;
use crate::scope::kept_out::{KeptOut, Subject};
use crate::scope::opt_out::OptOut;
use crate::scope::opt_out_qemu;
use crate::scope::rule::{Rule, RuleFacts, first_match};
use crate::scope::{Candidate, CgroupFacts, ScopeSpec, Selection, cgroups_of};
use crate::targets::Target;
use pagefold_engine::host::Mechanism;
use pagefold_engine::keys::{DomainKey, GroupKey, LineageKey};
use pagefold_engine::marking::lifetimes::Lifetimes;
use pagefold_engine::units::{Bytes, Pages};
use pagefold_inject::unmerge::{UnmergeError, Unmerged};
use pagefold_procmem::Roots;
use pagefold_procmem::image::{AddressSpace, ProgramId, image_of};
use pagefold_procmem::maps::read_marked;
use pagefold_procmem::os::cpu::{own_cpu_ns, process_cpu_ns};
use pagefold_procmem::process::ReadError;
use pagefold_text::escape::printable;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Least time between two checks of a process, nanoseconds.
const RECHECK_MIN_NS: u64 = 2_000_000_000;
/// Checks may take 1/`RECHECK_SHARE` of the time: with some hundred processes we check each less often, but still every
/// `RECHECK_NS` as long as checks take no more than 1/`RECHECK_MOST_SHARE`.
const RECHECK_SHARE: u64 = 500;
const RECHECK_NS: u64 = 10_000_000_000;
const RECHECK_MOST_SHARE: u64 = 100;
/// The most that we count for one check, nanoseconds, so that no process can make its own checks rare. Most take 30 to
/// 150 us.
const RECHECK_COST_MOST_NS: u64 = 200_000;
/// The first and the longest pause after we couldn't remove marks, nanoseconds. The pause doubles each time.
const UNMARK_PAUSE_NS: u64 = 250_000_000;
const OWED_PAUSE_MAX_NS: u64 = 10_000_000_000;

/// What we knew at the last look.
#[derive(Debug, Default)]
pub(super) struct Identity {
    /// Whether the user selected the process by pid.
    named: bool,
    /// Absent before our first look at a program.
    seen: Option<Seen>,
    next_check_ns: u64,
    /// Why we leave the process as a whole alone.
    barred: Option<Exclusion>,
    /// Whether this run has marked some of its memory, or of its parent's before the fork.
    marked: bool,
    /// Whether we've removed all marks since.
    cleared: bool,
    /// The trust domain at the last look. The target's own doesn't change while memory is marked.
    domain: DomainKey,
    /// Opt-outs that don't count, and the ones among them that we haven't reported yet.
    overridden: Vec<OptOut>,
    unreported: Vec<OptOut>,
}

#[derive(Debug)]
struct Seen {
    image: u64,
    cgroups: CgroupFacts,
    /// CPU time before the look.
    cpu_ns: Option<u64>,
    locked_kib: u64,
    command_line: CommandLine,
    /// Whether we asked the process itself if it's dumpable, possibly before it last ran.
    asked: bool,
}

/// What we found on a program's command line.
#[derive(Clone, Copy, Debug)]
enum CommandLine {
    /// We didn't look.
    Unread,
    /// An opt-out, or none.
    Read(Option<&'static str>),
}

/// Which marks of a process must go. Later variants include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Marks {
    /// Marks on excluded mappings. If the process is marked as a whole, we leave them: it, or the administrator, wants
    /// them.
    Excluded,
    /// Marks on all mappings, unless the process is marked as a whole.
    Mappings,
    /// All marks, whoever set them, because somebody has asked for it.
    All,
}

/// Marks of a target that must go, because its memory is excluded now.
#[derive(Clone, Debug)]
pub struct PendingUnmark {
    pub reason: Exclusion,
    pub marks: Marks,
    /// Address space still marked at the last try.
    pub left: Bytes,
    /// Why the last try failed, if one did.
    pub problem: Option<Arc<UnmergeError>>,
    /// Merged memory at the first try, KiB.
    pub(super) merged_kib: Option<u64>,
    pub(super) tried: bool,
    pub(super) next_ns: u64,
    pause_ns: u64,
}

impl PendingUnmark {
    /// Puts off the next try.
    pub(super) fn put_off(&mut self, now_ns: u64, problem: UnmergeError) {
        let pause_ns = self.pause_ns;
        self.pause_ns = (pause_ns * 2).min(OWED_PAUSE_MAX_NS);
        self.look_again(now_ns, pause_ns, problem);
    }

    /// Lets us check soon whether the try under way has ended.
    pub(super) fn wait(&mut self, now_ns: u64, problem: UnmergeError) {
        self.look_again(now_ns, UNMARK_PAUSE_NS, problem);
    }

    fn look_again(&mut self, now_ns: u64, pause_ns: u64, problem: UnmergeError) {
        // Others wait for the first try only.
        self.tried = true;
        self.problem = Some(Arc::new(problem));
        self.next_ns = now_ns + pause_ns;
    }
}

/// The time between two checks of a process, if checking all processes takes `all_ns`.
fn recheck_ns(all_ns: u64) -> u64 {
    (all_ns * RECHECK_SHARE).clamp(RECHECK_MIN_NS, RECHECK_NS).max(all_ns * RECHECK_MOST_SHARE)
}

/// The rules that we judge processes by.
#[allow(missing_debug_implementations, reason = "lives for one refresh")]
pub struct Watch<'a> {
    roots: &'a Roots,
    deny: &'a DenyList,
    kept_out: &'a mut KeptOut,
    rules: &'a DomainRules,
    domains: &'a mut Domains,
    /// The one domain that is merged, if ksmd merges.
    merged: Option<DomainKey>,
    groups: &'a [Rule],
    programs: &'a Programs,
    selection: Selection<'a>,
    cgroups: HashMap<Vec<u8>, CgroupFacts>,
}

impl<'a> Watch<'a> {
    /// The rules for processes of a scope, who is left out of it, the domains known so far and the merged one, and the
    /// rules for groups with limits.
    pub fn new(
        (scope, roots): (&'a ScopeSpec, &'a Roots),
        (deny, kept_out): (&'a DenyList, &'a mut KeptOut),
        (rules, domains, merged): (&'a DomainRules, &'a mut Domains, Option<DomainKey>),
        groups: &'a [Rule],
        programs: &'a Programs,
    ) -> Self {
        let selection = Selection::of_existing(&scope.0, roots);
        let cgroups = HashMap::new();
        Self { roots, deny, kept_out, rules, domains, merged, groups, programs, selection, cgroups }
    }

    pub(super) fn programs(&self) -> &'a Programs {
        self.programs
    }

    /// Why we must leave a process in a trust domain alone, if we must.
    fn excluded_domain(&self, domain: DomainKey, name: &str) -> Option<Exclusion> {
        if domain == NO_DOMAIN {
            return Some(Exclusion::NoDomain);
        }
        let merged = self.merged.filter(|&merged| merged != domain)?;
        let merged = self.domains.name(merged).cloned().unwrap_or_default();
        Some(Exclusion::OtherDomain { own: name.to_owned(), merged })
    }

    fn cgroup_facts(&mut self, text: Vec<u8>) -> CgroupFacts {
        let selection = &mut self.selection;
        self.cgroups.entry(text).or_insert_with_key(|text| selection.cgroup_facts(text)).clone()
    }
}

/// What we know about programs.
#[derive(Debug, Default)]
pub struct Programs {
    /// Programs whose memory this run has marked, and their trust domain at that time: their forks have the marks too.
    pub(super) marked: HashMap<u64, DomainKey>,
    /// How long processes live.
    pub(super) lifetimes: Lifetimes,
    pub(super) mechanism: Mechanism,
}

impl Identity {
    pub(super) fn new(named: bool) -> Self {
        Self { named, ..Self::default() }
    }

    /// Whether this run has marked memory of the process that may still be marked.
    pub(super) fn is_marked(&self) -> bool {
        self.marked
    }

    /// Records that nothing is marked any more.
    pub(super) fn set_cleared(&mut self) {
        (self.marked, self.cleared) = (false, true);
        self.next_check_ns = 0;
        self.judge_again();
    }

    /// Makes the next look judge the process even if it hasn't run.
    fn judge_again(&mut self) {
        if let Some(seen) = &mut self.seen {
            seen.cpu_ns = None;
        }
    }
}

impl Target {
    /// The cgroups that can limit its memory: the mount point and the directory in each hierarchy.
    pub(super) fn limiting(&self) -> &[(PathBuf, PathBuf)] {
        self.identity.seen.as_ref().map_or(&[], |seen| &seen.cgroups.limiting)
    }

    /// Makes the next refresh look at the process and judge it again.
    pub fn judge_again(&mut self) {
        self.identity.judge_again();
        self.identity.next_check_ns = 0;
        self.invalidate();
    }

    /// The processes that share memory with it by fork: they run the same program, since the same exec.
    pub(super) fn lineage(&self) -> LineageKey {
        match self.image() {
            Some(image) if image != 0 => LineageKey(image),
            _ => LineageKey(self.owner.0.into()),
        }
    }

    /// The program as of the last look.
    pub(super) fn image(&self) -> Option<u64> {
        self.identity.seen.as_ref().map(|seen| seen.image)
    }

    /// Records that memory was marked; returns the program.
    pub(super) fn set_marked(&mut self) -> Option<u64> {
        (self.identity.marked, self.identity.cleared) = (true, false);
        self.identity.seen.as_ref().map(|seen| seen.image)
    }

    /// The program that our verdict is about; `None` before the first look.
    pub(super) fn program(&self) -> Option<ProgramId> {
        let seen = self.identity.seen.as_ref()?;
        Some(ProgramId { image: seen.image, exe: self.exe.as_ref().and_then(Exe::id), uid: self.uid })
    }

    pub(super) fn look_is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.identity.next_check_ns
    }

    /// Whether we leave the process as a whole alone.
    pub(super) fn is_barred(&self) -> bool {
        self.identity.barred.is_some()
    }

    /// Shows the reason if we leave the process as a whole alone. Returns whether another reason was shown until now.
    pub(super) fn show_barred(&mut self) -> bool {
        let is_shown = self.identity.barred.is_none() || self.exclusion == self.identity.barred;
        if !is_shown {
            self.exclusion.clone_from(&self.identity.barred);
        }
        !is_shown
    }

    /// Forgets everything if the process runs another program than at the last look; returns whether it does.
    pub(super) fn notice_exec(&mut self) -> bool {
        let executed = self.runs_another_program();
        if executed {
            self.forget_program();
        }
        executed
    }

    pub(super) fn runs_another_program(&self) -> bool {
        self.space.as_ref().is_some_and(|space| !space.exists())
    }

    fn forget_program(&mut self) {
        self.identity = Identity::new(self.identity.named);
        self.space = None;
        self.pending = None;
        self.huge = HugeMappings::default();
        self.exe = None;
        self.forget_memory();
    }

    /// Looks at the process, and judges it if anything may have changed. Returns whether anything has.
    pub(super) fn look(&mut self, now_ns: u64, processes: u64, watch: &mut Watch<'_>) -> Result<bool, ReadError> {
        let before_ns = own_cpu_ns();
        let changed = self.look_now(watch);
        let spent_ns = (own_cpu_ns() - before_ns).min(RECHECK_COST_MOST_NS);
        self.identity.next_check_ns = now_ns + recheck_ns(spent_ns * processes);
        changed
    }

    fn look_now(&mut self, watch: &mut Watch<'_>) -> Result<bool, ReadError> {
        let pid = self.process.pid();
        let cgroup_lines = cgroups_of(&self.process)?;
        let cgroups = watch.cgroup_facts(cgroup_lines.clone());
        let cpu_ns = process_cpu_ns(pid);
        let may_pass = self.identity.barred.as_ref().is_some_and(Exclusion::may_pass);
        let is_known = |seen: &Seen| {
            let has_run = seen.cpu_ns.is_none() || seen.cpu_ns != cpu_ns;
            !has_run && seen.cgroups == cgroups && !(seen.asked && would_ask(&self.process))
        };
        if self.identity.seen.as_ref().is_some_and(is_known) && !may_pass {
            return Ok(false);
        }
        // A command line belongs to one execution of a program.
        let known = self.identity.seen.as_ref().map(|seen| (seen.image, seen.command_line));
        let (space, mut facts, image, command_line) = self.read(move |process| {
            // A process that we must not read has none.
            let space = AddressSpace::of(process).ok();
            let facts = ProcessFacts::of(process)?;
            let image = match image_of(process) {
                Err(ReadError::Denied { .. }) => 0,
                other => other?,
            };
            let command_line = match known {
                Some((of, CommandLine::Read(option))) if of == image && image != 0 => CommandLine::Read(option),
                _ if facts.may_run_qemu() => CommandLine::Read(opt_out_qemu::of_process(process)?),
                _ => CommandLine::Unread,
            };
            Ok((space, facts, image, command_line))
        })?;
        let id = |exe: &Option<_>| exe.as_ref().and_then(Exe::id);
        let is_same_file = id(&self.exe) == id(&facts.exe);
        let mut changed = false;
        if self.identity.seen.as_ref().is_some_and(|seen| seen.image != image || !is_same_file) {
            self.forget_program();
            changed = true;
        } else if is_same_file && self.exe.is_some() {
            // When we first saw it we found out whether it's trusted: it may have been replaced since.
            facts.exe = self.exe.take();
        }
        self.space = space.or(self.space.take());
        if let Some(exe) = &facts.exe {
            let _ = exe.trust();
        }
        let locked_kib = facts.locked_kib;
        if self.identity.seen.as_ref().is_some_and(|seen| seen.locked_kib != locked_kib) {
            self.set_changed();
        }
        let former = self.inherited(image, watch);
        let candidate = Candidate {
            pid,
            by_pid: self.identity.named.then_some(pid),
            uid: facts.uid,
            exe: facts.exe.as_ref(),
            comm: &facts.comm,
        };
        let subject = Subject {
            process: &self.process,
            candidate: Candidate { by_pid: None, ..candidate },
            cgroups: &cgroup_lines,
            is_new: self.identity.seen.is_none(),
        };
        let kept_out = watch.kept_out.verdict(&subject, watch.roots);
        let kept_out = kept_out.map(|(by, selector)| (Exclusion::KeptOut { by }, selector.to_string()));
        let by_cgroups = (cgroups.opt_outs.as_slice(), cgroups.path.as_deref());
        let option = if let CommandLine::Read(option) = command_line { option } else { None };
        let (opted_out, overridden) = judge_opt_outs(&facts, by_cgroups, option, watch.deny);
        let name = printable(&facts.comm);
        self.name.clone_from(&name);
        let by = RuleFacts { cgroup: cgroups.path.as_deref(), uid: facts.uid, exe: facts.exe.as_ref(), name: &name };
        let mut notes = Vec::new();
        let assigned = watch.rules.domain_of(cgroups.domain.as_deref(), &by, &mut notes);
        let domain = watch.domains.key_of(&assigned).unwrap_or(NO_DOMAIN);
        self.selected_by = watch.selection.selected_by(&candidate, &cgroups);
        let barred = if let Some((reason, _)) = &kept_out {
            Some(reason.clone())
        } else if opted_out.is_some() {
            opted_out
        } else if self.selected_by.is_none() {
            Some(Exclusion::OutOfScope)
        } else if let Some(other) = watch.excluded_domain(domain, &assigned) {
            Some(other)
        } else {
            // Last, because this may stop the process.
            exclusion_of(&self.process, &facts, watch.deny)
        };
        if watch.merged.is_some_and(|merged| merged != domain) {
            self.find_marks()?;
        }
        let asked = facts.dumpable == Dumpable::Unknown;
        let group = first_match(watch.groups, &by, "the limits of", &mut notes);
        notes.extend(
            group.map(|group| format!("The limits of {} apply to it.", printable(watch.groups[group].name.as_bytes()))),
        );
        notes.extend(overridden.iter().map(|opt_out| format!("overridden: {opt_out}")));
        notes.extend(
            kept_out.map(|(_, selector)| format!("Kept out by request: pagefold include {selector} lets it in again.")),
        );
        let group = group.and_then(|group| u16::try_from(group).ok()).map(GroupKey);
        changed |= self.group != group;
        (self.notes, self.group) = (notes, group);
        self.identity.domain = domain;
        (self.uid, self.exe) = (facts.uid, facts.exe);
        self.cgroup.clone_from(&cgroups.path);
        self.identity.seen = Some(Seen { image, cgroups, cpu_ns, locked_kib, command_line, asked });
        let moved = former.is_some_and(|former| former != domain);
        let barred = barred.or_else(|| moved.then_some(Exclusion::MovedDomain { to: assigned }));
        if !moved && self.domain != domain {
            self.domain = domain;
            self.forget_memory();
            changed = true;
        } else if let Some(former) = former {
            self.domain = former;
        }
        let overridden = if barred.is_none() { overridden } else { Vec::new() };
        if self.identity.overridden != overridden {
            self.identity.unreported.clone_from(&overridden);
            self.identity.overridden = overridden;
        }
        Ok(self.bar(barred) || changed)
    }

    /// Checks once whether a process that was there before the run has marks. An earlier run that merged its domain may
    /// have set them. We merge nothing before they're gone. Marks that a process sets later are its own affair.
    fn find_marks(&mut self) -> Result<(), ReadError> {
        if self.appeared_ns.is_some() || self.marks_sought || self.only_to_unmerge {
            return Ok(());
        }
        let marked = self.read(|process| match read_marked(process) {
            // We can't unmark it either.
            Err(ReadError::Denied { .. }) => Ok(Vec::new()),
            marked => marked,
        })?;
        self.identity.marked |= !marked.is_empty();
        self.marks_sought = true;
        Ok(())
    }

    /// Whether it has marked memory although we merge another trust domain than its own, or than the one it was marked
    /// in.
    pub(super) fn has_foreign_marks(&self, merged: DomainKey) -> bool {
        self.identity.marked && (self.domain != merged || self.identity.domain != merged)
    }

    /// The overridden opt-outs of the process, each once.
    pub(super) fn take_overridden(&mut self) -> Vec<OptOut> {
        std::mem::take(&mut self.identity.unreported)
    }

    /// The trust domain that the process was in when its memory was marked, if it was: by this run, or in its parent
    /// before the fork.
    fn inherited(&mut self, image: u64, watch: &Watch<'_>) -> Option<DomainKey> {
        if self.identity.marked {
            return Some(self.domain);
        }
        let marked = watch.programs.marked.get(&image).filter(|_| !self.identity.cleared).copied();
        self.identity.marked = marked.is_some();
        marked
    }

    /// Leaves the process as a whole alone, or stops doing so. Returns whether that changed anything.
    fn bar(&mut self, barred: Option<Exclusion>) -> bool {
        let is_new = self.identity.barred != barred;
        match &barred {
            Some(reason) => {
                self.leave_alone(reason.clone());
                if is_new {
                    self.forget_survey();
                }
                let marks = if matches!(reason, Exclusion::KeptOut { .. }) { Marks::All } else { Marks::Mappings };
                // We don't know about marks of an earlier run or of the process itself.
                let may_be_marked = self.identity.marked || is_new && marks == Marks::All;
                if reason.withdraws_marks() && may_be_marked {
                    self.request_unmark(reason.clone(), marks);
                }
            }
            None if is_new => {
                // The survey finds the kept regions again.
                self.exclusion = None;
                self.invalidate();
                self.pending = self.pending.take().filter(|pending| pending.reason == Exclusion::OtherProgram);
            }
            None => {}
        }
        self.identity.barred = barred;
        is_new
    }

    /// Unmarks the whole process, because this user asked for it.
    pub(super) fn unmerge(&mut self, by: u32) {
        self.unmerged = Unmerged::default();
        self.pending = None;
        self.request_unmark(Exclusion::KeptOut { by }, Marks::All);
    }

    /// Counts the work done for an unmerge request; `merged_kib` of the memory is still merged.
    pub(super) fn count_unmerged(&mut self, merged_kib: u64, unmarked: Pages, longest_stop_ns: u64) {
        let Some(pending) = self.pending.as_mut().filter(|pending| pending.marks == Marks::All) else { return };
        let before_kib = *pending.merged_kib.get_or_insert(merged_kib);
        let done = &mut self.unmerged;
        done.given_back = Bytes(before_kib.saturating_sub(merged_kib).saturating_mul(1024));
        done.unmarked = Bytes(done.unmarked.0 + unmarked.bytes().0);
        done.longest_stop_ns = done.longest_stop_ns.max(longest_stop_ns);
    }

    pub(super) fn put_off(&mut self, now_ns: u64, problem: UnmergeError) {
        if let Some(pending) = &mut self.pending {
            pending.put_off(now_ns, problem);
        }
    }

    /// Lets us check soon whether the try under way to remove marks has ended.
    pub(super) fn wait(&mut self, now_ns: u64, problem: UnmergeError) {
        if let Some(pending) = &mut self.pending {
            pending.wait(now_ns, problem);
        }
    }

    /// Records a try to remove marks, and how much there is to remove.
    pub(super) fn set_pending_left(&mut self, left: Bytes) {
        if let Some(pending) = &mut self.pending {
            (pending.tried, pending.left) = (true, left);
        }
    }

    /// Records that we've removed all marks that had to go.
    pub(super) fn set_settled(&mut self) {
        match self.pending.take() {
            Some(pending) if pending.marks > Marks::Excluded => self.identity.set_cleared(),
            _ => self.set_changed(),
        }
    }

    /// Records that marks must go.
    pub(super) fn request_unmark(&mut self, reason: Exclusion, marks: Marks) {
        if self.pending.as_ref().is_none_or(|pending| marks > pending.marks) {
            let left = Bytes(0);
            self.pending = Some(PendingUnmark {
                reason,
                marks,
                left,
                problem: None,
                merged_kib: None,
                tried: false,
                next_ns: 0,
                pause_ns: UNMARK_PAUSE_NS,
            });
        }
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
