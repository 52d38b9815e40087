//! Describes in a sentence what the daemon is doing, whether this saves memory, and when it'll be done.

use super::state::Point;
use crate::commands::status::Status;
use pagefold_engine::decision::Verb;
use pagefold_engine::host::Mechanism;
use pagefold_text::figures::time;
use pagefold_text::style::{human, percent};
use std::cmp::Ordering;

/// We compare savings and cost with the figures of this many seconds ago.
const BEFORE: f64 = 60.0;
/// We don't mention less CPU time than this, nanoseconds.
const LITTLE_NS: u64 = 20_000_000;

/// How well the daemon is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// The daemon saves more and more memory.
    Useful,
    /// The daemon has nothing to do, or isn't allowed to do anything.
    Idle,
    /// The daemon takes CPU time, and hasn't saved anything new lately.
    Searching,
}

/// Makes the sentence. The last point of `history` is the present.
pub fn describe(status: &Status, history: &[Point]) -> (Mood, String) {
    if status.activity.paused {
        return (Mood::Idle, "Paused: nothing is read, marked or merged until you run pagefold resume.".to_owned());
    }
    let seconds = status.activity.seconds;
    let before = history.iter().find(|point| point.seconds >= seconds - BEFORE).copied().unwrap_or_default();
    let result = status.result_bytes().unwrap_or(before.result_bytes);
    let gain = result.saturating_sub(before.result_bytes);
    let progress = if history.len() < 2 { String::new() } else { progress(status, &before, result) };
    if !status.activity.busy {
        let share = percent(status.activity.used_share, 1.0);
        let mood = if gain > 0 { Mood::Useful } else { Mood::Idle };
        return (mood, format!("Watching for changes, for {share} of a core. {progress}"));
    }
    let mood = if gain > 0 || history.len() < 2 { Mood::Useful } else { Mood::Searching };
    let end = status.forecast().map_or(String::new(), |end| format!(", {end}"));
    (mood, format!("{}{end}. {progress}", work(status)))
}

/// The change in savings since the point `before`, and the CPU time spent.
fn progress(status: &Status, before: &Point, result: u64) -> String {
    let span = status.activity.seconds - before.seconds;
    let lately = match span {
        span if span < BEFORE * 0.8 => format!("in the last {}", time(span)),
        _ => "in the last minute".to_owned(),
    };
    let verb = if status.run.dry_run { "found" } else { "saved" };
    let spent_ns = status.work.cpu_seconds.total_ns().saturating_sub(before.cpu_ns);
    let spent = time(spent_ns as f64 / 1e9);
    match result.cmp(&before.result_bytes) {
        Ordering::Greater => {
            format!("{} more {verb} {lately}, for {spent} of CPU time. ", human(result - before.result_bytes))
        }
        Ordering::Less => {
            format!("{} less {verb} {lately}: programs wrote to it, or ended. ", human(before.result_bytes - result))
        }
        Ordering::Equal if spent_ns > LITTLE_NS => format!("Nothing new {lately}, for {spent} of CPU time. "),
        Ordering::Equal => String::new(),
    }
}

fn work(status: &Status) -> String {
    let merging = match status.run.mechanism {
        Mechanism::Ksmd => "ksmd merges equal pages in",
        Mechanism::Request => "merging in",
    };
    let mut parts = Vec::new();
    for (verb, word) in
        [(Verb::Read, "reading"), (Verb::Sample, "sampling"), (Verb::Mark, "marking in"), (Verb::Merge, merging)]
    {
        if let Some(total) = status.totals.of_verb(verb) {
            parts.push(format!("{word} {}", human(total.resident.bytes().0)));
        }
    }
    let text = if parts.is_empty() { "sampling".to_owned() } else { parts.join(", ") };
    text[..1].to_uppercase() + &text[1..]
}
