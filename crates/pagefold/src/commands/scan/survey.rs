//! The survey before we read pages. It finds each process's pages, whether they're merged or shared, and the memory
//! that we leave out.
//!
//! We walk the page tables of everything in scope once (about 33 ns a page; reading a page takes 500 ns). This gives us
//! exact counts of merged or shared pages, and lists of the frames to read. We read a frame shared through fork only
//! once, among the pages of its first holder, and never if a process out of scope or left alone maps it.

use super::reader::ScanReader;
use super::why::cause::{Cause, Causes};
use crate::bounds::Bounds;
use anyhow::{Context, Result};
use pagefold_engine::host::PageState;
use pagefold_engine::keys::DomainKey;
use pagefold_engine::sampling::census::{Cell, bytes_of};
use pagefold_engine::units::{Pages, Vpn, index};
use pagefold_host::scope::ProcessInfo;
use pagefold_host::scope::exclude::{Exclusion, vma_exclusion};
use pagefold_procmem::image::{compare_address_spaces, image_of};
use pagefold_procmem::mappers::mappers_of;
use pagefold_procmem::maps::{RegionKind, VmaDetail, kind_of, pinned_kib, read_smaps};
use pagefold_procmem::memory::{PageReader, ReadHow};
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::status::program_name;
use pagefold_text::style::count;
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Why we leave out memory that's shared through fork with processes that we can't merge: they'd keep the frames, so
/// merging would save nothing.
const SHARED_WITH_OUTSIDERS: &str = "shared through fork with processes out of scope or left alone";

#[derive(Debug, Default)]
pub struct Survey {
    /// The processes, in the order of their pids.
    pub processes: Vec<Surveyed>,
    /// The cells of the census. A cell is the memory of one kind in one process.
    pub cells: Vec<Cell>,
    pub kinds: Vec<RegionKind>,
    /// Why each cell's memory is out of KSM's reach, if it is.
    pub causes: Vec<Option<Cause>>,
    /// Frames shared through fork, in ascending order: one entry for each page table entry that maps the frame, with
    /// the index of that page's cell in `cells`.
    shared: Vec<(u64, u32)>,
    /// If we look for causes: the pages of all frames that several page table entries share, by ascending frame.
    pub joint: Vec<Joint>,
    /// For each program image: one process of each address space, in the order of [`compare_address_spaces`].
    spaces: BTreeMap<u64, Vec<Arc<Process>>>,
}

/// What we look for beside mergeable memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Which workloads hold the same contents.
    pub sharing: bool,
    /// Memory out of reach, with the causes.
    pub causes: bool,
}

#[derive(Debug)]
pub struct Surveyed {
    pub scoped: ProcessInfo,
    pub excluded: Vec<LeftOut>,
    /// Why we leave out the whole process, if we do.
    pub refused: Option<Exclusion>,
    /// Whether we look at its frames nevertheless.
    pub only_frames: bool,
    /// The option or command that would bring the process in, to print after the reason.
    pub way_in: String,
    pub domain: DomainKey,
    /// If we look for causes: the memory that we can't examine, by reason.
    pub unseen: Vec<LeftOut>,
    /// At least this many of the pinned pages are in memory that KSM can merge.
    pinned: Pages,
    /// The kernel doesn't say which pages are pinned, so we assume that this part of all mergeable memory is.
    pub pinned_part: f64,
    /// Whether the process ended during the scan, or we couldn't read it any more.
    pub gone: bool,
    /// The anonymous pages and file pages of each mapping to read, by ascending address.
    pub regions: Vec<Region>,
    /// The address ranges of these mappings.
    pub ranges: Vec<(Vpn, u32)>,
    /// Merged pages to read, one for each merged frame.
    pub merged: Vec<Vpn>,
}

impl Surveyed {
    /// Whether some or all of the process's frames remain unexamined.
    pub fn is_unexamined(&self) -> bool {
        self.refused.is_some() && (self.gone || !self.only_frames)
    }

    /// Leaves out the process, since we can't read it. Fails if the error concerns more than this process.
    pub fn lose(&mut self, error: ReadError) -> Result<(), ReadError> {
        self.gone = true;
        if !matches!(error, ReadError::Vanished { .. }) {
            self.refused = Some(Exclusion::of_unreadable(error)?);
        }
        Ok(())
    }
}

/// Memory that we leave out for one reason.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    pub reason: String,
    pub bytes: u64,
    pub regions: u32,
    /// Whether KSM could never merge this memory, no matter who asks.
    #[serde(skip)]
    pub is_out_of_reach: bool,
}

impl LeftOut {
    pub fn of(why: &Exclusion, bytes: u64, regions: u32) -> Self {
        Self { reason: why.to_string(), bytes, regions, is_out_of_reach: why.is_out_of_reach() }
    }

    /// The number of mappings, in words.
    pub fn mappings(&self) -> String {
        match self.regions {
            0 => "the kernel does not say which mappings".to_owned(),
            regions => count(regions as usize, "mapping", "mappings"),
        }
    }
}

/// Memory that we leave out, by reason.
#[derive(Debug, Default)]
pub struct LeftOutByReason(BTreeMap<String, LeftOut>);

impl LeftOutByReason {
    pub fn add(&mut self, more: LeftOut) {
        match self.0.get_mut(&more.reason) {
            Some(sum) => {
                sum.bytes += more.bytes;
                sum.regions += more.regions;
            }
            None => _ = self.0.insert(more.reason.clone(), more),
        }
    }

    /// The reasons with their memory, the largest first.
    pub fn by_size(self) -> Vec<LeftOut> {
        let mut list: Vec<LeftOut> = self.0.into_values().collect();
        list.sort_by_key(|left_out| std::cmp::Reverse(left_out.bytes));
        list
    }
}

/// The anonymous pages, or the file pages, of one mapping.
#[derive(Debug)]
pub struct Region {
    /// A number that is unique in the survey.
    pub number: u32,
    pub cell: u32,
    /// Whether we may read the contents of the pages.
    pub is_read: bool,
    /// Runs of pages to sample. A frame shared through fork is only in the runs of its first holder.
    pub runs: Vec<(Vpn, u32)>,
}

/// A page whose frame several page table entries share.
#[derive(Clone, Copy, Debug)]
pub struct Joint {
    pub frame: u64,
    pub merged: bool,
    pub process: u32,
    /// Index of the region in its process.
    pub region: u32,
    page: Vpn,
}

/// A kind of memory, and why it's out of KSM's reach, if it is. Each process has one cell for each such key.
type CellKey = (RegionKind, Option<Cause>);

impl Survey {
    pub fn of(
        scoped: Vec<ProcessInfo>,
        bounds: &mut Bounds,
        reader: &mut ScanReader,
        wanted: Wanted,
        mut progress: impl FnMut(),
    ) -> Result<Self> {
        let mut survey = Self::default();
        let mut joint = Vec::new();
        let mut numbers = 0;
        for scoped in scoped {
            let mut surveyed = Surveyed {
                domain: bounds.domain(&scoped),
                scoped,
                excluded: Vec::new(),
                refused: None,
                only_frames: false,
                way_in: String::new(),
                unseen: Vec::new(),
                pinned: Pages(0),
                pinned_part: 0.0,
                gone: false,
                regions: Vec::new(),
                ranges: Vec::new(),
                merged: Vec::new(),
            };
            let cells_before = survey.cells.len();
            let joint_before = joint.len();
            if let Err(error) = survey.add(&mut surveyed, bounds, reader, wanted.causes, &mut joint, &mut numbers) {
                surveyed.lose(error)?;
                surveyed.regions.clear();
                survey.cells.truncate(cells_before);
                survey.kinds.truncate(cells_before);
                survey.causes.truncate(cells_before);
                joint.truncate(joint_before);
            }
            survey.processes.push(surveyed);
            progress();
        }
        survey.settle(&mut joint)?;
        if wanted.causes {
            survey.joint = joint;
        }
        Ok(survey)
    }

    fn add(
        &mut self,
        surveyed: &mut Surveyed,
        bounds: &mut Bounds,
        reader: &mut ScanReader,
        with_causes: bool,
        joint: &mut Vec<Joint>,
        numbers: &mut u32,
    ) -> Result<(), ReadError> {
        let process = &surveyed.scoped.process;
        surveyed.refused = bounds.exclusion(&surveyed.scoped)?;
        // To see whether trust domains share frames, we look at all domains' frames, but don't read their contents.
        surveyed.only_frames = with_causes && matches!(surveyed.refused, Some(Exclusion::OtherDomain { .. }));
        if surveyed.refused.is_none() || surveyed.only_frames {
            if let Some(same) = self.same_memory(process)? {
                surveyed.refused = Some(same);
                surveyed.only_frames = false;
            }
        }
        let only_frames = surveyed.only_frames;
        let mut left_out = LeftOutByReason::default();
        if let Some(refused) = surveyed.refused.as_ref().filter(|_| !only_frames) {
            surveyed.way_in = bounds.way_in(&surveyed.scoped, &refused.to_string());
            // We report the process's size, but read none of its pages.
            let details = reader.run(process, |_, process| read_smaps(process)).unwrap_or_default();
            let kib = details.iter().map(|detail| detail.anonymous_kib).sum::<u64>();
            left_out.add(LeftOut::of(refused, kib << 10, u32::try_from(details.len()).unwrap_or(u32::MAX)));
            surveyed.excluded = left_out.by_size();
            surveyed.unseen.clone_from(&surveyed.excluded);
            return Ok(());
        }
        let program = program_name(surveyed.scoped.exe.as_deref(), surveyed.scoped.name.as_bytes());
        let owner = u32::try_from(self.processes.len()).unwrap_or(u32::MAX);
        let mut cells: BTreeMap<CellKey, u32> = BTreeMap::new();
        let mut unseen = LeftOutByReason::default();
        let details = reader.run(process, |_, process| read_smaps(process))?;
        let mut pinned_kib = pinned_kib(&details, &surveyed.scoped.status);
        for detail in details {
            let exclusion = vma_exclusion(&detail);
            let causes = match &exclusion {
                exclusion if with_causes => Causes::of(&detail, exclusion.as_ref()),
                Some(_) => None,
                None => Some(Causes::default()),
            };
            if let Some(exclusion) = &exclusion {
                let kib = if matches!(exclusion, Exclusion::Special) { 0 } else { detail.rss_kib };
                if exclusion.is_out_of_reach() {
                    pinned_kib = pinned_kib.saturating_sub(kib);
                }
                if kib > 0 && *exclusion != Exclusion::NothingAnonymous {
                    let more = LeftOut::of(exclusion, kib << 10, 1);
                    if causes.is_none() {
                        unseen.add(more.clone());
                    }
                    left_out.add(more);
                }
            }
            let Some(causes) = causes else { continue };
            let pages = u32::try_from(detail.vma.pages().0).unwrap_or(u32::MAX);
            surveyed.ranges.push((detail.vma.first(), pages));
            let kind = kind_of(&detail.vma, &program);
            let has_swapped_file = detail.vma.perms.shared;
            let swapped = detail.swap_kib / 4;
            let with_file = causes.file.is_some();
            let found = reader
                .run(process, move |reader, process| pages_of(process, &detail, reader, with_file, only_frames))?;
            let file_cause = if found.is_swap_backed { causes.file.map(Cause::in_memory) } else { causes.file };
            for (is_file, cause, runs) in [(false, causes.anonymous, found.private), (true, file_cause, found.file)] {
                let shared = found.joint.iter().filter(|page| page.is_file == is_file);
                let swapped = if is_file == has_swapped_file { swapped } else { 0 };
                if (with_causes || is_file) && runs.is_empty() && swapped == 0 && shared.clone().next().is_none() {
                    continue;
                }
                let cell = self.cell(&mut cells, owner, (kind, cause));
                let facts = &mut self.cells[cell as usize];
                facts.private += Pages(runs.iter().map(|&(_, pages)| u64::from(pages)).sum());
                facts.swapped += Pages(swapped);
                let region = u32::try_from(surveyed.regions.len()).unwrap_or(u32::MAX);
                for page in shared {
                    joint.push(Joint {
                        frame: page.frame,
                        merged: page.merged,
                        process: owner,
                        region,
                        page: page.page,
                    });
                }
                *numbers += 1;
                let is_read = !only_frames && cause.is_none_or(Cause::is_read);
                surveyed.regions.push(Region { number: *numbers, cell, is_read, runs });
            }
        }
        surveyed.unseen = unseen.by_size();
        if pinned_kib > 0 {
            left_out.add(LeftOut::of(&Exclusion::Pinned, pinned_kib << 10, 0));
            surveyed.pinned = Pages(pinned_kib / 4);
        }
        surveyed.excluded = left_out.by_size();
        Ok(())
    }

    /// Whether we've surveyed the process's address space already, as another process's.
    fn same_memory(&mut self, process: &Arc<Process>) -> Result<Option<Exclusion>, ReadError> {
        // Processes that share an address space run the same program, so they have the same image.
        let spaces = self.spaces.entry(image_of(process)?).or_default();
        let order = |other: &Arc<Process>| compare_address_spaces(other, process).unwrap_or(Ordering::Less);
        match spaces.binary_search_by(order) {
            Ok(at) => Ok(Some(Exclusion::SameMemory { with: spaces[at].pid() })),
            Err(at) => {
                spaces.insert(at, Arc::clone(process));
                Ok(None)
            }
        }
    }

    /// The cell of one process for this kind of memory.
    fn cell(&mut self, cells: &mut BTreeMap<CellKey, u32>, process: u32, key: CellKey) -> u32 {
        *cells.entry(key).or_insert_with(|| {
            self.cells.push(Cell { process, ..Cell::default() });
            self.kinds.push(key.0);
            self.causes.push(key.1);
            u32::try_from(self.cells.len() - 1).unwrap_or(u32::MAX)
        })
    }

    /// Divides each shared or merged frame among the pages that map it, and decides in which process we read the frame.
    /// We leave out frames shared through fork if processes that we don't read map them, too.
    fn settle(&mut self, joint: &mut [Joint]) -> Result<()> {
        joint.sort_unstable_by_key(|joint| (joint.frame, joint.process, joint.page));
        let by_frame: Vec<&[Joint]> = joint.chunk_by(|a, b| a.frame == b.frame).collect();
        let frames: Vec<u64> = by_frame.iter().map(|holders| holders[0].frame).collect();
        let mappers = mappers_of(&frames).context("cannot read /proc/kpagecount")?;
        let mut kept: BTreeMap<u32, BTreeMap<u32, f64>> = BTreeMap::new();
        for (holders, mappers) in by_frame.into_iter().zip(mappers) {
            // If the holders disagree, the frame was merged during the survey, so it counts as merged.
            let merged = holders.iter().any(|holder| holder.merged);
            let in_scope = u32::try_from(holders.len()).unwrap_or(u32::MAX);
            let is_kept = mappers > in_scope || !holders.iter().all(|holder| self.is_read(holder));
            if !merged && is_kept && holders.iter().all(|holder| self.cause(holder).is_none()) {
                for holder in holders {
                    let part = 1.0 / f64::from(mappers);
                    *kept.entry(holder.process).or_default().entry(holder.region).or_default() += part;
                    let cell = self.cell_of(holder);
                    let facts = &mut self.cells[cell as usize];
                    facts.shared += Pages(1);
                    facts.kept_frames += part;
                }
                continue;
            }
            let part = 1.0 / f64::from(in_scope);
            for holder in holders {
                let cell = self.cell_of(holder);
                let facts = &mut self.cells[cell as usize];
                if merged {
                    facts.merged += Pages(1);
                    facts.merged_frames += part;
                } else {
                    facts.shared += Pages(1);
                    facts.shared_frames += part;
                    self.shared.push((holder.frame, cell));
                }
            }
            let Some(&first) = holders.iter().find(|holder| self.is_read(holder)) else { continue };
            let process = &mut self.processes[index(first.process)];
            if merged {
                process.merged.push(first.page);
            } else {
                process.regions[first.region as usize].runs.push((first.page, 1));
            }
        }
        self.exclude_kept(kept);
        self.spread_pins();
        for process in &mut self.processes {
            process.merged.sort_unstable();
            for region in &mut process.regions {
                if region.is_read {
                    join(&mut region.runs);
                } else {
                    region.runs.clear();
                }
            }
        }
        Ok(())
    }

    /// Leaves out frames that processes out of reach keep. `kept` has their numbers, by process and region.
    fn exclude_kept(&mut self, kept: BTreeMap<u32, BTreeMap<u32, f64>>) {
        for (number, frames_by_region) in kept {
            let excluded = &mut self.processes[number as usize].excluded;
            let regions = u32::try_from(frames_by_region.len()).unwrap_or(u32::MAX);
            let bytes = bytes_of(frames_by_region.values().sum());
            excluded.push(LeftOut { reason: SHARED_WITH_OUTSIDERS.to_owned(), bytes, regions, is_out_of_reach: false });
            excluded.sort_by_key(|left_out| std::cmp::Reverse(left_out.bytes));
        }
    }

    /// Assumes that a process's pinned pages are spread evenly over its mergeable memory.
    fn spread_pins(&mut self) {
        let mut held = vec![0.0; self.processes.len()];
        for (cell, cause) in self.cells.iter().zip(&self.causes) {
            if cause.is_none() {
                held[index(cell.process)] += cell.private.0 as f64 + cell.shared_frames;
            }
        }
        for (process, held) in self.processes.iter_mut().zip(held) {
            process.pinned_part = (process.pinned.0 as f64 / f64::max(held, 1.0)).min(1.0);
        }
    }

    /// Whether we read pages of the holder's process.
    fn is_read(&self, holder: &Joint) -> bool {
        self.processes[index(holder.process)].refused.is_none()
    }

    fn cell_of(&self, joint: &Joint) -> u32 {
        self.processes[joint.process as usize].regions[joint.region as usize].cell
    }

    /// Why a page is out of reach, if it is.
    pub fn cause(&self, joint: &Joint) -> Option<Cause> {
        self.causes[self.cell_of(joint) as usize]
    }

    /// Fills `cells` with the cell of each page table entry that maps a frame shared through fork. Leaves `cells` empty
    /// if the survey hasn't found the frame.
    pub fn holders(&self, frame: u64, cells: &mut Vec<u32>) {
        cells.clear();
        let from = self.shared.partition_point(|&(other, _)| other < frame);
        cells.extend(self.shared[from..].iter().take_while(|&&(other, _)| other == frame).map(|&(_, cell)| cell));
    }

    /// The number of frames that we can read.
    pub fn frames(&self) -> u64 {
        let mut frames = 0;
        for region in self.processes.iter().flat_map(|process| &process.regions) {
            frames += region.runs.iter().map(|run| u64::from(run.1)).sum::<u64>();
        }
        frames
    }
}

#[derive(Debug, Default)]
struct MappedPages {
    private: Vec<(Vpn, u32)>,
    /// Runs of file pages that only this mapping maps.
    file: Vec<(Vpn, u32)>,
    /// Whether the file is in memory: shared memory, or on a tmpfs.
    is_swap_backed: bool,
    joint: Vec<JointPage>,
}

/// A page whose frame other page table entries map, too.
#[derive(Clone, Copy, Debug)]
struct JointPage {
    page: Vpn,
    frame: u64,
    merged: bool,
    is_file: bool,
}

/// Finds the pages of one mapping, and file pages only if `with_file`. With `only_frames`, we never read a page, even
/// if it changes meanwhile.
fn pages_of(
    process: &Process,
    detail: &VmaDetail,
    reader: &mut PageReader,
    with_file: bool,
    only_frames: bool,
) -> Result<MappedPages, ReadError> {
    let mut found = MappedPages::default();
    let mut others: Vec<(Vpn, u32)> = Vec::new();
    let mut file_frame = None;
    reader.walk(process, detail.vma.first(), detail.vma.pages(), |page, entry| {
        if !entry.present() {
            return;
        }
        if entry.private() {
            extend(&mut found.private, page);
        } else if !entry.file_or_shared() {
            extend(&mut others, page);
        } else if with_file {
            let Some(frame) = entry.pfn() else { return };
            file_frame = Some(frame);
            if entry.exclusive() {
                extend(&mut found.file, page);
            } else {
                found.joint.push(JointPage { page, frame, merged: false, is_file: true });
            }
        }
    })?;
    if let Some(frame) = file_frame {
        let is = reader.is_swap_backed(frame);
        found.is_swap_backed = is.map_err(|error| ReadError::from_io(process.pid(), "../kpageflags", error))?;
    }
    // We needn't read contents, as the frame's flags tell a merged page from a shared one.
    let mut add = |page, state, frame| {
        if let (PageState::Merged | PageState::Shared, Some(frame)) = (state, frame) {
            let merged = state == PageState::Merged;
            found.joint.push(JointPage { page, frame, merged, is_file: false });
        }
    };
    if only_frames {
        reader.shared_frames(process, &others, false, |page, state, frame| add(page, state, Some(frame)))?;
    } else {
        let how = ReadHow { unmarked: !detail.flags.has(*b"mg"), ..ReadHow::default() };
        reader.read_runs(process, &others, how, |view| add(view.page, view.state, view.frame))?;
    }
    Ok(found)
}

fn extend(runs: &mut Vec<(Vpn, u32)>, page: Vpn) {
    match runs.last_mut() {
        Some((first, length)) if first.0 + u64::from(*length) == page.0 && *length < u32::MAX => *length += 1,
        _ => runs.push((page, 1)),
    }
}

fn join(runs: &mut Vec<(Vpn, u32)>) {
    runs.sort_unstable();
    runs.dedup_by(|next, kept| {
        let neighbours = kept.0.0 + u64::from(kept.1) == next.0.0 && kept.1.checked_add(next.1).is_some();
        if neighbours {
            kept.1 += next.1;
        }
        neighbours
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join() {
        let mut runs = vec![(Vpn(9), 1), (Vpn(3), 2), (Vpn(5), 1), (Vpn(7), 2)];
        join(&mut runs);
        assert_eq!(runs, [(Vpn(3), 3), (Vpn(7), 3)]);
    }
}
