//! Limits work that may wait to a small share of a core. We do such work in small portions, spread over time.

use crate::governor::share_ns;
use crate::units::Permyriad;

/// We can save up unused time for this long, nanoseconds.
const KEPT_NS: u64 = 60_000_000_000;
/// A portion takes this long, nanoseconds: long enough to be worth starting, short enough for others who are waiting.
const PORTION_NS: u64 = 4_000_000;
/// We assume at first that one page costs this much, nanoseconds.
const PAGE_NS: u64 = 1_500;
/// A portion has at most this many pages.
const PAGES_MOST: u64 = 8_192;

/// Says when a portion is due, and how large it may be.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    share: Permyriad,
    /// CPU time that we may use, nanoseconds. Negative after a portion that took longer than expected.
    left_ns: i64,
    last_ns: u64,
    page_ns: u64,
}

impl TokenBucket {
    /// For work that may take this share of a core, starting at `now_ns`.
    pub fn new(share: Permyriad, now_ns: u64) -> Self {
        Self { share, left_ns: 0, last_ns: now_ns, page_ns: PAGE_NS }
    }

    /// How many pages we may work on now, 0 if it's too early.
    pub fn portion(&mut self, now_ns: u64) -> u64 {
        let gained_ns = self.gained_ns(now_ns.saturating_sub(self.last_ns));
        self.left_ns = self.left_ns.saturating_add(gained_ns).min(self.gained_ns(KEPT_NS));
        self.last_ns = now_ns.max(self.last_ns);
        match u64::try_from(self.left_ns) {
            Ok(left_ns) if left_ns >= PORTION_NS => (PORTION_NS / self.page_ns.max(1)).clamp(1, PAGES_MOST),
            _ => 0,
        }
    }

    fn gained_ns(&self, time_ns: u64) -> i64 {
        i64::try_from(share_ns(time_ns, self.share)).unwrap_or(i64::MAX)
    }

    /// Records the cost of a portion.
    pub fn spend(&mut self, pages: u64, cpu_ns: u64) {
        self.left_ns = self.left_ns.saturating_sub(i64::try_from(cpu_ns).unwrap_or(i64::MAX));
        if let Some(page_ns) = cpu_ns.checked_div(pages) {
            self.page_ns = (3 * self.page_ns + page_ns) / 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn the_share_is_kept_whatever_pages_cost() {
        for page_ns in [100, 1_000, 50_000] {
            let mut bucket = TokenBucket::new(Permyriad(8), 5 * S);
            let (mut spent, mut pages) = (0, 0);
            for step in 0..4 * 3_600 {
                let now_ns = 5 * S + step * S / 4;
                let portion = bucket.portion(now_ns);
                assert!(portion <= PAGES_MOST);
                if portion > 0 {
                    bucket.spend(portion, portion * page_ns);
                    (spent, pages) = (spent + portion * page_ns, pages + portion);
                }
            }
            // The share of an hour.
            assert!(spent <= 3_600 * S * 8 / 10_000 + PAGES_MOST * page_ns, "{spent}");
            assert!(spent > 3_600 * S * 7 / 10_000 || page_ns == 100, "{spent}");
            assert!(pages > 0);
        }
    }

    #[test]
    fn what_was_not_used_does_not_pile_up() {
        let mut bucket = TokenBucket::new(Permyriad(10), 0);
        let mut portions = 0;
        while bucket.portion(86_400 * S) > 0 {
            bucket.spend(1_000, PORTION_NS);
            portions += 1;
        }
        // A minute's share is 60 ms.
        assert_eq!(portions, 15);
        // After a costly portion, the bucket gives nothing until the time for it is made up.
        bucket.spend(1, 30_000_000);
        assert_eq!(bucket.portion(86_430 * S), 0);
        assert!(bucket.portion(86_440 * S) > 0);
        // A clock that goes back changes nothing.
        assert!(bucket.portion(0) > 0);
    }
}
