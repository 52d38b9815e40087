//! The thread that writes the history.

use super::{HistoryFile, Moment, now};
use crate::background::{Background, Complaints};
use crate::commands::status::Status;
use crate::control::protocol::Request;
use crate::control::queue::RequestSender;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

/// Seconds between two moments.
const INTERVAL: u64 = 60;

/// Starts the thread that writes the opened file, and prints the message that opening may have returned. If the thread
/// can't start, we print a message, and there's no history of this run.
pub fn start(opened: Option<(HistoryFile, Option<String>)>, requests: &RequestSender) -> Option<Background<()>> {
    let (file, said) = opened?;
    if let Some(line) = said {
        complain!("{line}");
    }
    let requests = requests.clone();
    let started = Background::start("history", move |end| {
        let mut complaints = Complaints::default();
        let mut pause = Duration::ZERO;
        while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            pause = Duration::from_secs(INTERVAL - now() % INTERVAL);
            // A run that is ending, or hasn't finished its cycle in time, doesn't answer.
            let Ok(facts) = requests.send(Request::Status) else { continue };
            if let Some(moment) = Moment::of(&Status::of(&facts), now()) {
                complaints.hear(file.write(&moment));
            }
        }
    });
    started.inspect_err(|error| complain!("no history is written: cannot start the thread for it: {error}")).ok()
}
