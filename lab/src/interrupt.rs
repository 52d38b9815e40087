//! SIGINT and SIGTERM as a flag that every wait checks, so that an interrupted command undoes its changes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

const CHECK_EVERY: Duration = Duration::from_millis(20);

/// A signal has asked this process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Whether SIGINT or SIGTERM has arrived.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl From<Arc<AtomicBool>> for Interrupt {
    /// An interrupt that arrives when the flag is set.
    fn from(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }
}

impl Interrupt {
    pub fn on_signals() -> io::Result<Self> {
        let interrupt = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupt.0))?;
        }
        Ok(interrupt)
    }

    pub fn check(&self) -> Result<(), Interrupted> {
        if self.0.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
    }

    /// Sleeps, at most until a signal arrives.
    pub fn sleep(&self, duration: Duration) -> Result<(), Interrupted> {
        self.wait::<(), _>(duration, || Ok(None))?;
        Ok(())
    }

    /// Calls `poll` until it returns a value. Returns `None` after `limit`.
    pub fn wait<T, E: From<Interrupted>>(
        &self,
        limit: Duration,
        mut poll: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let end = Instant::now() + limit;
        loop {
            self.check()?;
            if let Some(found) = poll()? {
                return Ok(Some(found));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(left.min(CHECK_EVERY));
        }
    }
}
