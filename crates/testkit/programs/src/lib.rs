//! Programs that pagefold's tests and experiments start: [`child`] processes, and the [`emulator`] of machines.
#![forbid(unsafe_code)]

pub mod child;
pub mod emulator;
