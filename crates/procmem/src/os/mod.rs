//! The machine and our own process: CPU time, memory pressure, capabilities. No other processes.

pub mod abandonable;
pub mod arc;
pub mod cpu;
#[cfg(all(feature = "faults", debug_assertions))]
pub mod fault;
#[cfg(not(all(feature = "faults", debug_assertions)))]
#[path = "no_fault.rs"]
pub mod fault;
pub mod fields;
pub mod numa;
pub mod number_list;
pub mod peer;
pub mod pressure;
pub mod privileges;
pub mod sandbox;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex even if another thread has panicked while it held it. The mutex must guard plain values, which are
/// valid at any moment.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
