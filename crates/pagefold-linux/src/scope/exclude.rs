//! Which processes and which mappings are left alone, and why.
//!
//! Facts are acquired first and judged apart from that, so that every rule is tested without a process.

use crate::proc::maps::VmaDetail;
use crate::proc::process::{Process, ReadError};
use crate::proc::status::{Status, exe_of, printable, program_name};
use crate::scope::dumpable::{Dumpable, ask_inside, dumpable};
use std::fmt;

/// Why a process or a mapping is left alone. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Exclusion {
    /// A thread of the kernel.
    KernelThread,
    /// Ended, not reaped yet.
    Zombie,
    /// It has asked the kernel to keep its memory from others, or changed its user.
    NotDumpable,
    /// A debugger or the like holds it; KSM's marks could not be set anyway.
    Traced {
        /// The tracer.
        by: i32,
    },
    /// Its program is on the deny list.
    DenyListed {
        /// The entry that matches.
        entry: String,
    },
    /// The kernel does not let us read it.
    NotReadable,
    /// It keeps its memory map locked: who reads it waits with it.
    Stuck,
    /// It maps and unmaps memory all the time, and would be slowed down.
    Restless,
    /// Shared memory, or a file mapped shared.
    Shared,
    /// VM_PFNMAP: device memory without page structures.
    PfnMap,
    /// VM_IO: a device's registers.
    Io,
    /// VM_DONTEXPAND: a driver's mapping.
    DontExpand,
    /// Hugetlb pages.
    HugeTlb,
    /// VM_MIXEDMAP: a driver's mapping with some pages.
    MixedMap,
    /// VM_DROPPABLE: contents that the kernel may drop (the vDSO's random state).
    Droppable,
    /// A file on persistent memory, mapped synchronously.
    Dax,
    /// Shadow stack.
    ShadowStack,
    /// A mapping that the kernel provides: `[vdso]`, `[vvar]`, `[vsyscall]`.
    Special,
    /// MADV_DONTDUMP on less than [`BULK_BYTES`]: kept out of core dumps, as programs do with secrets.
    DontDump,
    /// MADV_WIPEONFORK: kept from children, as programs do with keys.
    WipeOnFork,
    /// mlock: to stay in memory as it is; programs do so with secrets and where time counts.
    Locked,
    /// userfaultfd watches it: a merge would lose its write protection, and a missing page is another program's to fill.
    UserFault,
    /// There is no anonymous page in it.
    NothingAnonymous,
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KernelThread => "kernel thread",
            Self::Zombie => "has ended",
            Self::NotDumpable => "keeps its memory from others (not dumpable)",
            Self::Traced { by } => return write!(f, "traced by process {by}"),
            Self::DenyListed { entry } => return write!(f, "on the deny list ({})", printable(entry.as_bytes())),
            Self::NotReadable => "it cannot be read",
            Self::Stuck => "it keeps its memory map locked",
            Self::Restless => "maps and unmaps memory all the time, and would be slowed down",
            Self::Shared => "shared mapping, which KSM never merges",
            Self::PfnMap => "device memory (VM_PFNMAP), which KSM never merges",
            Self::Io => "device registers (VM_IO), which KSM never merges",
            Self::DontExpand => "driver mapping (VM_DONTEXPAND), which KSM never merges",
            Self::HugeTlb => "hugetlb pages, which KSM never merges",
            Self::MixedMap => "driver mapping (VM_MIXEDMAP), which KSM never merges",
            Self::Droppable => "droppable memory, which KSM never merges",
            Self::Dax => "file on persistent memory, which KSM never merges",
            Self::ShadowStack => "shadow stack",
            Self::Special => "provided by the kernel",
            Self::DontDump => "kept out of core dumps (MADV_DONTDUMP): may hold secrets",
            Self::WipeOnFork => "kept from children (MADV_WIPEONFORK): may hold keys",
            Self::Locked => "locked in memory (mlock): may hold secrets",
            Self::UserFault => "watched by userfaultfd, which a merge would disturb",
            Self::NothingAnonymous => "no anonymous pages",
        })
    }
}

/// Programs that are never touched: those that keep keys, passwords or other people's web pages. An entry is a base
/// name, or its beginning followed by `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenyList {
    /// The first that fits a name counts.
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    denied: bool,
}

impl Default for DenyList {
    fn default() -> Self {
        Self::new(DEFAULT_DENIED.iter().map(|&entry| entry.to_owned()))
    }
}

/// The entries of the default [`DenyList`].
pub const DEFAULT_DENIED: &[&str] = &[
    // key agents and what handles keys
    "ssh-agent",
    "ssh-add",
    "ssh",
    "sshd",
    "sshd-*",
    "gpg",
    "gpg-agent",
    "keyboxd",
    "scdaemon",
    "gpgsm",
    "dirmngr",
    "gnome-keyring-d*",
    "kwalletd*",
    "ksecretd",
    "secret-tool",
    "oo7-daemon",
    "pinentry*",
    "polkitd",
    "polkit-agent-he*",
    "pcscd",
    "p11-kit-server",
    "vault",
    "sudo",
    "su",
    "login",
    "passwd",
    "cryptsetup",
    "systemd-cryptse*",
    "systemd-homed",
    "systemd-homewor*",
    "krb5kdc",
    "sssd*",
    // password managers
    "keepassxc*",
    "keepass2",
    "keepassxc-proxy",
    "1password*",
    "op",
    "bitwarden*",
    "bw",
    "enpass",
    "proton-pass*",
    "pass",
    // browsers, and mail programs that are browsers inside
    "firefox*",
    "plugin-containe*",
    "librewolf*",
    "thunderbird*",
    "chrome*",
    "chromium*",
    "google-chrome*",
    "brave*",
    "msedge*",
    "opera*",
    "vivaldi*",
    "epiphany*",
    "WebKitWebProces*",
    "WebKitNetworkPr*",
    "tor",
    "tor-browser*",
    "signal-desktop*",
];

impl DenyList {
    /// A list of these entries.
    pub fn new(entries: impl IntoIterator<Item = String>) -> Self {
        Self { entries: entries.into_iter().map(|name| Entry { name, denied: true }).collect() }
    }

    /// The list with these programs denied and those allowed, whatever it says of them. Denied comes before allowed.
    #[must_use]
    pub fn with(self, denied: &[String], allowed: &[String]) -> Self {
        let entries = |names: &[String], denied| {
            names.iter().map(|name| Entry { name: name.clone(), denied }).collect::<Vec<_>>()
        };
        Self { entries: [entries(denied, true), entries(allowed, false), self.entries].concat() }
    }

    /// The entry that denies a program of this name. A name of 15 bytes may be a command name that the kernel has cut
    /// off, so it also matches the longer entries that it begins. It is not allowed by those, for it may be another's.
    pub fn entry_for(&self, name: &[u8]) -> Option<&str> {
        const COMM_MOST: usize = 15;
        let fits = |entry: &&Entry| {
            if let Some(start) = entry.name.strip_suffix('*') {
                return name.starts_with(start.as_bytes());
            }
            let cut_off = || entry.denied && name.len() == COMM_MOST && entry.name.as_bytes().starts_with(name);
            name == entry.name.as_bytes() || cut_off()
        };
        self.entries.iter().find(fits).filter(|entry| entry.denied).map(|entry| entry.name.as_str())
    }
}

/// Why a deny list cannot have this entry, if it cannot: it would never match, and protect nobody.
pub fn unfit_entry(entry: &str) -> Option<&'static str> {
    let name = entry.strip_suffix('*').unwrap_or(entry);
    if entry.is_empty() {
        Some("is empty; give a program's base name")
    } else if name.contains('*') {
        Some("has an asterisk before its end; give a program's base name, or its beginning and one asterisk")
    } else if name.contains(['/', '\0']) {
        Some("is a path; give the program's base name")
    } else {
        None
    }
}

/// What the rules for processes need to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ProcessFacts {
    pub kernel_thread: bool,
    pub zombie: bool,
    pub dumpable: Dumpable,
    pub tracer: i32,
    pub program: Vec<u8>,
    pub readable: bool,
}

impl ProcessFacts {
    /// Finds the facts out.
    pub fn of(process: &Process) -> Result<Self, ReadError> {
        let stat = process.stat()?;
        let status = Status::of(process)?;
        let zombie = matches!(stat.state, b'Z' | b'X');
        let (exe, readable) = match exe_of(process) {
            Ok(exe) => (exe, true),
            Err(ReadError::Denied { .. }) => (None, false),
            Err(error) => return Err(error),
        };
        let dumpable = if stat.kernel_thread || zombie { Dumpable::Unknown } else { dumpable(process, &status)? };
        Ok(Self {
            kernel_thread: stat.kernel_thread,
            zombie,
            dumpable,
            tracer: status.tracer,
            program: program_name(exe.as_deref(), &stat.comm),
            readable,
        })
    }
}

/// The rule that keeps a process out, if one does.
pub fn judge_process(facts: &ProcessFacts, deny: &DenyList) -> Option<Exclusion> {
    if facts.kernel_thread {
        Some(Exclusion::KernelThread)
    } else if facts.zombie {
        Some(Exclusion::Zombie)
    } else if facts.dumpable == Dumpable::No {
        Some(Exclusion::NotDumpable)
    } else if facts.tracer != 0 {
        Some(Exclusion::Traced { by: facts.tracer })
    } else if let Some(entry) = deny.entry_for(&facts.program) {
        Some(Exclusion::DenyListed { entry: entry.to_owned() })
    } else if !facts.readable {
        Some(Exclusion::NotReadable)
    } else {
        None
    }
}

/// Why the process must be left alone, if it must.
pub fn process_exclusion(process: &Process, deny: &DenyList) -> Result<Option<Exclusion>, ReadError> {
    let facts = ProcessFacts::of(process)?;
    let excluded = judge_process(&facts, deny);
    // Last, for it stops the process: one that is left alone anyway is not asked.
    if excluded.is_none() && facts.dumpable == Dumpable::Unknown && ask_inside(process) == Dumpable::No {
        return Ok(Some(Exclusion::NotDumpable));
    }
    Ok(excluded)
}

/// A mapping kept out of core dumps that is at least this large, before marks cut it, is so for its size, not for secrets: databases keep
/// their buffer pools out (InnoDB does), and hypervisors their guests' memory. What keeps keys keeps kilobytes, and
/// locks them as well.
pub const BULK_BYTES: u64 = 32 << 20;

/// Why the mapping must be left alone, if it must. What KSM can never merge comes first (`vma_ksm_compatible` in the
/// kernel's mm/ksm.c), then what should not be merged.
///
/// Persistent memory shows in smaps only where it is mapped synchronously; elsewhere marking it does nothing, which
/// the missing `mg` flag tells afterwards.
pub fn vma_exclusion(detail: &VmaDetail) -> Option<Exclusion> {
    const RULES: [(&[u8; 2], Exclusion); 14] = [
        (b"sh", Exclusion::Shared),
        (b"ms", Exclusion::Shared),
        (b"pf", Exclusion::PfnMap),
        (b"io", Exclusion::Io),
        (b"de", Exclusion::DontExpand),
        (b"ht", Exclusion::HugeTlb),
        (b"mm", Exclusion::MixedMap),
        (b"dp", Exclusion::Droppable),
        (b"sf", Exclusion::Dax),
        (b"ss", Exclusion::ShadowStack),
        (b"uw", Exclusion::UserFault),
        (b"um", Exclusion::UserFault),
        (b"wf", Exclusion::WipeOnFork),
        (b"lo", Exclusion::Locked),
    ];
    if detail.vma.is_special() {
        return Some(Exclusion::Special);
    }
    let rule = RULES.iter().find(|(flag, _)| detail.flags.has(**flag)).map(|(_, exclusion)| exclusion.clone());
    let bulk = detail.original_bytes >= BULK_BYTES;
    let dont_dump = (detail.flags.has(*b"dd") && !bulk).then_some(Exclusion::DontDump);
    rule.or(dont_dump).or_else(|| (detail.anonymous_kib == 0).then_some(Exclusion::NothingAnonymous))
}

#[cfg(test)]
#[path = "exclude_tests.rs"]
mod tests;
