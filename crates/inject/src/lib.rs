//! Runs system calls inside other processes, without a lasting effect on them.
//!
//! `madvise` marks memory of its caller only, so a process must make the call itself if its memory is to be marked. We
//! stop one of its threads by ptrace, make it run a batch of calls, give it back every register and its signal mask,
//! and resume it. The process sees nothing but the delay. [`regs`], [`thread`] and [`tracee`] describe the cases where
//! the thread blocks in a call, or is signalled, frozen, killed or traced during the stop.
//!
//! One rule has no exception: once we've borrowed a thread's registers, we give them back, or the thread has died. No
//! time limit lifts that rule, which is why [`InjectError::Held`] exists. If our process dies in between, the thread
//! restores itself by a signal frame that we've left below its stack pointer ([`return_frame`] says how, and which
//! differences remain). There are three cases without a frame: we find no memory that's certainly unused
//! ([`stack_check`]), the target has no code to return by ([`trampoline`]), or the thread has a shadow stack. Then our
//! death kills the target ([`InjectionReport::unguarded`]). So a small process of its own should do the work
//! ([`Injector`]).
//!
//! Relative timeouts of restarted calls start over, as after any stop: a wait of 50 ms that we stop after 40 takes 90.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_pointer_width = "64")))]
compile_error!("injection knows the registers and the restart rules of 64-bit x86 Linux only");

mod code;
mod engine;
#[doc(hidden)]
pub mod fuzzing;
pub(crate) mod gadget;
mod injector;
mod progress;
mod ptrace;
mod regs;
mod return_frame;
mod stack_check;
mod starter;
pub(crate) mod thread;
mod tracee;
mod trampoline;
pub mod unmerge;
pub(crate) mod worker;

pub use injector::{Injector, InjectorHandle};
pub use pagefold_procmem::image::ProgramId;
pub use progress::held;
pub use starter::start_injectors;
pub use worker::{Inject, serve};

use engine::{AttemptOutcome, Verdict};
use pagefold_engine::host::Stops;
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::stops::StopLengths;
use pagefold_procmem::merge_any::PR_SET_MEMORY_MERGE;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::stalls::{ATTEMPTS, Origin, REQUESTS};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use thiserror::Error;

/// After this many failed attempts in a row we give up a batch of calls.
const ATTEMPTS_MOST: u32 = 8;
/// The pause after the first failed attempt; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// A request that has taken this long makes no further attempt, because other requests are waiting.
const REQUEST_LIMIT: Duration = Duration::from_millis(250);

/// A system call for the target to make.
///
/// The call shouldn't block, and it shouldn't matter which thread makes it. Meant for `madvise`, and for `prctl`
/// options that concern the whole address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub nr: i64,
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

    /// Whether the call only marks or unmarks memory, or asks if the program is dumpable. pagefold makes no other
    /// calls.
    pub fn is_harmless(&self) -> bool {
        let is = |value: u64, number: i32| value == unsigned(i64::from(number));
        match (self.nr, self.args) {
            (libc::SYS_madvise, [_, _, advice, ..]) => {
                is(advice, libc::MADV_MERGEABLE) || is(advice, libc::MADV_UNMERGEABLE)
            }
            (libc::SYS_prctl, [option, 0, 0, 0, 0, 0]) => {
                is(option, libc::PR_GET_DUMPABLE) || is(option, PR_SET_MEMORY_MERGE)
            }
            _ => false,
        }
    }
}

/// A system error number (errno).
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// How long the target may take to stop after we've asked for it. It keeps running until then, so we can be
    /// generous: a thread whose cgroup is out of CPU time takes a whole period, 100 ms by default, to reach its stop.
    pub stop_ns: u64,
    /// How long one call may take. All calls in a stop together may take this plus `stop_ns`. We interrupt a call that
    /// takes longer; an interrupted unmerge leaves the rest of its range merged.
    pub call_ns: u64,
    /// The most calls in one stop. Between two stops we let the target run for as long as we stopped it.
    pub calls_per_stop: usize,
}

/// Calls for a process to make.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub process: &'a Process,
    /// The program that the process must be running.
    pub program: &'a ProgramId,
    pub calls: &'a [Call],
    pub limits: &'a Limits,
}

impl Default for Limits {
    fn default() -> Self {
        // Unmerging copies about a gigabyte a second. Thirty marks in one stop took 37 us each.
        Self { stop_ns: 250_000_000, call_ns: 2_000_000_000, calls_per_stop: 32 }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectionReport {
    /// One result per call, in order. EINTR: signals interrupted every attempt; make the call again later.
    pub results: Vec<Result<u64, Errno>>,
    /// How often we stopped the target.
    pub stops: u32,
    /// The longest stop, nanoseconds: from our last check that found the thread running until we resumed it.
    pub longest_stop_ns: u64,
    pub total_stop_ns: u64,
    #[serde(default)]
    pub stop_lengths: StopLengths,
    /// How many stops had no return frame: if this process had been killed in one of them, the target would have died.
    #[serde(default)]
    pub unguarded: u32,
    /// The longest time that a thread had borrowed registers, nanoseconds. Without a return frame it's at risk that
    /// long.
    #[serde(default)]
    pub longest_away_ns: u64,
}

impl InjectionReport {
    /// The stops in this report, as stops of the process `owner`. `None` if we never stopped it.
    pub fn stops_of(&self, owner: OwnerKey) -> Option<Stops> {
        if self.stops == 0 {
            return None;
        }
        Some(Stops {
            owner,
            number: self.stops,
            longest_ns: self.longest_stop_ns,
            total_ns: self.total_stop_ns,
            lengths: self.stop_lengths,
        })
    }
}

/// Why we didn't make all calls of a batch. We may have made the first ones. The caller may repeat the whole batch:
/// marking twice has no effect.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum InjectError {
    /// The process has ended, or its pid has been reused.
    #[error("process {pid} has ended; nothing is left to do")]
    Vanished { pid: i32 },
    /// The process no longer runs the program that we judged, or runs it as another user.
    #[error(
        "process {pid} no longer runs the program that pagefold examined, or runs it as another user; try again later"
    )]
    OtherProgram { pid: i32 },
    /// A debugger or another tracer is attached: `by`, or 0 if we can't see its pid namespace.
    #[error("process {pid} is traced by process {by}; try again when the tracer has detached")]
    Traced { pid: i32, by: i32 },
    #[error("process {pid} is frozen; try again when its cgroup is thawed")]
    Frozen { pid: i32 },
    /// The kernel forbids us to trace the process.
    #[error(
        "not permitted to trace process {pid}; CAP_SYS_PTRACE is needed, and a security module may still forbid it"
    )]
    Denied { pid: i32 },
    #[error("process {pid} is a kernel thread, which has no memory of its own; exclude it")]
    KernelThread { pid: i32 },
    /// The process has ended, but its parent hasn't reaped it yet.
    #[error("process {pid} is a zombie without memory; exclude it")]
    Zombie { pid: i32 },
    /// Every thread is in a call that an interruption would change, or can't be stopped.
    #[error("every thread of process {pid} is in a system call that must not be interrupted; try again later")]
    NoSafeThread { pid: i32 },
    /// The process changed during every attempt (exec, ending threads, signals, restartable sequences).
    #[error("process {pid} changed during every attempt; try again later")]
    Busy { pid: i32 },
    /// We don't try this process now, because others of its user or cgroup have stalled us.
    #[error("process {pid} was not tried: other processes of its user or cgroup took too long; try again later")]
    OthersStalled { pid: i32 },
    /// A time limit passed. We've released the target unchanged.
    #[error("process {pid} did not {what} in time and was released unchanged; try again later")]
    TimedOut { pid: i32, what: String },
    /// A time limit passed while a thread was running with borrowed registers.
    #[error(
        "process {pid} cannot be released yet (it is frozen, or its call or a read of its memory does not end); do not end the injector, which restores the process as soon as possible"
    )]
    Held { pid: i32 },
    #[error("process {pid} runs 32-bit code, which is not supported; exclude it")]
    Compat { pid: i32 },
    #[error(
        "process {pid} has a seccomp filter that cannot be suspended; run with CAP_SYS_ADMIN and outside any seccomp filter"
    )]
    Filtered { pid: i32 },
    /// The process handles its own system calls.
    #[error("process {pid} uses syscall user dispatch (as Wine does), which is not supported; exclude it")]
    Dispatched { pid: i32 },
    /// We found no `syscall` instruction in the process's readable code.
    #[error("found no syscall instruction in the code of process {pid}, so no call can be made in it; exclude it")]
    NoInstruction { pid: i32 },
    /// The thread faulted at the `syscall` instruction, which has disappeared since we found it.
    #[error(
        "process {pid} faulted at the instruction that was to make the call; its state was restored; try again later"
    )]
    Fault { pid: i32 },
    #[error("{what} of process {pid}: {errno}")]
    System { pid: i32, what: String, errno: Errno },
    /// The injector process has ended. We don't know whether it made the calls.
    #[error("the injector process has ended; try again")]
    WorkerGone,
    /// Injectors have ended, or couldn't be started, `failures` times in a row.
    #[error("the injector process has ended and {failures} attempts to start it again have failed ({why})")]
    WorkerLost { why: String, failures: u32 },
    #[error(
        "the injector process has not replied in time; do not kill it, because it may have to restore a process, and try again later"
    )]
    WorkerSilent,
    #[error("the injector process sent a malformed reply ({what}); run the same version of pagefold on both ends")]
    Protocol { what: String },
}

impl InjectError {
    /// Whether the same batch may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            // Other errors, such as a lack of memory or descriptors, go away.
            Self::System { errno, .. } => !matches!(errno.0, libc::EPERM | libc::ENOSYS | libc::E2BIG),
            Self::OtherProgram { .. }
            | Self::Traced { .. }
            | Self::Frozen { .. }
            | Self::NoSafeThread { .. }
            | Self::Busy { .. }
            | Self::OthersStalled { .. }
            | Self::TimedOut { .. }
            | Self::Held { .. }
            | Self::Fault { .. }
            | Self::WorkerGone
            | Self::WorkerSilent
            | Self::Protocol { .. } => true,
            _ => false,
        }
    }

    /// Whether calls without a result may have been made, or may still be made.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::TimedOut { .. } | Self::WorkerGone | Self::WorkerSilent)
    }

    fn from_read(error: ReadError) -> Self {
        match error {
            ReadError::Vanished { pid } => Self::Vanished { pid },
            ReadError::Denied { pid, .. } => Self::Denied { pid },
            // The thread whose file we read has just ended, or the memory is moving.
            ReadError::Absent { pid, .. } | ReadError::Moving { pid } => Self::Busy { pid },
            ReadError::Malformed { pid, file, what } => {
                Self::System { pid, what: format!("reading {file} ({what})"), errno: Errno(libc::EINVAL) }
            }
            ReadError::TooMany { pid, .. } => {
                Self::System { pid, what: "listing the mappings".into(), errno: Errno(libc::E2BIG) }
            }
            ReadError::Io { pid, file, source } => Self::System {
                pid,
                what: format!("reading {file}"),
                errno: Errno(source.raw_os_error().unwrap_or(libc::EIO)),
            },
        }
    }
}

/// Whether the process's main thread is frozen by its cgroup.
pub fn is_frozen(process: &Process) -> bool {
    let pid = process.pid();
    match (process.stat(), thread::activity(process, pid)) {
        (Ok(stat), Ok(activity)) => thread::frozen(process, pid, &stat, activity),
        _ => false,
    }
}

/// Runs `calls` in `process`, on a short-lived thread of this process.
///
/// This process must not end before it has restored all threads ([`held`] counts the remaining ones). Until then it
/// must not wait for just any child with `waitpid`: the kernel would report the target's stops there.
pub fn inject(process: &Process, calls: &[Call], limits: &Limits) -> Result<InjectionReport, InjectError> {
    run(process, None, None, calls, limits, false)
}

/// Like [`inject`], but only while the process runs the batch's program, and as long as its user and cgroup haven't
/// used up their share of our time ([`pagefold_procmem::stalls`]). If the batch has no calls, this only makes sure that
/// no earlier call is still under way.
///
/// # Errors
/// [`InjectError::OtherProgram`] if the process runs another program.
pub fn inject_into(batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
    let Batch { process, program, calls, limits } = batch;
    let pid = process.pid();
    if ATTEMPTS.has_thread(process) {
        return Err(InjectError::TimedOut { pid, what: "finish the last call".into() });
    }
    let origin = Origin::of(process);
    if !calls.is_empty() && !REQUESTS.admits(origin, Instant::now()) {
        return Err(InjectError::OthersStalled { pid });
    }
    let began = Instant::now();
    let result = run(process, Some(program), None, calls, limits, true);
    REQUESTS.charge(origin, began.elapsed(), Instant::now());
    result
}

/// Like [`inject`], but in the given thread of `process`, whatever it's doing. For tests.
pub fn inject_thread(
    process: &Process,
    tid: i32,
    calls: &[Call],
    limits: &Limits,
) -> Result<InjectionReport, InjectError> {
    run(process, None, Some(tid), calls, limits, false)
}

fn run(
    process: &Process,
    program: Option<&ProgramId>,
    tid: Option<i32>,
    calls: &[Call],
    limits: &Limits,
    is_shared: bool,
) -> Result<InjectionReport, InjectError> {
    let pid = process.pid();
    let began = Instant::now();
    let mut report = InjectionReport::default();
    let mut pause = FIRST_PAUSE;
    let mut attempts = 0;
    // The kernel also denies tracing a thread that is dying. So we only report [`InjectError::Denied`] if every attempt
    // failed this way.
    let mut is_denied = true;
    while report.results.len() < calls.len() {
        let rest = &calls[report.results.len()..];
        let batch = &rest[..rest.len().min(limits.calls_per_stop.max(1))];
        let AttemptOutcome { results, stop_ns, unguarded, away_ns, verdict } =
            engine::attempt(process, program, tid, batch, limits, is_shared)?;
        let advanced = !results.is_empty();
        report.results.extend(results);
        if let Some(stop_ns) = stop_ns {
            report.stops += 1;
            report.longest_stop_ns = report.longest_stop_ns.max(stop_ns);
            report.total_stop_ns += stop_ns;
            report.stop_lengths.add(stop_ns);
            report.unguarded += u32::from(unguarded);
            report.longest_away_ns = report.longest_away_ns.max(away_ns);
        }
        let is_over = is_shared && began.elapsed() >= REQUEST_LIMIT;
        match verdict {
            Verdict::Done if is_over && report.results.len() < calls.len() => return Err(InjectError::Busy { pid }),
            // Before the next stop we let the target run for as long as we stopped it.
            Verdict::Done if report.results.len() < calls.len() => {
                std::thread::sleep(Duration::from_nanos(stop_ns.unwrap_or(0)));
            }
            Verdict::Done => {}
            Verdict::Failed(error) => return Err(error),
            Verdict::Again(error) => {
                attempts = if advanced { 0 } else { attempts + 1 };
                is_denied &= matches!(error, InjectError::Denied { .. }) && report.stops == 0;
                if attempts >= ATTEMPTS_MOST || is_over {
                    let is_dying = matches!(error, InjectError::Denied { .. }) && !is_denied;
                    return Err(if is_dying { InjectError::Busy { pid } } else { error });
                }
                if !process.stat().is_ok_and(|stat| stat.start_time_ticks == process.start_time_ticks()) {
                    return Err(InjectError::Vanished { pid });
                }
                std::thread::sleep(pause);
                pause *= 2;
            }
        }
        if attempts == 0 {
            pause = FIRST_PAUSE;
        }
    }
    Ok(report)
}

/// A register as a signed number. Our oldest supported compiler has no `u64::cast_signed`.
const fn signed(word: u64) -> i64 {
    i64::from_ne_bytes(word.to_ne_bytes())
}

/// The inverse of [`signed`].
const fn unsigned(number: i64) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_resources_passes_and_a_refusal_does_not() {
        let system = |errno| InjectError::System { pid: 1, what: "reading maps".into(), errno: Errno(errno) };
        for errno in [libc::ENOMEM, libc::EMFILE, libc::EIO] {
            assert!(system(errno).is_passing(), "{errno}");
        }
        assert!(InjectError::Protocol { what: "its end".into() }.is_passing());
        for errno in [libc::EPERM, libc::ENOSYS, libc::E2BIG] {
            assert!(!system(errno).is_passing(), "{errno}");
        }
        assert!(!InjectError::Denied { pid: 1 }.is_passing());
    }
}
