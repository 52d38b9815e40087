//! We act as root on the contents of some files, so we check that only root (or the user who runs pagefold) can write
//! or replace them.

use pagefold_procmem::os::peer::is_trusted;
use pagefold_text::escape::printable;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The longest configuration file, bytes.
const TEXT_MOST: u64 = 1 << 20;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Checks that a file or directory belongs to root or our own user, and that nobody else may write it.
///
/// # Errors
/// The error is a clause that completes a sentence about the file, with advice.
pub fn owned(uid: u32, mode: u32) -> Result<(), &'static str> {
    if !is_trusted(uid) {
        Err("belongs to another user; give it to root (chown root)")
    } else if mode & WRITABLE_BY_OTHERS != 0 {
        Err("other users may write; run chmod go-w on it")
    } else {
        Ok(())
    }
}

/// Checks a directory and all its ancestors with [`owned`]. The path must not contain symbolic links. Sticky ancestors
/// like /tmp may be writable by all, because users can't replace each other's entries there.
pub fn directory(path: &Path) -> Result<(), String> {
    for directory in path.ancestors() {
        let metadata =
            fs::metadata(directory).map_err(|error| format!("cannot be examined: {error}; check the path"))?;
        let mut mode = metadata.mode();
        if directory != path && mode & STICKY != 0 {
            mode &= !WRITABLE_BY_OTHERS;
        }
        if let Err(why) = owned(metadata.uid(), mode) {
            return Err(if directory == path { why.to_owned() } else { format!("is in a directory that {why}") });
        }
    }
    Ok(())
}

/// Reads a file that only root or our user can write.
///
/// # Errors
/// The error is a clause that completes a sentence about the file, with advice.
pub fn read(path: &Path) -> Result<String, String> {
    let real = path.canonicalize().map_err(|error| format!("cannot be read: {error}; name an existing file"))?;
    if let Some(parent) = real.parent() {
        directory(parent).map_err(|why| format!("is in a directory that {why}"))?;
    }
    // We check this before opening the file, since opening a pipe would wait for a writer.
    let found = fs::metadata(&real).map_err(|error| format!("cannot be read: {error}; check the path"))?;
    if !found.is_file() {
        return Err("is not a regular file; name a regular file".to_owned());
    }
    owned(found.uid(), found.mode()).map_err(|why| format!("is a file that {why}"))?;
    let mut text = Vec::new();
    File::open(&real)
        .and_then(|file| file.take(TEXT_MOST + 1).read_to_end(&mut text))
        .map_err(|error| format!("cannot be read: {error}; run as root"))?;
    if text.len() as u64 > TEXT_MOST {
        return Err("is longer than a megabyte; name a configuration file".to_owned());
    }
    String::from_utf8(text).map_err(|_| "is not UTF-8 text; convert it".to_owned())
}

/// A path in a form that is safe to print.
pub fn shown(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}
