//! Units that we must not confuse: pages, bytes, page numbers and shares.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

/// Bytes in a base page. pagefold supports 4 KiB pages only (x86-64, and arm64 with 4 KiB granules).
pub const PAGE_SIZE: usize = 4096;

pub const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// A length or index as a 64-bit number, lossless on every supported target.
pub const fn count(length: usize) -> u64 {
    const { assert!(usize::BITS <= u64::BITS) };
    length as u64
}

/// A 32-bit number as an index, lossless on every supported target.
pub const fn index(number: u32) -> usize {
    const { assert!(usize::BITS >= u32::BITS) };
    number as usize
}

/// The whole part of a number, saturating: 0 if it's negative or not a number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates, as wanted here")]
pub const fn whole(number: f64) -> u64 {
    number as u64
}

/// `one - other`. We cap each of the two at 2^63 - 1.
pub fn difference(one: u64, other: u64) -> i64 {
    let one = i64::try_from(one).unwrap_or(i64::MAX);
    one - i64::try_from(other).unwrap_or(i64::MAX)
}

/// The lowest `bits` bits of a number.
///
/// # Panics
///
/// If `bits` is not from 1 to 32.
pub const fn low_bits(number: u64, bits: u32) -> u32 {
    assert!(bits > 0 && bits <= u32::BITS);
    #[expect(clippy::cast_possible_truncation, reason = "masked to at most 32 bits")]
    let low = (number & (u64::MAX >> (u64::BITS - bits))) as u32;
    low
}

/// Pages in one extent: 2 MiB, the size of a huge page. We judge density by extents.
pub const EXTENT_PAGES: u64 = 512;

/// Pages in one block: 1 GiB. We judge longer mappings in blocks and may mark them in part.
pub const BLOCK_PAGES: Pages = Pages(1 << 18);

/// A number of base pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Pages(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A virtual page number: a virtual address divided by the page size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Vpn(pub u64);

/// A share in parts of ten thousand: 100 is one per cent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Permyriad(pub u32);

impl Pages {
    /// The bytes these pages hold, saturating.
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0.saturating_mul(PAGE_SIZE as u64))
    }
    /// The difference, or zero if `other` is larger (kernel counters may reset).
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// Serialises [`Pages`] as bytes: `#[serde(with = "as_bytes")]`.
pub mod as_bytes {
    use super::{PAGE_SIZE, Pages};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[allow(clippy::missing_errors_doc)]
    pub fn serialize<S: Serializer>(pages: &Pages, serializer: S) -> Result<S::Ok, S::Error> {
        pages.bytes().serialize(serializer)
    }

    #[allow(clippy::missing_errors_doc)]
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Pages, D::Error> {
        Ok(Pages(u64::deserialize(deserializer)? / PAGE_SIZE as u64))
    }
}

/// Serialises nanoseconds as seconds: `#[serde(with = "as_seconds")]`.
pub mod as_seconds {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[allow(clippy::missing_errors_doc, clippy::trivially_copy_pass_by_ref)]
    pub fn serialize<S: Serializer>(ns: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        (*ns as f64 / 1e9).serialize(serializer)
    }

    #[allow(clippy::missing_errors_doc)]
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        Ok(super::whole((f64::deserialize(deserializer)? * 1e9).round()))
    }
}

/// Serialises [`Permyriad`] as a fraction of one: `#[serde(with = "as_fraction")]`.
pub mod as_fraction {
    use super::Permyriad;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[allow(clippy::missing_errors_doc)]
    pub fn serialize<S: Serializer>(share: &Permyriad, serializer: S) -> Result<S::Ok, S::Error> {
        share.fraction().serialize(serializer)
    }

    #[allow(clippy::missing_errors_doc)]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share; saturates")]
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Permyriad, D::Error> {
        Ok(Permyriad((f64::deserialize(deserializer)? * 10_000.0).round() as u32))
    }
}

impl Bytes {
    /// Mebibytes, with a fraction.
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1024.0 * 1024.0)
    }
}

impl Vpn {
    /// The page that holds `address`.
    pub const fn of_address(address: u64) -> Self {
        Self(address / PAGE_SIZE as u64)
    }
    /// The first address of the page.
    pub const fn address(self) -> u64 {
        self.0 * PAGE_SIZE as u64
    }
    /// The number of the page's 2 MiB-aligned extent.
    pub const fn extent(self) -> u64 {
        self.0 / EXTENT_PAGES
    }
}

impl Permyriad {
    /// The share that `part` is of `whole`, rounded down. 0 of 0 is 0.
    pub fn of(part: u64, whole: u64) -> Self {
        let share = u128::from(part) * 10_000 / u128::from(whole.max(1));
        Self(u32::try_from(share).unwrap_or(u32::MAX))
    }
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / 10_000.0
    }
}

impl fmt::Display for Permyriad {
    /// In per cent: `2500` is `25 %`, `5` is `0.05 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", f64::from(self.0) / 100.0)
    }
}

impl Add for Pages {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}
impl AddAssign for Pages {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}
impl Sub for Pages {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}
impl Sum for Pages {
    fn sum<I: Iterator<Item = Self>>(pages: I) -> Self {
        Self(pages.map(|p| p.0).sum())
    }
}
impl Add<u64> for Vpn {
    type Output = Self;
    fn add(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
}
