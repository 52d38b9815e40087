//! A simulated host: memory and KSM by the kernel's rules, in virtual time.
//!
//! [`SimHost`] implements [`pagefold_engine::host::Host`], so the engine that runs on a live machine runs on it
//! unchanged. It does no I/O, and the same seed and calls give the same results everywhere. Page contents are numbers
//! instead of bytes, so we can afford a million pages. ksmd's steps and their costs follow Linux's `mm/ksm.c` and
//! measurements (see [`Costs`]).
//!
//! ```
//! use pagefold_engine::host::{Actions, Host, ScanOrder, Span};
//! use pagefold_engine::units::Pages;
//! use pagefold_sim::{Costs, Knobs, SimHost, scenario};
//!
//! let mut sim = SimHost::new(1, Costs::default(), Knobs::default());
//! scenario::pairs(&mut sim, Pages(1_000), Pages(0));
//! let seen = sim.observe().unwrap();
//! let mark = seen.regions.iter().map(|view| Span { region: view.key, first: view.first, pages: view.pages });
//! sim.apply(&Actions { mark: mark.map(Into::into).collect(), ..Actions::default() }).unwrap();
//! for _ in 0..2 {
//!     sim.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() }).unwrap();
//!     sim.wait(1_000_000_000).unwrap();
//! }
//! assert_eq!(sim.saved(), Pages(1_000));
//! ```
//!
//! Either ksmd merges pages, or another scanner of the kernel does ([`Scanner`]), or we merge on request
//! ([`Knobs::mechanism`]).
//!
//! We don't simulate swap, reclaim, running out of memory, khugepaged, locked pages (which ksmd can't merge), and
//! memory contention between ksmd and the processes that it scans.
//!
//! | module | holds |
//! | --- | --- |
//! | `host` | the machine: its events, the calls that pagefold makes, and views for tests |
//! | [`memory`] | pages, regions, frames, marked ranges and memory nodes |
//! | `ksmd` | the kernel's scanner, its trees, its visit of a page; merging on request |
//! | `scanner` | the interface for other scanners, such as UKSM's in the lab |
//! | `workload` | simulated processes, scripts of recorded or invented steps, ready-made scenarios |
//! | `knobs`, `costs` | KSM's and the machine's settings, and the cost of each step |
#![forbid(unsafe_code)]

mod comparisons;
mod content;
mod costs;
mod granularity;
mod host;
mod knobs;
mod ksmd;
pub mod memory;
mod scanner;
mod workload;

pub use comparisons::SearchCounts;
pub use content::content_of_series;
pub use costs::Costs;
pub use granularity::Granularity;
pub use host::SimHost;
pub use knobs::{Alike, Classes, Forest, Knobs};
pub use memory::GroundTruth;
pub use scanner::Scanner;
pub use workload::scenario;
pub use workload::script::{Script, Step};
pub use workload::{Behaviour, Fill, Mapping, Process, Replica, Writes};
