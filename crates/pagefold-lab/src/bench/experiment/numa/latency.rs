//! What an access to memory takes on each node, by a pointer chase: each address is known only when the one before has
//! been read.

use super::place::Nodes;
use anyhow::{Context, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use pagefold_core::placement::policy::Latencies;
use pagefold_core::random::finalize;
use std::time::Instant;

/// Elements of a cache line.
const LINE: usize = 16;
const LINE_BYTES: usize = LINE * size_of::<u32>();

/// From the first node's processors to its own memory and to the second's, nanoseconds, with so many MiB. That should be
/// much more than the caches hold. Pages are small ones, so misses of the processor's page table cache are part of it,
/// as they are for the programs.
pub fn measure(nodes: &Nodes, mib: usize, steps: u32) -> anyhow::Result<Latencies> {
    let [first, second, ..] = &nodes.nodes[..] else { anyhow::bail!("there is but one node") };
    let (here, there) = (processor(&first.cpus)?, processor(&second.cpus)?);
    let ns = |memory: usize| {
        let chase = std::thread::Builder::new().spawn(move || chase(here, memory, mib, steps))?;
        chase.join().map_err(|_| anyhow::anyhow!("the pointer chase panicked"))?
    };
    let (local_ns, remote_ns) = (ns(here)?, ns(there)?);
    ensure!(local_ns > 0, "memory that takes no time");
    Ok(Latencies { local_ns, remote_ns })
}

/// The first of a list like `0-3,8`.
fn processor(list: &str) -> anyhow::Result<usize> {
    let first = list.split([',', '-']).next().unwrap_or_default();
    first.trim().parse().with_context(|| format!("no processor in {list:?}"))
}

/// Nanoseconds of one access by processor `here` to memory that processor `memory` touched first.
fn chase(here: usize, memory: usize, mib: usize, steps: u32) -> anyhow::Result<u32> {
    keep_to(memory)?;
    let lines = (mib << 20) / LINE_BYTES;
    let mut next = vec![0_u32; lines * LINE];
    // One cycle through all lines in random order (Sattolo): no prefetcher follows it.
    let mut order: Vec<u32> = (0..u32::try_from(lines)?).collect();
    for at in (1..lines).rev() {
        let other = usize::try_from(finalize(at as u64) % at as u64)?;
        order.swap(at, other);
    }
    for (at, &to) in order.iter().enumerate() {
        next[at * LINE] = to;
    }
    drop(order);
    keep_to(here)?;
    let mut at = 0_u32;
    let began = Instant::now();
    for _ in 0..steps {
        at = next[at as usize * LINE];
    }
    let took = began.elapsed();
    std::hint::black_box(at);
    Ok(u32::try_from(took.as_nanos() / u128::from(steps.max(1)))?)
}

fn keep_to(processor: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor)?;
    // This thread only.
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("keeping to processor {processor}"))
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
