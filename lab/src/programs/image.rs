//! The initial file systems of emulated machines.

use super::libraries;
use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory that becomes an initramfs.
#[derive(Debug)]
pub struct Image {
    busybox: PathBuf,
    root: PathBuf,
}

impl Image {
    /// Begins an image in a new directory: busybox, the script that the kernel starts, and empty directories.
    pub fn begin(busybox: &Path, root: PathBuf, init: &str, dirs: &[&str]) -> anyhow::Result<Self> {
        let image = Self { busybox: busybox.to_owned(), root };
        image.put(busybox, "bin/busybox")?;
        dirs.iter().try_for_each(|dir| fs::create_dir_all(image.path(dir)))?;
        fs::write(image.path("init"), init)?;
        fs::set_permissions(image.path("init"), fs::Permissions::from_mode(0o755))?;
        Ok(image)
    }

    /// Where a path of the image is on this machine.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.root.join(inside.as_ref().strip_prefix("/").unwrap_or(inside.as_ref()))
    }

    /// Copies a file.
    pub fn put(&self, file: &Path, to: impl AsRef<Path>) -> anyhow::Result<()> {
        let to = self.path(to);
        fs::create_dir_all(to.parent().context("a file without a directory")?)?;
        fs::copy(file, &to).with_context(|| format!("{} to {}", file.display(), to.display()))?;
        Ok(())
    }

    /// Copies a program, and its libraries to the paths that they have here.
    pub fn put_program(&self, program: &Path, to: impl AsRef<Path>) -> anyhow::Result<()> {
        self.put(program, to)?;
        libraries(program)?.iter().try_for_each(|library| self.put(library, library))
    }

    /// Packs the image into a file and removes the directory.
    pub fn pack(self, to: &Path) -> anyhow::Result<()> {
        // Sorted, so that each directory precedes its contents.
        let status = Command::new(&self.busybox)
            .args(["sh", "-c", r#""$0" find . | "$0" sort | "$0" cpio -o -H newc"#])
            .arg(&self.busybox)
            .current_dir(&self.root)
            .stdout(File::create(to)?)
            .stderr(Stdio::null())
            .status()
            .context("busybox cpio")?;
        ensure!(status.success(), "busybox cpio ended with {status}");
        Ok(fs::remove_dir_all(self.root)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_copied_with_their_libraries() {
        let root = tempfile::tempdir().unwrap();
        let image = Image { busybox: PathBuf::new(), root: root.path().to_owned() };
        image.put_program(Path::new("/bin/sh"), "/bin/sh").unwrap();
        assert!(root.path().join("bin/sh").exists());
        assert!(root.path().join("lib64/ld-linux-x86-64.so.2").exists());
        let found = libraries(&std::env::current_exe().unwrap()).unwrap();
        assert!(found.iter().any(|path| path.to_string_lossy().contains("libc.so")), "{found:?}");
    }
}
