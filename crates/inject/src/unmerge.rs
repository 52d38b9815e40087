//! Unmerging: unmarks everything that's marked in a process, so that every merged page gets its own copy again.
//!
//! The kernel would make the copies within the system call that unmarks, in the target's own time and under its mmap
//! lock (`unmerge_ksm_pages`, mm/ksm.c). If we read a merged page from outside, the kernel copies it, too, while the
//! target keeps running. So we first read all merged pages, in steps, and check the target's memory limits before each
//! step. Then one call unmarks a whole mapping and has little left to copy. We don't unmark a part of a mapping on its
//! own: that would split the mapping, and a program that moves its memory just then would notice. In two cases we do
//! unmark a mapping in steps. In the first, ksmd has replaced many pages of the process by the kernel's zero page: only
//! the call unmerges those. In the second, the kernel doesn't tell merged from fork-shared pages, and our reads would
//! copy both.

use crate::{Batch, Call, Errno, InjectError, InjectionReport, InjectorHandle, Limits};
use pagefold_engine::relief::UNMERGE_STEP;
use pagefold_engine::units::{Bytes, PAGE_BYTES, Pages, Vpn};
use pagefold_procmem::Roots;
use pagefold_procmem::headroom::{Headroom, headroom};
use pagefold_procmem::image::{ProgramId, is_32_bit};
use pagefold_procmem::kpageflags::shows_merged;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::{VmaDetail, read_marked, read_merged};
use pagefold_procmem::memory::PageReader;
use pagefold_procmem::merge_any::PR_SET_MEMORY_MERGE;
use pagefold_procmem::numa::PreferNode;
use pagefold_procmem::os::abandonable::advance;
use pagefold_procmem::os::fault;
use pagefold_procmem::process::{Process, ReadError};
use std::thread::sleep;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long we keep trying a target that is too busy to be stopped, and the pause between tries.
const RETRY_LIMIT: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// When we copy merged pages from outside, we check the limits after this much address space: 2 MiB, some 2 ms.
const COPY_BYTES: u64 = UNMERGE_STEP.0 * PAGE_BYTES;
/// How much address space one call unmarks if it has to make the copies.
const STEP_BYTES: u64 = 4 * COPY_BYTES;
/// How much address space one call unmarks if it copies little. Walking that much takes the kernel some 40 ms at most.
const WHOLE_BYTES: u64 = 1 << 30;
/// How many calls we collect at most: a process may have marked nearly all of its address space.
pub const CALLS_MOST: usize = 4096;
/// How long a call that unmarks may take, including its wait for the mmap lock.
const CALL_NS: u64 = 1_000_000_000;
/// We give up after this many attempts: the mappings keep changing, or signals keep interrupting the calls.
const ATTEMPTS: u32 = 5;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unmerged {
    pub unmarked: Bytes,
    /// How much memory we've unmerged. Includes zero pages only where the kernel counts them per process (6.10).
    pub given_back: Bytes,
    pub longest_stop_ns: u64,
    pub mappings: Vec<UnmarkedMapping>,
}

/// A mapping that was marked when we began to unmerge its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmarkedMapping {
    pub start: u64,
    pub end: u64,
    /// How much of the mapping isn't marked any more.
    pub unmarked: Bytes,
}

/// Why we couldn't unmerge a process completely.
#[derive(Debug, Error)]
pub enum UnmergeError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// The copies wouldn't fit into the process's memory limits. `left` is how much the limits leave, `wanted` the size
    /// of a step plus a margin.
    #[error("process {pid} has room for {:.0} MiB only, but each step of unmerging needs {:.0} MiB; raise the memory limit of its cgroup or free memory, then unmerge again", left.mib(), wanted.mib())]
    NoRoom { pid: i32, left: Bytes, wanted: Bytes },
    /// The process keeps its mmap lock: we can neither read it nor change its marks.
    #[error("process {pid} ({name}) keeps its memory map locked")]
    Locked { pid: i32, name: String },
    #[error("process {pid} ({name}) is still being unmerged")]
    UnderWay { pid: i32, name: String },
    #[error(
        "process {pid} runs a 32-bit program, which cannot be unmarked from outside; end it, or start it without pagefold exec"
    )]
    Bits32 { pid: i32 },
    /// The kernel refused, or the mappings kept changing.
    #[error("process {pid} could not be unmerged completely: {why}")]
    Left { pid: i32, why: String },
}

impl UnmergeError {
    /// Whether the process keeps its mmap lock.
    pub fn is_late(&self) -> bool {
        match self {
            Self::Read(error) => error.is_late(),
            Self::Locked { .. } => true,
            _ => false,
        }
    }

    /// Whether we didn't try because the process's user or cgroup has used up its part of the injector's time.
    pub fn must_wait(&self) -> bool {
        matches!(self, Self::Inject(InjectError::OthersStalled { .. }))
    }

    /// Whether the process has ended, so that none of its memory is merged any more.
    pub fn has_ended(&self) -> bool {
        matches!(
            self,
            Self::Read(ReadError::Vanished { .. })
                | Self::Inject(InjectError::Vanished { .. } | InjectError::Zombie { .. })
        )
    }
}

/// Cuts an address range into pieces of `step` bytes at most. Yields the start of each, and its length in bytes.
pub fn steps(start: u64, end: u64, step: Bytes) -> impl Iterator<Item = (u64, u64)> {
    let by = usize::try_from(step.0).unwrap_or(usize::MAX);
    (start..end).step_by(by).map(move |at| (at, step.0.min(end - at)))
}

/// How much of a process's address space one call may unmark: little if the call itself must copy many merged pages.
pub fn step_bytes(process: &Process) -> Result<Bytes, ReadError> {
    let zero_kib = KsmStat::of(process)?.zero_kib;
    let copies = zero_kib.saturating_mul(1024) > STEP_BYTES || !shows_merged();
    Ok(Bytes(if copies { STEP_BYTES } else { WHOLE_BYTES }))
}

/// Makes `calls`, which unmark memory, one by one. If we can tell which pages are merged, first copies those that an
/// `madvise` call would copy. Fails when memory limits leave no room for the next step. `report` shows how far we got,
/// also after an error.
pub fn unmark_in_steps(
    process: &Process,
    program: &ProgramId,
    injector: &InjectorHandle,
    roots: &Roots,
    calls: &[Call],
    report: &mut InjectionReport,
) -> Result<(), UnmergeError> {
    // The injector couldn't make the calls, so we'd copy in vain.
    if !calls.is_empty() && is_32_bit(process, "") {
        return Err(UnmergeError::Bits32 { pid: process.pid() });
    }
    let limits = Limits { calls_per_stop: 1, call_ns: CALL_NS, ..Limits::default() };
    let mut reader = PageReader::new();
    let _prefer_node = PreferNode::of(process);
    // If we can't see which pages are merged, we assume that all are in the call's range, or at least a step of them.
    let copies_most = if shows_merged() { 0 } else { MarkState::of(process)?.copies_kib.saturating_mul(1024) };
    for call in calls {
        // ksmd goes on merging meanwhile, so we ask before each call how much it has to copy.
        let copies = if call.nr == libc::SYS_prctl {
            // This call also unmarks mappings that were made meanwhile. If they hold much, it waits for the next try.
            let kib = MarkState::of(process)?.copies_kib;
            if kib > STEP_BYTES / 1024 {
                break;
            }
            kib * 1024
        } else if shows_merged() {
            // We copy the merged pages first, and the call copies the zero pages.
            copy_merged(&mut reader, process, roots, call.args[0], call.args[0] + call.args[1])?;
            KsmStat::of(process)?.zeros().bytes().0.min(call.args[1])
        } else if copies_most > 0 || KsmStat::of(process)?.merged() > Pages(0) {
            copies_most.max(STEP_BYTES).min(call.args[1])
        } else {
            0
        };
        check_room(process, roots, copies)?;
        fault::point("unmark");
        let done =
            injector.run_first(Batch { process, program, calls: std::slice::from_ref(call), limits: &limits })?;
        fault::point("unmarked");
        advance();
        for result in done.results {
            // Linux before 6.4 doesn't have the prctl, so it has marked no process as a whole.
            let is_unknown = call.nr == libc::SYS_prctl && result == Err(Errno(libc::EINVAL));
            report.results.push(if is_unknown { Ok(0) } else { result });
        }
        report.stops += done.stops;
        report.longest_stop_ns = report.longest_stop_ns.max(done.longest_stop_ns);
        report.total_stop_ns += done.total_stop_ns;
        report.stop_lengths += done.stop_lengths;
    }
    Ok(())
}

/// Gives each merged page of an address range its own copy. Fails when the process's memory limits leave no room for
/// the next step.
fn copy_merged(
    reader: &mut PageReader,
    process: &Process,
    roots: &Roots,
    start: u64,
    end: u64,
) -> Result<Pages, UnmergeError> {
    let mut copied = Pages(0);
    // The range may be much larger than the memory in it, so we only visit the pieces with merged pages.
    for (at, bytes) in steps(start, end, Bytes(WHOLE_BYTES)) {
        let run = (Vpn::of_address(at), u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX));
        // The number of each such piece, and how many pages we copy there.
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        reader.merged_frames(process, &[run], true, |page, _| match pieces.last_mut() {
            Some((piece, pages)) if *piece == page.address() / COPY_BYTES => *pages += 1,
            _ => pieces.push((page.address() / COPY_BYTES, 1)),
        })?;
        for (piece, pages) in pieces {
            check_room(process, roots, pages * PAGE_BYTES)?;
            let from = at.max(piece * COPY_BYTES);
            let to = (at + bytes).min((piece + 1) * COPY_BYTES);
            copied += reader.unmerge(process, Vpn::of_address(from), Pages((to - from) / PAGE_BYTES))?;
        }
    }
    Ok(copied)
}

/// Fails unless the process's memory limits leave room for this many bytes of copies. Without copies we need no room,
/// however close the process is to its limit.
fn check_room(process: &Process, roots: &Roots, copies: u64) -> Result<(), UnmergeError> {
    if copies == 0 {
        return Ok(());
    }
    let Headroom { left, margin } = headroom(process, &roots.proc, &roots.cgroup)?;
    let wanted = Bytes(copies + margin.0);
    if left < wanted { Err(UnmergeError::NoRoom { pid: process.pid(), left, wanted }) } else { Ok(()) }
}

/// Refuses processes without memory: nothing can be marked in them, so the user has probably named the wrong process.
pub fn need_memory(process: &Process) -> Result<(), UnmergeError> {
    let pid = process.pid();
    let stat = process.stat()?;
    if stat.kernel_thread {
        return Err(InjectError::KernelThread { pid }.into());
    }
    if stat.is_zombie() {
        return Err(InjectError::Zombie { pid }.into());
    }
    Ok(())
}

/// Unmarks everything that's marked in a process. Adds to `done` how far we got, also after an error.
///
/// # Errors
/// [`UnmergeError::NoRoom`] if the process's memory limits leave no room for the copies. Memory that's already unmarked
/// stays unmarked.
pub fn unmerge(
    process: &Process,
    injector: &InjectorHandle,
    roots: &Roots,
    done: &mut Unmerged,
) -> Result<(), UnmergeError> {
    need_memory(process)?;
    let program = ProgramId::of(process)?;
    let before = MarkState::of(process)?;
    let ran = unmark_all(process, &program, injector, roots, before.clone(), &mut done.longest_stop_ns);
    match (&ran, MarkState::of(process)) {
        (_, Ok(after)) => done.record(&before, &after),
        // We've made all calls, but can't read their effect.
        (Ok(()), Err(error)) => return Err(error.into()),
        (Err(_), Err(_)) => {}
    }
    ran?;
    done.given_back.0 += copy_inherited(process, roots)?.bytes().0;
    Ok(())
}

/// Unmerges pages in unmarked mappings: when ksmd merges a page that two processes share since a fork, the page can end
/// up merged in both, though only one of them is marked.
pub fn copy_inherited(process: &Process, roots: &Roots) -> Result<Pages, UnmergeError> {
    let mut copied = Pages(0);
    if !shows_merged() {
        return Ok(copied);
    }
    let mut reader = PageReader::new();
    for _ in 0..ATTEMPTS {
        let merged = read_merged(process)?;
        if merged.is_empty() {
            break;
        }
        for VmaDetail { vma, .. } in merged {
            copied += copy_merged(&mut reader, process, roots, vma.start, vma.end)?;
            advance();
        }
    }
    Ok(copied)
}

fn unmark_all(
    process: &Process,
    program: &ProgramId,
    injector: &InjectorHandle,
    roots: &Roots,
    mut state: MarkState,
    longest_stop_ns: &mut u64,
) -> Result<(), UnmergeError> {
    let mut why = String::new();
    if state.shows_no_marks() {
        state.assume_not_marked_as_a_whole();
    }
    let mut attempts = ATTEMPTS;
    let end = Instant::now() + RETRY_LIMIT;
    while attempts > 0 {
        let mut calls = state.calls(step_bytes(process)?).peekable();
        if calls.peek().is_none() {
            break;
        }
        let mut ran = Ok(());
        let mut is_ended = false;
        while ran.is_ok() && calls.peek().is_some() {
            let some: Vec<Call> = calls.by_ref().take(CALLS_MOST).collect();
            let mut report = InjectionReport::default();
            ran = unmark_in_steps(process, program, injector, roots, &some, &mut report);
            *longest_stop_ns = report.longest_stop_ns.max(*longest_stop_ns);
            is_ended |= is_ended_by(&some, &report.results);
            if let Some(errno) = report.results.iter().find_map(|result| result.as_ref().err()) {
                why = errno.to_string();
            }
        }
        drop(calls);
        match ran {
            // Our caller tries again once the user or cgroup has some time left.
            Err(error) if error.must_wait() => return Err(error),
            // Unmarking twice does no harm.
            Err(UnmergeError::Inject(error)) if error.is_passing() && Instant::now() < end => sleep(RETRY_PAUSE),
            ran => {
                ran?;
                attempts -= 1;
            }
        }
        state = MarkState::of(process)?;
        if is_ended {
            state.assume_not_marked_as_a_whole();
        }
    }
    if state.is_marked() { Err(UnmergeError::Left { pid: process.pid(), why }) } else { Ok(()) }
}

impl Unmerged {
    /// Adds how much was unmarked and unmerged, from the states before and after.
    fn record(&mut self, before: &MarkState, after: &MarkState) {
        self.given_back.0 += before.merged_kib.saturating_sub(after.merged_kib).saturating_mul(1024);
        for &(start, end) in &before.marked {
            let still = after.marked.iter().map(|&(from, to)| to.min(end).saturating_sub(from.max(start)));
            let unmarked = Bytes(end - start - still.sum::<u64>());
            self.unmarked = Bytes(self.unmarked.0 + unmarked.0);
            self.mappings.push(UnmarkedMapping { start, end, unmarked });
        }
    }
}

/// The marked and merged memory of a process.
#[derive(Clone, Debug)]
pub struct MarkState {
    /// Whether the process is marked as a whole. `None` if the kernel doesn't say: then we make the prctl to be sure,
    /// which does nothing to a process that isn't.
    merge_any: Option<bool>,
    pub marked: Vec<(u64, u64)>,
    pub merged_kib: u64,
    /// How much unmarking may copy. Before Linux 6.7 the kernel doesn't show how much is merged, so this is all marked
    /// memory.
    copies_kib: u64,
    /// Whether ksmd keeps records of its pages: they are or were marked.
    is_known_to_ksmd: bool,
}

impl MarkState {
    fn of(process: &Process) -> Result<Self, ReadError> {
        Ok(Self::new(&read_marked(process)?, KsmStat::of(process)?))
    }

    /// `details` are the process's marked mappings.
    pub fn new(details: &[VmaDetail], stat: KsmStat) -> Self {
        let mut marked = Vec::new();
        let mut merged_kib: u64 = 0;
        let mut copies_kib: u64 = 0;
        for VmaDetail { vma, ksm_kib, .. } in details {
            marked.push((vma.start, vma.end));
            merged_kib += ksm_kib.unwrap_or(0);
            copies_kib += ksm_kib.unwrap_or((vma.end - vma.start) / 1024);
        }
        Self {
            merge_any: stat.merge_any,
            marked,
            merged_kib: merged_kib.saturating_add(stat.zero_kib),
            copies_kib: copies_kib.saturating_add(stat.zero_kib),
            is_known_to_ksmd: stat.items > 0,
        }
    }

    pub fn marked_bytes(&self) -> Bytes {
        Bytes(self.marked.iter().map(|(start, end)| end - start).sum())
    }

    fn is_marked(&self) -> bool {
        self.merge_any != Some(false) || !self.marked.is_empty()
    }

    /// Whether nothing suggests that memory is marked. A process that was marked as a whole may have no marked mappings
    /// any more, if we unmarked them and didn't get to the prctl.
    pub fn shows_no_marks(&self) -> bool {
        self.marked.is_empty() && !self.is_known_to_ksmd
    }

    /// Assumes that the process isn't marked as a whole, if the kernel doesn't say.
    pub fn assume_not_marked_as_a_whole(&mut self) {
        self.merge_any.get_or_insert(false);
    }

    /// The calls that remove the marks.
    pub fn calls(&self, step: Bytes) -> impl Iterator<Item = Call> + '_ {
        let pieces = self.marked.iter().flat_map(move |&(start, end)| steps(start, end, step));
        let unmark = pieces.map(|(at, bytes)| Call::madvise(at, bytes, libc::MADV_UNMERGEABLE));
        // The prctl ends the marking of future mappings, but also unmarks all that's left at once. So we only make this
        // call once no more than a step is left to copy. Pages outside of marked mappings remain merged.
        let copies_little = self.copies_kib <= STEP_BYTES / 1024 || self.marked.is_empty();
        let is_last = self.merge_any != Some(false) && copies_little;
        unmark.chain(is_last.then(|| Call::prctl(PR_SET_MEMORY_MERGE, [0; 4])))
    }
}

/// Whether the prctl among these calls was made, so that the process isn't marked as a whole any more.
pub fn is_ended_by(calls: &[Call], results: &[Result<u64, Errno>]) -> bool {
    calls.iter().zip(results).any(|(call, result)| call.nr == libc::SYS_prctl && result.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(merge_any: Option<bool>, bytes: u64, copies_kib: u64) -> MarkState {
        let marked = vec![(0x1000, 0x1000 + bytes)];
        MarkState { merge_any, marked, merged_kib: 0, copies_kib, is_known_to_ksmd: false }
    }

    #[test]
    fn large_mappings_are_unmarked_in_steps() {
        let lengths = |step| {
            let state = state(Some(false), STEP_BYTES + 4096, 0);
            state.calls(Bytes(step)).map(|call| call.args[1]).collect::<Vec<_>>()
        };
        assert_eq!(lengths(STEP_BYTES), [STEP_BYTES, 4096]);
        assert_eq!(lengths(WHOLE_BYTES), [STEP_BYTES + 4096]);
    }

    /// We produce the calls one by one as we need them, however much address space is marked.
    #[test]
    fn a_marked_address_space_takes_no_memory() {
        let state = state(Some(false), 1 << 47, 0);
        assert_eq!(state.calls(Bytes(STEP_BYTES)).take(CALLS_MOST).count(), CALLS_MOST);
    }

    /// We look for merged pages in populated memory only: 16 TiB of nothing take some 100 ms. Two million looks at the
    /// memory limits would take minutes.
    #[test]
    #[cfg_attr(not(feature = "live"), ignore = "needs root")]
    fn empty_address_space_is_walked_fast() {
        const EMPTY: usize = 16 << 40;
        if !shows_merged() {
            return pagefold_testkit::skip_unsupported("merged pages are not shown");
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), EMPTY, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let start = pagefold_engine::units::count(memory.addr());
        let began = Instant::now();
        let end = start + pagefold_engine::units::count(EMPTY);
        let copied = copy_merged(&mut PageReader::new(), &own, &Roots::default(), start, end).unwrap();
        assert_eq!(copied, Pages(0));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // SAFETY: nothing else refers to this memory.
        unsafe { libc::munmap(memory, EMPTY) };
    }

    #[test]
    fn the_call_that_unmarks_everything_comes_last_when_little_is_left() {
        let prctls = |state: MarkState| {
            state.calls(Bytes(STEP_BYTES)).map(|call| call.nr == libc::SYS_prctl).collect::<Vec<_>>()
        };
        // Before Linux 6.14 the kernel doesn't say whether a process is marked as a whole.
        for merge_any in [Some(true), None] {
            assert_eq!(prctls(state(merge_any, 2 * STEP_BYTES, 2 * STEP_BYTES / 1024)), [false, false]);
            assert_eq!(prctls(state(merge_any, 2 * STEP_BYTES, STEP_BYTES / 1024)), [false, false, true]);
            assert_eq!(prctls(state(merge_any, 0, 0)), [true]);
            let unmarked = MarkState { marked: Vec::new(), ..state(merge_any, 0, STEP_BYTES) };
            assert_eq!(prctls(unmarked), [true], "the zero pages aren't in marked mappings");
        }
        assert_eq!(prctls(state(Some(false), 4096, 0)), [false]);
        // In a process that ksmd knows, we may have unmarked all mappings and not made the prctl.
        let unmarked = MarkState { marked: Vec::new(), ..state(None, 0, 0) };
        assert!(unmarked.shows_no_marks() && !MarkState { is_known_to_ksmd: true, ..unmarked }.shows_no_marks());
        let mut unmarked = state(None, 4096, 0);
        unmarked.assume_not_marked_as_a_whole();
        assert_eq!(prctls(unmarked), [false]);
    }
}
