//! The fleet's key, and digests of contents under that key.
//!
//! All hosts of a fleet have the same key, so the same content has the same digest on all of them. Without the key
//! nobody can test whether a guessed content has a given digest.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;
use twox_hash::XxHash3_128;

const KEY_BYTES: usize = 32;
/// XXH3 uses this many bytes of a secret, and ignores the rest of a longer one.
const SECRET_BYTES: usize = 192;
const ID_BYTES: usize = 8;

#[derive(Clone)]
pub struct FleetKey {
    id: KeyId,
    contents: [u8; KEY_BYTES],
    fingerprints: [u8; SECRET_BYTES],
}

/// The content of a page, as a digest under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Content(pub u64);

/// Tells keys apart, but reveals nothing else about them.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId([u8; ID_BYTES]);

/// Why a text isn't a key.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum KeyError {
    #[error("is not a key of {} hexadecimal digits; make one with: openssl rand -hex {KEY_BYTES}", 2 * KEY_BYTES)]
    Malformed,
    #[error("has the same digit everywhere, which anybody can guess; make one with: openssl rand -hex {KEY_BYTES}")]
    Guessable,
}

impl FleetKey {
    pub fn new(key: [u8; KEY_BYTES]) -> Self {
        Self {
            id: KeyId(derive(&key, "pagefold.sketch/1 key id")),
            contents: derive(&key, "pagefold.sketch/1 contents"),
            fingerprints: derive(&key, "pagefold.sketch/1 fingerprints"),
        }
    }

    pub fn id(&self) -> KeyId {
        self.id
    }

    /// The digest of a page. Simulations may pass something shorter in its place.
    ///
    /// It's the keyed BLAKE3 of a 128-bit fingerprint. That takes 0.17 us. BLAKE3 of the whole page would take 2.5 us,
    /// three times as long as reading the page. BLAKE3 keeps anybody from testing guesses without the key; the
    /// fingerprint only has to tell contents apart. To make a page with another content's fingerprint, a program would
    /// have to know that content, and could as well hold it in memory itself.
    pub fn content(&self, page: &[u8]) -> Content {
        // This only fails for secrets that are too short.
        let fingerprint = XxHash3_128::oneshot_with_secret(&self.fingerprints, page).unwrap_or_default();
        let digest = blake3::keyed_hash(&self.contents, &fingerprint.to_le_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        Content(u64::from_le_bytes(first))
    }
}

impl FromStr for FleetKey {
    type Err = KeyError;

    /// Parses a key file: hexadecimal digits, with any white space around them.
    fn from_str(text: &str) -> Result<Self, KeyError> {
        let key: [u8; KEY_BYTES] = from_hex(text.trim()).ok_or(KeyError::Malformed)?;
        if key.iter().all(|byte| *byte == key[0] && byte >> 4 == byte & 15) {
            return Err(KeyError::Guessable);
        }
        Ok(Self::new(key))
    }
}

impl fmt::Debug for FleetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FleetKey({})", self.id)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl KeyId {
    /// Parses an ID that we've printed.
    pub fn parse(text: &str) -> Option<Self> {
        let id = Self(from_hex(text)?);
        if id.to_string() == text { Some(id) } else { None }
    }
}

fn derive<const N: usize>(key: &[u8; KEY_BYTES], purpose: &str) -> [u8; N] {
    let mut derived = [0; N];
    let mut hasher = blake3::Hasher::new_derive_key(purpose);
    hasher.update(key);
    hasher.finalize_xof().fill(&mut derived);
    derived
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn contents_depend_on_the_key_and_on_every_byte() {
        let (a, b) = (FleetKey::new([1; 32]), FleetKey::new([2; 32]));
        assert_ne!(a.id(), b.id());
        let page = vec![7; 4096];
        let mut contents = BTreeSet::from([a.content(&page), b.content(&page)]);
        for at in [0, 1, 2048, 4095] {
            let mut other = page.clone();
            other[at] ^= 0x80;
            contents.insert(a.content(&other));
        }
        assert_eq!(contents.len(), 6);
        // All hosts must compute the same digest, so a change of it requires another schema.
        assert_eq!(a.content(&page), Content(6_187_297_158_203_087_347));
        assert_eq!(a.id().to_string(), "771155f76b8e3ce9");
    }

    #[test]
    fn keys_are_64_digits() {
        let text = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";
        let key: FleetKey = format!(" {text}\n").parse().unwrap();
        assert_eq!(key.id(), text.to_lowercase().parse::<FleetKey>().unwrap().id());
        assert_eq!(KeyId::parse(&key.id().to_string()), Some(key.id()));
        assert!(!format!("{key:?}").contains("2233"));
        for bad in ["", &text[1..], &format!("{text}0"), &text.replace('1', "g"), &text.replace("11", "é")] {
            assert_eq!(bad.parse::<FleetKey>().unwrap_err(), KeyError::Malformed, "{bad}");
        }
        assert_eq!("0".repeat(64).parse::<FleetKey>().unwrap_err(), KeyError::Guessable);
        assert_eq!(KeyId::parse("0011223344556677A"), None);
        assert_eq!(KeyId::parse("00112233445566AA"), None);
    }
}
