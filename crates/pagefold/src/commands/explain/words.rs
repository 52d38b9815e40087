//! The text of an explanation.

use super::{Excluded, Explanation, Row};
use crate::commands::status::paint;
use crate::control::queue::{Facts, ToUnmark};
use pagefold_engine::decision::{Kind, Reason, Verb};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Mechanism;
use pagefold_engine::marking::profit::Wave;
use pagefold_engine::state::{MemoryTotal, RegionState};
use pagefold_engine::units::Pages;
use pagefold_host::scope::exclude::Exclusion;
use pagefold_text::figures::{thousands, time, wrap};
use pagefold_text::style::{Lines, Style, count, human, percent, shorten};

/// We show at most this many regions one by one.
const REGIONS: usize = 12;
/// We only sum up regions below this size (bytes), unless there are no larger ones.
const SMALL: u64 = 1 << 20;
/// For each reason to leave mappings alone, we show at most this many mappings.
const MAPPINGS: usize = 6;
const WIDTH: usize = 78;

/// A sentence on what happens to a region next, and when.
pub fn sentence(region: &RegionState, facts: &Facts) -> String {
    let state = &facts.state;
    if state.activity.paused {
        return "Paused: nothing happens to this region until you run pagefold resume. Merged pages stay merged."
            .to_owned();
    }
    let config = &facts.run.config;
    let decision = &region.decision;
    let left = decision.seconds_left(state.now_ns).map_or("some time".to_owned(), time);
    match decision.reason {
        Reason::ProcessLeftAlone => {
            "Its process is left alone: pagefold does not read or change it. Marked memory stays marked.".to_owned()
        }
        Reason::Refused => {
            let target = facts.targets.iter().find(|target| target.owner == region.owner);
            let problem = target.and_then(|target| target.problem.as_deref());
            format!(
                "Left alone: its process could not be marked{}.",
                problem.map_or(String::new(), |why| format!(" ({why})"))
            )
        }
        Reason::NoHeadroom(limit) => {
            no_headroom(region, facts.limited.get(&limit).map_or("its cgroup", String::as_str))
        }
        Reason::MemoryShort => "Worth marking, but memory is short; see pagefold status.".to_owned(),
        Reason::Busy => format!("Worth marking, but its process could not be stopped; the next try is in {left}."),
        Reason::NoMappings => format!("Worth marking, but its process has too many mappings; tried again in {left}."),
        Reason::BeingRead(read) => being_read(region, read, config.mechanism),
        Reason::TooFewSamples { sampled, needed } => {
            format!("Needs more samples: {} of about {} read so far.", thousands(sampled.0), pages(needed))
        }
        Reason::Duplicate => duplicate(decision.verb, facts),
        Reason::DoesNotPay { wave, price_ns } => match not_driven(facts) {
            Some(why) => format!("Would be merged later, but {why}."),
            None => waits(&wave, price_ns, &left, state.activity.in_force),
        },
        Reason::AwaitsNewcomers => format!(
            "Its parts with few duplicates wait for at most {left}, until new memory is read, which may hold copies of them."
        ),
        Reason::TakenBack => {
            format!("Left alone for {left}: it was unmerged because memory was short.")
        }
        Reason::Relieved => format!(
            "Left alone for {left}: it was unmerged because its merged pages counted against another cgroup that is too \
             close to its memory limit."
        ),
        Reason::Unmerged => format!(
            "Unmarked and left alone for {left}: it has copies, but ksmd could merge almost none of it. Either it or its copies are \
             pinned or not mergeable (io_uring buffers, VFIO, RDMA)."
        ),
        Reason::CowBroken(ratio) => {
            let share = percent(ratio.fraction(), 1.0);
            format!(
                "Left alone for up to {left}: {share} of it was written so soon after merges that they cost more than they save."
            )
        }
        Reason::Volatile if decision.verb == Verb::Wait => {
            format!("Left alone for {left}: its pages change so often that merges would not last.")
        }
        Reason::Volatile => "Watched, not merged: its pages change so often that merges would not last.".to_owned(),
        Reason::TooYoung => format!("Too young: it may move up a level in {left}."),
        Reason::Done => done(region, facts),
        Reason::Scattered => {
            "Not marked: its duplicates are scattered, so each scan would also visit all pages between them.".to_owned()
        }
        Reason::TooSmall => format!(
            "Not marked: it has fewer than {} duplicate pages. pagefold does not mark mappings with so few.",
            config.span_pages_min.0
        ),
        Reason::Promising => {
            "Probably duplicate: it moves up level by level while samples confirm that, and is read whole at the top."
                .to_owned()
        }
        Reason::SharedByMany(processes) => format!(
            "Left alone: {processes} processes share it through fork. Merging it in all of them would cost more than it saves."
        ),
        Reason::SharedWithOutsiders => {
            "Left alone: it is shared through fork with processes that are out of scope or left alone. They would keep \
             its pages, so merging it here would save nothing."
                .to_owned()
        }
        Reason::Sparse => {
            let threshold = percent(config.threshold().fraction(), 1.0);
            format!("Sampled rarely; read whole once samples show more than {threshold} duplicates.")
        }
    }
}

fn being_read(region: &RegionState, read: Pages, mechanism: Mechanism) -> String {
    let next = match mechanism {
        Mechanism::Request => "Pages that have a copy are merged right away.",
        Mechanism::Ksmd => "Then the parts with many duplicates are marked.",
    };
    format!("Being read whole: {} of {} pages so far. {next}", thousands(read.0), thousands(region.pages.0))
}

fn duplicate(verb: Verb, facts: &Facts) -> String {
    match (verb, not_driven(facts)) {
        (Verb::Mark, Some(why)) => format!("Worth marking, but {why}."),
        (Verb::Mark, None) => {
            "About to be marked together with other regions, so that one scan by ksmd covers them all.".to_owned()
        }
        (_, Some(why)) => format!("Would be merged, but {why}."),
        (_, None) => {
            "ksmd is merging it. A page is merged when a second scan finds it unchanged since the first.".to_owned()
        }
    }
}

fn done(region: &RegionState, facts: &Facts) -> String {
    match (not_driven(facts), region.marked > Pages(0)) {
        (Some(why), true) => format!("Would be merged, but {why}; watched for changes."),
        (Some(why), false) => format!("Worth merging, but {why}; watched for changes."),
        (None, true) => {
            "Marked and scanned; watched for changes. ksmd scans again once enough pages make it worthwhile.".to_owned()
        }
        (None, false) if region.exact => {
            "Read whole, and pages with a copy are merged; watched for changes.".to_owned()
        }
        (None, false) => {
            "Its pages were read in a process that shares them through fork, and those with a copy are merged; watched for \
             changes."
                .to_owned()
        }
    }
}

/// Why the run merges nothing, not even memory that's worth merging. `None` if the run merges.
fn not_driven(facts: &Facts) -> Option<String> {
    if facts.run.dry_run {
        return Some("this is a dry run".to_owned());
    }
    let why = facts.run.stood_down.as_ref()?;
    Some(format!("this run no longer controls KSM ({why})"))
}

/// Why a cgroup's limit keeps us from merging more of a region.
fn no_headroom(region: &RegionState, cgroup: &str) -> String {
    let begin = if region.marked > Pages(0) { "Merged in part, the rest is left alone" } else { "Left alone" };
    format!(
        "{begin}: a merged page stays charged to one of the cgroups that share it. The memory limit of {cgroup} has no \
         headroom to pay for others' pages beside the copies that its own programs make when they write."
    )
}

/// Why merging memory doesn't pay yet, and how long the memory waits at most.
fn waits(wave: &Wave, price_ns: u64, left: &str, governor: Governor) -> String {
    let takes = wave.takes_ns();
    let brings = wave.brings();
    let each = match takes.checked_div(brings.0) {
        Some(each) => format!(" ({} us a page)", each / 1_000),
        None => String::new(),
    };
    format!(
        "Does not pay yet: merging all waiting memory would save {} for {} of ksmd's CPU time{each}; governor \
         {governor} allows {} us a page. It is merged when another scan pays, or in {left}, when ksmd has been idle \
         long enough.",
        human(brings.bytes().0),
        time(takes as f64 / 1e9),
        price_ns / 1_000
    )
}

/// A sentence on marks that we must remove but haven't been able to.
pub fn to_unmark(to_unmark: &ToUnmark) -> String {
    let problem = to_unmark.problem.as_ref().map(|problem| format!(" Last try: {problem}.")).unwrap_or_default();
    format!("{} still to be unmarked: {}.{problem}", human(to_unmark.bytes), to_unmark.reason)
}

fn pages(number: Pages) -> String {
    format!("{} {}", thousands(number.0), if number == Pages(1) { "page" } else { "pages" })
}

pub fn describe(explanation: &Explanation, style: Style) -> String {
    let mut text = String::new();
    text.blank();
    for part in wrap(&headline(explanation), WIDTH) {
        text.line(style.bold(&part));
    }
    if let Some(exe) = &explanation.exe {
        text.line(style.dim(&shorten_front(exe, WIDTH)));
    }
    for note in &explanation.notes {
        text.blank();
        text.paragraph(note, WIDTH);
    }
    match (&explanation.left_alone, explanation.in_scope) {
        (Some(why), _) => {
            text.blank();
            text.paragraph(&format!("The whole process is left alone: {why}{}.", explanation.way_in), WIDTH);
        }
        (None, true) => {
            if let Some(place) = &explanation.numa {
                text.blank();
                text.paragraph(&place.sentence(), WIDTH);
            }
            regions(&mut text, explanation, style);
            decisions(&mut text, explanation, style);
        }
        (None, false) => {
            text.blank();
            text.line(format!(
                "No rule excludes this process: pagefold could look for duplicates in {}.",
                human(explanation.unseen_bytes)
            ));
        }
    }
    excluded(&mut text, explanation, style);
    if !explanation.in_scope && explanation.left_alone.is_none() {
        text.blank();
        text.line(format!(
            "To see how much merging would save:  {}",
            style.good(&format!("pagefold scan --pid {}", explanation.pid))
        ));
    }
    text.blank();
    text
}

fn headline(explanation: &Explanation) -> String {
    let kind = if explanation.guest { "guest" } else { "pid" };
    let who = format!("{} ({kind} {})", explanation.name, explanation.pid);
    if !explanation.in_scope {
        return format!("{who} is not in the scope of the running daemon ({}).", shorten(&explanation.scope, 60));
    }
    let mut memory = MemoryTotal::default();
    for row in &explanation.regions {
        // The headline is about marked memory, so count its duplicates as with ksmd, even if we merge on request.
        if row.figures.marked > Pages(0) {
            memory += row.figures.memory(Mechanism::Ksmd);
        }
    }
    // Merged zeros aren't resident, but marked.
    let marked = human(memory.marked_bytes.max(memory.expected_bytes));
    let duplicate = known_duplicate(memory, " of that");
    let regions = count(explanation.regions.len(), "region", "regions");
    let would = if explanation.dry_run { "would be marked (dry run)" } else { "marked" };
    let paused = if explanation.paused { " The daemon is paused." } else { "" };
    format!("{who}: {} in {regions}, {marked} {would}, {duplicate}.{paused}", human(explanation.resident_bytes))
}

/// How much of this memory is duplicate, and how much we haven't sampled enough to tell.
pub fn known_duplicate(memory: MemoryTotal, of: &str) -> String {
    let expected = human(memory.expected_bytes);
    match memory.unknown_bytes {
        0 => format!("{expected}{of} duplicate"),
        unknown => format!("{expected}{of} known to be duplicate ({} not sampled enough yet)", human(unknown)),
    }
}

fn regions(text: &mut String, explanation: &Explanation, style: Style) {
    let rows = &explanation.regions;
    let large = rows.iter().take(REGIONS).take_while(|row| row.figures.resident.bytes().0 >= SMALL).count();
    let shown = if large == 0 { rows.len().min(3) } else { large };
    for row in &rows[..shown] {
        region(text, row, explanation.levels, style);
    }
    let rest = &rows[shown..];
    if !rest.is_empty() {
        let memory = rest.iter().map(|row| row.figures.resident.bytes().0).sum();
        let mut kinds = Vec::new();
        for kind in Kind::ALL {
            let number = rest.iter().filter(|row| row.figures.kind == kind).count();
            if number > 0 {
                kinds.push(format!("{number} {kind}"));
            }
        }
        let others = count(rest.len(), "smaller region", "smaller regions");
        text.blank();
        let summed = format!("And {others} with {} in all: {}. To list them: --json.", human(memory), kinds.join(", "));
        text.paragraph(&summed, WIDTH);
    }
    if explanation.unseen_bytes > 0 {
        text.blank();
        text.line(format!("{} are new: the daemon sees them at its next refresh.", human(explanation.unseen_bytes)));
    }
    legend(text, rows, style);
}

fn region(text: &mut String, row: &Row, levels: usize, style: Style) {
    let region = &row.figures;
    let all = human(region.pages.bytes().0);
    let of = match region.resident {
        resident if resident >= region.pages => all,
        resident => format!("{} resident of {all}", human(resident.bytes().0)),
    };
    text.blank();
    let what = match &row.file {
        Some(file) => format!("{} {}", row.mapping, shorten_front(file, 34)),
        None => row.mapping.clone(),
    };
    text.line(format!("{}  {}  {what}", style.dim(&row.range), style.bold(&of)));
    let kind = paint(region.kind, &region.kind.to_string(), style);
    let age = format!("level {} of {levels}, seen for {}", region.level, time(region.age_seconds));
    text.line(format!("  {kind}: {}; {age}", ratio(region)));
    if region.marked > Pages(0) {
        let broken =
            region.cow_ratio.map_or(String::new(), |share| format!("; {} written too often", percent(share, 1.0)));
        let is_whole = region.marked >= region.resident;
        let marked = if is_whole { region.marked.max(region.expected) } else { region.marked };
        let marked = human(marked.bytes().0);
        let expected = human(region.expected.bytes().0);
        text.line(format!("  {marked} marked, {expected} expected to be merged{broken}"));
    }
    let sentence = format!("{} Decided {} ago.", row.sentence, time(row.since_seconds));
    for (at, part) in wrap(&sentence, WIDTH - 4).iter().enumerate() {
        text.line(format!("  {} {part}", if at == 0 { style.bold("→") } else { " ".to_owned() }));
    }
}

fn decisions(text: &mut String, explanation: &Explanation, style: Style) {
    if explanation.decisions.is_empty() {
        return;
    }
    text.blank();
    text.line(style.bold("Last decisions"));
    for row in &explanation.decisions {
        let ago = format!("{} ago", time(row.seconds_ago));
        let change = format!("{} → {}", row.from, row.to);
        text.line(format!("  {ago:>12}  {:>8}  {change:<16}  {}", human(row.bytes), row.reason));
    }
}

fn ratio(region: &RegionState) -> String {
    let share = percent(region.duplicate_ratio, 1.0);
    if region.exact {
        return format!("{share} duplicate, exactly");
    }
    if !region.is_known() {
        return "share of duplicates not known yet".to_owned();
    }
    let (floor, ceiling) = region.duplicate_range;
    let floor = percent(floor, 1.0);
    format!("about {share} duplicate ({} to {})", floor.trim_end_matches(" %"), percent(ceiling, 1.0))
}

fn legend(text: &mut String, rows: &[Row], style: Style) {
    text.blank();
    for kind in Kind::ALL.iter().filter(|kind| rows.iter().any(|row| row.figures.kind == **kind)) {
        let what = match kind {
            Kind::StaticallyDuplicated => "duplicates that last: worth merging",
            Kind::Sparse => "few duplicates",
            Kind::CowBroken => "written too often: merges would not last",
            Kind::ShortLived => "too young, or similar memory was short-lived",
            Kind::Unknown => "not sampled enough yet",
        };
        text.line(style.dim(&format!("{:<22} {what}", format!("{kind}:"))));
    }
}

fn excluded(text: &mut String, explanation: &Explanation, style: Style) {
    if explanation.excluded.is_empty() {
        return;
    }
    text.blank();
    text.line(style.bold("Mappings that are always left alone"));
    let mut reasons: Vec<(&str, Vec<&Excluded>)> = Vec::new();
    for row in &explanation.excluded {
        match reasons.iter_mut().find(|(reason, _)| *reason == row.reason) {
            Some((_, rows)) => rows.push(row),
            None => reasons.push((&row.reason, vec![row])),
        }
    }
    for (reason, rows) in reasons {
        let memory = rows.iter().map(|row| row.bytes).sum();
        let mappings = count(rows.len(), "mapping", "mappings");
        let mut parts = wrap(&format!("{reason} ({mappings})"), WIDTH - 12).into_iter();
        text.line(format!("  {:>8}  {}", human(memory), parts.next().unwrap_or_default()));
        parts.for_each(|part| text.line(format!("            {part}")));
        // Code, unmodified files and empty mappings aren't worth a line each.
        if reason == Exclusion::NothingAnonymous.to_string() || memory == 0 {
            continue;
        }
        for row in rows.iter().take(MAPPINGS) {
            let file = row.file.as_deref().map_or(String::new(), |file| shorten_front(file, 28));
            text.line(style.dim(&format!("            {}  {:>8}  {file}", row.range, human(row.bytes))));
        }
        if rows.len() > MAPPINGS {
            text.line(style.dim(&format!("            … and {} more: --json", rows.len() - MAPPINGS)));
        }
    }
}

/// Cuts a long path at its beginning, because its end is more specific.
fn shorten_front(path: &str, width: usize) -> String {
    let length = path.chars().count();
    if length <= width {
        return path.to_owned();
    }
    let kept: String = path.chars().skip(length + 1 - width).collect();
    shorten(&format!("…{kept}"), width)
}
