//! Collects all figures that we show to people.

use super::Engine;
use crate::decision::Kind;
use crate::governor::WINDOW_NS;
use crate::ledger::Ledger;
use crate::region::Region;
use crate::state::{KindTotal, LevelTotal, RegionState, State};
use crate::units::{Bytes, Pages, count};

pub(super) fn state(engine: &Engine) -> State {
    let table = &engine.table;
    let ledger = &engine.ledger;
    let pace = engine.pace();
    let sampled = table.sampled();
    let mut kinds = Kind::ALL.map(|kind| KindTotal { kind, regions: 0, resident: Pages(0) });
    let mut levels = Vec::new();
    for level in (1..=engine.ladder.levels()).rev() {
        let share = engine.ladder.share(level, pace, &engine.config);
        levels.push(LevelTotal { level, share, regions: 0, resident: Pages(0) });
    }
    let mut regions = Vec::new();
    for region in table.iter() {
        let region = of_region(engine, region, sampled);
        for total in kinds.iter_mut().filter(|total| total.kind == region.kind) {
            total.regions += 1;
            total.resident += region.resident;
        }
        for total in levels.iter_mut().filter(|total| total.level == region.level) {
            total.regions += 1;
            total.resident += region.resident;
        }
        regions.push(region);
    }
    State {
        governor: engine.config.governor,
        in_force: engine.spending.governor,
        top_share: pace.top,
        used_share: engine.spending.total.spent_ns(WINDOW_NS) as f64 / WINDOW_NS as f64,
        rounds: engine.ladder.rounds(),
        busy: engine.is_busy(),
        paused: engine.spending.paused,
        drives_ksm: engine.snapshot.ksm.ours,
        foreign_marks: engine.snapshot.foreign_marks,
        memory: engine.snapshot.memory,
        reserve: engine.room.reserve.clone(),
        saving: engine.saving().cloned(),
        may_return: engine.returns_at_worst(),
        saved_machine: ledger.saved_machine,
        exited: ledger.exited,
        marked: table.iter().map(Region::marked_resident).sum(),
        index_entries: engine.contents.index.len(),
        index_bytes: Bytes(count(engine.contents.index.bytes())),
        kinds: kinds.to_vec(),
        levels,
        ledger: Ledger { curve: Vec::new(), ..ledger.clone() },
        placement: engine.placer.summary().cloned(),
        regions,
    }
}

fn of_region(engine: &Engine, region: &Region, sampled: f64) -> RegionState {
    let evidence = engine.evidence(region, sampled);
    let cow_ratio = region.usage.cow_breaks.ratio;
    let marks = region.marks.counts();
    let mut other = Pages(0);
    for mark in &region.marks.spans {
        other += mark.resident.saturating_sub(mark.duplicate);
    }
    RegionState {
        owner: region.view.owner,
        domain: region.view.domain,
        first: region.view.first,
        pages: region.view.pages,
        resident: region.view.resident,
        level: region.life.level(),
        kind: evidence.kind,
        decision: region.decision,
        age_seconds: (engine.snapshot.now_ns - region.seen_ns) as f64 / 1e9,
        duplicate_ratio: evidence.ratio,
        duplicate_range: evidence.range,
        exact: evidence.exact,
        cow_ratio: (cow_ratio.0 > 0).then(|| cow_ratio.fraction()),
        marked: region.marked_resident(),
        expected: marks.duplicate,
        other,
    }
}
