//! CPU time of this process and of its children.

use std::io;

/// CPU time of all threads of this process, nanoseconds.
pub fn own_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or(0)
}

/// CPU time of this thread, nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or(0)
}

/// CPU time of reaped children and their reaped descendants, nanoseconds, in steps of 1 us.
pub fn reaped_children_cpu_ns() -> u64 {
    // SAFETY: all-zero is a valid rusage, and getrusage writes only to it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    timeval_ns(usage.ru_utime).saturating_add(timeval_ns(usage.ru_stime))
}

/// CPU time of this process and of its reaped children, nanoseconds.
pub fn own_and_children_cpu_ns() -> u64 {
    own_cpu_ns().saturating_add(reaped_children_cpu_ns())
}

/// CPU time of a process and all of its threads, nanoseconds. It's unchanged as long as none of them has run.
pub fn process_cpu_ns(pid: i32) -> Option<u64> {
    // The ID of the process's clock, as clock_getcpuclockid(3) makes it.
    const SCHED: libc::clockid_t = 2;
    clock_ns((!pid << 3) | SCHED).ok()
}

/// Time since boot, including the time that the machine was suspended, nanoseconds.
pub fn since_boot_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME).unwrap_or(0)
}

pub fn clock_ns(clock: libc::clockid_t) -> io::Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call, which writes one timespec into it.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Ok(seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0)))
}

fn timeval_ns(time: libc::timeval) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let micros = u64::try_from(time.tv_usec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(micros.saturating_mul(1000))
}
