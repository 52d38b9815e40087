//! We read object stores through DataFusion's own `object_store`: S3, with the settings in the usual environment
//! variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`...). For local directories we don't use it,
//! because it follows symbolic links and waits for pipes. Given a link to `/` it would list the whole machine, and
//! given a loop of links it would fail.

use crate::inventory::{Header, Seen};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use pagefold_sketch::SketchFile;
use pagefold_sketch::file::FILE_BYTES;
use pagefold_text::regular;
use pagefold_text::table::spaced;
use std::fs::OpenOptions;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use url::Url;
use walkdir::WalkDir;

/// How many files we read at a time. Each may take three times its length in memory.
pub const AT_A_TIME: usize = 2;
/// The names of sketch files end with this. A file that is being written has another name.
pub const EXTENSION: &str = ".parquet";

/// A place with files.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory or a file of this machine.
    Local(PathBuf),
    /// The files below a prefix in a bucket. `root` is the bucket's URL.
    Bucket { root: Url, store: Arc<dyn ObjectStore>, prefix: ObjectPath },
}

/// A file with a sketch file's name, or why we can't read it.
type Found = (Url, Result<(), String>);

/// Why we can't use a place. Each message is one line with the failure, the reason and the remedy.
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
        let wrong = |why: String| SourceError::Url { place: place.into(), why };
        let path = if place.contains("://") {
            let url = Url::parse(place).map_err(|error| wrong(error.to_string()))?;
            match url.scheme() {
                "file" => url.to_file_path().map_err(|()| wrong("it has no absolute path".into()))?,
                "s3" => return Self::bucket(place, url),
                other => return Err(wrong(format!("its scheme is {other}"))),
            }
        } else {
            PathBuf::from(place)
        };
        let path = path.canonicalize().map_err(|source| SourceError::Path { place: place.into(), source })?;
        Ok(Self::Local(path))
    }

    fn bucket(place: &str, mut url: Url) -> Result<Self, SourceError> {
        let opened = |why: &dyn std::fmt::Display| SourceError::Store { place: place.into(), why: one_line(why) };
        let prefix = ObjectPath::from_url_path(url.path()).map_err(|error| opened(&error))?;
        let store = AmazonS3Builder::from_env().with_url(place).build().map_err(|error| opened(&error))?;
        url.set_path("");
        url.set_query(None);
        Ok(Self::Bucket { root: url, store: Arc::new(store), prefix })
    }

    /// The files, by name.
    async fn files(&self) -> Result<Vec<Found>, SourceError> {
        let (root, store, prefix) = match self {
            Self::Local(path) => {
                let (place, path) = (path.display().to_string(), path.clone());
                // Listing may wait for a disk, so we do it on a blocking thread.
                let listed = tokio::task::spawn_blocking(move || list(&path)).await;
                let listed = listed.map_err(|error| std::io::Error::other(error.to_string())).flatten();
                return listed.map_err(|source| SourceError::Path { place, source });
            }
            Self::Bucket { root, store, prefix } => (root, store, prefix),
        };
        let mut files = match store.list(Some(prefix)).try_collect::<Vec<_>>().await {
            // A listing below a prefix doesn't contain the prefix itself, which may name a single file.
            Ok(files) if files.is_empty() => store.head(prefix).await.into_iter().collect(),
            Ok(files) => files,
            Err(error) => return Err(SourceError::List { place: format!("{root}/{prefix}"), why: one_line(&error) }),
        };
        files.retain(|file| file.location.as_ref().ends_with(EXTENSION));
        files.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(files.into_iter().map(|file| (url_of(root, &file.location), Ok(()))).collect())
    }

    /// Whether a file with such a URL is of this place.
    pub fn has(&self, file: &Url) -> bool {
        match self {
            Self::Local(_) => file.scheme() == "file",
            Self::Bucket { root, .. } => root.scheme() == file.scheme() && root.host() == file.host(),
        }
    }

    /// Reads and checks a file of this place.
    pub async fn read(&self, file: &Url) -> Result<SketchFile, String> {
        let stored = match self {
            Self::Local(_) => None,
            Self::Bucket { store, .. } => {
                let location = ObjectPath::from_url_path(file.path()).map_err(|error| unreadable(&error))?;
                let found = store.get(&location).await.map_err(|error| unreadable(&error))?;
                check_length(found.meta.size)?;
                Some(found.bytes().await.map_err(|error| unreadable(&error))?)
            }
        };
        // We do this on a blocking thread, because reading may wait for a disk, and decoding takes time.
        let file = file.clone();
        let read = tokio::task::spawn_blocking(move || {
            let bytes = match stored {
                Some(bytes) => bytes.into(),
                None => read_local(&file)?,
            };
            pagefold_sketch::read(bytes).map_err(|error| error.to_string())
        });
        read.await.map_err(|_| "cannot be decoded".to_owned())?
    }
}

fn url_of(root: &Url, location: &ObjectPath) -> Url {
    let mut url = root.clone();
    // This escapes characters that a URL can't have.
    if let Ok(mut path) = url.path_segments_mut() {
        path.clear().extend(location.parts());
    }
    url
}

/// Reads a file, unless something else has taken its place since we listed it.
fn read_local(file: &Url) -> Result<Vec<u8>, String> {
    let path = file.to_file_path().map_err(|()| unreadable(&"it has no path"))?;
    let mut bytes = Vec::new();
    let file = regular::open(&path, OpenOptions::new().read(true)).map_err(|error| unreadable(&error))?;
    check_length(file.metadata().map_err(|error| unreadable(&error))?.len())?;
    // We limit what we read, because the file may grow meanwhile.
    file.take(FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&error))?;
    Ok(bytes)
}

fn check_length(bytes: u64) -> Result<(), String> {
    if bytes > FILE_BYTES {
        return Err(format!("has {bytes} bytes, more than the {FILE_BYTES} of one host"));
    }
    Ok(())
}

/// Reads and checks all files of some places. Calls `show` with the number of files done and of all files.
pub async fn survey(sources: &[Source], show: impl Fn(usize, usize) + Sync) -> Result<Vec<Seen>, SourceError> {
    let mut files = Vec::new();
    for source in sources {
        for found in source.files().await? {
            files.push((source, found));
        }
    }
    let all = files.len();
    let looked = stream::iter(files).map(async |(source, (file, found))| {
        let header = match found {
            Ok(()) => source.read(&file).await.and_then(|read| Header::of(&read)),
            Err(why) => Err(why),
        };
        Seen { file, header }
    });
    let mut seen = Vec::with_capacity(all);
    let mut looked = std::pin::pin!(looked.buffered(AT_A_TIME));
    while let Some(file) = looked.next().await {
        seen.push(file);
        show(seen.len(), all);
    }
    Ok(seen)
}

/// The files in a directory and below it. We don't follow links.
fn list(path: &Path) -> std::io::Result<Vec<Found>> {
    let mut files = Vec::new();
    for entry in WalkDir::new(path).sort_by_file_name() {
        match entry {
            Ok(entry) => {
                let is_named = entry.file_name().as_encoded_bytes().ends_with(EXTENSION.as_bytes());
                if let Ok(file) = Url::from_file_path(entry.path())
                    && entry.file_type().is_file()
                    && is_named
                {
                    files.push((file, Ok(())));
                }
            }
            Err(error) if error.depth() == 0 => return Err(error.into()),
            Err(error) => {
                if let Some(path) = error.path()
                    && let Ok(file) = Url::from_file_path(path)
                {
                    files.push((file, Err(format!("cannot be listed: {}", one_line(&error)))));
                }
            }
        }
    }
    Ok(files)
}

fn unreadable(error: &dyn std::fmt::Display) -> String {
    format!("cannot be read: {}", one_line(error))
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    spaced(&error.to_string())
}
