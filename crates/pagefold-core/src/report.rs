//! What is known and what happens next, for people: `status`, `explain` and metrics are views of it.

use crate::config::Config;
use crate::governor::{Governor, Pace, WINDOW_NS};
use crate::host::KsmView;
use crate::keys::{DomainKey, OwnerKey};
use crate::ledger::Ledger;
use crate::marking::lifetimes::Lifetimes;
use crate::placement::inventory::PlacementSummary;
use crate::region::table::RegionTable;
use crate::region::{LeaveAlone, Region, Stage};
use crate::sampling::ladder::{Ladder, matures_ns, samples_wanted, wants_more};
use crate::units::{Bytes, Pages, Permyriad, Vpn, as_bytes, as_fraction, count};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a region (UKSM section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Not sampled enough yet.
    Unknown,
    /// Few duplicates.
    Sparse,
    /// Its merges do not last, because its pages are written.
    CowBroken,
    /// Too young to know whether it stays, or of a family whose regions ended young.
    ShortLived,
    /// Duplicates that stay: worth merging.
    StaticallyDuplicated,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::StaticallyDuplicated, Self::Sparse, Self::CowBroken, Self::ShortLived, Self::Unknown];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Sparse => "sparse",
            Self::CowBroken => "COW-broken",
            Self::ShortLived => "short-lived",
            Self::StaticallyDuplicated => "statically duplicated",
        })
    }
}

/// What happens to a region next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
pub enum Next {
    /// It is sampled until there is enough evidence.
    Sample {
        /// Samples taken so far, pages.
        sampled: Pages,
        /// Samples that its level asks for, pages.
        needed: Pages,
    },
    /// It is being read whole.
    Read {
        /// Pages of its range read so far.
        read: Pages,
    },
    /// Its duplicates wait for marks.
    Mark,
    /// Marked: ksmd is merging it.
    Merge,
    /// Sampled thinly for what changes.
    Watch,
    /// Left alone for some time, and then judged again.
    Wait {
        /// How long it is still left alone, nanoseconds.
        ns: u64,
    },
    /// Left alone: its process refused to be marked.
    Nothing,
}

/// One region.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegionReport {
    /// Its process.
    pub owner: OwnerKey,
    /// Its trust domain.
    pub domain: DomainKey,
    /// Its first page.
    pub first: Vpn,
    /// Its length.
    pub pages: Pages,
    /// Anonymous pages present in it.
    pub resident: Pages,
    /// Its level, from 1.
    pub level: usize,
    /// Its kind.
    pub kind: Kind,
    /// What happens next.
    pub next: Next,
    /// Seconds since it was first seen.
    pub age_seconds: f64,
    /// The estimated share of duplicates, 0 to 1. Exact if the region was read whole.
    pub duplicate_ratio: f64,
    /// The 95 % range of that estimate.
    pub duplicate_range: (f64, f64),
    /// Whether it was read whole, so that the ratio is exact.
    pub exact: bool,
    /// The share of its merged pages that are written and hold the same content again within the horizon.
    pub cow_ratio: Permyriad,
    /// Resident pages in its marked spans.
    pub marked: Pages,
    /// Duplicates expected among them.
    pub expected: Pages,
    /// Duplicates not marked because another trust domain holds contents of the same extents.
    pub withheld: Pages,
}

/// How much memory is of one kind.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct KindTotal {
    /// The kind.
    pub kind: Kind,
    /// Regions.
    pub regions: usize,
    /// Resident pages.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// How much memory is on one level of the ladder.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LevelTotal {
    /// Its number, from 1.
    pub level: usize,
    /// The share of a core it may use.
    #[serde(with = "as_fraction")]
    pub share: Permyriad,
    /// Regions on it.
    pub regions: usize,
    /// Their resident pages.
    #[serde(rename = "resident_bytes", with = "as_bytes")]
    pub resident: Pages,
}

/// The state of the judgement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineReport {
    /// The governor configured.
    pub governor: Governor,
    /// The governor in force: the one configured, or the one that `auto` has chosen.
    pub in_force: Governor,
    /// The share of a core that may be used.
    pub top_share: Permyriad,
    /// The share of a core used over the last ten seconds, 0 to 1.
    pub used_share: f64,
    /// Global rounds completed.
    pub rounds: u64,
    /// Whether reading or merging is under way.
    pub busy: bool,
    /// Whether it is paused.
    pub paused: bool,
    /// Whether it may control KSM.
    pub drives_ksm: bool,
    /// Pages saved by this run.
    pub saved: Pages,
    /// Pages that KSM saves on the machine.
    pub saved_machine: Pages,
    /// Resident pages in marked spans.
    pub marked: Pages,
    /// Contents in the index.
    pub index_entries: usize,
    /// Memory of the index.
    pub index_bytes: Bytes,
    /// Totals by kind.
    pub kinds: Vec<KindTotal>,
    /// Totals by level, from the top.
    pub levels: Vec<LevelTotal>,
    /// What was saved and what it cost.
    pub ledger: Ledger,
    /// Where merged pages live, on a machine with several NUMA nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementSummary>,
    /// The regions.
    pub regions: Vec<RegionReport>,
}

/// The state of the engine that the report needs beside its regions.
#[derive(Debug)]
pub(crate) struct EngineState<'a> {
    pub config: &'a Config,
    pub governor: Governor,
    pub pace: Pace,
    pub now_ns: u64,
    pub lifetimes: &'a Lifetimes,
    pub ladder: &'a Ladder,
    pub busy: bool,
    pub paused: bool,
    pub merging: bool,
    pub index: (usize, usize),
    pub spent_ns: u64,
    pub ksm: KsmView,
    pub placement: Option<&'a PlacementSummary>,
}

/// Builds the report.
pub(crate) fn report(engine: &EngineState<'_>, table: &RegionTable, ledger: &Ledger) -> EngineReport {
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
        let share = engine.ladder.share(level, engine.pace, engine.config);
        LevelTotal { level, share, regions, resident }
    });
    EngineReport {
        governor: engine.config.governor,
        in_force: engine.governor,
        top_share: engine.pace.top,
        used_share: engine.spent_ns as f64 / WINDOW_NS as f64,
        rounds: engine.ladder.rounds(),
        busy: engine.busy,
        paused: engine.paused,
        drives_ksm: engine.ksm.ours,
        saved: ledger.saved(),
        saved_machine: ledger.saved_now,
        marked: table.iter().map(Region::marked_resident).sum(),
        index_entries: engine.index.0,
        index_bytes: Bytes(count(engine.index.1)),
        kinds: kinds.to_vec(),
        levels: levels.collect(),
        ledger: Ledger { curve: Vec::new(), ..ledger.clone() },
        placement: engine.placement.cloned(),
        regions,
    }
}

fn of_region(engine: &EngineState<'_>, region: &Region, fraction: f64) -> RegionReport {
    let config = engine.config;
    let estimate = region.estimate(fraction);
    let exact = matches!(region.stage, Stage::Judged(_));
    let known = region.extents.values().fold((0_u64, 0_u64), |(resident, duplicate), extent| {
        (resident + u64::from(extent.resident), duplicate + u64::from(extent.duplicate))
    });
    let ratio = if exact { known.1 as f64 / known.0.max(1) as f64 } else { estimate.ratio };
    let range = if exact { (ratio, ratio) } else { (estimate.floor, estimate.ceiling) };
    let kind = kind(engine, region, ratio, exact, estimate.ceiling);
    RegionReport {
        owner: region.view.owner,
        domain: region.view.domain,
        first: region.view.first,
        pages: region.view.pages,
        resident: region.view.resident,
        level: region.level,
        kind,
        next: next(engine, region, kind),
        age_seconds: (engine.now_ns - region.seen_ns) as f64 / 1e9,
        duplicate_ratio: ratio,
        duplicate_range: range,
        exact,
        cow_ratio: region.usage.cow_breaks.ratio(config.cow_horizon_ns),
        marked: region.marked_resident(),
        expected: region.marks.spans.iter().map(|mark| mark.duplicate).sum(),
        withheld: region.withheld(),
    }
}

fn is_cow_broken(region: &Region) -> bool {
    region.hold.reason() == Some(LeaveAlone::CowBroken)
}

fn kind(engine: &EngineState<'_>, region: &Region, ratio: f64, exact: bool, ceiling: f64) -> Kind {
    let threshold = engine.config.duplicate_threshold.fraction();
    if is_cow_broken(region) || region.is_volatile(engine.config) {
        Kind::CowBroken
    } else if ratio >= threshold || region.marked_resident() > Pages(0) {
        let young = engine.now_ns < matures_ns(region, engine.lifetimes, engine.pace, engine.config);
        if young { Kind::ShortLived } else { Kind::StaticallyDuplicated }
    } else if exact || ceiling < 2.0 * threshold || !wants_more(region, engine.config) {
        Kind::Sparse
    } else {
        Kind::Unknown
    }
}

fn next(engine: &EngineState<'_>, region: &Region, kind: Kind) -> Next {
    let matures = matures_ns(region, engine.lifetimes, engine.pace, engine.config);
    let waits = |until_ns: u64| Next::Wait { ns: until_ns - engine.now_ns };
    match region.stage {
        _ if region.hold.is_refused() => Next::Nothing,
        _ if is_cow_broken(region) && region.hold.ends_ns() > engine.now_ns => waits(region.hold.ends_ns()),
        Stage::Examine(cursor) => Next::Read { read: Pages(cursor.0.saturating_sub(region.view.first.0)) },
        _ if kind == Kind::ShortLived && matures > engine.now_ns => waits(matures),
        Stage::Judged(_) if region.changed => Next::Mark,
        Stage::Judged(_) if region.level > 1 && !region.marks.spans.is_empty() && engine.merging => Next::Merge,
        Stage::Survey if wants_more(region, engine.config) => {
            let needed = Pages(samples_wanted(region, engine.config));
            Next::Sample { sampled: Pages(region.survey.tally.sampled), needed }
        }
        _ => Next::Watch,
    }
}
