//! Swap space for a test: in compressed memory if the kernel has zram, otherwise in a file.

use pagefold_testkit::skip;
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 512 << 20;
const CONTROL: &str = "/sys/class/zram-control";

/// Swap space. Dropping this switches it off, so then its contents must fit into memory.
pub struct Swap {
    pub path: PathBuf,
    zram: Option<String>,
    _dir: Option<tempfile::TempDir>,
    on: bool,
}

impl Swap {
    /// `None` if we can't make any swap space. Reports why.
    pub fn on() -> Option<Self> {
        let mut swap = match Self::zram() {
            Ok(swap) => swap,
            Err(why) => match Self::file() {
                Ok(swap) => swap,
                Err(also) => {
                    skip(format!("no swap: zram: {why}; a file: {also}"));
                    return None;
                }
            },
        };
        let made = Command::new("mkswap").arg(&swap.path).output();
        if !made.as_ref().is_ok_and(|made| made.status.success()) {
            skip(format!("no swap: mkswap {}: {made:?}", swap.path.display()));
            return None;
        }
        let path = path(&swap.path);
        // SAFETY: a string that ends with zero.
        if unsafe { libc::swapon(path.as_ptr(), 0) } != 0 {
            skip(format!("no swap on {}: {}", swap.path.display(), std::io::Error::last_os_error()));
            return None;
        }
        swap.on = true;
        println!("swap on {}", swap.path.display());
        Some(swap)
    }

    fn zram() -> std::io::Result<Self> {
        if !Path::new(CONTROL).exists() {
            // modprobe fails if zram is built in or missing. The next line finds out which.
            let _ = Command::new("modprobe").arg("zram").output();
        }
        let number = fs::read_to_string(format!("{CONTROL}/hot_add"))?.trim().to_owned();
        let path = PathBuf::from(format!("/dev/zram{number}"));
        let swap = Self { path, zram: Some(number.clone()), _dir: None, on: false };
        fs::write(format!("/sys/block/zram{number}/disksize"), BYTES.to_string())?;
        Ok(swap)
    }

    fn file() -> std::io::Result<Self> {
        let dir = tempfile::tempdir_in("/var/tmp")?;
        let path = dir.path().join("swap");
        // We write the whole file, since swap files must have no holes.
        fs::write(&path, vec![0; usize::try_from(BYTES).unwrap()])?;
        Ok(Self { path, zram: None, _dir: Some(dir), on: false })
    }
}

fn path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap()
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: a string that ends with zero.
        if self.on && unsafe { libc::swapoff(path(&self.path).as_ptr()) } != 0 {
            eprintln!("swapoff {}: {}", self.path.display(), std::io::Error::last_os_error());
        }
        if let Some(number) = &self.zram {
            let _ = fs::write(format!("/sys/block/zram{number}/reset"), "1");
            if let Err(error) = fs::write(format!("{CONTROL}/hot_remove"), number) {
                eprintln!("zram{number} stays: {error}");
            }
        }
    }
}
