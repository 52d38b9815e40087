//! Why two programs that should be alike aren't: compares pages at the same offsets of like mappings.
//!
//! We read both programs' mappings in blocks of 64 pages. If a page differs, we look for the same page anywhere in the
//! other program's pages that we've read, and for the same bytes, at any shift, in the other program's block. To find
//! shifted bytes we index some 16-byte windows, namely those whose hash ends in zeros. The hash depends only on the
//! bytes, so we choose the same windows in both copies.

use super::super::reader::ScanReader;
use super::cause::{Cause, Causes};
use pagefold_engine::hash::{Digest, Digester, PageBytes, is_zero};
use pagefold_engine::random::mix;
use pagefold_engine::units::{PAGE_SIZE, Vpn, count, index};
use pagefold_host::scope::exclude::vma_exclusion;
use pagefold_procmem::maps::{VmaDetail, read_smaps_named};
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::process::{Process, ReadError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Pages per block.
const BLOCK: u64 = 64;
/// We compare about this many pages, which takes some 0.2 s.
const PAGES: f64 = 8192.0;
/// Two pages differ in a few words if at most this many of their 512 words differ.
const FEW_WORDS: usize = 64;
/// We index the windows whose hash has none of these bits: one in 128.
const ANCHOR_MASK: u64 = 127;
const WINDOW: usize = 16;

/// How a page compares with the other program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Likeness {
    OneFrame,
    Same,
    Zeros,
    Elsewhere,
    Shifted,
    Pointers,
    Counters,
    Incompressible,
    Unique,
}

impl Likeness {
    pub fn name(self) -> &'static str {
        match self {
            Self::OneFrame => "in one frame already",
            Self::Same => "equal at the same place",
            Self::Zeros => "zeros",
            Self::Elsewhere => "equal to a page at another place: these merge, too",
            Self::Shifted => "equal, but shifted by some bytes: never equal as pages",
            Self::Pointers => "differ in pointers (ASLR)",
            Self::Counters => "differ in a few other words: counts, times, ids",
            Self::Incompressible => "look compressed, encrypted or random",
            Self::Unique => "differ wholly",
        }
    }

    /// What would make such pages equal.
    pub fn remedy(self) -> Option<&'static str> {
        match self {
            Self::OneFrame | Self::Same | Self::Zeros | Self::Elsewhere | Self::Unique => None,
            Self::Shifted => Some("page-aligned buffers, or the same order of allocations"),
            Self::Pointers => Some("fork both from one parent or snapshot, or setarch -R"),
            Self::Counters => Some("gc.freeze() (Python), Process.warmup (Ruby): counts elsewhere"),
            Self::Incompressible => Some("keep it unpacked; encrypted memory is never equal"),
        }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct PairReport {
    pub pids: [i32; 2],
    /// How many pages of the first program we've compared, and about which part of all its pages.
    pub pages: u64,
    pub sampled_fraction: f64,
    /// The largest class first.
    pub classes: Vec<Class>,
    /// How many words differ on pages that nearly match, and how many of these words are addresses in the program's own
    /// memory.
    pub differing_words: u64,
    pub pointer_words: u64,
    /// Pages for which either program has a huge page.
    pub huge_pages: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Class {
    pub likeness: Likeness,
    pub pages: u64,
}

/// The address ranges that a program maps, ascending.
#[derive(Debug)]
struct Space(Vec<(u64, u64)>);

impl Space {
    fn of(details: &[VmaDetail]) -> Self {
        Self(details.iter().map(|detail| (detail.vma.start, detail.vma.end)).collect())
    }

    fn holds(&self, address: u64) -> bool {
        let next = self.0.partition_point(|&(_, end)| end <= address);
        self.0.get(next).is_some_and(|&(start, _)| start <= address)
    }
}

/// How many words differ between two pages, and how many of these are pointers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Difference {
    words: usize,
    pointers: usize,
}

impl Difference {
    fn between(one: &PageBytes, other: &PageBytes, spaces: &[Space; 2]) -> Self {
        let mut difference = Self::default();
        for (one, other) in words(one).zip(words(other)) {
            if one != other {
                difference.words += 1;
                difference.pointers += usize::from(spaces[0].holds(one) && spaces[1].holds(other));
            }
        }
        difference
    }

    /// `None` if too many words differ.
    fn likeness(self) -> Option<Likeness> {
        match self.words {
            0 => Some(Likeness::Same),
            words if self.pointers * 10 >= words * 9 => Some(Likeness::Pointers),
            words if words > FEW_WORDS => None,
            words if self.pointers * 2 >= words => Some(Likeness::Pointers),
            _ => Some(Likeness::Counters),
        }
    }
}

fn words(page: &PageBytes) -> impl Iterator<Item = u64> {
    page.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// A block of one program's pages, with the contents of those that we could read.
#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    present: Vec<bool>,
    huge: Vec<bool>,
    frames: Vec<Option<u64>>,
}

impl Block {
    fn read(reader: &mut PageReader, process: &Process, first: Vpn, pages: u64) -> Result<Self, ReadError> {
        let length = index(u32::try_from(pages).unwrap_or(0));
        let mut block = Self {
            bytes: vec![0; length * PAGE_SIZE],
            present: vec![false; length],
            huge: vec![false; length],
            frames: vec![None; length],
        };
        let how = ReadHow { huge: true, contents: Contents::Present, ..ReadHow::default() };
        reader.read_runs(process, &[(first, u32::try_from(pages).unwrap_or(0))], how, |view| {
            let at = usize::try_from(view.page.0 - first.0).unwrap_or(0);
            if let Some(bytes) = view.bytes {
                block.bytes[at * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(bytes);
                block.present[at] = true;
                block.huge[at] = view.huge;
                block.frames[at] = view.frame;
            }
        })?;
        Ok(block)
    }

    fn page(&self, at: usize) -> Option<&PageBytes> {
        if !*self.present.get(at)? {
            return None;
        }
        self.bytes[at * PAGE_SIZE..][..PAGE_SIZE].try_into().ok()
    }
}

/// Calls `visit` with the hash and the offset of each window that we index.
fn anchors(bytes: &[u8], mut visit: impl FnMut(u64, usize)) {
    for (at, window) in bytes.windows(WINDOW).enumerate() {
        let word = |from: usize| window[from..from + 8].try_into().map_or(0, u64::from_le_bytes);
        let (first, second) = (word(0), word(8));
        // Windows that repeat 8 bytes, such as zeros, occur everywhere.
        if first == second {
            continue;
        }
        let hash = mix(first ^ second.rotate_left(32));
        if hash & ANCHOR_MASK == 0 {
            visit(hash, at);
        }
    }
}

/// Whether a block has most of this page's bytes, at any offset. `places`: the block's indexed windows by hash.
fn holds_shifted(page: &PageBytes, places: &HashMap<u64, usize>, block: &[u8]) -> bool {
    let mut tried = BTreeSet::new();
    let mut found = false;
    anchors(page, |hash, at| {
        let Some(start) = places.get(&hash).and_then(|place| place.checked_sub(at)) else { return };
        if found || !tried.insert(start) {
            return;
        }
        let Some(other) = block.get(start..start + PAGE_SIZE) else { return };
        let mut equal = 0;
        for (one, other) in page.iter().zip(other) {
            equal += usize::from(one == other);
        }
        found = equal * 8 >= PAGE_SIZE * 7;
    });
    found
}

/// Whether the bytes of a page are as evenly distributed as random ones: then its entropy is above 7.8 bits a byte.
fn is_incompressible(page: &PageBytes) -> bool {
    let mut counts = [0_u32; 256];
    for &byte in page {
        counts[usize::from(byte)] += 1;
    }
    let mut entropy = 0.0;
    for count in counts {
        if count == 0 {
            continue;
        }
        let share = f64::from(count) / PAGE_SIZE as f64;
        entropy -= share * share.log2();
    }
    entropy > 7.8
}

/// Pairs the mappings of two programs: by name and size, then by name, then by size, each time in the order of
/// addresses.
fn like_mappings(one: &[VmaDetail], other: &[VmaDetail]) -> Vec<(usize, usize)> {
    let mut pairs = BTreeMap::new();
    let mut taken = vec![false; other.len()];
    for (by_name, by_size) in [(true, true), (true, false), (false, true)] {
        let key = |detail: &VmaDetail| {
            let name = if by_name { detail.vma.name.clone() } else { Vec::new() };
            (name, detail.vma.perms, if by_size { detail.vma.pages().0 } else { 0 })
        };
        let mut waiting: HashMap<_, VecDeque<usize>> = HashMap::new();
        for (number, detail) in other.iter().enumerate() {
            if !taken[number] {
                waiting.entry(key(detail)).or_default().push_back(number);
            }
        }
        for (number, detail) in one.iter().enumerate() {
            if pairs.contains_key(&number) {
                continue;
            }
            if let Some(mate) = waiting.get_mut(&key(detail)).and_then(VecDeque::pop_front) {
                taken[mate] = true;
                pairs.insert(number, mate);
            }
        }
    }
    pairs.into_iter().collect()
}

/// The address ranges that a process maps, and the mappings whose pages we may read.
fn readable(process: &Process) -> Result<(Space, Vec<VmaDetail>), ReadError> {
    let mut details = read_smaps_named(process)?;
    let space = Space::of(&details);
    details.retain(|detail| {
        let causes = Causes::of(detail, vma_exclusion(detail).as_ref());
        causes.is_some_and(|causes| causes.anonymous.is_none_or(Cause::is_read))
    });
    Ok((space, details))
}

/// A block of two like mappings: its first page in each program, and its length.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: [Vpn; 2],
    pages: u64,
}

/// The blocks in which the first program has pages in memory, and the number of these pages.
fn places(
    reader: &mut PageReader,
    process: &Process,
    details: &[Vec<VmaDetail>; 2],
) -> Result<(Vec<Place>, u64), ReadError> {
    let mut places: Vec<Place> = Vec::new();
    let mut populated = 0;
    for (one, other) in like_mappings(&details[0], &details[1]) {
        let start = details[0][one].vma.first();
        let mate = details[1][other].vma.first();
        let pages = details[0][one].vma.pages().min(details[1][other].vma.pages());
        reader.walk(process, start, pages, |page, entry| {
            if !entry.present() {
                return;
            }
            populated += 1;
            let offset = (page.0 - start.0) / BLOCK * BLOCK;
            let first = start + offset;
            if places.last().is_none_or(|last| last.first[0] != first) {
                places.push(Place { first: [first, mate + offset], pages: BLOCK.min(pages.0 - offset) });
            }
        })?;
    }
    Ok((places, populated))
}

/// The results of the blocks that we've compared.
#[derive(Debug, Default)]
struct Comparison {
    classes: BTreeMap<Likeness, u64>,
    /// Pages that aren't equal to the other program's page at the same place.
    unequal: Vec<(Digest, Likeness)>,
    others: HashSet<Digest>,
    difference: Difference,
    huge_pages: u64,
}

impl Comparison {
    fn add(&mut self, blocks: &[Block; 2], spaces: &[Space; 2], digester: &Digester) {
        let [one, other] = blocks;
        for at in 0..other.present.len() {
            if let Some(page) = other.page(at) {
                self.others.insert(digester.digest(page));
            }
        }
        let mut anchored: Option<HashMap<u64, usize>> = None;
        for at in 0..one.present.len() {
            let Some(page) = one.page(at) else { continue };
            self.huge_pages += u64::from(one.huge[at] || other.huge[at]);
            if one.frames[at].is_some() && one.frames[at] == other.frames[at] {
                *self.classes.entry(Likeness::OneFrame).or_default() += 1;
                continue;
            }
            if is_zero(page) {
                *self.classes.entry(Likeness::Zeros).or_default() += 1;
                continue;
            }
            let difference = other.page(at).map(|mate| Difference::between(page, mate, spaces));
            let mut likeness = difference.and_then(Difference::likeness);
            if likeness == Some(Likeness::Same) {
                *self.classes.entry(Likeness::Same).or_default() += 1;
                continue;
            }
            if let (Some(_), Some(difference)) = (likeness, difference) {
                self.difference.words += difference.words;
                self.difference.pointers += difference.pointers;
            }
            if likeness.is_none() {
                let places = anchored.get_or_insert_with(|| {
                    let mut places = HashMap::new();
                    anchors(&other.bytes, |hash, place| _ = places.entry(hash).or_insert(place));
                    places
                });
                if holds_shifted(page, places, &other.bytes) {
                    likeness = Some(Likeness::Shifted);
                }
            }
            let rest = if is_incompressible(page) { Likeness::Incompressible } else { Likeness::Unique };
            self.unequal.push((digester.digest(page), likeness.unwrap_or(rest)));
        }
    }

    fn classes(&mut self) -> Vec<Class> {
        for (digest, likeness) in std::mem::take(&mut self.unequal) {
            let likeness = if self.others.contains(&digest) { Likeness::Elsewhere } else { likeness };
            *self.classes.entry(likeness).or_default() += 1;
        }
        let mut classes: Vec<Class> = Vec::new();
        for (&likeness, &pages) in &self.classes {
            classes.push(Class { likeness, pages });
        }
        classes.sort_by_key(|class| std::cmp::Reverse(class.pages));
        classes
    }
}

/// Compares two programs. Reads a sample, or all pages if `exact`.
pub fn compare(
    reader: &mut ScanReader,
    one: &Arc<Process>,
    other: &Arc<Process>,
    seed: u64,
    exact: bool,
) -> Result<PairReport, ReadError> {
    let (own_space, own) = reader.run(one, |_, process| readable(process))?;
    let (other_space, others) = reader.run(other, |_, process| readable(process))?;
    let spaces = [own_space, other_space];
    let details = [own, others];
    let (places, populated) = reader.run(one, move |reader, process| places(reader, process, &details))?;
    let fraction = if exact { 1.0 } else { (PAGES / populated.max(1) as f64).min(1.0) };
    let digester = Digester::new(seed);
    let mut comparison = Comparison::default();
    for place in places {
        if (mix(place.first[0].0 ^ seed) >> 11) as f64 / (1_u64 << 53) as f64 >= fraction {
            continue;
        }
        let Place { first, pages } = place;
        let blocks = [
            reader.run(one, move |reader, process| Block::read(reader, process, first[0], pages))?,
            reader.run(other, move |reader, process| Block::read(reader, process, first[1], pages))?,
        ];
        comparison.add(&blocks, &spaces, &digester);
    }
    let classes = comparison.classes();
    Ok(PairReport {
        pids: [one.pid(), other.pid()],
        pages: classes.iter().map(|class| class.pages).sum(),
        sampled_fraction: fraction,
        classes,
        differing_words: count(comparison.difference.words),
        pointer_words: count(comparison.difference.pointers),
        huge_pages: comparison.huge_pages,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::random::Random;
    use pagefold_procmem::maps::parse_smaps;

    const SPACES: [u64; 2] = [0x5555_0000_0000, 0x7777_0000_0000];

    fn random_page(seed: u64) -> PageBytes {
        let mut random = Random::new(seed);
        std::array::from_fn(|_| u8::try_from(random.below(256)).unwrap())
    }

    /// A page of text, whose entropy is low.
    fn text_page(seed: u64) -> PageBytes {
        let mut random = Random::new(seed);
        std::array::from_fn(|_| b'a' + u8::try_from(random.below(16)).unwrap())
    }

    fn block(pages: &[PageBytes]) -> Block {
        Block {
            bytes: pages.concat(),
            present: vec![true; pages.len()],
            huge: vec![false; pages.len()],
            frames: vec![None; pages.len()],
        }
    }

    fn classes(one: &[PageBytes], other: &[PageBytes]) -> Vec<(Likeness, u64)> {
        let spaces = SPACES.map(|start| Space(vec![(start, start + (1 << 30))]));
        let mut comparison = Comparison::default();
        comparison.add(&[block(one), block(other)], &spaces, &Digester::new(7));
        comparison.classes().iter().map(|class| (class.likeness, class.pages)).collect()
    }

    fn put(page: &mut PageBytes, word: usize, value: u64) {
        page[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
    }

    #[test]
    fn each_difference_has_its_name() {
        let base = text_page(1);
        let mut pointers = [base, base];
        for (page, start) in pointers.iter_mut().zip(SPACES) {
            (0..300).for_each(|word| put(page, word, start + 4096 * u64::from(u16::try_from(word).unwrap())));
        }
        let mut counted = base;
        put(&mut counted, 3, 77);
        put(&mut counted, 90, 78);
        let one = |page, mate| classes(&[page], &[mate]);
        assert_eq!(one(base, base), [(Likeness::Same, 1)]);
        assert_eq!(one([0; PAGE_SIZE], base), [(Likeness::Zeros, 1)]);
        assert_eq!(one(pointers[0], pointers[1]), [(Likeness::Pointers, 1)]);
        assert_eq!(one(base, counted), [(Likeness::Counters, 1)]);
        assert_eq!(one(base, text_page(2)), [(Likeness::Unique, 1)]);
        assert_eq!(one(random_page(1), random_page(2)), [(Likeness::Incompressible, 1)]);
        let swapped = classes(&[base, text_page(2)], &[text_page(2), text_page(3)]);
        assert_eq!(swapped, [(Likeness::Elsewhere, 1), (Likeness::Unique, 1)]);
    }

    #[test]
    fn a_shift_by_any_number_of_bytes_is_found() {
        let pages: Vec<PageBytes> = (0..8).map(text_page).collect();
        for shift in [1, 8, 100, 4095, 4100] {
            let mut bytes = vec![b'x'; shift];
            bytes.extend(pages.concat());
            let other: Vec<PageBytes> = bytes.as_chunks().0.to_vec();
            let found = classes(&pages, &other[..8]);
            let shifted = found.iter().find(|class| class.0 == Likeness::Shifted).map_or(0, |class| class.1);
            assert!(shifted >= 6, "{shift}: {found:?}");
        }
    }

    #[test]
    fn mappings_are_paired_by_name_before_size() {
        let parse = |heads: &[&str]| {
            let text: Vec<String> = heads.iter().map(|head| format!("{head}\nRss: 4 kB\n")).collect();
            parse_smaps(text.concat().as_bytes()).unwrap()
        };
        let one = parse(&[
            "1000-3000 rw-p 00000000 00:00 0 [heap]",
            "5000-6000 rw-p 00000000 00:00 0 ",
            "7000-9000 rw-p 00000000 08:01 5 /a",
        ]);
        let other = parse(&[
            "1000-4000 rw-p 00000000 00:00 0 [heap]",
            "5000-7000 rw-p 00000000 08:01 6 /b",
            "8000-9000 rw-p 00000000 00:00 0 ",
        ]);
        assert_eq!(like_mappings(&one, &other), [(0, 0), (1, 2), (2, 1)]);
    }
}
