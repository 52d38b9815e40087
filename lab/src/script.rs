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
    /// The first and the last page ever present, as recorded.
    first: u64,
    last: u64,
    /// The first page as replayed.
    replayed: u64,
}

impl Place {
    fn pages(self) -> u64 {
        self.last - self.first + 1
    }

    /// A recorded page, as replayed.
    fn at(self, page: u64) -> Vpn {
        Vpn(page - self.first + self.replayed)
    }
}

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
    /// The frame of a page shared through fork.
    frame: Option<u64>,
}

impl Known {
    /// Whether a program has written the page since. Merging a page or moving it to another frame isn't a write; if a
    /// merged page has its own frame again, someone wrote it, even with equal content.
    fn is_written(&self, now: &Page) -> bool {
        self.digest != now.digest || (self.state == PageState::Merged && now.state != PageState::Merged)
    }
}

pub fn script(record: &Record) -> Scripted {
    let places = places(record);
    let eighths = Eighths::of(record, &places);
    let mut conversion = Conversion { places, eighths, ..Conversion::default() };
    let mut pages = 0;
    // Time starts with the first snapshot.
    let began_ns = record.snapshots.first().map_or(0, |snapshot| snapshot.time_ns);
    for snapshot in &record.snapshots {
        conversion.at_ns = snapshot.time_ns.saturating_sub(began_ns);
        for event in &snapshot.events {
            conversion.convert(event);
        }
        pages = pages.max(conversion.known.len() as u64);
    }
    let Conversion { steps, at_ns, forked, .. } = conversion;
    Scripted { script: steps.into(), ends_ns: at_ns + record.origin.every_ns, pages, forked }
}

#[derive(Default)]
struct Conversion<'a> {
    places: FxHashMap<u32, Place>,
    eighths: Eighths,
    names: FxHashMap<u32, Option<&'a str>>,
    /// The regions of each process.
    mapped: FxHashMap<u32, BTreeSet<u32>>,
    /// The present pages, by region and number.
    known: FxHashMap<(u32, u64), Known>,
    /// The frames of pages shared through fork.
    shared: FxHashSet<u64>,
    at_ns: u64,
    steps: Vec<(u64, Step)>,
    forked: u64,
}

impl<'a> Conversion<'a> {
    fn convert(&mut self, event: &'a Event) {
        match event {
            Event::Process(row) => {
                self.names.insert(row.process, row.name.as_deref());
                self.push(Step::Start { process: row.process });
            }
            Event::Exit { process } => {
                for region in self.mapped.remove(process).unwrap_or_default() {
                    self.forget_region(region);
                }
                self.push(Step::Exit { process: *process });
            }
            Event::Region(row) => self.map(row),
            Event::Unmap { region } => {
                if self.forget_region(*region) {
                    self.push(Step::Unmap { region: *region });
                }
            }
            Event::Page { region, page, now } => self.page(*region, page.0, now),
        }
    }

    fn push(&mut self, step: Step) {
        self.steps.push((self.at_ns, step));
    }

    fn map(&mut self, row: &RegionRow) {
        let Some(&place) = self.places.get(&row.region) else { return };
        if self.mapped.entry(row.process).or_default().insert(row.region) {
            let family = family(self.names.get(&row.process).copied().flatten(), row);
            let first = Vpn(place.replayed);
            let pages = Pages(place.pages());
            return self.push(Step::Map { process: row.process, region: row.region, family, first, pages });
        }
        // New bounds: drop the pages outside.
        let inside = row.first.0..row.first.0 + row.pages.0;
        for page in place.first..=place.last {
            if !inside.contains(&page) && self.forget(row.region, page).is_some() {
                self.push(Step::Drop { region: row.region, page: place.at(page), zero: false });
            }
        }
    }

    fn page(&mut self, region: u32, page: u64, now: &Page) {
        let Some(place) = self.places.get(&region) else { return };
        let to = place.at(page);
        let before = self.forget(region, page);
        let frame = if now.state == PageState::Shared { now.frame } else { None };
        let forked = frame.is_some_and(|frame| self.shared.contains(&frame));
        self.forked += u64::from(forked);
        if forked || matches!(now.state, PageState::Absent | PageState::ZeroMapped) {
            return self.push(Step::Drop { region, page: to, zero: now.state == PageState::ZeroMapped });
        }
        self.shared.extend(frame);
        let Page { state, digest, parts, .. } = *now;
        self.known.insert((region, page), Known { state, digest, parts, frame });
        if before.is_none_or(|before| before.is_written(now)) {
            let eighth = self.eighths.of_page(now, to);
            self.push(Step::Write { region, page: to, content: content(now), parts: changed(before, now), eighth });
        }
    }

    fn forget(&mut self, region: u32, page: u64) -> Option<Known> {
        let before = self.known.remove(&(region, page))?;
        if let Some(frame) = before.frame {
            self.shared.remove(&frame);
        }
        Some(before)
    }

    /// Whether the region had pages at any time.
    fn forget_region(&mut self, region: u32) -> bool {
        let Some(&place) = self.places.get(&region) else { return false };
        for page in place.first..=place.last {
            self.forget(region, page);
        }
        true
    }
}

/// The changed quarters of a page; all if it wasn't present.
fn changed(before: Option<Known>, now: &Page) -> u8 {
    let Some(before) = before else { return 0b1111 };
    let mut changed = 0;
    for part in 0..PARTS {
        changed |= u8::from(before.parts[part] != now.parts[part]) << part;
    }
    // 32 bits of a quarter may be equal by chance.
    if changed == 0 { 0b1111 } else { changed }
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
    let mut order = Vec::new();
    let mut places: FxHashMap<u32, Place> = FxHashMap::default();
    for snapshot in &record.snapshots {
        for event in &snapshot.events {
            let Event::Page { region, page, now } = event else { continue };
            if now.state == PageState::Absent {
                continue;
            }
            let place = places.entry(*region).or_insert_with(|| {
                order.push(*region);
                Place { first: page.0, last: page.0, replayed: 0 }
            });
            place.first = place.first.min(page.0);
            place.last = place.last.max(page.0);
        }
    }
    let mut next = EXTENT_PAGES;
    for region in order {
        let Some(place) = places.get_mut(&region) else { continue };
        // Keep the position within an extent, because extents are marked.
        place.replayed = next.next_multiple_of(EXTENT_PAGES) + EXTENT_PAGES + place.first % EXTENT_PAGES;
        next = place.replayed + place.pages();
    }
    places
}

/// Divides memory into eighths: physical memory, or the replayed addresses if frames are unknown.
#[derive(Default)]
struct Eighths {
    low: u64,
    span: u64,
    by_frame: bool,
}

impl Eighths {
    fn of(record: &Record, places: &FxHashMap<u32, Place>) -> Self {
        let mut low = u64::MAX;
        let mut end = 0;
        for snapshot in &record.snapshots {
            for event in &snapshot.events {
                if let Event::Page { now: Page { frame: Some(frame), .. }, .. } = event {
                    low = low.min(*frame);
                    end = end.max(frame + 1);
                }
            }
        }
        let by_frame = end > 0;
        if !by_frame {
            low = places.values().map(|place| place.replayed).min().unwrap_or(0);
            end = places.values().map(|place| place.replayed + place.pages()).max().unwrap_or(1);
        }
        Self { low, span: end - low, by_frame }
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
