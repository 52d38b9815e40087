//! `/proc/PID/statm`: sizes of a process.

/// The fields of `/proc/PID/statm` that we use, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Address space.
    pub mapped: u64,
    /// Present pages of any kind.
    pub resident: u64,
    /// Address space of private writable memory and stacks.
    pub data: u64,
}

impl Sizes {
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(text).map_err(|_| "not ASCII")?;
        let mut words = text.split_ascii_whitespace();
        let mut fields = [0; 6];
        for field in &mut fields {
            *field = words.next().and_then(|word| word.parse().ok()).ok_or("a field is not a number")?;
        }
        let [mapped, resident, _, _, _, data] = fields;
        Ok(Self { mapped, resident, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_is_parsed_and_malformed_text_refused() {
        let sizes = Sizes::parse(b"1234 567 89 10 0 432 0\n").unwrap();
        assert_eq!(sizes, Sizes { mapped: 1234, resident: 567, data: 432 });
        for text in [&b""[..], b"1 2 3 4 5", b"1 x 3 4 5 6 7", b"\xff"] {
            assert!(Sizes::parse(text).is_err());
        }
    }
}
