//! `pagefold scan`: how much memory merging could save, and where. It only reads.

pub mod html;
pub mod map;
pub mod report;
pub mod survey;
pub mod table;

use crate::config::flags::DenyFlags;
use crate::config::scope::ScopeArgs;
use crate::output;
use crate::output::page;
use crate::output::placement::PlacementView;
use crate::preflight;
use anyhow::{Context, Result};
use map::{Map, part_of};
use pagefold_engine::hash::Digester;
use pagefold_engine::host::{MergedSample, PageState};
use pagefold_engine::keys::{OwnerKey, RegionKey};
use pagefold_engine::ledger::Ledger;
use pagefold_engine::placement::placer::summarize;
use pagefold_engine::placement::policy::{Latencies, Placement};
use pagefold_engine::sampling::census::choose::{Chooser, first_fraction, next_fraction};
use pagefold_engine::sampling::census::{Census, Findings};
use pagefold_engine::units::Vpn;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_procmem::memory::{Contents, PageReader, ReadHow};
use pagefold_procmem::numa::owner_view;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::os::numa::Topology;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use pagefold_text::style;
use report::{Cost, ScanReport};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use survey::{Survey, Surveyed};

#[derive(Clone, Debug, clap::Args)]
pub struct ScanArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    #[command(flatten)]
    pub deny: DenyFlags,
    /// Read every page instead of a sample (slower, without a margin of error)
    #[arg(long)]
    pub exact: bool,
    /// Print the result as JSON (schema pagefold.scan/1)
    #[arg(long)]
    pub json: bool,
    /// Also write the result to this file, as a self-contained web page with a map of each process, for which all of up to
    /// 16 GiB is read
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Seed of the sample, to repeat a scan with the same pages [default: random]
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
}

pub fn run(args: &ScanArgs) -> Result<u8> {
    let report = scan(args)?;
    if let Some(path) = &args.html {
        page::write(path, &html::page(&report))?;
    }
    print(args.json, &report)?;
    Ok(exit::OK)
}

pub fn print(json: bool, report: &ScanReport) -> Result<()> {
    output::print(json, report, |style| table::text(report, style))
}

pub fn scan(args: &ScanArgs) -> Result<ScanReport> {
    preflight::see_cgroups();
    let scoped = args.scope.resolve()?;
    let mut reader = reader()?;
    let cpu_before_ns = own_cpu_ns();
    let seed = args.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
    let progress = Progress::new();
    let (all, mut done) = (scoped.len() as f64, 0.0);
    let mut survey =
        Survey::of(scoped, &args.deny.apply(DenyList::default()), &mut reader, args.html.is_some(), || {
            done += 1.0;
            progress.show("reading page tables", Some(done / all));
        })?;
    refuse_if_nothing_is_left(&survey)?;

    let mut scanner = Scanner {
        census: Census::new(survey.cells.clone()),
        reader,
        chooser: Chooser::new(seed),
        digester: Digester::new(seed),
        pages_read: 0,
        reading_ns: 0,
        progress,
        to_read: 0.0,
        read: 0,
    };
    scanner.read_merged(&mut survey)?;
    let first = match args {
        ScanArgs { exact: true, .. } => 1.0,
        ScanArgs { html: Some(_), .. } => {
            (MAP_PAGES / survey.frames().max(1) as f64).clamp(first_fraction(survey.frames()), 1.0)
        }
        _ => first_fraction(survey.frames()),
    };
    let (findings, fraction) = scanner.sample(&mut survey, first)?;
    refuse_if_none_may_be_read(&survey)?;
    let numa = scanner.places(&survey)?;
    scanner.progress.clear();
    let cost = Cost::new(scanner.pages_read, own_cpu_ns().saturating_sub(cpu_before_ns), scanner.reading_ns);
    let maps = if args.html.is_some() { scanner.maps(&survey, &findings, fraction) } else { BTreeMap::new() };
    let report = ScanReport::of(&survey, &findings, fraction, args.scope.to_string(), cost);
    Ok(ScanReport { numa, maps, ..report })
}

fn reader() -> Result<PageReader, Exit> {
    let reader = PageReader::new();
    if reader.sees_frames() {
        return Ok(reader);
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
    let first = survey.processes.iter().find(|process| process.refused.is_some());
    let Some((process, reason)) = first.and_then(|process| Some((process, process.refused.as_ref()?))) else {
        return Err(Exit::new(exit::NO_SCOPE, "every process in scope has ended; start it again"));
    };
    let pid = process.scoped.process.pid();
    let others = match survey.processes.len() - 1 {
        0 => String::new(),
        others => format!(" (and so are {})", style::count(others, "other", "others")),
    };
    Err(Exit::new(
        exit::REFUSED,
        format!(
            "process {pid} ({}) is left alone: {reason}{}{others}; name other programs",
            process.scoped.name,
            report::way_in(&reason.to_string()),
        ),
    ))
}

/// If we may not read one process, we leave it out. If we may not read any, we lack rights.
fn refuse_if_none_may_be_read(survey: &Survey) -> Result<(), Exit> {
    let is_left = |process: &Surveyed| process.refused.is_none() && !process.gone;
    let denied = survey.processes.iter().find(|process| process.gone && process.refused.is_some());
    match denied.filter(|_| !survey.processes.iter().any(is_left)) {
        None => Ok(()),
        Some(process) => {
            let pid = process.scoped.process.pid();
            Err(Exit::new(exit::NOT_PERMITTED, format!("not permitted to read process {pid}; run as root (sudo)")))
        }
    }
}

/// We read up to this many pages for maps: 16 GiB.
const MAP_PAGES: f64 = 4_194_304.0;

/// Reads pages and counts their contents.
struct Scanner {
    census: Census,
    reader: PageReader,
    chooser: Chooser,
    digester: Digester,
    pages_read: u64,
    reading_ns: u64,
    progress: Progress,
    /// Frames of the present sample, and how many of them we've read.
    to_read: f64,
    read: u64,
}

impl Scanner {
    /// Reads one page of each merged frame: private pages with the same content can merge with it.
    fn read_merged(&mut self, survey: &mut Survey) -> Result<()> {
        for (number, process) in (0..).zip(&mut survey.processes) {
            if process.gone || process.merged.is_empty() {
                continue;
            }
            let runs: Vec<(Vpn, u32)> = process.merged.iter().map(|&page| (page, 1)).collect();
            let how = ReadHow { contents: Contents::All, huge: false, ..ReadHow::default() };
            let read = self.reader.read_runs(&process.scoped.process, &runs, how, |view| {
                if let (PageState::Merged, Some(bytes)) = (view.state, view.bytes) {
                    self.census.add_merged(self.digester.digest(bytes));
                    self.pages_read += 1;
                }
            });
            if let Err(error) = read {
                process.lose(error)?;
                self.census.remove_process(number);
            }
        }
        Ok(())
    }

    /// Where merged pages are. `None` on a machine with one memory node.
    fn places(&mut self, survey: &Survey) -> Result<Option<PlacementView>> {
        let Some(topology) = Topology::of_machine().context("cannot read /sys/devices/system/node")? else {
            return Ok(None);
        };
        let nodes = topology.views().context("cannot read /sys/devices/system/node")?;
        let (mut merged, mut owners) = (Vec::new(), Vec::new());
        let looked_at = || (0..).map(OwnerKey).zip(&survey.processes).filter(|(_, process)| !process.gone);
        for (owner, Surveyed { scoped, ranges, .. }) in looked_at() {
            let mut found = Vec::new();
            let looked = self.reader.merged_frames(&scoped.process, ranges, false, |page, frame| {
                let charged = false;
                let sample =
                    |node| (owner, MergedSample { region: RegionKey(0), page, frame, node, charged, mappers: 0 });
                found.extend(topology.node_of(frame).map(sample));
            });
            let view = owner_view(&scoped.process, &topology, owner, Placement::default());
            if let (Ok(()), Ok(view)) = (looked, view) {
                merged.append(&mut found);
                owners.push(view);
            }
        }
        let places = summarize(&merged, &owners, &nodes, Latencies::default());
        let name_of = |owner: OwnerKey| {
            let scoped = &survey.processes.get(owner.0 as usize)?.scoped;
            Some((scoped.process.pid(), scoped.name.clone()))
        };
        Ok(Some(PlacementView::of(&places, &Ledger::default(), name_of)))
    }

    /// The maps of the processes that we looked at, by pid.
    fn maps(&mut self, survey: &Survey, findings: &Findings, fraction: f64) -> BTreeMap<i32, Map> {
        let densities = self.census.densities(survey.parts(), findings);
        let mut maps = BTreeMap::new();
        for (number, process) in survey.processes.iter().enumerate().filter(|(_, process)| !process.gone) {
            let densities = &densities[survey.parts_before(number)..][..process.parts.len()];
            maps.insert(process.scoped.process.pid(), Map::of(survey, process, densities, fraction));
        }
        maps
    }

    /// Reads larger and larger samples until the error is small enough.
    fn sample(&mut self, survey: &mut Survey, first: f64) -> Result<(Findings, f64)> {
        let (mut from, mut fraction) = (0.0, first);
        loop {
            self.to_read = survey.frames() as f64 * (fraction - from);
            self.read = 0;
            for process in 0..survey.processes.len() {
                self.read_process(survey, process, from, fraction)?;
            }
            let findings = self.census.findings(fraction);
            match next_fraction(fraction, findings.relative_error()) {
                Some(next) => (from, fraction) = (fraction, next),
                None => return Ok((findings, fraction)),
            }
        }
    }

    fn read_process(&mut self, survey: &mut Survey, number: usize, from: f64, to: f64) -> Result<()> {
        let process = &survey.processes[number];
        if process.gone {
            return Ok(());
        }
        let (mut runs, mut places) = (Vec::new(), Vec::new());
        for region in &process.regions {
            for &(first, pages) in &region.runs {
                self.chooser.cut(region.number, first, pages, from, to, |first, pages, run| {
                    runs.push((first, pages));
                    places.push((region.cell, run));
                });
            }
        }
        let how = ReadHow { contents: Contents::All, huge: false, ..ReadHow::default() };
        let (mut at, mut holders, mut pages) = (0, Vec::new(), 0_u64);
        let (census, digester, progress) = (&mut self.census, &self.digester, &self.progress);
        let (to_read, before) = (self.to_read, self.read);
        let message = if to < 1.0 {
            format!("reading a sample of {}", style::percent(to, 1.0))
        } else {
            "reading every page".to_owned()
        };
        let before_ns = own_cpu_ns();
        let parts_before = survey.parts_before(number);
        let part_of = |page| u32::try_from(parts_before + part_of(&process.parts, page)?).ok();
        let read = self.reader.read_runs(&process.scoped.process, &runs, how, |view| {
            while view.page.0 >= runs[at].0.0 + u64::from(runs[at].1) {
                at += 1;
            }
            let (cell, run) = places[at];
            let Some(bytes) = view.bytes else { return };
            pages += 1;
            if pages % 4096 == 0 {
                progress.show(&message, Some((before + pages) as f64 / to_read));
            }
            match (view.state, view.frame) {
                (PageState::Private, _) => {
                    census.add_private(cell, run, part_of(view.page), digester.digest(bytes));
                }
                (PageState::Shared | PageState::Merged, Some(frame)) => {
                    survey.holders(frame, &mut holders);
                    if holders.is_empty() {
                        if view.state == PageState::Merged {
                            return;
                        }
                        // Shared since the survey, by COW or a fork.
                        holders.push(cell);
                    }
                    census.add_shared(&holders, run, digester.digest(bytes));
                }
                _ => {}
            }
        });
        self.pages_read += pages;
        self.read += pages;
        self.reading_ns += own_cpu_ns().saturating_sub(before_ns);
        if let Err(error) = read {
            self.census.remove_process(u32::try_from(number).unwrap_or(u32::MAX));
            survey.processes[number].lose(error)?;
        }
        Ok(())
    }
}
