use super::*;
use proptest::prelude::*;
use std::fmt::Write;

const HOSTILE: &[u8] = include_bytes!("../tests/fixtures/hostile.maps");
const SLEEP_MAPS: &[u8] = include_bytes!("../tests/fixtures/sleep-6.18.maps");
const SLEEP_SMAPS: &[u8] = include_bytes!("../tests/fixtures/sleep-6.18.smaps");
const QEMU: &[u8] = include_bytes!("../tests/fixtures/qemu.smaps");
const OLD: &[u8] = include_bytes!("../tests/fixtures/kernel-6.4.smaps");

/// A line as fs/proc/task_mmu.c prints it.
fn line(vma: &Vma) -> Vec<u8> {
    let flag = |set: bool, letter: char| if set { letter } else { '-' };
    let Perms { read, write, exec, shared } = vma.perms;
    let mut line = format!(
        "{:08x}-{:08x} {}{}{}{} {:08x} {:02x}:{:02x} {} ",
        vma.start,
        vma.end,
        flag(read, 'r'),
        flag(write, 'w'),
        flag(exec, 'x'),
        if shared { 's' } else { 'p' },
        vma.offset,
        vma.device.0,
        vma.device.1,
        vma.inode
    )
    .into_bytes();
    if !vma.name.is_empty() {
        line.resize(line.len().max(73), b' ');
        line.extend(&vma.name);
    }
    line.push(b'\n');
    line
}

#[test]
fn arbitrary_file_names_are_kept_byte_for_byte() {
    let vmas = parse_maps(HOSTILE).unwrap();
    assert_eq!(vmas.len(), 11);
    assert_eq!(vmas[0].name, b"/opt/a b/prog\\012second line (deleted)");
    assert_eq!(vmas[1].name, b"/tmp/\xff\xfe-1000-2000 rw-p ends in a space ");
    assert!(vmas[2].perms.shared);
    assert_eq!(vmas[5].name, b"");
    assert_eq!(vmas[5].perms, Perms::default());
    assert_eq!((vmas[8].device, vmas[8].inode), ((0x100, 0xf_ffff), u64::MAX));
    assert_eq!(vmas[10].start, 0xffff_ffff_ff60_0000);
    assert!(vmas[10].is_special() && !vmas[9].is_special());
    assert_eq!(vmas[9].pages(), Pages(33));
    assert_eq!(vmas.iter().flat_map(line).collect::<Vec<_>>(), HOSTILE, "printing gives the text back");
}

#[test]
fn mappings_are_classified_by_name_size_and_program() {
    use RegionKind::{Anonymous, FileCopy, Heap, Stack};
    let vmas = parse_maps(HOSTILE).unwrap();
    let kinds: Vec<RegionKind> = vmas.iter().map(|vma| kind_of(vma, b"prog")).collect();
    assert_eq!(kinds[..2], [FileCopy, FileCopy]);
    assert_eq!(kinds[3..10], [Anonymous, FileCopy, Anonymous, Anonymous, Heap, FileCopy, Stack]);
    let guest = &parse_smaps(QEMU).unwrap()[0].vma;
    assert_eq!(kind_of(guest, b"qemu-system-x86_64"), RegionKind::GuestRam);
    assert_eq!(kind_of(guest, b"firecracker"), RegionKind::GuestRam);
    assert_eq!(kind_of(guest, b"java"), Anonymous);
    let small = Vma { end: guest.start + GUEST_RAM_AT_LEAST - 4096, ..guest.clone() };
    assert_eq!(kind_of(&small, b"qemu-system-x86_64"), Anonymous);
}

#[test]
fn recorded_maps_and_smaps_agree() {
    let maps = parse_maps(SLEEP_MAPS).unwrap();
    let details = parse_smaps(SLEEP_SMAPS).unwrap();
    assert!(maps.len() > 10);
    assert_eq!(maps, details.iter().map(|detail| detail.vma.clone()).collect::<Vec<_>>());
    assert!(details.iter().all(|detail| detail.ksm_kib == Some(0)));
    let stack = details.iter().find(|detail| detail.vma.name == b"[stack]").unwrap();
    assert!(stack.flags.has(*b"gd") && stack.flags.has(*b"ac") && !stack.flags.has(*b"mg"));
    assert!(stack.anonymous_kib > 0 && stack.anonymous_kib <= stack.rss_kib);
}

#[test]
fn smaps_counters_and_flags_are_parsed() {
    let details = parse_smaps(QEMU).unwrap();
    let guest = &details[0];
    assert_eq!((guest.rss_kib, guest.anonymous_kib, guest.swap_kib), (812_344, 812_344, 1024));
    assert_eq!((guest.anon_huge_kib, guest.ksm_kib), (409_600, Some(120_004)));
    assert!(guest.flags.has(*b"mg") && guest.flags.has(*b"hg") && !guest.flags.has(*b"dd"));
    assert!(details[1].flags.has(*b"lo") && details[1].flags.has(*b"dd") && details[1].flags.has(*b"wf"));
    assert!(details[3].flags.has(*b"zz"), "unknown flags are kept");
    assert!(!details[3].flags.has(*b"??"));
    assert_eq!(format!("{:?}", details[2].flags), r#"["me", "mr", "ms", "mw", "rd", "sd", "sh", "wr"]"#);
    assert_eq!(parse_smaps(OLD).unwrap()[0].ksm_kib, None);
}

#[test]
fn malformed_text_is_refused() {
    for bad in [
        &b"1000-2000 rw-p 0 00:00"[..],
        b"1000-2000 rw-p 0 00:00 x",
        b"2000-1000 rw-p 0 00:00 0",
        b"1001-2000 rw-p 0 00:00 0",
        b"1000-2000 rwxq 0 00:00 0",
        b"1000-2000 rw-p 0 0000 0",
        b"1000-11112222333344445 rw-p 0 00:00 0",
        b"\n\nwords",
    ] {
        assert!(parse_maps(bad).is_err(), "{}", String::from_utf8_lossy(bad));
    }
    let backwards = b"2000-3000 rw-p 0 00:00 0\n1000-3000 rw-p 0 00:00 0\n";
    assert!(parse_maps(backwards).is_err() && parse_smaps(backwards).is_err());
    assert!(parse_smaps(b"1000-2000 rw-p 0 00:00 0\nRss: 18446744073709551615 kB\n").is_err());
    // Between two pieces of the list the second mapping grew downwards.
    let grown = b"2000-3000 rw-p 0 00:00 0\n1000-5000 rw-p 8000 0:1 1\n";
    let second = &parse_maps(grown).unwrap()[1];
    assert_eq!((second.start, second.end, second.offset), (0x3000, 0x5000, 0xa000));
    assert_eq!(&parse_smaps(grown).unwrap()[1].vma, second);
    // The first mapping's file offset plus length overflows.
    let ends = b"1000-2000 rw-p fffffffffffff000 0:1 1\n2000-3000 rw-p 0 0:1 1\n";
    assert!(parse_smaps(ends).unwrap().iter().all(|detail| detail.original_bytes == 4096));
    // Marks have split the first two mappings. The third one was never part of them.
    let split = b"1000-2000 rw-p 0 00:00 0\nVmFlags: rd dd\n2000-3000 rw-p 0 00:00 0\nVmFlags: rd dd mg sd\n\
        3000-4000 rw-p 0 00:00 0\nVmFlags: rd dd lo\n";
    let bytes: Vec<u64> = parse_smaps(split).unwrap().iter().map(|detail| detail.original_bytes).collect();
    assert_eq!(bytes, [8192, 8192, 4096]);
    assert!(parse_smaps(b"Rss: 4 kB\n").is_err());
    assert!(parse_smaps(b"1000-2000 rw-p 0 00:00 0\nRss: 4 MB\n").is_err());
    assert!(parse_smaps(b"1000-2000 rw-p 0 00:00 0\nRss: kB\n").is_err());
    assert_eq!(parse_maps(b"").unwrap(), []);
}

/// The text of smaps with `number` mappings of a page each, of this kind and with this much anonymous memory.
fn many(number: usize, first: u64, kind: &str, anonymous_kib: u64) -> String {
    let mut text = String::new();
    for at in (first..).take(number) {
        let (start, end) = (at * 8192, at * 8192 + 4096);
        let _ = write!(text, "{start:x}-{end:x} {kind}\nRss: 4 kB\nAnonymous: {anonymous_kib} kB\n");
    }
    text
}

fn read_text(text: &str) -> Result<Vec<VmaDetail>, ListError> {
    let mut found = Details::default();
    found.read(text.as_bytes(), Names::All, |_| true)?;
    Ok(found.finish())
}

#[test]
fn only_mappings_that_could_be_merged_count_against_the_most() {
    let file = "r--s 0 8:1 7 /index";
    let mapped = many(20_000, 1, file, 0) + &many(40_000, 30_000, "r-xp 0 8:1 7 /lib", 0);
    let heap = many(MAPPINGS_MOST, 100_000, "rw-p 0 00:00 0", 4);
    let details = read_text(&(mapped.clone() + &heap)).unwrap();
    assert_eq!(details.len(), OTHERS_MOST + MAPPINGS_MOST);
    assert_eq!(details.iter().map(|detail| detail.rss_kib).sum::<u64>(), 4 * (60_000 + MAPPINGS_MOST as u64));
    assert!(details.windows(2).all(|pair| pair[0].vma.end <= pair[1].vma.start));
    for more in ["rw-p 0 00:00 0", "rw-p 0 8:1 7 /lib"] {
        let text = mapped.clone() + &heap + &many(1, 200_000, more, 4);
        assert!(matches!(read_text(&text), Err(ListError::TooMany)), "{more}");
    }
    assert_eq!(read_text(&(heap + &many(1, 200_000, file, 0))).unwrap().len(), MAPPINGS_MOST + 1);
}

/// A thread has a stack and a guard page. Hardened allocators have guards, too.
#[test]
fn guards_and_untouched_mappings_count_only_among_marked_ones() {
    let untouched = |first, kind| many(20_000, first, kind, 0).replace("Rss: 4 kB", "Rss: 0 kB");
    let threads = untouched(1, "---p 0 00:00 0") + &untouched(30_000, "rw-p 0 00:00 0");
    let heap = many(2, 100_000, "rw-p 0 00:00 0", 4);
    assert_eq!(read_text(&(threads.clone() + &heap)).unwrap().len(), OTHERS_MOST / 2 + 2);
    let mut files = read_text(&(threads.clone() + &many(9_000, 70_000, "r--s 0 8:1 7 /index", 0))).unwrap();
    let rest = 9_000 - OTHERS_MOST as u64 / 2 + 1;
    assert_eq!((files.len(), files.pop().unwrap().rss_kib), (OTHERS_MOST, 4 * rest));
    // A buffer pool of 32 MiB that marks have split. Nothing was written to its middle part yet.
    let pool = "100000000-100800000 rw-p 0 00:00 0\nAnonymous: 4 kB\nVmFlags: rd wr dd mg\n\
        100800000-101800000 rw-p 0 00:00 0\nAnonymous: 0 kB\nVmFlags: rd wr dd\n\
        101800000-102000000 rw-p 0 00:00 0\nAnonymous: 4 kB\nVmFlags: rd wr dd mg\n";
    let details = read_text(&(threads + pool)).unwrap();
    assert_eq!((details.len(), details[OTHERS_MOST / 2].original_bytes), (OTHERS_MOST / 2 + 3, 32 << 20));
}

#[test]
fn a_mapping_is_pinned_if_the_others_cannot_hold_what_is() {
    let status = |pinned_kib, locked_kib| Status { locked_kib, pinned_kib, ..Status::parse(STATUS).unwrap() };
    let text = b"1000-a000 rw-p 0 00:00 0\nRss: 32 kB\nAnonymous: 32 kB\nb000-d000 rw-p 0 00:00 0\nRss: 4 kB\n";
    let pinned = |pinned_kib| {
        let mut details = parse_smaps(text).unwrap();
        set_pinned(&mut details, pinned_kib);
        details.iter().map(|detail| (detail.pinned_kib, detail.is_pinned())).collect::<Vec<_>>()
    };
    assert_eq!(pinned(0), [(0, false), (0, false)]);
    assert_eq!(pinned(16), [(12, false), (0, false)]);
    assert_eq!(pinned(34), [(30, true), (2, false)]);
    assert_eq!(pinned(99), [(32, true), (4, true)]);
    // A mapping of hugetlb pages, some of them present, and a device's mapping.
    let beside = |huge_kib: u64| {
        let more = format!(
            "10000-90000 rw-s 0 0:1 1\nRss: 0 kB\nShared_Hugetlb: {huge_kib} kB\nPrivate_Hugetlb: 16 kB\nVmFlags: rd sh ht\n\
             100000-900000 rw-s 0 0:1 1\nRss: 0 kB\nVmFlags: rd sh pf io de\n"
        );
        pinned_kib(&parse_smaps(&[text, more.as_bytes()].concat()).unwrap(), &status(90, 0))
    };
    assert_eq!((beside(48), beside(0)), (26, 74), "64 KiB may be in huge pages, or 16");
    let mut details = parse_smaps(text).unwrap();
    assert_eq!(pinned_kib(&details, &status(8, 40)), 48, "VFIO pins memory that counts as locked");
    details[0].flags.insert(*b"lo");
    assert_eq!(pinned_kib(&details, &status(8, 40)), 12, "36 KiB are locked by mlock");
}

/// A guest has 1 GiB and two modules of 512 MiB each; its emulator has 200 MiB of its own, in small mappings.
#[test]
fn the_modules_of_a_pinned_guest_are_pinned() {
    let text = b"40000000-80000000 rw-p 0 00:00 0\nRss: 1048576 kB\n\
        90000000-b0000000 rw-p 0 00:00 0\nRss: 524288 kB\nc0000000-e0000000 rw-p 0 00:00 0\nRss: 524288 kB\n\
        f0000000-f2000000 rw-p 0 00:00 0\nRss: 32768 kB\n100000000-110000000 rw-s 0 00:01 7\nRss: 172032 kB\n";
    let pinned = |mib: u64| {
        let mut details = parse_smaps(text).unwrap();
        set_pinned(&mut details, mib << 10);
        details.iter().map(VmaDetail::is_pinned).collect::<Vec<_>>()
    };
    assert_eq!(pinned(2_048), [true, true, true, false, false]);
    assert_eq!(pinned(1_900), [false; 5], "the emulator's own may be pinned, and then not all of the guest's is");
}

const STATUS: &[u8] = b"Tgid:\t1\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapPrm:\t0\n";

proptest! {
    #[test]
    fn flags_are_a_set(flags in prop::collection::vec([b'a'..=b'z', b'a'..=b'z'], 0..40)) {
        let set: VmFlags = flags.iter().copied().collect();
        let mut expected = flags;
        expected.sort_unstable();
        expected.dedup();
        prop_assert_eq!(set.iter().collect::<Vec<_>>(), expected);
    }
}
