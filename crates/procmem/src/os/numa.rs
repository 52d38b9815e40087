//! Memory nodes of the machine, and the node of each frame.
//!
//! We read nodes from `/sys/devices/system/node` (Documentation/ABI/stable/sysfs-devices-node), and the frames of each
//! from its memory blocks. There is no [`Topology`], and we place nothing, on kernels that don't show memory blocks
//! (without CONFIG_MEMORY_HOTPLUG) and on machines where only one node has memory.

use super::fields::kib;
use super::number_list::NumberList;
use pagefold_engine::host::NodeView;
use pagefold_engine::keys::NodeKey;
use pagefold_engine::units::{PAGE_BYTES, Pages};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The nodes that have memory, two or more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    root: PathBuf,
    nodes: Vec<Node>,
    /// Memory blocks, ascending.
    blocks: Vec<FrameSpan>,
}

/// Adjacent frames of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameSpan {
    pub first: u64,
    pub frames: u64,
    pub node: NodeKey,
}

impl FrameSpan {
    fn end(self) -> u64 {
        self.first.saturating_add(self.frames)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    key: NodeKey,
    cpus: NumberList,
    /// Distances to all nodes, in the order of `Topology::nodes`.
    distances: Vec<u32>,
}

impl Topology {
    /// The nodes of this machine; `None` if it has only one, or doesn't show memory blocks.
    pub fn of_machine() -> io::Result<Option<Self>> {
        Self::read(Path::new("/sys/devices/system"), Path::new("/proc/zoneinfo"))
    }

    /// Reads the nodes from a directory like `/sys/devices/system`. `zones`, a file like `/proc/zoneinfo`, tells us how
    /// to divide memory blocks that span several nodes.
    ///
    /// # Errors
    /// If we can't read or parse a file. Files that the kernel doesn't provide are not errors.
    pub fn read(root: &Path, zones: &Path) -> io::Result<Option<Self>> {
        let directory = root.join("node");
        // The first file needs CONFIG_NUMA, the second CONFIG_MEMORY_HOTPLUG.
        let Some(with_memory) = read_if_exists(&directory.join("has_memory"))? else { return Ok(None) };
        let Some(block_size) = read_if_exists(&root.join("memory/block_size_bytes"))? else { return Ok(None) };
        let keys: Vec<NodeKey> = list(&with_memory)?.nodes().collect();
        let block_bytes = u64::from_str_radix(block_size.trim(), 16).map_err(|_| malformed(&block_size))?;
        let block_frames = block_bytes / PAGE_BYTES;
        if keys.len() < 2 || block_frames == 0 {
            return Ok(None);
        }
        // The kernel lists distances to all online nodes, including those without memory.
        let online: Vec<u64> = list(&fs::read_to_string(directory.join("online"))?)?.iter().collect();
        let mut nodes = Vec::new();
        let mut blocks = Vec::new();
        for &node in &keys {
            let own = directory.join(format!("node{}", node.0));
            for entry in fs::read_dir(&own)? {
                if let Some(first) = first_frame(&entry?.file_name(), block_frames) {
                    blocks.push(FrameSpan { first, frames: block_frames, node });
                }
            }
            let text = fs::read_to_string(own.join("distance"))?;
            let all = text.split_ascii_whitespace().map(|word| word.parse().map_err(|_| malformed(&text)));
            let all: Vec<u32> = all.collect::<Result<_, _>>()?;
            let mut distances = Vec::new();
            for key in &keys {
                let at = online.iter().position(|&online| online == u64::from(key.0));
                distances.push(at.and_then(|at| all.get(at)).copied().unwrap_or(REMOTE_DISTANCE));
            }
            nodes.push(Node { key: node, cpus: list(&fs::read_to_string(own.join("cpulist"))?)?, distances });
        }
        blocks.sort_unstable();
        if blocks.windows(2).any(|pair| pair[0].first == pair[1].first) {
            blocks = divided(&blocks, &zones_of(&fs::read_to_string(zones)?));
        }
        Ok(if blocks.is_empty() { None } else { Some(Self { root: root.to_owned(), nodes, blocks }) })
    }

    pub fn node_of(&self, frame: u64) -> Option<NodeKey> {
        let at = self.blocks.partition_point(|block| block.first <= frame).checked_sub(1)?;
        let block = self.blocks[at];
        if frame < block.end() { Some(block.node) } else { None }
    }

    pub fn views(&self) -> io::Result<Vec<NodeView>> {
        let mut views = Vec::new();
        for Node { key, distances, .. } in &self.nodes {
            let number = key.0;
            let text = fs::read(self.root.join(format!("node/node{number}/meminfo")))?;
            views.push(NodeView {
                node: *key,
                total: pages(&text, &format!("Node {number} MemTotal"))?,
                free: pages(&text, &format!("Node {number} MemFree"))?,
                distances: distances.clone(),
            });
        }
        Ok(views)
    }

    /// The node that all these processors belong to, if there is one. We ignore processors of nodes without memory.
    pub fn home(&self, cpus: &NumberList) -> Option<NodeKey> {
        let mut homes = self.nodes.iter().filter(|node| cpus.meets(&node.cpus));
        match (homes.next(), homes.next()) {
            (Some(home), None) => Some(home.key),
            _ => None,
        }
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

/// The first frame of a memory block, by its file name.
fn first_frame(name: &OsStr, block_frames: u64) -> Option<u64> {
    name.to_str()?.strip_prefix("memory")?.parse::<u64>().ok()?.checked_mul(block_frames)
}

/// A number of KiB in a node's meminfo, as pages.
fn pages(meminfo: &[u8], key: &str) -> io::Result<Pages> {
    Ok(Pages(kib(meminfo, key).map_err(malformed)? / (PAGE_BYTES / 1024)))
}

fn list(text: &str) -> io::Result<NumberList> {
    NumberList::parse(text).ok_or_else(|| malformed(text))
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed: {}", what.trim()))
}

/// Divides memory blocks that span several nodes along the zones of the nodes. Leaves out frames that are in zones of
/// two nodes.
pub fn divided(blocks: &[FrameSpan], zones: &[FrameSpan]) -> Vec<FrameSpan> {
    let mut divided = Vec::new();
    for same in blocks.chunk_by(|a, b| a.first == b.first) {
        if let [whole] = same {
            divided.push(*whole);
            continue;
        }
        let block = same[0];
        let mut cuts: Vec<u64> = zones.iter().flat_map(|zone| [zone.first, zone.end()]).collect();
        cuts.extend([block.first, block.end()]);
        cuts.retain(|&cut| (block.first..=block.end()).contains(&cut));
        cuts.sort_unstable();
        cuts.dedup();
        for piece in cuts.windows(2) {
            let mut nodes = Vec::new();
            for zone in zones {
                if zone.first <= piece[0] && piece[1] <= zone.end() {
                    nodes.push(zone.node);
                }
            }
            nodes.dedup();
            if let [node] = nodes[..] {
                divided.push(FrameSpan { first: piece[0], frames: piece[1] - piece[0], node });
            }
        }
    }
    divided
}

/// The zones of `/proc/zoneinfo`, by node.
pub fn zones_of(text: &str) -> Vec<FrameSpan> {
    let mut zones = Vec::new();
    let mut node = None;
    let mut spanned = 0;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("Node"), Some(number)) => node = number.trim_end_matches(',').parse().ok().map(NodeKey),
            (Some("spanned"), Some(frames)) => spanned = frames.parse().unwrap_or(0),
            (Some("start_pfn:"), Some(first)) => {
                if let (Some(node), Ok(first), 1..) = (node, first.parse(), spanned) {
                    zones.push(FrameSpan { first, frames: spanned, node });
                }
            }
            _ => {}
        }
    }
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
        // Without zones we don't know the nodes of the divided block.
        fs::write(&zones, "").unwrap();
        let topology = Topology::read(root.path(), &zones).unwrap().unwrap();
        assert_eq!([0, 32_768, 65_536].map(|frame| topology.node_of(frame).is_some()), [true, false, true]);
    }
}
