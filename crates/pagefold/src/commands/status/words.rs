//! The text of `status`.

use super::groups::UNMERGED;
use super::{DomainRow, Status};
use pagefold_engine::decision::Kind;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Mechanism;
use pagefold_engine::reserve::RoomState;
use pagefold_engine::units::Pages;
use pagefold_text::figures::{thousands, time, wrap};
use pagefold_text::style::{Lines, Style, bar, count, human, percent, shorten};
use std::fmt::Write;

/// Processes shown; we sum up the rest.
const PROCESSES: usize = 8;
const BAR: usize = 20;
const WIDTH: usize = 78;

pub fn describe(status: &Status, style: Style) -> String {
    let mut text = String::new();
    text.blank();
    for part in wrap(&headline(status), WIDTH) {
        text.line(style.bold(&part));
    }
    text.blank();
    for (name, value) in rows(status) {
        for (at, part) in wrap(&value, WIDTH - 12).iter().enumerate() {
            let name = if at == 0 { name } else { "" };
            text.line(format!("  {}{part}", style.dim(&format!("{name:<10}"))));
        }
    }
    if status.processes.is_empty() {
        text.blank();
        return text;
    }
    kinds(&mut text, status, style);
    levels(&mut text, status, style);
    processes(&mut text, status, style);
    if let Some(places) = &status.numa {
        places.describe(&mut text, style);
    }
    next(&mut text, status, style);
    text.blank();
    text
}

/// The rows above the tables.
fn rows(status: &Status) -> Vec<(&'static str, String)> {
    let used = percent(status.used_share, 1.0);
    let (pagefold, ksmd) = (status.cpu_seconds.pagefold_ns as f64 / 1e9, status.cpu_seconds.ksmd_ns as f64 / 1e9);
    let (marked, metadata) = (human(status.marked_bytes), human(status.metadata_bytes));
    let mut rows = vec![
        ("run", format!("{} (pid {}), for {}", shorten(&status.scope, 46), status.pid, time(status.seconds))),
        ("state", state(status)),
        ("governor", governor(status)),
        ("cost", format!("{used} of a core in the last 10 s; pagefold {pagefold:.2} s, ksmd {ksmd:.2} s so far")),
        match &status.xen {
            Some(xen) => ("Xen", xen.sentence()),
            None => ("KSM", ksm(status)),
        },
    ];
    if status.mechanism == Mechanism::Ksmd || status.marked_bytes > 0 {
        rows.push(("marked", format!("{marked}, for which the kernel keeps {metadata} of metadata")));
    }
    if let Some(other) = status.other_bytes {
        let other = human(other);
        rows.push((
            "zeros",
            format!("{other} of what is marked are other pages, which ksmd visits, and merges if equal"),
        ));
    }
    rows.extend(status.requests.map(|requests| ("requests", requests.sentence())));
    if status.reserve.machine.total > Pages(0) {
        rows.push(("room", status.reserve.sentence()));
    }
    rows.extend(status.reserve.limits_sentence().map(|text| ("limits", text)));
    rows.extend(status.reserve.headroom_sentence().map(|text| ("headroom", text)));
    rows.extend(to_unmark(status).map(|text| ("to unmark", text)));
    rows.extend(kept_out(status).map(|text| ("kept out", text)));
    if status.stops > 0 {
        let (stops, longest) = (status.stops, status.longest_stop_us);
        rows.push(("stops", format!("{stops} of processes, to mark their memory; the longest {longest:.0} us")));
    }
    if status.audit_lost > 0 {
        rows.push(("audit", format!("{} lines of the audit log could not be written", thousands(status.audit_lost))));
    }
    let splits = status.splits;
    if splits.pages + splits.mappings > 0 {
        let (pages, mappings) = (thousands(splits.pages), thousands(splits.mappings));
        let mut text = format!(
            "{pages} huge pages were split, {mappings} in page tables: on the whole machine, since the run began"
        );
        if status.collapsed > 0 {
            let _ = write!(text, "; {} put together again", thousands(status.collapsed));
        }
        rows.push(("THP", text));
    }
    if status.domains.len() > 1 || status.domains.iter().any(|row| row.left_alone) {
        rows.push(("domains", domains(status)));
    }
    rows.extend(status.numa.as_ref().map(|places| ("nodes", places.sentence())));
    rows
}

/// The marks that we must remove and couldn't yet, if there are any.
fn to_unmark(status: &Status) -> Option<String> {
    let pending: Vec<_> = status.processes.iter().filter(|row| row.to_unmark.is_some()).collect();
    Some(format!(
        "{} in {}, excluded after it was marked; see pagefold explain {}",
        human(status.to_unmark_bytes),
        count(pending.len(), "process", "processes"),
        pending.first()?.pid
    ))
}

/// The selectors of processes that users keep out, if there are any.
fn kept_out(status: &Status) -> Option<String> {
    let mut text = String::new();
    for row in &status.kept_out {
        let joint = if text.is_empty() { "" } else { ", " };
        let but = if row.uid.is_none() { "but not " } else { "" };
        let _ = write!(text, "{joint}{but}{}", row.selector);
    }
    let unmerged = status.left_out.iter().find(|row| row.reason == UNMERGED).map_or(0, |row| row.processes);
    let processes = status.count(unmerged);
    (!text.is_empty()).then(|| format!("{text}: {processes} now, until pagefold include"))
}

/// The number of trust domains, and which of them we merge.
fn domains(status: &Status) -> String {
    let all = count(status.domains.len(), "trust domain", "trust domains");
    if status.mechanism == Mechanism::Request {
        return format!("{all}: no page is merged with one of another domain by this run");
    }
    let (others, merged): (Vec<&DomainRow>, Vec<&DomainRow>) = status.domains.iter().partition(|row| row.left_alone);
    let processes: usize = others.iter().map(|row| row.processes).sum();
    let merged = match merged.first() {
        Some(row) => format!("ksmd merges {}", row.name),
        None => "the one that ksmd merges has no process".to_owned(),
    };
    let waits = if status.foreign_marks { ". Nothing is merged before the memory of others is unmarked" } else { "" };
    format!(
        "{all}: {merged}; {} of others {} left alone. What merging on request would save there is not known{waits}",
        count(processes, "process", "processes"),
        if processes == 1 { "is" } else { "are" },
    )
}

fn headline(status: &Status) -> String {
    let of = format!("{} in {}", human(status.resident_bytes), status.count(status.processes.len()));
    if status.dry_run {
        let expected: u64 = status.processes.iter().map(|row| row.expected_bytes).sum();
        if status.mechanism == Mechanism::Request {
            return format!("Dry run: of {of}, {} would be merged with other pages or as zeros.", human(expected));
        }
        let marked = human(status.marked_bytes);
        return format!("Dry run: of {of}, {marked} would be marked, {} of it duplicate.", human(expected));
    }
    let used = percent(status.used_share, 1.0);
    match status.saved_bytes {
        Some(saved) => {
            let share = percent(saved as f64, status.resident_bytes as f64);
            format!("Saves {}, {share} of {of}, for {used} of a core.", human(saved))
        }
        None => format!("Counting what is saved of {of}, for {used} of a core."),
    }
}

fn state(status: &Status) -> String {
    let at = |what: &str| status.next.iter().any(|row| row.what == what);
    let work: Vec<&str> = [("read", "reading"), ("mark", "marking"), ("merge", "merging")]
        .into_iter()
        .filter(|(what, _)| at(what))
        .map(|(_, word)| word)
        .collect();
    match (status.paused, status.busy) {
        (true, _) => "paused: nothing is read, marked or merged until pagefold resume".to_owned(),
        (false, _) if status.processes.is_empty() => {
            let what = if status.xen.is_some() { "guest" } else { "process" };
            format!("waiting: no {what} is in scope")
        }
        (false, true) if work.is_empty() => "sampling".to_owned(),
        (false, true) => work.join(", "),
        (false, false) => "watching: nothing to do until something changes".to_owned(),
    }
}

fn governor(status: &Status) -> String {
    let allowed = format!("up to {} of a core", percent(status.allowed_share, 1.0));
    match status.governor {
        Governor::Auto => format!("auto, now {}: {allowed}", status.in_force),
        governor => format!("{governor}: {allowed}"),
    }
}

fn ksm(status: &Status) -> String {
    match (&status.ksm_why, status.ksm_driven) {
        (_, true) if status.mechanism == Mechanism::Request => format!(
            "merges the pages that this run names (/dev/ksm); saves {} on the whole machine",
            human(status.saved_machine_bytes)
        ),
        (_, true) => {
            let scans = count(usize::try_from(status.scans).unwrap_or(usize::MAX), "scan", "scans");
            let saved = human(status.saved_machine_bytes);
            let exited = match status.exited_bytes {
                0 => String::new(),
                bytes => format!(
                    ", without {} of programs that have ended, which KSM counts until its next scan",
                    human(bytes)
                ),
            };
            format!("controlled by this run, {scans} so far; saves {saved} on the whole machine{exited}")
        }
        (Some(why), false) => format!("not controlled by this run: {why}"),
        (None, false) => "not controlled by this run yet".to_owned(),
    }
}

/// Colours a kind: worth merging, not worth it, not known yet.
pub fn paint(kind: Kind, text: &str, style: Style) -> String {
    match kind {
        Kind::StaticallyDuplicated => style.good(text),
        Kind::CowBroken | Kind::ShortLived => style.other(text),
        Kind::Sparse => style.plain(text),
        Kind::Unknown => style.dim(text),
    }
}

fn kinds(text: &mut String, status: &Status, style: Style) {
    text.blank();
    text.line(style.dim("  KIND OF MEMORY           MEMORY    SHARE  REGIONS"));
    for row in &status.kinds {
        let (bytes, regions) = (row.resident.bytes().0, row.regions);
        let share = bytes as f64 / status.resident_bytes.max(1) as f64;
        let (kind, memory, part) = (row.kind.to_string(), human(bytes), percent(share, 1.0));
        let figures = format!("  {kind:<21} {memory:>9}  {part:>7}  {regions:>7}  ");
        let figures = if row.regions == 0 { style.dim(&figures) } else { figures };
        text.line(format!("{figures}{}", paint(row.kind, &bar(share, BAR), style)));
    }
}

fn levels(text: &mut String, status: &Status, style: Style) {
    text.blank();
    text.line(style.dim("  LEVEL OF THE LADDER      MEMORY     CORE  REGIONS"));
    let top = status.levels.len();
    for row in &status.levels {
        let what = match row.level {
            1 => "watched, and new",
            level if level == top => "read whole, merged",
            _ => "sampled",
        };
        let (bytes, level, regions) = (row.resident.bytes().0, row.level, row.regions);
        let (memory, core) = (human(bytes), percent(row.share.fraction(), 1.0));
        let figures = format!("  {level:<2} {what:<18} {memory:>9}  {core:>7}  {regions:>7}  ");
        let share = bytes as f64 / status.resident_bytes.max(1) as f64;
        let figures = if row.regions == 0 { style.dim(&figures) } else { figures };
        text.line(format!("{figures}{}", style.plain(&bar(share, BAR))));
    }
}

fn processes(text: &mut String, status: &Status, style: Style) {
    text.blank();
    let who = if status.xen.is_some() { " ID  GUEST  " } else { "PID  PROGRAM" };
    text.line(style.dim(&format!("      {who}            MEMORY    MARKED  DUPLICATE")));
    for row in status.processes.iter().take(PROCESSES) {
        let name = shorten(&row.name, 16);
        if let Some(why) = &row.left_alone {
            text.line(format!("  {:>7}  {name:<16} {}", row.pid, style.dim(&format!("left alone: {why}"))));
            continue;
        }
        let size = |bytes: u64| if bytes == 0 { "-".to_owned() } else { human(bytes) };
        let sizes = [row.resident_bytes, row.marked_bytes, row.expected_bytes].map(size);
        text.line(format!("  {:>7}  {name:<16} {:>8}  {:>8}  {:>9}", row.pid, sizes[0], sizes[1], sizes[2]));
    }
    if let Some(rest) = status.processes.get(PROCESSES..).filter(|rest| !rest.is_empty()) {
        let memory = rest.iter().map(|row| row.resident_bytes).sum();
        let others = status.count(rest.len());
        text.line(style.dim(&format!("           … and {others} more with {} (all of them: --json)", human(memory))));
    }
}

fn next(text: &mut String, status: &Status, style: Style) {
    text.blank();
    text.line(format!("  {}", style.bold("What happens next")));
    if status.paused {
        text.line("  Nothing, until pagefold resume. Merged pages stay merged.");
        return;
    }
    for row in &status.next {
        let what = match row.what.as_str() {
            "read" => "being read whole, to find what is worth merging",
            "mark" if status.reserve.machine.state == RoomState::Short => {
                "worth merging, once memory is no longer short"
            }
            "mark" if status.dry_run || !status.ksm_driven => "worth marking",
            "mark" if status.mechanism == Mechanism::Request => "about to be merged",
            "mark" => "about to be marked for ksmd",
            "merge" if status.dry_run => "would be merged; this is a dry run",
            "merge" if status.mechanism == Mechanism::Request => "being merged",
            "merge" => "being merged by ksmd, which takes two scans",
            "sample" => "sampled further: too few samples to decide",
            "watch" => "sampled thinly, for changes",
            "wait" => "left alone until there is room for it",
            "nothing" => "left alone",
            _ => "",
        };
        let what = match row.soonest_seconds {
            Some(seconds) => format!("left alone; the first is judged again in {}", time(seconds)),
            None => what.to_owned(),
        };
        let regions = count(row.regions, "region", "regions");
        text.line(format!("  {:>9}  {what} {}", human(row.resident_bytes), style.dim(&format!("({regions})"))));
    }
    text.blank();
    let rounds = count(usize::try_from(status.rounds).unwrap_or(usize::MAX), "round", "rounds");
    let why = if status.xen.is_some() {
        "guest: pagefold-xen explain --xen-domain ID"
    } else {
        "process: pagefold explain PID"
    };
    let read = format!("  {} pages read in {rounds}. Why, for one {why}", thousands(status.pages_read));
    text.line(style.dim(&read));
}
