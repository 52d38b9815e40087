//! The executable of a process, and whether rules that grant something may rely on it.
//!
//! Any user can run a program under any name: a copy, a link, a file mounted elsewhere, a command name set by prctl. So
//! a rule that grants something (a scope, a trust domain, an exception of the deny list) matches only a file that this
//! machine's root alone can write or replace: the file at this path, by device and inode, and all directories above it
//! belong to root, and no other user may write them. An upgrade may replace the file while the program is running. Then
//! we go by the same path if the file that runs is root's alone and was on the same mount as the directory, or on a
//! copy of that mount: a service with `PrivateTmp=` has copies of all mounts. Likewise, a link that led to a program
//! when we checked remains one of its names. Rules that only exclude match by name as well.

use pagefold_procmem::file_id::{FileId, Found};
use pagefold_procmem::os::locked;
use pagefold_procmem::os::peer::is_trusted;
use pagefold_procmem::process::{Process, ReadError};
use pagefold_procmem::status::{exe_of, program_name};
use pagefold_text::escape::printable;
use pagefold_text::regular;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use thiserror::Error;

const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// The kernel cuts command names off after this many bytes.
const COMM_MOST: usize = 15;
/// The kernel adds this to the path of a file that was removed or replaced.
const DELETED: &[u8] = b" (deleted)";

/// Whether root (or the user that runs pagefold) alone can write a file of this owner and mode.
pub(crate) fn is_roots_alone(uid: u32, mode: u32) -> bool {
    is_trusted(uid) && mode & WRITABLE_BY_OTHERS == 0
}

/// An executable. Dereferences to its path as the kernel shows it.
#[derive(Clone, Debug)]
pub struct Exe {
    path: PathBuf,
    file: Option<Found>,
    /// If the file was removed: where it's mounted ([`place_of`]), as the process itself sees it.
    place: Option<Vec<u8>>,
    /// We check it once, because a trusted file may be replaced while it runs.
    trust: OnceLock<Result<(), Distrust>>,
    /// Paths that have led to this file so far: a link may be switched to another version while this one runs.
    led_here: Arc<Mutex<BTreeSet<PathBuf>>>,
}

/// Why rules that grant something don't match an executable. Displayed as a clause that follows its path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Error)]
pub enum Distrust {
    /// The file has been replaced or removed since it was started, and it wasn't root's alone or was on another mount.
    #[error("has been replaced or removed since it was started, and may not have been root's")]
    Deleted,
    /// The path leads to another file, for example in a container.
    #[error("is not the file of that path on this machine (it may be in a container)")]
    Elsewhere,
    /// Users other than root can change the file or a directory above it.
    #[error("can be changed by users other than root ({} belongs to user {uid} and has mode {mode:o})", printable(path.as_os_str().as_bytes()))]
    Writable { path: PathBuf, uid: u32, mode: u32 },
    /// The path is a link, and leads to another file of this name.
    #[error("is not the version that the path now leads to")]
    OtherVersion,
    /// On a file system that a program provides.
    #[error("is on a file system that a program provides (FUSE)")]
    Provided,
    /// Only the command name matches.
    #[error("has another name: only the command name matches, which a program sets itself")]
    CommandName,
    /// This is about a cgroup rather than the executable: users other than root could have named it, or one above it.
    #[error("its cgroup {} could have been named by users other than root", printable(.0.as_bytes()))]
    Cgroup(String),
}

impl Distrust {
    /// The options that select such a process.
    pub(super) fn ways(&self) -> &'static str {
        match self {
            Self::Elsewhere => "--container, --pod, --pid, --cgroup or --user",
            _ => "--pid, --cgroup or --user",
        }
    }

    /// A clause about the process, whose executable is called `exe`.
    pub(super) fn clause(&self, exe: &str) -> String {
        match self {
            Self::Cgroup(_) => self.to_string(),
            _ => format!("{exe} {self}"),
        }
    }
}

/// How an executable matches a selector: an absolute path or a base name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matching {
    No,
    /// Matches, and only root can change the file.
    Yes,
    /// Matches by name only, and any user can choose the name.
    NameOnly(Distrust),
}

impl Deref for Exe {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl PartialEq for Exe {
    fn eq(&self, other: &Self) -> bool {
        // A fork made after the file was removed runs the same file.
        (without_deleted(&self.path), self.id()) == (without_deleted(&other.path), other.id())
    }
}

impl Eq for Exe {}

impl Exe {
    /// The executable of a process. `None` for kernel threads and zombies.
    pub fn of(process: &Process) -> Result<Option<Self>, ReadError> {
        let Some(path) = exe_of(process)? else { return Ok(None) };
        let mut trust = OnceLock::new();
        let file = match process.open_with("exe", OFlags::PATH) {
            Ok(file) => match Found::of_file(&file) {
                Ok(found) => Some(found),
                // A user's FUSE mount lets nobody else look at its files, not even root (`fuse_getattr`).
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    trust = OnceLock::from(Err(Distrust::Provided));
                    None
                }
                Err(error) => return Err(ReadError::from_io(process.pid(), "exe", error)),
            },
            // In a test's tree the executable may be missing.
            Err(ReadError::Absent { .. }) => None,
            Err(error) => return Err(error),
        };
        let is_deleted = without_deleted(&path) != path;
        let place = match &file {
            Some(file) if is_deleted => place_seen_by(process, file.mount),
            _ => None,
        };
        Ok(Some(Self { path, file, place, trust, led_here: Arc::default() }))
    }

    pub fn id(&self) -> Option<FileId> {
        Some(self.file?.id)
    }

    /// Whether only root can change the file; if not, why.
    pub fn trust(&self) -> Result<(), &Distrust> {
        let found = self.trust.get_or_init(|| {
            let file = self.file.ok_or(Distrust::Deleted)?;
            let path = without_deleted(&self.path);
            if path == self.path {
                return only_roots(path, Some(file.id));
            }
            let directory = path.parent().ok_or(Distrust::Deleted)?;
            // We check step by step first, so that we ask no file system that a program provides.
            match only_roots(directory, None) {
                // The directory may have been removed, too.
                Err(Distrust::Elsewhere) => return Err(Distrust::Deleted),
                checked => checked?,
            }
            let mount = Found::of_path(directory).map_err(|_| Distrust::Deleted)?.mount;
            if self.is_roots_on(mount) { Ok(()) } else { Err(Distrust::Deleted) }
        });
        match found {
            Ok(()) => Ok(()),
            Err(why) => Err(why),
        }
    }

    /// Whether only root can write the file, and the file is on this mount. A removed file may also be on a mount with
    /// the same device, root and mount point.
    fn is_roots_on(&self, mount: u64) -> bool {
        let Some(file) = self.file.filter(|file| is_roots_alone(file.uid, file.mode)) else { return false };
        if file.mount == mount {
            return true;
        }
        let place = own_mounts(|mounts| place_of(mounts, mount).map(<[u8]>::to_vec));
        self.place.is_some() && self.place == place.flatten()
    }

    /// How the executable matches a selector. `comm` is the command name.
    pub fn matches(&self, selector: &str, comm: &[u8]) -> Matching {
        let is_path = selector.starts_with('/');
        let is_exact = is_exactly(selector, &self.path);
        let matches_path = is_exact || is_path && self.is_linked_as(Path::new(selector));
        if is_path && !matches_path && self.is_other_version(Path::new(selector), comm) {
            return Matching::NameOnly(Distrust::OtherVersion);
        }
        if !matches_path && !is_named(selector, Some(&self.path), comm) {
            return Matching::No;
        }
        if let Err(why) = self.trust() {
            return Matching::NameOnly(why.clone());
        }
        // The command name may be that of a link beside the file.
        let link = self.path.with_file_name(selector);
        if matches_path || self.is_linked_as(&link) {
            Matching::Yes
        } else if self.is_other_version(&link, comm) {
            Matching::NameOnly(Distrust::OtherVersion)
        } else {
            Matching::NameOnly(Distrust::CommandName)
        }
    }

    /// Whether this path leads to the executable, as Debian's redis-server leads to redis-check-rdb, or has led to it
    /// at an earlier check. Only links and directories of root count.
    fn is_linked_as(&self, path: &Path) -> bool {
        if locked(&self.led_here).contains(path) {
            return true;
        }
        let leads_here = follow_roots(path).is_some_and(|file| file == without_deleted(&self.path));
        if leads_here {
            locked(&self.led_here).insert(path.to_owned());
        }
        leads_here
    }

    /// Whether this path is a link that leads to another file, while the executable is root's and has the link's name,
    /// or was started by it. A process can set its command name, so this never selects the process. It only tells the
    /// user why the process isn't selected.
    fn is_other_version(&self, path: &Path, comm: &[u8]) -> bool {
        let Some(name) = path.file_name() else { return false };
        let truncated = &name.as_bytes()[..name.len().min(COMM_MOST)];
        if without_deleted(&self.path).file_name() != Some(name) && comm != truncated {
            return false;
        }
        let Some(file) = follow_roots(path).filter(|file| file != path) else { return false };
        // The directory of a former version may be gone.
        self.trust().is_ok() || Found::of_path(&file).is_ok_and(|file| self.is_roots_on(file.mount))
    }
}

/// Where a path leads. `None` if a user other than root could have put something else on the way, and so could hold us
/// up: a link may lead to a file system that doesn't answer.
fn follow_roots(path: &Path) -> Option<PathBuf> {
    const LINKS_MOST: usize = 40;
    let mut walked = PathBuf::from("/");
    let mut left: Vec<PathBuf> = Vec::new();
    push_backwards(&mut left, path);
    let mut links = 0;
    let mut last_mount = None;
    while let Some(name) = left.pop() {
        if name == Path::new("..") {
            walked.pop();
            continue;
        }
        walked.push(name);
        let found = Found::of_path(&walked).ok()?;
        if last_mount.replace(found.mount) != Some(found.mount) && is_provided(found.mount) {
            return None;
        }
        match found.mode & libc::S_IFMT {
            // In directories like /tmp others may make files, but not replace root's.
            libc::S_IFDIR if is_roots_alone(found.uid, found.mode) || found.uid == 0 && found.mode & STICKY != 0 => {}
            libc::S_IFLNK if is_trusted(found.uid) && links < LINKS_MOST => {
                links += 1;
                let target = fs::read_link(&walked).ok()?;
                walked.pop();
                if target.is_absolute() {
                    walked = PathBuf::from("/");
                }
                push_backwards(&mut left, &target);
            }
            libc::S_IFREG if left.is_empty() => {}
            _ => return None,
        }
    }
    Some(walked)
}

/// The interpreter that runs a script, if this path leads to a script that root alone can replace: its first line is
/// `#!` and a path. A process that runs a script has the interpreter as its executable.
pub fn interpreter_of(path: &Path) -> Option<String> {
    /// The kernel reads as much (`BINPRM_BUF_SIZE`).
    const FIRST_LINE_MOST: u64 = 256;
    let file = regular::open(&follow_roots(path)?, OpenOptions::new().read(true)).ok()?;
    let mut start = Vec::new();
    file.take(FIRST_LINE_MOST).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace();
    let first = words.next()?;
    let program =
        if first.ends_with("/env") { words.find(|word| !word.starts_with('-') && !word.contains('=')) } else { None };
    Some(printable(program.unwrap_or(first).as_bytes()))
}

/// Pushes the parts of a path, the last one first.
fn push_backwards(parts: &mut Vec<PathBuf>, path: &Path) {
    for component in path.components().rev() {
        if matches!(component, Component::Normal(_) | Component::ParentDir) {
            parts.push(PathBuf::from(component.as_os_str()));
        }
    }
}

/// The path that an executable has or had.
fn without_deleted(path: &Path) -> &Path {
    match path.as_os_str().as_bytes().strip_suffix(DELETED) {
        Some(plain) => Path::new(OsStr::from_bytes(plain)),
        None => path,
    }
}

/// Whether the path or its base name is the selector.
fn is_exactly(selector: &str, path: &Path) -> bool {
    let path = without_deleted(path).as_os_str().as_bytes();
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    selector.as_bytes() == if selector.starts_with('/') { path } else { name }
}

/// Whether a process goes by this absolute path, base name or command name. The command name is truncated to 15 bytes.
pub(crate) fn is_named(selector: &str, exe: Option<&Path>, comm: &[u8]) -> bool {
    if selector.starts_with('/') {
        return exe.is_some_and(|exe| is_exactly(selector, exe));
    }
    let selector = selector.as_bytes();
    let name = program_name(exe, comm);
    let truncated = comm.len() == 15 && selector.starts_with(comm) && (exe.is_none() || !name.starts_with(comm));
    name == selector || comm == selector || truncated
}

/// Whether only root can change the file or directory at this path. If `id` is given it must be that file. The path
/// must have no links.
pub(super) fn only_roots(path: &Path, id: Option<FileId>) -> Result<(), Distrust> {
    let mut walked = PathBuf::new();
    let mut last_mount = None;
    let length = path.components().count();
    for (at, component) in path.components().enumerate() {
        if !matches!(component, Component::RootDir | Component::Normal(_)) {
            return Err(Distrust::Elsewhere);
        }
        walked.push(component);
        let found = Found::of_path(&walked).map_err(|_| Distrust::Elsewhere)?;
        // We check the mount before we ask its file system, because a program that provides one may not answer.
        if last_mount.replace(found.mount) != Some(found.mount) && is_provided(found.mount) {
            return Err(Distrust::Provided);
        }
        let is_last = at + 1 == length;
        let kind = if is_last && id.is_some() { libc::S_IFREG } else { libc::S_IFDIR };
        if found.mode & libc::S_IFMT != kind || is_last && id.is_some_and(|id| id != found.id) {
            return Err(Distrust::Elsewhere);
        }
        // In directories like /tmp others may make files, but not replace existing ones.
        let is_outer = at + if id.is_some() { 2 } else { 1 } < length;
        let mode = if is_outer && found.mode & STICKY != 0 { found.mode & !WRITABLE_BY_OTHERS } else { found.mode };
        if !is_roots_alone(found.uid, mode) {
            return Err(Distrust::Writable { path: walked, uid: found.uid, mode: found.mode & 0o7777 });
        }
    }
    Ok(())
}

/// The place of a mount in the text of `/proc/PID/mountinfo`: device, root and mount point. Mounts with the same place
/// show the same file at the same path.
fn place_of(mountinfo: &[u8], mount: u64) -> Option<&[u8]> {
    let number = mount.to_string();
    for line in mountinfo.split(|&byte| byte == b'\n') {
        // "36 35 98:0 / /mnt rw,noatime ..."
        let mut words = line.splitn(3, |&byte| byte == b' ');
        if words.next() != Some(number.as_bytes()) {
            continue;
        }
        let rest = words.nth(1)?;
        let mut spaces = rest.iter().enumerate().filter(|(_, byte)| **byte == b' ');
        let end = spaces.nth(2)?.0;
        return Some(&rest[..end]);
    }
    None
}

/// The place of a mount among a process's own mounts, if the process's root is called `/` like ours. `None` on any
/// error.
fn place_seen_by(process: &Process, mount: u64) -> Option<Vec<u8>> {
    /// A user can make as many mounts as `fs.mount-max` allows.
    const MOUNTINFO_BYTES: u64 = 1 << 20;
    let root = process.open_with("root", OFlags::PATH | OFlags::NOFOLLOW).ok()?;
    if rustix::fs::readlinkat(root, c"", Vec::new()).ok()?.as_c_str() != c"/" {
        return None;
    }
    let mut mounts = Vec::new();
    process.open_file("mountinfo").ok()?.take(MOUNTINFO_BYTES).read_to_end(&mut mounts).ok()?;
    Some(place_of(&mounts, mount)?.to_vec())
}

/// Whether a program provides a mount's file system (FUSE), by `/proc/self/mountinfo`.
fn is_provided(mount: u64) -> bool {
    own_mounts(|mounts| is_fuse(mounts, mount)).unwrap_or(false)
}

fn is_fuse(mountinfo: &[u8], mount: u64) -> bool {
    let number = mount.to_string();
    for line in mountinfo.split(|&byte| byte == b'\n') {
        let mut words = line.split(|&byte| byte == b' ');
        if words.next() == Some(number.as_bytes()) && words.any(|word| word == b"-") {
            return words.next().is_some_and(|kind| kind.starts_with(b"fuse"));
        }
    }
    false
}

/// `/proc/self/mountinfo` as we last read it. Users can make it long, by FUSE mounts, so we read it again only when
/// poll(2) says that the mounts have changed.
struct Mounts {
    file: File,
    text: Vec<u8>,
}

impl Mounts {
    fn open() -> io::Result<Self> {
        let mut mounts = Self { file: File::open("/proc/self/mountinfo")?, text: Vec::new() };
        mounts.read()?;
        Ok(mounts)
    }

    fn read(&mut self) -> io::Result<()> {
        self.text.clear();
        self.file.rewind()?;
        self.file.read_to_end(&mut self.text)?;
        Ok(())
    }

    /// Reads the mounts again if they've changed. Returns whether they have.
    fn refresh(&mut self) -> io::Result<bool> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let has_changed = poll(&mut [PollFd::new(&self.file, PollFlags::PRI)], Some(&now))? > 0;
        if has_changed {
            self.read()?;
        }
        Ok(has_changed)
    }
}

/// Finds something in our `/proc/self/mountinfo`. `None` if we can't read it.
fn own_mounts<T>(find: impl FnOnce(&[u8]) -> T) -> Option<T> {
    static KNOWN: Mutex<Option<Mounts>> = Mutex::new(None);
    let mut known = locked(&KNOWN);
    let mounts = match known.take() {
        Some(mut mounts) => mounts.refresh().map(|_| mounts),
        None => Mounts::open(),
    };
    let mounts = known.insert(mounts.ok()?);
    Some(find(&mounts.text))
}

#[cfg(test)]
#[path = "exe_tests.rs"]
mod tests;
