//! A bounded open load: a fixed number of clients, and each waits for an answer before its next request. A request is
//! due at its instant. Any free client makes it then, or else the first to become free. The latency counts from that
//! instant.

use crate::bench::load::Latencies;
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A request that a client made: its number, and its latency since it was due, or why it failed.
type Made = (u32, Result<Duration, String>);

/// Clients at work. Dropping this ends them.
#[derive(Debug)]
pub struct Clients {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Vec<Made>>>,
}

#[derive(Debug)]
struct Shared {
    began: Instant,
    every: Duration,
    stop: AtomicBool,
    next: AtomicU32,
}

impl Clients {
    /// One request is due each `every`. A client gets the request's number. After a failure a client makes no more
    /// requests.
    pub fn start<C>(every: Duration, clients: impl IntoIterator<Item = C>) -> Self
    where
        C: FnMut(u32) -> anyhow::Result<()> + Send + 'static,
    {
        let shared = Shared { began: Instant::now(), every, stop: AtomicBool::new(false), next: AtomicU32::new(0) };
        let shared = Arc::new(shared);
        let mut threads = Vec::new();
        for mut request in clients {
            let shared = Arc::clone(&shared);
            threads.push(thread::spawn(move || shared.follow(&mut request)));
        }
        Self { shared, threads }
    }

    /// Ends the load and returns the requests.
    pub fn finish(mut self) -> anyhow::Result<Requests> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut made = Vec::new();
        for thread in self.threads.drain(..) {
            made.extend(thread.join().ok().context("a client has panicked")?);
        }
        made.sort_by_key(|(number, _)| *number);
        Ok(Requests { began: self.shared.began, every: self.shared.every, made })
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn follow(&self, request: &mut impl FnMut(u32) -> anyhow::Result<()>) -> Vec<Made> {
        let mut made = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let due = self.every * number;
            thread::sleep(due.saturating_sub(self.began.elapsed()));
            if self.stop.load(Ordering::Relaxed) {
                return made;
            }
            if let Err(error) = request(number) {
                made.push((number, Err(format!("{error:#}"))));
                return made;
            }
            made.push((number, Ok(self.began.elapsed().saturating_sub(due))));
        }
    }
}

/// All requests, in order.
#[derive(Debug)]
pub struct Requests {
    began: Instant,
    every: Duration,
    made: Vec<Made>,
}

impl Requests {
    /// The latencies of the answered requests.
    pub fn latencies(&self) -> Latencies {
        let answered = self.made.iter().filter_map(|(number, answered)| Some((*number, *answered.as_ref().ok()?)));
        Latencies::of(self.began, self.every, answered.collect())
    }

    /// Why a request that was due before `end` failed: the first such failure, if any.
    pub fn failure_before(&self, end: Instant) -> Option<&str> {
        for (number, answered) in &self.made {
            match answered {
                Err(why) if self.began + self.every * *number < end => return Some(why),
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn requests_are_made_by_whoever_is_free_and_count_from_when_they_were_due() {
        // One of two clients at 10 ms is stuck for 300 ms. The other makes all requests meanwhile.
        let client = |number| {
            if number == 3 {
                thread::sleep(300 * MS);
            }
            Ok(())
        };
        let load = Clients::start(10 * MS, [client, client]);
        thread::sleep(500 * MS);
        let requests = load.finish().unwrap();
        let began = requests.began;
        let latencies = requests.latencies().between(began, began + 400 * MS);
        assert!((38..=40).contains(&latencies.len()), "{}", latencies.len());
        assert!(latencies.last().unwrap() >= &(295 * MS));
        assert_eq!(latencies.iter().filter(|latency| **latency > 150 * MS).count(), 1);
        // With only one client, every request that came due during the slow one is slow, too.
        let load = Clients::start(10 * MS, [client]);
        thread::sleep(600 * MS);
        let requests = load.finish().unwrap();
        let latencies = requests.latencies().between(requests.began, requests.began + 400 * MS);
        assert!(latencies.iter().filter(|latency| **latency > 150 * MS).count() >= 14, "{latencies:?}");
        assert_eq!(requests.failure_before(Instant::now()), None);
    }

    #[test]
    fn a_failure_is_told_from_one_after_the_end() {
        let client = |number| if number < 5 { Ok(()) } else { bail!("no answer to {number}") };
        let load = Clients::start(10 * MS, [client]);
        thread::sleep(200 * MS);
        let requests = load.finish().unwrap();
        let began = requests.began;
        assert_eq!(requests.latencies().between(began, began + 1000 * MS).len(), 5);
        assert_eq!(requests.failure_before(began + 1000 * MS), Some("no answer to 5"));
        assert_eq!(requests.failure_before(began + 45 * MS), None);
    }
}
