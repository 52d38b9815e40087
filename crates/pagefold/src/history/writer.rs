//! The thread that writes the history.

use super::{HistoryFile, Moment, now};
use crate::commands::status::Status;
use crate::control::protocol::Request;
use crate::control::queue::RequestSender;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Seconds between two moments.
const INTERVAL: u64 = 60;
/// How long the end of a run waits for a write that is under way.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Writes until it is dropped.
#[derive(Debug)]
pub struct HistoryWriter {
    /// Dropped to end the thread.
    going_on: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl HistoryWriter {
    /// Starts it for a run that has opened its file. `said` is what is to be said of that.
    pub fn of_run(opened: Option<(HistoryFile, Option<String>)>, requests: &RequestSender) -> Option<Self> {
        let (file, said) = opened?;
        if let Some(line) = said {
            complain!("{line}");
        }
        Self::start(file, requests.clone())
    }

    /// Starts the thread. Without it there is no history, and one line says so.
    fn start(file: HistoryFile, requests: RequestSender) -> Option<Self> {
        let (going_on, end) = channel::<()>();
        let (ending, ended) = channel::<()>();
        let write = move || {
            let _ending = ending;
            let mut complained = false;
            let mut pause = Duration::ZERO;
            while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = Duration::from_secs(INTERVAL - now() % INTERVAL);
                // A run that is ending, or has not finished its cycle, says nothing.
                let Ok(facts) = requests.send(Request::Status) else { continue };
                match file.write(&Moment::of(&Status::of(&facts), now())) {
                    Err(line) if !std::mem::replace(&mut complained, true) => complain!("{line}"),
                    Err(_) => {}
                    Ok(()) => complained = false,
                }
            }
        };
        match thread::Builder::new().name("history".into()).spawn(write) {
            Ok(_) => Some(Self { going_on: Some(going_on), ended }),
            Err(error) => {
                complain!("cannot start the thread for the history: {error}; it is not written");
                None
            }
        }
    }
}

impl Drop for HistoryWriter {
    fn drop(&mut self) {
        drop(self.going_on.take());
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}
