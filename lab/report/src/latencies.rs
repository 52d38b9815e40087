//! Latencies as histograms: small enough to keep, and good for any percentile.

use pagefold_engine::units::whole;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Parts of each power of two. A bound is at most 1/128 (0.8 %) above the latency.
const PARTS: u32 = 128;

/// The latencies of one server under one policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    pub policy: String,
    pub server: String,
    /// The time of the measurement, in words.
    pub when: String,
    pub histogram: Histogram,
}

/// How many latencies were at most this many nanoseconds, and above the next lower bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram(pub BTreeMap<u64, u64>);

impl Histogram {
    pub fn of(latencies: impl IntoIterator<Item = Duration>) -> Self {
        let mut histogram = Self::default();
        for latency in latencies {
            *histogram.0.entry(bound(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX))).or_default() += 1;
        }
        histogram
    }

    pub fn add(&mut self, other: &Self) {
        for (&bound, count) in &other.0 {
            *self.0.entry(bound).or_default() += count;
        }
    }

    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// The bound, in nanoseconds, that this share of all latencies doesn't exceed (the nearest rank).
    pub fn percentile(&self, share: f64) -> Option<u64> {
        let rank = whole((self.count() as f64 * share).ceil()).max(1);
        let mut seen = 0;
        for (&bound, count) in &self.0 {
            seen += count;
            if seen >= rank {
                return Some(bound);
            }
        }
        None
    }

    /// For each bound, microseconds: one in how many requests took longer, on average. Leaves out the last bound: none
    /// took longer.
    pub fn tail(&self) -> Vec<(f64, f64)> {
        let all = self.count();
        let mut longer = all;
        let mut points = Vec::new();
        for (&bound, count) in &self.0 {
            longer -= count;
            if longer > 0 {
                points.push((all as f64 / longer as f64, bound as f64 / 1e3));
            }
        }
        points
    }
}

/// The upper bound of the part with this value.
fn bound(nanos: u64) -> u64 {
    let shift = nanos.checked_ilog2().unwrap_or(0).saturating_sub(PARTS.ilog2());
    nanos | ((1 << shift) - 1)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    #[test]
    fn bounds_are_at_most_a_part_above() {
        assert_eq!([0, 1, 127, 255].map(bound), [0, 1, 127, 255]);
        assert_eq!([256, 257, 258].map(bound), [257, 257, 259]);
        for nanos in [999, 123_456, 10_000_000_001, u64::MAX - 5] {
            let bound = bound(nanos);
            assert!(bound >= nanos && bound - nanos <= nanos / u64::from(PARTS), "{nanos} {bound}");
            assert_eq!(super::bound(bound), bound);
        }
        assert_eq!(bound(u64::MAX), u64::MAX);
    }

    #[test]
    fn percentiles_and_tails_follow_from_the_counts() {
        let nanos = |nanos: &u64| Duration::from_nanos(*nanos);
        let mut histogram = Histogram::of([10, 20, 20, 30, 100].iter().map(nanos));
        assert_eq!(
            [0.0, 0.2, 0.5, 0.8, 0.81, 1.0].map(|share| histogram.percentile(share).unwrap()),
            [10, 10, 20, 30, 100, 100]
        );
        assert_eq!(histogram.tail(), [(1.25, 0.01), (2.5, 0.02), (5.0, 0.03)]);
        histogram.add(&Histogram::of([20, 200].iter().map(nanos)));
        assert_eq!((histogram.count(), histogram.0[&20], histogram.0[&200]), (7, 3, 1));
        assert_eq!((Histogram::default().percentile(0.5), Histogram::default().tail()), (None, vec![]));
    }
}
