//! Runs the experiment on an emulated machine with several memory nodes, for hosts with only one. The same programs are
//! merged by that machine's own kernel. Emulation needs no hardware virtualization, and page placement is the same.

use super::NumaSizes;
use crate::bench::experiment::ExperimentSetting;
use crate::bench::report::{ExperimentReport, Failure, PolicyRun};
use crate::programs::{Image, NodesTools, scratch};
use anyhow::{Context, bail};
use pagefold_workload::OwnedChild;
use serde::Deserialize;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

const INIT: &str = include_str!("init");

/// The memory of each node, MiB: multiples of 128 MiB, the memory blocks that the kernel assigns to nodes.
const NODES_MIB: [u64; 4] = [384, 384, 256, 256];

/// Two distant pairs of nodes.
const DISTANCES: [[u8; 4]; 4] = [[10, 20, 30, 30], [20, 10, 30, 30], [30, 30, 10, 20], [30, 30, 20, 10]];

/// The parts of the guest's report that are used.
#[derive(Debug, Deserialize)]
struct Found {
    machine: GuestMachine,
    runs: Vec<PolicyRun>,
    failures: Vec<Failure>,
}

#[derive(Debug, Deserialize)]
struct GuestMachine {
    kernel: String,
}

/// Boots the machine, runs the experiment on it, and copies its runs into the report.
pub fn run(setting: &ExperimentSetting<'_>, sizes: NumaSizes, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let tools = NodesTools::find()?;
    let scratch = scratch()?;
    let at = |name: &str| scratch.path().join(name);
    make_image(setting, &tools, scratch.path())?;
    eprintln!(
        "{}: this machine has one memory node; using an emulated machine with {}",
        report.experiment,
        NODES_MIB.len()
    );
    let mut command = command(setting, &tools, scratch.path());
    // QEMU warns about stopped clocks until the kernel starts one.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(at("errors"))?);
    let mut machine = OwnedChild(command.spawn().context("cannot start the emulator")?);
    let ended = setting.interrupt.wait(sizes.limit, || anyhow::Ok(machine.0.try_wait()?))?;
    drop(machine);
    let text = |name| String::from_utf8_lossy(&fs::read(at(name)).unwrap_or_default()).into_owned();
    let (console, errors) = (text("console"), text("errors"));
    let results = fs::read_to_string(at("results")).unwrap_or_default();
    let found = serde_json::from_str::<Found>(results.trim());
    let (Some(_), Ok(found)) = (ended, found) else {
        let how = ended
            .map_or_else(|| format!("did not end within {:?}", sizes.limit), |status| format!("ended with {status}"));
        let lines: Vec<&str> = console.lines().collect();
        let end = lines[lines.len().saturating_sub(20)..].join("\n");
        bail!("the emulated machine {how} and gave no valid result. {errors}Its console ends with:\n{end}");
    };
    report.machine.kernel = format!("{} (emulated, on {})", found.machine.kernel, report.machine.kernel);
    report.runs = found.runs;
    report.failures = found.failures;
    Ok(())
}

fn command(setting: &ExperimentSetting<'_>, tools: &NodesTools, dir: &Path) -> Command {
    let mut command = tools.emulator.command(dir);
    command.args(["-machine", "q35,mem-merge=off"]);
    // QEMU 7.2 sometimes sets wrong flags after cmpxchg16b, and the kernel panics.
    command.args(["-cpu", "qemu64,-cx16"]);
    // The clock counts instructions, 1 ns each, and skips idle time, so CPU times do not depend on the host's load.
    command.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"]);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    let count = NODES_MIB.len();
    command.args(["-smp", &format!("{count},sockets={count}")]);
    command.args(["-m", &format!("{}M", NODES_MIB.iter().sum::<u64>())]);
    for (node, mib) in NODES_MIB.iter().enumerate() {
        command.args(["-object", &format!("memory-backend-ram,id=memory{node},size={mib}M")]);
        command.args(["-numa", &format!("node,nodeid={node},cpus={node},memdev=memory{node}")]);
    }
    for (from, row) in DISTANCES.iter().enumerate() {
        for (to, distance) in row.iter().enumerate() {
            command.args(["-numa", &format!("dist,src={from},dst={to},val={distance}")]);
        }
    }
    command.args(["-chardev", "file,id=console,path=console", "-chardev", "file,id=results,path=results"]);
    command.args(["-serial", "chardev:console", "-serial", "chardev:results"]);
    command.arg("-kernel").arg(&tools.kernel).args(["-initrd", "image"]);
    // No huge pages, which would hold the programs' memory.
    let quick = if setting.quick { " -- --quick" } else { "" };
    command
        .args(["-append", &format!("console=ttyS0 quiet panic=-1 mitigations=off transparent_hugepage=never{quick}")]);
    command
}

/// Packs this program, the one to measure, and their dependencies.
fn make_image(setting: &ExperimentSetting<'_>, tools: &NodesTools, dir: &Path) -> anyhow::Result<()> {
    let root = Image::begin(&tools.emulator.busybox, dir.join("root"), INIT, &[])?;
    root.put_program(setting.player, "bin/pagefold-lab")?;
    root.put_program(setting.program, "bin/pagefold")?;
    root.put_program(&tools.taskset, "bin/taskset")?;
    root.put_program(&tools.nice, "bin/nice")?;
    root.pack(&dir.join("image"))
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
