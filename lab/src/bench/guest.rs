//! Runs an experiment in an emulated machine, on another kernel. Emulation needs no hardware virtualization.

use crate::bench::experiment::ExperimentSetting;
use crate::bench::report::ExperimentReport;
use crate::programs::scratch;
use anyhow::{Context, bail, ensure};
use pagefold_programs::child::OwnedChild;
use pagefold_programs::emulator::Emulator;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

const INIT: &str = include_str!("guest-init");

/// We show this many console lines if there's no result.
const TAIL: usize = 20;

/// A kernel for emulated machines.
#[derive(Clone, Debug)]
pub struct GuestKernel {
    /// The bootable image.
    pub image: PathBuf,
    /// A module to load before the experiment.
    pub module: Option<PathBuf>,
}

impl GuestKernel {
    /// Checks that the files exist.
    pub fn new(image: &Path, module: Option<&Path>) -> anyhow::Result<Self> {
        for file in std::iter::once(image).chain(module) {
            ensure!(file.is_file(), "{} is not a file; name a bootable kernel and, if any, its module", file.display());
        }
        Ok(Self { image: image.to_owned(), module: module.map(Path::to_owned) })
    }
}

/// A machine, without its kernel.
#[derive(Debug)]
pub struct GuestMachine {
    /// QEMU's arguments for processors and memory.
    pub hardware: Vec<String>,
    /// Further programs that the experiment needs: files here, and their paths in the machine.
    pub programs: Vec<(PathBuf, &'static str)>,
    /// Files that these programs need, at the same paths as here.
    pub files: Vec<PathBuf>,
    /// We end the machine after this time.
    pub limit: Duration,
}

impl GuestMachine {
    /// A machine with one processor and `mebibytes` of memory.
    pub fn new(mebibytes: u64, quick: bool) -> Self {
        let limit = Duration::from_secs(if quick { 900 } else { 3600 });
        Self {
            hardware: vec!["-m".to_owned(), format!("{mebibytes}M")],
            programs: Vec::new(),
            files: Vec::new(),
            limit,
        }
    }

    /// Memory for 1 GiB of programs and the kernel's records of them.
    pub fn small(quick: bool) -> Self {
        Self::new(1536, quick)
    }
}

/// Boots the machine, runs the experiment of `report` on it, and returns that machine's report.
pub fn run(
    setting: &ExperimentSetting<'_>,
    kernel: &GuestKernel,
    machine: &GuestMachine,
    report: &ExperimentReport,
) -> anyhow::Result<ExperimentReport> {
    let emulator = Emulator::find()?;
    let scratch = scratch()?;
    make_image(setting, &emulator, kernel, machine, &report.experiment, scratch.path())?;
    let mut command = emulator.machine(scratch.path(), &kernel.image, 0)?;
    // QEMU 7.2 sometimes sets wrong flags after cmpxchg16b, and the kernel panics.
    command.args(["-cpu", "qemu64,-cx16"]).args(&machine.hardware);
    // No huge pages, which would hold the programs' memory.
    command.args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off transparent_hugepage=never"]);
    // QEMU warns about stopped clocks until the kernel starts one.
    command.stderr(File::create(scratch.path().join("errors"))?);
    let mut emulated = OwnedChild(command.spawn().context("cannot start the emulator")?);
    let ended = setting.interrupt.wait(machine.limit, || anyhow::Ok(emulated.0.try_wait()?))?;
    drop(emulated);
    let result = serde_json::from_str::<ExperimentReport>(text_of(&scratch, "results").trim());
    let (Some(_), Ok(mut found)) = (ended, result) else {
        let console = text_of(&scratch, "console");
        let mut lines: Vec<&str> = console.lines().collect();
        lines.retain(|line| !line.trim().is_empty());
        eprintln!("{}", lines[lines.len().saturating_sub(TAIL)..].join("\n"));
        let how = match ended {
            Some(status) => format!("ended with {status}"),
            None => format!("did not end within {:?}", machine.limit),
        };
        let errors = text_of(&scratch, "errors");
        bail!("the emulated machine {how} and gave no valid result; its console ends as above. {}", errors.trim());
    };
    found.machine.kernel = format!("{} (emulated, on {})", found.machine.kernel, report.machine.kernel);
    Ok(found)
}

fn text_of(dir: &TempDir, name: &str) -> String {
    let bytes = fs::read(dir.path().join(name)).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Packs this program, the program to measure, their dependencies and the command line.
fn make_image(
    setting: &ExperimentSetting<'_>,
    emulator: &Emulator,
    kernel: &GuestKernel,
    machine: &GuestMachine,
    experiment: &str,
    dir: &Path,
) -> anyhow::Result<()> {
    let root = emulator.image(dir.join("root")).with_init(INIT, &[])?;
    root.put_program(setting.player, "bin/pagefold-lab")?;
    root.put_program(setting.program, "bin/pagefold")?;
    machine.programs.iter().try_for_each(|(here, there)| root.put_program(here, there))?;
    machine.files.iter().try_for_each(|file| root.put(file, file))?;
    if let Some(module) = &kernel.module {
        root.put(module, "module.ko")?;
    }
    fs::write(root.path("arguments"), arguments(setting, experiment))?;
    root.pack(&dir.join("image"))
}

/// The command line inside the machine, as init reads it.
fn arguments(setting: &ExperimentSetting<'_>, experiment: &str) -> String {
    let mut arguments = vec!["bench", experiment, "--emulated", "--json", "/dev/ttyS1"];
    if setting.quick {
        arguments.push("--quick");
    }
    if setting.all_peers {
        arguments.push("--all-peers");
    }
    for policy in setting.policies {
        arguments.extend(["--policy", policy]);
    }
    arguments.join("\0")
}
