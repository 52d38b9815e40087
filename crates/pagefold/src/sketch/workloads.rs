//! This host's workloads: processes grouped by the VM, container or unit they belong to, and by trust domain.

use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::Pages;
use pagefold_host::live::LiveHost;
use pagefold_host::scope::workload::{WorkloadKind, workload_of_process};
use pagefold_host::targets::Target;
use pagefold_procmem::process::Process;
use pagefold_procmem::status::program_name;
use pagefold_sketch::Kind;
use pagefold_sketch::row::NAME_BYTES;
use pagefold_text::escape::printable;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The smallest workload that we sketch. Sketches of smaller ones cost more than they're worth.
const SMALLEST: Pages = Pages(256);
/// The sketches of all workloads take at most this much memory; beyond that we skip the smallest workloads.
const SKETCHES_BYTES: u64 = 4 << 20;

/// A workload in a trust domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    pub kind: Kind,
    pub name: String,
    pub domain: String,
}

#[derive(Clone, Debug)]
pub struct Member {
    pub owner: OwnerKey,
    pub process: Arc<Process>,
    /// The memory that the process holds, as last counted.
    pub resident: Pages,
}

#[derive(Debug)]
pub struct Workload {
    pub id: Id,
    pub members: Vec<Member>,
}

impl Workload {
    fn resident(&self) -> Pages {
        self.members.iter().map(|member| member.resident).sum()
    }

    /// How much memory the workload's sketch takes at most.
    fn sketch_bytes(&self) -> u64 {
        (self.resident().0 * 8).min(pagefold_sketch::sketch::SKETCH_BYTES as u64)
    }
}

/// The workloads in scope that we don't leave alone, the largest first. The keeper takes workloads from the end, so it
/// reads the largest ones last.
pub fn find(host: &LiveHost) -> Vec<Workload> {
    let mut found: BTreeMap<Id, Vec<Member>> = BTreeMap::new();
    for target in host.targets().filter(|target| target.exclusion.is_none()) {
        let member = Member {
            owner: target.owner,
            process: target.info.process.clone(),
            resident: target.regions.iter().map(|tracked| tracked.stretch.resident).sum(),
        };
        found.entry(id_of(target, host)).or_default().push(member);
    }
    chosen(found.into_iter().map(|(id, members)| Workload { id, members }).collect())
}

fn chosen(mut workloads: Vec<Workload>) -> Vec<Workload> {
    workloads.retain(|workload| workload.resident() >= SMALLEST);
    workloads.sort_by_key(|workload| Reverse(workload.resident()));
    let mut bytes = 0;
    workloads.retain(|workload| {
        bytes += workload.sketch_bytes();
        bytes <= SKETCHES_BYTES
    });
    workloads
}

fn id_of(target: &Target, host: &LiveHost) -> Id {
    let domain = host.domains().get(usize::from(target.domain.0)).map_or("", String::as_str);
    let (kind, name) = workload_of_process(&target.info.process).map_or_else(
        || {
            let exe = target.info.exe.as_ref().map(|exe| exe.to_path_buf());
            (Kind::Process, printable(&program_name(exe.as_deref(), target.info.name.as_bytes())))
        },
        |found| (kind_of(found.kind), found.name),
    );
    Id { kind, name: fitted(&name), domain: fitted(&printable(domain.as_bytes())) }
}

fn kind_of(kind: WorkloadKind) -> Kind {
    match kind {
        WorkloadKind::Vm => Kind::Vm,
        WorkloadKind::Pod => Kind::Pod,
        WorkloadKind::Container => Kind::Container,
        WorkloadKind::Unit => Kind::Unit,
    }
}

/// Shortens a name to the length that a row may have.
fn fitted(name: &str) -> String {
    let end = (0..=name.len().min(NAME_BYTES)).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    if end == 0 { "-".to_owned() } else { name[..end].to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(name: &str, pages: u64) -> Workload {
        let process = Arc::new(Process::open(1).unwrap());
        Workload {
            id: Id { kind: Kind::Unit, name: name.to_owned(), domain: "default".to_owned() },
            members: vec![Member { owner: OwnerKey(1), process, resident: Pages(pages) }],
        }
    }

    #[test]
    fn the_largest_workloads_fit() {
        let names =
            |workloads: Vec<Workload>| workloads.into_iter().map(|workload| workload.id.name).collect::<Vec<_>>();
        let few = vec![workload("small", 300), workload("large", 1 << 20), workload("tiny", 255)];
        assert_eq!(names(chosen(few)), ["large", "small"]);
        let mut many: Vec<Workload> = (0..200).map(|at| workload(&at.to_string(), 10_000 + at)).collect();
        many.push(workload("small", 1000));
        let kept = chosen(many);
        assert_eq!(kept.len(), 128);
        assert_eq!(kept[0].id.name, "199");
    }

    #[test]
    fn names_fit_into_rows() {
        assert_eq!(fitted("web"), "web");
        assert_eq!(fitted(""), "-");
        let long = "ä".repeat(600);
        assert_eq!(fitted(&long), "ä".repeat(512));
        assert_eq!(fitted(&format!("x{long}")).len(), 1023);
    }
}
