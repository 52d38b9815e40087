//! The state of `top`: the daemon's answers, and the user's choices.

use super::{Answer, Moments, SINCE};
use crate::commands::explain::Explanation;
use crate::commands::status::Status;
use crate::commands::status::rows::{NO_WORKLOAD, Row, by_workload, process_rows};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;
use std::cmp::Reverse;
use std::time::Duration;

/// We keep at most this many points for the curve: two hours.
const POINTS_MOST: usize = 7_200;
/// How many rows the page keys move by.
const PAGE: isize = 10;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    pub seconds: f64,
    /// How much the run saved, or a dry run would have saved.
    pub result_bytes: u64,
    pub cpu_ns: u64,
}

impl Point {
    /// `None` while we don't know yet how much is saved.
    fn of(status: &Status) -> Option<Self> {
        Some(Self {
            seconds: status.activity.seconds,
            result_bytes: status.result_bytes()?,
            cpu_ns: status.work.cpu_seconds.total_ns(),
        })
    }
}

/// What the screen shows below the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Programs,
    Memory,
    History,
    Events,
    Process(i32),
    Help,
}

/// Whether rows are processes or workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    Process,
    Workload,
}

/// The column that we sort rows by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Saved,
    Memory,
    Marked,
    Duplicate,
    Name,
    Pid,
}

impl Sort {
    pub const ALL: [Self; 6] = [Self::Saved, Self::Memory, Self::Marked, Self::Duplicate, Self::Name, Self::Pid];
}

pub struct Top {
    pub colour: bool,
    pub host: String,
    /// When the last answer came, seconds since 1970.
    pub now: u64,
    pub status: Option<Status>,
    /// Why we have no newer status.
    pub problem: Option<String>,
    /// The run's savings since `top` began to show them.
    pub seen: Vec<Point>,
    /// The history from the daemon's file, and how far back we show it.
    pub history: Moments,
    pub since: Duration,
    /// The number of events below the last one shown.
    pub events_below: usize,
    /// The explanation of the process on the screen, or why there's none.
    pub explanation: Option<Result<Explanation, String>>,
    pub view: View,
    pub rows_are: Rows,
    pub sort: Sort,
    pub reversed: bool,
    pub filter: String,
    /// Whether keys go to the filter.
    pub typing: bool,
    pub table: TableState,
    pub regions: TableState,
    over: bool,
}

impl Top {
    pub fn new(colour: bool) -> Self {
        Self {
            colour,
            host: String::new(),
            now: 0,
            status: None,
            problem: None,
            seen: Vec::new(),
            history: Ok(Vec::new()),
            since: SINCE,
            events_below: 0,
            explanation: None,
            view: View::Programs,
            rows_are: Rows::Process,
            sort: Sort::Saved,
            reversed: false,
            filter: String::new(),
            typing: false,
            table: TableState::default().with_selected(0),
            regions: TableState::default().with_selected(0),
            over: false,
        }
    }

    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The process that we show region by region.
    pub fn explained(&self) -> Option<i32> {
        match self.view {
            View::Process(pid) => Some(pid),
            _ => None,
        }
    }

    pub fn update(&mut self, answer: Answer) {
        self.now = answer.time;
        match answer.status {
            Ok(status) => {
                // If the run's time has gone back, this is another run, so we begin a new curve.
                if self.seen.last().is_some_and(|last| last.seconds > status.activity.seconds) {
                    self.seen.clear();
                }
                if self.seen.len() == POINTS_MOST {
                    self.seen.remove(0);
                }
                self.seen.extend(Point::of(&status));
                let selected = self.selected();
                self.status = Some(status);
                self.problem = None;
                self.select(selected.as_ref());
            }
            Err(problem) => self.problem = Some(problem),
        }
        if let Some(history) = answer.history {
            self.history = history;
        }
        match answer.explanation {
            // Drop this explanation of another process: the user has just chosen a new one.
            Some(Ok(explanation)) if self.explained() != Some(explanation.pid) => {}
            None => {}
            found => self.explanation = found,
        }
    }

    pub fn key(&mut self, key: KeyEvent) {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            self.over = true;
        } else if self.typing {
            self.type_filter(key.code);
        } else {
            self.command(key.code);
        }
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
        self.table.select(Some(0));
    }

    fn command(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('q') | KeyCode::F(10) => self.over = true,
            KeyCode::Char('h' | '?') | KeyCode::F(1) => {
                self.view = if self.view == View::Help { View::Programs } else { View::Help };
            }
            KeyCode::Esc => match self.view {
                View::Programs => self.filter.clear(),
                _ => self.view = View::Programs,
            },
            KeyCode::Tab | KeyCode::F(2) => {
                self.view = if self.view == View::Programs { View::Memory } else { View::Programs };
            }
            KeyCode::Char('o') | KeyCode::F(3) => self.toggle(View::History),
            KeyCode::Char('e') | KeyCode::F(7) => {
                self.events_below = 0;
                self.toggle(View::Events);
            }
            KeyCode::Char('/') | KeyCode::F(4) if self.view == View::Programs => self.typing = true,
            KeyCode::Char('t') | KeyCode::F(5) => {
                self.rows_are = if self.rows_are == Rows::Process { Rows::Workload } else { Rows::Process };
                self.table.select(Some(0));
            }
            KeyCode::Char('>' | '.') | KeyCode::F(6) => self.sort_by(1),
            KeyCode::Char('<' | ',') => self.sort_by(Sort::ALL.len() - 1),
            KeyCode::Char('I') => self.reversed = !self.reversed,
            KeyCode::Enter if self.view == View::Programs => self.open(),
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::PageUp => self.move_by(-PAGE),
            KeyCode::PageDown => self.move_by(PAGE),
            KeyCode::Home => self.move_by(isize::MIN),
            KeyCode::End => self.move_by(isize::MAX),
            _ => {}
        }
    }

    fn open(&mut self) {
        let Some(row) = self.selected() else { return };
        if let Some(pid) = row.pid {
            self.view = View::Process(pid);
            self.explanation = None;
            self.regions.select(Some(0));
        } else {
            self.rows_are = Rows::Process;
            self.filter = row.workload;
            self.table.select(Some(0));
        }
    }

    fn toggle(&mut self, view: View) {
        self.view = if self.view == view { View::Programs } else { view };
    }

    fn sort_by(&mut self, steps: usize) {
        let selected = self.selected();
        let at = Sort::ALL.iter().position(|&sort| sort == self.sort).unwrap_or(0);
        self.sort = Sort::ALL[(at + steps) % Sort::ALL.len()];
        self.select(selected.as_ref());
    }

    fn move_by(&mut self, rows: isize) {
        if self.view == View::Events {
            let most = self.status.as_ref().map_or(0, |status| status.events.len().saturating_sub(1));
            self.events_below = self.events_below.saturating_add_signed(rows.saturating_neg()).min(most);
            return;
        }
        let length = match self.view {
            View::Process(_) => match &self.explanation {
                Some(Ok(explanation)) => explanation.regions.len(),
                _ => 0,
            },
            _ => self.rows().len(),
        };
        let table = if self.explained().is_some() { &mut self.regions } else { &mut self.table };
        let at = table.selected().unwrap_or(0).saturating_add_signed(rows);
        table.select(Some(at.min(length.saturating_sub(1))));
    }

    fn selected(&self) -> Option<Row> {
        self.rows().into_iter().nth(self.table.selected()?)
    }

    /// Selects the row of the same process or workload as this row, even if it has moved.
    fn select(&mut self, row: Option<&Row>) {
        let rows = self.rows();
        let mut at = self.table.selected().unwrap_or(0);
        if let Some(row) = row {
            let same = rows.iter().position(|other| other.pid == row.pid && other.workload == row.workload);
            at = same.unwrap_or(at);
        }
        self.table.select(Some(at.min(rows.len().saturating_sub(1))));
    }

    pub fn rows(&self) -> Vec<Row> {
        let Some(status) = &self.status else { return Vec::new() };
        let mut rows = process_rows(&status.programs.processes);
        if self.rows_are == Rows::Workload {
            rows = by_workload(rows);
        }
        let wanted = self.filter.to_lowercase();
        rows.retain(|row| {
            if wanted == NO_WORKLOAD {
                return row.workload == NO_WORKLOAD;
            }
            let pid = row.pid.map(|pid| pid.to_string()).unwrap_or_default();
            [&row.name, &row.workload, &pid].iter().any(|text| text.to_lowercase().contains(&wanted))
        });
        rows.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
        match self.sort {
            Sort::Saved => rows.sort_by_key(|row| Reverse((row.saved_bytes, row.memory.unmerged_bytes))),
            Sort::Memory => rows.sort_by_key(|row| Reverse(row.memory.unmerged_bytes)),
            Sort::Marked => rows.sort_by_key(|row| Reverse(row.memory.marked_bytes)),
            Sort::Duplicate => rows.sort_by_key(|row| Reverse(row.memory.expected_bytes)),
            Sort::Name => rows.sort_by(|a, b| a.name.cmp(&b.name)),
            Sort::Pid => {}
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }
}
