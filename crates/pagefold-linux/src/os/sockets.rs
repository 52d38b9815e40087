//! Listening sockets that a service manager passes on (sd_listen_fds(3)), and waiting for several sockets at once.

use std::env;
use std::io::{self, Error, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first descriptor that is passed on.
const FIRST: RawFd = 3;
/// More than this are not passed on by mistake.
const SOCKETS_MOST: RawFd = 16;

/// The sockets that were passed to this process. The first call has them; none are left for later ones. Call it before
/// anything opens a file.
///
/// # Errors
/// A descriptor that was passed is not a listening TCP socket.
pub fn take_passed() -> io::Result<Vec<TcpListener>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let for_this_process = number("LISTEN_PID") == Some(std::process::id());
    if !for_this_process || TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    let passed = RawFd::try_from(number("LISTEN_FDS").unwrap_or(0)).unwrap_or(RawFd::MAX);
    if passed > SOCKETS_MOST {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{passed} descriptors were passed")));
    }
    (FIRST..FIRST + passed).map(take).collect()
}

fn take(fd: RawFd) -> io::Result<TcpListener> {
    let wrong = || Error::new(ErrorKind::InvalidInput, format!("descriptor {fd} is not a listening TCP socket"));
    let is = |option, values: &[i32]| option_of(fd, option).is_ok_and(|value| values.contains(&value));
    let listens = is(libc::SO_DOMAIN, &[libc::AF_INET, libc::AF_INET6])
        && is(libc::SO_TYPE, &[libc::SOCK_STREAM])
        && is(libc::SO_PROTOCOL, &[libc::IPPROTO_TCP])
        && is(libc::SO_ACCEPTCONN, &[1]);
    if !listens {
        return Err(wrong());
    }
    // Programs that are started must not have it.
    // SAFETY: no memory is passed.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and belongs to nothing else in this process: it was passed by the service manager, and is
    // taken once.
    Ok(unsafe { TcpListener::from_raw_fd(fd) })
}

fn option_of(fd: RawFd, option: i32) -> io::Result<i32> {
    let mut value = 0_i32;
    let mut length = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes to `value`, which is that long; a bad descriptor is an error.
    let failed =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut value).cast(), &raw mut length) } != 0;
    if failed { Err(Error::last_os_error()) } else { Ok(value) }
}

/// What to wait for on a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Ready<'fd> {
    /// Something to read or to accept, or the end.
    Read(BorrowedFd<'fd>),
    /// Room to write.
    Write(BorrowedFd<'fd>),
}

/// Waits until one of these is ready or has failed, for at most `limit` (no limit: `None`). Returns which are; none after a
/// signal, too.
pub fn wait_for(of: &[Ready<'_>], limit: Option<Duration>) -> io::Result<Vec<bool>> {
    let one = |ready: &Ready<'_>| match ready {
        Ready::Read(fd) => libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 },
        Ready::Write(fd) => libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 },
    };
    let mut polled: Vec<libc::pollfd> = of.iter().map(one).collect();
    // Rounded up, so that a time that has not passed yet is not asked for again and again.
    let ms = limit.map_or(-1, |limit| i32::try_from(limit.as_micros().div_ceil(1_000)).unwrap_or(i32::MAX));
    let number = libc::nfds_t::try_from(polled.len()).unwrap_or(0);
    // SAFETY: the descriptors are open, and the array has `number` entries.
    if unsafe { libc::poll(polled.as_mut_ptr(), number, ms) } < 0 {
        let error = Error::last_os_error();
        return if error.kind() == ErrorKind::Interrupted { Ok(vec![false; of.len()]) } else { Err(error) };
    }
    Ok(polled.iter().map(|polled| polled.revents != 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::{AsFd, IntoRawFd};
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
        // None were passed to this process.
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
