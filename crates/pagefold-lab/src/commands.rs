//! The subcommands: flags, checks and output. What they do is in the library.

pub mod bench;
pub mod generate;
pub mod programs;
pub mod record;
pub mod replay;
pub mod scale;
