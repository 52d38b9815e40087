//! Memory pressure of the machine: pressure stall information (PSI), available memory and free swap.
//!
//! PSI may be missing from a kernel (no file) or disabled (reads fail with EOPNOTSUPP), and a service may be denied
//! access to the files (`ProcSubset=pid`). In these cases we don't know the value; only malformed text is an error.
//! The governor's other measure needs no PSI: memory is scarce when less than a fifth is available (ksmtuned's
//! `KSM_THRES_COEF` of 20).

use super::arc;
use super::fields::{NOT_A_NUMBER, kib, kib_or_none};
use crate::os::fault;
use pagefold_engine::host::MemoryView;
use pagefold_engine::units::{PAGE_BYTES, Pages, Permyriad};
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why we couldn't read the memory pressure.
#[derive(Debug, Error)]
pub enum PressureError {
    #[error("{} is malformed: {what}", path.display())]
    Malformed { path: PathBuf, what: &'static str },
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Reads the memory pressure from files kept open. One read of `meminfo` and `pressure` takes some 20 us.
#[derive(Debug)]
pub struct MemoryMonitor {
    meminfo: Source,
    pressure: Source,
    swaps: Source,
    arcstats: Source,
}

impl MemoryMonitor {
    /// Opens the files below `/proc` or another root.
    pub fn open(proc_root: &Path) -> Result<Self, PressureError> {
        Ok(Self {
            meminfo: Source::open(proc_root, "meminfo")?,
            pressure: Source::open(proc_root, "pressure/memory")?,
            swaps: Source::open(proc_root, "swaps")?,
            arcstats: Source::open(proc_root, arc::ARCSTATS)?,
        })
    }

    pub fn read(&self) -> Result<MemoryView, PressureError> {
        let (total, mut available, mut swap_free) = self.meminfo.read(parse_meminfo)?.unwrap_or_default();
        if swap_free > Pages(0) {
            // zram keeps its pages in memory. We assume that they compress to half.
            let zram = self.swaps.read(parse_zram_free)?.unwrap_or_default();
            swap_free = swap_free.saturating_sub(Pages(zram.0 / 2));
        }
        // If ZFS is unloaded, we still have its file open, but can't read it any more.
        if let Ok(Some(shrinkable)) = self.arcstats.read(|text| Ok(arc::shrinkable(text))) {
            available += Pages(shrinkable / PAGE_BYTES);
        }
        Ok(MemoryView { total, available, swap_free, pressure: self.pressure.read(parse_pressure)? })
    }
}

#[derive(Debug)]
struct Source {
    name: &'static str,
    path: PathBuf,
    file: Option<File>,
}

impl Source {
    fn open(proc_root: &Path, name: &'static str) -> Result<Self, PressureError> {
        let path = proc_root.join(name);
        match File::open(&path) {
            Ok(file) => Ok(Self { name, path, file: Some(file) }),
            Err(error) if is_withheld(&error) => Ok(Self { name, path, file: None }),
            Err(source) => Err(PressureError::Io { path, source }),
        }
    }

    /// Reads and parses the file; `None` if it's missing or access is denied.
    fn read<T>(&self, parse: impl Fn(&[u8]) -> Result<T, &'static str>) -> Result<Option<T>, PressureError> {
        let Some(file) = &self.file else { return Ok(None) };
        // All fields that we need are in the first 60 lines, of at most 60 bytes each.
        let mut buffer = [0; 4096];
        match fault::io_of("read", self.name).and_then(|()| file.read_at(&mut buffer, 0)) {
            Ok(length) => match parse(&buffer[..length]) {
                Ok(value) => Ok(Some(value)),
                Err(what) => Err(PressureError::Malformed { path: self.path.clone(), what }),
            },
            Err(error) if is_withheld(&error) => Ok(None),
            Err(source) => Err(PressureError::Io { path: self.path.clone(), source }),
        }
    }
}

fn is_withheld(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EACCES | libc::EPERM | libc::EOPNOTSUPP))
}

/// Parses `/proc/meminfo`: total memory without hugetlb's pool, which nothing else can use; memory available without
/// swapping; free swap.
pub fn parse_meminfo(text: &[u8]) -> Result<(Pages, Pages, Pages), &'static str> {
    // The last line may be cut off.
    let end = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let whole = &text[..end];
    let total = pages(kib(whole, "MemTotal")?)?.saturating_sub(pages(kib_or_none(whole, "Hugetlb")?)?);
    Ok((total, pages(kib(whole, "MemAvailable")?)?, pages(kib_or_none(whole, "SwapFree")?)?))
}

/// Parses `/proc/swaps`: how much of zram is free.
pub fn parse_zram_free(text: &[u8]) -> Result<Pages, &'static str> {
    let mut free_kib = 0_u64;
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        if !line.starts_with(b"/dev/zram") || !line.ends_with(b"\n") {
            continue;
        }
        // Name, type, size, used and priority.
        let line = std::str::from_utf8(line).map_err(|_| "not ASCII")?;
        let mut words = line.split_ascii_whitespace().skip(2);
        let mut kib = || words.next().and_then(|word| word.parse::<u64>().ok()).ok_or(NOT_A_NUMBER);
        let (size, used) = (kib()?, kib()?);
        free_kib = free_kib.saturating_add(size.saturating_sub(used));
    }
    Ok(Pages(free_kib / 4))
}

fn pages(kib: u64) -> Result<Pages, &'static str> {
    // The number of bytes must not overflow.
    if kib.checked_mul(1024).is_some() { Ok(Pages(kib / 4)) } else { Err("a field is too large") }
}

/// Parses `/proc/pressure/memory`: the share of the last 10 s during which some task waited for memory.
pub fn parse_pressure(text: &[u8]) -> Result<Permyriad, &'static str> {
    let line =
        text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"some ")).ok_or("no line 'some'")?;
    let line = std::str::from_utf8(line).map_err(|_| "not ASCII")?;
    let percent = line.split(' ').find_map(|word| word.strip_prefix("avg10=")).ok_or("no avg10")?;
    let (whole, hundredths) = percent.split_once('.').ok_or("avg10 has no fraction")?;
    let share = Permyriad(digits(whole, 1..=3)? * 100 + digits(hundredths, 2..=2)?);
    if share <= Permyriad(10_000) { Ok(share) } else { Err("avg10 is more than 100 per cent") }
}

/// A number of this many digits.
fn digits(text: &str, lengths: RangeInclusive<usize>) -> Result<u32, &'static str> {
    if !lengths.contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("avg10 is not a percentage with two decimals");
    }
    text.parse().map_err(|_| "avg10 is not a number")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    const MEMINFO: &str = "MemTotal:       24684084 kB\nMemFree:        23372588 kB\nMemAvailable:   24040296 kB\n\
        Buffers:           31164 kB\nCached:           784420 kB\nSwapCached:            0 kB\nSwapFree:          16 kB\n";
    const PRESSURE: &str =
        "some avg10=12.34 avg60=0.50 avg300=0.00 total=5\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=2\n";

    #[test]
    fn the_pool_of_huge_pages_is_no_memory_for_others() {
        // The field is far behind the others.
        let between = "Other:                 0 kB\n".repeat(50);
        let text = format!("{MEMINFO}{between}Hugetlb:        20000000 kB\n");
        let memory = view(&tree(Some(&text), None)).unwrap();
        assert_eq!(memory.total, Pages((24_684_084 - 20_000_000) / 4));
        assert_eq!(parse_meminfo(b"MemTotal: 8 kB\nMemAvailable: 4 kB\nHugetlb: 12 kB\n").unwrap().0, Pages(0));
    }

    #[test]
    fn swap_on_zram_counts_half_and_what_zfs_can_give_back_as_available() {
        let dir = tree(Some(&MEMINFO.replace("SwapFree:          16", "SwapFree:       24000")), None);
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(view(&dir).unwrap().swap_free, Pages(6_000));
        let head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        write(
            "swaps",
            &format!("{head}/dev/zram0  partition\t20000\t\t4000\t\t100\n/swap  file\t9000\t\t1000\t\t-2\n"),
        );
        write("spl/kstat/zfs/arcstats", "name    type data\nc_min    4    4096\nsize    4    40960000\n");
        let memory = view(&dir).unwrap();
        assert_eq!((memory.available, memory.swap_free), (Pages(6_010_074 + 9_999), Pages(4_000)));
        write("swaps", &format!("{head}/dev/zram0  partition\tmany\t\t4000\t\t100\n"));
        assert!(matches!(view(&dir), Err(PressureError::Malformed { .. })));
    }

    fn tree(meminfo: Option<&str>, pressure: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("pressure")).unwrap();
        for (name, text) in [("meminfo", meminfo), ("pressure/memory", pressure)] {
            if let Some(text) = text {
                fs::write(dir.path().join(name), text).unwrap();
            }
        }
        dir
    }

    fn view(dir: &tempfile::TempDir) -> Result<MemoryView, PressureError> {
        MemoryMonitor::open(dir.path())?.read()
    }

    #[test]
    fn missing_files_are_unknown_values() {
        let all = view(&tree(Some(MEMINFO), Some(PRESSURE))).unwrap();
        assert_eq!((all.total, all.available, all.swap_free), (Pages(6_171_021), Pages(6_010_074), Pages(4)));
        assert_eq!(all.pressure, Some(Permyriad(1_234)));
        let without_psi = view(&tree(Some(MEMINFO), None)).unwrap();
        assert_eq!(without_psi, MemoryView { pressure: None, ..all });
        assert_eq!(view(&tree(None, None)).unwrap(), MemoryView::default());
    }

    #[test]
    fn kernels_without_psi_and_denied_access_are_no_errors() {
        for number in [libc::ENOENT, libc::EOPNOTSUPP, libc::EACCES] {
            assert!(is_withheld(&io::Error::from_raw_os_error(number)));
        }
        assert!(!is_withheld(&io::Error::from_raw_os_error(libc::EIO)));
    }

    #[test]
    fn malformed_text_is_an_error() {
        for meminfo in [
            "",
            "MemTotal: 1 kB\n",
            "MemTotal: 1 kB\nMemAvailable: x kB\n",
            "MemTotal: 8 kB\nMemAvailable: 4 ",
            "MemTotal: 8 kB\nMemAvailable: 4 kB\nSwapFree: x kB\n",
            "MemTotal: 18446744073709551615 kB\nMemAvailable: 4 kB\n",
        ] {
            assert!(matches!(view(&tree(Some(meminfo), None)), Err(PressureError::Malformed { .. })), "{meminfo}");
        }
        for pressure in [
            "",
            "full avg10=1.00\n",
            "some avg60=1.00\n",
            "some avg10=1\n",
            "some avg10=+1.00\n",
            "some avg10=1.5\n",
            "some avg10=100.01\n",
        ] {
            let damaged = view(&tree(Some(MEMINFO), Some(pressure)));
            assert!(matches!(damaged, Err(PressureError::Malformed { .. })), "{pressure}");
        }
    }

    #[test]
    fn the_state_of_this_machine_is_read() {
        let memory = MemoryMonitor::open(Path::new("/proc")).unwrap().read().unwrap();
        assert!(memory.total > memory.available && memory.available > Pages(0), "{memory:?}");
    }

    proptest! {
        #[test]
        fn every_share_is_parsed(share in 0_u32..=10_000) {
            let text = format!("some avg10={}.{:02} avg60=0.00 avg300=0.00 total=0\n", share / 100, share % 100);
            prop_assert_eq!(parse_pressure(text.as_bytes()), Ok(Permyriad(share)));
        }
    }
}
