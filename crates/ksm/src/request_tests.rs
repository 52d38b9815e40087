use super::*;
use pagefold_engine::hash::LINES;
use pagefold_engine::random::INCREMENT;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

/// Compares sizes and offsets with the kernel's, so that our fields are in the kernel's order.
#[test]
fn the_structures_are_those_of_the_header() {
    use std::mem::offset_of;
    assert_eq!((size_of::<RawRange>(), size_of::<RawMerge>()), (72, 24));
    assert_eq!((align_of::<RawRange>(), align_of::<RawMerge>()), (8, 8));
    let range = [
        offset_of!(RawRange, keep_addr),
        offset_of!(RawRange, take_addr),
        offset_of!(RawRange, nr_pages),
        offset_of!(RawRange, page_status),
        offset_of!(RawRange, nr_done),
        offset_of!(RawRange, nr_merged),
        offset_of!(RawRange, keep_pidfd),
        offset_of!(RawRange, take_pidfd),
        offset_of!(RawRange, flags),
        offset_of!(RawRange, status),
        offset_of!(RawRange, keep_mappers),
        offset_of!(RawRange, reserved),
    ];
    assert_eq!(range, [0, 8, 16, 24, 32, 40, 48, 52, 56, 60, 64, 68]);
    let merge = [
        offset_of!(RawMerge, version),
        offset_of!(RawMerge, range_size),
        offset_of!(RawMerge, ranges),
        offset_of!(RawMerge, nr_ranges),
        offset_of!(RawMerge, reserved),
    ];
    assert_eq!(merge, [0, 4, 8, 16, 20]);
    let hash = [
        offset_of!(RawHash, version),
        offset_of!(RawHash, flags),
        offset_of!(RawHash, pidfd),
        offset_of!(RawHash, from),
        offset_of!(RawHash, to),
        offset_of!(RawHash, reserved),
        offset_of!(RawHash, addr),
        offset_of!(RawHash, nr_pages),
        offset_of!(RawHash, key),
        offset_of!(RawHash, hashes),
        offset_of!(RawHash, nr_done),
    ];
    assert_eq!(hash, [0, 4, 8, 12, 14, 16, 24, 32, 40, 48, 56]);
    assert_eq!((size_of::<RawHash>(), align_of::<RawHash>()), (64, 8));
    // _IOWR: direction 3, size, type, number.
    assert_eq!(u32::try_from(IOC_MERGE).unwrap(), 3_u32 << 30 | 24 << 16 | 0xb9 << 8);
    assert_eq!(u32::try_from(IOC_HASH).unwrap(), 3_u32 << 30 | 64 << 16 | 0xb9 << 8 | 1);
}

/// The constants in the header, by name.
fn header() -> BTreeMap<String, String> {
    let text = include_str!("../../../kernel/include/linux/ksm.h");
    let words = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let defined = words.filter_map(|words| match words.as_slice() {
        ["#define", name, value @ ..] => Some(((*name).to_owned(), value.join(" "))),
        [name, "=", value] => Some(((*name).to_owned(), value.trim_end_matches(',').to_owned())),
        _ => None,
    });
    defined.collect()
}

#[test]
fn the_numbers_are_those_of_the_header() {
    let header = header();
    assert_eq!(header["KSM_ABI_VERSION"], ABI_VERSION.to_string());
    assert_eq!(header["KSM_IOC_MAGIC"], "0xB9");
    assert_eq!(header["KSM_IOC_MERGE"], "_IOWR(KSM_IOC_MAGIC, 0x00, struct ksm_merge)");
    assert_eq!(header["KSM_IOC_HASH"], "_IOWR(KSM_IOC_MAGIC, 0x01, struct ksm_hash)");
    assert_eq!(header["KSM_HASH_LINES"], LINES.to_string());
    assert_eq!(header["KSM_HASH_GOLDEN"], format!("{INCREMENT:#x}ULL"));
    assert_eq!((header["KSM_MERGE_KEEP_ONE"].as_str(), KEEP_ONE), ("(1U << 0)", 1));
    assert_eq!((header["KSM_MERGE_ZERO"].as_str(), KEEP_ZERO), ("(1U << 1)", 2));
    assert!(CALL_RANGES <= header["KSM_MERGE_MAX_RANGES"].parse().unwrap());
    assert!(CALL_PAGES <= header["KSM_MERGE_MAX_PAGES"].parse().unwrap());
    for (name, merging) in [
        ("UNTRIED", Merging::Untried),
        ("MERGED", Merging::Merged),
        ("SHARED", Merging::Shared),
        ("DIFFERS", Merging::Differs),
        ("ABSENT", Merging::Absent),
        ("BUSY", Merging::Busy),
        ("INELIGIBLE", Merging::Ineligible),
        ("FULL", Merging::Full),
        ("GONE", Merging::Absent),
    ] {
        assert_eq!(outcome(header[&format!("KSM_PAGE_{name}")].parse().unwrap()), merging, "{name}");
    }
    assert_eq!(outcome(255), Merging::Untried);
}

#[test]
fn files_that_are_not_the_device_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("ksm");
    assert!(matches!(RequestDevice::open(&at), Err(RequestError::Absent { .. })));
    std::fs::write(&at, "").unwrap();
    assert!(matches!(RequestDevice::open(&at), Err(RequestError::Other { .. })));
    assert!(matches!(RequestDevice::open(dir.path()), Err(RequestError::Other { .. })));
    // A device that doesn't know our calls.
    let error = RequestDevice::open(Path::new("/dev/null")).unwrap_err();
    assert_eq!(error.to_string(), "/dev/null does not have version 1 of the interface");
    // Root may open the file even so.
    std::fs::set_permissions(&at, PermissionsExt::from_mode(0o0)).unwrap();
    assert!(matches!(RequestDevice::open(&at), Err(RequestError::Denied { .. } | RequestError::Other { .. })));
}

#[test]
fn the_carrier_is_known_by_the_module() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Carrier::of(dir.path()), Carrier::Series);
    std::fs::create_dir_all(dir.path().join("module/ksm_request")).unwrap();
    assert_eq!(Carrier::of(dir.path()), Carrier::Module);
}

/// Acts as a kernel that does at most `most` pages per call, and derives each page's outcome from its number.
struct Kernel {
    most: u64,
    calls: Vec<Vec<RawRange>>,
    /// Calls that fail, by number, with their errors. Below: calls in which one range fails, with the range's number,
    /// the page where it fails, and the error.
    fails: BTreeMap<usize, i32>,
    range_fails: BTreeMap<usize, (usize, u64, i32)>,
}

impl Kernel {
    fn of(most: u64) -> Self {
        Self { most, calls: Vec::new(), fails: BTreeMap::new(), range_fails: BTreeMap::new() }
    }

    fn call(&mut self, ranges: &mut [RawRange], statuses: &mut [u8]) -> io::Result<usize> {
        let number = self.calls.len();
        self.calls.push(ranges.to_vec());
        if let Some(&errno) = self.fails.get(&number) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let (mut left, mut from) = (self.most, 0);
        for (at, range) in ranges.iter_mut().enumerate() {
            if left == 0 {
                return Ok(at);
            }
            range.nr_done = range.nr_pages.min(left);
            if let Some(&(_, before, errno)) = self.range_fails.get(&number).filter(|fail| fail.0 == at) {
                (range.nr_done, range.status) = (before, -errno);
            }
            for page in 0..range.nr_done {
                let frame = range.take_addr / PAGE_BYTES + page;
                statuses[from + usize::try_from(page).unwrap()] = u8::try_from(1 + frame % 9).unwrap();
            }
            left -= range.nr_done;
            from += usize::try_from(range.nr_pages).unwrap();
            if range.status == 0 && range.nr_done < range.nr_pages {
                return Ok(at + 1);
            }
        }
        Ok(ranges.len())
    }
}

fn merge(kernel: &mut Kernel, ranges: &[(u64, u32)]) -> Merged {
    let null = File::open("/dev/null").unwrap();
    let of = |&(page, pages): &(u64, u32)| Range {
        process: null.as_fd(),
        address: page * PAGE_BYTES,
        pages,
        kept: Kept::Run(null.as_fd(), (1 << 30) + page * PAGE_BYTES),
        keep_mappers: 3,
    };
    let ranges: Vec<Range<'_>> = ranges.iter().map(of).collect();
    merge_by(|raw, statuses| kernel.call(raw, statuses), &ranges, || true)
}

/// The outcomes that [`Kernel`] gives these pages.
fn expected(ranges: &[(u64, u32)]) -> Vec<Merging> {
    let pages = ranges.iter().flat_map(|&(first, pages)| first..first + u64::from(pages));
    pages.map(|page| outcome(u8::try_from(1 + page % 9).unwrap())).collect()
}

#[test]
fn requests_go_on_where_a_call_ended_early() {
    let ranges = [(100, 3), (200, 1), (300, 10), (400, 1), (500, 6)];
    for most in [1, 2, 3, 4, 7, 20, 21, 100] {
        let mut kernel = Kernel::of(most);
        // Signals before the first and third call.
        kernel.fails = BTreeMap::from([(0, libc::EINTR), (2, libc::EINTR)]);
        let merged = merge(&mut kernel, &ranges);
        assert_eq!(merged.pages, expected(&ranges), "{most}");
        assert!(merged.error.is_none());
        for raw in kernel.calls.iter().flatten() {
            assert_eq!((raw.keep_addr, raw.keep_mappers), (raw.take_addr + (1 << 30), 3));
        }
    }
}

#[test]
fn calls_are_bounded() {
    let long = [(0, 10_000), (20_000, 1), (30_000, 5_000)];
    let mut kernel = Kernel::of(u64::MAX);
    assert_eq!(merge(&mut kernel, &long).pages, expected(&long));
    let pages = |ranges: &Vec<RawRange>| ranges.iter().map(|range| range.nr_pages).sum::<u64>();
    assert_eq!(kernel.calls.iter().map(pages).collect::<Vec<_>>(), [4096, 4096, 4096, 2713]);
    let many: Vec<(u64, u32)> = (0..3000).map(|page| (page * 2, 1)).collect();
    let mut kernel = Kernel::of(u64::MAX);
    assert_eq!(merge(&mut kernel, &many).pages, expected(&many));
    assert_eq!(kernel.calls.iter().map(Vec::len).collect::<Vec<_>>(), [1024, 1024, 952]);
}

#[test]
fn a_failed_range_leaves_the_others() {
    let ranges = [(100, 3), (200, 4), (300, 2)];
    for (errno, rest) in
        [(libc::EINVAL, Merging::Untried), (libc::ESRCH, Merging::Untried), (libc::ENOMEM, Merging::Busy)]
    {
        let mut kernel = Kernel::of(u64::MAX);
        kernel.range_fails.insert(0, (1, 1, errno));
        let merged = merge(&mut kernel, &ranges);
        let mut pages = expected(&ranges);
        pages[4..7].fill(rest);
        assert_eq!(merged.pages, pages);
        assert_eq!(merged.error.unwrap().raw_os_error(), Some(errno));
    }
}

#[test]
fn what_was_not_tried_says_so() {
    let ranges = [(100, 3), (200, 4)];
    let untried = vec![Merging::Untried; 7];
    let mut kernel = Kernel::of(u64::MAX);
    kernel.fails.insert(0, libc::ENODEV);
    let merged = merge(&mut kernel, &ranges);
    assert_eq!((merged.pages, merged.error.unwrap().raw_os_error()), (untried.clone(), Some(libc::ENODEV)));
    // The kernel does nothing, as if signals ended every call.
    let mut kernel = Kernel::of(0);
    assert_eq!(merge(&mut kernel, &ranges).pages, untried);
    // The caller stops after the first call.
    let mut kernel = Kernel::of(3);
    let null = File::open("/dev/null").unwrap();
    let range = Range { process: null.as_fd(), address: 0, pages: 7, kept: Kept::Zero, keep_mappers: 0 };
    let mut calls = 0;
    let merged = merge_by(
        |raw, statuses| kernel.call(raw, statuses),
        &[range],
        || {
            calls += 1;
            calls == 1
        },
    );
    assert_eq!(merged.pages[..3], expected(&[(0, 3)]));
    assert_eq!(merged.pages[3..], untried[..4]);
    let raw = kernel.calls[0][0];
    assert_eq!((raw.keep_pidfd, raw.keep_addr, raw.flags), (-1, 0, KEEP_ZERO));
}

#[test]
fn a_call_in_which_every_page_differs_is_the_last() {
    let null = File::open("/dev/null").unwrap();
    let kept = Kept::Page(null.as_fd(), 0);
    let range = Range { process: null.as_fd(), address: 0, pages: 10_000, kept, keep_mappers: 1 };
    for (equal, calls) in [(None, 1), (Some(5), 2)] {
        let mut first = true;
        let by = |raw: &mut [RawRange], statuses: &mut [u8]| {
            for range in raw.iter_mut() {
                range.nr_done = range.nr_pages;
            }
            statuses.fill(3);
            if let Some(at) = equal.filter(|_| std::mem::take(&mut first)) {
                statuses[at] = 1;
            }
            Ok(raw.len())
        };
        let pages = merge_by(by, &[range], || true).pages;
        let tried = pages.iter().filter(|&&page| page != Merging::Untried).count();
        assert_eq!(tried, calls * CALL_PAGES as usize);
    }
}

/// What each call asks for: `from`, `to`, the first page and the number of pages.
type HashCalls = Vec<(u16, u16, u64, u64)>;

/// Hashes pages with a kernel that does at most `most` per call, or fails with these errors. A hash is the page's
/// number plus one.
fn hash(pages: usize, most: u64, fails: &BTreeMap<usize, i32>) -> (io::Result<Vec<u64>>, HashCalls) {
    let null = File::open("/dev/null").unwrap();
    let (mut hashes, mut calls, mut tries) = (vec![0; pages], HashCalls::new(), 0);
    let asked = Hashed { process: null.as_fd(), address: 100 * PAGE_BYTES, key: 7, from: 0, to: 4 };
    let call = |raw: &mut RawHash, hashes: &mut [u64]| {
        assert_eq!((raw.version, raw.flags, raw.reserved, raw.key), (ABI_VERSION, 0, 0, 7));
        tries += 1;
        if let Some(&errno) = fails.get(&(tries - 1)) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        calls.push((raw.from, raw.to, raw.addr / PAGE_BYTES, count(hashes.len())));
        raw.nr_done = most.min(count(hashes.len()));
        let numbers = raw.addr / PAGE_BYTES - 99..;
        hashes.iter_mut().zip(numbers).take(usize::try_from(most).unwrap()).for_each(|(hash, number)| *hash = number);
        Ok(())
    };
    let result = hash_by(call, &asked, &mut hashes);
    (result.map(|()| hashes), calls)
}

#[test]
fn hashing_goes_on_where_a_call_ended_early() {
    let signals = BTreeMap::from([(0, libc::EINTR), (2, libc::EINTR)]);
    for most in [1, 2, 3, 6, 7] {
        let (hashes, calls) = hash(7, most, &signals);
        assert!(hashes.unwrap().into_iter().eq(1..=7), "{most}");
        assert!(calls.iter().all(|call| (call.0, call.1) == (0, 4) && call.2 + call.3 == 107));
    }
    let (hashes, calls) = hash(10_000, 1 << 20, &BTreeMap::new());
    assert!(hashes.unwrap().into_iter().eq(1..=10_000));
    assert_eq!(calls, [(0, 4, 100, 4096), (0, 4, 4196, 4096), (0, 4, 8292, 1808)]);
}

#[test]
fn hashing_ends_with_an_error_of_the_kernel() {
    let (hashes, calls) = hash(7, 3, &BTreeMap::from([(1, libc::ESRCH)]));
    assert_eq!((hashes.unwrap_err().raw_os_error(), calls.len()), (Some(libc::ESRCH), 1));
    let (hashes, calls) = hash(7, 0, &BTreeMap::new());
    assert_eq!(hashes.unwrap_err().kind(), io::ErrorKind::Interrupted);
    assert_eq!(calls.len(), IN_VAIN_MOST as usize);
    assert!(hash(0, 0, &BTreeMap::new()).1.is_empty());
}
