//! The NUMA nodes as the engine sees them, and moving merged frames between nodes.

use super::LiveHost;
use crate::targets::Target;
use pagefold_engine::host::{Move, NodeView, Outcome, OwnerView};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::count;
use pagefold_procmem::numa::{move_frames, owner_view};
use pagefold_procmem::os::abandonable::{advance, run_abandonable};
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::os::privileges::{PLACING, missing};
use pagefold_procmem::process::ReadError;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Time between two reads of the nodes and processes, nanoseconds.
const REFRESH_NS: u64 = 2_000_000_000;
/// Cost of reading one process, nanoseconds. All such reads may take 1/`PROCESS_SHARE` of the time: with more than 130
/// processes we read them less often.
const PROCESS_NS: u64 = 15_000;
const PROCESS_SHARE: u64 = 1_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Policy of domains that are not in `domains`.
    pub default: Placement,
    /// Policies of trust domains, by name.
    pub domains: BTreeMap<String, Placement>,
}

impl Policies {
    pub fn of(&self, domain: &str) -> Placement {
        self.domains.get(domain).copied().unwrap_or(self.default)
    }
}

/// The NUMA nodes, and where the targets run, on machines with several nodes.
#[derive(Debug, Default)]
pub(super) struct Placing {
    pub(super) topology: Option<Arc<Topology>>,
    pub(super) policies: Policies,
    pub(super) nodes: Vec<NodeView>,
    pub(super) owners: Vec<OwnerView>,
    /// Whether we have CAP_SYS_NICE.
    may_move: bool,
    next_ns: u64,
    /// Number of targets at the last refresh.
    processes: usize,
}

impl Placing {
    pub(super) fn new() -> Self {
        let topology = topology_now();
        let may_move = topology.is_some() && missing(&[PLACING]).is_ok_and(|missing| missing.is_empty());
        Self { topology, may_move, ..Self::default() }
    }

    /// Reads the nodes and the processes again if it's time.
    pub(super) fn refresh(&mut self, now_ns: u64, targets: &BTreeMap<i32, Target>, domains: &[String]) {
        if self.topology.is_none() || now_ns < self.next_ns && self.processes == targets.len() {
            return;
        }
        self.processes = targets.len();
        self.next_ns = now_ns + (count(targets.len()) * PROCESS_NS * PROCESS_SHARE).max(REFRESH_NS);
        // Memory may have been added or removed. With fewer than two nodes left, we place nothing.
        let Some(topology) = topology_now() else {
            self.nodes.clear();
            return;
        };
        self.nodes = topology.views().unwrap_or_default();
        self.owners.clear();
        for target in targets.values() {
            let policy = self.policies.of(domains.get(usize::from(target.domain.0)).map_or("", String::as_str));
            let placement = if self.may_move { policy } else { Placement::Kernel };
            self.owners.extend(owner_view(&target.info.process, &topology, target.owner, placement));
        }
        self.topology = Some(topology);
    }
}

/// If we can't read the nodes, we assume that there's only one.
fn topology_now() -> Option<Arc<Topology>> {
    Some(Arc::new(Topology::of_machine().ok()??))
}

impl LiveHost {
    /// Moves merged frames, batched by process.
    pub(super) fn place(&mut self, moves: &[Move], outcome: &mut Outcome) {
        for same_region in moves.chunk_by(|a, b| a.region == b.region) {
            let Some(&pid) = self.regions.pids.get(&same_region[0].region) else { continue };
            let Some(target) = self.targets.get_mut(&pid).filter(|target| !target.has_timed_out()) else { continue };
            let process = target.info.process.clone();
            let pages: Vec<_> = same_region.iter().map(|to| (to.page, to.node)).collect();
            let done = Arc::new(AtomicU64::new(0));
            let progress = done.clone();
            let result = run_abandonable(move || {
                move_frames(&process, &pages, |done| {
                    progress.store(done, Ordering::Relaxed);
                    advance();
                })
            });
            outcome.moved += done.load(Ordering::Relaxed);
            match result {
                Ok(Ok(_) | Err(ReadError::Vanished { .. })) => {}
                Ok(Err(error)) => self.report_left_alone(pid, error.to_string()),
                Err(pending) => {
                    target.set_timed_out(pending);
                    self.schedule.next_ns = 0;
                }
            }
        }
    }
}
