//! `pagefold top`: what the daemon saves, what it costs, what it does now and when it will be done, on the terminal, live.
//!
//! A thread asks the daemon once a second; [`state`] is what is known and what the user has chosen, [`draw`] shows it.

mod activity;
mod draw;
mod state;
#[cfg(test)]
mod tests;

use crate::commands::explain::Explanation;
use crate::commands::status::Status;
use crate::control::client::ask;
use crate::control::protocol::Request;
use anyhow::Result;
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::style::colours;
use pagefold_linux::scope::workload::workload_of;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use state::Top;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

/// Between two questions to the daemon.
const INTERVAL: Duration = Duration::from_secs(1);
/// How soon an answer is noticed.
const POLL: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {}

/// What the daemon and `/proc` say at one time.
pub struct Answer {
    status: Result<Status, String>,
    /// What each process belongs to.
    workloads: BTreeMap<i32, String>,
    explanation: Option<Result<Explanation, String>>,
}

pub fn run(_: &TopArgs) -> Result<u8> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        let message = "top needs a terminal; without one, use pagefold status, or pagefold status --json";
        return Err(Exit::new(exit::USAGE, message).into());
    }
    // A daemon that is not there, or that does not answer this user, is told before the screen is taken.
    ask::<Status>(&Request::Status)?;
    let explained = Arc::new(AtomicI32::new(0));
    let (sender, answers) = sync_channel(1);
    let asked = Arc::clone(&explained);
    std::thread::spawn(move || poll(&asked, &sender));
    let screen = Screen::take()?;
    end_on_signals()?;
    let result = show(&answers, &explained);
    drop(screen);
    result.map(|()| exit::OK)
}

/// Ends the program when it is told to, from a thread: once the terminal is gone, crossterm reads it for ever.
fn end_on_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        signals.forever().next();
        end();
    });
    Ok(())
}

fn end() -> ! {
    drop(Screen);
    std::process::exit(exit::OK.into())
}

/// Asks until nobody listens.
fn poll(explained: &AtomicI32, answers: &SyncSender<Answer>) {
    loop {
        let status = ask::<Status>(&Request::Status).map_err(|error| error.to_string());
        let pids = status.iter().flat_map(|status| &status.processes).map(|row| row.pid);
        let workloads = pids.filter_map(|pid| Some((pid, workload_of(pid)?))).collect();
        let explanation = match explained.load(Ordering::Relaxed) {
            0 => None,
            pid => Some(ask(&Request::Explain { pid }).map_err(|error| error.to_string())),
        };
        // There is room, unless the other thread hangs in the terminal.
        if let Err(TrySendError::Disconnected(_)) = answers.try_send(Answer { status, workloads, explanation }) {
            return;
        }
        // It has hung up, and no signal has come: sudo may have been in between.
        if !io::stdin().is_terminal() {
            end();
        }
        std::thread::sleep(INTERVAL);
    }
}

fn show(answers: &Receiver<Answer>, explained: &AtomicI32) -> Result<()> {
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
    let mut top = Top::new(colours());
    let mut changed = true;
    while !top.is_over() {
        for answer in answers.try_iter() {
            top.update(answer);
            changed = true;
        }
        if changed {
            terminal.draw(|frame| draw::draw(frame, &mut top))?;
        }
        changed = event::poll(POLL)?;
        if changed {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => top.key(key),
                _ => {}
            }
            explained.store(top.explained().unwrap_or(0), Ordering::Relaxed);
        }
    }
    Ok(())
}

/// The terminal, until it is dropped.
struct Screen;

impl Screen {
    fn take() -> io::Result<Self> {
        enable_raw_mode()?;
        let screen = Self;
        execute!(io::stdout(), EnterAlternateScreen)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
