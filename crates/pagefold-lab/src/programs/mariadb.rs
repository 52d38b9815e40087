//! MariaDB servers on copies of one data directory.

use super::{Server, Target, need};
use anyhow::{Context, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(60);
const PACKAGES: &str = "mariadb-server-core and mariadb-client-core";

/// Checks: whole-table scans, which load the table into the buffer pool, and one that sorts.
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
        let install = need("mariadb-install-db", PACKAGES)?;
        let data = Self {
            server: need("mariadbd", PACKAGES)?,
            client: need("mariadb", PACKAGES)?,
            dir: scratch.join("mariadb-data"),
        };
        fs::create_dir_all(&data.dir)?;
        let output = Command::new(install)
            .args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"])
            .arg("--innodb-log-file-size=16M")
            .arg(format!("--datadir={}", data.dir.display()))
            .stdin(Stdio::null())
            .output()
            .context("mariadb-install-db")?;
        ensure!(output.status.success(), "mariadb-install-db: {}", String::from_utf8_lossy(&output.stderr));
        let mut mariadb = data.start_in(scratch, &data.dir)?;
        let body = (0..8).map(|part| format!("SHA2(seq+{part},512)")).collect::<Vec<_>>().join(",");
        mariadb.query(&format!(
            "CREATE DATABASE bench; USE bench; \
             CREATE TABLE t (id INT PRIMARY KEY, tag INT, body VARCHAR(1024) CHARACTER SET latin1) ENGINE=InnoDB; \
             INSERT INTO t SELECT seq, seq*7919%10007, CONCAT({body}) FROM seq_1_to_{rows}; \
             SET GLOBAL innodb_fast_shutdown=0; SHUTDOWN"
        ))?;
        // A slow shutdown leaves no work for the next start, so all copies start alike.
        mariadb.server.child.end(READY_LIMIT);
        Ok(data)
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
            // Only queries load pages, not the list saved by the last server.
            .args(["--innodb-buffer-pool-load-at-startup=0", "--innodb-buffer-pool-dump-at-shutdown=0"])
            .arg(format!("--datadir={}", dir.display()))
            .arg(format!("--pid-file={}", scratch.join(format!("{name}.pid")).display()))
            .arg(format!("--socket={}", socket.display()));
        let mut server = Server::start(&mut run, &scratch.join(format!("{name}.log")))?;
        let client = &self.client;
        server.wait_ready(READY_LIMIT, || query(client, &socket, "SELECT 1").ok())?;
        Ok(MariaDb { server, client: client.clone(), socket })
    }
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

    fn query(&self, sql: &str) -> anyhow::Result<String> {
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
    let output = Command::new(client)
        .args(["--no-defaults", "--user=root", "--batch", "--skip-column-names"])
        .arg(format!("--socket={}", socket.display()))
        .arg(format!("--execute={sql}"))
        .stdin(Stdio::null())
        .output()
        .context("starting the mariadb client")?;
    ensure!(output.status.success(), "mariadb: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
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
