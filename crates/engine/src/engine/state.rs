//! Collects all figures that we show to people.

use super::Engine;
use crate::config::Only;
use crate::decision::{Kind, Verb};
use crate::governor::WINDOW_NS;
use crate::ledger::METADATA_BYTES_PER_PAGE;
use crate::marking::marker::marked_resident;
use crate::region::Region;
use crate::reserve::RoomState;
use crate::state::{
    Activity, CopyTotals, Incidents, IndexState, KindTotal, LevelTotal, LimitState, MemoryState, MemoryTotal,
    MoveTotals, OwnerTotal, RegionState, RegionTotals, ReserveState, State, VerbTotal, Work,
};
use crate::units::{PAGE_BYTES, Pages, count};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Next steps, in the order in which they happen.
const VERBS: [Verb; 7] = [Verb::Read, Verb::Mark, Verb::Merge, Verb::Sample, Verb::Wait, Verb::Watch, Verb::Leave];

pub(super) fn state(engine: &Engine) -> State {
    let ledger = &engine.ledger;
    let regions = regions(engine);
    let totals = totals(engine, &regions);
    let mut all = MemoryTotal::default();
    let mut owners: BTreeMap<_, OwnerTotal> = BTreeMap::new();
    let mut domains: BTreeMap<_, MemoryTotal> = BTreeMap::new();
    for region in &regions {
        let memory = region.memory(engine.config.mechanism);
        all += memory;
        *domains.entry(region.domain).or_default() += memory;
        let owner = owners.entry(region.owner).or_default();
        owner.regions += 1;
        owner.memory += memory;
    }
    // Even while the saving isn't known, the latest count shows roughly how much the processes would hold.
    let saving = engine.saving.latest();
    if let Some(saving) = saving {
        for &owner in saving.parts.keys() {
            owners.entry(owner).or_default().saved_bytes = saving.of(owner).bytes().0;
        }
    }
    for (owner, total) in &mut owners {
        let resident_bytes = total.memory.resident_bytes;
        let zeros = saving.map_or(Pages(0), |saving| saving.zeros_of(*owner));
        let most_bytes = resident_bytes + zeros.bytes().0;
        let unmerged = engine.holdings.unmerged(*owner);
        total.memory.unmerged_bytes = unmerged.map_or(most_bytes, |pages| most_bytes.min(pages.bytes().0));
        all.unmerged_bytes += total.memory.unmerged_bytes;
    }
    let others: Pages = regions.iter().map(|region| region.other).sum();
    let merges_zeros = engine.config.only == Only::Zeros && engine.by_marks();
    State {
        now_ns: ledger.now_ns,
        activity: activity(engine, &totals),
        memory: memory(engine, all),
        other_bytes: merges_zeros.then_some(others.bytes().0),
        foreign_marks: engine.snapshot.foreign_marks,
        copies: CopyTotals {
            copied_bytes: ledger.copies.total.bytes().0,
            copied_worst_day_bytes: ledger.copies.worst_day.bytes().0,
        },
        reserve: reserve(engine, &regions),
        incidents: Incidents { splits: ledger.splits, collapsed: ledger.collapsed, refused_spans: ledger.refused },
        work: work(engine),
        requests: (!engine.by_marks()).then_some(ledger.requests),
        placement: engine.placer.summary().cloned(),
        moves: MoveTotals {
            moved_pages: ledger.moved.0,
            refused_pages: ledger.not_moved.0,
            move_seconds: seconds(ledger.move_ns),
        },
        totals,
        owners,
        domains,
        regions,
        decisions: engine.decisions().iter().copied().collect(),
    }
}

fn activity(engine: &Engine, totals: &RegionTotals) -> Activity {
    Activity {
        seconds: seconds(engine.ledger.now_ns - engine.ledger.began_ns),
        governor: engine.config.governor,
        in_force: engine.spending.governor,
        allowed_share: engine.pace().top,
        used_share: used_share(engine),
        paused: engine.spending.paused,
        busy: engine.is_busy(),
        done_in_seconds: done_in(engine, totals),
        ksm_driven: engine.snapshot.ksm.ours,
    }
}

/// We compute the used share of a core over at least this time, nanoseconds.
const SHORTEST_NS: u64 = 1_000_000_000;

/// The share of a core used over the last ten seconds, or since the run began if that's less.
fn used_share(engine: &Engine) -> f64 {
    let up_ns = engine.ledger.now_ns - engine.ledger.began_ns;
    engine.spending.total.spent_ns(WINDOW_NS) as f64 / up_ns.clamp(SHORTEST_NS, WINDOW_NS) as f64
}

fn done_in(engine: &Engine, totals: &RegionTotals) -> Option<f64> {
    if engine.spending.paused || engine.ledger.pages_read == 0 {
        return None;
    }
    let of_verb = |verb| totals.of_verb(verb).map_or(Pages(0), |total| total.resident);
    let unread = of_verb(Verb::Read);
    let mut work_ns = unread.0 * engine.ladder.run_page_ns();
    if engine.by_marks() {
        // We assume that we'll mark all that we're reading.
        let marked = marked_resident(&engine.table);
        let all: Pages = engine.table.iter().map(|region| region.view.resident).sum();
        let unmarked = (unread + of_verb(Verb::Mark)).min(all.saturating_sub(marked));
        work_ns += engine.ksmd.scheduler.left_ns(&engine.snapshot.ksm, marked, unmarked);
    }
    let share = engine.pace().top.fraction();
    if work_ns == 0 {
        return None;
    }
    Some(seconds(work_ns) / share.max(1e-4))
}

fn memory(engine: &Engine, all: MemoryTotal) -> MemoryState {
    let ledger = &engine.ledger;
    let saving = engine.saving();
    MemoryState {
        available_bytes: engine.snapshot.memory.available.bytes().0,
        resident_bytes: all.resident_bytes,
        unmerged_bytes: all.unmerged_bytes,
        saved_bytes: saving.map(|saving| saving.saved.bytes().0),
        saved_age_seconds: saving.map(|saving| seconds(ledger.now_ns - saving.counted_ns)),
        may_return_bytes: engine.returns_at_worst().bytes().0,
        saved_machine_bytes: ledger.saved_machine.bytes().0,
        exited_bytes: ledger.exited.bytes().0,
        marked_bytes: all.marked_bytes,
        metadata_bytes: all.marked_bytes / PAGE_BYTES * METADATA_BYTES_PER_PAGE,
    }
}

fn reserve(engine: &Engine, regions: &[RegionState]) -> ReserveState {
    let machine = *engine.room.reserve.machine();
    let likely = engine.room.reserve.likely();
    let mut state = ReserveState {
        likely_bytes: likely.bytes().0,
        headroom_bytes: machine.left.saturating_sub(likely).bytes().0,
        headroom_at_worst_bytes: machine.left.saturating_sub(machine.worst).bytes().0,
        taken_back_bytes: engine.ledger.taken_back.bytes().0,
        machine,
        full: regions.iter().filter_map(RegionState::full).collect(),
        ..ReserveState::default()
    };
    for (&key, &room) in engine.room.reserve.limits() {
        match room.state {
            RoomState::Enough => {}
            RoomState::Overcommitted => state.limits_overcommitted += 1,
            RoomState::Short => state.limits_short += 1,
        }
        if room.state != RoomState::Enough || state.full.contains(&key) {
            state.limits.push(LimitState { key, room });
        }
    }
    state.limits.sort_by_key(|limit| (Reverse(limit.room.state), limit.room.left));
    state
}

fn work(engine: &Engine) -> Work {
    let ledger = &engine.ledger;
    Work {
        cpu_seconds: ledger.cost,
        pages_read: ledger.pages_read,
        scans: engine.scans(),
        stops: ledger.stops,
        longest_stop_us: ledger.longest_stop_ns as f64 / 1e3,
        total_stop_us: ledger.total_stop_ns as f64 / 1e3,
        stop_lengths: ledger.stop_lengths,
        rounds: engine.ladder.rounds(),
        index: IndexState { contents: engine.contents.index.len(), bytes: count(engine.contents.index.bytes()) },
    }
}

fn totals(engine: &Engine, regions: &[RegionState]) -> RegionTotals {
    let pace = engine.pace();
    let mut kinds = Kind::ALL.map(|kind| KindTotal { kind, regions: 0, resident: Pages(0) });
    let mut next = VERBS.map(|verb| VerbTotal { verb, regions: 0, resident: Pages(0), soonest_seconds: None }).to_vec();
    let mut levels = Vec::new();
    for level in (1..=engine.ladder.levels()).rev() {
        let share = engine.ladder.share(level, pace, &engine.config);
        levels.push(LevelTotal { level, share, regions: 0, resident: Pages(0) });
    }
    for region in regions {
        if let Some(total) = kinds.iter_mut().find(|total| total.kind == region.kind) {
            total.regions += 1;
            total.resident += region.resident;
        }
        if let Some(total) = levels.iter_mut().find(|total| total.level == region.level) {
            total.regions += 1;
            total.resident += region.resident;
        }
        if let Some(total) = next.iter_mut().find(|total| total.verb == region.decision.verb) {
            total.regions += 1;
            total.resident += region.resident;
            let left = region.decision.seconds_left(engine.ledger.now_ns);
            total.soonest_seconds = left.into_iter().chain(total.soonest_seconds).min_by(f64::total_cmp);
        }
    }
    next.retain(|total| total.regions > 0);
    RegionTotals { kinds: kinds.to_vec(), levels, next }
}

fn regions(engine: &Engine) -> Vec<RegionState> {
    let sampled = engine.table.sampled();
    engine.table.iter().map(|region| of_region(engine, region, sampled)).collect()
}

fn of_region(engine: &Engine, region: &Region, sampled: f64) -> RegionState {
    let evidence = engine.evidence(region, sampled);
    let cow_ratio = region.resting();
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
        age_seconds: seconds(engine.snapshot.now_ns - region.seen_ns),
        duplicate_ratio: evidence.ratio,
        duplicate_range: evidence.range,
        exact: evidence.exact,
        cow_ratio: (cow_ratio.0 > 0).then(|| cow_ratio.fraction()),
        marked: region.marked_resident(),
        expected: marks.duplicate,
        other,
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
