//! Writers keep rewriting their part of a mapping with the same contents. The rest of the mapping must stay merged.

mod common;

use common::{MIB, Machine, SECOND, host};
use pagefold_engine::decision::Kind;
use pagefold_engine::keys::FamilyKey;
use pagefold_engine::units::{Pages, Vpn};
use pagefold_sim::Step;

const PROCESSES: u32 = 2;
/// The size of each mapping, and of the part at its start that the writer walks through, in pages.
const PAGES: u64 = 256 * MIB;
const WALKED: u64 = 16 * MIB;
/// Pages written per second: 512 KiB.
const PER_SECOND: u64 = 128;
const FIRST: u64 = 512;

/// Two processes with equal mappings. For some seconds they rewrite the first `walked` pages again and again. `content`
/// gives each page its content.
fn walked(walked: u64, per_second: u64, seconds: u64, content: impl Fn(u64) -> u64) -> Vec<(u64, Step)> {
    let mut steps = Vec::new();
    let mut write = |at_ns, region, page| {
        let write = Step::Write { region, page: Vpn(FIRST + page), content: content(page), parts: 0b1111, eighth: 0 };
        steps.push((at_ns, write));
    };
    for at in 0..PAGES {
        (0..PROCESSES).for_each(|process| write(0, process, at));
    }
    for number in 0..seconds * per_second {
        let at_ns = 8 * SECOND + number * SECOND / per_second;
        (0..PROCESSES).for_each(|process| write(at_ns, process, number % walked));
    }
    let maps = (0..PROCESSES).flat_map(|process| {
        let (family, first, pages) = (FamilyKey(1), Vpn(FIRST), Pages(PAGES));
        [Step::Start { process }, Step::Map { process, region: process, family, first, pages }]
    });
    maps.map(|step| (0, step)).chain(steps).collect()
}

#[test]
fn data_beside_walked_data_stays_merged() {
    let mut sim = Machine::new(host());
    sim.play(walked(WALKED, PER_SECOND, 600, |page| page + 1).into());
    for seconds in [40, 560] {
        sim.run(seconds);
        let frames = sim.truth().frames;
        assert!(frames <= PAGES + 24 * MIB, "{frames} of {}", 2 * PAGES);
    }
}

#[test]
fn a_mapping_that_is_walked_through_is_given_back() {
    // The writer walks through the whole mapping in half a minute.
    let mut sim = Machine::new(host());
    sim.play(walked(PAGES, PAGES / 30, 240, |page| page + 1).into());
    sim.run(240);
    assert_eq!(sim.saved(), Pages(0));
    let report = sim.engine.state();
    for region in &report.regions {
        // By chance the engine has seen few breaks in some extents.
        assert!(region.kind == Kind::CowBroken && region.marked <= Pages(PAGES / 50), "{region:?}");
    }
}

/// Of two programs with equal memory, one writes all of it, page by page, soon after we've merged it. The other one
/// writes nothing.
#[test]
fn who_still_maps_what_others_have_written_is_not_charged_for_it() {
    let mut steps = walked(1, 0, 0, |page| page + 1);
    for page in 0..PAGES {
        let at_ns = 20 * SECOND + page * SECOND / 2_048;
        let content = 1 << 40 | page;
        steps.push((at_ns, Step::Write { region: 1, page: Vpn(FIRST + page), content, parts: 0b1111, eighth: 0 }));
    }
    let mut sim = Machine::new(host());
    sim.play(steps.into());
    sim.run(120);
    let state = sim.engine.state();
    let [quiet, writer] = [0, 1].map(|at| state.regions[at].cow_ratio);
    assert!(quiet.is_none() && writer.is_some(), "{quiet:?} {writer:?}");
}
