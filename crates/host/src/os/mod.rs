//! The daemon's own process: sockets passed to it, waking its main loop, namespaces.

pub mod namespaces;
pub mod sockets;
pub mod wake;
