//! Merges the pages of programs on several memory nodes and reads where each page is.

use super::Sizes;
use crate::bench::experiment::{ExperimentSetting, PolicySequence, Targets, before_and_during};
use crate::bench::marks::eligible_mappings;
use crate::bench::policy::{KSM_EVERYTHING, KsmEverything, Pagefold, Policy};
use crate::bench::report::{ExperimentReport, Placed};
use crate::programs::{Notes, Observed};
use crate::tenant::{Segment, Tenant, TenantSpec};
use anyhow::{Context, ensure};
use pagefold_engine::units::PAGE_SIZE;
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::pagemap::{Pagemap, PagemapEntry};
use pagefold_procmem::process::Process;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::rc::Rc;

/// A memory node with processors.
#[derive(Clone, Debug)]
pub struct Node {
    /// The node's index among the nodes that have memory.
    index: usize,
    /// The node's processors, in the kernel's list format.
    pub cpus: String,
    distances: Vec<u32>,
}

#[derive(Debug)]
pub struct Nodes {
    topology: Topology,
    /// The nodes that have processors.
    pub nodes: Vec<Node>,
}

impl Nodes {
    /// Reads this machine's nodes; `None` unless several have processors and memory.
    pub fn of_machine() -> anyhow::Result<Option<Self>> {
        let Some(topology) = Topology::of_machine()? else { return Ok(None) };
        let mut nodes = Vec::new();
        for (index, view) in topology.views()?.into_iter().enumerate() {
            let path = PathBuf::from(format!("/sys/devices/system/node/node{}/cpulist", view.node.0));
            let cpus = fs::read_to_string(&path).with_context(|| path.display().to_string())?.trim().to_owned();
            if !cpus.is_empty() {
                nodes.push(Node { index, cpus, distances: view.distances });
            }
        }
        Ok(if nodes.len() > 1 { Some(Self { topology, nodes }) } else { None })
    }

    /// The index of a frame's node among those that have memory.
    fn index_of(&self, frame: u64, all: &[u16]) -> Option<usize> {
        let node = self.topology.node_of(frame)?.0;
        all.iter().position(|&known| known == node)
    }
}

/// A group of programs: for each the index of its node in [`Nodes::nodes`], and its nice value.
type Group<'a> = &'a [(usize, i32)];

/// The thesis's configurations (Table 5.3): name, nice values, and the share of merged pages that should be on the
/// first program's node.
pub const PRIORITIES: [(&str, [i32; 2], f64); 5] = [
    ("10:1", [-20, -11], 0.909),
    ("5:1", [-20, -16], 0.833),
    ("1:1", [-20, -20], 0.5),
    ("1:5", [-16, -20], 0.167),
    ("1:10", [-11, -20], 0.091),
];

pub const KSM: &str = KSM_EVERYTHING;
/// pagefold with each placement policy.
pub const FAIR: &str = "pagefold --placement fair";
pub const KERNEL: &str = "pagefold --placement kernel";
pub const PRIORITY: &str = "pagefold --placement priority";
pub const LOCAL_ONLY: &str = "pagefold --placement local-only";

/// Merges two programs on two nodes, then larger groups, with every policy. Adds each run to the report.
pub fn run(
    setting: &ExperimentSetting<'_>,
    nodes: &Rc<Nodes>,
    sizes: Sizes,
    report: &mut ExperimentReport,
) -> anyhow::Result<()> {
    let two: Group<'_> = &[(0, 0), (1, 0)];
    let mut stage = Stage { setting, nodes, sizes, sequence: PolicySequence::take(setting)? };
    stage.run(report, &KsmEverything, two, "")?;
    // The policies take turns, so that other load affects both. The first turn also warms up an emulator.
    for turn in 0..sizes.turns {
        let mut pair = ["kernel", "fair"];
        pair.rotate_left(turn % 2);
        for placement in pair {
            stage.run(report, &pagefold(sizes, placement), two, "")?;
        }
    }
    for (name, [first, second], _) in PRIORITIES.into_iter().take(sizes.priorities) {
        stage.run(report, &pagefold(sizes, "priority"), &[(0, first), (1, second)], &format!(" {name}"))?;
    }
    if sizes.larger_groups {
        stage.run(report, &pagefold(sizes, "local-only"), two, "")?;
        let four_nodes: Group<'_> = &[(0, 0), (1, 0), (2, 0), (3, 0)];
        let mut groups: Vec<(Group<'_>, &str)> =
            vec![(&[(0, 0), (1, 0), (0, 0)], THREE), (&[(0, 0), (1, 0), (0, 0), (1, 0)], FOUR)];
        if nodes.nodes.len() >= four_nodes.len() {
            groups.push((four_nodes, FOUR_NODES));
        }
        for (group, name) in groups {
            // The number of answers depends on the number of programs.
            stage.sequence.expected = None;
            stage.run(report, &KsmEverything, group, name)?;
            stage.run(report, &pagefold(sizes, "fair"), group, name)?;
        }
    }
    Ok(())
}

fn pagefold(sizes: Sizes, placement: &str) -> Pagefold {
    Pagefold::new(sizes.seconds).with(&["--placement", placement])
}

/// Suffixes of the policy's name for larger groups.
pub const THREE: &str = ", three programs";
pub const FOUR: &str = ", four programs";
pub const FOUR_NODES: &str = ", four nodes";

struct Stage<'a> {
    setting: &'a ExperimentSetting<'a>,
    nodes: &'a Rc<Nodes>,
    sizes: Sizes,
    sequence: PolicySequence<'a>,
}

impl Stage<'_> {
    fn run(
        &mut self,
        report: &mut ExperimentReport,
        policy: &dyn Policy,
        group: Group<'_>,
        name: &str,
    ) -> anyhow::Result<()> {
        let mut samples = Vec::new();
        let Self { setting, nodes, sizes, sequence } = self;
        let run = sequence.run(report, policy, || start(setting, nodes, sizes.pages, group, &mut samples))?;
        let Some(run) = run else { return Ok(()) };
        run.beside(name);
        let mut frames = BTreeSet::new();
        let mut merged = 0;
        for (samples, &(node, _)) in samples.iter().zip(group) {
            let Some([before, during]) = before_and_during(samples) else { continue };
            let node = &nodes.nodes[node];
            ensure!(
                before.pages.iter().all(|page| page.node == node.index),
                "a program's memory is not on its node; check that every node has free memory"
            );
            for page in &during.pages {
                if page.merged {
                    merged += 1;
                    frames.insert(page.frame);
                }
            }
            run.programs.push(during.placed(node));
        }
        // We count in page tables, since KSM's counters may include other programs.
        run.saved_bytes = ((merged - frames.len()) * PAGE_SIZE) as u64;
        Ok(())
    }
}

/// Starts each program of a group on its node's processors, so that it gets the node's memory by first touch, and adds
/// its notes.
fn start(
    setting: &ExperimentSetting<'_>,
    nodes: &Rc<Nodes>,
    pages: u64,
    group: Group<'_>,
    samples: &mut Vec<Notes<PlacementSample>>,
) -> anyhow::Result<Targets> {
    let spec = TenantSpec::new([Segment::Shared { pages, seed: 21 }]);
    // `nice` adds to this process's value.
    let own = Process::open(i32::try_from(std::process::id())?)?.stat()?.nice;
    let mut targets = Targets::new();
    for &(node, nice) in group {
        let node = nodes.nodes.get(node).context("a program is assigned to a node that does not exist")?;
        let nice = (nice - i32::from(own)).to_string();
        let by = ["taskset", "-c", &node.cpus, "nice", "-n", &nice];
        let tenant = Tenant::start_by(&by, setting.player, &spec)?;
        let nodes = Rc::clone(nodes);
        let (observed, taken) = Observed::start(Box::new(tenant), move |tenant: &mut Tenant| {
            PlacementSample::at(&Process::open(tenant.pid())?, &nodes, pages)
        });
        targets.push(observed);
        samples.push(taken);
    }
    Ok(targets)
}

#[derive(Clone, Copy, Debug)]
struct NodePage {
    frame: u64,
    node: usize,
    merged: bool,
}

/// The nodes of a program's pages, by address.
#[derive(Clone, Debug)]
struct PlacementSample {
    pages: Vec<NodePage>,
}

impl PlacementSample {
    /// Reads the largest mapping. At least `pages` of it must be present.
    fn at(process: &Process, nodes: &Nodes, pages: u64) -> anyhow::Result<Self> {
        let mappings = eligible_mappings(process)?;
        let largest = mappings.iter().max_by_key(|detail| detail.vma.pages().0);
        let largest = &largest.context("the program has no eligible memory")?.vma;
        let keys: Vec<u16> = nodes.topology.views()?.iter().map(|view| view.node.0).collect();
        let mut entries = vec![0; usize::try_from(largest.pages().0)?];
        Pagemap::open(process)?.read(largest.first(), &mut entries)?;
        let mut found = Vec::with_capacity(entries.len());
        for entry in entries {
            let entry = PagemapEntry(entry);
            let Some(frame) = entry.pfn() else { continue };
            let node = nodes.index_of(frame, &keys).with_context(|| format!("frame {frame:#x} is on no node"))?;
            found.push(NodePage { frame, node, merged: !entry.file_or_shared() && !entry.exclusive() });
        }
        ensure!(found.len() as u64 >= pages, "{} of {pages} pages are present", found.len());
        let snapshot = Self { pages: found };
        snapshot.check_against(&process.read_file("numa_maps")?, largest.start, &keys)?;
        Ok(snapshot)
    }

    /// Checks the counts per node against the kernel's, allowing for 1 % of pages that NUMA balancing may have moved.
    fn check_against(&self, numa_maps: &[u8], start: u64, keys: &[u16]) -> anyhow::Result<()> {
        let counts = pages_by_node(&String::from_utf8_lossy(numa_maps), start, keys)
            .with_context(|| format!("numa_maps does not list {start:x}"))?;
        for (node, expected) in counts.into_iter().enumerate() {
            let seen = self.pages.iter().filter(|page| page.node == node).count();
            let off = seen.abs_diff(expected);
            ensure!(off * 100 <= self.pages.len(), "{seen} pages are on node {node}, the kernel counts {expected}");
        }
        Ok(())
    }

    fn placed(&self, node: &Node) -> Placed {
        let mut merged = vec![0; node.distances.len()];
        for page in &self.pages {
            merged[page.node] += u64::from(page.merged);
        }
        let pages = self.pages.iter().filter_map(|page| Placed::digit(page.node)).collect();
        Placed { home: node.index, distances: node.distances.clone(), merged, pages }
    }
}

/// Parses the pages by node of the mapping at `start` from `/proc/PID/numa_maps`, which has lines like
/// `7f12 default anon=9 N0=4 N1=5 kernelpagesize_kB=4`.
fn pages_by_node(numa_maps: &str, start: u64, keys: &[u16]) -> Option<Vec<usize>> {
    let address = |line: &str| u64::from_str_radix(line.split(' ').next()?, 16).ok();
    let line = numa_maps.lines().find(|line| address(line) == Some(start))?;
    let mut counts = Vec::new();
    for key in keys {
        let name = format!("N{key}=");
        let number = line.split_ascii_whitespace().find_map(|word| word.strip_prefix(&name)?.parse().ok());
        counts.push(number.unwrap_or(0));
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_checked_against_the_kernels() {
        let text = "7f0000 default anon=5 N0=1 N3=4 kernelpagesize_kB=4\n7f5000 default file=/lib/N0=9 N3=2\n";
        assert_eq!(pages_by_node(text, 0x7f_0000, &[0, 1, 3]), Some(vec![1, 0, 4]));
        assert_eq!(pages_by_node(text, 0x7f_1000, &[0]), None);
        let page = |node| NodePage { frame: 1, node, merged: true };
        let snapshot = PlacementSample { pages: vec![page(0), page(2), page(2), page(2), page(2)] };
        snapshot.check_against(text.as_bytes(), 0x7f_0000, &[0, 1, 3]).unwrap();
        let error = snapshot.check_against(text.as_bytes(), 0x7f_0000, &[3, 1, 0]).unwrap_err().to_string();
        assert!(error.contains("node 0"), "{error}");
    }

    #[test]
    fn merged_pages_are_counted_by_node() {
        let page = |node, merged| NodePage { frame: 1, node, merged };
        let snapshot = PlacementSample { pages: vec![page(0, true), page(1, true), page(1, false), page(1, true)] };
        let placed = snapshot.placed(&Node { index: 1, cpus: "1".to_owned(), distances: vec![20, 10] });
        assert_eq!((placed.pages.as_str(), &placed.merged[..], placed.home), ("0111", &[1, 2][..], 1));
    }
}
