//! The machine and this process: CPU time, memory pressure, capabilities, signals. Nothing here concerns other processes.

pub(crate) mod abandonable;
pub mod cpu;
pub mod fault;
pub mod interrupt;
pub mod peer;
pub mod pressure;
pub mod privileges;
pub mod wake;
