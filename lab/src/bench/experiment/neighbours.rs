//! How the programs beside a policy fare on the cores that ksmd and pagefold use too, during merging and afterwards:
//! the latencies of a redis and a MariaDB server under fixed open loads, and the speeds of a compression and a
//! compilation. We merge the servers' memory too, so their own writes to merged pages count.

use super::{Experiment, ExperimentSetting, PolicySequence, mib, shuffled, sort_runs};
use crate::bench::latencies::{Histogram, Latencies};
use crate::bench::load::{Done, Latencies as Measured, OpenLoop, Repeated, percentile};
use crate::bench::measures::{Spread, median};
use crate::bench::metric::{self, AT_REST, WHILE_MERGING};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmAdvisor, KsmPaced, NO_MERGING, NoMerging, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun, in_round};
use crate::programs::{MariaDb, MariaDbData, Redis, RedisData, Target, need, scratch};
use anyhow::Context;
use pagefold_engine::units::Bytes;
use pagefold_workload::Segment;
use pagefold_workload::contents::printable;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const EXPERIMENT: Experiment = Experiment {
    name: "neighbours",
    claim: "ours: the 99th percentile of each server's latencies is at most 1.10 of undisturbed while memory is merged beside it, and at \
            most 1.01 at rest (KSM: 1.6 to 5.8 times, Para-ksm, ATC 2025)",
    run,
};

const INSTANCES: usize = 3;
/// Compression and compilation run in the background, as jobs beside servers do. At the servers' priority they alone
/// would decide how long the slowest requests take.
const NICENESS: [&str; 2] = ["-n", "10"];
/// We compress this much text each time.
const TEXT_BYTES: usize = 2 << 20;
/// The seed for the order of policies in each round, unless the user asks for another.
const SEED: u64 = 15;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    rounds: u64,
    keys: u64,
    mebibytes: u64,
    /// Requests a second to redis.
    rate: u64,
    rows: u64,
    /// Queries a second to MariaDB.
    queries: u64,
    /// Time for merging, time until nothing is left to merge, and time at rest, seconds.
    merging: u64,
    settling: u64,
    resting: u64,
    /// Functions of the program that we compile several times in each window.
    functions: u32,
}

impl Sizes {
    fn of(quick: bool) -> Self {
        if quick {
            Self {
                rounds: 1,
                keys: 5_000,
                mebibytes: 16,
                rate: 1_000,
                rows: 2_000,
                queries: 200,
                merging: 3,
                settling: 1,
                resting: 2,
                functions: 20,
            }
        } else {
            Self {
                rounds: 3,
                keys: 50_000,
                mebibytes: 256,
                rate: 3_000,
                rows: 50_000,
                queries: 500,
                merging: 10,
                settling: 10,
                resting: 15,
                functions: 200,
            }
        }
    }
}

/// One of the two windows in which we measure the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Window {
    Merging,
    Rest,
}

impl Window {
    const ALL: [(Self, &'static str); 2] = [(Self::Merging, WHILE_MERGING), (Self::Rest, AT_REST)];

    /// Start and end, since the run began.
    fn within(self, sizes: &Sizes) -> (Duration, Duration) {
        let (from, seconds) = match self {
            Self::Merging => (0, sizes.merging),
            Self::Rest => (sizes.merging + sizes.settling, sizes.resting),
        };
        (Duration::from_secs(from), Duration::from_secs(from + seconds))
    }
}

/// The servers under load.
const SERVERS: [&str; 2] = ["redis", "mariadb"];

/// How the programs fared in one window.
#[derive(Clone, Copy, Debug)]
struct Felt {
    /// Of each server.
    servers: [Tail; SERVERS.len()],
    /// MiB a second.
    compression: f64,
    /// Compilations a second.
    compilations: f64,
    /// Merged pages that programs wrote and so copied, if the kernel counts them.
    copied: Option<f64>,
}

/// Percentiles of latencies, microseconds.
#[derive(Clone, Copy, Debug)]
struct Tail {
    p50: f64,
    p99: f64,
    p999: f64,
}

/// The load of a run.
struct Load {
    servers: [OpenLoop; SERVERS.len()],
    compression: Repeated,
    compilation: Repeated,
}

/// The results of a run.
struct Finished {
    servers: [Measured; SERVERS.len()],
    compressed: Done,
    compiled: Done,
}

impl Load {
    fn finish(self) -> anyhow::Result<Finished> {
        let [redis, mariadb] = self.servers;
        let (compressed, compiled) = (self.compression.finish()?, self.compilation.finish()?);
        Ok(Finished { servers: [redis.finish()?, mariadb.finish()?], compressed, compiled })
    }
}

/// We start each run's programs from these.
struct Images {
    redis: RedisData,
    mariadb: MariaDbData,
    gzip: PathBuf,
    gcc: PathBuf,
    nice: PathBuf,
    /// The input of the compression and of the compilation.
    text: PathBuf,
    program: PathBuf,
    /// Removed last.
    scratch: TempDir,
}

impl Images {
    fn make(sizes: &Sizes) -> anyhow::Result<Self> {
        let (gzip, gcc, nice) = (need("gzip", "gzip")?, need("gcc", "gcc")?, need("nice", "coreutils")?);
        let scratch = scratch()?;
        let redis = RedisData::make(scratch.path(), sizes.keys)?;
        let mariadb = MariaDbData::make(scratch.path(), sizes.rows)?;
        let (text, program) = (scratch.path().join("text"), scratch.path().join("program.c"));
        fs::write(&text, printable(SEED, 0, TEXT_BYTES))?;
        fs::write(&program, source(sizes.functions))?;
        Ok(Self { redis, mariadb, gzip, gcc, nice, text, program, scratch })
    }

    /// Starts the programs to merge, and the load once the servers under it are up.
    fn start(&self, setting: &ExperimentSetting<'_>, sizes: &Sizes) -> anyhow::Result<(Vec<Box<dyn Target>>, Load)> {
        let scratch = self.scratch.path();
        let database = self.mariadb.start(scratch, 0)?;
        let first = self.redis.start(scratch, 0)?;
        let load = self.load(&first, &database, sizes)?;
        let mut targets: Vec<Box<dyn Target>> = vec![Box::new(first)];
        for instance in 1..INSTANCES {
            targets.push(Box::new(self.redis.start(scratch, instance)?));
        }
        targets.push(Box::new(database));
        let pages = mib(sizes.mebibytes).0;
        targets.push(setting.tenant(Segment::Same { pages, seed: 1 })?);
        targets.push(setting.tenant(Segment::Random { pages, seed: 2 })?);
        Ok((targets, load))
    }

    fn load(&self, redis: &Redis, mariadb: &MariaDb, sizes: &Sizes) -> anyhow::Result<Load> {
        let every = |rate| Duration::from_nanos(1_000_000_000 / rate);
        let in_background =
            |command: &[&OsStr]| Repeated::start(&self.nice, &[&NICENESS.map(OsStr::new), command].concat());
        let compress = [self.gzip.as_os_str(), "-6".as_ref(), "-c".as_ref(), self.text.as_os_str()];
        let compile = [
            self.gcc.as_os_str(),
            "-O1".as_ref(),
            "-c".as_ref(),
            "-o".as_ref(),
            "/dev/null".as_ref(),
            self.program.as_os_str(),
        ];
        Ok(Load {
            servers: [redis.load(every(sizes.rate), sizes.keys)?, mariadb.load(every(sizes.queries))?],
            compression: in_background(&compress),
            compilation: in_background(&compile),
        })
    }
}

/// A C program with this many functions.
fn source(functions: u32) -> String {
    let function = |number| {
        format!(
            "int f{number}(int n) {{ int s = {number}; for (int i = 0; i < n; i++) s = s * 31 + (i ^ {number}) % 7; return s; }}\n"
        )
    };
    (0..functions).map(function).collect()
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting.quick);
    report.parameters([
        ("rounds", sizes.rounds),
        ("redis_keys", sizes.keys),
        ("same_mib", sizes.mebibytes),
        ("random_mib", sizes.mebibytes),
        ("redis_requests_per_second", sizes.rate),
        ("mariadb_rows", sizes.rows),
        ("mariadb_queries_per_second", sizes.queries),
        ("seconds_while_merging", sizes.merging),
        ("seconds_at_rest", sizes.resting),
        ("seed", SEED),
    ]);
    let images = Images::make(&sizes)?;

    let seconds = sizes.merging + sizes.settling + sizes.resting;
    let mut policies: Vec<Box<dyn Policy>> = vec![
        Box::new(Pagefold::new(seconds)),
        Box::new(NoMerging { seconds }),
        Box::new(KsmPaced { pages: KSM_PAGES, seconds }),
    ];
    if !setting.quick {
        policies.push(Box::new(Pagefold::new(seconds).with(&["--governor", "quiet"])));
        policies.push(Box::new(Pagefold::new(seconds).with(&["--governor", "auto"])));
        policies.push(Box::new(KsmAdvisor { at_cap: false, seconds }));
    }
    setting.add_further_peers(&mut policies, seconds);
    let mut sequence = PolicySequence::take(setting)?;
    let mut latencies = Vec::new();
    let mut felt: BTreeMap<(String, Window), Vec<Felt>> = BTreeMap::new();
    let mut ratios: Ratios = BTreeMap::new();
    for round in 0..sizes.rounds {
        let order = setting.order.unwrap_or(SEED).wrapping_add(round);
        let mut measured: BTreeMap<(String, Window), Felt> = BTreeMap::new();
        for policy in shuffled(&policies, Some(order)) {
            let mut load = None;
            let run = sequence.run(report, &**policy, || {
                let (targets, started) = images.start(setting, &sizes)?;
                load = Some(started);
                Ok(targets)
            })?;
            // The servers have ended, and so have the requests.
            let Some(load) = load else { continue };
            let finished = load.finish()?;
            let Some(run) = run else { continue };
            // Compressions that end meanwhile aren't pagefold's.
            let points = std::mem::take(&mut run.points);
            run.set_own_samples(&points);
            let name = run.policy.clone();
            let began = run.began.context("the run has not begun")?;
            run.policy = in_round(&name, round + 1);
            for (window, words) in Window::ALL {
                let (from, to) = window.within(&sizes);
                let span = (began + from, began + to);
                let felt = felt_in(span, (from, to), run, &finished)
                    .with_context(|| format!("{name}: nothing was measured {words}"))?;
                measured.insert((name.clone(), window), felt);
                latencies.extend(SERVERS.iter().zip(&finished.servers).map(|(server, measured)| Latencies {
                    policy: run.policy.clone(),
                    server: (*server).to_owned(),
                    when: words.to_owned(),
                    histogram: Histogram::of(measured.between(span.0, span.1)),
                }));
            }
        }
        for ((name, window), one) in measured.clone() {
            if let Some(base) = measured.get(&(NO_MERGING.to_owned(), window)).filter(|_| name != NO_MERGING) {
                for (at, server) in SERVERS.into_iter().enumerate() {
                    let ratio = one.servers[at].p99 / base.servers[at].p99;
                    ratios.entry((name.clone(), window, server)).or_default().push(ratio);
                }
            }
            felt.entry((name, window)).or_default().push(one);
        }
    }
    report.latencies = latencies;
    // By round, and in the order above within a round.
    let names: Vec<String> = (1..=sizes.rounds)
        .flat_map(|round| policies.iter().map(move |policy| in_round(&policy.name(), round)))
        .collect();
    sort_runs(report, &names);
    put_figures(report, &felt, &ratios);
    if !setting.quick {
        put_bars(report, &ratios);
    }
    Ok(())
}

fn felt_in(
    (from, to): (Instant, Instant),
    within: (Duration, Duration),
    run: &PolicyRun,
    finished: &Finished,
) -> Option<Felt> {
    let tail = |measured: &Measured| {
        let ascending = measured.between(from, to);
        let micros = |share| percentile(&ascending, share).map(|latency| latency.as_secs_f64() * 1e6);
        Some(Tail { p50: micros(0.5)?, p99: micros(0.99)?, p999: micros(0.999)? })
    };
    let [redis, mariadb] = &finished.servers;
    let copied_by = |time: Duration| {
        let point = run.points.iter().rev().find(|point| point.seconds <= time.as_secs_f64()).or(run.points.first())?;
        point.events.cow_breaks
    };
    let copied = || Some(copied_by(within.1)?.saturating_sub(copied_by(within.0)?) as f64);
    Some(Felt {
        servers: [tail(redis)?, tail(mariadb)?],
        compression: finished.compressed.per_second(from, to)? * Bytes(TEXT_BYTES as u64).mib(),
        compilations: finished.compiled.per_second(from, to)?,
        copied: copied(),
    })
}

/// p99 of undisturbed in each round, by policy, window and server.
type Ratios = BTreeMap<(String, Window, &'static str), Vec<f64>>;

/// Redis was the first server here, so its figures don't name one.
fn of_server(server: &str) -> String {
    if server == SERVERS[0] { String::new() } else { format!(" of {server}") }
}

fn put_figures(report: &mut ExperimentReport, felt: &BTreeMap<(String, Window), Vec<Felt>>, ratios: &Ratios) {
    for (window, words) in Window::ALL {
        let mut rows = [const { Vec::new() }; SERVERS.len()];
        for ((name, _), all) in felt.iter().filter(|((_, which), _)| *which == window) {
            let middle = |value: &dyn Fn(&Felt) -> f64| median(all.iter().map(value));
            for (at, server) in SERVERS.into_iter().enumerate() {
                let name = format!("{name}{}", of_server(server));
                report.figure(format!("{name} p50 us {words}"), middle(&|felt| felt.servers[at].p50));
                report.figure(format!("{name} p99 us {words}"), middle(&|felt| felt.servers[at].p99));
                report.figure(format!("{name} p99.9 us {words}"), middle(&|felt| felt.servers[at].p999));
                rows[at].push((name, middle(&|felt| felt.servers[at].p99)));
            }
            report.figure(format!("{name} compression MiB/s {words}"), middle(&|felt| felt.compression));
            report.figure(format!("{name} compilations a second {words}"), middle(&|felt| felt.compilations));
            let copied: Vec<f64> = all.iter().filter_map(|felt| felt.copied).collect();
            if !copied.is_empty() {
                report.figure(format!("{name} merged pages written and copied {words}"), median(copied));
            }
        }
        for ((name, _, server), all) in ratios.iter().filter(|((_, which, _), _)| *which == window) {
            let of = of_server(server);
            let Some(spread) = Spread::of(all.iter().copied()) else { continue };
            for (which, value) in [(metric::MEDIAN, spread.median), ("lowest", spread.min), ("highest", spread.max)] {
                report.figure(metric::P99_OF_UNDISTURBED.of([name, &of, words, which]), value);
            }
        }
        let pictures = match window {
            Window::Merging => [
                "99th percentile of redis' latency while memory is merged",
                "99th percentile of MariaDB's latency while memory is merged",
            ],
            Window::Rest => [
                "99th percentile of redis' latency when that is done",
                "99th percentile of MariaDB's latency when that is done",
            ],
        };
        for (title, rows) in pictures.into_iter().zip(rows) {
            report.picture(title, "microseconds; median of the rounds", rows);
        }
    }
}

fn put_bars(report: &mut ExperimentReport, ratios: &Ratios) {
    for ((window, words), limit) in Window::ALL.into_iter().zip([1.10, 1.01]) {
        for server in SERVERS {
            let ratio = ratios.get(&(SUBJECT.to_owned(), window, server)).map(|ratios| median(ratios.clone()));
            let when = format!("{} {words}", of_server(server));
            report.bar(metric::P99_LIMIT.of([when.trim_start()]), Limit::AtMost(limit), ratio);
        }
    }
}
