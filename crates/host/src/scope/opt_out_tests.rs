use super::*;
use crate::scope::deny_list::DenyList;
use crate::scope::opt_out_qemu::{is_qemu, of_arguments};
use crate::scope::opt_out_unit::{Setting, memory_ksm, of_cgroup, user_of};
use pagefold_procmem::cgroup::parse_cgroups;
use std::os::unix::fs::symlink;
use std::sync::mpsc::channel;

/// A root directory.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, path: &str, text: &str) -> &Self {
        let path = below(self.0.path(), Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn remove(&self, path: &str) {
        fs::remove_file(below(self.0.path(), Path::new(path))).unwrap();
    }

    /// The file that opts a cgroup out.
    fn decides(&self, cgroup: &str) -> Option<String> {
        let mut found = read(cgroup, self.0.path());
        assert!(found.len() <= 1, "{found:?}");
        match found.pop()? {
            OptOut::Unit { file, .. } | OptOut::Guest { file, .. } => Some(file.to_str().unwrap().to_owned()),
            other => panic!("{other:?}"),
        }
    }
}

const NO: &str = "[Service]\nMemoryKSM=no\n";
const YES: &str = "[Service]\nMemoryKSM=yes\n";

fn option_of(arguments: &[&str]) -> Option<&'static str> {
    of_arguments(arguments.join("\0").as_bytes(), |_| None)
}

#[test]
fn a_machine_opts_out_however_it_is_written() {
    for off in [
        &["qemu", "-machine", "q35,mem-merge=off"][..],
        &["qemu", "-M", "type=pc,mem-merge=no"],
        &["qemu", "--machine", "mem-merge=n"],
        &["qemu", "--M", "mem_merge=false,accel=kvm"],
        &["qemu", "-machine", "pc,nomem-merge"],
        &["qemu", "-machine", "mem-merge=on", "-m", "1G", "-machine", "mem-merge=off"],
        &["qemu", "-machine", "mem-merge=off", "-machine", "q35"],
        &["qemu", "-machine", "mem-merge=off,mem-merge=perhaps"],
        &["qemu", "-machine", "a=b,,c,mem-merge=off"],
        &["qemu", "-machine", "mem-merge=off", "-machine"],
    ] {
        assert_eq!(option_of(off), Some("-machine mem-merge=off"), "{off:?}");
    }
    for on in [
        &["qemu", "-machine", "q35"][..],
        &["qemu", "-machine", "mem-merge=off", "-M", "mem-merge=on"],
        &["qemu", "-machine", "mem-merge=off,mem-merge=y"],
        &["qemu", "-machine", "nomem-merge,mem-merge"],
        &["qemu", "-machine", "a=b,,mem-merge=off"],
        &["qemu", "-machine", "mem-merge=OFF"],
        &["qemu", "-name", "mem-merge=off"],
        &["qemu", "---machine", "mem-merge=off"],
        &["qemu", "-machine"],
        &[],
    ] {
        assert_eq!(option_of(on), None, "{on:?}");
    }
}

#[test]
fn a_part_of_the_memory_opts_out() {
    for off in [
        &["kvm", "-object", "memory-backend-ram,id=m0,size=1G,merge=off"][..],
        &["kvm", "-object", r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","merge":false,"size":1}"#],
        &["kvm", "-object", "memory-backend-ram,id=a,merge=on", "-object", "memory-backend-ram,merge=n,id=b"],
        &["kvm", "-object", "memory-backend-ram,id=a,merge=on", "-set", "object.a.merge=off"],
    ] {
        assert_eq!(option_of(off), Some("-object merge=off"), "{off:?}");
    }
    for on in [
        &["kvm", "-object", "memory-backend-ram,id=m0,size=1G"][..],
        &["kvm", "-object", "memory-backend-ram,id=m0,merge=off", "-set", "object.m0.merge=on"],
        &["kvm", "-object", r#"{"qom-type":"memory-backend-ram","merge":true}"#],
        &["kvm", "-object", r#"{"merge":false"#],
        &["kvm", "-set", "drive.a.merge=off"],
    ] {
        assert_eq!(option_of(on), None, "{on:?}");
    }
}

#[test]
fn a_file_of_options_is_read_in_its_place() {
    let text = b"# a comment\n[drive]\n  mem-merge = \"off\"\n[machine]\n  type = \"q35\"\n  mem_merge = \"off\"\n";
    let with = |arguments: &[&str]| {
        of_arguments(arguments.join("\0").as_bytes(), |path| (path == Path::new("/etc/vm.cfg")).then(|| text.to_vec()))
    };
    assert_eq!(with(&["qemu", "-readconfig", "/etc/vm.cfg"]), Some("-machine mem-merge=off"));
    assert_eq!(with(&["qemu", "-readconfig", "/etc/vm.cfg", "-M", "mem-merge=on"]), None);
    assert_eq!(with(&["qemu", "-readconfig", "etc/vm.cfg"]), None, "relative to what the process chooses");
    let object = |_: &Path| Some(b"[object \"m0\"]\n qom-type = \"memory-backend-ram\"\n merge = \"no\"\n".to_vec());
    assert_eq!(of_arguments(b"qemu\0-readconfig\0/x", object), Some("-object merge=off"));
    let mut read = 0;
    let many = "qemu\0".to_owned() + &"-readconfig\0/x\0".repeat(100);
    of_arguments(many.as_bytes(), |_| {
        read += 1;
        None
    });
    assert_eq!(read, 16);
}

#[test]
fn only_files_of_root_alone_are_read_for_a_process() {
    let root = Root::new();
    root.write("/a", "text").write("/theirs", "text");
    let path = |name: &str| root.0.path().join(name);
    assert_eq!(read_roots_file(&path("a"), 3).as_deref(), Some(&b"tex"[..]));
    symlink(path("a"), path("link")).unwrap();
    fs::set_permissions(path("theirs"), std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let elsewhere = ["/dev/zero", "/proc/version", "Cargo.toml"].map(PathBuf::from);
    for refused in [path("link"), path("theirs"), path("none"), path("")].into_iter().chain(elsewhere) {
        assert_eq!(read_roots_file(&refused, 3), None, "{}", refused.display());
    }
}

#[test]
fn programs_named_as_qemu_are_qemu() {
    for name in ["qemu-system-x86_64", "qemu-system-aarch64", "kvm", "qemu-kvm"] {
        assert!(is_qemu(name.as_bytes()), "{name}");
    }
    for name in ["qemu-img", "kvm-spice", "bash", ""] {
        assert!(!is_qemu(name.as_bytes()), "{name}");
    }
}

#[test]
fn a_guest_of_proxmox_opts_out() {
    let root = Root::new();
    let file = "/etc/pve/qemu-server/104.conf";
    for (text, is_out) in [
        ("memory: 2048\nallow-ksm: 0\n", true),
        ("allow-ksm: no\r\n", true),
        ("allow-ksm: 0\nallow-ksm: 1\n", false),
        ("allow-ksm: 1\n[PENDING]\nallow-ksm: 0\n", true),
        ("allow-ksm: 0\n[PENDING]\nallow-ksm: 1\n", true),
        ("memory: 1\n[before-upgrade]\nallow-ksm: 0\n", false),
        ("#allow-ksm: 0\nallow-ksmx: 0\n", false),
        ("", false),
    ] {
        root.write(file, text);
        assert_eq!(root.decides("/qemu.slice/104.scope").is_some(), is_out, "{text}");
    }
    root.write(file, "allow-ksm: 0\n");
    assert_eq!(root.decides("/qemu.slice/104.scope").as_deref(), Some(file));
    for other in ["/qemu.slice/105.scope", "/a/qemu.slice/104.scope", "/qemu.slice/../104.scope", "/qemu.slice/.scope"]
    {
        assert_eq!(root.decides(other), None, "{other}");
    }
}

#[test]
fn the_last_assignment_of_a_unit_file_counts() {
    for (text, setting) in [
        ("[Service]\nMemoryKSM=no\n", Some(Setting::No)),
        ("[Service]\n MemoryKSM = OFF \n", Some(Setting::No)),
        ("[Service]\nMemoryKSM=\\\n# between\n  0\n", Some(Setting::No)),
        ("[Service]\nMemoryKSM=no\nMemoryKSM=yes", Some(Setting::Yes)),
        ("[Service]\nMemoryKSM=no\nMemoryKSM=\n", Some(Setting::Reset)),
        ("[Service]\nMemoryKSM=no\nMemoryKSM=perhaps\n", Some(Setting::No)),
        ("[Unit]\nMemoryKSM=no\n[Service]\nUser=x\n", None),
        ("MemoryKSM=no\n[Service]\n#MemoryKSM=no\n;MemoryKSM=no\nXMemoryKSM=no\n", None),
        ("[Service]\nExecStart=a \\\nMemoryKSM=no\n", None),
    ] {
        assert_eq!(memory_ksm(text.as_bytes(), "Service"), setting, "{text}");
    }
}

#[test]
fn units_are_read_by_the_precedence_of_systemd() {
    let root = Root::new();
    let web = || root.decides("/system.slice/web-front-a.service");
    root.write("/usr/lib/systemd/system/web-front-a.service", NO);
    assert_eq!(web().as_deref(), Some("/usr/lib/systemd/system/web-front-a.service"));
    root.write("/etc/systemd/system/web-front-a.service", "[Service]\n");
    assert_eq!(web(), None, "it replaces the one of the distribution");
    // The drop-in directories have less and less specific names.
    for directory in ["web-front-a.service.d", "web-front-.service.d", "web-.service.d", "service.d"] {
        let file = format!("/usr/lib/systemd/system/{directory}/10.conf");
        root.write(&file, NO);
        assert_eq!(web().as_deref(), Some(&*file));
        root.write(&format!("/run/systemd/system/{directory}/10.conf"), "");
        assert_eq!(web(), None, "a file of that name comes first");
        root.remove(&format!("/run/systemd/system/{directory}/10.conf"));
        root.write("/etc/systemd/system.control/web-front-a.service.d/20.conf", YES);
        assert_eq!(web(), None, "a later one");
        root.remove("/etc/systemd/system.control/web-front-a.service.d/20.conf");
        root.remove(&file);
    }
    // The name of the drop-in decides on the order, not its directory.
    root.write("/etc/systemd/system/service.d/90.conf", NO);
    root.write("/etc/systemd/system/web-front-a.service.d/10.conf", YES);
    assert_eq!(web().as_deref(), Some("/etc/systemd/system/service.d/90.conf"));
    root.write("/etc/systemd/system/service.d/95.conf", "[Service]\nMemoryKSM=\n");
    assert_eq!(web(), None);
}

#[test]
fn instances_have_the_settings_of_their_template() {
    let root = Root::new();
    let tty = || root.decides(r"/system.slice/system-getty\x2dx.slice/getty-x@tty1.service");
    root.write("/usr/lib/systemd/system/getty-x@.service", NO);
    assert!(tty().is_some());
    root.write("/usr/lib/systemd/system/getty-x@.service.d/10.conf", YES);
    assert_eq!(tty(), None);
    root.write("/usr/lib/systemd/system/getty-x@tty1.service.d/20.conf", NO);
    assert!(tty().is_some());
    root.write("/run/systemd/transient/getty-x@tty1.service", "");
    root.write("/etc/systemd/system/getty-@.service.d/30.conf", YES);
    assert_eq!(tty(), None);
    // A masked unit counts as empty.
    root.remove("/usr/lib/systemd/system/getty-x@tty1.service.d/20.conf");
    root.remove("/usr/lib/systemd/system/getty-x@.service.d/10.conf");
    root.remove("/etc/systemd/system/getty-@.service.d/30.conf");
    root.remove("/run/systemd/transient/getty-x@tty1.service");
    assert!(tty().is_some());
    symlink("/dev/null", root.0.path().join("etc/systemd/system/getty-x@tty1.service")).unwrap();
    assert_eq!(tty(), None);
}

#[test]
fn links_below_the_folders_of_a_user_are_not_followed() {
    let root = Root::new();
    root.write("/etc/passwd", "alice:x:1000:1000:A:/home/alice:/bin/sh\n").write("/secret", NO);
    root.write("/linked/a.conf", YES).write("/home/alice/.config/systemd/user/other.service", YES);
    let path = "/user.slice/user-1000.slice/user@1000.service/app.slice/app.service";
    let unknown = vec![OptOut::Unknown { cgroup: path.to_owned() }];
    let inside = |path: &str| root.0.path().join(path);
    let unit = inside("home/alice/.config/systemd/user/app.service");
    for (target, found) in [("secret", &unknown), ("proc/kmsg", &unknown), ("/dev/null", &Vec::new())] {
        symlink(inside(target), &unit).unwrap();
        assert_eq!(&read(path, root.0.path()), found, "{target}");
        fs::remove_file(&unit).unwrap();
    }
    let drop_ins = unit.with_extension("service.d");
    symlink(inside("linked"), &drop_ins).unwrap();
    assert_eq!(read(path, root.0.path()), unknown);
    fs::remove_file(&drop_ins).unwrap();
    // Nor do we follow a link in place of a folder above.
    fs::rename(inside("home/alice/.config"), inside("moved")).unwrap();
    symlink(inside("moved"), inside("home/alice/.config")).unwrap();
    assert_eq!(read(path, root.0.path()), unknown);
    // Root's own links, such as a home that has moved, are followed.
    fs::remove_file(inside("home/alice/.config")).unwrap();
    fs::rename(inside("moved"), inside("home/alice/.config")).unwrap();
    fs::rename(inside("home"), inside("elsewhere")).unwrap();
    symlink(inside("elsewhere"), inside("home")).unwrap();
    root.write("/elsewhere/alice/.config/systemd/user/app.service", NO);
    assert_eq!(root.decides(path).as_deref(), Some("/home/alice/.config/systemd/user/app.service"));
}

#[test]
fn users_opt_out_by_their_own_units() {
    let root = Root::new();
    root.write("/etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000:A:/home/alice:/bin/sh\n");
    let path = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.service";
    for file in [
        "/home/alice/.config/systemd/user/app-x.service",
        "/run/user/1000/systemd/transient/app-x.service",
        "/home/alice/.local/share/systemd/user/app-x.service.d/a.conf",
        "/usr/lib/systemd/user/app-.service.d/a.conf",
        // Applies to everything that a user runs.
        "/etc/systemd/system/user@.service.d/a.conf",
    ] {
        root.write(file, NO);
        assert_eq!(root.decides(path).as_deref(), Some(file));
        root.remove(file);
    }
    assert_eq!(root.decides(path), None);
    root.write("/home/alice/.config/systemd/user/app-x.service", NO);
    let of_bob = path.replace("1000", "1001");
    assert_eq!(root.decides(&of_bob), None);
    assert_eq!((user_of(path), user_of("/system.slice/a.service")), (Some(1000), None));
}

#[test]
fn cgroups_below_a_unit_have_its_setting_and_no_other() {
    let root = Root::new();
    root.write("/etc/systemd/system/a.service", NO).write("/etc/systemd/system/run-x.mount", "[Mount]\nMemoryKSM=0\n");
    for inside in ["/system.slice/a.service", "/a.service/worker/3", "/a.slice/a-b.slice/_a.service", "/run-x.mount"] {
        assert!(root.decides(inside).is_some(), "{inside}");
    }
    for outside in [
        "/",
        "",
        "/system.slice",
        "/lxc/201/ns/system.slice/a.service",
        "/system.slice/docker-1.scope/system.slice/a.service",
        "/../system.slice/a.service",
        "/system.slice/..service",
        "/user.slice/user-1.slice/user@x.service/a.service",
    ] {
        assert_eq!(root.decides(outside), None, "{outside}");
    }
    let whose = |path| Whose::of(path);
    assert_eq!((whose("/qemu.slice/104.scope"), whose("/system.slice/a.service")), (Whose::Guests, Whose::System));
    assert_eq!(whose("/user.slice/user@7.service/a.service"), Whose::User(7));
    // Many dashes cost no more than a few.
    let long = format!("/system.slice/{}.service", "a-".repeat(120));
    assert_eq!(of_cgroup(&long, root.0.path()), []);
}

#[test]
fn more_files_than_are_read_are_a_no() {
    let root = Root::new();
    let unknown = [OptOut::Unknown { cgroup: "/a.service".to_owned() }];
    for (name, most) in [("x", 1_024), ("x.conf", 64)] {
        let directory = "/run/systemd/system/a.service.d";
        (0..most).for_each(|number| _ = root.write(&format!("{directory}/{number}{name}"), YES));
        assert_eq!(read("/a.service", root.0.path()), []);
        root.write(&format!("{directory}/more{name}"), YES);
        assert_eq!(read("/a.service", root.0.path()), unknown, "{name}");
        fs::remove_dir_all(below(root.0.path(), Path::new(directory))).unwrap();
    }
}

#[test]
fn what_is_no_regular_file_is_not_opened() {
    let root = Root::new();
    let fifo = root.0.path().join("fifo");
    let name = std::ffi::CString::new(fifo.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the path is NUL-terminated.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    for path in [&fifo, Path::new("/dev/zero"), root.0.path(), &root.0.path().join("none")] {
        assert!(read_file(path, &[], FILE_MOST).unwrap().is_empty(), "{}", path.display());
    }
    root.write("/large", &"x".repeat(1 << 20));
    assert_eq!(read_file(&root.0.path().join("large"), &[], FILE_MOST).unwrap().len() as u64, FILE_MOST);
}

#[test]
fn opt_outs_are_overridden_one_by_one() {
    let unit = OptOut::Unit { unit: "a.service".to_owned(), file: "/a".into() };
    let guest = OptOut::Guest { vmid: "104".to_owned(), file: "/b".into() };
    let option = by_command_line("-machine mem-merge=off", Some("/qemu.slice/104.scope"));
    let list = DenyList::default().overriding(vec!["104".to_owned(), "qemu-kvm".to_owned()]);
    assert!(list.overrides(&guest, None) && list.overrides(&option, None));
    assert!(!list.overrides(&unit, None) && !list.overrides(&unit, Some(b"a.service")));
    assert!(list.overrides(&unit, Some(b"qemu-kvm")), "by the program");
    assert!(!DenyList::default().overrides(&guest, Some(b"qemu-kvm")));
    let attribute = OptOut::Attribute { cgroup: "/sys/fs/cgroup/a".to_owned() };
    assert!(attribute.is_called("/sys/fs/cgroup/a") && !attribute.is_called("a"));
    assert!(!by_command_line("x", None).is_called(""));
    let cgroup = "/user.slice/user-1000.slice/user@1000.service/app.slice/a.service".to_owned();
    let unknown = OptOut::Unknown { cgroup: cgroup.clone() };
    assert!(unknown.is_called(&cgroup) && unknown.is_called("user@1000.service") && !unknown.is_called("a.service"));
    assert!(
        unknown.to_string().ends_with("--override-opt-out user@1000.service merges this user's programs all the same")
    );
}

fn key(whose: Whose, path: &str) -> Key {
    Key { whose, path: path.to_owned(), root: PathBuf::new() }
}

#[test]
fn files_are_read_again_after_a_while_only() {
    let known = Known::new();
    let no = || vec![OptOut::Unit { unit: "a.service".to_owned(), file: "/a".into() }];
    let now = Instant::now();
    assert_eq!(known.get(key(Whose::System, "/a"), now, no), no());
    assert_eq!(known.get(key(Whose::System, "/a"), now + VALID / 2, || unreachable!()), no());
    assert_eq!(known.get(key(Whose::System, "/b"), now, Vec::new), []);
    let later = now + VALID * 100;
    assert_eq!(known.get(key(Whose::System, "/a"), later, Vec::new), []);
    assert_eq!(known.get(key(Whose::System, "/a"), later, || unreachable!()), []);
    for number in 0..2 * REMEMBERED {
        known.get(key(Whose::System, &number.to_string()), later, Vec::new);
    }
    assert_eq!(known.entries.lock().unwrap().len(), REMEMBERED);
}

/// However many cgroups a user makes, root's files are read again in time, and other owners' cgroups are remembered.
#[test]
fn many_cgroups_of_a_user_delay_nobody_else() {
    let known = Known::new();
    let now = Instant::now();
    for number in 0..REMEMBERED {
        known.get(key(Whose::User(1000), &number.to_string()), now, Vec::new);
    }
    let slowly = || {
        let began_ns = thread_cpu_ns();
        while thread_cpu_ns() < began_ns + 1_000_000 {}
        Vec::new()
    };
    for whose in [Whose::System, Whose::User(1001)] {
        known.get(key(whose, "/a"), now, slowly);
        assert_eq!(known.get(key(whose, "/a"), now + VALID / 2, || unreachable!()), []);
        let found = || vec![OptOut::Unit { unit: "a.service".to_owned(), file: "/a".into() }];
        assert_eq!(known.get(key(whose, "/a"), now + VALID, found), found());
    }
    for number in 0..500 {
        known.get(key(Whose::System, &number.to_string()), now, Vec::new);
    }
    known.get(key(Whose::System, "/b"), now, slowly);
    assert_eq!(known.get(key(Whose::System, "/b"), now + VALID, || unreachable!()), []);
    let found = || vec![OptOut::Unit { unit: "a.service".to_owned(), file: "/a".into() }];
    assert_eq!(known.get(key(Whose::System, "/b"), now + VALID_MOST, found), found());
}

#[test]
fn files_that_do_not_answer_are_a_no_and_keep_no_other_user_waiting() {
    let known = Known::new();
    let now = Instant::now();
    let mut releases = Vec::new();
    for number in 0..2 * LATE_MOST {
        let (release, wait) = channel::<()>();
        let path = format!("/user/{number}");
        let found = known.get(key(Whose::User(1000), &path), now, move || {
            let _ = wait.recv();
            Vec::new()
        });
        assert_eq!(found, [OptOut::Unknown { cgroup: path }]);
        releases.push(release);
    }
    let late = known.entries.lock().unwrap().values().filter(|entry| entry.is_late()).count();
    assert_eq!(late, LATE_MOST, "no more than these are left behind");
    assert_eq!(known.get(key(Whose::User(1001), "/a"), now, Vec::new), []);
    assert_eq!(known.get(key(Whose::System, "/a"), now, Vec::new), []);
    drop(releases);
    let end = Instant::now() + Duration::from_secs(10);
    while known.entries.lock().unwrap().values().any(Entry::is_late) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(known.get(key(Whose::User(1000), "/user/0"), now + PAUSE, Vec::new), []);
}

/// The limit holds for any number of users with any number of cgroups.
#[test]
fn the_cgroups_that_we_remember_are_bounded() {
    let known = Known::new();
    let now = Instant::now();
    let count =
        |known: &Known, whose: Whose| known.entries.lock().unwrap().keys().filter(|key| key.whose == whose).count();
    for number in 0..40 {
        known.get(key(Whose::System, &number.to_string()), now, Vec::new);
    }
    // Reading takes a thread for each, so we fill in what would be read.
    for uid in 1..=40 {
        let mut entries = known.entries.lock().unwrap();
        for number in 0..REMEMBERED / 20 {
            let found = Some(Vec::new());
            let entry = Entry { found, next: now + VALID, late: None };
            entries.insert(key(Whose::User(uid), &format!("/{number}")), entry);
            if entries.len() > REMEMBERED_IN_ALL {
                forget_one(&mut entries);
            }
        }
    }
    known.get(key(Whose::User(50), "/a"), now, Vec::new);
    assert_eq!(known.entries.lock().unwrap().len(), REMEMBERED_IN_ALL);
    assert_eq!((count(&known, Whose::System), count(&known, Whose::User(50))), (40, 1), "who has few keeps them");
}

/// This holds for any number of cgroups, and however long it takes to read their files.
#[test]
fn a_users_files_take_a_share_of_the_time() {
    let known = Known::new();
    let now = Instant::now();
    let mut read = 0;
    for number in 0..100 {
        let path = format!("/user/{number}");
        let found = known.get(key(Whose::User(7001), &path), now, || {
            let end = Instant::now() + Duration::from_millis(100);
            while Instant::now() < end {}
            Vec::new()
        });
        match &found[..] {
            [] => read += 1,
            found => assert_eq!(found, [OptOut::Unknown { cgroup: path }]),
        }
    }
    assert!((1..=11).contains(&read), "{read}");
    assert_eq!(known.get(key(Whose::User(7002), "/a"), now, Vec::new), []);
    assert_eq!(known.get(key(Whose::System, "/a"), now, Vec::new), []);
    assert_eq!(known.get(key(Whose::User(7001), "/user/99"), now + Duration::from_secs(60), Vec::new), []);
}

#[test]
fn both_hierarchies_of_systemd_count_once() {
    let root = Root::new();
    root.write("/etc/systemd/system/a.service", NO).write("/etc/systemd/system/b.service", NO);
    let roots = Roots { files: root.0.path().to_owned(), ..Roots::default() };
    let units = |text: &str| by_files(&parse_cgroups(text.as_bytes()), &roots).len();
    assert_eq!(units("1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n"), 1);
    assert_eq!(units("1:name=systemd:/system.slice/a.service/x\n0::/system.slice/a.service\n"), 1);
    assert_eq!(units("5:memory:/system.slice/b.service\n0::/\n"), 0);
    assert_eq!(units("0::/b.service\n"), 1);
}

#[test]
fn reasons_are_one_printable_line() {
    let wild = "a\n\u{1b}[2J\u{202e}".to_owned();
    for opt_out in [
        OptOut::Attribute { cgroup: wild.clone() },
        OptOut::Unit { unit: wild.clone(), file: wild.clone().into() },
        OptOut::Guest { vmid: wild.clone(), file: wild.clone().into() },
        OptOut::CommandLine { option: "-machine mem-merge=off", guest: Some(wild.clone()) },
        OptOut::Unknown { cgroup: wild },
    ] {
        let text = opt_out.to_string();
        assert!(!text.contains(char::is_control) && !text.contains('\u{202e}'), "{text}");
    }
}
