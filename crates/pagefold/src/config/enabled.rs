//! The drop-in file of `pagefold enable` and `disable`: FILE.d/enabled.toml. Its only key, `enabled` in `[scope]`,
//! lists selectors in addition to those of the other files.

use crate::config::args::RunArgs;
use crate::config::options::Options;
use crate::config::ownership::shown;
use crate::config::settings::{Layer, Settings, additions, load, merged};
use crate::config::values::Value;
use crate::place::{Place, create_directory, is_there};
use pagefold_host::scope::{ScopeSpec, Selector};
use pagefold_ksm::lease::KsmPaths;
use pagefold_ksm::lock::{Lock, LockError};
use pagefold_text::exit::{self, Exit};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const NAME: &str = "enabled.toml";
/// How long we wait until another `enable` or `disable` has ended.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// We allow at most this many selectors, as we compare each with every process.
const MOST: usize = 1_000;

#[derive(Debug)]
pub struct EnabledFile {
    /// The configuration file that this one adds to.
    main: PathBuf,
    pub path: PathBuf,
    pub list: Vec<Selector>,
    /// All configuration files but this one.
    others: Vec<Layer>,
    created: Created,
    _lock: Option<Lock>,
}

/// Files and directories that we've created, oldest first. Dropping this removes them, except after
/// [`EnabledFile::keep`].
#[derive(Debug, Default)]
struct Created(Vec<PathBuf>);

impl Created {
    fn directory(&mut self, path: &Path) -> Result<(), String> {
        let was_there = path.exists();
        create_directory(path)?;
        if !was_there {
            self.0.push(path.to_owned());
        }
        Ok(())
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let removed = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
            // If somebody has put another file into FILE.d, we keep that directory and FILE.
            if removed.is_err() {
                break;
            }
        }
    }
}

impl EnabledFile {
    /// Reads the file if it exists. Until we drop the result, no other `enable` or `disable` can change the file. With
    /// `create`, we create the configuration file if there's none, since drop-ins without it aren't read. Dropping the
    /// result removes the files that we created, unless [`Self::keep`] was called.
    ///
    /// # Errors
    /// A configuration file is invalid, or not safely owned.
    pub fn open(main: &Path, create: bool) -> Result<Self, Exit> {
        let lock = KsmPaths::default().lock.with_file_name("enable.lock");
        let lock = Lock::take_within(&lock, LOCK_LIMIT).map_err(|error| match error {
            LockError::Held { .. } => {
                Exit::new(exit::FAILURE, "another pagefold enable or disable is running; try again later")
            }
            error => Exit::new(exit::FAILURE, format!("{error}; check /run/pagefold")),
        })?;
        let mut created = Created::default();
        if create {
            create_main(main, &mut created)
                .map_err(|why| Exit::new(exit::FAILURE, format!("{} {why}", shown(main))))?;
        }
        Ok(Self { created, _lock: Some(lock), ..Self::read(main)? })
    }

    fn read(main: &Path) -> Result<Self, Exit> {
        let path = additions(main).join(NAME);
        let mut list = Vec::new();
        let mut others = load(main)?;
        if let Some(at) = others.iter().position(|layer| layer.path == path) {
            let mut options = others.remove(at).options;
            list = options.enabled.take().unwrap_or_default();
            if options != Options::default() {
                let line = format!("{} has other settings, too; move them into another file beside it", shown(&path));
                return Err(Exit::new(exit::USAGE, line));
            }
        }
        Ok(Self { main: main.to_owned(), path, list, others, created: Created::default(), _lock: None })
    }

    /// Replaces the list, and returns the scope of all files. Changes nothing if the configuration would be
    /// invalid.
    ///
    /// # Errors
    /// The configuration would be invalid, or we can't write the file.
    pub fn set(&mut self, list: Vec<Selector>) -> Result<ScopeSpec, Exit> {
        let scope = self.check(&list)?;
        let written = if list.is_empty() { self.remove() } else { self.write(&list) };
        written.map_err(|why| Exit::new(exit::FAILURE, format!("{} {why}", shown(&self.path))))?;
        self.list = list;
        Ok(scope)
    }

    /// Keeps the files that we've created.
    pub fn keep(&mut self) {
        self.created.0.clear();
    }

    fn check(&self, list: &[Selector]) -> Result<ScopeSpec, Exit> {
        if list.len() > MOST {
            let line =
                format!("more than {MOST} selectors would be enabled; name a cgroup or a slice that contains them");
            return Err(Exit::new(exit::USAGE, line));
        }
        let mut options = merged(&self.others);
        if let Some(other) = self.others.iter().find(|layer| layer.options.enabled.is_some()) {
            let line = format!("{} sets \"enabled\" in [scope], too; remove that line", shown(&other.path));
            return Err(Exit::new(exit::USAGE, line));
        }
        options.enabled = Some(list.to_vec());
        let settings = Settings::of_options(&RunArgs::default(), Some(&self.main), options)?;
        Ok(settings.scope.spec())
    }

    fn write(&mut self, list: &[Selector]) -> Result<(), String> {
        if let Some(directory) = self.path.parent() {
            self.created.directory(directory)?;
        }
        let list = list.to_vec().written();
        let text = format!("# Written by pagefold enable and disable.\n[scope]\nenabled = {list}\n");
        replace(&self.path, &text)
    }

    fn remove(&self) -> Result<(), String> {
        if !self.path.exists() {
            return Ok(());
        }
        let place = Place::of(&self.path)?;
        place.remove().map_err(|error| format!("cannot be removed: {error}; run as root"))
    }
}

/// Creates the configuration file if there's none. Never replaces a file, nor a symbolic link whose target is missing.
fn create_main(path: &Path, created: &mut Created) -> Result<(), String> {
    if is_there(path) {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        created.directory(directory)?;
    }
    let place = Place::of(path)?;
    let fill = |mut file: File| {
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.write_all(b"# See pagefold.toml(5).\n")
    };
    let opened = File::create_new(&place.path).inspect(|_| created.0.push(place.path.clone()));
    opened.and_then(fill).map_err(|error| format!("cannot be created: {error}; run as root"))
}

fn replace(path: &Path, text: &str) -> Result<(), String> {
    let fill = |file: &mut File| {
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    Place::of(path)?.replace(0o644, fill).map_err(|error| format!("cannot be written: {error}; run as root"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn selector(kind: &str, name: &str) -> Selector {
        Selector::named(kind, name.to_owned()).unwrap()
    }

    /// An empty configuration file in a directory of its own.
    fn configuration() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("pagefold.toml");
        fs::write(&main, "").unwrap();
        (dir, main)
    }

    fn scope(main: &Path) -> String {
        Settings::from(&RunArgs::default(), Some(main)).unwrap().scope.to_string()
    }

    #[test]
    fn enabled_selectors_add_to_the_scope_until_they_are_disabled() {
        let (_dir, main) = configuration();
        fs::write(&main, "[scope]\nexes = [\"redis-server\"]\n").unwrap();
        let list =
            [selector("exe", "a, [\"b\\"), selector("cgroup", "/sys/fs/cgroup/web.slice"), selector("vm", "104")];
        let mut file = EnabledFile::read(&main).unwrap();
        file.set(list.to_vec()).unwrap();
        assert_eq!(fs::metadata(&file.path).unwrap().permissions().mode() & 0o7777, 0o644);
        let flags = "--cgroup /sys/fs/cgroup/web.slice --vm 104";
        assert_eq!(scope(&main), format!("--exe redis-server --exe 'a, [\"b\\' {flags}"));
        let mut file = EnabledFile::read(&main).unwrap();
        assert_eq!(file.list, list);
        file.set(list[1..2].to_vec()).unwrap();
        assert_eq!(scope(&main), "--exe redis-server --cgroup /sys/fs/cgroup/web.slice");
        file.set(Vec::new()).unwrap();
        file.set(Vec::new()).unwrap();
        assert!(!file.path.exists());
        assert_eq!(scope(&main), "--exe redis-server");
    }

    #[test]
    fn what_was_created_is_removed_again_unless_it_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("pagefold").join("pagefold.toml");
        let enable = || {
            let mut created = Created::default();
            create_main(&main, &mut created).unwrap();
            let mut file = EnabledFile { created, ..EnabledFile::read(&main).unwrap() };
            file.set(vec![selector("exe", "a")]).unwrap();
            file
        };
        let mut refused = enable();
        refused.set(Vec::new()).unwrap();
        drop(refused);
        assert!(!dir.path().join("pagefold").exists());
        // A list that wasn't undone stays in force.
        drop(enable());
        assert_eq!(scope(&main), "--exe a");
        let mut refused = EnabledFile::read(&main).unwrap();
        refused.set(Vec::new()).unwrap();
        drop(refused);
        assert!(additions(&main).exists(), "this call didn't create it");
        fs::remove_dir_all(dir.path().join("pagefold")).unwrap();
        let mut kept = enable();
        kept.keep();
        kept.set(Vec::new()).unwrap();
        drop(kept);
        assert!(main.exists() && additions(&main).exists());
    }

    #[test]
    fn the_file_is_not_written_if_the_configuration_is_or_would_be_invalid() {
        let (_dir, main) = configuration();
        let mut file = EnabledFile::read(&main).unwrap();
        let many = vec![selector("exe", "a"); MOST + 1];
        assert!(file.set(many).unwrap_err().line.contains("more than 1000"));
        let other = additions(&main).join("z.toml");
        fs::create_dir(additions(&main)).unwrap();
        fs::write(&other, "[scope]\nenabled = [\"exe b\"]\n").unwrap();
        let refused = EnabledFile::read(&main).unwrap().set(vec![selector("exe", "a")]).unwrap_err();
        assert!(refused.line.contains("z.toml sets \"enabled\""), "{refused}");
        fs::write(&other, "[scope]\nenabled = [\"program b\"]\n").unwrap();
        let refused = EnabledFile::read(&main).unwrap_err();
        assert!(refused.code == exit::USAGE && refused.line.contains("'program b'"), "{refused}");
        fs::remove_file(&other).unwrap();
        fs::write(&file.path, "[scope]\nenabled = []\nexes = [\"a\"]\n").unwrap();
        assert!(EnabledFile::read(&main).unwrap_err().line.contains("other settings"));
    }

    #[test]
    fn links_are_replaced_and_directories_of_others_refused() {
        let (dir, main) = configuration();
        let mut file = EnabledFile::read(&main).unwrap();
        let target = dir.path().join("target");
        fs::write(&target, "").unwrap();
        fs::create_dir(additions(&main)).unwrap();
        symlink(&target, &file.path).unwrap();
        file.set(vec![selector("exe", "a")]).unwrap();
        assert!(fs::symlink_metadata(&file.path).unwrap().is_file());
        assert_eq!(fs::read_to_string(&target).unwrap(), "");
        fs::set_permissions(additions(&main), Permissions::from_mode(0o777)).unwrap();
        assert!(EnabledFile::read(&main).unwrap_err().line.contains("other users may write"));
        assert!(file.set(Vec::new()).unwrap_err().line.contains("other users may write"));
    }
}
