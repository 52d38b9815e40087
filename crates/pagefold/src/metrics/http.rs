//! Serves the metrics over HTTP: `GET /metrics`, one request per connection, and nothing else.
//!
//! One thread serves all connections and blocks on none of them. A client may try to keep it busy or to use up memory,
//! so we accept few connections, at a limited rate, and limit each in time and size. If there are too many
//! connections, a new one replaces the oldest, so a client that sends its request immediately always gets an answer.

use pagefold_host::os::sockets::{Ready, wait_for};
use pagefold_procmem::os::sandbox::forbid_files;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const CONNECTIONS_MOST: usize = 16;
/// We close a connection after this time.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
/// The longest request without a body, bytes.
const REQUEST_MOST: usize = 8192;
/// We read at most this many times for one request: a client that sends single bytes would cost too much CPU time.
const PARTS_MOST: u32 = 32;
/// The shortest time between two connections. At this rate, serving takes less than a hundredth of a core.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(20);
/// The pause after a failure, so that we don't loop busily when we're out of descriptors.
const AGAIN: Duration = Duration::from_millis(200);
const PATH: &str = "/metrics";

/// A client, from its connection to the end of the answer.
struct Connection {
    stream: TcpStream,
    ends: Instant,
    received: Vec<u8>,
    parts: u32,
    /// Empty until the request is complete.
    answer: Vec<u8>,
    sent: usize,
}

/// Serves until the process ends. `page` makes the page, or returns an error with advice. Landlock keeps this thread
/// from opening files.
pub fn serve(listeners: &[TcpListener], mut page: impl FnMut() -> Result<Arc<str>, String>) {
    if let Err(error) = forbid_files() {
        complain!("the thread for metrics is not confined by Landlock: {error}; use a kernel with lsm=landlock");
    }
    let mut connections: Vec<Connection> = Vec::new();
    let mut accept_again = Instant::now();
    loop {
        let now = Instant::now();
        connections.retain(|connection| connection.ends > now);
        let may_accept = now >= accept_again;
        let listening = if may_accept { listeners } else { &[] };
        let mut waits: Vec<Ready<'_>> = listening.iter().map(|listener| Ready::Read(listener.as_fd())).collect();
        let mut end = if may_accept { None } else { Some(accept_again) };
        for connection in &connections {
            waits.push(connection.waits_for());
            end = Some(end.map_or(connection.ends, |end| end.min(connection.ends)));
        }
        let ready = wait_for(&waits, end.map(|end| end.saturating_duration_since(now)));
        drop(waits);
        let Ok(ready) = ready else {
            thread::sleep(AGAIN);
            continue;
        };
        let (accepting, going_on) = ready.split_at(listening.len());
        let mut is_ready = going_on.iter();
        connections.retain_mut(|connection| is_ready.next() != Some(&true) || connection.go_on(&mut page));
        for (listener, &is_ready) in listening.iter().zip(accepting) {
            if !is_ready {
                continue;
            }
            accept_again = Instant::now() + ACCEPT_INTERVAL;
            match listener.accept() {
                Ok((stream, _)) => admit(stream, &mut connections, &mut page),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
                Err(_) => accept_again = Instant::now() + AGAIN,
            }
        }
    }
}

/// Answers a new client if its request has arrived already. Otherwise keeps the connection, and closes the oldest
/// one if there are too many.
fn admit(stream: TcpStream, connections: &mut Vec<Connection>, page: &mut impl FnMut() -> Result<Arc<str>, String>) {
    let Some(mut connection) = Connection::of(stream) else { return };
    if !connection.go_on(page) {
        return;
    }
    if connections.len() >= CONNECTIONS_MOST {
        connections.remove(0);
    }
    connections.push(connection);
}

impl Connection {
    fn of(stream: TcpStream) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        let ends = Instant::now() + CONNECTION_LIMIT;
        Some(Self { stream, ends, received: Vec::new(), parts: 0, answer: Vec::new(), sent: 0 })
    }

    fn waits_for(&self) -> Ready<'_> {
        let fd = self.stream.as_fd();
        if self.answer.is_empty() { Ready::Read(fd) } else { Ready::Write(fd) }
    }

    /// Reads or writes as much as possible without waiting. Returns whether there's more to do.
    fn go_on(&mut self, page: &mut impl FnMut() -> Result<Arc<str>, String>) -> bool {
        let ended = self.advance(page);
        ended.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted))
    }

    fn advance(&mut self, page: &mut impl FnMut() -> Result<Arc<str>, String>) -> io::Result<()> {
        while self.answer.is_empty() {
            let mut buffer = [0; REQUEST_MOST];
            let length = self.stream.read(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            self.received.extend_from_slice(&buffer[..length]);
            self.parts += 1;
            if is_complete(&self.received) {
                self.answer = answer(&self.received, page);
            } else if self.received.len() >= REQUEST_MOST || self.parts >= PARTS_MOST {
                self.answer = reply("431 Request Header Fields Too Large", "", "The request is too long.\n", true);
            }
        }
        while self.sent < self.answer.len() {
            match self.stream.write(&self.answer[self.sent..])? {
                0 => return Ok(()),
                length => self.sent += length,
            }
        }
        self.stream.shutdown(Shutdown::Write)
    }
}

/// Whether the request line and its headers have arrived.
fn is_complete(received: &[u8]) -> bool {
    received.windows(4).any(|part| part == b"\r\n\r\n") || received.windows(2).any(|part| part == b"\n\n")
}

fn answer(request: &[u8], page: &mut impl FnMut() -> Result<Arc<str>, String>) -> Vec<u8> {
    let line = request.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = std::str::from_utf8(line).unwrap_or_default().trim_end_matches('\r');
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words[..] else {
        return reply("400 Bad Request", "", "This is not an HTTP request.\n", true);
    };
    let with_body = method != "HEAD";
    if !version.starts_with("HTTP/1.") {
        return reply("400 Bad Request", "", "This is not an HTTP/1 request.\n", with_body);
    }
    if method != "GET" && method != "HEAD" {
        return reply("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "Only GET and HEAD are allowed.\n", with_body);
    }
    if target.split('?').next() != Some(PATH) {
        return reply("404 Not Found", "", "There is only /metrics.\n", with_body);
    }
    match page() {
        Ok(page) => reply("200 OK", "", &page, with_body),
        Err(why) => reply("503 Service Unavailable", "", &format!("{why}\n"), with_body),
    }
}

fn reply(status: &str, headers: &str, body: &str, with_body: bool) -> Vec<u8> {
    let kind = if status.starts_with("200") {
        "text/plain; version=0.0.4; charset=utf-8"
    } else {
        "text/plain; charset=utf-8"
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{headers}Connection: close\r\n\r\n"
    );
    (head + if with_body { body } else { "" }).into_bytes()
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
