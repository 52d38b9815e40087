//! The text of `status`.

use super::groups::{TOO_MANY, UNMERGED};
use super::rows::{NO_WORKLOAD, Row, by_workload, process_rows};
use super::{Doing, DomainRow, ProcessRow, Status, count_targets};
use crate::output::placement::PlacementView;
use crate::output::requests;
use pagefold_engine::decision::{Kind, Verb};
use pagefold_engine::governor::Governor;
use pagefold_engine::host::Mechanism;
use pagefold_engine::reserve::RoomState;
use pagefold_engine::units::Pages;
use pagefold_host::check::users;
use pagefold_text::figures::{thousands, time, wrap};
use pagefold_text::style::{Lines, Style, bar, count, human, percent, shorten};
use std::fmt::Write;

/// A table has at most this many rows. We sum up the others.
const ROWS: usize = 8;
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
    if status.programs.processes.is_empty() {
        text.blank();
        return text;
    }
    kinds(&mut text, status, style);
    workload_table(&mut text, &status.programs.processes, style);
    process_table(&mut text, &status.programs.processes, status.xen.is_some(), style);
    if let Some(places) = &status.numa {
        places.describe(&mut text, style);
    }
    next(&mut text, status, style);
    text.blank();
    text
}

fn rows(status: &Status) -> Vec<(&'static str, String)> {
    let scope = shorten(&status.run.scope, 46);
    let used = percent(status.activity.used_share, 1.0);
    let span = time(status.activity.seconds.clamp(1.0, 10.0));
    let pagefold = status.work.cpu_seconds.pagefold_ns as f64 / 1e9;
    let ksmd = status.work.cpu_seconds.ksmd_ns as f64 / 1e9;
    let mut rows = vec![
        ("run", format!("{scope} (pid {}), up {}", status.pid, time(status.activity.seconds))),
        ("state", state(status)),
        ("governor", governor(status)),
        ("cost", format!("{used} of a core in the last {span}; pagefold {pagefold:.2} s, ksmd {ksmd:.2} s so far")),
        match &status.xen {
            Some(xen) => ("Xen", xen.sentence()),
            None => ("KSM", ksm(status)),
        },
    ];
    let places = status.numa.as_ref();
    let sentences = [
        ("marked", marked(status)),
        ("others", others(status)),
        ("zeros", zeros(status)),
        ("requests", status.requests.as_ref().map(requests::sentence)),
        ("headroom", headroom(status)),
        ("limits", status.reserve.limits_sentence()),
        ("full", status.reserve.headroom_sentence()),
        ("to unmark", to_unmark(status)),
        ("kept out", kept_out(status)),
        ("left out", turned_away(status)),
        ("stops", stops(status)),
        ("audit", audit(status)),
        ("THP", huge_pages(status)),
        ("domains", domains(status)),
        ("nodes", places.map(PlacementView::sentence)),
    ];
    for (name, sentence) in sentences {
        if let Some(sentence) = sentence {
            rows.push((name, sentence));
        }
    }
    rows
}

fn marked(status: &Status) -> Option<String> {
    if status.run.mechanism == Mechanism::Request && status.memory.marked_bytes == 0 {
        return None;
    }
    let marked = human(status.memory.marked_bytes);
    let metadata = human(status.memory.metadata_bytes);
    Some(format!("{marked}, which cost {metadata} of kernel metadata"))
}

fn others(status: &Status) -> Option<String> {
    if status.others.is_empty() { None } else { Some(users::sentence(&status.others)) }
}

/// If we merge only zeros: the marked memory that isn't zeros, which ksmd scans nevertheless.
fn zeros(status: &Status) -> Option<String> {
    let other = human(status.other_bytes?);
    Some(format!("{other} of the marked memory holds other data; ksmd scans it, too, and merges equal pages"))
}

fn headroom(status: &Status) -> Option<String> {
    if status.reserve.machine.total > Pages(0) { Some(status.reserve.sentence()) } else { None }
}

fn stops(status: &Status) -> Option<String> {
    let stops = status.work.stops;
    let longest = time(status.work.longest_stop_us / 1e6);
    if stops == 0 {
        return None;
    }
    Some(format!("{stops} times, to mark a process's memory; the longest {longest}"))
}

fn audit(status: &Status) -> Option<String> {
    if status.audit_lost == 0 {
        return None;
    }
    Some(format!("{} lines of the audit log could not be written", thousands(status.audit_lost)))
}

fn huge_pages(status: &Status) -> Option<String> {
    let splits = status.incidents.splits;
    if splits.pages + splits.mappings == 0 {
        return None;
    }
    let mut text = format!(
        "{} huge pages and {} huge mappings were split on the whole machine since the run began",
        thousands(splits.pages),
        thousands(splits.mappings)
    );
    if status.incidents.collapsed > 0 {
        let _ = write!(text, "; pagefold has turned {} back into huge pages", thousands(status.incidents.collapsed));
    }
    Some(text)
}

/// The marks that we must remove but couldn't remove yet, if there are any.
fn to_unmark(status: &Status) -> Option<String> {
    let processes = status.programs.processes.iter();
    let pending: Vec<&ProcessRow> = processes.filter(|row| row.to_unmark.is_some()).collect();
    Some(format!(
        "{} in {}, excluded after it was marked; see pagefold explain {}",
        human(status.to_unmark_bytes),
        count(pending.len(), "process", "processes"),
        pending.first()?.pid
    ))
}

/// The selectors of processes that users have unmerged or excluded, if there are any.
fn kept_out(status: &Status) -> Option<String> {
    if status.programs.kept_out.is_empty() {
        return None;
    }
    let mut selectors = Vec::new();
    for row in &status.programs.kept_out {
        let but = match row.uid {
            None => "but not ",
            Some(_) if selectors.is_empty() => "",
            Some(_) => "and ",
        };
        selectors.push(format!("{but}{}", row.selector));
    }
    let processes = status.count(status.programs.left_alone_for(UNMERGED));
    Some(format!("{}: {processes} now, until pagefold include", selectors.join("; ")))
}

/// How many processes in scope we don't track, because there are too many.
fn turned_away(status: &Status) -> Option<String> {
    let processes = status.programs.left_alone_for(TOO_MANY);
    if processes == 0 {
        return None;
    }
    let more = count(processes, "more process", "more processes");
    Some(format!("{more} left out: too many of one user or cgroup, or of the daemon's open files"))
}

/// The number of trust domains, and which of them ksmd merges. `None` if there's only one and we merge it.
fn domains(status: &Status) -> Option<String> {
    let rows = &status.programs.domains;
    if rows.len() < 2 && rows.iter().all(|row| !row.left_alone) {
        return None;
    }
    let all = count(rows.len(), "trust domain", "trust domains");
    if status.run.mechanism == Mechanism::Request {
        return Some(format!("{all}: this run merges no pages across domains"));
    }
    let (others, merged): (Vec<&DomainRow>, Vec<&DomainRow>) = rows.iter().partition(|row| row.left_alone);
    let processes: usize = others.iter().map(|row| row.processes).sum();
    let merged = match merged.first() {
        Some(row) => format!("ksmd merges {}", row.name),
        None => "the domain that ksmd merges has no process".to_owned(),
    };
    let waits = if status.foreign_marks { ". Nothing is merged until other domains' memory is unmarked" } else { "" };
    Some(format!(
        "{all}: {merged}; {} of other domains {} left alone (merging on request could merge them){waits}",
        count(processes, "process", "processes"),
        if processes == 1 { "is" } else { "are" },
    ))
}

/// If we counted the saving at least this many seconds ago, we say when.
const SHOWN_AGE: f64 = 3.0;

fn headline(status: &Status) -> String {
    let whole = status.memory.unmerged_bytes;
    let of = format!("{} in {}", human(whole), status.count(status.programs.looked_at()));
    if status.run.dry_run {
        let expected = human(status.expected_bytes());
        if status.run.mechanism == Mechanism::Request {
            return format!("Dry run: of {of}, {expected} would be merged with other pages or as zeros.");
        }
        let marked = human(status.memory.marked_bytes);
        return format!("Dry run: of {of}, {marked} would be marked, {expected} of it duplicate.");
    }
    let used = percent(status.activity.used_share, 1.0);
    match status.memory.saved_bytes {
        Some(saved) => {
            let share = percent(saved as f64, whole as f64);
            let text = format!("Saves {}, {share} of {of}, for {used} of a core", human(saved));
            match status.memory.saved_age_seconds {
                Some(age) if age >= SHOWN_AGE => format!("{text} (counted {} ago).", time(age)),
                _ => format!("{text}."),
            }
        }
        None => format!("Still counting the savings in {of}, for {used} of a core."),
    }
}

fn state(status: &Status) -> String {
    let doing = status.doing();
    if doing == [Doing::Paused] {
        return "paused: nothing is read, marked or merged until you run pagefold resume".to_owned();
    }
    if status.programs.processes.is_empty() {
        let target = if status.xen.is_some() { "guest" } else { "process" };
        return format!("waiting: no {target} is in scope");
    }
    if doing == [Doing::Watching] {
        return "watching: nothing to do until something changes".to_owned();
    }
    let names: Vec<String> = doing.iter().map(Doing::to_string).collect();
    let end = status.forecast().map_or(String::new(), |end| format!("; {end}"));
    names.join(", ") + &end
}

fn governor(status: &Status) -> String {
    let allowed = format!("up to {} of a core", percent(status.activity.allowed_share.fraction(), 1.0));
    match status.activity.governor {
        Governor::Auto => format!("auto, now {}: {allowed}", status.activity.in_force),
        governor => format!("{governor}: {allowed}"),
    }
}

fn ksm(status: &Status) -> String {
    if !status.activity.ksm_driven {
        return match &status.ksm_why {
            Some(why) => format!("not controlled by this run: {why}"),
            None => "not controlled by this run yet".to_owned(),
        };
    }
    let saved = human(status.memory.saved_machine_bytes);
    if status.run.mechanism == Mechanism::Request {
        return format!(
            "merges the pages that this run requests (/dev/ksm); counts {saved} saved on the whole machine"
        );
    }
    let scans = count(usize::try_from(status.work.scans).unwrap_or(usize::MAX), "scan", "scans");
    let text = format!("controlled by this run, {scans} so far; counts {saved} saved on the whole machine");
    match status.memory.exited_bytes {
        0 => text,
        bytes => {
            format!(
                "{text}, without {} that has ended or been unmerged, which KSM counts until its next scan",
                human(bytes)
            )
        }
    }
}

/// Colours the text by kind of memory: worth merging, not worth merging, or not known yet.
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
    for row in &status.totals.kinds {
        let kind = row.kind.to_string();
        let memory = human(row.resident.bytes().0);
        let share = share_of_all(row.resident, status);
        let part = percent(share, 1.0);
        let figures = format!("  {kind:<21} {memory:>9}  {part:>7}  {:>7}  ", row.regions);
        let figures = if row.regions == 0 { style.dim(&figures) } else { figures };
        text.line(format!("{figures}{}", paint(row.kind, &bar(share, BAR), style)));
    }
}

/// This memory's share of all memory in scope.
fn share_of_all(resident: Pages, status: &Status) -> f64 {
    resident.bytes().0 as f64 / status.memory.resident_bytes.max(1) as f64
}

/// The processes or guests that save most, a line each.
pub fn process_table(text: &mut String, processes: &[ProcessRow], are_guests: bool, style: Style) {
    let title = if are_guests { "     ID  GUEST" } else { "    PID  PROGRAM" };
    table(text, title, &process_rows(processes), style);
    if processes.len() > ROWS {
        let rest = &processes[ROWS..];
        let memory = rest.iter().map(|row| row.memory.unmerged_bytes).sum();
        let others = count_targets(rest.len(), are_guests);
        text.line(style.dim(&format!("           … and {others} more with {} (all of them: --json)", human(memory))));
    }
}

/// The workloads that save most, a line each. Nothing if no process belongs to one.
fn workload_table(text: &mut String, processes: &[ProcessRow], style: Style) {
    let rows = by_workload(process_rows(processes));
    if rows.iter().any(|row| row.workload != NO_WORKLOAD) {
        table(text, "  PROCS  WORKLOAD", &rows, style);
        if rows.len() > ROWS {
            let others = count(rows.len() - ROWS, "workload", "workloads");
            text.line(style.dim(&format!("           … and {others} more (all of them: pagefold top)")));
        }
    }
}

/// A table of the first rows.
fn table(text: &mut String, title: &str, rows: &[Row], style: Style) {
    text.blank();
    text.line(style.dim(&format!("  {title:<30}  MEMORY     SAVED   SHARE    MARKED  DUPLICATE")));
    for row in rows.iter().take(ROWS) {
        let number = row.pid.map_or(row.processes.to_string(), |pid| pid.to_string());
        let begin = format!("  {number:>7}  {:<19}", shorten(&row.name, 19));
        if let Some(why) = &row.left_alone {
            text.line(format!("{begin} {}", style.dim(&format!("left alone: {why}"))));
            continue;
        }
        let memory = size(row.memory.unmerged_bytes);
        let saved = saved_size(row.saved_bytes);
        let share = row.saved_share();
        let marked = size(row.memory.marked_bytes);
        let expected = size(row.memory.expected_bytes);
        text.line(format!("{begin} {memory:>8}  {saved:>8}  {share:>6}  {marked:>8}  {expected:>9}"));
    }
}

/// A size in a table: `-` if it's zero.
pub fn size(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { human(bytes) }
}

/// A saving in a table: `counting` while we don't know it yet.
pub fn saved_size(bytes: Option<u64>) -> String {
    bytes.map_or("counting".to_owned(), size)
}

fn next(text: &mut String, status: &Status, style: Style) {
    text.blank();
    text.line(format!("  {}", style.bold("What happens next")));
    if status.activity.paused {
        text.line("  Nothing, until you run pagefold resume. Merged pages stay merged.");
        return;
    }
    for row in &status.totals.next {
        let what = match row.soonest_seconds {
            Some(seconds) => format!("waits; the first region is judged again in {}", time(seconds)),
            None => next_step(row.verb, status).to_owned(),
        };
        let regions = count(row.regions, "region", "regions");
        text.line(format!("  {:>9}  {what} {}", human(row.resident.bytes().0), style.dim(&format!("({regions})"))));
    }
    text.blank();
    let rounds = count(usize::try_from(status.work.rounds).unwrap_or(usize::MAX), "round", "rounds");
    let explain = if status.xen.is_some() {
        "For one guest's reasons: pagefold-xen explain --xen-domain ID"
    } else {
        "For one process's reasons: pagefold explain PID"
    };
    let read = format!("  {} pages read in {rounds}. {explain}", thousands(status.work.pages_read));
    text.line(style.dim(&read));
}

fn next_step(verb: Verb, status: &Status) -> &'static str {
    let on_request = status.run.mechanism == Mechanism::Request;
    match verb {
        Verb::Read => "being read whole, to find pages worth merging",
        Verb::Mark if status.reserve.machine.state == RoomState::Short => {
            "worth merging, once memory is no longer short"
        }
        Verb::Mark if status.run.dry_run || !status.activity.ksm_driven => "worth marking",
        Verb::Mark if on_request => "about to be merged",
        Verb::Mark => "about to be marked for ksmd",
        Verb::Merge if status.run.dry_run => "would be merged; this is a dry run",
        Verb::Merge if on_request => "being merged",
        Verb::Merge => "being merged by ksmd, which takes two scans",
        Verb::Sample => "being sampled: too few samples to decide",
        Verb::Watch => "sampled rarely, to notice changes",
        Verb::Wait => "left alone until there is headroom for it",
        Verb::Leave => "left alone",
    }
}
