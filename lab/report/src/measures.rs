//! The cost of getting somewhere, and the cost of staying there. We keep them apart, so that nothing depends on how
//! long we watched.

use crate::points::SamplerPoint;
use crate::policy::{NO_MERGING, ORACLE, is_ours};
use crate::report::{ExperimentReport, PolicyRun, is_of_later_round};
use pagefold_engine::units::Bytes;
use std::fmt;

/// We measure when a run reaches these shares of the savable memory.
pub const SHARES: [f64; 3] = [0.5, 0.9, 0.99];
const AT_90: usize = 1;
const AT_99: usize = 2;
/// To tell the cost of staying there, we need at least this long afterwards.
const LEAST_SECONDS_AFTER: f64 = 5.0;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measures {
    /// The most memory saved, MiB.
    pub saved_mib: f64,
    /// When a run first saved each share of the savable memory, see [`SHARES`].
    pub seconds_to: [Option<f64>; 3],
    /// CPU seconds of ksmd and pagefold until then.
    pub cpu_to: [Option<f64>; 3],
    /// Per cent of a core after reaching 99 % (or else 90 %).
    pub percent_after: Option<f64>,
    /// MiB saved for each CPU second until 90 %.
    pub mib_per_cpu_second: Option<f64>,
}

impl Measures {
    /// The measures of a policy in a report.
    pub fn in_report(report: &ExperimentReport, policy: &str) -> Option<Self> {
        let run = report.run(policy)?;
        Self::of(run, savable(report, &run.set))
    }

    /// `whole` is the savable memory. `None` if we didn't sample the savings over time, or if they mean nothing.
    pub fn of(run: &PolicyRun, whole: u64) -> Option<Self> {
        // This comes from the targets' page tables, if we read them.
        let most = run.most_saved()?;
        let mut measures = Self { saved_mib: Bytes(most).mib(), ..Self::default() };
        for (place, share) in SHARES.into_iter().enumerate() {
            let enough = share * whole as f64;
            let reached = run.curve.iter().find(|(_, saved)| whole > 0 && *saved as f64 >= enough);
            let Some(&(at, saved)) = reached else { continue };
            let cpu = cpu_at(&run.points, at);
            measures.seconds_to[place] = Some(at);
            measures.cpu_to[place] = cpu;
            if place == AT_90 {
                measures.mib_per_cpu_second = match cpu {
                    Some(cpu) if cpu > 0.0 => Some(Bytes(saved).mib() / cpu),
                    _ => None,
                };
            }
            if place >= AT_90 {
                measures.percent_after = percent_since(&run.points, at, cpu);
            }
        }
        Some(measures)
    }
}

/// Per cent of a core from a time to the end, given the CPU seconds until then.
fn percent_since(points: &[SamplerPoint], at: f64, cpu: Option<f64>) -> Option<f64> {
    let last = points.last()?;
    let seconds = last.seconds - at;
    if seconds < LEAST_SECONDS_AFTER {
        return None;
    }
    Some(100.0 * (last.cpu_seconds() - cpu?) / seconds)
}

/// CPU seconds spent until the first sample at this time or later.
fn cpu_at(points: &[SamplerPoint], at: f64) -> Option<f64> {
    let point = points.iter().find(|point| point.seconds >= at).or(points.last())?;
    Some(point.cpu_seconds())
}

/// The savable memory of a set of programs: the oracle's saving, or else the most that any policy saved.
pub fn savable(report: &ExperimentReport, set: &str) -> u64 {
    let oracles = report.run(&format!("{ORACLE}{set}")).and_then(PolicyRun::most_saved).unwrap_or(0);
    if oracles > 0 {
        return oracles;
    }
    let mut most = 0;
    for run in &report.runs {
        if run.set == set {
            most = most.max(run.most_saved().unwrap_or(0));
        }
    }
    most
}

/// Whether people could use the policy in place of pagefold.
pub fn is_peer(policy: &str) -> bool {
    !is_ours(policy) && ![ORACLE, NO_MERGING].contains(&policy) && !is_of_later_round(policy)
}

pub struct Quantity {
    pub name: &'static str,
    pub of: fn(&Measures) -> Option<f64>,
    pub more_is_better: bool,
    /// Whether a missing value means that the policy hasn't got there.
    pub is_reached: bool,
}

impl Quantity {
    const fn reached(name: &'static str, of: fn(&Measures) -> Option<f64>) -> Self {
        Self { name, of, more_is_better: false, is_reached: true }
    }

    fn in_report(&self, report: &ExperimentReport, policy: &str) -> Option<f64> {
        (self.of)(&Measures::in_report(report, policy)?)
    }
}

/// We compare pagefold with its peers in these quantities.
pub const QUANTITIES: [Quantity; 7] = [
    Quantity { name: "memory saved", of: |measures| Some(measures.saved_mib), more_is_better: true, is_reached: true },
    Quantity::reached("seconds to 50 %", |measures| measures.seconds_to[0]),
    Quantity::reached("seconds to 90 %", |measures| measures.seconds_to[AT_90]),
    Quantity::reached("seconds to 99 %", |measures| measures.seconds_to[AT_99]),
    Quantity::reached("CPU seconds to 90 %", |measures| measures.cpu_to[AT_90]),
    Quantity::reached("CPU seconds to 99 %", |measures| measures.cpu_to[AT_99]),
    Quantity {
        name: "% of a core afterwards",
        of: |measures| measures.percent_after,
        more_is_better: false,
        is_reached: false,
    },
];

/// Merging's side effects: the head of a column, and the value of a run.
pub type Effect = (&'static str, fn(&PolicyRun) -> Option<f64>);

/// We show these if any isn't zero.
pub const EFFECTS: [Effect; 5] = [
    ("merged pages copied", |run| Some(run.events.cow_breaks? as f64)),
    ("MiB taken back by writes", |run| Some(Bytes(run.taken_back_bytes?).mib())),
    ("huge pages split", |run| Some(run.events.split_pages? as f64)),
    ("mappings of huge pages split", |run| Some(run.events.split_mappings? as f64)),
    ("pagefold's peak, MiB", |run| Some(Bytes(run.pagefold_peak_bytes?).mib())),
];

/// The median of some values, and their range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// `None` without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let max = *values.last()?;
        // With an odd number of values, both indices are the same.
        let median = f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median, min: values[0], max })
    }
}

/// The median, or the mean of the middle two; 0 without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    Spread::of(values).map_or(0.0, |spread| spread.median)
}

impl fmt::Display for Spread {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        use crate::charts::number;
        let [median, min, max] = [self.median, self.min, self.max].map(number);
        to.write_str(&median)?;
        if min == max { Ok(()) } else { write!(to, " ({min}..{max})") }
    }
}

/// The ratio of two policies in a quantity, worked out within each repetition.
pub fn ratio(repetitions: &[&ExperimentReport], own: &str, peer: &str, quantity: &Quantity) -> Option<Spread> {
    let mut ratios = Vec::new();
    for report in repetitions {
        let Some(ours) = quantity.in_report(report, own) else { continue };
        let Some(theirs) = quantity.in_report(report, peer) else { continue };
        if theirs > 0.0 {
            ratios.push(ours / theirs);
        }
    }
    Spread::of(ratios)
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact results
mod tests {
    use super::*;

    /// A run that saves `mib` at once after some seconds. It takes a CPU second each second until then and a tenth
    /// after it.
    fn run(policy: &str, mib: u64, after: u32, seconds: u32) -> PolicyRun {
        let points: Vec<SamplerPoint> = (0..=seconds)
            .map(|second| SamplerPoint {
                seconds: second.into(),
                saved_bytes: if second >= after { mib << 20 } else { 0 },
                ksmd_seconds: f64::from(second.min(after)) / 2.0,
                daemon_seconds: f64::from(second.min(after)) / 2.0 + f64::from(second.saturating_sub(after)) / 8.0,
                ..SamplerPoint::default()
            })
            .collect();
        let mut run = PolicyRun { policy: policy.to_owned(), ..PolicyRun::default() };
        run.set_samples(&points);
        run
    }

    #[test]
    fn the_way_and_the_stay_are_apart() {
        let whole = 100 << 20;
        let short = Measures::of(&run("p", 100, 4, 14), whole).unwrap();
        assert_eq!(short.seconds_to, [Some(4.0); 3]);
        assert_eq!(short.cpu_to, [Some(4.0); 3]);
        assert_eq!((short.percent_after, short.mib_per_cpu_second), (Some(12.5), Some(25.0)));
        // A longer run changes nothing.
        assert_eq!(Measures::of(&run("p", 100, 4, 400), whole).unwrap(), short);
        // The run is too short after 99 %, then saves less than 99 %, then less than 90 %.
        assert_eq!(Measures::of(&run("p", 100, 4, 8), whole).unwrap().percent_after, None);
        let most = Measures::of(&run("p", 95, 4, 14), whole).unwrap();
        assert_eq!((most.seconds_to, most.percent_after), ([Some(4.0), Some(4.0), None], Some(12.5)));
        let half = Measures::of(&run("p", 60, 4, 14), whole).unwrap();
        assert_eq!((half.seconds_to, half.percent_after), ([Some(4.0), None, None], None));
        assert_eq!((half.mib_per_cpu_second, half.saved_mib), (None, 60.0));
        assert_eq!(Measures::of(&PolicyRun::default(), whole), None);
    }

    #[test]
    fn the_oracle_says_what_can_be_saved() {
        let mut report = ExperimentReport::new("static-mix", "");
        assert_eq!(savable(&report, ""), 0);
        report.runs = vec![run("pagefold", 90, 1, 2), run("ksm", 110, 1, 2)];
        assert_eq!(savable(&report, ""), 110 << 20);
        report.runs.push(run("oracle", 100, 1, 2));
        assert_eq!(savable(&report, ""), 100 << 20);
        assert_eq!(
            ["pagefold --governor low", "oracle", "no merging", "ksm", "ksm, round 2"].map(is_peer),
            [false, false, false, true, false]
        );
    }

    #[test]
    fn medians_have_a_spread() {
        let spread = |values: &[f64]| Spread::of(values.iter().copied()).map(|spread| spread.to_string());
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[f64::NAN]), None);
        assert_eq!(spread(&[2.0]).unwrap(), "2.00");
        assert_eq!(spread(&[2.0, 2.0001]).unwrap(), "2.00");
        assert_eq!(spread(&[3.0, 1.0, 20.0]).unwrap(), "3.00 (1.00..20.0)");
        assert_eq!(spread(&[4.0, 1.0]).unwrap(), "2.50 (1.00..4.00)");
    }

    #[test]
    fn ratios_are_taken_within_a_repetition() {
        let repetition = |own, peers| {
            let mut report = ExperimentReport::new("static-mix", "");
            report.runs = vec![run("pagefold", 100, own, 30), run("ksm", 100, peers, 30), run("oracle", 100, 1, 2)];
            report
        };
        // In the second repetition the machine is four times slower. In the third KSM is lucky.
        let repetitions = [repetition(2, 4), repetition(8, 16), repetition(4, 2)];
        let all: Vec<&ExperimentReport> = repetitions.iter().collect();
        let found = ratio(&all, "pagefold", "ksm", &QUANTITIES[2]).unwrap();
        assert_eq!(found, Spread { median: 0.5, min: 0.5, max: 2.0 });
        assert_eq!(ratio(&all, "pagefold", "another", &QUANTITIES[2]), None);
    }
}
