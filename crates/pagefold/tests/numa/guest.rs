//! Emulated machines with several NUMA nodes, booted from a kernel and an image with a few programs. Emulated, because
//! hardware virtualization is not available everywhere, and the kernel places pages in the same way.

use cpio::newc::{Builder, ModeFileType, trailer};
use pagefold_testkit::numa::{Outcome, Scenario};
use pagefold_testkit::{program, skip, victim_binary};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A node: one processor, and memory.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub mib: u64,
    /// The memory is a module in a slot: it can go offline.
    pub module: bool,
}

impl Node {
    pub fn of(mib: u64) -> Self {
        Self { mib, module: false }
    }

    pub fn module(mib: u64) -> Self {
        Self { mib, module: true }
    }
}

/// An emulated machine.
#[derive(Clone, Debug)]
pub struct Machine {
    pub nodes: Vec<Node>,
    /// The distances between nodes, 10 from a node to itself (default: 20).
    pub distances: Vec<Vec<u8>>,
    /// Further parameters for the kernel.
    pub parameters: &'static str,
}

/// Programs and files that are needed beside those built here.
struct Tools {
    qemu: PathBuf,
    kernel: PathBuf,
    setpriv: PathBuf,
}

impl Tools {
    /// Finds them. The error names what is missing.
    fn find() -> Result<Self, String> {
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
        let kernel = cache.ok_or("no home directory")?.join("pagefold/nodes/vmlinuz");
        if !kernel.exists() {
            return Err(format!("there is no {}; scripts/guest-kernel nodes puts one there", kernel.display()));
        }
        let program = |name: &str| {
            let path = env::var_os("PATH").unwrap_or_default();
            let found = env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.exists());
            found.ok_or(format!("there is no {name}"))
        };
        Ok(Self { qemu: program("qemu-system-x86_64")?, kernel, setpriv: program("setpriv")? })
    }
}

/// One machine at a time: each uses a processor and much memory.
static ONE: Mutex<()> = Mutex::new(());

impl Machine {
    /// A machine with a node for each amount of memory, in MiB.
    pub fn of(mib: &[u64]) -> Self {
        Self { nodes: mib.iter().copied().map(Node::of).collect(), distances: Vec::new(), parameters: "" }
    }

    /// Boots it, runs the scenarios, and returns their results. `None`, with the reason reported, where that is impossible.
    #[track_caller]
    pub fn run(&self, scenarios: &[Scenario], limit: Duration) -> Option<Vec<Outcome>> {
        let tools = match Tools::find() {
            Ok(tools) => tools,
            Err(why) => {
                skip(why);
                return None;
            }
        };
        let _one = ONE.lock();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("image"), image(scenarios, dir.path())).unwrap();
        let began = Instant::now();
        let mut guest = self.command(&tools, &at("image"), &at("console"), &at("results")).spawn().unwrap();
        let ended = loop {
            if let Some(status) = guest.try_wait().unwrap() {
                break status.to_string();
            }
            if began.elapsed() > limit {
                guest.kill().unwrap();
                guest.wait().unwrap();
                break format!("not done after {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let console = fs::read(at("console")).unwrap_or_default();
        let results = fs::read_to_string(at("results")).unwrap_or_default();
        println!("{} scenarios on {} nodes: {:.0} s", scenarios.len(), self.nodes.len(), began.elapsed().as_secs_f64());
        if let Some(dir) = env::var_os("PAGEFOLD_NUMA_KEEP") {
            let name = std::thread::current().name().unwrap_or("numa").to_owned();
            fs::write(Path::new(&dir).join(format!("{name}.console")), &console).unwrap();
            fs::write(Path::new(&dir).join(format!("{name}.json")), &results).unwrap();
        }
        let outcomes: Vec<Outcome> = results.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            outcomes.len(),
            scenarios.len(),
            "the guest ended ({ended}) in {}. Its console:\n{}",
            scenarios.get(outcomes.len()).map_or("the end", |scenario| &scenario.name),
            String::from_utf8_lossy(&console)
        );
        Some(outcomes)
    }

    fn command(&self, tools: &Tools, image: &Path, console: &Path, results: &Path) -> Command {
        // Ends the guest if the test is killed.
        let mut command = Command::new(&tools.setpriv);
        command.args(["--pdeathsig", "KILL"]).arg(&tools.qemu);
        // The guest's memory is not for the host's KSM, which other tests use.
        command.args(["-machine", "q35,mem-merge=off"]);
        // The guest's clock counts instructions: its time does not depend on how busy this machine is, and waiting in the
        // guest takes no time here.
        command.args(["-accel", "tcg,thread=single", "-icount", "shift=1,sleep=off"]);
        // Without cmpxchg16b, after which QEMU 7.2 sometimes sets wrong flags (seen in kmem_cache_alloc).
        command.args(["-cpu", "qemu64,-cx16"]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        let count = self.nodes.len();
        command.args(["-smp", &format!("{count},sockets={count}")]);
        let fixed: u64 = self.nodes.iter().filter(|node| !node.module).map(|node| node.mib).sum();
        let all: u64 = self.nodes.iter().map(|node| node.mib).sum();
        let modules = self.nodes.iter().filter(|node| node.module).count();
        let slots = if modules == 0 { String::new() } else { format!(",slots={modules},maxmem={all}M") };
        command.args(["-m", &format!("{fixed}M{slots}")]);
        for (number, node) in self.nodes.iter().enumerate() {
            command.args(["-object", &format!("memory-backend-ram,id=memory{number},size={}M", node.mib)]);
            let memory = if node.module { String::new() } else { format!(",memdev=memory{number}") };
            command.args(["-numa", &format!("node,nodeid={number},cpus={number}{memory}")]);
            if node.module {
                command.args(["-device", &format!("pc-dimm,memdev=memory{number},node={number}")]);
            }
        }
        for (from, row) in self.distances.iter().enumerate() {
            for (to, distance) in row.iter().enumerate() {
                command.args(["-numa", &format!("dist,src={from},dst={to},val={distance}")]);
            }
        }
        command.args(["-chardev", &format!("file,id=console,path={}", console.display())]);
        command.args(["-chardev", &format!("file,id=results,path={}", results.display())]);
        command.args(["-serial", "chardev:console", "-serial", "chardev:results"]);
        command.arg("-kernel").arg(&tools.kernel).arg("-initrd").arg(image);
        // Without huge pages for the victims' memory. Added memory is onlined so that it can be removed. The rest makes it
        // boot faster.
        let parameters = "console=ttyS0 quiet panic=-1 transparent_hugepage=never memhp_default_state=online_movable nokaslr \
             mitigations=off init_on_alloc=0 cryptomgr.notests";
        command.args(["-append", &format!("{parameters} {}", self.parameters)]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

/// The initial file system.
fn image(scenarios: &[Scenario], scratch: &Path) -> Vec<u8> {
    let guest = stripped(&victim_binary("numa_guest"), scratch);
    let pagefold = stripped(program(), scratch);
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for library in [&guest, &pagefold].into_iter().flat_map(|program| libraries(program)).collect::<BTreeSet<_>>() {
        files.push((library.clone(), fs::read(&library).unwrap()));
    }
    let guest = fs::read(guest).unwrap();
    files.push(("/init".to_owned(), guest.clone()));
    files.push(("/bin/victim".to_owned(), guest));
    files.push(("/bin/pagefold".to_owned(), fs::read(pagefold).unwrap()));
    files.push(("/scenarios.json".to_owned(), serde_json::to_vec(scenarios).unwrap()));

    let dirs: BTreeSet<String> = files
        .iter()
        .flat_map(|(path, _)| Path::new(path).ancestors().skip(1))
        .map(|dir| dir.display().to_string())
        .filter(|dir| dir != "/")
        .collect();
    // Sorted, so that each directory precedes its contents.
    let dirs = dirs.into_iter().map(|dir| (dir, ModeFileType::Directory, Vec::new()));
    let files = files.into_iter().map(|(path, content)| (path, ModeFileType::Regular, content));
    let mut image = Vec::new();
    for (number, (path, kind, content)) in (1..).zip(dirs.chain(files)) {
        let entry = Builder::new(&path[1..]).ino(number).mode(0o755).set_mode_file_type(kind);
        let mut entry = entry.write(&mut image, u32::try_from(content.len()).unwrap());
        entry.write_all(&content).unwrap();
        entry.finish().unwrap();
    }
    trailer(&mut image).unwrap();
    image
}

/// A copy without debugging information, which is most of it.
fn stripped(program: &Path, scratch: &Path) -> PathBuf {
    let copy = scratch.join(program.file_name().unwrap());
    let done = Command::new("strip").arg("-o").arg(&copy).arg(program).status().expect("strip, of binutils");
    assert!(done.success(), "strip {}: {done}", program.display());
    copy
}

/// The shared libraries of a program, as the loader finds them here.
fn libraries(program: &Path) -> Vec<String> {
    let output = Command::new("ldd").arg(program).output().expect("ldd");
    let text = String::from_utf8(output.stdout).unwrap();
    let path = |line: &str| line.split_ascii_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    let found: Vec<String> = text.lines().filter_map(path).collect();
    assert!(output.status.success() && !found.is_empty(), "ldd {}: {text}", program.display());
    found
}
