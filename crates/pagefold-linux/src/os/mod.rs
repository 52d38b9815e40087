//! The machine and this process: CPU time, memory pressure, capabilities, signals, sockets. Nothing here concerns other processes.

pub(crate) mod abandonable;
pub mod cpu;
#[cfg(all(feature = "faults", debug_assertions))]
pub mod fault;
#[cfg(not(all(feature = "faults", debug_assertions)))]
#[path = "no_fault.rs"]
pub mod fault;
pub mod fields;
pub mod interrupt;
pub mod namespaces;
pub mod numa;
pub(crate) mod number_list;
pub mod peer;
pub mod pressure;
pub mod privileges;
pub mod sockets;
pub mod wake;
