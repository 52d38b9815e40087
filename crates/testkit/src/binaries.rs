//! Cargo gives a test the paths of its own package's binaries only, and `cargo test --test NAME` builds no others. So
//! we build the workspace's binaries on demand, once per test process, with the profile of the running test. We build
//! all of them: if we selected packages, Cargo would build their dependencies again with other features.

use crate::pagefold::output_of;
use std::fs::{self, Permissions};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Once, OnceLock};

/// The `pagefold` under test.
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| binary("pagefold", "pagefold"));
    &PROGRAM
}

/// A victim: a binary of this crate.
pub fn victim_binary(name: &str) -> PathBuf {
    binary(env!("CARGO_PKG_NAME"), name)
}

/// A copy of a program under another name, which every user may run. Dereferences to its path; removed when dropped.
pub struct ProgramCopy {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl ProgramCopy {
    pub fn of(program: &Path, name: &str) -> Self {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join(name);
        // Another process copies the file. If we had it open for writing when another test forks, the child would keep
        // it busy.
        output_of(Command::new("cp").arg(program).arg(&path));
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        Self { _dir: dir, path }
    }

    /// A copy of the program `holder` under a name that no other program has.
    pub fn unique() -> Self {
        Self::of(&victim_binary("holder"), &format!("pagefold-test-{}", std::process::id()))
    }

    /// The path of the copy as an argument.
    pub fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

impl Deref for ProgramCopy {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

/// A binary of a package in this workspace.
pub fn binary(package: &'static str, name: &str) -> PathBuf {
    static BUILT: Once = Once::new();
    // In an emulated machine this variable names the directory of the programs.
    if let Some(dir) = std::env::var_os("PAGEFOLD_PROGRAMS") {
        return Path::new(&dir).join(name);
    }
    // Cargo has already built the binaries of the test's own package.
    if std::env::var("CARGO_PKG_NAME").as_deref() != Ok(package) {
        BUILT.call_once(build);
    }
    let path = profile_dir().join(name);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

fn build() {
    let dir = profile_dir();
    let profile = dir.file_name().and_then(|name| name.to_str()).expect("a profile's directory");
    let profile = if profile == "debug" { "dev" } else { profile };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let status = Command::new(cargo)
        // We use the Makefile's arguments, so that Cargo builds nothing again.
        .args(["build", "--quiet", "--locked", "--workspace", "--features", "live", "--bins"])
        .args(["--profile", profile, "--target-dir"])
        .arg(dir.parent().expect("a target directory"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(status.as_ref().is_ok_and(std::process::ExitStatus::success), "cargo build: {status:?}");
}

/// `target/PROFILE`, if the running test's executable is `target/PROFILE/deps/NAME-HASH`.
fn profile_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let own = std::env::current_exe().expect("the test's executable");
        own.parent().and_then(Path::parent).expect("target/PROFILE/deps").to_owned()
    })
}
