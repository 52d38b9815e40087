//! A sentence on what the daemon does now, whether that brings anything, and when it'll be done.

use super::state::{Point, result_of};
use crate::commands::status::Status;
use pagefold_engine::host::Mechanism;
use pagefold_engine::units::PAGE_BYTES;
use pagefold_text::figures::time;
use pagefold_text::style::{human, percent};

/// We compare savings and cost with this long ago, seconds.
const BEFORE: f64 = 60.0;
/// Less CPU time than this isn't worth a word, nanoseconds.
const LITTLE_NS: u64 = 20_000_000;

/// How well the daemon does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Saves more memory.
    Useful,
    /// Has nothing to do, or isn't allowed to do anything.
    Idle,
    /// Costs CPU time and hasn't brought anything lately.
    Searching,
}

/// The sentence. `history` ends with the present.
pub fn describe(status: &Status, history: &[Point]) -> (Mood, String) {
    if status.paused {
        return (Mood::Idle, "Paused: nothing is read, marked or merged until pagefold resume.".to_owned());
    }
    let before = history.iter().find(|point| point.seconds >= status.seconds - BEFORE).copied().unwrap_or_default();
    let span = status.seconds - before.seconds;
    let lately =
        if span < BEFORE * 0.8 { format!("in the last {}", time(span)) } else { "in the last minute".to_owned() };
    let verb = if status.dry_run { "found" } else { "saved" };
    let result = result_of(status).unwrap_or(before.saved);
    let (gain, loss) = (result.saturating_sub(before.saved), before.saved.saturating_sub(result));
    let cost = status.cpu_seconds.pagefold_ns + status.cpu_seconds.ksmd_ns;
    let spent = cost.saturating_sub(before.cpu_ns);
    let result = match (gain, loss) {
        _ if history.len() < 2 => String::new(),
        (1.., _) => format!("{} more {verb} {lately}, for {} of CPU time. ", human(gain), time(spent as f64 / 1e9)),
        (_, 1..) => format!("{} less {verb} {lately}: programs wrote to it, or ended. ", human(loss)),
        _ if spent > LITTLE_NS => format!("Nothing new {lately}, for {} of CPU time. ", time(spent as f64 / 1e9)),
        _ => String::new(),
    };
    if !status.busy {
        let share = percent(status.used_share, 1.0);
        let mood = if gain > 0 { Mood::Useful } else { Mood::Idle };
        return (mood, format!("Watching for changes, for {share} of a core. {result}"));
    }
    let doing = work(status);
    let mood = if gain > 0 || history.len() < 2 { Mood::Useful } else { Mood::Searching };
    let end = remaining(status).map(|seconds| format!("Read in about {}. ", time(seconds))).unwrap_or_default();
    (mood, format!("{doing}. {end}{result}"))
}

fn work(status: &Status) -> String {
    let of = |what: &str| status.next.iter().find(|row| row.what == what).map(|row| human(row.resident_bytes));
    let merging = match status.mechanism {
        Mechanism::Ksmd => "ksmd merges what is equal in",
        Mechanism::Request => "merging in",
    };
    let parts = [("read", "reading"), ("sample", "sampling"), ("mark", "marking in"), ("merge", merging)];
    let parts: Vec<String> =
        parts.iter().filter_map(|(what, word)| of(what).map(|size| format!("{word} {size}"))).collect();
    let text = if parts.is_empty() { "sampling".to_owned() } else { parts.join(", ") };
    text[..1].to_uppercase() + &text[1..]
}

/// How long we need for the pages that must be read whole, at the allowed share of a core and the cost per page so far,
/// seconds.
fn remaining(status: &Status) -> Option<f64> {
    let row = status.next.iter().find(|row| row.what == "read")?;
    let page_ns = status.cpu_seconds.pagefold_ns as f64 / status.pages_read.max(1) as f64;
    let seconds = row.resident_bytes as f64 / PAGE_BYTES as f64 * page_ns / 1e9 / status.allowed_share.max(1e-4);
    (status.pages_read > 0 && seconds >= 1.0).then_some(seconds)
}
