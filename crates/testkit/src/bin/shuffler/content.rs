//! Describes a page's content by eight bytes, so that the model of a gigabyte takes only two megabytes.

use pagefold_engine::random::finalize as mix;

pub const WORDS: usize = 512;

/// Ids with this bit are for contents unique to one shuffler. All other contents are common to all shufflers.
const UNIQUE: u32 = 1 << 31;

/// The content of a page: 512 words that follow from `id` (zeros for id 0). One word may be replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    id: u32,
    /// 0 if no word is replaced. Otherwise the low nine bits are the word's index, and all bits the seed of its value.
    replaced: u32,
}

impl Content {
    pub const ZERO: Self = Self { id: 0, replaced: 0 };

    /// A content that other shufflers have too.
    pub fn common(number: u64) -> Self {
        Self { id: low(number % u64::from(UNIQUE - 1)) + 1, replaced: 0 }
    }

    /// A content that only this shuffler has.
    pub fn unique(number: u64) -> Self {
        Self { id: low(number) | UNIQUE, replaced: 0 }
    }

    pub fn with_word_replaced(self, random: u64) -> Self {
        Self { replaced: low(random) | 1 << 9, ..self }
    }

    /// The index and the value of the replaced word.
    pub fn replaced_word(self) -> Option<(usize, u64)> {
        (self.replaced != 0).then(|| (self.replaced as usize % WORDS, mix(u64::from(self.replaced))))
    }

    /// All words, in order. `salt` makes the unique contents of two shufflers different.
    pub fn words(self, salt: u64) -> impl Iterator<Item = u64> {
        let (first, step) = match self.id {
            0 => (0, 0),
            id if id & UNIQUE == 0 => (mix(u64::from(id)), mix(!u64::from(id)) | 1),
            id => (mix(u64::from(id) ^ salt << 32), mix(!u64::from(id) ^ salt << 32) | 1),
        };
        let (at, value) = self.replaced_word().unwrap_or((WORDS, 0));
        (0..WORDS).map(move |word| if word == at { value } else { first.wrapping_add(step.wrapping_mul(word as u64)) })
    }
}

#[allow(clippy::cast_possible_truncation)] // The low half is what is wanted.
fn low(number: u64) -> u32 {
    number as u32
}
