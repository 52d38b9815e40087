//! Converts full snapshots to changes and back.

use super::{Event, MemorySnapshot, PARTS, Page, ProcessRow, RegionRow, Snapshot};
use pagefold_engine::host::PageState;
use pagefold_engine::units::Vpn;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;

/// Converts full snapshots to changes.
#[derive(Debug, Default)]
pub struct Deltas {
    last: State,
}

impl Deltas {
    /// Starts with no memory, so everything in the first snapshot is a change.
    pub fn new() -> Self {
        Self::default()
    }

    /// The changes from the previous snapshot to this one.
    pub fn next(&mut self, memory: MemorySnapshot) -> Snapshot {
        let mut events = Vec::new();
        let State { processes, regions } = &mut self.last;
        let there: FxHashSet<u32> = memory.processes.iter().map(|row| row.process).collect();
        processes.retain(|&process, _| {
            let stays = there.contains(&process);
            if !stays {
                events.push(Event::Exit { process });
            }
            stays
        });
        let mapped: FxHashSet<u32> = memory.regions.iter().map(|(row, _)| row.region).collect();
        regions.retain(|&region, held| {
            let stays = mapped.contains(&region);
            let lives = there.contains(&held.row.process);
            if !stays && lives {
                events.push(Event::Unmap { region });
            }
            stays && lives
        });
        for row in memory.processes {
            if processes.get(&row.process) != Some(&row) {
                events.push(Event::Process(row.clone()));
                processes.insert(row.process, row);
            }
        }
        for (row, pages) in memory.regions {
            let region = row.region;
            if regions.get(&region).is_none_or(|held| held.row != row) {
                events.push(Event::Region(row.clone()));
            }
            let held = place(regions, &row);
            held.pages.replace_with(&pages, |page, now| events.push(Event::Page { region, page, now }));
        }
        Snapshot { time_ns: memory.time_ns, events }
    }
}

/// The memory at one time: the sum of the changes so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub processes: BTreeMap<u32, ProcessRow>,
    pub regions: BTreeMap<u32, Region>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Kind and address.
    pub row: RegionRow,
    pub pages: PageTable,
}

impl State {
    /// Applies changes. Ignores pages of unknown regions; no valid record has any.
    pub fn apply(&mut self, snapshot: &Snapshot) {
        let together = |a: &Event, b: &Event| match (a, b) {
            (Event::Page { region: a, .. }, Event::Page { region: b, .. }) => a == b,
            _ => false,
        };
        for events in snapshot.events.chunk_by(together) {
            match &events[0] {
                Event::Process(row) => {
                    self.processes.insert(row.process, row.clone());
                }
                Event::Exit { process } => {
                    self.processes.remove(process);
                    self.regions.retain(|_, held| held.row.process != *process);
                }
                Event::Region(row) => {
                    place(&mut self.regions, row);
                }
                Event::Unmap { region } => {
                    self.regions.remove(region);
                }
                Event::Page { region, .. } => {
                    if let Some(held) = self.regions.get_mut(region) {
                        held.pages.apply(events);
                    }
                }
            }
        }
    }

    pub fn pages(&self) -> u64 {
        self.regions.values().map(|held| held.pages.len() as u64).sum()
    }
}

/// Maps a region, or moves its bounds.
fn place<'a>(regions: &'a mut BTreeMap<u32, Region>, row: &RegionRow) -> &'a mut Region {
    let held = regions.entry(row.region).or_insert_with(|| Region { row: row.clone(), pages: PageTable::default() });
    if held.row != *row {
        held.pages.keep_within(row);
        held.row.clone_from(row);
    }
    held
}

/// The present pages of a region, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable(Vec<PackedPage>);

/// A page in 56 bytes. A [`Page`] and its number take 80.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedPage {
    page: Vpn,
    digest: [u64; 2],
    frame: u64,
    parts: [u32; PARTS],
    state: PageState,
    huge: bool,
    framed: bool,
}

impl PackedPage {
    #[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
    fn of(page: Vpn, now: &Page) -> Self {
        Self {
            page,
            digest: [(now.digest >> 64) as u64, now.digest as u64],
            frame: now.frame.unwrap_or(0),
            parts: now.parts,
            state: now.state,
            huge: now.huge,
            framed: now.frame.is_some(),
        }
    }

    fn now(&self) -> Page {
        Page {
            state: self.state,
            huge: self.huge,
            digest: u128::from(self.digest[0]) << 64 | u128::from(self.digest[1]),
            parts: self.parts,
            frame: if self.framed { Some(self.frame) } else { None },
        }
    }
}

pub(super) const ABSENT: Page =
    Page { state: PageState::Absent, huge: false, digest: 0, parts: [0; PARTS], frame: None };

impl PageTable {
    /// A page; `None` if absent.
    pub fn get(&self, page: Vpn) -> Option<Page> {
        let at = self.0.binary_search_by_key(&page, |kept| kept.page).ok()?;
        Some(self.0[at].now())
    }

    /// The pages, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Vpn, Page)> + '_ {
        self.0.iter().map(|kept| (kept.page, kept.now()))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops the pages outside the region's bounds.
    fn keep_within(&mut self, row: &RegionRow) {
        let end = row.first.0.saturating_add(row.pages.0);
        self.0.retain(|kept| (row.first.0..end).contains(&kept.page.0));
    }

    /// Replaces the pages by `pages` (ascending), and reports the differences.
    fn replace_with(&mut self, pages: &[(Vpn, Page)], mut report: impl FnMut(Vpn, Page)) {
        let former = std::mem::replace(&mut self.0, Vec::with_capacity(pages.len()));
        let mut former = former.iter().peekable();
        for &(page, now) in pages {
            if now.state == PageState::Absent {
                continue;
            }
            while let Some(gone) = former.next_if(|kept| kept.page < page) {
                report(gone.page, ABSENT);
            }
            let kept = PackedPage::of(page, &now);
            if former.next_if(|kept| kept.page == page) != Some(&kept) {
                report(page, now);
            }
            self.0.push(kept);
        }
        former.for_each(|gone| report(gone.page, ABSENT));
    }

    /// Applies page events of this region. The last event for a page counts.
    fn apply(&mut self, events: &[Event]) {
        let mut changes: Vec<(Vpn, Page)> = Vec::with_capacity(events.len());
        for event in events {
            if let Event::Page { page, now, .. } = event {
                changes.push((*page, *now));
            }
        }
        if !changes.is_sorted_by(|a, b| a.0 < b.0) {
            changes.sort_by_key(|(page, _)| *page);
            changes.dedup_by(|later, kept| {
                let same = later.0 == kept.0;
                if same {
                    kept.1 = later.1;
                }
                same
            });
        }
        let former = std::mem::take(&mut self.0);
        self.0.reserve_exact(former.len() + changes.len());
        let mut former = former.into_iter().peekable();
        for (page, now) in changes {
            while let Some(kept) = former.next_if(|kept| kept.page < page) {
                self.0.push(kept);
            }
            former.next_if(|kept| kept.page == page);
            if now.state != PageState::Absent {
                self.0.push(PackedPage::of(page, &now));
            }
        }
        self.0.extend(former);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::units::Pages;
    use proptest::prelude::*;

    #[test]
    fn a_gibibyte_takes_less_than_15_mb() {
        assert!(size_of::<PackedPage>() * 262_144 < 15_000_000);
    }

    /// Process, region, first page, pages, and some digests.
    type Mapped<'a> = (u32, u32, u64, u64, &'a [(u64, u128)]);

    fn memory_of(processes: &[u32], regions: &[Mapped<'_>]) -> MemorySnapshot {
        MemorySnapshot {
            time_ns: 0,
            processes: processes.iter().map(|&process| ProcessRow { process, pid: None, name: None }).collect(),
            regions: regions
                .iter()
                .map(|&(process, region, first, pages, held)| {
                    let (first, pages) = (Vpn(first), Pages(pages));
                    let held = held.iter().map(|&(page, digest)| (Vpn(page), private(digest))).collect();
                    (RegionRow { region, process, kind: "heap".into(), first, pages }, held)
                })
                .collect(),
        }
    }

    fn private(digest: u128) -> Page {
        Page { state: PageState::Private, huge: false, digest, parts: [1; PARTS], frame: None }
    }

    fn page(region: u32, page: u64, now: Page) -> Event {
        Event::Page { region, page: Vpn(page), now }
    }

    #[test]
    fn only_changes_are_reported() {
        let mut deltas = Deltas::new();
        let first = memory_of(&[1, 2], &[(1, 7, 10, 5, &[(10, 1), (12, 2)]), (2, 8, 10, 5, &[(11, 3)])]);
        assert_eq!(deltas.next(first.clone()).events.len(), 2 + 2 + 3);
        assert_eq!(deltas.next(first).events, []);
        // One region grows downwards and keeps its pages, one vanishes with its process, one appears.
        let second = memory_of(&[1], &[(1, 7, 8, 5, &[(8, 9), (10, 1), (12, 4)]), (1, 9, 20, 1, &[])]);
        let rows: Vec<RegionRow> = second.regions.iter().map(|(row, _)| row.clone()).collect();
        assert_eq!(
            deltas.next(second).events,
            [
                Event::Exit { process: 2 },
                Event::Region(rows[0].clone()),
                page(7, 8, private(9)),
                page(7, 12, private(4)),
                Event::Region(rows[1].clone()),
            ]
        );
        // We don't report pages outside the new bounds again, but do report vanished pages within them.
        let third = memory_of(&[1], &[(1, 7, 8, 4, &[(8, 9)])]);
        let row = third.regions[0].0.clone();
        assert_eq!(deltas.next(third).events, [Event::Unmap { region: 9 }, Event::Region(row), page(7, 10, ABSENT)]);
    }

    #[test]
    fn the_last_change_of_a_page_counts() {
        let mut state = State::default();
        let first = Deltas::new().next(memory_of(&[1], &[(1, 7, 0, 9, &[(1, 1), (3, 3)])]));
        state.apply(&first);
        let events = vec![page(7, 3, private(4)), page(7, 2, private(2)), page(7, 3, ABSENT), page(8, 3, private(4))];
        state.apply(&Snapshot { time_ns: 1, events });
        let pages = &state.regions[&7].pages;
        assert_eq!(pages.iter().collect::<Vec<_>>(), [(Vpn(1), private(1)), (Vpn(2), private(2))]);
        assert_eq!((pages.get(Vpn(2)), pages.get(Vpn(3)), state.pages()), (Some(private(2)), None, 2));
    }

    proptest! {
        /// Snapshots survive the conversion to changes and back.
        #[test]
        fn changes_add_up_to_the_snapshot(snapshots in super::super::arbitrary::snapshots()) {
            let (mut deltas, mut state) = (Deltas::new(), State::default());
            for memory in snapshots {
                state.apply(&deltas.next(memory.clone()));
                prop_assert_eq!(&state, &deltas.last);
                let processes: Vec<_> = state.processes.values().cloned().collect();
                prop_assert_eq!(processes, memory.processes);
                prop_assert_eq!(state.regions.len(), memory.regions.len());
                for (row, pages) in memory.regions {
                    let held = &state.regions[&row.region];
                    prop_assert_eq!(&held.row, &row);
                    prop_assert_eq!(held.pages.iter().collect::<Vec<_>>(), pages);
                }
            }
        }
    }
}
