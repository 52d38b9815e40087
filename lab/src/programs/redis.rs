//! Redis servers with the same data: each loads a copy of one dump.

use super::{Server, Target, find, need};
use crate::bench::load::OpenLoop;
use crate::contents::printable;
use anyhow::{Context, bail, ensure};
use pagefold_engine::permutation::Permutation;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(30);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const VALUE_BYTES: usize = 1000;
const SEED: u64 = 0x0072_6564_6973;
/// Commands to send before we read the answers, which must fit in the socket's buffer.
const PIPELINE: usize = 500;
const LOAD_KEYS: u64 = 10_000;

#[derive(Debug)]
pub struct RedisData {
    program: PathBuf,
    dump: PathBuf,
    keys: u64,
}

impl RedisData {
    /// Creates a dump of `keys` keys with values of 1000 bytes in `scratch`.
    pub fn make(scratch: &Path, keys: u64) -> anyhow::Result<Self> {
        let program = scratch.join("redis-server");
        let installed = Self::installed()?;
        symlink(&installed, &program).with_context(|| program.display().to_string())?;
        let dir = scratch.join("redis-data");
        let data = Self { program, dump: dir.join("dump.rdb"), keys };
        let mut redis = data.start_in(&dir)?;
        redis.set(&(0..keys).collect::<Vec<_>>(), SEED)?;
        redis.ask(&[b"SAVE"])?;
        Ok(data)
    }

    /// The server's executable. Debian ships it in redis-tools as redis-check-rdb; the name we start it by selects the
    /// mode.
    pub fn installed() -> anyhow::Result<PathBuf> {
        find("redis-server").map_or_else(|| need("redis-check-rdb", "redis-tools"), Ok)
    }

    /// Starts a server that loads a copy of the dump.
    pub fn start(&self, scratch: &Path, instance: usize) -> anyhow::Result<Redis> {
        let dir = scratch.join(format!("redis-{instance}"));
        fs::create_dir_all(&dir)?;
        fs::copy(&self.dump, dir.join("dump.rdb"))?;
        let mut redis = self.start_in(&dir)?;
        let keys = redis.ask(&[b"DBSIZE"])?;
        ensure!(keys == self.keys.to_string().as_bytes(), "redis loaded {} keys", String::from_utf8_lossy(&keys));
        Ok(redis)
    }

    fn start_in(&self, dir: &Path) -> anyhow::Result<Redis> {
        fs::create_dir_all(dir)?;
        let socket = dir.join("socket");
        let mut run = Command::new(&self.program);
        run.args(["--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--enable-debug-command", "yes", "--daemonize", "no"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(dir);
        let mut server = Server::start(&mut run, &dir.join("log"))?;
        let client = server.wait_ready(READY_LIMIT, || {
            let stream = UnixStream::connect(&socket).ok()?;
            stream.set_read_timeout(Some(ANSWER_LIMIT)).ok()?;
            let mut client = BufReader::new(stream);
            // While loading, the server answers with an error.
            let is_ready = matches!(ask(&mut client, &[b"PING"]), Ok(answer) if answer == b"PONG");
            if is_ready { Some(client) } else { None }
        })?;
        Ok(Redis { server, client, socket })
    }
}

#[derive(Debug)]
pub struct Redis {
    server: Server,
    client: BufReader<UnixStream>,
    socket: PathBuf,
}

impl Redis {
    fn ask(&mut self, words: &[&[u8]]) -> anyhow::Result<Vec<u8>> {
        ask(&mut self.client, words)
    }

    /// Gives every twentieth of `keys` keys a new value: different keys and values in each instance, so that the copies
    /// diverge.
    pub fn change(&mut self, keys: u64, instance: u64) -> anyhow::Result<()> {
        // The first three keys must keep the values that `check` expects.
        let numbers: Vec<u64> = (3 + instance..keys).step_by(20).collect();
        self.set(&numbers, SEED + 1 + instance)
    }

    /// Starts a load on its own connection: a request each `every`. One in ten writes, but every key keeps its value,
    /// so the digest of all data stays the same.
    pub fn load(&self, every: Duration, keys: u64) -> anyhow::Result<OpenLoop> {
        let order = Permutation::new(keys, SEED);
        let mut requests = Vec::new();
        for number in 0..keys.min(LOAD_KEYS) {
            let at = order.at(number);
            let mut request = Vec::new();
            if number % 10 == 0 {
                set(&mut request, SEED, at);
            } else {
                command(&mut request, &[b"GET", format!("key:{at}").as_bytes()]);
            }
            requests.push(request);
        }
        let stream = UnixStream::connect(&self.socket)?;
        OpenLoop::start(stream, every, requests, |answers| reply(answers).map(drop))
    }

    fn set(&mut self, numbers: &[u64], seed: u64) -> anyhow::Result<()> {
        for numbers in numbers.chunks(PIPELINE) {
            let mut commands = Vec::new();
            for &number in numbers {
                set(&mut commands, seed, number);
            }
            self.client.get_mut().write_all(&commands)?;
            for _ in numbers {
                let answer = reply(&mut self.client)?;
                ensure!(answer == b"OK", "redis answered {} to SET", String::from_utf8_lossy(&answer));
            }
        }
        Ok(())
    }
}

impl Target for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn pid(&self) -> i32 {
        self.server.pid()
    }

    /// Checks some values and returns the server's digest of all keys and values.
    fn check(&mut self) -> anyhow::Result<String> {
        let digest = self.ask(&[b"DEBUG", b"DIGEST"])?;
        for number in [0, 1, 2] {
            let value = self.ask(&[b"GET", format!("key:{number}").as_bytes()])?;
            ensure!(value == printable(SEED, number, VALUE_BYTES), "redis: the value of key:{number} is wrong");
        }
        Ok(String::from_utf8(digest)?)
    }
}

fn ask(client: &mut BufReader<UnixStream>, words: &[&[u8]]) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    command(&mut bytes, words);
    client.get_mut().write_all(&bytes)?;
    reply(client)
}

/// Appends a command that gives a key the value of a seed.
fn set(to: &mut Vec<u8>, seed: u64, number: u64) {
    command(to, &[b"SET", format!("key:{number}").as_bytes(), &printable(seed, number, VALUE_BYTES)]);
}

/// Appends a command in the Redis protocol: an array of byte strings.
fn command(to: &mut Vec<u8>, words: &[&[u8]]) {
    to.extend(format!("*{}\r\n", words.len()).into_bytes());
    for word in words {
        to.extend(format!("${}\r\n", word.len()).into_bytes());
        to.extend_from_slice(word);
        to.extend(b"\r\n");
    }
}

/// Reads a reply that isn't an array.
fn reply(from: &mut impl BufRead) -> anyhow::Result<Vec<u8>> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let line = line.strip_suffix("\r\n").context("redis closed the connection")?;
    match line.split_at_checked(1) {
        Some(("+" | ":", answer)) => Ok(answer.as_bytes().to_vec()),
        Some(("$", length)) => {
            let length: usize = length.parse().context("the key does not exist in redis")?;
            let mut value = vec![0; length + 2];
            from.read_exact(&mut value)?;
            value.truncate(length);
            Ok(value)
        }
        Some(("-", error)) => bail!("redis: {error}"),
        _ => bail!("redis answered {line:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_replies_follow_the_protocol() {
        let mut bytes = Vec::new();
        command(&mut bytes, &[b"GET", b"a\r\nb"]);
        assert_eq!(bytes, b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n");
        let mut replies: &[u8] = b"+OK\r\n:12\r\n$4\r\na\r\nb\r\n$0\r\n\r\n$-1\r\n-ERR no\r\n*1\r\n+OK\r";
        for expected in [&b"OK"[..], b"12", b"a\r\nb", b""] {
            assert_eq!(reply(&mut replies).unwrap(), expected);
        }
        for _ in 0..4 {
            assert!(reply(&mut replies).is_err());
        }
    }
}
