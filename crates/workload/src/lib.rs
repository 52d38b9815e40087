//! Programs with known memory, for pagefold's demonstration, experiments and tests to merge.
//!
//! A *tenant* is a process that holds exactly the memory its [`TenantSpec`] describes and can check every byte of it.
//! [`Tenant`] starts one and talks to it; [`serve`] is the tenant's own side. Both run in the same executable: a
//! program that starts tenants passes [`Tenant::start`] its own path and calls [`serve`] for its subcommand
//! `tenant --spec JSON`.
//!
//! | module | holds |
//! | --- | --- |
//! | [`contents`] | reproducible page contents |
//! | `spec` | the description of a tenant, as JSON, and the counters it reports |
//! | `memory` | memory filled as a segment says |
//! | `activity` | things that a tenant does by itself: rewrite pages, map and unmap memory |
//! | `serve` | the tenant's main loop |
//! | `dialogue` | programs that answer commands line by line |
//! | `tenant` | the handle a program keeps of a tenant it has started |
//! | [`emulator`] | emulated machines |
#![forbid(unsafe_code)]

mod activity;
pub mod contents;
mod dialogue;
pub mod emulator;
mod memory;
mod serve;
mod spec;
mod tenant;

pub use dialogue::{Dialogue, OwnedChild, end_child};
pub use serve::serve;
pub use spec::{Activity, ActivityCounters, Lifetime, Segment, TenantSpec};
pub use tenant::{Tenant, Verdict};
