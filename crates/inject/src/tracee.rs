//! Makes the calls in a stopped thread: save, call, restore, detach.
//!
//! Between the first register that we set and the last one that we restore ([`Tracee::make_calls`]), this code doesn't
//! allocate, panic or receive signals, and it only returns once the thread is restored or dead. [`super::return_frame`]
//! says what happens to the thread if we die at one of the `fault::point`s.

use super::progress::AttemptProgress;
use super::ptrace::{self, Registers, SignalCause, SyscallEntry, TraceeEvent};
use super::return_frame::ReturnFrame;
use super::stack_check::StackCheck;
use super::trampoline::Trampoline;
use super::{Call, Errno, Limits, gadget, regs, signed, unsigned};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::os::fault;
use pagefold_procmem::process::Process;

/// How many times we make a call that signals keep interrupting: unmerging stops at any pending signal.
const RESTARTS: u32 = 4;
/// How long a call may take to return once we've interrupted it. After that we report [`super::InjectError::Held`].
pub const GRACE_NS: u64 = 100_000_000;
/// How long a wait polls before it sleeps: most stops come within 20 us, and a sleep takes longer.
const SPIN_NS: u64 = 200_000;
/// If we need longer than this from the last check that found the thread running to the first call, we make no call in
/// this stop.
const LATE_NS: u64 = 4_000_000;
const LONGEST_NAP_NS: u64 = 5_000_000;

/// Waits until our interrupt or job control has stopped the thread. Delivers signals that come first. `since_ns`
/// becomes the time of the last check that found the thread running.
pub fn wait_for_trap(tid: i32, until_ns: u64, since_ns: &mut u64) -> Option<i32> {
    loop {
        match wait(tid, until_ns, since_ns) {
            TraceeEvent::Trap { signal } => return Some(signal),
            TraceeEvent::Signal(signal) => ptrace::resume(tid, signal).ok()?,
            TraceeEvent::Syscall => ptrace::resume(tid, 0).ok()?,
            TraceeEvent::Gone | TraceeEvent::Nothing => return None,
        }
    }
}

/// Waits for the next event of the tracee.
fn wait(tid: i32, until_ns: u64, since_ns: &mut u64) -> TraceeEvent {
    let begun_ns = clock_ns();
    loop {
        let now_ns = clock_ns();
        match ptrace::poll(tid) {
            TraceeEvent::Nothing => *since_ns = now_ns,
            found => return found,
        }
        if now_ns >= until_ns {
            return TraceeEvent::Nothing;
        }
        let waited_ns = now_ns.saturating_sub(begun_ns);
        if waited_ns < SPIN_NS {
            // SAFETY: no arguments. The target may need this CPU.
            unsafe { libc::sched_yield() };
        } else {
            // We sleep for an eighth of the time that we've waited, so we notice the event at most that much too late.
            let nap_ns = signed((waited_ns / 8).min(LONGEST_NAP_NS));
            let nap = libc::timespec { tv_sec: 0, tv_nsec: nap_ns };
            // SAFETY: `nap` outlives the call.
            unsafe { libc::nanosleep(&raw const nap, std::ptr::null_mut()) };
        }
    }
}

/// The monotonic clock, nanoseconds. We can't use `Instant`, whose arithmetic may panic.
pub fn clock_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    unsigned(now.tv_sec).wrapping_mul(1_000_000_000).wrapping_add(unsigned(now.tv_nsec))
}

/// How a stop ended. In every case the thread is restored and released, or dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopEnd {
    Restored,
    Gone,
    /// We had to deliver a signal that can't be blocked (SIGSTOP).
    Signal,
    /// The thread is at a bad moment (in a restartable sequence, signals pending), or the code that we found is gone.
    Unstable,
    /// The process is running a program other than the one that the calls are meant for.
    OtherProgram,
    Filtered,
    Compat,
    Dispatched,
    Fault,
    Abandoned,
    TimedOut,
}

/// Why we made no further call. The thread is stopped, except after `Gone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallFailure {
    Gone,
    TimedOut,
    Signal(i32),
    /// The thread entered a system call other than the one that we sent it to. We skipped that call.
    Diverted,
}

/// ptrace requests to a stopped thread only fail if the thread was killed.
impl From<Errno> for CallFailure {
    fn from(_: Errno) -> Self {
        Self::Gone
    }
}

pub struct Tracee<'a> {
    pub tid: i32,
    /// The program that the process must be running for us to make the calls. `None`: any program.
    pub program: Option<(&'a Process, ProgramId)>,
    pub since_ns: u64,
    /// Whether our interrupt stopped the thread, not job control.
    pub by_us: bool,
    pub is_main_thread: bool,
    /// The address of a `syscall` instruction: the trampoline's if there is one.
    pub instruction: u64,
    pub trampoline: Option<Trampoline>,
    pub stack_check: Option<StackCheck>,
}

#[derive(Clone, Copy, Debug)]
pub struct StopResult {
    pub made: usize,
    pub end: StopEnd,
    /// Whether the thread had borrowed registers and no return frame.
    pub unguarded: bool,
    pub away_ns: u64,
}

impl Tracee<'_> {
    /// Makes the calls, restores the thread and releases it.
    pub fn make_calls(
        &self,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        progress: &AttemptProgress,
        frame: &mut ReturnFrame,
    ) -> StopResult {
        let tid = self.tid;
        // We repair the registers first, whatever happens next: if we released the thread or died before, the thread
        // would see an EINTR.
        let Ok(original) = repair(tid, self.by_us) else { return self.let_go(StopEnd::Gone) };
        fault::point("stopped");
        if let Some(unusable) = self.unusable(&original) {
            return self.let_go(unusable);
        }
        let Ok(mask) = ptrace::signal_mask(tid) else { return self.let_go(StopEnd::Gone) };
        // We'd mistake a pending fault signal for a fault of our borrowed registers, and drop it. Any other pending
        // signal may have to end the interrupted call with EINTR, and a return by the frame can't do that.
        let Some(pending) = ptrace::pending_signals(tid) else { return self.let_go(StopEnd::Unstable) };
        if pending & FAULTS != 0 || self.by_us && regs::restarts(&original) && pending & !mask != 0 {
            return self.let_go(StopEnd::Unstable);
        }
        // Here we only check whether we may suspend the thread's seccomp filters. We clear the option before the thread
        // runs, and set it again within each call.
        let can_suspend = ptrace::set_options(tid, SUSPENDED).is_ok();
        if ptrace::set_options(tid, ptrace::OPTION_TRACESYSGOOD).is_err() {
            return self.let_go(StopEnd::Gone);
        }
        fault::point("options-set");
        if !can_suspend && !unfiltered(tid) {
            return self.let_go(StopEnd::Filtered);
        }
        if self.is_late() {
            return self.let_go(StopEnd::Unstable);
        }
        let trampoline = match self.trampoline {
            Some(found) if self.write_frame(frame, &original, mask, found) => Some(found),
            _ => None,
        };
        fault::point("frame-written");
        let calling = Calling { tracee: self, original: &original, mask, trampoline, frame, can_suspend };
        let is_late = self.is_late();
        if is_late || !progress.enter() {
            calling.undo_frame();
            return self.let_go(if is_late { StopEnd::Unstable } else { StopEnd::Abandoned });
        }
        let since_ns = clock_ns();
        let (made, end) = calling.run(calls, answers, limits, progress);
        progress.leave();
        StopResult { made, end, unguarded: trampoline.is_none(), away_ns: clock_ns().saturating_sub(since_ns) }
    }

    /// Releases the thread, whose registers we haven't borrowed yet.
    fn let_go(&self, end: StopEnd) -> StopResult {
        let end = match ptrace::set_options(self.tid, 0).and(ptrace::detach(self.tid, 0)) {
            Ok(()) => end,
            Err(_) => StopEnd::Gone,
        };
        StopResult { made: 0, end, unguarded: false, away_ns: 0 }
    }

    /// Whether our reads of memory have taken so long that a sibling must be holding the mmap lock. The call would wait
    /// for it, too.
    fn is_late(&self) -> bool {
        clock_ns().saturating_sub(self.since_ns) > LATE_NS
    }

    /// Writes the return frame. Returns false if that wasn't possible: then the thread's memory is as before.
    fn write_frame(&self, frame: &mut ReturnFrame, original: &Registers, mask: u64, trampoline: Trampoline) -> bool {
        let goal = regs::return_registers(original, self.number_restarted(original));
        frame.prepare(self.tid, &goal, mask, trampoline, |bytes| {
            self.stack_check.as_ref()?.unused(self.is_main_thread, self.tid, original, bytes)
        }) && frame.write(self.tid)
    }

    /// The number of the call that `restart_syscall` continues, if an earlier stop has made the thread enter that.
    fn number_restarted(&self, original: &Registers) -> Option<i64> {
        if signed(original.orig_rax) != libc::SYS_restart_syscall {
            return None;
        }
        let mut code = [0_u8; 64];
        ptrace::read(self.tid, original.rip.wrapping_sub(2 + 64), &mut code).ok()?;
        regs::number_in_code(&code)
    }

    /// Why we mustn't make calls in this stop, if there is a reason.
    fn unusable(&self, stopped: &Registers) -> Option<StopEnd> {
        let tid = self.tid;
        // No exec can come between this check and the release, since it would kill this thread first.
        if !is_same(self.program) {
            return Some(StopEnd::OtherProgram);
        }
        if !regs::is_64_bit(stopped) {
            return Some(StopEnd::Compat);
        }
        // The kernel aborts a restartable sequence when it returns to a thread in the middle of one. If we let the
        // thread run elsewhere first, the kernel wouldn't notice, and the sequence would continue although it wasn't
        // atomic.
        if !regs::in_syscall(stopped) && self.in_restartable_sequence(stopped) {
            return Some(StopEnd::Unstable);
        }
        // With syscall user dispatch, the kernel raises SIGSYS before the thread reaches the stop at a call's entry.
        // Before Linux 6.4 we can't ask for the setting.
        if ptrace::dispatches_syscalls(tid).unwrap_or(false) {
            return Some(StopEnd::Dispatched);
        }
        // We found the code before the stop, and an exec may have replaced it since.
        let there = match self.trampoline {
            Some(trampoline) => trampoline.is_there(tid),
            None => ptrace::peek(tid, self.instruction).is_ok_and(gadget::is_syscall),
        };
        if there { None } else { Some(StopEnd::Unstable) }
    }

    fn in_restartable_sequence(&self, stopped: &Registers) -> bool {
        const SECTION_IN_AREA: u64 = 8;
        let area = ptrace::rseq_area(self.tid).unwrap_or(0);
        if area == 0 {
            return false;
        }
        // The kernel clears this pointer late, so it may still point to a section that is over. So we check whether the
        // thread is inside the section.
        let section = self.word(area.wrapping_add(SECTION_IN_AREA));
        if section == 0 {
            return false;
        }
        let start = self.word(section.wrapping_add(8));
        regs::in_critical_section(stopped, start, self.word(section.wrapping_add(16)))
    }

    fn word(&self, addr: u64) -> u64 {
        ptrace::peek(self.tid, addr).unwrap_or(0)
    }
}

/// A thread that runs, or is about to run, with borrowed registers.
struct Calling<'a> {
    tracee: &'a Tracee<'a>,
    original: &'a Registers,
    mask: u64,
    /// The code to return by. `None`: the thread has no return frame.
    trampoline: Option<Trampoline>,
    frame: &'a ReturnFrame,
    /// Whether we can suspend the thread's seccomp filters.
    can_suspend: bool,
}

impl Calling<'_> {
    fn run(
        &self,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        progress: &AttemptProgress,
    ) -> (usize, StopEnd) {
        let tid = self.tracee.tid;
        if let Some(trampoline) = self.trampoline {
            if ptrace::set_registers(tid, &regs::returning(self.original, self.frame.base, trampoline.sigreturn))
                .is_err()
            {
                return (0, StopEnd::Gone);
            }
            fault::point("registers-set");
        }
        // We block signals until the thread is restored, because a handler's frame would contain the borrowed
        // registers. We don't block fault signals: the kernel would reset the handler of a blocked one, whereas an
        // unblocked one only stops the thread.
        if ptrace::set_signal_mask(tid, self.mask | !FAULTS).is_err() {
            return (0, StopEnd::Gone);
        }
        fault::point("mask-set");
        let (made, broken) = self.call_all(calls, answers, limits, progress);
        match broken {
            None => self.release(0, made, StopEnd::Restored),
            Some(CallFailure::Gone) => (made, StopEnd::Gone),
            Some(CallFailure::TimedOut) => self.release(0, made, StopEnd::TimedOut),
            Some(CallFailure::Diverted) => self.release(0, made, StopEnd::Unstable),
            Some(CallFailure::Signal(signal)) if self.is_ours(signal) => self.release(0, made, StopEnd::Fault),
            Some(CallFailure::Signal(signal)) => self.release(signal, made, StopEnd::Signal),
        }
    }

    /// Whether our own code made the thread raise a signal, which the thread then mustn't receive.
    fn is_ours(&self, signal: i32) -> bool {
        let tid = self.tracee.tid;
        let Some(cause) = ptrace::signal_cause(tid) else { return false };
        let Ok(registers) = ptrace::registers(tid) else { return false };
        let (code, frame) = match self.trampoline {
            Some(trampoline) => (
                [(trampoline.sigreturn, SIGRETURN_LENGTH), (trampoline.syscall, SYSCALL_LENGTH)],
                (self.frame.base, self.frame.length()),
            ),
            None => ([(self.tracee.instruction, SYSCALL_LENGTH); 2], (0, 0)),
        };
        Borrowed { code, frame }.may_raise(signal, cause, registers.rip)
    }

    /// Makes one call after the other. Returns how many we made, and why we stopped early.
    fn call_all(
        &self,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        progress: &AttemptProgress,
    ) -> (usize, Option<CallFailure>) {
        // The limit for all calls together.
        let end_ns = clock_ns().saturating_add(limits.stop_ns).saturating_add(limits.call_ns);
        let mut made = 0;
        for (call, answer) in calls.iter().zip(answers) {
            for _ in 0..RESTARTS {
                match self.call_once(call, limits, end_ns, progress) {
                    Ok(value) => *answer = value,
                    Err(broken) => return (made, Some(broken)),
                }
                // When we resume the thread, it first gets past the signals that are pending now, so they don't
                // interrupt the call again.
                if !(-516..=-512).contains(&*answer) {
                    break;
                }
            }
            made += 1;
        }
        (made, None)
    }

    fn call_once(
        &self,
        call: &Call,
        limits: &Limits,
        end_ns: u64,
        progress: &AttemptProgress,
    ) -> Result<i64, CallFailure> {
        let tid = self.tracee.tid;
        // With a return frame the thread is already heading for the entry of `rt_sigreturn`, where we replace that call
        // by ours.
        if self.trampoline.is_none() {
            let registers = regs::calling(self.original, self.tracee.instruction, call.nr, &call.args);
            ptrace::set_registers(tid, &registers)?;
            fault::point("registers-set");
        }
        ptrace::resume_to_syscall(tid)?;
        fault::point("resumed");
        let mut inside = false;
        let mut is_ours = true;
        let mut interrupted = false;
        let mut unused = 0;
        // Until the thread enters the call, it does nothing but return to user space. A freezer may stop it on the way.
        let mut until_ns = clock_ns().saturating_add(limits.stop_ns).min(end_ns);
        loop {
            match wait(tid, until_ns, &mut unused) {
                TraceeEvent::Syscall if !inside => {
                    fault::point("entry");
                    inside = true;
                    until_ns = clock_ns().saturating_add(limits.call_ns).min(end_ns);
                    is_ours = self.take_over(call)?;
                    fault::point("call-set");
                    ptrace::resume_to_syscall(tid)?;
                    fault::point("called");
                }
                TraceeEvent::Syscall => {
                    fault::point("exit");
                    ptrace::set_options(tid, ptrace::OPTION_TRACESYSGOOD)?;
                    let answer = signed(ptrace::registers(tid)?.rax);
                    return if !is_ours {
                        Err(CallFailure::Diverted)
                    } else if interrupted && (-516..=-512).contains(&answer) {
                        Err(CallFailure::TimedOut)
                    } else {
                        Ok(answer)
                    };
                }
                TraceeEvent::Trap { .. } if interrupted => return Err(CallFailure::TimedOut),
                // Job control stopped the thread. Once we detach, the thread stops with its group again.
                TraceeEvent::Trap { .. } => ptrace::resume_to_syscall(tid)?,
                TraceeEvent::Signal(signal) => return Err(CallFailure::Signal(signal)),
                TraceeEvent::Gone => return Err(CallFailure::Gone),
                TraceeEvent::Nothing if !interrupted => {
                    interrupted = true;
                    until_ns = clock_ns().saturating_add(GRACE_NS);
                    ptrace::interrupt(tid)?;
                }
                TraceeEvent::Nothing => {
                    // We can't restore the thread before it stops, so now we can only wait.
                    until_ns = u64::MAX;
                    progress.get_stuck();
                }
            }
        }
    }

    /// Called at the entry of a system call. Replaces that call by `call`, verifies that this worked, and suspends the
    /// seccomp filters until the call's exit. Returns false if the thread has run code other than ours, so that it
    /// isn't at the entry of a 64-bit call. Then the thread makes no call.
    ///
    /// Until now a sibling may have replaced the code. From here to the exit the kernel has the call's number and
    /// arguments, so a sibling can't change them.
    fn take_over(&self, call: &Call) -> Result<bool, Errno> {
        let tid = self.tracee.tid;
        let (rsp, rip) = match self.trampoline {
            // `rip` is the `ret` after the `syscall` instruction.
            Some(trampoline) => (self.frame.base, trampoline.syscall.wrapping_add(2)),
            None => (self.original.rsp, self.tracee.instruction.wrapping_add(2)),
        };
        let wanted = SyscallEntry { nr: unsigned(call.nr), args: call.args, rip };
        let is_entry = ptrace::syscall_entry(tid)?.is_some();
        if is_entry {
            ptrace::set_registers(tid, &regs::entering(self.original, rsp, rip, call.nr, &call.args))?;
        }
        let is_ours = is_entry && ptrace::syscall_entry(tid)? == Some(wanted);
        if !is_ours {
            let mut skipped = ptrace::registers(tid)?;
            skipped.orig_rax = u64::MAX;
            ptrace::set_registers(tid, &skipped)?;
        }
        if self.can_suspend {
            ptrace::set_options(tid, SUSPENDED)?;
        }
        Ok(is_ours)
    }

    /// Restores the thread's signal mask, registers, memory and filter, and releases it with `signal`.
    fn release(&self, signal: i32, made: usize, end: StopEnd) -> (usize, StopEnd) {
        match self.restore().and_then(|()| ptrace::detach(self.tracee.tid, signal)) {
            Ok(()) => (made, end),
            // The thread has just been killed.
            Err(_) => (made, StopEnd::Gone),
        }
    }

    fn restore(&self) -> Result<(), Errno> {
        let tid = self.tracee.tid;
        ptrace::set_signal_mask(tid, self.mask)?;
        fault::point("mask-restored");
        ptrace::set_registers(tid, self.original)?;
        fault::point("registers-restored");
        self.undo_frame();
        fault::point("memory-restored");
        ptrace::set_options(tid, 0)?;
        fault::point("options-cleared");
        Ok(())
    }

    /// Restores the memory that the frame covers.
    fn undo_frame(&self) {
        if self.trampoline.is_some() {
            self.frame.unwrite(self.tracee.tid);
        }
    }
}

/// Whether a process runs this program.
pub fn is_same(program: Option<(&Process, ProgramId)>) -> bool {
    program.is_none_or(|(process, program)| ProgramId::of(process).is_ok_and(|now| now == program))
}

/// Sets the registers so that a stopped thread continues as if it hadn't been interrupted. Returns them.
pub fn repair(tid: i32, by_us: bool) -> Result<Registers, Errno> {
    let stopped = ptrace::registers(tid)?;
    if !regs::is_64_bit(&stopped) {
        return Ok(stopped);
    }
    let by_syscall_instruction = ptrace::peek(tid, stopped.rip.wrapping_sub(2)).is_ok_and(gadget::is_syscall);
    let original = regs::repaired(&stopped, by_us, by_syscall_instruction);
    if original.rax != stopped.rax {
        ptrace::set_registers(tid, &original)?;
    }
    Ok(original)
}

/// The lengths of the code that a thread runs with borrowed registers: `mov $15, %rax; syscall`, and `syscall`. Both
/// include the first byte after `syscall`, to which the call returns.
const SIGRETURN_LENGTH: u64 = 10;
const SYSCALL_LENGTH: u64 = 3;

/// The memory that a thread with borrowed registers may touch: address and length of the two pieces of code that it
/// runs, and of the frame from which the kernel restores the thread's own registers.
struct Borrowed {
    code: [(u64, u64); 2],
    frame: (u64, u64),
}

impl Borrowed {
    /// Whether our code may have made the thread raise this signal. Some signals can arrive at any time, and aren't
    /// ours: a performance counter's overflow (TRAP_PERF), a memory error (BUS_MCEERR_AR, BUS_MCEERR_AO), SIGSYS (no
    /// call that we inject is denied), and faults that the program sends itself, unless their address is in our code or
    /// missing (SI_KERNEL).
    fn may_raise(&self, signal: i32, cause: SignalCause, rip: u64) -> bool {
        const TRAP_PERF: i32 = 6;
        const BUS_MCEERR: [i32; 2] = [4, 5];
        let is_any_time = match signal {
            libc::SIGTRAP => cause.code == TRAP_PERF,
            libc::SIGBUS => BUS_MCEERR.contains(&cause.code),
            libc::SIGSYS => true,
            _ => false,
        };
        if is_any_time || FAULTS & bit(signal) == 0 || !self.is_code(rip) {
            return false;
        }
        // Neither a breakpoint nor a general protection fault has an address.
        cause.code == SI_KERNEL || self.is_code(cause.address) || is_in(self.frame, cause.address)
    }

    fn is_code(&self, address: u64) -> bool {
        self.code.iter().any(|&range| is_in(range, address))
    }
}

fn is_in((start, length): (u64, u64), address: u64) -> bool {
    address.wrapping_sub(start) < length
}

/// The libc crate lacks this value.
const SI_KERNEL: i32 = 0x80;

/// ptrace options that suspend a thread's seccomp filters.
const SUSPENDED: u64 = ptrace::OPTION_TRACESYSGOOD | ptrace::OPTION_SUSPEND_SECCOMP;

/// Signals that the kernel raises for a thread's own actions.
const FAULTS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGILL)
    | bit(libc::SIGFPE)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Whether the stopped thread has no seccomp filter.
fn unfiltered(tid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_stay_unblocked() {
        assert_eq!(FAULTS & bit(libc::SIGUSR1), 0);
        assert_ne!(FAULTS & bit(libc::SIGSEGV), 0);
        assert_ne!(!FAULTS & bit(libc::SIGALRM), 0);
    }

    #[test]
    fn only_faults_of_the_borrowed_code_are_kept_from_a_thread() {
        let borrowed = Borrowed { code: [(0x1000, 10), (0x2000, 3)], frame: (0x7000, 0x400) };
        let raised = |signal, code, address, rip| borrowed.may_raise(signal, SignalCause { code, address }, rip);
        // Ours: fetching code that is gone, running into a breakpoint, an invalid instruction or a step, and returning
        // by a lost frame.
        assert!(raised(libc::SIGSEGV, 1, 0x1000, 0x1000) && raised(libc::SIGBUS, 2, 0x2000, 0x2000));
        assert!(raised(libc::SIGTRAP, SI_KERNEL, 0, 0x1001) && raised(libc::SIGILL, 2, 0x1007, 0x1007));
        assert!(raised(libc::SIGTRAP, 2, 0x2002, 0x2002) && raised(libc::SIGSEGV, 1, 0x7000, 0x2002));
        // Not ours: sent by the program, or raised elsewhere.
        assert!(!raised(libc::SIGSEGV, 1, 0x1234, 0x1000) && !raised(libc::SIGSEGV, 1, 0x7400, 0x1000));
        assert!(!raised(libc::SIGSEGV, 1, 0x1000, 0x3000) && !raised(libc::SIGUSR1, 1, 0x1000, 0x1000));
        assert!(!raised(libc::SIGBUS, 4, 0x1000, 0x1000) && !raised(libc::SIGTRAP, 6, 0x1000, 0x1000));
        assert!(!raised(libc::SIGSYS, 1, 0x1000, 0x1000));
    }
}
