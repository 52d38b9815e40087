//! Text for people and browsers, safe whatever names it contains. This crate knows nothing of pagefold or of other
//! processes.
//!
//! | text | module |
//! | --- | --- |
//! | names that others have chosen, made safe to print | [`escape`] |
//! | sizes, shares, times, counts; wrapped text | [`style`], [`figures`] |
//! | tables, colour, progress | [`table`], [`style`], [`progress`] |
//! | standard error that never delays a daemon; queues for readers that may stop reading | [`messages`], [`sink`] |
//! | web pages: building, escaping and writing them | [`html`] |
//! | opening a file that's really a regular file | [`regular`] |
//! | exit codes, and errors of one line; parsing a command line; misspelt names | [`exit`], `program`, `usage`, `misspelt` |
#![forbid(unsafe_code)]

pub mod escape;
pub mod exit;
pub mod figures;
pub mod html;
pub mod messages;
#[cfg(feature = "program")]
pub mod misspelt;
#[cfg(feature = "program")]
pub mod program;
pub mod progress;
pub mod regular;
pub mod sink;
pub mod style;
pub mod table;
#[cfg(feature = "program")]
pub mod usage;
