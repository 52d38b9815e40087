//! Whether a file can be trusted by what runs as root: nobody but root, or whoever runs this, may be able to write it or
//! put another in its place.

use pagefold_linux::proc::process::Process;
use pagefold_linux::proc::status::{Status, printable};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// No configuration is as long, bytes.
const TEXT_MOST: u64 = 1 << 20;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Whether a file or directory belongs to root or to whoever runs this, and nobody else may write it; why not.
pub fn owned(uid: u32, mode: u32) -> Result<(), &'static str> {
    if uid != 0 && Some(uid) != own_uid() {
        Err("belongs to another user; give it to root (chown root)")
    } else if mode & WRITABLE_BY_OTHERS != 0 {
        Err("others may write; take that right away (chmod go-w)")
    } else {
        Ok(())
    }
}

fn own_uid() -> Option<u32> {
    let own = Process::open(i32::try_from(std::process::id()).ok()?).ok()?;
    Status::of(&own).ok().map(|status| status.effective_uid())
}

/// The same for a directory, given without links, and for those above it. In these others may make files of their own
/// where they cannot touch those that are there (as in /tmp).
pub fn directory(path: &Path) -> Result<(), String> {
    for (above, directory) in path.ancestors().enumerate() {
        let metadata =
            fs::metadata(directory).map_err(|error| format!("cannot be looked at: {error}; check its path"))?;
        let harmless = above > 0 && metadata.mode() & STICKY != 0;
        let mode = if harmless { metadata.mode() & !WRITABLE_BY_OTHERS } else { metadata.mode() };
        owned(metadata.uid(), mode)
            .map_err(|why| if above == 0 { why.to_owned() } else { format!("is in one that {why}") })?;
    }
    Ok(())
}

/// The text of a file that can be trusted; why there is none: a clause that goes on from the file's name, and what to do.
pub fn read(path: &Path) -> Result<String, String> {
    let real = path.canonicalize().map_err(|error| format!("cannot be read: {error}; name a file that is there"))?;
    if let Some(parent) = real.parent() {
        directory(parent).map_err(|why| format!("is in a directory that {why}"))?;
    }
    // Not opened before that: opening a pipe waits for whoever writes to it.
    let found = fs::metadata(&real).map_err(|error| format!("cannot be read: {error}; check its path"))?;
    if !found.is_file() {
        return Err("is no regular file; name one".to_owned());
    }
    owned(found.uid(), found.mode()).map_err(|why| format!("is a file that {why}"))?;
    let mut text = Vec::new();
    File::open(&real)
        .and_then(|file| file.take(TEXT_MOST + 1).read_to_end(&mut text))
        .map_err(|error| format!("cannot be read: {error}; run as root"))?;
    if text.len() as u64 > TEXT_MOST {
        return Err("is longer than a megabyte; name a configuration".to_owned());
    }
    String::from_utf8(text).map_err(|_| "is not text in UTF-8; save it as that".to_owned())
}

/// A path, fit to print.
pub fn shown(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}
