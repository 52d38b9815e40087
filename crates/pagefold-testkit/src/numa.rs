//! What the guest is to do and what it found, as the test and the guest tell each other in JSON.

use serde::{Deserialize, Serialize};

/// What folds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fold {
    /// KSM alone: the victims mark their memory themselves, ksmd runs all the time.
    Ksm,
    /// `pagefold run` with these options.
    Pagefold(Vec<String>),
}

/// A program whose memory may be folded, with its processor and its memory on one node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Victim {
    /// Its node.
    pub node: usize,
    /// Its nice value.
    pub nice: i32,
    /// Its pages are on the active list when folding begins.
    pub active: bool,
    /// Its cgroup's cpuset.mems allows its node alone.
    pub confined: bool,
}

/// What happens besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trouble {
    /// Nothing.
    None,
    /// Before the folding somebody takes and locks this node's memory, but for so many MiB.
    Full {
        /// The node.
        node: usize,
        /// What is left free.
        left_mib: u64,
    },
    /// When all is folded, this node's memory goes offline.
    Offline {
        /// The node.
        node: usize,
    },
    /// Before the last check somebody writes a byte into a page of the first victim, which must be found.
    Damage,
}

/// One scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// What folds.
    pub fold: Fold,
    /// The programs.
    pub victims: Vec<Victim>,
    /// Pages of each: all different from each other, and the same in each program.
    pub pages: usize,
    /// What happens besides.
    pub trouble: Trouble,
    /// The kernel keeps its pages by generations, which tells nobody which are active.
    pub generations: bool,
}

/// What was seen of one victim's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Pages present, by the node of their frame.
    pub by_node: Vec<u64>,
    /// Those merged by KSM, by node.
    pub merged: Vec<u64>,
    /// How many are merged by the kernel's own sum, in smaps.
    pub merged_by_smaps: u64,
    /// Those whose frame is on the active list.
    pub active: u64,
    /// Those whose frame was referenced.
    pub referenced: u64,
}

/// What was seen at one time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PageSnapshot {
    /// Each victim's pages.
    pub victims: Vec<Pages>,
    /// Different merged frames, by node.
    pub frames: Vec<u64>,
    /// Pages that the victims would have more without merging.
    pub saved: u64,
    /// Merged frames that victims of several nodes share.
    pub across: u64,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[allow(clippy::struct_field_names, reason = "their unit")]
pub struct Cpu {
    /// ksmd.
    pub ksmd_ns: u64,
    /// pagefold and its injector.
    pub pagefold_ns: u64,
    /// The victims, within the kernel.
    pub victims_system_ns: u64,
}

/// Counters of /proc/vmstat, from the beginning of folding on.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Moves {
    /// Pages migrated, by whatever.
    pub migrated: u64,
    /// Migrations that failed.
    pub failed: u64,
    /// Pages migrated by the kernel's NUMA balancing.
    pub balanced: u64,
    /// Programs killed for want of memory.
    pub killed: u64,
}

/// What came of one scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// Before folding.
    pub before: PageSnapshot,
    /// When nothing merged and nothing moved any more.
    pub folded: PageSnapshot,
    /// Until nothing merged and nothing moved any more, milliseconds.
    pub settled_ms: u64,
    /// Whether that was before the time limit.
    pub settled: bool,
    /// Up to the end of `settled_ms`.
    pub cpu: Cpu,
    /// Up to the end of `settled_ms`.
    pub moves: Moves,
    /// The same, in the quiet time that then follows.
    pub when_quiet: Moves,
    /// After what `Trouble` does once all is folded.
    pub troubled: Option<PageSnapshot>,
    /// What `pagefold run --json` said at its end.
    pub summary: serde_json::Value,
    /// After everything was taken apart again.
    pub unfolded: PageSnapshot,
    /// KSM's knobs that are not what they were before.
    pub knobs_changed: Vec<String>,
    /// What was wrong, in words: bytes that changed, programs that failed.
    pub wrong: Vec<String>,
}
