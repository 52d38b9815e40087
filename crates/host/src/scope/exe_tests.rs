use super::*;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown, symlink};

/// An executable file of this name in a directory.
fn program(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn exe(path: &Path) -> Exe {
    Exe {
        path: path.to_owned(),
        file: Found::of_path(path).ok(),
        place: None,
        trust: OnceLock::new(),
        led_here: Arc::default(),
    }
}

#[test]
fn a_file_that_others_can_change_is_matched_by_name_only() {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = program(&inner, "server");
    let named = path.to_str().unwrap();
    let matches = |selector: &str| exe(&path).matches(selector, b"server");
    assert_eq!((matches("server"), matches(named)), (Matching::Yes, Matching::Yes));
    assert_eq!((matches("other"), matches("/usr/bin/server")), (Matching::No, Matching::No));
    let untrusted = |what: &str| {
        for selector in ["server", named] {
            assert!(matches!(matches(selector), Matching::NameOnly(Distrust::Writable { .. })), "{what}: {selector}");
        }
    };
    for (writable, mode) in
        [(&path, 0o775), (&path, 0o757), (&inner, 0o777), (&inner, 0o1777), (&directory.path().to_owned(), 0o777)]
    {
        fs::set_permissions(writable, fs::Permissions::from_mode(mode)).unwrap();
        untrusted(&format!("{} with mode {mode:o}", writable.display()));
        fs::set_permissions(writable, fs::Permissions::from_mode(0o755)).unwrap();
    }
    for owned in [&path, &inner] {
        if chown(owned, Some(1234), None).is_err() {
            return;
        }
        untrusted(&format!("{} of another user", owned.display()));
        chown(owned, Some(0), None).unwrap();
    }
    assert_eq!(matches("server"), Matching::Yes);
}

#[test]
fn the_file_must_be_the_one_at_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = program(directory.path(), "server");
    let elsewhere = Exe { file: exe(&program(directory.path(), "another")).file, ..exe(&path) };
    assert_eq!(elsewhere.matches("server", b"server"), Matching::NameOnly(Distrust::Elsewhere));
    // A trusted program stays trusted while it runs: an upgrade may replace its file.
    let known = exe(&path);
    assert_eq!(known.trust(), Ok(()));
    fs::remove_file(&path).unwrap();
    assert_eq!(known.matches("server", b"server"), Matching::Yes);
}

#[test]
fn a_program_that_was_upgraded_is_known_by_the_path_it_had() {
    let directory = tempfile::tempdir().unwrap();
    let path = program(directory.path(), "server");
    symlink(&path, directory.path().join("link")).unwrap();
    let shown = || PathBuf::from(format!("{} (deleted)", path.display()));
    let file = Found::of_path(&path).unwrap();
    let replaced = |file: Found| Exe { file: Some(file), ..exe(&shown()) };
    fs::remove_file(&path).unwrap();
    for selector in ["server", path.to_str().unwrap()] {
        assert_eq!(replaced(file).matches(selector, b"server"), Matching::Yes, "{selector}");
    }
    assert_eq!(replaced(file).matches("other", b"server"), Matching::No);
    // The link leads to the new file.
    program(directory.path(), "server");
    assert_eq!(replaced(file).matches("link", b"link"), Matching::Yes);
    // We don't trust the path if somebody else could have written the old file, if the file was on another mount (in a
    // container), or if the directory isn't root's.
    let not_roots = [Found { uid: 1234, ..file }, Found { mode: 0o100_777, ..file }, Found { mount: u64::MAX, ..file }];
    for file in not_roots {
        assert_eq!(replaced(file).matches("server", b"server"), Matching::NameOnly(Distrust::Deleted));
    }
    // A service with its own mounts runs the file from a copy of the mount, a container from another mount.
    let mounts = fs::read("/proc/self/mountinfo").unwrap();
    let place = place_of(&mounts, file.mount).unwrap().to_vec();
    let copied = |place: &[u8]| Exe { place: Some(place.to_vec()), ..replaced(Found { mount: u64::MAX, ..file }) };
    assert_eq!(copied(&place).matches("server", b"server"), Matching::Yes);
    for other in [&b"0:1 / /"[..], &place[..place.len() - 1], &[&place[..], b"x"].concat()] {
        assert_eq!(copied(other).matches("server", b"server"), Matching::NameOnly(Distrust::Deleted));
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(replaced(file).matches("server", b"server"), Matching::NameOnly(Distrust::Writable { .. })));
    assert_eq!(exe(&shown()).matches("server", b"server"), Matching::NameOnly(Distrust::Deleted));
}

#[test]
fn links_are_followed_and_command_names_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = program(directory.path(), "redis-check-rdb");
    symlink(&path, directory.path().join("redis-server")).unwrap();
    let matches = |selector: &str, comm: &[u8]| exe(&path).matches(selector, comm);
    assert_eq!(matches("redis-server", b"redis-server"), Matching::Yes);
    assert_eq!(matches("redis-check-rdb", b"redis-server"), Matching::Yes);
    assert_eq!(matches(directory.path().join("redis-server").to_str().unwrap(), b"x"), Matching::Yes);
    assert_eq!(matches("redis-server", b"x"), Matching::No, "another of its names");
    assert_eq!(matches("nginx", b"nginx"), Matching::NameOnly(Distrust::CommandName));
    assert_eq!(matches("redis", b"redis-server"), Matching::No);
    // A path of several links, some of them relative.
    let bin = directory.path().join("bin");
    fs::create_dir(directory.path().join("usr")).unwrap();
    symlink("usr", &bin).unwrap();
    symlink("../redis-server", directory.path().join("usr/other")).unwrap();
    assert_eq!(matches(bin.join("other").to_str().unwrap(), b"x"), Matching::Yes);
    symlink("endless", directory.path().join("endless")).unwrap();
    assert_eq!(matches(directory.path().join("endless").to_str().unwrap(), b"x"), Matching::No);
    // A link in somebody's directory doesn't count, and we don't even look where it leads.
    let others = tempfile::tempdir().unwrap();
    let mine = others.path().join("mine");
    symlink(&path, &mine).unwrap();
    assert_eq!(matches(mine.to_str().unwrap(), b"x"), Matching::Yes);
    fs::set_permissions(others.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(matches(mine.to_str().unwrap(), b"x"), Matching::No);
    let theirs = program(others.path(), "theirs");
    symlink("theirs", others.path().join("link")).unwrap();
    assert_eq!(exe(&theirs).matches("link", b"x"), Matching::No);
    assert!(matches!(exe(&theirs).matches("link", b"link"), Matching::NameOnly(Distrust::Writable { .. })));
}

#[test]
fn a_program_stays_known_by_a_link_that_is_switched_to_another_version() {
    let directory = tempfile::tempdir().unwrap();
    let current = directory.path().join("current");
    let mut versions = Vec::new();
    for release in ["1", "2"] {
        let release = directory.path().join(release);
        fs::create_dir(&release).unwrap();
        program(&release, "helper");
        versions.push(program(&release, "server"));
    }
    let switch = |release: &str| {
        let _ = fs::remove_file(&current);
        symlink(release, &current).unwrap();
    };
    let selector = current.join("server");
    let matches = |exe: &Exe| exe.matches(selector.to_str().unwrap(), b"server");
    switch("1");
    let running = exe(&versions[0]);
    assert_eq!((matches(&running), matches(&running.clone())), (Matching::Yes, Matching::Yes));
    switch("2");
    assert_eq!((matches(&running), matches(&running.clone())), (Matching::Yes, Matching::Yes));
    assert_eq!(matches(&exe(&versions[1])), Matching::Yes);
    assert_eq!(running.matches(current.join("helper").to_str().unwrap(), b"server"), Matching::No, "another path");
    // This one was started before the link was switched, but we see it only now.
    assert_eq!(matches(&exe(&versions[0])), Matching::NameOnly(Distrust::OtherVersion));
    let helper = exe(&directory.path().join("1/helper"));
    assert_eq!(helper.matches(selector.to_str().unwrap(), b"helper"), Matching::No);
    assert_eq!(exe(&versions[0]).matches(versions[1].to_str().unwrap(), b"server"), Matching::No, "it is no link");
    switch("3");
    assert_eq!((matches(&running), matches(&exe(&versions[0]))), (Matching::Yes, Matching::No), "it leads nowhere");
    // A link that another user could have switched counts for nothing, and neither does another user's program.
    switch("2");
    fs::set_permissions(&versions[0], fs::Permissions::from_mode(0o757)).unwrap();
    assert_eq!(matches(&exe(&versions[0])), Matching::No);
    fs::set_permissions(&versions[0], fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!((matches(&exe(&versions[0])), matches(&exe(&versions[1]))), (Matching::No, Matching::No));
}

/// Such a link is python3, which leads to python3.11 and later to python3.13. Old releases may also be removed.
#[test]
fn a_version_is_listed_if_its_link_leads_to_another_name_or_its_directory_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let old = program(directory.path(), "server-1");
    program(directory.path(), "server-2");
    let link = directory.path().join("server");
    symlink("server-2", &link).unwrap();
    let other = Matching::NameOnly(Distrust::OtherVersion);
    for selector in ["server", link.to_str().unwrap()] {
        assert_eq!(exe(&old).matches(selector, b"server"), other, "{selector}");
        assert_eq!(exe(&directory.path().join("server-2")).matches(selector, b"server"), Matching::Yes, "{selector}");
    }
    assert_eq!(exe(&old).matches(link.to_str().unwrap(), b"server-1"), Matching::No, "it goes by its own name");
    // The command name is cut off.
    let long = directory.path().join("a-server-with-a-long-name");
    symlink("server-2", &long).unwrap();
    let matches = |exe: &Exe, comm: &[u8]| exe.matches(long.to_str().unwrap(), comm);
    assert_eq!(
        (matches(&exe(&old), b"a-server-with-a"), matches(&exe(&old), b"a-server")),
        (other.clone(), Matching::No)
    );
    // A program of another user, or in a container, may give itself this name. We don't take it for an old version.
    let file = Found::of_path(&old).unwrap();
    for file in [Found { uid: 1234, ..file }, Found { mode: 0o100_777, ..file }, Found { mount: u64::MAX, ..file }] {
        let theirs = Exe { path: "/elsewhere/server-1".into(), file: Some(file), ..exe(&old) };
        assert_eq!(theirs.matches(link.to_str().unwrap(), b"server"), Matching::No, "{file:?}");
    }

    let release = directory.path().join("1");
    fs::create_dir(&release).unwrap();
    let removed = program(&release, "server-2");
    let path = format!("{} (deleted)", removed.display());
    let removed = Exe { path: path.into(), ..exe(&removed) };
    fs::remove_dir_all(&release).unwrap();
    assert_eq!(removed.matches(link.to_str().unwrap(), b"server"), other);
    assert_eq!(removed.matches("server-2", b"server-2"), Matching::NameOnly(Distrust::Deleted));
    let before = Exe { path: release.join("server-2"), ..removed.clone() };
    assert!(before == removed && before != exe(&old), "a fork runs the same file");
}

#[test]
fn names_include_command_names_which_are_truncated() {
    let named = |selector: &str, exe: &str, comm: &[u8]| is_named(selector, Some(Path::new(exe)), comm);
    assert!(named("redis-server", "/usr/bin/redis-check-rdb", b"redis-server"));
    assert!(named("redis-check-rdb", "/usr/bin/redis-check-rdb (deleted)", b"redis-server"));
    assert!(!named("redis", "/usr/bin/redis-check-rdb", b"redis-server"));
    assert!(named("a-very-long-name-of-a-link", "/usr/bin/tool", b"a-very-long-nam"));
    assert!(!named("a-very-long-name-of-another", "/usr/bin/a-very-long-name-of-this", b"a-very-long-nam"));
}

#[test]
fn the_place_of_a_mount_is_its_device_root_and_mount_point() {
    let mounts =
        b"25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n125 25 8:1 /a /usr\\040b rw - ext4 /dev/sda1 rw\n";
    assert_eq!(place_of(mounts, 25), Some(&b"8:1 / /"[..]));
    assert_eq!(place_of(mounts, 125), Some(&b"8:1 /a /usr\\040b"[..]));
    assert_eq!(place_of(mounts, 2), None);
    assert_eq!(place_of(b"25 1 8:1 / /", 25), None, "cut off");
    let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
    let here = Found::of_path(Path::new("/")).unwrap().mount;
    assert!(place_seen_by(&own, here).is_some_and(|place| place.ends_with(b" /")));
    assert_eq!(place_seen_by(&own, u64::MAX), None);
}

#[test]
fn the_executable_of_a_process_is_identified() {
    let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
    let exe = Exe::of(&own).unwrap().unwrap();
    assert_eq!(&*exe, std::env::current_exe().unwrap());
    assert_eq!(exe.id(), Some(Found::of_path(&exe).unwrap().id));
}

/// Another process may mount something at this very moment, but hardly ten times in a row.
#[test]
fn mounts_that_have_not_changed_are_not_read_again() {
    let mut mounts = Mounts::open().unwrap();
    assert!(!mounts.text.is_empty());
    assert!((0..10).any(|_| !mounts.refresh().unwrap()));
}

/// A user's FUSE mount, as AppImages and rootless containers have it. It has no server, but nobody asks it.
#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn a_file_that_root_cannot_look_at_is_provided() {
    let directory = tempfile::tempdir().unwrap();
    let process = directory.path().join("77");
    let mount = directory.path().join("mount");
    fs::create_dir(&process).unwrap();
    fs::create_dir(&mount).unwrap();
    fs::write(process.join("stat"), format!("77 (app) S 1 {}", "0 ".repeat(60))).unwrap();
    symlink(&mount, process.join("exe")).unwrap();
    let root = directory.path().to_owned();
    let found = std::thread::spawn(move || {
        let server = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!("fd={},rootmode=40000,user_id=1000,group_id=1000", server.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let path = std::ffi::CString::new(mount.as_os_str().as_bytes()).unwrap();
        // SAFETY: the calls read these strings only. The mount is in this thread's namespace, and ends with it.
        let is_mounted = unsafe {
            let private = libc::MS_REC | libc::MS_PRIVATE;
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()) == 0
                && libc::mount(c"test".as_ptr(), path.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast()) == 0
        };
        is_mounted.then(|| Exe::of(&Process::open_at(&root, 77).unwrap()))
    });
    let Some(found) = found.join().unwrap() else { return pagefold_testkit::skip_unsupported("cannot mount FUSE") };
    let exe = found.unwrap().unwrap();
    assert_eq!((exe.id(), exe.trust()), (None, Err(&Distrust::Provided)));
}
