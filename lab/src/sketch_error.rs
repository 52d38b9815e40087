//! How well sketches tell which contents two workloads have in common, against exact digests.
//!
//! The 128-bit digests of a record stand for contents. The random part of a sketch is its key, so we compare each pair
//! of programs under several keys. The bounds are the product's: `Sketch::common` computes them, and pagefold-fleet
//! reports them.

use crate::bench::measures::median;
use crate::record::State;
use pagefold_sketch::{Counter, Estimate, FleetKey, Sketch};
use serde::Serialize;
use std::collections::BTreeSet;

/// The estimate's error must be within its bounds this often: 19 of 20 times.
pub const WITHIN_BAR: f64 = 0.95;
/// The median error, as a share of the smaller workload.
pub const MEDIAN_BAR: f64 = 0.03;
/// The bars only concern pairs that have at least this much in common, as a share of the smaller program. If two
/// programs share a page or two, sketches hold none of them. The estimate then has wide bounds and a small error, and
/// says little.
pub const WORTH_TELLING: f64 = 0.01;

/// A program and its distinct contents, without zeros.
#[derive(Clone, Debug)]
pub struct Held {
    pub name: String,
    pub contents: BTreeSet<u128>,
}

/// Two programs, over all keys.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    pub a: String,
    pub b: String,
    /// Distinct pages of the smaller one.
    pub smaller: usize,
    /// Distinct pages of the larger one.
    pub larger: usize,
    pub common: usize,
    /// How often the true number was within the estimate's bounds.
    pub within: usize,
    pub keys: usize,
    /// Median error, as a share of the smaller one.
    pub median_error: f64,
    pub largest_error: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    pub schema: &'static str,
    pub keys: usize,
    pub programs: usize,
    /// Pairs with at least 1 % of the smaller one in common.
    pub pairs: Vec<Pair>,
    pub other_pairs: usize,
    /// Share of all estimates of `pairs` that were within their bounds; none if there are no pairs.
    pub within: Option<f64>,
    /// Median error of all estimates of `pairs`, as a share of the smaller workload.
    pub median_error: Option<f64>,
    #[serde(skip)]
    errors: Vec<f64>,
}

/// All estimates of several records. We apply the bars to these: the pairs of one record come from few programs, whose
/// sketches are right or wrong together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overall {
    pub estimates: usize,
    pub within: f64,
    pub median_error: f64,
}

impl Overall {
    /// `None` if no record has pairs.
    pub fn of(comparisons: &[Comparison]) -> Option<Self> {
        let mut within = 0;
        let mut errors = Vec::new();
        for comparison in comparisons {
            within += comparison.pairs.iter().map(|pair| pair.within).sum::<usize>();
            errors.extend_from_slice(&comparison.errors);
        }
        let estimates = errors.len();
        if estimates == 0 {
            return None;
        }
        Some(Self { estimates, within: within as f64 / estimates as f64, median_error: median(errors) })
    }

    pub fn meets_bars(self) -> bool {
        self.within >= WITHIN_BAR && self.median_error <= MEDIAN_BAR
    }
}

/// The programs of a record at some time, without the ones that hold nothing.
pub fn held(state: &State) -> Vec<Held> {
    let mut programs = Vec::new();
    for (process, row) in &state.processes {
        let mut contents = BTreeSet::new();
        for region in state.regions.values() {
            if region.row.process == *process {
                contents.extend(region.pages.iter().map(|(_, page)| page.digest));
            }
        }
        contents.remove(&0);
        if !contents.is_empty() {
            programs.push(Held { name: row.name.clone().unwrap_or_else(|| process.to_string()), contents });
        }
    }
    programs
}

/// Compares all pairs under keys numbered from 1.
pub fn compare(programs: &[Held], keys: u16) -> Comparison {
    let sketches: Vec<Vec<Sketch>> = (1..=keys).map(|number| sketches(programs, &key(number))).collect();
    let mut comparison = Comparison {
        schema: "pagefold.lab.sketch-error/1",
        keys: keys.into(),
        programs: programs.len(),
        ..Comparison::default()
    };
    for (at, a) in programs.iter().enumerate() {
        for (other, b) in programs.iter().enumerate().skip(at + 1) {
            let common = a.contents.intersection(&b.contents).count();
            let smaller = a.contents.len().min(b.contents.len());
            if (common as f64) < WORTH_TELLING * smaller as f64 {
                comparison.other_pairs += 1;
                continue;
            }
            let estimates = sketches.iter().map(|sketches| sketches[at].common(&sketches[other]));
            let (pair, errors) = pair(a, b, common, estimates);
            comparison.errors.extend(errors);
            comparison.pairs.push(pair);
        }
    }
    if let Some(overall) = Overall::of(std::slice::from_ref(&comparison)) {
        comparison.within = Some(overall.within);
        comparison.median_error = Some(overall.median_error);
    }
    comparison
}

fn key(number: u16) -> FleetKey {
    let mut bytes = [0; 32];
    bytes[..2].copy_from_slice(&number.to_be_bytes());
    FleetKey::new(bytes)
}

fn sketches(programs: &[Held], key: &FleetKey) -> Vec<Sketch> {
    let mut sketches = Vec::new();
    for program in programs {
        let mut counter = Counter::new();
        for digest in &program.contents {
            counter.add(key.content(&digest.to_be_bytes()));
        }
        sketches.push(counter.finish().sketch);
    }
    sketches
}

/// A pair, and the errors of its estimates.
fn pair(a: &Held, b: &Held, common: usize, estimates: impl Iterator<Item = Estimate>) -> (Pair, Vec<f64>) {
    let smaller = a.contents.len().min(b.contents.len());
    let mut within = 0;
    let mut largest_error = 0.0_f64;
    let mut errors = Vec::new();
    for Estimate { contents, low, high } in estimates {
        // We round the bounds to whole numbers: an estimate of exactly 3 may be stored as a little less.
        within += usize::from(low.floor() <= common as f64 && common as f64 <= high.ceil());
        let error = (contents - common as f64).abs() / smaller as f64;
        largest_error = largest_error.max(error);
        errors.push(error);
    }
    let pair = Pair {
        a: a.name.clone(),
        b: b.name.clone(),
        smaller,
        larger: a.contents.len().max(b.contents.len()),
        common,
        within,
        keys: errors.len(),
        median_error: median(errors.iter().copied()),
        largest_error,
    };
    (pair, errors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(name: &str, contents: std::ops::Range<u128>) -> Held {
        Held { name: name.into(), contents: contents.map(|content| content << 90 | 7).collect() }
    }

    #[test]
    fn generated_pairs_meet_the_bars() {
        let programs = [
            holding("a", 0..30_000),
            holding("b", 20_000..60_000),
            holding("c", 100..2_000),
            holding("d", 59_000..61_000),
            holding("e", 70_000..71_000),
        ];
        let comparison = compare(&programs, 40);
        let common: Vec<usize> = comparison.pairs.iter().map(|pair| pair.common).collect();
        assert_eq!((common, comparison.other_pairs), (vec![10_000, 1_900, 1_000], 7));
        let overall = Overall::of(std::slice::from_ref(&comparison)).unwrap();
        assert!(overall.meets_bars() && overall.estimates == 120, "{comparison:?}");
        assert!(comparison.median_error > Some(0.001), "the sketches are not exact");
        let twice = Overall::of(&[comparison.clone(), comparison]);
        assert_eq!(twice, Some(Overall { estimates: 240, ..overall }));
    }

    #[test]
    fn of_nothing_in_common_the_bars_say_nothing() {
        let comparison = compare(&[holding("a", 0..5_000), holding("b", 5_000..9_000)], 2);
        assert_eq!((comparison.pairs.len(), comparison.other_pairs), (0, 1));
        assert!(comparison.within.is_none() && Overall::of(&[comparison]).is_none());
    }

    #[test]
    fn sketches_of_different_keys_miss_the_bars() {
        let (a, b) = (holding("a", 0..30_000), holding("b", 0..30_000));
        let one = sketches(std::slice::from_ref(&a), &key(1));
        let other = sketches(std::slice::from_ref(&b), &key(2));
        let (pair, errors) = pair(&a, &b, 30_000, std::iter::once(one[0].common(&other[0])));
        assert!(pair.within == 0 && errors[0] > 0.9, "{pair:?}");
    }
}
