//! `pagefold-xen scan`: how much memory sharing could save between guests. It only reads.

use super::{ScopeArgs, call, open, refuse_unfit, resolve};
use anyhow::Result;
use pagefold::commands::scan::print;
use pagefold::commands::scan::report::{ProcessRow, ScanReport};
use pagefold::commands::scan::scanner::{Memory, Scanner};
use pagefold::commands::scan::survey::LeftOut;
use pagefold_engine::sampling::census::Cell;
use pagefold_engine::sampling::census::choose::first_fraction;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_text::escape::printable;
use pagefold_text::exit;
use pagefold_text::progress::Progress;
use pagefold_xen::guests::{InScope, unfit};
use pagefold_xen::hypervisor::{CallError, Gfn, GuestPage, Hypervisor};
use pagefold_xen::library::Xen;
use pagefold_xen::ranges::{Range, ranges};

/// What tables call guest memory.
const KIND: &str = "guest memory";
/// How many pages we read at a time.
const BATCH: usize = 256;
/// Why we leave out a guest that ended during the scan.
const ENDED: &str = "has ended";

/// A guest, and what we know of it before we read its pages.
struct Surveyed {
    guest: InScope,
    ranges: Vec<Range>,
    left_out: Option<String>,
}

impl Surveyed {
    fn pages(&self) -> Pages {
        self.ranges.iter().map(|range| range.pages).sum()
    }
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
    /// Seed for choosing the pages; give it again to sample the same ones [default: random]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

pub fn run(args: &ScanArgs) -> Result<u8> {
    print(args.json, &scan(args)?)?;
    Ok(exit::OK)
}

fn scan(args: &ScanArgs) -> Result<ScanReport> {
    let scope = args.scope.guests()?;
    let mut xen = open("reading guests' memory")?;
    let began_ns = own_cpu_ns();
    let guests = resolve(&mut xen, &scope)?;
    refuse_unfit(&guests)?;
    let mut surveyed = Vec::new();
    for guest in guests {
        let (ranges, left_out) = match unfit(&guest.domain) {
            Some(why) => (Vec::new(), Some(why.to_owned())),
            None => match ranges(&mut xen, guest.domain.id, guest.domain.most) {
                Ok(ranges) => (ranges, None),
                Err(CallError::Ended) => (Vec::new(), Some(ENDED.to_owned())),
                Err(error) => return Err(call(&error).into()),
            },
        };
        surveyed.push(Surveyed { guest, ranges, left_out });
    }
    // The hypervisor counts frames only for all guests together.
    let memory = xen.memory().map_err(|error| call(&error))?;
    let frames_per_page = memory.frames.0 as f64 / (memory.frames + memory.saved).0.max(1) as f64;
    let mut cells = Vec::new();
    for (number, surveyed) in (0..).zip(&surveyed) {
        // We only learn which pages are already shared by reading them: one hypercall each.
        let merged = surveyed.guest.domain.shared;
        let private = surveyed.pages().saturating_sub(merged);
        let merged_frames = merged.0 as f64 * frames_per_page;
        cells.push(Cell { process: number, private, merged, merged_frames, ..Cell::default() });
    }
    let mut scanner = Scanner::new(cells.clone(), args.seed, began_ns, Progress::new());
    let mut memory = GuestMemory { xen, guests: surveyed };
    let first = if args.exact { 1.0 } else { first_fraction(memory.frames()) };
    let (findings, fraction) = scanner.sample(&mut memory, first)?;
    scanner.progress.clear();
    let rows = memory.guests.iter().map(row).collect();
    let kinds = vec![KIND; cells.len()];
    let scope = args.scope.to_string();
    let report = ScanReport::of(rows, &cells, &kinds, &findings, fraction, scope, scanner.cost());
    Ok(ScanReport { cgroups: Vec::new(), workloads: Vec::new(), of: ("guest", "guests"), ..report })
}

/// A guest's row, still without figures.
fn row(surveyed: &Surveyed) -> ProcessRow {
    let domain = &surveyed.guest.domain;
    let mut excluded = Vec::new();
    if let Some(reason) = surveyed.left_out.clone() {
        if reason != ENDED {
            excluded.push(LeftOut { reason, bytes: domain.own.bytes().0, regions: 1, is_out_of_reach: false });
        }
    }
    ProcessRow {
        pid: domain.id.0.into(),
        name: printable(surveyed.guest.name.as_bytes()),
        excluded,
        left_out: surveyed.left_out.clone(),
        ..ProcessRow::default()
    }
}

struct GuestMemory {
    xen: Xen,
    guests: Vec<Surveyed>,
}

/// A frame of the sample.
struct ChosenFrame {
    frame: Gfn,
    /// The index of its run.
    run: u32,
}

impl Memory for GuestMemory {
    fn targets(&self) -> usize {
        self.guests.len()
    }

    fn frames(&self) -> u64 {
        self.guests.iter().map(|guest| guest.pages().0).sum()
    }

    fn read(&mut self, number: usize, scanner: &mut Scanner) -> Result<()> {
        let guest = &mut self.guests[number];
        if guest.left_out.is_some() {
            return Ok(());
        }
        let cell = u32::try_from(number).unwrap_or(u32::MAX);
        match read(&mut self.xen, guest, cell, scanner) {
            Err(CallError::Ended) => {
                scanner.census.remove_process(cell);
                guest.left_out = Some(ENDED.to_owned());
                Ok(())
            }
            read => Ok(read.map_err(|error| call(&error))?),
        }
    }
}

fn read(xen: &mut impl Hypervisor, guest: &Surveyed, cell: u32, scanner: &mut Scanner) -> Result<(), CallError> {
    let domain = guest.guest.domain.id;
    let has_shared = guest.guest.domain.shared > Pages(0);
    let mut chosen: Vec<ChosenFrame> = Vec::new();
    for range in &guest.ranges {
        let pages = u32::try_from(range.pages.0).unwrap_or(u32::MAX);
        scanner.choose(cell, Vpn(range.first.0), pages, |first, pages, run| {
            for frame in first.0..first.0 + u64::from(pages) {
                chosen.push(ChosenFrame { frame: Gfn(frame), run });
            }
        });
    }
    for batch in chosen.chunks(BATCH) {
        let frames: Vec<Gfn> = batch.iter().map(|chosen| chosen.frame).collect();
        let mut digests = vec![None; batch.len()];
        xen.read(domain, &frames, &mut |at, bytes| digests[at] = bytes.map(|bytes| scanner.digest(bytes)))?;
        for (&ChosenFrame { frame, run }, digest) in batch.iter().zip(digests) {
            let Some(digest) = digest else { continue };
            let is_shared = has_shared && xen.sharers(GuestPage { domain, frame })?.is_some_and(|pages| pages > 1);
            if is_shared {
                scanner.census.add_merged(digest);
            } else {
                scanner.census.add_private(cell, run, digest);
            }
        }
    }
    Ok(())
}
