//! Reads the pages of a plan on a thread that we may abandon (see [`pagefold_procmem::os::abandonable`]).

use crate::outsiders::{Member, SharedPage, may_be_forked};
use pagefold_engine::hash::{Digest, DigestSet, Digester, LineDigester};
use pagefold_engine::host::{Counted, MergedSample, PageSample, PageState, StateSample};
use pagefold_engine::keys::{LineageKey, NodeKey, OwnerKey, RegionKey};
use pagefold_engine::units::{Vpn, count};
use pagefold_ksm::request::{Hashed, RequestDevice};
use pagefold_procmem::charges::Charges;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::mappers::mappers_of;
use pagefold_procmem::memory::{PageReader, PageView, ReadHow};
use pagefold_procmem::os::abandonable::{Job, LIMIT, PATIENCE, Pending};
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Instant;

/// Pages of one region.
#[derive(Debug)]
pub(crate) struct RegionRead {
    pub(crate) region: RegionKey,
    /// The mappings of the region's family, if we want to know whether others map its pages, too.
    pub(crate) family: Vec<Member>,
    pub(crate) process: Arc<Process>,
    pub(crate) runs: Vec<(Vpn, u32)>,
    pub(crate) how: ReadHow,
}

/// A process whose merged zeros we count.
#[derive(Debug)]
pub(crate) struct CountedProcess {
    pub(crate) owner: OwnerKey,
    pub(crate) lineage: LineageKey,
    pub(crate) process: Arc<Process>,
}

/// The pages to read.
#[derive(Debug)]
pub(crate) struct SamplingJob {
    /// Pages to sample.
    pub(crate) reads: Vec<RegionRead>,
    /// Pages to search for merged frames.
    pub(crate) looks: Vec<RegionRead>,
    /// The directory of a cgroup: we look up which of the merged frames are charged to it.
    pub(crate) charged_to: Option<PathBuf>,
    /// The processes whose merged zeros we count, if we count savings.
    pub(crate) count: Option<Vec<CountedProcess>>,
    pub(crate) hash_mode: HashMode,
    /// Whether a huge page's average number of mappers is good enough for each of its pages. When we merge on request
    /// it isn't: we'd merge outsiders' memory, too. ksmd would only try in vain.
    pub(crate) takes_averages: bool,
    /// `None` on machines with a single NUMA node.
    pub(crate) topology: Option<Arc<Topology>>,
}

/// How we digest pages.
#[derive(Debug)]
pub(crate) enum HashMode {
    /// We read the pages ourselves.
    Read(Digester),
    /// The kernel hashes the pages in place. `colliding` are digests that pages of different contents share.
    InPlace { device: Arc<RequestDevice>, digester: LineDigester, colliding: Arc<DigestSet> },
}

impl HashMode {
    /// Reads or hashes runs of pages, and calls `visit` for every page in order.
    fn visit_runs(
        &self,
        reader: &mut PageReader,
        RegionRead { process, runs, how, .. }: &RegionRead,
        mut visit: impl FnMut(PageView<'_>, Digest),
    ) -> Result<(), ReadError> {
        match self {
            Self::Read(digester) => reader.read_runs(process, runs, *how, |view| {
                visit(view, view.bytes.map(|bytes| digester.digest(bytes)).unwrap_or_default());
            }),
            Self::InPlace { device, digester, colliding } => {
                let pidfd = process.pidfd()?;
                let mut hashes = Vec::new();
                let digest_run = |first: Vpn, digests: &mut [Option<Digest>]| {
                    hashes.clear();
                    hashes.resize(digests.len(), 0);
                    let extend = |skipped, hashes: &mut [u64], from, to| {
                        let address = (first + count(skipped)).address();
                        device.hash(&Hashed { process: pidfd, address, key: digester.key(), from, to }, hashes)
                    };
                    digester.digests(&mut hashes, colliding, extend, |at, digest| digests[at] = Some(digest))
                };
                let visit_digest = |view: PageView<'_>, digest: Option<Digest>| visit(view, digest.unwrap_or_default());
                reader.digest_runs(process, runs, *how, digest_run, visit_digest)
            }
        }
    }
}

/// The results of a job.
#[derive(Debug)]
pub(crate) struct PlanReading {
    pub(crate) reader: PageReader,
    pub(crate) pages: Vec<PageSample>,
    /// The regions that we've begun to read.
    pub(crate) read: BTreeSet<RegionKey>,
    pub(crate) merged: Vec<MergedSample>,
    /// The pages that we searched and that aren't merged, but are shared through fork or map the zero page.
    others: Vec<StateSample>,
    /// The count, if we counted savings.
    pub(crate) counted: Option<Counted>,
    /// Processes that we couldn't read completely.
    pub(crate) failed: Vec<(i32, ReadError)>,
    progress: Arc<Progress>,
}

/// Progress of the reading thread.
#[derive(Debug, Default)]
struct Progress {
    pid: AtomicI32,
    is_given_up: AtomicBool,
}

impl Progress {
    /// Begins reading a process, unless our caller has stopped waiting. Returns whether we may go on.
    fn begin(&self, process: &Process) -> bool {
        if self.is_given_up.load(Ordering::Relaxed) {
            return false;
        }
        self.pid.store(process.pid(), Ordering::Relaxed);
        true
    }
}

/// Reads the pages. The error has the pid of the process whose read doesn't return. Then the reader and the pages read
/// so far are lost.
pub(crate) fn sample(reader: PageReader, job: SamplingJob) -> Result<PlanReading, (i32, Pending)> {
    let progress = Arc::new(Progress::default());
    let mut reading = PlanReading {
        reader,
        pages: Vec::new(),
        read: BTreeSet::new(),
        merged: Vec::new(),
        others: Vec::new(),
        counted: None,
        failed: Vec::new(),
        progress: progress.clone(),
    };
    let read = Job::start(move || {
        reading.run(&job);
        reading
    });
    read.wait(LIMIT).map_err(|job| {
        progress.is_given_up.store(true, Ordering::Relaxed);
        (progress.pid.load(Ordering::Relaxed), job.pending)
    })
}

impl PlanReading {
    fn run(&mut self, job: &SamplingJob) {
        self.read_pages(job);
        self.find_merged(job);
        let frames: Vec<u64> = self.merged.iter().map(|sample| sample.frame).collect();
        if let Some(dir) = &job.charged_to {
            self.look_up_charges(dir, &frames);
        }
        if let Some(processes) = &job.count {
            self.counted = self.count(processes, &frames);
        }
    }

    /// Reads the pages to sample. If that takes long, we leave the rest unread.
    fn read_pages(&mut self, job: &SamplingJob) {
        let began = Instant::now();
        for read in &job.reads {
            let RegionRead { region, process, runs, family, .. } = read;
            if began.elapsed() > PATIENCE || !self.progress.begin(process) {
                break;
            }
            self.read.insert(*region);
            let mut shared = Vec::new();
            let pages = &mut self.pages;
            pages.reserve(runs.iter().map(|run| run.1 as usize).sum());
            let result = job.hash_mode.visit_runs(&mut self.reader, read, |view, digest| {
                let PageView { page, state, huge, active, lone, frame, .. } = view;
                let mut node = None;
                if let (Some(nodes), Some(frame), PageState::Private) = (&job.topology, frame, state) {
                    node = nodes.node_of(frame);
                }
                let outsiders = !family.is_empty() && may_be_forked(state);
                if outsiders {
                    shared.extend(SharedPage::of(&view, pages.len(), job.takes_averages));
                }
                pages.push(PageSample { region: *region, page, state, huge, digest, active, lone, outsiders, node });
            });
            if let Err(error) = result {
                self.failed.push((process.pid(), error));
            }
            self.find_outsiders(family, &mut shared);
        }
    }

    /// Finds out which pages are mapped by their family alone. If we can't find out, we assume that others map them,
    /// too.
    fn find_outsiders(&mut self, family: &[Member], shared: &mut Vec<SharedPage>) {
        shared.sort_unstable_by_key(|page| page.page);
        shared.dedup_by_key(|page| page.page);
        let frames: Vec<u64> = shared.iter().map(|page| page.frame).collect();
        if frames.is_empty() {
            return;
        }
        // We count all mappings first. If a member then writes its page, we find too few members, never too many.
        let Ok(mappers) = mappers_of(&frames) else { return };
        for member in family {
            if !self.progress.begin(&member.process) {
                return;
            }
            if let Err(error) = member.count(&mut self.reader, shared) {
                self.failed.push((member.process.pid(), error));
            }
        }
        for (page, mappers) in shared.iter().zip(mappers) {
            self.pages[page.at].outsiders = page.members != mappers;
        }
    }

    fn find_merged(&mut self, job: &SamplingJob) {
        for RegionRead { region, process, runs, .. } in &job.looks {
            if !self.progress.begin(process) {
                break;
            }
            let merged = &mut self.merged;
            let others = &mut self.others;
            let looked = self.reader.shared_frames(process, runs, job.charged_to.is_some(), |page, state, frame| {
                if state != PageState::Merged {
                    others.push(StateSample { region: *region, page, state });
                    return;
                }
                let node = match &job.topology {
                    Some(nodes) => nodes.node_of(frame),
                    // Without a topology the machine has one node.
                    None => Some(NodeKey(0)),
                };
                if let Some(node) = node {
                    merged.push(MergedSample { region: *region, page, frame, node, charged: false, mappers: 0 });
                }
            });
            if let Err(error) = looked {
                self.failed.push((process.pid(), error));
            }
        }
    }

    /// Finds out which merged frames are charged to a cgroup. If we can't, none counts as charged to it, so we unmerge
    /// nothing to relieve the cgroup.
    fn look_up_charges(&mut self, dir: &Path, frames: &[u64]) {
        let charged = Charges::of(dir).and_then(|mut charges| charges.look_up(frames)).unwrap_or_default();
        for (sample, charged) in self.merged.iter_mut().zip(charged) {
            sample.charged = charged;
        }
    }

    /// Counts how many pages map each merged frame, and how many pages of each process KSM has replaced by the zero
    /// page. `None` if we can't see frames.
    fn count(&mut self, processes: &[CountedProcess], frames: &[u64]) -> Option<Counted> {
        if !self.reader.sees_frames() {
            return None;
        }
        for (sample, mappers) in self.merged.iter_mut().zip(mappers_of(frames).ok()?) {
            sample.mappers = mappers;
        }
        let mut zeros = BTreeMap::new();
        for CountedProcess { owner, lineage, process } in processes {
            if !self.progress.begin(process) {
                break;
            }
            // If we can't read a process we don't know its zeros.
            if let Ok(stat) = KsmStat::of(process) {
                zeros.insert(*owner, (*lineage, stat.zeros()));
            }
        }
        Some(Counted { zeros, others: std::mem::take(&mut self.others) })
    }
}
