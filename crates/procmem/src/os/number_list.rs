//! Lists of numbers as the kernel prints them: `0-3,8`.

use pagefold_engine::keys::NodeKey;
use std::ops::RangeInclusive;

/// A list of processors or memory nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumberList(Vec<RangeInclusive<u64>>);

impl NumberList {
    /// Parses a list; `None` if it is malformed. Empty text is an empty list.
    pub fn parse(text: &str) -> Option<Self> {
        let mut ranges = Vec::new();
        for word in text.trim().split(',').filter(|word| !word.is_empty()) {
            let (low, high) = word.split_once('-').unwrap_or((word, word));
            let range = low.parse().ok()?..=high.parse().ok()?;
            if range.is_empty() {
                return None;
            }
            ranges.push(range);
        }
        Some(Self(ranges))
    }

    /// The numbers of the list that are below 1024, as all node numbers are (MAX_NUMNODES).
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().flat_map(|range| *range.start()..=(*range.end()).min(1023))
    }

    /// The numbers as memory nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeKey> {
        self.iter().filter_map(|number| Some(NodeKey(u16::try_from(number).ok()?)))
    }

    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> u64 {
        let mut len: u64 = 0;
        for range in &self.0 {
            len = len.saturating_add(range.end() - range.start()).saturating_add(1);
        }
        len
    }

    /// Whether the lists have a number in common.
    pub fn meets(&self, other: &Self) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.start() <= b.end() && b.start() <= a.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_counted() {
        let list = NumberList::parse("0-3,8\n").unwrap();
        assert_eq!((list.iter().collect::<Vec<_>>(), list.len()), (vec![0, 1, 2, 3, 8], 5));
        assert_eq!(NumberList::parse("\n").map(|list| list.len()), Some(0));
        for text in ["x", "3-", "5-4", "1,x", "-"] {
            assert_eq!(NumberList::parse(text), None, "{text}");
        }
    }
}
