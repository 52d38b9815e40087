//! A process that takes the memory of a node.

use std::time::Duration;

/// Bytes to take at a time.
const STEP: usize = 256 << 10;
const PAUSE: Duration = Duration::from_millis(100);

/// `filler NODE LEFT` takes and locks the node's memory until LEFT MiB are free, prints `ready`, and takes all memory
/// that becomes free there until it's killed.
pub fn main(args: &[String]) -> ! {
    let node = args[0].parse().expect("a node");
    let left_kib = args[1].parse::<u64>().expect("a size") << 10;
    let nodes = 1_u64 << node;
    // SAFETY: the kernel reads 64 bits.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, &raw const nodes, 64) };
    assert_eq!(done, 0, "set_mempolicy: {}", std::io::Error::last_os_error());
    fill(node, left_kib);
    println!("ready");
    loop {
        std::thread::sleep(PAUSE);
        fill(node, left_kib);
    }
}

fn fill(node: u64, left_kib: u64) {
    while free_kib(node) > left_kib {
        let step = vec![0_u8; STEP].leak();
        // SAFETY: we never free this memory; locking changes no contents.
        let done = unsafe { libc::mlock(step.as_ptr().cast(), STEP) };
        assert_eq!(done, 0, "mlock: {}", std::io::Error::last_os_error());
    }
}

fn free_kib(node: u64) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).expect("a node");
    let value = text.lines().find_map(|line| line.split_once("MemFree:")).expect("MemFree").1;
    value.trim().trim_end_matches(" kB").parse().expect("a number")
}
