//! Memory nodes of the machine, and the node of each frame.
//!
//! Nodes are read from `/sys/devices/system/node` (Documentation/ABI/stable/sysfs-devices-node), and the frames of each
//! from its memory blocks. There is no [`Topology`], and nothing is placed, on kernels that do not show memory blocks
//! (without CONFIG_MEMORY_HOTPLUG) and on machines where only one node has memory.

use super::fields::kib;
use super::number_list::NumberList;
use pagefold_engine::host::NodeView;
use pagefold_engine::keys::NodeKey;
use pagefold_engine::units::{PAGE_BYTES, Pages};
use std::fs;
use std::io;
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
    cpus: NumberList,
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
    ///
    /// # Errors
    /// If a file cannot be read or parsed. Files that the kernel does not provide are not errors.
    pub fn read(root: &Path, zones: &Path) -> io::Result<Option<Self>> {
        let directory = root.join("node");
        // Missing without CONFIG_NUMA and without CONFIG_MEMORY_HOTPLUG.
        let Some(with_memory) = read_if_exists(&directory.join("has_memory"))? else { return Ok(None) };
        let Some(block_size) = read_if_exists(&root.join("memory/block_size_bytes"))? else { return Ok(None) };
        let keys: Vec<NodeKey> =
            list(&with_memory)?.iter().filter_map(|node| u16::try_from(node).ok()).map(NodeKey).collect();
        let block_bytes = u64::from_str_radix(block_size.trim(), 16).map_err(|_| malformed(&block_size))?;
        let block_frames = block_bytes / PAGE_BYTES;
        if keys.len() < 2 || block_frames == 0 {
            return Ok(None);
        }
        // The kernel lists distances to all online nodes, including those without memory.
        let online: Vec<u64> = list(&fs::read_to_string(directory.join("online"))?)?.iter().collect();
        let (mut nodes, mut blocks) = (Vec::new(), Vec::new());
        for &node in &keys {
            let own = directory.join(format!("node{}", node.0));
            for entry in fs::read_dir(&own)? {
                let name = entry?.file_name();
                let number = name.to_str().and_then(|name| name.strip_prefix("memory")?.parse::<u64>().ok());
                if let Some(first) = number.and_then(|number| number.checked_mul(block_frames)) {
                    blocks.push((first, block_frames, node));
                }
            }
            let distances = fs::read_to_string(own.join("distance"))?;
            let distances: Vec<u32> = distances
                .split_ascii_whitespace()
                .map(|word| word.parse().map_err(|_| malformed(&distances)))
                .collect::<Result<_, _>>()?;
            let position = |key: &NodeKey| online.iter().position(|&online| online == u64::from(key.0));
            let distance = |key| position(key).and_then(|at| distances.get(at)).copied().unwrap_or(REMOTE_DISTANCE);
            nodes.push(Node {
                key: node,
                cpus: list(&fs::read_to_string(own.join("cpulist"))?)?,
                distances: keys.iter().map(distance).collect(),
            });
        }
        blocks.sort_unstable();
        let spans_nodes = |pair: &[(u64, u64, NodeKey)]| pair[0].0 == pair[1].0;
        if blocks.windows(2).any(spans_nodes) {
            blocks = divided(&blocks, &zones_of(&fs::read_to_string(zones)?));
        }
        Ok((!blocks.is_empty()).then(|| Self { root: root.to_owned(), nodes, blocks }))
    }

    pub fn node_of(&self, frame: u64) -> Option<NodeKey> {
        let at = self.blocks.partition_point(|&(first, _, _)| first <= frame).checked_sub(1)?;
        let (first, frames, node) = self.blocks[at];
        (frame - first < frames).then_some(node)
    }

    /// The nodes with their current free memory.
    pub fn views(&self) -> io::Result<Vec<NodeView>> {
        let view = |node: &Node| {
            let number = node.key.0;
            let text = fs::read(self.root.join(format!("node/node{number}/meminfo")))?;
            let pages = |name| {
                let kib = kib(&text, &format!("Node {number} {name}"));
                kib.map(|kib| Pages(kib / (PAGE_BYTES / 1024))).map_err(malformed)
            };
            let (total, free) = (pages("MemTotal")?, pages("MemFree")?);
            Ok(NodeView { node: node.key, total, free, distances: node.distances.clone() })
        };
        self.nodes.iter().map(view).collect()
    }

    /// The node that all these processors belong to, if there is one. Processors of nodes without memory are ignored.
    pub fn home(&self, cpus: &NumberList) -> Option<NodeKey> {
        let mut of = self.nodes.iter().filter(|node| cpus.meets(&node.cpus));
        of.next().filter(|_| of.next().is_none()).map(|node| node.key)
    }
}

/// SLIT's default distance between different nodes.
const REMOTE_DISTANCE: u32 = 20;

fn read_if_exists(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn list(text: &str) -> io::Result<NumberList> {
    NumberList::parse(text).ok_or_else(|| malformed(text))
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed: {}", what.trim()))
}

/// Divides memory blocks that span several nodes along the zones of the nodes. Frames in zones of two nodes get none.
pub fn divided(blocks: &[(u64, u64, NodeKey)], zones: &[(u64, u64, NodeKey)]) -> Vec<(u64, u64, NodeKey)> {
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
pub fn zones_of(text: &str) -> Vec<(u64, u64, NodeKey)> {
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
        let home = |cpus| topology.home(&NumberList::parse(cpus).unwrap()).map(|node| node.0);
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
}
