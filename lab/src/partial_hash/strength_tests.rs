use super::*;
use pagefold_engine::units::whole;
use proptest::prelude::*;

/// The cost of full hashing of a round in these models, nanoseconds.
const FULL_NS: u64 = 10_000_000;

/// A model: the cost of a round at a strength. The profit falls linearly with the strength.
fn round(full: u32, strength: u32, penalty_ns: u64, collisions: u64) -> RoundCost {
    let profit_ns = FULL_NS * u64::from(full - strength) / u64::from(full);
    RoundCost { full_ns: FULL_NS, profit_ns, penalty_ns, collisions }
}

/// Runs rounds until the controller is stable. Panics if it never is.
fn settle(controller: &mut StrengthController, model: impl Fn(u32) -> RoundCost) -> u32 {
    for _ in 0..400 {
        controller.round(&model(controller.strength()));
        if controller.is_stable() {
            return controller.strength();
        }
    }
    panic!("no rest after 400 rounds: {controller:?}");
}

/// Pages that collide less the stronger the hash, and never at full strength.
fn decaying(full: u32, scale: f64) -> impl Fn(u32) -> RoundCost {
    move |strength| {
        let share = (-f64::from(strength) / scale).exp() - (-f64::from(full) / scale).exp();
        let penalty_ns = whole(share * 2.0 * FULL_NS as f64);
        round(full, strength, penalty_ns, penalty_ns / 1000)
    }
}

/// The greatest benefit of all strengths.
fn best(full: u32, model: impl Fn(u32) -> RoundCost) -> i64 {
    (1..=full).map(|strength| model(strength).benefit()).max().unwrap()
}

#[test]
fn the_controller_starts_at_half() {
    assert_eq!((StrengthController::new(1024).strength(), StrengthController::new(64).strength()), (512, 32));
    assert_eq!(StrengthController::new(1).strength(), 1);
    assert_eq!(StrengthController::new(0).strength(), 1);
}

#[test]
fn pages_that_differ_everywhere_need_one_word() {
    for (full, rounds) in [(1024, 30), (64, 12)] {
        let mut controller = StrengthController::new(full);
        let mut took = 0;
        while !controller.is_stable() {
            controller.round(&round(full, controller.strength(), 0, 0));
            took += 1;
        }
        assert_eq!(controller.strength(), 1);
        assert!(took <= rounds, "{took} rounds of {full}");
        // At the weakest strength, rounds without collisions don't start a probe.
        for _ in 0..900 {
            assert_eq!(controller.round(&round(full, 1, 0, 0)), 1);
            assert!(controller.is_stable());
        }
    }
}

#[test]
fn the_first_steps_are_those_of_slow_start() {
    let mut controller = StrengthController::new(1024);
    let strengths: Vec<u32> = (0..9).map(|_| controller.round(&round(1024, controller.strength(), 0, 0))).collect();
    assert_eq!(strengths, [511, 509, 505, 497, 481, 449, 417, 385, 353]);
}

#[test]
fn pages_alike_but_for_one_word_anywhere_need_all_words() {
    // A page collides unless its word is hashed; a collision costs more than a full hash.
    for full in [1024, 64] {
        let model = |strength| {
            let colliding = u64::from(full - strength);
            round(full, strength, FULL_NS * 17 / 10 * colliding / u64::from(full), colliding)
        };
        assert_eq!(settle(&mut StrengthController::new(full), model), full);
    }
}

#[test]
fn pages_alike_but_for_one_place_need_the_strength_that_reaches_it() {
    // The paper's search alone would run to strength 1 if the place is in the upper half.
    for full in [1024, 64] {
        for place in [1, 2, full / 3, full / 2, full / 2 + 1, full * 3 / 4, full - 1, full] {
            let model = |strength| match strength {
                s if s < place => round(full, s, FULL_NS * 17 / 10, 1000),
                s => round(full, s, 0, 0),
            };
            let mut controller = StrengthController::new(full);
            assert_eq!(settle(&mut controller, model), place, "place {place} of {full}");
        }
    }
}

#[test]
fn the_optimum_of_two_opposing_costs_is_found() {
    for full in [1024, 64] {
        for scale in [0.3, 1.0, 3.0, 7.5, 20.0, 60.0, 150.0] {
            let model = decaying(full, scale);
            let found = settle(&mut StrengthController::new(full), &model);
            let (got, most) = (model(found).benefit(), best(full, &model));
            assert!(got >= most - 2000, "{scale} of {full}: {got} of {most} at {found}");
        }
    }
}

proptest! {
    #[test]
    fn any_single_peak_is_found(full in prop_oneof![Just(64u32), Just(1024)], peak in 0.0f64..1.0, slope in 0.1f64..3.0) {
        // The profit is linear, and so is the penalty, which vanishes at the peak: one maximum, at the peak.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place within the strengths")]
        let peak = 1 + (f64::from(full - 1) * peak) as u32;
        let model = |strength: u32| {
            let short = f64::from(peak.saturating_sub(strength)) / f64::from(full);
            let penalty_ns = whole(short * (1.0 + slope) * FULL_NS as f64);
            round(full, strength, penalty_ns, u64::from(penalty_ns > 0))
        };
        prop_assert_eq!(settle(&mut StrengthController::new(full), model), peak);
    }

    #[test]
    fn noise_has_little_effect(seed: u64, scale in 2.0f64..40.0) {
        let mut state = seed;
        let model = decaying(64, scale);
        let mut controller = StrengthController::new(64);
        let mut rounds = 0;
        while !controller.is_stable() {
            let mut round = model(controller.strength());
            state = pagefold_engine::random::mix(state);
            // Noise of two per cent.
            round.penalty_ns = round.penalty_ns * (980 + state % 41) / 1000;
            round.profit_ns = round.profit_ns * (995 + state % 11) / 1000;
            controller.round(&round);
            rounds += 1;
            prop_assert!(rounds < 200);
        }
        let (got, most) = (model(controller.strength()).benefit(), best(64, &model));
        prop_assert!(got >= most - WHOLE / 10, "{} of {} at {}", got, most, controller.strength());
    }
}

/// A controller that is stable at the place of a step model.
fn stable_controller(full: u32, place: u32) -> StrengthController {
    let mut controller = StrengthController::new(full);
    let model =
        |strength| round(full, strength, if strength < place { FULL_NS * 2 } else { 0 }, u64::from(strength <= place));
    assert_eq!(settle(&mut controller, model), place);
    controller
}

#[test]
fn a_change_of_more_than_half_starts_a_probe() {
    let stay = round(64, 16, FULL_NS * 30 / 100, 1);
    assert_eq!(round(64, 16, 0, 1).benefit(), 750_000);
    let mut controller = stable_controller(64, 16);
    controller.round(&stay);
    assert!(controller.is_stable(), "0.45 of 0.75 is less than half off");
    controller.round(&round(64, 16, FULL_NS * 40 / 100, 1));
    assert!(!controller.is_stable(), "0.35 of 0.75 is more than half off");
}

#[test]
fn a_thousand_rounds_start_a_probe() {
    let mut controller = stable_controller(64, 16);
    for count in 1..=STABLE_ROUNDS {
        assert!(controller.is_stable(), "{count}");
        controller.round(&round(64, 16, 0, 1));
    }
    assert!(!controller.is_stable());
}

#[test]
fn two_rounds_without_collisions_start_a_probe_and_one_does_not() {
    let mut controller = stable_controller(64, 16);
    for collisions in [0, 1, 0] {
        controller.round(&round(64, 16, 0, collisions));
        assert!(controller.is_stable());
    }
    controller.round(&round(64, 16, 0, 0));
    assert!(!controller.is_stable());
    // The pages now differ everywhere.
    assert_eq!(settle(&mut controller, |strength| round(64, strength, 0, 0)), 1);
}

#[test]
fn pages_that_become_similar_are_noticed_at_once() {
    let mut controller = StrengthController::new(64);
    assert_eq!(settle(&mut controller, |strength| round(64, strength, 0, 0)), 1);
    let alike = |strength: u32| round(64, strength, FULL_NS * 17 / 10 * u64::from(64 - strength) / 64, 1);
    controller.round(&alike(1));
    assert!(!controller.is_stable());
    assert_eq!(settle(&mut controller, alike), 64);
}

#[test]
fn the_strength_is_stable_without_collisions() {
    // No page collides at the place, all collide below it: each futile probe doubles the wait for the next.
    for (full, place) in [(64, 40), (1024, 700), (64, 64)] {
        let model = |strength| {
            round(full, strength, if strength < place { FULL_NS * 2 } else { 0 }, u64::from(strength < place))
        };
        let mut controller = StrengthController::new(full);
        settle(&mut controller, model);
        let (mut elsewhere, mut benefit) = (0, 0);
        for _ in 0..1000 {
            let strength = controller.strength();
            elsewhere += u32::from(strength != place);
            benefit += model(strength).benefit();
            controller.round(&model(strength));
        }
        assert!(elsewhere <= 60, "{elsewhere} of 1000 rounds away from {place} of {full}");
        let whole = 1000 * model(place).benefit();
        assert!(whole - benefit <= 1000 * WHOLE / 20, "{benefit} of {whole}");
    }
}

#[test]
fn a_round_without_pages_has_no_effect() {
    let mut controller = StrengthController::new(64);
    assert_eq!(controller.round(&RoundCost::default()), 32);
    assert_eq!(controller, StrengthController::new(64));
}

#[test]
fn extreme_figures_do_not_overflow() {
    let worst = RoundCost { full_ns: 1, profit_ns: 0, penalty_ns: u64::MAX, collisions: u64::MAX };
    let mut controller = StrengthController::new(64);
    for _ in 0..100 {
        controller.round(&worst);
        controller.round(&RoundCost { profit_ns: u64::MAX, penalty_ns: 0, ..worst });
    }
    assert!((1..=64).contains(&controller.strength()));
}
