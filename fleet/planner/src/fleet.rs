//! Hosts, workloads, samples of their contents, and the operator's rules.

use pagefold_engine::units::{Bytes, Pages, index};
use thiserror::Error;

/// How many bits of a key hold the trust domain. The other bits are the digest's highest. So keys sort like digests,
/// and equal contents of two domains have different keys.
pub(crate) const DOMAIN_BITS: u32 = 20;
/// How many trust domains there can be.
pub const DOMAINS: u32 = 1 << DOMAIN_BITS;

/// Digests are below this, like the hashes of a theta sketch.
pub const DIGESTS_END: u64 = 1 << 63;

pub(crate) const UNITS_PER_HOST: usize = 60_000;

/// A host, by its place in [`Fleet::hosts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A unit, by its place in [`Fleet::units`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub u32);

impl HostId {
    pub(crate) const fn index(self) -> usize {
        index(self.0)
    }
}

impl UnitId {
    pub(crate) const fn index(self) -> usize {
        index(self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// How much memory its workloads may take after merging, including memory that may come back.
    pub memory: Bytes,
    /// How much CPU time its workloads may use, thousandths of a core.
    pub cpu_millicores: u64,
}

/// A sample of the contents that a workload holds: all digests below a threshold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The trust domain, by number.
    pub domain: u32,
    /// Contents whose digests are below this were sampled: [`DIGESTS_END`] if all were.
    pub threshold: u64,
    /// The digests, below the threshold, in any order, each once.
    pub digests: Vec<u64>,
}

/// What we move as a whole: one workload, or several that must stay together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    pub host: HostId,
    /// How much memory it takes if it shares nothing with others, including memory that may come back.
    pub memory: Bytes,
    /// How many different contents its workloads hold, counted (not sampled) for each workload by itself. We correct
    /// estimates from samples by this.
    pub held: Pages,
    /// CPU time that it uses, thousandths of a core.
    pub cpu_millicores: u64,
    /// How many workloads it has. Each counts as a move.
    pub workloads: u32,
    /// Whether the unit must stay where it is.
    pub pinned: bool,
    /// The groups it belongs to whose members must be on different hosts.
    pub apart: Vec<u32>,
    /// Samples of its workloads' contents.
    pub samples: Vec<Sample>,
}

/// Hosts, and the units on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    pub hosts: Vec<Host>,
    pub units: Vec<Unit>,
}

/// Why we can't plan for a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FleetError {
    #[error("unit {unit} is on host {host}, but there are {hosts} hosts")]
    NoHost { unit: usize, host: u32, hosts: usize },
    #[error("there are more than {DOMAINS} trust domains")]
    Domains,
    #[error("host {host} has more than {UNITS_PER_HOST} workloads")]
    Crowded { host: usize },
    #[error("there are more than {} hosts or workloads", u32::MAX)]
    Many,
}

impl Fleet {
    /// The first problem found.
    pub fn check(&self) -> Result<(), FleetError> {
        if u32::try_from(self.hosts.len()).is_err() || u32::try_from(self.units.len()).is_err() {
            return Err(FleetError::Many);
        }
        let mut on = vec![0_usize; self.hosts.len()];
        for (unit, Unit { host, samples, .. }) in self.units.iter().enumerate() {
            let hosts = self.hosts.len();
            *on.get_mut(host.index()).ok_or(FleetError::NoHost { unit, host: host.0, hosts })? += 1;
            if samples.iter().any(|sample| sample.domain >= DOMAINS) {
                return Err(FleetError::Domains);
            }
        }
        match on.iter().position(|&units| units > UNITS_PER_HOST) {
            Some(host) => Err(FleetError::Crowded { host }),
            None => Ok(()),
        }
    }

    pub(crate) fn unit(&self, unit: UnitId) -> &Unit {
        &self.units[unit.index()]
    }

    pub(crate) fn host(&self, host: HostId) -> &Host {
        &self.hosts[host.index()]
    }

    pub fn unit_ids(&self) -> impl Iterator<Item = UnitId> + use<> {
        (0..u32::try_from(self.units.len()).unwrap_or(u32::MAX)).map(UnitId)
    }

    pub fn host_ids(&self) -> impl Iterator<Item = HostId> + use<> {
        (0..u32::try_from(self.hosts.len()).unwrap_or(u32::MAX)).map(HostId)
    }
}
