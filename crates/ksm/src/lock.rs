//! There's one KSM per machine, so two programs must not drive it at once. The lock is an `flock`: the kernel releases
//! it with its last descriptor, so it doesn't outlive its holder. The file also has the holder's pid, but only for
//! messages.

use pagefold_procmem::os::fault;
use rustix::fs::FlockOperation;
use rustix::io::{Errno, retry_on_intr};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

pub const LOCK_PATH: &str = "/run/pagefold/lock";

/// How long we wait between attempts to take the lock. `flock` itself has no time limit.
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// How long we wait for processes that lock the file only to find out who has the lock ([`holder`]). That usually takes
/// microseconds, but longer if they wait for a processor.
const LOOK_LIMIT: Duration = Duration::from_secs(2);
/// The pause between two attempts to take the lock meanwhile.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// If we find the file locked exclusively this many times, a program has the lock: [`holder`] locks it shared.
const TRIES: u32 = 50;

#[derive(Debug, Error)]
pub enum LockError {
    #[error("KSM is driven by another pagefold{}", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Held { pid: Option<i32> },
    #[error("not permitted to open {}", path.display())]
    Denied { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// The lock. We hold it until the last clone is dropped or the process ends.
#[derive(Clone, Debug)]
pub struct Lock {
    file: Arc<LockFile>,
}

#[derive(Debug)]
struct LockFile {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if it's free. Waits while another process only checks who has it ([`holder`]).
    pub fn try_take(path: &Path) -> Result<Self, LockError> {
        let mut file = open(path).map_err(|error| from_io(path, error))?;
        let try_lock = |how| flock(&file, how).map_err(|source| LockError::Io { path: path.into(), source });
        let began = Instant::now();
        let mut refused = 0;
        while !try_lock(FlockOperation::NonBlockingLockExclusive)? {
            if try_lock(FlockOperation::NonBlockingLockShared)? {
                // The other process has a shared lock, so it's in [`holder`].
                try_lock(FlockOperation::Unlock)?;
            } else {
                refused += 1;
            }
            if refused >= TRIES || began.elapsed() > LOOK_LIMIT {
                return Err(LockError::Held { pid: pid_in(&mut file) });
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        // We go on if we can't write the pid, which is only for messages: with a full disk we must still be able to
        // restore KSM.
        let _ = write_pid(&mut file);
        fault::point("lock-taken");
        Ok(Self { file: Arc::new(LockFile { file, path: path.to_owned() }) })
    }

    /// Takes the lock. Waits at most `limit` until it's free.
    pub fn take_within(path: &Path, limit: Duration) -> Result<Self, LockError> {
        let end = Instant::now() + limit;
        loop {
            match Self::try_take(path) {
                Err(LockError::Held { .. }) if Instant::now() < end => std::thread::sleep(RETRY_EVERY),
                done => return done,
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // The file's text is only for messages, but it shouldn't name a holder that has ended.
        let _ = self.file.set_len(0);
        // Closing alone wouldn't release the lock while a child between fork and exec has the descriptor, too.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Finds the holder of the lock at `path`. Neither takes the lock nor creates the file. `None` if the lock is free.
pub fn holder(path: &Path) -> Result<Option<Holder>, LockError> {
    let mut file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(from_io(path, error)),
    };
    // The kernel refuses us a shared lock only while another process has an exclusive one, so two callers of this
    // function don't disturb each other. A process that tries to take the lock within these microseconds tries again.
    let free = flock(&file, FlockOperation::NonBlockingLockShared)
        .map_err(|source| LockError::Io { path: path.into(), source })?;
    if !free {
        return Ok(Some(Holder { pid: pid_in(&mut file) }));
    }
    // Closing alone wouldn't release our lock while a child between fork and exec has the descriptor, too.
    let _ = flock(&file, FlockOperation::Unlock);
    Ok(None)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The holder's pid, if the file has it.
    pub pid: Option<i32>,
}

fn open(path: &Path) -> io::Result<File> {
    match (open_file(path), path.parent()) {
        (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(parent)?;
            open_file(path)
        }
        (opened, _) => opened,
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    fault::io("read:lock")?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        // /run/lock is writable for all on many systems: we must not follow a link there.
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

fn write_pid(file: &mut File) -> io::Result<()> {
    fault::io("write:lock")?;
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

fn from_io(path: &Path, source: io::Error) -> LockError {
    let path = path.to_owned();
    if source.kind() == io::ErrorKind::PermissionDenied {
        LockError::Denied { path }
    } else {
        LockError::Io { path, source }
    }
}

/// Returns false if another process holds the lock.
fn flock(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match retry_on_intr(|| rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn pid_in(file: &mut File) -> Option<i32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_free_after_the_last_clone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/one.lock");
        assert_eq!(holder(&path).unwrap(), None);
        let own = i32::try_from(std::process::id()).unwrap();
        let lock = Lock::try_take(&path).unwrap();
        let clone = lock.clone();
        drop(lock);
        // Locks of two open file descriptions conflict, even within one process.
        assert!(matches!(Lock::try_take(&path), Err(LockError::Held { pid: Some(pid) }) if pid == own));
        assert_eq!(holder(&path).unwrap(), Some(Holder { pid: Some(own) }));
        // This descriptor acts as one in a child that hasn't reached exec yet.
        let inherited = clone.file.file.try_clone().unwrap();
        drop(clone);
        assert_eq!(holder(&path).unwrap(), None);
        drop(inherited);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        Lock::try_take(&path).unwrap();
    }

    #[test]
    fn waiting_ends_with_the_limit_or_with_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.lock");
        let lock = Lock::try_take(&path).unwrap();
        let before = Instant::now();
        assert!(matches!(Lock::take_within(&path, Duration::from_millis(60)), Err(LockError::Held { .. })));
        assert!(before.elapsed() >= Duration::from_millis(60));
        let releaser = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(lock);
        });
        Lock::take_within(&path, Duration::from_secs(20)).unwrap();
        releaser.join().unwrap();
    }

    #[test]
    fn a_lock_that_is_only_looked_at_can_be_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.lock");
        drop(Lock::try_take(&path).unwrap());
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    holder(&path).unwrap();
                }
            });
            let refused = (0..1_000).filter(|_| Lock::try_take(&path).is_err()).count();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(refused, 0);
        });
    }

    #[test]
    fn who_only_looks_may_wait_for_a_processor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.lock");
        std::fs::write(&path, "").unwrap();
        let looker = File::open(&path).unwrap();
        assert!(flock(&looker, FlockOperation::NonBlockingLockShared).unwrap());
        let releaser = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(looker);
        });
        Lock::try_take(&path).unwrap();
        releaser.join().unwrap();
    }

    #[test]
    fn a_holder_that_dies_releases_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.lock");
        std::fs::write(&path, "").unwrap();
        // `flock FILE COMMAND` of util-linux holds the same kind of lock.
        let child = std::process::Command::new("flock").arg("--no-fork").arg(&path).args(["sleep", "60"]).spawn();
        let Ok(mut child) = child else {
            return pagefold_testkit::skip("flock(1) of util-linux is not installed");
        };
        let end = Instant::now() + Duration::from_secs(20);
        while holder(&path).unwrap().is_none() {
            assert!(Instant::now() < end, "the other holder never locked");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(Lock::try_take(&path), Err(LockError::Held { pid: None })));
        child.kill().unwrap();
        child.wait().unwrap();
        Lock::take_within(&path, Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.lock");
        std::fs::write(dir.path().join("precious"), "keep").unwrap();
        std::os::unix::fs::symlink(dir.path().join("precious"), &path).unwrap();
        assert!(matches!(Lock::try_take(&path), Err(LockError::Io { .. })));
        assert_eq!(std::fs::read_to_string(dir.path().join("precious")).unwrap(), "keep");
    }
}
