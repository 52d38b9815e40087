//! The ranges of the settings that users can change.
//!
//! Shares are in parts of ten thousand, times in nanoseconds, rates per second.

use std::ops::RangeInclusive;

/// [`Config::top_share`](crate::config::Config::top_share).
pub const TOP_SHARE: RangeInclusive<u64> = 20..=10_000;
/// [`Config::round_ns`](crate::config::Config::round_ns).
pub const ROUND_NS: RangeInclusive<u64> = 20_000_000..=3_600_000_000_000;
/// [`Config::levels`](crate::config::Config::levels).
pub const LEVELS: RangeInclusive<u64> = 1..=8;
/// Every threshold and density.
pub const THRESHOLD: RangeInclusive<u64> = 1..=10_000;
/// [`Config::lifetime_ns`](crate::config::Config::lifetime_ns).
pub const LIFETIME_NS: RangeInclusive<u64> = 0..=3_600_000_000_000;
/// [`Limits::pages`](crate::limits::Limits::pages) and
/// [`Limits::pages_per_process`](crate::limits::Limits::pages_per_process). Fewer than 64 would leave us nothing to
/// judge by.
pub const PAGES: RangeInclusive<u64> = 64..=100_000_000;
/// [`Limits::stops_per_process`](crate::limits::Limits::stops_per_process).
pub const STOPS_PER_PROCESS: RangeInclusive<u64> = 1..=1_000;
/// [`Limits::stops`](crate::limits::Limits::stops).
pub const STOPS: RangeInclusive<u64> = 1..=10_000;
/// [`Limits::moves`](crate::limits::Limits::moves).
pub const MOVES: RangeInclusive<u64> = 1..=10_000_000;
/// [`Limits::longest_stop_ns`](crate::limits::Limits::longest_stop_ns).
pub const LONGEST_STOP_NS: RangeInclusive<u64> = 100_000..=10_000_000_000;
/// The memory access times of [`Latencies`](crate::placement::policy::Latencies).
pub const LATENCY_NS: RangeInclusive<u64> = 1..=100_000;
