//! How strong a partial hash should be (UKSM section 6.1).
//!
//! A weak hash is quick, but pages that differ may share it, and then they are compared in vain. The controller seeks the
//! strength at which the profit (time saved against the full strength) less the penalty (time lost to collisions) is
//! greatest: it probes by slow start, first down, then up, then rests until something changes.
//!
//! Three things differ from the paper, each because its rule fails on pages that exist:
//! - Slow start oversteps, so the search goes on from the best strength found until neither direction brings more.
//! - The full strength, whose benefit is zero by definition, is always among the candidates. Pages that differ in one
//!   place beyond the strength all collide: then the benefit grows towards the *weakest* hash, though it is negative
//!   there. A search that ends below zero starts again from the full strength.
//! - Two rounds without a collision ask for a probe only where a weaker hash exists, and if that probe changes nothing,
//!   twice as many must pass before the next. Otherwise the best strength would be left for a worse one for ever.

/// What a round of scanning cost, all in nanoseconds of the same clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundCost {
    /// What hashing the round's pages at full strength would have cost.
    pub full_ns: u64,
    /// How much of that was saved by hashing less.
    pub profit_ns: u64,
    /// What collisions cost: comparing pages that turned out to differ, and all that followed from it.
    pub penalty_ns: u64,
    /// Pages that were compared and differed.
    pub collisions: u64,
}

impl RoundCost {
    /// Profit less penalty, in millionths of the cost of full hashing: at most [`WHOLE`], and 0 at full strength.
    fn benefit(&self) -> i64 {
        let gain = i128::from(self.profit_ns) - i128::from(self.penalty_ns);
        let share = gain * i128::from(WHOLE) / i128::from(self.full_ns.max(1));
        i64::try_from(share).unwrap_or(if share < 0 { i64::MIN / 2 } else { WHOLE })
    }
}

/// The whole cost of full hashing, as a benefit.
const WHOLE: i64 = 1_000_000;
/// A benefit this much below the best is certainly worse, and a deviation below it is no news: one per cent.
const NOISE: i64 = WHOLE / 100;
/// The largest step of slow start.
const DELTA_MAX: u32 = 32;
/// Steps in one direction, none of them better than the best but none certainly worse, before it is given up.
const STEPS_IN_VAIN: u32 = 2;
/// Changes of direction before a probe ends: on measurements full of noise it would go on for ever.
const TURNS_MAX: u32 = 12;
/// Rounds without a collision after which a weaker hash is tried.
const QUIET_ROUNDS: u32 = 2;
/// Rounds after which a stable strength is tested again.
const STABLE_ROUNDS: u32 = 1000;

/// Finds the best strength, a round at a time. Pure: what it decides depends on the rounds alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrengthController {
    full: u32,
    strength: u32,
    state: State,
    /// Rounds without a collision that ask for a probe.
    patience: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The benefit of this strength is to be known before a search can start from it.
    Measuring {
        then: Start,
    },
    Probing(Probe),
    Stable {
        benefit: i64,
        rounds: u32,
        quiet: u32,
    },
}

/// How a search starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Start {
    /// The strength that was stable before.
    from: u32,
    /// Only the lack of collisions asked for it.
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probe {
    start: Start,
    /// The best strength so far, and its benefit.
    best: (u32, i64),
    up: bool,
    delta: u32,
    /// Whether this direction has brought anything.
    better: bool,
    /// Steps since the best, in this direction.
    in_vain: u32,
    /// Whether a step down, and one up, from the best brought nothing.
    dead: [bool; 2],
    turns: u32,
}

impl StrengthController {
    /// A controller for strengths from 1 to `full`, starting at half.
    pub fn new(full: u32) -> Self {
        let (full, strength) = (full.max(1), (full / 2).max(1));
        let then = Start { from: strength, quiet: false };
        Self { full, strength, state: State::Measuring { then }, patience: QUIET_ROUNDS }
    }

    /// The strength for the next round.
    pub fn strength(&self) -> u32 {
        self.strength
    }

    /// Whether no search is under way.
    pub fn is_stable(&self) -> bool {
        matches!(self.state, State::Stable { .. })
    }

    /// Takes in a round done at [`Self::strength`], and returns the strength for the next one. A round without pages
    /// says nothing.
    pub fn round(&mut self, round: &RoundCost) -> u32 {
        if round.full_ns == 0 {
            return self.strength;
        }
        let benefit = round.benefit();
        match self.state {
            State::Measuring { then } => self.search(then, benefit),
            State::Probing(probe) => self.step(probe, benefit),
            State::Stable { benefit: before, rounds, quiet } => {
                let quiet = if round.collisions == 0 { quiet + 1 } else { 0 };
                let rounds = rounds + 1;
                let moved = (benefit - before).abs() > (before.abs() / 2).max(NOISE);
                let bored = quiet >= self.patience && self.strength > 1;
                if moved || bored || rounds >= STABLE_ROUNDS {
                    if !bored || moved {
                        self.patience = QUIET_ROUNDS;
                    }
                    self.search(Start { from: self.strength, quiet: bored && !moved }, benefit);
                } else {
                    self.state = State::Stable { benefit: before, rounds, quiet };
                }
            }
        }
        self.strength
    }

    /// Starts a search at the strength just measured: downwards.
    fn search(&mut self, start: Start, benefit: i64) {
        let best = (self.strength, benefit);
        self.go(Probe { start, best, up: false, delta: 1, better: false, in_vain: 0, dead: [false; 2], turns: 0 });
    }

    /// Takes in the benefit of a step.
    fn step(&mut self, mut probe: Probe, benefit: i64) {
        if benefit > probe.best.1 {
            let best = (self.strength, benefit);
            probe = Probe { best, better: true, in_vain: 0, dead: [false; 2], ..probe };
        } else {
            probe.in_vain += 1;
            if benefit < probe.best.1 - NOISE || probe.in_vain >= STEPS_IN_VAIN {
                return self.turn(probe);
            }
        }
        probe.delta = (probe.delta * 2).min(DELTA_MAX);
        self.go(probe);
    }

    /// Takes the next step in the direction of the probe, or turns where there is none.
    fn go(&mut self, probe: Probe) {
        let next = if probe.up {
            (self.strength + probe.delta).min(self.full)
        } else {
            self.strength.saturating_sub(probe.delta).max(1)
        };
        if next == self.strength {
            return self.turn(probe);
        }
        self.strength = next;
        self.state = State::Probing(probe);
    }

    /// Ends a direction, and the search when neither brings more.
    fn turn(&mut self, mut probe: Probe) {
        // Otherwise slow start has overstepped the neighbours of the best.
        if !probe.better {
            probe.dead[usize::from(probe.up)] = true;
        }
        self.strength = probe.best.0;
        probe.turns += 1;
        if probe.dead == [true; 2] || probe.turns >= TURNS_MAX {
            return self.rest(probe);
        }
        self.go(Probe { up: !probe.up, delta: 1, better: false, in_vain: 0, ..probe });
    }

    fn rest(&mut self, probe: Probe) {
        let (strength, benefit) = probe.best;
        if benefit < 0 && strength < self.full {
            // Worse than hashing everything, which needs no measuring.
            self.strength = self.full;
            self.search(probe.start, 0);
            return;
        }
        if probe.start.quiet {
            self.patience =
                if strength == probe.start.from { (self.patience * 2).min(STABLE_ROUNDS) } else { QUIET_ROUNDS };
        }
        self.state = State::Stable { benefit, rounds: 0, quiet: 0 };
    }
}

#[cfg(test)]
#[path = "strength_tests.rs"]
mod tests;
