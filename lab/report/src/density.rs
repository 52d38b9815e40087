//! Shows where a record's duplicate pages are in the address space (UKSM, figure 1).

use crate::charts::{Curve, Lines, Scale, number};
use crate::document::Grid;
use crate::policy::PEERS;
use crate::record::{RecordError, RecordReader, State};
use pagefold_engine::host::PageState;
use pagefold_engine::units::Pages;
use pagefold_text::escape::printable;
use rustc_hash::FxHashMap;
use std::path::Path;

/// The number of equal parts in the figure.
const BUCKETS: usize = 1000;
/// An axis in per cent.
const FULL: Scale = Scale::Linear { most: 100.0 };

/// The share of duplicate pages along all present pages, ordered by process and address.
#[derive(Clone, Debug, PartialEq)]
pub struct Density {
    pub source: String,
    pub pages: u64,
    pub duplicates: u64,
    /// The share of duplicates in each of equal parts.
    pub buckets: Vec<f64>,
    /// Each process: its name and its number of pages.
    pub processes: Vec<(String, u64)>,
}

impl Density {
    /// The density in the snapshot with the most pages.
    pub fn of_record(path: &Path) -> Result<Self, RecordError> {
        let mut most = 0;
        let mut snapshots = 0;
        let mut state = State::default();
        for (before, snapshot) in RecordReader::open(path)?.enumerate() {
            state.apply(&snapshot?);
            if state.pages() >= most {
                most = state.pages();
                snapshots = before + 1;
            }
        }
        let mut reader = RecordReader::open(path)?;
        let source = reader.origin().source.clone();
        let mut state = State::default();
        for snapshot in reader.by_ref().take(snapshots) {
            state.apply(&snapshot?);
        }
        Ok(Self::of(source, &state))
    }

    fn of(source: String, state: &State) -> Self {
        let mut regions: Vec<_> = state.regions.values().collect();
        regions.sort_by_key(|held| (held.row.process, held.row.first));
        let mut digests = Vec::new();
        let mut processes: Vec<(String, u64)> = Vec::new();
        let mut last = None;
        for held in regions {
            let before = digests.len();
            for (_, page) in held.pages.iter() {
                // Pages shared by fork and the zero page are already a single page.
                if matches!(page.state, PageState::Private | PageState::Merged) {
                    digests.push(page.digest);
                }
            }
            let process = held.row.process;
            if last.replace(process) != Some(process) {
                processes.push((name(state, process), 0));
            }
            processes.last_mut().expect("the region's").1 += (digests.len() - before) as u64;
        }
        let mut copies = FxHashMap::<u128, u32>::default();
        for digest in &digests {
            *copies.entry(*digest).or_default() += 1;
        }
        let parts = BUCKETS.min(digests.len());
        let mut duplicates = 0;
        let mut buckets = Vec::new();
        for part in 0..parts {
            let pages = &digests[part * digests.len() / parts..(part + 1) * digests.len() / parts];
            let found = pages.iter().filter(|digest| copies[*digest] > 1).count();
            duplicates += found as u64;
            buckets.push(found as f64 / pages.len() as f64);
        }
        Self { source, pages: digests.len() as u64, duplicates, buckets, processes }
    }

    /// The smallest share of the memory with this share of the duplicates.
    fn concentration(&self, share: f64) -> f64 {
        let mut shares = self.buckets.clone();
        shares.sort_by(|a, b| b.total_cmp(a));
        let all: f64 = shares.iter().sum();
        let mut sum = 0.0;
        let mut needed = 0;
        while needed < shares.len() && sum < share * all {
            sum += shares[needed];
            needed += 1;
        }
        needed as f64 / shares.len().max(1) as f64
    }

    pub fn describe(&self) -> String {
        format!(
            "Record: {}. {} MiB in {} processes; {} MiB ({:.0} %) have a copy elsewhere. Nine tenths of the duplicates \
             are in {:.0} % of the memory: where a few duplicates are found, more are nearby.",
            self.source,
            number(Pages(self.pages).bytes().mib()),
            self.processes.len(),
            number(Pages(self.duplicates).bytes().mib()),
            100.0 * self.duplicates as f64 / self.pages.max(1) as f64,
            100.0 * self.concentration(0.9),
        )
    }

    /// Plots the share of duplicates against the position in memory.
    pub fn draw(&self) -> String {
        let mut points = Vec::new();
        for (part, share) in self.buckets.iter().enumerate() {
            for edge in [part, part + 1] {
                points.push((100.0 * edge as f64 / self.buckets.len() as f64, 100.0 * share));
            }
        }
        let right = format!("per cent of {} present pages, by process and address", self.pages);
        Lines {
            title: "duplicate pages along the address space".to_owned(),
            up: (format!("duplicate pages in each of {} equal parts, per cent", self.buckets.len()), FULL),
            right: (right, FULL),
            curves: vec![Curve { colour: PEERS[0], width: 1, points, ..Curve::default() }],
        }
        .draw()
    }

    /// The processes in the order of the picture, and where each begins.
    pub fn processes(&self) -> Grid {
        let mut before = 0;
        let mut rows = Vec::new();
        for (name, pages) in &self.processes {
            let from = 100.0 * before as f64 / self.pages.max(1) as f64;
            rows.push([name.clone(), number(Pages(*pages).bytes().mib()), number(from)]);
            before += pages;
        }
        Grid::new(1, ["process", "MiB", "from, per cent"], rows)
    }
}

/// A process's name, or else its number in the record.
fn name(state: &State, process: u32) -> String {
    match state.processes.get(&process).and_then(|row| row.name.as_ref()) {
        Some(name) => printable(name.as_bytes()),
        None => format!("process {process}"),
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;
    use crate::record::{Event, PARTS, Page, ProcessRow, RegionRow, Snapshot};
    use pagefold_engine::units::Vpn;

    fn state() -> State {
        let mut events = Vec::new();
        for process in 0..2 {
            let name = Some("<a> & b".to_owned());
            events.push(Event::Process(ProcessRow { process, pid: None, name }));
            let (first, pages) = (Vpn(100), Pages(3000));
            events.push(Event::Region(RegionRow { region: process, process, kind: "heap".to_owned(), first, pages }));
            for page in 0..2000_u64 {
                // A quarter is in both, a quarter is the zero page, and the rest is different.
                let state = if page < 1500 { PageState::Private } else { PageState::ZeroMapped };
                let digest = 1 + u128::from(page) + if page < 500 { 0 } else { 10_000 * (1 + u128::from(process)) };
                let now = Page { state, huge: false, digest, parts: [0; PARTS], frame: None };
                events.push(Event::Page { region: process, page: Vpn(100 + page), now });
            }
        }
        let mut state = State::default();
        state.apply(&Snapshot { time_ns: 0, events });
        state
    }

    #[test]
    fn duplicates_are_counted_where_they_are() {
        let density = Density::of("test".to_owned(), &state());
        assert_eq!((density.pages, density.duplicates, density.buckets.len()), (3000, 1000, BUCKETS));
        assert_eq!(density.processes, [("<a> & b".to_owned(), 1500), ("<a> & b".to_owned(), 1500)]);
        assert_eq!((density.buckets[0], density.buckets[400], density.buckets[501]), (1.0, 0.0, 1.0));
        assert!((density.concentration(0.9) - 0.3).abs() < 0.01, "{}", density.concentration(0.9));
        assert!(density.describe().contains("(33 %)"), "{}", density.describe());
        let svg = density.draw();
        let texts = crate::charts::texts(&svg);
        assert!(texts.iter().any(|text| text.contains("of 3000 present pages")) && !svg.contains("NaN"), "{svg}");
        assert_eq!(density.processes().rows[1], ["<a> & b", "5.86", "50.0"]);
    }

    #[test]
    fn little_memory_has_fewer_parts_and_none_has_none() {
        let density = Density::of("test".to_owned(), &State::default());
        assert_eq!((density.pages, density.buckets.len(), density.concentration(0.9)), (0, 0, 0.0));
        assert!(!density.draw().contains("NaN"));
    }
}
