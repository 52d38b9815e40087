use super::*;
use pagefold_procmem::Roots;
use pagefold_procmem::maps::parse_smaps;
use pagefold_procmem::process::Process;
use proptest::prelude::*;
use std::sync::Arc;

fn info() -> ProcessInfo {
    ProcessInfo::fixture("redis-server", 0, None)
}

/// The process of `info`, changed.
fn with(change: impl FnOnce(&mut ProcessInfo)) -> ProcessInfo {
    let mut info = info();
    change(&mut info);
    info
}

#[test]
fn each_rule_for_processes_excludes() {
    let deny = DenyList::default();
    let judge = |info: &ProcessInfo| judge_process(info, Dumpable::Yes, &deny);
    assert_eq!(judge(&info()), None);
    assert_eq!(judge_process(&info(), Dumpable::Unknown, &deny), None);
    assert_eq!(judge(&with(|info| info.stat.kernel_thread = true)), Some(Exclusion::KernelThread));
    assert_eq!(judge(&with(|info| (info.stat.state, info.stat.threads) = (b'Z', 1))), Some(Exclusion::Zombie));
    assert_eq!(judge_process(&info(), Dumpable::No, &deny), Some(Exclusion::NotDumpable));
    assert_eq!(judge(&with(|info| info.status.tracer = 7)), Some(Exclusion::Traced { by: 7 }));
    assert_eq!(judge(&with(|info| info.is_readable = false)), Some(Exclusion::NotReadable));
    let agent = ProcessInfo::fixture("ssh-agent", 0, None);
    assert_eq!(judge(&agent), Some(Exclusion::DenyListed { entry: "ssh-agent".into() }));
    assert_eq!(judge_process(&agent, Dumpable::Yes, &DenyList::new([])), None, "the list can be overridden");
}

#[test]
fn a_script_is_denied_by_its_command_name_and_never_allowed_by_it() {
    let own = Arc::new(Process::open(crate::scope::own_pid()).unwrap());
    let mut script = ProcessInfo::of(&own).unwrap();
    script.stat.comm = b"pass".to_vec();
    let denied_by = |entry: &str| Some(Exclusion::DenyListed { entry: entry.into() });
    let deny = DenyList::default();
    assert_eq!(judge_process(&script, Dumpable::Yes, &deny), denied_by("pass"));
    assert_eq!(
        judge_process(&script, Dumpable::Yes, &deny.with(&[], &["pass".into()], &Roots::default())),
        denied_by("pass")
    );
    script.stat.comm = b"other".to_vec();
    assert_eq!(judge_process(&script, Dumpable::Yes, &DenyList::default()), None);
}

#[test]
fn ksmd_merges_32_bit_programs_only_if_they_have_marked_themselves() {
    use Dumpable::{Unknown, Yes};
    use Mechanism::{Ksmd, Request};
    let judge = |uid: u32, needs_exec: bool, dumpable: Dumpable, mechanism: Mechanism| {
        let mut info = with(|info| info.is_32_bit = true);
        info.status.uids[1] = uid;
        info.needs_exec = needs_exec;
        exclusion_of(&info, None, dumpable, mechanism, &DenyList::default())
    };
    for (uid, dumpable, mechanism) in [(0, Yes, Ksmd), (0, Unknown, Ksmd), (33, Yes, Ksmd), (0, Yes, Request)] {
        assert_eq!(judge(uid, true, dumpable, mechanism), Some(Exclusion::Bits32));
        assert_eq!(judge(uid, false, dumpable, mechanism), None, "it has marked itself");
    }
    assert_eq!(judge(33, true, Unknown, Request), Some(Exclusion::Bits32));
    assert_eq!(judge(33, true, Yes, Request), None, "there's nothing to mark or to ask");
}

#[test]
fn nearly_pinned_mappings_are_left_alone() {
    let text = b"1000-9000 rw-p 0 00:00 0\nRss: 32 kB\nAnonymous: 32 kB\n";
    let mut detail = parse_smaps(text).unwrap().remove(0);
    for (pinned_kib, excluded) in [(0, None), (28, None), (29, Some(Exclusion::Pinned))] {
        detail.pinned_kib = pinned_kib;
        assert_eq!(vma_exclusion(&detail), excluded, "{pinned_kib}");
    }
}

#[test]
fn fixture_mappings_are_judged() {
    let details = parse_smaps(include_bytes!("../../../procmem/tests/fixtures/qemu.smaps")).unwrap();
    let verdicts: Vec<_> = details.iter().map(vma_exclusion).collect();
    assert_eq!(verdicts, [None, Some(Exclusion::WipeOnFork), Some(Exclusion::Shared), Some(Exclusion::UserFault)]);
    let details = parse_smaps(include_bytes!("../../../procmem/tests/fixtures/sleep-6.18.smaps")).unwrap();
    for detail in &details {
        let verdict = vma_exclusion(detail);
        match detail.vma.name.as_slice() {
            b"[heap]" | b"[stack]" => assert_eq!(verdict, None),
            b"[vdso]" | b"[vvar]" | b"[vsyscall]" | b"[vvar_vclock]" => assert_eq!(verdict, Some(Exclusion::Special)),
            _ if detail.vma.perms.shared => assert_eq!(verdict, Some(Exclusion::Shared)),
            _ if detail.anonymous_kib == 0 => assert_eq!(verdict, Some(Exclusion::NothingAnonymous)),
            _ => assert_eq!(verdict, None),
        }
    }
}

#[test]
fn each_flag_excludes_a_mapping() {
    let text = |flag: &str| {
        format!("1000-2000 rw-p 0 00:00 0\nAnonymous: 4 kB\nVmFlags: rd wr mr mw me ac sd {flag} \n").into_bytes()
    };
    let judge = |flag| vma_exclusion(&parse_smaps(&text(flag)).unwrap()[0]);
    for harmless in ["", "mg", "hg", "nh", "gd", "nr", "dc", "ex"] {
        assert_eq!(judge(harmless), None, "{harmless}");
    }
    for (flag, exclusion) in [
        ("sh", Exclusion::Shared),
        ("ms", Exclusion::Shared),
        ("pf", Exclusion::Unmergeable("device memory (VM_PFNMAP)")),
        ("io", Exclusion::Unmergeable("device registers (VM_IO)")),
        ("de", Exclusion::Unmergeable("driver mapping (VM_DONTEXPAND)")),
        ("ht", Exclusion::Unmergeable("hugetlb pages")),
        ("mm", Exclusion::Unmergeable("driver mapping (VM_MIXEDMAP)")),
        ("dp", Exclusion::Unmergeable("droppable memory")),
        ("sf", Exclusion::Unmergeable("file on persistent memory")),
        ("ss", Exclusion::ShadowStack),
        ("dd", Exclusion::DontDump),
        ("wf", Exclusion::WipeOnFork),
        ("lo", Exclusion::Locked),
        ("uw", Exclusion::UserFault),
        ("um", Exclusion::UserFault),
    ] {
        assert_eq!(judge(flag), Some(exclusion), "{flag}");
    }
}

#[test]
fn dont_dump_excludes_only_small_mappings() {
    let judge = |end: u64, flags: &str| {
        let text = format!("10000000-{end:x} rw-p 0 00:00 0\nAnonymous: 4 kB\nVmFlags: rd wr {flags} \n");
        vma_exclusion(&parse_smaps(text.as_bytes()).unwrap()[0])
    };
    assert_eq!(judge(0x1000_0000 + BULK_BYTES - 4096, "dd"), Some(Exclusion::DontDump));
    assert_eq!(judge(0x1000_0000 + BULK_BYTES, "dd"), None);
    assert_eq!(judge(0x1000_0000 + BULK_BYTES, "dd lo"), Some(Exclusion::Locked));
    assert_eq!(judge(0x1000_0000 + BULK_BYTES, "dd wf"), Some(Exclusion::WipeOnFork));
}

fn exclusion(process: &Arc<Process>, deny: &DenyList) -> Result<Option<Exclusion>, ReadError> {
    let info = ProcessInfo::of(process)?;
    Ok(exclusion_of(&info, None, dumpable(&info)?, Mechanism::Ksmd, deny))
}

#[test]
fn running_traced_and_zombie_processes_are_judged() {
    let mut child = pagefold_testkit::OwnedChild(std::process::Command::new("sleep").arg("60").spawn().unwrap());
    let pid = child.pid();
    let process = Arc::new(Process::open(pid).unwrap());
    let deny = DenyList::default();
    while process.stat().unwrap().comm != b"sleep" {
        std::thread::yield_now(); // still before exec
    }
    assert_eq!(exclusion(&process, &deny).unwrap(), None);
    assert_eq!(
        exclusion(&process, &DenyList::new(["slee*".into()])).unwrap(),
        Some(Exclusion::DenyListed { entry: "slee*".into() })
    );
    // SAFETY: seizing our own child doesn't change it; this thread is the tracer and detaches when it ends.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == 0;
    // SAFETY: the call has no arguments.
    let own_thread = unsafe { libc::gettid() };
    if seized {
        // The kernel names the tracing thread.
        assert_eq!(exclusion(&process, &deny).unwrap(), Some(Exclusion::Traced { by: own_thread }));
    } else {
        pagefold_testkit::skip("ptrace is not permitted");
    }
    child.0.kill().unwrap();
    while process.stat().unwrap().state != b'Z' {
        std::thread::yield_now();
    }
    assert_eq!(exclusion(&process, &deny).unwrap(), Some(Exclusion::Zombie));
    child.0.wait().unwrap();
    assert!(matches!(exclusion(&process, &deny), Err(ReadError::Vanished { .. })));
}

proptest! {
    #[test]
    fn reasons_are_one_printable_line(entry in ".*", by in any::<i32>()) {
        for exclusion in [Exclusion::DenyListed { entry: entry.clone() }, Exclusion::Traced { by }] {
            let text = exclusion.to_string();
            prop_assert!(!text.is_empty() && !text.contains(char::is_control));
        }
    }
}
