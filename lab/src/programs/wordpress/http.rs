//! Just enough HTTP to get a page.

use anyhow::{Context, ensure};
use std::io::{Read, Write};

/// Requests a path on a new connection, which the server closes after its answer, and returns the content.
pub fn get(mut connection: impl Read + Write, host: &str, path: &str) -> anyhow::Result<Vec<u8>> {
    // HTTP/1.0, so that the answer isn't chunked.
    write!(connection, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").context("sending a request")?;
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).context("reading an answer")?;
    body(&answer).map(<[u8]>::to_vec)
}

/// The content of an answer. Any status but 200 is an error.
fn body(answer: &[u8]) -> anyhow::Result<&[u8]> {
    const END: &[u8] = b"\r\n\r\n";
    let end = answer.windows(END.len()).position(|bytes| bytes == END).context("the answer has no end of headers")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let body = &answer[end + END.len()..];
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    ensure!(status.split(' ').nth(1) == Some("200"), "the answer is {status}");
    for (name, length) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            ensure!(length.trim().parse() == Ok(body.len()), "the answer is cut off after {} bytes", body.len());
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_answers_with_status_200_are_accepted() {
        let of = |answer: &[u8]| body(answer).map(<[u8]>::to_vec).map_err(|error| error.to_string());
        assert_eq!(of(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\na\r\n\r\nb"), Ok(b"a\r\n\r\nb".to_vec()));
        assert_eq!(of(b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 2\r\n\r\nab"), Ok(b"ab".to_vec()));
        for wrong in [&b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"[..], b"HTTP/1.1 200 OK\r\n", b""] {
            assert!(of(wrong).is_err());
        }
        assert!(of(b"HTTP/1.0 500 Internal Server Error\r\n\r\nan error").unwrap_err().contains("500"));
    }
}
