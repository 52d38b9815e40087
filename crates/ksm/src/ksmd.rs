//! ksmd, the kernel thread that merges: its CPU time and whether it rests.

use pagefold_procmem::list::pids;
use pagefold_procmem::process::{Process, ReadError, Stat};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Debug)]
pub struct Ksmd {
    process: Process,
    /// Absent without CONFIG_SCHED_INFO.
    schedstat: Option<File>,
    stat: File,
}

impl Ksmd {
    /// Finds ksmd by its name. `None` without KSM, or in a pid namespace that hides it.
    pub fn find() -> Result<Option<Self>, ReadError> {
        Self::find_at(Path::new("/proc"))
    }

    pub fn find_at(proc_root: &Path) -> Result<Option<Self>, ReadError> {
        Self::find_named(proc_root, b"ksmd")
    }

    /// Like [`Self::find_at`], for a kernel thread with another name that does ksmd's work, like UKSM's `uksmd`.
    pub fn find_named(proc_root: &Path, name: &[u8]) -> Result<Option<Self>, ReadError> {
        for pid in pids(proc_root)? {
            let Ok(process) = Process::open_at(proc_root, pid) else { continue };
            let Ok(stat) = process.stat() else { continue };
            // A user's process may call itself ksmd, but can't be a child of kthreadd.
            if stat.comm == name && stat.parent == 2 && stat.kernel_thread {
                return Ok(Some(Self::hold(process)?));
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

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// CPU time since boot, nanoseconds. While ksmd is running this may lag by one tick.
    pub fn cpu_ns(&self) -> Result<u64, ReadError> {
        let Some(schedstat) = &self.schedstat else {
            return Ok(self.stat()?.cpu_ticks.saturating_mul(ns_per_tick()));
        };
        let text = self.pread(schedstat, "schedstat")?;
        parse_schedstat(&text).ok_or_else(|| self.process.malformed("schedstat", "no run time"))
    }

    /// Whether ksmd sleeps between batches, or is stopped.
    ///
    /// Only these sleeps are interruptible. Within a batch ksmd is runnable, or sleeps uninterruptibly while it waits
    /// for an mmap lock, a page lock or its mutex (read in 6.12's source, and seen so on 6.18).
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

/// Parses the first field of `schedstat`: nanoseconds on a CPU.
pub fn parse_schedstat(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

fn ns_per_tick() -> u64 {
    // SAFETY: sysconf only reads a constant of the system.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    1_000_000_000 / u64::try_from(per_second).unwrap_or(100).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn only_the_kernel_thread_is_ksmd() {
        let dir = ksmd_tree(2, 0x0020_0040, Some("123456789 5 6\n"));
        let ksmd = Ksmd::find_at(dir.path()).unwrap().unwrap();
        assert_eq!((ksmd.pid(), ksmd.cpu_ns().unwrap(), ksmd.rests().unwrap()), (31, 123_456_789, true));
        assert!(Ksmd::find_at(ksmd_tree(1, 0, None).path()).unwrap().is_none());
        assert_eq!(Ksmd::find_named(dir.path(), b"kswapd0").unwrap().unwrap().pid(), 5);
        assert!(Ksmd::find_named(dir.path(), b"uksmd").unwrap().is_none());
    }

    #[test]
    fn without_schedstat_ticks_are_counted() {
        let dir = ksmd_tree(2, 0x0020_0040, None);
        let ksmd = Ksmd::find_at(dir.path()).unwrap().unwrap();
        assert_eq!(ksmd.cpu_ns().unwrap(), 7 * ns_per_tick());
        let dir = ksmd_tree(2, 0x0020_0040, Some("what\n"));
        assert!(matches!(Ksmd::find_at(dir.path()).unwrap().unwrap().cpu_ns(), Err(ReadError::Malformed { .. })));
    }
}
