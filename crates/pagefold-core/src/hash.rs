//! The digest of a page: a 64-bit hash of its contents.
//!
//! A digest is a hint. Pages with equal digests are merged only after the kernel has compared them
//! byte for byte, so a collision costs time and never data.

use crate::units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// The contents of one page.
pub type PageBytes = [u8; PAGE_SIZE];

/// A 64-bit hash of a page's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub u64);

impl Digest {
    /// The digest that stands for a page of zeros; no other page gets it.
    pub const ZERO: Self = Self(0);

    /// Digests a page. `seed` is the run's own, so that nobody can prepare colliding pages.
    pub fn of_page(page: &PageBytes, seed: u64) -> Self {
        if is_zero(page) {
            return Self::ZERO;
        }
        Self(XxHash3_64::oneshot_with_seed(seed, page).max(1))
    }
}

/// Whether every byte is zero. Pages of real data are told apart within the first cache line.
pub fn is_zero(page: &PageBytes) -> bool {
    page.chunks(256).all(|chunk| chunk.iter().fold(0, |seen, byte| seen | byte) == 0)
}
