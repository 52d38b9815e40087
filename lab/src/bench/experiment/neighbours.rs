//! How the programs beside a policy fare on the cores that ksmd and pagefold use too, during merging and afterwards:
//! the latencies of a redis and a MariaDB server under fixed open loads, and the speeds of a compression and a
//! compilation. We merge the servers' memory too, so their own writes to merged pages count. Each server is in a cgroup
//! of its own, as services are, where the kernel reports how long it waits for a CPU.

use super::rounds::{Rounds, parts};
use super::{Experiment, ExperimentSetting, PolicySequence, Targets, mib, shuffled};
use crate::bench::latencies::{Histogram, Latencies};
use crate::bench::load::{Done, Latencies as Measured, OpenLoop, Repeated, percentile};
use crate::bench::metric::{self, AT_REST, WHILE_MERGING};
use crate::bench::policy::ksm::KSM_PAGES;
use crate::bench::policy::{KsmAdvisor, KsmPaced, NoMerging, Pagefold, Policy, SUBJECT};
use crate::bench::report::{ExperimentReport, Limit, PolicyRun, in_round};
use crate::contents::printable;
use crate::programs::{MariaDb, MariaDbData, Redis, RedisData, Service, need, scratch};
use crate::tenant::Segment;
use anyhow::Context;
use pagefold_engine::units::Bytes;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
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

sizes! {
    rounds: u64 = 3, quick 1, as "rounds";
    keys: u64 = 50_000, quick 5_000, as "redis_keys";
    mebibytes: u64 = 256, quick 16, as "same_mib", "random_mib";
    rate: u64 = 3_000, quick 1_000, as "redis_requests_per_second";
    rows: u64 = 50_000, quick 2_000, as "mariadb_rows";
    queries: u64 = 500, quick 200, as "mariadb_queries_per_second";
    merging: u64 = 10, quick 3, as "seconds_while_merging";
    /// Seconds until nothing is left to merge.
    settling: u64 = 10, quick 1;
    resting: u64 = 15, quick 2, as "seconds_at_rest";
    /// Functions of the program that we compile several times in each window.
    functions: u32 = 200, quick 20;
}

impl Sizes {
    /// Start and end of each window, since the run began.
    fn windows(&self) -> [Range<Duration>; WINDOWS.len()] {
        let rest = self.merging + self.settling;
        [0..self.merging, rest..rest + self.resting]
            .map(|seconds| Duration::from_secs(seconds.start)..Duration::from_secs(seconds.end))
    }
}

/// One of the two windows in which we measure the programs.
struct Window {
    words: &'static str,
    /// The window in the titles of pictures.
    when: &'static str,
    /// The bar on each server's p99 relative to undisturbed.
    at_most: f64,
}

/// While memory is merged, and when that's done.
const WINDOWS: [Window; 2] = [
    Window { words: WHILE_MERGING, when: "while memory is merged", at_most: 1.10 },
    Window { words: AT_REST, when: "when that is done", at_most: 1.01 },
];

/// A server under load.
struct Server {
    name: &'static str,
    /// The server in the titles of pictures.
    of: &'static str,
    /// The server in the names of figures. Redis was the first server here, so its figures don't name one.
    suffix: &'static str,
}

const SERVERS: [Server; 2] = [
    Server { name: "redis", of: "redis'", suffix: "" },
    Server { name: "mariadb", of: "MariaDB's", suffix: " of mariadb" },
];

/// The figure of a server in a window that we compare.
fn p99(server: &Server, window: &Window) -> String {
    format!("{} p99 us {}", server.suffix, window.words)
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
        let compressed = self.compression.finish()?;
        let compiled = self.compilation.finish()?;
        Ok(Finished { servers: [redis.finish()?, mariadb.finish()?], compressed, compiled })
    }
}

/// The data and executables from which we start each run's programs.
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
        let gzip = need("gzip", "gzip")?;
        let gcc = need("gcc", "gcc")?;
        let nice = need("nice", "coreutils")?;
        let scratch = scratch()?;
        let redis = RedisData::make(scratch.path(), sizes.keys)?;
        let mariadb = MariaDbData::make(scratch.path(), sizes.rows)?;
        let text = scratch.path().join("text");
        fs::write(&text, printable(SEED, 0, TEXT_BYTES))?;
        let program = scratch.path().join("program.c");
        fs::write(&program, (0..sizes.functions).map(function).collect::<String>())?;
        Ok(Self { redis, mariadb, gzip, gcc, nice, text, program, scratch })
    }

    /// Starts the programs to merge, and the load once the servers under it are up.
    fn start(&self, setting: &ExperimentSetting<'_>, sizes: &Sizes) -> anyhow::Result<(Targets, Load)> {
        let scratch = self.scratch.path();
        let database = self.mariadb.start(scratch, 0)?;
        let first = self.redis.start(scratch, 0)?;
        let load = self.load(&first, &database, sizes)?;
        let mut targets: Targets = vec![Service::of(first)?];
        for instance in 1..INSTANCES {
            targets.push(Service::of(self.redis.start(scratch, instance)?)?);
        }
        targets.push(Service::of(database)?);
        let pages = mib(sizes.mebibytes).0;
        targets.push(setting.tenant(Segment::Same { pages, seed: 1 })?);
        targets.push(setting.tenant(Segment::Random { pages, seed: 2 })?);
        Ok((targets, load))
    }

    fn load(&self, redis: &Redis, mariadb: &MariaDb, sizes: &Sizes) -> anyhow::Result<Load> {
        let requests = Duration::from_nanos(1_000_000_000 / sizes.rate);
        let queries = Duration::from_nanos(1_000_000_000 / sizes.queries);
        let mut compress = Command::new(&self.nice);
        compress.args(NICENESS).arg(&self.gzip).args(["-6", "-c"]).arg(&self.text);
        let mut compile = Command::new(&self.nice);
        compile.args(NICENESS).arg(&self.gcc).args(["-O1", "-c", "-o", "/dev/null"]).arg(&self.program);
        Ok(Load {
            servers: [redis.load(requests, sizes.keys)?, mariadb.load(queries)?],
            compression: Repeated::start(compress),
            compilation: Repeated::start(compile),
        })
    }
}

/// A C function.
fn function(number: u32) -> String {
    format!(
        "int f{number}(int n) {{ int s = {number}; for (int i = 0; i < n; i++) s = s * 31 + (i ^ {number}) % 7; return s; }}\n"
    )
}

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let sizes = Sizes::of(setting, report);
    report.parameters([("seed", SEED)]);
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
    let mut felt = Rounds::default();
    for round in 0..sizes.rounds {
        let order = setting.order.unwrap_or(SEED).wrapping_add(round);
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
            let name = policy.name();
            run.policy = in_round(&name, round + 1);
            for (window, span) in WINDOWS.iter().zip(sizes.windows()) {
                let figures = figures_of(run, window, span, &finished, &mut latencies)
                    .with_context(|| format!("{name}: nothing was measured {}", window.words))?;
                for (figure, value) in figures {
                    felt.add(&name, round, figure, value);
                }
            }
        }
    }
    report.latencies = latencies;
    felt.put(report, &policies, sizes.rounds);
    for window in &WINDOWS {
        for server in &SERVERS {
            compare(report, &felt, window, server, setting.quick);
        }
    }
    Ok(())
}

/// A run's figures in a window. Keeps the servers' latencies.
fn figures_of(
    run: &PolicyRun,
    window: &Window,
    span: Range<Duration>,
    finished: &Finished,
    latencies: &mut Vec<Latencies>,
) -> Option<Vec<(String, f64)>> {
    let from = run.began? + span.start;
    let to = run.began? + span.end;
    let words = window.words;
    let mut figures = Vec::new();
    for (server, measured) in SERVERS.iter().zip(&finished.servers) {
        let ascending = measured.between(from, to);
        figures.push((format!("{} p50 us {words}", server.suffix), us(&ascending, 0.5)?));
        figures.push((p99(server, window), us(&ascending, 0.99)?));
        figures.push((format!("{} p99.9 us {words}", server.suffix), us(&ascending, 0.999)?));
        latencies.push(Latencies {
            policy: run.policy.clone(),
            server: server.name.to_owned(),
            when: words.to_owned(),
            histogram: Histogram::of(ascending),
        });
    }
    let compressed_mib = finished.compressed.per_second(from, to)? * Bytes(TEXT_BYTES as u64).mib();
    figures.push((format!(" compression MiB/s {words}"), compressed_mib));
    figures.push((format!(" compilations a second {words}"), finished.compiled.per_second(from, to)?));
    if let (Some(before), Some(after)) = (copied_by(run, span.start), copied_by(run, span.end)) {
        let copied = after.saturating_sub(before) as f64;
        figures.push((format!(" merged pages written and copied {words}"), copied));
    }
    Some(figures)
}

fn us(ascending: &[Duration], share: f64) -> Option<f64> {
    Some(percentile(ascending, share)?.as_secs_f64() * 1e6)
}

/// Merged pages that programs wrote and so copied, until some time since the run began, if the kernel counts them.
fn copied_by(run: &PolicyRun, time: Duration) -> Option<u64> {
    let point = run.points.iter().rev().find(|point| point.seconds <= time.as_secs_f64()).or(run.points.first())?;
    point.events.cow_breaks
}

/// Adds a server's p99 relative to undisturbed in a window, its picture and its bar.
fn compare(report: &mut ExperimentReport, felt: &Rounds, window: &Window, server: &Server, quick: bool) {
    let p99 = p99(server, window);
    let mut rows = felt.medians(&p99);
    for (name, _) in &mut rows {
        if let Some(spread) = felt.relative_to_unmerged(name, &p99) {
            for (which, value) in parts(spread) {
                let of = [name.as_str(), server.suffix, window.words, which];
                report.figure(metric::P99_OF_UNDISTURBED.of(of), value);
            }
        }
        *name += server.suffix;
    }
    let title = format!("99th percentile of {} latency {}", server.of, window.when);
    report.picture(&title, "microseconds; median of the rounds", rows);
    if !quick {
        let ratio = felt.relative_to_unmerged(SUBJECT, &p99).map(|ratio| ratio.median);
        let when = format!("{} {}", server.suffix, window.words);
        report.bar(metric::P99_LIMIT.of([when.trim_start()]), Limit::AtMost(window.at_most), ratio);
    }
}
