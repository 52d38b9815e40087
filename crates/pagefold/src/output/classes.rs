//! How pages are spread over the classes of a classifier: for `status`.

use crate::output::figures::thousands;
use crate::output::style::{human, percent};
use pagefold_core::classes::{ClassReport, Classifier};
use serde::{Deserialize, Serialize};

/// The classes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassesView {
    /// By what.
    classifier: Classifier,
    /// What remembering pages takes.
    bytes: u64,
    /// All of them, by number.
    classes: Vec<ClassRow>,
}

/// A class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ClassRow {
    class: u8,
    /// Pages in it now, of those that were visited.
    pages: u64,
    /// Look-ups so far, those spared, and those that found a page with the same content.
    lookups: u64,
    spared: u64,
    found: u64,
}

impl ClassesView {
    /// Of what the core tells.
    pub fn of(report: &ClassReport) -> Self {
        let row = |(class, total): (u8, &pagefold_core::classes::ClassTotal)| ClassRow {
            class,
            pages: total.pages.0,
            lookups: total.lookups,
            spared: total.spared,
            found: total.found,
        };
        let classes = (0..).zip(&report.classes).map(row).collect();
        Self { classifier: report.classifier, bytes: report.bytes.0, classes }
    }

    /// How balanced they are, and what they bring.
    pub fn sentence(&self) -> String {
        let sum = |figure: fn(&ClassRow) -> u64| self.classes.iter().map(figure).sum::<u64>();
        let (pages, lookups, spared) = (sum(|row| row.pages), sum(|row| row.lookups), sum(|row| row.spared));
        let used = self.classes.iter().filter(|row| row.pages > 0).count();
        let largest = self.classes.iter().max_by_key(|row| (row.pages, std::cmp::Reverse(row.class)));
        let largest = largest.filter(|_| pages > 0).map_or(String::new(), |row| {
            format!(", class {} the largest with {}", row.class, percent(row.pages as f64, pages as f64))
        });
        format!(
            "by {}: {} pages in {used} of {}{largest}; {} of {} look-ups spared, {} found; {} to remember pages",
            match self.classifier {
                Classifier::None => "nothing",
                Classifier::Address => "address",
                Classifier::WriteCount => "visits that saw a change",
                Classifier::SubPages => "quarters that changed",
            },
            thousands(pages),
            self.classes.len(),
            percent(spared as f64, (lookups + spared) as f64),
            thousands(lookups + spared),
            thousands(sum(|row| row.found)),
            human(self.bytes),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_core::classes::ClassTotal;
    use pagefold_core::units::{Bytes, Pages};

    #[test]
    fn the_balance_is_told_in_one_sentence() {
        let mut classes = vec![ClassTotal::default(); 16];
        classes[0] = ClassTotal { pages: Pages(3_000), lookups: 4_000, spared: 2_000, found: 1_234 };
        classes[15] = ClassTotal { pages: Pages(1_000), lookups: 2_000, spared: 0, found: 1 };
        let report = ClassReport { classifier: Classifier::SubPages, bytes: Bytes(1 << 20), classes };
        let view = ClassesView::of(&report);
        assert_eq!(
            view.sentence(),
            "by quarters that changed: 4,000 pages in 2 of 16, class 0 the largest with 75 %; 25 % of 8,000 look-ups \
             spared, 1,235 found; 1 MiB to remember pages"
        );
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(
            (json["classifier"].as_str(), json["classes"][15]["lookups"].as_u64()),
            (Some("sub-pages"), Some(2_000))
        );
        let empty =
            ClassReport { classes: vec![ClassTotal::default(); 8], classifier: Classifier::Address, bytes: Bytes(0) };
        assert!(ClassesView::of(&empty).sentence().starts_with("by address: 0 pages in 0 of 8; "));
    }
}
