//! Cutting short the sleep of one thread.
//!
//! A signal ends a sleep only where a handler runs, and only in the thread that it is sent to. [`SIGNAL`] is one that the
//! kernel ignores by default, so that one sent a moment too late harms nobody.

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
    /// The calling thread. Somebody must have installed a handler for [`SIGNAL`], which need do nothing.
    pub fn this_thread() -> Self {
        // SAFETY: neither call has arguments or can fail.
        unsafe { Self { pid: libc::getpid(), tid: libc::gettid() } }
    }

    /// Ends its present sleep, if it sleeps.
    pub fn wake(self) -> io::Result<()> {
        // SAFETY: no memory is passed. With the process named too, a thread id that is in use elsewhere by now is refused.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, self.pid, self.tid, SIGNAL) };
        if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn a_sleep_ends_at_once() {
        signal_hook::flag::register(SIGNAL, Arc::new(AtomicBool::new(false))).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(Sleeper::this_thread()).unwrap();
            let time = libc::timespec { tv_sec: 60, tv_nsec: 0 };
            // SAFETY: `time` outlives the call.
            unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) }
        });
        let (sleeper, before) = (told.recv().unwrap(), Instant::now());
        while !thread.is_finished() {
            sleeper.wake().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(thread.join().unwrap(), -1);
        assert!(before.elapsed() < Duration::from_secs(30), "{:?}", before.elapsed());
        assert!(sleeper.wake().is_err(), "it has ended");
    }
}
