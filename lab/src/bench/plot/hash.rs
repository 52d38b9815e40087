//! Charts of the experiment `hash`: the avalanche effect of both forms (UKSM's Figure 6, as heat maps) and their
//! strengths over time.

use crate::bench::report::ExperimentReport;
use crate::charts::{Canvas, Curve, Drawn, LEFT, Lines, RIGHT, Scale, TOP, label, number, svg};
use crate::partial_hash::{LineHash, PartialHash, WordHash};
use pagefold_engine::hash::PageBytes;
use pagefold_engine::units::PAGE_SIZE;
use pagefold_report::plot::PEERS;
use pagefold_workload::contents::fill;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

pub fn charts(report: &ExperimentReport) -> Vec<(String, String)> {
    let mut charts = vec![("hash-avalanche.svg".to_owned(), avalanche())];
    for (form, full) in [("paper32", WordHash::FULL), ("lines", LineHash::FULL)] {
        let prefix = format!("{form}_adaptive ");
        let curves: Vec<(&str, &[(f64, f64)])> = report
            .curves
            .iter()
            .filter_map(|(name, curve)| Some((name.strip_prefix(&prefix)?, curve.as_slice())))
            .collect();
        if !curves.is_empty() {
            charts.push((format!("hash-strength-{form}.svg"), strength(form, full, &curves)));
        }
    }
    charts
}

const ROUNDS: f64 = 100.0;

fn strength(form: &str, full: u32, curves: &[(&str, &[(f64, f64)])]) -> String {
    let unit = if form == "lines" { "cache lines" } else { "words" };
    let drawn = (0_u32..).zip(curves.iter().zip(PEERS.iter().cycle())).map(|(line, ((set, curve), colour))| {
        // Steps, since a strength holds for a whole round.
        let shown = curve.iter().take_while(|(round, _)| *round < ROUNDS);
        let last = curve.last().map_or(0.0, |&(_, strength)| strength);
        Curve {
            label: format!("{set}: {} at the end", number(last)),
            colour,
            // Where curves coincide, the wider ones below stay visible.
            width: 1 + u32::try_from(curves.len()).unwrap_or(0) - line,
            points: shown.flat_map(|&(round, strength)| [(round, strength), (round + 1.0, strength)]).collect(),
            ..Curve::default()
        }
    });
    let mut drawn: Vec<Curve> = drawn.collect();
    for curve in &mut drawn {
        curve.width = curve.width.min(6);
    }
    Lines {
        title: format!("hash: strength of {form} over rounds"),
        up: (
            format!("{unit} hashed of {full} (logarithmic)"),
            Scale::Logarithmic { first: 1.0, last: f64::from(full) },
        ),
        right: ("rounds".to_owned(), Scale::Upto { last: ROUNDS }),
        curves: drawn,
    }
    .draw()
}

const TRIALS: u64 = 100;
/// Words shown: some spread over the order of hashing, and the last ones, for which the paper's form is weak.
const SPREAD: u16 = 48;
const LAST: u16 = 16;

/// The mean deviation (at most 100) by word (outer) and bit of the hash, and the number of bad points, which deviate by
/// more than 50.
struct Bias {
    mean: Vec<Vec<f64>>,
    bad: usize,
}

/// Measures over random pages how often each bit of the hash flips with each bit of the words at these indices.
fn bias(words: &[usize], bits: usize, hash: impl Fn(&PageBytes) -> u64) -> Bias {
    let mut points = vec![0_i32; words.len() * 32 * bits];
    for trial in 0..TRIALS {
        let mut page = [0; PAGE_SIZE];
        fill(&mut page, 30, trial);
        let before = hash(&page);
        let flips = words.iter().flat_map(|word| (0..32).map(move |bit| (word * 4 + bit / 8, 1 << (bit % 8))));
        for ((at, mask), points) in flips.zip(points.chunks_exact_mut(bits)) {
            page[at] ^= mask;
            let flipped = hash(&page) ^ before;
            page[at] ^= mask;
            for (point, out) in points.iter_mut().zip(0..) {
                *point += if flipped >> out & 1 == 1 { 1 } else { -1 };
            }
        }
    }
    let of_word = |word: &[i32]| {
        let of_bit = |bit| word.iter().skip(bit).step_by(bits).map(|point| f64::from(point.abs())).sum::<f64>() / 32.0;
        (0..bits).map(of_bit).collect()
    };
    let bad = points.iter().filter(|point| point.abs() > 50).count();
    Bias { mean: points.chunks_exact(32 * bits).map(of_word).collect(), bad }
}

/// The indices of a page's words in the order of hashing: the word at a rank changes the hash from that strength on.
fn ranked(seen: impl Fn(&PageBytes, u32) -> u64, full: u32, words_each: usize) -> Vec<usize> {
    let zero = [0; PAGE_SIZE];
    let rank = |word: usize| {
        let mut page = zero;
        page[word * 4] = 1;
        let (mut low, mut high) = (0, full);
        while low < high {
            let middle = low.midpoint(high);
            if seen(&page, middle) == seen(&zero, middle) { low = middle + 1 } else { high = middle }
        }
        low
    };
    let mut order: Vec<(u32, usize)> =
        (0..PAGE_SIZE / 4).map(|word| (rank(word / words_each * words_each), word)).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, word)| word).collect()
}

/// Height of a heat map, and distance from one to the next.
const MAP: i32 = 256;
const MAP_STEP: i32 = MAP + 56;

/// One hash function's heat map: a column per word, a row of some pixels per bit.
struct Panel {
    form: &'static str,
    bits: usize,
    row: i32,
    bias: Bias,
}

fn avalanche() -> String {
    let (paper, lines) = (WordHash::new(30), LineHash::new(30));
    let shown = |order: Vec<usize>| -> Vec<usize> {
        let (early, last) = order.split_at(order.len() - usize::from(LAST));
        early.iter().step_by(early.len() / usize::from(SPREAD)).take(usize::from(SPREAD)).chain(last).copied().collect()
    };
    let paper_words = shown(ranked(|page, strength| paper.hash(page, strength).into(), WordHash::FULL, 1));
    let lines_words = shown(ranked(|page, strength| lines.hash(page, strength), LineHash::FULL, 16));
    let of_paper = bias(&paper_words, 32, |page| paper.hash(page, WordHash::FULL).into());
    let of_lines = bias(&lines_words, 64, |page| lines.digest(page, LineHash::FULL).0);
    let panels = [
        Panel { form: "paper32", bits: 32, row: 8, bias: of_paper },
        Panel { form: "lines", bits: 64, row: 4, bias: of_lines },
    ];
    let subtitle = "deviation from one half of how often each bit of the hash (down) flips with a bit of the page: 0 is best, 100 worst";
    let height = TOP + 2 * MAP_STEP + 60;
    svg(height, "hash: avalanche effect of both forms", subtitle, |canvas| {
        for (top, panel) in (0..).map(|number| TOP + 18 + number * MAP_STEP).zip(&panels) {
            heat_map(canvas, top, panel)?;
        }
        let scale = height - 38;
        canvas.draw(&label("mean deviation", (LEFT, scale + 7), HPos::Left))?;
        for step in 0..=20 {
            let at = LEFT + 120 + step * 16;
            cell(canvas, (at, scale), (at + 16, scale + 14), colour(f64::from(step) * 5.0))?;
            if step % 10 == 0 {
                canvas.draw(&label(&(step * 5).to_string(), (at + 8, scale + 25), HPos::Center))?;
            }
        }
        Ok(())
    })
}

fn heat_map<'a>(canvas: &Canvas<'a>, top: i32, panel: &Panel) -> Drawn<'a> {
    let Panel { form, bits, row, bias } = panel;
    let points = bias.mean.len() * 32 * bits;
    let heading = format!("{form}: {} of {points} points deviate by more than 50", bias.bad);
    canvas.draw(&label(&heading, (LEFT + 32, top - 12), HPos::Left))?;
    let column = (RIGHT - LEFT - 32) / i32::from(SPREAD + LAST);
    let left = LEFT + 32;
    for (x, word) in (0..).map(|number| left + number * column).zip(&bias.mean) {
        let mut y = top;
        for alike in word.chunk_by(|a, b| (step(*a) - step(*b)).abs() < 1.0) {
            let end = y + row * i32::try_from(alike.len()).unwrap_or(0);
            cell(canvas, (x, y), (x + column, end), colour(step(alike[0])))?;
            y = end;
        }
    }
    for (bit, y) in (0..=*bits).step_by(16).zip((top..).step_by(16 * usize::try_from(*row).unwrap_or(1))) {
        canvas.draw(&label(&bit.to_string(), (left - 8, y), HPos::Right))?;
    }
    let border = left + i32::from(SPREAD) * column;
    canvas.draw(&PathElement::new([(border, top), (border, top + MAP)], BLACK))?;
    canvas.draw(&label("words of the page in the order of hashing, one in 21", (left, top + MAP + 14), HPos::Left))?;
    canvas.draw(&label("the last 16", (border + 8, top + MAP + 14), HPos::Left))
}

fn cell<'a>(canvas: &Canvas<'a>, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Drawn<'a> {
    canvas.draw(&Rectangle::new([from, to], colour.filled()))
}

/// Rounds to multiples of 4, so that equal neighbours are drawn as one.
fn step(deviation: f64) -> f64 {
    (deviation / 4.0).round() * 4.0
}

/// From white at 0 through orange to black at 100.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 255")]
fn colour(deviation: f64) -> RGBColor {
    let share = (deviation / 100.0).clamp(0.0, 1.0);
    let stops = [[255.0, 255.0, 255.0], [240.0, 160.0, 60.0], [40.0, 10.0, 30.0]];
    let (from, to, way) =
        if share < 0.5 { (stops[0], stops[1], share * 2.0) } else { (stops[1], stops[2], share * 2.0 - 1.0) };
    let [red, green, blue] = [0, 1, 2].map(|part| (from[part] + (to[part] - from[part]) * way).round() as u8);
    RGBColor(red, green, blue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_distinguishes_a_good_hash_from_a_bad_one() {
        let words = [3, 700];
        let word = |page: &PageBytes| u64::from(u32::from_le_bytes([page[12], page[13], page[14], page[15]]));
        let plain = bias(&words, 32, word);
        assert_eq!(plain.bad, 2 * 32 * 32, "a bit flips always or never");
        assert!(plain.mean.iter().flatten().all(|deviation| (deviation - 100.0).abs() < 1e-9));
        let lines = LineHash::new(1);
        let good = bias(&words, 64, |page| lines.digest(page, 64).0);
        assert_eq!(good.bad, 0);
        assert!(good.mean.iter().flatten().all(|deviation| *deviation < 20.0));
    }

    #[test]
    fn words_come_in_the_order_of_hashing() {
        let paper = WordHash::new(2);
        let order = ranked(|page, strength| paper.hash(page, strength).into(), WordHash::FULL, 1);
        for rank in [0, 1, 500, 1023] {
            let mut page = [0; PAGE_SIZE];
            page[order[rank as usize] * 4] = 7;
            assert_eq!(paper.hash(&page, rank), 0);
            assert_ne!(paper.hash(&page, rank + 1), 0);
        }
    }

    #[test]
    fn colours_go_from_white_to_dark() {
        let colours = [0.0, 50.0, 100.0, 400.0].map(colour).map(|RGBColor(red, green, blue)| (red, green, blue));
        assert_eq!(colours, [(255, 255, 255), (240, 160, 60), (40, 10, 30), (40, 10, 30)]);
    }
}
