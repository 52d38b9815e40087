//! Text output of the results.

use super::{RaceResult, Scaling, name};
use pagefold_cli::table::Table;
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

fn millions(number: u64) -> String {
    format!("{:.1}", number as f64 / 1e6)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A table whose first `texts` columns are text.
fn table(header: &[&str], texts: usize) -> Table {
    Table::new(header.iter().copied(), |column| column >= texts)
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
        let mut rows = table(
            &[
                "GiB",
                "processes",
                "algorithm",
                "savable GiB",
                "90 % after",
                "CPU until then",
                "CPU a day after",
                "ksmd's part",
                "comparisons, M",
                "saved on average",
                "at the end",
                "index MiB",
                "metadata MiB",
                "granularity",
            ],
            3,
        );
        for growth in &self.growth {
            let reached = growth.reached_seconds;
            let hashes = growth.hash_comparisons;
            let mib = |bytes: u64| {
                if bytes == 0 { "-".to_owned() } else { format!("{:.0}", bytes as f64 / f64::from(1 << 20)) }
            };
            rows.add_row([
                growth.gib.to_string(),
                growth.processes.to_string(),
                name(growth),
                gib(growth.savable_bytes),
                reached.map_or_else(|| "never".to_owned(), time),
                reached.map_or_else(|| "-".to_owned(), |_| time(growth.cpu_until_seconds)),
                growth.cpu_day_seconds.map_or_else(|| time(growth.cpu_seconds), time),
                percent(growth.kernel_cpu_seconds / growth.cpu_seconds.max(1e-9)),
                millions(growth.comparisons)
                    + &if hashes > 0 { format!(" + {} of hashes", millions(hashes)) } else { String::new() },
                percent(growth.saved_mean),
                percent(growth.saved_end),
                mib(growth.index_bytes),
                mib(growth.metadata_bytes),
                growth.granularity.to_string(),
            ]);
        }
        writeln!(f, "{rows}\n")?;
        writeln!(f, "If 90 % is never reached, the CPU time of a day is that of the whole run.\n")
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
        let mut rows = table(&["algorithm", "figure", "page by page", "coarse", "error"], 2);
        for check in &self.granularity {
            for figure in &check.figures {
                let number = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") };
                rows.add_row([
                    check.algorithm.to_string(),
                    figure.name.to_owned(),
                    number(figure.fine),
                    number(figure.coarse),
                    percent(figure.error()),
                ]);
            }
        }
        writeln!(f, "{rows}\n")
    }

    fn forests(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forests.is_empty() {
            return Ok(());
        }
        writeln!(f, "Forests: comparisons of a unique page, and the time of a scan:\n")?;
        let mut rows = table(
            &[
                "stable nodes",
                "trees",
                "stable tree",
                "log2(1 + nodes/trees)",
                "difference",
                "unstable tree",
                "round s",
                "pairs lost",
            ],
            0,
        );
        for point in &self.forests {
            rows.add_row([
                point.nodes.to_string(),
                point.trees.to_string(),
                format!("{:.2}", point.stable),
                format!("{:.2}", point.law),
                format!("{:+.2}", point.deviation()),
                format!("{:.2}", point.unstable),
                format!("{:.2}", point.round_seconds),
                point.lost.to_string(),
            ]);
        }
        writeln!(f, "{rows}\n")?;
        let most = self.forests.iter().map(|point| point.deviation().abs()).fold(0.0, f64::max);
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
    let mut rows = table(
        &[
            "algorithm",
            "out of memory",
            "most in use GiB",
            "1 GiB saved after",
            "half after",
            "saved GiB when the job is complete",
            "in the end",
            "CPU s",
        ],
        1,
    );
    for racer in racers {
        let after = |seconds: Option<f64>| seconds.map_or_else(|| "never".to_owned(), |at| format!("{at:.0} s"));
        rows.add_row([
            racer.name(),
            racer.exhausted_seconds.map_or_else(|| "finished".to_owned(), |at| format!("at {at:.0} s")),
            gib(racer.most_bytes),
            after(racer.first_seconds),
            after(racer.half_seconds),
            gib(racer.saved_bytes),
            gib(racer.saved_end_bytes),
            format!("{:.0}", racer.cpu_seconds),
        ]);
    }
    writeln!(f, "{rows}\n")
}
