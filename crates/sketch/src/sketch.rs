//! A theta sketch (Apache DataSketches) of distinct contents.
//!
//! A sketch keeps the contents whose hash is below a threshold, theta. So if two workloads have a content in common
//! whose hash is below both thresholds, both sketches keep it ("coordinated sampling"). From these entries we estimate
//! how much two workloads share.

use crate::key::Content;
use datasketches::theta::{CompactThetaSketch, ThetaANotB, ThetaIntersection};
use pagefold_engine::units::PAGE_BYTES;

pub const SKETCH_BYTES: usize = 32 << 10;
/// Bytes before the entries of a full sketch.
const PREAMBLE_BYTES: usize = 24;
/// A sketch has at most this many entries.
pub const SKETCH_ENTRIES: usize = (SKETCH_BYTES - PREAMBLE_BYTES) / size_of::<u64>();
/// log2 of the library's nominal number of entries. It keeps up to twice that number, less a sixteenth, before it drops
/// entries again.
pub(crate) const LG_NOMINAL: u8 = 12;

/// Theta while the sketch still has all contents.
pub(crate) const MAX_THETA: u64 = i64::MAX as u64;
/// The lowest theta that we accept: even 2^40 contents, 4 PiB, give a higher one.
const MIN_THETA: u64 = MAX_THETA >> 40;

/// The serial version that we write, and the only one that we read. The next version packs entries, and not all readers
/// can unpack them.
const SERIAL_VERSION: u8 = 3;
/// The library's number for the family of compact theta sketches.
const FAMILY: u8 = 3;
/// Read-only, compact, and ordered.
const FLAGS: u8 = 0b1_1010;
const FLAG_EMPTY: u8 = 1 << 2;
/// The hash of the library's default seed, 9001.
const SEED_HASH: u16 = 0x93cc;

/// Distinct contents of a workload, without the page of zeros.
#[derive(Clone, Debug)]
pub struct Sketch(CompactThetaSketch);

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The number of contents, each of one page.
    pub contents: f64,
    /// Bounds that are right in 19 of 20 cases: two standard deviations.
    pub low: f64,
    pub high: f64,
}

impl Estimate {
    /// The size of that many pages in bytes.
    pub fn bytes(self) -> f64 {
        self.contents * PAGE_BYTES as f64
    }

    /// The estimate if each content is kept with probability `theta`, and `kept` contents were kept. The bounds are a
    /// score interval, like in pagefold-fleet's reports: unlike the library's, they're also right if next to nothing is
    /// kept.
    fn of_share(kept: usize, theta: f64) -> Self {
        let kept = kept as f64;
        let variance = 4.0 * (1.0 - theta);
        let middle = kept + variance / 2.0;
        let reach = (kept * variance + variance * variance / 4.0).sqrt();
        // Rounding may make the lower bound slightly negative if nothing was kept.
        Self { contents: kept / theta, low: ((middle - reach) / theta).max(0.0), high: (middle + reach) / theta }
    }

    fn of(sketch: &CompactThetaSketch) -> Self {
        Self::of_share(sketch.num_retained(), sketch.theta64() as f64 / MAX_THETA as f64)
    }
}

impl Sketch {
    /// A sketch of some contents, for tests and simulations.
    pub fn of(contents: impl IntoIterator<Item = Content>) -> Self {
        let mut counter = crate::Counter::new();
        for content in contents {
            counter.add(content);
        }
        counter.finish().sketch
    }

    /// Makes a sketch from the hashes in a table of the library: all are below theta, in any order.
    pub(crate) fn of_hashes(mut hashes: Vec<u64>, mut theta: u64) -> Result<Self, String> {
        hashes.sort_unstable();
        if let Some(&next) = hashes.get(SKETCH_ENTRIES) {
            theta = next;
            hashes.truncate(SKETCH_ENTRIES);
        }
        Self::from_bytes(&serialized(&hashes, theta))
    }

    /// Reads the library's serialised form as we write it: ordered, not packed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > SKETCH_BYTES {
            return Err(format!("it has {} bytes, more than {SKETCH_BYTES}", bytes.len()));
        }
        match bytes.get(1) {
            Some(&version) if version != SERIAL_VERSION => {
                return Err(format!("its serial version is {version}, not {SERIAL_VERSION}"));
            }
            _ => {}
        }
        let sketch = CompactThetaSketch::deserialize(bytes).map_err(|error| crate::one_line(&error))?;
        // The library accepts entries in any order, repeated ones, and bytes after the last.
        let mut last = 0;
        let ascending = sketch.iter().all(|entry| entry.hash() > std::mem::replace(&mut last, entry.hash()));
        if !ascending || sketch.serialize() != bytes {
            return Err("its entries are not in the form that pagefold writes".to_owned());
        }
        if sketch.theta64() < MIN_THETA {
            return Err("its theta is lower than any memory makes it".to_owned());
        }
        Ok(Self(sketch))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.serialize()
    }

    /// How many distinct contents there are.
    pub fn contents(&self) -> Estimate {
        Estimate::of(&self.0)
    }

    /// How many contents both workloads have.
    pub fn common(&self, other: &Self) -> Estimate {
        let mut both = ThetaIntersection::default();
        // This only fails for sketches of other seeds or with repeated entries, which `from_bytes` refuses.
        let done = both.update(&self.0).and_then(|()| both.update(&other.0));
        debug_assert!(done.is_ok(), "{done:?}");
        let kept = both.to_sketch(true).map_or(0, |both| both.num_retained());
        let is_empty = self.is_surely_empty() || other.is_surely_empty();
        let theta = if is_empty { MAX_THETA } else { self.theta().min(other.theta()) };
        Estimate::of_share(kept, theta as f64 / MAX_THETA as f64)
    }

    /// How many contents this workload has and the other one hasn't.
    pub fn without(&self, other: &Self) -> Estimate {
        let rest = ThetaANotB::default().compute(&self.0, &other.0, true);
        debug_assert!(rest.is_ok(), "{rest:?}");
        rest.map_or(Estimate { contents: 0.0, low: 0.0, high: 0.0 }, |rest| Estimate::of(&rest))
    }

    /// The entries: hashes of the contents, ascending, each below [`Self::theta`].
    pub fn hashes(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|entry| entry.hash())
    }

    pub fn len(&self) -> usize {
        self.0.num_retained()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the workload certainly has no contents. An empty sample alone doesn't show that.
    fn is_surely_empty(&self) -> bool {
        self.is_empty() && self.theta() == MAX_THETA
    }

    /// The threshold, as a fraction of 2^63.
    pub fn theta(&self) -> u64 {
        self.0.theta64()
    }
}

impl PartialEq for Sketch {
    fn eq(&self, other: &Self) -> bool {
        self.theta() == other.theta() && self.hashes().eq(other.hashes())
    }
}

/// The library's serialised form of ascending hashes. The library can make a sketch from hashes, or from its own tables
/// of counts, only through this form.
fn serialized(hashes: &[u64], theta: u64) -> Vec<u8> {
    let estimated = theta < MAX_THETA;
    let (longs, flags) = match hashes.len() {
        0 if !estimated => (1, FLAGS | FLAG_EMPTY),
        1 if !estimated => (1, FLAGS),
        _ => (if estimated { 3 } else { 2 }, FLAGS),
    };
    let mut bytes = vec![longs, SERIAL_VERSION, FAMILY, 0, 0, flags];
    // An empty sketch belongs to any seed.
    bytes.extend(if flags & FLAG_EMPTY == 0 { SEED_HASH } else { 0 }.to_le_bytes());
    if longs > 1 {
        // At most `SKETCH_ENTRIES`.
        bytes.extend(u32::try_from(hashes.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend([0; 4]);
    }
    if estimated {
        bytes.extend(theta.to_le_bytes());
    }
    for hash in hashes {
        bytes.extend(hash.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use datasketches::theta::ThetaSketchBuilder;
    use proptest::prelude::*;

    /// Contents spread as evenly as digests.
    fn contents(numbers: std::ops::Range<u64>) -> impl Iterator<Item = Content> {
        numbers.map(|number| Content(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    #[test]
    fn a_sketch_is_what_the_library_makes() {
        for distinct in [0, 1, 2, 1000, 4093, 4094, 5000, 7680, 7681, 100_000] {
            let sketch = Sketch::of(contents(0..distinct).chain(contents(0..distinct / 2)));
            let mut theirs = ThetaSketchBuilder::default().lg_k(LG_NOMINAL).build().unwrap();
            contents(0..distinct).for_each(|content| theirs.update(content.0));
            theirs.trim();
            let theirs = theirs.compact(true);
            // We keep the same entries, without the ones that would make the sketch longer than 32 KiB.
            let kept: Vec<u64> = theirs.iter().map(|entry| entry.hash()).take(sketch.len()).collect();
            assert!(sketch.hashes().eq(kept.iter().copied()), "{distinct}");
            assert!(sketch.len() == SKETCH_ENTRIES.min(theirs.num_retained()));
            if theirs.num_retained() <= SKETCH_ENTRIES {
                assert_eq!(sketch.to_bytes(), theirs.serialize());
            }
            assert!(sketch.to_bytes().len() <= SKETCH_BYTES);
            assert_eq!(Sketch::from_bytes(&sketch.to_bytes()).unwrap(), sketch);
            let Estimate { contents, low, high } = sketch.contents();
            assert!((contents - distinct as f64).abs() <= 0.04 * distinct as f64, "{contents} of {distinct}");
            assert!(low <= contents && contents <= high);
        }
    }

    #[test]
    fn what_two_have_in_common_is_estimated() {
        let (a, b) = (Sketch::of(contents(0..60_000)), Sketch::of(contents(40_000..100_000)));
        let near = |estimate: Estimate, truth: f64| {
            assert!((estimate.contents - truth).abs() < 3000.0, "{estimate:?}, not {truth}");
            assert!(estimate.low - 1500.0 <= truth && truth <= estimate.high + 1500.0, "{estimate:?}, not {truth}");
        };
        near(a.common(&b), 20_000.0);
        near(b.common(&a), 20_000.0);
        near(a.without(&b), 40_000.0);
        let none = Estimate { contents: 0.0, low: 0.0, high: 0.0 };
        assert_eq!(a.common(&Sketch::of([])), none);
        // Even if the sketches have nothing in common, the workloads may share something.
        let little = a.common(&Sketch::of(contents(1 << 40..(1 << 40) + 9)));
        assert!(little.contents == 0.0 && little.low == 0.0 && little.high > 10.0, "{little:?}");
        // Small sketches are exact.
        let (a, b) = (Sketch::of(contents(0..3000)), Sketch::of(contents(2000..5000)));
        assert_eq!(a.common(&b), Estimate { contents: 1000.0, low: 1000.0, high: 1000.0 });
    }

    #[test]
    fn other_forms_are_refused() {
        let sketch = Sketch::of(contents(0..9000));
        let bytes = sketch.to_bytes();
        let refused = |change: &dyn Fn(&mut Vec<u8>), says: &str| {
            let mut bytes = bytes.clone();
            change(&mut bytes);
            let error = Sketch::from_bytes(&bytes).unwrap_err();
            assert!(error.contains(says), "{error}, not {says}");
        };
        refused(&|bytes| bytes.push(0), "more than");
        refused(&|bytes| bytes.truncate(30_000), "insufficient");
        refused(&|bytes| bytes.clear(), "insufficient");
        refused(&|bytes| bytes[1] = 4, "serial version");
        refused(&|bytes| bytes[2] = 2, "");
        refused(&|bytes| bytes[6] ^= 1, "seed");
        refused(&|bytes| bytes[5] |= FLAG_EMPTY, "form");
        refused(&|bytes| bytes[16..24].fill(0), "theta");
        refused(&|bytes| bytes[24..32].fill(0), "invalid");
        refused(&|bytes| bytes.copy_within(24..32, 32), "form");
        refused(&|bytes| bytes[8] -= 1, "form");
        refused(&|bytes| bytes[8..12].fill(0xff), "insufficient");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), at in 0..200_usize, with in any::<u8>()) {
            let _ = Sketch::from_bytes(&bytes);
            let mut changed = Sketch::of(contents(0..20)).to_bytes();
            if let Some(byte) = changed.get_mut(at) {
                *byte = with;
            }
            if let Ok(sketch) = Sketch::from_bytes(&changed) {
                prop_assert_eq!(sketch.to_bytes(), changed);
                let other = Sketch::of(contents(10..9000));
                let (common, rest) = (sketch.common(&other), sketch.without(&other));
                prop_assert!(common.low <= common.high && rest.low <= rest.high);
            }
        }
    }
}
