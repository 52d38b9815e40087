//! `pagefold scan --why`: divides all memory of processes, and says why some of it isn't shared.
//!
//! We take two censuses of one sample: the first counts duplicates in all memory, as if KSM could merge all of it, the
//! second only in mergeable memory. The difference is the duplicates out of KSM's reach. Figures count frames, each
//! divided among the pages that map it. But merged memory counts pages, and shared memory saved frames.

pub mod cause;
pub mod pair;
pub mod words;

use super::report::Cost;
use super::scanner::Memory;
use super::sharing::Groups;
use super::survey::{Survey, Surveyed, Wanted};
use super::{Prepared, ProcessMemory, ScanArgs, refuse_if_none_may_be_read};
use crate::config::settings;
use anyhow::Result;
use cause::Cause;
use pagefold_engine::sampling::census::choose::first_fraction;
use pagefold_engine::sampling::census::{Findings, bytes_of};
use pagefold_engine::units::index;
use pair::PairReport;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

pub const SCHEMA: &str = "pagefold.why/1";

/// We read at least this many pages (512 MiB), or all if there are fewer.
const READ_AT_LEAST: f64 = 131_072.0;

/// The result (schema pagefold.why/1). `reference.rs` explains the fields.
#[derive(Clone, Debug, Serialize)]
pub struct WhyReport {
    pub schema: &'static str,
    pub scope: String,
    pub exact: bool,
    pub sampled_fraction: f64,
    pub error_bytes: u64,
    pub totals: Row,
    /// A row for each workload, or program that belongs to none. If the scope has only pids: for each process.
    pub rows: Vec<Row>,
    /// Frames that several trust domains map, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames_between_domains: Option<CommonFrames>,
    /// The processes and the memory (theirs, and single mappings of others) whose frames we couldn't look at.
    pub unexamined_processes: usize,
    pub unexamined_bytes: u64,
    /// The causes that occur, with the settings that would remove them.
    pub causes: Vec<CauseRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair: Option<PairReport>,
    pub cost: Cost,
}

/// The memory of one workload, program or process. The sizes add up to `mapped_bytes`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub name: String,
    pub processes: usize,
    pub mapped_bytes: u64,
    pub merged_bytes: u64,
    pub mergeable_duplicate_bytes: u64,
    pub mergeable_unique_bytes: u64,
    pub out_of_reach: Vec<OutOfReach>,
    /// How much memory shared frames already save: frames shared through fork, and by mapping the same file.
    pub shared_by_fork_bytes: u64,
    pub shared_by_file_bytes: u64,
    pub unknown: Vec<Unknown>,
    /// How many of its frames other rows map, too.
    pub frames_in_common: CommonFrames,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct OutOfReach {
    pub cause: Cause,
    pub duplicate_bytes: u64,
    pub unique_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Unknown {
    pub reason: String,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CommonFrames {
    pub merged: u64,
    pub by_fork: u64,
    pub by_file: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct CauseRow {
    pub cause: Cause,
    pub about: &'static str,
    pub remedies: Vec<String>,
}

impl Row {
    pub fn duplicates_out_of_reach(&self) -> u64 {
        self.out_of_reach.iter().map(|part| part.duplicate_bytes).sum()
    }
}

impl CommonFrames {
    pub fn all(self) -> u64 {
        self.merged + self.by_fork + self.by_file
    }

    fn add(&mut self, merged: bool, by_file: bool) {
        if merged {
            self.merged += 1;
        } else if by_file {
            self.by_file += 1;
        } else {
            self.by_fork += 1;
        }
    }
}

pub fn report(args: &ScanArgs) -> Result<WhyReport> {
    let wanted = Wanted { sharing: false, causes: true };
    let Prepared { scope, is_host, mut memory, mut scanner } = Prepared::of(args, wanted)?;
    let frames = memory.frames();
    let mut first = first_fraction(frames).max(READ_AT_LEAST / frames.max(1) as f64);
    if args.exact || first > 0.66 {
        first = 1.0;
    }
    let (all, fraction) = scanner.sample(&mut memory, first)?;
    refuse_if_none_may_be_read(&memory.survey)?;
    let out_of_reach: Vec<bool> = memory.survey.causes.iter().map(Option::is_some).collect();
    scanner.census.remove_cells(&out_of_reach);
    let mergeable = scanner.census.findings(fraction);
    scanner.progress.clear();

    let by_process = !is_host && scope.spec().0.len() == scope.pid.len();
    let names = memory.survey.processes.iter().map(|Surveyed { scoped, .. }| {
        if by_process { format!("{} {}", scoped.pid(), scoped.name) } else { scoped.workload_or_name() }
    });
    let groups = Groups::of(names);
    let mut sums: Vec<Sums> = groups.names.iter().map(|_| Sums::default()).collect();
    add_cells(&memory, &groups, &all, &mergeable, &mut sums);
    add_processes(&memory.survey, &groups, &mut sums);
    let total_common = add_common_frames(&memory.survey, &groups, &mut sums);
    let domains = Groups::of(memory.survey.processes.iter().map(|process| format!("{:?}", process.domain)));
    let mut sums_by_domain: Vec<Sums> = domains.names.iter().map(|_| Sums::default()).collect();
    let between_domains = add_common_frames(&memory.survey, &domains, &mut sums_by_domain);
    let unseen = memory.survey.processes.iter().flat_map(|process| &process.unseen);
    let mut total = Sums { common: total_common, ..Sums::default() };
    let mut rows = Vec::new();
    for (name, sums) in groups.names.iter().zip(&sums) {
        total.add(sums);
        rows.push(sums.row(name));
    }
    rows.sort_by_key(|row| Reverse((row.duplicates_out_of_reach() + row.mergeable_duplicate_bytes, row.mapped_bytes)));
    let totals = total.row("total");
    let causes = totals.out_of_reach.iter().map(|part| CauseRow::of(part.cause)).collect();
    let pair = match memory.survey.processes.as_slice() {
        [one, other] if !one.gone && !other.gone && one.refused.is_none() && other.refused.is_none() => {
            let seed = args.seed.unwrap_or_else(settings::seed);
            Some(pair::compare(&mut memory.reader, &one.scoped.process, &other.scoped.process, seed, args.exact)?)
        }
        _ => None,
    };
    Ok(WhyReport {
        schema: SCHEMA,
        scope: scope.to_string(),
        exact: fraction >= 1.0,
        sampled_fraction: fraction.min(1.0),
        error_bytes: bytes_of(all.error),
        frames_between_domains: (domains.names.len() > 1).then_some(between_domains),
        unexamined_processes: memory.survey.processes.iter().filter(|process| process.is_unexamined()).count(),
        unexamined_bytes: unseen.map(|unseen| unseen.bytes).sum(),
        totals,
        rows,
        causes,
        pair,
        cost: scanner.cost(),
    })
}

impl CauseRow {
    pub fn of(cause: Cause) -> Self {
        let remedies = cause.remedies().iter().map(|(who, what)| format!("{who}: {what}")).collect();
        Self { cause, about: cause.name(), remedies }
    }
}

/// The figures of a row, in pages.
#[derive(Clone, Debug, Default)]
struct Sums {
    processes: usize,
    merged: f64,
    duplicate: f64,
    unique: f64,
    /// Duplicate and unique pages by cause.
    out_of_reach: BTreeMap<Cause, (f64, f64)>,
    by_fork: f64,
    by_file: f64,
    unknown: BTreeMap<String, f64>,
    common: CommonFrames,
}

impl Sums {
    /// Adds the figures of another row, except the frames in common.
    fn add(&mut self, other: &Self) {
        self.processes += other.processes;
        self.merged += other.merged;
        self.duplicate += other.duplicate;
        self.unique += other.unique;
        self.by_fork += other.by_fork;
        self.by_file += other.by_file;
        for (&cause, &(duplicate, unique)) in &other.out_of_reach {
            self.add_out_of_reach(cause, duplicate, unique);
        }
        for (reason, &pages) in &other.unknown {
            self.add_unknown(reason, pages);
        }
    }

    fn add_out_of_reach(&mut self, cause: Cause, duplicate: f64, unique: f64) {
        let part = self.out_of_reach.entry(cause).or_default();
        part.0 += duplicate;
        part.1 += unique;
    }

    fn add_unknown(&mut self, reason: &str, pages: f64) {
        if pages > 0.0 {
            *self.unknown.entry(reason.to_owned()).or_default() += pages;
        }
    }

    fn row(&self, name: &str) -> Row {
        let mut row = Row {
            name: name.to_owned(),
            processes: self.processes,
            mapped_bytes: 0,
            merged_bytes: bytes_of(self.merged),
            mergeable_duplicate_bytes: bytes_of(self.duplicate),
            mergeable_unique_bytes: bytes_of(self.unique),
            out_of_reach: Vec::new(),
            shared_by_fork_bytes: bytes_of(self.by_fork),
            shared_by_file_bytes: bytes_of(self.by_file),
            unknown: Vec::new(),
            frames_in_common: self.common,
        };
        row.mapped_bytes = row.merged_bytes
            + row.mergeable_duplicate_bytes
            + row.mergeable_unique_bytes
            + row.shared_by_fork_bytes
            + row.shared_by_file_bytes;
        for (&cause, &(duplicate, unique)) in &self.out_of_reach {
            let part = OutOfReach { cause, duplicate_bytes: bytes_of(duplicate), unique_bytes: bytes_of(unique) };
            row.mapped_bytes += part.duplicate_bytes + part.unique_bytes;
            if part.duplicate_bytes + part.unique_bytes > 0 {
                row.out_of_reach.push(part);
            }
        }
        for (reason, &pages) in &self.unknown {
            let unknown = Unknown { reason: reason.clone(), bytes: bytes_of(pages) };
            row.mapped_bytes += unknown.bytes;
            row.unknown.push(unknown);
        }
        row.out_of_reach.sort_by_key(|part| Reverse(part.duplicate_bytes));
        row.unknown.sort_by_key(|unknown| Reverse(unknown.bytes));
        row
    }
}

/// Adds the frames of each cell to its row. `all` are the findings as if KSM could merge everything, `mergeable` those
/// without the cells that are out of reach.
fn add_cells(memory: &ProcessMemory, groups: &Groups, all: &Findings, mergeable: &Findings, sums: &mut [Sums]) {
    let survey = &memory.survey;
    for (number, cell) in survey.cells.iter().enumerate() {
        let process = &survey.processes[index(cell.process)];
        if process.gone {
            continue;
        }
        let sums = &mut sums[groups.of_process[index(cell.process)]];
        let cause = survey.causes[number];
        let held = cell.private.0 as f64 + cell.shared_frames;
        let sharing = cell.shared.0 as f64 - cell.shared_frames;
        if cause.is_some_and(Cause::is_of_file) {
            sums.by_file += sharing;
        } else {
            sums.by_fork += sharing;
        }
        sums.merged += cell.merged.0 as f64;
        sums.add_unknown("swapped out", cell.swapped.0 as f64);
        let is_read = process.refused.is_none() && cause.is_none_or(Cause::is_read);
        let unread = match (memory.asked[number], memory.got[number]) {
            _ if !is_read => held,
            (0, _) => cell.private.0 as f64,
            (asked, got) => held * (1.0 - got as f64 / asked as f64),
        };
        let reason = match (&process.refused, cause) {
            (Some(refused), _) => refused.to_string(),
            (None, Some(cause)) if !is_read => cause.name().to_owned(),
            _ if memory.asked[number] == 0 => "not in the sample".to_owned(),
            _ => "could not be read, or gone meanwhile".to_owned(),
        };
        sums.add_unknown(&reason, unread);
        let read = held - unread;
        let duplicate = all.cells[number].savable_gross.clamp(0.0, read);
        if let Some(cause) = cause {
            sums.add_out_of_reach(cause, duplicate, read - duplicate);
        } else {
            let own = mergeable.cells[number].savable_gross.min(duplicate);
            let pinned = own * process.pinned_part;
            sums.duplicate += own - pinned;
            sums.add_out_of_reach(Cause::Pinned, pinned, 0.0);
            sums.add_out_of_reach(Cause::Copies, duplicate - own, 0.0);
            sums.unique += read - duplicate;
        }
    }
}

/// Counts the processes, and adds the memory that we couldn't examine.
fn add_processes(survey: &Survey, groups: &Groups, sums: &mut [Sums]) {
    for (process, &group) in survey.processes.iter().zip(&groups.of_process) {
        let sums = &mut sums[group];
        sums.processes += 1;
        for unseen in &process.unseen {
            sums.add_unknown(&unseen.reason, (unseen.bytes >> 12) as f64);
        }
    }
}

/// Counts for each row the frames that other rows map, too. Returns the number of frames that several rows map.
fn add_common_frames(survey: &Survey, groups: &Groups, sums: &mut [Sums]) -> CommonFrames {
    let mut total = CommonFrames::default();
    let mut holders: Vec<usize> = Vec::new();
    for frame in survey.joint.chunk_by(|one, other| one.frame == other.frame) {
        holders.clear();
        holders.extend(frame.iter().map(|joint| groups.of_process[index(joint.process)]));
        holders.sort_unstable();
        holders.dedup();
        if holders.len() < 2 {
            continue;
        }
        let merged = frame.iter().any(|joint| joint.merged);
        let by_file = frame.iter().any(|joint| survey.cause(joint).is_some_and(Cause::is_of_file));
        for &holder in &holders {
            sums[holder].common.add(merged, by_file);
        }
        total.add(merged, by_file);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_adds_up() {
        let mut one = Sums { duplicate: 3.0, unique: 2.0, by_fork: 1.0, ..Sums::default() };
        one.add_out_of_reach(Cause::Locked, 5.0, 1.0);
        one.add_unknown("swapped out", 4.0);
        one.add_unknown("nothing", 0.0);
        let mut total = Sums { merged: 7.0, ..Sums::default() };
        total.add(&one);
        total.add(&one);
        let row = total.row("total");
        assert_eq!(row.mapped_bytes, (7 + 2 * (3 + 2 + 1 + 6 + 4)) << 12);
        assert_eq!((row.out_of_reach.len(), row.duplicates_out_of_reach()), (1, 10 << 12));
        assert_eq!(row.unknown.len(), 1);
    }
}
