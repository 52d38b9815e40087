//! `/proc/PID/maps` and `/proc/PID/smaps`, and the regions made of their mappings.

use pagefold_engine::keys::RegionKey;
use pagefold_host::regions::{follow, stretches};
use pagefold_inject::fuzzing::executable;
use pagefold_procmem::maps::{Perms, Vma, VmaDetail, kind_of, parse_maps, parse_smaps};
use std::collections::BTreeSet;

/// `/proc/PID/maps`: no line is dropped; mappings ascend; printed in the kernel's format they parse back to the same;
/// and the injector's parser agrees.
pub fn maps(text: &[u8]) {
    let Ok(vmas) = parse_maps(text) else { return };
    assert_eq!(vmas.len(), text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).count());
    assert_ascending(vmas.iter());
    let printed: Vec<u8> = vmas.iter().flat_map(line).collect();
    assert_eq!(parse_maps(&printed).as_ref(), Ok(&vmas));
    let is_code = |vma: &&Vma| vma.perms.read && vma.perms.exec && vma.name != b"[vsyscall]";
    let code: Vec<&Vma> = vmas.iter().filter(is_code).collect();
    let is_vdso = |vma: &Vma| vma.inode == 0 && vma.name == b"[vdso]";
    let mut wanted: Vec<(u64, u64)> = code.iter().map(|vma| (vma.start, vma.end)).collect();
    let mut found = executable(&printed);
    if code.into_iter().any(is_vdso) {
        let first = vmas.iter().find(|vma| (vma.start, vma.end) == found[0]);
        assert!(first.is_some_and(is_vdso));
    }
    wanted.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, wanted);
    let _ = executable(text);
}

/// `/proc/PID/smaps`: as for maps; counters print and parse back; and regions ascend, contain exactly the mappings that
/// aren't excluded, and keep their keys.
pub fn smaps(text: &[u8]) {
    let Ok(details) = parse_smaps(text) else { return };
    assert_ascending(details.iter().map(|detail| &detail.vma));
    let printed: Vec<u8> = details.iter().flat_map(entry).collect();
    assert_eq!(parse_smaps(&printed).as_ref(), Ok(&details));
    for detail in &details {
        assert!(detail.original_bytes >= detail.vma.end - detail.vma.start);
        let _ = kind_of(&detail.vma, b"qemu-system-x86_64");
    }
    let mut excluded = BTreeSet::new();
    let found = stretches(&details, b"program", 7, |detail, _| assert!(excluded.insert(detail.vma.start)));
    assert!(found.windows(2).all(|pair| pair[0].first.0 + pair[0].pages.0 <= pair[1].first.0));
    assert!(found.iter().all(|stretch| stretch.pages.0 > 0 && stretch.marked <= stretch.pages));
    for detail in &details {
        if excluded.contains(&detail.vma.start) {
            continue;
        }
        let (first, end) = (detail.vma.first().0, detail.vma.first().0 + detail.vma.pages().0);
        let at = found.partition_point(|one| one.first.0 + one.pages.0 <= first);
        let holds = found.get(at).is_some_and(|one| one.first.0 <= first && end <= one.first.0 + one.pages.0);
        assert!(holds || detail.anonymous_kib == 0, "{detail:?} is in no region");
    }
    let mut next = 0;
    let mut new_key = || {
        next += 1;
        RegionKey(next)
    };
    let tracked = follow(&[], found.clone(), &mut new_key);
    let again = follow(&tracked, found, || unreachable!("nothing is new"));
    assert_eq!(again, tracked);
}

fn assert_ascending<'a>(vmas: impl Iterator<Item = &'a Vma>) {
    let mut end = 0;
    for vma in vmas {
        assert!(vma.start >= end && vma.start < vma.end && vma.start % 4096 == 0 && vma.end % 4096 == 0, "{vma:?}");
        assert!(vma.pages().0 > 0);
        end = vma.end;
    }
}

/// A mapping as fs/proc/task_mmu.c prints it (`show_map_vma`).
fn line(vma: &Vma) -> Vec<u8> {
    let flag = |set: bool, letter: char| if set { letter } else { '-' };
    let Perms { read, write, exec, shared } = vma.perms;
    let (r, w, x) = (flag(read, 'r'), flag(write, 'w'), flag(exec, 'x'));
    let s = if shared { 's' } else { 'p' };
    let (major, minor) = vma.device;
    let (start, end, offset, inode) = (vma.start, vma.end, vma.offset, vma.inode);
    let mut line =
        format!("{start:08x}-{end:08x} {r}{w}{x}{s} {offset:08x} {major:02x}:{minor:02x} {inode} ").into_bytes();
    if !vma.name.is_empty() {
        line.resize(line.len().max(73), b' ');
        line.extend(&vma.name);
    }
    line.push(b'\n');
    line
}

/// A mapping with its counters and flags as the kernel prints them (`show_smap`).
fn entry(detail: &VmaDetail) -> Vec<u8> {
    let mut text = line(&detail.vma);
    let counters = [
        ("Rss", Some(detail.rss_kib)),
        ("Pss", Some(detail.pss_kib)),
        ("Anonymous", Some(detail.anonymous_kib)),
        ("KSM", detail.ksm_kib),
        ("AnonHugePages", Some(detail.anon_huge_kib)),
        ("Private_Hugetlb", Some(detail.hugetlb_kib)),
        ("Swap", Some(detail.swap_kib)),
    ];
    for (name, kib) in counters {
        if let Some(kib) = kib {
            text.extend(format!("{:<16}{kib:8} kB\n", format!("{name}:")).bytes());
        }
    }
    text.extend(b"VmFlags:");
    detail.flags.iter().for_each(|[a, b]| text.extend([b' ', a, b]));
    text.extend(b" \n");
    text
}
