//! A thread that samples at regular intervals.

use anyhow::{Context, anyhow};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Samples until we stop it.
#[derive(Debug)]
pub struct SamplingThread<T> {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<Vec<T>>>>,
}

impl<T: Send + 'static> SamplingThread<T> {
    /// Samples right away, then each `interval`. `sample` gets the start time.
    pub fn start(interval: Duration, mut sample: impl FnMut(Instant) -> anyhow::Result<T> + Send + 'static) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&end);
        let began = Instant::now();
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            loop {
                let last = stop.load(Ordering::Acquire);
                samples.push(sample(began)?);
                if last {
                    return Ok(samples);
                }
                std::thread::park_timeout(interval);
            }
        });
        Self { end, thread: Some(thread) }
    }

    /// Takes a last sample and returns all of them.
    pub fn finish(mut self) -> anyhow::Result<Vec<T>> {
        self.end.store(true, Ordering::Release);
        let thread = self.thread.take().context("sampling has already ended")?;
        thread.thread().unpark();
        thread.join().map_err(|_| anyhow!("the thread that takes samples panicked"))?
    }
}

impl<T> Drop for SamplingThread<T> {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
    }
}
