//! Names a cgroup as its administrators do: a virtual machine, a container, a pod, a systemd unit.
//!
//! We only look at the path. Formats: systemd's escapes (systemd-escape(1)); libvirt's
//! `machine-qemu\x2dID\x2dNAME.scope`; Proxmox VE's `qemu.slice/VMID.scope` and `lxc/CTID`; `docker-ID.scope`,
//! `cri-containerd-ID.scope`, `crio-ID.scope`, `libpod-ID.scope` and, with the cgroupfs driver, `docker/ID`; the
//! kubelet's `...podUID.slice` and `kubepods/.../podUID`.

use pagefold_procmem::cgroup::parse_cgroups;
use pagefold_procmem::process::Process;
use pagefold_text::escape::printable;
use std::fmt;

/// The container tools show this many digits of an identifier.
const SHORT_ID: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    /// A virtual machine.
    Vm,
    /// A Kubernetes pod.
    Pod,
    Container,
    /// A systemd unit, or any other cgroup.
    Unit,
}

/// The workload of a process. Displays as `vm web1`, `pod 6c2f…`, `nginx.service`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Workload {
    pub kind: WorkloadKind,
    /// Its name, safe to print.
    pub name: String,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            WorkloadKind::Vm => "vm ",
            WorkloadKind::Pod => "pod ",
            WorkloadKind::Container => "container ",
            WorkloadKind::Unit => "",
        })?;
        f.write_str(&self.name)
    }
}

/// The workload of the process with this pid. `None` for the root cgroup, and for a process that has ended.
pub fn workload_of(pid: i32) -> Option<Workload> {
    workload_of_process(&Process::open(pid).ok()?)
}

/// The workload of this process.
pub fn workload_of_process(process: &Process) -> Option<Workload> {
    let text = process.read_file("cgroup").ok()?;
    let cgroups = parse_cgroups(&text);
    // Where version 1 is in use, systemd's own hierarchy says most, or else the deepest one.
    let longest = cgroups.iter().max_by_key(|cgroup| (cgroup.controllers.is_empty(), cgroup.path.matches('/').count()));
    let used = cgroups.iter().find(|cgroup| cgroup.controllers == "name=systemd").or(longest)?;
    let found = name_of(&used.path)?;
    Some(Workload { name: printable(found.name.as_bytes()), ..found })
}

/// The name of a cgroup's virtual machine.
pub(super) fn guest_of(path: &str) -> Option<String> {
    match name_of(path)? {
        Workload { kind: WorkloadKind::Vm, name } => Some(name),
        _ => None,
    }
}

fn name_of(path: &str) -> Option<Workload> {
    const KINDS: [fn(&str, &str) -> Option<Workload>; 3] = [pod, machine, container];
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    for kind in KINDS {
        let mut parent = "";
        for part in &parts {
            if let Some(found) = kind(parent, part) {
                return Some(found);
            }
            parent = part;
        }
    }
    unit(&parts)
}

fn workload_if(is_valid: bool, kind: WorkloadKind, name: &str) -> Option<Workload> {
    if is_valid { Some(Workload { kind, name: name.to_owned() }) } else { None }
}

fn pod(_: &str, part: &str) -> Option<Workload> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let uid = match part.strip_prefix("pod") {
        Some(uid) => uid,
        None if part.starts_with("kubepods") => part.rsplit_once("-pod")?.1,
        None => return None,
    };
    // systemd's escape of a dash in a slice would mean another level.
    let uid = uid.replace('_', "-");
    let is_uid = uid.len() >= 32 && uid.chars().all(|digit| digit.is_ascii_hexdigit() || digit == '-');
    workload_if(is_uid, WorkloadKind::Pod, &uid)
}

fn machine(parent: &str, part: &str) -> Option<Workload> {
    if parent == "qemu.slice" {
        let id = part.strip_suffix(".scope")?;
        return workload_if(is_number(id), WorkloadKind::Vm, id);
    }
    if parent == "lxc" && is_number(part) {
        return workload_if(true, WorkloadKind::Container, part);
    }
    let name = unescaped(part.strip_prefix("machine-")?.strip_suffix(".scope")?);
    let (id, name) = name.strip_prefix("qemu-")?.split_once('-')?;
    workload_if(is_number(id), WorkloadKind::Vm, name)
}

pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

fn container(parent: &str, part: &str) -> Option<Workload> {
    let mut id = if parent == "docker" { part } else { "" };
    if let Some(name) = part.strip_suffix(".scope") {
        for prefix in ["docker-", "cri-containerd-", "crio-", "libpod-", "nerdctl-"] {
            id = name.strip_prefix(prefix).unwrap_or(id);
        }
    }
    let is_id = id.len() > SHORT_ID && id.bytes().all(|digit| digit.is_ascii_hexdigit());
    workload_if(is_id, WorkloadKind::Container, id.get(..SHORT_ID)?)
}

/// The innermost service or scope, else the innermost cgroup.
fn unit(parts: &[&str]) -> Option<Workload> {
    let mut innermost = parts.iter().rev();
    let unit = innermost.find(|part| matches!(part.rsplit_once('.'), Some((_, "service" | "scope"))));
    workload_if(true, WorkloadKind::Unit, &unescaped(unit.or(parts.last())?))
}

/// Undoes systemd's escapes of single characters (`\x2d`).
fn unescaped(text: &str) -> String {
    let mut plain = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        if let Some(code) = escaped(rest) {
            plain.push(code);
            rest = &rest[4..];
        } else {
            plain.push(byte);
            rest = tail;
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// The character that an escape at the beginning stands for.
fn escaped(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"\\x")?.get(..2)?;
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_have_the_names_that_operators_use() {
        let id = "3f0c".repeat(16);
        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        for (path, name) in [
            (r"/machine.slice/machine-qemu\x2d12\x2dweb\x2d1.scope/libvirt/emulator", "vm web-1"),
            ("/qemu.slice/104.scope", "vm 104"),
            ("/lxc/201/ns/system.slice/cron.service", "container 201"),
            (&format!("/system.slice/docker-{id}.scope"), "container 3f0c3f0c3f0c"),
            (&format!("/docker/{id}"), "container 3f0c3f0c3f0c"),
            (&format!("/user.slice/user-1000.slice/libpod-{id}.scope/container"), "container 3f0c3f0c3f0c"),
            (
                &format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-{id}.scope",
                    uid.replace('-', "_")
                ),
                &format!("pod {uid}"),
            ),
            (&format!("/kubepods/besteffort/pod{uid}/{id}"), &format!("pod {uid}")),
            ("/system.slice/nginx.service", "nginx.service"),
            (r"/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.service", "app-x.service"),
            ("/batch/worker", "worker"),
        ] {
            assert_eq!(name_of(path).map(|found| found.to_string()).as_deref(), Some(name), "{path}");
        }
        assert_eq!(name_of("/"), None);
    }

    #[test]
    fn no_path_is_trusted() {
        for path in [r"/a\x", r"/machine-qemu\x2d.scope", "/qemu.slice/x.scope", "/podpod", "/docker/", r"/\xff\x1b"] {
            let found = name_of(path);
            assert!(found.is_none_or(|found| found.kind == WorkloadKind::Unit), "{path}");
        }
    }
}
