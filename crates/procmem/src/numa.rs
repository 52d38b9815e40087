//! Placement of a process's memory on nodes: its home node, and moving merged frames that it maps.

use super::process::{Process, ReadError};
use crate::os::fields::field;
use crate::os::numa::Topology;
use crate::os::number_list::NumberList;
use pagefold_engine::host::OwnerView;
use pagefold_engine::keys::{NodeKey, OwnerKey};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::{Vpn, count};
use std::io;

/// Reads the home node and the other facts that placement needs about a process.
pub fn owner_view(
    process: &Process,
    topology: &Topology,
    owner: OwnerKey,
    placement: Placement,
) -> Result<OwnerView, ReadError> {
    let text = process.read_file("status")?;
    let (cpus, nodes) =
        allowed(&text).ok_or_else(|| process.malformed("status", "no list of allowed processors or nodes"))?;
    let keys = nodes.iter().filter_map(|node| u16::try_from(node).ok()).map(NodeKey);
    let (home, nice) = (topology.home(&cpus), process.stat()?.nice);
    Ok(OwnerView { owner, home, nice, allowed: keys.collect(), placement })
}

/// The allowed processors and memory nodes in the text of `/proc/PID/status`.
pub fn allowed(status: &[u8]) -> Option<(NumberList, NumberList)> {
    let list = |key| NumberList::parse(std::str::from_utf8(field(status, key)?).ok()?);
    Some((list("Cpus_allowed_list")?, list("Mems_allowed_list")?))
}

/// While it exists, this thread prefers to allocate memory on the home node of a process: copies of pages that it causes
/// in other processes follow its own memory policy, not theirs.
#[derive(Debug)]
pub struct PreferNode(());

impl PreferNode {
    /// `None` if there is only one node, or the process runs on several, or the policy cannot be set.
    pub fn of(process: &Process) -> Option<Self> {
        const MPOL_PREFERRED: libc::c_int = 1;
        let topology = Topology::of_machine().ok().flatten()?;
        let home = owner_view(process, &topology, OwnerKey(0), Placement::Kernel).ok()?.home?;
        let nodes = 1_u64.checked_shl(home.0.into())?;
        // SAFETY: the mask outlives the call. The kernel reads one bit less than the given number: 64.
        let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, &raw const nodes, 65) };
        (set == 0).then_some(Self(()))
    }
}

impl Drop for PreferNode {
    fn drop(&mut self) {
        const MPOL_DEFAULT: libc::c_int = 0;
        // SAFETY: the default policy takes no mask.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, std::ptr::null::<u64>(), 0) };
    }
}

/// Frames moved by one call. A call takes the target's mmap lock for reading page by page, and drains the lists of new
/// pages of all processors once (`lru_cache_disable`, mm/migrate.c).
const BATCH: usize = 1_024;

/// Moves the merged frames that a process maps at these pages, for all processes that map them. Calls `progress` with the
/// number moved so far, and returns the number of frames that are on their node now. Needs CAP_SYS_NICE, and the process
/// must be allowed memory on the node.
pub fn move_frames(process: &Process, moves: &[(Vpn, NodeKey)], progress: impl Fn(u64)) -> Result<u64, ReadError> {
    const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;
    let (mut pages, mut nodes, mut status) = (Vec::new(), Vec::new(), Vec::new());
    let mut done = 0;
    for batch in moves.chunks(BATCH) {
        pages.clear();
        pages.extend(batch.iter().map(|(page, _)| page.address()));
        nodes.clear();
        nodes.extend(batch.iter().map(|(_, node)| libc::c_int::from(node.0)));
        status.clear();
        status.resize(batch.len(), -libc::ENOENT);
        // The pid may have been reused: then pages of the wrong process move, which is harmless.
        // SAFETY: three arrays of `batch.len()` elements, of pointer size and of ints, which outlive the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                process.pid(),
                batch.len(),
                pages.as_ptr(),
                nodes.as_ptr(),
                status.as_mut_ptr(),
                MPOL_MF_MOVE_ALL,
            )
        };
        if result < 0 {
            return Err(ReadError::from_io(process.pid(), "(move_pages)", io::Error::last_os_error()));
        }
        done += count(status.iter().zip(&nodes).filter(|(is, wanted)| is == wanted).count());
        progress(done);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_processors_and_nodes_are_parsed() {
        let text =
            b"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,7\nMems_allowed:\t1\nMems_allowed_list:\t0,2\n";
        let (cpus, nodes) = allowed(text).unwrap();
        assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 7]);
        assert_eq!(nodes.iter().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(allowed(b"Name:\tx\n"), None);
    }
}
