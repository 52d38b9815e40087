//! Plans marks, and ksmd's scans of them.

use super::Planner;
use crate::engine::{Engine, Ksmd};
use crate::host::{Actions, Change, PageSample, ScanOrder, Snapshot};
use crate::marking::marker::{Means, marked_resident};
use crate::merging::Inputs;
use crate::region::{Event, Region};
use crate::sampling::ladder::is_foreground;
use crate::units::Pages;

#[derive(Debug)]
pub(super) struct Marks;

impl Planner for Marks {
    /// Nothing to do: we mark a region once we've read all of it.
    fn record_page(&self, _: &mut Engine, _: u32, _: &PageSample, duplicate: bool) -> bool {
        duplicate
    }

    fn actions(&self, engine: &mut Engine) -> Actions {
        engine.take_back();
        // We ask before `unmark` takes the next span from its queue, because ksmd must wait for that span, too.
        let hold = engine.may_not_merge();
        let unmark = engine.unmark();
        if !engine.room.reserve.is_short() {
            // We request scans of old marks before we plan new ones, so that a small batch of new marks can share these
            // scans.
            engine.refresh_marks();
        }
        if engine.snapshot.foreign_marks {
            // If ksmd went on now, it would merge memory of two trust domains.
            let scan = engine.ksmd.scheduler.suspend(&engine.snapshot.ksm);
            return Actions { unmark, stop: engine.spending.allowance.stop_size(), scan, ..Actions::default() };
        }
        let mark = engine.mark();
        let scan = engine.order_scan(mark.is_empty(), hold);
        let moves = engine.moves();
        Actions { mark, unmark, stop: engine.spending.allowance.stop_size(), scan, moves, ..Actions::default() }
    }

    fn mergeable(&self, region: &Region) -> Pages {
        region.mergeable()
    }

    fn may_return(&self, region: &Region) -> Pages {
        region.marks.counts().duplicate
    }

    /// We needn't read the region again, because we still know its extents.
    fn judge_again(&self, region: &mut Region, _: u64, _: usize) {
        region.life.advance(Event::Reopen);
    }
}

impl Engine {
    /// The span to unmark now, if there is one.
    pub(super) fn unmark(&mut self) -> Vec<Change> {
        let allowance = &mut self.spending.allowance;
        let change = self.ksmd.marker.unmarking.next(&self.table, self.snapshot.now_ns, allowance);
        if change.is_some() {
            self.room.reserve.expect_own_copies(self.snapshot.now_ns);
        }
        Vec::from_iter(change)
    }

    /// Has ksmd scan marked memory again if enough of it has changed.
    fn refresh_marks(&mut self) {
        let pace = self.pace();
        let Snapshot { now_ns, ksm, .. } = &self.snapshot;
        let Ksmd { marker, scheduler } = &mut self.ksmd;
        marker.refresh(&mut self.table, *now_ns, ksm.broken, scheduler, pace);
    }

    /// Whether marks should wait for regions that we're still reading. They don't wait for regions that the host can't
    /// read now.
    fn waits_for_reading(&self) -> bool {
        if !self.plan.reading.foreground {
            return false;
        }
        let mut unfinished = self.table.iter().filter(|region| is_foreground(region, &self.config)).peekable();
        unfinished.peek().is_none() || unfinished.any(|region| !region.survey.is_out_of_reach())
    }

    /// The spans to mark now.
    fn mark(&mut self) -> Vec<Change> {
        let pace = self.pace();
        let now_ns = self.snapshot.now_ns;
        let more = self.waits_for_reading();
        let Ksmd { marker, scheduler } = &mut self.ksmd;
        let allowance = &mut self.spending.allowance;
        let means = Means { scheduler, allowance, headroom: &mut self.room.headroom };
        marker.mark(&mut self.table, now_ns, more, pace, means, &self.config)
    }

    /// The order for ksmd. `none_marked` means that we mark nothing in this cycle, and `hold` that nothing may be
    /// merged now.
    fn order_scan(&mut self, none_marked: bool, hold: bool) -> ScanOrder {
        let pace = self.pace();
        let inputs = Inputs {
            now_ns: self.snapshot.now_ns,
            ksm: &self.snapshot.ksm,
            ksmd_ns: self.snapshot.cost.ksmd_ns,
            marked: marked_resident(&self.table),
            settled: none_marked && !self.waits_for_reading() && !self.ksmd.marker.is_holding(),
            pace,
            room_ns: self.spending.total.room_ns(pace),
            hold,
            limits_read_ns: self.room.headroom.read_ns(),
        };
        self.ksmd.scheduler.order(&inputs)
    }
}
