//! Conversion of a record to a script for the simulator.

use crate::record::{Event, PARTS, Page, Record, RegionRow};
use pagefold_engine::host::PageState;
use pagefold_engine::keys::FamilyKey;
use pagefold_engine::units::{EXTENT_PAGES, Pages, Vpn};
use pagefold_sim::{Script, Step};
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

/// The address range of a region during the replay. In a record mappings can grow into the former range of others, and
/// programs may never use large parts. Here every region has its own range, from its first page ever present to its
/// last.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The first page ever present, as recorded and as replayed.
    from: (u64, u64),
    pages: u64,
}

/// A record as steps of the simulator.
#[derive(Clone, Debug)]
pub struct Scripted {
    pub script: Script,
    /// End of the record, nanoseconds.
    pub ends_ns: u64,
    /// Maximum number of pages present at one time.
    pub pages: u64,
    /// Pages left out because they share a frame with another by fork: merging saves nothing there.
    pub forked: u64,
}

/// The last state of a page during the conversion.
#[derive(Clone, Copy, Debug)]
struct Known {
    state: PageState,
    digest: u128,
    parts: [u32; PARTS],
    frame: Option<u64>,
}

impl Known {
    /// Whether a program has written the page since. Merging a page or moving it to another frame isn't a write; if a
    /// merged page has its own frame again, someone wrote it, even with equal content.
    fn is_written(&self, now: &Page) -> bool {
        self.digest != now.digest || (self.state == PageState::Merged && now.state != PageState::Merged)
    }
}

/// Converts a record to steps.
pub fn script(record: &Record) -> Scripted {
    let places = places(record);
    let eighths = Eighths::of(record, &places);
    let mut names: FxHashMap<u32, Option<&str>> = FxHashMap::default();
    let mut mapped: FxHashMap<u32, BTreeSet<u32>> = FxHashMap::default();
    let mut known = KnownPages::default();
    let (mut steps, mut forked, mut pages) = (Vec::new(), 0, 0);
    // Time starts with the first snapshot.
    let began_ns = record.snapshots.first().map_or(0, |snapshot| snapshot.time_ns);
    for snapshot in &record.snapshots {
        let at_ns = snapshot.time_ns.saturating_sub(began_ns);
        for event in &snapshot.events {
            match event {
                Event::Process(row) => {
                    names.insert(row.process, row.name.as_deref());
                    steps.push((at_ns, Step::Start { process: row.process }));
                }
                Event::Exit { process } => {
                    for region in mapped.remove(process).unwrap_or_default() {
                        places.get(&region).into_iter().for_each(|place| known.forget_region(region, place));
                    }
                    steps.push((at_ns, Step::Exit { process: *process }));
                }
                Event::Region(row) => {
                    let Some(place) = places.get(&row.region) else { continue };
                    if mapped.entry(row.process).or_default().insert(row.region) {
                        let family = family(names.get(&row.process).copied().flatten(), row);
                        let (first, pages) = (Vpn(place.from.1), Pages(place.pages));
                        let (process, region) = (row.process, row.region);
                        steps.push((at_ns, Step::Map { process, region, family, first, pages }));
                        continue;
                    }
                    // New bounds: drop the pages outside.
                    let inside = row.first.0..row.first.0 + row.pages.0;
                    let all = place.from.0..place.from.0 + place.pages;
                    for page in all.filter(|page| !inside.contains(page)) {
                        if known.forget((row.region, page)).is_some() {
                            let to = Vpn(page - place.from.0 + place.from.1);
                            steps.push((at_ns, Step::Drop { region: row.region, page: to, zero: false }));
                        }
                    }
                }
                Event::Unmap { region } => {
                    if let Some(place) = places.get(region) {
                        known.forget_region(*region, place);
                        steps.push((at_ns, Step::Unmap { region: *region }));
                    }
                }
                Event::Page { region, page, now } => {
                    let Some(place) = places.get(region) else { continue };
                    let to = Vpn(page.0 - place.from.0 + place.from.1);
                    let before = known.forget((*region, page.0));
                    let held = now.frame.filter(|_| now.state == PageState::Shared);
                    let relative = held.is_some_and(|frame| known.shared.contains(&frame));
                    forked += u64::from(relative);
                    if relative || matches!(now.state, PageState::Absent | PageState::ZeroMapped) {
                        let zero = now.state == PageState::ZeroMapped;
                        steps.push((at_ns, Step::Drop { region: *region, page: to, zero }));
                        continue;
                    }
                    known.shared.extend(held);
                    let Page { state, digest, parts, .. } = *now;
                    known.pages.insert((*region, page.0), Known { state, digest, parts, frame: held });
                    if before.is_some_and(|before| !before.is_written(now)) {
                        continue;
                    }
                    let parts = changed(before, now);
                    let (content, eighth) = (content(now), eighths.of_page(now, to));
                    steps.push((at_ns, Step::Write { region: *region, page: to, content, parts, eighth }));
                }
            }
        }
        pages = pages.max(known.pages.len() as u64);
    }
    let last_ns = record.snapshots.last().map_or(0, |snapshot| snapshot.time_ns.saturating_sub(began_ns));
    let ends_ns = last_ns + record.origin.every_ns;
    Scripted { script: steps.into(), ends_ns, pages, forked }
}

/// The pages present during the conversion, and the frames of pages shared through fork.
#[derive(Default)]
struct KnownPages {
    pages: FxHashMap<(u32, u64), Known>,
    shared: FxHashSet<u64>,
}

impl KnownPages {
    fn forget(&mut self, page: (u32, u64)) -> Option<Known> {
        let before = self.pages.remove(&page)?;
        if let Some(frame) = before.frame {
            self.shared.remove(&frame);
        }
        Some(before)
    }

    fn forget_region(&mut self, region: u32, place: &Place) {
        for page in place.from.0..place.from.0 + place.pages {
            self.forget((region, page));
        }
    }
}

/// The changed quarters of a page; all if it wasn't present.
fn changed(before: Option<Known>, now: &Page) -> u8 {
    let Some(before) = before else { return 0b1111 };
    let differ = before.parts.iter().zip(&now.parts).map(|(before, now)| before != now);
    let parts = differ.rev().fold(0, |bits, differs| bits << 1 | u8::from(differs));
    // 32 bits of a quarter may be equal by chance.
    if parts == 0 { 0b1111 } else { parts }
}

/// 64 of the 128 bits: the chance of a collision among a billion pages is 3 %.
#[expect(clippy::cast_possible_truncation, reason = "half of the bits are wanted")]
fn content(page: &Page) -> u64 {
    if page.digest == 0 { 0 } else { (page.digest as u64).max(1) }
}

/// Regions of the same program, kind and size.
fn family(name: Option<&str>, row: &RegionRow) -> FamilyKey {
    let mut hasher = FxHasher::default();
    (name, &row.kind, row.pages.0).hash(&mut hasher);
    FamilyKey(hasher.finish())
}

/// Assigns consecutive address ranges to regions in order of appearance.
fn places(record: &Record) -> FxHashMap<u32, Place> {
    let mut bounds: Vec<(u32, (u64, u64))> = Vec::new();
    let mut at: FxHashMap<u32, usize> = FxHashMap::default();
    for event in record.snapshots.iter().flat_map(|snapshot| &snapshot.events) {
        let Event::Page { region, page, now } = event else { continue };
        if now.state == PageState::Absent {
            continue;
        }
        let index = *at.entry(*region).or_insert_with(|| {
            bounds.push((*region, (page.0, page.0)));
            bounds.len() - 1
        });
        let (low, high) = &mut bounds[index].1;
        (*low, *high) = ((*low).min(page.0), (*high).max(page.0));
    }
    let mut next = EXTENT_PAGES;
    let mut place = |(low, high): (u64, u64)| {
        // Keep the position within an extent, because extents are marked.
        let to = next.next_multiple_of(EXTENT_PAGES) + EXTENT_PAGES + low % EXTENT_PAGES;
        let pages = high - low + 1;
        next = to + pages;
        Place { from: (low, to), pages }
    };
    bounds.into_iter().map(|(region, bounds)| (region, place(bounds))).collect()
}

/// Divides memory into eighths: physical memory, or the replayed addresses if frames are unknown.
struct Eighths {
    low: u64,
    span: u64,
    by_frame: bool,
}

impl Eighths {
    fn of(record: &Record, places: &FxHashMap<u32, Place>) -> Self {
        let events = record.snapshots.iter().flat_map(|snapshot| &snapshot.events);
        let frames = events.filter_map(|event| match event {
            Event::Page { now, .. } => now.frame,
            _ => None,
        });
        let bounds = frames.fold(None, |bounds: Option<(u64, u64)>, frame| {
            Some(bounds.map_or((frame, frame), |(low, high)| (low.min(frame), high.max(frame))))
        });
        if let Some((low, high)) = bounds {
            return Self { low, span: high - low + 1, by_frame: true };
        }
        let low = places.values().map(|place| place.from.1).min().unwrap_or(0);
        let high = places.values().map(|place| place.from.1 + place.pages).max().unwrap_or(1);
        Self { low, span: high - low, by_frame: false }
    }

    fn of_page(&self, page: &Page, to: Vpn) -> u8 {
        let at = if self.by_frame { page.frame } else { Some(to.0) };
        let eighth = at.map_or(0, |at| u128::from(at.saturating_sub(self.low)) * 8 / u128::from(self.span.max(1)));
        u8::try_from(eighth.min(7)).unwrap_or(7)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Origin, ProcessRow, Snapshot};

    /// The steps of a page after its first state. Each state has a digest and a frame.
    fn steps(states: &[(PageState, u128, u64)]) -> Vec<Step> {
        let rows = [
            Event::Process(ProcessRow { process: 0, pid: None, name: None }),
            Event::Region(RegionRow { region: 0, process: 0, kind: "heap".into(), first: Vpn(7), pages: Pages(1) }),
        ];
        let snapshots = (0..).zip(states).map(|(time_ns, &(state, digest, frame))| {
            let now = Page { state, huge: false, digest, parts: [1; PARTS], frame: Some(frame) };
            let page = Event::Page { region: 0, page: Vpn(7), now };
            Snapshot { time_ns, events: rows.iter().filter(|_| time_ns == 0).cloned().chain([page]).collect() }
        });
        let origin = Origin { source: "live".into(), every_ns: 1, anonymous: false };
        let script = script(&Record { origin, snapshots: snapshots.collect() }).script;
        script.iter().filter(|(at_ns, _)| *at_ns > 0).map(|&(_, step)| step).collect()
    }

    #[test]
    fn merging_or_moving_a_page_is_not_a_write() {
        use PageState::{Merged, Private, Shared};
        assert_eq!(steps(&[(Private, 5, 1), (Private, 5, 2), (Shared, 5, 2), (Merged, 5, 3), (Merged, 5, 4)]), []);
        // A merged page becomes private again by a write of equal content.
        assert!(matches!(steps(&[(Private, 5, 1), (Merged, 5, 3), (Private, 5, 1)])[..], [Step::Write { .. }]));
        assert!(matches!(steps(&[(Merged, 5, 1), (Merged, 6, 2)])[..], [Step::Write { content: 6, .. }]));
        assert!(matches!(
            steps(&[(Private, 5, 1), (PageState::ZeroMapped, 0, 9)])[..],
            [Step::Drop { zero: true, .. }]
        ));
    }
}
