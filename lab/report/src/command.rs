//! The command line of `pagefold-report` and `pagefold-lab report`.

use crate::density::Density;
use crate::{results, summary};
use pagefold_text::exit::{self, Exit};
use pagefold_text::html;
use std::path::PathBuf;

/// Options of the report.
#[derive(Clone, Debug, clap::Args)]
pub struct ReportArgs {
    /// The directory that bench --output wrote
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Write a web page: one file with all pictures, which needs no network
    #[arg(short, long, value_name = "FILE", default_value = "target/report.html")]
    pub output: PathBuf,
    /// Also show where the duplicate pages of this record are in the address space
    #[arg(long, value_name = "RECORD")]
    pub record: Option<PathBuf>,
}

pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let all = results::load(&args.dir, None)?;
    if all.is_empty() {
        let line = format!("{} has no results; make some with pagefold-lab bench --output", args.dir.display());
        return Err(Exit::new(exit::FAILURE, line).into());
    }
    let density = args.record.as_deref().map(Density::of_record).transpose()?;
    let document = summary::document(&all, density.as_ref());
    html::write(&args.output, &document.html()).map_err(|error| {
        let path = args.output.display();
        let line = format!("cannot write {path}: {error}; give --output a file that can be created");
        Exit::new(exit::FAILURE, line)
    })?;
    Ok(exit::OK)
}
