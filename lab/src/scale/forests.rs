//! nuKSM's forests (claim N4; sections 3.3, 4.3 and 5.4 of the thesis). `2X` pages in pairs make `X` stable nodes; then
//! we add unique pages. By the number of trees, we measure the stable nodes that each unique page is compared with
//! (figure 5.5a) and the duration of the scan (figure 5.5b).

use pagefold_engine::host::{Actions, Host, ScanOrder};
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Forest, Knobs, Mapping, Process, SimHost};
use serde::Serialize;

const UNIQUE_PAGES: u64 = 65_536;
const STEP_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct ForestPoint {
    /// Stable nodes (`X`).
    pub nodes: u64,
    pub trees: u16,
    /// Comparisons of a page with stable nodes, on average.
    pub stable: f64,
    /// Comparisons of a page with pages in unstable trees, on average.
    pub unstable: f64,
    /// `log2(1 + X / trees)`: comparisons of a full search in a balanced tree.
    pub law: f64,
    /// Modelled CPU time of a scan of all pages, seconds.
    pub round_seconds: f64,
    /// Pairs that the scan didn't merge.
    pub lost: u64,
}

impl ForestPoint {
    /// Difference between the measured comparisons and the law.
    pub fn deviation(&self) -> f64 {
        self.stable - self.law
    }

    pub fn largest_deviation(points: &[Self]) -> f64 {
        let mut largest = 0.0_f64;
        for point in points {
            largest = largest.max(point.deviation().abs());
        }
        largest
    }
}

pub fn forest(nodes: u64, trees: u16) -> ForestPoint {
    let knobs = Knobs { smart_scan: false, merge_any: true, forest: Forest::Checksum { trees }, ..Knobs::default() };
    let mut sim = SimHost::new(1, Costs::default(), knobs);
    for _ in 0..2 {
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(nodes), Fill::Series(1))));
    }
    scan(&mut sim);
    scan(&mut sim);
    let lost = nodes - sim.saved().0;
    sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(UNIQUE_PAGES), Fill::Random)));
    scan(&mut sim);
    let before = sim.counts();
    let spent_ns = sim.cost().ksmd_ns;
    scan(&mut sim);
    let after = sim.counts();
    let searches = (after.searches - before.searches) as f64;
    ForestPoint {
        nodes,
        trees,
        stable: (after.stable - before.stable) as f64 / searches,
        unstable: (after.unstable - before.unstable) as f64 / searches,
        law: (1.0 + nodes as f64 / f64::from(trees)).log2(),
        round_seconds: (sim.cost().ksmd_ns - spent_ns) as f64 / 1e9,
        lost,
    }
}

fn scan(sim: &mut SimHost) {
    let Ok(_) = sim.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() });
    while sim.is_scanning() {
        let Ok(()) = sim.wait(STEP_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_logarithmic_and_no_merge_is_lost() {
        for trees in [1, 3, 10, 100, 1_800] {
            let point = forest(10_240, trees);
            assert!(point.deviation().abs() < 0.6, "{point:?}");
            assert_eq!(point.lost, 0);
        }
    }
}
