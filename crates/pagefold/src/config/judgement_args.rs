//! The judgement's settings on the command line.

use crate::config::file::{ConfigFile, percent};
use pagefold_core::config::{Config, Preset};
use pagefold_core::error::ConfigError;
use pagefold_core::governor::Governor;
use pagefold_core::units::Permyriad;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// How hard to search, and what is worth folding.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Judgement")]
pub struct JudgementArgs {
    /// How much of a core pagefold and ksmd together may use while there is work: full (95 %), medium (50 %), low (20 %),
    /// quiet (1 %), or auto, which goes from quiet to full as memory gets scarce (usually full)
    #[arg(long, value_name = "NAME")]
    pub governor: Option<Governor>,
    /// Settings for a purpose: default, or sensitive, which folds memory that lives for seconds too
    #[arg(long, value_name = "NAME")]
    pub preset: Option<Preset>,
    /// Use so much of a core at most, instead of the governor's share (0.2 to 100)
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub top_share: Option<Permyriad>,
    /// Time of a global sampling round, instead of the governor's (20ms to 1h)
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub round: Option<Duration>,
    /// Levels of the ladder that regions climb (1 to 8, usually 4)
    #[arg(long, value_name = "N")]
    pub levels: Option<usize>,
    /// Share of duplicates from which a region is promoted (usually 6)
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
    /// These, and where they leave something open what the file says.
    #[must_use]
    pub fn over(&self, file: &ConfigFile) -> Self {
        Self {
            governor: self.governor.or(file.run.governor),
            preset: self.preset.or(file.run.preset),
            top_share: self.top_share.or(file.run.top_share),
            round: self.round.or(file.run.round),
            levels: self.levels.or(file.run.levels),
            duplicate_threshold: self.duplicate_threshold.or(file.judgement.duplicate_threshold),
            cow_threshold: self.cow_threshold.or(file.judgement.cow_threshold),
            lifetime: self.lifetime.or(file.judgement.lifetime),
        }
    }

    /// The settings, with a seed of their own, or why they are refused.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let preset = Config::of_preset(self.preset.unwrap_or_default());
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let config = Config {
            governor: self.governor.unwrap_or(preset.governor),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;

    #[test]
    fn the_command_line_comes_before_the_file() {
        let file = parse(
            "[run]\ngovernor = \"low\"\nlevels = 3\npreset = \"sensitive\"\n[judgement]\ncow-threshold = 70\n",
            "file",
        );
        let args = JudgementArgs { levels: Some(5), ..JudgementArgs::default() };
        let config = args.over(&file.unwrap()).config().unwrap();
        assert_eq!((config.governor, config.levels, config.cow_threshold), (Governor::Low, 5, Permyriad(7_000)));
        assert_eq!(config.lifetime_ns, 0, "of the preset");
        let plain = JudgementArgs::default().config().unwrap();
        assert_eq!(plain, Config { seed: plain.seed, ..Config::default() });
    }
}
