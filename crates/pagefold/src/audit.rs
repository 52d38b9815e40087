//! The audit log: one line of JSON (schema pagefold.audit/1) for every span of memory that we mark or unmark (if a
//! process has many, they share a line), for merges on request, for every user's request to exclude or include
//! processes, and for the command's beginning and end. It contains no memory contents and no digests of them.
//!
//! A thread writes the log, so that nothing else waits for its file system. We lose a line if we can't write it, or if
//! too many lines wait already. We count lost lines and report the first; the next line that we can write says how many
//! are missing.

mod entry;
mod file;

use crate::config::ownership::shown;
pub use entry::{Change, Changes, Demand, Entry, Owner};
use file::LogFile;
use pagefold_text::exit::Exit;
use pagefold_text::sink::Sink;
use pagefold_text::style::visible_json;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, SystemTime};

const SCHEMA: &str = "pagefold.audit/1";
/// Lines that wait to be written may take this many bytes: about 8,000 lines, more than a cycle makes.
const ROOM: usize = 4 << 20;
/// Lines about one user's processes may take only this much of [`ROOM`], so that no user crowds out the others.
const ROOM_OF_USER: usize = ROOM / 4;
/// How long the end of the run waits for the log.
const END_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Audit {
    shown: String,
    /// `None` once the thread has taken it. We start the thread only after we've dropped rights, because a thread keeps
    /// the rights that it starts with.
    file: Option<LogFile>,
    orders: Sink<Order>,
    lost: Arc<AtomicU64>,
    /// Complaints about lost lines, from the thread and from us.
    complaints: Receiver<String>,
    complain: Sender<String>,
    /// Whether we lost the last line because too many were waiting.
    is_stalled: bool,
    /// Bytes of the waiting lines about each user's processes.
    waiting: BTreeMap<u32, Arc<AtomicUsize>>,
    /// Lines dropped since we last queued one, because too many about the same user were waiting.
    dropped: u64,
}

/// Work for the thread.
#[derive(Debug)]
enum Order {
    Write(Line),
    /// Open the file again by its name.
    Reopen,
}

#[derive(Debug)]
struct Line {
    text: String,
    /// How many lines are missing before this one.
    missing: u64,
    /// The bytes of all waiting lines about the same user.
    waiting: Arc<AtomicUsize>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.text.len(), Ordering::Relaxed);
    }
}

impl Audit {
    /// Opens or creates the log.
    ///
    /// # Errors
    /// We can't open the file, or other users could write or replace it. The exit code is 2.
    pub fn open(path: &Path) -> Result<Self, Exit> {
        // SIGXFSZ would end the run once the file reaches RLIMIT_FSIZE. With a handler, the write fails instead.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
        let lost = Arc::default();
        let (complain, complaints) = channel();
        let file = LogFile::open(path, Arc::clone(&lost), complain.clone())?;
        Ok(Self {
            shown: shown(path),
            file: Some(file),
            orders: Sink::new(ROOM),
            lost,
            complaints,
            complain,
            is_stalled: false,
            waiting: BTreeMap::new(),
            dropped: 0,
        })
    }

    /// Opens the log again by its name, after the file was renamed. If that fails we keep the old file.
    pub fn reopen(&self) {
        self.orders.put(Order::Reopen, 0);
    }

    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Writes one line, with the time. The first line starts the thread.
    pub fn write(&mut self, entry: &Entry) {
        self.write_at(entry, SystemTime::now());
    }

    fn write_at(&mut self, entry: &Entry, time: SystemTime) {
        if let Some(mut file) = self.file.take() {
            // If the thread can't start, the queue fills up, and then we report that the log takes no more lines.
            let _ = self.orders.start("audit", move |next| file.serve(next));
        }
        let text = line_of(entry, time);
        let bytes = text.len();
        let waiting = self.waiting_of(entry.user());
        if waiting.fetch_add(bytes, Ordering::Relaxed) + bytes > ROOM_OF_USER && entry.user().is_some() {
            waiting.fetch_sub(bytes, Ordering::Relaxed);
            self.dropped += 1;
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let was_stalled = self.is_stalled;
        let line = Line { text, missing: self.dropped, waiting };
        self.is_stalled = !self.orders.put(Order::Write(line), bytes);
        if self.is_stalled {
            self.lost.fetch_add(1, Ordering::Relaxed);
        } else {
            self.dropped = 0;
        }
        if self.is_stalled && !was_stalled {
            let _ = self.complain.send(format!(
                "the audit log {} takes no more lines; check its file system (the run continues without the log)",
                self.shown
            ));
        }
    }

    /// The bytes of waiting lines about a user.
    fn waiting_of(&mut self, user: Option<u32>) -> Arc<AtomicUsize> {
        let Some(user) = user else { return Arc::default() };
        self.waiting.retain(|_, waiting| Arc::strong_count(waiting) > 1);
        Arc::clone(self.waiting.entry(user).or_default())
    }

    /// The complaints about lines lost since the last call.
    pub fn complaints(&mut self) -> Vec<String> {
        self.complaints.try_iter().collect()
    }

    /// Waits until all lines are written, up to [`END_LIMIT`]. Then we count the remaining lines as lost.
    pub fn finish(&mut self) {
        let unwritten = self.orders.flush(END_LIMIT);
        if unwritten > 0 {
            self.lost.fetch_add(unwritten as u64, Ordering::Relaxed);
            let _ = self.complain.send(format!(
                "the audit log {} hangs, and its last {unwritten} lines may be lost; check its file system",
                self.shown
            ));
        }
    }
}

fn line_of(entry: &Entry, time: SystemTime) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        schema: &'static str,
        time: String,
        #[serde(flatten)]
        entry: &'a Entry,
    }
    let line = Line { schema: SCHEMA, time: humantime::format_rfc3339_millis(time).to_string(), entry };
    // Encoding only fails for maps whose keys aren't strings, and we have no such maps.
    visible_json(&serde_json::to_string(&line).unwrap_or_default()) + "\n"
}

#[cfg(test)]
#[path = "audit/tests.rs"]
mod tests;
