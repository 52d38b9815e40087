//! Servers that start workers before there's work: gunicorn, puma, node's cluster and php-fpm. Each worker holds the
//! bytes of the same file, objects made from them, and modules of its language, and answers requests with a checksum of
//! the bytes.

mod fastcgi;

use super::{HeldFile, Server, Target, entries, need, wait_for_ends};
use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pagefold_procmem::process::Process;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

const READY_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const END_LIMIT: Duration = Duration::from_secs(10);
/// Requests in flight at the same time, so that idle workers get some, too.
const AT_ONCE: usize = 8;

const GUNICORN_APP: &str = include_str!("prefork/gunicorn.py");
const PUMA_APP: &str = include_str!("prefork/puma.rb");
const NODE_APP: &str = include_str!("prefork/node.js");
const PHP_APP: &str = include_str!("prefork/php-fpm.php");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefork {
    /// Each worker loads the application.
    Gunicorn,
    /// The master loads the application, and the workers share its pages by fork.
    GunicornPreload,
    /// The master loads the application.
    Puma,
    /// The workers are separate programs, started anew.
    NodeCluster,
    /// The master loads PHP. The application runs anew for each request, as user `nobody`.
    PhpFpm,
}

impl Prefork {
    pub const ALL: [Self; 5] = [Self::Gunicorn, Self::GunicornPreload, Self::Puma, Self::NodeCluster, Self::PhpFpm];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Gunicorn => "gunicorn",
            Self::GunicornPreload => "gunicorn --preload",
            Self::Puma => "puma",
            Self::NodeCluster => "node cluster",
            Self::PhpFpm => "php-fpm",
        }
    }

    /// Starts a master with this many workers in its own directory. The first of the targets is the master.
    pub fn start(self, scratch: &Path, held: &HeldFile, workers: usize) -> anyhow::Result<Vec<Box<dyn Target>>> {
        let dir = scratch.join(self.name().replace(' ', ""));
        fs::create_dir_all(&dir)?;
        let socket = dir.join("socket");
        // An earlier server may have left one.
        let _ = fs::remove_file(&socket);
        let mut command = self.command(&dir, &socket, held, workers)?;
        command
            .env("HELD_FILE", held.path())
            .env("SOCKET", &socket)
            .env("WORKERS", workers.to_string())
            .current_dir(&dir);
        let server = Server::start(&mut command, &dir.join("log"))?;
        let script = if self == Self::PhpFpm { Some(dir.join("app.php")) } else { None };
        let mut started = PreforkServer { server, workers: Vec::new(), socket, script };
        let mut pids = started.wait_ready(workers).with_context(|| self.name())?;
        for &pid in &pids {
            started.workers.push(Process::open(pid)?);
        }
        let master = started.server.pid();
        let server = Rc::new(RefCell::new(started));
        pids.insert(0, master);
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for pid in pids {
            let server = Rc::clone(&server);
            targets.push(Box::new(Member { name: self.name(), pid, is_master: pid == master, server }));
        }
        Ok(targets)
    }

    fn command(self, dir: &Path, socket: &Path, held: &HeldFile, workers: usize) -> anyhow::Result<Command> {
        let workers = workers.to_string();
        Ok(match self {
            Self::Gunicorn | Self::GunicornPreload => {
                put(dir, "app.py", GUNICORN_APP)?;
                let mut command = Command::new(need("/usr/bin/gunicorn", "gunicorn")?);
                command.args(["--workers", &workers, "--bind", &format!("unix:{}", socket.display())]);
                if self == Self::GunicornPreload {
                    command.arg("--preload");
                }
                command.arg("app:application");
                command
            }
            Self::Puma => {
                let mut command = Command::new(need("/usr/bin/puma", "puma")?);
                command.arg("--config").arg(put(dir, "config.rb", PUMA_APP)?);
                command
            }
            Self::NodeCluster => {
                let mut command = Command::new(need("/usr/bin/node", "nodejs")?);
                command.arg(put(dir, "app.js", NODE_APP)?);
                command
            }
            Self::PhpFpm => {
                // The workers aren't root, and the directory above is closed to others.
                fs::set_permissions(dir.parent().context("a directory above")?, Permissions::from_mode(0o755))?;
                put(dir, "app.php", PHP_APP)?;
                let config = format!(
                    "[global]\nerror_log = {dir}/errors\n[app]\nuser = nobody\ngroup = nogroup\nlisten = {socket}\n\
                     pm = static\npm.max_children = {workers}\nenv[HELD_FILE] = {file}\n\
                     php_admin_value[memory_limit] = -1\n",
                    dir = dir.display(),
                    socket = socket.display(),
                    file = held.path().display(),
                );
                let mut command = Command::new(php_fpm()?);
                command.args(["--nodaemonize", "--fpm-config"]).arg(put(dir, "fpm.conf", &config)?);
                command
            }
        })
    }
}

fn put(dir: &Path, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let file = dir.join(name);
    fs::write(&file, text).with_context(|| file.display().to_string())?;
    Ok(file)
}

/// php-fpm, whose executable has the version in its name.
pub fn php_fpm() -> anyhow::Result<PathBuf> {
    for program in entries("/usr/sbin") {
        if program.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"php-fpm")) {
            return Ok(program);
        }
    }
    need("php-fpm", "php-fpm")
}

/// A running master. Its workers are in its process group, and end with it.
#[derive(Debug)]
struct PreforkServer {
    server: Server,
    workers: Vec<Process>,
    socket: PathBuf,
    /// The script that we ask a FastCGI server for; the others speak HTTP.
    script: Option<PathBuf>,
}

impl PreforkServer {
    /// Waits until all workers have answered, and returns their pids.
    fn wait_ready(&mut self, workers: usize) -> anyhow::Result<Vec<i32>> {
        let mut pids = BTreeMap::new();
        self.server.wait_ready(READY_LIMIT, || {
            pids.extend(ask_all(&self.socket, self.script.as_deref()).ok()?);
            if pids.len() >= workers { Some(()) } else { None }
        })?;
        ensure!(pids.len() == workers, "{} workers instead of {workers}", pids.len());
        Ok(pids.into_keys().collect())
    }

    /// Sends requests until this worker answers.
    fn answer_of(&self, pid: i32) -> anyhow::Result<String> {
        let end = Instant::now() + ANSWER_LIMIT;
        while Instant::now() < end {
            if let Some(answer) = ask_all(&self.socket, self.script.as_deref())?.remove(&pid) {
                return Ok(answer);
            }
        }
        bail!("worker {pid} has not answered for {ANSWER_LIMIT:?}")
    }
}

impl Drop for PreforkServer {
    fn drop(&mut self) {
        // The master leads its own group, and nobody else can get the group's number before we've waited for the
        // master.
        if matches!(self.server.child.0.try_wait(), Ok(None)) {
            let _ = killpg(Pid::from_raw(self.server.pid()), Signal::SIGKILL);
        }
        // Workers may live on after their master.
        for worker in self.workers.iter().filter(|worker| worker.is_alive()) {
            let _ = kill(Pid::from_raw(worker.pid()), Signal::SIGKILL);
        }
        wait_for_ends(&self.workers, END_LIMIT);
    }
}

/// Sends some requests at once, and returns the answers by the worker's pid.
fn ask_all(socket: &Path, script: Option<&Path>) -> anyhow::Result<BTreeMap<i32, String>> {
    let mut streams = Vec::new();
    for _ in 0..AT_ONCE {
        let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        match script {
            Some(script) => stream.write_all(&fastcgi::request(script))?,
            None => stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?,
        }
        streams.push(stream);
    }
    let mut answers = BTreeMap::new();
    for mut stream in streams {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        let text = if script.is_some() { fastcgi::output(&bytes)? } else { bytes };
        let text = String::from_utf8(text).context("an answer that is not UTF-8")?;
        let (_, body) = text.split_once("\r\n\r\n").with_context(|| format!("no end of the headers: {text:?}"))?;
        let (pid, answer) = body.trim_end().split_once(' ').with_context(|| format!("an answer {body:?}"))?;
        answers.insert(pid.parse().with_context(|| format!("an answer {body:?}"))?, answer.to_owned());
    }
    Ok(answers)
}

/// The master or a worker.
struct Member {
    name: &'static str,
    pid: i32,
    is_master: bool,
    server: Rc<RefCell<PreforkServer>>,
}

impl Target for Member {
    fn name(&self) -> &str {
        self.name
    }

    fn pid(&self) -> i32 {
        self.pid
    }

    /// A worker answers a request; the master must be running.
    fn check(&mut self) -> anyhow::Result<String> {
        let mut server = self.server.borrow_mut();
        if !self.is_master {
            return server.answer_of(self.pid);
        }
        ensure!(server.server.child.0.try_wait()?.is_none(), "{} has ended:\n{}", self.name, server.server.log_end());
        Ok("running".to_owned())
    }
}
