//! The names of values that we record in one place and judge or compare in another.

use std::fmt;

/// A value that experiments record. Each `{}` in its name stands for the measured thing: a policy, a size, a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    name: &'static str,
    pub unit: &'static str,
}

impl Metric {
    pub const fn new(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit }
    }

    /// The metric's name for these things: they replace each `{}`, or else precede the name.
    pub fn of<const N: usize>(self, what: [&str; N]) -> String {
        Key(self, &what).to_string()
    }
}

impl From<Metric> for String {
    fn from(metric: Metric) -> Self {
        metric.name.to_owned()
    }
}

/// A metric, and the things it was measured of. An empty list stands for any.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a>(pub Metric, pub &'a [&'a str]);

impl Key<'_> {
    /// Whether a recorded value has this name.
    pub fn is(&self, name: &str) -> bool {
        match self.0.name.split_once("{}") {
            Some((before, after)) if self.1.is_empty() => name.starts_with(before) && name.ends_with(after),
            _ => name == self.to_string(),
        }
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Metric { name, .. }, what) = self;
        if !name.contains("{}") {
            what.iter().try_for_each(|what| write!(to, "{what}: "))?;
            return to.write_str(name);
        }
        let mut what = what.iter();
        for (at, part) in name.split("{}").enumerate() {
            if at > 0 {
                to.write_str(what.next().unwrap_or(&"{}"))?;
            }
            to.write_str(part)?;
        }
        Ok(())
    }
}

/// Ratios of pagefold's value to a peer's.
pub const SAVED_VS: Metric = Metric::new("saved_vs_{}", "");
pub const CPU_VS: Metric = Metric::new("cpu_vs_{}", "");
pub const SAVED_PER_CPU_SECOND_VS: Metric = Metric::new("saved_per_cpu_second_vs_{}", "");
pub const SECONDS_TO_90_PERCENT_VS: Metric = Metric::new("seconds_to_90_percent_vs_{}", "");
pub const CPU_KSMD_TO_90_PERCENT_VS: Metric = Metric::new("cpu_ksmd_to_90_percent_vs_{}", "");

/// `{}` is a case: [`WORST_CASE`] or [`BEST_CASE`].
pub const READING_SPEED: Metric = Metric::new("{}: speed of reading when merged, times that before", "times as fast");
pub const WORST_CASE: &str = "worst case";
pub const BEST_CASE: &str = "best case";

pub const FITTING_MEMORY: Metric = Metric::new("MiB of programs that fit", "MiB");
pub const FITTING_OF_LIMIT: Metric = Metric::new("memory of programs that fit, times the limit", "times");

pub const MERGED_AT_END: Metric = Metric::new("default: share merged at the end", "");
pub const SAVED_UNFILTERED: Metric =
    Metric::new("average savings with the filter off relative to KSM at equal CPU (smallest of three)", "times");

/// `{}` is a policy and a lifetime, such as [`KSM_FOR_2_S`].
pub const SHARE_MERGED: Metric = Metric::new("share merged, {}", "");
pub const KSM_FOR_2_S: &str = "ksm-2000/20ms, T = 2 s";
pub const MERGED_AT_BEST: Metric = Metric::new("default: share merged at best", "");
pub const SMALLEST_LIFETIME: Metric = Metric::new("smallest T at which half is merged, sensitive, s", "s");

pub const VMS_SAVED: Metric = Metric::new("saved when all are up relative to KSM's default", "times");
pub const VMS_CPU: Metric = Metric::new("CPU time until then relative to KSM's default", "times");
pub const VMS_SWAPPED: Metric = Metric::new("MiB swapped out until all are up", "MiB");
pub const VMS_SECONDS: Metric = Metric::new("seconds until all are up", "s");
pub const VMS_SECONDS_OF_KSM: Metric = Metric::new("time until all are up relative to KSM", "");
pub const VMS_CPU_OF_KSM: Metric = Metric::new("CPU time until then relative to KSM", "");

pub const MEMORY_OF_UNMERGED: Metric = Metric::new("anonymous memory on average relative to no merging", "");
pub const CPU_MEDIAN_SECOND: Metric =
    Metric::new("CPU of pagefold and ksmd in the median second, per cent of a core", "% of a core");
pub const CPU_BUSIEST_SECOND: Metric =
    Metric::new("CPU of pagefold and ksmd in the busiest second, per cent of a core", "%");

/// `{}` is a form of the hash: [`PAPER32`] or [`LINES`].
pub const HASH_SPEED: Metric = Metric::new("random: speed of {} relative to its full hash", "times");
pub const HASH_SPEED_OF_XXH64: Metric = Metric::new("random: speed of {} relative to full XXH64", "times");
pub const PAPER32: &str = "paper32";
pub const LINES: &str = "lines";

/// `{}` is a time, such as [`WHILE_MERGING`], after the server.
pub const P99_LIMIT: Metric = Metric::new("99th percentile {} relative to undisturbed", "");
/// Each `{}` in turn: a policy, a server, a time, and which of the rounds.
pub const P99_OF_UNDISTURBED: Metric = Metric::new("{} p99{} of undisturbed {}, {}", "");
pub const WHILE_MERGING: &str = "while merging";
pub const AT_REST: &str = "at rest";
pub const MEDIAN: &str = "median";

/// `{}` is the memory watched.
pub const CPU_WATCHING: Metric = Metric::new("CPU of pagefold and ksmd watching {}, per cent of a core", "% of a core");

/// Each `{}` in turn: a governor and a time.
pub const LARGEST_SHARE: Metric = Metric::new("{}: largest share of a core over {} s, per cent", "% of a core");
pub const FULL: &str = "full";
pub const QUIET: &str = "quiet";

/// `{}` is an algorithm of CMD.
pub const CLASS_COMPARISONS: Metric = Metric::new("comparisons, of ksm's, at most, {}", "");
pub const CLASS_SHARING: Metric = Metric::new("sharing on average, of ksm's, at least, {}", "");
pub const CLASS_FUTILE: Metric = Metric::new("points fewer futile comparisons on average, {}", "");
pub const CMD_ADDRESS: &str = "cmd-address";
pub const CMD_PAGECOUNT: &str = "cmd-pagecount";
pub const CMD_SUBPAGE: &str = "cmd-subpage";

/// `{}` is a set of programs.
pub const FAIRNESS_SMALLEST: Metric = Metric::new("smallest fairness of the five programs{} (modelled)", "");
pub const OFF_EVEN_SHARE: Metric =
    Metric::new("pagefold{}: largest deviation of local pages from an even share, percentage points", "points");
pub const OFF_PRIORITY: Metric = Metric::new("priority: largest deviation of local pages, percentage points", "points");

pub const TREES_UNMERGED: Metric = Metric::new("pairs not merged because of trees", "");
pub const TREES_OFF_LAW: Metric = Metric::new("comparisons off log2(1 + X / trees), at most", "");
pub const TREES_COMPARISONS: Metric = Metric::new("comparisons with 1,800 trees, of those with one", "");
pub const TREES_SCAN: Metric = Metric::new("time of a scan with 1,800 trees, of that with one", "");

pub const RACE_LIMIT: Metric = Metric::new("race: s until memory runs out, pagefold", "s");
/// Each `{}` in turn: an algorithm, and the time that stands for never.
pub const RACE: Metric = Metric::new("race: {}, s until memory runs out ({} stands for never)", "s");
pub const RACE_NEVER: &str = "2400";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_what_was_measured() {
        assert_eq!(LARGEST_SHARE.of(["full", "1"]), "full: largest share of a core over 1 s, per cent");
        assert_eq!(VMS_SWAPPED.of(["ksm"]), "ksm: MiB swapped out until all are up");
        assert_eq!(String::from(VMS_SWAPPED), VMS_SWAPPED.of([]));
        let watched = CPU_WATCHING.of(["8.00 GiB"]);
        let is = |of: &[&str]| Key(CPU_WATCHING, of).is(&watched);
        assert_eq!((is(&[]), is(&["8.00 GiB"]), is(&["2.00 GiB"])), (true, true, false));
        assert!(!Key(VMS_SWAPPED, &[]).is(&VMS_SWAPPED.of(["ksm"])));
    }
}
