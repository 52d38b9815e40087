//! Placement of memory on NUMA nodes: finds a process's home node, and moves the merged frames that it maps.

use super::process::{Process, ReadError};
use crate::os::fields::field;
use crate::os::numa::Topology;
use crate::os::number_list::NumberList;
use pagefold_engine::host::OwnerView;
use pagefold_engine::keys::{NodeKey, OwnerKey};
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::Vpn;
use std::io;

/// Reads the facts that placement needs: a process's home node, its nice value and the nodes that it may use.
pub fn owner_view(
    process: &Process,
    topology: &Topology,
    owner: OwnerKey,
    placement: Placement,
) -> Result<OwnerView, ReadError> {
    let text = process.read_file("status")?;
    let (cpus, nodes) =
        allowed(&text).ok_or_else(|| process.malformed("status", "no list of allowed processors or nodes"))?;
    let nice = process.stat()?.nice;
    Ok(OwnerView { owner, home: topology.home(&cpus), nice, allowed: nodes.nodes().collect(), placement })
}

/// The allowed processors and memory nodes in the text of `/proc/PID/status`.
pub fn allowed(status: &[u8]) -> Option<(NumberList, NumberList)> {
    Some((allowed_list(status, "Cpus_allowed_list")?, allowed_list(status, "Mems_allowed_list")?))
}

fn allowed_list(status: &[u8], key: &str) -> Option<NumberList> {
    NumberList::parse(std::str::from_utf8(field(status, key)?).ok()?)
}

/// While this exists, our thread prefers to allocate memory on the home node of a process. When we cause a page of
/// another process to be copied, the copy follows our memory policy, not the process's.
#[derive(Debug)]
pub struct PreferNode(());

impl PreferNode {
    /// `None` if there is only one node, or the process runs on several, or the policy can't be set.
    pub fn of(process: &Process) -> Option<Self> {
        const MPOL_PREFERRED: libc::c_int = 1;
        let topology = Topology::of_machine().ok()??;
        let home = owner_view(process, &topology, OwnerKey(0), Placement::Kernel).ok()?.home?;
        let nodes = 1_u64.checked_shl(home.0.into())?;
        // SAFETY: the mask outlives the call. The kernel reads one bit less than the given number: 64.
        let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, &raw const nodes, 65) };
        if set == 0 { Some(Self(())) } else { None }
    }
}

impl Drop for PreferNode {
    fn drop(&mut self) {
        const MPOL_DEFAULT: libc::c_int = 0;
        // SAFETY: the default policy takes no mask.
        unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, std::ptr::null::<u64>(), 0) };
    }
}

/// How many frames we move with one call. For each page the call takes the target's mmap lock for reading. Once per
/// call it drains all processors' lists of new pages (`lru_cache_disable`, mm/migrate.c).
const BATCH: usize = 1_024;

/// Moves merged frames for all processes that map them. `moves` has, for each frame, a page at which this process maps
/// it, and the wanted node. Calls `progress` with the number moved so far. Returns how many frames are on the wanted
/// node now. Needs CAP_SYS_NICE, and the process must be allowed memory on the node.
pub fn move_frames(process: &Process, moves: &[(Vpn, NodeKey)], progress: impl Fn(u64)) -> Result<u64, ReadError> {
    const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;
    let mut done = 0;
    for batch in moves.chunks(BATCH) {
        let pages: Vec<u64> = batch.iter().map(|(page, _)| page.address()).collect();
        let nodes: Vec<libc::c_int> = batch.iter().map(|(_, node)| node.0.into()).collect();
        let mut status = vec![-libc::ENOENT; batch.len()];
        // The pid may have been reused. Then we move pages of the wrong process, which does no harm.
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
        for (is, wanted) in status.iter().zip(&nodes) {
            done += u64::from(is == wanted);
        }
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
