//! Common parts of the charts, and the text chart.

use crate::report::PolicyRun;

/// Start of time axes, seconds: samples are 50 ms apart.
pub const FIRST_SECONDS: f64 = 0.1;

/// The time of the last sample of any run.
pub fn last_seconds(runs: &[PolicyRun]) -> f64 {
    runs.iter().map(|run| run.seconds).fold(10.0 * FIRST_SECONDS, f64::max)
}

/// The most bytes that any run saved at any time; at least 1.
pub fn most_saved(runs: &[PolicyRun]) -> f64 {
    runs.iter().map(|run| run.saved_bytes_max as f64).fold(1.0, f64::max)
}

/// The bytes that a run had saved at a time. After its end, what it saved last.
fn saved_at(run: &PolicyRun, seconds: f64) -> u64 {
    run.curve.iter().take_while(|(at, _)| *at <= seconds).last().map_or(0, |(_, saved)| *saved)
}

/// Draws one line of block characters for each run, `columns` wide.
pub fn lines(runs: &[PolicyRun], columns: u32) -> Vec<String> {
    const HEIGHTS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (last, most) = (last_seconds(runs), most_saved(runs));
    let height = |run: &PolicyRun, column: u32| {
        let seconds = FIRST_SECONDS * (last / FIRST_SECONDS).powf(f64::from(column + 1) / f64::from(columns));
        let share = saved_at(run, seconds) as f64 / most;
        // Rounded, so that small savings differ from none, and nearly all from all.
        (1..=8_u32)
            .rev()
            .find(|eighth| share * 8.0 >= f64::from(*eighth) - 0.5)
            .map_or(HEIGHTS[0], |eighth| HEIGHTS[eighth as usize])
    };
    runs.iter().map(|run| (0..columns).map(|column| height(run, column)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_rise_with_the_savings_and_stay_after_the_end() {
        let early =
            PolicyRun { seconds: 1.0, saved_bytes_max: 80, curve: vec![(0.0, 0), (0.5, 80)], ..PolicyRun::default() };
        let late =
            PolicyRun { seconds: 10.0, saved_bytes_max: 40, curve: vec![(0.0, 0), (9.9, 40)], ..PolicyRun::default() };
        let lines = lines(&[early, late], 10);
        assert_eq!(lines, ["   ███████", "         ▄"]);
        assert_eq!(super::lines(&[], 10), Vec::<String>::new());
    }
}
