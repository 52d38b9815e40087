//! Memory nodes, as the judgement sees them, and moving merged frames between them.

use super::LiveHost;
use crate::host::targets::Target;
use crate::os::abandonable::patiently;
use crate::os::privileges::{PLACING, missing};
use crate::proc::numa::{Topology, move_frames, owner_view};
use crate::proc::process::ReadError;
use pagefold_core::host::{Move, NodeView, Outcome, OwnerView};
use pagefold_core::placement::policy::Placement;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nodes and processes are looked at this often, nanoseconds, if that does not take more than its share.
const REFRESH_NS: u64 = 2_000_000_000;
/// What a look at one process takes, nanoseconds, and the one part in so many of the time that all may take: with more
/// than 130 processes looks become rarer.
const PROCESS_NS: u64 = 15_000;
const PROCESS_SHARE: u64 = 1_000;

/// Which policy is in force for whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// For all that no other is named for.
    pub usual: Placement,
    /// For the processes of trust domains, by name.
    pub domains: BTreeMap<String, Placement>,
}

impl Policies {
    /// The policy for a domain.
    pub fn of(&self, domain: &str) -> Placement {
        self.domains.get(domain).copied().unwrap_or(self.usual)
    }
}

/// The nodes and who is where, where there are several.
#[derive(Debug, Default)]
pub(super) struct Placing {
    pub(super) topology: Option<Arc<Topology>>,
    pub(super) policies: Policies,
    pub(super) nodes: Vec<NodeView>,
    pub(super) owners: Vec<OwnerView>,
    /// CAP_SYS_NICE is there.
    may_move: bool,
    next_ns: u64,
    /// How many processes there were at the last look.
    processes: usize,
}

impl Placing {
    pub(super) fn new() -> Self {
        // A machine that does not tell its nodes is taken to have one.
        let topology = Topology::of_machine().ok().flatten().map(Arc::new);
        let may_move = topology.is_some() && missing(&[PLACING]).is_ok_and(|missing| missing.is_empty());
        Self { topology, may_move, ..Self::default() }
    }

    /// Looks at the nodes and the processes again, if it is time.
    pub(super) fn refresh(&mut self, now_ns: u64, targets: &BTreeMap<i32, Target>, domains: &[String]) {
        if self.topology.is_none() || now_ns < self.next_ns && self.processes == targets.len() {
            return;
        }
        self.processes = targets.len();
        self.next_ns = now_ns + (targets.len() as u64 * PROCESS_NS * PROCESS_SHARE).max(REFRESH_NS);
        // Memory may have come or gone. With less than two nodes left, nothing is placed until they are back.
        let read = Topology::of_machine().ok().flatten();
        let Some(topology) = read.map(Arc::new) else {
            self.nodes.clear();
            return;
        };
        self.nodes = topology.views().unwrap_or_default();
        let view = |target: &Target| {
            let policy = self.policies.of(&domains[usize::from(target.domain.0)]);
            let placement = if self.may_move { policy } else { Placement::Kernel };
            owner_view(&target.process, &topology, target.owner, placement).ok()
        };
        self.owners = targets.values().filter_map(view).collect();
        self.topology = Some(topology);
    }
}

impl LiveHost {
    /// Moves merged frames, those that one process maps together.
    pub(super) fn place(&mut self, moves: &[Move], outcome: &mut Outcome) {
        for same_region in moves.chunk_by(|a, b| a.region == b.region) {
            let Some(&pid) = self.region_pids.get(&same_region[0].region) else { continue };
            let Some(target) = self.targets.get_mut(&pid).filter(|target| !target.is_stuck()) else { continue };
            let process = target.process.clone();
            let pages: Vec<_> = same_region.iter().map(|to| (to.page, to.node)).collect();
            let done = Arc::new(AtomicU64::new(0));
            let told = done.clone();
            let result = patiently(
                || done.load(Ordering::Relaxed),
                move || move_frames(&process, &pages, |done| told.store(done, Ordering::Relaxed)),
            );
            outcome.moved += done.load(Ordering::Relaxed);
            match result {
                Ok(Ok(_) | Err(ReadError::Vanished { .. })) => {}
                Ok(Err(error)) => self.tell_left_alone(pid, error.to_string()),
                Err(pending) => {
                    target.get_stuck(pending);
                    self.next_look_ns = 0;
                }
            }
        }
    }
}
