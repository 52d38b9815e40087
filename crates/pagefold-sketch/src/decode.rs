//! Columns of a file, decoded with bounded memory.

use crate::error::SketchError;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::Page;
use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::DataType;
use parquet::file::reader::RowGroupReader;

/// The values of a required column.
///
/// Every form but the plain one is refused before it is decoded: compressed or repeated values could be a thousand times as long as
/// the file.
pub(crate) fn column<T: DataType>(
    group: &dyn RowGroupReader,
    at: usize,
    rows: usize,
) -> Result<Vec<T::T>, Box<dyn std::error::Error>> {
    if group.metadata().column(at).compression() != Compression::UNCOMPRESSED {
        return Err("a column is compressed".into());
    }
    for page in group.get_column_page_reader(at)? {
        let page = page?;
        if !matches!(page, Page::DataPage { .. }) || page.encoding() != Encoding::PLAIN {
            return Err("a column is not plain".into());
        }
    }
    let mut values = Vec::new();
    let (read, _, _) =
        get_typed_column_reader::<T>(group.get_column_reader(at)?).read_records(rows, None, None, &mut values)?;
    if read != rows || values.len() != rows {
        return Err("a column is too short".into());
    }
    Ok(values)
}

/// An error of the parquet crate.
pub(crate) fn damaged(error: &dyn std::fmt::Display) -> SketchError {
    SketchError::Damaged(pagefold_parquet::one_line(error))
}
