use super::*;
use pagefold_core::units::Pages;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const SECOND: u64 = 1_000_000_000;
/// Where the child maps, one mapping after the other, and where it moves one to. Nothing else of it is near.
const FIRST: usize = 0x10_0000_0000;
const STEP: usize = 64 << 20;
const AWAY: usize = 0x20_0000_0000;
const BYTES: usize = 8 << 20;

/// A forked child that maps, unmaps, moves and fills memory when told to.
struct Child {
    pid: i32,
    line: UnixStream,
}

impl Child {
    fn fork() -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        // SAFETY: the child makes only system calls, which are safe after fork in a program with threads.
        match unsafe { libc::fork() } {
            0 => obey(&theirs),
            pid => {
                assert!(pid > 0);
                Self { pid, line }
            }
        }
    }

    fn tell(&mut self, order: u8) {
        self.line.write_all(&[order]).unwrap();
        let mut done = [0];
        self.line.read_exact(&mut done).unwrap();
        assert_eq!(done, [order], "the child failed");
    }

    fn kill(&mut self) {
        // SAFETY: the child is ours and not yet reaped.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // The end of the line comes with the end of the child.
        let _ = self.line.read(&mut [0]);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: the child is ours.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

fn obey(line: &UnixStream) -> ! {
    use std::os::fd::AsRawFd;
    let (fd, mut maps) = (line.as_raw_fd(), 0);
    loop {
        let mut order = [0_u8];
        // SAFETY: system calls on this process's own memory, at addresses that nothing else uses.
        unsafe {
            if libc::read(fd, order.as_mut_ptr().cast(), 1) != 1 {
                libc::_exit(0);
            }
            let last = (FIRST + STEP * (maps - usize::from(maps > 0))) as *mut libc::c_void;
            let done = match order[0] {
                b'm' => {
                    let at = (FIRST + STEP * maps) as *mut libc::c_void;
                    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                    let mapped = libc::mmap(at, BYTES, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0);
                    libc::madvise(at, BYTES, libc::MADV_NOHUGEPAGE);
                    maps += 1;
                    mapped == at && libc::madvise(at, 4096, libc::MADV_POPULATE_WRITE) == 0
                }
                b'l' => {
                    // Until it is told something else.
                    libc::write(fd, order.as_ptr().cast(), 1);
                    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    while libc::recv(fd, order.as_mut_ptr().cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) < 0 {
                        let at = libc::mmap(std::ptr::null_mut(), 65_536, libc::PROT_READ, how, -1, 0);
                        libc::munmap(at, 65_536);
                    }
                    continue;
                }
                b'u' => {
                    maps -= 1;
                    libc::munmap(last, BYTES) == 0
                }
                b'r' => {
                    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    libc::mremap(last, BYTES, BYTES, how, AWAY as *mut libc::c_void) as usize == AWAY
                }
                _ => libc::madvise(last, BYTES, libc::MADV_POPULATE_WRITE) == 0,
            };
            order[0] = if done { order[0] } else { 0 };
            libc::write(fd, order.as_ptr().cast(), 1);
        }
    }
}

struct Watched {
    child: Child,
    target: Target,
    now_ns: u64,
    next_key: u32,
}

impl Watched {
    fn new() -> Self {
        let child = Child::fork();
        let scoped = Scoped {
            process: Process::open(child.pid).unwrap(),
            name: "child".to_owned(),
            exe: None,
            cgroup: None,
            domain: None,
            uid: 0,
        };
        let mut watched =
            Self { child, target: Target::new(scoped, OwnerKey(1), DomainKey(0)), now_ns: 0, next_key: 0 };
        assert!(watched.look_after(0));
        watched
    }

    fn look(&mut self) -> Result<bool, ReadError> {
        let next_key = &mut self.next_key;
        self.target.look(self.now_ns, 1, &DenyList::new([]), || {
            *next_key += 1;
            RegionKey(*next_key)
        })
    }

    fn look_after(&mut self, ns: u64) -> bool {
        self.now_ns += ns;
        self.look().unwrap()
    }

    /// The pages present in the region at an address, and the region's key.
    fn at(&self, address: usize) -> Option<(u64, RegionKey)> {
        let region = self.target.regions.iter().find(|tracked| tracked.stretch.first.address() == address as u64)?;
        assert_eq!(region.stretch.pages, Pages(BYTES as u64 / 4096));
        Some((region.stretch.resident.0, region.key))
    }
}

#[test]
fn mappings_that_come_go_and_fill_are_noticed_and_quiet_ones_are_not_read_again() {
    let mut watched = Watched::new();
    // A fresh child may still be faulting in what it needs to read its orders.
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    let (resident, key) = watched.at(FIRST).unwrap();
    assert_eq!(resident, 1);
    let due_ns = |watched: &Watched| watched.target.seen.as_ref().unwrap().next_maps_ns;
    let first_ns = due_ns(&watched);
    assert!(!watched.look_after(SECOND / 2) && due_ns(&watched) == first_ns, "the sizes tell that nothing has changed");
    assert!(!watched.look_after(SECOND) && due_ns(&watched) > first_ns, "now and then the list is read all the same");

    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_some() && watched.at(FIRST) == Some((1, key)));
    watched.child.tell(b'u');
    assert!(watched.look_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_none() && watched.at(FIRST) == Some((1, key)));
    watched.child.tell(b'f');
    assert!(watched.look_after(10 * SECOND));
    assert_eq!(watched.at(FIRST), Some((BYTES as u64 / 4096, key)));
}

#[test]
fn a_change_is_taken_in_at_once_and_the_next_one_waits_for_its_share() {
    let mut watched = Watched::new();
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    watched.child.tell(b'm');
    assert!(!watched.look_after(1));
    assert!(watched.at(FIRST + STEP).is_none());
    assert!(watched.look_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_some());
}

#[test]
fn a_mapping_that_went_and_came_back_between_two_looks_is_another_one() {
    let mut watched = Watched::new();
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    let (_, first) = watched.at(FIRST).unwrap();
    // Glimpsed too soon for a look at the mappings.
    watched.child.tell(b'u');
    assert!(!watched.look_after(1));
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    let (_, second) = watched.at(FIRST).unwrap();
    assert_ne!(first, second);
    watched.child.tell(b'f');
    assert!(watched.look_after(10 * SECOND));
    assert_eq!(watched.at(FIRST).unwrap().1, second, "filling is no replacement");
}

#[test]
fn one_that_maps_all_the_time_is_left_alone_until_it_rests() {
    let mut watched = Watched::new();
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    assert!(watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
    watched.child.tell(b'l');
    // It has to be on a core in the very moment, of which other programs may keep it.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while watched.target.exclusion != Some(Exclusion::Restless) {
        assert!(std::time::Instant::now() < end, "not noticed");
        watched.look_after(SECOND);
    }
    assert!(watched.target.regions.is_empty());
    watched.child.tell(b'f');
    assert!(!watched.look_after(SECOND), "not at once");
    assert!(watched.look_after(RESTLESS_NS) && watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
}

#[test]
fn a_mapping_that_moves_is_noticed_though_no_size_has_changed() {
    let mut watched = Watched::new();
    watched.child.tell(b'm');
    assert!(watched.look_after(10 * SECOND));
    watched.child.tell(b'r');
    assert!(watched.look_after(MAPS_AGAIN_NS));
    assert!(watched.at(AWAY).is_some() && watched.at(FIRST).is_none());
}

#[test]
fn a_process_that_has_ended_has_vanished_reaped_or_not() {
    let mut watched = Watched::new();
    watched.child.kill();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while watched.target.process.is_alive() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(matches!(watched.look(), Err(ReadError::Vanished { .. })));
    // SAFETY: the child is ours.
    unsafe { libc::waitpid(watched.child.pid, std::ptr::null_mut(), 0) };
    assert!(matches!(watched.look(), Err(ReadError::Vanished { .. })));
}

#[test]
fn sizes_are_parsed_and_damage_is_refused() {
    let sizes = Sizes::parse(b"1234 567 89 10 0 432 0\n").unwrap();
    assert_eq!(sizes, Sizes { mapped: 1234, resident: 567, data: 432 });
    for text in [&b""[..], b"1 2 3 4 5", b"1 x 3 4 5 6 7", b"\xff"] {
        assert!(Sizes::parse(text).is_err());
    }
}

proptest! {
    #[test]
    fn sizes_never_panic(text in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = Sizes::parse(&text);
    }
}
