use super::*;
use crate::scope::resolve_for_undoing;
use crate::scope::tests::Tree;
use std::fs;
use std::os::unix::fs::symlink;

/// Processes of a fixture of /proc, and the list of kept-out ones.
struct Fixture {
    tree: Tree,
    kept_out: KeptOut,
}

impl Fixture {
    /// Three web servers (process 11 has started 12), a shell that has started 11, and a database.
    fn new() -> Self {
        let fixture = Self { tree: Tree::new(), kept_out: KeptOut::default() };
        fixture.start(10, 1, "web");
        fixture.start(30, 1, "sh");
        fixture.start(11, 30, "web");
        fixture.start(12, 11, "web");
        fixture.start(20, 1, "database");
        fixture
    }

    fn start(&self, pid: i32, parent: i32, name: &str) {
        let exe = format!("/usr/bin/{name}");
        self.tree.process(pid, name.as_bytes(), Some(&exe), 1000, &format!("0::/{name}.service\n"));
        let stat = self.tree.roots.proc.join(format!("{pid}/stat"));
        let text = fs::read_to_string(&stat).unwrap();
        fs::write(stat, text.replace(") S 1 ", &format!(") S {parent} "))).unwrap();
    }

    fn end(&self, pid: i32) {
        fs::remove_dir_all(self.tree.roots.proc.join(pid.to_string())).unwrap();
    }

    fn found(&self, spec: &ScopeSpec) -> Vec<ProcessInfo> {
        resolve_for_undoing(spec, &self.tree.roots, &[]).unwrap_or_default()
    }

    fn keep_out(&mut self, spec: &ScopeSpec) {
        let found = self.found(spec);
        self.kept_out.keep_out(spec, &found, 1000, &self.tree.roots).unwrap();
    }

    /// The processes that an `include` lets in again.
    fn include(&mut self, spec: &ScopeSpec) -> Result<Vec<i32>, String> {
        let found = self.found(spec);
        let included = self.kept_out.include(spec, &found, &self.tree.roots).map_err(|error| error.to_string())?;
        Ok(included.iter().map(|scoped| scoped.process.pid()).collect())
    }

    /// The processes that are kept out now.
    fn out(&mut self) -> Vec<i32> {
        let all = self.found(&ScopeSpec(vec![Selector::All]));
        let out = all.iter().filter(|info| self.kept_out.verdict(info, true, &self.tree.roots).is_some());
        out.map(|info| info.process.pid()).collect()
    }
}

fn by_exe(exe: &str) -> ScopeSpec {
    ScopeSpec(vec![Selector::Exe(exe.to_owned())])
}

fn by_pid(pid: i32) -> ScopeSpec {
    ScopeSpec::of_pids([pid])
}

fn all() -> ScopeSpec {
    ScopeSpec(vec![Selector::All])
}

#[test]
fn selectors_keep_newcomers_out_until_the_same_are_included() {
    let mut fixture = Fixture::new();
    assert!(fixture.out().is_empty());
    fixture.keep_out(&by_exe("web"));
    fixture.keep_out(&ScopeSpec(vec![Selector::Cgroup("/database.service".into())]));
    fs::create_dir_all(fixture.tree.roots.cgroup.join("unified/database.service")).unwrap();
    assert_eq!(fixture.out(), [10, 11, 12, 20]);
    fixture.start(13, 1, "web");
    assert_eq!(fixture.out(), [10, 11, 12, 13, 20]);
    assert_eq!(fixture.include(&by_exe("web")), Ok(vec![10, 11, 12, 13]));
    assert_eq!(fixture.out(), [20]);
    assert_eq!(fixture.include(&by_exe("web")), Err("nothing that matches --exe web is kept out".to_owned()));
    // This works even if nothing is running that the selector matches.
    fixture.end(20);
    let database = ScopeSpec(vec![Selector::Cgroup("/database.service".into())]);
    assert_eq!(fixture.include(&database), Ok(vec![]));
    assert_eq!(fixture.kept_out.entries().len(), 0);
}

#[test]
fn the_last_selector_that_matches_decides() {
    let mut fixture = Fixture::new();
    fixture.keep_out(&all());
    assert_eq!(fixture.include(&by_exe("web")), Ok(vec![10, 11, 12]));
    fixture.keep_out(&by_pid(10));
    assert_eq!(fixture.out(), [10, 20, 30]);
    let entries = fixture.kept_out.entries().iter().map(|entry| (entry.selector.to_string(), entry.is_in()));
    let expected = [("--all", false), ("--exe web", true), ("--pid 10", false)].map(|(text, is)| (text.to_owned(), is));
    assert_eq!(entries.collect::<Vec<_>>(), expected);
    assert_eq!(fixture.include(&all()), Ok(vec![10, 20, 30]));
    assert!(fixture.kept_out.entries().is_empty() && fixture.out().is_empty());
}

#[test]
fn a_link_that_is_switched_keeps_out_what_it_led_to_but_does_not_let_it_in() {
    let mut fixture = Fixture::new();
    let root = fixture.tree.roots.proc.parent().unwrap().to_owned();
    let current = root.join("current");
    fs::create_dir(root.join("opt")).unwrap();
    fs::write(root.join("opt/web"), "").unwrap();
    symlink("usr/bin", &current).unwrap();
    let spec = by_exe(current.join("web").to_str().unwrap());
    fixture.keep_out(&spec);
    assert_eq!(fixture.out(), [10, 11, 12]);
    fs::remove_file(&current).unwrap();
    symlink("opt", &current).unwrap();
    assert_eq!(fixture.out(), [10, 11, 12]);
    fixture.keep_out(&all());
    assert_eq!(fixture.include(&spec), Ok(vec![]));
    assert_eq!(fixture.out(), [10, 11, 12, 20, 30]);
}

#[test]
fn a_pid_stands_for_the_process_and_its_descendants() {
    let mut fixture = Fixture::new();
    fixture.keep_out(&by_pid(30));
    assert_eq!(fixture.out(), [11, 12, 30]);
    // Descendants that start later stay out too, even after the processes between them have ended.
    fixture.start(14, 12, "web");
    assert_eq!(fixture.out(), [11, 12, 14, 30]);
    for pid in [30, 11, 12] {
        fixture.end(pid);
    }
    fixture.start(15, 14, "web");
    fixture.kept_out.forget_ended(&fixture.tree.roots);
    assert_eq!(fixture.out(), [14, 15]);
    // A later process with the same pid isn't kept out. Start times of the fixture follow from pids, so we change this
    // one.
    fixture.start(30, 1, "sh");
    let stat = fixture.tree.roots.proc.join("30/stat");
    fs::write(&stat, fs::read_to_string(&stat).unwrap().replace(" 1030 ", " 2030 ")).unwrap();
    assert_eq!(fixture.out(), [14, 15]);
    fixture.keep_out(&by_pid(30));
    assert_eq!(fixture.out(), [14, 15, 30]);
    assert_eq!(fixture.include(&by_pid(14)), Ok(vec![14, 15]));
    assert_eq!(fixture.out(), [30]);
    fixture.end(30);
    fixture.kept_out.forget_ended(&fixture.tree.roots);
    assert!(fixture.kept_out.entries().is_empty());
}

/// A zombie may never be reaped, so we forget it at once. But we don't forget a leader whose other threads are still
/// alive: they may fork.
#[test]
fn zombies_are_forgotten_but_not_their_threads() {
    let mut fixture = Fixture::new();
    fixture.keep_out(&by_pid(30));
    for pid in [11, 12] {
        fixture.end(pid);
    }
    let stat = fixture.tree.roots.proc.join("30/stat");
    let zombie = fs::read_to_string(&stat).unwrap().replace(" S 1 ", " Z 1 ");
    fs::write(&stat, zombie.replace(" 20 0 1 0 1030 ", " 20 0 2 0 1030 ")).unwrap();
    fixture.kept_out.forget_ended(&fixture.tree.roots);
    assert_eq!(fixture.kept_out.entries().len(), 1);
    fs::write(&stat, zombie).unwrap();
    fixture.kept_out.forget_ended(&fixture.tree.roots);
    assert!(fixture.kept_out.entries().is_empty());
}

#[test]
fn children_of_a_process_that_has_ended_are_included_by_its_pid() {
    let mut fixture = Fixture::new();
    fixture.keep_out(&by_pid(11));
    fixture.end(11);
    assert_eq!(fixture.out(), [12]);
    assert_eq!(fixture.include(&by_pid(11)), Ok(vec![]));
    assert!(fixture.out().is_empty());
}

#[test]
fn the_list_is_bounded_and_never_has_all_programs() {
    let mut fixture = Fixture::new();
    let init = fixture.kept_out.keep_out(&by_pid(1), &[], 0, &fixture.tree.roots);
    assert_eq!(init, Err(KeptOutError::Init));
    for number in 0..ENTRIES_MOST {
        fixture.keep_out(&by_exe(&format!("program-{number}")));
    }
    let full = fixture.kept_out.keep_out(&by_exe("web"), &[], 0, &fixture.tree.roots);
    assert_eq!(full, Err(KeptOutError::TooMany));
    assert_eq!(fixture.include(&by_exe("program-0")), Ok(vec![]));
}

#[test]
fn a_process_let_in_by_its_pid_leaves_no_entry_unless_another_selector_keeps_it_out() {
    let mut fixture = Fixture::new();
    fixture.keep_out(&by_pid(10));
    fixture.keep_out(&by_pid(20));
    assert_eq!(fixture.include(&by_pid(10)), Ok(vec![10]));
    assert_eq!((fixture.out(), fixture.kept_out.entries().len()), (vec![20], 1));
    fixture.keep_out(&by_exe("web"));
    assert_eq!(fixture.include(&by_pid(10)), Ok(vec![10]));
    assert_eq!((fixture.out(), fixture.kept_out.entries().len()), (vec![11, 12, 20], 3));
}
