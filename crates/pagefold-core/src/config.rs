//! What can be set, with its permitted range.

use crate::extent::Density;
use crate::units::{Pages, Permyriad};
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use thiserror::Error;

/// How much CPU the search may take, after UKSM section 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Governor {
    /// 95 % of a core, rounds of 2 s.
    #[default]
    Full,
    /// 50 %, 4 s.
    Medium,
    /// 20 %, 8 s.
    Low,
    /// 1 %, 20 s.
    Quiet,
}

impl Governor {
    /// The most of one core that pagefold and ksmd together may use while there is work.
    pub fn top_share(self) -> Permyriad {
        Permyriad(match self {
            Self::Full => 9_500,
            Self::Medium => 5_000,
            Self::Low => 2_000,
            Self::Quiet => 100,
        })
    }

    /// The time of one round of watching, nanoseconds.
    pub fn round_ns(self) -> u64 {
        1_000_000_000
            * match self {
                Self::Full => 2,
                Self::Medium => 4,
                Self::Low => 8,
                Self::Quiet => 20,
            }
    }
}

/// A setting outside its range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// No governor has that name.
    #[error("there is no governor '{0}': choose full, medium, low or quiet")]
    NoGovernor(String),
    /// A number outside its range.
    #[error("{name} is {value}: it must be from {low} to {high}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// What was asked.
        value: u64,
        /// The least permitted.
        low: u64,
        /// The most permitted.
        high: u64,
    },
}

impl FromStr for Governor {
    type Err = ConfigError;
    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "full" => Ok(Self::Full),
            "medium" => Ok(Self::Medium),
            "low" => Ok(Self::Low),
            "quiet" => Ok(Self::Quiet),
            _ => Err(ConfigError::NoGovernor(name.to_owned())),
        }
    }
}

/// The judgement's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How much CPU the search may take.
    pub governor: Governor,
    /// Share of one core that watching takes when nothing is found (UKSM's bottom level).
    pub watch_share: Permyriad,
    /// Estimated duplicate ratio from which a region is read whole (UKSM `V_dup`).
    pub duplicate_threshold: Permyriad,
    /// Share of pages changed between two visits from which a region is left alone (UKSM `V_cow`).
    pub changed_threshold: Permyriad,
    /// Age below which a region is not marked (UKSM `V_life`), nanoseconds.
    pub lifetime_ns: u64,
    /// How dense an extent must be.
    pub density: Density,
    /// Duplicate pages below which a span is not worth a system call in the target.
    pub span_pages_min: Pages,
    /// Spans marked in one process at most: each may split a mapping in three.
    pub spans_per_process: usize,
    /// Pages marked up to which ksmd is kicked, and above which its scan is paced.
    pub kick_pages_max: Pages,
    /// Seed of every permutation and digest.
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            governor: Governor::default(),
            watch_share: Permyriad(10),
            duplicate_threshold: Permyriad(1_000),
            changed_threshold: Permyriad(5_000),
            lifetime_ns: 100_000_000,
            density: Density::default(),
            span_pages_min: Pages(16),
            spans_per_process: 64,
            kick_pages_max: Pages(1 << 20),
            seed: 0,
        }
    }
}

impl Config {
    /// Refuses settings outside their range.
    pub fn validated(self) -> Result<Self, ConfigError> {
        let shares = [
            ("watch-share (parts in 10,000)", self.watch_share, 1, 1_000),
            ("duplicate-threshold (parts in 10,000)", self.duplicate_threshold, 1, 10_000),
            ("changed-threshold (parts in 10,000)", self.changed_threshold, 1, 10_000),
            ("density (parts in 10,000)", self.density.plain, 1, 10_000),
            ("density of huge pages (parts in 10,000)", self.density.huge, 1, 10_000),
        ];
        for (name, share, low, high) in shares {
            check(name, share.0.into(), low, high)?;
        }
        check("lifetime (ns)", self.lifetime_ns, 0, 3_600_000_000_000)?;
        check("spans-per-process", self.spans_per_process as u64, 1, 4_096)?;
        Ok(self)
    }
}

fn check(name: &'static str, value: u64, low: u64, high: u64) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { name, value, low, high }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_outside_their_range_are_refused_with_it() {
        let config = Config { duplicate_threshold: Permyriad(14_000), ..Config::default() };
        let error = config.validated().unwrap_err().to_string();
        assert!(error.contains("14000") && error.contains("from 1 to 10000"), "{error}");
        assert!(Config::default().validated().is_ok());
        assert!("turbo".parse::<Governor>().unwrap_err().to_string().contains("full, medium, low or quiet"));
    }
}
