//! Simulated processes: their regions, the regions' first contents, and the writes to them.

pub mod scenario;
pub(crate) mod script;

use crate::content::{UniqueContents, content_of_series};
use crate::memory::{Backing, ProcessNuma};
use pagefold_engine::keys::{DomainKey, FamilyKey, NodeKey, NodeSet};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::random::{Random, finalize};
use pagefold_engine::units::{EXTENT_PAGES, Pages, Permyriad};

/// Defines builder methods, which set a field and return the value.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty)?): $($field:ident).+ = $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $($argument: $type)?) -> Self {
                self.$($field).+ = $value;
                self
            }
        )*
    };
}

#[derive(Clone, Debug, Default)]
pub struct Process {
    pub(crate) start_ns: u64,
    pub(crate) exit_ns: Option<u64>,
    pub(crate) untouchable: bool,
    pub(crate) domain: DomainKey,
    pub(crate) numa: ProcessNuma,
    pub(crate) mappings: Vec<Mapping>,
}

impl Process {
    /// A process that starts at a virtual time, with nothing mapped yet.
    pub fn starting_at(start_ns: u64) -> Self {
        Self { start_ns, ..Self::default() }
    }
    setters! {
        exiting_at(exit_ns: u64): exit_ns = Some(exit_ns);
        untouchable(): untouchable = true;
        /// Sets its trust domain. Default: 0.
        in_domain(domain: u16): domain = DomainKey(domain);
        /// Binds it to the processors of a memory node. Default: node 0.
        at_home_on(node: u16): numa.home = NodeKey(node);
        /// Lets it run anywhere. Then it's on its node only by chance, and has no home.
        unbound(): numa.bound = false;
        nice(nice: i8): numa.nice = nice;
        /// Restricts its memory to some nodes (`cpuset.mems`).
        confined_to(nodes: &[u16]): numa.allowed = nodes.iter().copied().map(NodeKey).collect::<NodeSet>();
        placed(placement: Placement): numa.placement = placement;
    }
    /// Adds a region, which is mapped when the process starts. There are gaps between regions.
    #[must_use]
    pub fn mapping(mut self, mapping: Mapping) -> Self {
        self.mappings.push(mapping);
        self
    }
}

#[derive(Clone, Debug)]
pub struct Mapping {
    pub(crate) pages: Pages,
    pub(crate) fill: Fill,
    pub(crate) behaviour: Behaviour,
    pub(crate) family: FamilyKey,
    pub(crate) resident: Permyriad,
    pub(crate) huge: bool,
    pub(crate) active: bool,
    pub(crate) pinned: bool,
}

impl Mapping {
    /// A static region, fully resident.
    ///
    /// # Panics
    /// If `pages` is 0 or above 2^32 - 2.
    pub fn new(pages: Pages, fill: Fill) -> Self {
        assert!((1..u64::from(u32::MAX)).contains(&pages.0), "a region has 1 to 2^32 - 2 pages");
        Self {
            pages,
            fill,
            behaviour: Behaviour::Static,
            family: FamilyKey(finalize(pages.0)),
            resident: Permyriad(10_000),
            huge: false,
            active: false,
            pinned: false,
        }
    }
    setters! {
        /// Sets which pages are rewritten, and when.
        behaving(behaviour: Behaviour): behaviour = behaviour;
        /// Sets its family. By default, regions of equal size are one family.
        of_family(family: u64): family = FamilyKey(family);
        /// Makes only a share of its pages resident. The others are absent until written.
        resident(share: Permyriad): resident = share;
        /// Maps it by huge pages where a whole aligned extent fits.
        huge(): huge = true;
        /// Pins its pages, as io_uring does: they never merge.
        pinned(): pinned = true;
        /// Puts its pages on page reclaim's active list.
        active(): active = true;
    }
}

/// The contents of a region at the start.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Each page has a content of its own.
    Random,
    /// All pages were written with zeros, so they have frames.
    Zeros,
    /// No page was ever written: all map the zero page.
    Untouched,
    /// All pages have the same content, identified by a number.
    Same(u64),
    /// Page i has content i of a numbered series, so regions of one series are copies.
    Series(u64),
    /// Partly a copy of other regions.
    Replica(Replica),
}

/// A region that has part of its contents in common with its siblings, like instances of one program. The duplicates
/// are in short runs, at about the same density throughout a 2 MiB extent.
#[derive(Clone, Debug)]
pub struct Replica {
    /// The template; regions of the same template are siblings.
    pub template: u64,
    /// The share of common contents in each extent. Longer regions repeat the list.
    pub density: Vec<Permyriad>,
    pub zeros: Permyriad,
    /// The mean length of a run of common pages, if the density permits it.
    pub run: u32,
    /// By how many pages the common contents come earlier than in the template.
    pub shift: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behaviour {
    Static,
    /// Writes one page after another with the content that it already has, which breaks merges and changes nothing.
    CowBreaker {
        every_ns: u64,
    },
    /// Maps and unmaps the region in turn. Each time it's a new region.
    ShortLived {
        /// How long the region is mapped, and then unmapped.
        life_ns: u64,
    },
    Churn {
        /// The share of the region's pages written per second.
        per_second: Permyriad,
        writes: Writes,
    },
    /// Rewrites random pages, less often.
    Turnover {
        /// How long the process takes to make as many writes as the region has pages.
        every_ns: u64,
        writes: Writes,
    },
}

/// The new contents of rewritten pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Contents that no other page has.
    Unique,
    /// Contents from a numbered series.
    Duplicate {
        series: u64,
        /// How many contents of the series we use, beginning with the first.
        size: u64,
    },
}

impl Mapping {
    /// The contents and the backing when the region is mapped.
    pub(crate) fn populate(&self, unique: &mut UniqueContents, stream: &mut Random) -> (Vec<u64>, Vec<Backing>) {
        let pages = self.pages.0;
        let content: Vec<u64> = match &self.fill {
            Fill::Random => (0..pages).map(|_| unique.next()).collect(),
            Fill::Zeros | Fill::Untouched => vec![0; usize::try_from(pages).expect("checked by new")],
            Fill::Same(name) => {
                vec![content_of_series(*name, u64::MAX); usize::try_from(pages).expect("checked by new")]
            }
            Fill::Series(series) => (0..pages).map(|page| content_of_series(*series, page)).collect(),
            Fill::Replica(replica) => replica.contents(pages, unique),
        };
        let present = if matches!(self.fill, Fill::Untouched) { Backing::ZeroMapped } else { Backing::Private };
        let backing =
            content.iter().map(|_| if stream.chance(self.resident) { present } else { Backing::Absent }).collect();
        (content, backing)
    }
}

impl Replica {
    fn contents(&self, pages: u64, unique: &mut UniqueContents) -> Vec<u64> {
        // We draw random numbers for the template's pages, so that all siblings agree on the common ones.
        let mut chance = Random::for_purpose(self.template, 0x007e_41a7e);
        let (mut common, mut zero) = (false, false);
        let mut contents = Vec::new();
        for page in 0..pages + u64::from(self.shift) {
            let extent = usize::try_from(page / EXTENT_PAGES).unwrap_or(usize::MAX);
            let density = self.density.get(extent % self.density.len().max(1)).copied().unwrap_or_default();
            common = if page % EXTENT_PAGES == 0 {
                chance.chance(density)
            } else {
                chance.chance(self.to_common(common, density))
            };
            // Zeros come in larger pieces, like memory that's allocated and not used yet.
            if page % 16 == 0 {
                zero = chance.chance(self.zeros);
            }
            if page < u64::from(self.shift) {
                continue;
            }
            contents.push(match (zero, common) {
                (true, _) => 0,
                (_, true) => content_of_series(self.template, page),
                _ => unique.next(),
            });
        }
        contents
    }

    /// The probability that the next page is common, in a two-state chain. The chain's runs have the wanted mean
    /// length, or the closest one that the density and runs of at least one page permit.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // shares of one, in ten-thousandths
    fn to_common(&self, common: bool, density: Permyriad) -> Permyriad {
        let share = density.fraction();
        if share <= 0.0 || share >= 1.0 {
            return density;
        }
        let odds = share / (1.0 - share);
        let gap = (f64::from(self.run) / odds).max(1.0 / odds).max(1.0);
        let chance = if common { 1.0 - 1.0 / (gap * odds).max(1.0) } else { 1.0 / gap };
        Permyriad((chance * 10_000.0).round() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_share_pages_at_the_given_density_and_run_length() {
        for (share, run) in [(8_800, 7), (5_000, 7), (2_000, 7), (200, 3), (10_000, 7), (0, 7)] {
            let replica =
                |shift| Replica { template: 9, density: vec![Permyriad(share)], zeros: Permyriad(0), run, shift };
            let mut unique = UniqueContents::new(1);
            let pages = 200 * EXTENT_PAGES;
            let one = replica(0).contents(pages, &mut unique);
            let two = replica(0).contents(pages, &mut unique);
            let common: Vec<bool> = one.iter().zip(&two).map(|(a, b)| a == b).collect();
            let found = common.iter().filter(|common| **common).count() as f64 / pages as f64;
            assert!((found - f64::from(share) / 10_000.0).abs() < 0.02, "density {share}: {found}");
            let runs = common.windows(2).filter(|pair| pair[0] != pair[1]).count() as f64 / 2.0;
            if share == 5_000 || share == 8_800 {
                let mean = found * pages as f64 / runs;
                assert!((6.0..8.5).contains(&mean), "density {share}: runs of {mean}");
            }
            let shifted = replica(100).contents(pages, &mut unique);
            let in_common = one[100..].iter().zip(&shifted).filter(|(a, b)| a == b).count() as f64;
            assert!((in_common / pages as f64 - found).abs() < 0.02, "a shifted sibling must have as much in common");
        }
    }
}
