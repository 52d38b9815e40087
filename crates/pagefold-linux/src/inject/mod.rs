//! Runs system calls inside other processes, and leaves no trace.
//!
//! `madvise` marks the memory of its caller only, so to mark a program's memory the program itself must
//! make the call. One of its threads is stopped by ptrace, made to run a batch of calls, given back every
//! register and its signal mask, and let go; the program notices nothing but the time. What its threads
//! block in, who signals it, freezes it, kills it or traces it meanwhile decides how ([`regs`], [`thread`]
//! and [`tracee`] say so where they do it).
//!
//! The one rule that cannot be bent: once a thread's registers are not its own, it is given them back or it
//! has died. Nothing times out of that, so [`InjectError::Held`] exists. Should this process die at that moment, the
//! thread comes home by itself, by a signal frame left below its stack pointer ([`return_frame`] says how, and what is then
//! different). Where there is no room that is certainly free for a frame ([`stack_check`]), no code to come back by
//! ([`trampoline`]), or a shadow stack, it is done without, and the tracer's death is the target's
//! ([`InjectionReport::unguarded`]); therefore the work belongs into a small process of its own all the same ([`Injector`]).
//!
//! Restarted relative timeouts start over, as after any stop: a wait of 50 ms that is stopped after 40 takes 90.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_pointer_width = "64")))]
compile_error!("injection knows the registers and the restart rules of 64-bit x86 Linux only");

mod engine;
pub(crate) mod gadget;
pub mod mark;
mod progress;
mod ptrace;
mod regs;
mod return_frame;
mod stack_check;
pub(crate) mod thread;
mod tracee;
mod trampoline;
pub mod unmerge;
pub(crate) mod worker;

pub use progress::held;
pub use worker::{Injector, InjectorHandle, serve};

use crate::proc::process::{Process, ReadError};
use engine::{Ended, Verdict};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use thiserror::Error;

/// How often a batch is tried when the moment was bad.
const TRIES: u32 = 8;
/// The pause after the first such try; it doubles.
const FIRST_PAUSE: Duration = Duration::from_micros(200);

/// A system call to be made by the target.
///
/// It should not block and must not depend on the thread that makes it; `madvise` and `prctl` on the whole
/// address space are what this is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The number.
    pub nr: i64,
    /// The arguments.
    pub args: [u64; 6],
}

impl Call {
    /// `madvise(addr, len, advice)`.
    pub fn madvise(addr: u64, len: u64, advice: i32) -> Self {
        Self { nr: libc::SYS_madvise, args: [addr, len, unsigned(i64::from(advice)), 0, 0, 0] }
    }

    /// `prctl(option, arg2, arg3, arg4, arg5)`.
    pub fn prctl(option: i32, args: [u64; 4]) -> Self {
        let [a, b, c, d] = args;
        Self { nr: libc::SYS_prctl, args: [unsigned(i64::from(option)), a, b, c, d, 0] }
    }
}

/// An error number of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errno(pub i32);

impl Errno {
    fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(formatter)
    }
}

/// How long what may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// From the request to the stop. The target runs (or sleeps) meanwhile, so this may be generous: a thread whose
    /// control group is out of CPU time takes a whole period, 100 ms by default, to reach its stop.
    pub stop_ns: u64,
    /// One call. When it is over the call is broken off; un-merging gives up the rest of its range then.
    pub call_ns: u64,
    /// Calls made before the target is let go for a while.
    pub calls_per_stop: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // Un-merging copies about a gigabyte a second. Thirty calls in one stop were measured at 37 us each.
        Self { stop_ns: 250_000_000, call_ns: 2_000_000_000, calls_per_stop: 32 }
    }
}

/// What came of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectionReport {
    /// One answer per call, in order. EINTR: cut short by signals again and again; make the call again later.
    pub results: Vec<Result<u64, Errno>>,
    /// How often the target was stopped.
    pub stops: u32,
    /// The longest of the stops: from the last look that did not find the thread stopped until it was let go.
    pub longest_stop_ns: u64,
    /// All stops together.
    pub total_stop_ns: u64,
    /// Of the stops, those whose thread would not have found home by itself had this process been killed in them.
    #[serde(default)]
    pub unguarded: u32,
    /// The longest time that a thread had registers that were not its own: what an unguarded target is at risk for.
    #[serde(default)]
    pub longest_away_ns: u64,
}

/// Why a batch was not (wholly) run. Calls at its beginning may have been; marking twice does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum InjectError {
    /// The process has ended, or its pid belongs to another one now.
    #[error("process {pid} has ended; nothing is left to do")]
    Vanished {
        /// The process.
        pid: i32,
    },
    /// A debugger or another tracer is there.
    #[error("process {pid} is traced by process {by}; try again when that has let go of it")]
    Traced {
        /// The process.
        pid: i32,
        /// Its tracer, zero if in a pid namespace that cannot be seen from here.
        by: i32,
    },
    /// Its control group is frozen.
    #[error("process {pid} is frozen; try again when its control group is thawed")]
    Frozen {
        /// The process.
        pid: i32,
    },
    /// The kernel forbids tracing it.
    #[error(
        "not permitted to trace process {pid}; CAP_SYS_PTRACE is needed, and a security module may forbid it even so"
    )]
    Denied {
        /// The process.
        pid: i32,
    },
    /// A thread of the kernel.
    #[error("process {pid} is a kernel thread, which has no memory of its own; leave it out")]
    KernelThread {
        /// The process.
        pid: i32,
    },
    /// Ended, but not yet reaped by its parent.
    #[error("process {pid} is a zombie, whose memory is gone; leave it out")]
    Zombie {
        /// The process.
        pid: i32,
    },
    /// All threads are in calls that would notice, or cannot be stopped.
    #[error("every thread of process {pid} is in a call that must not be interrupted; try again later")]
    NoSafeThread {
        /// The process.
        pid: i32,
    },
    /// It kept changing (an exec, threads that end, signals, critical sections).
    #[error("process {pid} changed at each of several tries; try again later")]
    Busy {
        /// The process.
        pid: i32,
    },
    /// A limit ran out. The target is as it was.
    #[error("process {pid} did not {what} in time and was let go unchanged; try again later")]
    TimedOut {
        /// The process.
        pid: i32,
        /// What it did not do.
        what: String,
    },
    /// A limit ran out while the thread has registers that are not its own.
    #[error(
        "process {pid} cannot be let go yet (frozen, or its call does not end); do not end the tracer, it restores the process as soon as it can"
    )]
    Held {
        /// The process.
        pid: i32,
    },
    /// A program for another instruction set.
    #[error("process {pid} runs 32-bit code, which is not supported; leave it out")]
    Compat {
        /// The process.
        pid: i32,
    },
    /// Its seccomp filter cannot be put to sleep.
    #[error(
        "process {pid} has a seccomp filter that may not be suspended; run with CAP_SYS_ADMIN and outside of any seccomp filter"
    )]
    Filtered {
        /// The process.
        pid: i32,
    },
    /// It handles its own system calls.
    #[error("process {pid} has its system calls sent to itself (syscall user dispatch, as Wine does); leave it out")]
    Dispatched {
        /// The process.
        pid: i32,
    },
    /// No `syscall` instruction in its readable code.
    #[error("process {pid} has no system-call instruction to borrow; leave it out")]
    NoInstruction {
        /// The process.
        pid: i32,
    },
    /// The borrowed instruction was taken away at the last moment.
    #[error("process {pid} faulted at the borrowed instruction and was restored; try again later")]
    Fault {
        /// The process.
        pid: i32,
    },
    /// Any other failure of the system.
    #[error("{what} of process {pid}: {errno}")]
    System {
        /// The process.
        pid: i32,
        /// What was tried.
        what: String,
        /// The system's error.
        errno: Errno,
    },
    /// The worker process has ended.
    #[error("the injector process has ended; start another one")]
    WorkerGone,
    /// The worker process does not answer.
    #[error(
        "the injector process has not answered in time; leave it alone, it may hold a process that needs it, and ask again later"
    )]
    WorkerSilent,
    /// The worker process does not speak this protocol.
    #[error("the injector process answered nonsense ({what}); both ends must be the same program")]
    Protocol {
        /// What is wrong.
        what: String,
    },
}

impl InjectError {
    /// Whether the same batch may well work in a while.
    pub fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Traced { .. }
                | Self::Frozen { .. }
                | Self::NoSafeThread { .. }
                | Self::Busy { .. }
                | Self::TimedOut { .. }
                | Self::Held { .. }
                | Self::Fault { .. }
                | Self::WorkerSilent
        )
    }

    fn from_read(error: ReadError) -> Self {
        match error {
            ReadError::Vanished { pid } => Self::Vanished { pid },
            ReadError::Denied { pid, .. } => Self::Denied { pid },
            // Files of a thread that has ended meanwhile.
            ReadError::Absent { pid, .. } => Self::Busy { pid },
            ReadError::Malformed { pid, file, what } => {
                Self::System { pid, what: format!("reading {file} ({what})"), errno: Errno(libc::EINVAL) }
            }
            ReadError::Io { pid, file, source } => Self::System {
                pid,
                what: format!("reading {file}"),
                errno: Errno(source.raw_os_error().unwrap_or(libc::EIO)),
            },
        }
    }
}

/// Whether the process is seen to be frozen by its control group, looking at its main thread.
pub fn is_frozen(process: &Process) -> bool {
    let pid = process.pid();
    match (process.stat(), thread::activity(process, pid)) {
        (Ok(stat), Ok(activity)) => thread::frozen(process, pid, &stat, activity),
        _ => false,
    }
}

/// Runs `calls` in `process`, by a short-lived thread of this very process.
///
/// This process must live until it is done ([`held`] tells), and nobody in it may wait for any child, or for this
/// one, with `waitpid` meanwhile: the kernel would hand it the target's stops.
pub fn inject(process: &Process, calls: &[Call], limits: &Limits) -> Result<InjectionReport, InjectError> {
    run(process, None, calls, limits)
}

/// The same in the given thread of `process`, whatever that is doing: for experiments. [`inject`] knows better.
pub fn inject_thread(
    process: &Process,
    tid: i32,
    calls: &[Call],
    limits: &Limits,
) -> Result<InjectionReport, InjectError> {
    run(process, Some(tid), calls, limits)
}

fn run(process: &Process, tid: Option<i32>, calls: &[Call], limits: &Limits) -> Result<InjectionReport, InjectError> {
    let pid = process.pid();
    let mut report = InjectionReport::default();
    let mut pause = FIRST_PAUSE;
    let mut tries = 0;
    while report.results.len() < calls.len() {
        let rest = &calls[report.results.len()..];
        let batch = &rest[..rest.len().min(limits.calls_per_stop.max(1))];
        let Ended { results, stop_ns, unguarded, away_ns, verdict } = engine::attempt(process, tid, batch, limits)?;
        let advanced = !results.is_empty();
        report.results.extend(results);
        if let Some(stop_ns) = stop_ns {
            report.stops += 1;
            report.longest_stop_ns = report.longest_stop_ns.max(stop_ns);
            report.total_stop_ns += stop_ns;
            report.unguarded += u32::from(unguarded);
            report.longest_away_ns = report.longest_away_ns.max(away_ns);
        }
        match verdict {
            // As long as it was stopped it runs, before it is stopped again.
            Verdict::Done if report.results.len() < calls.len() => {
                std::thread::sleep(Duration::from_nanos(stop_ns.unwrap_or(0)));
            }
            Verdict::Done => {}
            Verdict::Failed(error) => return Err(error),
            Verdict::Again(error) => {
                tries = if advanced { 0 } else { tries + 1 };
                if tries >= TRIES {
                    return Err(error);
                }
                if !process.stat().is_ok_and(|stat| stat.start_time_ticks == process.start_time_ticks()) {
                    return Err(InjectError::Vanished { pid });
                }
                std::thread::sleep(pause);
                pause *= 2;
            }
        }
        if matches!(tries, 0) {
            pause = FIRST_PAUSE;
        }
    }
    Ok(report)
}

/// A register's word as a number of either sign. The standard conversion is newer than the oldest supported compiler.
const fn signed(word: u64) -> i64 {
    i64::from_ne_bytes(word.to_ne_bytes())
}

/// The way back.
const fn unsigned(number: i64) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}
