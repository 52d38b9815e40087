//! Names of containers and pods, by the identifiers in their cgroups' paths. We read them where engines keep them for
//! root: nobody else can write there, so a rootless container has no name for us.

use super::workload::is_number;
use pagefold_procmem::os::locked;
use pagefold_text::regular;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};

/// Docker's data, unless [`DOCKER_CONFIGURATION`] says otherwise.
const DOCKER: &str = "var/lib/docker";
const DOCKER_CONFIGURATION: &str = "etc/docker/daemon.json";
/// Podman's and CRI-O's data, unless [`STORAGE_CONFIGURATION`] says otherwise. Some data is only kept until a restart.
const STORAGE: &str = "var/lib/containers/storage";
const STORAGE_CONFIGURATION: &str = "etc/containers/storage.conf";
const STORAGE_UNTIL_RESTART: &str = "run/containers/storage";
/// Podman's and CRI-O's lists of containers, and whether they're only kept until a restart. Containers that are removed
/// once they end (`--rm`) are in the volatile lists.
const LISTS: [(bool, &str); 6] = [
    (false, "overlay-containers/containers.json"),
    (false, "overlay-containers/volatile-containers.json"),
    (false, "vfs-containers/containers.json"),
    (false, "vfs-containers/volatile-containers.json"),
    (true, "overlay-containers/containers.json"),
    (true, "overlay-containers/volatile-containers.json"),
];
/// containerd's bundles of the containers that nerdctl has started.
const NERDCTL: &str = "run/containerd/io.containerd.runtime.v2.task/default";
/// The kubelet names each pod's logs `NAMESPACE_NAME_UID`.
const PODS: &str = "var/log/pods";

/// We read at most this much of a file.
const FILE_MOST: u64 = 16 << 20;
/// Once we know this many names that aren't from [`LISTS`], we forget them all.
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
    #[serde(default)]
    linux: BundleLinux,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BundleLinux {
    #[serde(default)]
    cgroups_path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct DockerConfiguration {
    data_root: PathBuf,
}

/// A file's inode, and when it was written. Engines replace these files, so each version has an inode of its own.
type Version = (u64, i64, i64);

/// Where engines keep their data. We trust the paths in their configuration: whoever can change it controls the engine.
#[derive(Debug, Default)]
struct Places {
    /// The versions of the files and directories that tell us these places.
    versions: [Option<Version>; 3],
    /// Docker's own directory, and one for each user that containers' root is mapped to (`userns-remap`).
    docker: Vec<PathBuf>,
    storage: PathBuf,
}

impl Places {
    fn data_root(&self) -> Option<Version> {
        version_of(self.docker.first()?)
    }
}

/// A list of [`LISTS`], as we last read it.
#[derive(Debug, Default)]
struct StorageList {
    version: Option<Version>,
    names: HashMap<String, String>,
}

#[derive(Debug)]
pub(super) struct EngineNames {
    root: PathBuf,
    places: Mutex<Arc<Places>>,
    /// The cgroups, and the names that aren't from [`LISTS`], by identifier, each with the version of its file.
    found: Mutex<HashMap<String, (Version, String)>>,
    storage: Mutex<[StorageList; LISTS.len()]>,
}

impl EngineNames {
    pub(super) fn here() -> &'static Self {
        static HERE: LazyLock<EngineNames> = LazyLock::new(|| EngineNames::below(Path::new("/")));
        &HERE
    }

    fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), places: Mutex::default(), found: Mutex::default(), storage: Mutex::default() }
    }

    pub(super) fn container(&self, id: &str) -> Option<String> {
        let places = self.places();
        let nerdctl = self.root.join(NERDCTL).join(id).join("config.json");
        let mut name = self.of_storage(id, &places.storage);
        for docker in &places.docker {
            let file = docker.join("containers").join(id).join("config.v2.json");
            name = name.or_else(|| self.of_file(id, &file, docker_name));
        }
        name.or_else(|| self.of_file(id, &nerdctl, nerdctl_name))
    }

    /// Whether Podman has started the container with this identifier in this cgroup.
    pub(super) fn is_in(&self, id: &str, cgroup: &str) -> bool {
        let bundle = format!("overlay-containers/{id}/userdata/config.json");
        for storage in [self.places().storage.clone(), self.root.join(STORAGE_UNTIL_RESTART)] {
            if let Some(found) = self.of_file(&format!("cgroup of {id}"), &storage.join(&bundle), cgroup_of) {
                return found == cgroup;
            }
        }
        false
    }

    /// Where the engines keep their data. We read their configuration again only if it has changed.
    fn places(&self) -> Arc<Places> {
        let configuration = self.root.join(DOCKER_CONFIGURATION);
        let storage = self.root.join(STORAGE_CONFIGURATION);
        let mut places = locked(&self.places);
        let versions = [version_of(&configuration), version_of(&storage), places.data_root()];
        if places.docker.is_empty() || places.versions != versions {
            let docker = read_json::<DockerConfiguration>(&configuration).map(|found| found.data_root);
            let docker = self.root.join(docker.unwrap_or_else(|| DOCKER.into()));
            let storage = self.root.join(graphroot(&storage).unwrap_or_else(|| STORAGE.into()));
            let mut found = Places { versions, docker: vec![docker], storage };
            found.versions[2] = found.data_root();
            found.docker.extend(remapped(&found.docker[0]));
            *places = Arc::new(found);
        }
        places.clone()
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
    fn of_storage(&self, id: &str, place: &Path) -> Option<String> {
        let until_restart = self.root.join(STORAGE_UNTIL_RESTART);
        let mut storage = locked(&self.storage);
        for ((is_until_restart, file), list) in LISTS.into_iter().zip(storage.iter_mut()) {
            let file = if is_until_restart { until_restart.join(file) } else { place.join(file) };
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

/// Docker's data has a directory `UID.GID` for each user that containers' root is mapped to. Returns these directories.
fn remapped(data_root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(data_root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if let Some((uid, gid)) = name.to_str().and_then(|name| name.split_once('.')) {
            if is_number(uid) && is_number(gid) {
                found.push(entry.path());
            }
        }
    }
    found
}

/// The value of `graphroot` in storage.conf, which is TOML.
fn graphroot(file: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once('='));
    let value = lines.find(|(key, _)| key.trim() == "graphroot")?.1;
    Some(value.split(['"', '\'']).nth(1)?.into())
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

fn cgroup_of(file: &Path) -> Option<String> {
    Some(read_json::<Bundle>(file)?.linux.cgroups_path)
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
            format!("{DOCKER}/containers/{}/config.v2.json", id("a")),
            r#"{"State":{"Running":true},"Name":"/web1","Driver":"x"}"#,
        );
        write(
            format!("{NERDCTL}/{}/config.json", id("b")),
            r#"{"ociVersion":"1.1","annotations":{"nerdctl/name":"db"}}"#,
        );
        let list = |name: &str| format!(r#"[{{"id":"{}","names":["{name}"],"flags":{{}}}},{{"id":"x"}}]"#, id("c"));
        let file = format!("{STORAGE}/{}", LISTS[1].1);
        write(file.clone(), &list("cache"));
        assert_eq!(names.container(&id("a")).as_deref(), Some("web1"));
        assert_eq!(names.container(&id("b")).as_deref(), Some("db"));
        assert_eq!(names.container(&id("c")).as_deref(), Some("cache"));
        fs::write(root.path().join("new"), list("renamed")).unwrap();
        fs::rename(root.path().join("new"), root.path().join(file)).unwrap();
        assert_eq!(names.container(&id("c")).as_deref(), Some("renamed"));

        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        assert_eq!(names.pod(uid), None);
        fs::create_dir_all(root.path().join(PODS).join(format!("shop_cart-0_{uid}"))).unwrap();
        assert_eq!(names.pod(uid).as_deref(), Some("shop/cart-0"));
    }

    #[test]
    fn engines_may_keep_their_data_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        let names = EngineNames::below(root.path());
        let elsewhere = tempfile::tempdir().unwrap();
        let write = |file: &Path, text: &str| {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let id = |digit: &str| digit.repeat(64);
        for (digit, docker) in [("a", "containers"), ("b", "100000.100000/containers")] {
            let file = elsewhere.path().join(docker).join(id(digit)).join("config.v2.json");
            write(&file, &format!(r#"{{"Name":"/web-{digit}"}}"#));
        }
        let file = elsewhere.path().join(LISTS[0].1);
        write(&file, &format!(r#"[{{"id":"{}","names":["web-c"]}}]"#, id("c")));
        let cgroup = format!("/system.slice/web.service/libpod-payload-{}", id("c"));
        let file = elsewhere.path().join(format!("overlay-containers/{}/userdata/config.json", id("c")));
        write(&file, &format!(r#"{{"linux":{{"cgroupsPath":"{cgroup}"}}}}"#));
        for digit in ["a", "b", "c"] {
            assert_eq!(names.container(&id(digit)), None);
        }
        let elsewhere = elsewhere.path().display();
        write(&root.path().join(DOCKER_CONFIGURATION), &format!(r#"{{"debug":true,"data-root":"{elsewhere}"}}"#));
        let conf = format!("[storage]\ndriver = \"overlay\"\n# graphroot = \"/a\"\ngraphroot = \"{elsewhere}\" # b\n");
        write(&root.path().join(STORAGE_CONFIGURATION), &conf);
        for digit in ["a", "b", "c"] {
            assert_eq!(names.container(&id(digit)), Some(format!("web-{digit}")));
        }
        assert!(names.is_in(&id("c"), &cgroup) && !names.is_in(&id("c"), "/c3.service") && !names.is_in(&id("a"), ""));
    }

    #[test]
    fn a_file_that_we_dont_understand_names_nothing() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(STORAGE).join(LISTS[0].1);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["", "{}", r#"[{"id":1}]"#, "\u{0}"] {
            fs::write(&file, text).unwrap();
            assert_eq!(EngineNames::below(root.path()).container("a"), None, "{text:?}");
        }
    }
}
