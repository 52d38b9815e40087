//! A region's life: its age, how far we are with judging it, and on which level we sample it.
//!
//! Every change goes through [`Life::advance`], which knows which events are possible in which phase. The reasons to
//! leave a region alone aren't part of its life: a [`Hold`](super::Hold) can begin and end in any phase.

use crate::units::{Permyriad, Vpn};

/// Whether a region is old enough to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// The region was there before the run. We don't know its age, and assume that it's old enough.
    Old,
    /// The region appeared during the run, and we don't know how long regions of its family live.
    New,
    /// The region appeared during the run. Merging pays for its family at this age, nanoseconds. Until then we don't
    /// even sample the region.
    Young { worth_from_ns: u64 },
    /// Like `Young`, but old enough to be sampled.
    Grown { worth_from_ns: u64 },
}

impl Age {
    /// The age of a region that has just appeared, if merging its family pays at the age `worth_from_ns`.
    pub fn of_new(worth_from_ns: Option<u64>) -> Self {
        match worth_from_ns {
            None => Self::New,
            Some(0) => Self::Grown { worth_from_ns: 0 },
            Some(worth_from_ns) => Self::Young { worth_from_ns },
        }
    }

    /// Whether the region appeared during the run.
    pub fn appeared(self) -> bool {
        self != Self::Old
    }

    pub fn is_young(self) -> bool {
        matches!(self, Self::Young { .. })
    }

    /// Notes that a young region is now old enough to be sampled.
    pub fn grow(&mut self) {
        if let Self::Young { worth_from_ns } = *self {
            *self = Self::Grown { worth_from_ns };
        }
    }
}

/// Our verdict on a region that we, or an earlier run, read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// When we judged the region, nanoseconds.
    pub at_ns: u64,
    /// We mark extents that are at least this dense: as dense as configured at first, less once the denser ones are
    /// merged.
    pub density: Permyriad,
    pub by: Judge,
}

impl Judgement {
    fn new(at_ns: u64, by: Judge) -> Self {
        Self { at_ns, density: Permyriad(10_000), by }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judge {
    ThisRun,
    /// An earlier run. Where it marked nothing, this share of pages were duplicates. We don't know the region's
    /// contents.
    EarlierRun {
        left_over: Permyriad,
    },
}

/// An event in a region's life. An event that's impossible in the current phase changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The region's samples show duplicates: it goes up one level.
    Climb,
    /// The region's samples show too few duplicates: it goes down one level.
    Descend,
    /// The region goes back to the bottom level, whatever we know about it.
    Sink,
    /// We start to read the whole region, from its first page, on the top level.
    StartReading { first: Vpn, top: usize },
    /// We've read the pages below this one.
    ReadTo(Vpn),
    /// We've read the whole region.
    FinishReading { now_ns: u64 },
    /// An earlier run had judged the region and marked its dense parts.
    Adopt { now_ns: u64, left_over: Permyriad },
    /// There may be more to mark: we found another duplicate, there's headroom again, or a mark failed.
    Reopen,
    /// Extents that are at least this dense now pay, too.
    Thin { density: Permyriad },
    /// There's nothing more to mark.
    Settle,
    /// We forget the digests of the region's pages, and sample it on the bottom level again.
    Forget,
}

/// How far we are with judging a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// We have no verdict, and sample the region to find out if it's worth reading whole.
    #[default]
    Surveyed,
    /// We're reading the whole region for a verdict, and have read the pages below this one.
    Reading(Vpn),
    /// We judged the region worth marking, and there may be more of it to mark.
    Worth(Judgement),
    /// Everything worth marking in the region is marked or merged. We keep sampling, to see whether that's still true.
    Settled(Judgement),
}

/// How far we are with judging a region, and on which level of the ladder we sample it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    phase: Phase,
    level: usize,
}

impl Default for Life {
    fn default() -> Self {
        Self { phase: Phase::Surveyed, level: 1 }
    }
}

impl Life {
    pub fn advance(&mut self, event: Event) {
        match (event, self.phase) {
            (Event::Climb, Phase::Surveyed) => self.level += 1,
            (Event::Descend, Phase::Surveyed) => self.level = self.level.max(2) - 1,
            (Event::Sink, _) => self.level = 1,
            (Event::StartReading { first, top }, _) => *self = Self { phase: Phase::Reading(first), level: top },
            (Event::ReadTo(page), Phase::Reading(_)) => self.phase = Phase::Reading(page),
            (Event::FinishReading { now_ns }, Phase::Reading(_)) => {
                self.phase = Phase::Worth(Judgement::new(now_ns, Judge::ThisRun));
            }
            (Event::Adopt { now_ns, left_over }, Phase::Surveyed) => {
                self.phase = Phase::Settled(Judgement::new(now_ns, Judge::EarlierRun { left_over }));
            }
            (Event::Reopen, Phase::Settled(judgement)) => self.phase = Phase::Worth(judgement),
            (Event::Thin { density }, Phase::Worth(judgement) | Phase::Settled(judgement)) => {
                self.phase = Phase::Worth(Judgement { density, ..judgement });
            }
            (Event::Settle, Phase::Worth(judgement)) => self.phase = Phase::Settled(judgement),
            (Event::Forget, _) => *self = Self::default(),
            // Other events are impossible in this phase.
            _ => {}
        }
    }

    /// The region's level on the ladder, from 1.
    pub fn level(&self) -> usize {
        self.level
    }

    pub fn is_surveyed(&self) -> bool {
        self.phase == Phase::Surveyed
    }

    pub fn is_reading(&self) -> bool {
        self.cursor().is_some()
    }

    /// While we're reading the whole region: the page up to which we've read.
    pub fn cursor(&self) -> Option<Vpn> {
        match self.phase {
            Phase::Reading(cursor) => Some(cursor),
            _ => None,
        }
    }

    pub fn is_judged(&self) -> bool {
        self.judgement().is_some()
    }

    /// Our verdict, unless we're reading the region again.
    pub fn judgement(&self) -> Option<&Judgement> {
        match &self.phase {
            Phase::Worth(judgement) | Phase::Settled(judgement) => Some(judgement),
            _ => None,
        }
    }

    /// Whether there may be more of the region to mark.
    pub fn is_worth_marking(&self) -> bool {
        matches!(self.phase, Phase::Worth(_))
    }

    /// Whether everything that's worth marking in the region is marked or merged.
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Settled(_))
    }

    /// The share of duplicates in the extents that an earlier run left unmarked, if we haven't read the region since.
    pub fn adopted(&self) -> Option<Permyriad> {
        match self.judgement()?.by {
            Judge::ThisRun => None,
            Judge::EarlierRun { left_over } => Some(left_over),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: Event = Event::StartReading { first: Vpn(7), top: 4 };
    const FINISH: Event = Event::FinishReading { now_ns: 5 };
    const ADOPT: Event = Event::Adopt { now_ns: 9, left_over: Permyriad(300) };
    const THIN: Event = Event::Thin { density: Permyriad(800) };

    fn after(events: &[Event]) -> Life {
        let mut life = Life::default();
        for event in events {
            life.advance(*event);
        }
        life
    }

    #[test]
    fn a_region_is_surveyed_then_read_then_judged_and_sampled_on() {
        let life = after(&[Event::Descend, Event::Climb, Event::Climb, Event::Descend]);
        assert_eq!((life.phase, life.level), (Phase::Surveyed, 2));
        let life = after(&[Event::Climb, START, Event::ReadTo(Vpn(9))]);
        assert_eq!((life.phase, life.level), (Phase::Reading(Vpn(9)), 4));
        let judgement = Judgement { at_ns: 5, density: Permyriad(10_000), by: Judge::ThisRun };
        let life = after(&[START, FINISH]);
        assert_eq!((life.phase, life.level), (Phase::Worth(judgement), 4));
        let life = after(&[START, FINISH, Event::Settle, Event::Sink]);
        assert_eq!((life.phase, life.level), (Phase::Settled(judgement), 1));
        assert_eq!(after(&[START, FINISH, Event::Settle, Event::Reopen]), after(&[START, FINISH]));
        let thinner = Judgement { density: Permyriad(800), ..judgement };
        assert_eq!(after(&[START, FINISH, Event::Settle, THIN]).phase, Phase::Worth(thinner));
        assert_eq!(after(&[START, FINISH, THIN, START, FINISH]), after(&[START, FINISH]), "it's judged anew");
        assert_eq!(after(&[START, FINISH, Event::Forget]), Life::default());
    }

    #[test]
    fn a_region_that_sinks_while_we_read_it_is_sampled_on_the_bottom_level() {
        let life = after(&[START, Event::Sink, FINISH]);
        assert!(life.is_worth_marking() && life.level == 1);
    }

    #[test]
    fn only_a_region_without_a_verdict_adopts_one() {
        let life = after(&[ADOPT]);
        assert_eq!((life.adopted(), life.is_worth_marking(), life.level), (Some(Permyriad(300)), false, 1));
        assert_eq!(after(&[ADOPT, START, FINISH]).adopted(), None);
        assert_eq!(after(&[START, FINISH, ADOPT]), after(&[START, FINISH]));
    }

    #[test]
    fn a_young_region_grows_once() {
        for (worth_from_ns, young) in [(None, false), (Some(0), false), (Some(5), true)] {
            let mut age = Age::of_new(worth_from_ns);
            assert!(age.appeared() && age.is_young() == young);
            age.grow();
            assert!(age.appeared() && !age.is_young());
        }
        assert!(!Age::Old.appeared());
    }

    proptest! {
        /// Whatever happens, a region is only judged by reading it whole or by an earlier run's verdict. It rises one
        /// level at a time, or to the top to be read.
        #[test]
        fn each_phase_follows_from_the_one_before(
            events in proptest::collection::vec(proptest::sample::select(vec![
                Event::Climb, Event::Descend, Event::Sink, START, Event::ReadTo(Vpn(50)), FINISH, ADOPT, Event::Reopen,
                THIN, Event::Settle, Event::Forget,
            ]), 0..40),
        ) {
            let mut life = Life::default();
            for event in events {
                let before = life;
                life.advance(event);
                let is_allowed = match (before.phase, life.phase) {
                    (Phase::Surveyed, Phase::Surveyed) => true,
                    (_, Phase::Surveyed) => event == Event::Forget,
                    (Phase::Surveyed, Phase::Settled(_)) => event == ADOPT,
                    (_, Phase::Reading(_)) => event == START || before.is_reading(),
                    (Phase::Reading(_), Phase::Worth(_)) => event == FINISH,
                    (before, Phase::Worth(_)) => !matches!(before, Phase::Surveyed | Phase::Reading(_)),
                    (before, Phase::Settled(_)) => !matches!(before, Phase::Surveyed | Phase::Reading(_)),
                };
                prop_assert!(is_allowed, "{before:?}, {event:?}, {life:?}");
                let has_climbed = event == Event::Climb && life.level == before.level + 1;
                prop_assert!(life.level <= before.level || has_climbed || event == START, "{event:?}");
            }
        }
    }
}
