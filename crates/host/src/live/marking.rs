//! Marking and unmarking spans of memory, so that ksmd merges it or no longer does: we make the targets call madvise(2)
//! with MADV_MERGEABLE or MADV_UNMERGEABLE.

use super::LiveHost;
use super::turns::{Pass, comes_last};
use crate::judge::Judge;
use crate::scope::exclude::{Exclusion, vma_exclusion};
use crate::targets::Marks;
use crate::targets::Target;
use pagefold_engine::host::{Change, ChangeResult, Marking, Outcome, Span, StopSize};
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages, count};
use pagefold_inject::unmerge::{CALLS_MOST, UnmergeError, step_bytes, steps, unmark_in_steps};
use pagefold_inject::{Batch, Call, Errno, InjectError, InjectionReport, Injector, Limits};
use pagefold_procmem::Roots;
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{Names, VmaDetail, each_mapping, read_smaps};
use pagefold_procmem::os::abandonable::{Job, PATIENCE};
use pagefold_procmem::os::fault;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::PASSES;
use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

/// We allow this long for a call that marks, nanoseconds. It takes microseconds, unless another thread of the process
/// holds the mmap lock.
const MARK_NS: u64 = 250_000_000;

/// A list of at least `MANY_MAPPINGS` may lack empty mappings, so we count all mappings of the process before we split
/// any. We leave the process `SPARE_MAPPINGS` below the kernel's limit: at the limit, its own mmap(2) would fail.
const MANY_MAPPINGS: usize = 2_048;
const SPARE_MAPPINGS: usize = 1_024;
/// The kernel's default of `vm.max_map_count`.
const DEFAULT_MAPPINGS_MOST: usize = 65_530;

/// The calls that change the marks of one process.
#[derive(Debug, Default)]
struct CallBatch {
    /// The program that we judged.
    program: Option<ProgramId>,
    /// How much memory one call may unmark. `None` if the calls mark memory.
    unmark_step: Option<Bytes>,
    calls: Vec<Call>,
    /// For each call, the part of a change that it makes.
    parts: Vec<Part>,
    /// Of the mappings to mark, the ones that have huge pages: start and end.
    huge: Vec<(u64, u64)>,
    /// Parts already in the requested state: marked by the program itself, or by an earlier try.
    done: Vec<Part>,
    /// How many more mappings the calls may add by splitting others.
    splits_left: usize,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    /// The index of the change that this part belongs to.
    change: usize,
    pages: Pages,
}

impl CallBatch {
    /// Adds the calls that make a change in the current mappings. If the span covers its region (`is_whole`), we change
    /// whole mappings even if they've grown since, because marking a part would split them. Adds nothing and returns
    /// false if that takes more splits than are left.
    fn add(&mut self, change: usize, span: Span, is_whole: bool, details: &[VmaDetail]) -> bool {
        let mut splits = 0;
        let mut ranges = Vec::new();
        for detail in details {
            if vma_exclusion(detail).is_some() {
                continue;
            }
            let is_done = detail.flags.has(*b"mg") == self.unmark_step.is_none();
            let first = detail.vma.first();
            let end = first + detail.vma.pages().0;
            let mut from = first.max(span.first);
            let mut to = end.min(span.first + span.pages.0);
            if from >= to {
                continue;
            }
            if is_whole {
                from = first;
                to = end;
            }
            if !is_done {
                splits += usize::from(from > first) + usize::from(to < end);
            }
            ranges.push((detail, is_done, from, to));
        }
        if splits > self.splits_left {
            return false;
        }
        self.splits_left -= splits;
        let advice = if self.unmark_step.is_some() { libc::MADV_UNMERGEABLE } else { libc::MADV_MERGEABLE };
        for (detail, is_done, from, to) in ranges {
            if is_done {
                self.done.push(Part { change, pages: Pages(to.0 - from.0) });
                continue;
            }
            for (start, bytes) in steps(from.address(), to.address(), self.unmark_step.unwrap_or(Bytes(u64::MAX))) {
                self.calls.push(Call::madvise(start, bytes, advice));
                self.parts.push(Part { change, pages: Pages(bytes / PAGE_BYTES) });
            }
            if detail.anon_huge_kib > 0 && self.unmark_step.is_none() {
                self.huge.push((detail.vma.start, detail.vma.end));
            }
        }
        true
    }

    /// Makes the process call madvise. Unmarking runs in a thread that we may leave behind.
    fn run(&self, target: &Target, injector: &mut Injector, roots: &Roots, changes: &Changes<'_>) -> CallsRun {
        let Some(program) = self.program else { return Err(InjectError::OtherProgram { pid: target.pid() }.into()) };
        if changes.mark {
            fault::point("mark");
            let calls_per_stop = usize::try_from(changes.size.marks).unwrap_or(usize::MAX);
            let limits = Limits { calls_per_stop, call_ns: MARK_NS, ..Limits::default() };
            let process = &target.info.process;
            let ran = injector.run(Batch { process, program: &program, calls: &self.calls, limits: &limits });
            fault::point("marked");
            return Ok((ran?, Ok(())));
        }
        let process = target.info.process.clone();
        let calls = self.calls.clone();
        let injector = injector.handle();
        let roots = roots.clone();
        let job = Job::start(move || {
            let mut report = InjectionReport::default();
            let ran = unmark_in_steps(&process, &program, &injector, &roots, &calls, &mut report);
            (report, ran)
        });
        job.wait(PATIENCE).map_err(|mut job| {
            target.leave(&mut job.pending);
            InjectError::WorkerSilent.into()
        })
    }
}

/// The results of the calls, and why we didn't make all of them. The outer error means that we made none, or that we
/// don't know which ones we made.
type CallsRun = Result<(InjectionReport, Result<(), UnmergeError>), UnmergeError>;

/// Changes to make, and their results so far.
struct Changes<'a> {
    asked: &'a [Change],
    mark: bool,
    size: StopSize,
    results: Vec<Marking>,
}

impl Changes<'_> {
    fn add(&mut self, part: Part) {
        let marking = &mut self.results[part.change];
        *marking = match marking {
            Marking::Done(done) => Marking::Done(*done + part.pages),
            Marking::Untried | Marking::Busy | Marking::NoMappings | Marking::Refused => Marking::Done(part.pages),
        };
    }

    fn set(&mut self, changes: impl IntoIterator<Item = usize>, marking: Marking) {
        for change in changes {
            self.results[change] = marking;
        }
    }
}

/// Results for changes that we didn't make now, and may make later.
pub(super) fn all_busy(changes: &[Change]) -> Vec<ChangeResult> {
    changes.iter().map(|&change| ChangeResult { change, marking: Marking::Busy }).collect()
}

/// How many more mappings a process may have.
fn mappings_left(process: &Process, proc: &Path) -> Result<usize, ReadError> {
    let most = fs::read(proc.join("sys/vm/max_map_count")).unwrap_or_default();
    let most = String::from_utf8_lossy(&most).trim().parse().unwrap_or(DEFAULT_MAPPINGS_MOST);
    let mut count: usize = 0;
    let counted = each_mapping(process.open_file("maps")?, Names::Special, |_| {
        count += 1;
        ControlFlow::Continue(())
    });
    counted.map_err(|_| process.malformed("maps", "the mappings can't be counted"))?;
    Ok(most.saturating_sub(count))
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
            return all_busy(changes);
        }
        let results = vec![Marking::Refused; changes.len()];
        let mut all = Changes { asked: changes, mark, size, results };
        // We keep the order of the changes: ksmd visits processes in the order in which they were first marked.
        let mut by_pid: Vec<(i32, Vec<usize>)> = Vec::new();
        for (at, change) in changes.iter().enumerate() {
            let Some(&pid) = self.regions.pids.get(&change.span.region) else { continue };
            match by_pid.iter_mut().find(|(known, _)| *known == pid) {
                Some((_, wanted)) => wanted.push(at),
                None => by_pid.push((pid, vec![at])),
            }
        }
        let mut pass = Pass::begin();
        by_pid.sort_by_cached_key(|(pid, _)| self.targets.get(pid).is_some_and(comes_last));
        for (pid, wanted) in by_pid {
            let Some(origin) = self.targets.get(&pid).map(|target| target.origin) else { continue };
            if pass.is_over() {
                all.set(wanted, if mark { Marking::Untried } else { Marking::Busy });
                continue;
            }
            self.change_process(pid, &wanted, &mut all, outcome);
            pass.charge(origin);
        }
        changes.iter().zip(all.results).map(|(&change, marking)| ChangeResult { change, marking }).collect()
    }

    /// Makes the `wanted` changes in one process.
    fn change_process(&mut self, pid: i32, wanted: &[usize], changes: &mut Changes<'_>, outcome: &mut Outcome) {
        let mark = changes.mark;
        if mark && !(self.may_be_marked(pid) && self.record_program(pid)) {
            changes.set(wanted.iter().copied(), Marking::Busy);
            return;
        }
        let Some(target) = self.targets.get_mut(&pid) else { return };
        let program = target.program();
        // We read the mappings again just before we act: they may have changed, and some may be excluded now.
        let details = match target.mappings_now() {
            Ok(details) => details,
            Err(ReadError::Vanished { .. }) => return,
            // The error may be temporary, such as a lack of memory.
            Err(error) => {
                if !error.is_late() {
                    self.report_left_alone(pid, error.to_string());
                }
                changes.set(wanted.iter().copied(), Marking::Busy);
                return;
            }
        };
        let proc = self.rules.roots.proc.clone();
        let has_many = details.len() >= MANY_MAPPINGS;
        let least_step = least_step(&details);
        let read = target.read(move |process| {
            let unmark_step = if mark { None } else { Some(step_bytes(process)?.max(least_step)) };
            let left = if has_many { mappings_left(process, &proc)? } else { usize::MAX };
            let splits_left = left.saturating_sub(SPARE_MAPPINGS);
            Ok(CallBatch { program, unmark_step, splits_left, ..CallBatch::default() })
        });
        let Ok(mut work) = read else {
            changes.set(wanted.iter().copied(), Marking::Busy);
            return;
        };
        for &at in wanted {
            let span = changes.asked[at].span;
            if !work.add(at, span, target.is_whole(&span), &details) {
                changes.results[at] = Marking::NoMappings;
            }
        }
        for &(start, end) in &work.huge {
            target.huge.record(start, end);
        }
        target.invalidate();
        self.schedule.next_ns = 0;
        let is_unknown = self.make(pid, &work, changes, outcome);
        if wanted.iter().any(|&at| changes.results[at] == Marking::NoMappings) {
            let why = "changing its marks would add mappings, and it is close to vm.max_map_count".to_owned();
            self.report_left_alone(pid, why);
        }
        if mark && (is_unknown || wanted.iter().any(|&at| matches!(changes.results[at], Marking::Done(_)))) {
            self.record_marked(pid);
        }
    }

    /// Whether there are marks that must go and that we haven't tried to remove yet. As long as there are, we make no
    /// new ones. A user or cgroup that has used up its part of the time can't hold up others in this way.
    pub(super) fn must_unmark_first(&self) -> bool {
        self.actuator.is_some() && self.targets.values().any(must_be_unmarked_first)
    }

    /// Whether memory of a trust domain other than the merged one is still marked, or may be. ksmd would merge both
    /// domains. So until such marks are gone, however long that takes, we mark nothing and let ksmd rest.
    pub(super) fn has_foreign_marks(&self) -> bool {
        let (Some(merged), Some(_)) = (self.rules.merged, &self.actuator) else { return false };
        !self.schedule.are_all_checked
            || self.targets.values().any(|target| target.has_foreign_marks(merged))
            || self.forks.domains().any(|domain| domain != merged)
    }

    /// Checks a process again just before we mark it. Returns true only if nothing about it has changed, we may read
    /// it, and no marks wait to be removed.
    pub(super) fn may_be_marked(&mut self, pid: i32) -> bool {
        let now_ns = self.now_ns();
        let mut judge = Judge::new(&mut self.rules, &self.history);
        let Some(target) = self.targets.get_mut(&pid) else { return false };
        let is_unchanged = !target.notice_exec() && matches!(target.recheck(now_ns, 1, &mut judge), Ok(false));
        if !is_unchanged {
            self.schedule.next_ns = 0;
        }
        is_unchanged && target.may_be_read() && target.pending.is_none()
    }

    /// Records a program that we're about to mark, for later runs. Returns false if we couldn't.
    pub(super) fn record_program(&mut self, pid: i32) -> bool {
        let (Some(target), Some(_)) = (self.targets.get(&pid), &self.actuator) else { return true };
        let Some(image) = target.image() else { return false };
        let domain = self.rules.domains.name(target.domain).map_or("", String::as_str);
        let recorded = self.history.marked.add(image, target.domain, domain);
        if let Err(error) = &recorded {
            self.report_left_alone(pid, format!("it is not marked, because we cannot record that it is: {error}"));
        }
        recorded.is_ok()
    }

    /// Records that we've marked memory of a process. If the process has called exec since we judged it, we may have
    /// marked its new program instead.
    pub(super) fn record_marked(&mut self, pid: i32) {
        if self.actuator.is_none() {
            return;
        }
        let Some(target) = self.targets.get_mut(&pid) else { return };
        if target.notice_exec() {
            target.set_marked();
            target.request_unmark(Exclusion::OtherProgram, Marks::Mappings);
        } else {
            target.set_marked();
        }
    }

    /// Makes the calls in a process. Returns true if the results may be incomplete: we don't know which calls were made,
    /// some may still be made, or a mapping has moved with its mark.
    fn make(&mut self, pid: i32, work: &CallBatch, changes: &mut Changes<'_>, outcome: &mut Outcome) -> bool {
        let Some(target) = self.targets.get_mut(&pid) else { return false };
        for &part in &work.done {
            changes.add(part);
        }
        let Some(actuator) = &mut self.actuator else {
            for &part in &work.parts {
                changes.add(part);
            }
            return false;
        };
        let (report, ran) = match work.run(target, &mut actuator.injector, &self.rules.roots, changes) {
            Ok(run) => run,
            Err(error) => (InjectionReport::default(), Err(error)),
        };
        outcome.stops.extend(report.stops_of(target.owner));
        for (&part, result) in work.parts.iter().zip(&report.results) {
            if result.is_ok() {
                changes.add(part);
            }
        }
        for (&part, result) in work.parts.iter().zip(&report.results) {
            let Err(error) = result else { continue };
            let marking = &mut changes.results[part.change];
            // A span with a failed call doesn't count as unmarked, because some of its marks are left. But it does
            // count as marked if another call has marked a part of it.
            if !changes.mark || *marking == Marking::Refused {
                *marking = marking_after(*error, changes.mark);
            }
        }
        match ran {
            Ok(()) => false,
            Err(UnmergeError::Inject(error)) => {
                let marking = if error.is_passing() { Marking::Busy } else { Marking::Refused };
                changes.set(work.parts.iter().map(|part| part.change), marking);
                let may_be_marked = find_changed(target, work, changes);
                self.report_left_alone(pid, error.to_string());
                error.is_unknown() || may_be_marked
            }
            // The process's memory limits have no room for more copies.
            Err(_) => {
                changes.set(work.parts[report.results.len()..].iter().map(|part| part.change), Marking::Busy);
                false
            }
        }
    }
}

/// The smallest steps in which [`CALLS_MOST`] calls unmark all marked memory of a process.
fn least_step(details: &[VmaDetail]) -> Bytes {
    let mut marked = Pages(0);
    for detail in details.iter().filter(|detail| detail.flags.has(*b"mg")) {
        marked += detail.vma.pages();
    }
    Pages(marked.0.div_ceil(count(CALLS_MOST))).bytes()
}

fn must_be_unmarked_first(target: &Target) -> bool {
    target.pending.as_ref().is_some_and(|pending| !pending.was_tried) && PASSES.admits(target.origin, Instant::now())
}

/// The result of a change that needs several calls, if one of them fails with this error.
fn marking_after(error: Errno, mark: bool) -> Marking {
    match error {
        // The kernel can't split a mapping, because vm.max_map_count is low, or part of the range isn't mapped any
        // more.
        Errno(libc::ENOMEM) => Marking::NoMappings,
        // Unmarking ends early if the process gets a signal.
        _ if !mark => Marking::Busy,
        _ => Marking::Refused,
    }
}

/// Finds out from the mappings which calls were made before the injection failed. Memory that we've unmarked only in
/// part doesn't count as unmarked. Returns whether the process may have marks that aren't in the results: a mapping
/// that has moved takes its mark along.
fn find_changed(target: &mut Target, work: &CallBatch, changes: &mut Changes<'_>) -> bool {
    let read =
        target.read(|process| Ok((read_smaps(process).unwrap_or_default(), KsmStat::of(process).unwrap_or_default())));
    let (details, stat) = read.unwrap_or_default();
    let mut made = Vec::new();
    let mut partial = BTreeSet::new();
    for (call, &part) in work.calls.iter().zip(&work.parts) {
        if is_in_state(&details, call.args[0], call.args[0] + call.args[1], changes.mark) {
            made.push(part);
        } else if !changes.mark {
            partial.insert(part.change);
        }
    }
    made.retain(|part| !partial.contains(&part.change));
    for part in made {
        changes.add(part);
    }
    changes.mark && stat.mergeable != Some(false)
}

/// Whether all of a range is mapped, and marked or (if not `marked`) not marked.
fn is_in_state(details: &[VmaDetail], start: u64, end: u64, marked: bool) -> bool {
    let mut from = start;
    for detail in details {
        if detail.vma.end <= start || detail.vma.start >= end {
            continue;
        }
        if detail.vma.start > from || detail.flags.has(*b"mg") != marked {
            return false;
        }
        from = detail.vma.end;
    }
    from >= end
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::keys::RegionKey;
    use pagefold_engine::units::Vpn;
    use pagefold_procmem::maps::parse_smaps;

    #[test]
    fn without_mappings_to_spare_only_changes_that_split_some_are_put_off() {
        let mapping = |range: &str, mark: &str| {
            format!("{range} rw-p 00000000 00:00 0 \nRss: 64 kB\nAnonymous: 64 kB\nVmFlags: rd wr mr mw me ac {mark}\n")
        };
        let text = [mapping("10000-20000", ""), mapping("30000-40000", ""), mapping("50000-60000", "mg")].concat();
        let details = parse_smaps(text.as_bytes()).unwrap();
        let span = |first, pages| Span { region: RegionKey(1), first: Vpn(first), pages: Pages(pages) };
        let mut work = CallBatch { splits_left: 1, ..CallBatch::default() };
        assert!(!work.add(0, span(0x12, 2), false, &details), "it splits twice");
        assert!(work.add(1, span(0x10, 8), false, &details));
        assert!(!work.add(2, span(0x30, 8), false, &details), "none is left");
        assert!(work.add(3, span(0x30, 8), true, &details), "the mapping has grown");
        let mut unmarking = CallBatch { unmark_step: Some(Bytes(1 << 30)), ..CallBatch::default() };
        assert!(!unmarking.add(0, span(0x50, 4), false, &details));
        assert!(unmarking.add(1, span(0x50, 4), true, &details));
        assert_eq!([work.calls.len(), unmarking.calls.len()], [2, 1]);
    }

    #[test]
    fn unmarking_reserved_memory_takes_few_calls() {
        let text =
            "100000000000-200000000000 rw-p 00000000 00:00 0 \nRss: 64 kB\nAnonymous: 64 kB\nVmFlags: rd wr mg\n";
        let details = parse_smaps(text.as_bytes()).unwrap();
        let span = Span { region: RegionKey(1), first: details[0].vma.first(), pages: details[0].vma.pages() };
        let unmark_step = Some(Bytes(8 << 20).max(least_step(&details)));
        let mut work = CallBatch { unmark_step, splits_left: 2, ..CallBatch::default() };
        assert!(work.add(0, span, true, &details));
        assert_eq!(work.calls.len(), CALLS_MOST);
        let small = parse_smaps(text.replace("200000000000", "100001000000").as_bytes()).unwrap();
        assert_eq!(least_step(&small), Bytes(PAGE_BYTES));
    }
}
