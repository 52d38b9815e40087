//! Samples over time: memory saved, the cost, and the page tables.

use crate::events::KernelEvents;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplerPoint {
    /// Time since the start.
    pub seconds: f64,
    /// Memory saved (`pages_sharing` and `ksm_zero_pages`), less the amount at the start.
    pub saved_bytes: u64,
    /// CPU time of ksmd since the start.
    pub ksmd_seconds: f64,
    /// CPU time of the daemon passed to `Sampler::watch` and of its children.
    pub daemon_seconds: f64,
    /// The daemon's peak memory so far, see `Meter::peak_bytes`.
    pub daemon_peak_bytes: u64,
    /// The kernel's counts since the start.
    pub events: KernelEvents,
}

impl SamplerPoint {
    pub fn cpu_seconds(&self) -> f64 {
        self.ksmd_seconds + self.daemon_seconds
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PageTableSample {
    /// Time since the start.
    pub seconds: f64,
    /// Pages that share their frame. In targets that never forked, these are the merged pages.
    pub merged_pages: u64,
    pub saved_bytes: u64,
}

/// The first sample with at least `share` of `whole` saved.
pub fn reached(points: &[SamplerPoint], share: f64, whole: u64) -> Option<SamplerPoint> {
    points.iter().find(|point| whole > 0 && point.saved_bytes as f64 >= share * whole as f64).copied()
}

/// The largest share of a core that ksmd and the daemon took over any `window` seconds, or over the whole time if
/// shorter.
pub fn largest_share(points: &[SamplerPoint], window: f64) -> f64 {
    let mut most: f64 = 0.0;
    let mut end = 0;
    for (at, first) in points.iter().enumerate() {
        while end + 1 < points.len() && points[end].seconds < first.seconds + window {
            end += 1;
        }
        let whole = points[end].seconds - first.seconds;
        if at == 0 || whole >= window {
            let spent = points[end].cpu_seconds() - first.cpu_seconds();
            most = most.max(spent / whole.max(f64::MIN_POSITIVE));
        }
    }
    most
}

/// CPU seconds of ksmd and of the daemon between two times, and the seconds between the samples that we used.
pub fn spent_between(points: &[SamplerPoint], from: f64, to: f64) -> Option<(f64, f64, f64)> {
    let first = points.iter().find(|point| point.seconds >= from)?;
    let last = points.iter().rev().find(|point| point.seconds <= to)?;
    let seconds = last.seconds - first.seconds;
    if seconds <= 0.0 {
        return None;
    }
    Some((last.ksmd_seconds - first.ksmd_seconds, last.daemon_seconds - first.daemon_seconds, seconds))
}

/// The curve without the points inside its flat parts.
pub fn thinned(points: &[SamplerPoint]) -> Vec<(f64, u64)> {
    let mut corners = Vec::new();
    for (at, point) in points.iter().enumerate() {
        let saved = point.saved_bytes;
        let around = points[at.saturating_sub(1)..].iter().take(3);
        let inside = at > 0 && at + 1 < points.len();
        if !inside || around.into_iter().any(|point| point.saved_bytes != saved) {
            corners.push((point.seconds, saved));
        }
    }
    corners
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
