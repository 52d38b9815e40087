//! The output of a run while it goes on: a status line on a terminal, otherwise one line for each message. A service
//! manager gets the status line, too.

use crate::service::{MessageLimit, ServiceManager};
use pagefold_engine::engine::Engine;
use pagefold_text::{progress, style};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// The summary lists at most this many processes that we leave alone, and counts the rest.
const LISTED_MOST: usize = 1_000;

/// A process in scope that we leave alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftAlone {
    pub pid: i32,
    pub name: String,
    pub reason: String,
}

#[derive(Debug)]
pub struct Progress {
    line: progress::Progress,
    manager: ServiceManager,
    /// The processes that we've left alone so far, and why.
    pub left_alone: Vec<LeftAlone>,
    /// How many more processes we've left alone than the list has.
    pub left_alone_more: u64,
    messages: MessageLimit,
    /// Many messages about programs must not hide the ones about memory limits, which we don't repeat.
    limits: MessageLimit,
}

impl Progress {
    pub fn start() -> Self {
        Self {
            line: progress::Progress::new(),
            manager: ServiceManager::of_environment(),
            left_alone: Vec::new(),
            left_alone_more: 0,
            messages: MessageLimit::new(Instant::now()),
            limits: MessageLimit::new(Instant::now()),
        }
    }

    pub fn begin(&self) {
        self.manager.ready();
    }

    pub fn say(&self, line: &str) {
        if self.line.is_hidden() {
            complain!("{line}");
        } else {
            self.line.println(line);
        }
    }

    /// Prints a message, but only on a terminal.
    pub fn say_on_terminal(&self, line: &str) {
        self.line.println(line);
    }

    /// Prints a message that other programs can cause, unless there are too many such messages.
    pub fn say_of_programs(&mut self, line: &str) {
        let admitted = self.messages.admit(Instant::now());
        self.say_admitted(line, "programs", admitted);
    }

    /// Like [`Self::say_of_programs`], for messages about the memory limits of cgroups.
    pub fn say_of_limits(&mut self, line: &str) {
        let admitted = self.limits.admit(Instant::now());
        self.say_admitted(line, "limits", admitted);
    }

    fn say_admitted(&self, line: &str, of: &str, admitted: Option<u64>) {
        let Some(unprinted) = admitted else { return };
        if unprinted > 0 {
            self.say(&format!("{unprinted} more messages about {of} were not printed; see pagefold status"));
        }
        self.say(line);
    }

    /// Reports processes or guests that we leave alone, unless we've reported them for the same reason before: one line
    /// for each program and reason. `noun` is "process" or "guest".
    pub fn leave_alone(&mut self, noun: &str, all: Vec<LeftAlone>) {
        let mut first: BTreeMap<(String, String), (i32, usize)> = BTreeMap::new();
        for left in all {
            if self.left_alone.contains(&left) {
                continue;
            }
            let key = (left.name.clone(), left.reason.clone());
            first.entry(key).or_insert((left.pid, 0)).1 += 1;
            if self.left_alone.len() < LISTED_MOST {
                self.left_alone.push(left);
            } else {
                self.left_alone_more += 1;
            }
        }
        for ((name, reason), (pid, number)) in first {
            let others = and_others(number - 1);
            self.say_of_programs(&format!("{noun} {pid} ({name}) is left alone: {reason}{others}"));
        }
    }

    /// Shows the work done so far. `targets` says how many processes or guests are in scope.
    pub fn show(&mut self, engine: &Engine, targets: &str, paused: bool) {
        if !self.line.is_hidden() {
            self.line.show(&line(engine, targets, paused), None);
        }
        self.manager.alive(Instant::now(), || line(engine, targets, paused));
    }

    pub fn finish(&self) {
        self.manager.stopping();
        self.line.clear();
    }
}

/// How many other targets share a reason, to print after it.
pub fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (and so is 1 other)".to_owned(),
        _ => format!(" (and so are {others} others)"),
    }
}

pub fn line(engine: &Engine, targets: &str, paused: bool) -> String {
    let ledger = engine.ledger();
    let resident: u64 = engine.regions().map(|region| region.view.resident.bytes().0).sum();
    let resident = style::human(resident);
    let saved = match ledger.saved {
        Some(saved) => format!("saved {}", style::human(saved.bytes().0)),
        None => "counting".to_owned(),
    };
    let cpu_seconds = ledger.cost.total_ns() as f64 / 1e9;
    let state = match (paused, engine.is_busy()) {
        (true, _) => ", paused (pagefold resume)",
        (false, true) => "",
        (false, false) => ", watching",
    };
    format!("{targets}, {resident}: {saved}, CPU {cpu_seconds:.1} s{state}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_lived_programs_fill_neither_the_list_nor_the_log() {
        let mut progress = Progress::start();
        let began = Instant::now();
        for pid in 0..9_000 {
            let name = "gpg".to_owned();
            progress.leave_alone("process", vec![LeftAlone { pid, name, reason: "on the deny list (gpg)".to_owned() }]);
        }
        assert_eq!(progress.left_alone.len(), LISTED_MOST);
        assert_eq!(progress.left_alone_more, 8_000);
        let printed = 9_000 - progress.messages.unprinted;
        assert!(printed <= 101 + began.elapsed().as_secs(), "{printed} lines");
        progress.say_of_limits("not enough headroom");
        assert_eq!(progress.limits.unprinted, 0);
    }

    #[test]
    fn equal_processes_share_a_line() {
        let mut progress = Progress::start();
        let mut all = Vec::new();
        for pid in 0..9_000 {
            all.push(LeftAlone { pid, name: "chrome".to_owned(), reason: "on the deny list (chrome*)".to_owned() });
        }
        progress.leave_alone("process", all);
        assert_eq!((progress.left_alone.len(), progress.messages.unprinted), (LISTED_MOST, 0));
        assert_eq!([0, 1, 2].map(and_others), ["", " (and so is 1 other)", " (and so are 2 others)"]);
    }
}
