//! The hands of pagefold: everything that touches the machine. The only crate with unsafe code.

pub mod inject;
pub mod process;
pub mod cpu;
pub mod ksm;
pub mod lock;
pub mod drive;
pub mod machine;
pub mod state_file;
pub mod tenure;
pub mod dumpable;
pub mod exclude;
pub mod maps;
pub mod memory;
pub mod pagemap;
pub mod scope;
pub mod status;
mod hand;
pub mod diagnose;
