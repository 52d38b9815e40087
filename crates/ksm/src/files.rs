//! KSM's files in sysfs. We open each of them once and then read it by `pread` at offset 0, which makes sysfs produce
//! the text again: eleven reads take 8 us (debug build, 6.18). No read takes ksmd's mutex. Writes to `run`,
//! `max_page_sharing` and `merge_across_nodes` do, so they block until the end of ksmd's batch. Other writes never
//! block.

use super::counters::KsmCounters;
use super::knobs::{Knob, Knobs};
use pagefold_engine::units::Pages;
use pagefold_procmem::os::fault;
use pagefold_procmem::os::fields::chosen;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;
use tracing::debug;

pub const KSM_ROOT: &str = "/sys/kernel/mm/ksm";

/// Why we couldn't read or write a file of KSM.
#[derive(Debug, Error)]
pub enum KsmError {
    /// The directory, or a file that every supported kernel has, doesn't exist.
    #[error("{} does not exist: this kernel was built without KSM, or is too old for pagefold", path.display())]
    Absent { path: PathBuf },
    #[error("not permitted to access {}", path.display())]
    Denied { path: PathBuf },
    /// The file's text isn't what the kernel documents.
    #[error("{} is malformed: {text:?}", path.display())]
    Malformed { path: PathBuf, text: String },
    /// The kernel refuses the value: EBUSY while pages are merged, EINVAL while the advisor is on.
    #[error("the kernel refuses to set {knob} to {value}: {source}")]
    Refused { knob: Knob, value: u64, source: io::Error },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
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

    /// Whether the kernel refused the value because pages are merged.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
    }
}

/// Counters that every supported kernel has.
const REQUIRED: [&str; 3] = ["pages_shared", "pages_sharing", "full_scans"];
const OPTIONAL: [&str; 3] = ["pages_scanned", "ksm_zero_pages", "advisor_mode"];

#[derive(Debug)]
pub struct Ksm {
    root: PathBuf,
    /// The open files by name, except files that this kernel lacks.
    files: BTreeMap<&'static str, File>,
}

impl Ksm {
    /// Opens the files under `root` for reading. We open a knob for writing only when we set it.
    pub fn open(root: &Path) -> Result<Self, KsmError> {
        let mut files = BTreeMap::new();
        let required = REQUIRED.map(|name| (name, true));
        let optional = OPTIONAL.map(|name| (name, false));
        let knobs = Knob::ALL.map(|knob| (knob.file_name(), !matches!(knob, Knob::MergeAcrossNodes | Knob::SmartScan)));
        for (name, required) in required.into_iter().chain(optional).chain(knobs) {
            let path = root.join(name);
            match File::open(&path).map_err(|error| KsmError::from_io(&path, error)) {
                Ok(file) => drop(files.insert(name, file)),
                Err(KsmError::Absent { .. }) if !required => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { root: root.to_owned(), files })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Reads all counters. They're no snapshot: ksmd may run between two of the reads.
    pub fn counters(&self) -> Result<KsmCounters, KsmError> {
        Ok(KsmCounters {
            pages_shared: Pages(self.required("pages_shared")?),
            pages_sharing: Pages(self.required("pages_sharing")?),
            pages_scanned: self.number("pages_scanned")?,
            full_scans: self.full_scans()?,
            // When processes with huge pages start and end, the kernel miscounts: we've seen -11 with nothing merged
            // (6.18).
            ksm_zero_pages: self.number("ksm_zero_pages")?.map(not_negative),
        })
    }

    /// Completed scans. The read takes less than a microsecond.
    pub fn full_scans(&self) -> Result<u64, KsmError> {
        self.required("full_scans")
    }

    /// Pages scanned since boot, 0 where the kernel doesn't count them.
    pub fn pages_scanned(&self) -> Result<u64, KsmError> {
        Ok(self.number("pages_scanned")?.unwrap_or(0))
    }

    /// Whether pages are merged. While they are, the kernel refuses to change `max_page_sharing` and
    /// `merge_across_nodes`.
    pub fn anything_merged(&self) -> Result<bool, KsmError> {
        Ok(self.required::<u64>("pages_shared")? > 0)
    }

    pub fn knobs(&self) -> Result<Knobs, KsmError> {
        Ok(Knobs {
            run: self.required(Knob::Run.file_name())?,
            pages_to_scan: self.required(Knob::PagesToScan.file_name())?,
            sleep_millisecs: self.required(Knob::SleepMillisecs.file_name())?,
            max_page_sharing: self.required(Knob::MaxPageSharing.file_name())?,
            use_zero_pages: self.required::<u64>(Knob::UseZeroPages.file_name())? != 0,
            merge_across_nodes: self.read(Knob::MergeAcrossNodes)?.map(|value| value != 0),
            smart_scan: self.read(Knob::SmartScan)?.map(|value| value != 0),
            advisor_mode: self.advisor_mode()?,
        })
    }

    /// The value of one knob. `None` if this kernel lacks the knob.
    pub fn read(&self, knob: Knob) -> Result<Option<u64>, KsmError> {
        self.number(knob.file_name())
    }

    /// The values of all knobs that this kernel has.
    pub fn values(&self) -> Result<BTreeMap<Knob, u64>, KsmError> {
        let mut values = BTreeMap::new();
        for knob in Knob::ALL {
            if let Some(value) = self.read(knob)? {
                values.insert(knob, value);
            }
        }
        Ok(values)
    }

    /// Sets one knob. May block until the end of ksmd's batch (see the module's documentation).
    pub fn write(&self, knob: Knob, value: u64) -> Result<(), KsmError> {
        let path = self.root.join(knob.file_name());
        debug!(target: "ksm", "setting {} to {value}", knob.file_name());
        // Sysfs ignores truncation, but plain files need it (tests have a copy of the directory): "5" would change
        // "100" to "500".
        let mut file = fault::io("write:knob")
            .and_then(|()| OpenOptions::new().write(true).truncate(true).open(&path))
            .map_err(|error| KsmError::from_io(&path, error))?;
        file.write_all(value.to_string().as_bytes()).map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY | libc::EINVAL) => KsmError::Refused { knob, value, source },
            _ => KsmError::from_io(&path, source),
        })
    }

    fn advisor_mode(&self) -> Result<Option<String>, KsmError> {
        self.parsed("advisor_mode", |text| Some(chosen(text)?.to_owned()))
    }

    /// A number that every supported kernel has.
    fn required<T: FromStr>(&self, name: &'static str) -> Result<T, KsmError> {
        self.number(name)?.ok_or_else(|| KsmError::Absent { path: self.root.join(name) })
    }

    fn number<T: FromStr>(&self, name: &'static str) -> Result<Option<T>, KsmError> {
        self.parsed(name, |text| text.parse().ok())
    }

    /// Reads and parses a file. `None` if this kernel lacks it.
    fn parsed<T>(&self, name: &'static str, parse: impl FnOnce(&str) -> Option<T>) -> Result<Option<T>, KsmError> {
        let Some(file) = self.files.get(name) else { return Ok(None) };
        let mut buffer = [0; 64];
        let read = fault::io_of("read:ksm", name).and_then(|()| file.read_at(&mut buffer, 0));
        let length = read.map_err(|error| KsmError::from_io(&self.root.join(name), error))?;
        let bytes = buffer.get(..length).unwrap_or_default();
        let Some(value) = plain(bytes).and_then(parse) else {
            let text = String::from_utf8_lossy(bytes).trim().to_owned();
            return Err(KsmError::Malformed { path: self.root.join(name), text });
        };
        Ok(Some(value))
    }
}

fn not_negative(pages: i64) -> Pages {
    Pages(u64::try_from(pages).unwrap_or(0))
}

/// The text of a file without the final newline. `None` if it isn't UTF-8.
pub fn plain(bytes: &[u8]) -> Option<&str> {
    Some(std::str::from_utf8(bytes).ok()?.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn every_counter_is_read_again_through_the_open_files() {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(dir.path());
        let ksm = Ksm::open(dir.path()).unwrap();
        assert_eq!(
            ksm.counters().unwrap(),
            KsmCounters { pages_scanned: Some(0), ksm_zero_pages: Some(Pages(0)), ..KsmCounters::default() }
        );
        let names = ["pages_shared", "pages_sharing", "pages_scanned", "full_scans", "ksm_zero_pages"];
        for (value, name) in (11..).zip(names) {
            fixture::set(dir.path(), name, &value.to_string());
        }
        let counters = ksm.counters().unwrap();
        assert_eq!(
            counters,
            KsmCounters {
                pages_shared: Pages(11),
                pages_sharing: Pages(12),
                pages_scanned: Some(13),
                full_scans: 14,
                ksm_zero_pages: Some(Pages(15)),
            }
        );
        assert_eq!(counters.view(true, false).saved(), Pages(27));
        assert!(ksm.anything_merged().unwrap());
        fixture::set(dir.path(), "ksm_zero_pages", "-11");
        assert_eq!(ksm.counters().unwrap().ksm_zero_pages, Some(Pages(0)));
    }

    #[test]
    fn older_kernels_lack_files() {
        let dir = tempfile::tempdir().unwrap();
        fixture::fresh(dir.path());
        for name in ["pages_scanned", "smart_scan", "advisor_mode", "ksm_zero_pages", "merge_across_nodes"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        let ksm = Ksm::open(dir.path()).unwrap();
        assert_eq!(ksm.counters().unwrap().pages_scanned, None);
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
