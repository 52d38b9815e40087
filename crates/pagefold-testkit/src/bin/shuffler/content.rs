//! What a page holds, as a function of eight bytes: so the model of a gigabyte is two megabytes.

use pagefold_core::random::finalize as mix;

/// Words in a page.
pub const WORDS: usize = 512;

/// Contents with this bit belong to one shuffler; those without it to all.
const OWN: u32 = 1 << 31;

/// What a page must hold: 512 words that follow from `id`, zeros for id 0, and one of them poked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    id: u32,
    /// 0 for none; else the word's index in the low nine bits, and all of it the seed of its value.
    poke: u32,
}

impl Content {
    pub const ZERO: Self = Self { id: 0, poke: 0 };

    /// One that every shuffler may hold.
    pub fn common(number: u64) -> Self {
        Self { id: low(number % u64::from(OWN - 1)) + 1, poke: 0 }
    }

    /// One that only this shuffler holds, however often it is asked.
    pub fn own(number: u64) -> Self {
        Self { id: low(number) | OWN, poke: 0 }
    }

    /// The same with another word in one place.
    pub fn poked(self, random: u64) -> Self {
        Self { poke: low(random) | 1 << 9, ..self }
    }

    /// The word that is not what `id` says.
    pub fn poke(self) -> Option<(usize, u64)> {
        (self.poke != 0).then(|| (self.poke as usize % WORDS, mix(u64::from(self.poke))))
    }

    /// All words, in order. `salt` tells the shufflers' own contents apart.
    pub fn words(self, salt: u64) -> impl Iterator<Item = u64> {
        let (first, step) = match self.id {
            0 => (0, 0),
            id if id & OWN == 0 => (mix(u64::from(id)), mix(!u64::from(id)) | 1),
            id => (mix(u64::from(id) ^ salt << 32), mix(!u64::from(id) ^ salt << 32) | 1),
        };
        let (at, value) = self.poke().unwrap_or((WORDS, 0));
        (0..WORDS).map(move |word| if word == at { value } else { first.wrapping_add(step.wrapping_mul(word as u64)) })
    }
}

#[allow(clippy::cast_possible_truncation)] // The low half is what is wanted.
fn low(number: u64) -> u32 {
    number as u32
}
