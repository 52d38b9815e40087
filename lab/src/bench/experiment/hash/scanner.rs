//! Scans pages with different hashes and measures the cost.

use super::pages::TestPage;
use crate::bench::measures::median;
use crate::partial_hash::{LineHash, PartialHash, RoundCost, StrengthController, WordHash};
use pagefold_engine::hash::{Digest, Digester, PageBytes, is_zero};
use pagefold_engine::units::whole;
use pagefold_procmem::os::cpu::own_cpu_ns;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;
use twox_hash::XxHash64;

/// A page hash. Only a page of zeros hashes to zero.
pub trait Form {
    const NAME: &'static str;
    const FULL: u32;
    /// Hashes a page at a strength.
    fn hash(&self, page: &PageBytes, strength: u32) -> u64;
    /// Computes the full hash from the one at `strength`.
    fn strengthen(&self, page: &PageBytes, hash: u64, strength: u32) -> u64;
}

/// Stands in for a 32-bit state of 0 if the page isn't all zeros.
const PAPER_ZERO: u64 = 1 << 32;

impl Form for WordHash {
    const NAME: &'static str = "paper32";
    const FULL: u32 = <Self as PartialHash>::FULL;
    fn hash(&self, page: &PageBytes, strength: u32) -> u64 {
        match PartialHash::hash(self, page, strength) {
            0 if is_zero(page) => 0,
            0 => PAPER_ZERO,
            state => state.into(),
        }
    }
    fn strengthen(&self, page: &PageBytes, hash: u64, strength: u32) -> u64 {
        let state = u32::try_from(hash).unwrap_or(0);
        u64::from(self.forward(page, state, strength, <Self as Form>::FULL)).max(1)
    }
}

impl Form for LineHash {
    const NAME: &'static str = "lines";
    const FULL: u32 = <Self as PartialHash>::FULL;
    fn hash(&self, page: &PageBytes, strength: u32) -> u64 {
        self.digest(page, strength).0
    }
    fn strengthen(&self, page: &PageBytes, hash: u64, strength: u32) -> u64 {
        self.redigest(page, Digest(hash), strength, <Self as Form>::FULL).0
    }
}

/// XXH64 of the whole page.
pub struct Xxh64(pub u64);

impl Form for Xxh64 {
    const NAME: &'static str = "xxh64";
    const FULL: u32 = 1;
    fn hash(&self, page: &PageBytes, _: u32) -> u64 {
        if is_zero(page) { 0 } else { XxHash64::oneshot(self.0, page).max(1) }
    }
    fn strengthen(&self, _: &PageBytes, hash: u64, _: u32) -> u64 {
        hash
    }
}

/// XXH3 of the whole page, as pagefold computes it.
impl Form for Digester {
    const NAME: &'static str = "xxh3";
    const FULL: u32 = 1;
    fn hash(&self, page: &PageBytes, _: u32) -> u64 {
        self.digest(page).0
    }
    fn strengthen(&self, _: &PageBytes, hash: u64, _: u32) -> u64 {
        hash
    }
}

/// We hash, look up and compare this many pages at a time, so that we rarely read the clock.
const BATCH: usize = 256;

/// The pages, and the position of the next round.
pub struct Scanner<'a> {
    pages: &'a [TestPage],
    round_pages: usize,
    at: usize,
    first: Table,
    second: Table,
}

/// The cost of scanning some pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pages: u64,
    total_ns: u64,
    /// Time for hashing at the strength of the round.
    pub hash_ns: u64,
    /// Time that collisions cost.
    pub penalty_ns: u64,
    /// Compared pages that differed.
    pub collisions: u64,
    duplicates: u64,
}

impl<'a> Scanner<'a> {
    /// Scans these pages. Their number must be a multiple of `round_pages`.
    pub fn new(pages: &'a [TestPage], round_pages: usize) -> Self {
        Self { pages, round_pages, at: 0, first: Table::new(round_pages), second: Table::new(2 * round_pages) }
    }

    /// A contender with adaptive strength.
    pub fn adaptive<F: Form + 'static>(&mut self, form: F) -> Box<dyn Contender> {
        let costs = self.calibrate(&form);
        let strengths = Strengths { controller: StrengthController::new(F::FULL), seen: Vec::new(), rested: None };
        Box::new(Runner { form, adaptive: Some((strengths, costs)) })
    }

    /// Measures the cost of hashing a page at each power of two of strength, each time on other pages, so that none are
    /// cached. A decrease is noise, so we remove it.
    fn calibrate<F: Form>(&mut self, form: &F) -> Costs {
        let slice = (self.round_pages / 8).max(BATCH);
        let mut times: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for _ in 0..5 {
            for bit in 0..=F::FULL.ilog2() {
                let pages = self.next(slice);
                let start = Instant::now();
                for batch in pages.chunks(BATCH) {
                    black_box(hash_batch(form, batch, 1 << bit));
                }
                let ns = start.elapsed().as_nanos() as f64 / pages.len() as f64;
                times.entry(1 << bit).or_default().push(ns);
            }
        }
        let mut costs = Vec::new();
        let mut most: f64 = 0.0;
        for (strength, times) in times {
            most = most.max(median(times));
            costs.push((strength, most));
        }
        Costs(costs)
    }

    /// This many rounds cover all pages.
    pub fn rounds(&self) -> usize {
        self.pages.len() / self.round_pages
    }

    /// Moves to the start of a round.
    pub fn go_to(&mut self, round: usize) {
        self.at = round % self.rounds() * self.round_pages;
    }

    fn next(&mut self, count: usize) -> &'a [TestPage] {
        if self.at + count > self.pages.len() {
            self.at = 0;
        }
        let pages = &self.pages[self.at..][..count];
        self.at += count;
        pages
    }

    /// Scans the pages of one round, and adds the cost.
    fn round<F: Form>(&mut self, form: &F, strength: u32, cost: &mut Cost) {
        let pages = self.next(self.round_pages);
        cost.pages += pages.len() as u64;
        // CPU time, so waiting for a processor doesn't count; the parts by the wall clock, which is faster to read.
        let begin_ns = own_cpu_ns();
        let Self { first, second, .. } = self;
        first.clear();
        second.clear();
        let mut pairs: Vec<(usize, usize, u64)> = Vec::with_capacity(BATCH);
        for (batch, offset) in pages.chunks(BATCH).zip((0..).step_by(BATCH)) {
            let start = Instant::now();
            let hashes = hash_batch(form, batch, strength);
            cost.hash_ns += ns_since(start);
            pairs.clear();
            for (page, &hash) in (offset..offset + batch.len()).zip(&hashes) {
                if hash == 0 {
                    cost.duplicates += 1;
                } else if let Some(other) = first.find_or_insert(hash, page) {
                    pairs.push((other, page, hash));
                }
            }
            if pairs.is_empty() {
                continue;
            }
            let start = Instant::now();
            let compared = pairs.len() as u64;
            pairs.retain(|&(other, page, _)| pages[other] != pages[page]);
            let collided = pairs.len() as u64;
            cost.duplicates += compared - collided;
            cost.collisions += collided;
            cost.penalty_ns += ns_since(start) * collided / compared;
            if pairs.is_empty() {
                continue;
            }
            // Like UKSM, we tell colliding pages apart by their full hashes.
            let start = Instant::now();
            for &(other, page, hash) in &pairs {
                if first.mark(hash) {
                    let full = form.strengthen(&pages[other].0, hash, strength);
                    second.find_or_insert(full, other);
                }
                let full = form.strengthen(&pages[page].0, hash, strength);
                if let Some(other) = second.find_or_insert(full, page) {
                    cost.duplicates += u64::from(pages[other] == pages[page]);
                }
            }
            cost.penalty_ns += ns_since(start);
        }
        cost.total_ns += own_cpu_ns() - begin_ns;
    }
}

fn ns_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Hashes a batch; inlined into each form's loop.
#[inline]
fn hash_batch<F: Form>(form: &F, pages: &[TestPage], strength: u32) -> [u64; BATCH] {
    let mut hashes = [0; BATCH];
    for (hash, TestPage(page)) in hashes.iter_mut().zip(pages) {
        *hash = form.hash(page, strength);
    }
    hashes
}

/// A contender that always hashes at full strength.
pub fn full<F: Form + 'static>(form: F) -> Box<dyn Contender> {
    Box::new(Runner { form, adaptive: None })
}

/// A hash, with fixed or adaptive strength.
pub trait Contender {
    fn name(&self) -> String;
    /// Scans the pages of the next round and adds the cost to a pass.
    fn round(&mut self, scanner: &mut Scanner<'_>, pass: &mut Pass);
    /// The contender's strengths so far, if it's adaptive.
    fn strengths(&self) -> Option<&Strengths>;
}

/// The cost of the rounds that together cover all pages once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    cost: Cost,
    rounds: u32,
    strengths: u32,
}

impl Pass {
    /// Total CPU time, nanoseconds.
    pub fn ns_per_page(&self) -> f64 {
        self.per_page(|cost| cost.total_ns)
    }

    /// Mean strength of the rounds.
    pub fn strength(&self) -> f64 {
        f64::from(self.strengths) / f64::from(self.rounds.max(1))
    }

    /// Pages equal to an earlier page of their round.
    pub fn duplicates(&self) -> f64 {
        self.cost.duplicates as f64
    }

    /// A part of the cost, per page.
    pub fn per_page(&self, of: fn(&Cost) -> u64) -> f64 {
        of(&self.cost) as f64 / self.cost.pages.max(1) as f64
    }
}

/// The controller, and the strengths it chose.
pub struct Strengths {
    controller: StrengthController,
    seen: Vec<u32>,
    rested: Option<usize>,
}

impl Strengths {
    /// Takes a round into account, by the cost before and after it.
    fn adapt(&mut self, strength: u32, costs: &Costs, before: &Cost, after: &Cost) {
        self.seen.push(strength);
        let pages = (after.pages - before.pages) as f64;
        self.controller.round(&RoundCost {
            full_ns: whole(costs.full() * pages),
            profit_ns: whole((costs.full() - costs.at(strength)) * pages),
            penalty_ns: after.penalty_ns - before.penalty_ns,
            collisions: after.collisions - before.collisions,
        });
        if self.is_stable() && self.rested.is_none() {
            self.rested = Some(self.seen.len());
        }
    }

    pub fn is_stable(&self) -> bool {
        self.controller.is_stable()
    }

    /// Rounds until it first became stable.
    pub fn rounds_to_rest(&self) -> u32 {
        u32::try_from(self.rested.unwrap_or(self.seen.len())).unwrap_or(u32::MAX)
    }

    /// The strength of each round.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        self.seen.iter().zip(0_u32..).map(|(&strength, round)| (f64::from(round), f64::from(strength))).collect()
    }
}

/// Cost of hashing a page, nanoseconds, by ascending strength.
struct Costs(Vec<(u32, f64)>);

impl Costs {
    /// Interpolates linearly between two measured strengths.
    fn at(&self, strength: u32) -> f64 {
        let above = self.0.partition_point(|&(measured, _)| measured < strength).min(self.0.len() - 1);
        let ((high, high_ns), (low, low_ns)) = (self.0[above], self.0[above.saturating_sub(1)]);
        let way = f64::from(strength.saturating_sub(low)) / f64::from(high - low).max(1.0);
        low_ns + (high_ns - low_ns) * way
    }

    fn full(&self) -> f64 {
        self.0.last().map_or(0.0, |&(_, ns)| ns)
    }
}

struct Runner<F> {
    form: F,
    adaptive: Option<(Strengths, Costs)>,
}

impl<F: Form> Contender for Runner<F> {
    fn name(&self) -> String {
        format!("{}_{}", F::NAME, if self.adaptive.is_some() { "adaptive" } else { "full" })
    }

    fn round(&mut self, scanner: &mut Scanner<'_>, pass: &mut Pass) {
        let strength = self.strengths().map_or(F::FULL, |strengths| strengths.controller.strength());
        let before = pass.cost;
        scanner.round(&self.form, strength, &mut pass.cost);
        pass.rounds += 1;
        pass.strengths += strength;
        if let Some((strengths, costs)) = &mut self.adaptive {
            strengths.adapt(strength, costs, &before, &pass.cost);
        }
    }

    fn strengths(&self) -> Option<&Strengths> {
        self.adaptive.as_ref().map(|(strengths, _)| strengths)
    }
}

/// Maps hashes to the first page with each: open addressing, at most half full.
struct Table {
    slots: Vec<Slot>,
    mask: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Zero if free: we never look up pages of zeros.
    hash: u64,
    page: u32,
    marked: bool,
}

impl Table {
    fn new(entries: usize) -> Self {
        let slots = (2 * entries).next_power_of_two();
        Self { slots: vec![Slot::default(); slots], mask: slots - 1 }
    }

    fn clear(&mut self) {
        self.slots.fill(Slot::default());
    }

    /// Finds the slot of a hash, or the free one for it.
    fn slot(&mut self, hash: u64) -> &mut Slot {
        // Multiplicative hashing by the golden ratio, because the paper's hash has only 32 bits.
        let mut at = usize::try_from(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap_or_default();
        loop {
            at &= self.mask;
            let slot = self.slots[at];
            if slot.hash == hash || slot.hash == 0 {
                return &mut self.slots[at];
            }
            at += 1;
        }
    }

    /// Returns the first page with the hash, or stores this one.
    fn find_or_insert(&mut self, hash: u64, page: usize) -> Option<usize> {
        let slot = self.slot(hash);
        if slot.hash == hash {
            return Some(slot.page as usize);
        }
        *slot = Slot { hash, page: u32::try_from(page).unwrap_or(u32::MAX), marked: false };
        None
    }

    /// Marks a hash in the table and returns whether it was unmarked before.
    fn mark(&mut self, hash: u64) -> bool {
        !std::mem::replace(&mut self.slot(hash).marked, true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::PageSet;
    use super::*;
    use std::collections::HashSet;

    fn duplicates(scanner: &mut Scanner<'_>, form: &impl Form, strength: u32) -> u64 {
        let mut cost = Cost::default();
        scanner.round(form, strength, &mut cost);
        scanner.round(form, strength, &mut cost);
        cost.duplicates
    }

    #[test]
    fn every_form_finds_the_duplicates_of_each_round_at_any_strength() {
        for set in PageSet::ALL {
            let mut pages = vec![TestPage::ZERO; 1024];
            set.fill(&mut pages);
            let distinct =
                |pages: &[TestPage]| pages.iter().filter(|page| !is_zero(&page.0)).collect::<HashSet<_>>().len();
            let expected = 1024 - pages.chunks(512).map(distinct).sum::<usize>();
            let mut scanner = Scanner::new(&pages, 512);
            let mut found = Vec::new();
            for strength in [1, 3, 64] {
                found.push(duplicates(&mut scanner, &LineHash::new(1), strength));
                found.push(duplicates(&mut scanner, &WordHash::new(1), strength * 16));
            }
            found.push(duplicates(&mut scanner, &Xxh64(1), 1));
            found.push(duplicates(&mut scanner, &Digester::new(1), 1));
            assert_eq!(found, [expected as u64; 8], "{set:?}");
        }
    }

    #[test]
    fn costs_are_interpolated_between_measurements() {
        let costs = Costs(vec![(1, 10.0), (2, 20.0), (4, 60.0)]);
        assert_eq!([0, 1, 2, 3, 4, 9].map(|strength| costs.at(strength))[1..5], [10.0, 20.0, 40.0, 60.0]);
        assert_eq!((costs.full(), Costs(vec![(1, 7.0)]).at(1)), (60.0, 7.0));
    }
}
