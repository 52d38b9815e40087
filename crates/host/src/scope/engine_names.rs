//! Names of containers and pods, by the identifiers in their cgroups' paths. We read them where engines keep them for
//! root: nobody else can write there, so a rootless container has no name for us.

use pagefold_text::regular;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

/// Docker's configuration of a container.
const DOCKER: &str = "var/lib/docker/containers";
/// Podman's and CRI-O's lists of containers.
const STORAGE: [&str; 2] =
    ["var/lib/containers/storage/overlay-containers", "var/lib/containers/storage/vfs-containers"];
/// containerd's bundles of the containers that nerdctl has started.
const NERDCTL: &str = "run/containerd/io.containerd.runtime.v2.task/default";
/// The kubelet names each pod's logs `NAMESPACE_NAME_UID`.
const PODS: &str = "var/log/pods";

/// We read no more of a file.
const FILE_MOST: u64 = 16 << 20;
/// We forget what we've found once it's so many.
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

/// A list of [`STORAGE`], as we last read it.
#[derive(Debug, Default)]
struct StorageList {
    written: Option<SystemTime>,
    names: HashMap<String, String>,
}

/// The names that we know.
#[derive(Debug)]
pub(super) struct EngineNames {
    /// The root directory.
    root: PathBuf,
    /// What we've found for a container or pod. Identifiers aren't used again.
    found: Mutex<HashMap<String, String>>,
    storage: Mutex<[StorageList; STORAGE.len()]>,
}

impl EngineNames {
    /// The names on this machine.
    pub(super) fn here() -> &'static Self {
        static HERE: LazyLock<EngineNames> = LazyLock::new(|| EngineNames::below(Path::new("/")));
        &HERE
    }

    fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), found: Mutex::default(), storage: Mutex::default() }
    }

    /// The name of a container.
    pub(super) fn container(&self, id: &str) -> Option<String> {
        self.of_storage(id).or_else(|| self.find(id, |id| self.of_docker(id).or_else(|| self.of_nerdctl(id))))
    }

    /// A pod as `NAMESPACE/NAME`.
    pub(super) fn pod(&self, uid: &str) -> Option<String> {
        self.find(uid, |uid| self.of_kubelet(uid))
    }

    fn find(&self, id: &str, read: impl Fn(&str) -> Option<String>) -> Option<String> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = found.get(id) {
            return Some(name.clone());
        }
        let name = read(id)?;
        if found.len() >= FOUND_MOST {
            found.clear();
        }
        found.insert(id.to_owned(), name.clone());
        Some(name)
    }

    fn of_docker(&self, id: &str) -> Option<String> {
        let container: DockerContainer = read_json(&self.root.join(DOCKER).join(id).join("config.v2.json"))?;
        Some(container.name.trim_start_matches('/').to_owned())
    }

    fn of_nerdctl(&self, id: &str) -> Option<String> {
        let mut bundle: Bundle = read_json(&self.root.join(NERDCTL).join(id).join("config.json"))?;
        bundle.annotations.remove("nerdctl/name")
    }

    fn of_kubelet(&self, uid: &str) -> Option<String> {
        for entry in fs::read_dir(self.root.join(PODS)).ok()?.flatten() {
            let entry = entry.file_name();
            if let Some((name, of)) = entry.to_str().and_then(|entry| entry.rsplit_once('_')) {
                if of == uid {
                    return Some(name.replacen('_', "/", 1));
                }
            }
        }
        None
    }

    /// From the lists of Podman and CRI-O, which we read again when they have changed.
    fn of_storage(&self, id: &str) -> Option<String> {
        let mut storage = self.storage.lock().unwrap_or_else(PoisonError::into_inner);
        for (folder, list) in STORAGE.into_iter().zip(storage.iter_mut()) {
            let file = self.root.join(folder).join("containers.json");
            let written = fs::metadata(&file).and_then(|found| found.modified()).ok();
            if written != list.written {
                let containers: Vec<StoredContainer> = read_json(&file).unwrap_or_default();
                let named =
                    containers.into_iter().filter_map(|mut container| Some((container.id, container.names.pop()?)));
                *list = StorageList { written, names: named.collect() };
            }
            if let Some(name) = list.names.get(id) {
                return Some(name.clone());
            }
        }
        None
    }
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
        write(format!("{}/containers.json", STORAGE[0]), &list("cache"));
        assert_eq!(names.container(&id("a")).as_deref(), Some("web1"));
        assert_eq!(names.container(&id("b")).as_deref(), Some("db"));
        assert_eq!(names.container(&id("c")).as_deref(), Some("cache"));
        std::thread::sleep(std::time::Duration::from_millis(20));
        write(format!("{}/containers.json", STORAGE[0]), &list("renamed"));
        assert_eq!(names.container(&id("c")).as_deref(), Some("renamed"));

        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        assert_eq!(names.pod(uid), None);
        fs::create_dir_all(root.path().join(PODS).join(format!("shop_cart-0_{uid}"))).unwrap();
        assert_eq!(names.pod(uid).as_deref(), Some("shop/cart-0"));
    }

    #[test]
    fn a_file_that_we_dont_understand_names_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(STORAGE[0]);
        fs::create_dir_all(&dir).unwrap();
        for text in ["", "{}", r#"[{"id":1}]"#, "\u{0}"] {
            fs::write(dir.join("containers.json"), text).unwrap();
            assert_eq!(EngineNames::below(root.path()).container("a"), None, "{text:?}");
        }
    }
}
