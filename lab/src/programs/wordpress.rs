//! WordPress sites, each in its own container: Apache with PHP in it, and MariaDB, on one image with a writable layer
//! each. We use no container engine: `unshare` makes the namespaces, and a script ([`CONTAINER`]) sets up their
//! contents.

mod http;

use super::{MariaDbData, Server, Target, need};
use crate::bench::daemon::children;
use anyhow::{Context, bail, ensure};
use nix::sched::{CloneFlags, setns};
use pagefold_procmem::process::Process;
use pagefold_workload::contents::printable;
use pagefold_workload::emulator::cache;
use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

const CONTAINER: &str = include_str!("wordpress/container.sh");
const APACHE_CONF: &str = include_str!("wordpress/apache.conf");
const PHP_INI: &str = include_str!("wordpress/php.ini");
const WP_CONFIG: &str = include_str!("wordpress/wp-config.php");
const INSTALL: &str = include_str!("wordpress/install.php");

/// Debian's program directories, in the containers too.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Directories of this machine that a container also sees; some may be links to others of them.
const SYSTEM: [&str; 6] = ["usr", "etc", "bin", "sbin", "lib", "lib64"];
const UPLOADS: &str = "srv/wordpress/wp-content/uploads";
/// As in apache.conf and wp-config.php.
const ADDRESS: (&str, u16) = ("127.0.0.1", 8080);
const HOST: &str = "localhost:8080";

/// Pictures on each page, and the size of each in bytes.
const PICTURES: u64 = 4;
const PICTURE_BYTES: usize = 60_000;

const READY_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const END_LIMIT: Duration = Duration::from_secs(20);

/// The image: an installed WordPress and its database.
#[derive(Debug)]
pub struct WordPress {
    image: PathBuf,
    php_module: PathBuf,
    busybox: PathBuf,
    pages: Arc<Pages>,
}

/// The pages of a site.
#[derive(Debug)]
struct Pages {
    pages: Vec<Page>,
    /// The pictures on each page: paths and contents.
    pictures: Vec<(String, Vec<u8>)>,
}

#[derive(Debug)]
struct Page {
    path: String,
    title: String,
    /// The first site's answer. All sites must answer the same at any time.
    answer: OnceLock<Vec<u8>>,
}

impl WordPress {
    /// Makes the image in `scratch`, with this many posts.
    pub fn make(scratch: &Path, posts: u64) -> anyhow::Result<Self> {
        let (php, busybox) = (need("php", "php-cli")?, need("busybox", "busybox-static")?);
        need("apache2", "apache2-bin")?;
        for (program, packages) in [("unshare", "util-linux"), ("setpriv", "util-linux"), ("mount", "mount")] {
            need(program, packages)?;
        }
        let php_module = module_of_apache()?;
        let unpacked = unpacked()?;

        let image = scratch.join("image");
        for dir in ["srv/conf", "dev", "proc", "tmp", "run"] {
            fs::create_dir_all(image.join(dir))?;
        }
        for name in SYSTEM {
            let (here, there) = (Path::new("/").join(name), image.join(name));
            match fs::read_link(&here) {
                Ok(target) => symlink(target, there)?,
                Err(_) if here.exists() => fs::create_dir(there)?,
                Err(_) => {}
            }
        }
        let site = image.join("srv/wordpress");
        done(Command::new("cp").arg("-a").arg(&unpacked).arg(&site))?;
        let put = |path: &str, content: &[u8]| {
            let file = image.join(path);
            fs::write(&file, content).with_context(|| file.display().to_string())
        };
        put("srv/conf/apache.conf", APACHE_CONF.as_bytes())?;
        put("srv/conf/php.ini", PHP_INI.as_bytes())?;
        put("srv/wordpress/wp-config.php", WP_CONFIG.as_bytes())?;
        fs::create_dir(image.join(UPLOADS))?;
        let mut pictures = Vec::new();
        for number in 1..=PICTURES {
            // Nobody decodes the pictures.
            let content = printable(number, 0, PICTURE_BYTES);
            put(&format!("{UPLOADS}/{number}.png"), &content)?;
            pictures.push((format!("/wp-content/uploads/{number}.png"), content));
        }

        let database = MariaDbData::empty(image.join("srv/mysql"))?;
        let server = database.serve(scratch)?;
        server.query("CREATE DATABASE wordpress")?;
        let script = scratch.join("install.php");
        fs::write(&script, INSTALL)?;
        let mut install = Command::new(php);
        install.env("PHP_INI_SCAN_DIR", "").arg("-c").arg(image.join("srv/conf/php.ini"));
        install.arg("-d").arg(format!("mysqli.default_socket={}", server.socket().display()));
        install.arg(script).arg(&site).args([posts, PICTURES].map(|number| number.to_string()));
        let numbers = done(&mut install)?;
        server.shut_down()?;

        let page = |path, title: &str| Page { path, title: title.to_owned(), answer: OnceLock::new() };
        let mut pages = vec![page("/".to_owned(), "Three sites")];
        for (post, number) in (1..).zip(numbers.split_whitespace()) {
            // The script prints nothing else, unless something is wrong.
            let number: u64 = number.parse().with_context(|| format!("installing WordPress: {numbers}"))?;
            pages.push(page(format!("/?p={number}"), &format!("Post {post}")));
        }
        ensure!(
            pages.len() as u64 == 1 + posts,
            "installing WordPress gave {} posts instead of {posts}",
            pages.len() - 1
        );

        // The servers in the containers aren't root.
        done(Command::new("chown").args(["-R", "www-data:www-data"]).arg(image.join("srv/mysql")))?;
        done(Command::new("chmod").args(["-R", "a+rX"]).arg(&image))?;
        for dir in ["run", "tmp"] {
            fs::set_permissions(image.join(dir), fs::Permissions::from_mode(0o1777))?;
        }
        let pages = Arc::new(Pages { pages, pictures });
        Ok(Self { image, php_module, busybox, pages })
    }

    /// Starts a container with this many Apache workers, and waits until it has answered.
    pub fn start(&self, scratch: &Path, number: usize, workers: usize) -> anyhow::Result<Site> {
        let name = format!("site-{number}");
        let dir = scratch.join(&name);
        // An earlier container may have had the same number.
        fs::create_dir_all(&dir)?;
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child", "/bin/sh", "-c", CONTAINER])
            .args([
                "container".as_ref(),
                self.image.as_os_str(),
                dir.as_os_str(),
                name.as_ref(),
                self.busybox.as_os_str(),
            ])
            .env_clear()
            .env("PATH", PATH)
            .env("PHP_MODULE", &self.php_module)
            .env("WORKERS", workers.to_string());
        let mut server = Server::start_with(&mut command, Stdio::piped(), &scratch.join(format!("{name}.log")))?;
        // `unshare`, the first process, MariaDB, Apache's master and its workers.
        let outer = Process::open(server.pid())?;
        let count = 3 + workers;
        let mut why = String::new();
        let ready = server.wait_ready(READY_LIMIT, || {
            let processes = descendants(&outer);
            if processes.len() != count {
                why = format!("{} processes instead of {count}", processes.len());
                return None;
            }
            let entered = Visitor::of(&processes[0], &self.pages).and_then(|visitor| {
                visitor.visit(0)?;
                Ok(visitor)
            });
            entered.map(|visitor| (processes, visitor)).map_err(|error| why = format!("{error:#}")).ok()
        });
        let (processes, visitor) = ready.with_context(|| format!("{name}: {why}"))?;
        Ok(Site { server, processes, visitor })
    }
}

/// PHP's module for Apache, which has the version in its name.
fn module_of_apache() -> anyhow::Result<PathBuf> {
    let below = |dir: &str| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let has_module = below("/usr/lib/php").any(|version| version.join("mysqli.so").exists());
    ensure!(has_module, "PHP has no mysqli: this experiment needs the packages libapache2-mod-php and php-mysql");
    let is_php = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libphp") && name.ends_with(".so")
    };
    let mut found: Vec<PathBuf> = below("/usr/lib/apache2/modules").filter(is_php).collect();
    found.sort();
    found.pop().context("Apache has no PHP: this experiment needs the package libapache2-mod-php")
}

/// The directory where `lab/scripts/wordpress` has put WordPress.
fn unpacked() -> anyhow::Result<PathBuf> {
    let dir = cache()?.join("wordpress");
    ensure!(dir.exists(), "{} does not exist: run lab/scripts/wordpress", dir.display());
    Ok(dir)
}

/// Runs a command to its end, and returns its output.
fn done(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{name}: {} {}", text.trim(), String::from_utf8_lossy(&output.stderr).trim());
    Ok(text)
}

/// All processes below this one, parents first.
fn descendants(of: &Process) -> Vec<Process> {
    children(of)
        .into_iter()
        .flat_map(|child| {
            let below = descendants(&child);
            [child].into_iter().chain(below)
        })
        .collect()
}

/// A client that loads the pages of a site.
#[derive(Clone, Debug)]
pub struct Visitor {
    /// The site's network namespace, which lives as long as this is open.
    network: Arc<File>,
    pages: Arc<Pages>,
}

impl Visitor {
    /// A client of the site that this process belongs to.
    fn of(process: &Process, pages: &Arc<Pages>) -> anyhow::Result<Self> {
        let network = process.open_file("ns/net")?;
        Ok(Self { network: Arc::new(network), pages: Arc::clone(pages) })
    }

    /// Loads the page that's `number` in turn, and its pictures. Every byte must be right.
    pub fn visit(&self, number: usize) -> anyhow::Result<()> {
        let page = &self.pages.pages[number % self.pages.pages.len()];
        let answer = self.get(&page.path)?;
        let text = String::from_utf8_lossy(&answer);
        ensure!(
            text.contains(&page.title) && text.trim_end().ends_with("</html>"),
            "{} has not the page {}: {text:.300}",
            page.path,
            page.title
        );
        ensure!(
            answer == *page.answer.get_or_init(|| answer.clone()),
            "{} has another content than at first",
            page.path
        );
        for (path, content) in &self.pages.pictures {
            ensure!(self.get(path)? == *content, "{path} has another content");
        }
        Ok(())
    }

    fn get(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        let stream = self.connect().with_context(|| path.to_owned())?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        http::get(stream, HOST, path).with_context(|| path.to_owned())
    }

    /// A connection belongs to the network of the thread that makes it, so we make it in a separate thread.
    fn connect(&self) -> anyhow::Result<TcpStream> {
        let connected = thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(&*self.network, CloneFlags::CLONE_NEWNET).context("entering a network namespace")?;
                TcpStream::connect(ADDRESS).context("connecting")
            });
            inside.join()
        });
        connected.ok().context("the thread that connects has panicked")?
    }
}

/// A running container. Dropping it ends the container.
#[derive(Debug)]
pub struct Site {
    /// `unshare`. The container ends when this process's standard input does.
    server: Server,
    processes: Vec<Process>,
    visitor: Visitor,
}

impl Site {
    pub fn visitor(&self) -> Visitor {
        self.visitor.clone()
    }

    /// The pids of the container's processes.
    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().map(Process::pid)
    }

    /// The container's processes as targets. The first one checks the site.
    pub fn targets(self) -> Vec<Box<dyn Target>> {
        let site = Rc::new(self);
        let member = |at| Box::new(Member { site: Rc::clone(&site), at }) as Box<dyn Target>;
        (0..site.processes.len()).map(member).collect()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.server.child.0.stdin.take());
        self.server.child.end(END_LIMIT);
        // If we had to kill `unshare`, the kernel kills the others too, but nobody has waited for them yet.
        let end = Instant::now() + END_LIMIT;
        while self.processes.iter().any(Process::is_alive) && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A process in a container.
struct Member {
    site: Rc<Site>,
    at: usize,
}

impl Target for Member {
    fn name(&self) -> &'static str {
        "wordpress"
    }

    fn pid(&self) -> i32 {
        self.site.processes[self.at].pid()
    }

    /// The first process loads every page; the others only have to be running.
    fn check(&mut self) -> anyhow::Result<String> {
        if !self.site.processes[self.at].is_alive() {
            bail!("process {} of a container has ended:\n{}", self.pid(), self.site.server.log_end());
        }
        if self.at == 0 {
            let visitor = &self.site.visitor;
            (0..visitor.pages.pages.len()).try_for_each(|number| visitor.visit(number))?;
        }
        Ok("as at first".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_testkit::{is_root, skip};

    fn image(scratch: &Path) -> Option<WordPress> {
        let found = need("apache2", "apache2-bin").and_then(|_| module_of_apache()).and_then(|_| unpacked());
        match found {
            Ok(_) if is_root() => Some(WordPress::make(scratch, 2).unwrap()),
            Ok(_) => {
                skip("needs root");
                None
            }
            Err(error) => {
                skip(format!("{error:#} (scripts/setup does it)"));
                None
            }
        }
    }

    #[test]
    fn sites_are_apart_and_nothing_of_them_remains() {
        let scratch = tempfile::tempdir().unwrap();
        let Some(image) = image(scratch.path()) else { return };
        let names = |site: &Site| fs::read_link(format!("/proc/{}/ns/net", site.processes[0].pid())).unwrap();
        let sites = [1, 2].map(|number| image.start(scratch.path(), number, 2).unwrap());
        assert_ne!(names(&sites[0]), names(&sites[1]));
        // Each container writes to its own layer.
        let file = |site: &Site| PathBuf::from(format!("/proc/{}/root/srv/written", site.processes[0].pid()));
        fs::write(file(&sites[0]), "1").unwrap();
        assert!(file(&sites[0]).exists() && !file(&sites[1]).exists() && !image.image.join("srv/written").exists());
        for site in &sites {
            (0..3).for_each(|number| site.visitor().visit(number).unwrap());
            assert_eq!(site.processes.len(), 5);
        }
        // The visitor notices a page that differs.
        let visitor = sites[0].visitor();
        fs::write(PathBuf::from(format!("/proc/{}/root/{UPLOADS}/2.png", sites[0].processes[0].pid())), "x").unwrap();
        assert!(format!("{:#}", visitor.visit(0).unwrap_err()).contains("2.png"));
        let pids: Vec<i32> = sites.iter().flat_map(Site::pids).collect();
        let all: Vec<Process> = pids.into_iter().map(|pid| Process::open(pid).unwrap()).collect();
        // We ask one container to end, and kill the outer process of the other.
        let [first, mut second] = sites;
        let began = Instant::now();
        drop(first);
        assert!(began.elapsed() < END_LIMIT, "it had to be killed");
        second.server.child.0.kill().unwrap();
        drop(second);
        assert!(all.iter().all(|process| !process.is_alive()));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&*scratch.path().to_string_lossy()), "{mounts}");
        assert!(visitor.visit(1).is_err());
    }
}
