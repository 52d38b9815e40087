//! The report of what is known and what happens next.

use super::Engine;
use crate::governor::WINDOW_NS;
use crate::ledger::Ledger;
use crate::region::{LeaveAlone, Region, Stage};
use crate::report::{EngineReport, Kind, KindTotal, LevelTotal, Next, RegionReport};
use crate::sampling::ladder::{matures_ns, samples_wanted, wants_more};
use crate::units::{Bytes, Pages, count};

/// Builds the report.
pub(super) fn report(engine: &Engine) -> EngineReport {
    let (table, ledger, pace) = (&engine.table, &engine.ledger, engine.pace());
    let resident: u64 = table.iter().map(|region| region.view.resident.0).sum();
    let sampled: u64 = table.iter().map(|region| region.survey.tally.sampled).sum();
    let fraction = sampled as f64 / resident.max(1) as f64;
    let regions: Vec<RegionReport> = table.iter().map(|region| of_region(engine, region, fraction)).collect();
    let total = |wanted: &dyn Fn(&RegionReport) -> bool| {
        let chosen = regions.iter().filter(|region| wanted(region));
        chosen.fold((0, Pages(0)), |(count, pages), region| (count + 1, pages + region.resident))
    };
    let kinds = Kind::ALL.map(|kind| {
        let (regions, resident) = total(&|region| region.kind == kind);
        KindTotal { kind, regions, resident }
    });
    let levels = (1..=engine.ladder.levels()).rev().map(|level| {
        let (regions, resident) = total(&|region| region.level == level);
        let share = engine.ladder.share(level, pace, &engine.config);
        LevelTotal { level, share, regions, resident }
    });
    EngineReport {
        governor: engine.config.governor,
        in_force: engine.governor,
        top_share: pace.top,
        used_share: engine.budget.spent_ns(WINDOW_NS) as f64 / WINDOW_NS as f64,
        rounds: engine.ladder.rounds(),
        busy: engine.is_busy(),
        paused: engine.paused,
        drives_ksm: engine.snapshot.ksm.ours,
        foreign_marks: engine.snapshot.foreign_marks,
        memory: engine.snapshot.memory,
        reserve: engine.reserve.clone(),
        saving: engine.saving().cloned(),
        may_return: engine.returns_at_worst(),
        saved_machine: ledger.saved_machine,
        exited: ledger.exited,
        marked: table.iter().map(Region::marked_resident).sum(),
        index_entries: engine.index.len(),
        index_bytes: Bytes(count(engine.index.bytes())),
        kinds: kinds.to_vec(),
        levels: levels.collect(),
        ledger: Ledger { curve: Vec::new(), ..ledger.clone() },
        placement: engine.placer.summary().cloned(),
        regions,
    }
}

fn of_region(engine: &Engine, region: &Region, fraction: f64) -> RegionReport {
    let estimate = region.survey.estimate(region.view.resident, fraction);
    let exact = matches!(region.stage, Stage::Judged(_));
    let known = region.extents.values().fold((0_u64, 0_u64), |(resident, duplicate), extent| {
        (resident + u64::from(extent.resident), duplicate + u64::from(extent.duplicate))
    });
    let ratio = if exact { known.1 as f64 / known.0.max(1) as f64 } else { estimate.ratio };
    let range = if exact { (ratio, ratio) } else { (estimate.floor, estimate.ceiling) };
    let kind = kind(engine, region, ratio, exact, estimate.ceiling);
    let cow_ratio = region.usage.cow_breaks.ratio;
    RegionReport {
        owner: region.view.owner,
        domain: region.view.domain,
        first: region.view.first,
        pages: region.view.pages,
        resident: region.view.resident,
        level: region.level,
        kind,
        next: next(engine, region, kind),
        age_seconds: (engine.snapshot.now_ns - region.seen_ns) as f64 / 1e9,
        duplicate_ratio: ratio,
        duplicate_range: range,
        exact,
        taken_back: is_taken_back(region),
        relieved: is_relieved(region),
        short: region.hold.is_short(),
        full: region.hold.full(),
        cow_ratio: (cow_ratio.0 > 0).then(|| cow_ratio.fraction()),
        marked: region.marked_resident(),
        expected: region.marks.spans.iter().map(|mark| mark.duplicate).sum(),
        other: region.marks.spans.iter().map(|mark| Pages(mark.resident.0.saturating_sub(mark.duplicate.0))).sum(),
    }
}

fn is_cow_broken(region: &Region) -> bool {
    region.hold.reason() == Some(LeaveAlone::CowBroken)
}

/// Whether it is left alone for a reason that passes.
fn is_passing(region: &Region) -> bool {
    is_cow_broken(region) || is_taken_back(region) || is_relieved(region)
}

fn is_relieved(region: &Region) -> bool {
    region.hold.reason() == Some(LeaveAlone::Relieved)
}

fn is_taken_back(region: &Region) -> bool {
    region.hold.reason() == Some(LeaveAlone::TakenBack)
}

fn kind(engine: &Engine, region: &Region, ratio: f64, exact: bool, ceiling: f64) -> Kind {
    let threshold = engine.config.threshold().fraction();
    if is_cow_broken(region) || region.survey.is_volatile(&engine.config) {
        Kind::CowBroken
    } else if region.young {
        Kind::ShortLived
    } else if ratio >= threshold || region.marked_resident() > Pages(0) {
        let young = engine.snapshot.now_ns < matures_ns(region, engine.pace(), &engine.config);
        if young { Kind::ShortLived } else { Kind::StaticallyDuplicated }
    } else if exact || ceiling < 2.0 * threshold || !wants_more(region, &engine.config) {
        Kind::Sparse
    } else {
        Kind::Unknown
    }
}

fn next(engine: &Engine, region: &Region, kind: Kind) -> Next {
    let matures = matures_ns(region, engine.pace(), &engine.config);
    let waits = |until_ns: u64| Next::Wait { ns: until_ns - engine.snapshot.now_ns };
    match region.stage {
        _ if region.hold.is_refused() => Next::Nothing,
        _ if region.hold.is_left_alone() => Next::Stay,
        _ if is_passing(region) && region.hold.ends_ns() > engine.snapshot.now_ns => waits(region.hold.ends_ns()),
        Stage::Examine(cursor) => Next::Read { read: Pages(cursor.0.saturating_sub(region.view.first.0)) },
        _ if kind == Kind::ShortLived && matures > engine.snapshot.now_ns => waits(matures),
        Stage::Judged(_) => next_of_judged(engine, region),
        Stage::Survey if wants_more(region, &engine.config) => {
            let needed = Pages(samples_wanted(region, &engine.config));
            Next::Sample { sampled: Pages(region.survey.tally.sampled), needed }
        }
        Stage::Survey => Next::Watch,
    }
}

fn next_of_judged(engine: &Engine, region: &Region) -> Next {
    if let Some(wave) = engine.marker.waits(region, &engine.config).filter(|_| !region.hold.is_short()) {
        let rested_ns = engine.scheduler.idle_ns(engine.snapshot.now_ns);
        let price_ns = engine.pace().price_ns;
        return Next::Defer { wave, price_ns, ns: wave.rest_ns(price_ns).saturating_sub(rested_ns) };
    }
    if region.changed {
        Next::Mark
    } else if region.level > 1 && !region.marks.spans.is_empty() && engine.is_merging() {
        Next::Merge
    } else {
        Next::Watch
    }
}
