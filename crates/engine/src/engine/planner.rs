//! The two planners: [`marks`] for ksmd, [`pairs`] for merging on request.

mod marks;
mod pairs;

use super::Engine;
use crate::host::{Actions, Mechanism, PageSample};
use crate::region::Region;
use crate::units::Pages;

/// Plans how equal pages get merged: by ksmd or on request. The constants of both are in [`crate::mechanism`].
pub(super) trait Planner {
    /// Records a page that we've read, merged or private. `duplicate` means that other pages have its content. Returns
    /// whether merging the page would save memory.
    fn record_page(&self, engine: &mut Engine, slot: u32, sample: &PageSample, duplicate: bool) -> bool;

    /// The actions of this cycle, once all its samples are judged.
    fn actions(&self, engine: &mut Engine) -> Actions;

    /// How many of a region's pages are or may be merged, besides the ones that wait for unmarking.
    fn mergeable(&self, region: &Region) -> Pages;

    /// How many more pages a region's process needs at worst, if it writes to all its merged pages.
    fn may_return(&self, region: &Region) -> Pages;

    /// Called for a region that we've read whole, once its cgroup has headroom again.
    fn judge_again(&self, region: &mut Region, now_ns: u64, top: usize);
}

pub(super) fn of(mechanism: Mechanism) -> &'static dyn Planner {
    match mechanism {
        Mechanism::Ksmd => &marks::Marks,
        Mechanism::Request => &pairs::Pairs,
    }
}
