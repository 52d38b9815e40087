//! MariaDB servers on copies of one data directory.

use super::{Server, Target, need, output_of};
use crate::bench::load::OpenLoop;
use anyhow::{Context, bail};
use pagefold_engine::permutation::Permutation;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(60);
const PACKAGES: &str = "mariadb-server-core and mariadb-client-core";

const LOAD_ROWS: u64 = 1000;

/// The capabilities that our client announces: passwords as in 4.1, which are empty here.
const CAPABILITIES: u32 = 0x0001 | 0x0200 | 0x8000;
const QUERY: u8 = 3;

/// Checks: whole-table scans, which load the table into the buffer pool, and a scan that sorts.
const CHECKS: &str = "SELECT COUNT(*), SUM(id), SUM(tag), BIT_XOR(CRC32(body)) FROM bench.t; \
    SELECT tag, COUNT(*), MIN(body) FROM bench.t WHERE tag < 20 GROUP BY tag ORDER BY tag; \
    CHECKSUM TABLE bench.t";

/// A data directory with one table, left by a clean shutdown.
#[derive(Debug)]
pub struct MariaDbData {
    server: PathBuf,
    client: PathBuf,
    dir: PathBuf,
}

impl MariaDbData {
    /// Creates a data directory in `scratch` with a table of `rows` rows of about 1 KiB.
    pub fn make(scratch: &Path, rows: u64) -> anyhow::Result<Self> {
        let data = Self::empty(scratch.join("mariadb-data"))?;
        let mariadb = data.serve(scratch)?;
        let body = (0..8).map(|part| format!("SHA2(seq+{part},512)")).collect::<Vec<_>>().join(",");
        mariadb.query(&format!(
            "CREATE DATABASE bench; USE bench; \
             CREATE TABLE t (id INT PRIMARY KEY, tag INT, body VARCHAR(1024) CHARACTER SET latin1) ENGINE=InnoDB; \
             INSERT INTO t SELECT seq, seq*7919%10007, CONCAT({body}) FROM seq_1_to_{rows}; \
             CREATE TABLE written (id INT PRIMARY KEY, times INT) ENGINE=InnoDB; \
             INSERT INTO written SELECT seq, 0 FROM seq_1_to_{LOAD_ROWS}"
        ))?;
        mariadb.shut_down()?;
        Ok(data)
    }

    /// Creates a data directory without databases.
    pub(super) fn empty(dir: PathBuf) -> anyhow::Result<Self> {
        let install = need("mariadb-install-db", PACKAGES)?;
        let data = Self { server: need("mariadbd", PACKAGES)?, client: need("mariadb", PACKAGES)?, dir };
        fs::create_dir_all(&data.dir)?;
        let mut command = Command::new(install);
        command
            .args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"])
            .arg("--innodb-log-file-size=16M")
            .args(own_directory(&data.dir));
        output_of(&mut command)?;
        Ok(data)
    }

    /// Starts a server on the directory itself.
    pub(super) fn serve(&self, scratch: &Path) -> anyhow::Result<MariaDb> {
        self.start_in(scratch, &self.dir)
    }

    /// Starts a server on a fresh copy and lets it read the whole table.
    pub fn start(&self, scratch: &Path, instance: usize) -> anyhow::Result<MariaDb> {
        let dir = scratch.join(format!("mariadb-{instance}"));
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => copy_dir(&self.dir, &dir)?,
        }
        let mut mariadb = self.start_in(scratch, &dir)?;
        mariadb.check()?;
        Ok(mariadb)
    }

    fn start_in(&self, scratch: &Path, dir: &Path) -> anyhow::Result<MariaDb> {
        let name = dir.file_name().and_then(|name| name.to_str()).context("the data directory has no name")?;
        let socket = scratch.join(format!("{name}.socket"));
        let mut run = Command::new(&self.server);
        run.args(["--no-defaults", "--user=root", "--skip-networking", "--skip-log-bin"])
            .args(["--innodb-buffer-pool-size=128M", "--innodb-log-file-size=16M"])
            // Only queries should load pages, not the list that the last server saved.
            .args(["--innodb-buffer-pool-load-at-startup=0", "--innodb-buffer-pool-dump-at-shutdown=0"])
            .args(own_directory(dir))
            .arg(format!("--pid-file={}", scratch.join(format!("{name}.pid")).display()))
            .arg(format!("--socket={}", socket.display()));
        let mut server = Server::start(&mut run, &scratch.join(format!("{name}.log")))?;
        let client = &self.client;
        server.wait_ready(READY_LIMIT, || query(client, &socket, "SELECT 1").ok())?;
        Ok(MariaDb { server, client: client.clone(), socket })
    }
}

/// Options for a data directory that also holds temporary tables: if they were in /tmp, each server that starts would
/// delete all others'.
fn own_directory(dir: &Path) -> [String; 2] {
    ["datadir", "tmpdir"].map(|option| format!("--{option}={}", dir.display()))
}

#[derive(Debug)]
pub struct MariaDb {
    server: Server,
    client: PathBuf,
    socket: PathBuf,
}

impl MariaDb {
    /// Updates every 27th row: different rows and values in each instance, so that the copies diverge.
    pub fn change(&mut self, instance: u64) -> anyhow::Result<()> {
        self.update(instance, instance)
    }

    /// Makes each row whose number is `rows` modulo 27 begin with `digit`.
    pub fn update(&mut self, rows: u64, digit: u64) -> anyhow::Result<()> {
        self.query(&format!(
            "UPDATE bench.t SET body=CONCAT('{}', SUBSTR(body, 2)) WHERE id % 27 = {}",
            digit % 10,
            rows % 27
        ))?;
        Ok(())
    }

    /// Starts a load on its own connection: a query each `every`. One in ten writes to a table that we don't check.
    pub fn load(&self, every: Duration) -> anyhow::Result<OpenLoop> {
        // By default each write waits for the disk.
        self.query("SET GLOBAL innodb_flush_log_at_trx_commit=0")?;
        let order = Permutation::new(LOAD_ROWS, 1);
        let mut requests = Vec::new();
        for number in 0..LOAD_ROWS {
            let id = order.at(number) + 1;
            requests.push(request(&if number % 10 == 0 {
                format!("UPDATE bench.written SET times=times+1 WHERE id={id}")
            } else {
                // `DO` computes, and answers without a result table.
                format!("DO (SELECT CRC32(body) FROM bench.t WHERE id={id})")
            }));
        }
        let mut stream = UnixStream::connect(&self.socket).context("the server's socket")?;
        // We don't need the greeting: an empty password has no salt.
        packet(&mut stream)?;
        let mut login = CAPABILITIES.to_le_bytes().to_vec();
        login.extend((16_u32 << 20).to_le_bytes());
        // Latin 1, and 23 unused bytes.
        login.push(8);
        login.extend([0; 23]);
        login.extend(b"root\0\0");
        stream.write_all(&framed(1, &login))?;
        accepted(&packet(&mut stream)?).context("logging in")?;
        OpenLoop::start(stream, every, requests, |answers| accepted(&packet(answers)?))
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Shuts the server down slowly, which leaves no work for the next start, so all copies start alike.
    pub(super) fn shut_down(mut self) -> anyhow::Result<()> {
        self.query("SET GLOBAL innodb_fast_shutdown=0; SHUTDOWN")?;
        self.server.child.end(READY_LIMIT);
        Ok(())
    }

    pub(super) fn query(&self, sql: &str) -> anyhow::Result<String> {
        query(&self.client, &self.socket, sql)
    }
}

impl Target for MariaDb {
    fn name(&self) -> &'static str {
        "mariadb"
    }

    fn pid(&self) -> i32 {
        self.server.pid()
    }

    fn check(&mut self) -> anyhow::Result<String> {
        self.query(CHECKS)
    }
}

fn query(client: &Path, socket: &Path, sql: &str) -> anyhow::Result<String> {
    let mut command = Command::new(client);
    command
        .args(["--no-defaults", "--user=root", "--batch", "--skip-column-names"])
        .arg(format!("--socket={}", socket.display()))
        .arg(format!("--execute={sql}"));
    output_of(&mut command)
}

fn request(sql: &str) -> Vec<u8> {
    framed(0, &[&[QUERY], sql.as_bytes()].concat())
}

/// Three bytes of length, the packet's number in its exchange, and the payload. Our payloads are short.
fn framed(number: u8, payload: &[u8]) -> Vec<u8> {
    let [low, high, ..] = payload.len().to_le_bytes();
    [&[low, high, 0, number], payload].concat()
}

/// Reads the payload of one packet.
fn packet(from: &mut impl Read) -> anyhow::Result<Vec<u8>> {
    let mut head = [0; 4];
    from.read_exact(&mut head).context("the server closed the connection")?;
    let [low, middle, high, _] = head;
    let mut payload = vec![0; usize::try_from(u32::from_le_bytes([low, middle, high, 0]))?];
    from.read_exact(&mut payload)?;
    Ok(payload)
}

/// Whether the server has accepted the request.
fn accepted(answer: &[u8]) -> anyhow::Result<()> {
    match answer.first() {
        Some(0) => Ok(()),
        // The error's number and its text.
        Some(0xff) => bail!("mariadb: {}", String::from_utf8_lossy(answer.get(3..).unwrap_or_default())),
        _ => bail!("mariadb gave another answer than expected"),
    }
}

fn copy_dir(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| target.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn packets_follow_the_protocol() {
        let bytes = request("DO 1");
        assert_eq!(bytes, b"\x05\0\0\0\x03DO 1");
        let mut answers: &[u8] = b"\x01\0\0\x01\0\x05\0\0\x01\xff\x28\x04no\x01\0\0\x02\xfe\x09\0\0\x01\0";
        accepted(&packet(&mut answers).unwrap()).unwrap();
        let error = accepted(&packet(&mut answers).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "mariadb: no");
        assert!(accepted(&packet(&mut answers).unwrap()).is_err());
        // A packet that's cut off.
        assert!(packet(&mut answers).is_err());
    }

    #[test]
    fn a_load_is_answered_and_changes_nothing_that_is_checked() {
        if need("mariadbd", PACKAGES).is_err() || !pagefold_testkit::is_root() {
            return pagefold_testkit::skip("needs root and MariaDB (scripts/setup installs it)");
        }
        let dir = tempfile::tempdir().unwrap();
        let data = MariaDbData::make(dir.path(), 500).unwrap();
        let mut server = data.start(dir.path(), 0).unwrap();
        let before = server.check().unwrap();
        let began = Instant::now();
        let load = server.load(Duration::from_millis(5)).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let measured = load.finish().unwrap();
        let count = measured.between(began, began + Duration::from_secs(60)).len();
        assert!((300..=410).contains(&count), "{count} answers in 2 s");
        assert_eq!(server.check().unwrap(), before);
        // One query in ten has written.
        let written: usize = server.query("SELECT SUM(times) FROM bench.written").unwrap().trim().parse().unwrap();
        assert!((count / 10..=count / 10 + 1).contains(&written), "{written} of {count}");
    }
}
