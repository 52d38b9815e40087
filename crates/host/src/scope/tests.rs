use super::deny_list::DenyList;
use super::dumpable::Dumpable;
use super::exclude::Exclusion;
use super::exe::Distrust;
use super::opt_out::OptOut;
use super::*;
use crate::judge::{Judge, ProgramHistory, ScopeRules};
use pagefold_procmem::cgroup::parse_cgroups;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A fixture of /proc and /sys/fs/cgroup.
pub(super) struct Tree {
    directory: tempfile::TempDir,
    pub(super) roots: Roots,
}

impl Tree {
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let roots = Roots { proc: root.join("proc"), cgroup: root.join("cgroup"), files: root.join("files") };
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        fs::create_dir_all(&roots.cgroup).unwrap();
        Self { directory, roots }
    }

    pub(super) fn process(&self, pid: i32, comm: &[u8], exe: Option<&str>, uid: u32, cgroup: &str) {
        self.process_in(pid, pid, b'S', 4_194_304, comm, exe, uid, cgroup);
    }

    fn process_in(
        &self,
        pid: i32,
        tgid: i32,
        state: u8,
        flags: u64,
        comm: &[u8],
        exe: Option<&str>,
        uid: u32,
        cgroup: &str,
    ) {
        let directory = self.roots.proc.join(pid.to_string());
        fs::create_dir_all(&directory).unwrap();
        let tail = format!(") {} 1 1 1 0 -1 {flags} 0 0 0 0 1 2 0 0 20 0 1 0 {} 1 1", char::from(state), 1000 + pid);
        fs::write(directory.join("stat"), [format!("{pid} (").as_bytes(), comm, tail.as_bytes()].concat()).unwrap();
        let status = format!("Tgid:\t{tgid}\nTracerPid:\t0\nUid:\t0\t{uid}\t0\t0\nGid:\t0\t0\t0\t0\nCapPrm:\t0\n");
        fs::write(directory.join("status"), status).unwrap();
        fs::write(directory.join("cgroup"), cgroup).unwrap();
        if let Some(exe) = exe {
            self.exec(pid, exe);
        }
    }

    /// Makes a process run this executable of the tree.
    pub(super) fn exec(&self, pid: i32, exe: &str) {
        let (exe, link) = (self.file(exe), self.roots.proc.join(pid.to_string()).join("exe"));
        fs::create_dir_all(exe.parent().unwrap()).unwrap();
        if !exe.as_os_str().as_bytes().ends_with(b" (deleted)") {
            fs::write(&exe, "").unwrap();
        }
        let _ = fs::remove_file(&link);
        symlink(exe, link).unwrap();
    }

    /// The path of an executable in the tree.
    fn file(&self, path: &str) -> PathBuf {
        self.directory.path().join(path.strip_prefix('/').unwrap())
    }

    fn cgroup(&self, path: &str) -> PathBuf {
        let path = self.roots.cgroup.join(path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn pids(&self, spec: &ScopeSpec) -> Result<Vec<i32>, String> {
        resolve_without(spec, &self.roots, &[99])
            .map(|scoped| scoped.iter().filter(|scoped| scoped.distrust.is_none()).map(ProcessInfo::pid).collect())
            .map_err(|error| error.to_string())
    }
}

/// A host with both cgroup versions.
fn hybrid() -> Tree {
    let tree = Tree::new();
    for path in ["memory/db/redis", "memory/dba", "unified/db/redis", "unified/web", "systemd"] {
        tree.cgroup(path);
    }
    tree.process(10, b"redis-server", Some("/usr/bin/redis-server"), 1001, "4:memory:/db/redis\n0::/\n");
    tree.process(11, b"redis-server", Some("/opt/redis-server (deleted)"), 1002, "4:memory:/dba\n0::/db/redis\n");
    tree.process(12, b"a-very-long-com", None, 1001, "4:memory:/\n0::/web\n");
    tree.process(13, b"x\x1b[2J", Some("/usr/bin/x"), 0, "4:memory:/\n1:name=systemd:/db\n0::/\n");
    tree.process(99, b"pagefold", Some("/usr/bin/pagefold"), 0, "0::/\n");
    tree.process_in(2, 2, b'S', 0x0020_0000, b"kthreadd", None, 0, "0::/\n");
    tree.process_in(14, 14, b'Z', 0, b"gone", None, 1001, "0::/web\n");
    tree.process_in(15, 10, b'S', 0, b"thread", None, 1001, "0::/web\n");
    fs::create_dir_all(tree.roots.proc.join("16")).unwrap(); // vanishing: the directory is still there but empty
    tree
}

fn by_cgroup(path: impl Into<PathBuf>) -> ScopeSpec {
    ScopeSpec(vec![Selector::Cgroup(path.into())])
}

fn by_exe(exe: &str) -> ScopeSpec {
    ScopeSpec(vec![Selector::Exe(exe.into())])
}

fn by_pid(pids: &[i32]) -> ScopeSpec {
    ScopeSpec::of_pids(pids.iter().copied())
}

#[test]
fn all_omits_the_caller_kernel_threads_zombies_and_vanishing_processes() {
    assert_eq!(hybrid().pids(&ScopeSpec(vec![Selector::All])).unwrap(), [10, 11, 12, 13]);
}

#[test]
fn the_first_selector_that_matches_is_known() {
    let tree = hybrid();
    let spec = ScopeSpec(vec![
        Selector::Pid(13),
        Selector::Cgroup("/no/such".into()),
        Selector::Cgroup("/dba".into()),
        Selector::User("no-such-user".into()),
        Selector::User("1002".into()),
        Selector::Exe("redis-server".into()),
        Selector::All,
    ]);
    let scoped = resolve_among(&spec, &tree.roots, |pid| pid != 99).unwrap();
    let selected_by: Vec<_> = scoped.iter().map(|scoped| (scoped.process.pid(), scoped.selected_by)).collect();
    assert_eq!(selected_by, [(10, Some(5)), (11, Some(2)), (12, Some(6)), (13, Some(0))]);
    let by_exe = ScopeSpec(vec![Selector::User("1001".into()), Selector::Exe("redis-server".into())]);
    let scoped = resolve_among(&by_exe, &tree.roots, |pid| pid != 99).unwrap();
    assert_eq!(scoped[0].selected_by, Some(0));
}

#[test]
fn processes_selected_by_pid_are_never_omitted() {
    let tree = hybrid();
    assert_eq!(tree.pids(&by_pid(&[12, 10, 10])).unwrap(), [10, 12]);
    assert_eq!(tree.pids(&by_pid(&[99])).unwrap(), [99], "the caller, by pid");
    assert_eq!(tree.pids(&by_pid(&[14])).unwrap(), [14], "to be excluded with a reason later");
    assert_eq!(tree.pids(&by_pid(&[10, 4711])).unwrap_err(), "there is no process 4711");
    assert_eq!(tree.pids(&by_pid(&[15])).unwrap_err(), "there is no process 15", "a thread");
    assert_eq!(tree.pids(&by_pid(&[16])).unwrap_err(), "there is no process 16");
    assert_eq!(tree.pids(&by_pid(&[-1])).unwrap_err(), "there is no process -1");
}

#[test]
fn cgroups_select_their_subtree() {
    let tree = hybrid();
    let mount = |path: &str| by_cgroup(tree.roots.cgroup.join(path));
    assert_eq!(tree.pids(&mount("memory/db")).unwrap(), [10], "not /dba, not the other hierarchy's /db");
    assert_eq!(tree.pids(&mount("unified/db")).unwrap(), [11]);
    assert_eq!(tree.pids(&by_cgroup("/sys/fs/cgroup/unified/web")).unwrap(), [12]);
    assert_eq!(tree.pids(&by_cgroup("/db")).unwrap(), [10, 11, 13], "in any hierarchy");
    assert_eq!(tree.pids(&by_cgroup("db/redis/")).unwrap(), [10, 11]);
    assert_eq!(tree.pids(&by_cgroup("/none")).unwrap_err(), "there is no cgroup /none");
    assert!(tree.pids(&mount("memory/none")).unwrap_err().starts_with("there is no cgroup"));
    assert!(tree.pids(&by_cgroup("/db/../web")).is_err(), "no climbing");
    tree.cgroup("memory/empty");
    assert_eq!(tree.pids(&by_cgroup("/empty")).unwrap_err(), "no process matches --cgroup /empty");
}

#[test]
fn what_the_kernel_hides_may_be_selected_and_has_opted_out() {
    let tree = hybrid();
    let file = tree.roots.proc.join("12/cgroup");
    fs::remove_file(&file).unwrap();
    symlink("x".repeat(300), &file).unwrap();
    for spec in [by_cgroup("/dba"), by_name("unit", "nginx"), ScopeSpec(vec![Selector::All]), by_pid(&[12])] {
        let scoped = resolve_among(&spec, &tree.roots, |_| true).unwrap();
        let info = scoped.iter().find(|info| info.pid() == 12).unwrap();
        let found = exclude::judge_opt_outs(info, None, &deny_list::DenyList::default());
        assert!(matches!(found.excluding, Some(OptOut::Unknown { .. })), "{spec}");
    }
    assert_eq!(resolve_for_undoing(&by_cgroup("/dba"), &tree.roots, &[]).unwrap().len(), 1, "only the other process");
}

#[test]
fn cgroups_are_selected_on_a_pure_version_two_system() {
    let tree = Tree::new();
    fs::write(tree.roots.cgroup.join("cgroup.controllers"), "memory").unwrap();
    tree.cgroup("system.slice/redis.service");
    tree.cgroup("system.slice/redis.service2");
    tree.process(5, b"a", None, 0, "0::/system.slice/redis.service\n");
    tree.process(6, b"b", None, 0, "0::/system.slice/redis.service2\n");
    for path in
        ["/sys/fs/cgroup/system.slice/redis.service", "/system.slice/redis.service", "system.slice/redis.service"]
    {
        assert_eq!(tree.pids(&by_cgroup(path)).unwrap(), [5], "{path}");
    }
    assert_eq!(tree.pids(&by_cgroup("/sys/fs/cgroup")).unwrap(), [5, 6]);
}

#[test]
fn processes_are_selected_by_user_and_executable() {
    let tree = hybrid();
    let user = |user: &str| ScopeSpec(vec![Selector::User(user.into())]);
    assert_eq!(tree.pids(&user("1001")).unwrap(), [10, 12]);
    assert_eq!(tree.pids(&user("root")).unwrap(), [13]);
    assert_eq!(tree.pids(&user("no such user")).unwrap_err(), "there is no user no such user");
    assert_eq!(tree.pids(&user("4242")).unwrap_err(), "no process matches --user 4242");
    assert_eq!(tree.pids(&by_exe("redis-server")).unwrap(), [10], "the other has been replaced since");
    assert_eq!(tree.pids(&by_exe(tree.file("/usr/bin/redis-server").to_str().unwrap())).unwrap(), [10]);
    let replaced = tree.pids(&by_exe(tree.file("/opt/redis-server").to_str().unwrap())).unwrap_err();
    assert!(replaced.contains("process 11") && replaced.contains("replaced or removed"), "{replaced}");
    assert_eq!(
        tree.pids(&by_exe("/usr/bin/redis-serve")).unwrap_err(),
        "no process matches --exe /usr/bin/redis-serve"
    );
    assert!(tree.pids(&by_exe("a-very-long-command")).is_err(), "a command name, which programs set themselves");
    let both = ScopeSpec(vec![Selector::User("1001".into()), Selector::Exe("redis-server".into())]);
    assert_eq!(tree.pids(&both).unwrap(), [10, 12], "selectors add up");
    // Other users could replace this program.
    fs::set_permissions(tree.file("/usr/bin"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let error = tree.pids(&by_exe("redis-server")).unwrap_err();
    assert!(error.contains("process 10") && error.contains("can be changed by users other than root"), "{error}");
}

#[test]
fn processes_that_match_by_name_only_are_listed_with_the_reason() {
    let tree = hybrid();
    let found = |selectors: Vec<Selector>| {
        let scoped = resolve_without(&ScopeSpec(selectors), &tree.roots, &[99]).unwrap();
        scoped.into_iter().map(|scoped| (scoped.pid(), scoped.selected_by, scoped.distrust)).collect::<Vec<_>>()
    };
    let exe = || Selector::Exe("redis-server".into());
    assert_eq!(found(vec![exe()]), [(10, Some(0), None), (11, Some(0), Some(Distrust::Deleted))]);
    // Another selector brings the second process into scope.
    let by_both = [(10, Some(0), None), (11, Some(1), None)];
    assert_eq!(found(vec![exe(), Selector::User("1002".into())]), by_both);
    assert_eq!(found(vec![exe(), Selector::Cgroup("/dba".into())]), by_both);
    let scoped = resolve_without(&by_exe("redis-server"), &tree.roots, &[99]).unwrap();
    let excluded = exclude::process_exclusion(&scoped[1], &deny_list::DenyList::default(), None).unwrap();
    assert_eq!(excluded, Some(exclude::Exclusion::Untrusted(Distrust::Deleted)));
}

#[test]
fn for_undoing_executables_are_matched_by_name() {
    let tree = hybrid();
    fs::set_permissions(tree.file("/usr/bin"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let pids = |exe: &str| -> Vec<i32> {
        let scoped = resolve_for_undoing(&by_exe(exe), &tree.roots, &[]).unwrap();
        scoped.iter().map(|scoped| scoped.process.pid()).collect()
    };
    assert_eq!(pids("redis-server"), [10, 11], "one that others can replace, and one that has been replaced");
    assert_eq!(pids(tree.file("/opt/redis-server").to_str().unwrap()), [11]);
    assert_eq!(pids("a-very-long-command"), [12], "by the command name");
    let error = resolve_for_undoing(&by_exe("redis"), &tree.roots, &[]).unwrap_err().to_string();
    assert_eq!(error, "no process matches --exe redis");
}

#[test]
fn a_named_process_that_cannot_be_read_is_not_taken_for_absent() {
    let tree = hybrid();
    fs::write(tree.roots.proc.join("12/status"), "nonsense").unwrap();
    let error = tree.pids(&by_pid(&[12])).unwrap_err();
    assert!(error.starts_with("process 12 cannot be read: /proc/12/status is malformed: "), "{error}");
    assert_eq!(tree.pids(&ScopeSpec(vec![Selector::All])).unwrap(), [10, 11, 13], "others are not named");
}

#[test]
fn the_error_of_an_empty_scope_lists_the_options() {
    let error = hybrid().pids(&ScopeSpec::default()).unwrap_err();
    for option in ["--pid", "--cgroup", "--user", "--exe", "--all"] {
        assert!(error.contains(option), "{error}");
    }
}

#[test]
fn scoped_processes_are_described_with_printable_names() {
    let tree = hybrid();
    let scoped = resolve_without(&by_pid(&[10, 11, 12, 13]), &tree.roots, &[]).unwrap();
    assert_eq!(scoped[3].name, "x\\u{1b}[2J");
    assert_eq!(scoped[0].exe.as_deref(), Some(&*tree.file("/usr/bin/redis-server")));
    assert_eq!(scoped[2].exe, None);
    let cgroups: Vec<_> = scoped.iter().map(|scoped| scoped.cgroups.path.as_deref().unwrap()).collect();
    assert_eq!(cgroups, ["/db/redis", "/db/redis", "/web", "/"]);
    assert_eq!(scoped.iter().map(ProcessInfo::uid).collect::<Vec<_>>(), [1001, 1002, 1001, 0]);
}

fn set(path: &Path, name: &str, value: &str) -> bool {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: path and name are NUL-terminated, the value has the given length.
    unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) == 0 }
}

#[test]
fn cgroup_attributes_avoid_include_and_set_domains() {
    let tree = hybrid();
    if !set(&tree.cgroup("unified"), "user.pagefold.domain", "house") {
        return pagefold_testkit::skip_unsupported("the file system of the temporary directory has no user attributes");
    }
    assert!(set(&tree.cgroup("unified/db"), "user.pagefold.avoid", "1"));
    assert!(set(&tree.cgroup("unified/web"), "user.pagefold.avoid", "0"));
    assert!(set(&tree.cgroup("unified/web"), "user.pagefold.domain", "tenant"));
    let all = ScopeSpec(vec![Selector::All]);
    let scoped = resolve_without(&all, &tree.roots, &[99]).unwrap();
    let found: Vec<_> =
        scoped.iter().map(|scoped| (scoped.process.pid(), scoped.cgroups.domain.as_deref().unwrap())).collect();
    assert_eq!(found, [(10, "house"), (11, "house"), (12, "tenant"), (13, "house")]);
    assert!(
        matches!(&scoped[1].cgroups.opt_outs[..], [OptOut::Attribute { cgroup }] if cgroup.ends_with("unified/db"))
    );
    // The processes that haven't opted out.
    let left = || -> Vec<i32> {
        let scoped = resolve_without(&all, &tree.roots, &[99]).unwrap();
        scoped.iter().filter(|scoped| scoped.cgroups.opt_outs.is_empty()).map(|scoped| scoped.process.pid()).collect()
    };
    assert_eq!(left(), [10, 12, 13]);
    // A cgroup owned by another user sets no domain: the one above does.
    let theirs = std::os::unix::fs::chown(tree.cgroup("unified/web"), Some(1234), None);
    if theirs.is_ok() {
        let web = resolve_without(&by_pid(&[12]), &tree.roots, &[]).unwrap();
        assert_eq!(web[0].cgroups.domain.as_deref(), Some("house"));
    }
    let long = "x".repeat(1000);
    assert!(set(&tree.cgroup("unified"), "user.pagefold.domain", &long));
    assert_eq!(
        resolve_without(&by_pid(&[10]), &tree.roots, &[]).unwrap()[0].cgroups.domain.as_deref(),
        Some(long.as_str())
    );
    assert!(set(&tree.cgroup("unified/db/redis"), "user.pagefold.include", ""));
    assert_eq!(left(), [10, 11, 12, 13], "the nearest attribute decides");
    // An attribute that others can set doesn't override the administrator's avoid, but may itself avoid.
    let delegated = tree.cgroup("unified/db/redis");
    fs::set_permissions(&delegated, std::os::unix::fs::PermissionsExt::from_mode(0o775)).unwrap();
    assert_eq!(left(), [10, 12, 13], "writable by a group");
    fs::set_permissions(&delegated, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    if theirs.is_ok() {
        std::os::unix::fs::chown(&delegated, Some(1234), None).unwrap();
        assert_eq!(left(), [10, 12, 13], "of another user");
        assert!(set(&tree.cgroup("unified/web"), "user.pagefold.avoid", "1"));
        assert_eq!(left(), [10, 13], "the owner's avoid counts");
    }
}

/// The root of a container without a user namespace is the host's root for its cgroups.
#[test]
fn the_root_of_a_container_gives_it_no_domain() {
    let tree = Tree::new();
    fs::write(tree.roots.cgroup.join("cgroup.controllers"), "memory").unwrap();
    let container = format!("docker-{}.scope", "ab".repeat(32));
    for (pid, path) in [(5, "system.slice/web.service"), (6, &format!("system.slice/{container}/x"))] {
        let directory = tree.cgroup(path);
        if !set(&directory, "user.pagefold.domain", "prod") {
            return pagefold_testkit::skip_unsupported(
                "the file system of the temporary directory has no user attributes",
            );
        }
        tree.process(pid, b"a", None, 0, &format!("0::/{path}\n"));
    }
    assert!(set(&tree.cgroup("system.slice"), "user.pagefold.avoid", "1"));
    for path in ["system.slice/web.service", &format!("system.slice/{container}/x")] {
        assert!(set(&tree.cgroup(path), "user.pagefold.include", "1"));
    }
    let of = |pid| {
        let found = resolve_without(&by_pid(&[pid]), &tree.roots, &[]).unwrap();
        let cgroups = &found[0].cgroups;
        (cgroups.domain.clone(), cgroups.opt_outs.is_empty(), cgroups.unreadable.is_none())
    };
    assert_eq!(of(5), (Some("prod".to_owned()), true, true));
    assert_eq!(of(6), (None, false, false), "left alone");
}

/// We know no path for a cgroup whose name isn't UTF-8, so we can't see whether it opts its processes out.
#[test]
fn the_attributes_of_a_cgroup_with_a_damaged_name_are_unknown() {
    let tree = Tree::new();
    tree.cgroup("a");
    tree.process(5, b"a", None, 0, "0::/a\n");
    tree.process(6, b"a", None, 0, "0::/a/x\u{fffd}\n");
    let is_known = |pid| resolve_without(&by_pid(&[pid]), &tree.roots, &[]).unwrap()[0].cgroups.unreadable.is_none();
    assert!(is_known(5) && !is_known(6));
}

/// Looking for attributes and limits of a cgroup takes time for each of its levels, so of deep ones we read nothing.
#[test]
fn a_process_in_a_cgroup_that_we_cannot_read_is_left_alone_whatever_is_overridden() {
    let tree = hybrid();
    let all = ScopeSpec(vec![Selector::All]);
    let deny = DenyList::new(Vec::new()).overriding(vec!["a cgroup with more than 64 levels".to_owned()]);
    let mut rules = ScopeRules::new(all, tree.roots.clone(), deny);
    let history = ProgramHistory::default();
    let mut judge = Judge::new(&mut rules, &history);
    let deep = format!("0::{}\n", "/a".repeat(2_000));
    // The path is longer than the kernel accepts below the mount point.
    let long = format!("0::{}\n", ["/", &"x".repeat(203)].concat().repeat(20));
    for (text, levels, is_read) in [("0::/a/b\n", 2, true), (deep.as_str(), 64, false), (long.as_str(), 20, false)] {
        let mut info = ProcessInfo::fixture("x", 1, None);
        info.cgroups = judge.cgroup_info(Some(text.into()));
        assert_eq!(info.cgroups.all[0].path.matches('/').count(), levels);
        assert_eq!(info.cgroups.limiting.is_empty(), levels == 64);
        let verdict = judge.judge(&mut info, Dumpable::Yes, None, false);
        let is_unknown = matches!(verdict.excluded, Some(Exclusion::OptedOut(OptOut::Unknown { .. })));
        assert_eq!(is_unknown, !is_read, "{:?}", verdict.excluded);
    }
}

#[test]
fn cgroup_names_may_end_with_a_carriage_return() {
    let paths: Vec<String> = parse_cgroups(b"0::/a\r\n1:memory:/b").into_iter().map(|cgroup| cgroup.path).collect();
    assert_eq!(paths, ["/a\r", "/b"]);
}

fn by_name(kind: &str, name: &str) -> ScopeSpec {
    ScopeSpec(vec![Selector::named(kind, name.to_owned()).unwrap()])
}

#[test]
fn workloads_are_selected_by_name_in_every_version_of_cgroups() {
    let id = "3f0c".repeat(16);
    let tree = Tree::new();
    for path in
        ["systemd/system.slice", "systemd/docker", "unified/qemu.slice", "unified/user.slice", "unified/machine.slice"]
    {
        tree.cgroup(path);
    }
    let guest = r"0::/machine.slice/machine-qemu\x2d1\x2dweb\x2d1.scope/libvirt/emulator";
    let nginx = Some("/usr/sbin/nginx");
    tree.process(20, b"nginx", nginx, 33, "9:name=systemd:/system.slice/nginx.service\n4:memory:/system.slice\n0::/\n");
    tree.process(21, b"redis", nginx, 0, &format!("9:name=systemd:/docker/{id}\n0::/\n"));
    tree.process(22, b"kvm", Some("/usr/bin/kvm"), 0, "9:name=systemd:/\n0::/qemu.slice/104.scope\n");
    tree.process(24, b"kvm", Some("/usr/bin/kvm"), 0, guest);
    let own = tree.cgroup("unified/user.slice/user-7.slice/user@7.service");
    // Any other user may write there.
    fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    tree.process(
        23,
        b"nginx",
        nginx,
        7,
        "9:name=systemd:/\n0::/user.slice/user-7.slice/user@7.service/nginx.service\n",
    );
    for (kind, name, pids) in [
        ("unit", "nginx", &[20][..]),
        ("unit", "nginx.service", &[20]),
        ("unit", "system.slice", &[20]),
        ("unit", "user@7", &[23]),
        ("container", &id[..12], &[21]),
        ("container", &id.to_uppercase(), &[21]),
        ("vm", "104", &[22]),
        ("vm", "web-1", &[24]),
    ] {
        assert_eq!(tree.pids(&by_name(kind, name)).as_deref(), Ok(pids), "--{kind} {name}");
    }
    for (kind, name) in
        [("unit", "nginx.servic"), ("container", "3f0c3f0c3f0"), ("vm", "10"), ("pod", "3f0c"), ("vm", "nginx")]
    {
        let error = tree.pids(&by_name(kind, name)).unwrap_err();
        assert_eq!(error, format!("no process matches --{kind} {name}"));
    }
    // We don't know these containers, and each container's root names the cgroups in it.
    for (pid, inside) in
        [(25, "machine.slice/machine-c1.scope/payload"), (26, "lxc/c2"), (27, "machine.slice/c3.service")]
    {
        tree.cgroup(&format!("unified/{inside}/system.slice"));
        tree.process(pid, b"apache2", nginx, 0, &format!("0::/{inside}/system.slice/apache2.service\n"));
    }
    assert!(tree.pids(&by_name("unit", "apache2")).is_err());
    // A user gave this unit its name, so the name counts only where it grants nothing.
    tree.process(20, b"nginx", nginx, 33, "0::/\n");
    let error = tree.pids(&by_name("unit", "nginx")).unwrap_err();
    assert!(error.ends_with("user@7.service/nginx.service could have been named by users other than root"), "{error}");
    let undone = resolve_for_undoing(&by_name("unit", "nginx"), &tree.roots, &[]).unwrap();
    assert_eq!(undone.iter().map(ProcessInfo::pid).collect::<Vec<_>>(), [23]);
    let info = &undone[0];
    let denying = |name: &str| deny_list::DenyList::new([]).denying([workload::Workload::parse(name)]);
    let excluded = |name: &str| exclude::judge_process(info, dumpable::Dumpable::Yes, &denying(name));
    assert_eq!(excluded("nginx.service"), Some(exclude::Exclusion::DenyListed { entry: "nginx.service".to_owned() }));
    assert!(excluded(" Unit nginx").is_some() && excluded("vm nginx").is_none() && excluded("other").is_none());
}

#[test]
fn a_container_is_let_in_by_its_name_but_not_by_the_names_of_its_programs() {
    let id = "3f0c".repeat(16);
    let tree = Tree::new();
    for path in ["unified/system.slice", "unified/user.slice/user@7.service"] {
        tree.cgroup(path);
    }
    // Any other user may write there.
    let own = tree.cgroup("unified/user.slice/user@7.service");
    fs::set_permissions(own, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let apache = Some("/usr/sbin/apache2 (deleted)");
    tree.process(20, b"apache2", apache, 33, &format!("0::/system.slice/docker-{id}.scope\n"));
    tree.process(21, b"apache2", apache, 33, &format!("0::/user.slice/user@7.service/docker-{id}.scope\n"));
    tree.process(22, b"vault", apache, 33, &format!("0::/system.slice/docker-{id}.scope\n"));
    let found = resolve_for_undoing(&ScopeSpec(vec![Selector::All]), &tree.roots, &[]).unwrap();
    let name = "container 3f0c3f0c3f0c".to_owned();
    let strings = |names: &[&str]| -> Vec<String> { names.iter().map(|&name| name.to_owned()).collect() };
    let list =
        |denied: &[&str], allowed: &[&str]| DenyList::default().with(&strings(denied), &strings(allowed), &tree.roots);
    let judge = |at: usize, deny: &DenyList| exclude::judge_process(&found[at], Dumpable::No, deny);
    let not_dumpable = Some(Exclusion::NotDumpable);
    assert_eq!(judge(0, &list(&[], &["apache2"])), not_dumpable, "the container's own file");
    let allowing = list(&[], &[&name]);
    assert_eq!(judge(0, &allowing), None);
    assert_eq!(judge(1, &allowing), not_dumpable, "a user may have named this cgroup so");
    assert_eq!(judge(2, &allowing), None, "a program of the default deny list");
    assert_eq!(judge(0, &list(&[], &["cgroup /system.slice"])), None);
    // Denials take precedence, and count by name.
    assert!(judge(2, &list(&["vault"], &[&name])).is_some() && judge(1, &list(&[&name], &[&name])).is_some());
    let denying = allowing.clone().denying([workload::Workload::parse(&name)]);
    assert_eq!(judge(0, &denying), Some(Exclusion::DenyListed { entry: name.clone() }));
    let way_in = |at: usize, deny: &DenyList| found[at].allowed_as(deny, &tree.roots);
    assert_eq!(way_in(0, &list(&[], &[])).as_deref(), Some(name.as_str()));
    assert_eq!((way_in(1, &list(&[], &[])), way_in(2, &list(&[], &[])), way_in(0, &denying)), (None, None, None));
}

#[test]
fn a_service_is_the_same_with_and_without_its_type() {
    let is_same =
        |one: (&str, &str), two: (&str, &str)| by_name(one.0, one.1).0[0].is_same(&by_name(two.0, two.1).0[0]);
    assert!(is_same(("unit", "nginx"), ("unit", "nginx.service")) && is_same(("user", "a"), ("user", "a")));
    assert!(!is_same(("unit", "nginx.slice"), ("unit", "nginx")) && !is_same(("unit", "nginx"), ("vm", "nginx")));
    assert!(!is_same(("vm", "a.service"), ("vm", "a")) && !is_same(("user", "a"), ("user", "a.service")));
}
