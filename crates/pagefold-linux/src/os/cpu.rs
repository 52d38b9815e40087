//! CPU time: our own, that of children, of any process, and of ksmd.

use crate::fault;
use crate::process::{Process, ReadError, Stat};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// CPU time of this process, all threads, nanoseconds.
pub fn own_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or(0)
}

/// CPU time of the children that have ended and been waited for, and of theirs, nanoseconds (steps of 1 us).
pub fn reaped_children_cpu_ns() -> u64 {
    // SAFETY: all-zero is a valid rusage, and getrusage writes no further than its end.
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

/// CPU time of a process, all its threads, also those that have ended, nanoseconds.
///
/// Its CPU clock is read, not `schedstat`: that one tells of the first thread only.
pub fn process_cpu_ns(process: &Process) -> Result<u64, ReadError> {
    let gone = || ReadError::Vanished { pid: process.pid() };
    let mut clock = 0;
    // SAFETY: `clock` outlives the call, which writes one clock id into it.
    if unsafe { libc::clock_getcpuclockid(process.pid(), &raw mut clock) } != 0 {
        return Err(gone());
    }
    let ns = clock_ns(clock).map_err(|_| gone())?;
    // The clock goes by pid: believe it only if the pid is still this process's afterwards.
    if process.is_alive() { Ok(ns) } else { Err(gone()) }
}

/// ksmd, held.
#[derive(Debug)]
pub struct Ksmd {
    process: Process,
    /// Absent without CONFIG_SCHED_INFO.
    schedstat: Option<File>,
    stat: File,
}

impl Ksmd {
    /// Finds ksmd: a kernel thread of that name. `None` without KSM, or in a pid namespace that hides it.
    pub fn find() -> Result<Option<Self>, ReadError> {
        Self::find_at(Path::new("/proc"))
    }

    /// The same below another root.
    pub fn find_at(proc_root: &Path) -> Result<Option<Self>, ReadError> {
        let entries = fault::io("read:proc").and_then(|()| std::fs::read_dir(proc_root));
        let entries = entries.map_err(|error| ReadError::from_io(0, "", error))?;
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        for pid in pids {
            let Ok(process) = Process::open_at(proc_root, pid) else { continue };
            let Ok(stat) = process.stat() else { continue };
            // A user's process may call itself ksmd; it cannot be a child of kthreadd.
            if stat.comm == b"ksmd" && stat.parent == 2 && stat.kernel_thread {
                return Self::hold(process).map(Some);
            }
        }
        Ok(None)
    }

    fn hold(process: Process) -> Result<Self, ReadError> {
        let schedstat = match process.open_file("schedstat") {
            Ok(file) => Some(file),
            Err(ReadError::Absent { .. }) => None,
            Err(error) => return Err(error),
        };
        let stat = process.open_file("stat")?;
        Ok(Self { process, schedstat, stat })
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// CPU time since boot, nanoseconds. While ksmd runs this may lag by one tick.
    pub fn cpu_ns(&self) -> Result<u64, ReadError> {
        let Some(schedstat) = &self.schedstat else {
            return Ok(self.stat()?.cpu_ticks.saturating_mul(ns_per_tick()));
        };
        let text = self.pread(schedstat, "schedstat")?;
        parse_schedstat(&text).ok_or_else(|| self.process.malformed("schedstat", "no run time"))
    }

    /// Whether ksmd sleeps between batches or is stopped.
    ///
    /// Its two waits are the only interruptible sleeps it has: within a batch it is runnable, or, while it
    /// waits for an mmap lock, a page lock or its mutex, uninterruptible (read in 6.12's source, seen so on 6.18).
    pub fn rests(&self) -> Result<bool, ReadError> {
        Ok(self.stat()?.state == b'S')
    }

    fn stat(&self) -> Result<Stat, ReadError> {
        let text = self.pread(&self.stat, "stat")?;
        Stat::parse(&text).map_err(|what| self.process.malformed("stat", what))
    }

    fn pread(&self, file: &File, name: &str) -> Result<Vec<u8>, ReadError> {
        self.process.fault(name)?;
        let mut buffer = vec![0; 512];
        let length =
            file.read_at(&mut buffer, 0).map_err(|error| ReadError::from_io(self.process.pid(), name, error))?;
        buffer.truncate(length);
        Ok(buffer)
    }
}

/// CPU time of ksmd since boot, nanoseconds; `None` where ksmd is not to be seen. Hold a [`Ksmd`] to ask often.
pub fn ksmd_cpu_ns() -> Result<Option<u64>, ReadError> {
    Ksmd::find()?.map(|ksmd| ksmd.cpu_ns()).transpose()
}

/// The first field of `schedstat`: nanoseconds on a CPU.
pub(crate) fn parse_schedstat(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

fn ns_per_tick() -> u64 {
    // SAFETY: sysconf only reads a constant of the system.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    1_000_000_000 / u64::try_from(per_second).unwrap_or(100).max(1)
}

fn clock_ns(clock: libc::clockid_t) -> io::Result<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn burn(ns: u64) {
        let end = own_cpu_ns() + ns;
        let mut sink = 0_u64;
        while own_cpu_ns() < end {
            for step in 0..10_000_u64 {
                sink = std::hint::black_box(sink.wrapping_mul(31).wrapping_add(step));
            }
        }
    }

    #[test]
    fn a_processs_clock_counts_all_its_threads() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let before = process_cpu_ns(&own).unwrap();
        std::thread::spawn(|| burn(30_000_000)).join().unwrap();
        let spent = process_cpu_ns(&own).unwrap() - before;
        assert!(spent >= 30_000_000, "{spent}");
    }

    #[test]
    fn children_count_once_reaped_and_then_are_gone() {
        let before = reaped_children_cpu_ns();
        let mut child =
            Command::new("sh").args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"]).spawn().unwrap();
        let held = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(process_cpu_ns(&held).is_ok());
        child.wait().unwrap();
        let spent = reaped_children_cpu_ns() - before;
        assert!(spent > 1_000_000, "{spent}");
        assert!(own_and_children_cpu_ns() >= spent);
        assert!(matches!(process_cpu_ns(&held), Err(ReadError::Vanished { .. })));
    }

    fn ksmd_tree(parent: i32, flags: u32, schedstat: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (pid, comm, parent, flags) in [(5, "kswapd0", 2, 0x0020_0000), (31, "ksmd", parent, flags)] {
            let at = dir.path().join(pid.to_string());
            std::fs::create_dir(&at).unwrap();
            let stat = format!("{pid} ({comm}) S {parent} 0 0 0 -1 {flags} 0 0 0 0 3 4 0 0 25 5 1 0 9 0 0\n");
            std::fs::write(at.join("stat"), stat).unwrap();
            if let Some(text) = schedstat {
                std::fs::write(at.join("schedstat"), text).unwrap();
            }
        }
        dir
    }

    #[test]
    fn ksmd_is_the_kernel_thread_and_nobody_else() {
        let dir = ksmd_tree(2, 0x0020_0040, Some("123456789 5 6\n"));
        let ksmd = Ksmd::find_at(dir.path()).unwrap().unwrap();
        assert_eq!((ksmd.pid(), ksmd.cpu_ns().unwrap(), ksmd.rests().unwrap()), (31, 123_456_789, true));
        assert!(Ksmd::find_at(ksmd_tree(1, 0, None).path()).unwrap().is_none());
    }

    #[test]
    fn without_schedstat_ticks_do() {
        let dir = ksmd_tree(2, 0x0020_0040, None);
        let ksmd = Ksmd::find_at(dir.path()).unwrap().unwrap();
        assert_eq!(ksmd.cpu_ns().unwrap(), 7 * ns_per_tick());
        let dir = ksmd_tree(2, 0x0020_0040, Some("what\n"));
        assert!(matches!(Ksmd::find_at(dir.path()).unwrap().unwrap().cpu_ns(), Err(ReadError::Malformed { .. })));
    }
}
