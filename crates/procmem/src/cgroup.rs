//! The cgroups of a process.

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// Comma-separated controllers of a version 1 hierarchy, or its `name=...`; empty for version 2.
    pub controllers: String,
    /// Path below the mount of the hierarchy, with a leading slash.
    pub path: String,
}

impl Cgroup {
    /// Possible names of this hierarchy's directory under the cgroup mount point.
    pub fn mounts(&self) -> Vec<&str> {
        match self.controllers.as_str() {
            "" => vec!["unified", ""],
            names => {
                let names = names.strip_prefix("name=").unwrap_or(names);
                std::iter::once(names).chain(names.split(',')).collect()
            }
        }
    }
}

/// Parses the text of `/proc/PID/cgroup`. Skips lines in another format.
pub fn parse_cgroups(text: &[u8]) -> Vec<Cgroup> {
    let mut cgroups = Vec::new();
    // We don't use `lines`, because a name may end with a carriage return.
    for line in String::from_utf8_lossy(text).split('\n') {
        match line.splitn(3, ':').collect::<Vec<_>>()[..] {
            [_, controllers, path] if path.starts_with('/') => {
                cgroups.push(Cgroup { controllers: controllers.to_owned(), path: path.to_owned() });
            }
            _ => {}
        }
    }
    cgroups
}
