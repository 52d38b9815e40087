//! A bound that no placement exceeds.
//!
//! A host pays once for each content that it holds. With at most `places` workloads on a host, the n holders of a
//! content are on at least n / `places` hosts. If each instance holds a content with the same probability, the pages
//! that a host with m instances of its kinds pays for are concave in m, so we pay least with as many full hosts as
//! possible. That holds for each content by itself; no placement need reach the bound for all of them at once.

use super::FleetOptions;
use super::world::World;
use pagefold_engine::units::count;
use rustc_hash::FxHashMap;

pub fn bound(world: &World<'_>, options: &FleetOptions) -> f64 {
    let mut of_kind = vec![0_u64; world.mix.kinds.len()];
    for instance in &world.instances {
        of_kind[instance.kind] += 1;
    }
    let mut holders: FxHashMap<u64, u64> = FxHashMap::default();
    for (kind, instances) in world.mix.kinds.iter().zip(&of_kind) {
        for content in &kind.common {
            *holders.entry(*content).or_default() += instances;
        }
    }
    let share = world.mix.held_tenths.min(10) as f64 / 10.0;
    let places = world.places().max(1);
    let own: u64 = world.instances.iter().map(|instance| count(world.mix.kinds[instance.kind].own)).sum();
    let mut least = 0.0;
    for instances in holders.into_values() {
        let full = (instances / places).min(u64::from(options.hosts));
        least += full as f64 * paid_with(share, places) + paid_with(share, instances % places);
    }
    world.held() as f64 - own as f64 - least
}

/// The pages of a content that a host pays for, if each of its instances holds this share.
fn paid_with(share: f64, instances: u64) -> f64 {
    1.0 - (1.0 - share).powf(instances as f64)
}
