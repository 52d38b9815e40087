//! The output of a run while it goes on: a status line on a terminal, otherwise one line for each message. A service
//! manager gets the status line, too.

use crate::service::{MessageLimit, ServiceManager};
use pagefold_engine::engine::Engine;
use pagefold_text::{progress, style};
use serde::Serialize;
use std::time::Instant;

/// How many of the processes we leave alone the summary lists. We count the rest.
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
    /// How many more there were.
    pub left_alone_more: u64,
    messages: MessageLimit,
    /// Why we gave up KSM, if we did.
    pub stood_down: Option<String>,
}

impl Progress {
    /// Shows nothing yet.
    pub fn start() -> Self {
        Self {
            line: progress::Progress::new(),
            manager: ServiceManager::of_environment(),
            left_alone: Vec::new(),
            left_alone_more: 0,
            messages: MessageLimit::new(Instant::now()),
            stood_down: None,
        }
    }

    /// The run begins.
    pub fn begin(&self) {
        self.manager.ready();
    }

    /// Prints a message.
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

    /// Prints a message that programs can cause, unless there are too many.
    pub fn say_of_programs(&mut self, line: &str) {
        if let Some(unprinted) = self.messages.admit(Instant::now()) {
            if unprinted > 0 {
                self.say(&format!(
                    "{unprinted} more messages about programs were left out meanwhile; see pagefold status"
                ));
            }
            self.say(line);
        }
    }

    /// Reports a process that we leave alone, once for each reason.
    pub fn leave_alone(&mut self, left: LeftAlone) {
        if self.left_alone.contains(&left) {
            return;
        }
        self.say_of_programs(&format!("process {} ({}) is left alone: {}", left.pid, left.name, left.reason));
        if self.left_alone.len() < LISTED_MOST {
            self.left_alone.push(left);
        } else {
            self.left_alone_more += 1;
        }
    }

    pub fn stand_down(&mut self, why: String) {
        self.say(&format!("KSM is no longer controlled by this run: {why}"));
        self.stood_down = Some(why);
    }

    /// Shows the work done. `who` names the processes or guests in scope, and how many there are.
    pub fn show(&mut self, engine: &Engine, who: impl Fn() -> String, paused: bool) {
        if !self.line.is_hidden() {
            self.line.show(&line(engine, &who(), paused), None);
        }
        self.manager.alive(Instant::now(), || line(engine, &who(), paused));
    }

    /// The run ends.
    pub fn finish(&self) {
        self.manager.stopping();
        self.line.clear();
    }
}

/// The status line.
pub fn line(engine: &Engine, who: &str, paused: bool) -> String {
    let ledger = engine.ledger();
    let resident: u64 = engine.regions().map(|region| region.view.resident.bytes().0).sum();
    format!(
        "{who}, {}: {}, CPU {:.1} s{}",
        style::human(resident),
        ledger.saved.map_or("counting".to_owned(), |saved| format!("saved {}", style::human(saved.bytes().0))),
        (ledger.cost.pagefold_ns + ledger.cost.ksmd_ns) as f64 / 1e9,
        match (paused, engine.is_busy()) {
            (true, _) => ", paused (pagefold resume)",
            (false, true) => "",
            (false, false) => ", watching",
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_lived_programs_fill_neither_the_list_nor_the_log() {
        let mut progress = Progress::start();
        let began = Instant::now();
        for pid in 0..9_000 {
            progress.leave_alone(LeftAlone {
                pid,
                name: "gpg".to_owned(),
                reason: "on the deny list (gpg)".to_owned(),
            });
        }
        assert_eq!(progress.left_alone.len(), LISTED_MOST);
        assert_eq!(progress.left_alone_more, 8_000);
        let printed = 9_000 - progress.messages.unprinted();
        assert!(printed <= 101 + began.elapsed().as_secs(), "{printed} lines");
    }
}
