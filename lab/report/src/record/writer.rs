//! Writes a record.

use super::check::Check;
use super::schema::{self, word};
use super::{Deltas, Event, Origin, Page, ProcessRow, RecordError, RegionRow, Snapshot, Source};
use pagefold_engine::host::PageState;
use pagefold_sketch::seal::{self, Sealing};
use parquet::basic::{Compression, Encoding};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, FixedLenByteArray, FixedLenByteArrayType, Int32Type, Int64Type,
};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::ColumnPath;
use serde::Serialize;
use std::collections::HashMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::NamedTempFile;
use thiserror::Error;

/// Maximum number of rows in a row group: about 10 MB while we collect them.
const GROUP_ROWS: usize = 1 << 17;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Written {
    pub snapshots: u64,
    /// Processes that existed at any time.
    pub processes: u64,
    /// Regions that existed at any time.
    pub regions: u64,
    /// Pages in the first snapshot.
    pub pages: u64,
    /// Page changes in the later snapshots.
    #[serde(rename = "changed_pages")]
    pub changes: u64,
    /// Size of the file, bytes.
    #[serde(rename = "file_bytes")]
    pub bytes: u64,
}

/// Writes a record snapshot by snapshot, to a temporary file in the same directory. [`Self::finish`] renames the file;
/// dropping the writer deletes it.
pub struct RecordWriter {
    path: PathBuf,
    beside: NamedTempFile,
    file: SerializedFileWriter<Sealing<File>>,
    rows: Rows,
    check: Check,
    written: Written,
    /// We refused a snapshot or wrote it only in part.
    failed: bool,
}

impl RecordWriter {
    /// Begins a record. In the end the record replaces an existing regular file; we refuse other kinds of files.
    pub fn create(path: &Path, origin: &Origin) -> Result<Self, RecordError> {
        // Replace the target of a symbolic link, not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            return Err(RecordError::Occupied { path });
        }
        let directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let opened = tempfile::Builder::new()
            .prefix(".pagefold-record-")
            // The default mode of new files, subject to the umask.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .and_then(|beside| Ok((beside.reopen()?, beside)));
        let (file, beside) = opened.map_err(|error| cannot_write(&path, &error))?;
        let columns = schema::columns().map_err(|error| cannot_write(&path, &error))?;
        let file = SerializedFileWriter::new(Sealing::new(file), columns, properties(origin))
            .map_err(|error| cannot_write(&path, &error))?;
        let rows = Rows::default();
        let check = Check::default();
        Ok(Self { path, beside, file, rows, check, written: Written::default(), failed: false })
    }

    /// Adds a snapshot. After an error [`Self::finish`] fails.
    pub fn write(&mut self, snapshot: &Snapshot) -> Result<(), RecordError> {
        self.failed = true;
        self.add(snapshot)?;
        self.failed = false;
        Ok(())
    }

    fn add(&mut self, snapshot: &Snapshot) -> Result<(), RecordError> {
        let at = self.written.snapshots;
        let path = &self.path;
        let inconsistent = |what| RecordError::Inconsistent { path: path.clone(), snapshot: at, what };
        let number = self.check.begin(snapshot.time_ns).map_err(inconsistent)?;
        // This is in range, because `begin` has checked it.
        let time_ns = signed_long(snapshot.time_ns);
        self.rows.begin(number, time_ns);
        for event in &snapshot.events {
            let process = self.check.event(event).map_err(inconsistent)?;
            self.rows.push(number, time_ns, process, event);
            match event {
                Event::Page { .. } if at == 0 => self.written.pages += 1,
                Event::Page { .. } => self.written.changes += 1,
                _ => {}
            }
            if self.rows.len() >= GROUP_ROWS {
                self.rows.flush(&mut self.file).map_err(|error| cannot_write(path, &error))?;
            }
        }
        self.written.snapshots += 1;
        Ok(())
    }

    /// Adds a snapshot even if it's inconsistent, with `shift` added to its number.
    #[cfg(test)]
    pub(super) fn write_unchecked(&mut self, snapshot: &Snapshot, shift: i32) -> ParquetResult {
        let number = i32::try_from(self.written.snapshots).unwrap() + shift;
        let time_ns = signed_long(snapshot.time_ns);
        self.rows.begin(number, time_ns);
        for event in &snapshot.events {
            let process = self.check.event(event).unwrap_or(match event {
                Event::Process(ProcessRow { process, .. })
                | Event::Exit { process }
                | Event::Region(RegionRow { process, .. }) => *process,
                Event::Unmap { .. } | Event::Page { .. } => 0,
            });
            self.rows.push(number, time_ns, process, event);
        }
        self.written.snapshots += 1;
        self.rows.flush(&mut self.file)
    }

    /// Completes the file and moves it to its path.
    pub fn finish(mut self) -> Result<Written, RecordError> {
        let path = self.path;
        if self.failed {
            return Err(cannot_write(&path, &"not all of a snapshot could be written"));
        }
        let failed = |error: &dyn std::fmt::Display| cannot_write(&path, error);
        if self.rows.len() > 0 {
            self.rows.flush(&mut self.file).map_err(|error| failed(&error))?;
        }
        let sealing = self.file.into_inner().map_err(|error| failed(&error))?;
        let (file, bytes) = sealing.seal().map_err(|error| failed(&error))?;
        file.sync_all().map_err(|error| failed(&error))?;
        self.beside.persist(&path).map_err(|error| failed(&error.error))?;
        let (processes, regions) = self.check.seen();
        Ok(Written { processes, regions, bytes, ..self.written })
    }
}

fn cannot_write(path: &Path, error: &dyn std::fmt::Display) -> RecordError {
    RecordError::Write { path: path.to_owned(), what: error.to_string() }
}

/// Writes all snapshots of a source.
pub fn write<S: Source>(path: &Path, origin: &Origin, source: &mut S) -> Result<Written, WriteError<S::Error>> {
    let mut writer = RecordWriter::create(path, origin)?;
    let mut deltas = Deltas::new();
    while let Some(memory) = source.next_snapshot().map_err(WriteError::Source)? {
        writer.write(&deltas.next(memory))?;
    }
    Ok(writer.finish()?)
}

#[derive(Debug, Error)]
pub enum WriteError<E> {
    #[error(transparent)]
    Source(E),
    #[error(transparent)]
    Record(#[from] RecordError),
}

fn properties(origin: &Origin) -> Arc<WriterProperties> {
    let entries = [
        (schema::KEY_SCHEMA, schema::SCHEMA.to_owned()),
        (schema::KEY_VERSION, env!("CARGO_PKG_VERSION").to_owned()),
        (schema::KEY_SOURCE, origin.source.clone()),
        (schema::KEY_EVERY_NS, origin.every_ns.to_string()),
        (schema::KEY_ANONYMOUS, origin.anonymous.to_string()),
    ];
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_created_by(concat!("pagefold version ", env!("CARGO_PKG_VERSION")).to_owned())
        // Row-group statistics let readers skip some groups. Finer ones would be as large as the data.
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
        .set_key_value_metadata(Some(seal::entries(&entries, KeyValue::new)));
    for column in schema::ASCENDING {
        let column = ColumnPath::from(column);
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_encoding(column, Encoding::DELTA_BINARY_PACKED);
    }
    for column in schema::RANDOM {
        let column = ColumnPath::from(column);
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_statistics_enabled(column.clone(), EnabledStatistics::None)
            .set_column_encoding(column, Encoding::PLAIN);
    }
    Arc::new(properties.build())
}

/// A column of rows to write: the values, and for each row whether it has one.
#[derive(Debug)]
struct Column<T> {
    values: Vec<T>,
    levels: Vec<i16>,
}

impl<T> Default for Column<T> {
    fn default() -> Self {
        Self { values: Vec::new(), levels: Vec::new() }
    }
}

impl<T> Column<T> {
    fn push(&mut self, value: impl Into<Option<T>>) {
        let value = value.into();
        self.levels.push(value.is_some().into());
        self.values.extend(value);
    }

    fn flush<D: DataType<T = T>>(&mut self, group: &mut SerializedRowGroupWriter<'_, Sealing<File>>) -> ParquetResult {
        // Called once for each column, in the schema's order.
        if let Some(mut column) = group.next_column()? {
            // Required columns ignore the levels.
            column.typed::<D>().write_batch(&self.values, Some(&self.levels), None)?;
            column.close()?;
        }
        self.values.clear();
        self.levels.clear();
        Ok(())
    }
}

/// Parquet stores unsigned values as signed ones; the schema marks them.
#[expect(clippy::cast_possible_wrap, reason = "the same bits")]
const fn signed(bits: u32) -> i32 {
    bits as i32
}

/// Reinterprets 64 bits in the same way.
#[expect(clippy::cast_possible_wrap, reason = "the same bits")]
const fn signed_long(bits: u64) -> i64 {
    bits as i64
}

type ParquetResult<T = ()> = parquet::errors::Result<T>;

#[derive(Debug, Default)]
struct Rows {
    snapshot: Column<i32>,
    time_ns: Column<i64>,
    event: Column<ByteArray>,
    process: Column<i32>,
    pid: Column<i32>,
    name: Column<ByteArray>,
    region: Column<i32>,
    kind: Column<ByteArray>,
    first_page: Column<i64>,
    pages: Column<i64>,
    page: Column<i64>,
    state: Column<ByteArray>,
    huge: Column<bool>,
    digest: Column<[u8; 16]>,
    parts: [Column<i32>; 4],
    frame: Column<i64>,
    words: Words,
}

/// Interned values of columns with few distinct values.
#[derive(Debug, Default)]
struct Words(HashMap<&'static str, ByteArray>);

impl Words {
    fn get(&mut self, word: &'static str) -> ByteArray {
        self.0.entry(word).or_insert_with(|| ByteArray::from(word)).clone()
    }
}

impl Rows {
    fn len(&self) -> usize {
        self.event.levels.len()
    }

    fn begin(&mut self, number: i32, time_ns: i64) {
        let row = self.row(number, time_ns, word::SNAPSHOT, None);
        row.process_columns(None);
        row.region_columns(None, None);
        row.page_columns(None);
    }

    fn push(&mut self, number: i32, time_ns: i64, process: u32, event: &Event) {
        let event_word = match event {
            Event::Process(_) => word::PROCESS,
            Event::Exit { .. } => word::EXIT,
            Event::Region(_) => word::REGION,
            Event::Unmap { .. } => word::UNMAP,
            Event::Page { .. } => word::PAGE,
        };
        let rows = self.row(number, time_ns, event_word, Some(process));
        rows.process_columns(if let Event::Process(row) = event { Some(row) } else { None });
        match event {
            Event::Region(row) => rows.region_columns(Some(row.region), Some(row)),
            Event::Unmap { region } | Event::Page { region, .. } => rows.region_columns(Some(*region), None),
            Event::Process(_) | Event::Exit { .. } => rows.region_columns(None, None),
        }
        rows.page_columns(if let Event::Page { page, now, .. } = event { Some((page.0, now)) } else { None });
    }

    /// Fills the columns that every row has.
    fn row(&mut self, number: i32, time_ns: i64, event: &'static str, process: Option<u32>) -> &mut Self {
        self.snapshot.push(number);
        self.time_ns.push(time_ns);
        self.event.push(self.words.get(event));
        self.process.push(process.map(signed));
        self
    }

    fn process_columns(&mut self, row: Option<&ProcessRow>) {
        self.pid.push(row.and_then(|row| row.pid));
        self.name.push(row.and_then(|row| row.name.as_deref()).map(ByteArray::from));
    }

    fn region_columns(&mut self, region: Option<u32>, row: Option<&RegionRow>) {
        self.region.push(region.map(signed));
        self.kind.push(row.map(|row| ByteArray::from(row.kind.as_str())));
        self.first_page.push(row.map(|row| signed_long(row.first.0)));
        self.pages.push(row.map(|row| signed_long(row.pages.0)));
    }

    fn page_columns(&mut self, page: Option<(u64, &Page)>) {
        self.page.push(page.map(|(page, _)| signed_long(page)));
        self.state.push(page.map(|(_, now)| self.words.get(schema::state_word(now.state))));
        let there = page.map(|(_, now)| now).filter(|now| now.state != PageState::Absent);
        self.huge.push(there.map(|now| now.huge));
        self.digest.push(there.map(|now| now.digest.to_be_bytes()));
        for (at, part) in self.parts.iter_mut().enumerate() {
            part.push(there.map(|now| signed(now.parts[at])));
        }
        self.frame.push(there.and_then(|now| now.frame).map(signed_long));
    }

    fn flush(&mut self, file: &mut SerializedFileWriter<Sealing<File>>) -> ParquetResult {
        let mut group = file.next_row_group()?;
        self.snapshot.flush::<Int32Type>(&mut group)?;
        self.time_ns.flush::<Int64Type>(&mut group)?;
        self.event.flush::<ByteArrayType>(&mut group)?;
        self.process.flush::<Int32Type>(&mut group)?;
        self.pid.flush::<Int32Type>(&mut group)?;
        self.name.flush::<ByteArrayType>(&mut group)?;
        self.region.flush::<Int32Type>(&mut group)?;
        self.kind.flush::<ByteArrayType>(&mut group)?;
        self.first_page.flush::<Int64Type>(&mut group)?;
        self.pages.flush::<Int64Type>(&mut group)?;
        self.page.flush::<Int64Type>(&mut group)?;
        self.state.flush::<ByteArrayType>(&mut group)?;
        self.huge.flush::<BoolType>(&mut group)?;
        // We make one allocation for all digests.
        let all = ByteArray::from(self.digest.values.as_flattened().to_vec());
        let pieces = (0..self.digest.values.len()).map(|at| FixedLenByteArray::from(all.slice(16 * at, 16)));
        let mut digest = Column { values: pieces.collect(), levels: std::mem::take(&mut self.digest.levels) };
        digest.flush::<FixedLenByteArrayType>(&mut group)?;
        self.digest.values.clear();
        for part in &mut self.parts {
            part.flush::<Int32Type>(&mut group)?;
        }
        self.frame.flush::<Int64Type>(&mut group)?;
        group.close()?;
        Ok(())
    }
}
