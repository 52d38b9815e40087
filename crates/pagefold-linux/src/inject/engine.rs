//! One stop of one thread: seize, interrupt, save, call, restore, detach.
//!
//! Each attempt has a thread of its own, because there is only one way to let go of a thread that does not
//! stop (a vfork parent, a frozen one): the end of its tracer. The kernel then forgets the request, and as
//! nothing has been set yet, nothing has happened.
//!
//! From the first register set to the last one restored the code ([`call_all`]) neither allocates nor panics nor
//! takes signals, and leaves only with the thread restored or dead.

use super::ptrace::{self, Look, Registers};
use super::thread::{self, Activity, Candidate, Choice};
use super::{Call, Errno, InjectError, Limits, gadget, regs};
use crate::process::Process;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How often a call is made that a signal cuts short (un-merging stops at any pending signal).
const RESTARTS: u32 = 4;
/// After a call's time is over and it was interrupted: what it gets to come back before the caller is told.
const GRACE_NS: u64 = 500_000_000;
/// What preparing (reading `/proc`, attaching) may take on top of the wait for the stop. Attaching waits for an
/// exec in progress, and that for its file system.
const PREPARING: Duration = Duration::from_secs(2);
/// So long a wait is polled without sleeping: most stops come within 20 us, and a sleep costs more than that.
const SPIN_NS: u64 = 200_000;
const LONGEST_NAP_NS: u64 = 5_000_000;

/// Threads of targets that wait for us to be able to restore them.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// How many processes cannot be let go at this moment ([`InjectError::Held`]). While it is not zero, this process
/// must not end.
pub fn held() -> usize {
    HELD.load(Ordering::Acquire)
}

/// What an attempt came to.
#[derive(Debug)]
pub struct Ended {
    /// The answers of the calls that were made, from the first on.
    pub results: Vec<Result<u64, Errno>>,
    /// How long the thread was stopped, if it was.
    pub stop_ns: Option<u64>,
    /// How to go on.
    pub verdict: Verdict,
}

/// How to go on after an attempt.
#[derive(Debug)]
pub enum Verdict {
    /// All calls were made.
    Done,
    /// A bad moment; if it stays bad, this is the error.
    Again(InjectError),
    /// It makes no sense to try again at once.
    Failed(InjectError),
}

impl Verdict {
    fn unstopped(self) -> Ended {
        Ended { results: Vec::new(), stop_ns: None, verdict: self }
    }
}

/// How far the thread of an attempt is, seen from outside: it cannot send messages while it must not allocate.
struct Gate(AtomicU8);

const PREPARING_GATE: u8 = 0;
const CALLING: u8 = 1;
const STUCK: u8 = 2;
const ABANDONED: u8 = 3;

impl Gate {
    /// From here on nobody may give up. False: somebody has.
    fn enter(&self) -> bool {
        self.0.compare_exchange(PREPARING_GATE, CALLING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Gives up an attempt that has not begun to call. False: it has.
    fn abandon(&self) -> bool {
        self.0.compare_exchange(PREPARING_GATE, ABANDONED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn is(&self, state: u8) -> bool {
        self.0.load(Ordering::Acquire) == state
    }
}

/// Makes one attempt at running `calls` in one stop, in the thread `tid` or one of its choice.
pub fn attempt(process: &Process, tid: Option<i32>, calls: &[Call], limits: &Limits) -> Result<Ended, InjectError> {
    let pid = process.pid();
    // The thread may outlive this call, so it takes hold of the process by itself.
    let held = Process::open(pid).map_err(InjectError::from_read)?;
    if held.start_time_ticks() != process.start_time_ticks() {
        return Err(InjectError::Vanished { pid });
    }
    let gate = Arc::new(Gate(AtomicU8::new(PREPARING_GATE)));
    let (sender, receiver) = mpsc::channel();
    let (calls, limits, gate_inside) = (calls.to_vec(), *limits, Arc::clone(&gate));
    std::thread::Builder::new()
        .name("inject".into())
        .stack_size(256 << 10)
        .spawn(move || {
            shield_thread();
            let ended = one_stop(&held, tid, &calls, &limits, &gate_inside);
            // Nobody listens any more if the attempt was given up.
            let _ = sender.send(ended);
        })
        .map_err(|error| InjectError::System {
            pid,
            what: "starting a thread for the injection".into(),
            errno: Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)),
        })?;
    let mut patience = PREPARING + Duration::from_nanos(limits.stop_ns);
    loop {
        match receiver.recv_timeout(patience) {
            Ok(ended) => return Ok(ended),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(InjectError::System { pid, what: "the injection thread".into(), errno: Errno(libc::EIO) });
            }
            Err(mpsc::RecvTimeoutError::Timeout) if gate.abandon() => {
                return Err(InjectError::TimedOut { pid, what: "let itself be attached".into() });
            }
            Err(mpsc::RecvTimeoutError::Timeout) if gate.is(STUCK) => return Err(InjectError::Held { pid }),
            Err(mpsc::RecvTimeoutError::Timeout) => patience = Duration::from_millis(50),
        }
    }
}

/// Keeps everything that could delay this thread away from it.
fn shield_thread() {
    // SAFETY: plain calls on this thread only; `all` outlives them. Failure of the last two costs promptness only:
    // sleeps get 50 us longer, and a busy or nice caller keeps targets waiting for its turn on the CPU.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64, 0, 0, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, -10);
    }
}

fn one_stop(process: &Process, tid: Option<i32>, calls: &[Call], limits: &Limits, gate: &Gate) -> Ended {
    let pid = process.pid();
    let busy = || Verdict::Again(InjectError::Busy { pid }).unstopped();
    let (candidate, instruction) = match prepare(process, tid) {
        Ok(prepared) => prepared,
        Err(verdict) => return verdict.unstopped(),
    };
    let tid_chosen = candidate.tid;
    let mut answers = vec![0_i64; calls.len()];
    if let Err(errno) = ptrace::seize(tid_chosen) {
        return refused(process, tid_chosen, errno).unstopped();
    }
    // From now on the kernel answers ESRCH if the tid comes to mean another thread, so this look is the last one
    // needed. Nothing has been asked of the thread yet: to leave here is to have done nothing.
    match thread::examine(process, tid_chosen) {
        // Attaching to a thread in a group stop turns that into ours at once.
        Ok((stat, activity))
            if tid.is_some() || stat.state == b't' || thread::fitness(stat.state, activity).is_some() => {}
        _ => return busy(),
    }
    match process.stat() {
        Ok(stat) if stat.start_time_ticks == process.start_time_ticks() => {}
        _ => return Verdict::Failed(InjectError::Vanished { pid }).unstopped(),
    }
    if gate.is(ABANDONED) || ptrace::interrupt(tid_chosen).is_err() {
        return busy();
    }
    let mut since_ns = clock_ns();
    let Some(signal) = wait_for_trap(tid_chosen, since_ns.saturating_add(limits.stop_ns), &mut since_ns) else {
        let verdict = match thread::examine(process, tid_chosen) {
            Ok((stat, _)) if matches!(stat.state, b'Z' | b'X') => Verdict::Again(InjectError::Busy { pid }),
            Ok((stat, activity)) if thread::frozen(process, tid_chosen, &stat, activity) => {
                Verdict::Failed(InjectError::Frozen { pid })
            }
            Ok(_) => Verdict::Failed(InjectError::TimedOut { pid, what: "stop".into() }),
            Err(_) => Verdict::Again(InjectError::Busy { pid }),
        };
        return verdict.unstopped();
    };
    let tracee = Tracee { tid: tid_chosen, by_us: signal == libc::SIGTRAP, instruction };
    let (made, end) = tracee.serve(calls, &mut answers, limits, gate);
    let stop_ns = clock_ns().saturating_sub(since_ns);
    let results: Vec<Result<u64, Errno>> = answers.iter().take(made).map(|&answer| as_result(answer)).collect();
    let verdict = match end {
        End::Restored => Verdict::Done,
        End::Gone | End::Signal | End::Unsteady => Verdict::Again(InjectError::Busy { pid }),
        End::Filtered => Verdict::Failed(InjectError::Filtered { pid }),
        End::Compat => Verdict::Failed(InjectError::Compat { pid }),
        End::Dispatched => Verdict::Failed(InjectError::Dispatched { pid }),
        End::Fault => Verdict::Failed(InjectError::Fault { pid }),
        End::Abandoned => Verdict::Failed(InjectError::TimedOut { pid, what: "let itself be attached".into() }),
        End::TimedOut if is_back_in_freezer(process, tid_chosen) => Verdict::Failed(InjectError::Frozen { pid }),
        End::TimedOut => Verdict::Failed(InjectError::TimedOut { pid, what: "finish the call".into() }),
    };
    Ended { results, stop_ns: Some(stop_ns), verdict }
}

/// Whether a thread that did not get to its call was kept from it by a freezer. Let go, it takes a moment to be back.
fn is_back_in_freezer(process: &Process, tid: i32) -> bool {
    (0..10).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        thread::examine(process, tid).is_ok_and(|(stat, activity)| thread::frozen(process, tid, &stat, activity))
    })
}

/// Chooses the thread and the instruction.
fn prepare(process: &Process, tid: Option<i32>) -> Result<(Candidate, u64), Verdict> {
    let pid = process.pid();
    // Before anything else: the numbers of its calls would be misread.
    if is_32_bit(process, "exe") {
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
            // In the middle of an exec by another than the main thread it looks so, too. Whether the process has ended,
            // the caller looks.
            Err(error @ (InjectError::Zombie { .. } | InjectError::Vanished { .. })) => {
                return Err(Verdict::Again(error));
            }
            Err(error) => return Err(Verdict::Failed(error)),
        },
    };
    // A process whose main thread has ended shows its program only here.
    if is_32_bit(process, &format!("task/{}/exe", candidate.tid)) {
        return Err(Verdict::Failed(InjectError::Compat { pid }));
    }
    match gadget::find(process, candidate.tid, candidate.activity) {
        Ok(instruction) => Ok((candidate, instruction)),
        Err(error @ InjectError::Busy { .. }) => Err(Verdict::Again(error)),
        // The chosen thread may have ended; whether the process has, the caller looks.
        Err(InjectError::Vanished { pid }) => Err(Verdict::Again(InjectError::Busy { pid })),
        Err(error) => Err(Verdict::Failed(error)),
    }
}

fn is_32_bit(process: &Process, exe: &str) -> bool {
    use std::io::Read;
    const ELFCLASS32: u8 = 1;
    let mut head = [0_u8; 5];
    process.open_file(exe).is_ok_and(|mut exe| exe.read_exact(&mut head).is_ok())
        && &head[..4] == b"\x7fELF"
        && head[4] == ELFCLASS32
}

/// Why the kernel refused to attach.
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
    if matches!(stat.state, b'Z' | b'X') {
        return Verdict::Again(InjectError::Busy { pid });
    }
    match thread::tracer(process, tid) {
        by if by != 0 => Verdict::Failed(InjectError::Traced { pid, by }),
        _ if errno.0 == libc::EPERM => Verdict::Failed(InjectError::Denied { pid }),
        _ => Verdict::Failed(InjectError::System { pid, what: "attaching to a thread".into(), errno }),
    }
}

fn as_result(answer: i64) -> Result<u64, Errno> {
    match answer {
        // The kernel's private "restart", after as many restarts as it gets.
        -516..=-512 => Err(Errno(libc::EINTR)),
        -4095..=-1 => Err(Errno(i32::try_from(-answer).unwrap_or(libc::EIO))),
        _ => Ok(answer.cast_unsigned()),
    }
}

/// Waits until the thread is in a trap of the tracer's or of job control. Signals that come first are passed on.
/// `since_ns` becomes the time of the last look that did not find it stopped.
fn wait_for_trap(tid: i32, until_ns: u64, since_ns: &mut u64) -> Option<i32> {
    loop {
        match wait(tid, until_ns, since_ns) {
            Look::Trap { signal } => return Some(signal),
            Look::Signal(signal) => ptrace::resume(tid, signal).ok()?,
            Look::Syscall => ptrace::resume(tid, 0).ok()?,
            Look::Gone | Look::Nothing => return None,
        }
    }
}

/// Waits for anything to happen to the tracee.
fn wait(tid: i32, until_ns: u64, since_ns: &mut u64) -> Look {
    let begun_ns = clock_ns();
    loop {
        let now_ns = clock_ns();
        match ptrace::look(tid) {
            Look::Nothing => *since_ns = now_ns,
            found => return found,
        }
        if now_ns >= until_ns {
            return Look::Nothing;
        }
        let waited_ns = now_ns.saturating_sub(begun_ns);
        if waited_ns < SPIN_NS {
            // SAFETY: no arguments. Gives the target the CPU if it is to have this one.
            unsafe { libc::sched_yield() };
        } else {
            // An eighth of the wait so far: the end is seen late by that much at most.
            let nap_ns = (waited_ns / 8).min(LONGEST_NAP_NS).cast_signed();
            let nap = libc::timespec { tv_sec: 0, tv_nsec: nap_ns };
            // SAFETY: `nap` outlives the call.
            unsafe { libc::nanosleep(&raw const nap, std::ptr::null_mut()) };
        }
    }
}

/// The monotonic clock. Not `Instant`, whose arithmetic may panic.
fn clock_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.cast_unsigned())
}

/// How a stop ended. The thread is restored and let go, or dead, in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Restored,
    Gone,
    /// A signal that cannot be blocked (SIGSTOP) had to be let through.
    Signal,
    /// In a restartable sequence, or no longer the program that was looked at.
    Unsteady,
    Filtered,
    Compat,
    Dispatched,
    Fault,
    Abandoned,
    TimedOut,
}

/// Why calling broke off. But for `Gone`, the thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Gone,
    TimedOut,
    Signal(i32),
}

/// A thread that is stopped by us.
struct Tracee {
    tid: i32,
    /// Stopped by our interrupt, not by job control.
    by_us: bool,
    instruction: u64,
}

impl Tracee {
    /// Makes the calls, and lets the thread go as it was. Returns how many were made.
    fn serve(&self, calls: &[Call], answers: &mut [i64], limits: &Limits, gate: &Gate) -> (usize, End) {
        let tid = self.tid;
        let let_go = |end: End| match ptrace::detach(tid, 0) {
            Ok(()) => (0, end),
            Err(_) => (0, End::Gone),
        };
        let Ok(stopped) = ptrace::registers(tid) else { return let_go(End::Gone) };
        if let Some(objection) = self.objection(&stopped) {
            return let_go(objection);
        }
        let by_syscall_instruction = ptrace::peek(tid, stopped.rip.wrapping_sub(2)).is_ok_and(gadget::is_syscall);
        let own = regs::repaired(&stopped, self.by_us, by_syscall_instruction);
        // Set here and not when attaching: there it would leave the thread unfiltered while it still runs.
        let suspend = ptrace::OPTION_TRACESYSGOOD | ptrace::OPTION_SUSPEND_SECCOMP;
        let suspended = ptrace::set_options(tid, suspend).is_ok();
        if !suspended && ptrace::set_options(tid, ptrace::OPTION_TRACESYSGOOD).is_err() {
            return let_go(End::Gone);
        }
        let Ok(mask) = ptrace::signal_mask(tid) else { return let_go(End::Gone) };
        if !suspended && !unfiltered(tid) {
            return self.let_go_as(&own, mask, 0, (0, End::Filtered));
        }
        // Signals wait until the thread is itself again: a handler's frame would hold our registers. Not those of
        // faults: the kernel would reset a blocked one's handler, and unblocked it only shows us the signal.
        if ptrace::set_signal_mask(tid, mask | !FAULTS).is_err() {
            return let_go(End::Gone);
        }
        if !gate.enter() {
            return self.let_go_as(&own, mask, 0, (0, End::Abandoned));
        }
        let (made, broken) = self.call_all(&stopped, calls, answers, limits, gate);
        let outcome = match broken {
            None => self.let_go_as(&own, mask, 0, (made, End::Restored)),
            Some(Broken::Gone) => (made, End::Gone),
            Some(Broken::TimedOut) => self.let_go_as(&own, mask, 0, (made, End::TimedOut)),
            Some(Broken::Signal(signal)) if FAULTS & bit(signal) != 0 && ptrace::signal_is_fault(tid) => {
                self.let_go_as(&own, mask, 0, (made, End::Fault))
            }
            Some(Broken::Signal(signal)) => self.let_go_as(&own, mask, signal, (made, End::Signal)),
        };
        if gate.is(STUCK) {
            HELD.fetch_sub(1, Ordering::AcqRel);
        }
        outcome
    }

    /// Why this stop must not be used.
    fn objection(&self, stopped: &Registers) -> Option<End> {
        let tid = self.tid;
        if !regs::is_64_bit(stopped) {
            return Some(End::Compat);
        }
        // A restartable sequence is aborted by the kernel on the way back to it. Made to run elsewhere first, the thread
        // would come back to its middle with the kernel no longer knowing: the sequence would not be atomic.
        if !regs::in_syscall(stopped) && self.in_restartable_sequence(stopped) {
            return Some(End::Unsteady);
        }
        // Checked before the tracer's entry stop is: the thread would be sent SIGSYS. Kernels before 6.4 cannot say.
        if ptrace::dispatches_syscalls(tid).unwrap_or(false) {
            return Some(End::Dispatched);
        }
        // It was found before the stop; an exec in between puts another program there.
        match ptrace::peek(tid, self.instruction) {
            Ok(word) if gadget::is_syscall(word) => None,
            _ => Some(End::Unsteady),
        }
    }

    fn in_restartable_sequence(&self, stopped: &Registers) -> bool {
        const SECTION_IN_AREA: u64 = 8;
        let word = |addr: u64| ptrace::peek(self.tid, addr).unwrap_or(0);
        let area = ptrace::rseq_area(self.tid).unwrap_or(0);
        if area == 0 {
            return false;
        }
        // The pointer stays set after the section until the kernel next looks, so the range decides.
        let section = word(area.wrapping_add(SECTION_IN_AREA));
        section != 0
            && regs::in_critical_section(stopped, word(section.wrapping_add(8)), word(section.wrapping_add(16)))
    }

    /// Makes one call after the other. Returns how many were made and why not all.
    fn call_all(
        &self,
        stopped: &Registers,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        gate: &Gate,
    ) -> (usize, Option<Broken>) {
        let mut made = 0;
        for (call, answer) in calls.iter().zip(answers) {
            let registers = regs::calling(stopped, self.instruction, call.nr, &call.args);
            for _ in 0..RESTARTS {
                match self.call_once(&registers, limits, gate) {
                    Ok(value) => *answer = value,
                    Err(broken) => return (made, Some(broken)),
                }
                // Going on takes the thread past its pending signals, so a restart is not cut short by the same one.
                if !(-516..=-512).contains(&*answer) {
                    break;
                }
            }
            made += 1;
        }
        (made, None)
    }

    fn call_once(&self, registers: &Registers, limits: &Limits, gate: &Gate) -> Result<i64, Broken> {
        let tid = self.tid;
        let gone = |_: Errno| Broken::Gone;
        ptrace::set_registers(tid, registers).map_err(gone)?;
        ptrace::resume_to_syscall(tid).map_err(gone)?;
        let mut inside = false;
        let mut interrupted = false;
        let mut unused = 0;
        // Until the call begins there is only the way back to the program; it ends in a freezer if anywhere.
        let mut until_ns = clock_ns().saturating_add(limits.stop_ns);
        loop {
            match wait(tid, until_ns, &mut unused) {
                Look::Syscall if !inside => {
                    inside = true;
                    until_ns = clock_ns().saturating_add(limits.call_ns);
                    ptrace::resume_to_syscall(tid).map_err(gone)?;
                }
                Look::Syscall => {
                    let answer = ptrace::registers(tid).map_err(gone)?.rax.cast_signed();
                    return if interrupted && (-516..=-512).contains(&answer) {
                        Err(Broken::TimedOut)
                    } else {
                        Ok(answer)
                    };
                }
                Look::Trap { .. } if interrupted => return Err(Broken::TimedOut),
                // Job control; the detaching puts the thread back into its group's stop.
                Look::Trap { .. } => ptrace::resume_to_syscall(tid).map_err(gone)?,
                Look::Signal(signal) => return Err(Broken::Signal(signal)),
                Look::Gone => return Err(Broken::Gone),
                Look::Nothing if !interrupted => {
                    interrupted = true;
                    until_ns = clock_ns().saturating_add(GRACE_NS);
                    ptrace::interrupt(tid).map_err(gone)?;
                }
                Look::Nothing => {
                    // Nothing more can be done than to stay: the thread cannot be restored before it stops.
                    until_ns = u64::MAX;
                    if gate.0.compare_exchange(CALLING, STUCK, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                        HELD.fetch_add(1, Ordering::AcqRel);
                    }
                }
            }
        }
    }

    /// Gives the thread its own registers, signals and filter back, and lets it go with `signal`.
    fn let_go_as(&self, own: &Registers, mask: u64, signal: i32, outcome: (usize, End)) -> (usize, End) {
        let tid = self.tid;
        // Each fails only if the thread was killed meanwhile, and then the rest does too.
        let restored = ptrace::set_registers(tid, own)
            .and(ptrace::set_signal_mask(tid, mask))
            .and(ptrace::set_options(tid, 0))
            .and(ptrace::detach(tid, signal));
        match restored {
            Ok(()) => outcome,
            Err(_) => (outcome.0, End::Gone),
        }
    }
}

/// Signals that the kernel raises for what a thread does.
const FAULTS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGILL)
    | bit(libc::SIGFPE)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Whether the stopped thread has no seccomp filter, by the file that its own kernel thread id names.
fn unfiltered(tid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|status| {
        status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_become_results() {
        assert_eq!(as_result(0), Ok(0));
        assert_eq!(as_result(4096), Ok(4096));
        assert_eq!(as_result(-12), Err(Errno(libc::ENOMEM)));
        assert_eq!(as_result(-512), Err(Errno(libc::EINTR)));
        assert_eq!(as_result(i64::MIN), Ok(1 << 63));
    }

    #[test]
    fn only_one_of_caller_and_thread_decides() {
        let gate = Gate(AtomicU8::new(PREPARING_GATE));
        assert!(gate.enter() && !gate.abandon() && gate.is(CALLING));
        let gate = Gate(AtomicU8::new(PREPARING_GATE));
        assert!(gate.abandon() && !gate.enter() && gate.is(ABANDONED));
    }

    #[test]
    fn faults_stay_unblocked() {
        assert_eq!(FAULTS & bit(libc::SIGUSR1), 0);
        assert_ne!(FAULTS & bit(libc::SIGSEGV), 0);
        assert_ne!(!FAULTS & bit(libc::SIGALRM), 0);
    }
}
