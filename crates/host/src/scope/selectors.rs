//! The selectors of a scope: pids, cgroups, users and executables.

use super::ScopeError;
use pagefold_procmem::Roots;
use pagefold_procmem::cgroup::Cgroup;
use pagefold_text::escape::printable;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// The user ID of a user given by name or number.
pub fn user_id(user: &str) -> Result<u32, ScopeError> {
    let unknown = || ScopeError::UnknownUser(printable(user.as_bytes()));
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let name = CString::new(user).map_err(|_| unknown())?;
    let mut buffer = vec![0; 16 << 10];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: the name is NUL-terminated; record, buffer and result pointer outlive the call, which gets the buffer's
    // length.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return Err(unknown());
    }
    // SAFETY: a non-null result points to the record, which the call has initialized.
    Ok(unsafe { (*found).pw_uid })
}

/// A selected cgroup.
#[derive(Debug)]
pub(super) struct CgroupSelector {
    /// Directory of the hierarchy, if the path has one: `memory`, `unified`, or empty on a pure version 2 system.
    pub(super) mount: Option<String>,
    pub(super) path: PathBuf,
}

impl CgroupSelector {
    pub(super) fn of(asked: &Path, roots: &Roots) -> Result<Self, ScopeError> {
        let no_cgroup = || ScopeError::NoCgroup(printable(asked.as_os_str().as_bytes()));
        let clean = |path: &Path| -> Result<PathBuf, ScopeError> {
            path.components()
                .filter(|part| !matches!(part, Component::CurDir | Component::RootDir))
                .map(|part| if matches!(part, Component::Normal(_)) { Ok(part) } else { Err(no_cgroup()) })
                .collect()
        };
        let below = asked.strip_prefix(&roots.cgroup).or_else(|_| asked.strip_prefix("/sys/fs/cgroup"));
        let Ok(below) = below else {
            let path = clean(asked)?;
            let exists = path.as_os_str().is_empty()
                || roots.cgroup.join(&path).is_dir()
                || fs::read_dir(&roots.cgroup)
                    .is_ok_and(|mounts| mounts.flatten().any(|mount| mount.path().join(&path).is_dir()));
            return if exists { Ok(Self { mount: None, path }) } else { Err(no_cgroup()) };
        };
        let below = clean(below)?;
        if !roots.cgroup.join(&below).is_dir() {
            return Err(no_cgroup());
        }
        // Only version 2 has cgroup.controllers; its mount point is the root cgroup.
        if roots.cgroup.join("cgroup.controllers").exists() {
            return Ok(Self { mount: Some(String::new()), path: below });
        }
        let mut parts = below.components();
        let mount = parts.next().ok_or_else(no_cgroup)?.as_os_str().to_string_lossy().into_owned();
        Ok(Self { mount: Some(mount), path: parts.as_path().to_owned() })
    }

    /// Whether a cgroup is the selected one or below it.
    pub(super) fn matches(&self, cgroup: &Cgroup) -> bool {
        let mount_fits = self.mount.as_deref().is_none_or(|mount| cgroup.mounts().contains(&mount));
        mount_fits && Path::new(&cgroup.path).strip_prefix("/").is_ok_and(|path| path.starts_with(&self.path))
    }
}
