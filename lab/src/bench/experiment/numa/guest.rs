//! Runs the experiment on an emulated machine with several memory nodes, for hosts with only one. That machine's own
//! kernel merges the same programs, and places pages the same way.

use super::Sizes;
use crate::bench::experiment::ExperimentSetting;
use crate::bench::guest::{self, GuestKernel, GuestMachine};
use crate::bench::report::ExperimentReport;
use crate::programs::need;
use pagefold_programs::emulator::kernel_for;

/// The memory of each node, MiB: multiples of 128 MiB, the memory blocks that the kernel assigns to nodes. Any node may
/// hold the programs in this machine's file system (400 MiB if unoptimized): they go to the node of the processor that
/// unpacks them.
const NODES_MIB: [u64; 4] = [768; 4];

/// Two distant pairs of nodes.
const DISTANCES: [[u8; 4]; 4] = [[10, 20, 30, 30], [20, 10, 30, 30], [30, 30, 10, 20], [30, 30, 20, 10]];

/// Boots the machine, runs the experiment on it, and copies its runs into the report.
pub fn run(setting: &ExperimentSetting<'_>, sizes: Sizes, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let kernel = match setting.guest {
        Some(kernel) => kernel.clone(),
        None => GuestKernel { image: kernel_for("nodes")?, module: None },
    };
    eprintln!("{}: using an emulated machine with {} memory nodes", report.experiment, NODES_MIB.len());
    let programs = vec![(need("taskset", "util-linux")?, "bin/taskset"), (need("nice", "coreutils")?, "bin/nice")];
    let machine = GuestMachine { hardware: hardware(), programs, files: Vec::new(), limit: sizes.limit };
    let found = guest::run(setting, &kernel, &machine, report)?;
    report.machine.kernel = found.machine.kernel;
    report.runs = found.runs;
    report.failures = found.failures;
    Ok(())
}

fn hardware() -> Vec<String> {
    let count = NODES_MIB.len();
    let mut options = vec![("-smp", format!("{count},sockets={count}"))];
    options.push(("-m", format!("{}M", NODES_MIB.iter().sum::<u64>())));
    for (node, mib) in NODES_MIB.iter().enumerate() {
        options.push(("-object", format!("memory-backend-ram,id=memory{node},size={mib}M")));
        options.push(("-numa", format!("node,nodeid={node},cpus={node},memdev=memory{node}")));
    }
    for (from, row) in DISTANCES.iter().enumerate() {
        for (to, distance) in row.iter().enumerate() {
            options.push(("-numa", format!("dist,src={from},dst={to},val={distance}")));
        }
    }
    options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_symmetric() {
        for (from, row) in DISTANCES.iter().enumerate() {
            assert_eq!(row[from], 10);
            assert!(row.iter().enumerate().all(|(to, distance)| DISTANCES[to][from] == *distance));
        }
    }
}
