//! One attempt: choose a thread, seize it, interrupt it, let [`Tracee`] make the calls, and report the result.
//!
//! Each attempt runs on a thread of its own. If a thread of the target doesn't stop in time (a vfork parent, a frozen
//! thread), our thread stays attached until it does: if we detached earlier, the interrupt would still cut its system
//! call short.

use super::code::Code;
use super::progress::AttemptProgress;
use super::ptrace::{self, TraceeEvent};
use super::return_frame::ReturnFrame;
use super::stack_check::StackCheck;
use super::thread::{self, Activity, Candidate, Choice};
use super::tracee::{self, StopEnd, StopResult, Tracee, clock_ns, repair, wait_for_trap};
use super::trampoline::{self, Trampoline};
use super::{Call, Errno, InjectError, Limits, gadget, unsigned};
use pagefold_procmem::image::{AddressSpace, ProgramId, is_32_bit};
use pagefold_procmem::os::abandonable::is_asleep;
use pagefold_procmem::process::Process;
use pagefold_procmem::stalls::{ATTEMPTS, Refusal};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Once, Weak, mpsc};
use std::time::{Duration, Instant};

/// How long our thread may sleep in total while it prepares a stop (reads `/proc`, attaches), and how long preparing
/// may take, sleeping or not. The wait for the stop itself isn't included.
const PREPARING: Duration = Duration::from_millis(250);
const PREPARING_MOST: Duration = Duration::from_secs(15);
/// How often we check these limits.
const TICK: Duration = Duration::from_millis(50);

/// If we can't get the target's mmap lock in this time, somebody is holding it. We try this many times.
const LOCK_LIMIT: Duration = Duration::from_millis(1);
const LOCK_TRIES: u32 = 4;

#[derive(Debug)]
pub struct AttemptOutcome {
    /// The results of the calls that were made, in order.
    pub results: Vec<Result<u64, Errno>>,
    /// How long we stopped the thread, if we did.
    pub stop_ns: Option<u64>,
    /// Whether registers were borrowed without a return frame.
    pub unguarded: bool,
    /// How long registers were borrowed.
    pub away_ns: u64,
    pub verdict: Verdict,
}

impl AttemptOutcome {
    /// Whether the thread didn't stop in time, or its call took too long.
    fn is_late(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(InjectError::TimedOut { .. }))
    }
}

#[derive(Debug)]
pub enum Verdict {
    /// All calls were made.
    Done,
    /// Try again. After too many attempts, fail with this error.
    Again(InjectError),
    /// Don't try again soon.
    Failed(InjectError),
}

impl Verdict {
    fn unstopped(self) -> AttemptOutcome {
        AttemptOutcome { results: Vec::new(), stop_ns: None, unguarded: false, away_ns: 0, verdict: self }
    }
}

/// Makes one attempt to run `calls` in one stop, in thread `tid` or a thread of our choice. If `is_shared`, other
/// targets are waiting for us. Then we leave a process that stalls us alone for a while, and if many of one user or
/// cgroup stall us, we leave all of that user or cgroup alone.
pub fn attempt(
    process: &Process,
    program: Option<&ProgramId>,
    tid: Option<i32>,
    calls: &[Call],
    limits: &Limits,
    is_shared: bool,
) -> Result<AttemptOutcome, InjectError> {
    let pid = process.pid();
    // Our thread may outlive this function, so it needs its own handle to the process.
    let handle = Process::open(pid).map_err(InjectError::from_read)?;
    if handle.start_time_ticks() != process.start_time_ticks() {
        return Err(InjectError::Vanished { pid });
    }
    match ATTEMPTS.admit(process) {
        Err(Refusal::Stalled) => return Err(InjectError::TimedOut { pid, what: "accept a tracer".into() }),
        Err(Refusal::OthersStalled) if is_shared => return Err(InjectError::OthersStalled { pid }),
        _ => {}
    }
    let alive = Arc::new(());
    let thread = Arc::downgrade(&alive);
    let own = Arc::new(AtomicI32::new(0));
    let tid_inside = own.clone();
    let progress = Arc::new(AttemptProgress::default());
    let (sender, receiver) = mpsc::channel();
    let progress_inside = Arc::clone(&progress);
    let calls = calls.to_vec();
    let limits_inside = *limits;
    let program = program.copied();
    std::thread::Builder::new()
        .name("inject".into())
        .stack_size(256 << 10)
        .spawn(move || {
            tid_inside.store(own_tid(), Ordering::Relaxed);
            shield_thread();
            let outcome = one_stop(&handle, program, tid, &calls, &limits_inside, &progress_inside);
            finish(outcome, &handle, &alive, is_shared, &sender);
            drop(alive);
        })
        .map_err(|error| InjectError::System {
            pid,
            what: "starting a thread for the injection".into(),
            errno: Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)),
        })?;
    let stop = Duration::from_nanos(limits.stop_ns);
    let calls_end = stop + Duration::from_nanos(limits.call_ns.saturating_add(tracee::GRACE_NS));
    let began = Instant::now();
    let mut slept = Duration::ZERO;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(outcome) => return Ok(outcome),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(InjectError::System { pid, what: "the injection thread".into(), errno: Errno(libc::EIO) });
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        // Only sleep counts: on a busy machine our thread may wait long for a processor.
        slept += if is_asleep(own.load(Ordering::Relaxed)) { TICK } else { Duration::ZERO };
        let is_late = slept >= PREPARING + stop || began.elapsed() >= PREPARING_MOST + stop;
        if is_late && progress.abandon() {
            ATTEMPTS.give_up(process, thread);
            cut_short(own.load(Ordering::Relaxed));
            return Err(InjectError::TimedOut { pid, what: "accept a tracer".into() });
        }
        // Even the last call must be over by now, so our thread must be stuck reading the return frame's memory.
        if slept >= PREPARING + stop + calls_end {
            progress.get_stuck();
        }
        if progress.is_stuck() {
            stall(process, thread, is_shared);
            return Err(InjectError::Held { pid });
        }
    }
}

/// Ends an attempt, on its thread. If the caller has given up the attempt, nobody receives the result.
fn finish(
    stopped: StopOutcome,
    process: &Process,
    alive: &Arc<()>,
    is_shared: bool,
    sender: &mpsc::Sender<AttemptOutcome>,
) {
    match stopped {
        StopOutcome::Over(outcome) => {
            if is_shared && outcome.is_late() {
                ATTEMPTS.give_up(process, Weak::new());
            }
            drop(sender.send(outcome));
        }
        StopOutcome::Awaited(outcome, tid) => {
            // We don't try this process again before its thread has stopped.
            stall(process, Arc::downgrade(alive), is_shared && outcome.is_late());
            drop(sender.send(outcome));
            await_stop(process, tid);
        }
    }
}

/// Keeps us from trying a process again while one of our threads is busy with it; if `gives_up`, for a pause as well.
fn stall(process: &Process, thread: Weak<()>, gives_up: bool) {
    if gives_up {
        ATTEMPTS.give_up(process, thread);
    } else {
        ATTEMPTS.hold(process, thread);
    }
}

fn own_tid() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// Keeps signals, timer slack and scheduling from delaying this thread during a stop.
fn shield_thread() {
    // SAFETY: plain calls on this thread only; `all` outlives them. If the last two fail, stops are longer: sleeps take
    // 50 us more, and targets wait until a busy or nice caller gets the CPU.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64, 0, 0, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, -10);
    }
}

/// Attaches to a thread. This blocks while the target is in exec, which may wait for a file system. If the caller gives
/// up the attempt, its signal ends the wait.
fn seize(tid: i32, progress: &AttemptProgress) -> Result<(), Errno> {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: all-zero is a valid sigaction, which outlives the call; the handler only changes its arguments.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = leave_ptrace as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(CUT_SHORT, &raw const action, std::ptr::null_mut());
        }
    });
    set_cut_short_mask(libc::SIG_UNBLOCK);
    // If the signal came while it was blocked, it has interrupted nothing. So we check the flag.
    let seized = if progress.is_abandoned() { Err(Errno(libc::EINTR)) } else { ptrace::seize(tid) };
    set_cut_short_mask(libc::SIG_BLOCK);
    seized
}

/// Blocks or unblocks [`CUT_SHORT`] for this thread.
fn set_cut_short_mask(how: i32) {
    // SAFETY: `set` outlives the calls, which affect this thread only.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, CUT_SHORT);
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

/// Makes a thread of this process return from [`seize`], if it's blocked there.
fn cut_short(tid: i32) {
    // SAFETY: we pass no memory. The signal has a handler or, before the first `seize`, is blocked.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, CUT_SHORT) };
}

/// The signal that interrupts [`seize`]. We use it for nothing else.
const CUT_SHORT: i32 = libc::SIGSTKFLT;

/// Makes the thread skip the `ptrace` call that the signal has interrupted. Otherwise the kernel would restart the
/// call, whatever the handler's flags (ERESTARTNOINTR).
extern "C" fn leave_ptrace(_: i32, _: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    // SAFETY: the kernel passes the registers of this thread, and restores them from there; at its instruction pointer
    // there are at least two bytes of code.
    unsafe {
        let registers = &mut (*context).uc_mcontext.gregs;
        let rip = libc::REG_RIP as usize;
        let rax = libc::REG_RAX as usize;
        let code = usize::from_ne_bytes(registers[rip].to_ne_bytes());
        let code = std::ptr::with_exposed_provenance::<[u8; 2]>(code);
        if registers[rax] == libc::SYS_ptrace && code.read_unaligned() == SYSCALL {
            registers[rip] += 2;
            registers[rax] = -i64::from(libc::EINTR);
        }
    }
}

/// Waits until a thread that didn't stop in time stops, then repairs its registers and releases it. The kernel doesn't
/// report the death of a main thread to us while other threads live, so we check for it. The end of our thread releases
/// the dead one.
fn await_stop(process: &Process, tid: i32) {
    const LONGEST_PAUSE: Duration = Duration::from_millis(100);
    let mut pause = Duration::from_millis(1);
    loop {
        match ptrace::poll(tid) {
            TraceeEvent::Nothing if thread::has_ended(process, tid) => break,
            TraceeEvent::Nothing => {
                std::thread::sleep(pause);
                pause = (pause * 5 / 4).min(LONGEST_PAUSE);
            }
            TraceeEvent::Trap { signal } => {
                let _ = repair(tid, signal == libc::SIGTRAP);
                let _ = ptrace::detach(tid, 0);
                break;
            }
            TraceeEvent::Signal(signal) if ptrace::resume(tid, signal).is_ok() => {}
            TraceeEvent::Syscall if ptrace::resume(tid, 0).is_ok() => {}
            TraceeEvent::Signal(_) | TraceeEvent::Syscall | TraceeEvent::Gone => break,
        }
    }
}

enum StopOutcome {
    /// We've let the thread go, or never asked it to stop.
    Over(AttemptOutcome),
    /// We've asked this thread to stop, and it hasn't yet.
    Awaited(AttemptOutcome, i32),
}

fn busy(pid: i32) -> StopOutcome {
    StopOutcome::Over(Verdict::Again(InjectError::Busy { pid }).unstopped())
}

fn one_stop(
    process: &Process,
    program: Option<ProgramId>,
    tid: Option<i32>,
    calls: &[Call],
    limits: &Limits,
    progress: &AttemptProgress,
) -> StopOutcome {
    let pid = process.pid();
    let program = program.map(|program| (process, program));
    if !tracee::is_same(program) {
        return StopOutcome::Over(Verdict::Failed(InjectError::OtherProgram { pid }).unstopped());
    }
    let (candidate, instruction, trampoline) = match prepare(process, tid) {
        Ok(prepared) => prepared,
        Err(verdict) => return StopOutcome::Over(verdict.unstopped()),
    };
    let tid_chosen = candidate.tid;
    let stack_check = match trampoline {
        Some(_) => StackCheck::open(process, tid_chosen),
        None => None,
    };
    let mut frame = ReturnFrame::new();
    let mut answers = vec![0_i64; calls.len()];
    if !is_unlocked(process) {
        return busy(pid);
    }
    if let Err(errno) = seize(tid_chosen, progress) {
        return StopOutcome::Over(refused(process, tid_chosen, errno).unstopped());
    }
    // We check the thread and the process once more. From now on the kernel returns ESRCH if the tid is reused, so this
    // check is the last one. The thread hasn't noticed anything yet, so we can still return.
    match thread::examine(process, tid_chosen) {
        // If job control has stopped the thread, attaching changes its state to a tracing stop (`t`) at once.
        Ok((stat, activity))
            if tid.is_some() || stat.state == b't' || thread::fitness(stat.state, activity).is_some() => {}
        _ => return busy(pid),
    }
    match process.stat() {
        Ok(stat) if stat.start_time_ticks == process.start_time_ticks() => {}
        _ => return StopOutcome::Over(Verdict::Failed(InjectError::Vanished { pid }).unstopped()),
    }
    if progress.is_abandoned() || ptrace::interrupt(tid_chosen).is_err() {
        return busy(pid);
    }
    let mut since_ns = clock_ns();
    let Some(signal) = wait_for_trap(tid_chosen, since_ns.saturating_add(limits.stop_ns), &mut since_ns) else {
        let verdict = match thread::examine(process, tid_chosen) {
            Ok((stat, _)) if stat.has_ended() => Verdict::Again(InjectError::Busy { pid }),
            Ok((stat, activity)) if thread::frozen(process, tid_chosen, &stat, activity) => {
                Verdict::Failed(InjectError::Frozen { pid })
            }
            Ok(_) => Verdict::Failed(InjectError::TimedOut { pid, what: "stop".into() }),
            Err(_) => Verdict::Again(InjectError::Busy { pid }),
        };
        return StopOutcome::Awaited(verdict.unstopped(), tid_chosen);
    };
    let tracee = Tracee {
        tid: tid_chosen,
        program,
        since_ns,
        by_us: signal == libc::SIGTRAP,
        is_main_thread: tid_chosen == pid,
        instruction,
        trampoline,
        stack_check,
    };
    let StopResult { made, end, unguarded, away_ns } =
        tracee.make_calls(calls, &mut answers, limits, progress, &mut frame);
    let stop_ns = clock_ns().saturating_sub(since_ns);
    if !unguarded && end != StopEnd::Gone {
        StackCheck::remember(process, frame.base, frame.length());
    }
    if matches!(end, StopEnd::Unstable | StopEnd::Fault) {
        trampoline::forget(process);
    }
    let results = answers.iter().take(made).map(|&answer| as_result(answer)).collect();
    let verdict = match end {
        StopEnd::Restored => Verdict::Done,
        // If the caller has abandoned the attempt, nobody receives this.
        StopEnd::Gone | StopEnd::Signal | StopEnd::Unstable | StopEnd::Abandoned => {
            Verdict::Again(InjectError::Busy { pid })
        }
        StopEnd::Filtered => Verdict::Failed(InjectError::Filtered { pid }),
        StopEnd::OtherProgram => Verdict::Failed(InjectError::OtherProgram { pid }),
        StopEnd::Compat => Verdict::Failed(InjectError::Compat { pid }),
        StopEnd::Dispatched => Verdict::Failed(InjectError::Dispatched { pid }),
        // Usually the fault is the thread's own and was pending when we stopped it. The thread will fault again by
        // itself.
        StopEnd::Fault => Verdict::Again(InjectError::Fault { pid }),
        StopEnd::TimedOut if is_back_in_freezer(process, tid_chosen) => Verdict::Failed(InjectError::Frozen { pid }),
        StopEnd::TimedOut => Verdict::Failed(InjectError::TimedOut { pid, what: "finish the call".into() }),
    };
    StopOutcome::Over(AttemptOutcome { results, stop_ns: Some(stop_ns), unguarded, away_ns, verdict })
}

/// Whether the mmap lock is free. While somebody holds it, for example a sibling whose fork copies the page tables, our
/// work in a stop would wait for it, and so would the call. If we get it in time, it's free.
///
/// We check this before we attach to the thread, because we mustn't wait for the lock afterwards.
fn is_unlocked(process: &Process) -> bool {
    let Ok(space) = AddressSpace::of(process) else { return true };
    (0..LOCK_TRIES).any(|_| space.is_unlocked(LOCK_LIMIT))
}

/// Whether a freezer kept the thread from making the call. A thread that we release takes a moment to freeze again.
fn is_back_in_freezer(process: &Process, tid: i32) -> bool {
    (0..10).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        thread::examine(process, tid).is_ok_and(|(stat, activity)| thread::frozen(process, tid, &stat, activity))
    })
}

/// Chooses the thread and the `syscall` instruction, and finds the code for a return frame.
fn prepare(process: &Process, tid: Option<i32>) -> Result<(Candidate, u64, Option<Trampoline>), Verdict> {
    let pid = process.pid();
    // We check this first, because we'd misread the call numbers of a 32-bit program.
    if is_32_bit(process, "") {
        return Err(Verdict::Failed(InjectError::Compat { pid }));
    }
    let candidate = match tid {
        Some(tid) => {
            let activity = thread::activity(process, tid).unwrap_or(Activity::Running);
            Candidate { tid, activity }
        }
        None => match thread::choose(process) {
            Ok(Choice::Thread(candidate)) => candidate,
            Ok(Choice::NoneNow) => return Err(Verdict::Again(InjectError::NoSafeThread { pid })),
            // For a moment, an exec by a thread other than the main one looks like the end of the process. The caller
            // checks whether the process has really ended.
            Err(error @ (InjectError::Zombie { .. } | InjectError::Vanished { .. })) => {
                return Err(Verdict::Again(error));
            }
            Err(error) => return Err(Verdict::Failed(error)),
        },
    };
    // If the main thread has ended, the process's auxv is empty, so we check the chosen thread's.
    if is_32_bit(process, &format!("task/{}/", candidate.tid)) {
        return Err(Verdict::Failed(InjectError::Compat { pid }));
    }
    let found = match Code::open(process, candidate.tid) {
        Ok(code) => {
            if let Some(trampoline) = trampoline::find(process, candidate.tid, &code) {
                return Ok((candidate, trampoline.syscall, Some(trampoline)));
            }
            gadget::find(process, candidate.tid, candidate.activity, &code)
        }
        Err(error) => Err(InjectError::from_read(error)),
    };
    match found {
        Ok(instruction) => Ok((candidate, instruction, None)),
        Err(error @ InjectError::Busy { .. }) => Err(Verdict::Again(error)),
        // The chosen thread may have ended; the caller checks whether the process has.
        Err(InjectError::Vanished { pid }) => Err(Verdict::Again(InjectError::Busy { pid })),
        Err(error) => Err(Verdict::Failed(error)),
    }
}

/// Why we couldn't attach, judged by the kernel's error and the thread's state.
fn refused(process: &Process, tid: i32, errno: Errno) -> Verdict {
    let pid = process.pid();
    if errno.0 == libc::ESRCH {
        return Verdict::Again(InjectError::Busy { pid });
    }
    let Ok((stat, _)) = thread::examine(process, tid) else {
        return Verdict::Again(InjectError::Busy { pid });
    };
    if stat.kernel_thread {
        return Verdict::Failed(InjectError::KernelThread { pid });
    }
    if stat.has_ended() {
        return Verdict::Again(InjectError::Busy { pid });
    }
    match thread::tracer(process, tid) {
        by if by != 0 => Verdict::Failed(InjectError::Traced { pid, by }),
        // A dying thread also causes EPERM, and since then an exec may have replaced it by a living one. So we try
        // again.
        _ if errno.0 == libc::EPERM => Verdict::Again(InjectError::Denied { pid }),
        _ => Verdict::Failed(InjectError::System { pid, what: "attaching to a thread".into(), errno }),
    }
}

fn as_result(answer: i64) -> Result<u64, Errno> {
    match answer {
        // The kernel's private restart errors: signals interrupted the call at every attempt.
        -516..=-512 => Err(Errno(libc::EINTR)),
        -4095..=-1 => Err(Errno(i32::try_from(-answer).unwrap_or(libc::EIO))),
        _ => Ok(unsigned(answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_values_become_results() {
        assert_eq!(as_result(0), Ok(0));
        assert_eq!(as_result(4096), Ok(4096));
        assert_eq!(as_result(-12), Err(Errno(libc::ENOMEM)));
        assert_eq!(as_result(-512), Err(Errno(libc::EINTR)));
        assert_eq!(as_result(i64::MIN), Ok(1 << 63));
    }
}
