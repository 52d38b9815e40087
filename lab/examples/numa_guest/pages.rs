//! An independent reader of where pages are: page tables, frame flags and the nodes' zones, as the kernel shows them,
//! without any of pagefold's code.

use crate::model::{PageSnapshot, Pages};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

pub const PAGE: u64 = 4096;
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const EXCLUSIVE: u64 = 1 << 56;
/// Bits of /proc/kpageflags, from the kernel's include/uapi/linux/kernel-page-flags.h.
const REFERENCED: u64 = 1 << 2;
const ACTIVE: u64 = 1 << 6;
const KSM: u64 = 1 << 21;

#[derive(Clone, Copy, Debug)]
pub struct Extent {
    pub pid: i32,
    /// The address of the first page.
    pub start: u64,
    pub pages: usize,
    /// The node that the process runs on.
    pub node: usize,
}

/// The nodes of all frames.
pub struct Nodes {
    count: usize,
    /// For each first frame of a zone: the number of frames, and the node.
    zones: BTreeMap<u64, (u64, usize)>,
}

impl Nodes {
    /// Reads the zones of each node. Memory blocks won't do: one block can belong to two nodes.
    pub fn read() -> Self {
        let text = fs::read_to_string("/proc/zoneinfo").expect("zoneinfo");
        let mut nodes = Self { count: 0, zones: BTreeMap::new() };
        let mut node = 0;
        let mut frames: u64 = 0;
        for line in text.lines() {
            let line = line.trim_start();
            if let Some((number, _)) = line.strip_prefix("Node ").and_then(|rest| rest.split_once(',')) {
                node = number.parse().expect("a node");
                nodes.count = nodes.count.max(node + 1);
            } else if let Some(spanned) = line.strip_prefix("spanned ") {
                frames = spanned.trim().parse().expect("a number of frames");
            } else if let (Some(first), true) = (line.strip_prefix("start_pfn:"), frames > 0) {
                nodes.zones.insert(first.trim().parse().expect("a frame"), (frames, node));
            }
        }
        let mut end = 0;
        for (first, (frames, _)) in &nodes.zones {
            assert!(end <= *first, "zones overlap: {text}");
            end = first + frames;
        }
        nodes
    }

    fn of(&self, frame: u64) -> usize {
        match self.zones.range(..=frame).next_back() {
            Some((first, (frames, node))) if frame - first < *frames => *node,
            _ => panic!("frame {frame:#x} is on no node"),
        }
    }

    /// The state of every page of the processes.
    pub fn snapshot(&self, victims: &[Extent]) -> PageSnapshot {
        let kpageflags = File::open("/proc/kpageflags").expect("kpageflags");
        let mut snapshot = PageSnapshot { frames: vec![0; self.count], ..PageSnapshot::default() };
        // For each frame: the number of pages that map it, and their nodes.
        let mut merged: BTreeMap<u64, (u64, Vec<usize>)> = BTreeMap::new();
        for victim in victims {
            let mut pages = Pages { by_node: vec![0; self.count], merged: vec![0; self.count], ..Pages::default() };
            let pagemap = File::open(format!("/proc/{}/pagemap", victim.pid)).expect("pagemap");
            let mut entries = vec![0; victim.pages * 8];
            pagemap.read_exact_at(&mut entries, victim.start / PAGE * 8).expect("a page table");
            for entry in entries.chunks_exact(8) {
                let entry = word(entry);
                if entry & PRESENT == 0 {
                    continue;
                }
                let frame = entry & FRAME;
                let mut flags = [0; 8];
                kpageflags.read_exact_at(&mut flags, frame * 8).expect("a frame's flags");
                let flags = word(&flags);
                let node = self.of(frame);
                pages.by_node[node] += 1;
                pages.active += u64::from(flags & ACTIVE != 0);
                pages.referenced += u64::from(flags & REFERENCED != 0);
                // Some kernels from 6.10 on set KSM for every anonymous page (stable_page_flags in fs/proc/page.c). A
                // page that's mapped more than once is merged: the processes have no children.
                if flags & KSM != 0 && entry & EXCLUSIVE == 0 {
                    pages.merged[node] += 1;
                    let (mapped, from) = merged.entry(frame).or_default();
                    *mapped += 1;
                    from.push(victim.node);
                }
            }
            pages.merged_by_smaps = smaps_ksm(victim);
            snapshot.victims.push(pages);
        }
        for (frame, (mapped, from)) in &merged {
            snapshot.frames[self.of(*frame)] += 1;
            snapshot.saved += mapped - 1;
            snapshot.across += u64::from(from.iter().any(|node| *node != from[0]));
        }
        snapshot
    }
}

/// The number of merged pages according to smaps, in the mappings that hold a process's memory.
fn smaps_ksm(victim: &Extent) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/smaps", victim.pid)).expect("smaps");
    let end = victim.start + victim.pages as u64 * PAGE;
    let mut inside = false;
    let mut pages = 0;
    for line in text.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let from = u64::from_str_radix(from, 16).expect("an address");
            let to = u64::from_str_radix(to, 16).expect("an address");
            inside = from < end && to > victim.start;
        } else if let (Some(kib), true) = (line.strip_prefix("KSM:"), inside) {
            pages += kib.trim().trim_end_matches(" kB").parse::<u64>().expect("a size") / 4;
        }
    }
    pages
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// CPU time of a process and all its descendants, nanoseconds. Leaves out processes that have ended.
pub fn tree_ns(pid: i32) -> u64 {
    /// A tick in /proc/PID/stat: a hundredth of a second, on every architecture.
    const TICK_NS: u64 = 10_000_000;
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return 0 };
    let words: Vec<&str> = text[text.rfind(')').expect("a name") + 2..].split(' ').collect();
    // utime is the 14th word, the state after the name the 3rd (proc_pid_stat(5)). The three others are system time,
    // and both times of children that have ended.
    let own: u64 = words[11..15].iter().map(|word| word.parse::<u64>().expect("ticks") * TICK_NS).sum();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let below: u64 = children.split_ascii_whitespace().map(|child| tree_ns(child.parse().expect("a pid"))).sum();
    own + below
}
