//! Counts for a census, in one pass over the pages sorted by content, and the findings from them.

use super::mixture::{FREQUENT, Histogram, Mixture};
use super::{Cell, Figures, Findings, RUN_PAGES, ReadPage};
use crate::hash::Digest;
use crate::ledger::METADATA_BYTES_PER_PAGE;
use crate::units::{PAGE_SIZE, index};

/// The number of groups of runs. For the error, we leave out each group in turn.
const GROUPS: usize = 50;
/// Student's t for 95 % with `GROUPS - 1` degrees of freedom.
const STUDENT_T: f64 = 2.01;

/// Counts of the pages we've read, in frames, before we estimate anything.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    read: f64,
    zero: f64,
    /// Frames that are certainly savable, without zero pages.
    sure: f64,
    /// How many shared contents are left after merging these frames, as far as we know.
    contents: f64,
    /// The units (runs that hold a content) of contents that aren't frequent.
    units: Histogram,
}

impl Counts {
    fn add(&mut self, other: &Self, sign: f64) {
        self.read += sign * other.read;
        self.zero += sign * other.zero;
        self.sure += sign * other.sure;
        self.contents += sign * other.contents;
        for (own, other) in self.units.iter_mut().zip(&other.units) {
            *own += sign * other;
        }
    }
}

/// The counts of a cell: by copies in all memory, and by copies in its own process only.
#[derive(Clone, Copy, Debug, Default)]
struct CellCounts {
    all: Counts,
    own: Counts,
}

pub(super) struct CensusCounts {
    cells: Vec<CellCounts>,
    /// For each group of runs: the counts that the total loses if we leave the group out.
    groups: Vec<Counts>,
}

/// The units of one content: the runs that hold it.
#[derive(Default)]
struct Units {
    /// The runs, ascending, and how many frames in each hold the content.
    runs: Vec<(u32, f64)>,
}

impl Units {
    /// Divides the pages of one content into units.
    fn divide(&mut self, pages: &[ReadPage]) {
        self.runs.clear();
        self.runs.extend(pages.iter().map(|page| (page.run, weight(page))));
        self.runs.sort_unstable_by_key(|&(run, _)| run);
        self.runs.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                kept.1 += next.1;
            }
            same
        });
    }

    fn frames_of(&self, run: u32) -> f64 {
        self.runs.binary_search_by_key(&run, |&(run, _)| run).map_or(1.0, |at| self.runs[at].1)
    }
}

fn weight(page: &ReadPage) -> f64 {
    1.0 / f64::from(page.mappings)
}

impl CensusCounts {
    pub fn of(cells: &[Cell], pages: &[ReadPage], merged: &[u64], fraction: f64) -> Self {
        let mut counts =
            Self { cells: vec![CellCounts::default(); cells.len()], groups: vec![Counts::default(); GROUPS] };
        let mut units = Units::default();
        for content in pages.chunk_by(|a, b| a.digest == b.digest) {
            if content[0].digest == Digest::ZERO.0 {
                counts.sure(content, true);
            } else if merged.binary_search(&content[0].digest).is_ok() {
                counts.sure(content, false);
                counts.count_own(cells, content, fraction, &mut units);
            } else if fraction >= 1.0 {
                counts.count_exactly(content);
                counts.count_own(cells, content, fraction, &mut units);
            } else {
                counts.count_sampled(content, fraction, &mut units);
                counts.count_own(cells, content, fraction, &mut units);
            }
        }
        counts
    }

    fn sure(&mut self, content: &[ReadPage], zero: bool) {
        for page in content {
            let weight = weight(page);
            let mut counts = Counts { read: weight, ..Counts::default() };
            *(if zero { &mut counts.zero } else { &mut counts.sure }) += weight;
            self.cells[index(page.cell)].all.add(&counts, 1.0);
            self.groups[group_of(page.run)].add(&counts, 1.0);
        }
    }

    fn count_exactly(&mut self, content: &[ReadPage]) {
        let frames: f64 = content.iter().map(weight).sum();
        for page in content {
            let weight = weight(page);
            let counts = &mut self.cells[index(page.cell)].all;
            counts.read += weight;
            // Sums of fractions such as thirds have rounding errors, hence the margin.
            if frames > 1.0 + 1e-9 {
                counts.sure += weight * (1.0 - 1.0 / frames);
                counts.contents += weight / frames;
            }
        }
    }

    fn count_sampled(&mut self, content: &[ReadPage], fraction: f64, units: &mut Units) {
        units.divide(content);
        let seen_in = units.runs.len();
        for page in content {
            let weight = weight(page);
            let frames = units.frames_of(page.run).max(weight);
            let counts = &mut self.cells[index(page.cell)].all;
            counts.read += weight;
            counts.sure += weight - weight / frames;
            add_units(counts, seen_in, weight / frames, fraction);
        }
        // If we leave out a group, its units are missing, and the other groups' units of the content count as seen less
        // often.
        units.runs.sort_unstable_by_key(|&(run, _)| group_of(run));
        for group in units.runs.chunk_by(|a, b| group_of(a.0) == group_of(b.0)) {
            let at = &mut self.groups[group_of(group[0].0)];
            for &(_, frames) in group {
                at.read += frames;
                at.sure += frames - 1.0;
            }
            add_units(at, seen_in, seen_in as f64, fraction);
            let others = seen_in - group.len();
            if others > 0 {
                let mut fewer = Counts::default();
                add_units(&mut fewer, others, others as f64, fraction);
                at.add(&fewer, -1.0);
            }
        }
    }

    /// Counts the copies within each process. Pages are sorted by cell, and so by process.
    fn count_own(&mut self, cells: &[Cell], content: &[ReadPage], fraction: f64, units: &mut Units) {
        for own in content.chunk_by(|a, b| cells[index(a.cell)].process == cells[index(b.cell)].process) {
            if fraction >= 1.0 {
                let frames: f64 = own.iter().map(weight).sum();
                if frames > 1.0 + 1e-9 {
                    for page in own {
                        self.cells[index(page.cell)].own.sure += weight(page) * (1.0 - 1.0 / frames);
                    }
                }
                continue;
            }
            units.divide(own);
            for page in own {
                let weight = weight(page);
                let frames = units.frames_of(page.run).max(1.0);
                let counts = &mut self.cells[index(page.cell)].own;
                counts.sure += weight - weight / frames;
                add_units(counts, units.runs.len(), weight / frames, fraction);
            }
        }
    }

    pub fn findings(&self, cells: &[Cell], fraction: f64) -> Findings {
        if fraction >= 1.0 { self.exact(cells) } else { self.estimated(cells, fraction) }
    }

    fn exact(&self, cells: &[Cell]) -> Findings {
        let mut findings = Findings::default();
        for (cell, counts) in cells.iter().zip(&self.cells) {
            let all = &counts.all;
            let gross = all.zero + all.sure;
            let figures = figures(cell, all.read, all.zero, gross, counts.own.sure, all.contents);
            findings.total += figures;
            findings.cells.push(figures);
        }
        findings
    }

    fn estimated(&self, cells: &[Cell], fraction: f64) -> Findings {
        let mut total = Counts::default();
        let mut own = Counts::default();
        for counts in &self.cells {
            total.add(&counts.all, 1.0);
            own.add(&counts.own, 1.0);
        }
        let frames: f64 = cells.iter().map(Cell::held).sum();
        if total.read <= 0.0 || frames <= 0.0 {
            return Findings { error: frames, ..self.exact(cells) };
        }
        let scale = frames / total.read;
        let mixture = Mixture::new(total.read / frames);
        let shares = mixture.fit(&total.units);
        let own_shares = mixture.fit(&own.units);
        let savable = saving(&mixture, &shares, &total) * scale;

        // We estimate each cell separately, then scale all cells so that they add up to the total.
        let mut parts = Vec::with_capacity(cells.len());
        for (cell, counts) in cells.iter().zip(&self.cells) {
            let held = cell.private.0 as f64 + cell.shared_frames;
            let up = if counts.all.read > 0.0 { held / counts.all.read } else { 0.0 };
            let posterior = mixture.posterior(&mixture.refine(&counts.all.units, &shares));
            let gross = (counts.all.zero + counts.all.sure + posterior.saving(&counts.all.units)) * up;
            let contents = (counts.all.contents + posterior.contents(&counts.all.units)) * up;
            let within = saving(&mixture, &mixture.refine(&counts.own.units, &own_shares), &counts.own) * up;
            parts.push((held, counts.all.zero * up, gross, within, contents));
        }
        let sum: f64 = parts.iter().map(|part| part.2).sum();
        let level = if sum > 0.0 { savable / sum } else { 0.0 };
        let mut findings = Findings { error: self.error(&total, frames, fraction), ..Findings::default() };
        for (cell, (held, zero, gross, within, contents)) in cells.iter().zip(parts) {
            let gross = (gross * level).clamp(zero, held);
            let figures = figures(cell, held, zero, gross, within, contents * level);
            findings.total += figures;
            findings.cells.push(figures);
        }
        findings
    }

    /// The error at 95 % confidence, from the spread of estimates that each leave out one group.
    fn error(&self, total: &Counts, frames: f64, fraction: f64) -> f64 {
        let mut estimates = Vec::with_capacity(GROUPS);
        for group in &self.groups {
            let mut rest = *total;
            rest.add(group, -1.0);
            if rest.read <= 0.0 {
                estimates.push(0.0);
                continue;
            }
            for units in &mut rest.units {
                *units = units.max(0.0);
            }
            let mixture = Mixture::new(rest.read / frames);
            estimates.push(saving(&mixture, &mixture.fit(&rest.units), &rest) * frames / rest.read);
        }
        let groups = GROUPS as f64;
        let mean = estimates.iter().sum::<f64>() / groups;
        let spread: f64 = estimates.iter().map(|estimate| (estimate - mean).powi(2)).sum();
        // The larger the sample, the less the estimate depends on our choice of runs.
        let sampling = STUDENT_T * (spread * (groups - 1.0) / groups * (1.0 - fraction)).sqrt();
        // If we expect three pairs of runs with the same content, we see none in one case of twenty.
        let seen_once = total.units[1] * frames / total.read;
        let hidden = (3.0 * f64::from(RUN_PAGES) / fraction.powi(2)).min(seen_once / 2.0);
        sampling.max(hidden)
    }
}

fn group_of(run: u32) -> usize {
    index(run) % GROUPS
}

/// Adds the units of a content that we saw in `seen_in` runs.
fn add_units(counts: &mut Counts, seen_in: usize, units: f64, fraction: f64) {
    if seen_in < FREQUENT {
        counts.units[seen_in] += units;
    } else {
        let content = (fraction / seen_in as f64).min(1.0);
        counts.sure += units * (1.0 - content);
        counts.contents += units * content;
    }
}

/// The number of savable frames among the pages we've read.
fn saving(mixture: &Mixture, shares: &[f64], counts: &Counts) -> f64 {
    counts.zero + counts.sure + mixture.posterior(shares).saving(&counts.units)
}

/// The figures of a cell with `held` frames: `zero` of them are zero, `gross` are savable, and `within` are savable
/// within the process. `contents` shared contents are left after merging.
fn figures(cell: &Cell, held: f64, zero: f64, gross: f64, within: f64, contents: f64) -> Figures {
    let within = within.clamp(0.0, (gross - zero).max(0.0));
    // KSM keeps a record for each marked page, and one for each shared content.
    let metadata = METADATA_BYTES_PER_PAGE as f64 * (held + contents) / PAGE_SIZE as f64;
    let net = gross - metadata;
    let worth = net > 0.0;
    Figures {
        resident: held + cell.merged_frames + cell.kept_frames,
        anonymous: held - cell.shared_frames + (cell.shared + cell.merged).0 as f64,
        zero,
        duplicate_within: within,
        duplicate_across: gross - zero - within,
        merged: cell.merged.0 as f64,
        fork_shared: cell.shared.0 as f64,
        swapped: cell.swapped.0 as f64,
        savable_gross: gross,
        savable: if worth { net } else { 0.0 },
        metadata: if worth { metadata } else { 0.0 },
    }
}
