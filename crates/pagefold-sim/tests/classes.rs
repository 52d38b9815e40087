//! Classes of pages (CMD, section 3.3) in the live policy: what they lose, what they spare, and what they take, in virtual
//! time.

use pagefold_core::classes::{ClassReport, ClassTotal, Classifier};
use pagefold_core::config::Config;
use pagefold_core::engine::{Engine, round};
use pagefold_core::hash::Parts;
use pagefold_core::host::{Actions, Host, Outcome, RegionKey, SamplePlan, Samples, Snapshot};
use pagefold_core::region::Region;
use pagefold_core::units::{Pages, Permyriad, Vpn};
use pagefold_sim::{Behaviour, Costs, Fill, Knobs, Mapping, Process, SimHost, Writes, scenario};
use std::convert::Infallible;

const SECOND: u64 = 1_000_000_000;
const MIB: u64 = 256;
const ALL: [Classifier; 4] = [Classifier::None, Classifier::Address, Classifier::WriteCount, Classifier::SubPages];

fn host() -> SimHost {
    SimHost::new(7, Costs::default(), Knobs::driven())
}

fn engine(classifier: Classifier) -> Engine {
    Engine::new(Config { seed: 11, classifier, ..Config::default() })
}

fn run<H: Host<Error = Infallible>>(host: &mut H, engine: &mut Engine, seconds: u64) {
    let mut left = seconds * SECOND;
    while left > 0 {
        let Ok(pause) = round(engine, host);
        let pause = pause.max(1_000_000).min(left);
        let Ok(()) = host.wait(pause);
        left -= pause;
    }
}

fn classes(engine: &Engine) -> ClassReport {
    engine.report().classes.unwrap()
}

fn sum(report: &ClassReport, figure: fn(&ClassTotal) -> u64) -> u64 {
    report.classes.iter().map(figure).sum()
}

fn region(host: &mut SimHost, pages: u64, fill: Fill) -> RegionKey {
    let owner = host.add(Process::starting_at(0).mapping(Mapping::new(Pages(pages), fill)));
    host.regions_of(owner)[0]
}

fn pages_of(host: &SimHost, region: RegionKey) -> impl Iterator<Item = Vpn> + use<> {
    let span = host.span_of(region).unwrap();
    (0..span.pages.0).map(move |page| span.first + page)
}

#[test]
fn static_duplicates_are_found_with_every_classifier() {
    let saved = ALL.map(|classifier| {
        let mut host = host();
        scenario::pairs(&mut host, Pages(32 * MIB), Pages(32 * MIB));
        scenario::static_mix(&mut host, Pages(16 * MIB));
        scenario::redis(&mut host, 3, Pages(32 * MIB));
        scenario::mariadb(&mut host, 3, Pages(32 * MIB));
        let savable = host.truth().savable;
        let mut engine = engine(classifier);
        run(&mut host, &mut engine, 40);
        assert_eq!(engine.report().classes.is_some(), classifier != Classifier::None);
        (host.saved().0, savable)
    });
    for (classifier, (saved, savable)) in ALL.into_iter().zip(saved) {
        assert!(saved * 100 >= savable * 95, "{classifier}: {saved} of {savable}");
    }
    // Nothing has changed, so that all are in one class.
    assert_eq!((saved[2], saved[3]), (saved[0], saved[0]));
}

#[test]
fn what_has_not_changed_and_was_alone_is_looked_up_once_and_found_by_whoever_comes_later() {
    for classifier in &ALL[1..] {
        let mut host = host();
        let pages = 16 * MIB;
        region(&mut host, pages, Fill::Series(9));
        let mut engine = engine(*classifier);
        run(&mut host, &mut engine, 60);
        let report = classes(&engine);
        assert_eq!(sum(&report, |total| total.pages.0), pages, "{classifier}");
        let (lookups, spared) = (sum(&report, |total| total.lookups), sum(&report, |total| total.spared));
        assert!(lookups == pages && spared > 5 * pages, "{classifier}: {lookups} look-ups, {spared} spared");
        assert_eq!(engine.report().index_entries as u64, pages, "{classifier}");
        region(&mut host, pages, Fill::Series(9));
        run(&mut host, &mut engine, 30);
        assert!(host.saved().0 * 100 >= pages * 99, "{classifier}: {} of {pages}", host.saved().0);
    }
}

#[test]
fn pages_of_different_classes_do_not_meet() {
    // The one has changed since its first visit, and the other comes with the same contents.
    let saved = ALL.map(|classifier| {
        let mut host = host();
        let pages = 16 * MIB;
        let first = region(&mut host, pages, Fill::Random);
        let config = Config { seed: 11, classifier, cow_threshold: Permyriad(10_000), ..Config::default() };
        let mut engine = Engine::new(config);
        run(&mut host, &mut engine, 30);
        for (at, page) in pages_of(&host, first).enumerate() {
            host.write(first, page, content(at as u64, 1));
        }
        run(&mut host, &mut engine, 30);
        let second = region(&mut host, pages, Fill::Random);
        for (at, page) in pages_of(&host, second).enumerate() {
            host.write(second, page, content(at as u64, 1));
        }
        run(&mut host, &mut engine, 60);
        host.saved().0 * 100 / pages
    });
    assert!(saved[0] > 98 && saved[1] > 98 && saved[2] < 2 && saved[3] < 2, "{saved:?} %");
}

#[test]
fn domains_are_kept_apart_in_whatever_class() {
    for classifier in ALL {
        let mut host = host();
        let pages = 16 * MIB;
        let pair = |host: &mut SimHost, domain| {
            [0, 1].map(|_| {
                let mapping = Mapping::new(Pages(pages), Fill::Random);
                let owner = host.add(Process::starting_at(0).in_domain(domain).mapping(mapping));
                host.regions_of(owner)[0]
            })
        };
        let rewrite = |host: &mut SimHost, regions: [RegionKey; 2]| {
            for region in regions {
                for (at, page) in pages_of(host, region).enumerate() {
                    host.write(region, page, content(at as u64, 1));
                }
            }
        };
        let config = Config { seed: 11, classifier, cow_threshold: Permyriad(10_000), ..Config::default() };
        let mut engine = Engine::new(config);
        // The first are in a class of pages that have changed, those of the other domain in that of first visits.
        let first = pair(&mut host, 1);
        run(&mut host, &mut engine, 30);
        rewrite(&mut host, first);
        run(&mut host, &mut engine, 60);
        assert!(host.saved().0 * 100 >= pages * 95, "{classifier}: {} of {pages}", host.saved().0);
        let second = pair(&mut host, 2);
        rewrite(&mut host, second);
        run(&mut host, &mut engine, 60);
        let (marked, rest): (Vec<_>, Vec<_>) = engine.regions().partition(|region| !region.marks.is_empty());
        let domains = |regions: &[&Region]| regions.iter().map(|region| region.view.domain.0).collect::<Vec<_>>();
        assert_eq!((domains(&marked), domains(&rest)), (vec![1, 1], vec![2, 2]), "{classifier}");
    }
}

/// A host some of whose contents differ in one quarter only.
struct Quartered {
    host: SimHost,
}

/// Page `page` but for one quarter: one in which it has `variant`.
fn content(page: u64, variant: u64) -> u64 {
    1 << 60 | page << 8 | variant
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
fn quarters(content: u64) -> Parts {
    let (page, variant) = ((content >> 8) as u32 & 0xff_ffff, content as u32 & 0xff);
    [0, 1, 2, 3].map(|at| {
        let written = if page % 4 == at { variant } else { 0 };
        (page << 4 | at << 2 | written).wrapping_mul(0x9e37_79b1).rotate_left(13)
    })
}

impl Host for Quartered {
    type Error = Infallible;
    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        self.host.observe()
    }
    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        let mut samples = self.host.read(plan)?;
        for sample in &mut samples.pages {
            sample.parts = quarters(self.host.page(sample.region, sample.page).unwrap().0);
        }
        Ok(samples)
    }
    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        self.host.apply(actions)
    }
    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.host.wait(ns)
    }
}

#[test]
fn pages_written_in_the_same_quarter_meet_in_its_class() {
    let pages = 8 * MIB;
    let mut host = Quartered { host: host() };
    let regions = [1, 2].map(|variant| (variant, region(&mut host.host, pages, Fill::Random)));
    for (variant, region) in regions {
        for (at, page) in pages_of(&host.host, region).enumerate() {
            host.host.write(region, page, content(at as u64, variant));
        }
    }
    // All pages change at one time, which would pass for a region that does not keep its contents.
    let cow_threshold = Permyriad(10_000);
    let classifier = Classifier::SubPages;
    let mut engine = Engine::new(Config { seed: 11, classifier, cow_threshold, ..Config::default() });
    run(&mut host, &mut engine, 30);
    assert_eq!(sum(&classes(&engine), |total| total.found), 0);
    for (_, region) in regions {
        for (at, page) in pages_of(&host.host, region).enumerate() {
            host.host.write(region, page, content(at as u64, 3));
        }
    }
    run(&mut host, &mut engine, 30);
    let report = classes(&engine);
    for class in [1, 2, 4, 8] {
        let total = report.classes[class];
        // A class is missed once in 64 times: then all four quarters are taken to have changed, or none.
        assert!(total.pages.0 * 100 >= 2 * pages / 4 * 97, "class {class}: {total:?}");
        assert!(total.found > 0, "class {class}: {total:?}");
    }
    assert!(host.host.saved().0 * 100 >= pages * 95, "{} of {pages}", host.host.saved().0);
}

#[test]
fn the_balance_adds_up_and_the_memory_is_bounded() {
    for classifier in &ALL[1..] {
        let mut host = host();
        let behaviour = Behaviour::Churn { per_second: Permyriad(300), writes: Writes::Unique };
        for _ in 0..2 {
            let mapping = Mapping::new(Pages(16 * MIB), Fill::Random).behaving(behaviour.clone());
            host.add(Process::starting_at(0).mapping(mapping));
        }
        let late = host.add(Process::starting_at(0).mapping(Mapping::new(Pages(8 * MIB), Fill::Series(3))));
        let mut engine = engine(*classifier);
        run(&mut host, &mut engine, 120);
        let (report, whole) = (classes(&engine), engine.report());
        // There are no zeros, so that all that was read was looked up or spared.
        let visits = sum(&report, |total| total.lookups + total.spared);
        assert_eq!(visits, whole.ledger.pages_read, "{classifier}");
        let by_region: u64 = whole.regions.iter().flat_map(|region| &region.classes).map(|(_, pages)| pages.0).sum();
        assert_eq!((by_region, sum(&report, |total| total.pages.0)), (40 * MIB, 40 * MIB), "{classifier}");
        for (class, total) in (0..).zip(&report.classes) {
            let of_class = whole.regions.iter().flat_map(|region| &region.classes).filter(|row| row.0 == class);
            assert_eq!(total.pages.0, of_class.map(|row| row.1.0).sum::<u64>(), "{classifier}, class {class}");
        }
        assert_eq!(report.classes.len(), if *classifier == Classifier::Address { 8 } else { 16 });
        let each = report.bytes.0 as f64 / (40 * MIB) as f64;
        assert!(each < 4.3, "{classifier}: {each} bytes a page");
        host.exit(late);
        run(&mut host, &mut engine, 2);
        assert_eq!(sum(&classes(&engine), |total| total.pages.0), 32 * MIB, "{classifier}");
    }
}

#[test]
fn the_index_does_not_grow_with_what_pages_held_before() {
    let entries = ALL.map(|classifier| {
        let mut host = host();
        for per_second in [20, 200, 2_000] {
            let behaviour = Behaviour::Churn { per_second: Permyriad(per_second), writes: Writes::Unique };
            let mapping = Mapping::new(Pages(8 * MIB), Fill::Random).behaving(behaviour);
            host.add(Process::starting_at(0).mapping(mapping));
        }
        let mut engine = engine(classifier);
        run(&mut host, &mut engine, 600);
        engine.report().index_entries as u64
    });
    assert!(entries.iter().all(|&entries| entries <= 3 * 24 * MIB), "{entries:?}");
}

/// What each classifier finds and spares: saved pages in truth, of what plain look-ups save.
///
/// Run by hand: `cargo test -p pagefold-sim --test classes -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn what_each_classifier_finds_and_spares() {
    type Script = fn(&mut SimHost, &mut Engine);
    fn churned(host: &mut SimHost, per_second: u32, writes: Writes) {
        for _ in 0..3 {
            let behaviour = Behaviour::Churn { per_second: Permyriad(per_second), writes };
            let fill = Fill::Series(3);
            host.add(Process::starting_at(0).mapping(Mapping::new(Pages(32 * MIB), fill).behaving(behaviour)));
        }
    }
    fn rewrite(host: &mut SimHost, region: RegionKey, series: u64) {
        for (at, page) in pages_of(host, region).enumerate() {
            host.write(region, page, content(at as u64, series));
        }
    }
    let scripts: [(&str, Script); 8] = [
        ("static: pairs, one content, three redis, three mariadb", |host, engine| {
            scenario::pairs(host, Pages(32 * MIB), Pages(32 * MIB));
            scenario::static_mix(host, Pages(16 * MIB));
            scenario::redis(host, 3, Pages(32 * MIB));
            scenario::mariadb(host, 3, Pages(32 * MIB));
            run(host, engine, 300);
        }),
        ("pairs that lie 3 MiB apart", |host, engine| {
            for shift in [0, 3 * 256] {
                let density = vec![Permyriad(10_000)];
                let replica = pagefold_sim::Replica { template: 9, density, zeros: Permyriad(0), run: 7, shift };
                region(host, 32 * MIB, Fill::Replica(replica));
            }
            run(host, engine, 300);
        }),
        ("nothing to find", |host, engine| {
            scenario::idle(host, Pages(64 * MIB));
            run(host, engine, 300);
        }),
        ("1 % of pages written a second with contents of their own", |host, engine| {
            churned(host, 100, Writes::Unique);
            run(host, engine, 300);
        }),
        ("0.1 % written a second with contents that others have", |host, engine| {
            churned(host, 10, Writes::Duplicate { series: 4, size: 4 * MIB });
            run(host, engine, 600);
        }),
        ("two rewritten alike at one time", |host, engine| {
            let regions = [0, 1].map(|_| region(host, 32 * MIB, Fill::Random));
            run(host, engine, 60);
            for region in regions {
                rewrite(host, region, 1);
            }
            run(host, engine, 300);
        }),
        ("two rewritten alike a minute apart, the first of them twice", |host, engine| {
            let regions = [0, 1].map(|_| region(host, 32 * MIB, Fill::Random));
            run(host, engine, 60);
            rewrite(host, regions[0], 2);
            run(host, engine, 60);
            for region in regions {
                rewrite(host, region, 1);
            }
            run(host, engine, 300);
        }),
        ("one rewritten, and then another comes with the same", |host, engine| {
            let first = region(host, 32 * MIB, Fill::Random);
            run(host, engine, 60);
            rewrite(host, first, 1);
            run(host, engine, 60);
            let second = region(host, 32 * MIB, Fill::Random);
            rewrite(host, second, 1);
            run(host, engine, 300);
        }),
    ];
    for (name, script) in scripts {
        println!("{name}");
        let mut plain = None;
        for classifier in ALL {
            let mut host = host();
            let cow_threshold = Permyriad(10_000);
            let config = Config { seed: 11, classifier, cow_threshold, ..Config::default() };
            let mut engine = Engine::new(config);
            script(&mut host, &mut engine);
            let saved = host.saved().0;
            let of = *plain.get_or_insert(saved);
            let (report, cost) = (engine.report(), host.cost());
            let spent =
                format!("pagefold {:.2} s, ksmd {:.2} s", cost.pagefold_ns as f64 / 1e9, cost.ksmd_ns as f64 / 1e9);
            let classes = report.classes.map_or(String::new(), |classes| {
                let (lookups, spared) = (sum(&classes, |total| total.lookups), sum(&classes, |total| total.spared));
                let pages = sum(&classes, |total| total.pages.0);
                let largest = classes.classes.iter().map(|total| total.pages.0).max().unwrap_or(0);
                format!(
                    "; {:.0} % of {} look-ups spared, the largest class has {:.0} %",
                    spared as f64 / (lookups + spared) as f64 * 100.0,
                    lookups + spared,
                    largest as f64 / pages as f64 * 100.0
                )
            });
            println!(
                "  {:<12} saved {saved:>6} ({:>5.1} %), {spent}{classes}",
                classifier.to_string(),
                saved as f64 / of.max(1) as f64 * 100.0
            );
        }
    }
}
