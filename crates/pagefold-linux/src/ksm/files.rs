//! KSM's files in sysfs: counters, and the knobs that steer ksmd.
//!
//! Every file is opened once and then read by `pread` at offset 0, for which sysfs produces the text
//! anew: all eleven counters take 8 us (debug build, 6.18).
//! No read takes ksmd's mutex; of the writes, those to `run`, `max_page_sharing` and
//! `merge_across_nodes` do, and so block until ksmd's batch has ended. The others never block.

use crate::os::fault;
use crate::os::fields::number;
use pagefold_core::host::KsmView;
use pagefold_core::units::Pages;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// Where the kernel keeps KSM's files.
pub const KSM_ROOT: &str = "/sys/kernel/mm/ksm";

/// Why KSM could not be read or steered.
#[derive(Debug, Error)]
pub enum KsmError {
    /// The directory or a file that every supported kernel has is missing.
    #[error("{} does not exist: this kernel was built without KSM, or is older than pagefold needs", path.display())]
    Absent {
        /// What is missing.
        path: PathBuf,
    },
    /// The kernel refuses access.
    #[error("not permitted to access {}", path.display())]
    Denied {
        /// The file.
        path: PathBuf,
    },
    /// The text is not what the kernel documents.
    #[error("{} is malformed: {text:?}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it said.
        text: String,
    },
    /// The kernel knows the knob and refuses the value now: EBUSY while pages are merged, EINVAL under the advisor.
    #[error("the kernel refuses {knob} = {value}: {source}")]
    Refused {
        /// The knob.
        knob: Knob,
        /// The value.
        value: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Any other failure.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl KsmError {
    fn from_io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Absent { path },
            io::ErrorKind::PermissionDenied => Self::Denied { path },
            _ => Self::Io { path, source },
        }
    }

    /// The kernel says that it cannot be changed while pages are merged.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
    }
}

/// A numeric knob of KSM that pagefold may turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// 0 stop, 1 scan, 2 stop and unmerge everything.
    Run,
    /// Pages in one batch.
    PagesToScan,
    /// Sleep between batches.
    SleepMillisecs,
    /// Copies of one content that share one page, before a second page is kept.
    MaxPageSharing,
    /// Whether all-zero pages map the kernel's zero page.
    UseZeroPages,
    /// Whether pages of two NUMA nodes may be merged with each other.
    MergeAcrossNodes,
    /// Whether pages that never merged are skipped in some scans (6.7 and later).
    SmartScan,
}

impl Knob {
    /// Every knob.
    pub const ALL: [Self; 7] = [
        Self::Run,
        Self::PagesToScan,
        Self::SleepMillisecs,
        Self::MaxPageSharing,
        Self::UseZeroPages,
        Self::MergeAcrossNodes,
        Self::SmartScan,
    ];

    /// The name of its file.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::PagesToScan => "pages_to_scan",
            Self::SleepMillisecs => "sleep_millisecs",
            Self::MaxPageSharing => "max_page_sharing",
            Self::UseZeroPages => "use_zero_pages",
            Self::MergeAcrossNodes => "merge_across_nodes",
            Self::SmartScan => "smart_scan",
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.file_name())
    }
}

/// KSM's counters. `None` stands for a file that this kernel does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmCounters {
    /// Merged pages that stand for several.
    pub pages_shared: Pages,
    /// Pages saved by them.
    pub pages_sharing: Pages,
    /// Pages looked at whose content is held once.
    pub pages_unshared: Pages,
    /// Pages that change too often to be looked up.
    pub pages_volatile: Pages,
    /// Pages looked at since boot (6.6).
    pub pages_scanned: Option<u64>,
    /// Pages passed over by smart scan since boot (6.7).
    pub pages_skipped: Option<u64>,
    /// Completed scans since boot or the last `run` 2.
    pub full_scans: u64,
    /// Pages that map the kernel's zero page instead of one of their own (6.6).
    pub ksm_zero_pages: Option<Pages>,
    /// Contents held by more than one merged page.
    pub stable_node_chains: u64,
    /// Merged pages in those chains.
    pub stable_node_dups: u64,
    /// Bytes saved less bytes of metadata, the kernel's reckoning (6.4).
    pub general_profit: Option<i64>,
}

impl KsmCounters {
    /// What the judgement sees of KSM. `busy` is the driver's to tell: an order not yet done.
    pub fn view(&self, ours: bool, busy: bool) -> KsmView {
        KsmView {
            shared: self.pages_shared,
            sharing: self.pages_sharing,
            zero: self.ksm_zero_pages.unwrap_or_default(),
            scanned: self.pages_scanned.unwrap_or(0),
            full_scans: self.full_scans,
            broken: 0,
            ours,
            busy,
        }
    }
}

/// Copies made because a merged page was written, unmerging among them: `cow_ksm` of vmstat. Machine-wide.
#[derive(Debug)]
pub struct Breaks {
    vmstat: Option<File>,
}

impl Breaks {
    /// The counter below a mount of procfs.
    pub fn open(proc: &Path) -> Self {
        Self { vmstat: File::open(proc.join("vmstat")).ok() }
    }

    /// Copies so far, 0 where the kernel does not count them; `None` when that cannot be read now.
    pub fn read(&self) -> Option<u64> {
        let mut text = String::new();
        let Some(mut vmstat) = self.vmstat.as_ref() else { return Some(0) };
        let read = fault::io("read:vmstat").and_then(|()| vmstat.seek(SeekFrom::Start(0)));
        read.and_then(|_| vmstat.read_to_string(&mut text)).ok().map(|_| cow_ksm(&text))
    }
}

pub(crate) fn cow_ksm(vmstat: &str) -> u64 {
    number(vmstat.as_bytes(), "cow_ksm").unwrap_or(0)
}

/// The knobs as they stand. `None` stands for a file that this kernel does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knobs {
    /// 0 stop, 1 scan, 2 stopped and unmerged.
    pub run: u64,
    /// Pages in one batch.
    pub pages_to_scan: u64,
    /// Sleep between batches.
    pub sleep_millisecs: u64,
    /// Copies of one content that share one page.
    pub max_page_sharing: u64,
    /// All-zero pages map the kernel's zero page.
    pub use_zero_pages: bool,
    /// Pages of two nodes may be merged (absent without CONFIG_NUMA).
    pub merge_across_nodes: Option<bool>,
    /// Smart scan (6.7).
    pub smart_scan: Option<bool>,
    /// The advisor's mode in force, `none` or `scan-time` (6.8).
    pub advisor_mode: Option<String>,
}

impl Knobs {
    /// The advisor is steering `pages_to_scan`.
    pub fn advisor_on(&self) -> bool {
        self.advisor_mode.as_deref().is_some_and(|mode| mode != "none")
    }
}

/// KSM's files, open.
#[derive(Debug)]
#[allow(clippy::struct_field_names)] // the kernel's names
pub struct Ksm {
    root: PathBuf,
    pages_shared: File,
    pages_sharing: File,
    pages_unshared: File,
    pages_volatile: File,
    full_scans: File,
    stable_node_chains: File,
    stable_node_dups: File,
    pages_scanned: Option<File>,
    pages_skipped: Option<File>,
    ksm_zero_pages: Option<File>,
    general_profit: Option<File>,
    advisor_mode: Option<File>,
    knobs: [Option<File>; Knob::ALL.len()],
}

impl Ksm {
    /// Opens the files below `root` for reading. They are opened for writing only when written.
    pub fn open(root: &Path) -> Result<Self, KsmError> {
        let required = |name: &str| {
            let path = root.join(name);
            File::open(&path).map_err(|error| KsmError::from_io(&path, error))
        };
        let optional = |name: &str| match required(name) {
            Ok(file) => Ok(Some(file)),
            Err(KsmError::Absent { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        let mut knobs: [Option<File>; Knob::ALL.len()] = Default::default();
        for (knob, slot) in Knob::ALL.into_iter().zip(&mut knobs) {
            *slot = match knob {
                Knob::MergeAcrossNodes | Knob::SmartScan => optional(knob.file_name())?,
                _ => Some(required(knob.file_name())?),
            };
        }
        Ok(Self {
            pages_shared: required("pages_shared")?,
            pages_sharing: required("pages_sharing")?,
            pages_unshared: required("pages_unshared")?,
            pages_volatile: required("pages_volatile")?,
            full_scans: required("full_scans")?,
            stable_node_chains: required("stable_node_chains")?,
            stable_node_dups: required("stable_node_dups")?,
            pages_scanned: optional("pages_scanned")?,
            pages_skipped: optional("pages_skipped")?,
            ksm_zero_pages: optional("ksm_zero_pages")?,
            general_profit: optional("general_profit")?,
            advisor_mode: optional("advisor_mode")?,
            knobs,
            root: root.to_owned(),
        })
    }

    /// The directory the files are in.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All counters. Not one instant: ksmd may work between two of the reads.
    pub fn counters(&self) -> Result<KsmCounters, KsmError> {
        Ok(KsmCounters {
            pages_shared: Pages(self.number(&self.pages_shared, "pages_shared")?),
            pages_sharing: Pages(self.number(&self.pages_sharing, "pages_sharing")?),
            pages_unshared: Pages(self.number(&self.pages_unshared, "pages_unshared")?),
            // Kept as the difference of other counters, so it may come out below zero for a moment.
            pages_volatile: Pages(
                u64::try_from(self.number::<i64>(&self.pages_volatile, "pages_volatile")?).unwrap_or(0),
            ),
            pages_scanned: self.optional_number(self.pages_scanned.as_ref(), "pages_scanned")?,
            pages_skipped: self.optional_number(self.pages_skipped.as_ref(), "pages_skipped")?,
            full_scans: self.full_scans()?,
            // The kernel loses count where processes with huge pages come and go: it was seen at -11 with nothing merged (6.18).
            ksm_zero_pages: self
                .optional_number::<i64>(self.ksm_zero_pages.as_ref(), "ksm_zero_pages")?
                .map(|pages| Pages(u64::try_from(pages).unwrap_or(0))),
            stable_node_chains: self.number(&self.stable_node_chains, "stable_node_chains")?,
            stable_node_dups: self.number(&self.stable_node_dups, "stable_node_dups")?,
            general_profit: self.optional_number(self.general_profit.as_ref(), "general_profit")?,
        })
    }

    /// Completed scans alone: under a microsecond, for those who wait for a scan to end.
    pub fn full_scans(&self) -> Result<u64, KsmError> {
        self.number(&self.full_scans, "full_scans")
    }

    /// Pages looked at since boot, 0 where the kernel does not count them.
    pub fn pages_scanned(&self) -> Result<u64, KsmError> {
        Ok(self.optional_number(self.pages_scanned.as_ref(), "pages_scanned")?.unwrap_or(0))
    }

    /// Whether pages are merged, which is what keeps `max_page_sharing` and `merge_across_nodes` from being changed.
    pub fn anything_merged(&self) -> Result<bool, KsmError> {
        Ok(self.number::<u64>(&self.pages_shared, "pages_shared")? > 0)
    }

    /// All knobs.
    pub fn knobs(&self) -> Result<Knobs, KsmError> {
        let needed =
            |knob: Knob| self.read(knob)?.ok_or_else(|| KsmError::Absent { path: self.root.join(knob.file_name()) });
        Ok(Knobs {
            run: needed(Knob::Run)?,
            pages_to_scan: needed(Knob::PagesToScan)?,
            sleep_millisecs: needed(Knob::SleepMillisecs)?,
            max_page_sharing: needed(Knob::MaxPageSharing)?,
            use_zero_pages: needed(Knob::UseZeroPages)? != 0,
            merge_across_nodes: self.read(Knob::MergeAcrossNodes)?.map(|value| value != 0),
            smart_scan: self.read(Knob::SmartScan)?.map(|value| value != 0),
            advisor_mode: self.advisor_mode()?,
        })
    }

    /// One knob; `None` where this kernel does not have it.
    pub fn read(&self, knob: Knob) -> Result<Option<u64>, KsmError> {
        let file = Knob::ALL.into_iter().zip(&self.knobs).find(|(each, _)| *each == knob);
        self.optional_number(file.and_then(|(_, file)| file.as_ref()), knob.file_name())
    }

    /// Turns one knob. May block for as long as ksmd's batch lasts (see the module's opening).
    pub fn write(&self, knob: Knob, value: u64) -> Result<(), KsmError> {
        let path = self.root.join(knob.file_name());
        // Truncation means nothing to sysfs; on a copy of the tree it keeps "5" from turning "100" into "500".
        let mut file = fault::io("write:knob")
            .and_then(|()| OpenOptions::new().write(true).truncate(true).open(&path))
            .map_err(|error| KsmError::from_io(&path, error))?;
        file.write_all(value.to_string().as_bytes()).map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY | libc::EINVAL) => KsmError::Refused { knob, value, source },
            _ => KsmError::from_io(&path, source),
        })
    }

    fn advisor_mode(&self) -> Result<Option<String>, KsmError> {
        let Some(file) = &self.advisor_mode else { return Ok(None) };
        let mut buffer = [0; 64];
        let text = self.text(file, "advisor_mode", &mut buffer)?;
        let mode = chosen(text).ok_or_else(|| self.malformed("advisor_mode", text))?;
        Ok(Some(mode.to_owned()))
    }

    fn optional_number<T: FromStr>(&self, file: Option<&File>, name: &str) -> Result<Option<T>, KsmError> {
        file.map(|file| self.number(file, name)).transpose()
    }

    fn number<T: FromStr>(&self, file: &File, name: &str) -> Result<T, KsmError> {
        let mut buffer = [0; 64];
        let text = self.text(file, name, &mut buffer)?;
        text.parse().map_err(|_| self.malformed(name, text))
    }

    fn text<'a>(&self, file: &File, name: &str, buffer: &'a mut [u8; 64]) -> Result<&'a str, KsmError> {
        let read = fault::io_of("read:ksm", name).and_then(|()| file.read_at(buffer, 0));
        let length = read.map_err(|error| KsmError::from_io(&self.root.join(name), error))?;
        let bytes = buffer.get(..length).unwrap_or_default();
        plain(bytes).ok_or_else(|| self.malformed(name, &String::from_utf8_lossy(bytes)))
    }

    fn malformed(&self, name: &str, text: &str) -> KsmError {
        KsmError::Malformed { path: self.root.join(name), text: text.to_owned() }
    }
}

/// What a file says, without the newline at its end.
pub(crate) fn plain(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().map(str::trim_ascii)
}

/// The choice in force in a text like `always [madvise] never`.
pub fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    let (choice, _) = rest.split_once(']')?;
    Some(choice)
}

/// Trees like the kernel's, for the tests of this crate.
#[cfg(test)]
pub(crate) mod fixture {
    use std::path::Path;

    /// Writes KSM's files as a freshly booted 6.18 shows them.
    pub fn fresh(root: &Path) {
        std::fs::create_dir_all(root).unwrap();
        for (name, text) in [
            ("run", "0"),
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "20"),
            ("max_page_sharing", "256"),
            ("use_zero_pages", "0"),
            ("merge_across_nodes", "1"),
            ("smart_scan", "1"),
            ("advisor_mode", "[none] scan-time"),
            ("pages_shared", "0"),
            ("pages_sharing", "0"),
            ("pages_unshared", "0"),
            ("pages_volatile", "0"),
            ("pages_scanned", "0"),
            ("pages_skipped", "0"),
            ("full_scans", "0"),
            ("ksm_zero_pages", "0"),
            ("stable_node_chains", "0"),
            ("stable_node_dups", "0"),
            ("general_profit", "0"),
        ] {
            set(root, name, text);
        }
    }

    /// Sets one file, as the kernel or somebody else would.
    pub fn set(root: &Path, name: &str, text: &str) {
        std::fs::write(root.join(name), format!("{text}\n")).unwrap();
    }

    /// Reads one file.
    pub fn get(root: &Path, name: &str) -> String {
        std::fs::read_to_string(root.join(name)).unwrap().trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_merged_pages_are_found_in_vmstat() {
        assert_eq!(cow_ksm("pgfault 12\nksm_swpin_copy 0\ncow_ksm 345\nzswpin 0\n"), 345);
        assert_eq!(cow_ksm("pgfault 12\ncow_ksm_not 3\ncow_ksm many\n"), 0);
        assert_eq!(Breaks::open(Path::new("/nowhere")).read(), Some(0));
    }

    #[test]
    fn reads_every_counter_and_sees_changes_through_the_open_files() {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(dir.path());
        let ksm = Ksm::open(dir.path()).unwrap();
        assert_eq!(
            ksm.counters().unwrap(),
            KsmCounters {
                pages_scanned: Some(0),
                pages_skipped: Some(0),
                ksm_zero_pages: Some(Pages(0)),
                general_profit: Some(0),
                ..KsmCounters::default()
            }
        );
        let names = [
            "pages_shared",
            "pages_sharing",
            "pages_unshared",
            "pages_volatile",
            "pages_scanned",
            "pages_skipped",
            "full_scans",
            "ksm_zero_pages",
            "stable_node_chains",
            "stable_node_dups",
        ];
        for (value, name) in (11..).zip(names) {
            fixture::set(dir.path(), name, &value.to_string());
        }
        fixture::set(dir.path(), "general_profit", "-640");
        let counters = ksm.counters().unwrap();
        assert_eq!(
            counters,
            KsmCounters {
                pages_shared: Pages(11),
                pages_sharing: Pages(12),
                pages_unshared: Pages(13),
                pages_volatile: Pages(14),
                pages_scanned: Some(15),
                pages_skipped: Some(16),
                full_scans: 17,
                ksm_zero_pages: Some(Pages(18)),
                stable_node_chains: 19,
                stable_node_dups: 20,
                general_profit: Some(-640),
            }
        );
        assert_eq!(counters.view(true, false).saved(), Pages(30));
        assert!(ksm.anything_merged().unwrap());
        fixture::set(dir.path(), "ksm_zero_pages", "-11");
        assert_eq!(ksm.counters().unwrap().ksm_zero_pages, Some(Pages(0)));
    }

    #[test]
    fn older_kernels_lack_files() {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(dir.path());
        for name in ["pages_skipped", "smart_scan", "advisor_mode", "ksm_zero_pages", "merge_across_nodes"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        let ksm = Ksm::open(dir.path()).unwrap();
        assert_eq!(ksm.counters().unwrap().pages_skipped, None);
        let knobs = ksm.knobs().unwrap();
        assert_eq!((knobs.smart_scan, knobs.merge_across_nodes, knobs.advisor_on()), (None, None, false));
    }

    #[test]
    fn no_ksm_is_absent_and_nonsense_is_malformed() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Ksm::open(&dir.path().join("none")), Err(KsmError::Absent { .. })));
        fixture::fresh(dir.path());
        fixture::set(dir.path(), "full_scans", "many");
        let ksm = Ksm::open(dir.path()).unwrap();
        assert!(matches!(ksm.counters(), Err(KsmError::Malformed { .. })));
    }

    #[test]
    fn writes_replace_the_whole_value() {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(dir.path());
        let ksm = Ksm::open(dir.path()).unwrap();
        for knob in Knob::ALL {
            ksm.write(knob, 7).unwrap();
            assert_eq!(ksm.read(knob).unwrap(), Some(7), "{knob}");
        }
        fixture::set(dir.path(), "advisor_mode", "none [scan-time]");
        assert!(ksm.knobs().unwrap().advisor_on());
    }
}
