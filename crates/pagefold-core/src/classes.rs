//! Classes of pages: a page is looked up among pages of its class only, and one that has not changed since a look-up that
//! found no partner is not looked up again.
//!
//! After CMD (Chen et al., VEE 2014), section 3.3. There a board counts every write to memory; here pages are read anyway,
//! and what has changed is seen at the next visit. What that makes of the paper's three classifiers:
//!
//! - [`Classifier::SubPages`]: which of the four KiB of a page differ from the last visit's.
//! - [`Classifier::WriteCount`]: how many visits saw the page changed, 15 and more in one class. However often it was written
//!   in between, a visit sees one change, so that one change here stands for the paper's 64 writes.
//! - [`Classifier::Address`]: ranges of 2 MiB, counted from where the region began when it was first seen and dealt out to
//!   eight classes in turn. The paper has eight ranges of 1 GiB of physical addresses, which have nothing to do with what
//!   pages hold; copies of a program have the same contents in the same places. These ranges do not move when a region
//!   grows, and are as even as regions are long.
//!
//! The first visit knows of no writes: its page is in class 0, and stays there as long as it does not change. So static
//! duplicates meet, however often each of them was visited. A page that has changed keeps its class until it changes again.
//! What is lost are partners that have changed in different ways or at different times: they meet only when one changes
//! again and comes to the other's class. That is CMD's price.
//!
//! Memory: 4 bytes for each page visited, beside the index's 12, and 0.24 bytes for finding them where all pages of an extent
//! were visited: 6 bits of a print of each quarter and 2 of the digest, 4 of the class and 2 of what the last look-up found. A
//! page of which one quarter was written passes for unmodified once in 2^8 times, one of which two were once in 2^14; a
//! quarter that was written is missing in the class once in 2^6 times. The other two classifiers have 26 bits of the digest
//! in place of the prints.

use crate::config::ConfigError;
use crate::hash::{Digest, Parts};
use crate::host::PageSample;
use crate::index::Seen;
use crate::region::Region;
use crate::slots::Slots;
use crate::units::{Bytes, EXTENT_PAGES, Pages, Vpn};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Classes at most.
pub const CLASSES: usize = 16;
/// Ranges of addresses (CMD, section 4).
const RANGES: u64 = 8;
/// Records by which an extent's grow at least.
const RECORDS_STEP: usize = 8;

/// By what pages are told apart before they are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Classifier {
    /// Nothing: all pages are compared.
    #[default]
    None,
    /// Where they lie in the scope (CMD_Address).
    Address,
    /// How often they were seen changed (CMD_PageCount).
    WriteCount,
    /// Which of their quarters were seen changed (CMD_Subpage_Distribution).
    SubPages,
}

impl Classifier {
    /// Its classes are numbered from 0 to one less than this.
    pub const fn classes(self) -> u8 {
        match self {
            Self::None => 1,
            Self::Address => 8,
            Self::WriteCount | Self::SubPages => 16,
        }
    }
}

impl FromStr for Classifier {
    type Err = ConfigError;
    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "none" => Ok(Self::None),
            "address" => Ok(Self::Address),
            "write-count" => Ok(Self::WriteCount),
            "sub-pages" => Ok(Self::SubPages),
            _ => Err(ConfigError::NoClassifier(name.to_owned())),
        }
    }
}

impl fmt::Display for Classifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Address => "address",
            Self::WriteCount => "write-count",
            Self::SubPages => "sub-pages",
        })
    }
}

/// What a class has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassTotal {
    /// Pages that are in it now.
    pub pages: Pages,
    /// Look-ups among its pages so far.
    pub lookups: u64,
    /// Look-ups spared so far: visits of pages that had not changed since a look-up that found nothing.
    pub spared: u64,
    /// Look-ups that found a page with the same content.
    pub found: u64,
}

/// How pages are spread over classes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassReport {
    /// By what.
    pub classifier: Classifier,
    /// What remembering pages takes.
    pub bytes: Bytes,
    /// The classes, by number.
    pub classes: Vec<ClassTotal>,
}

/// The classes of a run.
#[derive(Clone, Debug)]
pub struct Classes {
    classifier: Classifier,
    totals: [ClassTotal; CLASSES],
}

impl Classes {
    /// Those of a classifier, empty.
    pub fn new(classifier: Classifier) -> Self {
        Self { classifier, totals: <[_; CLASSES]>::default() }
    }

    /// Whether there is more than one.
    pub fn is_on(&self) -> bool {
        self.classifier != Classifier::None
    }

    /// The numbers of the classes.
    pub fn numbers(&self) -> std::ops::Range<u8> {
        0..self.classifier.classes()
    }

    /// Gives a region that has come room for what is to be remembered of its pages.
    pub fn take_in(&self, region: &mut Region) {
        if self.is_on() && region.classes.is_none() {
            region.classes = Some(Box::new(PageClasses { base: region.base, ..PageClasses::default() }));
        }
    }

    /// Takes note of a page that was visited and looked up, with what came of it, or not looked up.
    pub fn count(&mut self, visit: Visit<'_>, looked_up: bool, seen: Seen) {
        let Visit { class, record, .. } = visit;
        let total = &mut self.totals[usize::from(class)];
        if !looked_up {
            total.spared += 1;
            return;
        }
        total.lookups += 1;
        total.found += u64::from(seen != Seen::New);
        record.set_state(if seen == Seen::New { ALONE } else { MET });
    }

    /// How pages are spread over the classes, unless there is but one.
    pub fn report(&self, slots: &Slots) -> Option<ClassReport> {
        if !self.is_on() {
            return None;
        }
        let (mut classes, mut bytes) = (self.totals, 0);
        for pages in slots.iter().filter_map(|region| region.classes.as_deref()) {
            bytes += pages.bytes();
            for (total, &more) in classes.iter_mut().zip(&pages.pages) {
                total.pages += Pages(more);
            }
        }
        let classes = classes[..usize::from(self.classifier.classes())].to_vec();
        Some(ClassReport { classifier: self.classifier, bytes: Bytes(bytes as u64), classes })
    }

    /// The class of a page at its first visit. A region may have grown below its base: there it is counted backwards.
    fn first(&self, base: Vpn, page: Vpn) -> u8 {
        match self.classifier {
            Classifier::Address => (page.0.wrapping_sub(base.0) / EXTENT_PAGES % RANGES) as u8,
            _ => 0,
        }
    }

    /// The class of a page some quarters of which have changed.
    fn next(&self, class: u8, changed: u8) -> u8 {
        match self.classifier {
            Classifier::None | Classifier::Address => class,
            Classifier::WriteCount => (class + 1).min(LAST),
            Classifier::SubPages => changed,
        }
    }

    /// 26 bits of what a page holds.
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
    fn print(&self, digest: Digest, parts: Parts) -> u32 {
        if self.classifier != Classifier::SubPages {
            return digest.0 as u32 & PRINT;
        }
        let quarters = parts.iter().rev().fold(0, |print, part| print << PART_BITS | part & PART);
        quarters << WHOLE_BITS | digest.0 as u32 & WHOLE
    }
}

/// The classes of a region's pages, as far as they were visited.
#[derive(Clone, Debug, Default)]
pub struct PageClasses {
    /// Where the region began when it was first seen.
    base: Vpn,
    extents: BTreeMap<u64, Visited>,
    /// Pages by class.
    pages: [u64; CLASSES],
}

/// The pages visited in an extent.
#[derive(Clone, Debug, Default)]
struct Visited {
    /// Which they are.
    which: [u64; WORDS],
    /// Theirs, in the order of the pages.
    records: Vec<Record>,
}

/// The visit of a page.
#[derive(Debug)]
pub struct Visit<'a> {
    /// Its class now.
    pub class: u8,
    /// Whether it is to be looked up: it has changed, or had a partner when it was looked up last.
    pub looks_up: bool,
    record: &'a mut Record,
}

impl PageClasses {
    /// Takes note of a page that was read.
    pub fn visit(&mut self, classes: &Classes, sample: &PageSample) -> Visit<'_> {
        let (page, print) = (sample.page, classes.print(sample.digest, sample.parts));
        let extent = self.extents.entry(page.extent()).or_default();
        let (known, at) = extent.find(page);
        if !known {
            let class = classes.first(self.base, page);
            self.pages[usize::from(class)] += 1;
            extent.insert(page, at, Record::new(print, class, MET));
            return Visit { class, looks_up: true, record: &mut extent.records[at] };
        }
        let record = &mut extent.records[at];
        let changed = record.changed(print);
        let (before, state) = (record.class(), record.state());
        if changed == 0 {
            if state != MET {
                record.set_state(SETTLED);
            }
            return Visit { class: before, looks_up: state == MET, record };
        }
        let class = classes.next(before, changed);
        self.pages[usize::from(before)] -= 1;
        self.pages[usize::from(class)] += 1;
        *record = Record::new(print, class, MET);
        Visit { class, looks_up: true, record }
    }

    /// The class of a page, visited or not.
    pub fn class_of(&self, classes: &Classes, page: Vpn) -> u8 {
        let record = self.extents.get(&page.extent()).and_then(|extent| match extent.find(page) {
            (true, at) => Some(extent.records[at]),
            (false, _) => None,
        });
        record.map_or_else(|| classes.first(self.base, page), Record::class)
    }

    /// A page has got a partner: it is looked up again at its next visit.
    pub fn met(&mut self, page: Vpn) {
        if let Some(record) = self.record(page) {
            record.set_state(MET);
        }
    }

    /// Whether a page is the only reason why an entry of the index that has not been renewed for long should stay: it is not
    /// looked up because it had not changed when it was last visited. One that was not visited since it was looked up is
    /// looked up again instead.
    ///
    /// An entry may be of what the page held before. It goes when the page is found changed at the time of asking, so that
    /// pages that change often keep none.
    pub fn keeps(&mut self, page: Vpn) -> bool {
        self.record(page).is_some_and(|record| {
            let settled = record.state() == SETTLED;
            if !settled {
                record.set_state(MET);
            }
            settled
        })
    }

    /// Forgets the pages beyond the bounds of the region.
    pub fn keep_within(&mut self, first: Vpn, pages: Pages) {
        let end = first.0 + pages.0;
        self.extents.retain(|number, _| first.extent() <= *number && number * EXTENT_PAGES < end);
        self.pages = [0; CLASSES];
        for record in self.extents.values().flat_map(|extent| &extent.records) {
            self.pages[usize::from(record.class())] += 1;
        }
    }

    /// The classes that have pages, and how many.
    pub fn by_class(&self) -> Vec<(u8, Pages)> {
        (0..).zip(self.pages).filter(|&(_, pages)| pages > 0).map(|(class, pages)| (class, Pages(pages))).collect()
    }

    /// Bytes of memory held, but for the free places of the map's nodes.
    pub fn bytes(&self) -> usize {
        let one = |extent: &Visited| size_of::<(u64, Visited)>() + extent.records.capacity() * size_of::<Record>();
        size_of::<Self>() + self.extents.values().map(one).sum::<usize>()
    }

    fn record(&mut self, page: Vpn) -> Option<&mut Record> {
        let extent = self.extents.get_mut(&page.extent())?;
        let (known, at) = extent.find(page);
        extent.records.get_mut(at).filter(|_| known)
    }
}

impl Visited {
    /// Whether a page was visited, and where its record is or would be.
    fn find(&self, page: Vpn) -> (bool, usize) {
        if self.records.len() == ALL {
            // The usual case once all has come by: nothing is to be counted.
            return (true, offset_of(page));
        }
        let (word, bit) = place(page);
        let before: u32 = self.which[..word].iter().map(|bits| bits.count_ones()).sum();
        let own = self.which[word];
        (own & bit != 0, (before + (own & (bit - 1)).count_ones()) as usize)
    }

    fn insert(&mut self, page: Vpn, at: usize, record: Record) {
        let (word, bit) = place(page);
        self.which[word] |= bit;
        let len = self.records.len();
        if len == self.records.capacity() {
            // By an eighth, and no further than the extent is long.
            self.records.reserve_exact(RECORDS_STEP.max(len / 8).min(ALL - len));
        }
        self.records.insert(at, record);
    }
}

/// The word and the bit that stand for a page in its extent.
fn place(page: Vpn) -> (usize, u64) {
    (offset_of(page) / 64, 1 << (page.0 % 64))
}

fn offset_of(page: Vpn) -> usize {
    (page.0 % EXTENT_PAGES) as usize
}

/// Pages of an extent, and the words of their bits.
const ALL: usize = 512;
const WORDS: usize = ALL / 64;
/// The last class.
const LAST: u8 = 15;
const PART_BITS: u32 = 6;
const PART: u32 = (1 << PART_BITS) - 1;
const WHOLE_BITS: u32 = 2;
const WHOLE: u32 = (1 << WHOLE_BITS) - 1;
/// All of a print.
const PRINT: u32 = (1 << (4 * PART_BITS + WHOLE_BITS)) - 1;
const CLASS_SHIFT: u32 = 26;
const STATE_SHIFT: u32 = 30;
/// It has changed since it was looked up, or had a partner then.
const MET: u32 = 0;
/// It had no partner when it was looked up last.
const ALONE: u32 = 1;
/// The same, and it has been visited unchanged since.
const SETTLED: u32 = 2;

/// What is remembered of a page: 26 bits of print (2 of the digest, then the quarters from the first), 4 of
/// class, 2 of state.
#[derive(Clone, Copy, Debug)]
struct Record(u32);

impl Record {
    fn new(print: u32, class: u8, state: u32) -> Self {
        Self(print | u32::from(class) << CLASS_SHIFT | state << STATE_SHIFT)
    }
    fn class(self) -> u8 {
        (self.0 >> CLASS_SHIFT) as u8 & LAST
    }
    fn state(self) -> u32 {
        self.0 >> STATE_SHIFT
    }
    fn set_state(&mut self, state: u32) {
        self.0 = self.0 & !(3 << STATE_SHIFT) | state << STATE_SHIFT;
    }
    /// Which quarters another print shows changed, the first in the lowest of 4 bits; 0 if it is the same. Where only the
    /// digest tells, all of them.
    fn changed(self, print: u32) -> u8 {
        let differs = (self.0 ^ print) & PRINT;
        let quarter = |at: u32| u8::from(differs >> (WHOLE_BITS + at * PART_BITS) & PART != 0) << at;
        match (0..4).map(quarter).sum() {
            0 if differs != 0 => LAST,
            changed => changed,
        }
    }
}

#[cfg(test)]
#[path = "classes_tests.rs"]
mod tests;
