//! Extended attributes of cgroups: `user.pagefold.avoid`, `user.pagefold.include` and `user.pagefold.domain`.

use crate::os::peer::own_uid;
use crate::proc::cgroup::Cgroup;
use crate::proc::status::printable;
use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Extended attributes of cgroups, each read once.
pub(super) struct Attributes<'a> {
    root: &'a Path,
    seen: HashMap<(PathBuf, &'static str), Option<Vec<u8>>>,
}

impl<'a> Attributes<'a> {
    /// Reads attributes below the cgroup mount point `root`.
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, seen: HashMap::new() }
    }

    /// The cgroup that excludes the process, if any. In each hierarchy the nearest attribute decides.
    pub(super) fn avoided(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                // If one cgroup has both attributes, avoid takes precedence.
                if attributes.get(directory, "user.pagefold.avoid").is_some_and(|value| means_yes(&value)) {
                    Some(Some(directory.display().to_string()))
                } else {
                    let include = attributes.get(directory, "user.pagefold.include");
                    include.filter(|value| means_yes(value)).map(|_| None)
                }
            })
            .flatten()
        })
    }

    /// The trust domain set by the nearest cgroup. Attributes of cgroups owned by another user are ignored: that user
    /// could join a domain of others.
    pub(super) fn domain(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |attributes, directory| {
                let named = attributes.get(directory, "user.pagefold.domain")?;
                let owner = fs::metadata(directory).ok()?.uid();
                [0, own_uid()].contains(&owner).then(|| printable(&named))
            })
        })
    }

    /// Calls `find` with the directory of the cgroup and then with its parents up to the root of the hierarchy.
    fn nearest<T>(&mut self, cgroup: &Cgroup, mut find: impl FnMut(&mut Self, &Path) -> Option<T>) -> Option<T> {
        let inner = Path::new(&cgroup.path).strip_prefix("/").ok()?;
        // Paths outside our cgroup namespace begin with "..": directories of the same name here are different ones.
        if inner.components().any(|part| !matches!(part, Component::Normal(_))) {
            return None;
        }
        let root = self.root;
        let mount = cgroup.mounts().into_iter().map(|mount| root.join(mount)).find(|mount| mount.is_dir())?;
        inner.ancestors().find_map(|below| find(self, &mount.join(below)))
    }

    fn get(&mut self, directory: &Path, name: &'static str) -> Option<Vec<u8>> {
        self.seen.entry((directory.to_owned(), name)).or_insert_with(|| xattr(directory, name)).clone()
    }
}

/// Whether the value of an attribute means yes. An empty value does.
fn means_yes(value: &[u8]) -> bool {
    !matches!(value.trim_ascii(), b"0" | b"no" | b"false")
}

/// Reads an extended attribute. `None` if it is not set, not supported or the directory is gone.
fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let name = CString::new(name).ok()?;
    // The kernel's limit for values: with a smaller buffer, longer values would fail.
    let mut value = vec![0u8; 64 << 10];
    // SAFETY: path and name are NUL-terminated; the buffer has the given length.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(length).ok()?);
    Some(value)
}
