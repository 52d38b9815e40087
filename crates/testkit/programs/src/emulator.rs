//! Emulated machines: their emulator, their kernels and their initial file systems.
//!
//! We emulate because that also works without hardware virtualization. The guests' memory has the same contents.

use anyhow::{Context, ensure};
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const QEMU: &str = "qemu-system-x86_64";

/// The tools for every emulated machine.
#[derive(Clone, Debug)]
pub struct Emulator {
    qemu: PathBuf,
    setpriv: PathBuf,
    busybox: PathBuf,
}

impl Emulator {
    /// Finds the tools. The error names the packages to install.
    pub fn find() -> anyhow::Result<Self> {
        Ok(Self {
            qemu: need(QEMU, "qemu-system-x86")?,
            setpriv: need("setpriv", "util-linux")?,
            busybox: need("busybox", "busybox-static")?,
        })
    }

    pub fn path(&self) -> &Path {
        &self.qemu
    }

    /// Uses a copy of the emulator in a new directory. The emulator finds its modules and firmware relative to its own
    /// path.
    pub fn copied_to(&self, dir: &Path) -> anyhow::Result<Self> {
        let qemu = dir.join("bin").join(QEMU);
        fs::create_dir_all(dir.join("bin"))?;
        for shared in ["lib", "share"] {
            symlink(Path::new("/usr").join(shared), dir.join(shared))?;
        }
        fs::copy(&self.qemu, &qemu).with_context(|| qemu.display().to_string())?;
        Ok(Self { qemu, ..self.clone() })
    }

    /// Starts a machine in this directory. If we're killed, the machine wouldn't notice that its console is closed, so
    /// `setpriv` makes the kernel end it.
    pub fn command(&self, dir: &Path) -> Command {
        let mut command = Command::new(&self.setpriv);
        command.args(["--pdeathsig", "KILL"]).arg(&self.qemu).current_dir(dir);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command
    }

    /// A machine that boots a kernel and the file `image` of this directory, and writes the output on its two serial
    /// ports to the files `console` and `results`. The caller adds processors, memory and kernel parameters.
    ///
    /// Its clock counts instructions, 2^`shift` ns each, and skips idle time. So CPU times in the guest don't depend on
    /// our load, and its waiting takes us no time.
    pub fn machine(&self, dir: &Path, kernel: &Path, shift: u32) -> anyhow::Result<Command> {
        let mut command = self.command(dir);
        // This machine's own KSM shouldn't merge the guest's memory.
        command.args(["-machine", "q35,mem-merge=off", "-accel", "tcg,thread=single"]);
        command.args(["-icount", &format!("shift={shift},sleep=off")]);
        command.args(["-chardev", "file,id=console,path=console", "-chardev", "file,id=results,path=results"]);
        command.args(["-serial", "chardev:console", "-serial", "chardev:results", "-initrd", "image"]);
        command.arg("-kernel").arg(fs::canonicalize(kernel).with_context(|| kernel.display().to_string())?);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }

    /// An empty initial file system, which we put together in a new directory.
    pub fn image(&self, root: PathBuf) -> Image {
        Image { busybox: self.busybox.clone(), root }
    }
}

/// A directory that becomes an initramfs.
#[derive(Debug)]
pub struct Image {
    busybox: PathBuf,
    root: PathBuf,
}

impl Image {
    /// Puts busybox, the script that the kernel starts, and empty directories in it.
    pub fn with_init(self, script: &str, dirs: &[&str]) -> anyhow::Result<Self> {
        self.put(&self.busybox, "bin/busybox")?;
        for dir in dirs {
            fs::create_dir_all(self.path(dir))?;
        }
        fs::write(self.path("init"), script)?;
        fs::set_permissions(self.path("init"), fs::Permissions::from_mode(0o755))?;
        Ok(self)
    }

    /// The path of an image's file on this machine.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.root.join(inside.as_ref().strip_prefix("/").unwrap_or(inside.as_ref()))
    }

    pub fn put(&self, file: &Path, to: impl AsRef<Path>) -> anyhow::Result<()> {
        let to = self.path(to);
        fs::create_dir_all(to.parent().context("a file without a directory")?)?;
        fs::copy(file, &to).with_context(|| format!("{} to {}", file.display(), to.display()))?;
        Ok(())
    }

    /// Copies a program into the image, and its libraries to the same paths as here.
    pub fn put_program(&self, program: &Path, to: impl AsRef<Path>) -> anyhow::Result<()> {
        self.put(program, to)?;
        libraries(program)?.iter().try_for_each(|library| self.put(library, library))
    }

    /// Packs the image into a file, with root as the owner of everything. Removes the directory.
    pub fn pack(self, to: &Path) -> anyhow::Result<()> {
        // We sort, so that each directory precedes its contents.
        let status = Command::new(&self.busybox)
            .args(["sh", "-c", r#""$0" find . | "$0" sort | "$0" cpio -o -H newc -R 0:0"#])
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

/// The shared libraries that the loader finds for a program. None for a static program.
fn libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    // `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)` or `/lib64/ld-linux-x86-64.so.2 (0x...)`
    let text = String::from_utf8_lossy(&output.stdout);
    let mut libraries = Vec::new();
    for word in text.split_ascii_whitespace() {
        if word.starts_with('/') {
            libraries.push(PathBuf::from(word));
        }
    }
    Ok(libraries)
}

/// The directory where `scripts/guest-kernel` puts kernels, and `lab/scripts/wordpress` its image.
pub fn cache() -> anyhow::Result<PathBuf> {
    if let Some(cache) = env::var_os("XDG_CACHE_HOME") {
        return Ok(PathBuf::from(cache).join("pagefold"));
    }
    let home = env::var_os("HOME").context("no directory for unpacked kernels and images: set HOME")?;
    Ok(PathBuf::from(home).join(".cache/pagefold"))
}

/// Finds the kernel that `scripts/guest-kernel PURPOSE` unpacks.
pub fn kernel_for(purpose: &str) -> anyhow::Result<PathBuf> {
    let kernel = cache()?.join(purpose).join("vmlinuz");
    ensure!(kernel.exists(), "{} does not exist: run scripts/guest-kernel {purpose}", kernel.display());
    Ok(kernel)
}

/// Finds an executable on the search path or in the directories of servers, which aren't on every user's path.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let fallback = ["/usr/sbin", "/usr/bin", "/usr/local/bin", "/usr/libexec"].map(PathBuf::from);
    env::split_paths(&path).chain(fallback).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Finds an executable. The error names the packages to install.
pub fn need(name: &str, packages: &str) -> anyhow::Result<PathBuf> {
    find(name).with_context(|| format!("{name} is not installed: it is in the packages {packages} (Debian's names)"))
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

    #[test]
    fn a_missing_program_is_named() {
        assert!(find("sh").is_some());
        let error = need("no-such-server", "some-server-core").unwrap_err().to_string();
        assert!(error.contains("no-such-server") && error.contains("some-server-core"), "{error}");
    }
}
