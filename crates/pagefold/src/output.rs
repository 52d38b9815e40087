//! How figures are shown: colours, sizes, shares, and the rows that several commands print.

pub mod placement;
