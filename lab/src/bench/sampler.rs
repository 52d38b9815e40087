//! Records what KSM saves and what ksmd and a daemon spend over time, independently of what controls KSM.

use crate::bench::daemon::Meter;
use crate::bench::events::{EventReader, KernelEvents};
use crate::bench::policy::uksm::Uksm;
use crate::bench::sampling::SamplingThread;
use anyhow::Context;
use pagefold_core::units::Bytes;
use pagefold_linux::ksm::ksmd::Ksmd;
use pagefold_linux::ksm::{KSM_ROOT, Ksm};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time between two samples. A sample is twelve small reads, and as many again with a daemon.
const INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplerPoint {
    /// Time since the start.
    pub seconds: f64,
    /// Memory saved (`pages_sharing` and `ksm_zero_pages`) beyond that at the start.
    pub saved_bytes: u64,
    /// CPU time of ksmd since the start.
    pub ksmd_seconds: f64,
    /// CPU time of the daemon passed to [`Sampler::watch`] and of its children.
    pub daemon_seconds: f64,
    /// The daemon's peak memory so far, see [`Meter::peak_bytes`].
    pub daemon_peak_bytes: u64,
    /// What the kernel has counted since the start.
    pub events: KernelEvents,
}

impl SamplerPoint {
    pub fn cpu_seconds(&self) -> f64 {
        self.ksmd_seconds + self.daemon_seconds
    }
}

/// Samples KSM and a daemon until it is stopped.
#[derive(Debug)]
pub struct Sampler {
    shared: Arc<Mutex<Shared>>,
    thread: SamplingThread<SamplerPoint>,
}

/// The daemon that the thread measures, and its latest sample.
#[derive(Debug, Default)]
struct Shared {
    daemon: Option<Meter>,
    last: SamplerPoint,
}

impl Sampler {
    pub fn start() -> anyhow::Result<Self> {
        let ksm = Ksm::open(Path::new(KSM_ROOT))?;
        Self::watching(Ksmd::find()?.context("ksmd is not running")?, move || {
            Ok(ksm.counters()?.view(true, false).saved().bytes())
        })
    }

    /// The same on a kernel with UKSM in place of KSM.
    pub fn start_uksm(uksm: Uksm) -> anyhow::Result<Self> {
        let uksmd = Ksmd::find_named(Path::new("/proc"), b"uksmd")?.context("uksmd is not running")?;
        Self::watching(uksmd, move || uksm.saved())
    }

    fn watching(ksmd: Ksmd, saved: impl Fn() -> anyhow::Result<Bytes> + Send + 'static) -> anyhow::Result<Self> {
        let saved_and_cpu_ns = move || anyhow::Ok((saved()?.0, ksmd.cpu_ns()?));
        let shared = Arc::new(Mutex::new(Shared::default()));
        let for_thread = Arc::clone(&shared);
        let (saved_then, cpu_then) = saved_and_cpu_ns()?;
        let events = EventReader::open(Path::new("/proc/vmstat"))?;
        let events_then = events.read()?;
        let thread = SamplingThread::start(INTERVAL, move |began| {
            let (saved, cpu_ns) = saved_and_cpu_ns()?;
            let events = events.read()?.since(events_then);
            let mut shared = for_thread.lock().unwrap_or_else(PoisonError::into_inner);
            shared.last = SamplerPoint {
                seconds: began.elapsed().as_secs_f64(),
                saved_bytes: saved.saturating_sub(saved_then),
                ksmd_seconds: Duration::from_nanos(cpu_ns.saturating_sub(cpu_then)).as_secs_f64(),
                daemon_seconds: shared.daemon.as_mut().map_or(0.0, Meter::cpu_seconds),
                daemon_peak_bytes: shared.daemon.as_mut().map_or(0, Meter::peak_bytes),
                events,
            };
            Ok(shared.last)
        });
        Ok(Self { shared, thread })
    }

    /// Also measures the CPU time and memory of this daemon from now on.
    pub fn watch(&self, daemon: Meter) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).daemon = Some(daemon);
    }

    pub fn last(&self) -> SamplerPoint {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Takes a last sample and returns all of them (at least one).
    pub fn finish(self) -> anyhow::Result<Vec<SamplerPoint>> {
        self.thread.finish()
    }
}

/// The first sample with at least `share` of `whole` saved.
pub fn reached(points: &[SamplerPoint], share: f64, whole: u64) -> Option<SamplerPoint> {
    points.iter().copied().find(|point| whole > 0 && point.saved_bytes as f64 >= share * whole as f64)
}

/// The largest share of a core that ksmd and the daemon took over any `window` seconds, or over the whole time if that
/// is shorter.
pub fn largest_share(points: &[SamplerPoint], window: f64) -> f64 {
    let mut most: f64 = 0.0;
    let mut end = 0;
    for (at, first) in points.iter().enumerate() {
        while end + 1 < points.len() && points[end].seconds < first.seconds + window {
            end += 1;
        }
        let (last, whole) = (points[end], points[end].seconds - first.seconds);
        if at == 0 || whole >= window {
            most = most.max((last.cpu_seconds() - first.cpu_seconds()) / whole.max(f64::MIN_POSITIVE));
        }
    }
    most
}

/// CPU seconds of ksmd and of the daemon between two times, and the seconds between the samples used.
pub fn spent_between(points: &[SamplerPoint], from: f64, to: f64) -> Option<(f64, f64, f64)> {
    let first = points.iter().find(|point| point.seconds >= from)?;
    let last = points.iter().rev().find(|point| point.seconds <= to)?;
    let seconds = last.seconds - first.seconds;
    let (ksmd, daemon) = (last.ksmd_seconds - first.ksmd_seconds, last.daemon_seconds - first.daemon_seconds);
    (seconds > 0.0).then_some((ksmd, daemon, seconds))
}

/// The curve without the points inside its flat parts.
pub fn thinned(points: &[SamplerPoint]) -> Vec<(f64, u64)> {
    let flat = |at: usize| {
        at > 0
            && at + 1 < points.len()
            && points[at - 1].saved_bytes == points[at].saved_bytes
            && points[at].saved_bytes == points[at + 1].saved_bytes
    };
    (0..points.len()).filter(|&at| !flat(at)).map(|at| (points[at].seconds, points[at].saved_bytes)).collect()
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    fn points(saved: &[u64]) -> Vec<SamplerPoint> {
        (0_u32..)
            .zip(saved)
            .map(|(at, &saved_bytes)| SamplerPoint { seconds: f64::from(at), saved_bytes, ..SamplerPoint::default() })
            .collect()
    }

    #[test]
    fn the_first_sample_counts_and_zero_savings_are_never_reached() {
        let curve = points(&[0, 50, 90, 80, 100]);
        assert_eq!(reached(&curve, 0.9, 100).unwrap().seconds, 2.0);
        assert!(reached(&points(&[0, 0]), 0.9, 0).is_none());
    }

    #[test]
    fn shares_cover_whole_windows_and_both_processes() {
        let points = [(0.0, 0.0, 0.0), (1.0, 0.5, 0.0), (2.0, 0.5, 1.0), (3.0, 0.5, 1.0), (4.0, 1.25, 1.0)].map(
            |(seconds, ksmd_seconds, daemon_seconds)| SamplerPoint {
                seconds,
                ksmd_seconds,
                daemon_seconds,
                ..SamplerPoint::default()
            },
        );
        assert_eq!(largest_share(&points, 1.0), 1.0);
        assert_eq!(largest_share(&points, 2.0), 0.75);
        // Shorter than a window.
        assert_eq!(largest_share(&points, 10.0), 2.25 / 4.0);
        assert_eq!(largest_share(&[], 1.0), 0.0);
        assert_eq!(spent_between(&points, 0.5, 3.5), Some((0.0, 1.0, 2.0)));
        assert_eq!(spent_between(&points, 4.0, 9.0), None);
    }

    #[test]
    fn thinning_keeps_corners_and_ends() {
        assert_eq!(thinned(&points(&[0, 0, 0, 5, 5, 5])), [(0.0, 0), (2.0, 0), (3.0, 5), (5.0, 5)]);
        assert_eq!(thinned(&points(&[1])), [(0.0, 1)]);
    }
}
