//! The map of a process: its resident pages in the order of their addresses, divided into parts of equal size, with
//! each part's contents.

use super::survey::{Region, Survey, Surveyed};
use pagefold_engine::sampling::census::density::Density;
use pagefold_engine::units::{Vpn, index};
use pagefold_procmem::maps::RegionKind;

/// We divide a map into at most this many parts. If a sample is too small for that, we join parts, but keep about
/// [`PARTS_LEAST`].
const PARTS: u64 = 160;
const PARTS_LEAST: usize = 10;
/// A part should be so large that if all its pages are duplicates, the sample finds about this many pairs of equal
/// pages.
const PAIRS_A_PART: f64 = 8.0;

/// A part of a map, as the survey found it.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub first: Vpn,
    /// Index of the region in which the part begins.
    region: u32,
    /// Pages that only this process maps.
    private: u64,
    pub shared: u64,
    pub merged: u64,
}

/// Divides a process's pages into parts. `regions` have the runs of its private pages, `others` are its other pages,
/// each with the index of its region.
pub fn parts(regions: &[Region], others: impl Iterator<Item = (Vpn, u32)>) -> Vec<Part> {
    let mut runs: Vec<(Vpn, u32, u32, bool)> = others.map(|(page, region)| (page, 1, region, false)).collect();
    for (number, region) in (0..).zip(regions) {
        runs.extend(region.runs.iter().map(|&(first, pages)| (first, pages, number, true)));
    }
    runs.sort_unstable_by_key(|run| run.0);
    let size = runs.iter().map(|run| u64::from(run.1)).sum::<u64>().div_ceil(PARTS).max(1);
    let mut parts: Vec<Part> = Vec::new();
    let mut room = 0;
    for (mut first, pages, region, is_private) in runs {
        let mut left = u64::from(pages);
        while left > 0 {
            if room == 0 {
                parts.push(Part { first, region, private: 0, shared: 0, merged: 0 });
                room = size;
            }
            let taken = left.min(room);
            if let (Some(part), true) = (parts.last_mut(), is_private) {
                part.private += taken;
            }
            left -= taken;
            room -= taken;
            first = first + taken;
        }
    }
    parts
}

/// The index of the part with this page.
pub fn part_of(parts: &[Part], page: Vpn) -> Option<usize> {
    parts.partition_point(|part| part.first <= page).checked_sub(1)
}

/// What a part contains, as fractions of its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    pub merged: f64,
    pub zero: f64,
    pub duplicate: f64,
    pub fork_shared: f64,
}

/// Neighbouring parts of a process that are of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    pub first: Vpn,
    pub kind: RegionKind,
    pub parts: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Map {
    pub parts: Vec<Shares>,
    pub stretches: Vec<Stretch>,
}

impl Map {
    /// The map of a process, given the densities of its parts.
    pub fn of(survey: &Survey, process: &Surveyed, densities: &[Density], fraction: f64) -> Self {
        let private: u64 = process.parts.iter().map(|part| part.private).sum();
        let join = if fraction < 1.0 {
            let pairs = private as f64 * fraction * fraction;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; saturates")]
            let parts = (pairs / PAIRS_A_PART) as usize;
            process.parts.len().div_ceil(parts.max(PARTS_LEAST)).max(1)
        } else {
            1
        };
        let mut map = Self::default();
        for (parts, densities) in process.parts.chunks(join).zip(densities.chunks(join)) {
            map.parts.push(shares(parts, densities));
            let first = parts[0];
            let cell = process.regions[index(first.region)].cell;
            let kind = survey.kinds[index(cell)];
            match map.stretches.last_mut() {
                Some(stretch) if stretch.kind == kind => stretch.parts += 1,
                _ => map.stretches.push(Stretch { first: first.first, kind, parts: 1 }),
            }
        }
        map
    }
}

fn shares(parts: &[Part], densities: &[Density]) -> Shares {
    let private: u64 = parts.iter().map(|part| part.private).sum();
    let shared: u64 = parts.iter().map(|part| part.shared).sum();
    let merged: u64 = parts.iter().map(|part| part.merged).sum();
    let read: f64 = densities.iter().map(|density| density.read).sum();
    let whole = (private + shared + merged).max(1) as f64;
    let a_page = private as f64 / read.max(1.0) / whole;
    Shares {
        merged: merged as f64 / whole,
        zero: densities.iter().map(|density| density.zero).sum::<f64>() * a_page,
        duplicate: densities.iter().map(|density| density.duplicate).sum::<f64>() * a_page,
        fork_shared: shared as f64 / whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(runs: &[(u64, u32)]) -> Region {
        Region {
            number: 0,
            cell: 0,
            is_read: true,
            runs: runs.iter().map(|&(first, pages)| (Vpn(first), pages)).collect(),
        }
    }

    #[test]
    fn parts_have_equal_size_and_leave_gaps_out() {
        let regions = [region(&[(100, 200), (1_000, 60)]), region(&[(5_000, 50)])];
        let parts = parts(&regions, (0..10).map(|page| (Vpn(2_000 + page), 0)));
        // The parts have two of the 320 pages each.
        assert_eq!(parts.len(), 160);
        assert!(
            parts.iter().enumerate().all(|(at, part)| part.private == if (130..135).contains(&at) { 0 } else { 2 })
        );
        assert_eq!((parts[0].first, parts[100].first, parts[159].first), (Vpn(100), Vpn(1_000), Vpn(5_048)));
        assert_eq!((parts[159].region, parts[0].region), (1, 0));
        assert_eq!([99, 101, 102, 5_049].map(|page| part_of(&parts, Vpn(page))), [None, Some(0), Some(1), Some(159)]);
    }

    #[test]
    fn shares_add_up() {
        let part = Part { first: Vpn(0), region: 0, private: 50, shared: 25, merged: 25 };
        let density = Density { read: 10.0, zero: 2.0, duplicate: 4.0 };
        let expected = Shares { merged: 0.25, zero: 0.1, duplicate: 0.2, fork_shared: 0.25 };
        let found = shares(&[part], &[density]);
        let pairs =
            [(found.zero, expected.zero), (found.duplicate, expected.duplicate), (found.merged, expected.merged)];
        assert!(pairs.iter().all(|(found, expected)| (found - expected).abs() < 1e-9), "{found:?}");
        assert!(shares(&[part], &[Density::default()]).zero.abs() < 1e-9);
    }
}
