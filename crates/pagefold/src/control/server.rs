//! The daemon's end of the control socket.
//!
//! One thread accepts connections, and each connection has its own thread, so a slow, silent or malicious peer delays
//! only itself. Without a connection everything sleeps in `accept`.

use super::protocol::{ONLY_ROOT, REQUEST_MOST, Refusal, Request};
use crate::config::ownership;
use anyhow::{Context, Result, bail};
use pagefold_procmem::os::locked;
use pagefold_procmem::os::peer::{Peer, is_in_group, is_trusted};
use pagefold_procmem::os::sandbox::forbid_files;
use pagefold_text::exit::{self, Exit};
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::debug;

/// The most connections at a time: in all, from all members of the group, and from one member. Beyond that, a new
/// connection replaces the one that has been idle longest.
const CONNECTIONS_MOST: usize = 32;
const MEMBERS_MOST: usize = 24;
const MEMBER_MOST: usize = 4;
/// A request must be complete within this time after the connection was made or the last answer was sent.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// We close the connection if the peer doesn't read its answer for this long.
const TAKE_LIMIT: Duration = Duration::from_secs(5);
/// The pause after `accept` fails, so that we don't loop busily when we're out of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// Answers a user's request with a line (without its newline), or an error. Gets the request and the user's uid.
pub type Answer = dyn Fn(Request, u32) -> Result<String, Exit> + Send + Sync;

#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket's file, to recognise it later.
    file: (u64, u64),
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves at `path`. We replace a socket that nobody listens on. With `supersede` we replace any socket. Members of
    /// the group `readers` may ask for the status, if this process may give the socket to that group.
    ///
    /// # Errors
    /// Another process listens, or we can't create the socket safely.
    pub fn start(path: &Path, supersede: bool, readers: Option<u32>, answer: Arc<Answer>) -> Result<Self> {
        if let (false, Ok(other)) = (supersede, UnixStream::connect(path)) {
            let pid = Peer::of(&other).map(|peer| format!(" (pid {})", peer.pid)).unwrap_or_default();
            bail!("another pagefold{pid} serves {}", path.display());
        }
        secure_parent(path)?;
        // We create the socket under another name and rename it, so that it never has wrong permissions or lacks a
        // listener.
        let beside = path.with_extension(format!("{}", std::process::id()));
        let _ = fs::remove_file(&beside);
        let listener = UnixListener::bind(&beside).with_context(|| format!("cannot create {}", beside.display()))?;
        let readers = readers.filter(|&group| chown(&beside, None, Some(group)).is_ok());
        let permissions = Permissions::from_mode(if readers.is_some() { 0o660 } else { 0o600 });
        let file = match publish(&beside, path, permissions) {
            Ok(file) => file,
            Err(error) => {
                let _ = fs::remove_file(&beside);
                return Err(error).with_context(|| format!("cannot create {}", path.display()));
            }
        };
        let closing = Arc::new(AtomicBool::new(false));
        let mut server = Self { path: path.to_owned(), file, closing: closing.clone(), thread: None };
        let thread = thread::Builder::new().name("control".into());
        server.thread = Some(thread.spawn(move || accept(&listener, &closing, readers, &answer))?);
        Ok(server)
    }
}

/// Gives a socket its permissions and its name. Returns its device and inode.
fn publish(beside: &Path, path: &Path, permissions: Permissions) -> io::Result<(u64, u64)> {
    fs::set_permissions(beside, permissions)?;
    let file = fs::symlink_metadata(beside)?;
    fs::rename(beside, path)?;
    Ok((file.dev(), file.ino()))
}

impl Drop for Server {
    fn drop(&mut self) {
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.file);
        // If another process has replaced or removed the socket, we can't wake the thread. It ends with this process.
        if !is_ours {
            return;
        }
        self.closing.store(true, Ordering::SeqCst);
        let woken = UnixStream::connect(&self.path).is_ok();
        let _ = fs::remove_file(&self.path);
        if let (true, Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Makes sure that only root and this user can replace the socket.
fn secure_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(parent)
        .with_context(|| format!("cannot create {}", parent.display()))?;
    let found = fs::symlink_metadata(parent).with_context(|| format!("cannot examine {}", parent.display()))?;
    if !found.is_dir() || ownership::owned(found.uid(), found.mode()).is_err() {
        bail!("users other than root can write to {}; run chmod go-w on it", parent.display());
    }
    Ok(())
}

/// An open connection, which counts towards the limits.
struct Connection {
    number: u64,
    stream: UnixStream,
    uid: u32,
    is_member: bool,
    /// Since when the peer has sent no request. `None` while we answer one.
    idle_since: Option<Instant>,
}

#[derive(Clone, Default)]
struct Connections(Arc<Mutex<Vec<Connection>>>);

impl Connections {
    /// Adds a connection, unless there are too many already. Members of the group can't use up root's connections, and
    /// no member can use up the other members'.
    fn admit(&self, connection: Connection) -> bool {
        let mut all = locked(&self.0);
        let uid = connection.uid;
        let has_room = if connection.is_member {
            make_room(&mut all, MEMBER_MOST, |other| other.is_member && other.uid == uid)
                && make_room(&mut all, MEMBERS_MOST, |other| other.is_member)
        } else {
            make_room(&mut all, CONNECTIONS_MOST, |_| true)
        };
        if has_room {
            all.push(connection);
        }
        has_room
    }

    fn set_idle(&self, number: u64, idle_since: Option<Instant>) {
        if let Some(connection) = locked(&self.0).iter_mut().find(|connection| connection.number == number) {
            connection.idle_since = idle_since;
        }
    }

    fn remove(&self, number: u64) {
        locked(&self.0).retain(|connection| connection.number != number);
    }
}

/// Makes sure that there are fewer than `most` connections of a kind. If not, closes the one that has been idle
/// longest.
fn make_room(all: &mut Vec<Connection>, most: usize, is_kind: impl Fn(&Connection) -> bool) -> bool {
    let mut number = 0;
    let mut oldest: Option<(usize, Instant)> = None;
    for (at, connection) in all.iter().enumerate() {
        if !is_kind(connection) {
            continue;
        }
        number += 1;
        let Some(idle_since) = connection.idle_since else { continue };
        if oldest.is_none_or(|(_, since)| idle_since < since) {
            oldest = Some((at, idle_since));
        }
    }
    if number < most {
        return true;
    }
    let Some((at, _)) = oldest else { return false };
    // The connection's thread sees the end of the stream, and ends.
    let _ = all.swap_remove(at).stream.shutdown(Shutdown::Both);
    true
}

fn accept(listener: &UnixListener, closing: &AtomicBool, readers: Option<u32>, answer: &Arc<Answer>) {
    let connections = Connections::default();
    for (number, stream) in (0..).zip(listener.incoming()) {
        if closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok(mut stream) = stream else {
            thread::sleep(ACCEPT_AGAIN);
            continue;
        };
        // These time limits are for the connection's own thread. The accepting thread never blocks: refusals fit into
        // the socket's empty buffer.
        let timed = stream.set_read_timeout(Some(REQUEST_LIMIT)).and(stream.set_write_timeout(Some(TAKE_LIMIT)));
        let Ok(peer) = timed.and_then(|()| Peer::of(&stream)) else { continue };
        debug!(target: "control", pid = peer.pid, uid = peer.uid, "a client connects");
        let may_change = is_trusted(peer.uid);
        if !may_change && !readers.is_some_and(|group| is_in_group(&stream, group).unwrap_or(false)) {
            refuse(&mut stream, only_root("requests to the daemon"));
            continue;
        }
        let Ok(other) = stream.try_clone() else { continue };
        let idle_since = Some(Instant::now());
        let connection = Connection { number, stream: other, uid: peer.uid, is_member: !may_change, idle_since };
        if !connections.admit(connection) {
            refuse(&mut stream, failed("too many clients are waiting for answers; try again later".to_owned()));
            continue;
        }
        let answer = answer.clone();
        let places = connections.clone();
        let thread = thread::Builder::new().name("control peer".into()).spawn(move || {
            if !may_change {
                confine();
            }
            // An error only means that the connection has ended.
            let _ = converse(stream, peer.uid, |request| {
                places.set_idle(number, None);
                let answered = answer(request, peer.uid);
                places.set_idle(number, Some(Instant::now()));
                answered
            });
            places.remove(number);
        });
        if thread.is_err() {
            connections.remove(number);
        }
    }
}

/// Keeps this thread from opening files. It serves members of the group, whose only request, status, needs no files.
fn confine() {
    static COMPLAINED: Once = Once::new();
    if let Err(error) = forbid_files() {
        COMPLAINED.call_once(|| {
            complain!(
                "threads for the group pagefold are not confined by Landlock: {error}; use a kernel with lsm=landlock"
            );
        });
    }
}

/// Answers requests until the peer closes the connection, is too slow, or sends a malformed request.
fn converse(mut stream: UnixStream, uid: u32, answer: impl Fn(Request) -> Result<String, Exit>) -> io::Result<()> {
    let mut received = Vec::new();
    loop {
        let answered = match read_line(&mut stream, &mut received)? {
            Line::End => return Ok(()),
            Line::TooLong => Err(failed(format!("the request is longer than {REQUEST_MOST} bytes; send less"))),
            Line::TooSlow => {
                Err(failed(format!("no request came within {} s; connect again", REQUEST_LIMIT.as_secs())))
            }
            Line::Whole(line) => match Request::parse(&line) {
                Ok(request) if request == Request::Status || is_trusted(uid) => answer(request),
                Ok(_) => Err(only_root("this request")),
                Err(why) => Err(failed(why)),
            },
        };
        match answered {
            Ok(mut line) => {
                line.push('\n');
                stream.write_all(line.as_bytes())?;
            }
            Err(why) => {
                refuse(&mut stream, why);
                return Ok(());
            }
        }
    }
}

fn failed(why: String) -> Exit {
    Exit::new(exit::FAILURE, why)
}

fn only_root(what: &str) -> Exit {
    Exit::new(exit::NOT_PERMITTED, format!("{ONLY_ROOT} {what}; run as root (sudo)"))
}

fn refuse(stream: &mut UnixStream, why: Exit) {
    let refusal = Refusal::from(why);
    // The peer may have closed the connection.
    let _ = stream.write_all((serde_json::to_string(&refusal).unwrap_or_default() + "\n").as_bytes());
}

enum Line {
    Whole(Vec<u8>),
    TooLong,
    TooSlow,
    End,
}

/// Reads up to the next newline or the end. The rest stays in `received`.
fn read_line(stream: &mut UnixStream, received: &mut Vec<u8>) -> io::Result<Line> {
    let end = Instant::now() + REQUEST_LIMIT;
    loop {
        if let Some(at) = received.iter().position(|&byte| byte == b'\n') {
            if at >= REQUEST_MOST {
                return Ok(Line::TooLong);
            }
            let rest = received.split_off(at + 1);
            let mut line = std::mem::replace(received, rest);
            line.pop();
            return Ok(Line::Whole(line));
        }
        if received.len() >= REQUEST_MOST {
            return Ok(Line::TooLong);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Line::TooSlow);
        }
        stream.set_read_timeout(Some(left))?;
        let mut buffer = vec![0; REQUEST_MOST];
        match stream.read(&mut buffer) {
            Ok(0) if received.is_empty() => return Ok(Line::End),
            // The last line may lack a newline.
            Ok(0) => return Ok(Line::Whole(std::mem::take(received))),
            Ok(length) => received.extend_from_slice(&buffer[..length]),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock | ErrorKind::TimedOut => return Ok(Line::TooSlow),
                _ => return Err(error),
            },
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
