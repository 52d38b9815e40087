//! memcached servers with the same entries.

use super::{Server, Target, need};
use crate::contents::printable;
use anyhow::{Context, ensure};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(30);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Most of a value fills its own pages, with no pointers beside it.
const VALUE_BYTES: usize = 8000;
const SEED: u64 = 0x006d_656d_6361;
/// Commands to send before we read the answers, which must fit in the socket's buffer.
const PIPELINE: usize = 16;

/// The server's executable, and how many entries of 8000 bytes each server has.
#[derive(Debug)]
pub struct MemcachedData {
    program: PathBuf,
    entries: u64,
}

impl MemcachedData {
    pub fn new(entries: u64) -> anyhow::Result<Self> {
        Ok(Self { program: need("memcached", "memcached")?, entries })
    }

    /// Starts a server and fills it. It drops root's rights, as the package's service does.
    pub fn start(&self, scratch: &Path, instance: usize) -> anyhow::Result<Memcached> {
        // The port was free a moment ago. If another program takes it meanwhile, the server ends, and its log says why.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let mut run = Command::new(&self.program);
        run.args(["-u", "nobody", "-l", "127.0.0.1", "-U", "0", "-m", "1024", "-p", &port.to_string()]);
        let log = scratch.join(format!("memcached-{instance}.log"));
        let mut server = Server::start(&mut run, &log)?;
        let client = server.wait_ready(READY_LIMIT, || {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
            stream.set_read_timeout(Some(ANSWER_LIMIT)).ok()?;
            Some(BufReader::new(stream))
        })?;
        let mut memcached = Memcached { server, client, entries: self.entries };
        memcached.fill().with_context(|| format!("memcached: {}", fs::read_to_string(&log).unwrap_or_default()))?;
        Ok(memcached)
    }
}

#[derive(Debug)]
pub struct Memcached {
    server: Server,
    client: BufReader<TcpStream>,
    entries: u64,
}

impl Memcached {
    fn fill(&mut self) -> anyhow::Result<()> {
        for numbers in self.batches() {
            let mut commands = Vec::new();
            for number in numbers.clone() {
                commands.extend(format!("set key:{number} 0 0 {VALUE_BYTES}\r\n").into_bytes());
                commands.extend(printable(SEED, number, VALUE_BYTES));
                commands.extend(b"\r\n");
            }
            self.client.get_mut().write_all(&commands)?;
            for _ in numbers {
                self.expect("STORED")?;
            }
        }
        Ok(())
    }

    /// The numbers of the entries, in batches.
    fn batches(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let entries = self.entries;
        (0..entries).step_by(PIPELINE).map(move |first| first..entries.min(first + PIPELINE as u64))
    }

    fn expect(&mut self, line: &str) -> anyhow::Result<()> {
        let mut answer = String::new();
        self.client.read_line(&mut answer)?;
        ensure!(answer.trim_end() == line, "memcached answers {:?}, not {line:?}", answer.trim_end());
        Ok(())
    }
}

impl Target for Memcached {
    fn name(&self) -> &'static str {
        "memcached"
    }

    fn pid(&self) -> i32 {
        self.server.pid()
    }

    /// Compares every entry with the value that we stored.
    fn check(&mut self) -> anyhow::Result<String> {
        for numbers in self.batches() {
            for number in numbers.clone() {
                write!(self.client.get_mut(), "get key:{number}\r\n")?;
            }
            for number in numbers {
                self.expect(&format!("VALUE key:{number} 0 {VALUE_BYTES}"))?;
                let mut value = [0; VALUE_BYTES + 2];
                self.client.read_exact(&mut value)?;
                ensure!(value[..VALUE_BYTES] == printable(SEED, number, VALUE_BYTES), "key:{number} is damaged");
                self.expect("END")?;
            }
        }
        Ok(format!("{} entries, all as stored", self.entries))
    }
}
