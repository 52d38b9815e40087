//! Writes to standard error: messages of one line, and the progress line.
//!
//! A command writes them itself. A daemon must not: a pipe that nobody reads, a log that doesn't answer or a stopped
//! terminal would block it. So it queues them ([`Sink`]), and once somebody reads again, it says how many were lost.

use crate::escape::printable;
use crate::sink::{Next, Sink};
use std::io::{self, IsTerminal, Write, stderr};
use std::sync::OnceLock;
use std::time::Duration;

const ROOM: usize = 1 << 20;
/// How long we wait, when the program ends, for somebody to read the remaining messages.
const END_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Messages {
    program: &'static str,
    queue: Sink<String>,
}

static MESSAGES: OnceLock<Messages> = OnceLock::new();

/// From now on no message waits for a reader, not even a panic's. Messages are queued until [`start`]: we mustn't start
/// a thread before we've dropped privileges.
pub fn never_wait(program: &'static str) {
    if MESSAGES.set(Messages { program, queue: Sink::new(ROOM) }).is_ok() {
        std::panic::set_hook(Box::new(move |panic| {
            complain(program, &panic.to_string());
            // The process may end with the thread that panics.
            flush();
        }));
    }
}

/// Starts the thread that writes queued messages, if [`never_wait`] was called.
pub fn start() -> io::Result<()> {
    let Some(Messages { program, queue }) = MESSAGES.get() else { return Ok(()) };
    queue.start("messages", move |next| match next {
        Next::Item(text) => print(&text),
        Next::Gap(lost) => print(&format!("{program}: {lost} messages were lost, because nobody read them\n")),
    })
}

/// Waits until the messages are read, at most [`END_LIMIT`].
pub fn flush() {
    if let Some(Messages { queue, .. }) = MESSAGES.get() {
        // If the run was refused early, the thread hasn't been started yet. If we can't start it, there's nothing to
        // wait for.
        if start().is_ok() {
            queue.flush(END_LIMIT);
        }
    }
}

/// Writes a message as one line, whatever it contains.
pub fn complain(program: &str, message: &str) {
    write(format!("{program}: {}\n", printable(message.as_bytes())));
}

/// Writes a line of a daemon's log. `rank` is its prefix for journald. Replaces the progress line on a terminal.
pub fn log(rank: &str, line: &str) {
    let Some(Messages { program, .. }) = MESSAGES.get() else { return };
    let clear = if stderr().is_terminal() { "\r\x1b[K" } else { "" };
    write(format!("{clear}{rank}{program}: {}\n", printable(line.as_bytes())));
}

pub(crate) fn write(text: String) {
    match MESSAGES.get() {
        None => print(&text),
        Some(Messages { queue, .. }) => {
            let bytes = text.len();
            queue.put(text, bytes);
        }
    }
}

/// Writes a text that the next one replaces, like a progress line. Drops it if another message is still waiting.
pub(crate) fn write_if_idle(text: String) {
    if MESSAGES.get().is_none_or(|messages| messages.queue.is_idle()) {
        write(text);
    }
}

/// Ignores errors, because the reader may be gone and nothing depends on the message.
fn print(text: &str) {
    let _ = stderr().write_all(text.as_bytes());
}
