//! Reports what hosts and pairs of workloads have in common, how much is saved or could be, and how much may come back.

use crate::engine::{Columns, Engine, positive};
use crate::inventory::{Inventory, LeftOut};
use crate::queries;
use datafusion::error::Result;
use pagefold_engine::units::{count, whole};
use pagefold_text::style::{human, percent};
use pagefold_text::table::{Table, cell, spaced};
use serde::Serialize;
use std::fmt;

pub const SCHEMA: &str = "pagefold.fleet.report/1";

/// The report as JSON. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub key: Option<String>,
    pub hosts: Vec<HostRow>,
    /// The pairs with most in common.
    pub pairs: Vec<PairRow>,
    /// How many contents of each workload we searched for pairs.
    pub sampled: usize,
    pub left_out: Vec<LeftOut>,
    /// How many files don't count because their host has a newer one.
    pub older_files: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostRow {
    pub host: String,
    pub workloads: u64,
    pub anonymous_bytes: u64,
    /// How much of the anonymous memory was read for the sketches.
    pub read_bytes: u64,
    pub saved_bytes: u64,
    /// How much memory could be saved within workloads.
    pub within_bytes: u64,
    /// How much memory could be saved across workloads of one trust domain, and the error of that estimate.
    pub across_bytes: u64,
    pub across_error_bytes: u64,
    /// How much memory has come back at most, added up over workloads.
    pub take_back_bytes: u64,
    pub cpu_millicores: u64,
    pub host_memory_bytes: u64,
    pub host_cpu_millicores: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairRow {
    pub host: String,
    pub kind: String,
    pub workload: String,
    pub other_host: String,
    pub other_kind: String,
    pub other_workload: String,
    pub domain: String,
    /// How many bytes of distinct contents each of the two holds.
    pub held_bytes: u64,
    pub other_held_bytes: u64,
    pub common_bytes: u64,
    /// Bounds that are right in 19 of 20 cases.
    pub low_bytes: u64,
    pub high_bytes: u64,
}

impl Report {
    /// Asks the engine for hosts, and for at most `pairs` pairs.
    pub async fn of(engine: &Engine, inventory: &Inventory, pairs: usize) -> Result<Self> {
        let sampled = queries::sampled(engine.workloads());
        Ok(Self {
            schema: SCHEMA,
            key: inventory.key().map(|key| key.to_string()),
            hosts: hosts(engine).await?,
            pairs: if pairs == 0 { Vec::new() } else { self::pairs(engine, sampled, pairs).await? },
            sampled,
            left_out: [inventory.left_out.clone(), engine.lost()].concat(),
            older_files: inventory.older,
        })
    }
}

/// For each host, the memory that its workloads take, save and could save.
pub async fn hosts(engine: &Engine) -> Result<Vec<HostRow>> {
    let mut hosts = Vec::new();
    for batch in engine.rows(queries::HOSTS).await? {
        let columns = Columns(&batch);
        let host = columns.texts("host")?;
        let workloads = columns.integers("workloads")?;
        let anonymous = columns.integers("anonymous_bytes")?;
        let read = columns.integers("read_bytes")?;
        let saved = columns.integers("saved_bytes")?;
        let within = columns.integers("within_bytes")?;
        let across = columns.numbers("across_bytes")?;
        let error = columns.numbers("across_error_bytes")?;
        let take_back = columns.integers("take_back_bytes")?;
        let cpu = columns.integers("cpu_millicores")?;
        let memory = columns.integers("host_memory_bytes")?;
        let host_cpu = columns.integers("host_cpu_millicores")?;
        for row in 0..batch.num_rows() {
            hosts.push(HostRow {
                host: host.value(row).to_owned(),
                workloads: positive(workloads.value(row)),
                anonymous_bytes: positive(anonymous.value(row)),
                read_bytes: positive(read.value(row)),
                saved_bytes: positive(saved.value(row)),
                within_bytes: positive(within.value(row)),
                across_bytes: whole(across.value(row)),
                across_error_bytes: whole(error.value(row)),
                take_back_bytes: positive(take_back.value(row)),
                cpu_millicores: positive(cpu.value(row)),
                host_memory_bytes: positive(memory.value(row)),
                host_cpu_millicores: positive(host_cpu.value(row)),
            });
        }
    }
    Ok(hosts)
}

async fn pairs(engine: &Engine, sampled: usize, most: usize) -> Result<Vec<PairRow>> {
    let mut pairs = Vec::new();
    for batch in engine.rows(&queries::pairs(sampled, most)).await? {
        let columns = Columns(&batch);
        let host = columns.texts("host")?;
        let kind = columns.texts("kind")?;
        let workload = columns.texts("workload")?;
        let other_host = columns.texts("other_host")?;
        let other_kind = columns.texts("other_kind")?;
        let other_workload = columns.texts("other_workload")?;
        let domain = columns.texts("domain")?;
        let held = columns.numbers("held_bytes")?;
        let other_held = columns.numbers("other_held_bytes")?;
        let common = columns.numbers("common_bytes")?;
        let low = columns.numbers("low_bytes")?;
        let high = columns.numbers("high_bytes")?;
        for row in 0..batch.num_rows() {
            pairs.push(PairRow {
                host: host.value(row).to_owned(),
                kind: kind.value(row).to_owned(),
                workload: workload.value(row).to_owned(),
                other_host: other_host.value(row).to_owned(),
                other_kind: other_kind.value(row).to_owned(),
                other_workload: other_workload.value(row).to_owned(),
                domain: domain.value(row).to_owned(),
                held_bytes: whole(held.value(row)),
                other_held_bytes: whole(other_held.value(row)),
                common_bytes: whole(common.value(row)),
                low_bytes: whole(low.value(row)),
                high_bytes: whole(high.value(row)),
            });
        }
    }
    Ok(pairs)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["HOST", "WORKLOADS", "ANONYMOUS", "READ", "SAVED", "WITHIN", "ACROSS", "ERROR", "MAY COME BACK"];
        let mut table = Table::new(header, |column| column > 0);
        for host in &self.hosts {
            table.add_row([
                host.host.clone(),
                host.workloads.to_string(),
                human(host.anonymous_bytes),
                percent(host.read_bytes as f64, host.anonymous_bytes as f64),
                human(host.saved_bytes),
                human(host.within_bytes),
                human(host.across_bytes),
                format!("±{}", human(host.across_error_bytes)),
                human(host.take_back_bytes),
            ]);
        }
        // The sums of one host are below 2^63. But hosts may lie, so the sums over hosts saturate.
        let sum = |of: fn(&HostRow) -> u64| human(self.hosts.iter().map(of).fold(0, u64::saturating_add));
        writeln!(f, "{table}\n")?;
        writeln!(
            f,
            "{} hosts, {} workloads: {} saved, {} could be saved where they are, {} may come back",
            self.hosts.len(),
            self.hosts.iter().map(|host| host.workloads).sum::<u64>(),
            sum(|host| host.saved_bytes),
            sum(|host| host.within_bytes.saturating_add(host.across_bytes)),
            sum(|host| host.take_back_bytes),
        )?;
        if !self.pairs.is_empty() {
            let mut table = Table::new(
                ["WORKLOAD", "HOST", "AND", "HOST", "IN COMMON", "AT LEAST", "AT MOST", "OF THE SMALLER"],
                |column| column > 3,
            );
            for pair in &self.pairs {
                table.add_row([
                    format!("{} {}", pair.kind, pair.workload),
                    pair.host.clone(),
                    format!("{} {}", pair.other_kind, pair.other_workload),
                    pair.other_host.clone(),
                    human(pair.common_bytes),
                    human(pair.low_bytes),
                    human(pair.high_bytes),
                    percent(pair.common_bytes as f64, pair.held_bytes.min(pair.other_held_bytes) as f64),
                ]);
            }
            writeln!(f, "\n{table}")?;
        }
        write_left_out(f, &self.left_out, self.older_files)
    }
}

/// The files that do not count.
pub fn write_left_out(f: &mut fmt::Formatter<'_>, left_out: &[LeftOut], older: usize) -> fmt::Result {
    if older > 0 {
        writeln!(f, "\n{older} older files of these hosts do not count")?;
    }
    if !left_out.is_empty() {
        writeln!(f, "\nleft out ({}):", count(left_out.len()))?;
    }
    for LeftOut { file, host, why } in left_out {
        let host = host.as_ref().map_or_else(String::new, |host| format!(" of host {}", cell(host)));
        writeln!(f, "  {}{host} {}", spaced(file), spaced(why))?;
    }
    Ok(())
}
