//! Reads a record.

use super::check::Check;
use super::deltas::ABSENT;
use super::schema::{self, word};
use super::{Event, Origin, Page, ProcessRow, Record, RecordError, RegionRow, Snapshot};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sketch::{guarded, one_line, seal};
use parquet::basic::{Repetition, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, FixedLenByteArrayType, Int32Type, Int64Type};
use parquet::file::metadata::FileMetaData;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::schema::types::Type;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// We decode this many rows together.
const BATCH_ROWS: usize = 8192;

impl Record {
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let mut reader = RecordReader::open(path)?;
        let snapshots = reader.by_ref().collect::<Result<_, _>>()?;
        Ok(Self { origin: reader.origin, snapshots })
    }
}

/// Reads a record snapshot by snapshot. An error ends the iteration.
pub struct RecordReader {
    path: PathBuf,
    origin: Origin,
    file: SerializedFileReader<File>,
    next_group: usize,
    rows: Option<Rows>,
    /// The number and content of the snapshot that we're reading.
    open: Option<(i32, Snapshot)>,
    check: Check,
    ended: bool,
}

impl RecordReader {
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        let path = path.to_owned();
        let mut file = File::open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => RecordError::Absent { path: path.clone() },
            _ => RecordError::Read { path: path.clone(), source },
        })?;
        let metadata = file.metadata().map_err(|source| RecordError::Read { path: path.clone(), source })?;
        if !metadata.is_file() {
            return Err(RecordError::NotAFile { path });
        }
        seal::check(&mut file).map_err(|error| RecordError::of_seal(error, &path))?;
        let opened = guarded(|| SerializedFileReader::new(file));
        let file = opened.map_err(|what| RecordError::Damaged { path: path.clone(), what })?;
        Self::of(path, file)
    }

    fn of(path: PathBuf, file: SerializedFileReader<File>) -> Result<Self, RecordError> {
        let metadata = file.metadata().file_metadata();
        if let Some(schema) = value(metadata, schema::KEY_SCHEMA).filter(|schema| is_newer(schema)) {
            return Err(RecordError::Newer { schema: schema.to_owned(), path });
        }
        match origin(metadata) {
            Ok(origin) => {
                let check = Check::default();
                Ok(Self { path, origin, file, next_group: 0, rows: None, open: None, check, ended: false })
            }
            Err(what) => Err(RecordError::NotARecord { path, what }),
        }
    }

    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    fn next_snapshot(&mut self) -> Result<Option<Snapshot>, Fault> {
        loop {
            let Some(row) = self.next_row()? else {
                return Ok(self.open.take().map(|(_, snapshot)| snapshot));
            };
            let time_ns = u64::try_from(row.time_ns).map_err(|_| Fault::Inconsistent("a time is negative".into()))?;
            let Some(event) = row.event else {
                let number = self.check.begin(time_ns).map_err(Fault::Inconsistent)?;
                if number != row.snapshot {
                    return Err(Fault::Inconsistent(format!("its number is {}, not {number}", row.snapshot)));
                }
                let begun = Some((number, Snapshot { time_ns, events: Vec::new() }));
                match std::mem::replace(&mut self.open, begun) {
                    Some((_, done)) => return Ok(Some(done)),
                    None => continue,
                }
            };
            let Some((number, snapshot)) = &mut self.open else {
                return Err(Fault::Inconsistent("an event precedes the first snapshot".into()));
            };
            if (*number, snapshot.time_ns) != (row.snapshot, time_ns) {
                let what = format!("an event belongs to snapshot {} at {time_ns} ns", row.snapshot);
                return Err(Fault::Inconsistent(what));
            }
            let process = self.check.event(&event).map_err(Fault::Inconsistent)?;
            if row.process != Some(process) {
                return Err(Fault::Inconsistent("an event has the number of another process".into()));
            }
            snapshot.events.push(event);
        }
    }

    fn next_row(&mut self) -> Result<Option<Row>, Fault> {
        loop {
            if let Some(rows) = &mut self.rows {
                if let Some(row) = rows.next()? {
                    return Ok(Some(row));
                }
                self.rows = None;
            }
            if self.next_group >= self.file.num_row_groups() {
                return Ok(None);
            }
            let group = self.file.get_row_group(self.next_group)?;
            self.rows = Some(Rows::of(group.as_ref())?);
            self.next_group += 1;
        }
    }
}

/// The origin of a file that has our schema, or why it's not a record.
fn origin(metadata: &FileMetaData) -> Result<Origin, String> {
    match value(metadata, schema::KEY_SCHEMA) {
        Some(schema::SCHEMA) => {}
        Some(_) => return Err("its schema has another name".to_owned()),
        None => return Err("it does not name its schema".to_owned()),
    }
    let number = wanted(metadata, schema::KEY_EVERY_NS)?.parse();
    let flag = wanted(metadata, schema::KEY_ANONYMOUS)?.parse();
    let origin = Origin {
        source: wanted(metadata, schema::KEY_SOURCE)?.to_owned(),
        every_ns: number.map_err(|_| "the time between its snapshots is not a number")?,
        anonymous: flag.map_err(|_| "its anonymous flag is neither true nor false")?,
    };
    let expected = schema::columns().map_err(|error| error.to_string())?;
    let found = metadata.schema_descr().root_schema();
    if !found.is_group() || shape(found) != shape(&expected) {
        return Err("its columns differ from the schema".to_owned());
    }
    Ok(origin)
}

fn value<'a>(metadata: &'a FileMetaData, key: &str) -> Option<&'a str> {
    metadata.key_value_metadata()?.iter().find(|entry| entry.key == key)?.value.as_deref()
}

fn wanted<'a>(metadata: &'a FileMetaData, key: &str) -> Result<&'a str, String> {
    value(metadata, key).ok_or_else(|| format!("it lacks {key}"))
}

/// The name and type of each column, and whether it's optional.
fn shape(schema: &Type) -> Vec<(&str, Option<PhysicalType>, bool)> {
    let mut columns = Vec::new();
    for column in schema.get_fields() {
        let info = column.get_basic_info();
        let optional = !info.has_repetition() || info.repetition() == Repetition::OPTIONAL;
        let kind = if column.is_primitive() { Some(column.get_physical_type()) } else { None };
        columns.push((column.name(), kind, optional));
    }
    columns
}

/// Whether `schema` is a later version of our schema.
fn is_newer(schema: &str) -> bool {
    version(schema).is_some_and(|found| Some(found) > version(schema::SCHEMA))
}

fn version(schema: &str) -> Option<u32> {
    schema.strip_prefix(schema::SCHEMA_NAME)?.parse().ok()
}

impl Iterator for RecordReader {
    type Item = Result<Snapshot, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let snapshot = self.check.snapshots().saturating_sub(1);
        let next = guarded(|| Ok::<_, String>(self.next_snapshot())).unwrap_or_else(|what| Err(Fault::Damaged(what)));
        let path = self.path.clone();
        let next = next.map_err(|fault| match fault {
            Fault::Damaged(what) => RecordError::Damaged { path, what },
            Fault::Inconsistent(what) => RecordError::Inconsistent { path, snapshot, what },
        });
        self.ended = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

/// An error without the file's name.
enum Fault {
    Damaged(String),
    Inconsistent(String),
}

impl From<parquet::errors::ParquetError> for Fault {
    fn from(error: parquet::errors::ParquetError) -> Self {
        Self::Damaged(one_line(&error))
    }
}

/// A row; `event` is `None` if it begins a snapshot.
struct Row {
    snapshot: i32,
    time_ns: i64,
    process: Option<u32>,
    event: Option<Event>,
}

/// A column of a row group. We read it in batches.
struct Column<T: DataType> {
    name: &'static str,
    reader: ColumnReaderImpl<T>,
    optional: bool,
    values: Vec<T::T>,
    levels: Vec<i16>,
    next_value: usize,
}

impl<T: DataType> Column<T> {
    fn fill(&mut self, rows: usize) -> Result<(), Fault> {
        self.values.clear();
        self.levels.clear();
        self.next_value = 0;
        let (read, _, _) = self.reader.read_records(rows, Some(&mut self.levels), None, &mut self.values)?;
        let whole = read == rows && self.levels.len() == if self.optional { rows } else { 0 };
        if whole { Ok(()) } else { Err(Fault::Damaged(format!("the column {} is too short", self.name))) }
    }

    /// The value in a row. Call this for every row in order.
    fn take(&mut self, row: usize) -> Option<T::T> {
        if self.optional && self.levels.get(row) != Some(&1) {
            return None;
        }
        self.next_value += 1;
        self.values.get(self.next_value - 1).cloned()
    }
}

/// Defines the rows of a row group from the schema's columns, in order.
macro_rules! rows {
    ($($column:ident: $type:ty,)*) => {
        struct Rows {
            left: usize,
            batch: usize,
            at: usize,
            $($column: Column<$type>,)*
        }

        impl Rows {
            fn of(group: &dyn RowGroupReader) -> Result<Self, Fault> {
                let left = usize::try_from(group.metadata().num_rows());
                let left = left.map_err(|_| Fault::Damaged("a number of rows is out of range".into()))?;
                let mut columns = ColumnOpener { group, next: 0 };
                Ok(Self { left, batch: 0, at: 0, $($column: columns.column(stringify!($column))?,)* })
            }

            fn fill(&mut self) -> Result<(), Fault> {
                self.batch = self.left.min(BATCH_ROWS);
                self.left -= self.batch;
                self.at = 0;
                $(self.$column.fill(self.batch)?;)*
                Ok(())
            }
        }
    };
}

rows! {
    snapshot: Int32Type,
    time_ns: Int64Type,
    event: ByteArrayType,
    process: Int32Type,
    pid: Int32Type,
    name: ByteArrayType,
    region: Int32Type,
    kind: ByteArrayType,
    first_page: Int64Type,
    pages: Int64Type,
    page: Int64Type,
    state: ByteArrayType,
    huge: BoolType,
    digest: FixedLenByteArrayType,
    part0: Int32Type,
    part1: Int32Type,
    part2: Int32Type,
    part3: Int32Type,
    frame: Int64Type,
}

/// Opens the columns of a row group in the schema's order.
struct ColumnOpener<'a> {
    group: &'a dyn RowGroupReader,
    next: usize,
}

impl ColumnOpener<'_> {
    fn column<T: DataType>(&mut self, name: &'static str) -> Result<Column<T>, Fault> {
        let reader: ColumnReader = self.group.get_column_reader(self.next)?;
        let optional = self.group.metadata().column(self.next).column_descr().max_def_level() > 0;
        self.next += 1;
        let reader = get_typed_column_reader(reader);
        Ok(Column { name, reader, optional, values: Vec::new(), levels: Vec::new(), next_value: 0 })
    }
}

impl Rows {
    fn next(&mut self) -> Result<Option<Row>, Fault> {
        if self.at == self.batch {
            if self.left == 0 {
                return Ok(None);
            }
            self.fill()?;
        }
        let at = self.at;
        self.at += 1;
        // Every row must read every column to keep them in step.
        let snapshot = require(self.snapshot.take(at), "snapshot")?;
        let time_ns = require(self.time_ns.take(at), "time_ns")?;
        let event = require(self.event.take(at), "event")?;
        let process = self.process.take(at).map(unsigned);
        let pid = self.pid.take(at);
        let name = self.name.take(at);
        let region = self.region.take(at).map(unsigned);
        let kind = self.kind.take(at);
        let first = self.first_page.take(at);
        let pages = self.pages.take(at);
        let page = self.page.take(at);
        let state = self.state.take(at);
        let huge = self.huge.take(at);
        let digest = self.digest.take(at);
        let parts = [&mut self.part0, &mut self.part1, &mut self.part2, &mut self.part3];
        let parts = parts.map(|part| part.take(at).map(unsigned));
        let frame = self.frame.take(at).map(unsigned_long);
        let event = match text(&event)? {
            word::SNAPSHOT => None,
            word::PROCESS => {
                let name = name.as_ref().map(text).transpose()?.map(str::to_owned);
                Some(Event::Process(ProcessRow { process: require(process, "process")?, pid, name }))
            }
            word::EXIT => Some(Event::Exit { process: require(process, "process")? }),
            word::REGION => Some(Event::Region(RegionRow {
                region: require(region, "region")?,
                process: require(process, "process")?,
                kind: text(&require(kind, "kind")?)?.to_owned(),
                first: Vpn(unsigned_long(require(first, "first_page")?)),
                pages: Pages(unsigned_long(require(pages, "pages")?)),
            })),
            word::UNMAP => Some(Event::Unmap { region: require(region, "region")? }),
            word::PAGE => {
                let word = require(state, "state")?;
                let word = text(&word)?;
                let unknown = || Fault::Inconsistent(format!("{word:?} is not a page state"));
                let mut now = Page { state: schema::state_of(word).ok_or_else(unknown)?, ..ABSENT };
                if now.state != PageState::Absent {
                    let digest = require(digest, "digest")?;
                    let bytes = digest.data().try_into();
                    now.digest =
                        u128::from_be_bytes(bytes.map_err(|_| Fault::Damaged("a digest is too short".into()))?);
                    for (to, part) in now.parts.iter_mut().zip(parts) {
                        *to = require(part, "parts")?;
                    }
                    now.huge = require(huge, "huge")?;
                    now.frame = frame;
                }
                let page = Vpn(unsigned_long(require(page, "page")?));
                Some(Event::Page { region: require(region, "region")?, page, now })
            }
            other => return Err(Fault::Inconsistent(format!("{other:?} is not an event"))),
        };
        Ok(Some(Row { snapshot, time_ns, process, event }))
    }
}

fn require<T>(value: Option<T>, column: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::Inconsistent(format!("an event lacks its {column}")))
}

fn text(bytes: &ByteArray) -> Result<&str, Fault> {
    std::str::from_utf8(bytes.data()).map_err(|_| Fault::Inconsistent("a word is not UTF-8".into()))
}

/// Parquet stores unsigned values as signed ones.
#[expect(clippy::cast_sign_loss, reason = "the same bits")]
const fn unsigned(bits: i32) -> u32 {
    bits as u32
}

/// Reinterprets 64 bits in the same way.
#[expect(clippy::cast_sign_loss, reason = "the same bits")]
const fn unsigned_long(bits: i64) -> u64 {
    bits as u64
}
