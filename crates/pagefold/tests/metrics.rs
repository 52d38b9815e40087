//! Metrics agree with the status, Prometheus accepts them, and no client can do harm.
#![allow(clippy::float_cmp, reason = "whole numbers")]

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ::pagefold::metrics::families::FAMILIES;
use pagefold_procmem::os::fields;
use pagefold_testkit::*;

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

/// A port that was free just now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn ask(port: u16, request: &[u8]) -> String {
    let mut stream = connect(port);
    // The server may have answered and closed before it has read all of a long request.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[track_caller]
fn page(port: u16) -> String {
    let answer = ask(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, page) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    page.to_owned()
}

/// The values of a page by name and labels.
fn values(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name, value.parse().unwrap())).collect()
}

/// Checks that a program that these tests need is installed. Reports if it isn't.
#[track_caller]
fn installed(program: &str) -> Option<()> {
    if Command::new(program).arg("--version").output().is_err() {
        skip(format!("{program} is not installed"));
        return None;
    }
    Some(())
}

fn promtool(args: &[&str], input: &str) -> Output {
    let mut child = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[track_caller]
fn assert_promtool(args: &[&str], input: &str) {
    let output = promtool(args, input);
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success(), "{args:?}: {said}");
    println!("{args:?}: {said}");
}

/// Prometheus on the loopback interface, with its data in a directory of its own.
struct Prometheus {
    child: std::process::Child,
    port: u16,
    dir: tempfile::TempDir,
}

impl Prometheus {
    fn scraping(target: u16) -> Self {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [packaging().join("prometheus/pagefold.rules.yml")],
            "scrape_configs": [{"job_name": "pagefold", "static_configs": [{"targets": [format!("127.0.0.1:{target}")]}]}],
        });
        // Prometheus wants YAML, and JSON is YAML.
        fs::write(dir.path().join("prometheus.yml"), config.to_string()).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", path("prometheus.yml")))
            .arg(format!("--storage.tsdb.path={}", path("data")))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, port, dir }
    }

    /// The answer of Prometheus, if there is one.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(stream, "GET /api/v1/{path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// The value of the only series that a query finds.
    fn value(&self, query: &str) -> Option<f64> {
        let answer = self.get(&format!("query?query={query}"))?;
        let [series] = &answer["data"]["result"].as_array()?[..] else { return None };
        series["value"][1].as_str()?.parse().ok()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn metrics_agree_with_the_status_and_with_the_kernel_and_prometheus_takes_them() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let (Some(()), Some(())) = (installed("promtool"), installed("prometheus")) else { return };
    let before = saved_bytes();
    let mut pair = pair(48, 24, 31);
    let pids = pids(&pair);
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    let (port_text, file) = (port.to_string(), dir.path().join("pagefold.prom"));
    let options = ["--metrics", &port_text, "--metrics-file", file.to_str().unwrap(), "--metrics-interval", "1s"];
    let daemon = Daemon::on(&pids, &[&["--for", "300s"], &options[..]].concat()).answering();
    let prometheus = Prometheus::scraping(port);
    wait_until("the memory is merged", || saved_bytes() >= before + 47 * MIB && status()["busy"] == false);
    // A page may be seconds old.
    wait_until("the page is of the state that is merged", || {
        let page_text = page(port);
        let (found, stops) = (values(&page_text), status()["stops"].as_f64().unwrap());
        // The daemon counts the savings once merging has ended.
        let saved = (saved_bytes() - before) as f64;
        let counted = found.get("pagefold_saved_bytes");
        let is_counted = counted.is_some_and(|counted| (counted - saved).abs() <= MIB as f64);
        found["pagefold_state{state=\"watching\"}"] == 1.0
            && found["pagefold_stop_seconds_count"] == stops
            && is_counted
    });

    let (page_text, status) = (page(port), status());
    let found = values(&page_text);
    let number = |field: &Value| field.as_f64().unwrap();
    for (metric, field) in [
        ("pagefold_saved_bytes", "saved_bytes"),
        ("pagefold_may_return_bytes", "saved_machine_bytes"),
        ("pagefold_metadata_bytes", "metadata_bytes"),
        ("pagefold_marked_bytes", "marked_bytes"),
        ("pagefold_resident_bytes", "resident_bytes"),
        ("pagefold_cpu_allowed_ratio", "allowed_share"),
        ("pagefold_stop_seconds_count", "stops"),
        ("pagefold_to_unmark_bytes", "to_unmark_bytes"),
        ("pagefold_refused_spans_total", "refused_spans"),
    ] {
        let (metric_is, status_is) = (found[metric], number(&status[field]));
        assert!((metric_is - status_is).abs() <= MIB as f64, "{metric}: {metric_is} and {status_is}");
    }
    let near = |a: f64, b: f64| (a - b).abs() <= MIB as f64;
    assert!(near(found["pagefold_may_return_bytes"], saved_bytes() as f64), "{page_text}");
    assert!(near(found["pagefold_saved_bytes"], (saved_bytes() - before) as f64), "{page_text}");
    let metadata = found["pagefold_metadata_bytes"];
    assert!(metadata > 0.0 && near(found["pagefold_net_profit_bytes"], found["pagefold_saved_bytes"] - metadata));
    let (stops, longest) = (found["pagefold_stop_seconds_count"], found["pagefold_longest_stop_seconds"]);
    assert!(stops >= 2.0 && found["pagefold_stop_seconds_bucket{le=\"+Inf\"}"] == stops, "{page_text}");
    assert!(longest > 0.0 && found["pagefold_stop_seconds_sum"] >= longest, "{page_text}");
    let cpu = |part: &str| found[&*format!("pagefold_cpu_seconds_total{{part=\"{part}\"}}")];
    let seconds = &status["cpu_seconds"];
    assert!(cpu("pagefold") > 0.0 && cpu("injector") > 0.0 && cpu("ksmd") > 0.0, "{page_text}");
    let all = cpu("pagefold") + cpu("injector") + cpu("ksmd");
    assert!((all - number(&seconds["pagefold"]) - number(&seconds["ksmd"])).abs() < 0.5, "{seconds} and {page_text}");
    assert!(cpu("ksmd") <= number(&seconds["ksmd"]) && cpu("injector") <= number(&seconds["injector"]), "{seconds}");
    assert_eq!((found["pagefold_processes"], found["pagefold_ksm_controlled"]), (2.0, 1.0));
    assert_eq!(found["pagefold_state{state=\"watching\"}"], 1.0);
    let available = fields::kib(&fs::read("/proc/meminfo").unwrap(), "MemAvailable").unwrap() as f64 * 1024.0;
    assert!((found["pagefold_available_bytes"] / available - 1.0).abs() < 0.2, "{available} in {page_text}");
    for &pid in &pids {
        let of = |metric: &str| found[&*format!("pagefold_scope_{metric}{{kind=\"pid\",scope=\"{pid}\"}}")];
        assert_eq!(of("processes"), 1.0);
        assert!(
            of("expected_bytes") >= 46.0 * MIB as f64 && of("resident_bytes") >= of("expected_bytes"),
            "{page_text}"
        );
    }
    assert_promtool(&["check", "metrics"], &page_text);

    // Check the file, which every user may read.
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o644);
    let names = |text: &str| values(text).into_keys().map(str::to_owned).collect::<Vec<_>>();
    let mut text = String::new();
    wait_until("the file has the same metrics", || {
        text = fs::read_to_string(&file).unwrap();
        names(&text) == names(&page_text)
    });
    let uptime = values(&text)["pagefold_uptime_seconds"];
    wait_until("the file is written again", || {
        values(&fs::read_to_string(&file).unwrap())["pagefold_uptime_seconds"] > uptime
    });
    wait_until("nothing is left beside it", || dir.path().read_dir().unwrap().count() == 1);

    wait_until("Prometheus has the figures", || {
        prometheus.value("pagefold_saved_bytes").is_some_and(|saved| near(saved, found["pagefold_saved_bytes"]))
    });
    assert_eq!(prometheus.value("up"), Some(1.0), "{}", prometheus.log());
    assert_eq!(prometheus.value("scrape_samples_scraped"), Some(values(&page_text).len() as f64));
    let is_evaluated = |rule: &Value| rule["health"] == "ok" && rule["state"] != "firing";
    wait_until("the rules are evaluated", || {
        let rules = prometheus.get("rules").unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap();
        rules.len() == 10 && rules.iter().all(is_evaluated)
    });

    let summary = daemon.stop();
    assert!(!file.exists(), "the run has ended");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    assert_eq!(summary["knobs_restored"], true);
    wait_until("Prometheus notices the end", || prometheus.value("up") == Some(0.0));
    drop(prometheus);
    ksm.give_back(&pids);
    assert_intact(&mut pair);
}

/// Resident anonymous memory of a process, bytes.
fn anonymous(pid: i32) -> u64 {
    kib(&format!("/proc/{pid}/status"), "RssAnon") << 10
}

/// The daemon's CPU time so far, seconds.
fn cpu_seconds() -> f64 {
    status()["cpu_seconds"]["pagefold"].as_f64().unwrap()
}

#[test]
fn no_client_keeps_the_run_or_other_clients_from_anything() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let port = free_port();
    let daemon = Daemon::on(&[idle.pid()], &["--for", "300s", "--metrics", &port.to_string()]).answering();
    page(port);
    let before = anonymous(daemon.pid());
    // We hold a thousand connections open: clients that never send, send half a request, never read, or send garbage.
    let get = b"GET /metrics HTTP/1.1\r\n\r\n";
    let mut held = Vec::new();
    let garbage: Vec<u8> = (0..=255).cycle().map(|byte: u8| byte.wrapping_mul(167)).take(4096).collect();
    let began = Instant::now();
    let mut most = Duration::ZERO;
    for number in 0..1_000 {
        let mut stream = connect(port);
        let _ = match number % 4 {
            0 => Ok(()),
            1 => stream.write_all(b"GET /metrics HTTP/1.1\r\nX: "),
            2 => stream.write_all(get),
            _ => stream.write_all(&garbage),
        };
        held.push(stream);
        if number % 100 == 50 {
            let asked = Instant::now();
            assert_eq!(status()["pid"], daemon.pid());
            most = most.max(asked.elapsed());
        }
    }
    println!("1,000 connections took {:?}; the status, at most {most:?}", began.elapsed());
    assert!(most < Duration::from_secs(5), "{most:?}");
    let asked = Instant::now();
    assert!(page(port).contains("pagefold_uptime_seconds"));
    println!("with all of them open, the page took {:?}", asked.elapsed());
    let grown = anonymous(daemon.pid()).saturating_sub(before);
    println!("the daemon has grown by {} KiB", grown >> 10);
    assert!(grown < 4 * MIB, "{grown}");
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    assert!(descriptors < 100, "{descriptors}");

    // Send requests as fast as one client can.
    let (before, began) = (cpu_seconds(), Instant::now());
    let mut answers = 0;
    while began.elapsed() < Duration::from_secs(5) {
        assert!(page(port).contains("pagefold_build_info"));
        answers += 1;
    }
    let share = (cpu_seconds() - before) / began.elapsed().as_secs_f64();
    println!("{answers} answers in 5 s took {:.2} % of a core", share * 100.0);
    assert!(answers <= 260 && share < 0.1, "{answers}, {share}");
    drop(held);
    assert_eq!(daemon.stop()["knobs_restored"], true);
    ksm.assert_restored();
}

#[test]
fn what_cannot_be_served_or_written_is_refused_at_the_start() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let run = |options: &[&str], code, says: &str| {
        assert_fails(&[&["run", "--pid", &pid, "--for", "1s"], options].concat(), code, says);
    };
    run(
        &["--metrics", &address.port().to_string()],
        1,
        &format!("cannot serve metrics at {address}: Address already in use"),
    );
    run(&["--metrics", "192.0.2.1:10045"], 1, "cannot serve metrics at 192.0.2.1:10045: ");
    run(&["--metrics", "localhost:10045"], 2, "'localhost:10045' is not an address");
    run(&["--metrics", "0"], 2, "is not an address");
    run(&["--metrics-file", "/no/such/directory/file"], 2, "/no/such/directory/file cannot be created");
    run(&["--metrics-file", "/tmp/file"], 2, "other users may write");
    run(&["--metrics-file", "/proc/pagefold.prom"], 2, "/proc/pagefold.prom cannot be written");
    run(&["--metrics-interval", "10ms"], 2, "10ms is out of range");

    // A dry run with the service's configuration file doesn't take over the service's address and metrics file.
    let config = ConfigFile::new("");
    let metrics = config.beside("pagefold.prom");
    config.write(&format!("[metrics]\naddress = {}\ntextfile = \"{metrics}\"\n", address.port()));
    let args = ["run", "--pid", &pid, "--for", "1s", "--config", config.name()];
    assert_fails(&args, 1, "Address already in use");
    Daemon::start(&[&args[..], &["--dry-run", "--json"]].concat()).end().summary();
    assert!(!Path::new(&metrics).exists());
    // Changes to the metrics take effect at the next start.
    drop(taken);
    let mut args = args.to_vec();
    args[4] = "60s";
    let daemon = Daemon::start(&[&args[..], &["--json"]].concat()).answering();
    assert!(page(address.port()).contains("pagefold_run_info{dry_run=\"false\""));
    wait_until("the file is there", || Path::new(&metrics).exists());
    daemon.reload(&config, "[metrics]\ninterval = \"20s\"\n");
    wait_until("the change is noticed", || daemon.has_said("changes to [metrics] take effect at the next start"));
    page(address.port());
    daemon.stop();
    ksm.assert_restored();
}

/// The sockets that a process has open, by inode.
fn sockets(pid: i32) -> Vec<PathBuf> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).collect()
}

#[test]
fn a_socket_of_the_service_manager_is_served_and_not_passed_on() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(()) = installed("systemd-socket-activate") else { return };
    let idle = Sleeper::start();
    let (port, pid) = (free_port(), idle.pid().to_string());
    let mut command = Command::new("systemd-socket-activate");
    command.args(["--fdname=pagefold-metrics.socket", "-l", &format!("127.0.0.1:{port}")]).arg(program());
    command.args(["run", "--json", "--for", "300s", "--pid", &pid]);
    let daemon = Daemon::of(&mut command);
    wait_until("something listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let daemon = daemon.answering();
    assert!(page(port).contains("pagefold_build_info{version="));
    let own = sockets(daemon.pid());
    let children = [daemon.children(), daemon.injectors()].concat();
    assert_eq!(children.len(), 2);
    for child in children {
        // The injector has none of the daemon's sockets.
        assert!(sockets(child).iter().all(|socket| !own.contains(socket)), "{:?} and {own:?}", sockets(child));
    }
    daemon.stop();
    ksm.assert_restored();
}

#[test]
fn another_descriptor_of_the_service_manager_is_refused() {
    let idle = Sleeper::start();
    let script = "exec 3</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" run --pid \"$1\" --for 1s";
    let output = Command::new("sh").args(["-c", script]).arg(program()).arg(idle.pid().to_string()).output().unwrap();
    assert_refused(&output, 2, "descriptor 3 is not a listening TCP socket");
}

/// The metrics named in a text.
fn named(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let mut names: Vec<&str> = words.filter(|word| word.starts_with("pagefold_")).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[test]
fn the_alerts_and_the_dashboard_use_metrics_that_exist() {
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let known: Vec<&str> = FAMILIES.iter().map(|metric| metric.name).collect();
    let rules = read(&packaging().join("prometheus/pagefold.rules.yml"));
    let dashboard = read(&packaging().join("grafana/pagefold.json"));
    let parsed: Value = serde_json::from_str(&dashboard).unwrap();
    assert!(parsed["panels"].as_array().unwrap().len() > 10 && parsed["title"] == "pagefold");
    for text in [&rules, &dashboard] {
        let used = named(text);
        assert!(used.len() > 5, "{used:?}");
        for name in used {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            assert!(known.contains(&name) || base.is_some_and(|base| known.contains(&base)), "{name} is unknown");
        }
    }
    let Some(()) = installed("promtool") else { return };
    let dir = tempfile::tempdir().unwrap();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metrics/pagefold.rules.test.yml");
    fs::write(dir.path().join("pagefold.rules.yml"), rules).unwrap();
    fs::write(dir.path().join("tests.yml"), read(&tests)).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    assert_promtool(&["check", "rules", &path("pagefold.rules.yml")], "");
    assert_promtool(&["test", "rules", &path("tests.yml")], "");
    // Each expression of the dashboard, as a rule, with Grafana's variables filled in.
    let mut rules = Vec::new();
    for panel in parsed["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression =
                target["expr"].as_str().unwrap().replace("$__rate_interval", "1m").replace("$instance", ".*");
            rules.push(json!({"record": format!("panel:{}", rules.len()), "expr": expression}));
        }
    }
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(dir.path().join("dashboard.yml"), rules.to_string()).unwrap();
    assert_promtool(&["check", "rules", &path("dashboard.yml")], "");
    let scrape = read(&packaging().join("prometheus/pagefold.scrape.yml"));
    assert_has(&scrape, &["job_name: pagefold", "127.0.0.1:10045"]);
    let socket = read(&packaging().join("systemd/pagefold-metrics.socket"));
    assert_has(&socket, &["ListenStream=127.0.0.1:10045", "Service=pagefold.service"]);
}
