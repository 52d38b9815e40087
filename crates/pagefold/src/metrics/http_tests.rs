use super::*;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Serves pages of this size, and counts how often it makes one.
fn start(size: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (address, made) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counter = made.clone();
    // This thread ends with the process.
    thread::spawn(move || {
        let page: Arc<str> = "x".repeat(size).into();
        serve(&[listener], move || {
            let number = counter.fetch_add(1, Ordering::SeqCst);
            if number == 0 { Err("not yet; later".to_owned()) } else { Ok(page.clone()) }
        });
    });
    (address, made)
}

fn send(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // The server may answer and close before it has read all of a long request.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[track_caller]
fn assert_answer(address: SocketAddr, request: &str, begins: &str) -> String {
    let answer = send(address, request.as_bytes());
    assert!(answer.starts_with(&format!("HTTP/1.1 {begins}")), "{request:?}: {answer:?}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("\r\nConnection: close") && head.contains("\r\nContent-Length: "), "{head}");
    body.to_owned()
}

#[test]
fn the_thread_that_serves_can_open_no_file() {
    if let Err(error) = thread::spawn(forbid_files).join().unwrap() {
        return pagefold_testkit::skip_unsupported(format!("Landlock: {error}"));
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        serve(&[listener], || match std::fs::File::open("/etc/passwd") {
            Ok(_) => Ok("opened".into()),
            Err(error) => Err(error.to_string()),
        });
    });
    let denied = assert_answer(address, "GET /metrics HTTP/1.1\r\n\r\n", "503 ");
    assert!(denied.contains("Permission denied"), "{denied}");
}

#[test]
fn there_is_one_page() {
    let (address, made) = start(5);
    let get = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    assert_eq!(assert_answer(address, get, "503 "), "not yet; later\n");
    assert_eq!(assert_answer(address, get, "200 OK\r\nContent-Type: text/plain; version=0.0.4; "), "xxxxx");
    assert_eq!(assert_answer(address, "GET /metrics?a=b HTTP/1.0\n\n", "200 "), "xxxxx");
    assert_eq!(made.load(Ordering::SeqCst), 3);
    // The answer has the page's length, but not the page.
    let head = send(address, b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("Content-Length: 5\r\n") && head.ends_with("\r\n\r\n"));
    for target in ["/", "/metricsx", "/metrics/", "//metrics", "*", "http://127.0.0.1/metrics", "/%6detrics"] {
        assert_answer(address, &format!("GET {target} HTTP/1.1\r\n\r\n"), "404 ");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "get", "CONNECT"] {
        assert_answer(address, &format!("{method} /metrics HTTP/1.1\r\n\r\n"), "405 ");
    }
    assert_eq!(made.load(Ordering::SeqCst), 4);
}

#[test]
fn what_is_no_request_is_refused() {
    let (address, made) = start(5);
    for request in
        ["\n\n", "GET\r\n\r\n", "GET /metrics\r\n\r\n", "GET  /metrics HTTP/1.1\r\n\r\n", "GET /metrics FTP/1.1\n\n"]
    {
        assert_answer(address, request, "400 ");
    }
    assert!(send(address, b"\xff\xfe\0 \x16\x03\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let long = send(address, &[b'a'; REQUEST_MOST]);
    assert!(long.starts_with("HTTP/1.1 431 "), "{long:?}");
    // This request comes in so many parts that looking at each would take too long.
    let mut parts = TcpStream::connect(address).unwrap();
    parts.set_nodelay(true).unwrap();
    while parts.write_all(b"a").is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
    // One client sends nothing, another one half a request.
    assert_eq!(TcpStream::connect(address).map(drop).ok(), Some(()));
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    assert_eq!(half.read(&mut [0; 10]).unwrap(), 0);
    assert_eq!(made.load(Ordering::SeqCst), 0);
}

#[test]
fn clients_that_are_silent_or_never_read_keep_nobody_else_from_the_page() {
    // This page is larger than a connection's buffers.
    let (address, _) = start(24 << 20);
    let get = b"GET /metrics HTTP/1.1\r\n\r\n";
    send(address, get);
    let silent: Vec<TcpStream> = (0..3 * CONNECTIONS_MOST).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut deaf: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(address).unwrap()).collect();
    for stream in &mut deaf {
        stream.write_all(get).unwrap();
    }
    let answer = send(address, get);
    assert!(answer.len() > 24 << 20, "{}", answer.len());
    // The first connections gave way to later ones.
    silent[0].set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    assert_eq!((&silent[0]).read(&mut [0; 1]).unwrap(), 0);
    drop(deaf);
}

#[test]
#[cfg_attr(not(feature = "live"), ignore = "takes 10 s")]
fn a_connection_ends_when_its_time_is_over() {
    let (address, _) = start(5);
    let mut slow = TcpStream::connect(address).unwrap();
    slow.set_read_timeout(Some(CONNECTION_LIMIT * 3)).unwrap();
    let began = Instant::now();
    // The connection ends even if the client keeps sending.
    let mut sender = slow.try_clone().unwrap();
    let sending = thread::spawn(move || {
        while sender.write_all(b"a").is_ok() {
            thread::sleep(Duration::from_millis(500));
        }
    });
    let ended = slow.read(&mut [0; 1]);
    assert!(matches!(ended, Ok(0)) || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    let took = began.elapsed();
    assert!(took >= CONNECTION_LIMIT && took < CONNECTION_LIMIT * 2, "{took:?}");
    sending.join().unwrap();
}
