//! What the command lines of `pagefold` and `pagefold-lab` share.
//!
//! | what | module |
//! | --- | --- |
//! | the table of options: flags, keys, ranges, defaults, help | [`options`] |
//! | flags made from the table | [`flags`]; the selection of processes: [`scope`] |
//! | the configuration file's syntax | [`config_file`] |
//! | what a daemon says beside its messages | [`log`] |
//! | text output, exit codes, errors of one line | the crate pagefold-text |
#![forbid(unsafe_code)]

pub mod config_file;
pub mod flags;
pub mod log;
pub mod options;
#[cfg(test)]
mod reference;
pub mod scope;

pub use pagefold_text::program::{code_of, finish, parse};
pub use pagefold_text::{exit, figures, html, messages, progress, sink, style, table};
