//! The judgement's settings on the command line.

use pagefold_core::config::{Config, ConfigError, Preset};
use pagefold_core::governor::Governor;
use pagefold_core::units::Permyriad;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// How hard to search, and what is worth folding.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Judgement")]
pub struct JudgementArgs {
    /// How much of a core pagefold and ksmd together may use while there is work: full (95 %), medium (50 %), low (20 %),
    /// quiet (1 %), or auto, which goes from quiet to full as memory gets scarce
    #[arg(long, value_name = "NAME", default_value = "full")]
    pub governor: Governor,
    /// Settings for a purpose: default, or sensitive, which folds memory that lives for seconds too
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub preset: Preset,
    /// Use so much of a core at most, instead of the governor's share (0.2 to 100)
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub top_share: Option<Permyriad>,
    /// Time of a global sampling round, instead of the governor's (20ms to 1h)
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub round: Option<Duration>,
    /// Levels of the ladder that regions climb (1 to 8, usually 4)
    #[arg(long, value_name = "N")]
    pub levels: Option<usize>,
    /// Share of duplicates from which a region is promoted (usually 10)
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub duplicate_threshold: Option<Permyriad>,
    /// Share of merged pages written again from which a region is left alone (usually 50; 100 switches this off)
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub cow_threshold: Option<Permyriad>,
    /// Age below which a region is left alone (usually 100ms)
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub lifetime: Option<Duration>,
}

impl JudgementArgs {
    /// The settings, with a seed of their own, or why they are refused.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let preset = Config::of_preset(self.preset);
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let config = Config {
            governor: self.governor,
            top_share: self.top_share.or(preset.top_share),
            round_ns: self.round.map(ns).or(preset.round_ns),
            levels: self.levels.unwrap_or(preset.levels),
            duplicate_threshold: self.duplicate_threshold.unwrap_or(preset.duplicate_threshold),
            cow_threshold: self.cow_threshold.unwrap_or(preset.cow_threshold),
            lifetime_ns: self.lifetime.map_or(preset.lifetime_ns, ns),
            seed: seed(),
            ..preset
        };
        config.validated()
    }
}

/// A seed that nobody can foretell.
pub fn seed() -> u64 {
    RandomState::new().hash_one(0)
}

/// Per cent with at most two decimals. Whether it is permitted is the configuration's to say.
fn percent(text: &str) -> Result<Permyriad, String> {
    let number: f64 = text.trim_end_matches('%').parse().map_err(|_| format!("'{text}' is no number of per cent"))?;
    if !(0.0..=1e6).contains(&number) {
        return Err(format!("{text} % is out of range"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let permyriad = (number * 100.0).round() as u32;
    Ok(Permyriad(permyriad))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_cent_are_read_as_they_are_written() {
        assert_eq!(percent("10"), Ok(Permyriad(1_000)));
        assert_eq!(percent("0.2%"), Ok(Permyriad(20)));
        assert_eq!(percent("140"), Ok(Permyriad(14_000)));
        assert!(percent("ten").is_err() && percent("-1").is_err() && percent("nan").is_err());
    }
}
