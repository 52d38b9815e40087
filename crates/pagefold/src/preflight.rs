//! Checks that `run` and `unmerge` make before they touch anything, with the exit codes and advice for refusals.

use crate::config::settings::MechanismChoice;
use anyhow::{Context, Result};
use pagefold_engine::placement::policy::Placement;
use pagefold_host::os::namespaces::enter_cgroups_of_init;
use pagefold_inject::{InjectError, Injector};
use pagefold_ksm::lease::TakeError;
use pagefold_ksm::lock::{self, LOCK_PATH, LockError};
use pagefold_ksm::request::{self, RequestDevice, RequestError};
use pagefold_ksm::{KSM_ROOT, Ksm, KsmError};
use pagefold_procmem::os::fields::number;
use pagefold_procmem::os::numa::Topology;
use pagefold_procmem::os::peer::own_uid;
use pagefold_procmem::os::privileges::{
    Capability, PLACING, PrivilegeError, READING, REQUESTING, keep_from_dumps, keep_only, missing,
};
use pagefold_procmem::os::sandbox::forbid_calls;
use pagefold_text::exit::{self, Exit};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// The hidden subcommand of the injector process.
pub const INJECTOR: &str = "injector";

pub fn ksm() -> Result<Arc<Ksm>, Exit> {
    Ksm::open(Path::new(KSM_ROOT)).map(Arc::new).map_err(|error| match &error {
        KsmError::Absent { .. } => {
            Exit::new(exit::NO_KERNEL_SUPPORT, "this kernel has no KSM; use one built with CONFIG_KSM")
        }
        KsmError::Denied { .. } => Exit::new(exit::NOT_PERMITTED, format!("{error}; run as root")),
        _ => Exit::new(exit::FAILURE, error.to_string()),
    })
}

/// Checks that the user is root. `purpose` is the work that needs root.
pub fn need_root(purpose: &str) -> Result<(), Exit> {
    if own_uid() == 0 {
        return Ok(());
    }
    Err(Exit::new(exit::NOT_PERMITTED, format!("{purpose} needs root; run it with sudo")))
}

/// Checks that we have the capabilities to read and mark other processes (in most containers root lacks some), and
/// enters the host's cgroup namespace.
pub fn need_rights(purpose: &str) -> Result<(), Exit> {
    need_root(purpose)?;
    if fs::read("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim_ascii() == b"3") {
        let why = "nobody may read other programs' memory while kernel.yama.ptrace_scope is 3";
        return Err(Exit::new(exit::NOT_PERMITTED, format!("{why}; boot with a lower value")));
    }
    let missing = missing(&READING).map_err(|error| refused(&error))?;
    if missing.is_empty() {
        see_cgroups();
        return Ok(());
    }
    let list: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let list = list.join(", ");
    let line = format!("{purpose} needs {list}, which this process lacks; grant it (for a container, with --cap-add)");
    Err(Exit::new(exit::NOT_PERMITTED, line))
}

/// Enters init's cgroup namespace, to see other processes' cgroups by their paths on the host. If that fails, we see
/// the paths relative to our own namespace.
pub fn see_cgroups() {
    enter_cgroups_of_init().ok();
}

/// Opens /dev/ksm, the device that merges pages on request. `None` if ksmd should find and merge pages instead.
///
/// # Errors
/// The user chose merging on request, and it isn't possible.
pub fn request_device(choice: MechanismChoice, placement: Placement, ksm: &Ksm) -> Result<Option<RequestDevice>, Exit> {
    request_device_at(Path::new(request::DEVICE), choice, placement, ksm)
}

fn request_device_at(
    device: &Path,
    choice: MechanismChoice,
    placement: Placement,
    ksm: &Ksm,
) -> Result<Option<RequestDevice>, Exit> {
    if choice == MechanismChoice::Ksmd {
        return Ok(None);
    }
    let opened = RequestDevice::open(device);
    let is_absent = matches!(opened, Err(RequestError::Absent { .. }));
    let possible = opened.map_err(|error| no_request(&error)).and_then(|device| {
        may_request(placement, ksm)?;
        Ok(device)
    });
    match (choice, possible) {
        (_, Ok(device)) => Ok(Some(device)),
        (MechanismChoice::Request, Err(exit)) => Err(exit),
        (_, Err(exit)) => {
            // Most kernels have no such device, so its absence isn't worth a message.
            if !is_absent {
                complain!("pages are merged by ksmd, not on request: {exit}");
            }
            Ok(None)
        }
    }
}

fn no_request(error: &RequestError) -> Exit {
    let (code, advice) = match error {
        RequestError::Absent { .. } | RequestError::Other { .. } | RequestError::Version { .. } => {
            (exit::NO_KERNEL_SUPPORT, "use --mechanism ksmd, or see pagefold doctor")
        }
        RequestError::Denied { .. } => (exit::NOT_PERMITTED, "run as root, and allow the service this device"),
        RequestError::Io { .. } => (exit::FAILURE, "use --mechanism ksmd"),
    };
    Exit::new(code, format!("{error}; {advice}"))
}

/// Checks for reasons why the kernel would refuse all requests to merge.
fn may_request(placement: Placement, ksm: &Ksm) -> Result<(), Exit> {
    let lacking = missing(&[REQUESTING]).map_err(|error| refused(&error))?;
    if !lacking.is_empty() {
        let line = format!("merging on request needs {REQUESTING}, which this process lacks; grant it");
        return Err(Exit::new(exit::NOT_PERMITTED, line));
    }
    if placement == Placement::LocalOnly && Topology::of_machine().is_ok_and(|nodes| nodes.is_some()) {
        let line = "local-only is a setting of ksmd, which merging on request must not change; use --mechanism ksmd";
        return Err(Exit::new(exit::USAGE, line));
    }
    let knobs = ksm.knobs().map_err(|error| Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor")))?;
    if knobs.run == 2 {
        let line = "the kernel does not merge on request while /sys/kernel/mm/ksm/run is 2, which unmerges everything; \
                    write 0 to it";
        return Err(Exit::new(exit::KSM_TAKEN, line));
    }
    Ok(())
}

/// Permanently gives up the system calls that we don't need, and all capabilities except `more` and those for reading
/// other processes and placing their merged pages. Call this before starting any thread and before reading another
/// process, but after starting the injector, which would inherit these limits.
pub fn give_up_rights(more: &[Capability]) -> Result<(), Exit> {
    keep_from_dumps();
    let mut kept = [&READING[..], more].concat();
    // With a single memory node there's nothing to place.
    if Topology::of_machine().is_ok_and(|nodes| nodes.is_some()) {
        kept.push(PLACING);
        if missing(&[PLACING]).is_ok_and(|missing| !missing.is_empty()) {
            complain!("merged pages stay on the memory node where ksmd leaves them: {PLACING} is missing");
        }
    }
    keep_only(&kept).map_err(|error| refused(&error))?;
    if let Err(error) = forbid_calls() {
        complain!("this process has no seccomp filter: {error}; use a kernel with CONFIG_SECCOMP_FILTER");
    }
    Ok(())
}

fn refused(error: &PrivilegeError) -> Exit {
    Exit::new(exit::FAILURE, format!("{error}; see docs/privileges.md"))
}

/// Starts a process that starts the injector, and a new injector whenever one dies. Call before [`give_up_rights`].
pub fn injector() -> Result<Injector> {
    let is_filtered =
        fs::read("/proc/self/status").is_ok_and(|status| matches!(number(&status, "Seccomp"), Ok(1_u8..)));
    if is_filtered {
        complain!(
            "pagefold itself runs under a seccomp filter, so it can't mark programs that have one; run it outside the \
             container, or with seccomp=unconfined"
        );
    }
    Injector::keep_running(injector_command().arg("--starter")).context("cannot start the injector process")
}

pub fn injector_command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg(INJECTOR);
    command
}

/// Connects to the socket at `path`. The service manager starts an injector for each connection.
pub fn injector_at(path: &Path) -> Result<Injector, Exit> {
    let at = path.display();
    Injector::connect(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            let line = format!("no process listens at {at}; start pagefold-injector.socket, or omit --injector");
            Exit::new(exit::FAILURE, line)
        }
        ErrorKind::PermissionDenied => Exit::new(
            exit::NOT_PERMITTED,
            format!("cannot connect to the injector at {at}: {error}; make root the owner of that socket"),
        ),
        _ => Exit::new(
            exit::FAILURE,
            format!("cannot connect to the injector at {at}: {error}; see systemctl status pagefold-injector@*"),
        ),
    })
}

/// The exit code and advice if we can't take KSM over.
pub fn explain_take(error: &TakeError) -> Exit {
    let (code, advice) = match error {
        TakeError::Lock(LockError::Held { .. }) | TakeError::Busy { .. } => {
            (exit::KSM_TAKEN, "stop it first, or use it instead")
        }
        TakeError::InUse(_) => (exit::KSM_TAKEN, "stop that first: see pagefold doctor"),
        TakeError::Recovering => (exit::KSM_TAKEN, "try again later"),
        TakeError::Ksm(KsmError::Absent { .. }) => (exit::NO_KERNEL_SUPPORT, "use a kernel built with CONFIG_KSM"),
        TakeError::Ksm(KsmError::Denied { .. }) => (exit::NOT_PERMITTED, "run as root"),
        _ => (exit::FAILURE, "see pagefold doctor"),
    };
    Exit::new(code, format!("{error}; {advice}"))
}

/// The exit code for a failed injection.
pub fn inject_code(error: &InjectError) -> u8 {
    match error {
        InjectError::Vanished { .. } => exit::NO_SCOPE,
        InjectError::Denied { .. } | InjectError::Filtered { .. } => exit::NOT_PERMITTED,
        InjectError::WorkerGone
        | InjectError::WorkerLost { .. }
        | InjectError::WorkerSilent
        | InjectError::Protocol { .. }
        | InjectError::System { .. } => exit::FAILURE,
        _ => exit::REFUSED,
    }
}

/// Whether a pagefold process controls KSM, even if it doesn't answer requests. Always false for users who can't read
/// KSM's lock.
pub fn is_running() -> bool {
    lock::holder(Path::new(LOCK_PATH)).is_ok_and(|holder| holder.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exit code with which we refuse merging on request if `device` is this file.
    fn refusal(device: &Path) -> Option<u8> {
        let choose = |choice| {
            let root = pagefold_ksm::KSM_ROOT;
            let ksm = Ksm::open(Path::new(root)).ok()?;
            Some(request_device_at(device, choice, Placement::Fair, &ksm))
        };
        // These choices don't depend on the file.
        assert!(choose(MechanismChoice::Ksmd)?.unwrap().is_none());
        assert!(choose(MechanismChoice::Auto)?.unwrap().is_none());
        let exit = choose(MechanismChoice::Request)?.unwrap_err();
        assert!(!exit.line.contains('\n') && exit.line.contains("; "), "{exit}");
        Some(exit.code)
    }

    #[test]
    fn what_is_not_the_device_is_refused_or_left_for_ksmd() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for device in [&dir.path().join("none"), &file, Path::new("/dev/null")] {
            // A kernel without KSM has nothing to merge with.
            if let Some(code) = refusal(device) {
                assert_eq!(code, exit::NO_KERNEL_SUPPORT, "{}", device.display());
            }
        }
    }
}
