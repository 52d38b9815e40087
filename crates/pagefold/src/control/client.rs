//! Sends requests to the daemon.

use super::protocol::{GROUP, ONLY_ROOT, PATH, Refusal, Request};
use crate::service::is_booted_by_systemd;
use anyhow::Result;
use pagefold_text::exit::{self, Exit};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long we wait for the daemon's answer. The daemon answers between two cycles, and a cycle may read for about 40
/// ms, refresh many processes, or wait for a target that doesn't stop.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

pub fn ask<T: DeserializeOwned>(request: &Request) -> Result<T> {
    Ok(serde_json::from_value(ask_at(Path::new(PATH), request)?)?)
}

/// Sends a request to the socket at `path`, and returns the answer as untyped JSON.
fn ask_at(path: &Path, request: &Request) -> Result<Value> {
    let mut stream = UnixStream::connect(path).map_err(|error| unreachable(&error))?;
    let line = talk(&mut stream, request).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let limit = ANSWER_LIMIT.as_secs();
            Exit::new(exit::FAILURE, format!("the daemon has not answered within {limit} s; try again"))
        }
        _ => {
            Exit::new(exit::FAILURE, format!("the daemon closed the connection ({error}); {}", after_its_end(request)))
        }
    })?;
    let answer: Value = serde_json::from_slice(&line).map_err(|_| {
        Exit::new(exit::FAILURE, "the daemon's answer is malformed; use a pagefold of the same version")
    })?;
    match serde_json::from_value::<Refusal>(answer.clone()) {
        Ok(refusal) => Err(Exit::new(refusal.code, refusal.error).into()),
        Err(_) => Ok(answer),
    }
}

fn talk(stream: &mut UnixStream, request: &Request) -> io::Result<Vec<u8>> {
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    // A daemon that refuses us answers and closes without reading. We want its answer, not our broken-pipe error.
    let sent = stream.write_all(request.line().as_bytes()).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    // A whole line is an answer, even if the connection ended with an error.
    if answer.ends_with(b"\n") {
        return Ok(answer);
    }
    read.and(sent).and(Err(ErrorKind::UnexpectedEof.into()))
}

/// The advice for a user whose daemon ended before it answered.
fn after_its_end(request: &Request) -> &'static str {
    match request {
        Request::Unmerge(_) => {
            "it has ended, and some of the processes may still be merged: run pagefold unmerge again"
        }
        _ => "it may be ending: try again",
    }
}

fn unreachable(error: &io::Error) -> Exit {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            let start = if is_booted_by_systemd() { "systemctl start pagefold" } else { "pagefold run" };
            let line = format!(
                "no pagefold is running; start it with sudo {start}, or see what to enable with sudo pagefold scan"
            );
            Exit::new(exit::NO_DAEMON, line)
        }
        ErrorKind::PermissionDenied => Exit::new(
            exit::NOT_PERMITTED,
            format!("{ONLY_ROOT} requests to the daemon (the group {GROUP} may ask for status); run as root (sudo)"),
        ),
        _ => Exit::new(exit::FAILURE, format!("cannot connect to {PATH}: {error}; see pagefold doctor")),
    }
}
