//! Emulated machines, booted from a kernel and an image with a few programs. Emulated, because hardware virtualization is not
//! available everywhere.

use crate::{binaries::victim_binary, skip};
use cpio::newc::{Builder, ModeFileType, trailer};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Programs and files that are needed beside those built here.
#[derive(Debug)]
pub struct Tools {
    qemu: PathBuf,
    setpriv: PathBuf,
    pub kernel: PathBuf,
}

impl Tools {
    /// Finds them, and the kernel that `scripts/guest-kernel PURPOSE` unpacks. `None`, with the reason reported, if one is
    /// missing.
    #[track_caller]
    pub fn find(purpose: &str) -> Option<Self> {
        Self::kernel_for(purpose).and_then(Self::try_with).map_err(skip::skip).ok()
    }

    /// The same for this kernel.
    #[track_caller]
    pub fn with_kernel(kernel: PathBuf) -> Option<Self> {
        Self::try_with(kernel).map_err(skip::skip).ok()
    }

    fn kernel_for(purpose: &str) -> Result<PathBuf, String> {
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
        let kernel = cache.ok_or("no home directory")?.join("pagefold").join(purpose).join("vmlinuz");
        if !kernel.exists() {
            return Err(format!("there is no {}; scripts/guest-kernel {purpose} puts one there", kernel.display()));
        }
        Ok(kernel)
    }

    fn try_with(kernel: PathBuf) -> Result<Self, String> {
        let program = |name: &str| {
            let path = env::var_os("PATH").unwrap_or_default();
            let found = env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.exists());
            found.ok_or(format!("there is no {name}"))
        };
        Ok(Self { qemu: program("qemu-system-x86_64")?, setpriv: program("setpriv")?, kernel })
    }

    /// A machine, as yet without processors, memory and kernel parameters.
    pub fn qemu(&self, image: &Path, console: &Path, results: &Path) -> Command {
        // Ends the guest if the test is killed.
        let mut command = Command::new(&self.setpriv);
        command.args(["--pdeathsig", "KILL"]).arg(&self.qemu);
        // The guest's memory is not for the host's KSM, which other tests use.
        command.args(["-machine", "q35,mem-merge=off"]);
        // The guest's clock counts instructions: its time does not depend on how busy this machine is, and waiting in the
        // guest takes no time here.
        command.args(["-accel", "tcg,thread=single", "-icount", "shift=1,sleep=off"]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(["-chardev", &format!("file,id=console,path={}", console.display())]);
        command.args(["-chardev", &format!("file,id=results,path={}", results.display())]);
        command.args(["-serial", "chardev:console", "-serial", "chardev:results"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(image);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

/// What a machine left when it ended.
#[derive(Debug)]
pub struct GuestEnded {
    /// How it ended.
    pub status: String,
    /// What it wrote to its first serial port: the kernel's and the programs' messages.
    pub console: String,
    /// What it wrote to its second serial port.
    pub results: String,
    pub took: Duration,
}

/// Runs a machine until it ends, or for `limit`. `machine` completes its command. One at a time: each uses a processor and
/// much memory.
pub fn run_guest(tools: &Tools, image: &[u8], limit: Duration, machine: impl FnOnce(&mut Command)) -> GuestEnded {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("image"), image).unwrap();
    let began = Instant::now();
    let mut command = tools.qemu(&at("image"), &at("console"), &at("results"));
    machine(&mut command);
    let mut guest = command.spawn().unwrap();
    let status = loop {
        if let Some(status) = guest.try_wait().unwrap() {
            break status.to_string();
        }
        if began.elapsed() > limit {
            guest.kill().unwrap();
            guest.wait().unwrap();
            break format!("not done after {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let read = |name: &str| String::from_utf8_lossy(&fs::read(at(name)).unwrap_or_default()).into_owned();
    GuestEnded { status, console: read("console"), results: read("results"), took: began.elapsed() }
}

/// An initial file system with `numa_guest` as `/init`, these programs in `/bin`, their libraries, and these files.
pub fn image(programs: &[(&str, &Path)], mut files: Vec<(String, Vec<u8>)>) -> Vec<u8> {
    let scratch = tempfile::tempdir().unwrap();
    let init = victim_binary("numa_guest");
    let programs = programs.iter().map(|&(name, path)| (format!("/bin/{name}"), path));
    let programs: Vec<(String, PathBuf)> = [("/init".to_owned(), &*init)]
        .into_iter()
        .chain(programs)
        .map(|(name, path)| (name, stripped(path, scratch.path())))
        .collect();
    for library in programs.iter().flat_map(|(_, program)| libraries(program)).collect::<BTreeSet<_>>() {
        files.push((library.clone(), fs::read(&library).unwrap()));
    }
    files.extend(programs.into_iter().map(|(name, program)| (name, fs::read(program).unwrap())));

    let dirs: BTreeSet<String> = files
        .iter()
        .flat_map(|(path, _)| Path::new(path).ancestors().skip(1))
        .map(|dir| dir.display().to_string())
        .filter(|dir| dir != "/")
        .collect();
    // Sorted, so that each directory precedes its contents.
    let dirs = dirs.into_iter().map(|dir| (dir, ModeFileType::Directory, Vec::new()));
    let files = files.into_iter().map(|(path, content)| (path, ModeFileType::Regular, content));
    let mut image = Vec::new();
    for (number, (path, kind, content)) in (1..).zip(dirs.chain(files)) {
        let entry = Builder::new(&path[1..]).ino(number).mode(0o755).set_mode_file_type(kind);
        let mut entry = entry.write(&mut image, u32::try_from(content.len()).unwrap());
        entry.write_all(&content).unwrap();
        entry.finish().unwrap();
    }
    trailer(&mut image).unwrap();
    image
}

/// A copy without debugging information, which is most of it.
fn stripped(program: &Path, scratch: &Path) -> PathBuf {
    let copy = scratch.join(program.file_name().unwrap());
    let done = Command::new("strip").arg("-o").arg(&copy).arg(program).status().expect("strip, of binutils");
    assert!(done.success(), "strip {}: {done}", program.display());
    copy
}

/// The shared libraries of a program, as the loader finds them here.
fn libraries(program: &Path) -> Vec<String> {
    let output = Command::new("ldd").arg(program).output().expect("ldd");
    let text = String::from_utf8(output.stdout).unwrap();
    let path = |line: &str| line.split_ascii_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    let found: Vec<String> = text.lines().filter_map(path).collect();
    assert!(output.status.success() && !found.is_empty(), "ldd {}: {text}", program.display());
    found
}
