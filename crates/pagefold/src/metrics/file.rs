//! Metrics in a file, for node_exporter's textfile collector.
//!
//! We replace the file by renaming a new one, so a reader always sees a whole page. Only the writing thread waits for
//! the disk.

use crate::background::{Background, Complaints};
use crate::place::{Place, cannot_write, unusable};
use pagefold_text::exit::Exit;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct MetricsFile(Place);

impl MetricsFile {
    /// Checks that we can write the file, and that no other user can redirect our writes.
    ///
    /// # Errors
    /// We can't use this path, or other users could redirect our writes. The exit code is 2.
    pub fn open(path: &Path) -> Result<Self, Exit> {
        checked(path).map(Self).map_err(|why| unusable("the metrics file", path, &why))
    }

    fn write(&self, text: &str) -> Result<(), String> {
        let replaced = self.0.replace(0o644, |file: &mut File| {
            file.set_permissions(Permissions::from_mode(0o644))?;
            file.write_all(text.as_bytes())
        });
        replaced.map_err(|error| cannot_write("the metrics file", &self.0.path, &error))
    }

    /// Starts a thread that writes the file. Dropping the result removes the file.
    pub fn start(
        self,
        interval: Duration,
        mut page: impl FnMut() -> Result<Arc<str>, String> + Send + 'static,
    ) -> io::Result<Background<()>> {
        Background::start("metrics file", move |end| {
            let mut complaints = Complaints::default();
            let mut pause = Duration::ZERO;
            while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = interval;
                // A run that is ending, or hasn't finished its cycle in time, provides no page.
                let Ok(text) = page() else { continue };
                complaints.hear(self.write(&text));
            }
            let _ = fs::remove_file(&self.0.path);
        })
    }
}

/// Checks that we can write a file at `path`. The error has advice.
fn checked(path: &Path) -> Result<Place, String> {
    let place = Place::of_regular(path)?;
    let advice = "name a file in a directory that only root can write";
    place.check().map_err(|error| format!("cannot be written: {error}; {advice}"))?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_testkit::wait_until;
    use pagefold_text::exit;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_file_is_replaced_and_removed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.prom");
        let victim = dir.path().join("victim");
        fs::write(&victim, "as it was").unwrap();
        // A link lies where we create the new file: we must remove the link and not follow it.
        symlink(&victim, dir.path().join(".m.prom.new")).unwrap();
        let file = MetricsFile::open(&path).unwrap();
        assert!(!path.exists());
        symlink(&victim, dir.path().join(".m.prom.new")).unwrap();
        let mut count = 0;
        let page = move || {
            count += 1;
            if count == 2 { Err("not now; later".to_owned()) } else { Ok(Arc::from(format!("page {count}\n"))) }
        };
        let writer = file.start(Duration::from_millis(5), page).unwrap();
        let text = || fs::read_to_string(&path).unwrap_or_default();
        wait_until("pages are written", || {
            text().strip_prefix("page ").is_some_and(|rest| rest.trim().parse::<u32>().unwrap() > 2)
        });
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "as it was");
        drop(writer);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1, "only the victim is left");
    }

    #[test]
    fn what_cannot_be_written_safely_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path, says: &str| {
            let error = MetricsFile::open(path).unwrap_err();
            assert_eq!(error.code, exit::USAGE);
            assert!(error.line.contains(says) && error.line.contains("; ") && !error.line.contains('\n'), "{error}");
        };
        refused(&dir.path().join("none/m.prom"), "cannot be created");
        fs::create_dir(dir.path().join("directory")).unwrap();
        refused(&dir.path().join("directory"), "is not a regular file");
        refused(Path::new("/"), "has no name");
        symlink("/etc/passwd", dir.path().join("link")).unwrap();
        refused(&dir.path().join("link"), "is not a regular file");
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        refused(&open.join("m.prom"), "would be in a directory that other users may write");
        fs::create_dir(dir.path().join(".m.new")).unwrap();
        refused(&dir.path().join("m"), "cannot be written");
    }
}
