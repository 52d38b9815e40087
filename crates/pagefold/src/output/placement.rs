//! Where merged pages are, on a machine with several memory nodes: for `status`, `explain` and `scan`.

use pagefold_cli::style::{Style, count, human, line, percent, shorten};
use pagefold_core::keys::{NodeKey, OwnerKey};
use pagefold_core::ledger::Ledger;
use pagefold_core::placement::inventory::{NodeTotal, OwnerPlacement, PlacementSummary};
use pagefold_core::placement::policy::Placement;
use pagefold_core::units::Pages;
use serde::{Deserialize, Serialize};

/// Processes shown; the rest is summed up.
const PROCESSES: usize = 8;

/// Where merged pages are.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PlacesView {
    /// The nodes that have memory.
    pub nodes: Vec<NodeTotal>,
    /// The processes that have merged pages, the most remote first.
    pub processes: Vec<PlaceRow>,
    /// Merged memory that the policies would place on another node.
    pub misplaced_bytes: u64,
    /// Merged pages moved so far.
    pub moved_pages: u64,
    /// Merged pages that the kernel refused to move.
    pub refused_pages: u64,
    /// CPU time of the moves.
    pub move_seconds: f64,
}

/// The merged memory of one process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlaceRow {
    pid: i32,
    name: String,
    /// Where it runs, or most of its memory is.
    node: u16,
    nice: i8,
    policy: Placement,
    /// Its merged memory on its own node, and on others.
    local_bytes: u64,
    remote_bytes: u64,
    /// Its merged memory by node.
    by_node: Vec<(u16, u64)>,
    /// How much longer an access to its merged memory takes on average than on its own node: 0.28 is 28 %.
    tax: f64,
}

impl PlacesView {
    /// From the core's report. `who` has the pid and the name of a process.
    pub fn of(places: &PlacementSummary, ledger: &Ledger, who: impl Fn(OwnerKey) -> Option<(i32, String)>) -> Self {
        let bytes = |pages: Pages| pages.bytes().0;
        let row = |owner: &OwnerPlacement| {
            let (pid, name) = who(owner.owner)?;
            Some(PlaceRow {
                pid,
                name,
                node: owner.home.0,
                nice: owner.nice,
                policy: owner.placement,
                local_bytes: bytes(owner.local()),
                remote_bytes: bytes(owner.remote()),
                by_node: owner.by_node.iter().map(|&(NodeKey(node), pages)| (node, bytes(pages))).collect(),
                tax: owner.tax,
            })
        };
        let mut processes: Vec<PlaceRow> = places.owners.iter().filter_map(row).collect();
        processes.sort_by_key(|row| (std::cmp::Reverse(row.remote_bytes), row.pid));
        Self {
            nodes: places.nodes.clone(),
            processes,
            misplaced_bytes: bytes(places.misplaced),
            moved_pages: ledger.moved.0,
            refused_pages: ledger.not_moved.0,
            move_seconds: ledger.move_ns as f64 / 1e9,
        }
    }

    /// The row of one process.
    pub fn process(&self, pid: i32) -> Option<&PlaceRow> {
        self.processes.iter().find(|row| row.pid == pid)
    }

    /// What the policies have done and would do, as a sentence.
    pub fn sentence(&self) -> String {
        let moved = match self.moved_pages {
            0 => String::new(),
            pages => format!(
                "{} moved in {:.2} s of CPU time{}; ",
                count(usize::try_from(pages).unwrap_or(usize::MAX), "merged page", "merged pages"),
                self.move_seconds,
                match self.refused_pages {
                    0 => String::new(),
                    refused => format!(", {refused} refused by the kernel"),
                }
            ),
        };
        match self.misplaced_bytes {
            0 => format!("{moved}every merged page is where its policy places it"),
            bytes => format!("{moved}{} should be on another node by policy", human(bytes)),
        }
    }

    /// The tables.
    pub fn describe(&self, text: &mut String, style: Style) {
        line(text, "");
        line(text, &style.dim("  MEMORY NODE              TOTAL      FREE  MERGED PAGES"));
        for row in &self.nodes {
            let (total, free, merged) =
                (human(row.total.bytes().0), human(row.free.bytes().0), human(row.frames.bytes().0));
            line(text, &format!("  {:<20} {total:>9} {free:>9}  {merged:>12}", row.node.0));
        }
        if self.processes.is_empty() {
            return;
        }
        line(text, "");
        line(text, &style.dim("      PID  PROGRAM           NODE      LOCAL    REMOTE    TAX  POLICY"));
        for row in self.processes.iter().take(PROCESSES) {
            let tax = format!("{:>6}", percent(row.tax, 1.0));
            let figures = format!(
                "  {:>7}  {:<16} {:>5}  {:>9} {:>9}",
                row.pid,
                shorten(&row.name, 16),
                row.node,
                human(row.local_bytes),
                human(row.remote_bytes)
            );
            let policy = match row.policy {
                Placement::Priority => format!("priority (nice {})", row.nice),
                policy => policy.to_string(),
            };
            line(
                text,
                &format!("{figures} {}  {policy}", if row.tax > 0.3 { style.other(&tax) } else { style.plain(&tax) }),
            );
        }
        if let Some(rest) = self.processes.get(PROCESSES..).filter(|rest| !rest.is_empty()) {
            let others = count(rest.len(), "process", "processes");
            line(text, &style.dim(&format!("           … and {others} more (all of them: --json)")));
        }
        line(text, &style.dim("  Tax: extra time of an access to merged memory, compared with the own node."));
    }
}

impl PlaceRow {
    /// Where the process's merged memory is, and what that costs, as a sentence.
    pub fn sentence(&self) -> String {
        let (local, remote) = (human(self.local_bytes), human(self.remote_bytes));
        let policy = match self.policy {
            Placement::Fair => "fair: where it is used, else an equal part on each node".to_owned(),
            Placement::Priority => format!("priority: by nice values, here {}", self.nice),
            Placement::LocalOnly => "local-only: nothing is merged across nodes".to_owned(),
            Placement::Kernel => "kernel: wherever ksmd leaves it".to_owned(),
        };
        format!(
            "It runs on memory node {}: {local} of its merged memory is there, {remote} on others, so that an access to it \
             takes {} longer on average. Policy: {policy}.",
            self.node,
            percent(self.tax, 1.0)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_and_remote_memory_are_distinguished() {
        let node = |node, frames| NodeTotal {
            node: NodeKey(node),
            total: Pages(1 << 18),
            free: Pages(1 << 16),
            frames: Pages(frames),
        };
        let owner = OwnerPlacement {
            owner: OwnerKey(3),
            home: NodeKey(1),
            nice: -5,
            placement: Placement::Priority,
            by_node: vec![(NodeKey(0), Pages(256)), (NodeKey(1), Pages(768))],
            tax: 0.14,
        };
        let places =
            PlacementSummary { nodes: vec![node(0, 256), node(1, 768)], owners: vec![owner], misplaced: Pages(512) };
        let ledger = Ledger { moved: Pages(1_000), not_moved: Pages(2), move_ns: 20_000_000, ..Ledger::default() };
        let view = PlacesView::of(&places, &ledger, |owner| (owner == OwnerKey(3)).then(|| (77, "redis".to_owned())));
        assert_eq!(
            view.sentence(),
            "1000 merged pages moved in 0.02 s of CPU time, 2 refused by the kernel; 2 MiB should be on another node by policy"
        );
        assert_eq!(
            view.process(77).unwrap().sentence(),
            "It runs on memory node 1: 3 MiB of its merged memory is there, 1 MiB on others, so that an access to it \
             takes 14 % longer on average. Policy: priority: by nice values, here -5."
        );
        assert!(view.process(78).is_none());
        let mut text = String::new();
        view.describe(&mut text, Style::plain_text());
        assert!(text.contains("     77  redis"), "{text}");
    }
}
