//! Emulated machines, booted from a kernel and an image with a few programs. We emulate because hardware virtualization
//! isn't available everywhere.

use crate::{binaries::victim_binary, pagefold::output_of, skip};
use pagefold_programs::emulator::{Emulator, Image, kernel_for};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The programs and files that we need besides the ones built here.
#[derive(Debug)]
pub struct Tools {
    emulator: Emulator,
    kernel: PathBuf,
}

impl Tools {
    /// Finds the tools, and the kernel that `scripts/guest-kernel PURPOSE` unpacks. If one is missing, reports that and
    /// returns `None`.
    #[track_caller]
    pub fn find(purpose: &str) -> Option<Self> {
        kernel_for(purpose).map_err(skip::skip).ok().and_then(Self::with_kernel)
    }

    /// Like [`Self::find`], with this kernel.
    #[track_caller]
    pub fn with_kernel(kernel: PathBuf) -> Option<Self> {
        Emulator::find().map(|emulator| Self { emulator, kernel }).map_err(skip::skip).ok()
    }

    /// An initial file system with `guest_init` as `/init`, these programs in `/bin`, their libraries, and these files.
    pub fn image(&self, programs: &[(&str, &Path)], files: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let scratch = tempfile::tempdir().unwrap();
        let image = self.emulator.image(scratch.path().join("root"));
        put_stripped(&image, &victim_binary("guest_init"), "init");
        for (name, program) in programs {
            put_stripped(&image, program, &format!("bin/{name}"));
        }
        for (path, content) in files {
            fs::write(image.path(path), content).unwrap();
        }
        let packed = scratch.path().join("image");
        image.pack(&packed).unwrap();
        fs::read(packed).unwrap()
    }
}

/// Puts a program into an image, without its debugging information, which would take up most of the space.
fn put_stripped(image: &Image, program: &Path, to: &str) {
    image.put_program(program, to).unwrap();
    output_of(Command::new("strip").arg(image.path(to)));
}

/// What remains of a machine when it has ended.
#[derive(Debug)]
pub struct GuestEnded {
    pub status: String,
    /// The output on its first serial port: the kernel's and the programs' messages.
    pub console: String,
    /// The output on its second serial port.
    pub results: String,
    pub took: Duration,
}

/// Runs a machine until it ends, for at most `limit`. `machine` completes the emulator's command. We run only one
/// machine at a time, because each uses a processor and much memory.
pub fn run_guest(tools: &Tools, image: &[u8], limit: Duration, machine: impl FnOnce(&mut Command)) -> GuestEnded {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("image"), image).unwrap();
    let began = Instant::now();
    let mut command = tools.emulator.machine(dir.path(), &tools.kernel, 1).unwrap();
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
