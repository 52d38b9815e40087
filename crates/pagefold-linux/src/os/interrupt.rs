//! Interrupts: noted, and asked for wherever an experiment waits, so that everything is given back on the way out.

use anyhow::bail;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a wait goes on without asking.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// Whether SIGINT or SIGTERM has come.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl From<Arc<AtomicBool>> for Interrupt {
    /// One that comes when the flag is set.
    fn from(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }
}

impl Interrupt {
    /// Notes the signals from now on.
    pub fn on_signals() -> anyhow::Result<Self> {
        let interrupt = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupt.0))?;
        }
        Ok(interrupt)
    }

    /// An error once a signal has come.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Waits, unless interrupted.
    pub fn sleep(&self, duration: Duration) -> anyhow::Result<()> {
        self.wait(duration, || Ok(None::<()>)).map(drop)
    }

    /// Asks `done` again and again until it gives something or `limit` has passed.
    pub fn wait<T>(
        &self,
        limit: Duration,
        mut done: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<Option<T>> {
        let end = Instant::now() + limit;
        loop {
            self.check()?;
            if let Some(found) = done()? {
                return Ok(Some(found));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(left.min(ASK_EVERY));
        }
    }
}
