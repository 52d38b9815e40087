//! `/proc/PID/status` and `/proc/PID/exe`: user, tracer, capabilities and executable of a process.

use crate::os::fields::{MISSING, NOT_A_NUMBER, field, kib_or_none, number};
use crate::process::{Process, ReadError};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The fields of `/proc/PID/status` that pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Thread group ID. Differs from the requested pid if that is a thread ID.
    pub thread_group: i32,
    /// Thread that traces the process; 0 if none.
    pub tracer: i32,
    /// Real, effective, saved and file system user.
    pub uids: [u32; 4],
    /// Real, effective, saved and file system group.
    pub gids: [u32; 4],
    /// Permitted capabilities, one bit each.
    pub permitted: u64,
    /// Memory locked by mlock, KiB; 0 for kernel threads and zombies.
    pub locked_kib: u64,
    /// Memory pinned for I/O, KiB, as far as drivers count it here.
    pub pinned_kib: u64,
    /// Whether the process is in a pid namespace below the one that we see it from, like a container's.
    pub is_nested: bool,
}

impl Status {
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        Self::parse(&process.read_file("status")?).map_err(|what| process.malformed("status", what))
    }

    /// Parses the text of `/proc/PID/status`. The kernel escapes newlines in the name, so it can't forge a line.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        Ok(Self {
            thread_group: number(text, "Tgid")?,
            tracer: number(text, "TracerPid")?,
            uids: four_ids(text, "Uid")?,
            gids: four_ids(text, "Gid")?,
            permitted: u64::from_str_radix(text_of(text, "CapPrm")?, 16).map_err(|_| NOT_A_NUMBER)?,
            // Kernel threads and zombies lack these.
            locked_kib: kib_or_none(text, "VmLck")?,
            pinned_kib: kib_or_none(text, "VmPin")?,
            // A pid for each namespace. Kernels without pid namespaces lack the line.
            is_nested: field(text, "NSpid").is_some_and(|pids| pids.trim_ascii().contains(&b'\t')),
        })
    }

    pub fn effective_uid(&self) -> u32 {
        self.uids[1]
    }
}

fn text_of<'a>(status: &'a [u8], key: &str) -> Result<&'a str, &'static str> {
    std::str::from_utf8(field(status, key).ok_or(MISSING)?).map_err(|_| "a field is not ASCII")
}

fn four_ids(status: &[u8], key: &str) -> Result<[u32; 4], &'static str> {
    let mut ids = [0; 4];
    let mut words = text_of(status, key)?.split_ascii_whitespace();
    for id in &mut ids {
        *id = words.next().ok_or("too few IDs")?.parse().map_err(|_| "an ID is not a number")?;
    }
    Ok(ids)
}

/// Path of the executable, with ` (deleted)` appended if it has been replaced. `None` for kernel threads and zombies.
pub fn exe_of(process: &Process) -> Result<Option<PathBuf>, ReadError> {
    process.fault("exe")?;
    let link = match process.open_with("exe", OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(link) => link,
        Err(ReadError::Absent { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    // With an empty path we read the link that we've opened.
    match rustix::fs::readlinkat(link, c"", Vec::new()) {
        Ok(target) => Ok(Some(OsString::from_vec(target.into_bytes()).into())),
        // Kernel threads have the link, but nobody can read it.
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(ReadError::from_io(process.pid(), "exe", error.into())),
    }
}

/// Base name of the executable without ` (deleted)`, or the command name (at most 15 bytes) without an executable.
pub fn program_name(exe: Option<&Path>, comm: &[u8]) -> Vec<u8> {
    let Some(name) = exe.and_then(Path::file_name) else { return comm.to_vec() };
    let name = name.as_bytes();
    name.strip_suffix(b" (deleted)").unwrap_or(name).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] =
        b"Name:\ta\\nUid:\t0\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t12\nNgid:\t0\nPid:\t12\nPPid:\t1\n\
        TracerPid:\t77\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t7\t8\n\
        VmLck:\t      64 kB\nVmPin:\t       8 kB\nCapInh:\t0000000000000000\nCapPrm:\t000001ffffffffff\n";

    #[test]
    fn status_is_parsed() {
        let status = Status::parse(TEXT).unwrap();
        assert_eq!((status.thread_group, status.tracer, status.effective_uid()), (12, 77, 1001));
        assert_eq!((status.gids, status.permitted), ([5, 6, 7, 8], 0x1ff_ffff_ffff));
        assert_eq!((status.locked_kib, status.pinned_kib), (64, 8));
        assert!(Status::parse(b"Tgid:\t1\n").is_err());
    }

    #[test]
    fn exe_of_reads_the_link_through_the_held_directory() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(exe_of(&own).unwrap().unwrap(), std::env::current_exe().unwrap());
    }

    #[test]
    fn a_program_has_the_base_name_of_its_executable() {
        assert_eq!(program_name(Some("/opt/x y (deleted)".as_ref()), b"z"), b"x y");
        assert_eq!(program_name(None, b"z"), b"z");
    }
}
