//! Emulated guests: we boot one, and restore any number from its snapshot, then change each individually.

use super::Answering;
use crate::dialogue::Dialogue;
use anyhow::{Context, bail, ensure};
use pagefold_programs::emulator::{Emulator, cache};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Booting takes 20 s on an idle machine, longer on a busy one.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
const MONITOR_LIMIT: Duration = Duration::from_secs(60);
/// Time between two queries to a monitor.
const PAUSE: Duration = Duration::from_millis(50);

const INIT: &str = include_str!("guest-init");
const SNAPSHOT: &str = "guest.snapshot";

/// The emulator and the contents of the image.
#[derive(Clone, Debug)]
pub struct GuestTools {
    emulator: Emulator,
    kernel: PathBuf,
    /// Source of the files in the guests.
    modules: PathBuf,
}

impl GuestTools {
    /// Finds the tools, or names the packages to install.
    pub fn find() -> anyhow::Result<Self> {
        let unpacked = cache()?.join("guest");
        let boot = files_below(&unpacked.join("boot")).unwrap_or_default();
        let kernel = boot.into_iter().find(|file| file.to_string_lossy().contains("/vmlinuz"));
        Ok(Self {
            emulator: Emulator::find()?,
            kernel: kernel.with_context(|| format!("no kernel in {}: run scripts/guest-kernel", unpacked.display()))?,
            modules: unpacked.join("lib/modules"),
        })
    }
}

#[derive(Debug)]
pub struct GuestImage {
    tools: GuestTools,
    dir: PathBuf,
    memory_mib: u64,
}

impl GuestImage {
    /// Builds an image with at most `data_mib` of files, boots it and saves the guest. Takes about a minute.
    pub fn make(tools: GuestTools, scratch: &Path, memory_mib: u64, data_mib: u64) -> anyhow::Result<Self> {
        let dir = scratch.join("guest");
        let image = Self { tools, dir, memory_mib };
        image.pack(data_mib << 20)?;
        let mut booted = image.command("boot");
        booted
            .arg("-kernel")
            .arg(&image.tools.kernel)
            .arg("-initrd")
            .arg(image.initrd())
            // ramfs, because the default tmpfs is limited to half of the memory.
            .args(["-append", "console=ttyS0 quiet panic=-1 rootfstype=ramfs"]);
        let mut guest = Dialogue::start(&mut booted, Some(&image.dir.join("boot.log")))?;
        guest.ready(BOOT_LIMIT).context("booting a guest")?;
        // A change that all guests share; it also loads everything the shell needs.
        let answer = guest.ask("change 0", ANSWER_LIMIT)?;
        ensure!(answer == "changed", "a guest answers {answer:?}");
        Monitor::connect(&image.monitor("boot"))?.save(SNAPSHOT)?;
        Ok(image)
    }

    /// Restores a guest and changes some of its files.
    pub fn start(&self, instance: usize) -> anyhow::Result<Answering> {
        let name = format!("guest-{instance}");
        let mut command = self.command(&name);
        command.args(["-incoming", &format!("exec:cat {SNAPSHOT}")]);
        let mut guest = Dialogue::start(&mut command, Some(&self.dir.join(format!("{name}.log"))))?;
        // Input sent before the restore is complete would be partly lost.
        Monitor::connect(&self.monitor(&name))?.wait_until_running()?;
        let answer = guest.ask(&format!("change {}", instance + 1), ANSWER_LIMIT)?;
        ensure!(answer == "changed", "a guest answers {answer:?}");
        // The guest computes the checksum that it answers.
        Ok(Answering { name: "qemu", dialogue: guest, question: "sum", limit: ANSWER_LIMIT })
    }

    /// The command of the machine: the snapshot requires the same one each time.
    fn command(&self, name: &str) -> Command {
        let mut command = self.tools.emulator.command(&self.dir);
        command
            // By default QEMU marks its guests' memory, which would bypass the policies under test.
            .args(["-machine", "pc,mem-merge=off", "-accel", "tcg,tb-size=64"])
            .args(["-m", &self.memory_mib.to_string()])
            // Relative names need no quotes in QEMU's options.
            .args(["-serial", "stdio", "-qmp", &format!("unix:{name}.monitor,server=on,wait=off")]);
        command
    }

    fn monitor(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.monitor"))
    }

    fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }

    /// Packs busybox, the init script and files of at most `data_bytes` in all.
    fn pack(&self, data_bytes: u64) -> anyhow::Result<()> {
        let root = self.tools.emulator.image(self.dir.join("root")).with_init(INIT, &["dev", "data", "own"])?;
        let mut left = data_bytes;
        for (number, file) in files_below(&self.tools.modules)?.into_iter().enumerate() {
            let length = file.metadata()?.len();
            if length > left {
                break;
            }
            left -= length;
            root.put(&file, format!("data/{number:05}"))?;
        }
        root.pack(&self.initrd())
    }
}

/// All files below a directory, ordered by name.
fn files_below(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        let kind = path.symlink_metadata()?.file_type();
        if kind.is_dir() {
            files.extend(files_below(&path)?);
        } else if kind.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

/// A connection to a guest's monitor by QMP: one JSON document per line.
#[derive(Debug)]
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to an emulator that is still starting.
    fn connect(socket: &Path) -> anyhow::Result<Self> {
        let end = Instant::now() + MONITOR_LIMIT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Err(_) if Instant::now() < end => std::thread::sleep(PAUSE),
                done => break done.with_context(|| socket.display().to_string())?,
            }
        };
        stream.set_read_timeout(Some(MONITOR_LIMIT))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.0.read_line(&mut String::new()).context("reading the monitor's greeting")?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Writes the guest's state to a file in the emulator's directory. The guest is paused afterwards.
    fn save(&mut self, file: &str) -> anyhow::Result<()> {
        // The default bandwidth limit is meant for networks.
        self.execute("migrate-set-parameters", &json!({ "max-bandwidth": 1_u64 << 36 }))?;
        self.execute("migrate", &json!({ "uri": format!("exec:cat > {file}") }))?;
        self.wait_for("query-migrate", "completed")
    }

    /// Waits until a guest is restored.
    fn wait_until_running(&mut self) -> anyhow::Result<()> {
        self.wait_for("query-status", "running")
    }

    fn wait_for(&mut self, query: &str, status: &str) -> anyhow::Result<()> {
        let end = Instant::now() + MONITOR_LIMIT;
        loop {
            let state = self.execute(query, &Value::Null)?;
            if state["status"] == status {
                return Ok(());
            }
            ensure!(state["status"] != "failed" && Instant::now() < end, "a guest is not {status}: {state}");
            std::thread::sleep(PAUSE);
        }
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let mut line = json!({ "execute": command });
        if !arguments.is_null() {
            line["arguments"] = arguments.clone();
        }
        writeln!(self.0.get_mut(), "{line}")?;
        loop {
            let mut text = String::new();
            ensure!(self.0.read_line(&mut text)? > 0, "the guest ended at {command}");
            let mut reply: Value = serde_json::from_str(&text)?;
            if let Some(error) = reply.get("error") {
                bail!("{command}: {error}");
            }
            // Other lines are events.
            if let Some(answer) = reply.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }
}
