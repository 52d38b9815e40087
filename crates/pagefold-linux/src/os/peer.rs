//! Who is at the other end of a local socket.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The process that connected, or that listens: as it was then, whoever holds the socket by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid in our pid namespace; 0 where it has none there.
    pub pid: i32,
    /// Its effective user.
    pub uid: u32,
}

impl Peer {
    /// Asks the kernel (`SO_PEERCRED`).
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
        // SAFETY: the descriptor is open; the kernel writes at most `length` bytes to `found`, which is that long.
        let failed = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { pid: found.pid, uid: found.uid })
    }
}

/// The user whose rights this process has.
pub fn own_uid() -> u32 {
    // SAFETY: no arguments, no memory, and it cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_is_ourselves() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = Peer { pid: i32::try_from(std::process::id()).unwrap(), uid: own_uid() };
        assert_eq!(Peer::of(&one).unwrap(), own);
    }
}
