//! A process handle that pid reuse can't confuse.
//!
//! A [`Process`] is a pid, its start time and an open descriptor of `/proc/PID`. We read everything through the
//! descriptor: once the process is reaped, the kernel answers ESRCH there, even if the pid has been reused.
//!
//! If a program's main thread ends before others, `/proc/PID` shows a zombie without memory. Then we read the files of
//! another thread, below `/proc/PID/task`.

use crate::os::abandonable::advance;
use crate::os::fault;
use crate::os::fields::number;
use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use thiserror::Error;

/// How many threads we look at to find a living one.
const THREADS_MOST: usize = 64;

/// Why we couldn't read a file below `/proc/PID`. Callers treat the cases differently.
#[derive(Debug, Error)]
// `pid` is the process, `file` the path below `/proc/PID`
pub enum ReadError {
    /// The process has ended, or is a zombie, which has no memory.
    #[error("process {pid} has ended")]
    Vanished { pid: i32 },
    /// The process exists but the file doesn't: this kernel doesn't provide it.
    #[error("/proc/{pid}/{file} does not exist on this kernel")]
    Absent { pid: i32, file: String },
    #[error("not permitted to read /proc/{pid}/{file}")]
    Denied { pid: i32, file: String },
    #[error("/proc/{pid}/{file} is malformed: {what}")]
    Malformed { pid: i32, file: String, what: String },
    /// The process has more mappings than we consider.
    #[error("process {pid} has more than {most} mappings")]
    TooMany { pid: i32, most: usize },
    /// The process has marked memory, but moved it each time before we found it.
    #[error("process {pid} moves its marked memory faster than we can find it")]
    Moving { pid: i32 },
    #[error("cannot read /proc/{pid}/{file}: {source}")]
    Io { pid: i32, file: String, source: io::Error },
}

/// Whether we, or all processes together, have too many files open.
pub fn is_for_lack_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

impl ReadError {
    /// Whether the read didn't return in time, or we didn't even try because an earlier read of this process hasn't
    /// returned.
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut)
    }

    /// Whether we, or all processes together, have too many files open.
    pub fn is_for_lack_of_files(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_for_lack_of_files(source))
    }

    pub fn from_io(pid: i32, file: &str, source: io::Error) -> Self {
        let file = file.to_owned();
        match source.raw_os_error() {
            Some(libc::ESRCH) => Self::Vanished { pid },
            Some(libc::ENOENT) => Self::Absent { pid, file },
            Some(libc::EACCES | libc::EPERM) => Self::Denied { pid, file },
            _ => Self::Io { pid, file, source },
        }
    }
}

/// Pid and start time, which no other process has ever had.
pub type ProcessKey = (i32, u64);

/// A handle of a process. Two handles are of the same process if pid and start time are equal.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    start_time_ticks: u64,
    dir: OwnedFd,
    pidfd: OnceLock<OwnedFd>,
    /// If the main thread had ended when we last looked: a thread that was alive. Else 0.
    survivor: AtomicI32,
}

impl Process {
    /// Opens the process that has `pid` now.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if there is no such process.
    pub fn open(pid: i32) -> Result<Self, ReadError> {
        Self::open_at(Path::new("/proc"), pid)
    }

    /// Like [`Self::open`], below another root, for tests on fixture trees.
    pub fn open_at(root: &Path, pid: i32) -> Result<Self, ReadError> {
        let path: PathBuf = root.join(pid.to_string());
        let dir: OwnedFd = match File::open(&path) {
            Ok(dir) => dir.into(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ReadError::Vanished { pid }),
            Err(error) => return Err(ReadError::from_io(pid, "", error)),
        };
        let mut process = Self { pid, start_time_ticks: 0, dir, pidfd: OnceLock::new(), survivor: AtomicI32::new(0) };
        process.start_time_ticks = process.stat()?.start_time_ticks;
        Ok(process)
    }

    /// The process's pid in our pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Start time in clock ticks after boot, field 22 of `/proc/PID/stat`.
    pub fn start_time_ticks(&self) -> u64 {
        self.start_time_ticks
    }

    pub fn key(&self) -> ProcessKey {
        (self.pid, self.start_time_ticks)
    }

    /// The thread that we read: the main thread or, after its end, another one.
    pub fn tid(&self) -> i32 {
        match self.survivor.load(Ordering::Relaxed) {
            0 => self.pid,
            tid => tid,
        }
    }

    /// The path below `/proc/PID` by which we read a file.
    pub(crate) fn path_of<'a>(&self, file: &'a str) -> Cow<'a, str> {
        match self.survivor.load(Ordering::Relaxed) {
            0 => file.into(),
            _ if file.starts_with("task") => file.into(),
            tid => format!("task/{tid}/{file}").into(),
        }
    }

    /// A pidfd of this very process. We open it at the first call, and keep it open.
    ///
    /// # Errors
    /// [`ReadError::Vanished`] if the process has ended, even if its pid has been reused.
    pub fn pidfd(&self) -> Result<BorrowedFd<'_>, ReadError> {
        if let Some(pidfd) = self.pidfd.get() {
            return Ok(pidfd.as_fd());
        }
        let pid = Pid::from_raw(self.pid).ok_or(ReadError::Vanished { pid: self.pid })?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| ReadError::from_io(self.pid, "pidfd", error.into()))?;
        // Nobody else can get the pid before the process is reaped, so we check below that it's alive. And pidfd_open
        // looks up the pid in our pid namespace, which must be the one that /proc shows.
        let shown = std::fs::read(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))
            .map_err(|error| ReadError::from_io(self.pid, "pidfd", error))?;
        if number(&shown, "Pid") != Ok(self.pid) || !self.is_alive() {
            return Err(ReadError::Vanished { pid: self.pid });
        }
        Ok(self.pidfd.get_or_init(|| pidfd).as_fd())
    }

    pub fn open_file(&self, file: &str) -> Result<File, ReadError> {
        self.open_with(file, OFlags::RDONLY)
    }

    pub fn open_with(&self, file: &str, flags: OFlags) -> Result<File, ReadError> {
        self.fault(file)?;
        let mut opened = openat(&self.dir, &self.path_of(file), flags);
        if opened.is_err() && self.tid() != self.pid {
            // This thread may have ended, too.
            self.stat()?;
            opened = openat(&self.dir, &self.path_of(file), flags);
        }
        let opened = opened.map_err(|error| match error {
            // If the process has been reaped, all its files are missing. If it's alive, the kernel doesn't provide this
            // one.
            Errno::NOENT if openat(&self.dir, "stat", OFlags::RDONLY).is_err() => ReadError::Vanished { pid: self.pid },
            _ => ReadError::from_io(self.pid, file, error.into()),
        })?;
        Ok(opened.into())
    }

    /// Where a test can make reads of a file below `/proc/PID` fail. Call this also before reads of files kept open.
    pub fn fault(&self, file: &str) -> Result<(), ReadError> {
        let name = file.rsplit('/').next().unwrap_or(file);
        fault::io_of("read", name).map_err(|error| ReadError::from_io(self.pid, file, error))
    }

    pub fn read_file(&self, file: &str) -> Result<Vec<u8>, ReadError> {
        let mut bytes = Vec::new();
        self.open_file(file)?.read_to_end(&mut bytes).map_err(|error| ReadError::from_io(self.pid, file, error))?;
        Ok(bytes)
    }

    /// Reads at most `most` bytes of a file, and reports progress after each piece: else a long file would look like a
    /// read that doesn't return.
    pub fn read_pieces(&self, file: &str, most: u64, mut add: impl FnMut(&[u8])) -> Result<(), ReadError> {
        let mut opened = self.open_file(file)?.take(most);
        let mut buffer = vec![0; 16 << 10];
        loop {
            match opened.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => add(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::from_io(self.pid, file, error)),
            }
            advance();
        }
    }

    /// The state of the process and its main thread. If the main thread has ended, we read another one from now on.
    pub fn stat(&self) -> Result<Stat, ReadError> {
        let stat = self.stat_at("stat")?;
        let survivor = if stat.has_ended() && !stat.is_zombie() { self.living_thread() } else { 0 };
        self.survivor.store(survivor, Ordering::Relaxed);
        Ok(stat)
    }

    fn stat_at(&self, file: &str) -> Result<Stat, ReadError> {
        self.fault(file)?;
        let from_io = |error| ReadError::from_io(self.pid, file, error);
        let opened = match openat(&self.dir, file, OFlags::RDONLY) {
            Err(Errno::NOENT) => return Err(ReadError::Vanished { pid: self.pid }),
            opened => opened.map_err(|error| from_io(error.into()))?,
        };
        let mut bytes = Vec::new();
        File::from(opened).read_to_end(&mut bytes).map_err(from_io)?;
        Stat::parse(&bytes).map_err(|what| self.malformed(file, what))
    }

    /// A thread that hasn't ended, if possible the one that we found last; 0 if we find none. Threads that have ended
    /// stay only if a tracer keeps them, so it's enough to look at a few.
    fn living_thread(&self) -> i32 {
        let is_alive = |tid: i32| self.stat_at(&format!("task/{tid}/stat")).is_ok_and(|stat| !stat.has_ended());
        let last = self.tid();
        if is_alive(last) {
            return last;
        }
        let Ok(threads) = openat(&self.dir, "task", OFlags::RDONLY).and_then(Dir::new) else { return 0 };
        for entry in threads.flatten().take(THREADS_MOST) {
            let tid = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
            if let Some(tid) = tid.filter(|&tid| is_alive(tid)) {
                return tid;
            }
        }
        0
    }

    /// Whether the process is alive (zombies aren't).
    pub fn is_alive(&self) -> bool {
        self.stat().is_ok_and(|stat| stat.start_time_ticks == self.start_time_ticks && !stat.is_zombie())
    }

    pub fn malformed(&self, file: &str, what: impl Into<String>) -> ReadError {
        ReadError::Malformed { pid: self.pid, file: file.to_owned(), what: what.into() }
    }
}

fn openat(dir: &OwnedFd, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(dir, path, flags | OFlags::CLOEXEC, Mode::empty())
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl AsRawFd for Process {
    fn as_raw_fd(&self) -> i32 {
        self.dir.as_raw_fd()
    }
}

/// The fields of `/proc/PID/stat` that pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Command name: at most 15 bytes, of any value.
    pub comm: Vec<u8>,
    /// State letter: R, S, D, Z, T, t, X, I.
    pub state: u8,
    pub parent: i32,
    pub kernel_thread: bool,
    /// PF_FORKNOEXEC is set: the process hasn't called exec yet, so it has the memory that it inherited from its
    /// parent.
    pub only_forked: bool,
    /// User plus system time of the process, clock ticks.
    pub cpu_ticks: u64,
    /// System time alone.
    pub system_ticks: u64,
    /// Start time, clock ticks after boot.
    pub start_time_ticks: u64,
    pub nice: i8,
    /// Number of threads, including a thread group leader that has ended before the others.
    pub threads: u32,
}

impl Stat {
    /// Whether this thread has ended. If it's the main thread, others may go on.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    /// Whether a process has ended with all its threads, and so has no memory. Ask this of its main thread only.
    pub fn is_zombie(&self) -> bool {
        self.has_ended() && self.threads <= 1
    }

    /// Parses the text of `/proc/PID/stat`. The name may contain spaces and parentheses; it ends at the last
    /// parenthesis.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        const PF_KTHREAD: u64 = 0x0020_0000;
        const PF_FORKNOEXEC: u64 = 0x40;
        let open = text.iter().position(|&byte| byte == b'(').ok_or("no command name")?;
        let close = text.iter().rposition(|&byte| byte == b')').ok_or("no command name")?;
        let comm = text.get(open + 1..close).ok_or("no command name")?.to_vec();
        let rest = std::str::from_utf8(&text[close + 1..]).map_err(|_| "fields are not ASCII")?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let flags: u64 = field(&fields, 6)?;
        Ok(Self {
            comm,
            state: match fields.first().ok_or("no state")?.as_bytes() {
                [letter] if letter.is_ascii_alphabetic() => *letter,
                _ => return Err("the state is not a letter"),
            },
            parent: field(&fields, 1)?,
            kernel_thread: flags & PF_KTHREAD != 0,
            only_forked: flags & PF_FORKNOEXEC != 0,
            cpu_ticks: field::<u64>(&fields, 11)?.saturating_add(field(&fields, 12)?),
            system_ticks: field(&fields, 12)?,
            start_time_ticks: field(&fields, 19)?,
            nice: field(&fields, 16)?,
            threads: field(&fields, 17)?,
        })
    }
}

fn field<T: FromStr>(fields: &[&str], index: usize) -> Result<T, &'static str> {
    fields.get(index).ok_or("too few fields")?.parse().map_err(|_| "a field is not a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_whatever_the_command_name() {
        let text = b"42 (a) R 1 (b)) S 7 1 1 0 -1 4194304 0 0 0 0 11 22 0 0 20 -5 1 0 9876 1 1";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat.comm, b"a) R 1 (b)");
        assert_eq!((stat.state, stat.parent, stat.cpu_ticks, stat.start_time_ticks), (b'S', 7, 33, 9876));
        assert!(!stat.kernel_thread && !stat.only_forked && stat.nice == -5 && stat.threads == 1);
        let forked = String::from_utf8_lossy(text).replace("4194304", "4194368");
        assert!(Stat::parse(forked.as_bytes()).unwrap().only_forked);
        for cut in 0..text.len() {
            let _ = Stat::parse(&text[..cut]);
        }
        let nameless = String::from_utf8_lossy(text).replace(" S ", " é ");
        assert!(Stat::parse(nameless.as_bytes()).is_err());
    }

    #[test]
    fn missing_files_and_missing_processes_are_different_errors() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(own.is_alive());
        assert!(matches!(own.read_file("no-such-file"), Err(ReadError::Absent { .. })));
        assert!(matches!(Process::open(0x7fff_fff0), Err(ReadError::Vanished { .. })));
    }

    #[test]
    fn a_pidfd_is_of_the_process_that_was_opened() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let open = || Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        let (process, other) = (open(), open());
        let first = process.pidfd().unwrap().as_raw_fd();
        assert_eq!(process.pidfd().unwrap().as_raw_fd(), first);
        child.kill().unwrap();
        child.wait().unwrap();
        // The pid may belong to any process by now.
        assert!(matches!(other.pidfd(), Err(ReadError::Vanished { .. })));
    }
}
