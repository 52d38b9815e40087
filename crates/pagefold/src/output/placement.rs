//! Where merged pages are, on a machine with several memory nodes: for `status`, `explain` and `scan`.

use pagefold_engine::keys::OwnerKey;
use pagefold_engine::placement::inventory::{NodeTotal, OwnerPlacement, PlacementSummary};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::state::MoveTotals;
use pagefold_text::style::{Lines, Style, count, human, percent, shorten};
use serde::{Deserialize, Serialize};

/// The table shows at most this many processes. We only count the rest.
const PROCESSES: usize = 8;

/// Where merged pages are. `reference.rs` explains the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PlacementView {
    pub nodes: Vec<NodeTotal>,
    pub processes: Vec<PlacementRow>,
    pub misplaced_bytes: u64,
    #[serde(flatten)]
    pub moves: MoveTotals,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlacementRow {
    pid: i32,
    name: String,
    #[serde(flatten)]
    place: OwnerPlacement,
}

impl PlacementView {
    /// Makes the view from the engine's summary. `name_of` returns the pid and the name of a process.
    pub fn of(
        places: &PlacementSummary,
        moves: MoveTotals,
        name_of: impl Fn(OwnerKey) -> Option<(i32, String)>,
    ) -> Self {
        let mut processes = Vec::new();
        for place in &places.owners {
            if let Some((pid, name)) = name_of(place.owner) {
                processes.push(PlacementRow { pid, name, place: place.clone() });
            }
        }
        processes.sort_by_key(|row| (std::cmp::Reverse(row.place.remote), row.pid));
        Self { nodes: places.nodes.clone(), processes, misplaced_bytes: places.misplaced.bytes().0, moves }
    }

    pub fn process(&self, pid: i32) -> Option<&PlacementRow> {
        self.processes.iter().find(|row| row.pid == pid)
    }

    /// A sentence on the pages that the policies have moved and would still move.
    pub fn sentence(&self) -> String {
        let moved = match self.moves.moved_pages {
            0 => String::new(),
            pages => format!(
                "{} moved in {:.2} s of CPU time{}; ",
                count(usize::try_from(pages).unwrap_or(usize::MAX), "merged page", "merged pages"),
                self.moves.move_seconds,
                match self.moves.refused_pages {
                    0 => String::new(),
                    refused => format!(", {refused} refused by the kernel"),
                }
            ),
        };
        match self.misplaced_bytes {
            0 => format!("{moved}every merged page is on the node that its policy wants"),
            bytes => format!("{moved}{} should be on another node according to policy", human(bytes)),
        }
    }

    pub fn describe(&self, text: &mut String, style: Style) {
        text.blank();
        text.line(style.dim("  MEMORY NODE              TOTAL      FREE  MERGED PAGES"));
        for row in &self.nodes {
            let total = human(row.total.bytes().0);
            let free = human(row.free.bytes().0);
            let merged = human(row.frames.bytes().0);
            text.line(format!("  {:<20} {total:>9} {free:>9}  {merged:>12}", row.node.0));
        }
        if self.processes.is_empty() {
            return;
        }
        text.blank();
        text.line(style.dim("      PID  PROGRAM           NODE      LOCAL    REMOTE    TAX  POLICY"));
        for PlacementRow { pid, name, place } in self.processes.iter().take(PROCESSES) {
            let tax = format!("{:>6}", percent(place.tax, 1.0));
            let tax = if place.tax > 0.3 { style.other(&tax) } else { style.plain(&tax) };
            let policy = match place.placement {
                Placement::Priority => format!("priority (nice {})", place.nice),
                policy => policy.to_string(),
            };
            let local = human(place.local.bytes().0);
            let remote = human(place.remote.bytes().0);
            let name = shorten(name, 16);
            let node = place.home.0;
            text.line(format!("  {pid:>7}  {name:<16} {node:>5}  {local:>9} {remote:>9} {tax}  {policy}"));
        }
        if let Some(rest) = self.processes.get(PROCESSES..).filter(|rest| !rest.is_empty()) {
            let others = count(rest.len(), "process", "processes");
            text.line(style.dim(&format!("           … and {others} more (all of them: --json)")));
        }
        text.line(style.dim("  Tax: extra time of an access to merged memory, compared with local memory."));
    }
}

impl PlacementRow {
    /// A sentence on where the process's merged memory is, and how much that costs.
    pub fn sentence(&self) -> String {
        let place = &self.place;
        let policy = match place.placement {
            Placement::Fair => "fair: on the node that uses it, else an equal part on each sharer's node".to_owned(),
            Placement::Priority => format!("priority: by nice values, here {}", place.nice),
            Placement::LocalOnly => "local-only: never merged across nodes".to_owned(),
            Placement::Kernel => "kernel: where ksmd leaves it".to_owned(),
        };
        format!(
            "It runs on memory node {}: {} of its merged memory is there, {} on others, so that an access to it takes {} \
             longer on average. Policy: {policy}.",
            place.home.0,
            human(place.local.bytes().0),
            human(place.remote.bytes().0),
            percent(place.tax, 1.0)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::keys::NodeKey;
    use pagefold_engine::placement::inventory::NodePages;
    use pagefold_engine::units::Pages;

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
            local: Pages(768),
            remote: Pages(256),
            by_node: vec![NodePages(NodeKey(0), Pages(256)), NodePages(NodeKey(1), Pages(768))],
            tax: 0.14,
        };
        let places =
            PlacementSummary { nodes: vec![node(0, 256), node(1, 768)], owners: vec![owner], misplaced: Pages(512) };
        let moves = MoveTotals { moved_pages: 1_000, refused_pages: 2, move_seconds: 0.02 };
        let view = PlacementView::of(&places, moves, |owner| (owner == OwnerKey(3)).then(|| (77, "redis".to_owned())));
        assert_eq!(
            view.sentence(),
            "1000 merged pages moved in 0.02 s of CPU time, 2 refused by the kernel; 2 MiB should be on another node \
             according to policy"
        );
        assert_eq!(
            view.process(77).unwrap().sentence(),
            "It runs on memory node 1: 3 MiB of its merged memory is there, 1 MiB on others, so that an access to it \
             takes 14 % longer on average. Policy: priority: by nice values, here -5."
        );
        assert!(view.process(78).is_none());
        let row = serde_json::json!({
            "pid": 77, "name": "redis", "node": 1, "nice": -5, "policy": "priority", "local_bytes": 3 << 20,
            "remote_bytes": 1 << 20, "by_node": [[0, 1 << 20], [1, 3 << 20]], "tax": 0.14,
        });
        assert_eq!(serde_json::to_value(view.process(77)).unwrap(), row);
        let mut text = String::new();
        view.describe(&mut text, Style::plain_text());
        assert!(text.contains("     77  redis"), "{text}");
    }
}
