//! Just enough FastCGI 1.0 to ask for one script.

use anyhow::{Context, ensure};
use std::path::Path;

const VERSION: u8 = 1;
const BEGIN: u8 = 1;
const PARAMETERS: u8 = 4;
const INPUT: u8 = 5;
const OUTPUT: u8 = 6;
const HEADER_BYTES: usize = 8;

/// A request for a script, after which the server closes the connection.
pub fn request(script: &Path) -> Vec<u8> {
    let mut parameters = Vec::new();
    for (name, value) in [("SCRIPT_FILENAME", script.to_string_lossy().as_ref()), ("REQUEST_METHOD", "GET")] {
        // A length may also be four bytes with the highest bit set.
        for length in [name.len(), value.len()] {
            parameters.extend((u32::try_from(length).unwrap_or(u32::MAX) | 1 << 31).to_be_bytes());
        }
        parameters.extend(name.bytes().chain(value.bytes()));
    }
    // Role responder; the server closes the connection afterwards.
    [
        record(BEGIN, &[0, 1, 0, 0, 0, 0, 0, 0]),
        record(PARAMETERS, &parameters),
        record(PARAMETERS, &[]),
        record(INPUT, &[]),
    ]
    .concat()
}

fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(content.len()).unwrap_or(u16::MAX).to_be_bytes();
    [&[VERSION, kind, 0, 1, high, low, 0, 0], content].concat()
}

/// Extracts the script's output from all that the server sent.
pub fn output(mut bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut output = Vec::new();
    while let Some((&[version, kind, _, _, high, low, padding, _], rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        ensure!(version == VERSION, "a record of FastCGI {version}");
        let length = usize::from(u16::from_be_bytes([high, low]));
        let content = rest.get(..length).context("a record that is cut off")?;
        if kind == OUTPUT {
            output.extend(content);
        }
        bytes = rest.get(length + usize::from(padding)..).context("a record that is cut off")?;
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_the_script() {
        let request = request(Path::new("/a.php"));
        assert_eq!(request[..16], [1, 1, 0, 1, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(request[16..24], [1, 4, 0, 1, 0, 54, 0, 0]);
        assert_eq!(request[24..32], [0x80, 0, 0, 15, 0x80, 0, 0, 6]);
        assert!(request[32..].starts_with(b"SCRIPT_FILENAME/a.php"));
        assert!(request.ends_with(&[1, 5, 0, 1, 0, 0, 0, 0]));
    }

    #[test]
    fn output_is_joined_and_other_records_are_left_out() {
        let bytes =
            [record(OUTPUT, b"one "), record(7, b"an error"), record(OUTPUT, b"two"), record(3, &[0; 8])].concat();
        assert_eq!(output(&bytes).unwrap(), b"one two");
        // Three bytes of padding.
        assert_eq!(output(&[&[1, 6, 0, 1, 0, 1, 3, 0], &b"x..."[..]].concat()).unwrap(), b"x");
        assert!(output(&bytes[..10]).is_err());
        assert!(output(&[2; 8]).is_err());
    }
}
