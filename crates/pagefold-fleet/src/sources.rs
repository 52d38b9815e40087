//! Directories and object stores with files of sketches.
//!
//! All are read through DataFusion's own `object_store`: local directories, and S3 with the settings of its usual
//! environment variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`...). Local directories are listed here instead, because
//! `object_store` follows symbolic links: a link to `/` would make it list the whole machine, and a loop of links would make it fail.

use crate::inventory::{Header, Seen};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use pagefold_sketch::file::FILE_BYTES;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use url::Url;
use walkdir::WalkDir;

/// Files that are read at a time. Each may take three times its length.
const AT_A_TIME: usize = 2;
/// What files of sketches are called. One that is being written has another name.
const EXTENSION: &str = ".parquet";

/// A place with files.
#[derive(Clone, Debug)]
pub struct Source {
    /// The store, as DataFusion knows it.
    pub root: Url,
    pub store: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    /// The path, if it is one of this machine.
    local: Option<PathBuf>,
}

/// A file that is called as one of sketches.
struct Found {
    file: Url,
    /// Its place in the store and its length; or why it cannot be read.
    object: Result<(ObjectPath, u64), String>,
}

/// A place that cannot be used. Each is one line: what failed and why; what to do.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("cannot read {place}: {source}; check the path and its permissions")]
    Path { place: String, source: std::io::Error },
    #[error("{place} is not a URL ({why}); give a directory or s3://BUCKET/PREFIX")]
    Url { place: String, why: String },
    #[error("cannot open {place}: {why}; check the address, and AWS_* in the environment")]
    Store { place: String, why: String },
    #[error("cannot list {place}: {why}; check the address, the permissions and AWS_* in the environment")]
    List { place: String, why: String },
}

impl Source {
    /// Opens a directory, a file or a URL.
    pub fn open(place: &str) -> Result<Self, SourceError> {
        let url = if place.contains("://") {
            Url::parse(place).map_err(|error| SourceError::Url { place: place.into(), why: error.to_string() })?
        } else {
            let failed = |source| SourceError::Path { place: place.into(), source };
            let path = Path::new(place).canonicalize().map_err(failed)?;
            let url = if path.is_dir() { Url::from_directory_path(&path) } else { Url::from_file_path(&path) };
            url.map_err(|()| SourceError::Url { place: place.into(), why: "it has no absolute path".into() })?
        };
        let opened = |why: &dyn std::fmt::Display| SourceError::Store { place: place.into(), why: one_line(why) };
        let prefix = ObjectPath::from_url_path(url.path()).map_err(|error| opened(&error))?;
        let store: Arc<dyn ObjectStore> = match url.scheme() {
            "file" => Arc::new(LocalFileSystem::new()),
            "s3" => Arc::new(AmazonS3Builder::from_env().with_url(place).build().map_err(|error| opened(&error))?),
            other => {
                let why = format!("its scheme is {other}");
                return Err(SourceError::Url { place: place.into(), why });
            }
        };
        let local = if url.scheme() == "file" { url.to_file_path().ok() } else { None };
        let mut root = url;
        root.set_path("");
        root.set_query(None);
        Ok(Self { root, store, prefix, local })
    }

    /// The files, by name.
    async fn files(&self) -> Result<Vec<Found>, SourceError> {
        if let Some(path) = self.local.clone() {
            let place = path.display().to_string();
            // On a thread that may wait for a disk.
            let listed = tokio::task::spawn_blocking(move || list(&path)).await;
            let listed = listed.map_err(|error| std::io::Error::other(error.to_string())).flatten();
            return listed.map_err(|source| SourceError::Path { place, source });
        }
        let failed = |why: String| SourceError::List { place: format!("{}/{}", self.root, self.prefix), why };
        let listed = self.store.list(Some(&self.prefix)).try_collect::<Vec<_>>().await;
        let mut files: Vec<ObjectMeta> = match listed {
            // A single file is not listed below its own name.
            Ok(files) if files.is_empty() => self.store.head(&self.prefix).await.into_iter().collect(),
            Ok(files) => files,
            Err(error) => return Err(failed(one_line(&error))),
        };
        files.retain(|file| file.location.as_ref().ends_with(EXTENSION));
        files.sort_by(|a, b| a.location.cmp(&b.location));
        let found =
            |file: ObjectMeta| Found { file: self.url_of(&file.location), object: Ok((file.location, file.size)) };
        Ok(files.into_iter().map(found).collect())
    }

    fn url_of(&self, location: &ObjectPath) -> Url {
        let mut url = self.root.clone();
        // Encodes whatever a name has that a URL cannot have.
        if let Ok(mut path) = url.path_segments_mut() {
            path.clear().extend(location.parts());
        }
        url
    }

    /// Reads and checks one file.
    async fn look_at(&self, object: Result<(ObjectPath, u64), String>) -> Result<Header, String> {
        let (location, size) = object?;
        if size > FILE_BYTES {
            return Err(format!("has {size} bytes, more than the {FILE_BYTES} of one host"));
        }
        let bytes = async { self.store.get(&location).await?.bytes().await };
        let bytes = bytes.await.map_err(|error| format!("cannot be read: {}", one_line(&error)))?;
        // Decoding takes time: not on a thread that waits for others.
        let read = tokio::task::spawn_blocking(move || pagefold_sketch::read(bytes.into())).await;
        let read = read.map_err(|_| "cannot be decoded".to_owned())?.map_err(|error| error.to_string())?;
        let first = read.rows.first().ok_or("has no workload")?;
        Ok(Header { host: first.host.clone(), key: first.key, time_us: read.time_us(), workloads: read.rows.len() })
    }
}

/// Reads and checks all files of some places. `show` is told how many of how many are done.
pub async fn survey(sources: &[Source], show: &(dyn Fn(usize, usize) + Sync)) -> Result<Vec<Seen>, SourceError> {
    let mut files = Vec::new();
    for source in sources {
        files.extend(source.files().await?.into_iter().map(|file| (source, file)));
    }
    let all = files.len();
    let looked = stream::iter(files).map(async |(source, found)| {
        let header = source.look_at(found.object).await;
        Seen { file: found.file, header }
    });
    let mut seen = Vec::with_capacity(all);
    let mut looked = std::pin::pin!(looked.buffered(AT_A_TIME));
    while let Some(file) = looked.next().await {
        seen.push(file);
        show(seen.len(), all);
    }
    Ok(seen)
}

/// The files in a directory and below it. Links are not followed.
fn list(path: &Path) -> std::io::Result<Vec<Found>> {
    let mut files = Vec::new();
    for entry in WalkDir::new(path).sort_by_file_name() {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if error.depth() == 0 => return Err(error.into()),
            Err(error) => {
                let file = error.path().and_then(|path| Url::from_file_path(path).ok());
                let object = Err(format!("cannot be listed: {}", one_line(&error)));
                files.extend(file.map(|file| Found { file, object }));
                continue;
            }
        };
        let is_named = entry.file_name().as_encoded_bytes().ends_with(EXTENSION.as_bytes());
        if !entry.file_type().is_file() || !is_named {
            continue;
        }
        let Ok(file) = Url::from_file_path(entry.path()) else { continue };
        let location = ObjectPath::from_absolute_path(entry.path()).map_err(|error| one_line(&error));
        let object =
            location.and_then(|location| Ok((location, entry.metadata().map_err(|error| one_line(&error))?.len())));
        files.push(Found { file, object: object.map_err(|why| format!("cannot be read: {why}")) });
    }
    Ok(files)
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
