//! The rows of tables: processes, and workloads summed up.

use super::ProcessRow;
use pagefold_engine::state::MemoryTotal;
use pagefold_text::style::percent;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// We show this for a process that belongs to no workload.
pub const NO_WORKLOAD: &str = "-";

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// `None` for a workload.
    pub pid: Option<i32>,
    pub name: String,
    pub workload: String,
    pub processes: usize,
    pub memory: MemoryTotal,
    /// `None` while we don't know yet.
    pub saved_bytes: Option<u64>,
    pub left_alone: Option<String>,
}

impl Row {
    /// The saving's share of the memory. `-` if there's none, or if we don't know it yet.
    pub fn saved_share(&self) -> String {
        match self.saved_bytes {
            None | Some(0) => "-".to_owned(),
            Some(saved) => percent(saved as f64, self.memory.unmerged_bytes as f64),
        }
    }
}

pub fn process_rows(processes: &[ProcessRow]) -> Vec<Row> {
    let mut rows = Vec::new();
    for process in processes {
        rows.push(Row {
            pid: Some(process.pid),
            name: process.name.clone(),
            workload: process.workload.as_deref().unwrap_or(NO_WORKLOAD).to_owned(),
            processes: 1,
            memory: process.memory,
            saved_bytes: process.saved_bytes,
            left_alone: process.left_alone.clone(),
        });
    }
    rows
}

/// Sums up processes into a row for each workload, the ones that save most first.
pub fn by_workload(processes: Vec<Row>) -> Vec<Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for Row { workload, memory, saved_bytes, .. } in processes {
        let row =
            rows.entry(workload.clone()).or_insert_with(|| Row { name: workload.clone(), workload, ..Row::default() });
        row.processes += 1;
        row.memory += memory;
        if let Some(bytes) = saved_bytes {
            row.saved_bytes = Some(row.saved_bytes.unwrap_or(0) + bytes);
        }
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by_key(|row| Reverse((row.saved_bytes, row.memory.unmerged_bytes)));
    rows
}
