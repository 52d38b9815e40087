//! The hands of pagefold: everything that touches the machine. The only crate with unsafe code.
//!
//! Looking: [`process`], [`maps`], [`pagemap`], [`memory`], [`scope`], [`exclude`]. Acting on programs: [`inject`],
//! [`unfold`], [`merge_any`]. Acting on KSM: [`ksm`], [`tenure`], [`drive`]. [`live`] puts them together behind the
//! core's one door.

pub mod cpu;
pub mod diagnose;
pub mod domain;
pub mod drive;
pub mod dumpable;
pub mod exclude;
pub mod fault;
#[doc(hidden)]
pub mod fuzzing;
mod hand;
pub mod headroom;
pub mod inject;
pub mod ksm;
pub mod live;
pub mod lock;
pub mod machine;
pub mod maps;
pub mod memory;
pub mod merge_any;
pub mod newcomers;
pub mod numa;
pub mod pagemap;
mod patience;
pub mod peer;
pub mod pressure;
pub mod privileges;
pub mod process;
pub mod regions;
mod sampling;
pub mod scope;
pub mod state_file;
pub mod status;
pub mod targets;
pub mod tenure;
pub mod unfold;
pub mod wake;
