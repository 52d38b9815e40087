//! Mappings of a process: parsers of `/proc/PID/maps` and `/proc/PID/smaps`.
//!
//! The name of a mapping can contain any bytes that a file system allows. The kernel escapes only the newline, as
//! `\012`, and not the backslash, so the escape is ambiguous: we keep names as printed, including a final ` (deleted)`.

use crate::ksm_stat::KsmStat;
use crate::os::abandonable;
use crate::process::{Process, ReadError};
use crate::status::Status;
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn};
use std::fmt;
use std::io::{self, Read};
use std::ops::ControlFlow;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Perms {
    pub read: bool,
    pub write: bool,
    pub exec: bool,
    /// `s` rather than `p`: a shared file mapping or shared memory.
    pub shared: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    pub start: u64,
    pub end: u64,
    pub perms: Perms,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Major and minor number of the file's device; zeros without a file.
    pub device: (u32, u32),
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// File name, `[heap]`, `[anon:...]` and the like, or empty.
    pub name: Vec<u8>,
}

impl Vma {
    pub fn first(&self) -> Vpn {
        Vpn::of_address(self.start)
    }

    pub fn pages(&self) -> Pages {
        Pages((self.end - self.start) / PAGE_BYTES)
    }

    /// Cuts off the part of the mapping below `end`, where the mapping listed before it ends. The kernel prints the
    /// list in pieces (`m_start` in fs/proc/task_mmu.c). If a mapping grows downwards, or is merged with its neighbour,
    /// between two pieces, it begins inside the part that we've already read.
    fn above(mut self, end: u64) -> Result<Self, &'static str> {
        if self.end <= end {
            return Err("a mapping ends before the one above it");
        }
        if let Some(below @ 1..) = end.checked_sub(self.start) {
            self.start = end;
            self.offset = if self.inode == 0 { self.offset } else { self.offset.saturating_add(below) };
        }
        Ok(self)
    }

    /// Whether this is one of the kernel's own mappings: `[vdso]`, `[vvar]`, `[vvar_vclock]`, `[vsyscall]`,
    /// `[uprobes]`.
    pub fn is_special(&self) -> bool {
        self.inode == 0 && (self.name.starts_with(b"[v") || self.name.starts_with(b"[uprobes"))
    }
}

/// The set of two-letter flags in smaps' `VmFlags` line. We keep unknown flags.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct VmFlags([u64; 11]);

impl VmFlags {
    /// Adds a flag. We ignore anything but two lower-case letters: the kernel prints `??` for unnamed bits.
    pub fn insert(&mut self, flag: [u8; 2]) {
        if let Some(bit) = Self::bit(flag) {
            self.0[bit / 64] |= 1 << (bit % 64);
        }
    }

    /// Whether the flag is set, as in `has(*b"mg")`.
    pub fn has(&self, flag: [u8; 2]) -> bool {
        Self::bit(flag).is_some_and(|bit| self.0[bit / 64] & (1 << (bit % 64)) != 0)
    }

    /// The flags without the mark (`mg`) and without soft-dirty (`sd`): the kernel joins mappings even if only one of
    /// them is soft-dirty.
    fn before_mark(mut self) -> Self {
        for bit in [*b"mg", *b"sd"].into_iter().filter_map(Self::bit) {
            self.0[bit / 64] &= !(1 << (bit % 64));
        }
        self
    }

    /// The flags in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = [u8; 2]> {
        let mut flags = Vec::new();
        for first in b'a'..=b'z' {
            for second in b'a'..=b'z' {
                if self.has([first, second]) {
                    flags.push([first, second]);
                }
            }
        }
        flags.into_iter()
    }

    fn bit(flag: [u8; 2]) -> Option<usize> {
        match flag {
            [a @ b'a'..=b'z', b @ b'a'..=b'z'] => Some(usize::from(a - b'a') * 26 + usize::from(b - b'a')),
            _ => None,
        }
    }
}

impl FromIterator<[u8; 2]> for VmFlags {
    fn from_iter<I: IntoIterator<Item = [u8; 2]>>(flags: I) -> Self {
        let mut set = Self::default();
        for flag in flags {
            set.insert(flag);
        }
        set
    }
}

impl fmt::Debug for VmFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|[a, b]| format!("{}{}", char::from(a), char::from(b)))).finish()
    }
}

/// A mapping with its counters and flags from smaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmaDetail {
    pub vma: Vma,
    /// `Rss`: present pages of any kind.
    pub rss_kib: u64,
    /// `Pss`: like `Rss`, but each page divided by the number of its mappings.
    pub pss_kib: u64,
    /// `Anonymous`: present anonymous pages.
    pub anonymous_kib: u64,
    /// `Swap`: anonymous pages that are swapped out.
    pub swap_kib: u64,
    /// `AnonHugePages`: memory mapped by huge pages.
    pub anon_huge_kib: u64,
    /// `KSM`: merged memory without zero pages; `None` before Linux 6.7.
    pub ksm_kib: Option<u64>,
    /// `Shared_Hugetlb` and `Private_Hugetlb`: present hugetlb pages, which aren't in `Rss`.
    pub hugetlb_kib: u64,
    pub flags: VmFlags,
    /// Size of the mapping before marks split it: the bytes of this one and of its neighbours that differ only in the
    /// mark.
    pub original_bytes: u64,
    /// At least this much of the mapping is pinned for I/O.
    pub pinned_kib: u64,
}

impl VmaDetail {
    /// Whether KSM could merge pages of this mapping. It can't in guard areas and unused stacks, which have no pages.
    fn can_be_merged(&self) -> bool {
        !self.vma.perms.shared && (self.anonymous_kib > 0 || self.swap_kib > 0 || self.flags.has(*b"mg"))
    }

    /// Whether nearly all present memory of this mapping is pinned.
    pub fn is_pinned(&self) -> bool {
        self.pinned_kib * 8 > self.rss_kib * 7
    }

    /// Whether this mapping and `next` would be one if their flags were equal.
    pub fn continues(&self, next: &Self) -> bool {
        let a = &self.vma;
        let b = &next.vma;
        a.end == b.start
            && a.perms == b.perms
            && a.name == b.name
            && (a.device, a.inode) == (b.device, b.inode)
            && (a.inode == 0 || a.offset.checked_add(a.end - a.start) == Some(b.offset))
    }
}

/// The kind of memory in a mapping. We show it to users, and group similar regions by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RegionKind {
    Heap,
    /// The main thread's stack. We can't tell stacks of other threads from anonymous memory.
    Stack,
    Anonymous,
    /// Guest memory of a virtual machine.
    GuestRam,
    /// Written pages of a private file mapping.
    FileCopy,
}

impl RegionKind {
    /// A number that is different for each kind.
    pub fn number(self) -> u64 {
        self as u64
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Heap => "heap",
            Self::Stack => "stack",
            Self::Anonymous => "anonymous",
            Self::GuestRam => "guest RAM",
            Self::FileCopy => "file copy",
        })
    }
}

/// A hypervisor's anonymous mapping of at least this many bytes is guest RAM. Firmware, video memory and thread stacks
/// are smaller.
pub const GUEST_RAM_AT_LEAST: u64 = 64 << 20;

/// Kind of a mapping in a process whose executable has the base name `exe`.
pub fn kind_of(vma: &Vma, exe: &[u8]) -> RegionKind {
    match vma.name.as_slice() {
        b"[heap]" => RegionKind::Heap,
        name if name.starts_with(b"[stack") => RegionKind::Stack,
        // A private mapping of /dev/zero is anonymous memory with a file name.
        _ if vma.inode != 0 && vma.name != b"/dev/zero" => RegionKind::FileCopy,
        _ if vma.end - vma.start >= GUEST_RAM_AT_LEAST && is_hypervisor(exe) => RegionKind::GuestRam,
        _ => RegionKind::Anonymous,
    }
}

fn is_hypervisor(exe: &[u8]) -> bool {
    exe.starts_with(b"qemu-")
        || exe.starts_with(b"cloud-hypervisor")
        || exe.starts_with(b"firecracker")
        || exe == b"kvm"
        || exe == b"crosvm"
}

/// Of the mappings that KSM could merge, we consider at most this many per process. Each takes some 250 bytes while we
/// read it, and as much again for the region that we make of it. The kernel allows 65,530 mappings by default
/// (`vm.max_map_count`), with names of 4,096 bytes each.
pub const MAPPINGS_MOST: usize = 16_384;
/// We list this many of the other mappings (shared memory, and private ones with no page written) one by one, and add
/// up the rest. At most half of the listed ones have no present pages. Search servers map tens of thousands of files,
/// and each thread has a guard page.
const OTHERS_MOST: usize = 4_096;
/// The longest part of a line that we keep: everything but the end of a file's name.
const LINE_BYTES: usize = 8 << 10;
const BUFFER_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// As printed, up to 8 KiB.
    All,
    /// Only names that tell the kind of memory: no paths of files, except `/dev/zero`.
    Special,
}

impl Names {
    fn keep(self, name: &[u8]) -> Vec<u8> {
        if self == Self::Special && name.starts_with(b"/") && name != b"/dev/zero" { Vec::new() } else { name.to_vec() }
    }
}

/// Why we couldn't read a list of mappings.
#[derive(Debug)]
pub enum ListError {
    Io(io::Error),
    Malformed(&'static str),
    TooMany,
}

impl ListError {
    fn of(self, process: &Process, file: &str) -> ReadError {
        let pid = process.pid();
        match self {
            Self::Io(error) => ReadError::from_io(pid, file, error),
            Self::Malformed(what) => process.malformed(file, what),
            Self::TooMany => ReadError::TooMany { pid, most: MAPPINGS_MOST },
        }
    }
}

/// Calls `each` for every line of `input`, cut to `LINE_BYTES` so that we need little memory. Each read counts as
/// progress of a job (see [`crate::os::abandonable`]).
fn each_line(
    mut input: impl Read,
    mut each: impl FnMut(&[u8]) -> Result<ControlFlow<()>, ListError>,
) -> Result<(), ListError> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut line: Vec<u8> = Vec::new();
    loop {
        let read = match input.read(&mut buffer) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ListError::Io(error)),
        };
        abandonable::advance();
        for piece in buffer[..read].split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            line.extend(&text[..text.len().min(LINE_BYTES - line.len())]);
            if ends && !line.is_empty() && each(&line)?.is_break() {
                return Ok(());
            }
            if ends {
                line.clear();
            }
        }
        if read == 0 {
            return if line.is_empty() { Ok(()) } else { each(&line).map(drop) };
        }
    }
}

/// Calls `each` for the mappings in the text of `/proc/PID/maps`, until it breaks.
pub fn each_mapping(
    maps: impl Read,
    names: Names,
    mut each: impl FnMut(Vma) -> ControlFlow<()>,
) -> Result<(), ListError> {
    let mut last = 0;
    each_line(maps, |line| {
        let vma = parse_line(line, names, last).map_err(ListError::Malformed)?;
        last = vma.end;
        Ok(each(vma))
    })
}

pub fn parse_maps(text: &[u8]) -> Result<Vec<Vma>, &'static str> {
    let mut found = Vec::new();
    let mut end = 0;
    for line in lines(text) {
        let vma = parse_line(line, Names::All, end)?;
        end = vma.end;
        found.push(vma);
    }
    Ok(found)
}

/// We read the mappings at most this often to find the marked ones.
const READS_MOST: u32 = 16;

/// KiB in the largest address space, of 57 bits.
const MOST_KIB: u64 = 1 << 47;

/// Reads a process's mappings with their details, without names of files. The kernel walks the page tables: that costs
/// some 10 ns per present page. Of the mappings that KSM can't merge we list at most `OTHERS_MOST`, and add the present
/// pages of the rest to one of these. Empty parts of a mapping that marks have split are all listed.
///
/// # Errors
/// [`ReadError::TooMany`] if KSM could merge more than [`MAPPINGS_MOST`].
pub fn read_smaps(process: &Process) -> Result<Vec<VmaDetail>, ReadError> {
    read_details(process, Names::Special, |_| true)
}

/// Like [`read_smaps`], with all names.
pub fn read_smaps_named(process: &Process) -> Result<Vec<VmaDetail>, ReadError> {
    read_details(process, Names::All, |_| true)
}

/// Reads up to [`MAPPINGS_MOST`] marked mappings, however many unmarked ones there are. `original_bytes` counts only
/// marked neighbours.
///
/// The kernel prints the list in pieces of some mappings. Between two pieces a mapping can move from the part we
/// haven't read to the part that we have. So if we find no marked mapping, we read the list again, until the kernel
/// says that there is none. Before Linux 6.14 it doesn't say so, and we stop after two lists.
///
/// # Errors
/// [`ReadError::Moving`] if there are marked mappings but we never found one.
pub fn read_marked(process: &Process) -> Result<Vec<VmaDetail>, ReadError> {
    for read in 1..=READS_MOST {
        let mut found = Details::default();
        match found.read(process.open_file("smaps")?, Names::Special, |detail| detail.flags.has(*b"mg")) {
            Ok(()) | Err(ListError::TooMany) => {}
            Err(error) => return Err(error.of(process, "smaps")),
        }
        let found = found.finish();
        if !found.is_empty() || !KsmStat::of(process)?.mergeable.unwrap_or(read == 1) {
            return Ok(found);
        }
    }
    Err(ReadError::Moving { pid: process.pid() })
}

/// Reads up to [`MAPPINGS_MOST`] mappings, marked or not, that have merged pages other than zero pages.
pub fn read_merged(process: &Process) -> Result<Vec<VmaDetail>, ReadError> {
    let mut found = Details::default();
    match found.read(process.open_file("smaps")?, Names::Special, |detail| detail.ksm_kib.unwrap_or(0) > 0) {
        Ok(()) | Err(ListError::TooMany) => Ok(found.finish()),
        Err(error) => Err(error.of(process, "smaps")),
    }
}

fn read_details(
    process: &Process,
    names: Names,
    keep: impl Fn(&VmaDetail) -> bool,
) -> Result<Vec<VmaDetail>, ReadError> {
    let mut found = Details::default();
    found.read(process.open_file("smaps")?, names, keep).map_err(|error| error.of(process, "smaps"))?;
    let mut details = found.finish();
    let pinned_kib = pinned_kib(&details, &Status::of(process)?);
    set_pinned(&mut details, pinned_kib);
    Ok(details)
}

/// How much of a process is pinned for I/O, KiB, as far as the kernel counts it. VFIO's pins count as locked memory. We
/// subtract present hugetlb pages: they aren't in `Rss`, and may be all that's pinned. The kernel refuses to pin pages
/// of devices (VM_IO, VM_PFNMAP).
pub fn pinned_kib(details: &[VmaDetail], status: &Status) -> u64 {
    let mut locked_kib = 0;
    let mut hugetlb_kib: u64 = 0;
    for detail in details {
        if detail.flags.has(*b"lo") {
            locked_kib += (detail.vma.end - detail.vma.start) >> 10;
        }
        hugetlb_kib = hugetlb_kib.saturating_add(detail.hugetlb_kib);
    }
    (status.pinned_kib + status.locked_kib.saturating_sub(locked_kib)).saturating_sub(hugetlb_kib)
}

/// Sets `pinned_kib` of each mapping. The kernel doesn't say which pages are pinned. But pinned pages are present: if
/// more pages are pinned than all other mappings have present, the excess is in this mapping. We also apply this to all
/// large private mappings together, such as the memory modules of a guest: if nearly all of their pages are pinned, we
/// count them all as pinned.
fn set_pinned(details: &mut [VmaDetail], pinned_kib: u64) {
    let is_large = |detail: &VmaDetail| {
        !detail.vma.perms.shared && detail.vma.inode == 0 && detail.vma.end - detail.vma.start >= GUEST_RAM_AT_LEAST
    };
    let resident_kib: u64 = details.iter().map(|detail| detail.rss_kib).sum();
    let large_kib: u64 = details.iter().filter(|detail| is_large(detail)).map(|detail| detail.rss_kib).sum();
    let is_pinned = |rss_kib: u64| pinned_kib.saturating_sub(resident_kib - rss_kib) * 8 > rss_kib * 7;
    let are_large_pinned = is_pinned(large_kib);
    for detail in details {
        let others_kib = resident_kib - detail.rss_kib;
        detail.pinned_kib = pinned_kib.saturating_sub(others_kib).min(detail.rss_kib);
        if are_large_pinned && is_large(detail) {
            detail.pinned_kib = detail.rss_kib;
        }
    }
}

pub fn parse_smaps(text: &[u8]) -> Result<Vec<VmaDetail>, &'static str> {
    let mut found = Details::default();
    for line in lines(text) {
        found.add(line, Names::All, |_| true)?;
    }
    found.settle_last(|_| true);
    Ok(found.finish())
}

/// The mappings of an smaps text as far as we've read it.
#[derive(Default)]
struct Details {
    found: Vec<VmaDetail>,
    end: u64,
    /// How many of `found` KSM could merge.
    mergeable: usize,
    /// Index of the last mapping in `found` that has present pages that KSM can't merge.
    last_other: Option<usize>,
}

impl Details {
    fn read(&mut self, smaps: impl Read, names: Names, keep: impl Fn(&VmaDetail) -> bool) -> Result<(), ListError> {
        each_line(smaps, |line| {
            self.add(line, names, &keep).map_err(ListError::Malformed)?;
            if self.mergeable > MAPPINGS_MOST { Err(ListError::TooMany) } else { Ok(ControlFlow::Continue(())) }
        })?;
        self.settle_last(keep);
        if self.mergeable > MAPPINGS_MOST { Err(ListError::TooMany) } else { Ok(()) }
    }

    /// Call this after adding all lines of a mapping. Counts the mapping, or drops it if `keep` doesn't want it.
    fn settle_last(&mut self, keep: impl Fn(&VmaDetail) -> bool) {
        let Some(last) = self.found.pop().filter(keep) else { return };
        // An empty part belongs to the mapping before it if only their flags differ, as after marking.
        let is_part = self.found.last().is_some_and(|before| before.can_be_merged() && before.continues(&last));
        let others = self.found.len() - self.mergeable;
        let is_empty = last.rss_kib == 0 && last.hugetlb_kib == 0;
        if last.can_be_merged() || is_part {
            self.mergeable += 1;
        } else if is_empty && others >= OTHERS_MOST / 2 {
            return;
        } else if let Some(other) = self.last_other.filter(|_| others >= OTHERS_MOST) {
            self.found[other].rss_kib += last.rss_kib;
            self.found[other].hugetlb_kib = self.found[other].hugetlb_kib.saturating_add(last.hugetlb_kib);
            return;
        } else if !is_empty {
            self.last_other = Some(self.found.len());
        }
        self.found.push(last);
    }

    fn add(&mut self, line: &[u8], names: Names, keep: impl Fn(&VmaDetail) -> bool) -> Result<(), &'static str> {
        // A mapping's line has a dash, in its addresses, before any colon; a counter's line has the colon first.
        if line.iter().find(|byte| matches!(byte, b'-' | b':')) == Some(&b'-') {
            let vma = parse_line(line, names, self.end)?;
            self.end = vma.end;
            self.settle_last(keep);
            self.found.push(VmaDetail {
                vma,
                rss_kib: 0,
                pss_kib: 0,
                anonymous_kib: 0,
                swap_kib: 0,
                anon_huge_kib: 0,
                ksm_kib: None,
                hugetlb_kib: 0,
                flags: VmFlags::default(),
                original_bytes: 0,
                pinned_kib: 0,
            });
            return Ok(());
        }
        let colon = line.iter().position(|&byte| byte == b':').ok_or("a line is neither mapping nor counter")?;
        let detail = self.found.last_mut().ok_or("a counter before the first mapping")?;
        let value = &line[colon + 1..];
        match &line[..colon] {
            b"Rss" => detail.rss_kib = kib(value)?,
            b"Pss" => detail.pss_kib = kib(value)?,
            b"Anonymous" => detail.anonymous_kib = kib(value)?,
            b"Swap" => detail.swap_kib = kib(value)?,
            b"AnonHugePages" => detail.anon_huge_kib = kib(value)?,
            b"KSM" => detail.ksm_kib = Some(kib(value)?),
            b"Shared_Hugetlb" | b"Private_Hugetlb" => {
                detail.hugetlb_kib = detail.hugetlb_kib.saturating_add(kib(value)?);
            }
            b"VmFlags" => {
                detail.flags = words(value).filter_map(|word| <[u8; 2]>::try_from(word).ok()).collect();
            }
            _ => {} // kernels add counters
        }
        Ok(())
    }

    fn finish(mut self) -> Vec<VmaDetail> {
        for alike in self.found.chunk_by_mut(|a, b| a.continues(b) && a.flags.before_mark() == b.flags.before_mark()) {
            let bytes = alike.iter().map(|detail| detail.vma.end - detail.vma.start).sum();
            for detail in alike {
                detail.original_bytes = bytes;
            }
        }
        self.found
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty())
}

fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b' ').filter(|word| !word.is_empty())
}

fn kib(value: &[u8]) -> Result<u64, &'static str> {
    let mut words = words(value);
    let number = words.next().ok_or("a counter without a value")?;
    if words.next() != Some(b"kB") {
        return Err("a counter is not in kB");
    }
    match decimal(number)? {
        kib @ ..=MOST_KIB => Ok(kib),
        _ => Err("a counter is too large"),
    }
}

/// Parses the line of a mapping that is listed after one that ends at `end_before`.
fn parse_line(line: &[u8], names: Names, end_before: u64) -> Result<Vma, &'static str> {
    let mut fields = [&line[..0]; 6];
    for (field, text) in fields.iter_mut().zip(line.splitn(6, |&byte| byte == b' ')) {
        *field = text;
    }
    let [range, perms, offset, device, inode, padded_name] = fields;
    let (start, end) = pair(range, b'-')?;
    if start >= end || start % PAGE_BYTES != 0 || end % PAGE_BYTES != 0 {
        return Err("a mapping's addresses are not whole pages in order");
    }
    let (major, minor) = pair(device, b':')?;
    let (Ok(major), Ok(minor)) = (u32::try_from(major), u32::try_from(minor)) else {
        return Err("a device number is too large");
    };
    // We only strip padding: no name begins with a space, but it can end with one.
    let name = padded_name.iter().position(|&byte| byte != b' ').unwrap_or(padded_name.len());
    let vma = Vma {
        start,
        end,
        perms: parse_perms(perms)?,
        offset: hexadecimal(offset)?,
        device: (major, minor),
        inode: decimal(inode)?,
        name: names.keep(&padded_name[name..]),
    };
    vma.above(end_before)
}

fn parse_perms(text: &[u8]) -> Result<Perms, &'static str> {
    match *text {
        [read @ (b'r' | b'-'), write @ (b'w' | b'-'), exec @ (b'x' | b'-'), shared @ (b's' | b'p')] => {
            Ok(Perms { read: read == b'r', write: write == b'w', exec: exec == b'x', shared: shared == b's' })
        }
        _ => Err("unknown permissions"),
    }
}

fn pair(text: &[u8], separator: u8) -> Result<(u64, u64), &'static str> {
    let at = text.iter().position(|&byte| byte == separator).ok_or("a pair of numbers lacks its separator")?;
    Ok((hexadecimal(&text[..at])?, hexadecimal(&text[at + 1..])?))
}

fn hexadecimal(text: &[u8]) -> Result<u64, &'static str> {
    digits(text, 16)
}

fn decimal(text: &[u8]) -> Result<u64, &'static str> {
    digits(text, 10)
}

fn digits(text: &[u8], radix: u32) -> Result<u64, &'static str> {
    if text.is_empty() {
        return Err("a number is missing");
    }
    let mut value = 0u64;
    for &byte in text {
        let digit = char::from(byte).to_digit(radix).ok_or("a number has an invalid digit")?;
        let shifted = value.checked_mul(u64::from(radix)).ok_or("a number is too large")?;
        value = shifted.checked_add(u64::from(digit)).ok_or("a number is too large")?;
    }
    Ok(value)
}

#[cfg(test)]
#[path = "maps_tests.rs"]
mod tests;
