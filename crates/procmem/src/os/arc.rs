//! ZFS's cache (ARC). It isn't page cache, so `MemAvailable` leaves it out, though ZFS shrinks it when memory is short.

use super::fields::field;

/// The file below `/proc` that has the ARC's sizes. It's missing if ZFS isn't loaded.
pub const ARCSTATS: &str = "spl/kstat/zfs/arcstats";

/// How much ZFS can give back, bytes, from the text of [`ARCSTATS`]: all but the ARC's smallest size.
pub fn shrinkable(arcstats: &[u8]) -> u64 {
    bytes(arcstats, "size").zip(bytes(arcstats, "c_min")).map_or(0, |(size, least)| size.saturating_sub(least))
}

/// Each line has a name, a type and a number.
fn bytes(arcstats: &[u8], name: &str) -> Option<u64> {
    let number = field(arcstats, name)?.rsplit(|&byte| byte == b' ').next()?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_the_smallest_size_can_shrink() {
        let text = |size: &str| {
            format!(
                "13 1 0x01 147 39984 5 7\nname    type data\nc_max    4    900\nc_min    4    300\nsize    4    {size}\n"
            )
        };
        let found = ["800", "200", "x"].map(|size| shrinkable(text(size).as_bytes()));
        assert_eq!(found, [500, 0, 0]);
        assert_eq!((shrinkable(b"size 4 800\n"), shrinkable(b"")), (0, 0));
    }
}
