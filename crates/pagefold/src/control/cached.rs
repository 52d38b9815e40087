//! Texts made from the run's facts, cached so that frequent requests can't keep the main loop busy.

use super::protocol::Request;
use super::queue::{Facts, RequestSender};
use pagefold_procmem::os::cpu::thread_cpu_ns;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// We cache a text for at least this long.
const AGE_LEAST: Duration = Duration::from_secs(1);
/// We cache a text for at most this long.
const AGE_MOST: Duration = Duration::from_secs(10);
/// Between these bounds, we cache a text for this many times the CPU time that making it took.
const CORE_PART: u32 = 1_000;

pub struct Cached {
    requests: RequestSender,
    make: fn(&Facts) -> Result<String, String>,
    text: Arc<str>,
    expires: Instant,
}

impl Cached {
    pub fn new(requests: RequestSender, make: fn(&Facts) -> Result<String, String>) -> Self {
        Self { requests, make, text: Arc::from(""), expires: Instant::now() }
    }

    /// Returns the text. If the cached one has expired, makes a new one.
    ///
    /// # Errors
    /// The main loop doesn't answer, or has ended, or the text can't be made.
    pub fn get(&mut self) -> Result<Arc<str>, String> {
        if Instant::now() >= self.expires {
            let before_ns = thread_cpu_ns();
            let facts = self.requests.send(Request::Status)?;
            self.text = (self.make)(&facts)?.into();
            let cost = Duration::from_nanos(thread_cpu_ns() - before_ns + facts.cost_ns);
            self.expires = Instant::now() + (cost * CORE_PART).clamp(AGE_LEAST, AGE_MOST);
        }
        Ok(self.text.clone())
    }
}
