//! Turns the moments of the history into points of curves.

use super::Moment;

/// A day in seconds. Of moments older than this, we only have one for each quarter of an hour.
const DAY: u64 = 86_400;
/// The longest gap between two moments of the same run, seconds: in the last day, and before that.
const STEP_MOST: [u64; 2] = [190, 1_900];

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub moment: Moment,
    /// Whether this point continues the run of the point before it.
    pub goes_on: bool,
    /// The share of a core that pagefold and ksmd have used since the point before it.
    pub cpu: Option<f64>,
}

/// Turns moments into points of a curve. Both are in order, the oldest first.
pub fn points(moments: &[Moment], now: u64) -> Vec<Point> {
    let mut points = Vec::new();
    let mut before: Option<&Moment> = None;
    for moment in moments {
        let cpu = before.and_then(|before| cpu(before, moment, now));
        points.push(Point { moment: *moment, goes_on: cpu.is_some(), cpu });
        before = Some(moment);
    }
    points
}

/// The share of a core used between two moments. `None` if they're of different runs, or there's a gap between them.
fn cpu(before: &Moment, after: &Moment, now: u64) -> Option<f64> {
    let most = STEP_MOST[usize::from(now.saturating_sub(before.time) >= DAY)];
    let seconds = after.time.checked_sub(before.time).filter(|seconds| (1..=most).contains(seconds))?;
    // A new run's CPU time begins at zero again.
    let pagefold = after.pagefold_ns.checked_sub(before.pagefold_ns)?;
    let ksmd = after.ksmd_ns.checked_sub(before.ksmd_ns)?;
    (before.pid == after.pid).then(|| pagefold.saturating_add(ksmd) as f64 / 1e9 / seconds as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_ends_with_its_run() {
        let at = |time, pid, cpu| Moment { time, pid, pagefold_ns: cpu, ..Moment::default() };
        let moments = [
            at(100, 1, 0),
            at(1_000, 1, 90_000_000_000),
            at(200_000, 1, 90_000_000_000),
            at(200_060, 1, 96_000_000_000),
            at(200_120, 2, 97_000_000_000),
            at(200_180, 2, 1_000),
            at(200_900, 2, 1_000),
        ];
        let shares: Vec<Option<f64>> = points(&moments, 201_000).iter().map(|point| point.cpu).collect();
        assert_eq!(shares, [None, Some(0.1), None, Some(0.1), None, None, None]);
    }
}
