//! The Parquet file of a host's workloads: `pagefold.sketch/1`.
//!
//! One flat table, no column nullable, plain and not compressed (hashes can't be made smaller). So any Parquet reader
//! can read it, and a hostile file takes at most a few times its own length in memory. fleet/README.md describes the
//! columns. The key-value metadata has the schema, our version, and a checksum over the file.

use crate::decode::{column, damaged};
use crate::error::SketchError;
use crate::guarded;
use crate::key::KeyId;
use crate::layout::{Layout, schema_of};
use crate::row::{Kind, NUMBER_MOST, Row, TIME_MOST};
use crate::seal::{self, KEY_SCHEMA, KEY_VERSION, SealError, Sealing};
use crate::sketch::Sketch;
use bytes::Bytes;
use pagefold_engine::units::count;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::file::metadata::{KeyValue, RowGroupMetaData};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::TypePtr;
use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::io::{Cursor, Read, Seek, Write};
use std::sync::Arc;

pub const SCHEMA: &str = "pagefold.sketch/1";
/// The beginning of [`SCHEMA`], which is the same in all versions.
const SCHEMA_NAME: &str = "pagefold.sketch/";
const VERSION: u32 = 1;
/// We search this much at the end of a file for the schema's name: only other entries, and the end of the metadata,
/// come after the name.
const TAIL_BYTES: usize = 4096;

pub const ROWS_MOST: usize = 4096;
pub const FILE_BYTES: u64 = 160 << 20;
/// We write this many rows together, half a MiB at most.
const GROUP_ROWS: usize = 16;

/// A column: its name, and its value in a row.
pub type Text = (&'static str, fn(&Row) -> String);
/// A column of numbers: its name, its value in a row, and the row's field for it.
pub type Number = (&'static str, fn(&Row) -> u64, fn(&mut Row) -> &mut u64);

/// The columns of text, which come first.
pub const TEXTS: [Text; 5] = [
    ("host", |row| row.host.clone()),
    ("key", |row| row.key.to_string()),
    ("kind", |row| row.kind.to_string()),
    ("workload", |row| row.workload.clone()),
    ("domain", |row| row.domain.clone()),
];

/// The columns of numbers, which follow the texts. The last column of a file is the sketch.
pub const NUMBERS: [Number; 19] = [
    ("time_us", |row| row.time_us, |row| &mut row.time_us),
    ("since_us", |row| row.since_us, |row| &mut row.since_us),
    ("anonymous_bytes", |row| row.anonymous_bytes, |row| &mut row.anonymous_bytes),
    ("read_bytes", |row| row.read_bytes, |row| &mut row.read_bytes),
    ("zero_bytes", |row| row.zero_bytes, |row| &mut row.zero_bytes),
    ("pages_1", |row| row.pages[0], |row| &mut row.pages[0]),
    ("pages_2", |row| row.pages[1], |row| &mut row.pages[1]),
    ("pages_3_15", |row| row.pages[2], |row| &mut row.pages[2]),
    ("pages_16_255", |row| row.pages[3], |row| &mut row.pages[3]),
    ("pages_256", |row| row.pages[4], |row| &mut row.pages[4]),
    ("savable_bytes", |row| row.savable_bytes, |row| &mut row.savable_bytes),
    ("saved_bytes", |row| row.saved_bytes, |row| &mut row.saved_bytes),
    ("take_back_bytes", |row| row.take_back_bytes, |row| &mut row.take_back_bytes),
    ("came_bytes", |row| row.came_bytes, |row| &mut row.came_bytes),
    ("went_bytes", |row| row.went_bytes, |row| &mut row.went_bytes),
    ("broken_bytes", |row| row.broken_bytes, |row| &mut row.broken_bytes),
    ("cpu_millicores", |row| row.cpu_millicores, |row| &mut row.cpu_millicores),
    ("host_memory_bytes", |row| row.host_memory_bytes, |row| &mut row.host_memory_bytes),
    ("host_cpu_millicores", |row| row.host_cpu_millicores, |row| &mut row.host_cpu_millicores),
];

/// Whether a column has times, microseconds since 1970.
pub fn is_time(column: &str) -> bool {
    column.ends_with("_us")
}

/// The largest number in a column.
fn most(column: &str) -> u64 {
    if is_time(column) { TIME_MOST } else { NUMBER_MOST }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct SketchFile {
    pub rows: Vec<Row>,
}

impl SketchFile {
    /// The host of the file's workloads, if there are any.
    pub fn host(&self) -> Option<&str> {
        self.rows.first().map(|row| row.host.as_str())
    }

    /// When the file's latest sketch was complete, microseconds.
    pub fn time_us(&self) -> u64 {
        self.rows.iter().map(|row| row.time_us).max().unwrap_or(0)
    }
}

/// Checks whether these rows can be in one file.
fn check<R: Borrow<Row>>(rows: &[R]) -> Result<(), SketchError> {
    if rows.len() > ROWS_MOST {
        return Err(SketchError::TooMuch { what: "workloads", found: count(rows.len()), most: count(ROWS_MOST) });
    }
    let mut names = BTreeSet::new();
    for (at, row) in rows.iter().enumerate() {
        let checked = check_row(row.borrow(), rows[0].borrow(), &mut names);
        checked.map_err(|what| SketchError::Row { row: at, what })?;
    }
    Ok(())
}

fn check_row<'a>(
    row: &'a Row,
    first: &Row,
    names: &mut BTreeSet<(Kind, &'a String, &'a String)>,
) -> Result<(), String> {
    row.check()?;
    if (&row.host, row.key) != (&first.host, first.key) {
        return Err("it has another host or key than the first row".to_owned());
    }
    if !names.insert((row.kind, &row.workload, &row.domain)) {
        return Err(format!("an earlier row has a {} of the same name", row.kind));
    }
    Ok(())
}

fn schema() -> parquet::errors::Result<TypePtr> {
    let texts = TEXTS.iter().map(|(name, _)| format!("required binary {name} (STRING);"));
    let numbers = NUMBERS.iter().map(|(name, ..)| {
        let logical = if is_time(name) { " (TIMESTAMP(MICROS,true))" } else { "" };
        format!("required int64 {name}{logical};")
    });
    let columns: String = texts.chain(numbers).collect();
    let message = format!("message pagefold_sketch {{ {columns} required binary sketch; }}");
    Ok(Arc::new(parse_message_type(&message)?))
}

/// Writes a file. We must be able to read `out` again, for the checksum.
pub fn write<W: Read + Write + Seek + Send, R: Borrow<Row>>(out: W, rows: &[R]) -> Result<W, SketchError> {
    check(rows)?;
    let written = write_groups(out, rows).map_err(|error| failed(&error))?;
    let (out, _) = written.seal().map_err(|error| failed(&error))?;
    Ok(out)
}

fn failed(error: &dyn std::fmt::Display) -> SketchError {
    SketchError::Write(crate::one_line(error))
}

fn write_groups<W: Read + Write + Seek + Send, R: Borrow<Row>>(
    out: W,
    rows: &[R],
) -> parquet::errors::Result<Sealing<W>> {
    let entries = [(KEY_SCHEMA, SCHEMA.to_owned()), (KEY_VERSION, env!("CARGO_PKG_VERSION").to_owned())];
    let properties = WriterProperties::builder()
        .set_compression(Compression::UNCOMPRESSED)
        .set_dictionary_enabled(false)
        // Row groups are small, and hashes have no order that a reader could use.
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_created_by(concat!("pagefold version ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(seal::entries(&entries, KeyValue::new)))
        .build();
    let mut writer = SerializedFileWriter::new(Sealing::new(out), schema()?, Arc::new(properties))?;
    for rows in rows.chunks(GROUP_ROWS) {
        let rows: Vec<&Row> = rows.iter().map(Borrow::borrow).collect();
        let mut group = writer.next_row_group()?;
        for (_, text) in TEXTS {
            put::<ByteArrayType, W>(&mut group, rows.iter().map(|row| ByteArray::from(text(row).into_bytes())))?;
        }
        for (name, number, _) in NUMBERS {
            let most = most(name);
            let values = rows.iter().map(|row| i64::try_from(number(row).min(most)).unwrap_or(i64::MAX));
            put::<Int64Type, W>(&mut group, values)?;
        }
        put::<ByteArrayType, W>(&mut group, rows.iter().map(|row| ByteArray::from(row.sketch.to_bytes())))?;
        group.close()?;
    }
    writer.into_inner()
}

fn put<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, Sealing<W>>,
    values: impl Iterator<Item = T::T>,
) -> parquet::errors::Result<()> {
    // We call this once for each column, in the schema's order.
    if let Some(mut column) = group.next_column()? {
        column.typed::<T>().write_batch(&values.collect::<Vec<_>>(), None, None)?;
        column.close()?;
    }
    Ok(())
}

/// Reads a file, which takes about twice as much memory as the file is long.
pub fn read(bytes: Vec<u8>) -> Result<SketchFile, SketchError> {
    let length = count(bytes.len());
    if length > FILE_BYTES {
        return Err(SketchError::TooMuch { what: "bytes", found: length, most: FILE_BYTES });
    }
    seal::check(&mut Cursor::new(&bytes)).map_err(|error| match error {
        SealError::Read(error) => SketchError::Read(error),
        SealError::NotParquet => SketchError::NotParquet,
        SealError::CutOff => SketchError::CutOff,
        SealError::NoChecksum { ours: false } => SketchError::Foreign(error.to_string()),
        SealError::NoChecksum { ours: true } | SealError::Wrong => SketchError::Damaged(error.to_string()),
    })?;
    check_schema(&bytes)?;
    let empty = write_empty()?;
    let layout = Layout::of(&bytes, schema_of(&empty), count(ROWS_MOST))?;
    let decoded = guarded(|| Ok::<_, String>(decode(&layout, Bytes::from(bytes))));
    let file = decoded.unwrap_or_else(|what| Err(SketchError::Damaged(what)))?;
    check(&file.rows)?;
    Ok(file)
}

/// Finds out which schema a file names near its end.
fn check_schema(bytes: &[u8]) -> Result<(), SketchError> {
    let tail = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
    let last = tail.windows(SCHEMA_NAME.len()).rposition(|window| window == SCHEMA_NAME.as_bytes());
    let named = last.ok_or_else(|| SketchError::Foreign("it does not name its schema".to_owned()))?;
    let mut version = 0;
    for digit in tail[named + SCHEMA_NAME.len()..].iter().take(9) {
        if !digit.is_ascii_digit() {
            break;
        }
        version = version * 10 + u32::from(digit - b'0');
    }
    match version {
        VERSION => Ok(()),
        0 => Err(SketchError::Foreign("its schema has no version".to_owned())),
        other => Err(SketchError::Newer(format!("{SCHEMA_NAME}{other}"))),
    }
}

/// A file without rows. It consists of the parts that all files have in common.
fn write_empty() -> Result<Vec<u8>, SketchError> {
    let rows: [Row; 0] = [];
    write(Cursor::new(Vec::new()), &rows).map(Cursor::into_inner)
}

fn decode(layout: &Layout, bytes: Bytes) -> Result<SketchFile, SketchError> {
    let file = SerializedFileReader::new(bytes).map_err(|error| damaged(&error))?;
    let metadata = file.metadata().file_metadata();
    let expected = schema().map_err(|error| damaged(&error))?;
    if metadata.schema_descr().root_schema() != &*expected {
        return Err(SketchError::Foreign("its columns differ from the schema".to_owned()));
    }
    let most = count(ROWS_MOST);
    let mut found: u64 = 0;
    for group in file.metadata().row_groups() {
        found = found.saturating_add(u64::try_from(group.num_rows()).unwrap_or(u64::MAX));
    }
    if found > most {
        return Err(SketchError::TooMuch { what: "workloads", found, most });
    }
    // No two columns may share a page: if they could, a short file could take a thousand times its length in memory.
    let mut end = None;
    for column in file.metadata().row_groups().iter().flat_map(RowGroupMetaData::columns) {
        let (from, length) = column.byte_range();
        if end.is_some_and(|end| from != end) {
            return Err(SketchError::Damaged("its columns are not one after the other".to_owned()));
        }
        end = from.checked_add(length);
    }
    let mut rows = Vec::new();
    for group in 0..file.num_row_groups() {
        let group = file.get_row_group(group).map_err(|error| damaged(&error))?;
        read_group(layout, &*group, &mut rows)?;
    }
    Ok(SketchFile { rows })
}

/// Adds the rows of a group.
fn read_group(layout: &Layout, group: &dyn RowGroupReader, rows: &mut Vec<Row>) -> Result<(), SketchError> {
    let first = rows.len();
    let many = usize::try_from(group.metadata().num_rows()).map_err(|error| damaged(&error))?;
    let mut texts: [Vec<ByteArray>; TEXTS.len()] = Default::default();
    for (at, texts) in texts.iter_mut().enumerate() {
        *texts = column::<ByteArrayType>(layout, group, at, many).map_err(|error| damaged(&error))?;
    }
    let sketches =
        column::<ByteArrayType>(layout, group, TEXTS.len() + NUMBERS.len(), many).map_err(|error| damaged(&error))?;
    for (at, sketch) in sketches.iter().enumerate() {
        rows.push(row_of(&texts, sketch, at).map_err(|what| SketchError::Row { row: first + at, what })?);
    }
    for (at, (name, _, place)) in NUMBERS.iter().enumerate() {
        let numbers = column::<Int64Type>(layout, group, TEXTS.len() + at, many).map_err(|error| damaged(&error))?;
        for (at, number) in numbers.into_iter().enumerate() {
            let Some(number) = u64::try_from(number).ok().filter(|number| *number <= most(name)) else {
                let what = format!("{name} is not from 0 to {}", most(name));
                return Err(SketchError::Row { row: first + at, what });
            };
            *place(&mut rows[first + at]) = number;
        }
    }
    Ok(())
}

fn row_of(texts: &[Vec<ByteArray>; TEXTS.len()], sketch: &ByteArray, at: usize) -> Result<Row, String> {
    let [host, key, kind, workload, domain] = texts;
    Ok(Row {
        host: text(host, at)?,
        key: KeyId::parse(&text(key, at)?).ok_or("its key is not 16 digits")?,
        kind: Kind::parse(&text(kind, at)?).ok_or("its kind is unknown")?,
        workload: text(workload, at)?,
        domain: text(domain, at)?,
        ..Row::blank(Sketch::from_bytes(sketch.data()).map_err(|what| format!("its sketch: {what}"))?)
    })
}

fn text(values: &[ByteArray], at: usize) -> Result<String, String> {
    Ok(values[at].as_utf8().map_err(|_| "a name is not UTF-8")?.to_owned())
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
