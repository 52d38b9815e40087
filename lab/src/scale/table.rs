//! Text output of the results.

use super::{ForestPoint, Growth, RaceResult, Racer, Scaling, name};
use crate::columns::table;
use pagefold_engine::units::Bytes;
use std::fmt;

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

/// A time in a readable unit.
fn time(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7_200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3_600.0),
    }
}

fn after(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "never".to_owned(), |at| format!("{at:.0} s"))
}

fn millions(number: u64) -> String {
    format!("{:.1}", number as f64 / 1e6)
}

fn mib(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { format!("{:.0}", Bytes(bytes).mib()) }
}

fn comparisons(growth: &Growth) -> String {
    match growth.hash_comparisons {
        0 => millions(growth.comparisons),
        hashes => format!("{} + {} of hashes", millions(growth.comparisons), millions(hashes)),
    }
}

fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.growth(f)?;
        self.check(f)?;
        self.forests(f)?;
        self.races.iter().try_for_each(|result| show_race(f, result))
    }
}

impl Scaling {
    fn growth(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.growth.first() else { return Ok(()) };
        writeln!(f, "Growing memory, {:.1} h of each size; 90 % of the savable memory:\n", first.hours)?;
        let rows = table(
            3,
            &self.growth,
            &[
                ("GiB", &|growth| growth.gib.to_string()),
                ("processes", &|growth| growth.processes.to_string()),
                ("algorithm", &name),
                ("savable GiB", &|growth| gib(growth.savable_bytes)),
                ("90 % after", &|growth| growth.reached_seconds.map_or_else(|| "never".to_owned(), time)),
                ("CPU until then", &|growth| {
                    growth.reached_seconds.map_or_else(|| "-".to_owned(), |_| time(growth.cpu_until_seconds))
                }),
                ("CPU a day after", &|growth| time(growth.cpu_day_seconds.unwrap_or(growth.cpu_seconds))),
                ("ksmd's part", &|growth| percent(growth.kernel_cpu_seconds / growth.cpu_seconds.max(1e-9))),
                ("comparisons, M", &comparisons),
                ("saved on average", &|growth| percent(growth.saved_mean)),
                ("at the end", &|growth| percent(growth.saved_end)),
                ("index MiB", &|growth| mib(growth.index_bytes)),
                ("metadata MiB", &|growth| mib(growth.metadata_bytes)),
                ("granularity", &|growth| growth.granularity.to_string()),
            ],
        );
        writeln!(f, "{rows}\n")?;
        writeln!(f, "If 90 % is never reached, the CPU time per day is measured over the whole run.\n")
    }

    fn check(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.granularity.first() else { return Ok(()) };
        writeln!(
            f,
            "{} GiB for {:.0} min, simulated page by page and {} pages at a time:\n",
            first.gib,
            first.hours * 60.0,
            first.granularity
        )?;
        let mut figures = Vec::new();
        for check in &self.granularity {
            for figure in &check.figures {
                figures.push((check.algorithm, figure));
            }
        }
        let rows = table(
            2,
            &figures,
            &[
                ("algorithm", &|(algorithm, _)| algorithm.to_string()),
                ("figure", &|(_, figure)| figure.name.to_owned()),
                ("page by page", &|(_, figure)| number(figure.fine)),
                ("coarse", &|(_, figure)| number(figure.coarse)),
                ("error", &|(_, figure)| percent(figure.error())),
            ],
        );
        writeln!(f, "{rows}\n")
    }

    fn forests(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forests.is_empty() {
            return Ok(());
        }
        writeln!(f, "Forests: comparisons of a unique page, and the time of a scan:\n")?;
        let rows = table(
            0,
            &self.forests,
            &[
                ("stable nodes", &|point| point.nodes.to_string()),
                ("trees", &|point| point.trees.to_string()),
                ("stable tree", &|point| format!("{:.2}", point.stable)),
                ("log2(1 + nodes/trees)", &|point| format!("{:.2}", point.law)),
                ("difference", &|point| format!("{:+.2}", point.deviation())),
                ("unstable tree", &|point| format!("{:.2}", point.unstable)),
                ("round s", &|point| format!("{:.2}", point.round_seconds)),
                ("pairs lost", &|point| point.lost.to_string()),
            ],
        );
        writeln!(f, "{rows}\n")?;
        let most = ForestPoint::largest_deviation(&self.forests);
        writeln!(f, "The largest deviation from the law is {most:.2} comparisons.\n")
    }
}

fn show_race(f: &mut fmt::Formatter<'_>, RaceResult { race, racers }: &RaceResult) -> fmt::Result {
    let job = format!("a job that takes {} GiB each {} s", race.step_gib, race.every_seconds);
    writeln!(
        f,
        "The race: {} GiB available, two instances of {} GiB and {job} from {} s to {} s; all costs {} %:\n",
        race.node_gib,
        race.instance_gib,
        race.begins_seconds,
        race.complete_seconds(),
        race.cost_percent
    )?;
    let rows = table(
        1,
        racers,
        &[
            ("algorithm", &Racer::name),
            ("out of memory", &|racer| {
                racer.exhausted_seconds.map_or("finished".to_owned(), |at| format!("at {at:.0} s"))
            }),
            ("most in use GiB", &|racer| gib(racer.most_bytes)),
            ("1 GiB saved after", &|racer| after(racer.first_seconds)),
            ("half after", &|racer| after(racer.half_seconds)),
            ("saved GiB when the job is complete", &|racer| gib(racer.saved_bytes)),
            ("in the end", &|racer| gib(racer.saved_end_bytes)),
            ("CPU s", &|racer| format!("{:.0}", racer.cpu_seconds)),
        ],
    );
    writeln!(f, "{rows}\n")
}
