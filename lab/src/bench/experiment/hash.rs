//! Adaptive partial hashing (UKSM sections 6 and 8.3) on this process's memory, so that, as in uksmd, no system call
//! lies between the hash and the pages.
//!
//! Scans work like UKSM's. We hash pages at the round's strength, look them up, and compare pages with the same hash.
//! If two differ, we hash both in full and look up again; this and the failed comparison are the penalty. Full-page
//! hashes use the same scan, and never collide.

mod pages;
mod scanner;

use self::pages::{PageSet, TestPage};
use self::scanner::{Contender, Pass, Scanner, Strengths, Xxh64, full};
use super::{Experiment, ExperimentSetting, mib};
use crate::bench::measures::median;
use crate::bench::metric::{self, Metric};
use crate::bench::report::{ExperimentReport, Limit};
use crate::partial_hash::{LineHash, WordHash};
use pagefold_engine::hash::Digester;

pub const EXPERIMENT: Experiment = Experiment {
    name: "hash",
    claim: "UKSM 8.3.1: pages that differ everywhere are scanned at least 5.9 times as fast as with a full hash of the same \
            family; ours: also faster than with XXH64, and pages that differ in one word cost at most 1.1 of the full hash",
    run,
};

/// Each `{}` in turn: a page set and a hash.
const DUPLICATES: Metric = Metric::new("{}_{}_duplicates_found", "");
/// Each `{}` in turn: a page set, an adaptive hash and a full one.
const SPEED_VS: Metric = Metric::new("{}_{}_speed_vs_{}", "");
const OWN: &str = "own_full";
const XXH64: &str = "xxh64_full";
const XXH3: &str = "xxh3_full";

/// The seed of all hash forms (arbitrary).
const SEED: u64 = 20;

fn run(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> anyhow::Result<()> {
    let (size_mib, round_mib, passes) = if setting.quick { (64, 8, 1) } else { (1024, 64, 7) };
    let settling_rounds = 80;
    report.parameters([
        ("working_set_mib", size_mib),
        ("round_mib", round_mib),
        ("passes", passes),
        ("settling_rounds", settling_rounds),
    ]);
    let round_pages = usize::try_from(mib(round_mib).0)?;
    let mut memory = vec![TestPage::ZERO; usize::try_from(mib(size_mib).0)?];
    for set in PageSet::ALL {
        eprintln!("hash: {}", set.name());
        set.fill(&mut memory);
        let mut scanner = Scanner::new(&memory, round_pages);
        let mut contenders: [Box<dyn Contender>; 6] = [
            scanner.adaptive(WordHash::new(SEED)),
            full(WordHash::new(SEED)),
            scanner.adaptive(LineHash::new(SEED)),
            full(LineHash::new(SEED)),
            full(Xxh64(SEED)),
            full(Digester::new(SEED)),
        ];
        for contender in &mut contenders {
            for _ in 0..settling_rounds {
                setting.interrupt.check()?;
                if contender.strengths().is_none_or(Strengths::is_stable) {
                    break;
                }
                contender.round(&mut scanner, &mut Pass::default());
            }
        }
        // The hashes take turns, so that other load affects all of them, and each gets different pages, so that none
        // profits from pages that another has brought into the cache.
        let mut found: [Vec<Pass>; 6] = Default::default();
        for _ in 0..passes {
            let mut now = [Pass::default(); 6];
            for round in 0..scanner.rounds() {
                setting.interrupt.check()?;
                for (at, (contender, pass)) in contenders.iter_mut().zip(&mut now).enumerate() {
                    scanner.go_to(round + 3 * at);
                    contender.round(&mut scanner, pass);
                }
            }
            for (found, pass) in found.iter_mut().zip(now) {
                found.push(pass);
            }
        }
        compare(report, set, &contenders, &found);
        for (contender, found) in contenders.iter().zip(&found) {
            add_figures(report, set, &**contender, found);
        }
    }
    judge(report, setting.quick);
    Ok(())
}

/// Adds the median speed of the adaptive hashes relative to the full ones, compared pass by pass.
fn compare(report: &mut ExperimentReport, set: PageSet, contenders: &[Box<dyn Contender>; 6], found: &[Vec<Pass>; 6]) {
    let [_, paper, _, lines, xxh64, xxh3] = found;
    for (own, own_full) in [(0, paper), (2, lines)] {
        let own_name = contenders[own].name();
        for (peer, passes) in [(OWN, own_full), (XXH64, xxh64), (XXH3, xxh3)] {
            let ratios = passes.iter().zip(&found[own]).map(|(peer, own)| peer.ns_per_page() / own.ns_per_page());
            report.put_ratio(SPEED_VS.of([set.name(), &own_name, peer]), median(ratios));
        }
    }
}

fn add_figures(report: &mut ExperimentReport, set: PageSet, contender: &dyn Contender, passes: &[Pass]) {
    let name = format!("{}_{}", set.name(), contender.name());
    report.figure(format!("{name}_ns_per_page"), median_of(passes, Pass::ns_per_page));
    report.figure(DUPLICATES.of([set.name(), &contender.name()]), median_of(passes, Pass::duplicates));
    if let Some(strengths) = contender.strengths() {
        report.figure(format!("{name}_strength"), median_of(passes, Pass::strength));
        report.figure(format!("{name}_rounds_to_rest"), f64::from(strengths.rounds_to_rest()));
        let hash_ns = median_of(passes, |pass| pass.per_page(|cost| cost.hash_ns));
        let penalty_ns = median_of(passes, |pass| pass.per_page(|cost| cost.penalty_ns));
        let collisions = median_of(passes, |pass| pass.per_page(|cost| cost.collisions));
        report.figure(format!("{name}_hash_ns_per_page"), hash_ns);
        report.figure(format!("{name}_penalty_ns_per_page"), penalty_ns);
        report.figure(format!("{name}_collisions_per_page"), collisions);
        report.curves.insert(format!("{} {}", contender.name(), set.name()), strengths.curve());
    }
}

fn median_of(passes: &[Pass], figure: impl Fn(&Pass) -> f64) -> f64 {
    median(passes.iter().map(figure))
}

fn judge(report: &mut ExperimentReport, quick: bool) {
    for set in PageSet::ALL {
        let truth = report.figure_of(DUPLICATES, [set.name(), XXH3]);
        let mut same = 0.0;
        for contender in ["paper32_adaptive", "paper32_full", "lines_adaptive", "lines_full", XXH64] {
            if truth.is_some() && report.figure_of(DUPLICATES, [set.name(), contender]) == truth {
                same += 1.0;
            }
        }
        let name = format!("{}: other hashes that found the same duplicates as XXH3, of five", set.name());
        report.bar(name, Limit::AtLeast(5.0), Some(same));
    }
    if quick {
        return;
    }
    for form in [metric::PAPER32, metric::LINES] {
        let adaptive = format!("{form}_adaptive");
        let of_full = speed(report, PageSet::Random, &adaptive, OWN);
        let of_xxh64 = speed(report, PageSet::Random, &adaptive, XXH64);
        report.bar(metric::HASH_SPEED.of([form]), Limit::AtLeast(5.9), Some(of_full));
        report.bar(metric::HASH_SPEED_OF_XXH64.of([form]), Limit::AtLeast(1.0), Some(of_xxh64));
        for set in [PageSet::OneWord, PageSet::Tails] {
            let cost = 1.0 / speed(report, set, &adaptive, OWN);
            let name = format!("{}: cost of {form} relative to its full hash", set.name());
            report.bar(name, Limit::AtMost(1.1), Some(cost));
        }
    }
}

/// The speed, or not a number (and so below any bar) if it wasn't measured.
fn speed(report: &ExperimentReport, set: PageSet, adaptive: &str, peer: &str) -> f64 {
    report.ratios.get(&SPEED_VS.of([set.name(), adaptive, peer])).copied().unwrap_or(f64::NAN)
}
