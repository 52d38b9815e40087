//! Page contents of four independent parts of 1 KiB.

use crate::record::{PARTS, Page};
use pagefold_engine::host::PageState;
use pagefold_engine::random::finalize;

/// Numbers that stand for the contents of a page's parts; 0 stands for zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body(pub [u64; PARTS]);

/// The content identified by these numbers, equal in all processes. Never zeros.
pub const fn named(series: u64, number: u64, place: u64) -> u64 {
    let content = finalize(finalize(finalize(series ^ 0x6e61_6d65) ^ number).wrapping_add(place));
    if content == 0 { 1 } else { content }
}

impl Body {
    pub const ZEROS: Self = Self([0; PARTS]);

    /// The page identified by these numbers, equal in all processes.
    pub fn named(series: u64, number: u64, place: u64) -> Self {
        let first = place.wrapping_mul(PARTS as u64);
        let mut place = first;
        Self(std::array::from_fn(|_| {
            place = place.wrapping_add(1);
            named(series, number, place)
        }))
    }

    /// Replaces the parts from `part` on with zeros.
    #[must_use]
    pub fn ending(mut self, part: usize) -> Self {
        self.0[part..].fill(0);
        self
    }

    /// The page as a record has it, with digests under `key`.
    pub fn page(&self, key: u64, frame: u64) -> Page {
        let mut parts = [0; PARTS];
        let mut halves = [finalize(key ^ 0x6c6f_7765), finalize(key ^ 0x7570_7065)];
        for (part, &content) in parts.iter_mut().zip(&self.0) {
            let digest = if content == 0 { 0 } else { finalize(finalize(content) ^ key).max(1) };
            halves = halves.map(|half| finalize(half.rotate_left(23) ^ digest));
            *part = low(digest, content);
        }
        let digest =
            if *self == Self::ZEROS { 0 } else { (u128::from(halves[1]) << 64 | u128::from(halves[0])).max(1) };
        Page { state: PageState::Private, huge: false, digest, parts, frame: Some(frame) }
    }
}

/// 32 bits of a digest: 0 for zeros and nothing else.
#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn low(digest: u64, content: u64) -> u32 {
    (digest as u32).max(u32::from(content != 0))
}
