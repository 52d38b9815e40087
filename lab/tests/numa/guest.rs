//! Emulated machines with several NUMA nodes, booted from a kernel and an image with a few programs. We emulate them
//! because hardware virtualization isn't available everywhere, and the kernel places pages in the same way.

use crate::common::example;
use crate::model::{Outcome, Scenario};
use pagefold_testkit::guest::{GuestEnded, Tools, run_guest};
use pagefold_testkit::{program, victim_binary};
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A node: one processor, and memory.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub mib: u64,
    /// Whether the memory is a module in a slot, so that it can go offline.
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

#[derive(Clone, Debug)]
pub struct Machine {
    pub nodes: Vec<Node>,
    /// The distances between nodes, 10 from a node to itself (default: 20).
    pub distances: Vec<Vec<u8>>,
    /// Further parameters for the kernel.
    pub parameters: &'static str,
}

impl Machine {
    /// A machine with a node for each amount of memory, in MiB.
    pub fn of(mib: &[u64]) -> Self {
        Self { nodes: mib.iter().copied().map(Node::of).collect(), distances: Vec::new(), parameters: "" }
    }

    /// Boots it, runs the scenarios, and returns their results. Where that's impossible, reports the reason and returns
    /// `None`.
    #[track_caller]
    pub fn run(&self, scenarios: &[Scenario], limit: Duration) -> Option<Vec<Outcome>> {
        let tools = match env::var_os("PAGEFOLD_NUMA_KERNEL") {
            Some(kernel) => Tools::with_kernel(kernel.into())?,
            None => Tools::find("nodes")?,
        };
        let scenarios_json = serde_json::to_vec(scenarios).unwrap();
        let command = br#"["/bin/numa_guest"]"#.to_vec();
        let guest = example("numa_guest");
        let programs = [("numa_guest", &*guest), ("holder", &*victim_binary("holder")), ("pagefold", program())];
        let image = tools.image(&programs, &[("command.json", command), ("scenarios.json", scenarios_json)]);
        let GuestEnded { status, console, results, took } =
            run_guest(&tools, &image, limit, |command| self.complete(command));
        println!("{} scenarios on {} nodes: {:.0} s", scenarios.len(), self.nodes.len(), took.as_secs_f64());
        if let Some(dir) = env::var_os("PAGEFOLD_NUMA_KEEP") {
            let name = std::thread::current().name().unwrap_or("numa").to_owned();
            fs::write(Path::new(&dir).join(format!("{name}.console")), &console).unwrap();
            fs::write(Path::new(&dir).join(format!("{name}.json")), &results).unwrap();
        }
        // The last line is the program's exit status.
        let lines = results.lines().filter(|line| line.starts_with('{'));
        let outcomes: Vec<Outcome> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            outcomes.len(),
            scenarios.len(),
            "the guest ended ({status}) in {}. Its console:\n{console}",
            scenarios.get(outcomes.len()).map_or("the end", |scenario| &scenario.name),
        );
        Some(outcomes)
    }

    fn complete(&self, command: &mut Command) {
        // We leave out cmpxchg16b, after which QEMU 7.2 sometimes sets wrong flags (seen in kmem_cache_alloc).
        command.args(["-cpu", "qemu64,-cx16"]);
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
        // The victims' memory has no huge pages. The kernel onlines added memory so that it can be removed. The other
        // parameters make the boot faster.
        let parameters = "console=ttyS0 quiet panic=-1 transparent_hugepage=never memhp_default_state=online_movable nokaslr \
             mitigations=off init_on_alloc=0 cryptomgr.notests";
        command.args(["-append", &format!("{parameters} {}", self.parameters)]);
    }
}
