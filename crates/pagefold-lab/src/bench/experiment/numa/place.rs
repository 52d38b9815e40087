//! Programs on several memory nodes, really folded, and where each of their pages has come to be.

use super::NumaSizes;
use crate::bench::experiment::{ExperimentSetting, PolicySequence};
use crate::bench::policy::Policy;
use crate::bench::report::{ExperimentReport, Placed};
use crate::programs::Target;
use anyhow::{Context, ensure};
use pagefold_core::units::PAGE_SIZE;
use pagefold_linux::os::numa::Topology;
use pagefold_linux::proc::pagemap::{Pagemap, PagemapEntry};
use pagefold_linux::proc::process::Process;
use pagefold_linux::scope::eligible::eligible_mappings;
use pagefold_workload::{Segment, Tenant, TenantSpec};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::rc::Rc;

/// A node that programs can run on.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its place among the nodes that have memory.
    index: usize,
    /// Its processors, as the kernel lists them.
    pub cpus: String,
    distances: Vec<u32>,
}

/// The machine's nodes.
#[derive(Debug)]
pub struct Nodes {
    topology: Topology,
    /// Those that have processors.
    pub nodes: Vec<Node>,
}

impl Nodes {
    /// Those of this machine, if it has several that have processors and memory.
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
        Ok((nodes.len() > 1).then_some(Self { topology, nodes }))
    }

    /// The place of a frame's node among those that have memory.
    fn index_of(&self, frame: u64, all: &[u16]) -> Option<usize> {
        let node = self.topology.node_of(frame)?.0;
        all.iter().position(|&known| known == node)
    }
}

/// Who is folded: for each program its node, of those that have processors, and its nice value.
type Crew<'a> = &'a [(usize, i32)];

/// The thesis's configurations (Table 5.3): the name, the nice values, and the part of the merged pages that the first
/// program should have on its node.
pub const PRIORITIES: [(&str, [i32; 2], f64); 5] = [
    ("10:1", [-20, -11], 0.909),
    ("5:1", [-20, -16], 0.833),
    ("1:1", [-20, -20], 0.5),
    ("1:5", [-16, -20], 0.167),
    ("1:10", [-11, -20], 0.091),
];

/// KSM by itself.
pub const KSM: &str = "ksm-everything";
/// pagefold with each policy.
pub const FAIR: &str = "pagefold --placement fair";
pub const KERNEL: &str = "pagefold --placement kernel";
pub const PRIORITY: &str = "pagefold --placement priority";
pub const LOCAL_ONLY: &str = "pagefold --placement local-only";

/// Folds two programs on two nodes, and more of them, in every way; each adds a run to the report.
pub fn fold(
    setting: &ExperimentSetting<'_>,
    nodes: &Rc<Nodes>,
    sizes: NumaSizes,
    report: &mut ExperimentReport,
) -> anyhow::Result<()> {
    let pagefold = |placement: &str| Policy::pagefold_with(sizes.seconds, &["--placement", placement]);
    let two: Crew<'_> = &[(0, 0), (1, 0)];
    let mut stage = Stage { setting, nodes, pages: sizes.pages, sequence: PolicySequence::take(setting)? };
    stage.run(report, &Policy::KsmEverything, two, "")?;
    // In turns, so that what else goes on befalls both. The first turn is also when an emulator sees everything for the
    // first time.
    for turn in 0..sizes.turns {
        let mut pair = ["kernel", "fair"];
        pair.rotate_left(turn % 2);
        for placement in pair {
            stage.run(report, &pagefold(placement), two, "")?;
        }
    }
    for (name, [first, second], _) in PRIORITIES.into_iter().take(sizes.priorities) {
        stage.run(report, &pagefold("priority"), &[(0, first), (1, second)], &format!(" {name}"))?;
    }
    if sizes.larger_crews {
        stage.run(report, &pagefold("local-only"), two, "")?;
        let four_nodes: Crew<'_> = &[(0, 0), (1, 0), (2, 0), (3, 0)];
        let mut crews: Vec<(Crew<'_>, &str)> =
            vec![(&[(0, 0), (1, 0), (0, 0)], THREE), (&[(0, 0), (1, 0), (0, 0), (1, 0)], FOUR)];
        if nodes.nodes.len() >= four_nodes.len() {
            crews.push((four_nodes, FOUR_NODES));
        }
        for (crew, name) in crews {
            // Afresh: as many programs, as many answers.
            drop(stage);
            stage = Stage { setting, nodes, pages: sizes.pages, sequence: PolicySequence::take(setting)? };
            for policy in [Policy::KsmEverything, pagefold("fair")] {
                stage.run(report, &policy, crew, name)?;
            }
        }
    }
    Ok(())
}

/// What is added to the policy's name where there are more than two programs.
pub const THREE: &str = ", three programs";
pub const FOUR: &str = ", four programs";
pub const FOUR_NODES: &str = ", four nodes";

struct Stage<'a> {
    setting: &'a ExperimentSetting<'a>,
    nodes: &'a Rc<Nodes>,
    pages: u64,
    sequence: PolicySequence<'a>,
}

impl Stage<'_> {
    fn run(
        &mut self,
        report: &mut ExperimentReport,
        policy: &Policy,
        crew: Crew<'_>,
        name: &str,
    ) -> anyhow::Result<()> {
        let looks: RefCell<Vec<Looks>> = RefCell::default();
        let before = report.runs.len();
        let start = || {
            let start = |&(node, nice): &(usize, i32)| {
                let node = self.nodes.nodes.get(node).context("a node")?;
                let watched = PlacedTenant::start(self.setting, self.nodes, node, nice, self.pages)?;
                looks.borrow_mut().push(Rc::clone(&watched.looks));
                Ok(Box::new(watched) as Box<dyn Target>)
            };
            crew.iter().map(start).collect()
        };
        self.sequence.run(report, policy, start)?;
        let Some(run) = report.runs.get_mut(before) else { return Ok(()) };
        run.policy += name;
        let mut frames = BTreeSet::new();
        let mut merged = 0;
        for (looks, &(node, _)) in looks.borrow().iter().zip(crew) {
            let looks = looks.borrow();
            // The last three are those before, during and after.
            let [.., first, during, _] = &looks[..] else { continue };
            let node = &self.nodes.nodes[node];
            ensure!(
                first.pages.iter().all(|page| page.node == node.index),
                "a program's memory is not on its node: is there room on each?"
            );
            merged += during.pages.iter().filter(|page| page.merged).count();
            frames.extend(during.pages.iter().filter(|page| page.merged).map(|page| page.frame));
            run.programs.push(during.placed(node));
        }
        // By the page tables: truer than KSM's counters, which other programs may have a part in.
        run.saved_bytes = ((merged - frames.len()) * PAGE_SIZE) as u64;
        Ok(())
    }
}

type Looks = Rc<RefCell<Vec<PlacementSample>>>;

#[derive(Clone, Copy, Debug)]
struct NodePage {
    frame: u64,
    node: usize,
    merged: bool,
}

/// A program's pages by address.
#[derive(Clone, Debug)]
struct PlacementSample {
    pages: Vec<NodePage>,
}

impl PlacementSample {
    /// Looks at the largest mapping, which must have so many pages, all of them present.
    fn at(process: &Process, nodes: &Nodes, pages: u64) -> anyhow::Result<Self> {
        let largest = eligible_mappings(process)?.into_iter().map(|detail| detail.vma).max_by_key(|vma| vma.pages().0);
        let largest = largest.context("a program without memory")?;
        let keys: Vec<u16> = nodes.topology.views()?.iter().map(|view| view.node.0).collect();
        let mut entries = vec![0; usize::try_from(largest.pages().0)?];
        Pagemap::open(process)?.read(largest.first(), &mut entries)?;
        let mut found = Vec::with_capacity(entries.len());
        for entry in entries.into_iter().map(PagemapEntry) {
            let Some(frame) = entry.pfn() else { continue };
            let node = nodes.index_of(frame, &keys).with_context(|| format!("frame {frame:#x} is on no node"))?;
            found.push(NodePage { frame, node, merged: !entry.file_or_shared() && !entry.exclusive() });
        }
        ensure!(found.len() as u64 >= pages, "{} of {pages} pages are present", found.len());
        let look = Self { pages: found };
        look.compare(&process.read_file("numa_maps")?, largest.start, &keys)?;
        Ok(look)
    }

    /// The kernel's own count by node must be the same, but for a page in a hundred that its NUMA balancing may have
    /// moved meanwhile.
    fn compare(&self, numa_maps: &[u8], start: u64, keys: &[u16]) -> anyhow::Result<()> {
        let told = told_by_node(&String::from_utf8_lossy(numa_maps), start, keys)
            .with_context(|| format!("numa_maps does not list {start:x}"))?;
        for (node, told) in told.into_iter().enumerate() {
            let seen = self.pages.iter().filter(|page| page.node == node).count();
            let off = seen.abs_diff(told);
            ensure!(off * 100 <= self.pages.len(), "{seen} pages are on node {node}, the kernel counts {told}");
        }
        Ok(())
    }

    fn placed(&self, node: &Node) -> Placed {
        let mut merged = vec![0; node.distances.len()];
        for page in self.pages.iter().filter(|page| page.merged) {
            merged[page.node] += 1;
        }
        let pages = self.pages.iter().filter_map(|page| Placed::digit(page.node)).collect();
        Placed { home: node.index, distances: node.distances.clone(), merged, pages }
    }
}

/// Pages by node of the mapping at `start`, in `/proc/PID/numa_maps`: `7f12 default anon=9 N0=4 N1=5 kernelpagesize_kB=4`.
fn told_by_node(numa_maps: &str, start: u64, keys: &[u16]) -> Option<Vec<usize>> {
    let line = numa_maps.lines().find_map(|line| {
        let (address, rest) = line.split_once(' ')?;
        (u64::from_str_radix(address, 16) == Ok(start)).then_some(rest)
    })?;
    let of_node = |key: &u16| {
        let name = format!("N{key}=");
        let number = line.split_ascii_whitespace().find_map(|word| word.strip_prefix(&name)?.parse().ok());
        number.unwrap_or(0)
    };
    Some(keys.iter().map(of_node).collect())
}

/// A program whose pages are looked at each time that it is asked.
struct PlacedTenant {
    tenant: Tenant,
    nodes: Rc<Nodes>,
    pages: u64,
    looks: Looks,
}

impl PlacedTenant {
    /// Starts a program on a node's processors, where it takes its memory from by first touch.
    fn start(
        setting: &ExperimentSetting<'_>,
        nodes: &Rc<Nodes>,
        node: &Node,
        nice: i32,
        pages: u64,
    ) -> anyhow::Result<Self> {
        let spec = TenantSpec::new([Segment::Shared { pages, seed: 21 }]);
        // The command adds to ours.
        let own = Process::open(i32::try_from(std::process::id())?)?.stat()?.nice;
        let nice = (nice - i32::from(own)).to_string();
        let tenant = Tenant::start_by(&["taskset", "-c", &node.cpus, "nice", "-n", &nice], setting.player, &spec)?;
        Ok(Self { tenant, nodes: Rc::clone(nodes), pages, looks: Rc::default() })
    }
}

impl Target for PlacedTenant {
    fn name(&self) -> &str {
        self.tenant.name()
    }

    fn pid(&self) -> i32 {
        Target::pid(&self.tenant)
    }

    fn check(&mut self) -> anyhow::Result<String> {
        let look = PlacementSample::at(&Process::open(Target::pid(&self.tenant))?, &self.nodes, self.pages)?;
        self.looks.borrow_mut().push(look);
        self.tenant.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_count_is_found_and_believed() {
        let text = "7f0000 default anon=5 N0=1 N3=4 kernelpagesize_kB=4\n7f5000 default file=/lib/N0=9 N3=2\n";
        assert_eq!(told_by_node(text, 0x7f_0000, &[0, 1, 3]), Some(vec![1, 0, 4]));
        assert_eq!(told_by_node(text, 0x7f_1000, &[0]), None);
        let page = |node| NodePage { frame: 1, node, merged: true };
        let look = PlacementSample { pages: vec![page(0), page(2), page(2), page(2), page(2)] };
        look.compare(text.as_bytes(), 0x7f_0000, &[0, 1, 3]).unwrap();
        let error = look.compare(text.as_bytes(), 0x7f_0000, &[3, 1, 0]).unwrap_err().to_string();
        assert!(error.contains("node 0"), "{error}");
    }

    #[test]
    fn what_is_merged_is_counted_by_node() {
        let page = |node, merged| NodePage { frame: 1, node, merged };
        let look = PlacementSample { pages: vec![page(0, true), page(1, true), page(1, false), page(1, true)] };
        let placed = look.placed(&Node { index: 1, cpus: "1".to_owned(), distances: vec![20, 10] });
        assert_eq!((placed.pages.as_str(), &placed.merged[..], placed.home), ("0111", &[1, 2][..], 1));
    }
}
