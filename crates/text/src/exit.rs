//! We report a failure in one line on standard error: `pagefold: what failed and why; what to do`.

use std::fmt;

pub const OK: u8 = 0;
/// A failure without a code of its own.
pub const FAILURE: u8 = 1;
/// The command line or a configuration file is invalid.
pub const USAGE: u8 = 2;
/// The kernel denies permission: root or a capability is needed.
pub const NOT_PERMITTED: u8 = 3;
/// The kernel lacks a feature.
pub const NO_KERNEL_SUPPORT: u8 = 4;
/// No process is in scope, or a named one doesn't exist.
pub const NO_SCOPE: u8 = 5;
/// We leave the target alone: it's traced, frozen, ended, a kernel thread, or on the deny list.
pub const REFUSED: u8 = 6;
pub const KSM_TAKEN: u8 = 7;
pub const NO_DAEMON: u8 = 8;

/// `exec` only: the program can't be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// `exec` only: the program doesn't exist.
pub const NOT_FOUND: u8 = 127;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub code: u8,
    /// What failed and why; what to do.
    pub line: String,
}

impl Exit {
    /// An error that ends the program with `code`.
    pub fn new(code: u8, line: impl Into<String>) -> Self {
        Self { code, line: line.into() }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl std::error::Error for Exit {}
