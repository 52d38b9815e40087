//! The hands of pagefold: everything that touches the machine. The only crate with unsafe code.

pub mod inject;
pub mod process;
