//! The scenarios that `tests/numa.rs` sends to the example `numa_guest`, and the results that it returns, as JSON.
#![allow(dead_code, reason = "each side uses a part of it")]

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MergedBy {
    /// KSM alone: the processes mark their memory themselves, and ksmd runs all the time.
    Ksm,
    /// `pagefold run` with these options.
    Pagefold(Vec<String>),
}

/// A process with memory to merge, its processor and its memory on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Victim {
    pub node: usize,
    pub nice: i32,
    /// The process's pages are on the active list when merging begins.
    pub active: bool,
    /// The process's cgroup allows only its node (cpuset.mems).
    pub confined: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Disturbance {
    None,
    /// Before merging, a process takes and locks the node's memory except for some MiB.
    Full {
        node: usize,
        /// The memory left free.
        left_mib: u64,
    },
    /// After merging, the node's memory goes offline.
    Offline {
        node: usize,
    },
    /// While pagefold runs, we set the clock ten years back and forth again, four times a second.
    ClockSteps,
    /// Before the last check we write a byte into a page of the first process, and the check must find it.
    Damage,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scenario {
    pub name: String,
    pub merged_by: MergedBy,
    pub victims: Vec<Victim>,
    /// Pages of each process: all different from each other, and the same in each process.
    pub pages: usize,
    pub disturbance: Disturbance,
    /// The kernel uses the multi-generational LRU, which doesn't show which pages are active.
    pub generations: bool,
}

/// The state of one process's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// The number of pages present, by the node of their frame.
    pub by_node: Vec<u64>,
    /// The pages merged by KSM, by node.
    pub merged: Vec<u64>,
    /// The number of merged pages according to smaps.
    pub merged_by_smaps: u64,
    /// The pages whose frame is on the active list.
    pub active: u64,
    /// The pages whose frame was referenced.
    pub referenced: u64,
}

/// The state of all pages at one time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PageSnapshot {
    pub victims: Vec<Pages>,
    /// Different merged frames, by node.
    pub frames: Vec<u64>,
    /// The number of pages saved by merging.
    pub saved: u64,
    /// Merged frames that processes of several nodes share.
    pub across: u64,
}

/// Counters of /proc/vmstat since merging began.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Moves {
    /// Pages migrated for any reason.
    pub migrated: u64,
    /// Migrations that failed.
    pub failed: u64,
    /// Pages migrated by the kernel's NUMA balancing.
    pub balanced: u64,
    /// Processes killed because memory ran out.
    pub killed: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub name: String,
    pub before: PageSnapshot,
    /// The pages once the kernel neither merged nor moved any more of them.
    pub merged: PageSnapshot,
    /// Time until the kernel neither merged nor moved any more pages, milliseconds.
    pub settled_ms: u64,
    /// Whether the machine settled before the time limit.
    pub settled: bool,
    /// During `settled_ms`.
    pub moves: Moves,
    /// During the quiet time that follows.
    pub when_quiet: Moves,
    /// The state after a disturbance that happens after merging.
    pub disturbed: Option<PageSnapshot>,
    /// The summary of `pagefold run --json`.
    pub summary: serde_json::Value,
    /// The state after we've unmerged everything.
    pub unmerged: PageSnapshot,
    /// KSM's knobs that the merger didn't restore.
    pub knobs_changed: Vec<String>,
    /// Errors: bytes that changed, programs that failed.
    pub wrong: Vec<String>,
}
