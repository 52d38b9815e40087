//! Owners who say that we must not merge their memory.
//!
//! They say so by the attribute `user.pagefold.avoid` of a cgroup ([`super::attributes`]), by `MemoryKSM=no` in a
//! systemd unit ([`super::opt_out_unit`]), by `allow-ksm: 0` in the configuration of a virtual machine of Proxmox VE,
//! or on QEMU's command line ([`super::opt_out_qemu`]), where libvirt's `<nosharepages/>` and Proxmox's `allow-ksm: 0`
//! appear as well. We take a no from anyone, so nothing here asks who could have written it. Only `--override-opt-out`
//! lets such a process in.
//!
//! We read the files once for all processes of a cgroup, and again after [`VALID`]. They may be on a file system whose
//! server doesn't respond, so we read them on a thread that we may abandon. If we can't read something, that counts as
//! a no.

use crate::scope::exe::only_roots;
use crate::scope::opt_out_unit;
use crate::scope::workload::{guest_of, is_number};
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::Cgroup;
use pagefold_procmem::file_id::Found;
use pagefold_procmem::os::abandonable::{Pending, run_abandonable};
use pagefold_procmem::os::cpu::thread_cpu_ns;
use pagefold_procmem::os::locked;
use pagefold_procmem::stalls::{Origin, Share, TimeShares};
use pagefold_text::escape::printable;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long we rely on files that we've read. To read an owner's files again may take 1/[`SHARE`] of the time: if the
/// owner has many cgroups, we read their files less often, but root's at least once in [`VALID_MOST`].
const VALID: Duration = Duration::from_secs(10);
const VALID_MOST: Duration = Duration::from_secs(60);
const SHARE: u32 = 2_000;
/// After a read that didn't return in time, we wait for this long, and for that read to end, before the next one.
const PAUSE: Duration = Duration::from_secs(60);
/// How many late reads of one user's files, or of root's, may be under way at a time.
const LATE_MOST: usize = 4;
/// We remember this many cgroups of each owner, and twice as many in all. A path may take 4 KiB.
const REMEMBERED: usize = 4_096;
const REMEMBERED_IN_ALL: usize = 2 * REMEMBERED;
/// We read at most this much of a file.
pub(super) const FILE_MOST: u64 = 64 << 10;

/// The parent of the cgroups of Proxmox VE's virtual machines.
const GUESTS: &str = "/qemu.slice/";

/// How the owner of a process has excluded it from merging. Displayed as one line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OptOut {
    /// The process's cgroup, or one above, has the attribute `user.pagefold.avoid`.
    Attribute { cgroup: String },
    Unit {
        unit: String,
        /// The file that says so.
        file: PathBuf,
    },
    Guest {
        vmid: String,
        /// The file that says so.
        file: PathBuf,
    },
    /// The process runs QEMU, with such an option on its command line.
    CommandLine {
        option: &'static str,
        /// The name of the virtual machine, taken from the cgroup.
        guest: Option<String>,
    },
    /// We can't read the files that could say so: their file system doesn't answer, for example, or there are too many.
    Unknown {
        /// The cgroup that the files are about.
        cgroup: String,
    },
}

impl OptOut {
    /// Whether this is the name of the unit, virtual machine or cgroup that has opted out. Where we can't read a user's
    /// files, the user's manager stands for all of the user's cgroups, which change with each container.
    pub fn is_called(&self, name: &str) -> bool {
        match self {
            Self::Attribute { cgroup } => cgroup == name,
            Self::Unknown { cgroup } => cgroup == name || users_manager(cgroup).is_some_and(|manager| manager == name),
            Self::Unit { unit, .. } => unit == name,
            Self::Guest { vmid, .. } => vmid == name,
            Self::CommandLine { guest, .. } => guest.as_deref() == Some(name),
        }
    }
}

impl fmt::Display for OptOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attribute { cgroup } => {
                write!(f, "its cgroup {} has the attribute user.pagefold.avoid", shown(cgroup))
            }
            Self::Unit { unit, file } => write!(f, "its unit {} has MemoryKSM=no ({})", shown(unit), shown(file)),
            Self::Guest { vmid, file } => {
                write!(f, "its virtual machine {} has allow-ksm: 0 ({})", shown(vmid), shown(file))
            }
            Self::CommandLine { option, guest: None } => write!(f, "its command line has {option}"),
            Self::CommandLine { option, guest: Some(guest) } => {
                write!(f, "the command line of its virtual machine {} has {option}", shown(guest))
            }
            Self::Unknown { cgroup } => {
                write!(f, "the files that say whether {} may be merged cannot be read", shown(cgroup))?;
                match users_manager(cgroup) {
                    Some(manager) => {
                        write!(f, "; --override-opt-out {manager} merges this user's programs all the same")
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

fn shown(text: impl AsRef<OsStr>) -> String {
    printable(text.as_ref().as_encoded_bytes())
}

/// The opt-outs in files about the cgroups of a process.
pub(super) fn by_files(cgroups: &[Cgroup], roots: &Roots) -> Vec<OptOut> {
    static KNOWN: Known = Known::new();
    let mut found: Vec<OptOut> = Vec::new();
    for cgroup in cgroups {
        // We only look at systemd's own hierarchies: one or two of them are mounted.
        if !matches!(cgroup.controllers.as_str(), "" | "name=systemd") || cgroup.path == "/" {
            continue;
        }
        let path = cgroup.path.clone();
        let root = roots.files.clone();
        let key = Key { root: root.clone(), whose: Whose::of(&path), path: path.clone() };
        for opt_out in KNOWN.get(key, Instant::now(), move || read(&path, &root)) {
            if !found.contains(&opt_out) {
                found.push(opt_out);
            }
        }
    }
    found
}

/// The opt-out of a process that runs QEMU with this option on its command line.
pub(crate) fn by_command_line(option: &'static str, cgroup: Option<&str>) -> OptOut {
    OptOut::CommandLine { option, guest: cgroup.and_then(guest_of) }
}

fn read(path: &str, root: &Path) -> Vec<OptOut> {
    opt_out_unit::of_cgroup(path, root).into_iter().chain(of_guest(path, root)).collect()
}

/// The opt-out of a virtual machine of Proxmox VE, which runs in `qemu.slice/VMID.scope`. Its configuration is on a
/// file system whose server runs as root, and only root can write these files there.
fn of_guest(path: &str, root: &Path) -> Option<OptOut> {
    let vmid = path.strip_prefix(GUESTS)?.split('/').next()?.strip_suffix(".scope")?;
    if !is_number(vmid) {
        return None;
    }
    let file = Path::new("/etc/pve/qemu-server").join(format!("{vmid}.conf"));
    match read_file(&below(root, &file), &[], FILE_MOST) {
        Ok(text) if guest_denies(&text) => Some(OptOut::Guest { vmid: vmid.to_owned(), file }),
        Ok(_) => None,
        Err(_) => Some(OptOut::Unknown { cgroup: path.to_owned() }),
    }
}

/// Whether the configuration of a virtual machine of Proxmox VE has `allow-ksm: 0`, either now or pending for the next
/// start. All other sections are snapshots, which don't count.
pub fn guest_denies(text: &[u8]) -> bool {
    let mut running = false;
    let mut pending = false;
    let mut is_pending = false;
    let mut is_snapshot = false;
    for line in text.split(|&byte| byte == b'\n') {
        let line = line.trim_ascii();
        if line.starts_with(b"[") {
            is_pending = line.eq_ignore_ascii_case(b"[pending]");
            is_snapshot = !is_pending;
            continue;
        }
        let Some(value) = line.strip_prefix(b"allow-ksm") else { continue };
        let Some(value) = value.trim_ascii_start().strip_prefix(b":") else { continue };
        let denied = matches!(&value.trim_ascii().to_ascii_lowercase()[..], b"0" | b"no" | b"off" | b"false");
        if is_pending {
            pending = denied;
        } else if !is_snapshot {
            running = denied;
        }
    }
    running || pending
}

/// An absolute path in another root directory.
pub(super) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Finds a file without opening it, because opening alone may have an effect. Below a user's folders we follow no
/// links: they could lead to any file that root may read, such as /proc/kmsg, where reading takes the contents away.
fn find(path: &Path, folders: &[PathBuf]) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    for folder in folders {
        let Ok(inner) = path.strip_prefix(folder) else { continue };
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        return Ok(rustix::fs::openat2(folder, inner, flags, Mode::empty(), resolve)?.into());
    }
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Reads the beginning of a regular file. Anything else reads as empty, and so does a link to /dev/null, by which units
/// are masked. `folders` are a user's, if the file may be in one of them.
pub(super) fn read_file(path: &Path, folders: &[PathBuf], most: u64) -> io::Result<Vec<u8>> {
    let found = match find(path, folders) {
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        Err(_) if fs::read_link(path).is_ok_and(|target| target == Path::new("/dev/null")) => return Ok(Vec::new()),
        found => found?,
    };
    Ok(read_found(&found, most)?.unwrap_or_default())
}

/// Reads the beginning of a regular file that we've found. `None` if it's something else, or belongs to a file system
/// in which the kernel shows itself (/proc, /sys, tracing): reading such a file may take its contents away, or wait for
/// more. These file systems have no blocks.
fn read_found(found: &File, most: u64) -> io::Result<Option<Vec<u8>>> {
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    // These may have no blocks either: a tmpfs has some only if it's limited.
    const OTHERS: [i64; 3] = [libc::TMPFS_MAGIC, RAMFS_MAGIC, libc::FUSE_SUPER_MAGIC];
    if !found.metadata()?.is_file() {
        return Ok(None);
    }
    let system = rustix::fs::fstatfs(found)?;
    if system.f_blocks == 0 && !OTHERS.contains(&system.f_type) {
        return Ok(None);
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// Reads the beginning of a file, if its path is absolute and root alone can change the file. The path must have no
/// links.
pub(super) fn read_roots_file(path: &Path, most: u64) -> Option<Vec<u8>> {
    if !path.is_absolute() {
        return None;
    }
    only_roots(path, Some(Found::of_path(path).ok()?.id)).ok()?;
    read_found(&find(path, &[]).ok()?, most).ok()?
}

/// The names in a directory. There may be at most `room`, which we reduce by their number. `None` if there are more, or
/// if we can't read the directory. `folders` are a user's.
pub(super) fn names_in(directory: &Path, folders: &[PathBuf], room: &mut usize) -> Option<Vec<String>> {
    let found = match find(directory, folders) {
        Err(error) if is_missing(&error) => return Some(Vec::new()),
        found => found.ok()?,
    };
    let mut names = Vec::new();
    if !found.metadata().ok()?.is_dir() {
        return Some(names);
    }
    for entry in fs::read_dir(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()? {
        *room = room.checked_sub(1)?;
        names.extend(entry.ok()?.file_name().into_string());
    }
    Some(names)
}

/// The results of reads, by cgroup.
struct Known {
    entries: Mutex<BTreeMap<Key, Entry>>,
    /// The time that reading the files of each user takes. Once a user has used up its part of the time, cgroups that
    /// are new to us count as opted out.
    time: TimeShares,
}

/// The owner of the files. If files of one owner don't respond, we can still read another owner's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Whose {
    System,
    /// Proxmox VE's files about its virtual machines, on a file system of their own.
    Guests,
    User(u32),
}

impl Whose {
    fn of(path: &str) -> Self {
        match opt_out_unit::user_of(path) {
            Some(uid) => Self::User(uid),
            None if path.starts_with(GUESTS) => Self::Guests,
            None => Self::System,
        }
    }

    /// We don't limit the time that reading root's own files takes.
    fn origin(self) -> Origin {
        match self {
            Self::User(uid) => Origin { user: Some(Share::User(uid)), cgroup: None },
            Self::System | Self::Guests => Origin::default(),
        }
    }
}

/// The unit of the user manager that started the processes in this cgroup, if one did.
fn users_manager(cgroup: &str) -> Option<String> {
    opt_out_unit::user_of(cgroup).map(|uid| format!("user@{uid}.service"))
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    whose: Whose,
    path: String,
    root: PathBuf,
}

struct Entry {
    /// `None`: not read yet.
    found: Option<Vec<OptOut>>,
    next: Instant,
    late: Option<Pending>,
}

impl Entry {
    fn is_late(&self) -> bool {
        self.late.as_ref().is_some_and(|late| !late.is_over())
    }
}

impl Known {
    const fn new() -> Self {
        Self { entries: Mutex::new(BTreeMap::new()), time: TimeShares::new(Duration::ZERO, Duration::MAX) }
    }

    fn get(&self, key: Key, now: Instant, read: impl FnOnce() -> Vec<OptOut> + Send + 'static) -> Vec<OptOut> {
        let unknown = vec![OptOut::Unknown { cgroup: key.path.clone() }];
        let mut before = None;
        let mut late = 0;
        let mut others = 0;
        {
            let entries = locked(&self.entries);
            if let Some(known) = entries.get(&key) {
                before.clone_from(&known.found);
                if now < known.next || known.is_late() {
                    return before.unwrap_or(unknown);
                }
            }
            for (_, entry) in entries.iter().filter(|(other, _)| other.whose == key.whose) {
                late += usize::from(entry.is_late());
                // We don't count cgroups that nobody has asked about for a while.
                others += u32::from(now < entry.next);
            }
        }
        let origin = key.whose.origin();
        if late >= LATE_MOST || !self.time.admits(origin, now) {
            return before.unwrap_or(unknown);
        }
        // We wait no longer than we do for a process that doesn't answer.
        let began = Instant::now();
        let entry = match run_abandonable(move || {
            let before_ns = thread_cpu_ns();
            (read(), Duration::from_nanos(thread_cpu_ns().saturating_sub(before_ns)))
        }) {
            Ok((found, cost)) => {
                let valid = cost.saturating_mul(others).saturating_mul(SHARE);
                let most = if matches!(key.whose, Whose::User(_)) { Duration::MAX } else { VALID_MOST };
                let valid = valid.clamp(VALID, most);
                Entry { found: Some(found), next: now + valid, late: None }
            }
            Err(pending) => Entry { found: before, next: now + PAUSE, late: Some(pending) },
        };
        self.time.charge(origin, began.elapsed(), now);
        let found = entry.found.clone().unwrap_or(unknown);
        let mut entries = locked(&self.entries);
        if entries.len() >= REMEMBERED {
            entries.retain(|_, entry| now < entry.next || entry.is_late());
        }
        let remembered = entries.keys().filter(|other| other.whose == key.whose).count();
        if remembered < REMEMBERED || entries.contains_key(&key) {
            entries.insert(key, entry);
        }
        if entries.len() > REMEMBERED_IN_ALL {
            forget_one(&mut entries);
        }
        found
    }
}

/// Finds the owner with the most entries. Forgets the one of them that we'd have to read again first.
fn forget_one(entries: &mut BTreeMap<Key, Entry>) {
    let mut counts: BTreeMap<Whose, usize> = BTreeMap::new();
    for key in entries.keys() {
        *counts.entry(key.whose).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|&(_, count)| count).map(|(whose, _)| whose);
    // We keep the entries of threads that haven't returned, because these threads still count.
    let of_most = entries.iter().filter(|(key, entry)| Some(key.whose) == most && !entry.is_late());
    if let Some((key, _)) = of_most.min_by_key(|(_, entry)| entry.next) {
        let key = key.clone();
        entries.remove(&key);
    }
}

#[cfg(test)]
#[path = "opt_out_tests.rs"]
mod tests;
