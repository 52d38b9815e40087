//! Tables described column by column.

use pagefold_text::table::Table;

/// The heading of a column, and the text of its cell in a row.
pub type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> String);

/// Lays out rows as a table. The first `texts` columns are text; the others are aligned to the right.
pub fn table<'r, T: 'r>(texts: usize, rows: impl IntoIterator<Item = &'r T>, columns: &[Column<'_, T>]) -> Table {
    let mut table = Table::new(columns.iter().map(|(heading, _)| *heading), |column| column >= texts);
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| cell(row)));
    }
    table
}
