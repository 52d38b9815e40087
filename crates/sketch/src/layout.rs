//! The layout of a file, which we check before the parquet crate sees it.
//!
//! The crate reserves memory for as many row groups as a footer claims, follows groups of the schema as deep as they
//! go, and reads the header of a page wherever the footer says there is one. If it can't reserve that memory or
//! overflows its stack, the process ends: we couldn't catch that as a panic. It also counts up to the length that a
//! list of booleans claims to have, which takes seconds, and there can be many lists. So we only let through the form
//! that we write: the schema byte for byte, no more groups than rows, short lists, and pages one after the other, each
//! plain and not compressed. This module doesn't read Parquet files of any other form.

use crate::decode::damaged;
use crate::error::SketchError;
use pagefold_engine::units::count;

const MAGIC: usize = 4;
/// The length of the footer, and the magic number.
const TAIL: usize = 8;

/// Bytes of Thrift's compact protocol. The first byte of a field has its distance from the field before in the upper
/// half, and its type in the lower half.
mod thrift {
    /// First byte of the next field (distance 1), a 32-bit number.
    pub(super) const I32: u8 = 0x15;
    /// First byte of the next field, a 64-bit number.
    pub(super) const I64: u8 = 0x16;
    /// First byte of the next field, a list.
    pub(super) const LIST: u8 = 0x19;
    /// First byte of the field after the next (distance 2), a structure.
    pub(super) const SKIP_STRUCT: u8 = 0x2c;
    /// Types of values: the lower half of a field's first byte, and of a list's.
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const I8: u8 = 3;
    /// Numbers of 16, 32 and 64 bits.
    pub(super) const NUMBERS_FIRST: u8 = 4;
    pub(super) const NUMBERS_LAST: u8 = 6;
    pub(super) const BINARY: u8 = 8;
    pub(super) const ELEMENTS: u8 = 9;
    pub(super) const STRUCT: u8 = 12;
    pub(super) const END: u8 = 0;
    /// How deep structures and lists may be within others. We write eight levels.
    pub(super) const DEPTH_MOST: u32 = 16;
}

/// Zigzag-encoded values of Parquet's enumerations.
const DATA_PAGE: u64 = 0;
const PLAIN: u64 = 0;
const RLE: u64 = 6;

/// How long a footer may be: `FOOTER_BYTES` plus `GROUP_BYTES` for each row group, which is twice as much as our own
/// footers need. We limit it because a parsed footer takes several times its length in memory.
const FOOTER_BYTES: u64 = 16 << 10;
const GROUP_BYTES: u64 = 4 << 10;

/// Where the data pages of a file are.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The offsets of the pages, ascending, and finally the offset of the footer.
    starts: Vec<u64>,
}

impl Layout {
    /// Checks a file. `schema` is the beginning of every footer, and `rows_most` the limit on rows.
    pub(crate) fn of(bytes: &[u8], schema: &[u8], rows_most: u64) -> Result<Self, SketchError> {
        let (rest, tail) = bytes.split_at_checked(bytes.len().saturating_sub(TAIL)).ok_or(SketchError::CutOff)?;
        let length = u32::from_le_bytes(*tail.first_chunk().ok_or(SketchError::CutOff)?);
        let length = usize::try_from(length).map_err(|_| SketchError::CutOff)?;
        let (data, footer) = rest.split_at(rest.len().checked_sub(length).ok_or(SketchError::CutOff)?);
        let Some(groups) = footer.strip_prefix(schema) else {
            return Err(SketchError::Foreign("its columns differ from the schema".to_owned()));
        };
        let (rows, found) = counts(groups).ok_or_else(malformed)?;
        if rows > rows_most {
            return Err(SketchError::TooMuch { what: "workloads", found: rows, most: rows_most });
        }
        if found > rows {
            return Err(damaged(&"it has more groups than rows"));
        }
        if count(footer.len()) > FOOTER_BYTES + found * GROUP_BYTES {
            return Err(damaged(&"its footer is longer than its groups need"));
        }
        let mut reader = Reader(groups);
        if reader.structure(rows_most, thrift::DEPTH_MOST).is_none() || !reader.0.is_empty() {
            return Err(malformed());
        }
        let starts = starts(data).ok_or_else(|| damaged(&"its pages are not in the form that pagefold writes"))?;
        Ok(Self { starts })
    }

    /// Whether the `length` bytes from this offset on are whole data pages.
    pub(crate) fn holds(&self, from: u64, length: u64) -> bool {
        length > 0 && self.is_start(from) && from.checked_add(length).is_some_and(|end| self.is_start(end))
    }

    fn is_start(&self, at: u64) -> bool {
        self.starts.binary_search(&at).is_ok()
    }
}

fn malformed() -> SketchError {
    damaged(&"its footer is not in the form that pagefold writes")
}

/// The beginning of the footer of a file without rows, up to the counts. The footers of all files begin like this.
pub(crate) fn schema_of(empty: &[u8]) -> &[u8] {
    let counts = [thrift::I64, 0, thrift::LIST, thrift::STRUCT];
    let footer = footer_of(empty).unwrap_or_default();
    let end = footer.windows(counts.len()).position(|window| window == counts).unwrap_or(0);
    &footer[..end]
}

/// The end of a file: the footer, the footer's length and the magic number.
fn footer_of(file: &[u8]) -> Option<&[u8]> {
    let end = file.len().checked_sub(TAIL)?;
    let length = u32::from_le_bytes(*file[end..].first_chunk()?);
    file.get(end.checked_sub(usize::try_from(length).ok()?)?..)
}

/// The numbers of rows and of row groups.
fn counts(footer: &[u8]) -> Option<(u64, u64)> {
    let mut reader = Reader(footer);
    reader.byte(thrift::I64)?;
    let rows = reader.number()?;
    reader.byte(thrift::LIST)?;
    let (kind, groups) = reader.list()?;
    (kind == thrift::STRUCT).then_some((rows, groups))
}

/// The offsets of the pages, and of the end of the last one.
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
        reader.skip(length)?;
    }
    starts.push(count(data.len()));
    Some(starts)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self, expected: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[expected])?;
        Some(())
    }

    fn any(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    fn skip(&mut self, bytes: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(bytes).ok()?..)?;
        Some(())
    }

    /// The type and number of the elements of a list.
    fn list(&mut self) -> Option<(u8, u64)> {
        let header = self.any()?;
        let elements = if header >> 4 == 15 { self.varint()? } else { u64::from(header >> 4) };
        Some((header & 15, elements))
    }

    /// Skips the fields of a structure, in ascending order, and its end.
    fn structure(&mut self, elements_most: u64, depth: u32) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        loop {
            match self.any()? {
                thrift::END => return Some(()),
                // A field with a number of its own instead of a distance, which could repeat an earlier field.
                header if header >> 4 == 0 => return None,
                header if matches!(header & 15, thrift::TRUE | thrift::FALSE) => {}
                header => self.value(header & 15, elements_most, depth)?,
            }
        }
    }

    /// Skips a value that isn't a boolean.
    fn value(&mut self, kind: u8, elements_most: u64, depth: u32) -> Option<()> {
        match kind {
            thrift::I8 => self.skip(1),
            thrift::NUMBERS_FIRST..=thrift::NUMBERS_LAST => self.varint().map(drop),
            thrift::BINARY => {
                let length = self.varint()?;
                self.skip(length)
            }
            thrift::ELEMENTS => {
                let depth = depth.checked_sub(1)?;
                let (kind, elements) = self.list()?;
                if elements > elements_most {
                    return None;
                }
                (0..elements).try_for_each(|_| self.value(kind, elements_most, depth))
            }
            thrift::STRUCT => self.structure(elements_most, depth),
            _ => None,
        }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.any()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A number that is not negative.
    fn number(&mut self) -> Option<u64> {
        let zigzag = self.varint()?;
        if zigzag % 2 == 0 { Some(zigzag / 2) } else { None }
    }

    /// Skips the next field, which must have this zigzag-encoded value.
    fn field(&mut self, zigzag: u64) -> Option<()> {
        self.byte(thrift::I32)?;
        (self.varint()? == zigzag).then_some(())
    }

    /// Skips the next field, which must have this number.
    fn field_of(&mut self, number: u64) -> Option<()> {
        self.field(number.checked_mul(2)?)
    }
}
