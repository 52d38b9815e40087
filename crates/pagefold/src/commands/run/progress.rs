//! What a run shows while it goes on: a status line on a terminal, otherwise one line for each message.

use pagefold_cli::{progress, style};
use pagefold_core::engine::Engine;
use pagefold_linux::host::live::LiveHost;
use serde::Serialize;

/// A process in scope that is left alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftAlone {
    pub pid: i32,
    pub name: String,
    pub reason: String,
}

/// The messages of a run.
#[derive(Debug)]
pub struct Progress {
    line: progress::Progress,
    /// The processes left alone so far, and why.
    pub left_alone: Vec<LeftAlone>,
    /// Why KSM was given up, if it was.
    pub stood_down: Option<String>,
}

impl Progress {
    /// Shows nothing yet.
    pub fn new() -> Self {
        Self { line: progress::Progress::new(), left_alone: Vec::new(), stood_down: None }
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

    /// Reports a process that is left alone, once for each reason.
    pub fn leave_alone(&mut self, left: LeftAlone) {
        if !self.left_alone.contains(&left) {
            self.say(&format!("process {} ({}) is left alone: {}", left.pid, left.name, left.reason));
            self.left_alone.push(left);
        }
    }

    /// Reports that KSM was given up.
    pub fn stand_down(&mut self, why: String) {
        self.say(&format!("KSM is no longer controlled by this run: {why}"));
        self.stood_down = Some(why);
    }

    /// Updates the status line.
    pub fn show(&self, engine: &Engine, host: &LiveHost, paused: bool) {
        let ledger = engine.ledger();
        let resident: u64 = engine.regions().map(|region| region.view.resident.bytes().0).sum();
        self.line.show(
            &format!(
                "{}, {}: saved {}, CPU {:.1} s{}",
                style::count(host.targets().count(), "process", "processes"),
                style::human(resident),
                style::human(ledger.saved().bytes().0),
                (ledger.cost.pagefold_ns + ledger.cost.ksmd_ns) as f64 / 1e9,
                match (paused, engine.is_busy()) {
                    (true, _) => ", paused (pagefold resume)",
                    (false, true) => "",
                    (false, false) => ", watching",
                },
            ),
            None,
        );
    }

    /// Removes the status line.
    pub fn finish(&self) {
        self.line.clear();
    }
}
