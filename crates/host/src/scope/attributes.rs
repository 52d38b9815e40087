//! Extended attributes of cgroups: `user.pagefold.avoid`, `user.pagefold.include` and `user.pagefold.domain`.

use crate::scope::exe::is_roots_alone;
use crate::scope::workload::{WorkloadKind, labels_of};
use pagefold_procmem::cgroup::Cgroup;
use pagefold_text::escape::printable;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Extended attributes of cgroups, each read once.
pub(super) struct Attributes {
    root: PathBuf,
    /// The mount point of each hierarchy, by its controllers.
    mounts: HashMap<String, Option<PathBuf>>,
    seen: HashMap<PathBuf, Labels>,
}

#[derive(Clone, Debug, Default)]
struct Labels {
    avoid: bool,
    include: bool,
    domain: Option<String>,
    /// Whether we couldn't read the attributes.
    is_unreadable: bool,
}

impl Labels {
    fn of(directory: &Path, path: &Path) -> Self {
        Self::read(directory, path).unwrap_or(Self { is_unreadable: true, ..Self::default() })
    }

    /// Reads the attributes. `include` and `domain` grant something, so they count only where root alone can set them:
    /// otherwise the owner of a delegated cgroup could override the administrator's `avoid` above it, or join somebody
    /// else's domain. In containers they never count, because the root there may be the host's.
    fn read(directory: &Path, path: &Path) -> Result<Self, Errno> {
        // The name isn't UTF-8, so this isn't the cgroup's path.
        if path.as_os_str().as_encoded_bytes().windows(3).any(|bytes| bytes == "\u{fffd}".as_bytes()) {
            return Err(Errno::ILSEQ);
        }
        let avoid = is_set(directory, "user.pagefold.avoid")?;
        let include = is_set(directory, "user.pagefold.include")?;
        let domain = xattr(directory, "user.pagefold.domain")?;
        let is_roots = (include || domain.is_some())
            && fs::metadata(directory).is_ok_and(|found| is_roots_alone(found.uid(), found.mode()));
        let grants = is_roots && !is_in_container(path);
        // The attribute may be there to keep others apart from the process, but the container's root may have set it.
        let is_unreadable = is_roots && !grants && domain.is_some();
        let domain = if grants { domain.map(|name| printable(&name)) } else { None };
        Ok(Self { avoid, include: include && grants, domain, is_unreadable })
    }
}

impl Attributes {
    /// Reads attributes below the cgroup mount point `root`.
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), mounts: HashMap::new(), seen: HashMap::new() }
    }

    /// The cgroup that opts its processes out, if any. In each hierarchy the nearest attribute decides.
    pub(super) fn avoided(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        for cgroup in cgroups {
            // If one cgroup has both attributes, avoid takes precedence.
            match self.nearest(cgroup, |labels| labels.avoid || labels.include) {
                Some((directory, labels)) if labels.avoid => return Some(directory.display().to_string()),
                _ => {}
            }
        }
        None
    }

    /// A cgroup of the process, or a parent, whose attributes we can't read.
    pub(super) fn unreadable(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        let found = cgroups.iter().find_map(|cgroup| self.nearest(cgroup, |labels| labels.is_unreadable));
        Some(found?.0.display().to_string())
    }

    /// The trust domain set by the nearest cgroup.
    pub(super) fn domain(&mut self, cgroups: &[Cgroup]) -> Option<String> {
        cgroups.iter().find_map(|cgroup| self.nearest(cgroup, |labels| labels.domain.is_some())?.1.domain)
    }

    /// The first directory whose attributes satisfy `is_it`: the cgroup's or one of its parents', up to the root of the
    /// hierarchy.
    fn nearest(&mut self, cgroup: &Cgroup, is_it: impl Fn(&Labels) -> bool) -> Option<(PathBuf, Labels)> {
        let inner = inner_path(&cgroup.path)?;
        let mount = self.mount_of(cgroup)?;
        for below in inner.ancestors() {
            let directory = mount.join(below);
            let labels = self.seen.entry(directory.clone()).or_insert_with(|| Labels::of(&directory, below));
            if is_it(labels) {
                return Some((directory, labels.clone()));
            }
        }
        None
    }

    fn mount_of(&mut self, cgroup: &Cgroup) -> Option<PathBuf> {
        if let Some(known) = self.mounts.get(&cgroup.controllers) {
            return known.clone();
        }
        let mut mounts = cgroup.mounts().into_iter().map(|mount| self.root.join(mount));
        let found = mounts.find(|mount| mount.is_dir());
        self.mounts.insert(cgroup.controllers.clone(), found.clone());
        found
    }
}

/// Whether a path below a mount is a container's or pod's cgroup, or below one.
fn is_in_container(path: &Path) -> bool {
    let path = format!("/{}", path.display());
    let mut labels = labels_of(&path).into_iter();
    labels.any(|label| matches!(label.kind, WorkloadKind::Container | WorkloadKind::Pod))
}

/// The path of a cgroup below its mount. Paths outside our cgroup namespace begin with "..", and would lead us to other
/// directories.
fn inner_path(path: &str) -> Option<&Path> {
    let inner = Path::new(path).strip_prefix("/").ok()?;
    if inner.components().all(|part| matches!(part, Component::Normal(_))) { Some(inner) } else { None }
}

/// The directory of a path in the hierarchy of this cgroup, below the cgroup mount point `root`.
pub(super) fn directory_of(root: &Path, cgroup: &Cgroup, path: &str) -> Option<PathBuf> {
    let inner = inner_path(path)?;
    let mut mounts = cgroup.mounts().into_iter().map(|mount| root.join(mount));
    Some(mounts.find(|mount| mount.is_dir())?.join(inner))
}

/// Whether a directory has an attribute that means yes.
fn is_set(directory: &Path, name: &str) -> Result<bool, Errno> {
    Ok(xattr(directory, name)?.is_some_and(|value| means_yes(&value)))
}

/// Whether the value of an attribute means yes. An empty value does.
fn means_yes(value: &[u8]) -> bool {
    !matches!(value.trim_ascii(), b"0" | b"no" | b"false")
}

/// Reads an extended attribute. `None` if it isn't set or not supported, or the directory is gone.
fn xattr(path: &Path, name: &str) -> Result<Option<Vec<u8>>, Errno> {
    // Most directories have no value or a short one, so we try a small buffer first. If a value doesn't fit, we try
    // again with the kernel's limit.
    for size in [256, 64 << 10] {
        let mut value = vec![0u8; size];
        match rustix::fs::getxattr(path, name, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            Err(Errno::RANGE) => {}
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Err(Errno::RANGE)
}
