//! Tenants of the sizes that tests need.

use crate::{PAGES_PER_MIB, victim_binary};
use pagefold_workload::{Segment, Tenant, TenantSpec, Verdict};

/// A tenant with memory that all tenants with the same `seed` have in common, and memory of its own.
pub fn spec(common_mib: u64, unique_mib: u64, seed: u64) -> TenantSpec {
    let common = Segment::Shared { pages: common_mib * PAGES_PER_MIB, seed };
    let unique = Segment::Random { pages: unique_mib * PAGES_PER_MIB, seed };
    TenantSpec::new(if unique_mib == 0 { vec![common] } else { vec![common, unique] })
}

pub fn tenant(spec: &TenantSpec) -> Tenant {
    Tenant::start(&victim_binary("tenant"), spec).unwrap()
}

/// Two tenants of the same [`spec`].
pub fn pair(common_mib: u64, unique_mib: u64, seed: u64) -> [Tenant; 2] {
    let spec = spec(common_mib, unique_mib, seed);
    [tenant(&spec), tenant(&spec)]
}

pub fn pids(tenants: &[Tenant]) -> Vec<i32> {
    tenants.iter().map(Tenant::pid).collect()
}

/// Asserts that every byte of the tenants' memory is as written.
#[track_caller]
pub fn assert_intact(tenants: &mut [Tenant]) {
    for tenant in tenants {
        assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    }
}
