//! Loads that show how the programs beside a policy fare: requests at fixed instants, and commands such as a
//! compression.
//!
//! The load is open: we send the next request at its instant even if the last one has no answer yet, and the latency
//! counts from that instant. So if a server stalls for 100 ms, we charge it for every request due meanwhile, not just
//! for one (coordinated omission).

use anyhow::{Context, ensure};
use pagefold_engine::units::whole;
use pagefold_programs::child::OwnedChild;
use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Requests at fixed instants over one connection.
#[derive(Debug)]
pub struct OpenLoop {
    stop: Arc<AtomicBool>,
    began: Instant,
    every: Duration,
    writer: JoinHandle<()>,
    reader: JoinHandle<Vec<Duration>>,
}

impl OpenLoop {
    /// Sends these requests over and over, one each `every`. `read` must read one answer.
    pub fn start(
        stream: UnixStream,
        every: Duration,
        requests: Vec<Vec<u8>>,
        mut read: impl FnMut(&mut BufReader<UnixStream>) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        ensure!(!requests.is_empty(), "there are no requests");
        let mut answers = BufReader::new(stream.try_clone().context("a second handle of the connection")?);
        let stop = Arc::new(AtomicBool::new(false));
        let began = Instant::now();
        let stopped = Arc::clone(&stop);
        let writer = thread::spawn(move || {
            let mut stream = stream;
            for (number, request) in (0_u32..).zip(requests.iter().cycle()) {
                thread::sleep((every * number).saturating_sub(began.elapsed()));
                if stopped.load(Ordering::Relaxed) || stream.write_all(request).is_err() {
                    break;
                }
            }
            // The reader ends once it has read the answers on the way.
            let _ = stream.shutdown(std::net::Shutdown::Write);
        });
        let reader = thread::spawn(move || {
            let mut latencies = Vec::new();
            for number in 0_u32.. {
                if read(&mut answers).is_err() {
                    break;
                }
                latencies.push(began.elapsed().saturating_sub(every * number));
            }
            latencies
        });
        Ok(Self { stop, began, every, writer, reader })
    }

    /// Ends the load and returns the latencies.
    pub fn finish(self) -> anyhow::Result<Latencies> {
        self.stop.store(true, Ordering::Relaxed);
        ensure!(self.writer.join().is_ok(), "the load generator has panicked");
        let in_order = self.reader.join().ok().context("the load generator has panicked")?;
        Ok(Latencies::of(self.began, self.every, (0..).zip(in_order).collect()))
    }
}

/// The latency of every request.
#[derive(Debug)]
pub struct Latencies {
    began: Instant,
    every: Duration,
    /// The latencies by request number.
    numbered: Vec<(u32, Duration)>,
}

impl Latencies {
    /// The latencies of numbered requests, one due each `every`.
    pub fn of(began: Instant, every: Duration, numbered: Vec<(u32, Duration)>) -> Self {
        Self { began, every, numbered }
    }

    /// The latencies of requests that were due between two instants, ascending.
    pub fn between(&self, from: Instant, to: Instant) -> Vec<Duration> {
        let mut found = Vec::new();
        for &(number, latency) in &self.numbered {
            if (from..to).contains(&(self.began + self.every * number)) {
                found.push(latency);
            }
        }
        found.sort_unstable();
        found
    }
}

/// The ascending value that this share of all values doesn't exceed.
pub fn percentile(ascending: &[Duration], share: f64) -> Option<Duration> {
    let rank = whole((ascending.len() as f64 * share).ceil()).max(1);
    ascending.get(usize::try_from(rank - 1).ok()?).copied()
}

/// A command that we run again and again, one at a time.
#[derive(Debug)]
pub struct Repeated {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Instant>>,
}

impl Repeated {
    /// Starts the first run. We discard the output, and stop after a failure.
    pub fn start(mut command: Command) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let thread = thread::spawn(move || {
            let mut done = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let Ok(child) = command.spawn() else { break };
                if !OwnedChild(child).0.wait().is_ok_and(|status| status.success()) {
                    break;
                }
                done.push(Instant::now());
            }
            done
        });
        Self { stop, thread }
    }

    /// Ends the load and returns when each run was done.
    pub fn finish(self) -> anyhow::Result<Done> {
        self.stop.store(true, Ordering::Relaxed);
        Ok(Done(self.thread.join().ok().context("the load generator has panicked")?))
    }
}

/// When each run of a command was done.
#[derive(Debug)]
pub struct Done(Vec<Instant>);

impl Done {
    /// Runs per second between two instants, counted from the first end to the last.
    pub fn per_second(&self, from: Instant, to: Instant) -> Option<f64> {
        let within: Vec<Instant> = self.0.iter().copied().filter(|done| (from..to).contains(done)).collect();
        let seconds = within.last()?.duration_since(*within.first()?).as_secs_f64();
        if seconds > 0.0 { Some((within.len() as f64 - 1.0) / seconds) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values: Vec<Duration> = (1..=1000).map(|number| MS * number).collect();
        let at = |share| percentile(&values, share).unwrap().as_millis();
        assert_eq!([0.0, 0.5, 0.99, 0.999, 1.0].map(at), [1, 500, 990, 999, 1000]);
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(percentile(&values[..1], 0.99), Some(MS));
    }

    #[test]
    fn a_stall_is_charged_to_every_request_that_was_due_meanwhile() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // Answers each byte, but once not for 200 ms.
        let server = thread::spawn(move || {
            let mut byte = [0];
            for number in 0.. {
                if theirs.read_exact(&mut byte).is_err() {
                    break;
                }
                if number == 100 {
                    thread::sleep(200 * MS);
                }
                theirs.write_all(&byte).unwrap();
            }
        });
        let began = Instant::now();
        let load = OpenLoop::start(ours, MS, vec![b"a".to_vec(), b"b".to_vec()], |answers| {
            answers.read_exact(&mut [0])?;
            Ok(())
        });
        let load = load.unwrap();
        thread::sleep(600 * MS);
        let latencies = load.finish().unwrap();
        server.join().unwrap();
        let all = latencies.between(began, began + 500 * MS);
        assert!((450..=500).contains(&all.len()), "{} requests in half a second", all.len());
        // A generator that waits for answers would have found one slow request in 300.
        let slow = all.iter().filter(|latency| **latency >= 50 * MS).count();
        assert!(slow >= 140, "{slow} of {} requests", all.len());
        assert!(percentile(&all, 1.0).unwrap() >= 195 * MS);
        assert!(latencies.between(began + 3600 * MS, began + 7200 * MS).is_empty());
    }

    #[test]
    fn commands_are_counted_between_whole_runs() {
        let began = Instant::now();
        let done = Done([1, 3, 5, 9].map(|second| began + Duration::from_secs(second)).to_vec());
        let speed = done.per_second(began, began + Duration::from_secs(8)).unwrap();
        assert!((speed - 0.5).abs() < 1e-9, "{speed}");
        assert_eq!(done.per_second(began, began + Duration::from_secs(2)), None);
    }

    #[test]
    fn a_command_is_repeated_until_it_fails() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        // Fails the fourth time.
        let script = format!("echo >>{0}; [ $(wc -l <{0}) -lt 4 ]", file.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        let repeated = Repeated::start(command);
        let end = Instant::now() + 20_000 * MS;
        while std::fs::read(&file).map_or(0, |lines| lines.len()) < 4 && Instant::now() < end {
            thread::sleep(5 * MS);
        }
        assert_eq!(repeated.finish().unwrap().0.len(), 3);
    }
}
