//! A progress line on standard error.

use crate::escape::printable;
use crate::messages;
use crate::style::bar;
use std::io::{IsTerminal, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const BAR: usize = 24;

const INTERVAL: Duration = Duration::from_millis(120);

/// A line on standard error that we rewrite in place. It's hidden if standard error isn't a terminal.
#[derive(Debug)]
pub struct Progress {
    hidden: bool,
    began: Instant,
    drawn: Mutex<Option<Instant>>,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress {
    pub fn new() -> Self {
        Self { hidden: !stderr().is_terminal(), began: Instant::now(), drawn: Mutex::new(None) }
    }

    pub fn is_hidden(&self) -> bool {
        self.hidden
    }

    /// Shows a message, a bar if we know which share is done (0 to 1), and the time elapsed. Does nothing if the last
    /// call was less than [`INTERVAL`] ago.
    pub fn show(&self, message: &str, share: Option<f64>) {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.hidden || drawn.is_some_and(|drawn| drawn.elapsed() < INTERVAL) {
            return;
        }
        *drawn = Some(Instant::now());
        let bar = share.map_or_else(String::new, |share| format!("\x1b[32m{:<BAR$}\x1b[0m  ", bar(share, BAR)));
        let seconds = self.began.elapsed().as_secs();
        let time = format!("{}:{:02}", seconds / 60, seconds % 60);
        messages::write_if_idle(format!("\r\x1b[K{bar}{message}  \x1b[2m{time}\x1b[0m"));
    }

    /// Prints a line above the progress line. Prints nothing if the progress line is hidden.
    pub fn println(&self, line: &str) {
        if !self.hidden {
            self.clear();
            messages::write(format!("{}\n", printable(line.as_bytes())));
        }
    }

    pub fn clear(&self) {
        if self.drawn.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            messages::write("\r\x1b[K".to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
