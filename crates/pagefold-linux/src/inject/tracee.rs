//! A stopped thread: save, call, restore, detach.
//!
//! From the first register set to the last one restored ([`Tracee::make_calls`]) the code neither allocates nor panics
//! nor takes signals, and leaves only with the thread restored or dead. What becomes of the thread if this process dies
//! at one of the `fault::point`s is said in [`super::return_frame`].

use super::progress::AttemptProgress;
use super::ptrace::{self, Registers, TraceeEvent};
use super::return_frame::ReturnFrame;
use super::stack_check::StackCheck;
use super::trampoline::Trampoline;
use super::{Call, Errno, Limits, gadget, regs, signed, unsigned};
use crate::os::fault;

/// How often a call is made that a signal cuts short (un-merging stops at any pending signal).
const RESTARTS: u32 = 4;
/// After a call's time is over and it was interrupted: what it gets to come back before the caller is told.
const GRACE_NS: u64 = 500_000_000;
/// So long a wait is polled without sleeping: most stops come within 20 us, and a sleep costs more than that.
const SPIN_NS: u64 = 200_000;
const LONGEST_NAP_NS: u64 = 5_000_000;

/// Waits until the thread is in a trap of the tracer's or of job control. Signals that come first are passed on.
/// `since_ns` becomes the time of the last look that did not find it stopped.
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

/// Waits for anything to happen to the tracee.
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
            // SAFETY: no arguments. Gives the target the CPU if it is to have this one.
            unsafe { libc::sched_yield() };
        } else {
            // An eighth of the wait so far: the end is seen late by that much at most.
            let nap_ns = signed((waited_ns / 8).min(LONGEST_NAP_NS));
            let nap = libc::timespec { tv_sec: 0, tv_nsec: nap_ns };
            // SAFETY: `nap` outlives the call.
            unsafe { libc::nanosleep(&raw const nap, std::ptr::null_mut()) };
        }
    }
}

/// The monotonic clock. Not `Instant`, whose arithmetic may panic.
pub fn clock_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    unsigned(now.tv_sec).wrapping_mul(1_000_000_000).wrapping_add(unsigned(now.tv_nsec))
}

/// How a stop ended. The thread is restored and let go, or dead, in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopEnd {
    Restored,
    Gone,
    /// A signal that cannot be blocked (SIGSTOP) had to be let through.
    Signal,
    /// In a restartable sequence, or no longer the program that was looked at.
    Unstable,
    Filtered,
    Compat,
    Dispatched,
    Fault,
    Abandoned,
    TimedOut,
}

/// Why calling broke off. But for `Gone`, the thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallFailure {
    Gone,
    TimedOut,
    Signal(i32),
}

/// A thread that is stopped by us.
pub struct Tracee {
    pub tid: i32,
    /// Stopped by our interrupt, not by job control.
    pub by_us: bool,
    pub is_main_thread: bool,
    /// A `syscall` instruction; that of the trampoline if there is one.
    pub instruction: u64,
    pub trampoline: Option<Trampoline>,
    pub stack_check: Option<StackCheck>,
}

/// What came of a stop.
#[derive(Clone, Copy, Debug)]
pub struct StopResult {
    /// How many calls were made.
    pub made: usize,
    pub end: StopEnd,
    /// Registers were set without a way home.
    pub unguarded: bool,
    /// From the first register set to the last one restored.
    pub away_ns: u64,
}

impl Tracee {
    /// Makes the calls, and lets the thread go as it was.
    pub fn make_calls(
        &self,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        progress: &AttemptProgress,
        frame: &mut ReturnFrame,
    ) -> StopResult {
        let tid = self.tid;
        let stopped_with = |end: StopEnd| StopResult { made: 0, end, unguarded: false, away_ns: 0 };
        let let_go = |end: StopEnd| match ptrace::set_options(tid, 0).and(ptrace::detach(tid, 0)) {
            Ok(()) => stopped_with(end),
            Err(_) => stopped_with(StopEnd::Gone),
        };
        let Ok(stopped) = ptrace::registers(tid) else { return let_go(StopEnd::Gone) };
        if let Some(unusable) = self.unusable(&stopped) {
            return let_go(unusable);
        }
        let by_syscall_instruction = ptrace::peek(tid, stopped.rip.wrapping_sub(2)).is_ok_and(gadget::is_syscall);
        let original = regs::repaired(&stopped, self.by_us, by_syscall_instruction);
        fault::point("stopped");
        // At once: until then this process's death is an EINTR.
        if original.rax != stopped.rax && ptrace::set_registers(tid, &original).is_err() {
            return let_go(StopEnd::Gone);
        }
        let Ok(mask) = ptrace::signal_mask(tid) else { return let_go(StopEnd::Gone) };
        // It may have to answer EINTR to this call, which the way home cannot give. Soon it will have.
        if self.by_us && regs::restarts(&original) && ptrace::has_pending(tid, mask) {
            return let_go(StopEnd::Unstable);
        }
        // Set here and not when attaching: there it would leave the thread unfiltered while it still runs.
        let suspend = ptrace::OPTION_TRACESYSGOOD | ptrace::OPTION_SUSPEND_SECCOMP;
        let suspended = ptrace::set_options(tid, suspend).is_ok();
        if !suspended && ptrace::set_options(tid, ptrace::OPTION_TRACESYSGOOD).is_err() {
            return let_go(StopEnd::Gone);
        }
        fault::point("options-set");
        if !suspended && !unfiltered(tid) {
            return let_go(StopEnd::Filtered);
        }
        let trampoline = self.trampoline.filter(|found| self.write_frame(frame, &original, mask, *found));
        fault::point("frame-written");
        let calling = Calling { tracee: self, original: &original, mask, trampoline, frame };
        if !progress.enter() {
            calling.undo_frame();
            return let_go(StopEnd::Abandoned);
        }
        let since_ns = clock_ns();
        let (made, end) = calling.run(calls, answers, limits, progress);
        progress.leave();
        StopResult { made, end, unguarded: trampoline.is_none(), away_ns: clock_ns().saturating_sub(since_ns) }
    }

    /// Writes the frame that brings the thread home. False: it has none, and nothing was written.
    fn write_frame(&self, frame: &mut ReturnFrame, original: &Registers, mask: u64, trampoline: Trampoline) -> bool {
        let goal = regs::return_registers(original, self.number_restarted(original));
        frame.prepare(self.tid, &goal, mask, trampoline)
            && self
                .stack_check
                .as_ref()
                .is_some_and(|stack_check| stack_check.is_unused(self.is_main_thread, self.tid, original, frame.base))
            && frame.write(self.tid)
    }

    /// The call that goes on as `restart_syscall` after an earlier stop, if that is what the thread is in.
    fn number_restarted(&self, original: &Registers) -> Option<i64> {
        let mut code = [0_u8; 64];
        let from = original.rip.wrapping_sub(2 + code.len() as u64);
        if signed(original.orig_rax) == libc::SYS_restart_syscall {
            ptrace::read(self.tid, from, &mut code).ok().and_then(|()| regs::number_in_code(&code))
        } else {
            None
        }
    }

    /// Why this stop must not be used.
    fn unusable(&self, stopped: &Registers) -> Option<StopEnd> {
        let tid = self.tid;
        if !regs::is_64_bit(stopped) {
            return Some(StopEnd::Compat);
        }
        // A restartable sequence is aborted by the kernel on the way back to it. Made to run elsewhere first, the thread
        // would come back to its middle with the kernel no longer knowing: the sequence would not be atomic.
        if !regs::in_syscall(stopped) && self.in_restartable_sequence(stopped) {
            return Some(StopEnd::Unstable);
        }
        // Checked before the tracer's entry stop is: the thread would be sent SIGSYS. Kernels before 6.4 cannot say.
        if ptrace::dispatches_syscalls(tid).unwrap_or(false) {
            return Some(StopEnd::Dispatched);
        }
        // It was found before the stop; an exec in between puts another program there.
        let there = match self.trampoline {
            Some(trampoline) => trampoline.is_there(tid),
            None => ptrace::peek(tid, self.instruction).is_ok_and(gadget::is_syscall),
        };
        (!there).then_some(StopEnd::Unstable)
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
}

/// A thread that is about to run, or runs, with registers that are not its own.
struct Calling<'a> {
    tracee: &'a Tracee,
    original: &'a Registers,
    mask: u64,
    /// It has a frame to come home by, and this is the code for it.
    trampoline: Option<Trampoline>,
    frame: &'a ReturnFrame,
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
        // Signals wait until the thread is itself again: a handler's frame would hold our registers. Not those of
        // faults: the kernel would reset a blocked one's handler, and unblocked it only shows us the signal.
        if ptrace::set_signal_mask(tid, self.mask | !FAULTS).is_err() {
            return (0, StopEnd::Gone);
        }
        fault::point("mask-set");
        let (made, broken) = self.call_all(calls, answers, limits, progress);
        match broken {
            None => self.let_go(0, (made, StopEnd::Restored)),
            Some(CallFailure::Gone) => (made, StopEnd::Gone),
            Some(CallFailure::TimedOut) => self.let_go(0, (made, StopEnd::TimedOut)),
            Some(CallFailure::Signal(signal)) if FAULTS & bit(signal) != 0 && ptrace::signal_is_fault(tid) => {
                self.let_go(0, (made, StopEnd::Fault))
            }
            Some(CallFailure::Signal(signal)) => self.let_go(signal, (made, StopEnd::Signal)),
        }
    }

    /// Makes one call after the other. Returns how many were made and why not all.
    fn call_all(
        &self,
        calls: &[Call],
        answers: &mut [i64],
        limits: &Limits,
        progress: &AttemptProgress,
    ) -> (usize, Option<CallFailure>) {
        let mut made = 0;
        for (call, answer) in calls.iter().zip(answers) {
            let registers = match self.trampoline {
                // To the `ret` behind the instruction.
                Some(trampoline) => regs::entering(
                    self.original,
                    self.frame.base,
                    trampoline.syscall.wrapping_add(2),
                    call.nr,
                    &call.args,
                ),
                None => regs::calling(self.original, self.tracee.instruction, call.nr, &call.args),
            };
            for _ in 0..RESTARTS {
                match self.call_once(&registers, limits, progress) {
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

    fn call_once(
        &self,
        registers: &Registers,
        limits: &Limits,
        progress: &AttemptProgress,
    ) -> Result<i64, CallFailure> {
        let tid = self.tracee.tid;
        let gone = |_: Errno| CallFailure::Gone;
        // With a way home it is on it, and comes to the entry of `rt_sigreturn`.
        if self.trampoline.is_none() {
            ptrace::set_registers(tid, registers).map_err(gone)?;
            fault::point("registers-set");
        }
        ptrace::resume_to_syscall(tid).map_err(gone)?;
        fault::point("resumed");
        let mut inside = false;
        let mut interrupted = false;
        let mut unused = 0;
        // Until the call begins there is only the way back to the program; it ends in a freezer if anywhere.
        let mut until_ns = clock_ns().saturating_add(limits.stop_ns);
        loop {
            match wait(tid, until_ns, &mut unused) {
                TraceeEvent::Syscall if !inside => {
                    fault::point("entry");
                    inside = true;
                    until_ns = clock_ns().saturating_add(limits.call_ns);
                    if self.trampoline.is_some() {
                        ptrace::set_registers(tid, registers).map_err(gone)?;
                        fault::point("call-set");
                    }
                    ptrace::resume_to_syscall(tid).map_err(gone)?;
                    fault::point("called");
                }
                TraceeEvent::Syscall => {
                    fault::point("exit");
                    let answer = signed(ptrace::registers(tid).map_err(gone)?.rax);
                    return if interrupted && (-516..=-512).contains(&answer) {
                        Err(CallFailure::TimedOut)
                    } else {
                        Ok(answer)
                    };
                }
                TraceeEvent::Trap { .. } if interrupted => return Err(CallFailure::TimedOut),
                // Job control; the detaching puts the thread back into its group's stop.
                TraceeEvent::Trap { .. } => ptrace::resume_to_syscall(tid).map_err(gone)?,
                TraceeEvent::Signal(signal) => return Err(CallFailure::Signal(signal)),
                TraceeEvent::Gone => return Err(CallFailure::Gone),
                TraceeEvent::Nothing if !interrupted => {
                    interrupted = true;
                    until_ns = clock_ns().saturating_add(GRACE_NS);
                    ptrace::interrupt(tid).map_err(gone)?;
                }
                TraceeEvent::Nothing => {
                    // Nothing more can be done than to stay: the thread cannot be restored before it stops.
                    until_ns = u64::MAX;
                    progress.get_stuck();
                }
            }
        }
    }

    /// Gives the thread its own signals, registers, memory and filter back, and lets it go with `signal`.
    fn let_go(&self, signal: i32, outcome: (usize, StopEnd)) -> (usize, StopEnd) {
        match self.restore().and_then(|()| ptrace::detach(self.tracee.tid, signal)) {
            Ok(()) => outcome,
            // Killed meanwhile.
            Err(_) => (outcome.0, StopEnd::Gone),
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

    /// Puts back the dead memory that the frame was written on.
    fn undo_frame(&self) {
        if self.trampoline.is_some() {
            self.frame.unwrite(self.tracee.tid);
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
    fn faults_stay_unblocked() {
        assert_eq!(FAULTS & bit(libc::SIGUSR1), 0);
        assert_ne!(FAULTS & bit(libc::SIGSEGV), 0);
        assert_ne!(!FAULTS & bit(libc::SIGALRM), 0);
    }
}
