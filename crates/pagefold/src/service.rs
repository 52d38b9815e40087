//! Tells a service manager that the run is ready, how it's going, that it's alive, and that it's ending
//! (`sd_notify`(3)). Also adds events with their fields (systemd.journal-fields(7)) to the manager's journal.
//!
//! A message is one datagram to the socket that `NOTIFY_SOCKET` names, or to the journal's socket. The sockets never
//! block: a manager that doesn't read its messages misses some, but can't delay us.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::{Duration, Instant};

/// The socket of the journal's own protocol.
const JOURNAL: &str = "/run/systemd/journal/socket";
/// Messages that other programs cause: we print this many at once, and one more after each interval.
const MESSAGES_MOST: u32 = 100;
const MESSAGE_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two texts for `systemctl status`.
const TEXT_INTERVAL: Duration = Duration::from_secs(10);

/// Whether systemd manages this machine (sd_booted(3)).
pub fn is_booted_by_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// The service manager, if there is one.
#[derive(Debug)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    /// How often we tell the manager that the run is alive: twice within its time limit.
    watchdog: Option<Duration>,
    alive: Instant,
    told: Option<Instant>,
}

impl ServiceManager {
    /// The manager that started this process.
    pub fn of_environment() -> Self {
        let limit_us: u64 = env::var("WATCHDOG_USEC").ok().and_then(|limit| limit.parse().ok()).unwrap_or(0);
        let own_pid = std::process::id().to_string();
        let is_watched = limit_us > 0 && env::var_os("WATCHDOG_PID").is_none_or(|pid| *pid == *own_pid);
        Self {
            socket: env::var_os("NOTIFY_SOCKET").and_then(|name| connect(&name)),
            watchdog: is_watched.then(|| Duration::from_micros(limit_us) / 2),
            alive: Instant::now(),
            told: None,
        }
    }

    /// Reports that the run has begun.
    pub fn ready(&self) {
        self.send("READY=1");
    }

    /// Reports that the run is ending, and now restores KSM's settings.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=restoring KSM's settings");
    }

    /// Reports that the run is alive, and its state (`text`, one line). Call this after each cycle.
    pub fn alive(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if self.watchdog.is_some_and(|interval| now.duration_since(self.alive) >= interval) {
            self.alive = now;
            self.send("WATCHDOG=1");
        }
        if self.socket.is_some() && self.told.is_none_or(|told| now.duration_since(told) >= TEXT_INTERVAL) {
            self.told = Some(now);
            self.send(&format!("STATUS={}", text()));
        }
    }

    fn send(&self, message: &str) {
        if let Some(socket) = &self.socket {
            let _ = socket.send(message.as_bytes());
        }
    }
}

/// The journal that standard error goes to.
#[derive(Debug)]
pub struct Journal {
    socket: UnixDatagram,
}

impl Journal {
    /// The journal, if standard error is connected to one.
    pub fn of_environment() -> Option<Self> {
        if !has_standard_error() {
            return None;
        }
        Some(Self { socket: connect(OsStr::new(JOURNAL))? })
    }

    /// Adds an entry. We send the length with each value, so values may contain anything.
    pub fn add(&self, fields: &[(&str, String)]) {
        let mut entry = Vec::new();
        for (name, value) in fields {
            let length = (value.len() as u64).to_le_bytes();
            entry.extend([name.as_bytes(), b"\n", &length, value.as_bytes(), b"\n"].concat());
        }
        let _ = self.socket.send(&entry);
    }
}

/// Whether standard error goes to the journal. If so, `JOURNAL_STREAM` has the device and inode of that stream.
pub fn has_standard_error() -> bool {
    let Ok(descriptor) = std::io::stderr().as_fd().try_clone_to_owned() else { return false };
    let Ok(stream) = File::from(descriptor).metadata() else { return false };
    env::var("JOURNAL_STREAM").is_ok_and(|named| named == format!("{}:{}", stream.dev(), stream.ino()))
}

/// Limits messages that other programs can cause: a number at once, and then one in each interval.
#[derive(Debug)]
pub struct MessageLimit {
    left: u32,
    since: Instant,
    /// How many messages we've skipped since the last one that we printed.
    pub unprinted: u64,
}

impl MessageLimit {
    pub fn new(now: Instant) -> Self {
        Self { left: MESSAGES_MOST, since: now, unprinted: 0 }
    }

    /// If we may print a message now, returns how many we've skipped since the last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.since).as_secs() / MESSAGE_INTERVAL.as_secs();
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(passed).min(MESSAGES_MOST);
        self.since += MESSAGE_INTERVAL * passed;
        if self.left == 0 {
            self.unprinted += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.unprinted))
    }
}

/// Connects to a socket. A name that begins with `@` means an abstract socket.
fn connect(name: &OsStr) -> Option<UnixDatagram> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(name),
    };
    let socket = UnixDatagram::unbound().ok()?;
    socket.set_nonblocking(true).ok()?;
    socket.connect_addr(&address.ok()?).ok()?;
    Some(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_the_journal_has_one_field_for_each_value_whatever_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let heard = UnixDatagram::bind(&path).unwrap();
        let journal = Journal { socket: connect(path.as_os_str()).unwrap() };
        journal.add(&[("MESSAGE", "a\nPRIORITY=0".to_owned()), ("OBJECT_PID", "p".to_owned())]);
        let mut bytes = [0; 200];
        let length = heard.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"MESSAGE\n\x0c\0\0\0\0\0\0\0a\nPRIORITY=0\nOBJECT_PID\n\x01\0\0\0\0\0\0\0p\n");
    }

    #[test]
    fn messages_that_programs_can_cause_are_limited() {
        let began = Instant::now();
        let mut limit = MessageLimit::new(began);
        assert_eq!((0..300).filter(|_| limit.admit(began).is_some()).count(), 100);
        assert_eq!(limit.admit(began + MESSAGE_INTERVAL), Some(200));
        assert_eq!(limit.admit(began + MESSAGE_INTERVAL), None);
    }

    #[test]
    fn without_a_manager_nothing_is_said() {
        let mut manager = ServiceManager { socket: None, watchdog: None, alive: Instant::now(), told: None };
        manager.ready();
        manager.alive(Instant::now(), || unreachable!());
        manager.stopping();
        assert!(connect(OsStr::new("/nonexistent/socket")).is_none());
    }
}
