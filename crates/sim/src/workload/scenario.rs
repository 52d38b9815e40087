//! Ready-made workloads for experiments with memory deduplication. Each function adds processes that start at once, and
//! returns them, so we can combine workloads.

use crate::host::SimHost;
use crate::workload::{Behaviour, Fill, Mapping, Process, Replica, Writes};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::{Pages, Permyriad};

const NS_PER_MS: u64 = 1_000_000;

fn one(sim: &mut SimHost, mapping: Mapping) -> OwnerKey {
    sim.add(Process::starting_at(0).mapping(mapping))
}

/// UKSM's first workload: `pages` pages with the same content, and as many with contents of their own.
pub fn static_mix(sim: &mut SimHost, pages: Pages) -> [OwnerKey; 2] {
    [one(sim, Mapping::new(pages, Fill::Same(1)).of_family(1)), idle(sim, pages)]
}

/// Two processes with the same contents in `pages` pages each, so each content exists exactly twice, beside `random`
/// pages with contents of their own. The common case among real programs, and the hard one for sampling.
pub fn pairs(sim: &mut SimHost, pages: Pages, random: Pages) -> Vec<OwnerKey> {
    let mut owners: Vec<_> = (0..2).map(|_| one(sim, Mapping::new(pages, Fill::Series(2)).of_family(2))).collect();
    if random.0 > 0 {
        owners.push(idle(sim, random));
    }
    owners
}

/// UKSM's COW-breaking workload: identical pages. Every 10 ms the process writes the next one with the content that it
/// already has. So a merge lasts until the writer comes back to the page.
pub fn cow_breaker(sim: &mut SimHost, pages: Pages) -> OwnerKey {
    let breaker = Behaviour::CowBreaker { every_ns: 10 * NS_PER_MS };
    one(sim, Mapping::new(pages, Fill::Same(3)).behaving(breaker).of_family(3))
}

/// UKSM's short-lived workload: identical pages that are mapped and unmapped in turn, for `life_ns` each.
pub fn short_lived(sim: &mut SimHost, pages: Pages, life_ns: u64) -> OwnerKey {
    one(sim, Mapping::new(pages, Fill::Same(4)).behaving(Behaviour::ShortLived { life_ns }).of_family(4))
}

/// UKSM's sparse workload: a large range of which only a share is resident, each page with a content of its own.
pub fn sparse(sim: &mut SimHost, pages: Pages, resident: Permyriad) -> OwnerKey {
    one(sim, Mapping::new(pages, Fill::Random).resident(resident).of_family(5))
}

pub fn idle(sim: &mut SimHost, pages: Pages) -> OwnerKey {
    one(sim, Mapping::new(pages, Fill::Random).of_family(6))
}

/// Instances of one program, as [`Replica`] describes them.
pub fn replicas(sim: &mut SimHost, instances: u32, pages: Pages, replica: &Replica) -> Vec<OwnerKey> {
    let mapping = || Mapping::new(pages, Fill::Replica(replica.clone())).of_family(replica.template);
    (0..instances).map(|_| one(sim, mapping())).collect()
}

/// In-memory databases with the same data. On three instances of redis we measured 1 % zeros, 59 % savable, runs of 6
/// to 8 pages, and every duplicate in an extent with at least half duplicates.
pub fn redis(sim: &mut SimHost, instances: u32, pages: Pages) -> Vec<OwnerKey> {
    let density = vec![Permyriad(8_800)];
    replicas(sim, instances, pages, &Replica { template: 10, density, zeros: Permyriad(100), run: 7, shift: 0 })
}

/// Databases on copies of one data directory. On three instances of mariadb we measured 36 % zeros, 72 % savable, and
/// the density of redis.
pub fn mariadb(sim: &mut SimHost, instances: u32, pages: Pages) -> Vec<OwnerKey> {
    let density = vec![Permyriad(8_400)];
    replicas(sim, instances, pages, &Replica { template: 11, density, zeros: Permyriad(3_600), run: 7, shift: 0 })
}

/// Garbage-collected heaps with little in common. On three instances of java we measured 3 % savable (a third of that
/// in dense extents), and 28 % of the pages changed within 30 s.
pub fn java(sim: &mut SimHost, instances: u32, pages: Pages) -> Vec<OwnerKey> {
    // One extent in 66 is dense; the other duplicates are spread thinly.
    let mut density = vec![Permyriad(200); 66];
    density[0] = Permyriad(7_000);
    let replica = Replica { template: 12, density, zeros: Permyriad(100), run: 3, shift: 0 };
    let churn = Behaviour::Churn { per_second: Permyriad(107), writes: Writes::Unique };
    let mapping = || Mapping::new(pages, Fill::Replica(replica.clone())).behaving(churn.clone()).of_family(12);
    (0..instances).map(|_| one(sim, mapping())).collect()
}
