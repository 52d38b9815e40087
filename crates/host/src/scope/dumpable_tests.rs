use super::*;
use pagefold_testkit::Forked;
use std::sync::Arc;

/// Asks about a child that has set its user (0: remains root) and its dumpable attribute.
fn answer(user: u32, dumpable: bool) -> Dumpable {
    let child = Forked::start(|| {
        // SAFETY: plain system calls; changing the user clears the attribute, so it is set after that.
        unsafe {
            if user != 0 {
                libc::syscall(libc::SYS_setresgid, user, user, user);
                libc::syscall(libc::SYS_setresuid, user, user, user);
            }
            libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(dumpable));
        }
    });
    let process = Arc::new(Process::open(child.0).unwrap());
    super::dumpable(&ProcessInfo::of(&process).unwrap()).unwrap()
}

fn effective() -> CapabilitySet {
    capabilities(None).unwrap().effective
}

#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn the_attribute_is_determined_for_our_own_and_other_users() {
    // SAFETY: the call takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return pagefold_testkit::skip("changing the user needs root");
    }
    let before = effective();
    for user in [0, 65534] {
        assert_eq!(answer(user, true), Dumpable::Yes, "user {user}");
        assert_eq!(answer(user, false), Dumpable::No, "user {user}");
    }
    assert_eq!(effective(), before, "the capability is raised again");
}

#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn root_of_a_user_namespace_is_asked_from_within_it() {
    // SAFETY: the call takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return pagefold_testkit::skip("entering a user namespace needs root");
    }
    // A namespace need not map its root, nor anybody.
    let root = [("setgroups", "deny"), ("gid_map", "0 0 1"), ("uid_map", "0 0 1")];
    for maps in [&root[..], &[("uid_map", "1000 0 1")], &[]] {
        for (dumpable, expected) in [(1, Dumpable::Yes), (0, Dumpable::No)] {
            let child = Forked::start(|| {
                // SAFETY: a plain system call.
                assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER) }, 0);
                for (file, text) in maps {
                    fs::write(Path::new("/proc/self").join(file), text).unwrap();
                }
                // SAFETY: a plain system call.
                unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable) };
            });
            let process = Arc::new(Process::open(child.0).unwrap());
            let info = ProcessInfo::of(&process).unwrap();
            assert_eq!(super::dumpable(&info).unwrap(), Dumpable::Unknown);
            assert_eq!(ask_inside(&info), expected, "{maps:?}");
        }
    }
}

/// The namespace's root, who owns a non-dumpable process's files, may be any user of the namespace around it.
#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn a_user_of_another_namespace_is_not_judged_by_the_owner_of_its_files() {
    // SAFETY: the call takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return pagefold_testkit::skip("changing the user needs root");
    }
    for (dumpable, expected) in [(1, Dumpable::Unknown), (0, Dumpable::No)] {
        let child = Forked::start(|| {
            // SAFETY: plain system calls; changing the user clears the attribute, so we set it again.
            unsafe {
                libc::syscall(libc::SYS_setresgid, 65534, 65534, 65534);
                libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534);
                libc::prctl(libc::PR_SET_DUMPABLE, 1);
                assert_eq!(libc::unshare(libc::CLONE_NEWUSER), 0);
            }
            for (file, text) in [("setgroups", "deny"), ("gid_map", "7 65534 1"), ("uid_map", "7 65534 1")] {
                fs::write(Path::new("/proc/self").join(file), text).unwrap();
            }
            // SAFETY: a plain system call.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable) };
        });
        let process = Arc::new(Process::open(child.0).unwrap());
        let info = ProcessInfo::of(&process).unwrap();
        assert_eq!(super::dumpable(&info).unwrap(), expected);
        assert_eq!(ask_inside(&info) == Dumpable::Yes, dumpable == 1);
    }
}

#[test]
fn ids_inside_a_user_namespace_are_found() {
    assert_eq!(id_inside(b"         0          0 4294967295\n", 7), Some(7));
    let two = b"         0     100000      65536\n     70000      1000      1\n";
    assert_eq!(id_inside(two, 100_000), Some(0));
    assert_eq!(id_inside(two, 165_535), Some(65_535));
    assert_eq!(id_inside(two, 165_536), None);
    assert_eq!(id_inside(two, 1000), Some(70_000));
    assert_eq!(id_inside(b"", 0), None);
    assert_eq!(id_inside(b"\xff\n0\n0 x", 0), None);
}

#[test]
fn a_process_that_cannot_be_asked_is_unknown_and_asked_less_and_less_often() {
    let start = Instant::now();
    let mut answer =
        Answer { of: (1, ProgramId { image: 1, exe: None, uid: 0 }), last: None, next: start, pause: FIRST_PAUSE };
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let now = answer.next;
        answer.record(now, None);
        assert_eq!(answer.valid(now), Dumpable::Unknown);
        pauses.push((answer.next - now).as_secs());
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    // We ask again, and answers expire if we can't.
    let now = answer.next;
    answer.record(now, Some(Dumpable::Yes));
    assert_eq!((answer.valid(now), answer.next), (Dumpable::Yes, now + ANSWER_FRESH));
    answer.record(now + ANSWER_FRESH, None);
    assert_eq!(answer.valid(now + ANSWER_FRESH), Dumpable::Yes);
    assert_eq!(answer.valid(now + ANSWER_VALID), Dumpable::Unknown);
    answer.record(now + ANSWER_VALID, Some(Dumpable::No));
    assert_eq!(answer.valid(now + ANSWER_VALID), Dumpable::No);
}
