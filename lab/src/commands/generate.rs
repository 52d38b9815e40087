//! `pagefold-lab generate`: writes a record of one of the papers' workloads.

use crate::generate::{GENERATORS, Generator, Options};
use crate::record::{WriteError, Written, write};
use anyhow::{Result, bail};
use pagefold_engine::units::{Bytes, PAGE_SIZE, Pages};
use pagefold_text::exit::{self, Exit};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_SIZE as u64;

/// Options of `pagefold-lab generate`.
#[derive(clap::Args)]
pub struct GenerateArgs {
    /// The workload (see --list)
    #[arg(value_name = "NAME", required_unless_present = "list", value_parser = generator)]
    workload: Option<&'static Generator>,
    /// Write the record to this file, replacing it if it exists
    #[arg(short, long, value_name = "FILE", required_unless_present = "list")]
    output: Option<PathBuf>,
    /// Set the memory of each guest or program, in MiB [default: see --list]
    #[arg(long, value_name = "MIB")]
    size: Option<u64>,
    /// Set the number of guests or programs [default: see --list]
    #[arg(long, value_name = "N", alias = "processes")]
    guests: Option<u32>,
    /// Set the time that the record covers [default: 60s]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    length: Option<Duration>,
    /// Set the time between snapshots [default: 1s]
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    every: Option<Duration>,
    /// Set the seed: equal seeds and options give equal records [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print a summary as JSON (schema pagefold.lab.generate/1)
    #[arg(long)]
    json: bool,
    /// List the workloads
    #[arg(long, exclusive = true)]
    list: bool,
}

#[derive(Serialize)]
struct Summary<'a> {
    schema: &'static str,
    workload: &'static str,
    file: &'a Path,
    seed: u64,
    snapshots: u64,
    processes: u64,
    first_pages: u64,
    changed_pages: u64,
    bytes: u64,
}

fn generator(name: &str) -> Result<&'static Generator, String> {
    Generator::named(name).ok_or_else(|| {
        let names: Vec<_> = GENERATORS.iter().map(|generator| generator.name).collect();
        format!("choose {}", names.join(", "))
    })
}

pub fn run(args: &GenerateArgs) -> Result<u8> {
    if args.list {
        print!("{}", list());
        return Ok(exit::OK);
    }
    let (Some(generator), Some(file)) = (args.workload, &args.output) else {
        bail!("a workload and a file are required; see pagefold-lab generate --help");
    };
    let options = args.or_defaults(&generator.defaults);
    let mut workload = generator.start(&options).map_err(|error| Exit::new(exit::USAGE, error.to_string()))?;
    let written = match write(file, &generator.origin(&options), &mut workload) {
        Ok(written) => written,
        Err(WriteError::Record(error)) => return Err(error.into()),
        Err(WriteError::Source(never)) => match never {},
    };
    let Written { snapshots, processes, pages: first_pages, changes: changed_pages, bytes, .. } = written;
    if args.json {
        let schema = "pagefold.lab.generate/1";
        let workload = generator.name;
        let seed = options.seed;
        let summary = Summary { schema, workload, file, seed, snapshots, processes, first_pages, changed_pages, bytes };
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!(
            "{}: {snapshots} snapshots of {processes} programs, {first_pages} pages in the first and {changed_pages} changes after it, \
             {:.1} MiB in {}",
            generator.name,
            Bytes(bytes).mib(),
            file.display()
        );
    }
    Ok(exit::OK)
}

impl GenerateArgs {
    /// These options, with the workload's defaults for the ones that the user didn't give.
    fn or_defaults(&self, defaults: &Options) -> Options {
        Options {
            size: self.size.map_or(defaults.size, |mib| Pages(mib.saturating_mul(PAGES_PER_MIB))),
            processes: self.guests.unwrap_or(defaults.processes),
            length_ns: self.length.map_or(defaults.length_ns, nanoseconds),
            every_ns: self.every.map_or(defaults.every_ns, nanoseconds),
            seed: self.seed.unwrap_or(defaults.seed),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn list() -> String {
    let width = GENERATORS.iter().map(|generator| generator.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Generator { name, about, defaults, .. } in GENERATORS {
        let mib = defaults.size.bytes().mib();
        let seconds = defaults.length_ns / 1_000_000_000;
        let _ = writeln!(text, "{name:width$}  {about}; {} of {mib} MiB, {seconds} s", defaults.processes);
    }
    text
}
