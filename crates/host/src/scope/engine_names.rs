//! Names of containers and pods, by the identifiers in their cgroups' paths. We read them where engines keep them for
//! root: nobody else can write there, so a rootless container has no name for us.

use pagefold_procmem::os::locked;
use pagefold_text::regular;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

/// Docker's configuration of a container.
const DOCKER: &str = "var/lib/docker/containers";
/// Podman's and CRI-O's lists of containers. Containers that are removed once they end (`--rm`) are in the volatile
/// ones.
const STORAGE: [&str; 6] = [
    "var/lib/containers/storage/overlay-containers/containers.json",
    "var/lib/containers/storage/overlay-containers/volatile-containers.json",
    "var/lib/containers/storage/vfs-containers/containers.json",
    "var/lib/containers/storage/vfs-containers/volatile-containers.json",
    "run/containers/storage/overlay-containers/containers.json",
    "run/containers/storage/overlay-containers/volatile-containers.json",
];
/// containerd's bundles of the containers that nerdctl has started.
const NERDCTL: &str = "run/containerd/io.containerd.runtime.v2.task/default";
/// The kubelet names each pod's logs `NAMESPACE_NAME_UID`.
const PODS: &str = "var/log/pods";

/// We read at most this much of a file.
const FILE_MOST: u64 = 16 << 20;
/// Once we know this many names that aren't from such lists, we forget them all.
const FOUND_MOST: usize = 1 << 14;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerContainer {
    /// With a leading slash.
    name: String,
}

#[derive(Deserialize)]
struct StoredContainer {
    id: String,
    #[serde(default)]
    names: Vec<String>,
}

#[derive(Deserialize)]
struct Bundle {
    #[serde(default)]
    annotations: HashMap<String, String>,
}

/// A file's inode, and when it was written. Engines replace these files, so each version has an inode of its own.
type Version = (u64, i64, i64);

/// A list of [`STORAGE`], as we last read it.
#[derive(Debug, Default)]
struct StorageList {
    version: Option<Version>,
    names: HashMap<String, String>,
}

#[derive(Debug)]
pub(super) struct EngineNames {
    root: PathBuf,
    /// The names that aren't from [`STORAGE`], by identifier, each with the version of its file.
    found: Mutex<HashMap<String, (Version, String)>>,
    storage: Mutex<[StorageList; STORAGE.len()]>,
}

impl EngineNames {
    pub(super) fn here() -> &'static Self {
        static HERE: LazyLock<EngineNames> = LazyLock::new(|| EngineNames::below(Path::new("/")));
        &HERE
    }

    fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), found: Mutex::default(), storage: Mutex::default() }
    }

    pub(super) fn container(&self, id: &str) -> Option<String> {
        let docker = self.root.join(DOCKER).join(id).join("config.v2.json");
        let nerdctl = self.root.join(NERDCTL).join(id).join("config.json");
        let name = self.of_storage(id).or_else(|| self.of_file(id, &docker, docker_name));
        name.or_else(|| self.of_file(id, &nerdctl, nerdctl_name))
    }

    /// A pod as `NAMESPACE/NAME`. We list the logs again whenever the directory has changed.
    pub(super) fn pod(&self, uid: &str) -> Option<String> {
        self.of_file(uid, &self.root.join(PODS), |logs| pod_name(logs, uid))
    }

    /// The name in a file, which we only read again if it has changed.
    fn of_file(&self, id: &str, file: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<String> {
        let version = version_of(file)?;
        let mut found = locked(&self.found);
        let known = found.get(id).cloned();
        if known.as_ref().is_none_or(|(of, _)| *of != version) {
            if let Some(name) = read(file) {
                if found.len() >= FOUND_MOST {
                    found.clear();
                }
                found.insert(id.to_owned(), (version, name.clone()));
                return Some(name);
            }
        }
        // If we can't read the file now, we take the name from its last version.
        Some(known?.1)
    }

    /// The name of a container in the lists of Podman and CRI-O.
    fn of_storage(&self, id: &str) -> Option<String> {
        let mut storage = locked(&self.storage);
        for (file, list) in STORAGE.into_iter().zip(storage.iter_mut()) {
            let file = self.root.join(file);
            let version = version_of(&file);
            if version.is_none() {
                *list = StorageList::default();
            } else if version != list.version {
                // If we can't read the list now, we go by its last version, and try again the next time.
                if let Some(containers) = read_json::<Vec<StoredContainer>>(&file) {
                    let named = containers.into_iter().filter_map(|mut found| Some((found.id, found.names.pop()?)));
                    *list = StorageList { version, names: named.collect() };
                }
            }
            if let Some(name) = list.names.get(id) {
                return Some(name.clone());
            }
        }
        None
    }
}

fn version_of(file: &Path) -> Option<Version> {
    let found = fs::metadata(file).ok()?;
    Some((found.ino(), found.mtime(), found.mtime_nsec()))
}

fn docker_name(file: &Path) -> Option<String> {
    Some(read_json::<DockerContainer>(file)?.name.trim_start_matches('/').to_owned())
}

fn nerdctl_name(file: &Path) -> Option<String> {
    read_json::<Bundle>(file)?.annotations.remove("nerdctl/name")
}

fn pod_name(logs: &Path, uid: &str) -> Option<String> {
    for entry in fs::read_dir(logs).ok()?.flatten() {
        let entry = entry.file_name();
        if let Some((name, of)) = entry.to_str().and_then(|entry| entry.rsplit_once('_')) {
            if of == uid {
                return Some(name.replacen('_', "/", 1));
            }
        }
    }
    None
}

fn read_json<T: DeserializeOwned>(file: &Path) -> Option<T> {
    let file = regular::open(file, OpenOptions::new().read(true)).ok()?;
    let mut text = Vec::new();
    file.take(FILE_MOST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_files_name_containers_and_pods() {
        let root = tempfile::tempdir().unwrap();
        let names = EngineNames::below(root.path());
        let write = |file: String, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let id = |digit: &str| digit.repeat(64);
        for digit in ["a", "b", "c"] {
            assert_eq!(names.container(&id(digit)), None, "{digit}");
        }
        write(
            format!("{DOCKER}/{}/config.v2.json", id("a")),
            r#"{"State":{"Running":true},"Name":"/web1","Driver":"x"}"#,
        );
        write(
            format!("{NERDCTL}/{}/config.json", id("b")),
            r#"{"ociVersion":"1.1","annotations":{"nerdctl/name":"db"}}"#,
        );
        let list = |name: &str| format!(r#"[{{"id":"{}","names":["{name}"],"flags":{{}}}},{{"id":"x"}}]"#, id("c"));
        write(STORAGE[1].to_owned(), &list("cache"));
        assert_eq!(names.container(&id("a")).as_deref(), Some("web1"));
        assert_eq!(names.container(&id("b")).as_deref(), Some("db"));
        assert_eq!(names.container(&id("c")).as_deref(), Some("cache"));
        fs::write(root.path().join("new"), list("renamed")).unwrap();
        fs::rename(root.path().join("new"), root.path().join(STORAGE[1])).unwrap();
        assert_eq!(names.container(&id("c")).as_deref(), Some("renamed"));

        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        assert_eq!(names.pod(uid), None);
        fs::create_dir_all(root.path().join(PODS).join(format!("shop_cart-0_{uid}"))).unwrap();
        assert_eq!(names.pod(uid).as_deref(), Some("shop/cart-0"));
    }

    #[test]
    fn a_file_that_we_dont_understand_names_nothing() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(STORAGE[0]);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["", "{}", r#"[{"id":1}]"#, "\u{0}"] {
            fs::write(&file, text).unwrap();
            assert_eq!(EngineNames::below(root.path()).container("a"), None, "{text:?}");
        }
    }
}
