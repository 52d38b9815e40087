//! Trust domains on the simulated host: a content present in two domains is marked in at most one.

mod common;

use common::{MIB, SECOND, Watched, engine, host, process_of, run};
use pagefold_core::config::Config;
use pagefold_core::engine::Engine;
use pagefold_core::host::Host;
use pagefold_core::keys::RegionKey;
use pagefold_core::units::Pages;
use pagefold_sim::{Costs, Fill, Knobs, Mapping, Process, SimHost};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn pair(host: &mut SimHost, domain: u16, mib: u64, fill: &Fill) {
    for _ in 0..2 {
        let mapping = Mapping::new(Pages(mib * MIB), fill.clone());
        host.add(Process::starting_at(host.now_ns()).in_domain(domain).mapping(mapping));
    }
}

/// Contents in marked spans, and the domains that contain them there. Zeros belong to no domain.
fn marked(host: &mut SimHost, engine: &Engine) -> BTreeMap<u64, Vec<u16>> {
    let Ok(snapshot) = host.observe();
    let domain_of: BTreeMap<RegionKey, u16> = snapshot.regions.iter().map(|view| (view.key, view.domain.0)).collect();
    let mut found: BTreeMap<u64, Vec<u16>> = BTreeMap::new();
    for region in engine.regions() {
        for mark in &region.marks.spans {
            for page in mark.first.0..mark.first.0 + mark.pages.0 {
                let Some((content, _)) = host.page(region.view.key, pagefold_core::units::Vpn(page)) else { continue };
                let domains = found.entry(content).or_default();
                let domain = domain_of[&region.view.key];
                if content != 0 && !domains.contains(&domain) {
                    domains.push(domain);
                }
            }
        }
    }
    found
}

#[track_caller]
fn apart(host: &mut SimHost, engine: &Engine) {
    let in_two = marked(host, engine).values().filter(|domains| domains.len() > 1).count();
    assert_eq!(in_two, 0, "contents are marked in two domains");
}

#[test]
fn each_domain_merges_its_own_duplicates() {
    let (mut host, mut engine) = (host(), engine());
    pair(&mut host, 1, 64, &Fill::Series(1));
    pair(&mut host, 2, 64, &Fill::Series(2));
    pair(&mut host, 3, 16, &Fill::Zeros);
    run(&mut host, &mut engine, 20);
    apart(&mut host, &engine);
    let expected = (64 + 64 + 2 * 16) * MIB;
    assert!(host.saved().0 >= expected * 99 / 100, "{} of {expected}", host.saved().0);
}

#[test]
fn contents_of_two_domains_are_merged_in_one() {
    let (mut host, mut engine) = (host(), engine());
    pair(&mut host, 1, 64, &Fill::Series(1));
    pair(&mut host, 2, 64, &Fill::Series(1));
    run(&mut host, &mut engine, 20);
    apart(&mut host, &engine);
    let expected = 64 * MIB;
    assert!(host.saved().0.abs_diff(expected) <= expected / 100, "{} of {expected}", host.saved().0);
    let withheld: u64 = engine.regions().map(|region| region.withheld().0).sum();
    assert!(withheld >= 2 * 64 * MIB * 99 / 100, "{withheld} are said to be withheld");
    // Within one domain everything is merged.
    let (mut host, mut engine) = (common::host(), common::engine());
    pair(&mut host, 1, 64, &Fill::Series(1));
    pair(&mut host, 1, 64, &Fill::Series(1));
    run(&mut host, &mut engine, 20);
    assert!(host.saved().0 >= 3 * 64 * MIB * 99 / 100);
}

#[test]
fn a_later_domain_cannot_mark_marked_contents() {
    let (mut host, mut engine) = (host(), engine());
    pair(&mut host, 1, 64, &Fill::Series(1));
    run(&mut host, &mut engine, 10);
    assert!(host.saved().0 >= 63 * MIB);
    pair(&mut host, 2, 64, &Fill::Series(1));
    pair(&mut host, 2, 64, &Fill::Series(2));
    run(&mut host, &mut engine, 60);
    apart(&mut host, &engine);
    assert!(host.saved().0 >= 2 * 63 * MIB && host.saved().0 <= 129 * MIB, "{}", host.saved().0);
}

#[test]
fn a_content_stays_with_its_domain_when_the_first_process_exits() {
    let (mut host, mut engine) = (host(), engine());
    let mapping = || Mapping::new(Pages(32 * MIB), Fill::Series(1));
    let starting = || Process::starting_at(0).in_domain(1).mapping(mapping());
    host.add(starting().exiting_at(20 * SECOND));
    host.add(starting());
    host.add(starting());
    // The other domain needs memory from the start.
    pair(&mut host, 2, 16, &Fill::Series(2));
    run(&mut host, &mut engine, 25);
    // Many short-lived contents make the index drop old ones.
    for number in 0..100 {
        let short = Mapping::new(Pages(64), Fill::Random);
        host.add(Process::starting_at(host.now_ns() + number * 10_000_000).exiting_at(30 * SECOND).mapping(short));
    }
    run(&mut host, &mut engine, 15);
    pair(&mut host, 2, 32, &Fill::Series(1));
    run(&mut host, &mut engine, 40);
    apart(&mut host, &engine);
}

#[test]
fn a_process_that_is_left_alone_keeps_its_marks_and_its_domain() {
    let starting = |domain| {
        let mapping = Mapping::new(Pages(32 * MIB), Fill::Series(1));
        Process::starting_at(0).in_domain(domain).mapping(mapping)
    };
    let mut host = host();
    let victims = [host.add(starting(1)), host.add(starting(1))];
    // There are two domains from the start.
    pair(&mut host, 2, 16, &Fill::Series(2));
    let (mut watched, mut engine) = (Watched::new(host), engine());
    watched.run(&mut engine, 20);
    let is_marked = |engine: &Engine, owner| {
        engine.regions().any(|region| region.view.owner == owner && region.marked_resident() > Pages(0))
    };
    assert!(victims.iter().all(|&victim| is_marked(&engine, victim)));
    let saved = watched.host.saved();
    for victim in victims {
        watched.host.leave_alone(victim, true);
    }
    watched.run(&mut engine, 1);
    let since_ns = watched.host.now_ns();
    pair(&mut watched.host, 2, 32, &Fill::Series(1));
    // Long enough for contents to be forgotten that are not read again.
    watched.run(&mut engine, 3_600);
    apart(&mut watched.host, &engine);
    assert_eq!(watched.host.saved(), saved);
    assert!(victims.iter().all(|&victim| is_marked(&engine, victim)), "they are accounted for");
    let was_read = |watched: &Watched, owner| watched.pages.iter().any(|&(at, of, _)| at > since_ns && of == owner);
    assert!(!victims.iter().any(|&victim| was_read(&watched, victim)), "they are left alone");
    for victim in victims {
        watched.host.leave_alone(victim, false);
    }
    watched.run(&mut engine, 60);
    apart(&mut watched.host, &engine);
    assert!(victims.iter().all(|&victim| was_read(&watched, victim) && is_marked(&engine, victim)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_content_is_marked_in_two_domains(
        tenants in common::tenants(), seed in any::<u64>(),
    ) {
        let mut host = SimHost::new(seed, Costs::default(), Knobs { use_zero_pages: true, ..Knobs::default() });
        let mut engine = Engine::new(Config { seed, ..Config::default() });
        for tenant in tenants {
            host.add(process_of(tenant));
        }
        for _ in 0..6 {
            run(&mut host, &mut engine, 8);
            let in_two = marked(&mut host, &engine).values().filter(|domains| domains.len() > 1).count();
            prop_assert_eq!(in_two, 0);
        }
    }
}
