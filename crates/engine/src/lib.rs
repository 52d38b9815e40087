//! pagefold's engine: which memory is worth merging, when, and with what result.
//!
//! Everything here is pure. There is no clock, file, environment or random source: time and seeds are arguments, and
//! processes and regions are opaque keys. A [`host::Host`] (the live machine or the simulated one) observes, reads and
//! acts; this crate plans, judges and accounts. [`engine::cycle`] runs one cycle:
//!
//! ```text
//! observe -> plan -> read -> judge -> apply -> account
//! ```
//!
//! # Where things are
//!
//! | question | module |
//! | --- | --- |
//! | What does the engine see, and what can it order? | [`host`]: snapshots, samples, actions, results |
//! | What do we know about one region? | [`region`]; all regions: [`region::table`] |
//! | What do we read? | [`sampling`]: the ladder of levels, estimates from samples |
//! | What do we mark or unmark? | [`marking`]: dense extents, COW-broken and short-lived regions |
//! | When does ksmd scan? | [`merging`] |
//! | Which pages do we merge with which, where the kernel merges on request? | [`requests`] |
//! | On which node does a merged page live? | [`placement`] |
//! | How much may it cost? | [`governor`]: CPU time; [`limits`]: pages, stops; [`token_bucket`]: work that may wait |
//! | Is there memory for copies of merged pages? | [`reserve`]; below cgroup limits: [`headroom`], [`relief`] |
//! | Which contents have we seen? | [`index`], by [`hash`]; how much of a page we hash: [`strength`] |
//! | What does the next run learn from this one? | [`learned`] |
//! | How much do we save? | [`saving`] |
//! | What have we done and spent? | [`ledger`]; lengths of stops: [`stops`] |
//! | What happens to a region next, and why? | [`decision`] |
//! | Which figures do we show to people? | [`state`] |
//! | How do merging by ksmd and merging on request differ? | `mechanism`; each has a planner in [`engine`] |
//! | What can users set, and in which range? | [`config`], [`range`] |
//!
//! A new governor goes into [`governor`], a new reason to leave a region alone into [`region`], a new figure of
//! `status` into [`state`]. Modules import only from those below them: units, keys and errors first, then [`host`], the
//! governor and the configuration, the index, regions, the modules that decide, and the engine on top.
#![forbid(unsafe_code)]

pub mod config;
pub mod decision;
pub mod engine;
pub mod error;
pub mod governor;
pub mod hash;
pub mod headroom;
mod holdings;
pub mod host;
pub mod index;
pub mod keys;
pub mod learned;
pub mod ledger;
pub mod limits;
pub mod marking;
mod mechanism;
pub mod merging;
mod names;
pub mod permutation;
pub mod placement;
pub mod random;
pub mod range;
pub mod region;
pub mod relief;
pub mod requests;
pub mod reserve;
pub mod sampling;
pub mod saving;
pub mod state;
pub mod stops;
pub mod strength;
pub mod token_bucket;
pub mod units;
