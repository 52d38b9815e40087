//! Compares plans with the best placement, which we find by trying all. Checks the rules that every step must keep.

use pagefold_engine::random::Random;
use pagefold_engine::units::{Bytes, Pages, index};
use pagefold_planner::contents::Contents;
use pagefold_planner::fleet::DIGESTS_END;
use pagefold_planner::{Fleet, Host, HostId, Placement, Sample, Unit, UnitId, plan};
use proptest::prelude::*;

/// Units of some kinds on hosts. A unit holds what its kind has in common, what half of the kinds have in common, and
/// some contents of its own. We sampled one content in 2^level, at a level below `levels` that differs from unit to
/// unit.
fn fleet(seed: u64, hosts: u32, per_host: u32, kinds: u64, memory: Bytes, levels: u64) -> Fleet {
    let mut random = Random::new(seed);
    let unit = |host: u32, random: &mut Random| {
        let kind = random.below(kinds);
        let segment = |number: u64, size: u64| (0..size).map(move |page| Random::for_purpose(number, page).next() >> 1);
        let mut digests: Vec<u64> = segment(kind, 150 + 20 * kind).chain(segment(100 + kind % 2, 100)).collect();
        digests.extend((0..100).map(|_| random.next() >> 1));
        let (held, threshold) = (Pages(digests.len() as u64), DIGESTS_END >> random.below(levels));
        digests.retain(|&digest| digest < threshold);
        Unit {
            host: HostId(host),
            memory: held.bytes(),
            held,
            cpu_millicores: 1,
            workloads: 1,
            pinned: false,
            apart: Vec::new(),
            samples: vec![Sample { domain: 0, threshold, digests }],
        }
    };
    let units = (0..hosts).flat_map(|host| (0..per_host).map(move |_| host)).collect::<Vec<u32>>();
    let units = units.into_iter().map(|host| unit(host, &mut random)).collect();
    let host = Host { memory, cpu_millicores: u64::from(per_host) };
    Fleet { hosts: vec![host; index(hosts)], units }
}

/// How much the best placement saves, found by trying all.
fn best(fleet: &Fleet, contents: &Contents) -> u64 {
    fn place(placement: &mut Placement<'_>, unit: u32, most: &mut u64) {
        let fleet = placement.fleet();
        if index(unit) == fleet.units.len() {
            *most = placement.saved().max(*most);
            return;
        }
        let mut empty_tried = false;
        for host in fleet.host_ids() {
            // All empty hosts are alike, so we try only one.
            let is_empty = placement.units_on(host).is_empty();
            if is_empty && empty_tried || !placement.fits(UnitId(unit), host) {
                continue;
            }
            empty_tried |= is_empty;
            placement.add(UnitId(unit), host);
            place(placement, unit + 1, most);
            placement.remove(UnitId(unit));
        }
    }
    let mut most = 0;
    place(&mut Placement::empty(fleet, contents), 0, &mut most);
    most
}

#[test]
fn plans_save_nearly_what_the_best_placement_does() {
    let mut shares = Vec::new();
    for seed in 0..30 {
        // Nine units on three hosts with room for three each.
        let fleet = fleet(seed, 3, 3, 3, Bytes(1 << 40), 1);
        let contents = Contents::of(&fleet);
        let made = plan(&fleet, &contents, u64::MAX);
        let best = best(&fleet, &contents);
        assert!(made.after.pages.0 <= best);
        shares.push(made.after.pages.0 as f64 / best as f64);
    }
    shares.sort_by(f64::total_cmp);
    assert!(shares[0] >= 0.9 && shares.iter().sum::<f64>() / 30.0 >= 0.98, "{shares:?}");
}

#[test]
fn what_is_best_already_is_left_alone() {
    let fleet = fleet(5, 3, 4, 3, Bytes(1 << 40), 1);
    let contents = Contents::of(&fleet);
    let made = plan(&fleet, &contents, u64::MAX);
    let mut again = fleet.clone();
    for (unit, host) in again.units.iter_mut().zip(&made.places) {
        unit.host = *host;
    }
    let second = plan(&again, &Contents::of(&again), u64::MAX);
    assert!(second.after.pages.0 >= made.after.pages.0);
    assert!(second.moves == 0 || second.after.pages.0 > made.after.pages.0, "{second:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// After each step the limits hold on hosts where they held before, moves are counted, pinned units stay, units
    /// that must be apart are apart, and the figures are right.
    #[test]
    fn every_step_keeps_the_rules(
        seed in any::<u64>(),
        room in 500_u64..2_500,
        most_moves in 0..40_u64,
        pinned in prop::collection::btree_set(0..20_usize, 0..6),
        apart in prop::collection::btree_set(0..20_usize, 0..5),
    ) {
        let mut fleet = fleet(seed, 4, 5, 4, Pages(room).bytes(), 3);
        fleet.hosts.iter_mut().for_each(|host| host.cpu_millicores = 7);
        for unit in pinned {
            fleet.units[unit].pinned = true;
        }
        for &unit in &apart {
            fleet.units[unit].apart = vec![1];
        }
        let contents = Contents::of(&fleet);
        let made = plan(&fleet, &contents, most_moves);
        prop_assert!(made.moves <= most_moves);
        prop_assert!(made.after.pages >= made.before.pages);
        let mut placement = Placement::current(&fleet, &contents);
        let over = |placement: &Placement<'_>, host| placement.memory(host).0.saturating_sub(fleet.hosts[0].memory.0);
        let crowd = |placement: &Placement<'_>, host| {
            placement.units_on(host).iter().filter(|unit| apart.contains(&index(unit.0))).count()
        };
        let before: Vec<(u64, usize)> =
            fleet.host_ids().map(|host| (over(&placement, host), crowd(&placement, host))).collect();
        let mut moves = 0;
        for step in &made.steps {
            let saved = placement.total_saving().pages.0;
            for of in &step.moves {
                prop_assert!(!fleet.units[index(of.unit.0)].pinned);
                prop_assert_eq!(placement.host_of(of.unit), Some(of.from));
                placement.remove(of.unit);
                moves += 1;
            }
            for of in &step.moves {
                placement.add(of.unit, of.to);
            }
            prop_assert_eq!(i128::from(placement.total_saving().pages.0) - i128::from(saved), i128::from(step.saves));
            for (host, (over_before, crowd_before)) in fleet.host_ids().zip(&before) {
                prop_assert!(over(&placement, host) <= *over_before, "{:?}", step);
                prop_assert!(crowd(&placement, host) <= (*crowd_before).max(1));
                prop_assert!(placement.units_on(host).len() <= 7);
            }
        }
        prop_assert_eq!(moves, made.moves);
        prop_assert_eq!(placement.total_saving(), made.after);
    }
}
