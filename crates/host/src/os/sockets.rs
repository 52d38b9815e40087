//! Listening sockets that a service manager passes on (sd_listen_fds(3)), and waiting for several sockets at once.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_protocol, socket_type};
use rustix::net::{AddressFamily, SocketType, ipproto};
use std::env;
use std::io::{self, Error, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first passed descriptor.
const FIRST: RawFd = 3;
/// We take at most this many. If there are more, somebody has made a mistake.
const SOCKETS_MOST: RawFd = 16;

/// The sockets passed to this process. The first call takes them and leaves none for later calls. Call it before
/// anything opens a file.
///
/// # Errors
/// If too many descriptors were passed, or one isn't a listening TCP socket.
pub fn take_passed() -> io::Result<Vec<TcpListener>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let for_this_process = number("LISTEN_PID") == Some(std::process::id());
    if !for_this_process || TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    let passed = RawFd::try_from(number("LISTEN_FDS").unwrap_or(0)).unwrap_or(RawFd::MAX);
    if passed > SOCKETS_MOST {
        return Err(Error::new(ErrorKind::InvalidInput, format!("too many descriptors were passed: {passed}")));
    }
    (FIRST..FIRST + passed).map(take).collect()
}

fn take(fd: RawFd) -> io::Result<TcpListener> {
    // SAFETY: we borrow the descriptor for a few calls that fail if it isn't open, and nobody closes it during them.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    if !listens(passed).unwrap_or(false) {
        let wrong = format!("descriptor {fd} is not a listening TCP socket");
        return Err(Error::new(ErrorKind::InvalidInput, wrong));
    }
    // Programs that we start must not inherit the socket.
    fcntl_setfd(passed, FdFlags::CLOEXEC)?;
    // SAFETY: the descriptor is open, and belongs to nothing else in this process: the service manager passed it, and
    // we take it once.
    Ok(unsafe { TcpListener::from_raw_fd(fd) })
}

/// Whether the descriptor is a listening TCP socket.
fn listens(fd: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    Ok(matches!(socket_domain(fd)?, AddressFamily::INET | AddressFamily::INET6)
        && socket_type(fd)? == SocketType::STREAM
        && socket_protocol(fd)? == Some(ipproto::TCP)
        && socket_acceptconn(fd)?)
}

/// The event to wait for on a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Ready<'fd> {
    /// Something to read or to accept, or the end.
    Read(BorrowedFd<'fd>),
    /// Room to write.
    Write(BorrowedFd<'fd>),
}

/// Waits until one of these is ready or has failed, for at most `limit` (`None`: for ever). Returns which ones are
/// ready. That may be none, because a signal ends the wait.
pub fn wait_for(of: &[Ready<'_>], limit: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> = of
        .iter()
        .map(|ready| match *ready {
            Ready::Read(fd) => PollFd::from_borrowed_fd(fd, PollFlags::IN),
            Ready::Write(fd) => PollFd::from_borrowed_fd(fd, PollFlags::OUT),
        })
        .collect();
    let limit = limit.map(Timespec::try_from).transpose().map_err(Error::other)?;
    match poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(polled.iter().map(|polled| !polled.revents().is_empty()).collect()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    #[test]
    fn only_listening_tcp_sockets_are_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(take(listener.into_raw_fd()).unwrap().local_addr().unwrap(), address);
        let (one, _other) = UnixStream::pair().unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let file = File::open("/dev/null").unwrap();
        for fd in [one.as_raw_fd(), udp.as_raw_fd(), file.as_raw_fd(), 1 << 20] {
            let error = take(fd).unwrap_err();
            assert!(error.to_string().contains("is not a listening TCP socket"), "{error}");
        }
        // No sockets were passed to this process.
        assert!(take_passed().unwrap().is_empty());
    }

    #[test]
    fn waiting_ends_when_something_is_ready_or_the_time_has_passed() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let before = Instant::now();
        assert_eq!(wait_for(&[Ready::Read(other.as_fd())], Some(Duration::from_millis(20))).unwrap(), [false]);
        assert!(before.elapsed() >= Duration::from_millis(20));
        one.write_all(b"x").unwrap();
        let both = [Ready::Read(other.as_fd()), Ready::Write(other.as_fd()), Ready::Read(one.as_fd())];
        assert_eq!(wait_for(&both, None).unwrap(), [true, true, false]);
    }
}
