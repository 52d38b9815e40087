//! WordPress sites, each in its own container: Apache with PHP in it, and MariaDB, on one image with a writable layer
//! each. We use no container engine: `unshare` makes the namespaces, and a script ([`CONTAINER`]) sets up their
//! contents.

mod http;

use super::{MariaDbData, Server, Target, entries, need, output_of, wait_for_ends};
use crate::bench::daemon::children;
use crate::contents::printable;
use anyhow::{Context, bail, ensure};
use nix::sched::{CloneFlags, setns};
use pagefold_procmem::process::Process;
use pagefold_programs::emulator::cache;
use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

const CONTAINER: &str = include_str!("wordpress/container.sh");
const APACHE_CONF: &str = include_str!("wordpress/apache.conf");
const PHP_INI: &str = include_str!("wordpress/php.ini");
const WP_CONFIG: &str = include_str!("wordpress/wp-config.php");
const INSTALL: &str = include_str!("wordpress/install.php");

/// Debian's program directories, in the containers too.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Directories of this machine that a container also sees; some may be links to others of them.
const SYSTEM: [&str; 6] = ["usr", "etc", "bin", "sbin", "lib", "lib64"];
/// Paths in the image: the site, and PHP's configuration.
const SITE: &str = "srv/wordpress";
const PHP_INI_PATH: &str = "srv/conf/php.ini";
/// A path in the site.
const UPLOADS: &str = "wp-content/uploads";
/// The same address as in apache.conf and wp-config.php.
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

impl Page {
    fn new(path: String, title: String) -> Self {
        Self { path, title, answer: OnceLock::new() }
    }
}

impl WordPress {
    /// Makes the image in `scratch`, with this many posts.
    pub fn make(scratch: &Path, posts: u64) -> anyhow::Result<Self> {
        let php = need("php", "php-cli")?;
        let busybox = need("busybox", "busybox-static")?;
        need("apache2", "apache2-bin")?;
        for (program, packages) in [("unshare", "util-linux"), ("setpriv", "util-linux"), ("mount", "mount")] {
            need(program, packages)?;
        }
        let php_module = module_of_apache()?;
        let image = scratch.join("image");
        make_directories(&image)?;
        output_of(Command::new("cp").arg("-a").arg(unpacked()?).arg(image.join(SITE)))?;
        let pictures = put_files(&image)?;
        let pages = install(&image, scratch, &php, posts)?;
        // The servers in the containers aren't root.
        output_of(Command::new("chown").args(["-R", "www-data:www-data"]).arg(image.join("srv/mysql")))?;
        output_of(Command::new("chmod").args(["-R", "a+rX"]).arg(&image))?;
        for dir in ["run", "tmp"] {
            fs::set_permissions(image.join(dir), fs::Permissions::from_mode(0o1777))?;
        }
        Ok(Self { image, php_module, busybox, pages: Arc::new(Pages { pages, pictures }) })
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
            match Visitor::of(&processes[0], &self.pages) {
                Ok(visitor) => Some((processes, visitor)),
                Err(error) => {
                    why = format!("{error:#}");
                    None
                }
            }
        });
        let (processes, visitor) = ready.with_context(|| format!("{name}: {why}"))?;
        Ok(Site { server, processes, visitor })
    }
}

fn make_directories(image: &Path) -> anyhow::Result<()> {
    for dir in ["srv/conf", "dev", "proc", "tmp", "run"] {
        fs::create_dir_all(image.join(dir))?;
    }
    for name in SYSTEM {
        let here = Path::new("/").join(name);
        match fs::read_link(&here) {
            Ok(target) => symlink(target, image.join(name))?,
            Err(_) if here.exists() => fs::create_dir(image.join(name))?,
            Err(_) => {}
        }
    }
    Ok(())
}

/// Puts our files into the image. Returns the pictures: paths and contents.
fn put_files(image: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    fs::write(image.join("srv/conf/apache.conf"), APACHE_CONF)?;
    fs::write(image.join(PHP_INI_PATH), PHP_INI)?;
    fs::write(image.join(SITE).join("wp-config.php"), WP_CONFIG)?;
    fs::create_dir(image.join(SITE).join(UPLOADS))?;
    let mut pictures = Vec::new();
    for number in 1..=PICTURES {
        // Nobody decodes the pictures.
        let content = printable(number, 0, PICTURE_BYTES);
        let path = format!("{UPLOADS}/{number}.png");
        fs::write(image.join(SITE).join(&path), &content)?;
        pictures.push((format!("/{path}"), content));
    }
    Ok(pictures)
}

/// Installs WordPress with this many posts. Returns the pages of the site.
fn install(image: &Path, scratch: &Path, php: &Path, posts: u64) -> anyhow::Result<Vec<Page>> {
    let server = MariaDbData::empty(image.join("srv/mysql"))?.serve(scratch)?;
    server.query("CREATE DATABASE wordpress")?;
    let script = scratch.join("install.php");
    fs::write(&script, INSTALL)?;
    let mut install = Command::new(php);
    install.env("PHP_INI_SCAN_DIR", "").arg("-c").arg(image.join(PHP_INI_PATH));
    install.arg("-d").arg(format!("mysqli.default_socket={}", server.socket().display()));
    install.arg(script).arg(image.join(SITE)).args([posts, PICTURES].map(|number| number.to_string()));
    let numbers = output_of(&mut install)?;
    server.shut_down()?;
    let mut pages = vec![Page::new("/".to_owned(), "Three sites".to_owned())];
    for (post, number) in (1..).zip(numbers.split_whitespace()) {
        // The script prints nothing else, unless something is wrong.
        let number: u64 = number.parse().with_context(|| format!("installing WordPress: {numbers}"))?;
        pages.push(Page::new(format!("/?p={number}"), format!("Post {post}")));
    }
    ensure!(pages.len() as u64 == 1 + posts, "installing WordPress gave {} posts instead of {posts}", pages.len() - 1);
    Ok(pages)
}

/// PHP's module for Apache, which has the version in its name.
fn module_of_apache() -> anyhow::Result<PathBuf> {
    let has_module = entries("/usr/lib/php").iter().any(|version| version.join("mysqli.so").exists());
    ensure!(has_module, "PHP has no mysqli: this experiment needs the packages libapache2-mod-php and php-mysql");
    for file in entries("/usr/lib/apache2/modules").into_iter().rev() {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("libphp") && name.ends_with(".so") {
            return Ok(file);
        }
    }
    bail!("Apache has no PHP: this experiment needs the package libapache2-mod-php")
}

/// The directory where `lab/scripts/wordpress` has put WordPress.
fn unpacked() -> anyhow::Result<PathBuf> {
    let dir = cache()?.join("wordpress");
    ensure!(dir.exists(), "{} does not exist: run lab/scripts/wordpress", dir.display());
    Ok(dir)
}

/// All processes below this one, parents first.
fn descendants(of: &Process) -> Vec<Process> {
    let mut found = Vec::new();
    for child in children(of) {
        let below = descendants(&child);
        found.push(child);
        found.extend(below);
    }
    found
}

/// A client that loads the pages of a site.
#[derive(Clone, Debug)]
pub struct Visitor {
    /// The site's network namespace, which lives as long as this is open.
    network: Arc<File>,
    pages: Arc<Pages>,
}

impl Visitor {
    /// A client of the site that this process belongs to. It has loaded the first page.
    fn of(process: &Process, pages: &Arc<Pages>) -> anyhow::Result<Self> {
        let network = process.open_file("ns/net")?;
        let visitor = Self { network: Arc::new(network), pages: Arc::clone(pages) };
        visitor.visit(0)?;
        Ok(visitor)
    }

    /// Loads the page whose turn it is after `number` loads, and its pictures. Every byte must be right.
    pub fn visit(&self, number: usize) -> anyhow::Result<()> {
        let page = &self.pages.pages[number % self.pages.pages.len()];
        let answer = self.get(&page.path)?;
        let text = String::from_utf8_lossy(&answer);
        ensure!(
            text.contains(&page.title) && text.trim_end().ends_with("</html>"),
            "{} does not show the page {}: {text:.300}",
            page.path,
            page.title
        );
        ensure!(
            answer == *page.answer.get_or_init(|| answer.clone()),
            "{} has changed since the first load",
            page.path
        );
        for (path, content) in &self.pages.pictures {
            ensure!(self.get(path)? == *content, "{path} has changed");
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

    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().map(Process::pid)
    }

    /// The container's processes as targets. The first one checks the site.
    pub fn targets(self) -> Vec<Box<dyn Target>> {
        let site = Rc::new(self);
        let mut targets: Vec<Box<dyn Target>> = Vec::new();
        for at in 0..site.processes.len() {
            targets.push(Box::new(Member { site: Rc::clone(&site), at }));
        }
        targets
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.server.child.0.stdin.take());
        self.server.child.end(END_LIMIT);
        // If we had to kill `unshare`, the kernel kills the others too, but nobody has waited for them yet.
        wait_for_ends(&self.processes, END_LIMIT);
    }
}

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
            for number in 0..visitor.pages.pages.len() {
                visitor.visit(number)?;
            }
        }
        Ok("as at first".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_testkit::{is_root, skip};
    use std::time::Instant;

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
        fs::write(PathBuf::from(format!("/proc/{}/root/{SITE}/{UPLOADS}/2.png", sites[0].processes[0].pid())), "x")
            .unwrap();
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
