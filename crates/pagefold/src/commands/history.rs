//! `pagefold history`: the savings over time, as CSV or JSON. We read the file that the daemon writes, so this works
//! without a running daemon, too.

use crate::commands::status::Status;
use crate::config::args::seconds;
use crate::config::ownership;
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::history::{self, Moment, utc};
use crate::output;
use anyhow::Result;
use pagefold_text::exit::{self, Exit};
use pagefold_text::style::Lines;
use serde::Serialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Clone, Debug, clap::Args)]
pub struct HistoryArgs {
    /// Print the last hours or days (2h, 30d): one line a minute for the last day, one for 15 minutes of older data
    #[arg(long, value_name = "DURATION", value_parser = seconds, default_value = "24h")]
    pub since: Duration,
    /// Read the history from this file [default: the running daemon's]
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Print JSON (schema pagefold.history/1) instead of CSV
    #[arg(long)]
    pub json: bool,
    /// What we print anyway
    #[arg(long, hide = true, conflicts_with = "json")]
    csv: bool,
}

#[derive(Debug, Serialize)]
struct Export {
    schema: &'static str,
    moments: Vec<Moment>,
}

/// The columns of the CSV, which are also the fields of a [`Moment`] as JSON.
const COLUMNS: &str = "time,pid,dry_run,saved_bytes,expected_bytes,marked_bytes,resident_bytes,available_bytes,\
    pagefold_cpu_seconds,ksmd_cpu_seconds";

pub fn run(args: &HistoryArgs) -> Result<u8> {
    let status = if args.history.is_none() { ask(&Request::Status).ok() } else { None };
    let file = history_file(args.history.as_deref(), status.as_ref());
    let moments = history::read(file, args.since, history::now()).map_err(|error| {
        let line = format!("cannot read the history {}: {error}", ownership::shown(file));
        match error.kind() {
            ErrorKind::PermissionDenied => Exit::new(exit::NOT_PERMITTED, format!("{line}; run as root (sudo)")),
            _ => Exit::new(exit::FAILURE, format!("{line}; give the daemon's file with --history")),
        }
    })?;
    let export = Export::of(moments);
    output::print(args.json, &export, |_| export.csv())?;
    Ok(exit::OK)
}

/// The file to read: the one that's named, the running daemon's, or the service's.
pub fn history_file<'a>(named: Option<&'a Path>, status: Option<&'a Status>) -> &'a Path {
    let daemons = status.and_then(|status| status.run.history.as_deref());
    named.or(daemons).unwrap_or(Path::new(history::DEFAULT_FILE))
}

impl Export {
    fn of(moments: Vec<Moment>) -> Self {
        Self { schema: "pagefold.history/1", moments }
    }

    fn csv(&self) -> String {
        let mut text = String::new();
        text.line(COLUMNS);
        for moment in &self.moments {
            text.line(format!(
                "{},{},{},{},{},{},{},{},{},{}",
                utc(moment.time),
                moment.pid,
                moment.dry_run,
                moment.saved_bytes,
                moment.expected_bytes,
                moment.marked_bytes,
                moment.resident_bytes,
                moment.available_bytes,
                moment.pagefold_ns as f64 / 1e9,
                moment.ksmd_ns as f64 / 1e9
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use pagefold_text::style::json;

    #[test]
    fn the_history_is_printed_as_csv_and_json() {
        let moment = |minute: u64, saved: u64| Moment {
            time: golden::NOW + 60 * minute,
            pid: golden::PID.into(),
            saved_bytes: saved << 20,
            expected_bytes: saved << 21,
            marked_bytes: saved << 22,
            resident_bytes: 1 << 30,
            available_bytes: 2 << 30,
            pagefold_ns: 1_500_000_000 * minute,
            ksmd_ns: 70_000_000 * minute,
            ..Moment::default()
        };
        let export = Export::of(vec![moment(0, 0), moment(1, 100), Moment { dry_run: true, ..moment(15, 0) }]);
        let document = json(&export).unwrap();
        golden::check("history.json", &document);
        golden::check("history.csv", &export.csv());
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        let first = document["moments"][0].as_object().unwrap();
        assert_eq!(first.len(), COLUMNS.split(',').count());
        assert!(COLUMNS.split(',').all(|column| first.contains_key(column)));
    }
}
