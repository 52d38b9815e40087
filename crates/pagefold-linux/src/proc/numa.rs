//! Memory nodes: the nodes of the machine and of each frame, the home nodes of processes, and moving merged frames.
//!
//! Nodes are read from `/sys/devices/system/node` (Documentation/ABI/stable/sysfs-devices-node), and the frames of each
//! from its memory blocks. There is no [`Topology`], and nothing is placed, on kernels that do not show memory blocks
//! (without CONFIG_MEMORY_HOTPLUG) and on machines where only one node has memory.

use crate::proc::process::{Process, ReadError};
use pagefold_core::host::{NodeView, OwnerView};
use pagefold_core::keys::{NodeKey, OwnerKey};
use pagefold_core::placement::policy::Placement;
use pagefold_core::units::{PAGE_SIZE, Pages, Vpn};
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The nodes that have memory, two or more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    root: PathBuf,
    nodes: Vec<Node>,
    /// Memory blocks: first frame, frames, node. Ascending.
    blocks: Vec<(u64, u64, NodeKey)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    key: NodeKey,
    cpus: List,
    /// Distances to the nodes of the topology, in its order.
    distances: Vec<u32>,
}

impl Topology {
    /// The nodes of this machine; `None` if it has only one, or does not show memory blocks.
    pub fn of_machine() -> io::Result<Option<Self>> {
        Self::read(Path::new("/sys/devices/system"), Path::new("/proc/zoneinfo"))
    }

    /// The nodes under a directory like `/sys/devices/system`. Memory blocks that span several nodes are divided by the
    /// zones in a file like `/proc/zoneinfo`.
    pub fn read(root: &Path, zones: &Path) -> io::Result<Option<Self>> {
        let directory = root.join("node");
        let online = match fs::read_to_string(directory.join("has_memory")) {
            Ok(text) => List::parse(&text),
            // A kernel without CONFIG_NUMA.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let keys: Vec<NodeKey> = online.iter().filter_map(|node| u16::try_from(node).ok()).map(NodeKey).collect();
        if keys.len() < 2 {
            return Ok(None);
        }
        let size = fs::read_to_string(root.join("memory/block_size_bytes")).ok();
        let size = size.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        let Some(frames) = size.map(|bytes| bytes / PAGE_SIZE as u64).filter(|&frames| frames > 0) else {
            return Ok(None);
        };
        let (mut nodes, mut blocks) = (Vec::new(), Vec::new());
        for &node in &keys {
            let own = directory.join(format!("node{}", node.0));
            for entry in fs::read_dir(&own)? {
                let number =
                    entry?.file_name().to_str().and_then(|name| name.strip_prefix("memory")?.parse::<u64>().ok());
                if let Some(first) = number.and_then(|number| number.checked_mul(frames)) {
                    blocks.push((first, frames, node));
                }
            }
            let distances = fs::read_to_string(own.join("distance"))?;
            let distances: Vec<u32> = distances.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
            nodes.push(Node { key: node, cpus: List::parse(&fs::read_to_string(own.join("cpulist"))?), distances });
        }
        // The kernel lists distances to all online nodes, including those without memory.
        let listed: Vec<u64> = List::parse(&fs::read_to_string(directory.join("online"))?).iter().collect();
        for node in &mut nodes {
            let to = |key: &NodeKey| listed.iter().position(|&listed| listed == u64::from(key.0));
            let distance = |key| to(key).and_then(|at| node.distances.get(at)).copied().unwrap_or(20);
            node.distances = keys.iter().map(distance).collect();
        }
        blocks.sort_unstable();
        let is_shared = |pair: &[(u64, u64, NodeKey)]| pair[0].0 == pair[1].0;
        if blocks.windows(2).any(is_shared) {
            blocks = divided(&blocks, &zones_of(&fs::read_to_string(zones)?));
        }
        Ok((!blocks.is_empty()).then(|| Self { root: root.to_owned(), nodes, blocks }))
    }

    /// The node of a frame.
    pub fn node_of(&self, frame: u64) -> Option<NodeKey> {
        let at = self.blocks.partition_point(|&(first, _, _)| first <= frame).checked_sub(1)?;
        let (first, frames, node) = self.blocks[at];
        (frame - first < frames).then_some(node)
    }

    /// The nodes with their current free memory.
    pub fn views(&self) -> io::Result<Vec<NodeView>> {
        let view = |node: &Node| {
            let text = fs::read_to_string(self.root.join(format!("node/node{}/meminfo", node.key.0)))?;
            let field = |name| Pages(field_kib(&text, name).unwrap_or(0) / (PAGE_SIZE as u64 / 1024));
            Ok(NodeView {
                node: node.key,
                total: field("MemTotal:"),
                free: field("MemFree:"),
                distances: node.distances.clone(),
            })
        };
        self.nodes.iter().map(view).collect()
    }

    /// The node that all these processors belong to, if there is one. Processors of nodes without memory are ignored.
    fn home(&self, cpus: &List) -> Option<NodeKey> {
        let mut of = self.nodes.iter().filter(|node| cpus.meets(&node.cpus));
        of.next().filter(|_| of.next().is_none()).map(|node| node.key)
    }
}

/// Divides memory blocks that span several nodes along the zones of the nodes. Frames in zones of two nodes get none.
pub(crate) fn divided(blocks: &[(u64, u64, NodeKey)], zones: &[(u64, u64, NodeKey)]) -> Vec<(u64, u64, NodeKey)> {
    let mut divided = Vec::new();
    for same in blocks.chunk_by(|a, b| a.0 == b.0) {
        let &[(first, frames, _), ..] = same else { continue };
        if let [whole] = same {
            divided.push(*whole);
            continue;
        }
        let mut cuts: Vec<u64> =
            zones.iter().flat_map(|&(start, length, _)| [start, start.saturating_add(length)]).collect();
        cuts.extend([first, first + frames]);
        cuts.retain(|&cut| (first..=first + frames).contains(&cut));
        cuts.sort_unstable();
        cuts.dedup();
        for piece in cuts.windows(2) {
            let inside = |&&(start, length, _): &&(u64, u64, NodeKey)| {
                start <= piece[0] && piece[1] <= start.saturating_add(length)
            };
            let mut nodes: Vec<NodeKey> = zones.iter().filter(inside).map(|&(_, _, node)| node).collect();
            nodes.dedup();
            if let [node] = nodes[..] {
                divided.push((piece[0], piece[1] - piece[0], node));
            }
        }
    }
    divided
}

/// The zones of `/proc/zoneinfo`: first frame, frames, node. By node.
pub(crate) fn zones_of(text: &str) -> Vec<(u64, u64, NodeKey)> {
    let (mut zones, mut node, mut spanned) = (Vec::new(), None, 0);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("Node"), Some(number)) => node = number.trim_end_matches(',').parse().ok().map(NodeKey),
            (Some("spanned"), Some(frames)) => spanned = frames.parse().unwrap_or(0),
            (Some("start_pfn:"), Some(first)) => {
                zones.extend(node.zip(first.parse().ok()).map(|(node, first)| (first, spanned, node)));
            }
            _ => {}
        }
    }
    zones.retain(|&(_, frames, _)| frames > 0);
    zones
}

/// A field of a node's meminfo: `Node 0 MemFree:   1234 kB`.
pub(crate) fn field_kib(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(2);
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

/// Reads the home node and the other facts that placement needs about a process.
pub fn owner_view(
    process: &Process,
    topology: &Topology,
    owner: OwnerKey,
    placement: Placement,
) -> Result<OwnerView, ReadError> {
    let text = process.read_file("status")?;
    let (cpus, nodes) = allowed(&text).ok_or_else(|| process.malformed("status", "no Cpus_allowed_list"))?;
    let keys = nodes.iter().filter_map(|node| u16::try_from(node).ok()).map(NodeKey);
    let (home, nice) = (topology.home(&cpus), process.stat()?.nice);
    Ok(OwnerView { owner, home, nice, allowed: keys.collect(), placement })
}

/// The allowed processors and memory nodes in the text of `/proc/PID/status`.
pub(crate) fn allowed(status: &[u8]) -> Option<(List, List)> {
    let text = String::from_utf8_lossy(status);
    let list = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(List::parse);
    Some((list("Cpus_allowed_list:")?, list("Mems_allowed_list:")?))
}

/// Numbers as the kernel lists them: `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct List(Vec<RangeInclusive<u64>>);

impl List {
    /// Parses a list. Malformed parts are skipped.
    pub(crate) fn parse(text: &str) -> Self {
        let range = |word: &str| {
            let (low, high) = word.split_once('-').unwrap_or((word, word));
            Some(low.parse().ok()?..=high.parse().ok()?)
        };
        Self(text.trim().split(',').filter_map(range).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        // Node numbers are below 1024 (MAX_NUMNODES).
        self.0.iter().flat_map(|range| *range.start()..=(*range.end()).min(1023))
    }

    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.start() <= b.end() && b.start() <= a.end()))
    }
}

/// While it exists, this thread prefers to allocate memory on the home node of a process: copies of pages that it causes
/// in other processes follow its own memory policy, not theirs.
#[derive(Debug)]
pub(crate) struct PreferNode(());

impl PreferNode {
    /// `None` if there is only one node, or the process runs on several, or the policy cannot be set.
    pub(crate) fn of(process: &Process) -> Option<Self> {
        const MPOL_PREFERRED: libc::c_int = 1;
        let topology = Topology::of_machine().ok().flatten()?;
        let home = owner_view(process, &topology, OwnerKey(0), Placement::Kernel).ok()?.home?;
        let nodes = 1_u64.checked_shl(home.0.into())?;
        // SAFETY: the mask outlives the call. The kernel reads one bit less than the given number: 64.
        let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, &raw const nodes, 65) };
        (set == 0).then_some(Self(()))
    }
}

impl Drop for PreferNode {
    fn drop(&mut self) {
        const MPOL_DEFAULT: libc::c_int = 0;
        // SAFETY: the default policy takes no mask.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, std::ptr::null::<u64>(), 0) };
    }
}

/// Frames moved by one call. A call takes the target's mmap lock for reading page by page, and drains the lists of new
/// pages of all processors once (`lru_cache_disable`, mm/migrate.c).
const BATCH: usize = 1_024;

/// Moves the merged frames that a process maps at these pages, for all processes that map them. Calls `progress` with the
/// number moved so far, and returns the number of frames that are on their node now. Needs CAP_SYS_NICE, and the process
/// must be allowed memory on the node.
pub(crate) fn move_frames(
    process: &Process,
    moves: &[(Vpn, NodeKey)],
    progress: impl Fn(u64),
) -> Result<u64, ReadError> {
    const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;
    let (mut pages, mut nodes, mut status) = (Vec::new(), Vec::new(), Vec::new());
    let mut done = 0;
    for batch in moves.chunks(BATCH) {
        pages.clear();
        pages.extend(batch.iter().map(|(page, _)| page.address()));
        nodes.clear();
        nodes.extend(batch.iter().map(|(_, node)| libc::c_int::from(node.0)));
        status.clear();
        status.resize(batch.len(), -libc::ENOENT);
        // The pid may have been reused: then pages of the wrong process move, which is harmless.
        // SAFETY: three arrays of `batch.len()` elements, of pointer size and of ints, which outlive the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                process.pid(),
                batch.len(),
                pages.as_ptr(),
                nodes.as_ptr(),
                status.as_mut_ptr(),
                MPOL_MF_MOVE_ALL,
            )
        };
        if result < 0 {
            return Err(ReadError::from_io(process.pid(), "(move_pages)", io::Error::last_os_error()));
        }
        done += status.iter().zip(&nodes).filter(|(is, wanted)| is == wanted).count() as u64;
        progress(done);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(nodes: &[(u16, &str, &str, &[u64])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let list: Vec<String> = nodes.iter().map(|node| node.0.to_string()).collect();
        write("node/has_memory", &(list.join(",") + "\n"));
        write("node/online", &(list.join(",") + "\n"));
        write("memory/block_size_bytes", "8000000\n");
        for (node, cpus, distances, blocks) in nodes {
            write(&format!("node/node{node}/cpulist"), cpus);
            write(&format!("node/node{node}/distance"), distances);
            let meminfo = format!("\nNode {node} MemTotal:   1048576 kB\nNode {node} MemFree:  4096 kB\n");
            write(&format!("node/node{node}/meminfo"), &meminfo);
            for block in *blocks {
                write(&format!("node/node{node}/memory{block}"), "");
            }
        }
        root
    }

    #[test]
    fn frames_and_processors_are_assigned_to_nodes() {
        let root = machine(&[(0, "0-3,8\n", "10 21\n", &[0, 1, 4]), (2, "4-7\n", "21 10\n", &[2, 3])]);
        let topology = Topology::read(root.path(), Path::new("/nowhere")).unwrap().unwrap();
        // Blocks of 128 MiB.
        let node = |mib: u64| topology.node_of(mib << 8).map(|node| node.0);
        assert_eq!(
            [0, 255, 256, 511, 512, 639, 640].map(node),
            [0, 0, 2, 2, 0, 0].map(Some).into_iter().chain([None]).collect::<Vec<_>>()[..]
        );
        let views = topology.views().unwrap();
        assert_eq!((views[1].node, views[1].total, views[1].free), (NodeKey(2), Pages(1 << 18), Pages(1 << 10)));
        assert_eq!(views[0].distances, [10, 21]);
        let home = |cpus| topology.home(&List::parse(cpus)).map(|node| node.0);
        assert_eq!(
            [home("1-2"), home("8"), home("5"), home("3-4"), home("99")],
            [Some(0), Some(0), Some(2), None, None]
        );
    }

    #[test]
    fn a_machine_with_one_node_has_no_topology() {
        let root = machine(&[(0, "0-3\n", "10\n", &[0, 1])]);
        assert_eq!(Topology::read(root.path(), Path::new("/nowhere")).unwrap(), None);
        assert_eq!(Topology::read(&root.path().join("nowhere"), Path::new("/nowhere")).unwrap(), None);
    }

    #[test]
    fn blocks_that_span_two_nodes_are_divided_by_zones() {
        let root = machine(&[(0, "0\n", "10 20\n", &[0, 1]), (1, "1\n", "20 10\n", &[1, 2])]);
        let zones = root.path().join("zoneinfo");
        let text = "Node 0, zone      DMA\n  pages free     3975\n        spanned  4095\n  start_pfn:           1\n\
            Node 0, zone    DMA32\n        spanned  45056\n        present  45056\n  start_pfn:           4096\n\
            Node 1, zone    DMA32\n        spanned  49152\n  start_pfn:           49152\n\
            Node 1, zone  Movable\n        spanned  0\n  start_pfn:           0\n";
        fs::write(&zones, text).unwrap();
        let topology = Topology::read(root.path(), &zones).unwrap().unwrap();
        let node = |frame| topology.node_of(frame).map(|node| node.0);
        // Blocks of 32768 frames; the second is divided at 49152.
        assert_eq!([0, 32_768, 49_151].map(node), [Some(0); 3]);
        assert_eq!([49_152, 65_535, 65_536, 98_303].map(node), [Some(1); 4]);
        assert_eq!(node(98_304), None);
        // Without zones its node is unknown.
        fs::write(&zones, "").unwrap();
        let topology = Topology::read(root.path(), &zones).unwrap().unwrap();
        assert_eq!([0, 32_768, 65_536].map(|frame| topology.node_of(frame).is_some()), [true, false, true]);
    }

    #[test]
    fn allowed_processors_and_nodes_are_parsed() {
        let text =
            b"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,7\nMems_allowed:\t1\nMems_allowed_list:\t0,2\n";
        let (cpus, nodes) = allowed(text).unwrap();
        assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 7]);
        assert_eq!(nodes.iter().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(allowed(b"Name:\tx\n"), None);
        assert_eq!(List::parse("x,3-,5-4").iter().count(), 0);
    }
}
