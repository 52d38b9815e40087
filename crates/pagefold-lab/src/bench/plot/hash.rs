//! Charts of the experiment "hash": the avalanche of both forms (UKSM's Figure 6, seen from above) and how their
//! strengths went.

use super::{BOTTOM, LEFT, PEERS, RIGHT, Svg, TOP};
use crate::bench::report::Report;
use crate::bench::table::number;
use pagefold_core::hash::PageBytes;
use pagefold_core::units::PAGE_SIZE;
use pagefold_sim::partial_hash::{LineHash, PartialHash, WordHash};
use pagefold_workload::contents::fill;

/// File names and contents.
pub fn charts(report: &Report) -> Vec<(String, String)> {
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

/// Rounds shown.
const ROUNDS: f64 = 100.0;

fn strength(form: &str, full: u32, curves: &[(&str, &[(f64, f64)])]) -> String {
    let x = |round: f64| LEFT + (RIGHT - LEFT) * round / ROUNDS;
    let y = |strength: f64| BOTTOM - (BOTTOM - TOP) * strength.max(1.0).log2() / f64::from(full).log2();
    let unit = if form == "lines" { "cache lines" } else { "words" };
    let title = format!("hash: strength of {form} over rounds");
    let mut svg =
        Svg::new(BOTTOM + 64.0 + 24.0 * curves.len() as f64, LEFT, &title, &format!("{unit} hashed of {full}"));
    for mark in (0..=full.ilog2()).map(|bit| f64::from(1 << bit)) {
        svg.line((LEFT, y(mark)), (RIGHT, y(mark)), "grid");
        svg.text((LEFT - 8.0, y(mark) + 4.0), "end", "tick", &format!("{mark:.0}"));
    }
    for round in (0..=10).map(|tenth| f64::from(tenth) * ROUNDS / 10.0) {
        svg.line((x(round), TOP), (x(round), BOTTOM), "grid");
        svg.text((x(round), BOTTOM + 18.0), "middle", "tick", &format!("{round:.0}"));
    }
    svg.text((f64::midpoint(LEFT, RIGHT), BOTTOM + 38.0), "middle", "tick", "rounds");
    for (line, ((set, curve), colour)) in (0_u32..).zip(curves.iter().zip(PEERS.iter().cycle())) {
        // A strength holds for a whole round: steps.
        let shown = curve.iter().take_while(|(round, _)| *round < ROUNDS);
        let points: Vec<(f64, f64)> =
            shown.flat_map(|&(round, strength)| [(x(round), y(strength)), (x(round + 1.0), y(strength))]).collect();
        // Where curves coincide, the wider ones below show.
        svg.curve(&points, colour, 1.0 + (curves.len() as f64 - f64::from(line)), "");
        let at = BOTTOM + 66.0 + 24.0 * f64::from(line);
        svg.curve(&[(LEFT, at - 4.0), (LEFT + 28.0, at - 4.0)], colour, 3.0, "");
        let last = curve.last().map_or(0.0, |&(_, strength)| strength);
        svg.text((LEFT + 38.0, at), "start", "label", &format!("{set}: {} at the end", number(last)));
    }
    svg.finish()
}

const TRIALS: u64 = 100;
/// Words shown: spread over the order of hashing, and the last ones, where the paper's form is weak.
const SPREAD: u32 = 48;
const LAST: u32 = 16;

/// Mean deviation, of at most 100, for each of the words shown (outer) and each bit of the hash; and the bad points among
/// all bits of these words, which deviate by more than 50.
struct Bias {
    mean: Vec<Vec<f64>>,
    bad: usize,
}

/// Counts, over random pages, how often each bit of the hash flips with each bit of some words: their places in a page.
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

/// The places in a page of the words shown, in the order in which a form takes them in. The order shows in what it sees:
/// the word at a rank changes the hash from that strength on.
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

fn avalanche() -> String {
    const GAP: f64 = 56.0;
    let (paper, lines) = (WordHash::new(30), LineHash::new(30));
    let shown = |order: Vec<usize>| -> Vec<usize> {
        let (early, last) = order.split_at(order.len() - LAST as usize);
        early.iter().step_by(early.len() / SPREAD as usize).take(SPREAD as usize).chain(last).copied().collect()
    };
    let paper_words = shown(ranked(|page, strength| paper.hash(page, strength).into(), WordHash::FULL, 1));
    let lines_words = shown(ranked(|page, strength| lines.hash(page, strength), LineHash::FULL, 16));
    let panels = [
        ("paper32", 32, 8.0, bias(&paper_words, 32, |page| paper.hash(page, WordHash::FULL).into())),
        ("lines", 64, 4.0, bias(&lines_words, 64, |page| lines.digest(page, LineHash::FULL).0)),
    ];
    let height = TOP + 2.0 * (256.0 + GAP) + 60.0;
    let mut svg = Svg::new(
        height,
        LEFT,
        "hash: avalanche of both forms",
        "how far the flips of each bit of the hash (down) are from even, when a bit of the page is flipped; 0 is best, 100 worst",
    );
    let column = (RIGHT - LEFT) / f64::from(SPREAD + LAST);
    for (number_of, (form, bits, row, bias)) in (0_u32..).zip(&panels) {
        let top = TOP + 18.0 + f64::from(number_of) * (256.0 + GAP);
        let points = bias.mean.len() * 32 * bits;
        let label = format!("{form}: {} bad points (off by more than 50) of {points} looked at", bias.bad);
        svg.text((LEFT, top - 8.0), "start", "label", &label);
        for (x, word) in (0_u32..).zip(&bias.mean) {
            let mut y = 0.0;
            for alike in word.chunk_by(|a, b| (step(*a) - step(*b)).abs() < 1.0) {
                let high = alike.len() as f64 * row;
                svg.cell((LEFT + f64::from(x) * column, top + y), (column, high), &colour(step(alike[0])));
                y += high;
            }
        }
        for bit in (0..=*bits).step_by(16) {
            let y = top + bit as f64 * row;
            svg.text((LEFT - 8.0, y + 4.0), "end", "tick", &format!("{bit}"));
        }
        let border = LEFT + f64::from(SPREAD) * column;
        svg.dashes((border, top), (border, top + 256.0), "#222");
        svg.text((LEFT, top + 272.0), "start", "tick", "words of the page in the order of hashing, one in 21");
        svg.text((RIGHT, top + 272.0), "end", "tick", "the last 16");
    }
    let scale = height - 38.0;
    svg.text((LEFT, scale + 12.0), "start", "tick", "mean deviation");
    for step in 0..=20_u32 {
        let at = LEFT + 110.0 + f64::from(step) * 16.0;
        svg.cell((at, scale), (16.0, 14.0), &colour(f64::from(step) * 5.0));
        if step % 10 == 0 {
            svg.text((at + 8.0, scale + 27.0), "middle", "tick", &format!("{}", step * 5));
        }
    }
    svg.finish()
}

/// Rounded to fours, so that neighbours can be drawn as one.
fn step(deviation: f64) -> f64 {
    (deviation / 4.0).round() * 4.0
}

/// From white at 0 through orange to black at 100.
fn colour(deviation: f64) -> String {
    let share = (deviation / 100.0).clamp(0.0, 1.0);
    let stops = [[255.0, 255.0, 255.0], [240.0, 160.0, 60.0], [40.0, 10.0, 30.0]];
    let (from, to, way) =
        if share < 0.5 { (stops[0], stops[1], share * 2.0) } else { (stops[1], stops[2], share * 2.0 - 1.0) };
    let mixed: Vec<String> = from.iter().zip(to).map(|(a, b)| format!("{:.0}", a + (b - a) * way)).collect();
    format!("rgb({})", mixed.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_tells_a_good_hash_from_a_bad_one() {
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
        assert_eq!(
            [0.0, 50.0, 100.0, 400.0].map(colour)[..3],
            ["rgb(255,255,255)", "rgb(240,160,60)", "rgb(40,10,30)"]
        );
    }
}
