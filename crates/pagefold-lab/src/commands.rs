//! The subcommands: flags, checks and output. Their logic is in the library.

pub mod bench;
pub mod generate;
pub mod programs;
pub mod record;
pub mod replay;
pub mod scale;
