use super::*;
use crate::control::protocol::SCHEMA;
use std::io::BufRead;

/// A server in a temporary directory, which answers each request with the request itself.
fn server() -> (tempfile::TempDir, PathBuf, Server) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/control.sock");
    let server = Server::start(&path, false, Arc::new(echo)).unwrap();
    (dir, path, server)
}

#[expect(clippy::unnecessary_wraps, clippy::needless_pass_by_value, reason = "the signature of Answer")]
fn echo(request: Request) -> Result<String, String> {
    if request == Request::Pause {
        // A run in a long cycle.
        thread::sleep(Duration::from_secs(2));
    }
    Ok(request.line().trim_end().to_owned())
}

/// Sends these bytes, closes the sending side, and returns everything that the server answers.
fn answer(path: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

fn status() -> String {
    Request::Status.line()
}

#[test]
fn each_line_is_answered_by_one_line() {
    let (_dir, path, _server) = server();
    assert_eq!(answer(&path, status().as_bytes()), status());
    let several = status() + &Request::Resume.line() + Request::Explain { pid: 3 }.line().trim_end();
    assert_eq!(answer(&path, several.as_bytes()), several.clone() + "\n");
    assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
    // In pieces, on one connection that stays open.
    let mut stream = UnixStream::connect(&path).unwrap();
    for _ in 0..2 {
        for piece in status().as_bytes().chunks(7) {
            stream.write_all(piece).unwrap();
        }
        let mut line = String::new();
        io::BufReader::new(&stream).read_line(&mut line).unwrap();
        assert_eq!(line, status());
    }
}

#[test]
fn malformed_requests_are_refused_and_others_still_served() {
    let (_dir, path, _server) = server();
    let long =
        format!("{{\"schema\":\"{SCHEMA}\",\"request\":\"status\",\"more\":\"{}\"}}\n", "x".repeat(REQUEST_MOST));
    let many = vec![b'x'; 1 << 20];
    let cases: [(&[u8], &str); 7] = [
        (b"\n", "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"\0\xff\xfe\n", "malformed"),
        (br#"{"schema":"pagefold.control/1","request":"dance"}"#, "dance"),
        (&[b'['; 4000], "malformed"),
        (long.as_bytes(), "longer than 4096 bytes"),
        (&many, "longer than 4096 bytes"),
    ];
    for (bytes, says) in cases {
        // Requests after a malformed one are not answered.
        let followed = [bytes, status().as_bytes()].concat();
        for bytes in [bytes, &followed] {
            let answer = answer(&path, bytes);
            let refusal: Refusal = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
            assert!(refusal.error.contains(says), "{refusal:?}");
            assert_eq!(answer.lines().count(), 1);
        }
    }
    assert_eq!(answer(&path, b""), "");
    assert_eq!(answer(&path, status().as_bytes()), status());
}

#[test]
fn the_longest_request_is_answered() {
    let (_dir, path, _server) = server();
    let bare = format!("{{\"schema\":\"{SCHEMA}\",\"request\":\"status\",\"more\":\"\"}}\n");
    let padded = |length: usize| bare.replace("\"\"", &format!("\"{}\"", "x".repeat(length - bare.len())));
    assert_eq!(answer(&path, padded(REQUEST_MOST).as_bytes()), status());
    assert!(answer(&path, padded(REQUEST_MOST + 1).as_bytes()).contains("longer"));
}

#[test]
fn silent_and_slow_clients_delay_no_other() {
    let (_dir, path, _server) = server();
    let silent: Vec<UnixStream> = (0..CONNECTIONS_MOST - 2).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut slow = UnixStream::connect(&path).unwrap();
    slow.write_all(Request::Pause.line().as_bytes()).unwrap();
    let before = Instant::now();
    assert_eq!(answer(&path, status().as_bytes()), status());
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    // One connection too many is refused, and accepted again after others have closed.
    let last = UnixStream::connect(&path).unwrap();
    let full = answer(&path, status().as_bytes());
    assert!(full.contains("16 clients are connected"), "{full}");
    drop((silent, last));
    let end = Instant::now() + Duration::from_secs(20);
    while answer(&path, status().as_bytes()) != status() {
        assert!(Instant::now() < end, "connections are still refused");
        thread::sleep(Duration::from_millis(10));
    }
    // The slow request is answered too.
    let mut line = String::new();
    io::BufReader::new(&slow).read_line(&mut line).unwrap();
    assert_eq!(line, Request::Pause.line());
}

#[test]
fn an_abandoned_socket_is_replaced_and_a_live_one_is_not() {
    let (dir, path, first) = server();
    let error = Server::start(&path, false, Arc::new(echo)).unwrap_err().to_string();
    assert!(error.contains(&format!("another pagefold (pid {})", std::process::id())), "{error}");
    assert_eq!(answer(&path, status().as_bytes()), status());
    // With `supersede` it is replaced, and the first server does not remove it when it ends.
    let second = Server::start(&path, true, Arc::new(echo)).unwrap();
    drop(first);
    assert_eq!(answer(&path, status().as_bytes()), status());
    drop(second);
    assert!(!path.exists());
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "a file is left");
    // Left by a server that was killed: nothing listens.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let third = Server::start(&path, false, Arc::new(echo)).unwrap();
    assert_eq!(answer(&path, status().as_bytes()), status());
    drop(third);
    // Not in a directory where other users could replace it.
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let error = Server::start(&open.join("control.sock"), false, Arc::new(echo)).unwrap_err().to_string();
    assert!(error.contains("writable by other users"), "{error}");
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
}
