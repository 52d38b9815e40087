//! Interrupts the sleep of a thread.
//!
//! A signal ends a sleep only if it has a handler, and only in the thread that we send it to. [`SIGNAL`] is ignored by
//! default, so a signal that comes too late is harmless.

use std::io;

/// The signal to install a handler for.
pub const SIGNAL: i32 = libc::SIGURG;

/// A thread of this process that may sleep.
#[derive(Clone, Copy, Debug)]
pub struct Sleeper {
    pid: libc::pid_t,
    tid: libc::pid_t,
}

impl Sleeper {
    /// The calling thread. The caller must have installed a handler for [`SIGNAL`], which need not do anything.
    pub fn this_thread() -> Self {
        let pid = rustix::process::getpid().as_raw_pid();
        Self { pid, tid: rustix::thread::gettid().as_raw_pid() }
    }

    /// Ends the current sleep of the thread, if it's asleep.
    pub fn wake(self) -> io::Result<()> {
        // SAFETY: we pass no memory. The kernel refuses a thread ID that another process uses by now.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, self.pid, self.tid, SIGNAL) };
        if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::NanosleepRelativeResult;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn wake_ends_a_sleep() {
        signal_hook::flag::register(SIGNAL, Arc::new(AtomicBool::new(false))).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            sender.send(Sleeper::this_thread()).unwrap();
            rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 60, tv_nsec: 0 })
        });
        let (sleeper, before) = (receiver.recv().unwrap(), Instant::now());
        while !thread.is_finished() {
            sleeper.wake().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(thread.join().unwrap(), NanosleepRelativeResult::Interrupted(_)));
        assert!(before.elapsed() < Duration::from_secs(30), "{:?}", before.elapsed());
        assert!(sleeper.wake().is_err(), "it has ended");
    }
}
