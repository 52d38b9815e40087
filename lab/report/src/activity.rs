//! What tenants did by themselves.

use serde::{Deserialize, Serialize};

/// How far an activity has got.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActivityCounters {
    /// Time since it began, without the time spent answering.
    pub seconds: f64,
    pub pages_written: u64,
    /// The longest delay of a write behind its schedule since the last answer, in microseconds.
    pub latest_us: f64,
    pub writing_seconds: f64,
    /// Short-lived memory that it has unmapped.
    pub lives: Vec<Lifetime>,
    /// Mappings made and removed, in each tenth of a second since the last answer.
    #[serde(default)]
    pub maps: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lifetime {
    /// Pages merged just before the end: present, and mapped elsewhere too.
    pub merged_pages: u64,
    /// Time from mapping to unmapping.
    pub seconds: f64,
}
