//! Copies made because programs wrote merged pages: how many in all, and how many on the worst day of the run.

use crate::units::{Pages, count};

const HOUR_NS: u64 = 3_600_000_000_000;
const HOURS: usize = 24;

/// Copies of merged pages during a run, on the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    pub total: Pages,
    /// Copies in the worst 24 hours, counted by full hours.
    pub worst_day: Pages,
    /// The kernel's count when we last saw it.
    counted: Option<u64>,
    /// Copies of the last 24 hours, by the number of the hour.
    hours: [Pages; HOURS],
    hour: u64,
}

impl Copies {
    /// Records the kernel's count. Copies from before the run don't count.
    pub fn observe(&mut self, now_ns: u64, counted: u64) {
        let hour = now_ns / HOUR_NS;
        // We clear the hours since the last call. After a gap of more than a day, clearing 24 is enough.
        for past in (self.hour + 1..=hour).take(self.hours.len()) {
            *self.of_hour(past) = Pages(0);
        }
        self.hour = hour.max(self.hour);
        // Now and then the host can't read the count, and reports 0.
        let before = self.counted.unwrap_or(counted);
        self.counted = Some(before.max(counted));
        let new = Pages(counted.saturating_sub(before));
        if new > Pages(0) {
            self.total += new;
            *self.of_hour(self.hour) += new;
            self.worst_day = self.worst_day.max(self.hours.iter().copied().sum());
        }
    }

    /// Copies in the worst of the last 24 hours. An hour's copies count up to `most`, and half as many for each full
    /// hour that has passed since.
    pub fn worst_hour(&self, most: Pages) -> Pages {
        let mut worst = Pages(0);
        for age in 0..count(HOURS) {
            let copies = self.hours[index_of(self.hour + count(HOURS) - age)].min(most);
            worst = worst.max(Pages(copies.0 >> age.saturating_sub(1)));
        }
        worst
    }

    fn of_hour(&mut self, hour: u64) -> &mut Pages {
        &mut self.hours[index_of(hour)]
    }
}

/// The index of an hour in `hours`. The remainder is below the length.
fn index_of(hour: u64) -> usize {
    usize::try_from(hour % count(HOURS)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_day_is_the_worst_of_all_days() {
        let mut copies = Copies::default();
        let mut at = |hour: u64, count| {
            copies.observe(hour * HOUR_NS + 5, count);
            (copies.total.0, copies.worst_day.0)
        };
        assert_eq!(at(0, 1_000), (0, 0));
        assert_eq!(at(0, 1_010), (10, 10));
        assert_eq!(at(5, 1_030), (30, 30));
        // 24 hours later the first ten belong to another day.
        assert_eq!(at(24, 1_031), (31, 30));
        assert_eq!(at(25, 1_040), (40, 30));
        assert_eq!(at(28, 1_060), (60, 50));
        // A count that couldn't be read changes nothing, and gaps between counts may be long.
        assert_eq!(at(30, 0), (60, 50));
        assert_eq!(at(30, 1_060), (60, 50));
        assert_eq!(at(1 << 20, 1_061), (61, 50));
        assert_eq!(at((1 << 20) + 1, 1_111), (111, 51));
        assert_eq!(copies.worst_hour(Pages(99)), Pages(50));
        assert_eq!(copies.worst_hour(Pages(40)), Pages(40));
        for (hours, worst) in [(1, 50), (2, 25), (3, 12), (9, 0)] {
            copies.observe(((1 << 20) + 1 + hours) * HOUR_NS, 1_111);
            assert_eq!(copies.worst_hour(Pages(99)), Pages(worst));
        }
    }
}
