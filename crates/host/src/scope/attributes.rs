//! Extended attributes of cgroups: `user.pagefold.avoid`, `user.pagefold.include` and `user.pagefold.domain`.

use crate::scope::exe::is_roots_alone;
use pagefold_procmem::cgroup::Cgroup;
use pagefold_text::escape::printable;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Extended attributes of cgroups, each read once.
pub(super) struct Attributes<'a> {
    root: &'a Path,
    /// The mount point of each hierarchy, by its controllers.
    mounts: HashMap<String, Option<PathBuf>>,
    seen: HashMap<PathBuf, Labels>,
}

/// The attributes of one cgroup.
#[derive(Clone, Debug, Default)]
struct Labels {
    avoid: bool,
    include: bool,
    domain: Option<String>,
}

impl Labels {
    /// Reads them. `include` and `domain` grant something, so they count only where root alone can set them: otherwise
    /// the owner of a delegated cgroup could override the administrator's `avoid` above it, or join somebody else's
    /// domain.
    fn of(directory: &Path) -> Self {
        let yes = |name| xattr(directory, name).is_some_and(|value| means_yes(&value));
        let (avoid, include, domain) =
            (yes("user.pagefold.avoid"), yes("user.pagefold.include"), xattr(directory, "user.pagefold.domain"));
        let grants = (include || domain.is_some())
            && fs::metadata(directory).is_ok_and(|found| is_roots_alone(found.uid(), found.mode()));
        let domain = domain.filter(|_| grants).map(|name| printable(&name));
        Self { avoid, include: include && grants, domain }
    }
}

impl<'a> Attributes<'a> {
    /// Reads attributes below the cgroup mount point `root`.
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, mounts: HashMap::new(), seen: HashMap::new() }
    }

    /// The cgroup that excludes the process, if any. In each hierarchy the nearest attribute decides.
    pub(super) fn avoided(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| {
            self.nearest(cgroup, |labels, directory| match labels {
                // If one cgroup has both attributes, avoid takes precedence.
                Labels { avoid: true, .. } => Some(Some(directory.display().to_string())),
                Labels { include: true, .. } => Some(None),
                _ => None,
            })
            .flatten()
        })
    }

    /// The trust domain set by the nearest cgroup.
    pub(super) fn domain(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| self.nearest(cgroup, |labels, _| labels.domain.clone()))
    }

    /// Calls `find` with the directory of the cgroup and then with its parents up to the root of the hierarchy.
    fn nearest<T>(&mut self, cgroup: &Cgroup, mut find: impl FnMut(&Labels, &Path) -> Option<T>) -> Option<T> {
        let inner = Path::new(&cgroup.path).strip_prefix("/").ok()?;
        // Paths outside our cgroup namespace begin with "..": directories of the same name here are different ones.
        if inner.components().any(|part| !matches!(part, Component::Normal(_))) {
            return None;
        }
        let root = self.root;
        let of = || cgroup.mounts().into_iter().map(|mount| root.join(mount)).find(|mount| mount.is_dir());
        let mount = self.mounts.entry(cgroup.controllers.clone()).or_insert_with(of).as_deref()?;
        inner.ancestors().find_map(|below| {
            let directory = mount.join(below);
            let labels = self.seen.entry(directory.clone()).or_insert_with(|| Labels::of(&directory));
            find(labels, &directory)
        })
    }
}

/// Whether the value of an attribute means yes. An empty value does.
fn means_yes(value: &[u8]) -> bool {
    !matches!(value.trim_ascii(), b"0" | b"no" | b"false")
}

/// Reads an extended attribute. `None` if it isn't set or not supported, or the directory is gone.
fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    // Most have no value or a short one. If the buffer is smaller than the kernel's limit, reading a longer value
    // fails.
    for size in [256, 64 << 10] {
        let mut value = vec![0u8; size];
        match rustix::fs::getxattr(path, name, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                return Some(value);
            }
            Err(Errno::RANGE) => {}
            Err(_) => return None,
        }
    }
    None
}
