//! The daemon's own process: sockets passed to it, waking its main loop, namespaces.

pub mod namespaces;
pub mod sockets;
pub mod wake;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit: we hold three files of each target open, four if we merge its
/// pages on request, and three more for the targets read most recently. The default of 1024 exists for programs that
/// use select(2).
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
