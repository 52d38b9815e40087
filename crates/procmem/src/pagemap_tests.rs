use super::*;
use pagefold_engine::units::PAGE_SIZE;

#[test]
fn entries_are_decoded() {
    let private = PagemapEntry(1 << 63 | 1 << 56 | 0x1234);
    assert!(private.private() && private.exclusive());
    assert_eq!(private.pfn(), Some(0x1234));
    assert!(!PagemapEntry(1 << 63 | 0x1234).private(), "mapped more than once");
    assert!(!PagemapEntry(1 << 63 | 1 << 61 | 1 << 56).private(), "page of a file");
    assert!(!PagemapEntry(1 << 62 | 1 << 56).private(), "swapped out");
    assert_eq!(PagemapEntry(1 << 62 | 0x1234).pfn(), None, "a swap offset");
    assert_eq!(PagemapEntry(1 << 63).pfn(), None, "frame number hidden");
}

#[test]
fn scan_finds_the_categories_of_own_memory() {
    let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
    let pagemap = Pagemap::open(&own).unwrap();
    assert!(pagemap.is_live().unwrap());
    let code = Vpn::of_address(scan_finds_the_categories_of_own_memory as *const () as u64);
    let local = 0u8;
    let stack = Vpn::of_address((&raw const local) as u64);
    for (page, expected) in [(code, Categories::FILE.or(Categories::PRESENT)), (stack, Categories::PRESENT)] {
        let mut found = Vec::new();
        let wanted = Categories::PRESENT.or(Categories::FILE).or(Categories::ZERO).or(Categories::HUGE);
        match pagemap.scan(page, Pages(1), wanted, &mut found) {
            Err(ScanError::Absent) => return pagefold_testkit::skip_unsupported("PAGEMAP_SCAN needs Linux 6.7"),
            other => other.unwrap(),
        }
        assert_eq!(found, [PageRange { first: page, pages: Pages(1), categories: expected }]);
        let mut entry = [0];
        pagemap.read(page, &mut entry).unwrap();
        assert_eq!(PagemapEntry(entry[0]).file_or_shared(), expected.has(Categories::FILE));
    }
}

#[test]
fn a_scan_with_more_ranges_than_one_call_returns_is_complete() {
    let pages = 1000u64;
    let length = 1000 * PAGE_SIZE;
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let start = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(start, libc::MAP_FAILED);
    // SAFETY: the pages are inside the new mapping.
    unsafe {
        libc::madvise(start, length, libc::MADV_NOHUGEPAGE);
        (0..1000).step_by(2).for_each(|page| start.cast::<u8>().add(page * PAGE_SIZE).write(1));
    }
    let first = Vpn::of_address(start as u64);
    let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
    let mut found = Vec::new();
    match Pagemap::open(&own).unwrap().scan(first, Pages(pages), Categories::PRESENT, &mut found) {
        Err(ScanError::Absent) => pagefold_testkit::skip_unsupported("PAGEMAP_SCAN needs Linux 6.7"),
        result => {
            result.unwrap();
            let firsts: Vec<Vpn> = found.iter().map(|range| range.first).collect();
            assert_eq!(firsts, (0..pages).step_by(2).map(|page| first + page).collect::<Vec<_>>());
        }
    }
    // SAFETY: the mapping belongs to this test and is no longer used.
    unsafe { libc::munmap(start, length) };
}
