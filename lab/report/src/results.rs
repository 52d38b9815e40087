//! The results of `pagefold-lab bench --output`: files for each repetition of an experiment.
//!
//! `NAME-REPETITION.json` is its line of JSON. `NAME-REPETITION.parquet` has the raw samples, one row each:
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `experiment` | text | its name |
//! | `repetition` | int32 | its number, starting with 1 |
//! | `policy` | text | what merged |
//! | `seconds` | double | time since the marks were set |
//! | `saved_bytes` | int64 | memory saved by KSM's counters, beyond that at the start |
//! | `ksmd_seconds` | double | CPU time of ksmd since the start |
//! | `pagefold_seconds` | double | CPU time of pagefold and its children |
//! | `pagefold_peak_bytes` | int64 | their peak memory so far, added up |
//! | `cow_breaks` | int64 or null | merged pages copied since the start, on the whole machine |
//! | `split_pages`, `split_mappings` | int64 or null | huge pages and mappings of them split since the start, on the whole machine |
//!
//! Null: this kernel does not have the counter.
//!
//! `NAME-REPETITION.latencies.parquet` has the latencies that the experiment measured, if it did, as histograms:
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `policy` | text | what merged |
//! | `server` | text | what was asked |
//! | `when` | text | when it was asked |
//! | `up_to_ns` | int64 | upper bound, at most 1/128 above a latency |
//! | `count` | int64 | requests that took as long, and longer than the next lower bound |
//!
//! The samples' metadata has the options of the run, the digest of the JSON, and a checksum over the file. All files appear whole,
//! the samples last: what has its samples is finished.

use crate::events::KernelEvents;
use crate::latencies::{Histogram, Latencies};
use crate::points::SamplerPoint;
use crate::report::ExperimentReport;
use anyhow::Context;
use pagefold_sketch::guarded;
use pagefold_sketch::seal::{self, KEY_SCHEMA};
use pagefold_text::exit::{self, Exit};
use pagefold_text::regular;
use parquet::basic::Compression;
use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::{ByteArrayType, DataType, DoubleType, Int32Type, Int64Type};
use parquet::file::metadata::{FileMetaData, KeyValue};
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use twox_hash::XxHash3_64;

const SCHEMA: &str = "pagefold.bench.samples/2";
const KEY_EXPERIMENT: &str = "pagefold.experiment";
const KEY_REPETITION: &str = "pagefold.repetition";
const KEY_OPTIONS: &str = "pagefold.options";
const KEY_ELAPSED_MS: &str = "pagefold.elapsed_ms";
const KEY_JSON: &str = "pagefold.json_xxh3";

const MESSAGE: &str = "message pagefold_samples {
    required binary experiment (STRING);
    required int32 repetition;
    required binary policy (STRING);
    required double seconds;
    required int64 saved_bytes;
    required double ksmd_seconds;
    required double pagefold_seconds;
    required int64 pagefold_peak_bytes;
    optional int64 cow_breaks;
    optional int64 split_pages;
    optional int64 split_mappings;
}";

const LATENCIES_SCHEMA: &str = "pagefold.bench.latencies/1";
const LATENCIES_ENDING: &str = ".latencies.parquet";
const LATENCIES_MESSAGE: &str = "message pagefold_latencies {
    required binary policy (STRING);
    required binary server (STRING);
    required binary when (STRING);
    required int64 up_to_ns;
    required int64 count;
}";

/// A repetition takes less than a megabyte.
const BYTES_MOST: u64 = 256 << 20;

/// What must be equal for results to be compared.
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
    /// The digest of a program.
    pub fn digest(program: &Path) -> anyhow::Result<String> {
        let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
        Ok(digest(&bytes))
    }

    /// The first option in which two differ, with both values.
    fn difference(&self, other: &Self) -> Option<String> {
        let (ours, theirs) = (serde_json::to_value(self).ok()?, serde_json::to_value(other).ok()?);
        let (name, own) = ours.as_object()?.iter().find(|(name, own)| theirs.get(name) != Some(own))?;
        Some(format!("{name} {own}, not {}", theirs.get(name)?))
    }
}

/// The experiments in the order of the report: that of the list in the laboratory.
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

/// A finished repetition of an experiment.
#[derive(Clone, Debug)]
pub struct Finished {
    pub repetition: u32,
    pub options: BenchOptions,
    /// How long it took.
    pub elapsed: Duration,
    pub report: ExperimentReport,
}

fn digest(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

fn refused(path: &Path, what: &str) -> anyhow::Error {
    let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
    Exit::new(exit::FAILURE, format!("{} {what}; delete it, or choose another directory", path.display())).into()
}

fn cut_off(path: &Path) -> anyhow::Error {
    refused(path, "is damaged or was not written by pagefold-lab bench")
}

/// The paths of a repetition's JSON and samples.
pub fn paths(dir: &Path, experiment: &str, repetition: u32) -> (PathBuf, PathBuf) {
    let path = |ending| dir.join(format!("{experiment}-{repetition}.{ending}"));
    (path("json"), path("parquet"))
}

/// All finished repetitions in a directory, by experiment and repetition. They must have the same options, and those of
/// `wanted` if given.
pub fn load(dir: &Path, wanted: Option<&BenchOptions>) -> anyhow::Result<Vec<Finished>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}; give a directory", dir.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<PathBuf>>>()?;
    let is_samples = |name: &str| name.ends_with(".parquet") && !name.ends_with(LATENCIES_ENDING);
    paths.retain(|path| path.file_name().is_some_and(|name| is_samples(&name.to_string_lossy())));
    paths.sort();
    let mut all: Vec<Finished> = Vec::new();
    for path in paths {
        let finished = read(&path)?;
        if let Some(what) =
            wanted.or(all.first().map(|one| &one.options)).and_then(|wanted| finished.options.difference(wanted))
        {
            return Err(refused(&path, &format!("was measured with {what}")));
        }
        all.push(finished);
    }
    all.sort_by_key(|one| (position(&one.report.experiment), one.repetition));
    Ok(all)
}

/// Where an experiment comes in the list of them.
fn position(experiment: &str) -> Option<usize> {
    NAMES.iter().position(|&name| name == experiment)
}

/// Writes a repetition.
pub fn write(dir: &Path, finished: &Finished) -> anyhow::Result<()> {
    let (json_path, path) = paths(dir, &finished.report.experiment, finished.repetition);
    let mut report = finished.report.clone();
    // JSON has no other numbers.
    report.figures.retain(|_, value| value.is_finite());
    report.ratios.retain(|_, value| value.is_finite());
    let mut json = serde_json::to_vec(&report)?;
    json.push(b'\n');
    put(&json_path, |file| Ok(file.write_all(&json)?))?;
    let latencies_path = json_path.with_extension(&LATENCIES_ENDING[1..]);
    match &report.latencies[..] {
        // Of a repetition that was interrupted.
        [] => match fs::remove_file(&latencies_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        },
        latencies => put(&latencies_path, |file| write_latencies(file, latencies, &digest(&json)))?,
    }
    put(&path, |file| {
        let properties = properties(finished, &digest(&json))?;
        let writer = SerializedFileWriter::new(seal::Sealing::new(file.try_clone()?), schema()?, properties)?;
        samples(writer, finished)?.seal()?;
        Ok(())
    })
}

/// Makes a file appear whole.
fn put(path: &Path, write: impl FnOnce(&mut File) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let put = || {
        let mut beside = tempfile::Builder::new()
            .prefix(".pagefold-bench-")
            // The default mode of new files, subject to the umask.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(path.parent().unwrap_or(Path::new(".")))?;
        write(beside.as_file_mut())?;
        beside.as_file().sync_all()?;
        beside.persist(path)?;
        anyhow::Ok(())
    };
    put().with_context(|| format!("cannot write {}; choose a writable directory with enough space", path.display()))
}

fn write_latencies(file: &File, latencies: &[Latencies], json: &str) -> anyhow::Result<()> {
    let entries = [(KEY_SCHEMA, LATENCIES_SCHEMA.to_owned()), (KEY_JSON, json.to_owned())];
    let schema = Arc::new(parse_message_type(LATENCIES_MESSAGE)?);
    let mut writer = SerializedFileWriter::new(seal::Sealing::new(file.try_clone()?), schema, sealed(&entries))?;
    let rows = || latencies.iter().flat_map(|one| one.histogram.0.iter().map(move |counted| (one, counted)));
    let texts = |of: fn(&Latencies) -> &str| rows().map(|(one, _)| of(one).into()).collect::<Vec<_>>();
    let numbers = |of: fn((&u64, &u64)) -> u64| {
        rows().map(|(_, counted)| i64::try_from(of(counted))).collect::<Result<Vec<_>, _>>()
    };
    let mut group = writer.next_row_group()?;
    column::<ByteArrayType>(&mut group, &texts(|one| &one.policy))?;
    column::<ByteArrayType>(&mut group, &texts(|one| &one.server))?;
    column::<ByteArrayType>(&mut group, &texts(|one| &one.when))?;
    column::<Int64Type>(&mut group, &numbers(|(&bound, _)| bound)?)?;
    column::<Int64Type>(&mut group, &numbers(|(_, &count)| count)?)?;
    group.close()?;
    writer.into_inner()?.seal()?;
    Ok(())
}

/// The latencies and the digest of the JSON written with them.
fn read_latencies(file: File) -> anyhow::Result<(Vec<Latencies>, String)> {
    let file = SerializedFileReader::new(file)?;
    let metadata = file.metadata().file_metadata();
    anyhow::ensure!(value(metadata, KEY_SCHEMA)? == LATENCIES_SCHEMA, "its schema is another");
    let schema = parse_message_type(LATENCIES_MESSAGE)?;
    anyhow::ensure!(metadata.schema_descr().root_schema() == &schema, "its columns differ");
    let mut latencies: Vec<Latencies> = Vec::new();
    for group in 0..file.num_row_groups() {
        let group = file.get_row_group(group)?;
        let count = usize::try_from(group.metadata().num_rows())?;
        let group = group.as_ref();
        let texts = [0, 1, 2].map(|at| values::<ByteArrayType>(group, at, count));
        let [policies, servers, whens] = texts;
        let (policies, servers, whens) = (policies?, servers?, whens?);
        let (bounds, counts) = (values::<Int64Type>(group, 3, count)?, values::<Int64Type>(group, 4, count)?);
        for at in 0..count {
            let [policy, server, when] = [policies[at].as_utf8()?, servers[at].as_utf8()?, whens[at].as_utf8()?];
            let same = |one: &&mut Latencies| {
                (one.policy.as_str(), one.server.as_str(), one.when.as_str()) == (policy, server, when)
            };
            let (bound, counted) = (u64::try_from(bounds[at])?, u64::try_from(counts[at])?);
            if let Some(last) = latencies.last_mut().filter(same) {
                last.histogram.0.insert(bound, counted);
            } else {
                let [policy, server, when] = [policy, server, when].map(str::to_owned);
                latencies.push(Latencies { policy, server, when, histogram: Histogram([(bound, counted)].into()) });
            }
        }
    }
    Ok((latencies, value(metadata, KEY_JSON)?))
}

fn value(metadata: &FileMetaData, key: &str) -> anyhow::Result<String> {
    let entries = metadata.key_value_metadata().map_or(&[][..], Vec::as_slice);
    let entry = entries.iter().find(|entry| entry.key == key).and_then(|entry| entry.value.clone());
    entry.with_context(|| format!("it lacks {key}"))
}

fn schema() -> anyhow::Result<parquet::schema::types::TypePtr> {
    Ok(Arc::new(parse_message_type(MESSAGE)?))
}

fn properties(finished: &Finished, json: &str) -> anyhow::Result<Arc<WriterProperties>> {
    let entries = [
        (KEY_SCHEMA, SCHEMA.to_owned()),
        // An experiment without samples has no rows to name it.
        (KEY_EXPERIMENT, finished.report.experiment.clone()),
        (KEY_REPETITION, finished.repetition.to_string()),
        (KEY_OPTIONS, serde_json::to_string(&finished.options)?),
        (KEY_ELAPSED_MS, finished.elapsed.as_millis().to_string()),
        (KEY_JSON, json.to_owned()),
    ];
    Ok(sealed(&entries))
}

/// The properties of a file with these entries and room for its checksum.
fn sealed(entries: &[(&str, String)]) -> Arc<WriterProperties> {
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).set_offset_index_disabled(true);
    Arc::new(properties.set_key_value_metadata(Some(seal::entries(entries, KeyValue::new))).build())
}

type Writer = SerializedFileWriter<seal::Sealing<File>>;

fn samples(mut writer: Writer, finished: &Finished) -> anyhow::Result<seal::Sealing<File>> {
    let runs = &finished.report.runs;
    let rows = || runs.iter().flat_map(|run| run.points.iter().map(|point| (run.policy.as_str(), *point)));
    let numbers = |of: fn(SamplerPoint) -> f64| rows().map(|(_, point)| of(point)).collect::<Vec<_>>();
    let mut group = writer.next_row_group()?;
    column::<ByteArrayType>(
        &mut group,
        &rows().map(|_| finished.report.experiment.as_str().into()).collect::<Vec<_>>(),
    )?;
    let repetition = i32::try_from(finished.repetition)?;
    column::<Int32Type>(&mut group, &rows().map(|_| repetition).collect::<Vec<_>>())?;
    column::<ByteArrayType>(&mut group, &rows().map(|(policy, _)| policy.into()).collect::<Vec<_>>())?;
    column::<DoubleType>(&mut group, &numbers(|point| point.seconds))?;
    let saved = rows().map(|(_, point)| i64::try_from(point.saved_bytes)).collect::<Result<Vec<_>, _>>()?;
    column::<Int64Type>(&mut group, &saved)?;
    column::<DoubleType>(&mut group, &numbers(|point| point.ksmd_seconds))?;
    column::<DoubleType>(&mut group, &numbers(|point| point.daemon_seconds))?;
    let peaks = rows().map(|(_, point)| i64::try_from(point.daemon_peak_bytes)).collect::<Result<Vec<_>, _>>()?;
    column::<Int64Type>(&mut group, &peaks)?;
    for event in EVENTS {
        optional_column(&mut group, rows().map(|(_, mut point)| *event(&mut point.events)))?;
    }
    group.close()?;
    Ok(writer.into_inner()?)
}

/// The optional columns, in order.
const EVENTS: [fn(&mut KernelEvents) -> &mut Option<u64>; 3] =
    [|events| &mut events.cow_breaks, |events| &mut events.split_pages, |events| &mut events.split_mappings];

fn optional_column(
    group: &mut SerializedRowGroupWriter<'_, seal::Sealing<File>>,
    rows: impl Iterator<Item = Option<u64>>,
) -> anyhow::Result<()> {
    let rows: Vec<Option<u64>> = rows.collect();
    let values = rows.iter().flatten().map(|&value| i64::try_from(value)).collect::<Result<Vec<_>, _>>()?;
    let levels: Vec<i16> = rows.iter().map(|value| i16::from(value.is_some())).collect();
    let mut column = group.next_column()?.context("the schema has fewer columns")?;
    column.typed::<Int64Type>().write_batch(&values, Some(&levels), None)?;
    Ok(column.close()?)
}

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, seal::Sealing<File>>,
    values: &[T::T],
) -> anyhow::Result<()> {
    let mut column = group.next_column()?.context("the schema has fewer columns")?;
    column.typed::<T>().write_batch(values, None, None)?;
    Ok(column.close()?)
}

/// Reads a repetition, with its samples, after checking that both files are as they were written.
fn read(path: &Path) -> anyhow::Result<Finished> {
    let opened = |path: &Path| {
        let file = regular::open(path, OpenOptions::new().read(true));
        let file = file.map_err(|error| refused(path, &format!("cannot be read: {error}")))?;
        if file.metadata()?.len() > BYTES_MOST {
            return Err(refused(path, "is larger than any result"));
        }
        Ok(file)
    };
    let mut file = opened(path)?;
    seal::check(&mut file).map_err(|_| cut_off(path))?;
    // A crafted file can have a right checksum.
    let (mut finished, json_digest, rows) = guarded(|| decoded(file).map_err(|error| format!("{error:#}")))
        .map_err(|what| refused(path, &format!("is not a result of pagefold-lab bench ({what})")))?;
    if paths(Path::new(""), &finished.report.experiment, finished.repetition).1.file_name() != path.file_name() {
        return Err(refused(path, "has the name of another result"));
    }
    let json_path = path.with_extension("json");
    let mut json = Vec::new();
    opened(&json_path)?.take(BYTES_MOST).read_to_end(&mut json)?;
    if digest(&json) != json_digest {
        return Err(refused(&json_path, "is not what was written with the samples beside it"));
    }
    let report: ExperimentReport =
        serde_json::from_slice(&json).map_err(|error| refused(&json_path, &format!("is not a result: {error}")))?;
    finished.report = report.named_as(&finished.report);
    for (policy, point) in rows {
        match finished.report.runs.iter_mut().find(|run| run.policy == policy) {
            Some(run) => run.points.push(point),
            None => return Err(refused(path, &format!("has samples of {policy:?}, which its JSON lacks"))),
        }
    }
    let latencies_path = path.with_extension(&LATENCIES_ENDING[1..]);
    if latencies_path.symlink_metadata().is_ok() {
        let mut file = opened(&latencies_path)?;
        seal::check(&mut file).map_err(|_| cut_off(&latencies_path))?;
        let (latencies, json) = guarded(|| read_latencies(file).map_err(|error| format!("{error:#}")))
            .map_err(|what| refused(&latencies_path, &format!("has no latencies ({what})")))?;
        if json != json_digest {
            return Err(refused(&latencies_path, "was not written with the samples beside it"));
        }
        finished.report.latencies = latencies;
    }
    Ok(finished)
}

type Decoded = (Finished, String, Vec<(String, SamplerPoint)>);

fn decoded(file: File) -> anyhow::Result<Decoded> {
    let file = SerializedFileReader::new(file)?;
    let metadata = file.metadata().file_metadata();
    let value = |key: &str| value(metadata, key);
    anyhow::ensure!(value(KEY_SCHEMA)? == SCHEMA, "its schema is another");
    anyhow::ensure!(metadata.schema_descr().root_schema() == schema()?.as_ref(), "its columns differ");
    let name = value(KEY_EXPERIMENT)?;
    anyhow::ensure!(position(&name).is_some(), "there is no experiment {name:?}");
    let finished = Finished {
        repetition: value(KEY_REPETITION)?.parse().context("its repetition")?,
        options: serde_json::from_str(&value(KEY_OPTIONS)?).context("its options")?,
        elapsed: Duration::from_millis(value(KEY_ELAPSED_MS)?.parse().context("its duration")?),
        report: ExperimentReport::new(&name, ""),
    };
    let mut rows = Vec::new();
    for group in 0..file.num_row_groups() {
        let group = file.get_row_group(group)?;
        let count = usize::try_from(group.metadata().num_rows())?;
        let group = group.as_ref();
        let (policies, seconds) = (values::<ByteArrayType>(group, 2, count)?, values::<DoubleType>(group, 3, count)?);
        let (saved, ksmd) = (values::<Int64Type>(group, 4, count)?, values::<DoubleType>(group, 5, count)?);
        let (daemon, peaks) = (values::<DoubleType>(group, 6, count)?, values::<Int64Type>(group, 7, count)?);
        let mut events = vec![KernelEvents::default(); count];
        for (at, event) in (8..).zip(EVENTS) {
            for (events, value) in events.iter_mut().zip(optional_values(group, at, count)?) {
                *event(events) = value;
            }
        }
        for at in 0..count {
            let point = SamplerPoint {
                seconds: seconds[at],
                saved_bytes: u64::try_from(saved[at])?,
                ksmd_seconds: ksmd[at],
                daemon_seconds: daemon[at],
                daemon_peak_bytes: u64::try_from(peaks[at])?,
                events: events[at],
            };
            anyhow::ensure!(point.seconds.is_finite() && point.cpu_seconds().is_finite(), "a sample is not finite");
            rows.push((policies[at].as_utf8()?.to_owned(), point));
        }
    }
    Ok((finished, value(KEY_JSON)?, rows))
}

fn values<T: DataType>(group: &dyn RowGroupReader, at: usize, count: usize) -> anyhow::Result<Vec<T::T>> {
    let mut reader = get_typed_column_reader::<T>(group.get_column_reader(at)?);
    let mut values = Vec::new();
    reader.read_records(count, None, None, &mut values)?;
    anyhow::ensure!(values.len() == count, "a column is too short");
    Ok(values)
}

fn optional_values(group: &dyn RowGroupReader, at: usize, count: usize) -> anyhow::Result<Vec<Option<u64>>> {
    let mut reader = get_typed_column_reader::<Int64Type>(group.get_column_reader(at)?);
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    reader.read_records(count, Some(&mut levels), None, &mut values)?;
    anyhow::ensure!(levels.len() == count, "a column is too short");
    let mut values = values.into_iter();
    let mut value =
        |&level: &i16| if level == 0 { Ok(None) } else { values.next().context("a value is missing").map(Some) };
    levels.iter().map(|level| Ok(value(level)?.map(u64::try_from).transpose()?)).collect()
}
