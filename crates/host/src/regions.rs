//! Regions: adjacent mappings that differ only in flags, with keys that persist while the mappings change.
//!
//! Mappings change all the time: the heap grows, stacks grow downwards, and marks split mappings in three. A region
//! keeps its key if its new range overlaps the old one.

use crate::scope::exclude::{Exclusion, vma_exclusion};
use pagefold_engine::keys::{FamilyKey, RegionKey};
use pagefold_engine::random::mix;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::maps::{RegionKind, VmaDetail, kind_of};
use std::collections::HashMap;

/// If our list of a process's mappings is older than this, nanoseconds, we read it again before we ask the kernel to
/// merge the process's pages. Reading lists may take 1/`LIST_SHARE` of the time of one core.
pub(crate) const LIST_NS: u64 = 1_000_000_000;
const LIST_SHARE: u64 = 100;

/// Adjacent mappings judged as a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub first: Vpn,
    pub pages: Pages,
    /// Present anonymous pages.
    pub resident: Pages,
    /// The process's part of the frames of these pages, as Pss counts.
    pub held: Pages,
    pub marked: Pages,
    /// How many pages KSM has merged, as smaps counts them (Linux 6.7).
    pub merged: Pages,
    /// Whether some of the pages are in huge pages.
    pub huge: bool,
    pub kind: RegionKind,
    /// Regions that are likely copies of each other have the same family.
    pub family: FamilyKey,
}

/// A stretch with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracked {
    pub key: RegionKey,
    pub stretch: Stretch,
}

/// Groups the mappings of a process into stretches. Calls `excluded` for each mapping that we leave alone.
///
/// `exe` is the base name of the executable, `program` a hash of its path.
pub fn stretches(
    details: &[VmaDetail],
    exe: &[u8],
    program: u64,
    mut excluded: impl FnMut(&VmaDetail, Exclusion),
) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut last: Option<&VmaDetail> = None;
    for detail in details {
        let goes_on = last.is_some_and(|last| last.continues(detail));
        let is_marked = detail.flags.has(*b"mg");
        match vma_exclusion(detail) {
            // Such empty mappings don't end a region. Marks may have split a mapping into parts, some of them empty,
            // and all pages of a marked mapping may be merged zeros.
            Some(Exclusion::NothingAnonymous) if goes_on || is_marked => {}
            Some(exclusion) => {
                excluded(detail, exclusion);
                last = None;
                continue;
            }
            None => {}
        }
        let pages = detail.vma.pages();
        let resident = Pages(detail.anonymous_kib / 4);
        // Pss also counts a file's pages that nobody has written.
        let held = Pages((detail.pss_kib.min(detail.anonymous_kib) + 2) / 4);
        let marked = if is_marked { pages } else { Pages(0) };
        let merged = Pages(detail.ksm_kib.unwrap_or(0) / 4);
        match stretches.last_mut() {
            Some(stretch) if goes_on => {
                stretch.pages += pages;
                stretch.resident += resident;
                stretch.held += held;
                stretch.marked += marked;
                stretch.merged += merged;
                stretch.huge |= detail.anon_huge_kib > 0;
            }
            _ => stretches.push(Stretch {
                first: detail.vma.first(),
                pages,
                resident,
                held,
                marked,
                merged,
                huge: detail.anon_huge_kib > 0,
                kind: kind_of(&detail.vma, exe),
                family: FamilyKey(0),
            }),
        }
        last = Some(detail);
    }
    name_families(&mut stretches, program);
    stretches
}

/// The mappings of a process as we last read them.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) program: ProgramId,
    pub(crate) at_ns: u64,
    /// CPU time spent reading the mappings.
    cost_ns: u64,
    pub(crate) mapped: Vec<Mapped>,
}

/// Neighbouring mappings: first page, end, and whether we may ask the kernel to merge their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped(pub(crate) u64, pub(crate) u64, pub(crate) bool);

impl List {
    pub(crate) fn of(details: &[VmaDetail], program: ProgramId, at_ns: u64, cost_ns: u64) -> Self {
        let mut mapped: Vec<Mapped> = Vec::new();
        for detail in details {
            let may_be = match vma_exclusion(detail) {
                None => true,
                // We don't list the mapping as excluded: it may have anonymous pages when we use the list.
                Some(Exclusion::NothingAnonymous) => continue,
                Some(_) => false,
            };
            let first = detail.vma.first().0;
            let end = first + detail.vma.pages().0;
            match mapped.last_mut().filter(|last| (last.1, last.2) == (first, may_be)) {
                Some(last) => last.1 = end,
                None => mapped.push(Mapped(first, end, may_be)),
            }
        }
        Self { program, at_ns, cost_ns, mapped }
    }

    /// Whether we may ask the kernel to merge a page (`None`: we don't know its mapping). Also returns for how many
    /// pages, from this one on, the answer is the same.
    pub(crate) fn at(&self, page: Vpn) -> (Option<bool>, u64) {
        let next = self.mapped.partition_point(|mapped| mapped.1 <= page.0);
        match self.mapped.get(next) {
            Some(&Mapped(first, end, may_be)) if first <= page.0 => (Some(may_be), end - page.0),
            Some(&Mapped(first, ..)) => (None, first - page.0),
            None => (None, u64::MAX),
        }
    }

    pub(crate) fn is_fresh(&self, now_ns: u64) -> bool {
        now_ns < self.at_ns + (self.cost_ns * LIST_SHARE).max(LIST_NS)
    }
}

/// Assigns families. Regions of equal program, kind and size are likely copies of each other if they also have the same
/// rank among such regions of their process.
fn name_families(stretches: &mut [Stretch], program: u64) {
    let mut ranks: HashMap<(RegionKind, Pages), u64> = HashMap::new();
    for stretch in stretches {
        let rank = ranks.entry((stretch.kind, stretch.pages)).or_default();
        let name = [stretch.kind.number(), stretch.pages.0, *rank];
        stretch.family = FamilyKey(name.iter().fold(program, |key, part| mix(key ^ part)));
        *rank += 1;
    }
}

/// Gives each stretch the key of the earlier region that it overlaps most, or a new key. Leaves out new stretches
/// without resident pages.
pub fn follow(former: &[Tracked], stretches: Vec<Stretch>, mut new_key: impl FnMut() -> RegionKey) -> Vec<Tracked> {
    let end = |stretch: &Stretch| stretch.first.0 + stretch.pages.0;
    let mut pairs = Vec::new();
    // Both lists ascend and neither overlaps itself: one pass finds all overlapping pairs.
    let mut from = 0;
    for (new, stretch) in stretches.iter().enumerate() {
        while from < former.len() && end(&former[from].stretch) <= stretch.first.0 {
            from += 1;
        }
        for (old, tracked) in former.iter().enumerate().skip(from) {
            if tracked.stretch.first.0 >= end(stretch) {
                break;
            }
            let low = tracked.stretch.first.0.max(stretch.first.0);
            let high = end(&tracked.stretch).min(end(stretch));
            pairs.push((high.saturating_sub(low), old, new));
        }
    }
    pairs.sort_unstable_by(|a, b| b.cmp(a));
    let mut keys: Vec<Option<RegionKey>> = vec![None; stretches.len()];
    let mut taken = vec![false; former.len()];
    for (_, old, new) in pairs {
        if !taken[old] && keys[new].is_none() {
            taken[old] = true;
            keys[new] = Some(former[old].key);
        }
    }
    let mut tracked = Vec::new();
    for (key, stretch) in keys.into_iter().zip(stretches) {
        if key.is_some() || stretch.resident > Pages(0) {
            tracked.push(Tracked { key: key.unwrap_or_else(&mut new_key), stretch });
        }
    }
    tracked
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_procmem::maps::parse_smaps;

    /// Hypervisors keep guest memory out of core dumps. Marks split it into mappings below
    /// [`crate::scope::exclude::BULK_BYTES`], some of them empty.
    #[test]
    fn guest_memory_split_by_marks_is_not_taken_for_secrets() {
        let details = smaps(&[
            ("100000000-101000000 rw-p 00000000 00:00 0 ", 16_384, "rd wr ac dd mg"),
            ("101000000-101800000 rw-p 00000000 00:00 0 ", 4_096, "rd wr ac dd"),
            ("101800000-102000000 rw-p 00000000 00:00 0 ", 0, "rd wr ac dd"),
            ("102000000-104000000 rw-p 00000000 00:00 0 ", 8_192, "rd wr ac dd mg"),
            ("105000000-105800000 rw-p 00000000 00:00 0 ", 4_096, "rd wr ac dd"),
        ]);
        let mut left_out = Vec::new();
        let found = stretches(&details, b"qemu", 1, |detail, exclusion| left_out.push((detail.vma.start, exclusion)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pages, found[0].marked), (Pages(16_384), Pages(12_288)));
        assert_eq!(left_out, [(0x1_0500_0000, Exclusion::DontDump)]);
    }

    /// After a merge of zeros, no page counts as present.
    #[test]
    fn a_marked_region_that_has_become_empty_stays_and_none_begins_empty() {
        let empty = || smaps(&[("100000000-101000000 rw-p 00000000 00:00 0 ", 0, "rd wr ac mg")]);
        let full = smaps(&[("100000000-101000000 rw-p 00000000 00:00 0 ", 16_384, "rd wr ac")]);
        assert_eq!(follow(&[], stretches(&empty(), b"x", 1, |_, _| {}), || RegionKey(1)), []);
        let former = follow(&[], stretches(&full, b"x", 1, |_, _| {}), || RegionKey(1));
        let now = follow(&former, stretches(&empty(), b"x", 1, |_, _| {}), || RegionKey(2));
        assert_eq!(
            now.iter().map(|tracked| (tracked.key, tracked.stretch.resident)).collect::<Vec<_>>(),
            [(RegionKey(1), Pages(0))]
        );
    }

    fn smaps(entries: &[(&str, u64, &str)]) -> Vec<VmaDetail> {
        let text: Vec<String> = entries
            .iter()
            .map(|(head, anonymous_kib, flags)| {
                format!("{head}\nRss: {anonymous_kib} kB\nAnonymous: {anonymous_kib} kB\nVmFlags: {flags}\n")
            })
            .collect();
        parse_smaps(text.concat().as_bytes()).unwrap()
    }

    #[test]
    fn exclusions_split_regions_and_marks_do_not() {
        let details = smaps(&[
            ("1000000-1100000 rw-p 00000000 00:00 0 ", 400, "rd wr mr mw me ac"),
            ("1100000-1300000 rw-p 00000000 00:00 0 ", 2048, "rd wr mr mw me ac mg"),
            ("1300000-1400000 rw-p 00000000 00:00 0 ", 1024, "rd wr mr mw me ac"),
            ("1400000-1500000 rw-p 00000000 00:00 0 ", 1024, "rd wr mr mw me lo ac"),
            ("1500000-1600000 rw-p 00000000 00:00 0 ", 1024, "rd wr mr mw me ac"),
        ]);
        let mut reasons = Vec::new();
        let found = stretches(&details, b"x", 1, |_, exclusion| reasons.push(exclusion));
        let ranges: Vec<_> = found.iter().map(|s| (s.first.0, s.pages.0, s.resident.0, s.marked.0)).collect();
        assert_eq!(ranges, [(0x1000, 0x400, 868, 0x200), (0x1500, 0x100, 256, 0)]);
        assert_eq!(reasons, [Exclusion::Locked]);
    }

    #[test]
    fn regions_keep_their_keys_when_they_grow_split_or_get_neighbours() {
        let stretch = |first: u64, pages: u64| Stretch {
            first: Vpn(first),
            pages: Pages(pages),
            resident: Pages(pages),
            held: Pages(pages),
            marked: Pages(0),
            merged: Pages(0),
            huge: false,
            kind: RegionKind::Anonymous,
            family: FamilyKey(0),
        };
        let mut next = 0;
        let mut fresh = || {
            next += 1;
            RegionKey(next)
        };
        let first = follow(&[], vec![stretch(100, 50), stretch(200, 100)], &mut fresh);
        // The first region grows on both sides, a new one appears, the second is split into a small and a large part.
        let second =
            follow(&first, vec![stretch(90, 70), stretch(180, 5), stretch(200, 20), stretch(230, 70)], &mut fresh);
        let keys: Vec<u32> = second.iter().map(|tracked| tracked.key.0).collect();
        assert_eq!(keys, [1, 3, 4, 2]);
    }

    #[test]
    fn families_depend_on_program_kind_size_and_rank() {
        let details = smaps(&[
            ("1000000-1100000 rw-p 00000000 00:00 0 ", 400, "rd wr"),
            ("2000000-2100000 rw-p 00000000 00:00 0 ", 400, "rd wr"),
            ("3000000-3200000 rw-p 00000000 00:00 0 ", 400, "rd wr"),
        ]);
        let one: Vec<_> = stretches(&details, b"x", 1, |_, _| {}).iter().map(|s| s.family).collect();
        let same: Vec<_> = stretches(&details, b"x", 1, |_, _| {}).iter().map(|s| s.family).collect();
        let other: Vec<_> = stretches(&details, b"x", 2, |_, _| {}).iter().map(|s| s.family).collect();
        assert_eq!(one, same);
        assert!(one[0] != one[1] && one[1] != one[2] && one[0] != other[0]);
    }
}
