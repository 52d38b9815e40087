//! The facts about a process that we read for a check. Selectors, rules and exclusions judge the process by them.

use super::Selector;
use super::deny_list::DenyList;
use super::exe::{Distrust, Exe, Matching};
use super::opt_out::OptOut;
use super::workload::{Workload, WorkloadKind, workload_of_cgroups};
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::Cgroup;
use pagefold_procmem::image::is_32_bit;
use pagefold_procmem::ksm_stat::KsmStat;
use pagefold_procmem::maps::read_marked;
use pagefold_procmem::process::{Process, ReadError, Stat};
use pagefold_procmem::status::{Status, program_name};
use pagefold_text::escape::printable;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A process and everything that selects or excludes it.
#[derive(Clone, Debug)]
pub struct ProcessInfo {
    /// The pid, the start time, and a descriptor through which we read the process.
    pub process: Arc<Process>,
    pub stat: Stat,
    pub status: Status,
    /// Command name, safe to print.
    pub name: String,
    /// Executable. `None` for kernel threads and zombies, and if we can't read it.
    pub exe: Option<Exe>,
    /// Whether the kernel lets us read the process.
    pub is_readable: bool,
    /// We read cgroups separately, and once for all processes of a cgroup.
    pub cgroups: Arc<CgroupInfo>,
    /// The selected pid: its own or, when we undo something, an ancestor's.
    pub by_pid: Option<i32>,
    /// The selector that brought the process into scope: a position in [`ScopeSpec`](super::ScopeSpec).
    pub selected_by: Option<usize>,
    /// Why that selector doesn't count: it matches by a name that any user can choose.
    pub distrust: Option<Distrust>,
    /// Whether the process is running a 32-bit program. We can't mark such a program from outside, so it needs
    /// `pagefold exec` unless all its memory is marked already. We read these two facts separately.
    pub(crate) is_32_bit: bool,
    pub(crate) needs_exec: bool,
}

/// Facts about a process that its cgroups tell us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupInfo {
    /// The version 2 path or, if that is the root, the path in the version 1 memory hierarchy.
    pub path: Option<String>,
    /// The trust domain that the cgroups' attributes set.
    pub domain: Option<String>,
    pub(crate) opt_outs: Vec<OptOut>,
    /// The cgroups' directories that can limit memory, each with its mount point.
    pub(crate) limiting: Vec<(PathBuf, PathBuf)>,
    /// The cgroup in each hierarchy. For a very deep one, the ancestor down to which we read.
    pub(super) all: Vec<Cgroup>,
    /// A cgroup that's too deep, or that we can't read, so it may have opted out. We leave the process alone.
    pub(crate) unreadable: Option<String>,
    /// The selector whose cgroup contains the process.
    pub(super) selected_by: Option<usize>,
}

impl CgroupInfo {
    /// The directories of the cgroups whose memory limits apply.
    pub fn limiting_dirs(&self) -> Vec<&Path> {
        let mut dirs = Vec::new();
        for (mount, dir) in &self.limiting {
            dirs.extend(dir.ancestors().take_while(|above| above.starts_with(mount)));
        }
        dirs
    }

    /// The facts about cgroups that we can't read.
    pub(crate) fn unreadable(cgroup: &str) -> Self {
        Self { unreadable: Some(cgroup.to_owned()), ..Self::default() }
    }

    /// Whether the kernel hides its cgroups because a path is over 4096 bytes long (kernel/cgroup/cgroup.c).
    pub(super) fn are_hidden(&self) -> bool {
        self.unreadable.is_some() && self.all.is_empty()
    }
}

impl ProcessInfo {
    /// Reads all facts about a process but its cgroups. May block on the process.
    pub fn of(process: &Arc<Process>) -> Result<Self, ReadError> {
        Self::with_stat(process, process.stat()?)
    }

    pub(super) fn with_stat(process: &Arc<Process>, stat: Stat) -> Result<Self, ReadError> {
        let status = Status::of(process)?;
        let exe = match Exe::of(process) {
            Err(ReadError::Denied { .. }) => None,
            other => Some(other?),
        };
        Ok(Self {
            process: process.clone(),
            name: printable(&stat.comm),
            stat,
            status,
            is_readable: exe.is_some(),
            exe: exe.flatten(),
            cgroups: Arc::default(),
            by_pid: None,
            selected_by: None,
            distrust: None,
            is_32_bit: false,
            needs_exec: false,
        })
    }

    /// Finds out whether the process is running a 32-bit program. May block on the process.
    pub(crate) fn read_width(&mut self) -> Result<(), ReadError> {
        self.is_32_bit = is_32_bit(&self.process, "");
        self.needs_exec = self.is_32_bit && !is_marked_as_a_whole(&self.process)?;
        Ok(())
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub fn uid(&self) -> u32 {
        self.status.effective_uid()
    }

    /// Whether the process is selected by its own pid.
    pub fn is_named(&self) -> bool {
        self.by_pid == Some(self.pid())
    }

    /// The workload that the process's cgroups belong to.
    pub fn workload(&self) -> Option<Workload> {
        workload_of_cgroups(&self.cgroups.all)
    }

    /// The process's workload, or the name of its program if it belongs to none.
    pub fn workload_or_name(&self) -> String {
        self.workload().map_or_else(|| self.name.clone(), |workload| workload.to_string())
    }

    /// The path of the executable, safe to print.
    pub(super) fn exe_text(&self) -> String {
        self.exe.as_ref().map(|exe| printable(exe.as_os_str().as_bytes())).unwrap_or_default()
    }

    /// The names by which the deny list knows the program: the executable's, and the command name. The kernel takes the
    /// latter from the link by which the program was started.
    pub(super) fn names(&self) -> [Vec<u8>; 2] {
        [self.program(), self.stat.comm.clone()]
    }

    /// How the program matches a name or a path: `Yes` only if root alone can have given it.
    pub(super) fn matches(&self, name: &[u8]) -> Matching {
        let Some(exe) = &self.exe else { return Matching::No };
        match std::str::from_utf8(name) {
            Ok(name) => exe.matches(name, &self.stat.comm),
            Err(_) if name == self.program() && self.is_trusted() => Matching::Yes,
            Err(_) => Matching::No,
        }
    }

    pub fn program(&self) -> Vec<u8> {
        program_name(self.exe.as_deref(), &self.stat.comm)
    }

    /// The name by which `--allow` lets the process in: the program's or, if users other than root
    /// could give a program this name, that of its container, pod or virtual machine. `None` if there's no such name
    /// that root alone can give, if the program is denied, or if the name has special characters.
    pub fn allowed_as(&self, deny: &DenyList, roots: &Roots) -> Option<String> {
        if deny.denies(self).is_some() {
            return None;
        }
        let name =
            if self.is_trusted() { String::from_utf8(self.program()).ok()? } else { self.roots_workload(roots)? };
        let is_plain = name == printable(name.as_bytes()) && !name.starts_with('-') && !name.contains('*');
        is_plain.then_some(name)
    }

    /// The process's container, pod or virtual machine, if only root can have named it.
    fn roots_workload(&self, roots: &Roots) -> Option<String> {
        let workload = self.workload().filter(|workload| workload.kind != WorkloadKind::Unit)?;
        let name = workload.to_string();
        let matcher = Selector::Workload(workload).resolve(roots).ok()?;
        (matcher.matches(self) == Matching::Yes).then_some(name)
    }

    /// Whether root alone can change the executable, and so the program's name.
    pub(super) fn is_trusted(&self) -> bool {
        self.exe.as_ref().is_some_and(|exe| exe.trust().is_ok())
    }
}

/// Whether all memory of a 32-bit process is marked, as `pagefold exec` does it.
fn is_marked_as_a_whole(process: &Process) -> Result<bool, ReadError> {
    if let Some(marked) = KsmStat::of(process)?.merge_any {
        return Ok(marked);
    }
    // Before Linux 6.14 the kernel doesn't tell us, so we check whether any code is marked: no program marks just its
    // code. We can't ask for all memory to be marked, because the kernel marks no stack that an exec sets up.
    Ok(read_marked(process)?.iter().any(|detail| detail.vma.perms.exec && detail.vma.inode != 0))
}

#[cfg(test)]
impl ProcessInfo {
    /// This test's process, as if it had this command name and effective user, and no executable.
    pub(crate) fn fixture(comm: &str, uid: u32, cgroup: Option<&str>) -> Self {
        let own = Arc::new(Process::open(super::own_pid()).unwrap());
        let mut info = Self::of(&own).unwrap();
        info.stat.comm = comm.into();
        info.name = comm.to_owned();
        info.status.uids[1] = uid;
        info.exe = None;
        let mut all = Vec::new();
        if let Some(path) = cgroup {
            all.push(Cgroup { controllers: String::new(), path: path.to_owned() });
        }
        info.cgroups = Arc::new(CgroupInfo { path: cgroup.map(str::to_owned), all, ..CgroupInfo::default() });
        info
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Before Linux 6.14 `ksm_stat` doesn't say whether all memory is marked.
    #[test]
    fn marked_code_shows_that_all_memory_is_marked() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("77");
        fs::create_dir(&at).unwrap();
        fs::write(at.join("stat"), format!("77 (app) S 1 {}", "0 ".repeat(60))).unwrap();
        fs::write(at.join("ksm_stat"), "ksm_rmap_items 3\nksm_merging_pages 5\n").unwrap();
        let process = Process::open_at(dir.path(), 77).unwrap();
        for (code, heap, expected) in [("mg", "mg", true), ("", "mg", false), ("", "", false)] {
            let smaps = format!(
                "08048000-08049000 r-xp 00000000 08:01 77 /bin/app\nAnonymous: 0 kB\nVmFlags: rd ex {code} \n\
                 ff000000-ff021000 rw-p 00000000 00:00 0 [heap]\nAnonymous: 8 kB\nVmFlags: rd wr {heap} \n"
            );
            fs::write(at.join("smaps"), smaps).unwrap();
            assert_eq!(is_marked_as_a_whole(&process).unwrap(), expected, "{code} {heap}");
        }
    }
}
