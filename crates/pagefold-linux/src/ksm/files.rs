//! KSM's files in sysfs.
//!
//! Every file is opened once and then read by `pread` at offset 0, for which sysfs produces the text again: all eleven
//! counters take 8 us (debug build, 6.18). No read takes ksmd's mutex. Of the writes, those to `run`,
//! `max_page_sharing` and `merge_across_nodes` do, and so block until the end of ksmd's batch; the others never block.

use super::counters::KsmCounters;
use super::knobs::{Knob, Knobs};
use crate::os::fault;
use pagefold_core::units::Pages;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// KSM's directory in sysfs.
pub const KSM_ROOT: &str = "/sys/kernel/mm/ksm";

/// Why a file of KSM could not be read or written.
#[derive(Debug, Error)]
pub enum KsmError {
    /// The directory, or a file that every supported kernel has, does not exist.
    #[error("{} does not exist: this kernel was built without KSM, or is older than pagefold needs", path.display())]
    Absent {
        /// The missing file.
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
        /// Its text.
        text: String,
    },
    /// The kernel refuses the value: EBUSY while pages are merged, EINVAL while the advisor is on.
    #[error("the kernel refuses to set {knob} to {value}: {source}")]
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

    /// Whether the knob cannot be changed because pages are merged.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
    }
}

/// KSM's files, held open.
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
    /// Opens the files under `root` for reading. A knob is opened for writing only when it is set.
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

    /// The directory of the files.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All counters. They are not one snapshot: ksmd may run between two of the reads.
    pub fn counters(&self) -> Result<KsmCounters, KsmError> {
        Ok(KsmCounters {
            pages_shared: Pages(self.number(&self.pages_shared, "pages_shared")?),
            pages_sharing: Pages(self.number(&self.pages_sharing, "pages_sharing")?),
            pages_unshared: Pages(self.number(&self.pages_unshared, "pages_unshared")?),
            // The kernel computes it as a difference, which may be negative for a moment.
            pages_volatile: Pages(
                u64::try_from(self.number::<i64>(&self.pages_volatile, "pages_volatile")?).unwrap_or(0),
            ),
            pages_scanned: self.optional_number(self.pages_scanned.as_ref(), "pages_scanned")?,
            pages_skipped: self.optional_number(self.pages_skipped.as_ref(), "pages_skipped")?,
            full_scans: self.full_scans()?,
            // The kernel miscounts where processes with huge pages start and end: -11 was seen with nothing merged (6.18).
            ksm_zero_pages: self
                .optional_number::<i64>(self.ksm_zero_pages.as_ref(), "ksm_zero_pages")?
                .map(|pages| Pages(u64::try_from(pages).unwrap_or(0))),
            stable_node_chains: self.number(&self.stable_node_chains, "stable_node_chains")?,
            stable_node_dups: self.number(&self.stable_node_dups, "stable_node_dups")?,
            general_profit: self.optional_number(self.general_profit.as_ref(), "general_profit")?,
        })
    }

    /// Completed scans. Takes less than a microsecond.
    pub fn full_scans(&self) -> Result<u64, KsmError> {
        self.number(&self.full_scans, "full_scans")
    }

    /// Pages scanned since boot, 0 where the kernel does not count them.
    pub fn pages_scanned(&self) -> Result<u64, KsmError> {
        Ok(self.optional_number(self.pages_scanned.as_ref(), "pages_scanned")?.unwrap_or(0))
    }

    /// Whether pages are merged. While they are, `max_page_sharing` and `merge_across_nodes` cannot be changed.
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

    /// The value of one knob; `None` if this kernel does not have it.
    pub fn read(&self, knob: Knob) -> Result<Option<u64>, KsmError> {
        let file = Knob::ALL.into_iter().zip(&self.knobs).find(|(each, _)| *each == knob);
        self.optional_number(file.and_then(|(_, file)| file.as_ref()), knob.file_name())
    }

    /// Sets one knob. May block until the end of ksmd's batch (see the module's documentation).
    pub fn write(&self, knob: Knob, value: u64) -> Result<(), KsmError> {
        let path = self.root.join(knob.file_name());
        // Sysfs ignores truncation; on a copy of the directory it keeps "5" from changing "100" into "500".
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

/// The text of a file without the newline at its end.
pub(crate) fn plain(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().map(str::trim_ascii)
}

/// The selected choice in a text like `always [madvise] never`.
pub fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    let (choice, _) = rest.split_once(']')?;
    Some(choice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ksm::fixture;

    #[test]
    fn every_counter_is_read_again_through_the_open_files() {
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
    fn a_missing_directory_is_absent_and_other_text_is_malformed() {
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
