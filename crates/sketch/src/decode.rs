//! Columns of a file, decoded with bounded memory.

use crate::error::SketchError;
use crate::layout::Layout;
use parquet::basic::Compression;
use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::DataType;
use parquet::file::reader::RowGroupReader;

/// The values of a required column.
pub(crate) fn column<T: DataType>(
    layout: &Layout,
    group: &dyn RowGroupReader,
    at: usize,
    rows: usize,
) -> Result<Vec<T::T>, Box<dyn std::error::Error>> {
    let chunk = group.metadata().column(at);
    let (from, length) = chunk.byte_range();
    if chunk.compression() != Compression::UNCOMPRESSED || !layout.holds(from, length) {
        return Err("a column does not consist of whole pages".into());
    }
    let mut values = Vec::new();
    let (read, _, _) =
        get_typed_column_reader::<T>(group.get_column_reader(at)?).read_records(rows, None, None, &mut values)?;
    if read != rows || values.len() != rows {
        return Err("a column is too short".into());
    }
    Ok(values)
}

/// Makes an error of the parquet crate one of ours.
pub(crate) fn damaged(error: &dyn std::fmt::Display) -> SketchError {
    SketchError::Damaged(crate::one_line(error))
}
