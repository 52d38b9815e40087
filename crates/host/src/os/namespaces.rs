//! The namespaces that this process is in.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

/// Enters the cgroup namespace of process 1, if it's another one. In a container that sees the host's processes, we
/// then see their cgroups by the same names as the host does. Without this, the names begin with "/..". Affects only
/// this thread and the ones that it starts.
///
/// # Errors
/// If we don't have root's rights on the host.
pub fn enter_cgroups_of_init() -> io::Result<()> {
    let of_init = "/proc/1/ns/cgroup";
    if fs::read_link(of_init)? == fs::read_link("/proc/thread-self/ns/cgroup")? {
        return Ok(());
    }
    let namespace = File::open(of_init)?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ControlGroup))?)
}
