//! Looks and records that could be, for property tests.

use super::{Deltas, MemorySnapshot, Origin, PARTS, Page, ProcessRow, Record, RegionRow};
use pagefold_core::host::PageState;
use pagefold_core::units::{Pages, Vpn};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A page that is not absent.
fn page() -> impl Strategy<Value = Page> {
    use PageState::{Merged, Private, Shared, ZeroMapped};
    let state = prop::sample::select(vec![Private, Merged, Shared, ZeroMapped]);
    // Few digests, so that pages stay what they are now and then; and all bits of them, now and then.
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

/// Looks, one after the other: the same few numbers come and go, and none comes twice.
pub(super) fn looks() -> impl Strategy<Value = Vec<MemorySnapshot>> {
    let process = (any::<Option<i32>>(), any::<Option<String>>());
    let processes = prop::collection::btree_map(0..4_u32, process, 0..4);
    let regions = prop::collection::btree_map(0..8_u32, region(), 0..6);
    prop::collection::vec((0..9_u64, processes, regions), 0..6).prop_map(|raw| {
        let (mut time_ns, mut looks) = (0, Vec::new());
        let mut last = (BTreeSet::new(), BTreeSet::new());
        let mut gone = (BTreeSet::new(), BTreeSet::new());
        for (step, mut processes, mut regions) in raw {
            time_ns += step << 40;
            processes.retain(|process, _| !gone.0.contains(process));
            // Whose a region is follows from its number.
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
            looks.push(MemorySnapshot { time_ns, processes: rows_of(processes), regions: rows });
        }
        looks
    })
}

/// A record.
pub(super) fn record() -> impl Strategy<Value = Record> {
    (looks(), any::<String>(), any::<u64>(), any::<bool>()).prop_map(|(looks, source, every_ns, anonymous)| {
        let mut deltas = Deltas::new();
        let snapshots = looks.into_iter().map(|look| deltas.next(look)).collect();
        Record { origin: Origin { source, every_ns, anonymous }, snapshots }
    })
}
