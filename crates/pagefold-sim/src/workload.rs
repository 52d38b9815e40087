//! What simulated processes are made of: regions, what fills them, and who writes to them.

pub mod scenario;
pub(crate) mod script;

use crate::content::{UniqueContents, content_of_series};
use crate::memory::{Backing, ProcessNuma};
use pagefold_core::keys::{DomainKey, FamilyKey, NodeKey, NodeSet};
use pagefold_core::placement::policy::Placement;
use pagefold_core::random::{Random, finalize};
use pagefold_core::units::{EXTENT_PAGES, Pages, Permyriad, Vpn};

/// A process to be: when it starts, when it exits, what it maps.
#[derive(Clone, Debug, Default)]
pub struct Process {
    pub(crate) start_ns: u64,
    pub(crate) exit_ns: Option<u64>,
    pub(crate) untouchable: bool,
    pub(crate) domain: DomainKey,
    pub(crate) place: ProcessNuma,
    pub(crate) mappings: Vec<Mapping>,
}

impl Process {
    /// A process that starts at a virtual time, with nothing mapped yet.
    pub fn starting_at(start_ns: u64) -> Self {
        Self { start_ns, ..Self::default() }
    }
    /// Exits at a virtual time.
    #[must_use]
    pub fn exiting_at(mut self, exit_ns: u64) -> Self {
        self.exit_ns = Some(exit_ns);
        self
    }
    /// Refuses to be marked.
    #[must_use]
    pub fn untouchable(mut self) -> Self {
        self.untouchable = true;
        self
    }
    /// In a trust domain of its own or of its likes.
    #[must_use]
    pub fn in_domain(mut self, domain: u16) -> Self {
        self.domain = DomainKey(domain);
        self
    }
    /// Bound to the processors of a memory node. Without this, of node 0.
    #[must_use]
    pub fn at_home_on(mut self, node: u16) -> Self {
        self.place.home = NodeKey(node);
        self
    }
    /// May run anywhere: its node is where it happens to run, and nobody can tell.
    #[must_use]
    pub fn unbound(mut self) -> Self {
        self.place.bound = false;
        self
    }
    /// Its nice value.
    #[must_use]
    pub fn nice(mut self, nice: i8) -> Self {
        self.place.nice = nice;
        self
    }
    /// Its memory may be on these nodes only (`cpuset.mems`).
    #[must_use]
    pub fn confined_to(mut self, nodes: &[u16]) -> Self {
        self.place.allowed = nodes.iter().copied().map(NodeKey).collect::<NodeSet>();
        self
    }
    /// The policy for it.
    #[must_use]
    pub fn placed(mut self, placement: Placement) -> Self {
        self.place.placement = placement;
        self
    }
    /// Maps a region from its start on. Unless placed, regions follow one another with gaps.
    #[must_use]
    pub fn mapping(mut self, mapping: Mapping) -> Self {
        self.mappings.push(mapping);
        self
    }
}

/// A region to be.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub(crate) pages: Pages,
    pub(crate) fill: Fill,
    pub(crate) behaviour: Behaviour,
    pub(crate) family: FamilyKey,
    pub(crate) resident: Permyriad,
    pub(crate) huge: bool,
    pub(crate) first: Option<Vpn>,
    pub(crate) node: Option<NodeKey>,
    pub(crate) active: bool,
}

impl Mapping {
    /// A static region, all of it resident.
    pub fn new(pages: Pages, fill: Fill) -> Self {
        assert!((1..u64::from(u32::MAX)).contains(&pages.0), "a region has 1 to 2^32 - 2 pages");
        let family = FamilyKey(finalize(pages.0));
        Self {
            pages,
            fill,
            behaviour: Behaviour::Static,
            family,
            resident: Permyriad(10_000),
            huge: false,
            first: None,
            node: None,
            active: false,
        }
    }
    /// What goes on in it.
    #[must_use]
    pub fn behaving(mut self, behaviour: Behaviour) -> Self {
        self.behaviour = behaviour;
        self
    }
    /// Its family. Without this, regions of equal size are one family.
    #[must_use]
    pub fn of_family(mut self, family: u64) -> Self {
        self.family = FamilyKey(family);
        self
    }
    /// Only this share of its pages is there; the others are absent until written.
    #[must_use]
    pub fn resident(mut self, share: Permyriad) -> Self {
        self.resident = share;
        self
    }
    /// Mapped by huge pages where a whole aligned extent fits.
    #[must_use]
    pub fn huge(mut self) -> Self {
        self.huge = true;
        self
    }
    /// On a memory node, wherever its process runs.
    #[must_use]
    pub fn on_node(mut self, node: u16) -> Self {
        self.node = Some(NodeKey(node));
        self
    }
    /// In use: page reclaim has its pages on its active list.
    #[must_use]
    pub fn active(mut self) -> Self {
        self.active = true;
        self
    }
    /// Placed at a page of the address space.
    #[must_use]
    pub fn at(mut self, first: Vpn) -> Self {
        self.first = Some(first);
        self
    }
}

/// What the pages of a region hold at first.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Every page another content, found nowhere else.
    Random,
    /// Written zeros: frames that hold nothing.
    Zeros,
    /// Never written: mapped to the zero page.
    Untouched,
    /// Every page the same content, named by a number.
    Same(u64),
    /// Page i holds content i of a numbered series: regions of one series are copies of each other.
    Series(u64),
    /// Partly a copy of its siblings.
    Replica(Replica),
}

/// A region that has part of its contents in common with its siblings, as instances of one program do:
/// duplicates in short runs, at about the same density throughout a 2 MiB extent.
#[derive(Clone, Debug)]
pub struct Replica {
    /// Siblings are of one template.
    pub template: u64,
    /// The share of common contents in each extent, over and over again for longer regions.
    pub density: Vec<Permyriad>,
    /// The share of pages of zeros.
    pub zeros: Permyriad,
    /// The mean length of a run of common pages, where the density leaves a choice.
    pub run: u32,
    /// Pages by which the common contents lie further down than in the template.
    pub shift: u32,
}

/// What goes on in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Nothing.
    Static,
    /// Writes one page after another, each with what it holds already: undoes merges, changes nothing.
    CowBreaker {
        /// Time between two writes.
        every_ns: u64,
    },
    /// Mapped for as long as unmapped, over and over again. Each life is a new region.
    ShortLived {
        /// The length of a life, and of the gap after it.
        life_ns: u64,
    },
    /// Random pages are rewritten.
    Churn {
        /// The share of the region's pages written per second.
        per_second: Permyriad,
        /// What is written.
        writes: Writes,
    },
    /// Random pages are rewritten, more seldom.
    Turnover {
        /// The time in which as many are as the region has.
        every_ns: u64,
        /// What is written.
        writes: Writes,
    },
}

/// What churn writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Contents found nowhere else.
    Unique,
    /// Contents out of the first `size` of a numbered series.
    Duplicate {
        /// The series.
        series: u64,
        /// How many different contents.
        size: u64,
    },
}

impl Mapping {
    /// The pages as they are at the start of a life.
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
        // Drawn for the template's own pages, so that all siblings agree on which are common.
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
            // Zeros come in larger pieces: memory taken and not used yet.
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

    /// The chance that the next page is common: a chain of two states whose mean runs have the wanted
    /// length, or as near to it as the density and runs of at least one page allow.
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
    fn siblings_share_what_the_density_says_in_runs_of_the_given_length() {
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
            assert!((in_common / pages as f64 - found).abs() < 0.02, "a shifted sibling has the same in common");
        }
    }
}
