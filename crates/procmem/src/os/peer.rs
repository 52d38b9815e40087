//! The process at the other end of a Unix socket.

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The process that called connect or listen. It may have passed the socket on since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Pid in our pid namespace; 0 outside of it.
    pub pid: i32,
    pub uid: u32,
}

impl Peer {
    /// Reads `SO_PEERCRED`.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let found = credentials(stream)?;
        Ok(Self { pid: found.pid, uid: found.uid })
    }
}

/// We don't use rustix here: its pids are never 0, but processes outside our pid namespace have pid 0.
fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
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
    if failed == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

/// Whether the process was in this group when it connected: SO_PEERGROUPS and SO_PEERCRED.
pub fn is_in_group(stream: &UnixStream, group: u32) -> io::Result<bool> {
    // A process can have at most this many groups (NGROUPS_MAX).
    let mut groups = vec![0_u32; 65_536];
    let size = groups.len() * size_of::<u32>();
    let mut length = libc::socklen_t::try_from(size).unwrap_or(0);
    // SAFETY: the descriptor is open; the kernel writes at most `length` bytes to `groups`, which are that long.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(usize::try_from(length).unwrap_or(0) / size_of::<u32>());
    Ok(groups.contains(&group) || credentials(stream)?.gid == group)
}

/// The number of a group in /etc/group.
pub fn group_id(name: &str) -> Option<u32> {
    parse_group_id(&std::fs::read_to_string("/etc/group").ok()?, name)
}

fn parse_group_id(groups: &str, name: &str) -> Option<u32> {
    for line in groups.lines() {
        let mut fields = line.split(':');
        if fields.next() == Some(name) {
            return fields.nth(1)?.parse().ok();
        }
    }
    None
}

/// Whether a user may control this process: root, or the user that runs it.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == own_uid()
}

pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = Peer { pid: i32::try_from(std::process::id()).unwrap(), uid: own_uid() };
        assert_eq!(Peer::of(&one).unwrap(), own);
        assert!(is_in_group(&one, rustix::process::getegid().as_raw()).unwrap());
        assert!(!is_in_group(&one, 4_000_000).unwrap());
    }

    #[test]
    fn groups_are_found_by_name() {
        let groups = "root:x:0:\nbroken\npagefold:x:998:anna,ben\n";
        assert_eq!(
            ["root", "pagefold", "broken", "x"].map(|name| parse_group_id(groups, name)),
            [Some(0), Some(998), None, None]
        );
    }
}
