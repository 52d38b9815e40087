//! Reads the pages of a plan on a thread that we may abandon (see [`pagefold_procmem::os::abandonable`]).

use pagefold_engine::hash::{Digest, DigestSet, Digester, LineDigester};
use pagefold_engine::host::{Counted, MergedSample, PageSample, PageState};
use pagefold_engine::keys::{LineageKey, NodeKey, OwnerKey, RegionKey};
use pagefold_engine::units::{PAGE_BYTES, Pages, Vpn, count};
use pagefold_ksm::request::{Hashed, RequestDevice};
use pagefold_procmem::charges::Charges;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::mappers::mappers_of;
use pagefold_procmem::memory::{PageReader, PageView, ReadHow};
use pagefold_procmem::os::abandonable::{Pending, run_abandonable};
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::process::{Process, ReadError};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Pages of one region.
#[derive(Debug)]
pub(crate) struct RegionRuns {
    pub(crate) region: RegionKey,
    pub(crate) process: Arc<Process>,
    pub(crate) runs: Vec<(Vpn, u32)>,
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
    pub(crate) reads: Vec<(RegionRuns, ReadHow)>,
    /// Pages to search for merged frames.
    pub(crate) looks: Vec<RegionRuns>,
    /// The directory of a cgroup: we look up whether these frames are charged to it.
    pub(crate) charged_to: Option<PathBuf>,
    /// The processes whose merged zeros we count, if we count savings.
    pub(crate) count: Option<Vec<CountedProcess>>,
    pub(crate) digesting: Digesting,
    /// On machines with several memory nodes.
    pub(crate) topology: Option<Arc<Topology>>,
}

/// How we digest pages.
#[derive(Debug)]
pub(crate) enum Digesting {
    /// We read them.
    Read(Digester),
    /// The kernel hashes them in place. The set has digests that pages of different contents share.
    InPlace(Arc<RequestDevice>, LineDigester, Arc<DigestSet>),
}

impl Digesting {
    /// Reads or hashes runs of pages, and calls `visit` for every page in order.
    fn visit_runs(
        &self,
        reader: &mut PageReader,
        process: &Process,
        runs: &[(Vpn, u32)],
        how: ReadHow,
        mut visit: impl FnMut(PageView<'_>, Digest),
    ) -> Result<(), ReadError> {
        match self {
            Self::Read(digester) => reader.read_runs(process, runs, how, |view| {
                visit(view, view.bytes.map(|bytes| digester.digest(bytes)).unwrap_or_default());
            }),
            Self::InPlace(device, digester, colliding) => {
                let (pidfd, mut hashes) = (process.pidfd()?, Vec::new());
                let digest = |first: Vpn, digests: &mut [Option<Digest>]| {
                    hashes.clear();
                    hashes.resize(digests.len(), 0);
                    let change = |skipped, hashes: &mut [u64], from, to| {
                        let address = (first + count(skipped)).address();
                        device.hash(&Hashed { process: pidfd, address, key: digester.key(), from, to }, hashes)
                    };
                    digester.digests(&mut hashes, colliding, change, |at, digest| digests[at] = Some(digest))
                };
                reader.digest_runs(process, runs, how, digest, |view, digest| visit(view, digest.unwrap_or_default()))
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) reader: PageReader,
    pub(crate) pages: Vec<PageSample>,
    pub(crate) merged: Vec<MergedSample>,
    /// If we counted savings.
    pub(crate) counted: Option<Counted>,
    /// Processes that we couldn't read completely.
    pub(crate) failed: Vec<(i32, ReadError)>,
}

/// Progress of the reading thread.
#[derive(Debug, Default)]
struct Progress {
    pid: AtomicI32,
    given_up: AtomicBool,
}

/// Reads the pages. The error names the process whose read doesn't return; the reader and the pages read so far are
/// lost with it.
pub(crate) fn sample(mut reader: PageReader, work: SamplingJob) -> Result<Sampled, (i32, Pending)> {
    let SamplingJob { reads, looks, charged_to, count, digesting, topology } = work;
    let progress = Arc::new(Progress::default());
    let shared = progress.clone();
    let work = move || {
        let expected =
            reads.iter().flat_map(|(piece, _)| &piece.runs).map(|run| usize::try_from(run.1).unwrap_or(0)).sum();
        let mut pages = Vec::with_capacity(expected);
        let mut failed = Vec::new();
        for (RegionRuns { region, process, runs }, how) in reads {
            if shared.given_up.load(Ordering::Relaxed) {
                break;
            }
            shared.pid.store(process.pid(), Ordering::Relaxed);
            let read = digesting.visit_runs(&mut reader, &process, &runs, how, |view, digest| {
                let node = match &topology {
                    Some(nodes) if view.state == PageState::Private => {
                        view.frame.and_then(|frame| nodes.node_of(frame))
                    }
                    _ => None,
                };
                let PageView { page, state, huge, active, .. } = view;
                pages.push(PageSample { region, page, state, huge, digest, active, node });
            });
            if let Err(error) = read {
                failed.push((process.pid(), error));
            }
        }
        let mut merged = Vec::new();
        for RegionRuns { region, process, runs } in looks {
            if shared.given_up.load(Ordering::Relaxed) {
                break;
            }
            shared.pid.store(process.pid(), Ordering::Relaxed);
            let looked = reader.merged_frames(&process, &runs, charged_to.is_some(), |page, frame| {
                // Without a topology there is one node.
                let node = topology.as_ref().map_or(Some(NodeKey(0)), |nodes| nodes.node_of(frame));
                merged.extend(node.map(|node| MergedSample { region, page, frame, node, charged: false, mappers: 0 }));
            });
            if let Err(error) = looked {
                failed.push((process.pid(), error));
            }
        }
        if let Some(dir) = charged_to {
            // If we can't read that, nothing counts as charged to it, and we take nothing apart for it.
            let frames: Vec<u64> = merged.iter().map(|sample| sample.frame).collect();
            let charged = Charges::of(&dir).and_then(|mut charges| charges.look_up(&frames)).unwrap_or_default();
            for (sample, charged) in merged.iter_mut().zip(charged) {
                sample.charged = charged;
            }
        }
        let counted = count.and_then(|processes| {
            if !reader.sees_frames() {
                return None;
            }
            let frames: Vec<u64> = merged.iter().map(|sample| sample.frame).collect();
            let mappers = mappers_of(&frames).ok()?;
            for (sample, mappers) in merged.iter_mut().zip(mappers) {
                sample.mappers = mappers;
            }
            Some(Counted { zeros: merged_zeros(&processes, &shared) })
        });
        Sampled { reader, pages, merged, counted, failed }
    };
    run_abandonable(work).map_err(|pending| {
        progress.given_up.store(true, Ordering::Relaxed);
        (progress.pid.load(Ordering::Relaxed), pending)
    })
}

/// The zeros of each process that ksmd has merged. If we can't read a process we don't know its zeros.
fn merged_zeros(processes: &[CountedProcess], progress: &Progress) -> BTreeMap<OwnerKey, (LineageKey, Pages)> {
    let mut zeros = BTreeMap::new();
    for CountedProcess { owner, lineage, process } in processes {
        if progress.given_up.load(Ordering::Relaxed) {
            break;
        }
        progress.pid.store(process.pid(), Ordering::Relaxed);
        if let Ok(stat) = KsmStat::of(process) {
            zeros.insert(*owner, (*lineage, Pages(stat.zero_kib * 1024 / PAGE_BYTES)));
        }
    }
    zeros
}
