//! Names a cgroup as its administrators do: a virtual machine, a container, a pod, a systemd unit.
//!
//! We take the names from the cgroup's path, and from the container engines' own files. Formats: systemd's escapes
//! (systemd-escape(1)); libvirt's `machine-qemu\x2dID\x2dNAME.scope`; Proxmox VE's `qemu.slice/VMID.scope` and
//! `lxc/CTID`; `docker-ID.scope`, `cri-containerd-ID.scope`, `crio-ID.scope`, `libpod-ID.scope` and, with the cgroupfs
//! driver, `docker/ID`; the kubelet's `...podUID.slice` and `kubepods/.../podUID`; LXC's `lxc.payload.NAME`.
//!
//! A path has several names: a container is in a pod, a service in a slice. Any of them selects the processes below.

use super::ProcessInfo;
use super::engine_names::EngineNames;
use super::selection::list_pids;
use pagefold_procmem::cgroup::{Cgroup, parse_cgroups};
use pagefold_procmem::process::Process;
use pagefold_text::escape::printable;
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// The container tools show this many digits of an identifier. With fewer digits, somebody who starts many containers
/// could get another container's digits.
const SHORT_ID: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    Vm,
    Pod,
    Container,
    /// A systemd unit, or any other cgroup.
    Unit,
}

impl WorkloadKind {
    const NAMES: [(&'static str, Self); 4] =
        [("unit", Self::Unit), ("vm", Self::Vm), ("container", Self::Container), ("pod", Self::Pod)];

    /// The kind that selectors call by this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Some(Self::NAMES.iter().find(|(other, _)| *other == name)?.1)
    }

    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// The workload of a process. Displays as `vm web1`, `pod 6c2f…`, `nginx.service`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Workload {
    pub kind: WorkloadKind,
    pub name: String,
}

impl Workload {
    /// Parses a workload as it's displayed. A unit may be preceded by `unit`.
    pub fn parse(text: &str) -> Self {
        let text = text.trim();
        let kind = text
            .split_once(' ')
            .and_then(|(kind, name)| Some((WorkloadKind::of_name(&kind.to_ascii_lowercase())?, name.trim())));
        let (kind, name) = kind.unwrap_or((WorkloadKind::Unit, text));
        Self { kind, name: name.to_owned() }
    }

    /// The name. If it's a service's, without `.service`.
    pub(super) fn base_name(&self) -> &str {
        match self.kind {
            WorkloadKind::Unit => self.name.strip_suffix(".service").unwrap_or(&self.name),
            _ => &self.name,
        }
    }

    /// If this is a pattern of pods' names that would never match, says why.
    pub fn unfit(&self) -> Option<&'static str> {
        if self.kind != WorkloadKind::Pod || !self.name.contains('*') {
            return None;
        }
        match self.name.strip_suffix('*').and_then(|start| start.split_once('/')) {
            Some((namespace, name)) if !namespace.is_empty() && !namespace.contains('*') && !name.contains('*') => None,
            _ => {
                Some("has an asterisk that is not at the end of NAMESPACE/NAME; give a name like shop/cart-* or shop/*")
            }
        }
    }

    /// Whether this is the engine's name of a container or pod, or a pattern that matches a pod's.
    fn is_name_or_pattern_of(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(start) if self.kind == WorkloadKind::Pod && self.unfit().is_none() => name.starts_with(start),
            _ => name == self.name,
        }
    }

    /// Whether this is a name of a process's workload, whoever has chosen the name.
    pub(super) fn names(&self, info: &ProcessInfo) -> bool {
        info.cgroups.all.iter().any(|cgroup| {
            // A unit can make cgroups below its own, so its name may be anywhere in the path.
            let is_below = self.kind == WorkloadKind::Unit && cgroup.path.split('/').any(|part| part == self.name);
            is_below || labels_of(&cgroup.path).iter().any(|label| label.is_called(self))
        })
    }
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

/// The names of the workloads of a kind that have processes.
pub fn running(kind: WorkloadKind, proc: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for pid in list_pids(proc).unwrap_or_default() {
        let Ok(text) = Process::open_at(proc, pid).and_then(|process| process.read_file("cgroup")) else { continue };
        for cgroup in parse_cgroups(&text) {
            let labels = labels_of(&cgroup.path).into_iter();
            names.extend(labels.filter(|label| label.kind == kind).map(|label| label.workload().name));
        }
    }
    names
}

pub fn workload_of_process(process: &Process) -> Option<Workload> {
    workload_of_cgroups(&parse_cgroups(&process.read_file("cgroup").ok()?))
}

/// The workload of a process with these cgroups.
pub fn workload_of_cgroups(cgroups: &[Cgroup]) -> Option<Workload> {
    // systemd's own hierarchy has the most detailed paths. If there's none, we take version 2's, or else the deepest
    // cgroup.
    let depth = |cgroup: &Cgroup| cgroup.path.split('/').filter(|part| !part.is_empty()).count();
    let longest = cgroups.iter().max_by_key(|cgroup| (cgroup.controllers.is_empty(), depth(cgroup)));
    let used = cgroups.iter().find(|cgroup| cgroup.controllers == "name=systemd").or(longest)?;
    name_of(&used.path)
}

/// The name of a cgroup's virtual machine.
pub(super) fn guest_of(path: &str) -> Option<String> {
    match name_of(path)? {
        Workload { kind: WorkloadKind::Vm, name } => Some(name),
        _ => None,
    }
}

/// The workload of a path, as we show it.
fn name_of(path: &str) -> Option<Workload> {
    let labels = labels_of(path);
    let machine = labels.iter().find(|label| label.kind != WorkloadKind::Unit);
    let unit = labels.iter().rev().find(|label| label.is_service());
    Some(machine.or(unit).or(labels.last())?.workload())
}

/// One of the names in a cgroup's path.
#[derive(Debug)]
pub(super) struct Label<'a> {
    pub(super) kind: WorkloadKind,
    /// The name, not yet shortened for display: a unit's still has its escapes, and an identifier has all its digits.
    name: String,
    /// The path of the cgroup that contains the named one.
    pub(super) parent: &'a str,
    /// The path of the named cgroup.
    path: &'a str,
}

impl Label<'_> {
    fn workload(&self) -> Workload {
        let name = self.engines_name().unwrap_or_else(|| match self.kind {
            WorkloadKind::Container if is_id(&self.name) => self.name[..SHORT_ID].to_owned(),
            WorkloadKind::Unit => unescaped(&self.name),
            _ => self.name.clone(),
        });
        Workload { kind: self.kind, name: printable(name.as_bytes()) }
    }

    /// The name that the engine has given a container or pod with this identifier.
    fn engines_name(&self) -> Option<String> {
        match self.kind {
            WorkloadKind::Container if is_id(&self.name) => EngineNames::here().container(&self.name),
            WorkloadKind::Pod => EngineNames::here().pod(&self.name),
            _ => None,
        }
    }

    fn is_service(&self) -> bool {
        matches!(unit_type(&self.name), Some("service" | "scope"))
    }

    /// Whether `asked` is a name of this workload: the one that we show or that is in the path, the first digits of an
    /// identifier, the engine's name, the start of a pod's name and `*`, or a service's name without `.service`.
    pub(super) fn is_called(&self, asked: &Workload) -> bool {
        if self.kind != asked.kind {
            return false;
        }
        if matches!(self.kind, WorkloadKind::Pod | WorkloadKind::Container) && is_id(&self.name) {
            let digits = asked.name.to_ascii_lowercase();
            let has_digits = digits.len() >= SHORT_ID && self.name.starts_with(&digits);
            return has_digits || self.engines_name().is_some_and(|name| asked.is_name_or_pattern_of(&name));
        }
        let shown = self.workload().name;
        for name in [&self.name, &shown] {
            let is_services = self.kind == WorkloadKind::Unit && name.strip_suffix(".service") == Some(&asked.name);
            if is_services || *name == asked.name {
                return true;
            }
        }
        false
    }

    /// Whether only the system can have made this cgroup. We judge by the cgroups above: a service, or root in a
    /// container that we don't recognise, can make cgroups below its own. Podman does so, too, for a container that is
    /// a service (`--cgroups=split`), but it records the cgroup. Of the cgroups that aren't systemd's we trust the
    /// topmost ones, and those that Kubernetes and ECS make below theirs.
    pub(super) fn is_systems(&self) -> bool {
        self.is_below_slices()
            || self.kind == WorkloadKind::Container
                && is_id(&self.name)
                && EngineNames::here().is_in(&self.name, self.path)
    }

    fn is_below_slices(&self) -> bool {
        let is_typed_unit = self.kind == WorkloadKind::Unit && unit_type(&self.name).is_some();
        let mut above = "";
        for part in self.parent.split('/').filter(|part| !part.is_empty()) {
            let is_fine = match unit_type(part) {
                Some(found) => found == "slice",
                None if is_typed_unit => false,
                None => {
                    let is_of_pods = matches!(part, "kubepods" | "burstable" | "besteffort") || pod(part).is_some();
                    above.is_empty() || above == "ecs" || is_of_pods
                }
            };
            if !is_fine {
                return false;
            }
            above = part;
        }
        true
    }
}

/// `service`, `scope` or `slice`: the types of systemd's units that have cgroups.
fn unit_type(part: &str) -> Option<&str> {
    match part.rsplit_once('.')?.1 {
        found @ ("service" | "scope" | "slice") => Some(found),
        _ => None,
    }
}

/// The names in a cgroup's path, the outermost first. We stop at a container or virtual machine: its own root names the
/// cgroups below.
pub(super) fn labels_of(path: &str) -> Vec<Label<'_>> {
    let mut labels: Vec<Label<'_>> = Vec::new();
    let mut last = "";
    let mut end = 0;
    for part in path.split('/') {
        let parent = &path[..end];
        let through = &path[..end + part.len()];
        end += part.len() + 1;
        if part.is_empty() {
            continue;
        }
        let above = std::mem::replace(&mut last, part);
        if let Some((kind, name)) = pod(part).or_else(|| machine(above, part)).or_else(|| container(above, part)) {
            if part.ends_with(".service") || part.starts_with("machine-") {
                // The unit of systemd-nspawn or systemd-machined, which is a container.
                labels.push(Label { kind: WorkloadKind::Unit, name: part.to_owned(), parent, path: through });
            }
            labels.push(Label { kind, name, parent, path: through });
            if kind != WorkloadKind::Pod {
                return labels;
            }
        } else if unit_type(part).is_some() {
            // systemd puts an underscore before a name that the kernel could use for a file.
            let name = part.strip_prefix('_').unwrap_or(part);
            labels.push(Label { kind: WorkloadKind::Unit, name: name.to_owned(), parent, path: through });
        }
    }
    // No service or other workload is in the path, so we go by the innermost cgroup.
    if !last.is_empty() && !labels.iter().any(|label| label.kind != WorkloadKind::Unit || label.is_service()) {
        let parent = path.trim_end_matches('/').strip_suffix(last).unwrap_or_default();
        labels.push(Label { kind: WorkloadKind::Unit, name: last.to_owned(), parent, path });
    }
    labels
}

fn named_if(is_valid: bool, kind: WorkloadKind, name: &str) -> Option<(WorkloadKind, String)> {
    if is_valid { Some((kind, name.to_owned())) } else { None }
}

fn pod(part: &str) -> Option<(WorkloadKind, String)> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let uid = match part.strip_prefix("pod") {
        Some(uid) => uid,
        None if part.starts_with("kubepods") => part.rsplit_once("-pod")?.1,
        None => return None,
    };
    // A dash in a slice's name would mean another level, so an underscore stands for it.
    let uid = uid.replace('_', "-");
    named_if(uid.len() >= 32 && is_id(&uid), WorkloadKind::Pod, &uid)
}

fn machine(above: &str, part: &str) -> Option<(WorkloadKind, String)> {
    if above == "qemu.slice" {
        let id = part.strip_suffix(".scope")?;
        return named_if(is_number(id), WorkloadKind::Vm, id);
    }
    if above == "lxc" {
        return named_if(true, WorkloadKind::Container, part);
    }
    if let Some(name) = part.strip_prefix("lxc.payload.") {
        return named_if(!name.is_empty(), WorkloadKind::Container, name);
    }
    if above == "machine.slice" {
        if let Some(name) = part.strip_prefix("systemd-nspawn@").and_then(|name| name.strip_suffix(".service")) {
            return named_if(!name.is_empty(), WorkloadKind::Container, &unescaped(name));
        }
    }
    let machine = unescaped(part.strip_prefix("machine-")?.strip_suffix(".scope")?);
    if let Some((id, name)) = machine.strip_prefix("qemu-").and_then(|guest| guest.split_once('-')) {
        return named_if(is_number(id), WorkloadKind::Vm, name);
    }
    named_if(above == "machine.slice" && !machine.is_empty(), WorkloadKind::Container, &machine)
}

pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

fn is_id(text: &str) -> bool {
    text.len() > SHORT_ID && text.bytes().all(|digit| digit.is_ascii_hexdigit() || digit == b'-')
}

fn container(above: &str, part: &str) -> Option<(WorkloadKind, String)> {
    let is_whole_id = part.len() == 64 && is_id(part);
    let mut id = if is_whole_id || above == "docker" || pod(above).is_some() { part } else { "" };
    let name = part.strip_suffix(".scope").unwrap_or(part);
    for prefix in ["docker-", "cri-containerd-", "crio-", "libpod-", "libpod-payload-", "nerdctl-"] {
        id = name.strip_prefix(prefix).unwrap_or(id);
    }
    named_if(is_id(id), WorkloadKind::Container, id)
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
            ("/batch.slice", "batch.slice"),
            ("/lxc.payload.db/system.slice/cron.service", "container db"),
            (&format!("/libpod_parent/libpod-{id}"), "container 3f0c3f0c3f0c"),
            (&format!("/system.slice/web.service/libpod-payload-{id}"), "container 3f0c3f0c3f0c"),
            ("/machine.slice/systemd-nspawn@a.service/payload/system.slice/nginx.service", "container a"),
            (r"/machine.slice/machine-a\x2d1.scope/payload/init.scope", "container a-1"),
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

    #[test]
    fn pods_are_named_by_the_start_of_their_names_within_a_namespace() {
        let asked = |name: &str| Workload { kind: WorkloadKind::Pod, name: name.to_owned() };
        let cart = "shop/cart-7d9f8b6c5-x2x4z";
        for name in ["shop/*", "shop/cart-*", "shop/cart*", cart] {
            assert!(asked(name).is_name_or_pattern_of(cart) && asked(name).unfit().is_none(), "{name}");
        }
        for name in ["shop/cart", "shop/cart-", "shop/web-*", "sho/*", "shop"] {
            assert!(!asked(name).is_name_or_pattern_of(cart) && asked(name).unfit().is_none(), "{name}");
        }
        for name in ["*", "shop*", "*/cart-*", "shop/c*t", "/*", "*/*", "shop/**"] {
            assert!(!asked(name).is_name_or_pattern_of(cart) && asked(name).unfit().is_some(), "{name}");
        }
        let container = Workload { kind: WorkloadKind::Container, name: "web*".to_owned() };
        assert!(!container.is_name_or_pattern_of("web1") && container.unfit().is_none());
    }

    #[test]
    fn each_name_in_a_path_selects() {
        let id = "3f0c".repeat(16);
        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        let in_pod = format!("/kubepods.slice/kubepods-pod{}.slice/crio-{id}.scope", uid.replace('-', "_"));
        let is_called = |path: &str, kind, name: &str| {
            labels_of(path).iter().any(|label| label.is_called(&Workload { kind, name: name.to_owned() }))
        };
        for name in ["6c2f1f0e-111", uid] {
            assert!(is_called(&in_pod, WorkloadKind::Pod, name), "{name}");
        }
        for name in ["3f0c3f0c3f0c", "3F0C3F0C3F0C3", &id] {
            assert!(is_called(&in_pod, WorkloadKind::Container, name), "{name}");
        }
        for name in ["3f0c3f0c3f0", "f0c3f0c3f0c3", "3f0c3f0c3f0d"] {
            assert!(!is_called(&in_pod, WorkloadKind::Container, name), "{name}");
        }
        assert!(is_called(&in_pod, WorkloadKind::Unit, "kubepods.slice"));
        let unit = r"/system.slice/system-pg.slice/pg\x2dmain@a.service/worker";
        for name in [
            "pg-main@a.service",
            r"pg\x2dmain@a.service",
            r"pg\x2dmain@a",
            "pg-main@a",
            "system-pg.slice",
            "system.slice",
        ] {
            assert!(is_called(unit, WorkloadKind::Unit, name), "{name}");
        }
        assert!(!is_called(unit, WorkloadKind::Unit, "worker") && !is_called(unit, WorkloadKind::Unit, "pg"));
        assert!(is_called("/batch/worker", WorkloadKind::Unit, "worker"));
        assert!(!is_called("/batch/worker", WorkloadKind::Unit, "batch"));
        // A container's own root names the cgroups below it.
        let inner = format!("/system.slice/docker-{id}.scope/system.slice/nginx.service");
        assert!(!is_called(&inner, WorkloadKind::Unit, "nginx") && is_called(&inner, WorkloadKind::Container, &id));
        let nspawn = "/machine.slice/systemd-nspawn@a.service/payload/system.slice/nginx.service";
        assert!(is_called(nspawn, WorkloadKind::Container, "a") && !is_called(nspawn, WorkloadKind::Unit, "nginx"));
        assert!(is_called(nspawn, WorkloadKind::Unit, "systemd-nspawn@a"));
        assert!(is_called("/qemu.slice/104.scope", WorkloadKind::Vm, "104"));
        assert!(!is_called("/qemu.slice/104.scope", WorkloadKind::Vm, "10"));
    }

    #[test]
    fn root_in_an_unknown_container_claims_no_other_workload() {
        let id = "3f0c".repeat(16);
        let uid = "6c2f1f0e-1111-4222-8333-944445555666";
        for path in [
            format!("/docker/{id}"),
            format!("/ecs/0f2c3d4e/{id}"),
            format!("/kubelet/kubepods/burstable/pod{uid}/{id}"),
            format!("/system.slice/docker-{id}.scope"),
            "/batch/worker".to_owned(),
        ] {
            assert!(labels_of(&path).last().unwrap().is_systems(), "{path}");
        }
        for inner in [format!("docker-{id}.scope"), format!("kubepods/pod{uid}/{id}"), "web".to_owned()] {
            let path = format!("/mesos/0f2c3d4e/{inner}");
            assert!(!labels_of(&path).last().unwrap().is_systems(), "{path}");
        }
    }

    #[test]
    fn the_hierarchy_that_says_most_names_the_workload() {
        let named = |text: &str| workload_of_cgroups(&parse_cgroups(text.as_bytes())).map(|found| found.to_string());
        let hybrid =
            "9:name=systemd:/system.slice/nginx.service\n4:memory:/system.slice\n0::/system.slice/nginx.service\n";
        assert_eq!(named(hybrid).as_deref(), Some("nginx.service"));
        assert_eq!(named("4:memory:/batch/a\n2:cpu:/\n").as_deref(), Some("a"), "no systemd");
        assert_eq!(named("9:name=systemd:/\n4:memory:/batch/a\n0::/\n"), None);
        assert_eq!(named("9:name=systemd:/\n0::/\n"), None);
    }
}
