//! What only the daemon needs of this process: sockets that were passed to it, waking its main loop, namespaces.

pub mod namespaces;
pub mod sockets;
pub mod wake;
