//! `pagefold scan`: shows how much memory merging could save, and where. It only reads memory.

mod advice;
mod headroom;
pub mod html;
pub mod reader;
pub mod report;
pub mod scanner;
pub mod sharing;
pub mod survey;
pub mod table;
pub mod why;

use crate::bounds::Bounds;
use crate::commands::run::progress::and_others;
use crate::config::flags::DenyFlags;
use crate::config::ownership::shown;
use crate::config::scope::ScopeArgs;
use crate::output;
use crate::output::page::{self, Origin};
use crate::output::placement::PlacementView;
use crate::preflight;
use anyhow::{Context, Result};
use headroom::{Savable, without_headroom};
use pagefold_engine::host::{MergedSample, PageState};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::placement::placer::summarize;
use pagefold_engine::placement::policy::{Latencies, Placement};
use pagefold_engine::sampling::census::choose::first_fraction;
use pagefold_engine::sampling::census::{Figures, bytes_of};
use pagefold_engine::state::MoveTotals;
use pagefold_engine::units::{Bytes, Vpn, index};
use pagefold_ksm::request::DEVICE;
use pagefold_procmem::headroom::total_of;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::numa::owner_view;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::process::ReadError;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use reader::ScanReader;
use report::{ProcessRow, ScanReport};
use scanner::{Memory, Scanner};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use survey::{Survey, Surveyed, Wanted};

#[derive(Clone, Debug, clap::Args)]
pub struct ScanArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    #[command(flatten)]
    pub deny: DenyFlags,
    /// Read every page instead of a sample (slower, without a margin of error)
    #[arg(long)]
    pub exact: bool,
    /// Say why memory is or isn't shared, and what would change that
    ///
    /// Divides all memory (also file pages, and memory that KSM can't merge) into merged, mergeable, duplicate but out
    /// of KSM's reach (by cause), already shared, and unknown. If the scope is two processes, also compares them page
    /// by page, and counts the frames that both map. Also reads memory that a plain scan leaves alone (locked, or kept
    /// out of core dumps), without storing any of it.
    #[arg(long, conflicts_with = "html")]
    pub why: bool,
    /// Print the result as JSON (schema pagefold.scan/1, or pagefold.why/1)
    #[arg(long)]
    pub json: bool,
    /// Also write the result to this file, as a web page
    ///
    /// The page is self-contained, and also shows which workloads have copies of each other's memory. To find these
    /// copies, we read all memory, or a sample of 16 GiB if there is more. If the file is -, only the page is written,
    /// to standard output.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Seed for choosing the pages; give it again to sample the same ones [default: random]
    #[arg(long, value_name = "NUMBER", hide_short_help = true)]
    pub seed: Option<u64>,
}

pub fn run(args: &ScanArgs) -> Result<u8> {
    if args.why {
        let report = why::report(args)?;
        output::print(args.json, &report, |style| why::words::text(&report, style))?;
        return Ok(exit::OK);
    }
    let is_page_alone = args.html.as_deref() == Some(Path::new(page::STDOUT));
    if is_page_alone && args.json {
        let line = "--json and --html - both write to standard output; give --html a file";
        return Err(Exit::new(exit::USAGE, line).into());
    }
    let report = scan(args)?;
    if let Some(path) = &args.html {
        page::write(path, &html::page(&report, &Origin::here()))?;
    }
    if is_page_alone {
        return Ok(exit::OK);
    }
    print(args.json, &report)?;
    Ok(exit::OK)
}

pub fn print(json: bool, report: &ScanReport) -> Result<()> {
    output::print(json, report, |style| table::text(report, style))
}

/// A scan that has walked the page tables and read the merged frames, but no sample yet.
struct Prepared {
    scope: ScopeArgs,
    /// Whether this is the whole host, because no scope was given.
    is_host: bool,
    memory: ProcessMemory,
    scanner: Scanner,
}

impl Prepared {
    fn of(args: &ScanArgs, wanted: Wanted) -> Result<Self> {
        preflight::see_cgroups();
        let is_host = args.scope == ScopeArgs::default();
        let scope = if is_host { ScopeArgs::all() } else { args.scope.clone() };
        let scoped = scope.resolve()?;
        let mut reader = reader()?;
        let began_ns = own_cpu_ns();
        let progress = Progress::new();
        let all = scoped.len() as f64;
        let mut done = 0.0;
        let mut bounds = Bounds::with(&args.deny)?;
        let survey = Survey::of(scoped, &mut bounds, &mut reader, wanted, || {
            done += 1.0;
            progress.show("reading page tables", Some(done / all));
        })?;
        refuse_if_nothing_is_left(&survey)?;
        let mut scanner = Scanner::new(survey.cells.clone(), args.seed, began_ns, progress);
        let contents = if wanted.causes { Contents::Present } else { Contents::All };
        let mut memory = ProcessMemory {
            how: ReadHow { contents, ..ReadHow::default() },
            contents: wanted.sharing.then(|| sharing::Contents::new(&survey)),
            asked: vec![0; survey.cells.len()],
            got: vec![0; survey.cells.len()],
            survey,
            reader,
        };
        memory.read_merged(&mut scanner)?;
        Ok(Self { scope, is_host, memory, scanner })
    }
}

fn scan(args: &ScanArgs) -> Result<ScanReport> {
    let wanted = Wanted { sharing: args.html.is_some(), causes: false };
    let Prepared { scope, is_host, mut memory, mut scanner } = Prepared::of(args, wanted)?;
    let frames = memory.frames();
    let mut first = first_fraction(frames);
    if args.exact {
        first = 1.0;
    } else if wanted.sharing {
        first = (SHARING_PAGES / frames.max(1) as f64).clamp(first, 1.0);
    }
    let (findings, fraction) = scanner.sample(&mut memory, first)?;
    refuse_if_none_may_be_read(&memory.survey)?;
    let numa = memory.places()?;
    scanner.progress.clear();
    let cost = scanner.cost();
    let matrix = memory.contents.map(|contents| contents.matrix(fraction >= 1.0));
    let survey = memory.survey;
    let rows = survey.processes.iter().map(ProcessRow::from).collect();
    let mut report = ScanReport::of(rows, &survey.cells, &survey.kinds, &findings, fraction, scope.to_string(), cost);
    let by_pid: HashMap<i32, Figures> = report.processes.iter().map(|row| (row.pid, row.figures)).collect();
    let mut savable = Vec::new();
    for process in &survey.processes {
        let Some(figures) = by_pid.get(&process.scoped.pid()) else { continue };
        let bytes = Bytes(bytes_of(figures.savable));
        savable.push(Savable { bytes, cgroups: process.scoped.cgroups.limiting_dirs() });
    }
    // If we merge on request, we choose which copies stay, namely those where there's headroom.
    if !Path::new(DEVICE).exists() {
        let memory = total_of(Path::new("/proc")).context("cannot read /proc/meminfo")?;
        report.without_headroom_bytes = without_headroom(&savable, memory).0;
    }
    report.is_host = is_host;
    report.command = advice::command(&report, &scope, &args.deny);
    if is_host && report.command.is_none() && !preflight::is_running() {
        report.across_workloads = advice::across_workloads(&report);
    }
    Ok(ScanReport { numa, matrix, ..report })
}

fn reader() -> Result<ScanReader, Exit> {
    let reader = PageReader::new();
    if reader.sees_frames() {
        return Ok(ScanReader(Some(reader)));
    }
    Err(match std::fs::metadata("/proc/kpageflags") {
        Ok(_) => Exit::new(exit::NOT_PERMITTED, "not permitted to read other processes' memory; run as root (sudo)"),
        Err(_) => Exit::new(
            exit::NO_KERNEL_SUPPORT,
            "this kernel has no /proc/kpageflags; it must be built with CONFIG_PROC_PAGE_MONITOR",
        ),
    })
}

fn refuse_if_nothing_is_left(survey: &Survey) -> Result<(), Exit> {
    if survey.processes.iter().any(|process| process.refused.is_none() && !process.gone) {
        return Ok(());
    }
    let Some(process) = survey.processes.iter().find(|process| process.refused.is_some()) else {
        return Err(Exit::new(exit::NO_SCOPE, "every process in scope has ended; start one again"));
    };
    let reason = process.refused.as_ref().map(ToString::to_string).unwrap_or_default();
    let pid = process.scoped.process.pid();
    let others = and_others(survey.processes.len() - 1);
    Err(Exit::new(
        exit::REFUSED,
        format!(
            "process {pid} ({}) is left alone: {reason}{}{others}; name other programs",
            process.scoped.name, process.way_in,
        ),
    ))
}

/// We leave out a process that we may not read. If we may not read any, we lack rights, and the scan fails.
fn refuse_if_none_may_be_read(survey: &Survey) -> Result<(), Exit> {
    let mut denied = None;
    for process in &survey.processes {
        match (&process.refused, process.gone) {
            (None, false) => return Ok(()),
            (Some(_), true) => denied = denied.or(Some(process.scoped.process.pid())),
            _ => {}
        }
    }
    match denied {
        None => Ok(()),
        Some(pid) => {
            Err(Exit::new(exit::NOT_PERMITTED, format!("not permitted to read process {pid}; run as root (sudo)")))
        }
    }
}

/// To see which workloads have the same contents, we read at least this many pages (16 GiB), or all if there are fewer:
/// a small sample finds hardly any pairs.
const SHARING_PAGES: f64 = 4_194_304.0;

struct ProcessMemory {
    survey: Survey,
    reader: ScanReader,
    how: ReadHow,
    /// For each cell of the census: how many pages we tried to read, and how many we could read.
    asked: Vec<u64>,
    got: Vec<u64>,
    /// The contents that we've read, if the web page shows which workloads share them.
    contents: Option<sharing::Contents>,
}

/// Where a page that we read belongs: its cell in the census (one kind of memory of one process), and its run of pages.
struct RunPlace {
    cell: u32,
    run: u32,
}

impl Memory for ProcessMemory {
    fn targets(&self) -> usize {
        self.survey.processes.len()
    }

    fn frames(&self) -> u64 {
        self.survey.frames()
    }

    fn read(&mut self, number: usize, scanner: &mut Scanner) -> Result<()> {
        let survey = &self.survey;
        let process = &survey.processes[number];
        if process.gone {
            return Ok(());
        }
        let mut runs = Vec::new();
        let mut places = Vec::new();
        for region in &process.regions {
            for &(first, pages) in &region.runs {
                scanner.choose(region.number, first, pages, |first, pages, run| {
                    runs.push((first, pages));
                    places.push(RunPlace { cell: region.cell, run });
                    self.asked[index(region.cell)] += u64::from(pages);
                });
            }
        }
        let mut holders = Vec::new();
        let contents = &mut self.contents;
        let number_of_process = u32::try_from(number).unwrap_or(u32::MAX);
        let mut at = 0;
        let domain = process.domain;
        let process = &process.scoped.process;
        let read = self.reader.read_runs(process, &runs, self.how, scanner, |scanner, page, state, frame, digest| {
            let digest = digest.in_domain(domain);
            while page.0 >= runs[at].0.0 + u64::from(runs[at].1) {
                at += 1;
            }
            let RunPlace { cell, run } = places[at];
            self.got[index(cell)] += 1;
            match (state, frame) {
                (PageState::Private, _) => {
                    scanner.census.add_private(cell, run, digest);
                    if let Some(contents) = contents {
                        contents.add(digest, [number_of_process].into_iter());
                    }
                }
                (PageState::Shared | PageState::Merged, Some(frame)) => {
                    survey.holders(frame, &mut holders);
                    if holders.is_empty() && state == PageState::Shared {
                        // The page has become shared since the survey, for example by a fork.
                        holders.push(cell);
                    }
                    scanner.census.add_shared(&holders, run, digest);
                    if let Some(contents) = contents {
                        contents.add(digest, holders.iter().map(|cell| survey.cells[index(*cell)].process));
                    }
                }
                _ => {}
            }
        });
        if let Err(error) = read {
            self.lose(number, error, scanner)?;
        }
        Ok(())
    }
}

impl ProcessMemory {
    /// Leaves out a process that we can't read any more.
    fn lose(&mut self, number: usize, error: ReadError, scanner: &mut Scanner) -> Result<(), ReadError> {
        scanner.census.remove_process(u32::try_from(number).unwrap_or(u32::MAX));
        self.survey.processes[number].lose(error)
    }

    /// Reads one page of each merged frame, because private pages with the same content can merge with that frame.
    fn read_merged(&mut self, scanner: &mut Scanner) -> Result<()> {
        for number in 0..self.targets() {
            let process = &self.survey.processes[number];
            if process.gone || process.merged.is_empty() {
                continue;
            }
            let runs: Vec<(Vpn, u32)> = process.merged.iter().map(|&page| (page, 1)).collect();
            let domain = process.domain;
            let process = &process.scoped.process;
            let read = self.reader.read_runs(process, &runs, self.how, scanner, |scanner, _, state, _, digest| {
                if state == PageState::Merged {
                    scanner.census.add_merged(digest.in_domain(domain));
                }
            });
            if let Err(error) = read {
                self.lose(number, error, scanner)?;
            }
        }
        Ok(())
    }

    /// On which memory nodes merged pages are. `None` on a machine with one node.
    fn places(&mut self) -> Result<Option<PlacementView>> {
        let Some(topology) = Topology::of_machine().context("cannot read /sys/devices/system/node")? else {
            return Ok(None);
        };
        let nodes = topology.views().context("cannot read /sys/devices/system/node")?;
        let processes = &self.survey.processes;
        let mut merged = Vec::new();
        let mut owners = Vec::new();
        for (number, process) in (0..).zip(processes) {
            if process.gone {
                continue;
            }
            let owner = OwnerKey(number);
            let ranges = process.ranges.clone();
            let frames = self.reader.run(&process.scoped.process, move |reader, process| {
                let mut frames = Vec::new();
                reader.merged_frames(process, &ranges, false, |page, frame| frames.push((page, frame)))?;
                Ok(frames)
            });
            let view = owner_view(&process.scoped.process, &topology, owner, Placement::default());
            let (Ok(frames), Ok(view)) = (frames, view) else { continue };
            owners.push(view);
            for (page, frame) in frames {
                if let Some(node) = topology.node_of(frame) {
                    let region = RegionKey(0);
                    let sample = MergedSample { region, page, frame, node, charged: false, mappers: 0 };
                    merged.push((owner, sample));
                }
            }
        }
        let places = summarize(&merged, &owners, &nodes, Latencies::default());
        Ok(Some(PlacementView::of(&places, MoveTotals::default(), |owner| {
            let scoped = &processes.get(owner.0 as usize)?.scoped;
            Some((scoped.process.pid(), scoped.name.clone()))
        })))
    }
}

impl From<&Surveyed> for ProcessRow {
    /// A process's row, without figures.
    fn from(surveyed: &Surveyed) -> Self {
        let scoped = &surveyed.scoped;
        let left_out = match &surveyed.refused {
            Some(refused) => Some(refused.to_string()),
            None if surveyed.gone => Some("has ended".to_owned()),
            None => None,
        };
        Self {
            pid: scoped.process.pid(),
            name: scoped.name.clone(),
            exe: scoped.exe.as_deref().map(shown),
            cgroup: scoped.cgroups.path.as_ref().map(|cgroup| printable(cgroup.as_bytes())),
            workload: scoped.workload().map(|workload| workload.to_string()),
            excluded: surveyed.excluded.clone(),
            left_out,
            way_in: surveyed.way_in.clone(),
            pinned_part: surveyed.pinned_part,
            ..Self::default()
        }
    }
}
