//! `pagefold-fleet verify`.

use super::sketches::{SketchArgs, failed};
use crate::fleet::Workloads;
use crate::plan::{Document, SCHEMA};
use crate::verify::Verification;
use anyhow::Result;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The longest plan, bytes: a million moves.
const MOST_BYTES: u64 = 1 << 28;

/// Options of `pagefold-fleet verify`.
#[derive(clap::Args)]
pub struct VerifyArgs {
    /// The plan, as plan --json printed it
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    #[command(flatten)]
    sketches: SketchArgs,
}

pub async fn run(args: &VerifyArgs) -> Result<u8> {
    let plan = read_plan(&args.plan)?;
    let mut opened = args.sketches.open().await?;
    opened.progress.show("reading sketches", None);
    let now = Workloads::of(&opened.engine, &|_| ()).await.map_err(failed)?;
    opened.inventory.left_out.extend(opened.engine.lost());
    let verification = Verification::of(&plan, &now, &opened.inventory);
    opened.progress.clear();
    style::print(&if args.sketches.json { style::json(&verification)? } else { verification.to_string() })?;
    Ok(exit::OK)
}

fn read_plan(path: &Path) -> Result<Document> {
    let refused = |what: String| {
        let line = format!("cannot use {}: {what}; give the output of plan --json", path.display());
        Exit::new(exit::FAILURE, line)
    };
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text));
    if pagefold_engine::units::count(read.map_err(|error| refused(error.to_string()))?) > MOST_BYTES {
        return Err(refused(format!("it has more than {MOST_BYTES} bytes")).into());
    }
    let plan: Document = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    if plan.schema != SCHEMA {
        return Err(refused(format!("its schema is {}, not {SCHEMA}", plan.schema)).into());
    }
    if plan.hosts.iter().any(|host| host.host.contains(char::is_control)) {
        return Err(refused("a host's name has a control character".to_owned()).into());
    }
    Ok(plan)
}
