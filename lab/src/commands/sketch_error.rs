//! `pagefold-lab sketch-error`: how well sketches tell which contents the programs of a record have in common.

use crate::columns::table;
use crate::record::{RecordReader, State};
use crate::sketch_error::{Comparison, MEDIAN_BAR, Overall, Pair, WITHIN_BAR, compare, held};
use anyhow::Result;
use pagefold_text::exit;
use pagefold_text::style::{self, Lines};
use std::path::PathBuf;

/// Options of `pagefold-lab sketch-error`.
#[derive(clap::Args)]
pub struct SketchErrorArgs {
    /// The records; their last snapshots are compared
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Compare each pair of programs under this many keys
    #[arg(long, value_name = "NUMBER", default_value_t = 255, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    keys: u16,
    /// Print the results as JSON (schema pagefold.lab.sketch-error/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SketchErrorArgs) -> Result<u8> {
    let mut comparisons = Vec::new();
    for file in &args.files {
        let mut state = State::default();
        for snapshot in RecordReader::open(file)? {
            state.apply(&snapshot?);
        }
        // Digests of two records have different keys, so we compare each record by itself.
        let comparison = compare(&held(&state), args.keys);
        let text = if args.json { serde_json::to_string(&comparison)? + "\n" } else { describe(&comparison) };
        style::print(&text)?;
        comparisons.push(comparison);
    }
    let Some(overall) = Overall::of(&comparisons) else { return Ok(exit::OK) };
    if !args.json {
        style::print(&format!(
            "all: {} estimates, within the bounds {} % (bar {} %), median error {} % of the smaller one (bar {} %)\n",
            overall.estimates,
            percent(overall.within),
            percent(WITHIN_BAR),
            percent(overall.median_error),
            percent(MEDIAN_BAR),
        ))?;
    }
    Ok(if overall.meets_bars() { exit::OK } else { exit::FAILURE })
}

fn percent(share: f64) -> String {
    format!("{:.2}", 100.0 * share)
}

fn describe(comparison: &Comparison) -> String {
    let mut text = String::new();
    let rows = table::<Pair>(
        2,
        &comparison.pairs,
        &[
            ("a", &|pair| pair.a.clone()),
            ("b", &|pair| pair.b.clone()),
            ("smaller", &|pair| pair.smaller.to_string()),
            ("larger", &|pair| pair.larger.to_string()),
            ("common", &|pair| pair.common.to_string()),
            ("within", &|pair| format!("{}/{}", pair.within, pair.keys)),
            ("median %", &|pair| percent(pair.median_error)),
            ("largest %", &|pair| percent(pair.largest_error)),
        ],
    );
    rows.to_string().lines().for_each(|row| text.line(row));
    let Comparison { programs, keys, pairs, other_pairs, .. } = comparison;
    let found = match (comparison.within, comparison.median_error) {
        (Some(within), Some(error)) => {
            format!(": within the bounds {} %, median error {} % of the smaller one", percent(within), percent(error))
        }
        _ => String::new(),
    };
    text.line(format!(
        "{programs} programs, {} pairs with at least 1 % of the smaller one in common ({other_pairs} others), {keys} keys{found}",
        pairs.len(),
    ));
    text
}
