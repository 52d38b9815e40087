//! Measures memory latency by a pointer chase: each address depends on the previous read.

use super::place::Nodes;
use anyhow::{Context, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use pagefold_engine::placement::policy::Latencies;
use pagefold_engine::random::finalize;
use std::time::Instant;

/// Elements of a cache line.
const LINE: usize = 16;
const LINE_BYTES: usize = LINE * size_of::<u32>();

/// Measures the latency from the first node's processors to its own memory and to the second node's, nanoseconds. `mib`
/// should be far more than the caches hold. Pages are small, so we include TLB misses, as programs have them too.
pub fn measure(nodes: &Nodes, mib: usize, steps: u32) -> anyhow::Result<Latencies> {
    let [first, second, ..] = &nodes.nodes[..] else { anyhow::bail!("there is only one node") };
    let here = processor(&first.cpus)?;
    let mut found = [0; 2];
    for (ns, memory) in found.iter_mut().zip([here, processor(&second.cpus)?]) {
        // A thread of its own, because it binds itself.
        let chase = std::thread::spawn(move || chase(here, memory, mib, steps));
        *ns = chase.join().ok().context("the pointer chase panicked")??;
    }
    let [local_ns, remote_ns] = found;
    ensure!(local_ns > 0, "measured a memory latency of 0 ns");
    Ok(Latencies { local_ns, remote_ns })
}

/// The first processor of a list like `0-3,8`.
fn processor(list: &str) -> anyhow::Result<usize> {
    let first = list.split([',', '-']).next().unwrap_or_default();
    first.trim().parse().with_context(|| format!("no processor in {list:?}"))
}

/// Measures the nanoseconds per access by processor `here` to memory first touched by processor `memory`.
fn chase(here: usize, memory: usize, mib: usize, steps: u32) -> anyhow::Result<u32> {
    bind_to(memory)?;
    let lines = (mib << 20) / LINE_BYTES;
    let mut next = vec![0_u32; lines * LINE];
    // One cycle through all lines in random order (Sattolo), which defeats prefetchers.
    let mut order: Vec<u32> = (0..u32::try_from(lines)?).collect();
    for at in (1..lines).rev() {
        let other = usize::try_from(finalize(at as u64) % at as u64)?;
        order.swap(at, other);
    }
    for (at, &to) in order.iter().enumerate() {
        next[at * LINE] = to;
    }
    drop(order);
    bind_to(here)?;
    let mut at = 0_u32;
    let began = Instant::now();
    for _ in 0..steps {
        at = next[at as usize * LINE];
    }
    let took = began.elapsed();
    std::hint::black_box(at);
    Ok(u32::try_from(took.as_nanos() / u128::from(steps.max(1)))?)
}

fn bind_to(processor: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor)?;
    // Pid 0: this thread only.
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot bind to processor {processor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_processor_of_a_list() {
        assert_eq!((processor("3-5,9").unwrap(), processor("7").unwrap()), (3, 7));
        assert!(processor("").is_err());
    }

    #[test]
    fn memory_is_slower_than_a_register() {
        let cpus = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        let cpu = processor(&cpus).unwrap();
        let ns = std::thread::spawn(move || chase(cpu, cpu, 64, 300_000)).join().unwrap().unwrap();
        assert!((1..100_000).contains(&ns), "{ns}");
    }
}
