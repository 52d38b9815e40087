//! Facts about this machine, which [`crate::check::diagnose`] judges.
//!
//! Nothing here decides or changes anything. Each fact comes from one read below a root path, and tells missing, denied
//! and malformed files apart.

use super::users::{KsmUser, ksm_users, saved};
use pagefold_engine::units::Pages;
use pagefold_ksm::lock::{Holder, LockError, holder};
use pagefold_ksm::request::{Carrier, RequestDevice, RequestError};
use pagefold_ksm::state_file::{State, StateError, boot_id};
use pagefold_ksm::{Knobs, Ksm, KsmCounters, KsmError};
use pagefold_procmem::list::programs_named;
use pagefold_procmem::os::fields::chosen;
use pagefold_procmem::os::fields::field;
use pagefold_procmem::os::number_list::NumberList;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// One fact, or why we don't know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact<T> {
    Is(T),
    Absent,
    Denied,
    /// We couldn't read or parse the file.
    Malformed(String),
}

impl<T> Fact<T> {
    pub fn known(&self) -> Option<&T> {
        if let Self::Is(value) = self { Some(value) } else { None }
    }

    fn of<E: fmt::Display>(result: Result<Option<T>, E>, denied: impl FnOnce(&E) -> bool) -> Self {
        match result {
            Ok(Some(value)) => Self::Is(value),
            Ok(None) => Self::Absent,
            Err(error) if denied(&error) => Self::Denied,
            Err(error) => Self::Malformed(error.to_string()),
        }
    }

    fn from_io(result: io::Result<T>) -> Self {
        match result {
            Ok(value) => Self::Is(value),
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => Self::Absent,
                io::ErrorKind::PermissionDenied => Self::Denied,
                _ => Self::Malformed(error.to_string()),
            },
        }
    }

    fn and_then<U>(self, next: impl FnOnce(T) -> Fact<U>) -> Fact<U> {
        match self {
            Self::Is(value) => next(value),
            Self::Absent => Fact::Absent,
            Self::Denied => Fact::Denied,
            Self::Malformed(what) => Fact::Malformed(what),
        }
    }
}

/// Kernel version: major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release(pub u32, pub u32);

impl Release {
    /// Parses the beginning of a version like `6.12.9-amd64`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split(|letter: char| !letter.is_ascii_digit());
        Some(Self(parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }
}

impl fmt::Display for Release {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}.{}", self.0, self.1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// One hierarchy, version 2.
    Unified,
    /// Version 1 controllers with a version 2 hierarchy beside them.
    Hybrid,
    /// Version 1 only.
    Legacy,
    Missing,
}

/// A state file that we found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundState {
    pub state: State,
    /// Whether the file was written after the last boot.
    pub this_boot: bool,
    /// Whether the process that wrote the file is still running.
    pub holder_alive: bool,
}

/// Paths to read from.
#[derive(Clone, Debug)]
pub struct MachinePaths {
    pub proc: PathBuf,
    pub sys: PathBuf,
    pub dev: PathBuf,
    pub modules: PathBuf,
    pub lock: PathBuf,
    pub state: PathBuf,
}

impl Default for MachinePaths {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
            dev: "/dev".into(),
            modules: "/lib/modules".into(),
            lock: pagefold_ksm::lock::LOCK_PATH.into(),
            state: pagefold_ksm::state_file::STATE_PATH.into(),
        }
    }
}

/// All facts that `doctor` judges.
#[derive(Clone, Debug)]
pub struct MachineFacts {
    pub release: Fact<Release>,
    pub release_text: String,
    pub ksm: Fact<(Knobs, KsmCounters)>,
    /// Whether merging on request (/dev/ksm) comes from the kernel itself or from its module.
    pub request: Fact<Carrier>,
    /// Whether the module that merges on request is installed for this kernel.
    pub request_module: Fact<()>,
    pub ksm_stat: Fact<()>,
    /// Whether pagemap shows frame numbers.
    pub frames_visible: Fact<bool>,
    /// Whether `/proc/kpageflags` is readable.
    pub page_flags: Fact<()>,
    pub uid: Fact<u32>,
    pub capabilities: Fact<u64>,
    /// Seccomp mode of this process: 0 none, 1 strict, 2 filter.
    pub seccomp: Fact<u32>,
    pub ptrace_scope: Fact<u32>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Fact<String>,
    /// How many of 512 pages may be empty or zero where khugepaged makes a huge page (`max_ptes_none`).
    pub max_ptes_none: Fact<u64>,
    /// Running programs that set KSM's knobs, or may set them.
    pub programs: Fact<Vec<(i32, String)>>,
    /// Processes whose memory KSM merges or may merge, and the memory that this saves.
    pub users: Fact<Vec<KsmUser>>,
    pub saved: Option<Pages>,
    /// Holder of the lock. Absent if the lock is free.
    pub lock_holder: Fact<Holder>,
    /// State file. Absent if there is none.
    pub state: Fact<FoundState>,
    pub max_map_count: Fact<u64>,
    pub swap_total_kib: Fact<u64>,
    pub pressure: Fact<()>,
    pub nodes: Fact<u32>,
    pub page_size: Fact<u64>,
    pub cgroups: Cgroups,
}

/// A program that sets KSM's knobs, as pagefold does, on hosts of Red Hat and Proxmox VE.
pub const KSMTUNED: &str = "ksmtuned";
/// KubeVirt's agent on each node. It sets KSM's knobs only if KubeVirt's `ksmConfiguration` selects the node.
pub const VIRT_HANDLER: &str = "virt-handler";
/// We spend at most this long on finding the processes that use KSM. Each takes some 10 us.
const USERS_LIMIT: Duration = Duration::from_secs(5);

impl MachineFacts {
    /// Reads all facts. Changes nothing.
    pub fn gather(roots: &MachinePaths) -> Self {
        let proc = |path: &str| roots.proc.join(path);
        let huge_pages = roots.sys.join("kernel/mm/transparent_hugepage");
        let release_text = read(&proc("sys/kernel/osrelease"));
        let status = read(&proc("self/status"));
        let in_status = |name: &str| status.clone().and_then(|text| field_of(&text, name));
        let users = Fact::of(ksm_users(&roots.proc, USERS_LIMIT).map(Some), |_| false);
        let saved = saved(&roots.proc, users.known().map(Vec::as_slice).unwrap_or_default());
        Self {
            release: parsed(release_text.clone(), Release::parse),
            release_text: release_text.known().map(|text| text.trim().to_owned()).unwrap_or_default(),
            ksm: ksm(&roots.sys.join("kernel/mm/ksm")),
            request: request(roots),
            request_module: release_text.clone().and_then(|release| module(&roots.modules.join(release.trim()))),
            ksm_stat: opens(&proc("self/ksm_stat")),
            frames_visible: frames_visible(&proc("self/pagemap")),
            page_flags: opens(&proc("kpageflags")),
            uid: parsed(in_status("Uid"), |text| text.split_ascii_whitespace().nth(1)?.parse().ok()),
            capabilities: parsed(in_status("CapEff"), |text| u64::from_str_radix(text.trim(), 16).ok()),
            seccomp: number(in_status("Seccomp")),
            ptrace_scope: number(read(&proc("sys/kernel/yama/ptrace_scope"))),
            huge_pages: parsed(read(&huge_pages.join("enabled")), |text| Some(chosen(text)?.to_owned())),
            max_ptes_none: number(read(&huge_pages.join("khugepaged/max_ptes_none"))),
            programs: match programs_named(&roots.proc, &[KSMTUNED, VIRT_HANDLER]) {
                Ok(programs) => Fact::Is(programs),
                Err(error) => Fact::Malformed(error.to_string()),
            },
            users,
            saved,
            lock_holder: Fact::of(holder(&roots.lock), |error| matches!(error, LockError::Denied { .. })),
            state: state(roots),
            max_map_count: number(read(&proc("sys/vm/max_map_count"))),
            swap_total_kib: parsed(read(&proc("meminfo")).and_then(|text| field_of(&text, "SwapTotal")), |text| {
                text.split_ascii_whitespace().next()?.parse().ok()
            }),
            pressure: opens(&proc("pressure/memory")),
            nodes: parsed(read(&roots.sys.join("devices/system/node/online")), |text| {
                u32::try_from(NumberList::parse(text)?.len()).ok()
            }),
            page_size: page_size(&proc("self/auxv")),
            cgroups: cgroups(&roots.sys.join("fs/cgroup")),
        }
    }
}

fn read(path: &Path) -> Fact<String> {
    Fact::from_io(std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn opens(path: &Path) -> Fact<()> {
    Fact::from_io(File::open(path).map(drop))
}

fn parsed<T>(text: Fact<String>, parse: impl FnOnce(&str) -> Option<T>) -> Fact<T> {
    text.and_then(|text| match parse(&text) {
        Some(value) => Fact::Is(value),
        None => Fact::Malformed(text.trim().to_owned()),
    })
}

fn number<T: FromStr>(text: Fact<String>) -> Fact<T> {
    parsed(text, |text| text.trim().parse().ok())
}

/// The value of a field in `key: value` text.
fn field_of(text: &str, key: &str) -> Fact<String> {
    match field(text.as_bytes(), key) {
        Some(value) => Fact::Is(String::from_utf8_lossy(value).into_owned()),
        None => Fact::Absent,
    }
}

fn ksm(root: &Path) -> Fact<(Knobs, KsmCounters)> {
    let all = Ksm::open(root).and_then(|ksm| Ok((ksm.knobs()?, ksm.counters()?)));
    match all {
        Ok(all) => Fact::Is(all),
        Err(KsmError::Absent { .. }) => Fact::Absent,
        Err(KsmError::Denied { .. }) => Fact::Denied,
        Err(error) => Fact::Malformed(error.to_string()),
    }
}

fn request(roots: &MachinePaths) -> Fact<Carrier> {
    match RequestDevice::open(&roots.dev.join("ksm")) {
        Ok(_) => Fact::Is(Carrier::of(&roots.sys)),
        Err(RequestError::Absent { .. }) => Fact::Absent,
        Err(RequestError::Denied { .. }) => Fact::Denied,
        Err(error) => Fact::Malformed(error.to_string()),
    }
}

/// Looks for the module in a kernel's folder, where DKMS puts it, compressed or not.
fn module(kernel: &Path) -> Fact<()> {
    let at = |end: &str| kernel.join(format!("updates/dkms/ksm_request.ko{end}")).exists();
    if ["", ".xz", ".zst", ".gz"].into_iter().any(at) { Fact::Is(()) } else { Fact::Absent }
}

fn state(roots: &MachinePaths) -> Fact<FoundState> {
    let state = Fact::of(State::load(&roots.state), |error| matches!(error, StateError::Denied { .. }));
    // If we can't check the boot ID, or whether the file's holder is alive, the file must not count as obsolete.
    state.and_then(|state| match (boot_id(&roots.proc), state.holder.map(|holder| holder.is_alive(&roots.proc))) {
        (Err(error), _) => Fact::Malformed(error.to_string()),
        (_, Some(Err(error))) => Fact::Malformed(error.to_string()),
        (Ok(boot), alive) => Fact::Is(FoundState {
            this_boot: boot == state.boot_id,
            holder_alive: matches!(alive, Some(Ok(true))),
            state,
        }),
    })
}

/// We read this byte so that its page is present, and then look up the page in our own pagemap.
static PROBE: [u8; 1] = [1];

/// Offset of the probe's entry in pagemap, which has 8 bytes per page.
fn probe_offset() -> u64 {
    let page = PROBE.as_ptr().addr() / pagefold_engine::units::PAGE_SIZE;
    u64::try_from(page).unwrap_or(0) * 8
}

/// Without CAP_SYS_ADMIN the kernel shows every frame number as 0 instead of refusing the read.
fn frames_visible(pagemap: &Path) -> Fact<bool> {
    const FRAME: u64 = (1 << 55) - 1;
    std::hint::black_box(PROBE[0]);
    let mut entry = [0; 8];
    let read = File::open(pagemap).and_then(|file| file.read_exact_at(&mut entry, probe_offset()));
    Fact::from_io(read.map(|()| u64::from_ne_bytes(entry) & FRAME != 0))
}

/// The page size in the auxiliary vector, which consists of pairs of words; AT_PAGESZ is 6.
fn page_size(auxv: &Path) -> Fact<u64> {
    Fact::from_io(std::fs::read(auxv)).and_then(|bytes| match page_size_in(&bytes) {
        Some(size) => Fact::Is(size),
        None => Fact::Malformed("no page size in the auxiliary vector".to_owned()),
    })
}

/// AT_PAGESZ of an auxiliary vector.
pub fn page_size_in(auxv: &[u8]) -> Option<u64> {
    for pair in auxv.chunks_exact(16) {
        let key = u64::from_ne_bytes(pair[..8].try_into().ok()?);
        if key == 6 {
            return Some(u64::from_ne_bytes(pair[8..].try_into().ok()?));
        }
    }
    None
}

fn cgroups(root: &Path) -> Cgroups {
    if root.join("cgroup.controllers").exists() {
        Cgroups::Unified
    } else if root.join("unified/cgroup.controllers").exists() {
        Cgroups::Hybrid
    } else if root.join("memory").exists() || root.join("freezer").exists() {
        Cgroups::Legacy
    } else {
        Cgroups::Missing
    }
}

#[cfg(test)]
#[path = "facts_fixture.rs"]
pub(crate) mod fixture;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_numerically() {
        assert_eq!(Release::parse("6.12.9-amd64\n"), Some(Release(6, 12)));
        assert_eq!(Release::parse("7.0-rc1"), Some(Release(7, 0)));
        assert!(Release(6, 4) < Release(6, 12) && Release(5, 19) < Release(6, 4));
        for text in ["", "six", "6", "99999999999.1"] {
            assert_eq!(Release::parse(text), None, "{text}");
        }
    }

    #[test]
    fn all_facts_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let facts = MachineFacts::gather(&fixture::healthy(dir.path()));
        assert_eq!(facts.release, Fact::Is(Release(6, 12)));
        assert_eq!(facts.capabilities, Fact::Is(0x1ff_ffff_ffff));
        assert_eq!((facts.uid, facts.seccomp, facts.ptrace_scope), (Fact::Is(0), Fact::Is(0), Fact::Is(1)));
        assert_eq!((facts.page_size, facts.frames_visible), (Fact::Is(4096), Fact::Is(true)));
        assert_eq!((facts.swap_total_kib, facts.nodes), (Fact::Is(2048), Fact::Is(1)));
        assert_eq!((facts.lock_holder, facts.state), (Fact::Absent, Fact::Absent));
        assert_eq!(facts.cgroups, Cgroups::Unified);
    }

    #[test]
    fn facts_of_an_empty_tree_are_absent() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let facts = MachineFacts::gather(&MachinePaths {
            proc: at("p"),
            sys: at("s"),
            dev: at("d"),
            modules: at("m"),
            lock: at("l"),
            state: at("t"),
        });
        assert_eq!((facts.release, facts.uid, facts.frames_visible), (Fact::Absent, Fact::Absent, Fact::Absent));
        assert!(matches!(facts.ksm, Fact::Absent));
        assert_eq!(facts.cgroups, Cgroups::Missing);
    }

    #[test]
    fn hidden_frame_numbers_are_detected() {
        let dir = tempfile::tempdir().unwrap();
        let roots = fixture::healthy(dir.path());
        fixture::set_frame(&roots.proc, 0);
        assert_eq!(MachineFacts::gather(&roots).frames_visible, Fact::Is(false));
    }
}
