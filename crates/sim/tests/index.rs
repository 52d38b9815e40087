//! The index of contents has a limit, and the memory in scope holds more contents than that.

mod common;

use common::{MIB, Machine, both, config};
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::units::Pages;
use pagefold_sim::{Fill, Mapping, Process};

/// How many pages each program has.
const EACH: u64 = 24 * MIB;
/// How many contents the index holds at most.
const MOST: usize = 8_192;

/// A machine where the second and the last of six programs have equal memory, of different sizes so that they aren't of
/// one family. The pages of the other four have no duplicates.
fn machine(mut sim: Machine) -> Machine {
    sim.engine = Engine::new(Config { contents_most: MOST, ..config() });
    for number in 0..6 {
        let fill = if number == 1 || number == 5 { Fill::Series(1) } else { Fill::Random };
        sim.add(Process::starting_at(0).mapping(Mapping::new(Pages(EACH + number * MIB), fill)));
    }
    sim
}

#[test]
fn duplicates_are_merged_beside_more_contents_than_the_index_holds() {
    // On request we only find the pairs whose contents the index keeps. ksmd finds all pairs in memory that we mark.
    for (sim, percent) in both().into_iter().zip([95, 15]) {
        let mut sim = machine(sim);
        for _ in 0..300 {
            sim.run(1);
            let index = sim.engine.state().work.index;
            assert!(index.contents <= MOST, "{index:?}");
            assert!(index.bytes <= 16 * MOST as u64, "{index:?}");
        }
        assert!(sim.saved().0 >= EACH * percent / 100, "{:?} of {EACH}", sim.saved());
    }
}
