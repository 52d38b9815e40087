//! `pagefold top`: shows the daemon's savings, costs and work live on the terminal, and when the daemon will be done.
//!
//! A thread asks the daemon once a second. [`state`] holds the answers and the user's choices, and [`draw`] shows them.

mod activity;
mod draw;
mod html;
mod over_time;
mod state;
#[cfg(test)]
mod tests;

use crate::commands::explain::Explanation;
use crate::commands::history::history_file;
use crate::commands::status::Status;
use crate::config::args::seconds;
use crate::config::ownership;
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::history::{self, Moment};
use crate::output::host_name;
use crate::output::page::{self, Origin};
use anyhow::Result;
use html::Sources;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::{self, Lines, colours};
use ratatui::Terminal;
use ratatui::backend::{CrosstermBackend, TestBackend};
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use state::{Top, View};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// How often we ask the daemon.
const INTERVAL: Duration = Duration::from_secs(1);
/// The most programs that `--once` prints.
const ROWS_MOST: u16 = 1_000;
/// How many rows of the screen show anything other than programs.
const OTHER_ROWS: u16 = 11;
/// The rows of the history that `--once` prints.
const HISTORY_ROWS: usize = 13;
/// How long we wait for a key before we look for an answer from the daemon.
const POLL: Duration = Duration::from_millis(100);

/// How much history we show without --since.
const SINCE: Duration = Duration::from_secs(2 * 3_600);
/// How much history the web page shows without --since.
const SINCE_PAGE: Duration = Duration::from_secs(24 * 3_600);
/// How often we read the history.
const HISTORY_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// Show first what was saved in the last hours or days (2h, 30d), even if no pagefold is running now
    #[arg(long, value_name = "DURATION", value_parser = seconds)]
    pub since: Option<Duration>,
    /// Read the history from this file [default: the running daemon's]
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Write a self-contained web page about the last day (or the time of --since) to this file, and exit
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print the programs (with --since, the savings) once, as text of 80 columns (or of COLUMNS), and exit
    #[arg(long, conflicts_with = "html")]
    pub once: bool,
}

/// The history, or why there is none.
type Moments = Result<Vec<Moment>, String>;

/// The answers to one round of requests to the daemon.
pub struct Answer {
    /// When the answer came, seconds since 1970.
    time: u64,
    status: Result<Status, String>,
    explanation: Option<Result<Explanation, String>>,
    /// `None` if we haven't read the history again for this answer.
    history: Option<Moments>,
}

pub fn run(args: &TopArgs) -> Result<u8> {
    if let Some(file) = &args.html {
        return write_page(args, file);
    }
    let has_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    if !has_terminal && !args.once {
        let message = "top needs a terminal; without one, use pagefold top --once, or pagefold status";
        return Err(Exit::new(exit::USAGE, message).into());
    }
    // If there's no daemon, or it doesn't answer this user, we say so before we take over the screen.
    let since = args.since.unwrap_or(SINCE);
    let found = ask::<Status>(&Request::Status);
    let moments = moments(args.history.as_deref(), found.as_ref().ok(), since);
    let status = match (found, &moments, args.since) {
        (Ok(status), ..) => Ok(status),
        // We can still show the history, if the user asked for it.
        (Err(error), Ok(_), Some(_)) => Err(error.to_string()),
        (Err(error), Err(problem), Some(_)) => return Err(also(&error, problem)),
        (Err(error), _, None) => return Err(error),
    };
    let mut top = Top::new(!args.once && colours());
    top.history = moments;
    top.since = since;
    top.now = history::now();
    top.host = host_name();
    if args.since.is_some() {
        top.view = View::History;
    }
    if args.once {
        style::print(&print_once(top, status))?;
        return Ok(exit::OK);
    }
    let explained = Arc::new(AtomicI32::new(0));
    let (sender, answers) = sync_channel(1);
    let asked = Arc::clone(&explained);
    let history = args.history.clone();
    std::thread::spawn(move || poll(&asked, history.as_deref(), since, &sender));
    let screen = Screen::take()?;
    end_on_signals()?;
    let result = show(top, &answers, &explained);
    drop(screen);
    result.map(|()| exit::OK)
}

/// The screen as text, with a row for each program, but [`ROWS_MOST`] at most.
fn print_once(mut top: Top, status: Result<Status, String>) -> String {
    let programs = match (&status, top.view) {
        (Ok(status), View::Programs) => status.programs.processes.len(),
        _ => HISTORY_ROWS,
    };
    let rows = u16::try_from(programs).unwrap_or(ROWS_MOST).min(ROWS_MOST) + OTHER_ROWS;
    top.update(Answer { time: history::now(), status, explanation: None, history: None });
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(80_u16);
    let mut text = screen(&mut top, (columns.clamp(40, 500), rows));
    // Cut off the last line, which shows keys to press.
    let end = text.trim_end().rfind('\n').unwrap_or(0);
    text.truncate(text[..end].trim_end().len());
    text + "\n"
}

fn screen(top: &mut Top, (width, height): (u16, u16)) -> String {
    let mut text = String::new();
    // Drawing into memory can't fail.
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height)) else { return text };
    // Use the returned buffer: the backend's is wrong beyond 65,535 cells (ratatui 0.29, `Buffer::pos_of`).
    let Ok(drawn) = terminal.draw(|frame| draw::draw(frame, top)) else { return text };
    for y in 0..height {
        let row: String = (0..width).map(|x| drawn.buffer[(x, y)].symbol()).collect();
        text.line(row);
    }
    text
}

/// Ends the program on a signal. This needs a thread: once the terminal is gone, crossterm tries for ever to read it.
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

/// Asks the daemon again and again, until nobody listens to the answers.
fn poll(explained: &AtomicI32, file: Option<&Path>, since: Duration, answers: &SyncSender<Answer>) {
    let mut read = Instant::now();
    loop {
        let status = ask::<Status>(&Request::Status).map_err(|error| error.to_string());
        let mut history = None;
        if read.elapsed() >= HISTORY_INTERVAL {
            history = Some(moments(file, status.as_ref().ok(), since));
            read = Instant::now();
        }
        let explanation = match explained.load(Ordering::Relaxed) {
            0 => None,
            pid => Some(ask(&Request::Explain { pid }).map_err(|error| error.to_string())),
        };
        let answer = Answer { time: history::now(), status, explanation, history };
        // The channel is full only if the screen's thread hangs in writing to the terminal. Then we drop the answer.
        if let Err(TrySendError::Disconnected(_)) = answers.try_send(answer) {
            return;
        }
        // The terminal may have hung up without a signal to us, for example if sudo runs us.
        if !io::stdin().is_terminal() {
            end();
        }
        std::thread::sleep(INTERVAL);
    }
}

fn moments(named: Option<&Path>, status: Option<&Status>, since: Duration) -> Moments {
    let file = history_file(named, status);
    history::read(file, since, history::now()).map_err(|error| format!("{}: {error}", ownership::shown(file)))
}

/// Adds to an error that we can't read the history either.
fn also(error: &anyhow::Error, problem: &str) -> anyhow::Error {
    Exit::new(pagefold_text::program::code_of(error), format!("{error:#}; nor can the history be read: {problem}"))
        .into()
}

fn write_page(args: &TopArgs, file: &Path) -> Result<u8> {
    let since = args.since.unwrap_or(SINCE_PAGE);
    let found = ask::<Status>(&Request::Status);
    let moments = moments(args.history.as_deref(), found.as_ref().ok(), since);
    let status = match (found, &moments) {
        (Ok(status), _) => Some(status),
        (Err(_), Ok(moments)) if !moments.is_empty() => None,
        (Err(error), Err(problem)) => return Err(also(&error, problem)),
        (Err(error), Ok(_)) => return Err(also(&error, "it has no entries from this time")),
    };
    let sources = Sources {
        status: status.as_ref(),
        moments: moments.as_deref().unwrap_or_default(),
        problem: moments.as_ref().err().map(String::as_str),
        since,
        origin: Origin::here(),
    };
    page::write(file, &html::page(&sources))?;
    Ok(exit::OK)
}

fn show(mut top: Top, answers: &Receiver<Answer>, explained: &AtomicI32) -> Result<()> {
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
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

/// The terminal in raw mode, on its alternate screen. Dropping this restores the terminal.
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
