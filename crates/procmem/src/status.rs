//! `/proc/PID/status` and `/proc/PID/exe`: user, tracer, capabilities and executable of a process.

use crate::os::fields::{MISSING, NOT_A_NUMBER, field, number};
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
}

impl Status {
    /// Reads the status of a process.
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        Self::parse(&process.read_file("status")?).map_err(|what| process.malformed("status", what))
    }

    /// Parses the text of `/proc/PID/status`. The kernel escapes newlines in the name, so it cannot forge a line.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let text_of = |key| std::str::from_utf8(field(text, key).ok_or(MISSING)?).map_err(|_| "a field is not ASCII");
        let four = |key| -> Result<[u32; 4], &'static str> {
            let mut ids = [0; 4];
            let mut words = text_of(key)?.split_ascii_whitespace();
            for id in &mut ids {
                *id = words.next().ok_or("too few IDs")?.parse().map_err(|_| "an ID is not a number")?;
            }
            Ok(ids)
        };
        Ok(Self {
            thread_group: number(text, "Tgid")?,
            tracer: number(text, "TracerPid")?,
            uids: four("Uid")?,
            gids: four("Gid")?,
            permitted: u64::from_str_radix(text_of("CapPrm")?, 16).map_err(|_| NOT_A_NUMBER)?,
            locked_kib: field(text, "VmLck").map_or(Ok(0), kib)?,
        })
    }

    /// Effective user.
    pub fn effective_uid(&self) -> u32 {
        self.uids[1]
    }
}

/// A number of KiB: `12 kB`.
fn kib(text: &[u8]) -> Result<u64, &'static str> {
    let number = text.trim_ascii().strip_suffix(b" kB").ok_or(NOT_A_NUMBER)?;
    std::str::from_utf8(number.trim_ascii()).ok().and_then(|number| number.parse().ok()).ok_or(NOT_A_NUMBER)
}

/// Path of the executable as the kernel shows it, with ` (deleted)` appended if the file has been replaced. `None` for
/// kernel threads and zombies.
pub fn exe_of(process: &Process) -> Result<Option<PathBuf>, ReadError> {
    process.fault("exe")?;
    let link = match process.open_with("exe", OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(link) => link,
        Err(ReadError::Absent { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    // An empty path is the link itself.
    match rustix::fs::readlinkat(link, c"", Vec::new()) {
        Ok(target) => Ok(Some(OsString::from_vec(target.into_bytes()).into())),
        // Kernel threads have the link, but it cannot be read.
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(ReadError::from_io(process.pid(), "exe", error.into())),
    }
}

/// Base name of the executable without ` (deleted)`, or the command name (at most 15 bytes) if there is no executable.
pub fn program_name(exe: Option<&Path>, comm: &[u8]) -> Vec<u8> {
    let name = exe.and_then(Path::file_name).map(OsStrExt::as_bytes);
    let name = name.map(|name| name.strip_suffix(b" (deleted)").unwrap_or(name));
    name.unwrap_or(comm).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &[u8] =
        b"Name:\ta\\nUid:\t0\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t12\nNgid:\t0\nPid:\t12\nPPid:\t1\n\
        TracerPid:\t77\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t7\t8\n\
        VmLck:\t      64 kB\nCapInh:\t0000000000000000\nCapPrm:\t000001ffffffffff\n";

    #[test]
    fn status_is_parsed() {
        let status = Status::parse(TEXT).unwrap();
        assert_eq!((status.thread_group, status.tracer, status.effective_uid()), (12, 77, 1001));
        assert_eq!((status.gids, status.permitted, status.locked_kib), ([5, 6, 7, 8], 0x1ff_ffff_ffff, 64));
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

    proptest! {
        #[test]
        fn parsing_status_never_panics(text in prop::collection::vec(any::<u8>(), 0..300), cut in 0..TEXT.len()) {
            let _ = Status::parse(&text);
            let _ = Status::parse(&[&TEXT[..cut], &text].concat());
        }
    }
}
