//! Programs with known memory, which pagefold's experiments and tests merge.
//!
//! A *tenant* is a process that holds exactly the memory that its [`TenantSpec`] describes, and can check every byte of
//! it. [`Tenant`] starts one and talks to it; [`serve`] is the tenant's own side. A program that
//! starts tenants passes to [`Tenant::start`] the path of a program that calls [`serve`] for its subcommand
//! `tenant --spec JSON`, for example its own.
//!
//! | module | holds |
//! | --- | --- |
//! | [`contents`] | reproducible page contents |
//! | `spec` | the description of a tenant, as JSON |
//! | [`memory`] | memory filled as a segment says |
//! | `serve` | the tenant's main loop |
//! | `dialogue` | programs that answer commands line by line |
//! | `tenant` | a program's handle of a tenant that it has started |
//! | [`emulator`] | emulated machines |
#![forbid(unsafe_code)]

pub mod contents;
mod dialogue;
pub mod emulator;
pub mod memory;
mod serve;
mod spec;
mod tenant;

pub use dialogue::{Dialogue, OwnedChild, end_child};
pub use serve::{Activity, serve, serve_with};
pub use spec::{Segment, TenantSpec};
pub use tenant::{Tenant, Verdict};
