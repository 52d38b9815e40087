//! Arbitrary snapshots and records for property tests.

use super::{Deltas, MemorySnapshot, Origin, PARTS, Page, ProcessRow, Record, RegionRow};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A page that isn't absent.
fn page() -> impl Strategy<Value = Page> {
    use PageState::{Merged, Private, Shared, ZeroMapped};
    let state = prop::sample::select(vec![Private, Merged, Shared, ZeroMapped]);
    // Few digests, so that pages sometimes stay equal, and sometimes any 128 bits.
    let digest = prop_oneof![0..4_u128, any::<u128>()];
    (state, any::<bool>(), digest, any::<[u32; PARTS]>(), any::<Option<u64>>()).prop_map(
        |(state, huge, digest, parts, frame)| match state {
            ZeroMapped => Page { state, huge, digest: 0, parts: [0; PARTS], frame },
            _ => Page { state, huge, digest, parts, frame },
        },
    )
}

fn region() -> impl Strategy<Value = (String, u64, Vec<(Vpn, Page)>)> {
    let pages = prop::collection::btree_map(0..12_u64, page(), 0..8);
    ("[a-z ]{0,9}", 0..1_u64 << 51, pages).prop_map(|(kind, first, pages)| {
        (kind, first, pages.into_iter().map(|(page, now)| (Vpn(first + page), now)).collect())
    })
}

/// Consecutive snapshots. Few process and region numbers appear and vanish, and none reappears.
pub(super) fn snapshots() -> impl Strategy<Value = Vec<MemorySnapshot>> {
    let process = (any::<Option<i32>>(), any::<Option<String>>());
    let processes = prop::collection::btree_map(0..4_u32, process, 0..4);
    let regions = prop::collection::btree_map(0..8_u32, region(), 0..6);
    prop::collection::vec((0..9_u64, processes, regions), 0..6).prop_map(|raw| {
        let (mut time_ns, mut snapshots) = (0, Vec::new());
        let mut last = (BTreeSet::new(), BTreeSet::new());
        let mut gone = (BTreeSet::new(), BTreeSet::new());
        for (step, mut processes, mut regions) in raw {
            time_ns += step << 40;
            processes.retain(|process, _| !gone.0.contains(process));
            // A region's number determines its process.
            regions.retain(|region, _| processes.contains_key(&(region % 4)) && !gone.1.contains(region));
            let now: (BTreeSet<u32>, BTreeSet<u32>) =
                (processes.keys().copied().collect(), regions.keys().copied().collect());
            gone.0.extend(last.0.difference(&now.0).copied());
            gone.1.extend(last.1.difference(&now.1).copied());
            last = now;
            let mut rows: Vec<(RegionRow, Vec<(Vpn, Page)>)> = regions
                .into_iter()
                .map(|(region, (kind, first, held))| {
                    (RegionRow { region, process: region % 4, kind, first: Vpn(first), pages: Pages(12) }, held)
                })
                .collect();
            rows.sort_by_key(|(row, _)| (row.process, row.first));
            let rows_of = |processes: BTreeMap<u32, (Option<i32>, Option<String>)>| {
                processes.into_iter().map(|(process, (pid, name))| ProcessRow { process, pid, name }).collect()
            };
            snapshots.push(MemorySnapshot { time_ns, processes: rows_of(processes), regions: rows });
        }
        snapshots
    })
}

pub(super) fn record() -> impl Strategy<Value = Record> {
    (snapshots(), any::<String>(), any::<u64>(), any::<bool>()).prop_map(|(snapshots, source, every_ns, anonymous)| {
        let mut deltas = Deltas::new();
        let snapshots = snapshots.into_iter().map(|memory| deltas.next(memory)).collect();
        Record { origin: Origin { source, every_ns, anonymous }, snapshots }
    })
}
