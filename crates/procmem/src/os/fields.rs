//! Reads text with a `key value` or `key: value` on each line, like `/proc/meminfo`, `/proc/PID/status` and
//! `memory.stat`.

use std::str::FromStr;

pub const MISSING: &str = "a field is missing";
pub const NOT_A_NUMBER: &str = "a field is not a number";

/// The value of the first line with this key, trimmed.
///
/// ```
/// use pagefold_procmem::os::fields::field;
/// assert_eq!(field(b"Uid:\t0\t0\nSwapTotal:  8 kB\n", "SwapTotal"), Some(&b"8 kB"[..]));
/// ```
pub fn field<'a>(text: &'a [u8], key: &str) -> Option<&'a [u8]> {
    for line in text.split(|&byte| byte == b'\n') {
        let Some(rest) = line.strip_prefix(key.as_bytes()) else { continue };
        if let Some(b':' | b' ' | b'\t') = rest.first() {
            return Some(rest.strip_prefix(b":").unwrap_or(rest).trim_ascii());
        }
    }
    None
}

/// The value of a key as a number.
///
/// # Errors
/// If the key is missing or its value is not a number.
pub fn number<T: FromStr>(text: &[u8], key: &str) -> Result<T, &'static str> {
    parsed(field(text, key).ok_or(MISSING)?).ok_or(NOT_A_NUMBER)
}

/// The value of a key in KiB, as in `MemFree:  8 kB`.
///
/// # Errors
/// If the key is missing or its value is not in kB.
pub fn kib(text: &[u8], key: &str) -> Result<u64, &'static str> {
    let value = field(text, key).ok_or(MISSING)?;
    value.strip_suffix(b" kB").and_then(parsed).ok_or("a field is not in kB")
}

/// Like [`kib`], but a missing key counts as 0.
///
/// # Errors
/// If the value is not in kB.
pub fn kib_or_none(text: &[u8], key: &str) -> Result<u64, &'static str> {
    match kib(text, key) {
        Err(MISSING) => Ok(0),
        other => other,
    }
}

fn parsed<T: FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// The selected choice in a text like `always [madvise] never`.
pub fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    let (choice, _) = rest.split_once(']')?;
    Some(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_separators_are_accepted_and_keys_match_as_a_whole() {
        let text = b"ksm_rmap_items 3\nksm_zero_pages 12\nksm_merge_any: yes\nNode 0 MemFree:   8 kB\nbad: x\n";
        assert_eq!(number(text, "ksm_zero_pages"), Ok(12));
        assert_eq!(field(text, "ksm_merge_any"), Some(&b"yes"[..]));
        assert_eq!(kib(text, "Node 0 MemFree"), Ok(8));
        assert_eq!((field(text, "ksm"), field(text, "MemFree")), (None, None));
        assert!(number::<u64>(text, "bad").is_err() && kib(text, "ksm_zero_pages").is_err());
    }
}
