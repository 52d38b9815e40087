//! A test's own mount namespaces, and file systems that we can freeze.

use crate::pagefold::output_of;
use crate::process::Script;
use crate::skip::skip;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

/// A mount namespace, and a directory to use in it. A shell keeps the namespace alive until we drop this.
pub struct Namespace {
    shell: Script,
    pub dir: tempfile::TempDir,
}

impl Namespace {
    /// Runs a shell script in a new namespace, in an empty directory. If the script fails, reports `otherwise` and
    /// returns `None`.
    #[track_caller]
    pub fn make(script: &str, otherwise: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &format!("{script} && echo ready && read x")]).current_dir(dir.path());
        let mut shell = Script::of(&mut command);
        if shell.line() != "ready" {
            skip(otherwise);
            return None;
        }
        Some(Self { shell, dir })
    }

    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.shell.pid().to_string(), "-m"]).arg(program);
        command
    }

    /// Runs this in the namespace, on a thread of its own. Threads that it starts stay there.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/mnt", self.shell.pid())).unwrap();
        let enter = move || {
            // SAFETY: no memory is passed, and the descriptor is open. Other threads keep their namespace.
            unsafe {
                assert_eq!(libc::unshare(libc::CLONE_FS), 0);
                assert_eq!(libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNS), 0);
            }
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    /// The root of the namespace's file systems, as seen from outside.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.shell.pid()))
    }
}

/// A file system in a mount namespace.
pub struct Disk {
    pub namespace: Namespace,
    pub mount: String,
}

/// While this exists, writes to the file system block. So drop this before you wait for a writer.
pub struct Frozen<'a>(&'a Disk);

impl Disk {
    /// Mounts the file system. If we can't, reports why and returns `None`.
    #[track_caller]
    pub fn mount() -> Option<Self> {
        let script = "truncate -s 16M img && mkfs.ext4 -q -F img && mkdir mnt && mount -o loop img mnt";
        let namespace = Namespace::make(script, "no ext4 image can be mounted on a loop device")?;
        let mount = namespace.dir.path().join("mnt").to_str().unwrap().to_owned();
        Some(Self { namespace, mount })
    }

    pub fn freeze(&self) -> Frozen<'_> {
        output_of(&mut self.fsfreeze(true));
        Frozen(self)
    }

    fn fsfreeze(&self, frozen: bool) -> Command {
        let mut command = self.namespace.command("fsfreeze");
        command.args([if frozen { "-f" } else { "-u" }, &self.mount]);
        command
    }

    /// The content of a file; empty if there's no such file.
    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(format!("{}{path}", self.namespace.root().display())).unwrap_or_default()
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        output_of(&mut self.0.fsfreeze(false));
    }
}
