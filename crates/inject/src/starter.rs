//! The starter, a process that starts the injectors for a daemon. The daemon can't: its seccomp filter forbids it to
//! start programs, and an injector that inherited the filter couldn't suspend its targets' filters.
//!
//! For each injector the daemon sends one end of a socket pair, and the starter replies with the injector's pid. The
//! starter does nothing else, and ends when the daemon and the injectors have ended.

use super::worker::{Connection, confine, wait_briefly};
use pagefold_procmem::os::locked;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// The daemon's end.
#[derive(Debug)]
pub(super) struct Starter {
    socket: Mutex<UnixStream>,
    child: Child,
}

impl Starter {
    /// Starts `command`, which must call [`start_injectors`].
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn();
        // Otherwise `command` would keep the starter's end open in this process.
        command.stdin(Stdio::null());
        Ok(Self { socket: Mutex::new(socket), child: child? })
    }

    /// Makes the starter start an injector.
    pub(super) fn start(&self) -> io::Result<Connection> {
        let (stream, theirs) = UnixStream::pair()?;
        let mut socket = locked(&self.socket);
        let ends = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        message.push(SendAncillaryMessage::ScmRights(&ends));
        sendmsg(&*socket, &[IoSlice::new(&[0])], &mut message, SendFlags::NOSIGNAL)?;
        let mut pid = [0; 4];
        socket.read_exact(&mut pid)?;
        match u32::from_ne_bytes(pid) {
            0 => Err(io::Error::other("its starter can't start another one")),
            pid => Ok(Connection::new(pid, None, stream)),
        }
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        let _ = locked(&self.socket).shutdown(Shutdown::Both);
        wait_briefly(&mut self.child);
    }
}

/// Runs the starter: starts an `injector` on each socket that comes over standard input, and ends with standard input.
pub fn start_injectors(injector: impl Fn() -> Command) -> ! {
    confine();
    let mut injectors: Vec<Child> = Vec::new();
    let _ = serve(injector, &mut injectors);
    // Our parent's RUSAGE_CHILDREN includes an injector's CPU time only if we've waited for the injector.
    for mut injector in injectors {
        let _ = injector.wait();
    }
    std::process::exit(0)
}

fn serve(injector: impl Fn() -> Command, injectors: &mut Vec<Child>) -> io::Result<()> {
    let mut daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    while let Some(stream) = receive(&daemon)? {
        injectors.retain_mut(|injector| matches!(injector.try_wait(), Ok(None)));
        let started = stream.try_clone().and_then(|input| injector().stdin(input).stdout(stream).spawn());
        let pid = started.as_ref().map_or(0, Child::id);
        injectors.extend(started);
        daemon.write_all(&pid.to_ne_bytes())?;
    }
    Ok(())
}

/// Receives the next descriptor over a socket. `None` if the other end is closed.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    for part in message.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = part {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}
