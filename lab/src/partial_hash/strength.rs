//! The strength of a partial hash (UKSM section 6.1).
//!
//! A weak hash is fast, but pages that differ may share it, and then we compare them for nothing. The controller seeks
//! the strength with the greatest benefit: the profit (time saved compared with the full strength) minus the penalty
//! (time lost to collisions). It probes by slow start, first downwards, then upwards, then rests until the benefit
//! changes.
//!
//! Three of our rules differ from the paper's, which fail on real pages:
//! - Slow start overshoots, so the search continues from the best strength found until neither direction is better.
//! - The full strength, whose benefit is zero by definition, is always a candidate. Pages that differ only in one
//!   place beyond the hashed words all collide; the benefit then rises towards the *weakest* hash although it's
//!   negative there. A search that ends below zero restarts from the full strength.
//! - Two rounds without a collision start a probe only if a weaker hash exists. If that probe changes nothing, twice
//!   as many such rounds must pass before the next one. Otherwise we'd abandon the best strength for a worse one
//!   again and again.

/// The cost of a scanning round, in nanoseconds of one clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundCost {
    /// The cost of hashing the round's pages at full strength.
    pub full_ns: u64,
    /// The part of `full_ns` that hashing less has saved.
    pub profit_ns: u64,
    /// The cost of collisions: comparing pages that differ, and all the work that follows.
    pub penalty_ns: u64,
    /// Pages that we compared and that differed.
    pub collisions: u64,
}

impl RoundCost {
    /// Profit minus penalty, in millionths of the cost of full hashing: at most [`WHOLE`], and 0 at full strength.
    fn benefit(&self) -> i64 {
        let gain = i128::from(self.profit_ns) - i128::from(self.penalty_ns);
        let share = gain * i128::from(WHOLE) / i128::from(self.full_ns.max(1));
        i64::try_from(share).unwrap_or(if share < 0 { i64::MIN / 2 } else { WHOLE })
    }
}

/// The cost of full hashing, as a benefit.
const WHOLE: i64 = 1_000_000;
/// Differences in benefit below one per cent are noise.
const NOISE: i64 = WHOLE / 100;
/// The largest step of slow start.
const DELTA_MAX: u32 = 32;
/// Steps in one direction without improvement before we give it up. Steps double, so these cross half of all strengths
/// of a hash by cache lines: processors that read ahead take as long for half of the lines as for all, and less only
/// for a few.
const FUTILE_STEPS_MAX: u32 = 5;
/// Changes of direction before a probe ends; noisy measurements would prolong a probe forever.
const TURNS_MAX: u32 = 12;
/// Rounds without a collision before we try a weaker hash.
const QUIET_ROUNDS: u32 = 2;
/// Rounds before we test a stable strength again.
const STABLE_ROUNDS: u32 = 1000;

/// Finds the best strength, round by round. Its decisions depend only on the rounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrengthController {
    full: u32,
    strength: u32,
    state: State,
    /// Rounds without a collision that start a probe.
    quiet_limit: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A search starts once we know the benefit of this strength.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Start {
    /// The strength that was stable before.
    from: u32,
    /// Whether only the lack of collisions started the probe.
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probe {
    start: Start,
    /// The best strength so far, and its benefit.
    best: (u32, i64),
    up: bool,
    delta: u32,
    /// Whether this direction has improved the benefit.
    improved: bool,
    /// Steps in this direction since the best.
    futile_steps: u32,
    /// Whether a step down, and a step up, from the best brought no improvement.
    exhausted: [bool; 2],
    turns: u32,
}

impl StrengthController {
    /// A controller for strengths from 1 to `full`, starting at half.
    pub fn new(full: u32) -> Self {
        let full = full.max(1);
        let strength = (full / 2).max(1);
        let then = Start { from: strength, quiet: false };
        Self { full, strength, state: State::Measuring { then }, quiet_limit: QUIET_ROUNDS }
    }

    pub fn strength(&self) -> u32 {
        self.strength
    }

    /// Whether no search is running.
    pub fn is_stable(&self) -> bool {
        matches!(self.state, State::Stable { .. })
    }

    /// Processes a round done at [`Self::strength`], and returns the strength for the next one. A round without pages
    /// has no effect.
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
                let quiet_enough = quiet >= self.quiet_limit && self.strength > 1;
                if moved || quiet_enough || rounds >= STABLE_ROUNDS {
                    if !quiet_enough || moved {
                        self.quiet_limit = QUIET_ROUNDS;
                    }
                    self.search(Start { from: self.strength, quiet: quiet_enough && !moved }, benefit);
                } else {
                    self.state = State::Stable { benefit: before, rounds, quiet };
                }
            }
        }
        self.strength
    }

    /// Starts a search downwards from the strength just measured.
    fn search(&mut self, start: Start, benefit: i64) {
        let best = (self.strength, benefit);
        self.go(Probe {
            start,
            best,
            up: false,
            delta: 1,
            improved: false,
            futile_steps: 0,
            exhausted: [false; 2],
            turns: 0,
        });
    }

    fn step(&mut self, mut probe: Probe, benefit: i64) {
        if benefit > probe.best.1 {
            let best = (self.strength, benefit);
            probe = Probe { best, improved: true, futile_steps: 0, exhausted: [false; 2], ..probe };
        } else {
            probe.futile_steps += 1;
            if benefit < probe.best.1 - NOISE || probe.futile_steps >= FUTILE_STEPS_MAX {
                return self.turn(probe);
            }
        }
        probe.delta = (probe.delta * 2).min(DELTA_MAX);
        self.go(probe);
    }

    /// Takes the next step of the probe, or turns if there's none.
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

    /// Ends a direction, and the search if neither direction improves.
    fn turn(&mut self, mut probe: Probe) {
        // After an improvement it isn't exhausted: slow start has skipped the neighbours of the best strength.
        if !probe.improved {
            probe.exhausted[usize::from(probe.up)] = true;
        }
        self.strength = probe.best.0;
        probe.turns += 1;
        if probe.exhausted == [true; 2] || probe.turns >= TURNS_MAX {
            return self.settle(probe);
        }
        self.go(Probe { up: !probe.up, delta: 1, improved: false, futile_steps: 0, ..probe });
    }

    fn settle(&mut self, probe: Probe) {
        let (strength, benefit) = probe.best;
        if benefit < 0 && strength < self.full {
            // Worse than hashing everything, which always has benefit 0.
            self.strength = self.full;
            self.search(probe.start, 0);
            return;
        }
        if probe.start.quiet {
            self.quiet_limit =
                if strength == probe.start.from { (self.quiet_limit * 2).min(STABLE_ROUNDS) } else { QUIET_ROUNDS };
        }
        self.state = State::Stable { benefit, rounds: 0, quiet: 0 };
    }
}

#[cfg(test)]
#[path = "strength_tests.rs"]
mod tests;
