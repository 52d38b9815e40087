//! Page contents: numbers that stand for the bytes of a page, with their digests and checksums.

use crate::knobs::Alike;
use pagefold_engine::hash::Digest;
use pagefold_engine::random::{INCREMENT, Random, finalize};

/// The content at `index` of the numbered series of contents `series`. Never 0, the page of zeros.
pub const fn content_of_series(series: u64, index: u64) -> u64 {
    let id = finalize(finalize(series ^ 0x5e41_e5c0_17e4_7001).wrapping_add(index.wrapping_mul(INCREMENT)));
    if id == 0 { INCREMENT } else { id }
}

/// The digest of a page with content `id`, under `seed`.
pub fn digest(id: u64, seed: u64) -> Digest {
    if id == 0 {
        return Digest::ZERO;
    }
    Digest(finalize(finalize(id).wrapping_add(finalize(seed ^ INCREMENT))).max(1))
}

/// The digest of a page with content `id` if we hash only this many of its cache lines.
pub(crate) fn line_digest(id: u64, seed: u64, lines: u32, alike: Alike) -> Digest {
    let is_alike = lines < alike.distinct_from && finalize(id ^ INCREMENT) % 10_000 < u64::from(alike.share.0);
    // Zeros keep their digest whatever the number of lines.
    let id = if is_alike && id != 0 { content_of_series(u64::MAX, id % alike.groups.max(1)) } else { id };
    digest(id, seed ^ finalize(u64::from(lines)))
}

/// ksmd's checksum of a page: 32 bits, as in the kernel. Never 0, which stands for a page that ksmd hasn't visited.
#[allow(clippy::cast_possible_truncation)] // the low half is what is wanted
pub const fn checksum(id: u64) -> u32 {
    finalize(id ^ INCREMENT) as u32 | 1
}

/// A series of contents that no other page has: a bijection of a counter, so no two are equal.
#[derive(Debug)]
pub(crate) struct UniqueContents(Random);

impl UniqueContents {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(Random::for_purpose(seed, 0x0041_1757))
    }

    pub(crate) fn next(&mut self) -> u64 {
        loop {
            let id = self.0.next();
            if id != 0 {
                return id;
            }
        }
    }
}
