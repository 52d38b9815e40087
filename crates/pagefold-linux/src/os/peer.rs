//! The process at the other end of a Unix socket.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The process that connected or listens, as of that time. The socket may have been passed on since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Pid in our pid namespace; 0 if it is outside.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
}

impl Peer {
    /// Reads `SO_PEERCRED`.
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

/// Effective user of this process.
pub fn own_uid() -> u32 {
    // SAFETY: takes no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = Peer { pid: i32::try_from(std::process::id()).unwrap(), uid: own_uid() };
        assert_eq!(Peer::of(&one).unwrap(), own);
    }
}
