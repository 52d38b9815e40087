//! The layout of a file, checked before the parquet crate sees it.
//!
//! The crate reserves memory for as many row groups as a footer says that there are, follows groups of the schema as deep as they go,
//! and reads the header of a page wherever the footer says that one is. What cannot be reserved ends the process, and a stack that
//! overflows does, too: no panic that could be caught. So only the form that this program writes is let through: the schema byte
//! for byte, no more groups than rows, and pages one after the other, each plain and not compressed. This is no reader of Parquet.

use crate::error::SketchError;
use pagefold_core::units::count;

const MAGIC: usize = 4;
/// The length of the footer, and the magic number.
const TAIL: usize = 8;

/// Bytes of Thrift's compact protocol: field by field, in the order in which they are written.
mod thrift {
    /// The next field, a 32-bit number.
    pub(super) const I32: u8 = 0x15;
    /// The next field, a 64-bit number.
    pub(super) const I64: u8 = 0x16;
    /// The next field, a list.
    pub(super) const LIST: u8 = 0x19;
    /// The field after the next, a structure.
    pub(super) const SKIP_STRUCT: u8 = 0x2c;
    /// Elements of a list that are structures.
    pub(super) const STRUCT: u8 = 0x0c;
    pub(super) const END: u8 = 0;
}

/// Zigzag-encoded values of Parquet's enumerations.
const DATA_PAGE: u64 = 0;
const PLAIN: u64 = 0;
const RLE: u64 = 6;

/// Where the pages of a file are.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Their offsets, ascending, and at last that of the footer.
    starts: Vec<u64>,
}

impl Layout {
    /// Checks a file. `schema` is the beginning of every footer, and `rows_most` the most rows.
    pub(crate) fn of(bytes: &[u8], schema: &[u8], rows_most: u64) -> Result<Self, SketchError> {
        let damaged = |what: &str| SketchError::Damaged(what.to_owned());
        let (rest, tail) = bytes.split_at_checked(bytes.len().saturating_sub(TAIL)).ok_or(SketchError::CutOff)?;
        let length = tail.first_chunk().map(|length| u32::from_le_bytes(*length)).ok_or(SketchError::CutOff)?;
        let length = usize::try_from(length).map_err(|_| SketchError::CutOff)?;
        let (data, footer) =
            rest.len().checked_sub(length).and_then(|at| rest.split_at_checked(at)).ok_or(SketchError::CutOff)?;
        let groups = footer
            .strip_prefix(schema)
            .ok_or_else(|| SketchError::Foreign("its columns differ from the schema".to_owned()))?;
        let (rows, groups) = counts(groups).ok_or_else(|| damaged("its footer is not in the written form"))?;
        if rows > rows_most {
            return Err(SketchError::TooMuch { what: "workloads", found: rows, most: rows_most });
        }
        if groups > rows {
            return Err(damaged("it has more groups than rows"));
        }
        let starts = starts(data).ok_or_else(|| damaged("its pages are not in the written form"))?;
        Ok(Self { starts })
    }

    /// Whether so many bytes from an offset on are whole pages.
    pub(crate) fn holds(&self, from: u64, length: u64) -> bool {
        let is_start = |at: u64| self.starts.binary_search(&at).is_ok();
        is_start(from) && length > 0 && from.checked_add(length).is_some_and(is_start)
    }
}

/// The part of the footer of a file without rows that is the same in all files: what is before the counts.
pub(crate) fn schema_of(empty: &[u8]) -> &[u8] {
    let counts = [thrift::I64, 0, thrift::LIST, thrift::STRUCT];
    let length = empty
        .len()
        .checked_sub(TAIL)
        .and_then(|at| empty[at..].first_chunk())
        .map(|length| u32::from_le_bytes(*length));
    let footer = length
        .and_then(|length| empty.get(empty.len().checked_sub(TAIL + usize::try_from(length).ok()?)?..))
        .unwrap_or_default();
    let end = footer.windows(counts.len()).position(|window| window == counts).unwrap_or(0);
    &footer[..end]
}

/// The numbers of rows and of row groups.
fn counts(footer: &[u8]) -> Option<(u64, u64)> {
    let mut reader = Reader(footer);
    reader.byte(thrift::I64)?;
    let rows = reader.number()?;
    reader.byte(thrift::LIST)?;
    let (&header, rest) = reader.0.split_first()?;
    reader.0 = rest;
    let groups = if header >> 4 == 15 { reader.varint()? } else { u64::from(header >> 4) };
    (header & 15 == thrift::STRUCT).then_some((rows, groups))
}

/// The offsets of the pages, and of what follows them.
fn starts(data: &[u8]) -> Option<Vec<u64>> {
    let mut reader = Reader(data.get(MAGIC..)?);
    let mut starts = Vec::new();
    while !reader.0.is_empty() {
        starts.push(count(data.len() - reader.0.len()));
        reader.field(DATA_PAGE)?;
        reader.byte(thrift::I32)?;
        let length = reader.number()?;
        reader.field_of(length)?;
        reader.byte(thrift::SKIP_STRUCT)?;
        reader.byte(thrift::I32)?;
        reader.number()?;
        for value in [PLAIN, RLE, RLE] {
            reader.field(value)?;
        }
        reader.byte(thrift::END)?;
        reader.byte(thrift::END)?;
        reader.0 = reader.0.get(usize::try_from(length).ok()?..)?;
    }
    starts.push(count(data.len()));
    Some(starts)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// Skips this byte.
    fn byte(&mut self, expected: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[expected])?;
        Some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..63).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A number that is not negative.
    fn number(&mut self) -> Option<u64> {
        self.varint().filter(|zigzag| zigzag % 2 == 0).map(|zigzag| zigzag / 2)
    }

    /// Skips the next field, which has this zigzag-encoded value.
    fn field(&mut self, zigzag: u64) -> Option<()> {
        self.byte(thrift::I32)?;
        (self.varint()? == zigzag).then_some(())
    }

    /// The same for a number.
    fn field_of(&mut self, number: u64) -> Option<()> {
        self.field(number.checked_mul(2)?)
    }
}
