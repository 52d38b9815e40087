//! The results of `pagefold-lab bench --output`: a file `NAME-REPETITION.json` for each repetition of an experiment,
//! with the run's options, how long it took, and all measurements, raw samples included. A file appears whole, so any
//! existing file is finished.

use crate::report::ExperimentReport;
use anyhow::{Context, ensure};
use pagefold_text::exit::{self, Exit};
use pagefold_text::regular;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use twox_hash::XxHash3_64;

const SCHEMA: &str = "pagefold.bench.repetition/1";

/// A repetition takes some megabytes.
const BYTES_MOST: u64 = 256 << 20;

/// We only compare results if all of these are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenchOptions {
    pub seed: Option<u64>,
    pub quick: bool,
    pub all_peers: bool,
    pub policies: BTreeSet<String>,
    pub kernel: String,
    /// Digest of the pagefold program.
    pub program: String,
}

impl BenchOptions {
    pub fn digest(program: &Path) -> anyhow::Result<String> {
        let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
        Ok(format!("{:016x}", XxHash3_64::oneshot(&bytes)))
    }

    /// The first option that differs, with both values.
    fn difference(&self, other: &Self) -> Option<String> {
        let ours = serde_json::to_value(self).ok()?;
        let theirs = serde_json::to_value(other).ok()?;
        let (name, own) = ours.as_object()?.iter().find(|(name, own)| theirs.get(name) != Some(own))?;
        Some(format!("{name} {own}, not {}", theirs.get(name)?))
    }
}

/// The experiments in the report's order, as the laboratory lists them.
pub const NAMES: [&str; 28] = [
    "static-mix",
    "tails",
    "pairs",
    "cow-breaker",
    "short-lived",
    "clones",
    "idle",
    "governors",
    "mapper",
    "real-programs",
    "mixed-host",
    "recall",
    "mix",
    "workers",
    "neighbours",
    "vms",
    "vms-overcommitted",
    "containers",
    "build",
    "huge",
    "overcommit",
    "scan",
    "hash",
    "classes",
    "forests",
    "numa",
    "on-request",
    "programs-on-request",
];

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finished {
    schema: String,
    pub repetition: u32,
    pub options: BenchOptions,
    pub elapsed: Duration,
    pub report: ExperimentReport,
}

impl Finished {
    pub fn new(repetition: u32, options: BenchOptions, elapsed: Duration, report: ExperimentReport) -> Self {
        Self { schema: SCHEMA.to_owned(), repetition, options, elapsed, report }
    }

    fn file_name(&self) -> String {
        format!("{}-{}.json", self.report.experiment, self.repetition)
    }
}

fn refused(path: &Path, what: &str) -> anyhow::Error {
    let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
    Exit::new(exit::FAILURE, format!("{} {what}; delete it, or choose another directory", path.display())).into()
}

/// All finished repetitions in a directory, by experiment and repetition. They must have the same options, and match
/// `wanted` if given.
pub fn load(dir: &Path, wanted: Option<&BenchOptions>) -> anyhow::Result<Vec<Finished>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}; give a directory", dir.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<PathBuf>>>()?;
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    paths.sort();
    let mut all: Vec<Finished> = Vec::new();
    for path in paths {
        let finished = read(&path)?;
        let wanted = wanted.or(all.first().map(|one| &one.options));
        if let Some(difference) = wanted.and_then(|wanted| finished.options.difference(wanted)) {
            return Err(refused(&path, &format!("was measured with {difference}")));
        }
        all.push(finished);
    }
    all.sort_by_key(|one| (position(&one.report.experiment), one.repetition));
    Ok(all)
}

fn position(experiment: &str) -> Option<usize> {
    NAMES.iter().position(|&name| name == experiment)
}

/// Writes a repetition. The file appears whole.
pub fn write(dir: &Path, finished: &Finished) -> anyhow::Result<()> {
    let path = dir.join(finished.file_name());
    let mut json = serde_json::to_vec(finished)?;
    json.push(b'\n');
    replace(dir, &path, &json)
        .with_context(|| format!("cannot write {}; choose a writable directory with enough space", path.display()))
}

fn replace(dir: &Path, path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut beside = tempfile::Builder::new()
        .prefix(".pagefold-bench-")
        // The default mode of new files, subject to the umask.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(dir)?;
    beside.write_all(content)?;
    beside.as_file().sync_all()?;
    beside.persist(path)?;
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Finished> {
    let file = regular::open(path, OpenOptions::new().read(true));
    let file = file.map_err(|error| refused(path, &format!("cannot be read: {error}")))?;
    let mut json = Vec::new();
    file.take(BYTES_MOST + 1).read_to_end(&mut json)?;
    if json.len() as u64 > BYTES_MOST {
        return Err(refused(path, "is larger than any result"));
    }
    let finished = parse(&json)
        .map_err(|error| refused(path, &format!("is damaged or was not written by pagefold-lab bench ({error:#})")))?;
    if path.file_name() != Some(finished.file_name().as_ref()) {
        return Err(refused(path, "has the name of another result"));
    }
    Ok(finished)
}

fn parse(json: &[u8]) -> anyhow::Result<Finished> {
    let finished: Finished = serde_json::from_slice(json)?;
    ensure!(finished.schema == SCHEMA, "its schema is another");
    let name = &finished.report.experiment;
    ensure!(position(name).is_some(), "there is no experiment {name:?}");
    Ok(finished)
}
