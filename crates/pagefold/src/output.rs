//! How figures are shown: colours, sizes, shares, and the rows that several commands print.

pub mod figures;
pub mod placement;
pub use pagefold_cli::style;
