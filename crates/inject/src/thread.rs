//! Chooses the thread of the target that runs the calls.
//!
//! Any thread can run them, because all share one address space. The best one blocks in a call that the kernel restarts
//! without effect. A running one will do, preferably one that spends little of its time in the kernel, where a stop may
//! cut a call short. We never choose a thread in a call that returns a partial result when interrupted (a large write
//! to a pipe, a receive with MSG_WAITALL, an io_uring wait that also submits). Nor do we choose one that wouldn't stop
//! at all (uninterruptible sleep, a vfork parent).

use super::InjectError;
use pagefold_procmem::os::fields::number;
use pagefold_procmem::process::{Process, ReadError, Stat};
use rustix::fs::OFlags;
use std::os::fd::AsRawFd;

/// How many threads we examine at most. Each takes some 10 us.
const MAX_THREADS: usize = 128;

/// The content of `/proc/PID/task/TID/syscall`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Running,
    /// Blocked outside a system call: stopped, frozen, in a page fault.
    Blocked,
    Syscall {
        nr: i64,
        args: [u64; 6],
        /// The program counter, just after the `syscall` instruction.
        pc: u64,
    },
}

impl Activity {
    /// Parses the content of the file.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(text).map_err(|_| "not ASCII")?.trim_end();
        if text == "running" {
            return Ok(Self::Running);
        }
        let mut fields = text.split(' ');
        let nr: i64 = fields.next().unwrap_or_default().parse().map_err(|_| "the call is not a number")?;
        let mut words = [0_u64; 8];
        let wanted = if nr < 0 { 2 } else { 8 };
        for word in &mut words[..wanted] {
            let field = fields.next().ok_or("too few fields")?;
            let digits = field.strip_prefix("0x").ok_or("a field is not hexadecimal")?;
            *word = u64::from_str_radix(digits, 16).map_err(|_| "a field is not hexadecimal")?;
        }
        if nr < 0 {
            return Ok(Self::Blocked);
        }
        let mut args = [0; 6];
        args.copy_from_slice(&words[..6]);
        // The stack pointer is between the arguments and the program counter.
        Ok(Self::Syscall { nr, args, pc: words[7] })
    }
}

/// How suitable a thread is. Smaller is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fitness {
    /// Blocked in a call that restarts without effect.
    Restarts,
    /// Blocked in a call whose relative timeout starts over if we interrupt the call.
    StartsOver,
    /// Running, or stopped by job control.
    User,
}

/// Judges a thread by its state letter and activity. `None`: we can't use it now.
pub fn fitness(state: u8, activity: Activity) -> Option<Fitness> {
    match state {
        b'R' | b'S' => {}
        // Job control has already interrupted any call.
        b'T' => return Some(Fitness::User),
        _ => return None,
    }
    match activity {
        Activity::Running | Activity::Blocked => Some(Fitness::User),
        Activity::Syscall { nr, args, .. } => match nr {
            libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
            | libc::SYS_futex
            | libc::SYS_futex_waitv
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_pause
            | libc::SYS_rt_sigsuspend
            | libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_msgrcv
            // After a stop, this continues one of the calls above that have a timeout.
            | libc::SYS_restart_syscall => Some(Fitness::Restarts),
            libc::SYS_recvfrom if args[3] & waitall() != 0 => None,
            libc::SYS_recvmsg if args[2] & waitall() != 0 => None,
            // This call submits requests before it waits. If we interrupted the wait, the call would return the number
            // of submitted requests, although the completions that it waits for aren't there.
            libc::SYS_io_uring_enter if args[1] != 0 => None,
            // We could turn an EINTR of these calls into a restart, but they may have sent a part of their data, so we
            // don't choose them.
            libc::SYS_sendto | libc::SYS_sendmsg => None,
            nr if super::regs::repairable(nr) => Some(Fitness::StartsOver),
            _ => None,
        },
    }
}

fn waitall() -> u64 {
    u64::from(libc::MSG_WAITALL.unsigned_abs())
}

/// A thread, and what it was doing when we examined it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub tid: i32,
    pub activity: Activity,
}

#[derive(Debug)]
pub enum Choice {
    Thread(Candidate),
    NoneNow,
}

/// Reads the state and activity of one thread.
pub fn examine(process: &Process, tid: i32) -> Result<(Stat, Activity), ReadError> {
    Ok((stat(process, tid)?, activity(process, tid)?))
}

fn stat(process: &Process, tid: i32) -> Result<Stat, ReadError> {
    let file = format!("task/{tid}/stat");
    Stat::parse(&process.read_file(&file)?).map_err(|what| process.malformed(&file, what))
}

/// Whether a thread is dead, though it may not be reaped yet.
pub fn has_ended(process: &Process, tid: i32) -> bool {
    stat(process, tid).is_ok_and(|stat| stat.has_ended())
}

pub fn activity(process: &Process, tid: i32) -> Result<Activity, ReadError> {
    let file = format!("task/{tid}/syscall");
    Activity::parse(&process.read_file(&file)?).map_err(|what| process.malformed(&file, what))
}

/// Whether a cgroup freezer has frozen the thread. The kernel doesn't document how to tell, so we may overlook a frozen
/// thread; then a time limit ends the attempt.
pub fn frozen(process: &Process, tid: i32, stat: &Stat, activity: Activity) -> bool {
    // With cgroup v1, a thread that sleeps in a call is frozen there (Linux 6.1). Only the freezer makes the sleep of
    // these calls uninterruptible.
    if stat.state == b'D' && matches!(activity, Activity::Syscall { nr, .. } if only_sleeps(nr)) {
        return true;
    }
    // With cgroup v2, threads are frozen in `do_freezer_trap`, where the kernel delivers signals. The compiler may
    // inline that function into `get_signal`, where threads stopped by job control wait, too (state T).
    process.read_file(&format!("task/{tid}/wchan")).is_ok_and(|name| match name.as_slice() {
        b"__refrigerator" | b"do_freezer_trap" => true,
        b"get_signal" => stat.state == b'S',
        _ => false,
    })
}

fn only_sleeps(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
            | libc::SYS_futex
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2
            | libc::SYS_restart_syscall
    )
}

/// Chooses a thread of a process. We examine the main thread first.
pub fn choose(process: &Process) -> Result<Choice, InjectError> {
    let pid = process.pid();
    let mut best: Option<(Fitness, u64, Candidate)> = None;
    let mut living = 0_usize;
    for tid in threads(process)? {
        let (stat, activity) = match examine(process, tid) {
            Ok(found) => found,
            // The thread has ended.
            Err(ReadError::Vanished { .. } | ReadError::Absent { .. }) => continue,
            Err(error) => return Err(InjectError::from_read(error)),
        };
        if stat.kernel_thread {
            return Err(InjectError::KernelThread { pid });
        }
        if stat.has_ended() {
            continue;
        }
        living += 1;
        if living == 1 && frozen(process, tid, &stat, activity) {
            return Err(InjectError::Frozen { pid });
        }
        if stat.state == b't' {
            return Err(InjectError::Traced { pid, by: tracer(process, tid) });
        }
        let Some(fitness) = fitness(stat.state, activity) else { continue };
        let in_kernel = in_kernel_permille(&stat, activity);
        if best.is_none_or(|(so_far, least, _)| (fitness, in_kernel) < (so_far, least)) {
            best = Some((fitness, in_kernel, Candidate { tid, activity }));
        }
        if fitness == Fitness::Restarts {
            break;
        }
    }
    match best {
        Some((Fitness::User, _, candidate))
            if candidate.activity == Activity::Running
                && (is_in_between(process, candidate.tid) || may_have_ring(process)) =>
        {
            Ok(Choice::NoneNow)
        }
        Some((_, _, candidate)) => Ok(Choice::Thread(candidate)),
        None if living == 0 => Err(InjectError::Zombie { pid }),
        None => Ok(Choice::NoneNow),
    }
}

/// The share of its time that a running thread has spent in the kernel so far, in thousandths.
fn in_kernel_permille(stat: &Stat, activity: Activity) -> u64 {
    match activity {
        Activity::Running => stat.system_ticks.saturating_mul(1000) / stat.cpu_ticks.max(1),
        _ => 0,
    }
}

/// Watches a running thread for 2 ms, and returns whether it blocks in a call that an interruption would change. If it
/// does, it may also have been running inside such a call, which we can't see.
fn is_in_between(process: &Process, tid: i32) -> bool {
    const CHECKS: u32 = 8;
    const PAUSE: std::time::Duration = std::time::Duration::from_micros(250);
    (0..CHECKS).any(|_| {
        std::thread::sleep(PAUSE);
        examine(process, tid).is_ok_and(|(stat, activity)| {
            // Uninterruptible waits (for an mmap lock, a disk) don't count: no stop can interrupt them.
            stat.state == b'S'
                && matches!(activity, Activity::Syscall { .. })
                && fitness(stat.state, activity).is_none()
        })
    })
}

/// Whether a process may have an `io_uring`. If so, a running thread may submit to it and wait at any moment, and we
/// can't tell afterwards whether we've cut its wait short. We also return true if the descriptor table is too large to
/// read each time.
fn may_have_ring(process: &Process) -> bool {
    const MAX_DESCRIPTORS: usize = 16_384;
    let Ok(directory) = process.open_with("fd", OFlags::DIRECTORY) else { return true };
    let Ok(entries) = std::fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd())) else { return true };
    for (count, entry) in entries.enumerate() {
        let Ok(entry) = entry else { return true };
        // If the descriptor has just been closed, there's no link to read.
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if count == MAX_DESCRIPTORS || target.as_os_str() == "anon_inode:[io_uring]" {
            return true;
        }
    }
    false
}

/// The process that traces a thread; 0 if there's none or if we can't see it from this pid namespace.
pub fn tracer(process: &Process, tid: i32) -> i32 {
    let status = process.read_file(&format!("task/{tid}/status")).unwrap_or_default();
    let by = number(&status, "TracerPid").unwrap_or(0);
    // TracerPid is the id of a thread; we want its process.
    match std::fs::read(format!("/proc/{by}/status")) {
        Ok(status) if by != 0 => number(&status, "Tgid").unwrap_or(by),
        _ => by,
    }
}

fn threads(process: &Process) -> Result<Vec<i32>, InjectError> {
    let task = process.open_with("task", OFlags::DIRECTORY).map_err(InjectError::from_read)?;
    let entries = std::fs::read_dir(format!("/proc/self/fd/{}", task.as_raw_fd()))
        .map_err(|error| InjectError::from_read(ReadError::from_io(process.pid(), "task", error)))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).take(MAX_THREADS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activities_are_parsed() {
        assert_eq!(Activity::parse(b"running\n"), Ok(Activity::Running));
        assert_eq!(Activity::parse(b"-1 0x7ffd 0x401000\n"), Ok(Activity::Blocked));
        let text = b"35 0x7ffd10 0x0 0x0 0x1 0x2 0x3 0x7ffd00 0x7f0012\n";
        let args = [0x7f_fd10, 0, 0, 1, 2, 3];
        assert_eq!(Activity::parse(text), Ok(Activity::Syscall { nr: 35, args, pc: 0x7f_0012 }));
        for bad in [&b""[..], b"35", b"35 0x", b"x 0x1", b"35 1 2 3 4 5 6 7 8", b"\xff"] {
            assert!(Activity::parse(bad).is_err(), "{bad:?}");
        }
        for cut in 0..text.len() - 10 {
            let _ = Activity::parse(&text[..cut]);
        }
    }

    #[test]
    fn the_share_of_time_in_the_kernel_counts_for_running_threads_only() {
        let stat = |user: u64, system: u64| {
            let text = format!("7 (x) R 1 7 7 0 -1 0 0 0 0 0 {user} {system} 0 0 20 0 1 0 5 0 0");
            Stat::parse(text.as_bytes()).unwrap()
        };
        let share = |user, system| in_kernel_permille(&stat(user, system), Activity::Running);
        assert_eq!([share(0, 0), share(90, 10), share(1, 3), share(0, 9)], [0, 100, 750, 1000]);
        assert_eq!(in_kernel_permille(&stat(0, 9), Activity::Blocked), 0);
    }

    fn call(nr: i64, args: [u64; 6]) -> Activity {
        Activity::Syscall { nr, args, pc: 0 }
    }

    #[test]
    fn threads_in_calls_that_cannot_restart_are_not_chosen() {
        for nr in [
            libc::SYS_write,
            libc::SYS_writev,
            libc::SYS_sendto,
            libc::SYS_sendfile,
            libc::SYS_splice,
            libc::SYS_vfork,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_execve,
            libc::SYS_ioctl,
            libc::SYS_recvmmsg,
            libc::SYS_close,
        ] {
            assert_eq!(fitness(b'S', call(nr, [0; 6])), None, "{nr}");
        }
        assert_eq!(fitness(b'S', call(libc::SYS_recvfrom, [3, 0, 9, 0x100, 0, 0])), None);
        assert_eq!(fitness(b'S', call(libc::SYS_recvmsg, [3, 0, 0x100, 0, 0, 0])), None);
        assert_eq!(fitness(b'S', call(libc::SYS_io_uring_enter, [3, 1, 1, 1, 0, 0])), None);
        assert_eq!(fitness(b'S', call(libc::SYS_io_uring_enter, [3, 0, 1, 1, 0, 0])), Some(Fitness::StartsOver));
        for state in [b'D', b'Z', b'X', b't', b'I'] {
            assert_eq!(fitness(state, Activity::Running), None);
            assert_eq!(fitness(state, call(libc::SYS_nanosleep, [0; 6])), None);
        }
    }

    #[test]
    fn a_call_that_restarts_is_better_than_a_running_thread() {
        let sleeping = fitness(b'S', call(libc::SYS_nanosleep, [0; 6])).unwrap();
        let polling = fitness(b'S', call(libc::SYS_epoll_wait, [0; 6])).unwrap();
        let computing = fitness(b'R', Activity::Running).unwrap();
        assert!(sleeping < polling && polling < computing);
        assert_eq!(fitness(b'T', Activity::Blocked), Some(Fitness::User));
        assert_eq!(fitness(b'T', call(libc::SYS_write, [0; 6])), Some(Fitness::User));
        assert_eq!(fitness(b'S', call(libc::SYS_recvfrom, [3, 0, 9, 0, 0, 0])), Some(Fitness::StartsOver));
    }
}
