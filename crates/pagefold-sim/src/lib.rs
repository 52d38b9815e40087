//! A simulated host.
