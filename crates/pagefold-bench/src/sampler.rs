//! What KSM saves and what ksmd spends over time, measured apart from whoever drives it.

use anyhow::Context;
use pagefold_linux::cpu::Ksmd;
use pagefold_linux::ksm::{KSM_ROOT, Ksm};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks. A look is eleven small reads, some 10 us.
const INTERVAL: Duration = Duration::from_millis(50);

/// One look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Since the start.
    pub seconds: f64,
    /// `pages_sharing` and `ksm_zero_pages`, beyond those at the start.
    pub saved_bytes: u64,
    /// CPU time of ksmd since the start.
    pub ksmd_seconds: f64,
}

/// A thread that looks until it is told to end.
#[derive(Debug)]
pub struct Sampler {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<Vec<Point>>>>,
}

impl Sampler {
    /// Starts looking; its time begins now.
    pub fn start() -> anyhow::Result<Self> {
        let ksm = Ksm::open(Path::new(KSM_ROOT))?;
        let ksmd = Ksmd::find()?.context("there is no ksmd to be seen")?;
        let end = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&end);
        let began = Instant::now();
        let (saved_then, cpu_then) = look(&ksm, &ksmd)?;
        let thread = std::thread::spawn(move || {
            let mut points = Vec::new();
            loop {
                let last = told.load(Ordering::Acquire);
                let (saved, cpu_ns) = look(&ksm, &ksmd)?;
                points.push(Point {
                    seconds: began.elapsed().as_secs_f64(),
                    saved_bytes: saved.saturating_sub(saved_then),
                    ksmd_seconds: Duration::from_nanos(cpu_ns.saturating_sub(cpu_then)).as_secs_f64(),
                });
                if last {
                    return Ok(points);
                }
                std::thread::park_timeout(INTERVAL);
            }
        });
        Ok(Self { end, thread: Some(thread) })
    }

    /// Takes a last look and returns them all; never none.
    pub fn finish(mut self) -> anyhow::Result<Vec<Point>> {
        self.end.store(true, Ordering::Release);
        let thread = self.thread.take().context("a sampler that has ended")?;
        thread.thread().unpark();
        thread.join().map_err(|_| anyhow::anyhow!("the sampler panicked"))?
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
    }
}

fn look(ksm: &Ksm, ksmd: &Ksmd) -> anyhow::Result<(u64, u64)> {
    Ok((ksm.counters()?.view(true, false).saved().bytes().0, ksmd.cpu_ns()?))
}

/// When `share` of `whole` was reached first.
pub fn reached(points: &[Point], share: f64, whole: u64) -> Option<Point> {
    points.iter().copied().find(|point| whole > 0 && point.saved_bytes as f64 >= share * whole as f64)
}

/// The curve without the points in the middle of flat stretches.
pub fn thinned(points: &[Point]) -> Vec<(f64, u64)> {
    let flat = |at: usize| {
        at > 0
            && at + 1 < points.len()
            && points[at - 1].saved_bytes == points[at].saved_bytes
            && points[at].saved_bytes == points[at + 1].saved_bytes
    };
    (0..points.len()).filter(|&at| !flat(at)).map(|at| (points[at].seconds, points[at].saved_bytes)).collect()
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // figures that come out exact
mod tests {
    use super::*;

    fn points(saved: &[u64]) -> Vec<Point> {
        (0_u32..)
            .zip(saved)
            .map(|(at, &saved_bytes)| Point { seconds: f64::from(at), saved_bytes, ksmd_seconds: 0.0 })
            .collect()
    }

    #[test]
    fn the_first_moment_counts_and_nothing_saved_is_never_reached() {
        let curve = points(&[0, 50, 90, 80, 100]);
        assert_eq!(reached(&curve, 0.9, 100).unwrap().seconds, 2.0);
        assert!(reached(&points(&[0, 0]), 0.9, 0).is_none());
    }

    #[test]
    fn thinning_keeps_corners_and_ends() {
        assert_eq!(thinned(&points(&[0, 0, 0, 5, 5, 5])), [(0.0, 0), (2.0, 0), (3.0, 5), (5.0, 5)]);
        assert_eq!(thinned(&points(&[1])), [(0.0, 1)]);
    }
}
