//! `pagefold-xen scan`: how much memory sharing could save between guests. It only reads.

use super::{ScopeArgs, call, open, refuse_unfit, resolve};
use pagefold::commands::scan::print;
use pagefold::commands::scan::report::{Cost, KindRow, ProcessRow, SCHEMA, ScanReport};
use pagefold::commands::scan::survey::by_size;
use pagefold_engine::hash::Digester;
use pagefold_engine::sampling::census::choose::{Chooser, first_fraction, next_fraction};
use pagefold_engine::sampling::census::{Cell, Census, Figures, Findings, bytes_of};
use pagefold_engine::units::{Pages, Vpn, index};
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use pagefold_xen::guests::{InScope, unfit};
use pagefold_xen::hypervisor::{CallError, Gfn, GuestPage, Hypervisor};
use pagefold_xen::ranges::{Range, ranges};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

/// The tables' name for guest memory.
const KIND: &str = "guest memory";
/// Pages to read at a time.
const BATCH: usize = 256;

/// A guest, and what we know of it before we read its pages.
struct Surveyed {
    guest: InScope,
    ranges: Vec<Range>,
    left_out: Option<String>,
}

#[derive(Clone, Debug, clap::Args)]
pub struct ScanArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Read every page instead of a sample (slower, without a margin of error)
    #[arg(long)]
    exact: bool,
    /// Print the result as JSON (schema pagefold.scan/1)
    #[arg(long)]
    json: bool,
    /// Seed of the sample, to repeat a scan with the same pages [default: random]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

pub fn run(args: &ScanArgs) -> anyhow::Result<u8> {
    print(args.json, &scan(args)?)?;
    Ok(exit::OK)
}

fn scan(args: &ScanArgs) -> Result<ScanReport, Exit> {
    let scope = args.scope.guests()?;
    let mut xen = open("reading guests' memory")?;
    let cpu_before_ns = own_cpu_ns();
    let guests = resolve(&mut xen, &scope)?;
    refuse_unfit(&guests)?;
    let mut surveyed = Vec::new();
    for guest in guests {
        let (ranges, left_out) = match unfit(&guest.domain) {
            Some(why) => (Vec::new(), Some(why.to_owned())),
            None => match ranges(&mut xen, guest.domain.id, guest.domain.most) {
                Ok(ranges) => (ranges, None),
                Err(CallError::Ended) => (Vec::new(), Some("has ended".to_owned())),
                Err(error) => return Err(call(&error)),
            },
        };
        surveyed.push(Surveyed { guest, ranges, left_out });
    }
    // We only learn which pages are already shared by reading them: one hypercall each.
    let shared: Vec<Pages> = surveyed.iter().map(|surveyed| surveyed.guest.domain.shared).collect();
    let seed = args.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
    // The hypervisor counts frames only for all guests together.
    let memory = xen.memory().map_err(|error| call(&error))?;
    let frames_per_page = memory.frames.0 as f64 / (memory.frames + memory.saved).0.max(1) as f64;
    let mut cells = Vec::new();
    for (number, surveyed) in (0..).zip(&surveyed) {
        let merged = shared[index(number)];
        let merged_frames = merged.0 as f64 * frames_per_page;
        let all: Pages = surveyed.ranges.iter().map(|range| range.pages).sum();
        cells.push(Cell {
            process: number,
            private: all.saturating_sub(merged),
            merged,
            merged_frames,
            ..Cell::default()
        });
    }
    let mut scanner = Scanner {
        census: Census::new(cells),
        chooser: Chooser::new(seed),
        digester: Digester::new(seed),
        pages_read: 0,
        reading_ns: 0,
        progress: Progress::new(),
    };
    let all: u64 = surveyed.iter().flat_map(|surveyed| &surveyed.ranges).map(|range| range.pages.0).sum();
    let first = if args.exact { 1.0 } else { first_fraction(all) };
    let (findings, fraction) = scanner.sample(&mut xen, &mut surveyed, first)?;
    scanner.progress.clear();
    let cost = Cost::new(scanner.pages_read, own_cpu_ns().saturating_sub(cpu_before_ns), scanner.reading_ns);
    Ok(report(&surveyed, &findings, fraction, args.scope.to_string(), cost))
}

/// Reads pages and counts their contents.
struct Scanner {
    census: Census,
    chooser: Chooser,
    digester: Digester,
    pages_read: u64,
    reading_ns: u64,
    progress: Progress,
}

impl Scanner {
    /// Reads larger and larger samples until the error is small enough.
    fn sample(
        &mut self,
        xen: &mut impl Hypervisor,
        surveyed: &mut [Surveyed],
        first: f64,
    ) -> Result<(Findings, f64), Exit> {
        let (mut from, mut fraction) = (0.0, first);
        loop {
            let guests = surveyed.len() as f64;
            for (number, surveyed) in (0..).zip(surveyed.iter_mut()).filter(|(_, surveyed)| surveyed.left_out.is_none())
            {
                self.progress.show("reading guests' memory", Some(f64::from(number) / guests));
                match self.read(xen, number, surveyed, from, fraction) {
                    Ok(()) => {}
                    Err(CallError::Ended) => {
                        self.census.remove_process(number);
                        surveyed.left_out = Some("has ended".to_owned());
                    }
                    Err(error) => return Err(call(&error)),
                }
            }
            let findings = self.census.findings(fraction);
            match next_fraction(fraction, findings.relative_error()) {
                Some(next) => (from, fraction) = (fraction, next),
                None => return Ok((findings, fraction)),
            }
        }
    }

    fn read(
        &mut self,
        xen: &mut impl Hypervisor,
        number: u32,
        surveyed: &Surveyed,
        from: f64,
        to: f64,
    ) -> Result<(), CallError> {
        let before_ns = own_cpu_ns();
        let id = surveyed.guest.domain.id;
        let has_shared = surveyed.guest.domain.shared > Pages(0);
        // The frames of the sample, each with its run.
        let mut frames: Vec<(Gfn, u32)> = Vec::new();
        for range in &surveyed.ranges {
            let pages = u32::try_from(range.pages.0).unwrap_or(u32::MAX);
            self.chooser.cut(number, Vpn(range.first.0), pages, from, to, |first, pages, run| {
                frames.extend((first.0..first.0 + u64::from(pages)).map(|frame| (Gfn(frame), run)));
            });
        }
        for batch in frames.chunks(BATCH) {
            let numbers: Vec<Gfn> = batch.iter().map(|&(frame, _)| frame).collect();
            let mut digests = vec![None; batch.len()];
            let digester = &self.digester;
            xen.read(id, &numbers, &mut |at, bytes| digests[at] = bytes.map(|bytes| digester.digest(bytes)))?;
            for (&(frame, run), digest) in batch.iter().zip(digests) {
                let Some(digest) = digest else { continue };
                self.pages_read += 1;
                let is_shared =
                    has_shared && xen.sharers(GuestPage { domain: id, frame })?.is_some_and(|pages| pages > 1);
                if is_shared {
                    self.census.add_merged(digest);
                } else {
                    self.census.add_private(number, run, None, digest);
                }
            }
        }
        self.reading_ns += own_cpu_ns().saturating_sub(before_ns);
        Ok(())
    }
}

fn report(surveyed: &[Surveyed], findings: &Findings, fraction: f64, scope: String, cost: Cost) -> ScanReport {
    let mut excluded: BTreeMap<String, (u64, u32)> = BTreeMap::new();
    let mut rows = Vec::new();
    for (Surveyed { guest, left_out, .. }, &figures) in surveyed.iter().zip(&findings.cells) {
        if let Some(why) = left_out.as_ref().filter(|why| *why != "has ended") {
            let entry = excluded.entry(why.clone()).or_default();
            *entry = (entry.0 + guest.domain.own.bytes().0, entry.1 + 1);
        }
        let kinds = vec![KindRow { kind: KIND.to_owned(), figures }];
        rows.push(ProcessRow {
            pid: guest.domain.id.0.into(),
            name: printable(guest.name.as_bytes()),
            exe: None,
            cgroup: None,
            figures,
            kinds: if left_out.is_some() { Vec::new() } else { kinds },
            excluded: Vec::new(),
            left_out: left_out.clone(),
        });
    }
    rows.sort_by_key(|row| (Reverse(bytes_of(row.figures.savable)), row.pid));
    let mut total = Figures::default();
    findings.cells.iter().for_each(|&figures| total += figures);
    ScanReport {
        schema: SCHEMA,
        exact: fraction >= 1.0,
        sampled_fraction: fraction.min(1.0),
        error_bytes: bytes_of(findings.error),
        scope,
        totals: findings.total,
        processes: rows,
        kinds: vec![KindRow { kind: KIND.to_owned(), figures: total }],
        cgroups: Vec::new(),
        excluded: by_size(excluded),
        numa: None,
        cost,
        maps: BTreeMap::new(),
        of: ("guest", "guests"),
    }
}
