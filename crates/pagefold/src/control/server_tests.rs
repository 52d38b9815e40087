use super::*;
use crate::control::protocol::{SCHEMA, Selectors};
use pagefold_procmem::os::peer::own_uid;
use std::io::BufRead;
use std::sync::mpsc;

/// A server in a temporary directory that answers each request with the request itself.
fn server() -> (tempfile::TempDir, PathBuf, Server) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/control.sock");
    let server = Server::start(&path, false, None, Arc::new(echo)).unwrap();
    (dir, path, server)
}

#[expect(clippy::unnecessary_wraps, clippy::needless_pass_by_value, reason = "the signature of Answer")]
fn echo(request: Request, _uid: u32) -> Result<String, Exit> {
    if request == Request::Pause {
        // This stands for a run in a long cycle.
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
    // We send requests in pieces, on one connection that stays open.
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
        (long.as_bytes(), "longer than 65536 bytes"),
        (&many, "longer than 65536 bytes"),
    ];
    for (bytes, says) in cases {
        // The server doesn't answer requests after a malformed one.
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
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/control.sock");
    let (begun, begins) = mpsc::channel();
    let answer_slowly = move |request: Request, uid| {
        if request == Request::Pause {
            let _ = begun.send(());
        }
        echo(request, uid)
    };
    let _server = Server::start(&path, false, None, Arc::new(answer_slowly)).unwrap();
    let silent: Vec<UnixStream> = (0..CONNECTIONS_MOST - 2).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut slow = UnixStream::connect(&path).unwrap();
    slow.write_all(Request::Pause.line().as_bytes()).unwrap();
    begins.recv_timeout(REQUEST_LIMIT).unwrap();
    let before = Instant::now();
    assert_eq!(answer(&path, status().as_bytes()), status());
    assert!(before.elapsed() < REQUEST_LIMIT / 2, "{:?}", before.elapsed());
    // If there are too many connections, the one that has been silent for longest is closed.
    let more: Vec<UnixStream> = (0..2 * CONNECTIONS_MOST).map(|_| UnixStream::connect(&path).unwrap()).collect();
    assert_eq!(answer(&path, status().as_bytes()), status());
    assert_eq!((&silent[0]).read(&mut [0]).unwrap(), 0, "the first is still open");
    drop(more);
    // The slow request also gets an answer.
    let mut line = String::new();
    io::BufReader::new(&slow).read_line(&mut line).unwrap();
    assert_eq!(line, Request::Pause.line());
}

#[test]
fn members_of_the_group_leave_places_to_root_and_to_each_other() {
    const MEMBERS: u32 = 7;
    let connections = Connections::default();
    let start = Instant::now();
    let mut others = Vec::new();
    let mut admit = |number: u64, uid: u32| {
        let (stream, other) = UnixStream::pair().unwrap();
        others.push(other);
        let idle_since = Some(start + Duration::from_millis(number));
        connections.admit(Connection { number, stream, uid, is_member: uid != 0, idle_since })
    };
    let mut number = 0;
    for uid in 1..=MEMBERS {
        for _ in 0..2 * MEMBER_MOST {
            number += 1;
            assert!(admit(number, uid));
        }
    }
    let of = |uid| locked(&connections.0).iter().filter(|connection| connection.uid == uid).count();
    assert_eq!((of(1), of(MEMBERS), locked(&connections.0).len()), (0, MEMBER_MOST, MEMBERS_MOST));
    // A client that is waiting for its answer keeps its place.
    for number in 0..=number {
        connections.set_idle(number, None);
    }
    assert!(!admit(1_000, 1), "all members are being answered");
    for number in 2_000..2_000 + (CONNECTIONS_MOST as u64) {
        assert!(admit(number, 0), "root has places of its own");
    }
    assert_eq!((of(MEMBERS), of(0)), (MEMBER_MOST, CONNECTIONS_MOST - MEMBERS_MOST));
}

#[test]
fn members_of_the_group_may_ask_for_the_status_only() {
    const GROUP: u32 = 54_321;
    let dir = tempfile::tempdir().unwrap();
    if own_uid() != 0 {
        return pagefold_testkit::skip("only root can start programs of another user");
    }
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("control.sock");
    let has_landlock = thread::spawn(forbid_files).join().unwrap().is_ok();
    let answer_confined = move |request, uid| {
        // If this panics, there's no answer.
        assert_eq!(fs::File::open("/etc/passwd").is_ok(), uid == 0 || !has_landlock);
        echo(request, uid)
    };
    let _server = Server::start(&path, false, Some(GROUP), Arc::new(answer_confined)).unwrap();
    assert_eq!(answer(&path, status().as_bytes()), status());
    let found = fs::symlink_metadata(&path).unwrap();
    assert_eq!((found.mode() & 0o777, found.uid(), found.gid()), (0o660, 0, GROUP));
    // The server may close the connection before it has read everything.
    let script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect(sys.argv[1])\n\
        except OSError as e: sys.exit(str(e))\ntry: s.sendall(sys.argv[2].encode())\nexcept OSError: pass\n\
        print(s.makefile().readline(), end='')";
    let ask = |groups: &str, request: &Request| {
        let mut other = std::process::Command::new("setpriv");
        other
            .args(["--reuid=65534", "--regid=65534", groups, "/usr/bin/python3", "-c", script])
            .arg(&path)
            .arg(request.line());
        let output = other.output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let (member, stranger) = (format!("--groups={GROUP}"), "--clear-groups");
    assert_eq!(ask(&member, &Request::Status), status());
    for request in [
        Request::Pause,
        Request::Resume,
        Request::Explain { pid: 1 },
        Request::Governor { name: "low".to_owned() },
        Request::Unmerge(Selectors::default()),
        Request::Include(Selectors::default()),
    ] {
        assert!(ask(&member, &request).contains("only root may send this request"));
    }
    assert!(ask(stranger, &Request::Status).contains("Permission denied"));
    // Even if anybody may open the socket, the server checks the peer's groups.
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    assert_eq!(ask(&member, &Request::Status), status());
    assert!(ask(stranger, &Request::Status).contains("only root may send requests"));
}

#[test]
fn an_abandoned_socket_is_replaced_and_a_live_one_is_not() {
    let (dir, path, first) = server();
    let error = Server::start(&path, false, None, Arc::new(echo)).unwrap_err().to_string();
    assert!(error.contains(&format!("another pagefold (pid {})", std::process::id())), "{error}");
    assert_eq!(answer(&path, status().as_bytes()), status());
    // With `supersede`, a second server replaces the socket. The first server doesn't remove the new one at its end.
    let second = Server::start(&path, true, None, Arc::new(echo)).unwrap();
    drop(first);
    assert_eq!(answer(&path, status().as_bytes()), status());
    drop(second);
    assert!(!path.exists());
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0, "a file is left");
    // A server that was killed leaves a socket without a listener.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let third = Server::start(&path, false, None, Arc::new(echo)).unwrap();
    assert_eq!(answer(&path, status().as_bytes()), status());
    drop(third);
    // We refuse a directory where other users could replace the socket.
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let error = Server::start(&open.join("control.sock"), false, None, Arc::new(echo)).unwrap_err().to_string();
    assert!(error.contains("users other than root can write"), "{error}");
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
}
