//! Files that we replace as a whole: we fill a new file and rename it over the old one. A crash leaves the old file.

use crate::config::ownership::{self, shown};
use pagefold_text::exit::{self, Exit};
use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tracing::debug;

/// Opens a file of a run: the one that the settings name, or else `name` in the service's directory (systemd's
/// StateDirectory=). A dry run only opens a file that the settings name.
pub fn of_run<T>(
    named: Option<&Path>,
    name: &str,
    dry_run: bool,
    open: fn(&Path) -> Result<T, Exit>,
) -> Result<Option<T>, Exit> {
    let path = if named.is_none() && !dry_run { of_service(name) } else { named.map(Path::to_owned) };
    path.map(|path| open(&path)).transpose()
}

/// A file in the directory that the service manager has made for the service.
fn of_service(name: &str) -> Option<PathBuf> {
    let directory = env::var_os("STATE_DIRECTORY")?;
    // The variable may name several directories, separated by colons.
    let first = directory.to_str()?.split(':').next()?;
    if first.starts_with('/') { Some(Path::new(first).join(name)) } else { None }
}

/// Checks that we can safely write the run's file `path`, if there is one. `what` describes the file, for the error.
///
/// # Errors
/// The exit code is 2.
pub fn of_file(what: &str, path: Option<&Path>) -> Result<(), Exit> {
    let Some(path) = path else { return Ok(()) };
    Place::of(path).map(drop).map_err(|why| unusable(what, path, &why))
}

/// The error if we can't use a file. `why` is a clause with advice.
pub fn unusable(what: &str, path: &Path, why: &str) -> Exit {
    Exit::new(exit::USAGE, format!("{what} {} {why}", shown(path)))
}

/// The message about a failed write that we'll try again.
pub fn cannot_write(what: &str, path: &Path, error: &io::Error) -> String {
    format!("cannot write {what} {}: {error}; free some space (pagefold tries again)", shown(path))
}

/// Whether something has this path, even a dangling link. If we can't tell, we assume so.
pub fn is_there(path: &Path) -> bool {
    !path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Creates a directory that only root can write, if there's none. Its parent must exist.
///
/// # Errors
/// The error is a clause that completes a sentence about the directory, with advice.
pub fn create_directory(path: &Path) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    let path = Place::of(path)?.path;
    let created = fs::create_dir(&path).and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o755)));
    created.map_err(|error| format!("cannot be created: {error}; check {}", shown(&path)))
}

/// Opens a file for reading, and with `write` for writing, too. If somebody has put a link, a pipe or a device in its
/// place, the flags keep us from following or waiting for it.
pub fn open_regular(path: &Path, write: bool) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("is a symbolic link"),
        Some(libc::EISDIR) => io::Error::other("is a directory"),
        _ => error,
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("is not a regular file")) }
}

/// The path of a file that we replace as a whole, in a directory that only root can write.
#[derive(Clone, Debug)]
pub struct Place {
    pub path: PathBuf,
    /// The file that we fill and then rename.
    pub beside: PathBuf,
}

impl Place {
    /// Checks that no other user can redirect our writes.
    ///
    /// # Errors
    /// The error is a clause that completes a sentence about the file, with advice.
    pub fn of(path: &Path) -> Result<Self, String> {
        let name = path.file_name().ok_or("has no name; name a file")?;
        let directory = path.parent().filter(|directory| *directory != Path::new("")).unwrap_or(Path::new("."));
        let directory = directory
            .canonicalize()
            .map_err(|error| format!("cannot be created: {error}; create its directory, writable by root only"))?;
        ownership::directory(&directory).map_err(|why| format!("would be in a directory that {why}"))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".new");
        Ok(Self { path: directory.join(name), beside: directory.join(hidden) })
    }

    /// Like [`Self::of`], but also refuses a path where there's something other than a regular file.
    pub fn of_regular(path: &Path) -> Result<Self, String> {
        let place = Self::of(path)?;
        if fs::symlink_metadata(&place.path).is_ok_and(|found| !found.is_file()) {
            return Err("is not a regular file; name a regular or a new file".to_owned());
        }
        Ok(place)
    }

    /// Like [`Self::of_regular`], but also refuses a file that doesn't begin as ours do, with `head`. We accept a file
    /// that's empty or all zeros, as a power failure may leave ours.
    pub fn of_ours(path: &Path, head: &str) -> Result<Self, String> {
        let place = Self::of_regular(path)?;
        // If we can't open or read it now, we find out why later.
        let Ok(file) = open_regular(&place.path, false) else { return Ok(place) };
        let mut found = vec![0; head.len()];
        let read = file.read_at(&mut found, 0).unwrap_or(0);
        let found = &found[..read];
        if head.as_bytes().starts_with(found) || found.iter().all(|&byte| byte == 0) {
            return Ok(place);
        }
        Err("has other contents, which pagefold would replace; name a new file".to_owned())
    }

    /// Writes a new file and renames it over the old one. If the old one is a symbolic link, we replace it and don't
    /// follow it.
    pub fn replace(&self, mode: u32, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        let written = self.create(mode).and_then(|mut file| fill(&mut file));
        let written = written.and_then(|()| fs::rename(&self.beside, &self.path)).and_then(|()| self.sync_directory());
        debug!(target: "files", path = %shown(&self.path), ?written, "replaced");
        if written.is_err() {
            let _ = fs::remove_file(&self.beside);
        }
        written
    }

    /// Removes the file.
    pub fn remove(&self) -> io::Result<()> {
        fs::remove_file(&self.path)?;
        self.sync_directory()
    }

    /// Makes sure that a power failure doesn't undo the renaming or removal of a file.
    fn sync_directory(&self) -> io::Result<()> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        File::open(directory)?.sync_all()
    }

    /// Reads the file, up to `most` bytes.
    pub fn read(&self, most: u64) -> io::Result<Vec<u8>> {
        let file = open_regular(&self.path, false)?;
        let metadata = file.metadata()?;
        ownership::owned(metadata.uid(), metadata.mode())
            .map_err(|why| io::Error::other(format!("is a file that {why}")))?;
        let mut bytes = Vec::new();
        file.take(most + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most {
            return Err(io::Error::other("is too long"));
        }
        Ok(bytes)
    }

    /// Checks whether we can make a file there.
    pub fn check(&self) -> io::Result<()> {
        let made = self.create(0o600).map(drop);
        let _ = fs::remove_file(&self.beside);
        made
    }

    /// Creates the file that we rename later. The file must be new, so that we never write through a link.
    fn create(&self, mode: u32) -> io::Result<File> {
        match fs::remove_file(&self.beside) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(mode)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&self.beside)
    }
}
