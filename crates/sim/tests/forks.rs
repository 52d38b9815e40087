//! Pages shared through fork, where the kernel merges on request. The frame that stays becomes a merged one for all who
//! map it. The kernel replaces the other frame only in the named process, and marks only the mappings that we name.

mod common;

use common::{MIB, Machine, SECOND, config, host, requested};
use pagefold_engine::config::Config;
use pagefold_engine::decision::Reason;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{Actions, Change, Host, PageState};
use pagefold_engine::keys::OwnerKey;
use pagefold_engine::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};

const PAGES: u64 = 16 * MIB;

/// Two masters with equal memory, and some workers of each.
struct Families {
    sim: Machine,
    masters: [OwnerKey; 2],
    workers: Vec<OwnerKey>,
}

impl Families {
    fn new(workers: u64) -> Self {
        Self::on(requested(), workers)
    }

    fn on(host: SimHost, workers: u64) -> Self {
        let mut sim = Machine::with(host, Config { governor: Governor::Full, ..config() });
        let mapping = || Mapping::new(Pages(PAGES), Fill::Series(1));
        let masters = [0, 0].map(|start_ns| sim.add(Process::starting_at(start_ns).mapping(mapping())));
        let mut families = Self { sim, masters, workers: Vec::new() };
        for master in masters {
            for _ in 0..workers {
                families.fork(master);
            }
        }
        families
    }

    fn fork(&mut self, parent: OwnerKey) -> OwnerKey {
        let child = self.sim.fork(parent);
        self.workers.push(child);
        child
    }

    /// Lets time pass. Asserts all the time that no memory is merged unless it's marked.
    #[track_caller]
    fn run(&mut self, seconds: u64) {
        self.sim.run_and(seconds, |host| assert_eq!(host.merged_unmarked(), Pages(0), "at {} ns", host.now_ns()));
    }

    /// Acts as if both masters got a SIGHUP: they fork new workers, and so many seconds later the old ones end.
    fn restart_workers(&mut self, seconds: u64) {
        let old = std::mem::take(&mut self.workers);
        for master in self.masters {
            for _ in 0..4 {
                self.fork(master);
            }
        }
        self.run(seconds);
        for worker in old {
            self.sim.exit(worker);
        }
        self.run(8);
    }

    fn write(&mut self, owner: OwnerKey, content: impl Fn(u64) -> u64) {
        for region in self.sim.regions_of(owner) {
            let first = self.sim.span_of(region).expect("it is there").first;
            for page in 0..PAGES {
                self.sim.write(region, first + page, content(page));
            }
        }
    }

    fn content(&self, owner: OwnerKey) -> Vec<u64> {
        let region = self.sim.regions_of(owner)[0];
        let first = self.sim.span_of(region).expect("it is there").first;
        (0..PAGES).map(|page| self.sim.page(region, first + page).expect("it is there").0).collect()
    }

    #[track_caller]
    fn assert_reasons(&self, right: Reason) {
        for region in self.sim.engine.regions() {
            assert_eq!(region.decision.reason, right, "of process {}", region.view.owner.0);
        }
    }

    #[track_caller]
    fn assert_left_alone(&self) {
        assert_eq!((self.frames(), self.sim.merged_pages()), (2 * PAGES, Pages(0)));
        assert_eq!(self.sim.engine.saving().map(|saving| saving.saved), Some(Pages(0)));
    }

    fn frames(&self) -> u64 {
        self.sim.truth().frames
    }

    /// Asserts that the families' memory takes the frames of one copy, and `more` frames besides.
    #[track_caller]
    fn assert_frames(&self, more: u64) {
        let frames = self.frames();
        let right = PAGES + more;
        assert!((right..=right + PAGES / 50).contains(&frames), "{frames} frames, {right} are right");
    }
}

fn unmerge(host: &mut SimHost, owner: OwnerKey) {
    let mut unmark: Vec<Change> = Vec::new();
    for region in host.regions_of(owner) {
        unmark.extend(host.span_of(region).map(Change::from));
    }
    let Ok(_) = host.apply(&Actions { unmark, ..Actions::default() });
}

#[test]
fn unmerging_leaves_nothing_merged_whether_it_is_one_process_or_all() {
    let mut families = Families::new(4);
    families.run(25);
    families.assert_frames(0);
    families.assert_reasons(Reason::Done);
    let merged = families.sim.merged_pages().0;
    assert!(merged * 100 >= 10 * PAGES * 98, "{merged} pages");
    let one = families.workers[2];
    unmerge(&mut families.sim, one);
    assert_eq!(families.sim.merged_pages().0, merged / 10 * 9, "all pages of one process of ten");
    families.sim.leave_alone(one, true);
    families.run(30);
    assert_eq!(families.sim.merged_unmarked(), Pages(0));
    for owner in families.masters.into_iter().chain(families.workers.clone()) {
        unmerge(&mut families.sim, owner);
    }
    assert_eq!(families.sim.merged_pages(), Pages(0));
}

#[test]
fn new_workers_share_the_copy() {
    let mut families = Families::new(4);
    families.run(25);
    for _ in 0..2 {
        families.restart_workers(2);
        families.run(20);
        families.assert_frames(0);
    }
    // Now we fork before anything is merged, while the engine reads and names pages.
    let mut families = Families::new(2);
    for _ in 0..30 {
        families.sim.cycle();
        for master in families.masters {
            families.fork(master);
        }
        let oldest: Vec<OwnerKey> = families.workers.drain(..2).collect();
        for worker in oldest {
            families.sim.exit(worker);
        }
    }
    families.run(40);
    families.assert_frames(0);
}

#[test]
fn workers_of_workers_belong_to_the_family() {
    let mut families = Families::new(1);
    for worker in families.workers.clone() {
        let child = families.fork(worker);
        families.fork(child);
    }
    families.run(25);
    families.assert_frames(0);
    // When the masters end, a worker that another worker forked becomes the first of its family.
    for master in families.masters {
        families.sim.exit(master);
    }
    families.run(25);
    families.assert_frames(0);
    assert_eq!(families.sim.merged_unmarked(), Pages(0));
}

/// First the two workers are of different families, then of the same one.
#[test]
fn workers_that_diverge_and_come_back_are_merged_again() {
    for pair in [[0, 7], [6, 7]] {
        let mut families = Families::new(4);
        let workers = pair.map(|number: usize| families.workers[number]);
        let before = families.content(workers[0]);
        families.run(25);
        for worker in workers {
            families.write(worker, |page| 7 << 32 | u64::from(worker.0) << 20 | page);
        }
        families.run(25);
        families.assert_frames(2 * PAGES);
        for worker in workers {
            families.write(worker, |page| before[usize::try_from(page).unwrap()]);
        }
        families.run(120);
        families.assert_frames(0);
    }
}

/// The index may know the workers' old contents from the workers' own pages. When the workers return to these contents,
/// the rest of their family mustn't be left with a copy of its own.
#[test]
fn workers_that_come_back_at_once_leave_nobody_behind() {
    let mut families = Families::new(4);
    families.run(5);
    families.restart_workers(0);
    let workers = [families.workers[6], families.workers[7]];
    let before = families.content(workers[0]);
    for worker in workers {
        families.write(worker, |page| before[usize::try_from(page).unwrap()]);
    }
    families.run(60);
    families.assert_frames(0);
}

/// If one member of a family keeps its frame, merging the others saves nothing. And we mustn't merge its memory behind
/// its back.
#[test]
fn a_family_with_a_member_out_of_scope_is_left_alone() {
    for set in [SimHost::leave_alone, SimHost::set_out_of_scope] {
        for (is_master, host) in [(true, requested()), (false, requested()), (true, host()), (false, host())] {
            let mut families = Families::on(host, 4);
            let member = if is_master { families.masters[0] } else { families.workers[1] };
            set(&mut families.sim, member, true);
            families.sim.run(60);
            families.assert_left_alone();
            set(&mut families.sim, member, false);
            families.sim.run(60);
            families.assert_frames(0);
        }
    }
}

/// A web server's master runs as root, and only its workers are in scope; or the workers have changed their user, and
/// only the masters are.
#[test]
fn families_without_their_masters_or_without_their_workers_are_left_alone_and_say_why() {
    for are_masters_out in [true, false] {
        for host in [requested(), host()] {
            let mut families = Families::on(host, 4);
            let masters = families.masters.to_vec();
            let out = if are_masters_out { masters } else { families.workers.clone() };
            for &member in &out {
                families.sim.set_out_of_scope(member, true);
            }
            families.sim.run(60);
            families.assert_left_alone();
            families.assert_reasons(Reason::SharedWithOutsiders);
            // The last outsiders end, and what's left can be merged.
            for member in out {
                families.sim.exit(member);
            }
            families.sim.run(120);
            families.assert_frames(0);
        }
    }
}

/// One member has diverged and another is out of scope, so as many processes map the frames as there are in scope.
#[test]
fn a_member_that_has_diverged_does_not_hide_one_out_of_scope() {
    let mut families = Families::new(4);
    families.sim.set_out_of_scope(families.workers[1], true);
    families.write(families.workers[2], |page| 7 << 32 | page);
    families.run(60);
    assert_eq!((families.frames(), families.sim.merged_pages()), (3 * PAGES, Pages(0)));
    families.sim.exit(families.workers[1]);
    families.run(60);
    families.assert_frames(PAGES);
}

/// Where the kernel calls fork-shared pages merged, we can't tell pages that an earlier run merged from pages that
/// outsiders map. We name neither, and allow for both.
#[test]
fn pages_that_an_earlier_run_may_have_merged_are_reckoned_with() {
    let knobs = Knobs { shows_lone: false, ..Knobs::requested() };
    let mut families = Families::on(SimHost::new(7, Costs::default(), knobs), 4);
    families.run(25);
    families.sim.engine = Engine::new(Config { governor: Governor::Full, ..config() });
    families.run(120);
    families.assert_frames(0);
    for region in families.sim.engine.regions().filter(|region| region.reads_forked()) {
        let pages = region.usage.merged.len() + region.usage.outside.len();
        assert!(pages.0 * 100 >= PAGES * 95, "{pages:?} of {PAGES}");
    }
}

/// We find out page by page which frames the outsider no longer maps.
#[test]
fn memory_that_a_member_out_of_scope_has_written_is_merged() {
    let mut families = Families::new(4);
    let outsider = families.workers[1];
    families
        .sim
        .change_pages(outsider, 0..PAGES / 2, |host, region, page| _ = host.write(region, page, 7 << 32 | page.0));
    families.sim.set_out_of_scope(outsider, true);
    families.run(60);
    families.assert_frames(PAGES);
}

/// ksmd also merges the half that the outsider hasn't written, but that frees nothing: the outsider keeps those frames.
#[test]
fn what_a_member_out_of_scope_keeps_is_not_counted_as_saved() {
    let mut families = Families::on(host(), 4);
    let outsider = families.workers[1];
    families
        .sim
        .change_pages(outsider, 0..PAGES / 2, |host, region, page| _ = host.write(region, page, 7 << 32 | page.0));
    families.sim.set_out_of_scope(outsider, true);
    let before = families.frames();
    families.sim.run(60);
    let saved = before - families.frames();
    assert!((PAGES * 45 / 100..PAGES * 55 / 100).contains(&saved), "{saved} frames of {PAGES}");
    let said = families.sim.engine.saving().expect("it is counted").saved.0;
    assert!(said.abs_diff(saved) <= saved / 50, "{said} frames, {saved} are saved");
}

/// We've read a process before it forks one that's out of scope, so we don't look at its pages again before we name them.
#[test]
fn what_a_process_shares_with_a_new_one_out_of_scope_is_not_merged() {
    let mut sim = Machine::with(requested(), Config { governor: Governor::Full, ..config() });
    let mapping = || Mapping::new(Pages(PAGES), Fill::Series(1));
    let parent = sim.add(Process::starting_at(0).mapping(mapping()));
    sim.run(30);
    let outsider = sim.fork(parent);
    sim.set_out_of_scope(outsider, true);
    let now_ns = sim.now_ns();
    let others = [0, 0].map(|_| sim.add(Process::starting_at(now_ns).mapping(mapping())));
    sim.run_and(60, |host| assert_eq!(host.merged_unmarked(), Pages(0), "at {} ns", host.now_ns()));
    // The two newcomers share one copy, and the parent and its child another.
    let merged = |owner| {
        let region = sim.regions_of(owner)[0];
        let first = sim.span_of(region).expect("it is there").first;
        let state = |page| sim.page(region, first + page).expect("it is there").1;
        (0..PAGES).filter(|&page| state(page) == PageState::Merged).count()
    };
    assert_eq!((merged(parent), merged(outsider)), (0, 0));
    let [one, other] = others.map(merged);
    assert_eq!(one, other);
    assert!(one as u64 >= PAGES * 98 / 100, "{one} of {PAGES}");
}

/// Merging pages that are shared so often costs more than the frame is worth.
#[test]
fn a_family_with_too_many_members_is_left_alone() {
    let most = 20;
    for host in [requested(), host()] {
        let mut families = Families::on(host, most);
        families.sim.run(60);
        assert_eq!(families.sim.merged_pages(), Pages(0));
        families.assert_reasons(Reason::SharedByMany(most + 1));
        // When one worker of each master has ended, they're few enough.
        for worker in [0, usize::try_from(most).unwrap()] {
            families.sim.exit(families.workers[worker]);
        }
        families.sim.run(60);
        families.assert_frames(0);
    }
}

#[test]
fn a_family_with_a_member_that_refuses_is_left_alone() {
    let mut families = Families::new(4);
    families.sim.set_untouchable(families.workers[5], true);
    families.run(60);
    assert_eq!((families.frames(), families.sim.merged_pages()), (2 * PAGES, Pages(0)));
}

/// The parent is marked before the newcomer is old enough, and the child inherits its marks. At the second scan after the
/// newcomer was marked, ksmd merges the parent's page with the newcomer's, and the child's page stays alone.
#[test]
fn with_ksmd_a_child_that_was_forked_from_marked_memory_is_merged_too() {
    let mut sim = Machine::new(host());
    let mapping = || Mapping::new(Pages(PAGES), Fill::Series(1));
    let parent = sim.add(Process::starting_at(SECOND).mapping(mapping()));
    sim.run(9);
    sim.add(Process::starting_at(0).mapping(mapping()));
    while sim.log.marks == 0 {
        sim.run(1);
    }
    sim.run(1);
    assert_eq!(sim.saved(), Pages(0));
    sim.fork(parent);
    sim.run(60);
    let frames = sim.truth().frames;
    assert!(frames <= PAGES + PAGES / 50, "{frames} frames");
}

/// While the processes are still being marked, one content fills more pages than may share a merged page.
#[test]
fn a_family_of_one_content_is_merged_at_once() {
    let mut sim = Machine::with(requested(), Config { governor: Governor::Full, ..config() });
    let parent = sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(PAGES), Fill::Same(7))));
    sim.fork(parent);
    sim.run(10);
    let frames = sim.truth().frames;
    assert!(frames <= PAGES / 50, "{frames} of {PAGES} frames");
}

/// ksmd merges the parent's zeros first. The child's zeros stay in the frames that both shared.
#[test]
fn zeros_that_a_child_inherited_count_once() {
    for tenths in [0, 5, 10, 20] {
        let mut sim = Machine::with(host(), Config { governor: Governor::Full, ..config() });
        let zeros = Mapping::new(Pages(2 * MIB), Fill::Zeros);
        let data = Mapping::new(Pages(2 * MIB), Fill::Series(1));
        let parent = sim.add(Process::starting_at(5 * SECOND).mapping(zeros).mapping(data));
        sim.run_until(5 * SECOND + tenths * SECOND / 10, |_| {});
        sim.fork(parent);
        sim.run(60);
        let shown = sim.engine.saving().map(|saving| saving.saved.0);
        assert_eq!((shown, sim.truth().frames), (Some(2 * MIB), 2 * MIB), "forked {tenths} tenths of a second later");
    }
}
