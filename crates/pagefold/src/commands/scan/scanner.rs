//! Reads larger and larger samples of memory until the margin of error is small enough.

use super::report::Cost;
use crate::config::settings;
use anyhow::Result;
use pagefold_engine::hash::{Digest, Digester, PageBytes};
use pagefold_engine::sampling::census::choose::{Chooser, next_fraction};
use pagefold_engine::sampling::census::{Cell, Census, Findings};
use pagefold_engine::units::Vpn;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_text::progress::Progress;
use pagefold_text::style;

/// The memory that a scan reads: of processes or of Xen guests.
pub trait Memory {
    /// How many processes or guests there are.
    fn targets(&self) -> usize;

    /// How many frames we can read.
    fn frames(&self) -> u64;

    /// Reads the pages of a target that are in the sample ([`Scanner::choose`]), and adds them to the census. If this
    /// one target can't be read any more, removes it from the census.
    ///
    /// # Errors
    /// Reading failed for a reason that concerns more than this target.
    fn read(&mut self, target: usize, scanner: &mut Scanner) -> Result<()>;
}

/// Reads pages and counts their contents.
pub struct Scanner {
    pub census: Census,
    pub progress: Progress,
    chooser: Chooser,
    pub digester: Digester,
    began_ns: u64,
    pages_read: u64,
    reading_ns: u64,
    /// We're enlarging the sample from the share `from` of all pages, which we've read, to the share `to`.
    from: f64,
    to: f64,
    /// For the progress bar: how many frames this step adds to the sample, and how many pages we had read before.
    frames: f64,
    read_before: u64,
}

impl Scanner {
    /// `seed` chooses the pages; `None` means a random seed. `began_ns` is our CPU time when the scan began.
    pub fn new(cells: Vec<Cell>, seed: Option<u64>, began_ns: u64, progress: Progress) -> Self {
        let seed = seed.unwrap_or_else(settings::seed);
        Self {
            census: Census::new(cells),
            progress,
            chooser: Chooser::new(seed),
            digester: Digester::new(seed),
            began_ns,
            pages_read: 0,
            reading_ns: 0,
            from: 0.0,
            to: 0.0,
            frames: 0.0,
            read_before: 0,
        }
    }

    /// Reads samples: first the share `first` of all pages, then more until the margin of error is small enough.
    /// Returns the findings and the share of pages that we read.
    pub fn sample(&mut self, memory: &mut impl Memory, first: f64) -> Result<(Findings, f64)> {
        self.to = first;
        loop {
            self.frames = memory.frames() as f64 * (self.to - self.from);
            self.read_before = self.pages_read;
            let before_ns = own_cpu_ns();
            for target in 0..memory.targets() {
                memory.read(target, self)?;
            }
            self.reading_ns += own_cpu_ns().saturating_sub(before_ns);
            let findings = self.census.findings(self.to);
            let Some(next) = next_fraction(self.to, findings.relative_error()) else {
                return Ok((findings, self.to));
            };
            self.from = self.to;
            self.to = next;
        }
    }

    /// Chooses the sample's runs of pages among these pages, and calls `chosen` with the first page, the length and the
    /// number of each run. `region` is the number of the pages' region.
    pub fn choose(&self, region: u32, first: Vpn, pages: u32, chosen: impl FnMut(Vpn, u32, u32)) {
        self.chooser.cut(region, first, pages, self.from, self.to, chosen);
    }

    /// Makes the digest of a page that we've read.
    pub fn digest(&mut self, bytes: &PageBytes) -> Digest {
        self.count_page();
        self.digester.digest(bytes)
    }

    /// Counts a page that we've read.
    pub fn count_page(&mut self) {
        self.pages_read += 1;
        if self.pages_read % 4096 == 0 && self.frames > 0.0 {
            let message = match self.to {
                1.0.. => "reading every page".to_owned(),
                share => format!("reading a sample of {}", style::percent(share, 1.0)),
            };
            self.progress.show(&message, Some((self.pages_read - self.read_before) as f64 / self.frames));
        }
    }

    pub fn cost(&self) -> Cost {
        Cost::new(self.pages_read, own_cpu_ns().saturating_sub(self.began_ns), self.reading_ns)
    }
}
