//! Computes the most that merging can save below memory limits. We may choose which page stays for each content, but no
//! order of rewriting may take a cgroup over a limit that it would have stayed below without merging.
//!
//! A frame that stays charged to a cgroup while processes outside map it takes one page of that cgroup's headroom: its
//! limit, minus the pages that its processes have without merging. So for each kind of content we choose how many
//! become a frame, which processes share it, and whose page stays. That's a linear program.

use pagefold_engine::units::whole;
use std::collections::BTreeSet;

/// A process. Its pages are the first ones of a numbered series of contents.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub series: u64,
    pub pages: u64,
}

/// A memory limit, and the programs that it applies to, by their numbers.
#[derive(Clone, Debug)]
pub struct Limit {
    pub pages: u64,
    pub members: BTreeSet<usize>,
}

/// A way to merge a content: which programs share a frame, and whose cgroup is charged for it.
struct Way {
    kind: usize,
    sharers: BTreeSet<usize>,
    payer: usize,
}

pub fn most_saved(programs: &[Program], limits: &[Limit]) -> u64 {
    let kinds = kinds(programs);
    let mut ways = Vec::new();
    for (kind, (holders, _)) in kinds.iter().enumerate() {
        for sharers in sharer_sets(holders, limits) {
            for &payer in &sharers {
                ways.push(Way { kind, sharers: sharers.clone(), payer });
            }
        }
    }
    let gains: Vec<f64> = ways.iter().map(|way| way.sharers.len() as f64 - 1.0).collect();
    let mut rows = Vec::new();
    // No program has more pages of a kind than there are contents.
    for (kind, (holders, contents)) in kinds.iter().enumerate() {
        for holder in holders {
            let takes = |way: &Way| way.kind == kind && way.sharers.contains(holder);
            rows.push(row(&ways, takes, *contents));
        }
    }
    for limit in limits {
        let used: u64 = limit.members.iter().map(|&member| programs[member].pages).sum();
        let takes = |way: &Way| limit.members.contains(&way.payer) && !way.sharers.is_subset(&limit.members);
        rows.push(row(&ways, takes, limit.pages.saturating_sub(used)));
    }
    whole(maximum(&gains, rows).round())
}

/// One row of the linear program: 1 for each way that takes from an amount, 0 for the others, then the amount.
fn row(ways: &[Way], takes: impl Fn(&Way) -> bool, amount: u64) -> Vec<f64> {
    let mut row: Vec<f64> = ways.iter().map(|way| f64::from(u8::from(takes(way)))).collect();
    row.push(amount as f64);
    row
}

/// Contents that several programs hold, by their holders, with the number of such contents.
fn kinds(programs: &[Program]) -> Vec<(BTreeSet<usize>, u64)> {
    let mut kinds = Vec::new();
    let series: BTreeSet<u64> = programs.iter().map(|program| program.series).collect();
    for series in series {
        let mut holders: Vec<usize> = (0..programs.len()).filter(|&at| programs[at].series == series).collect();
        holders.sort_by_key(|&at| std::cmp::Reverse(programs[at].pages));
        for number in 2..=holders.len() {
            let next = holders.get(number).map_or(0, |&at| programs[at].pages);
            let contents = programs[holders[number - 1]].pages - next;
            if contents > 0 {
                kinds.push((holders[..number].iter().copied().collect(), contents));
            }
        }
    }
    kinds
}

/// The sets of holders that may share a frame: all holders, and for each limit the ones inside and the ones outside.
fn sharer_sets(holders: &BTreeSet<usize>, limits: &[Limit]) -> BTreeSet<BTreeSet<usize>> {
    let mut sets = BTreeSet::from([holders.clone()]);
    for limit in limits {
        sets.insert(holders.intersection(&limit.members).copied().collect());
        sets.insert(holders.difference(&limit.members).copied().collect());
    }
    sets.retain(|set| set.len() > 1);
    sets
}

/// Maximizes the sum of `gains`, each times its amount. In each row, the amounts times the coefficients must add up to
/// the row's last entry at most. By the simplex method, with Bland's rule.
fn maximum(gains: &[f64], mut rows: Vec<Vec<f64>>) -> f64 {
    const TINY: f64 = 1e-9;
    let width = gains.len();
    let mut columns: Vec<usize> = (0..width).collect();
    let mut bases: Vec<usize> = (width..width + rows.len()).collect();
    let mut target: Vec<f64> = gains.iter().map(|gain| -gain).collect();
    target.push(0.0);
    loop {
        let improving = (0..width).filter(|&at| target[at] < -TINY);
        let Some(column) = improving.min_by_key(|&at| columns[at]) else { return target[width] };
        let mut leaving: Option<(f64, usize, usize)> = None;
        for (at, row) in rows.iter().enumerate() {
            if row[column] > TINY {
                let candidate = (row[width] / row[column], bases[at], at);
                if leaving.is_none_or(|least| candidate < least) {
                    leaving = Some(candidate);
                }
            }
        }
        let (_, _, at) = leaving.expect("bounded by the number of contents");
        let pivot = rows[at][column];
        rows[at][column] = 1.0;
        rows[at].iter_mut().for_each(|entry| *entry /= pivot);
        let pivot_row = rows[at].clone();
        let others = rows.iter_mut().enumerate().filter(|(number, _)| *number != at).map(|(_, row)| row);
        for row in others.chain([&mut target]) {
            let factor = std::mem::take(&mut row[column]);
            for (entry, pivot) in row.iter_mut().zip(&pivot_row) {
                *entry -= factor * pivot;
            }
        }
        std::mem::swap(&mut columns[column], &mut bases[at]);
    }
}
