//! `pagefold enable` and `disable`: add processes to the scope in a drop-in file, make the daemon read it, and show the
//! result.

use super::status::Status;
use crate::config::enabled::EnabledFile;
use crate::config::flags::DenyFlags;
use crate::config::options::Options;
use crate::config::ownership::shown;
use crate::config::scope::{ScopeArgs, explain, hint};
use crate::config::settings::{DEFAULT_FILE, deny_list, load, merged};
use crate::control::client::ask;
use crate::control::protocol::{Reloaded, Request};
use crate::preflight;
use crate::service::is_booted_by_systemd;
use anyhow::Result;
use clap::Arg;
use pagefold_host::scope::exclude::Exclusion;
use pagefold_host::scope::exe::Matching;
use pagefold_host::scope::{
    ProcessInfo, ScopeError, ScopeSpec, Selector, own_pid, resolve, resolve_among, resolve_for_including,
};
use pagefold_procmem::Roots;
use pagefold_text::escape::{printable, shell_word};
use pagefold_text::exit::{self, Exit};
use pagefold_text::program::code_of;
use pagefold_text::progress::Progress;
use pagefold_text::style::{self, Lines, Style};
use pagefold_text::table::spaced;
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SERVICE: &str = "pagefold.service";
/// How long we wait for the first saving.
const SAVING_LIMIT: Duration = Duration::from_secs(60);
/// How long we wait until a daemon that starts answers.
const READY_LIMIT: Duration = Duration::from_secs(5);
/// How long we wait until a process is unmerged.
const UNMERGING_LIMIT: Duration = Duration::from_secs(10);
/// If the daemon leaves all processes alone for this long, we stop waiting: it'll hardly change its mind.
const LEFT_ALONE: Duration = Duration::from_secs(3);
const INTERVAL: Duration = Duration::from_millis(250);

/// A pid and `--all` can't be enabled. We read them all the same, to say what would work.
#[derive(Clone, Debug, clap::Args)]
#[command(mut_arg("targets", program), mut_arg("pid", |pid| pid.hide(true)), mut_arg("all", |all| all.hide(true)))]
pub struct EnableArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// The configuration file. The change goes to FILE.d/enabled.toml, and not to this file
    #[arg(id = "file", long = "config", value_name = "FILE", default_value = DEFAULT_FILE)]
    pub config: PathBuf,
}

fn program(targets: Arg) -> Arg {
    targets.value_name("PROGRAM").help("Processes that run this program (as with --exe)").long_help(None)
}

impl EnableArgs {
    fn spec(&self, enables: bool) -> Result<ScopeSpec, Exit> {
        let spec = self.scope.spec();
        let cannot_be = !self.scope.pid.is_empty() || spec.0.contains(&Selector::All);
        let line = if cannot_be && !enables {
            format!("only names can be disabled; to keep processes out, try pagefold exclude {spec}")
        } else if let Some(pid) = self.scope.pid.first() {
            format!("a pid is gone when its process ends, so it cannot be enabled; try pagefold run --pid {pid}")
        } else if spec.0.contains(&Selector::All) {
            format!("--all cannot be enabled; write all = true below [scope] in {}", shown(&self.config))
        } else if spec.0.is_empty() {
            "no name is given; give a program, --unit, --vm, --container, --pod, --cgroup or --user, as pagefold scan \
             shows them"
                .to_owned()
        } else {
            return Ok(spec);
        };
        Err(Exit::new(exit::USAGE, line))
    }

    /// Whether `file` is the configuration file, by any path. A link to that file isn't, since it has other drop-ins.
    fn is_file(&self, file: &Path) -> bool {
        let place =
            |file: &Path| Some((absolute(file).ok()?.parent()?.canonicalize().ok()?, file.file_name()?.to_owned()));
        let found = place(file);
        file == self.config || found.is_some() && found == place(&self.config)
    }

    /// ` --config FILE` with a leading space, or nothing if it's the default file.
    fn file_flag(&self) -> String {
        if self.is_file(Path::new(DEFAULT_FILE)) {
            return String::new();
        }
        format!(" --config {}", shell_word(&shown(&self.config)))
    }
}

/// How the daemon responded to a change of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DaemonState {
    /// The daemon has read the files, and has this scope now.
    Reloaded(ScopeSpec),
    Started,
    Absent,
}

/// What the daemon has done with the processes so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Outcome {
    processes: usize,
    saved_bytes: u64,
    /// How many processes the daemon leaves alone, and the reason for the first.
    left_alone: usize,
    reason: Option<String>,
    /// Of the processes left alone: how many are out of scope, and how many have no memory left to unmark.
    out_of_scope: usize,
    unmerged: usize,
    /// One of the processes, to suggest `pagefold explain`.
    pid: Option<i32>,
    doing: String,
    /// How long the daemon's work will still take, in words.
    done_in: Option<String>,
}

impl Outcome {
    fn of(status: &Status, pids: &[i32]) -> Self {
        let doing: Vec<String> = status.doing().iter().map(ToString::to_string).collect();
        let mut outcome = Self { doing: doing.join(" and "), done_in: status.done_in(), ..Self::default() };
        let out_of_scope = Exclusion::OutOfScope.to_string();
        for row in status.programs.processes.iter().filter(|row| pids.contains(&row.pid)) {
            outcome.processes += 1;
            outcome.saved_bytes += row.saved_bytes.unwrap_or(0);
            outcome.pid = outcome.pid.or(Some(row.pid));
            outcome.left_alone += usize::from(row.left_alone.is_some());
            outcome.out_of_scope += usize::from(row.left_alone.as_ref() == Some(&out_of_scope));
            outcome.unmerged += usize::from(row.left_alone.is_some() && row.to_unmark.is_none());
            outcome.reason = outcome.reason.or_else(|| row.left_alone.clone());
        }
        outcome
    }

    fn is_left_alone(&self) -> bool {
        self.processes > 0 && self.left_alone == self.processes
    }
}

pub fn enable(args: &EnableArgs) -> Result<u8> {
    preflight::need_root("changing the configuration")?;
    let spec = args.spec(true)?;
    preflight::ksm()?;
    preflight::see_cgroups();
    let found = match resolve(&spec, &Roots::default()) {
        Err(error @ (ScopeError::NoCgroup(_) | ScopeError::NoMatch(_) | ScopeError::NameOnly { .. })) => {
            let next = hint(&error).unwrap_or_else(|| "memory is merged once there is one".to_owned());
            complain!("{error}; {next}");
            Vec::new()
        }
        found => found.map_err(|error| explain(&error))?,
    };
    let pids: Vec<i32> = found.iter().map(ProcessInfo::pid).collect();
    let mut file = EnabledFile::open(&args.config, true)?;
    let mut list = file.list.clone();
    for selector in &spec.0 {
        if !selector.is_among(&list) {
            list.push(selector.clone());
        }
    }
    let daemon = change(args, &mut file, list)?;
    let mut text = String::new();
    text.line(format!("Enabled {spec} in {}.", shown(&file.path)));
    drop(file);
    let outcome = if daemon == DaemonState::Absent || pids.is_empty() { None } else { Some(wait_for_saving(&pids)?) };
    let flag = args.file_flag();
    text += &describe_enabled(&daemon, outcome.as_ref(), &flag, Style::of_stdout());
    let options = merged(&load(&args.config)?);
    if let Some(advice) = outcome.as_ref().and_then(|outcome| way_in(outcome, &found, &options, &args.config)) {
        complain!("{advice}");
    }
    if outcome.is_none() {
        for selector in &spec.0 {
            if let Some(warning) = denial(selector, &options, &args.config) {
                complain!("{warning}");
            }
        }
    }
    text.line(format!("To undo this: pagefold disable {spec}{flag}"));
    style::print(&text)?;
    Ok(exit::OK)
}

pub fn disable(args: &EnableArgs) -> Result<u8> {
    preflight::need_root("changing the configuration")?;
    let spec = args.spec(false)?;
    preflight::see_cgroups();
    let mut file = EnabledFile::open(&args.config, false)?;
    if let Some(absent) = spec.0.iter().find(|selector| !selector.is_among(&file.list)) {
        // An interrupted `disable` may have written the file without making the daemon read it.
        let _ = ask::<Reloaded>(&Request::Reload);
        let line = format!(
            "{absent} is not enabled in {}; to see what is in scope, and by which file: pagefold config show",
            shown(&file.path)
        );
        return Err(Exit::new(exit::NO_SCOPE, line).into());
    }
    let roots = Roots::default();
    let found = resolve_for_including(&spec, &roots, &[own_pid()]).map_err(|error| explain(&error))?;
    let mut pids: Vec<i32> = found.iter().map(ProcessInfo::pid).collect();
    let mut list = file.list.clone();
    list.retain(|selector| !selector.is_among(&spec.0));
    let daemon = match reload(args, &mut file, list)? {
        None => DaemonState::Absent,
        Some(scope) => DaemonState::Reloaded(scope),
    };
    drop(file);
    let mut kept = 0;
    let mut outcome = Outcome::default();
    if let DaemonState::Reloaded(scope) = &daemon {
        let others = resolve_among(scope, &roots, |pid| pids.contains(&pid)).map_err(|error| explain(&error))?;
        let before = pids.len();
        pids.retain(|pid| !others.iter().any(|other| other.pid() == *pid && other.distrust.is_none()));
        kept = before - pids.len();
        outcome = wait_for_unmerging(&pids)?;
    }
    style::print(&describe_disabled(&spec, &daemon, &outcome, kept))?;
    Ok(exit::OK)
}

/// A warning if the program that this selector has brought into scope is on the deny list.
fn denial(selector: &Selector, options: &Options, file: &Path) -> Option<String> {
    let Selector::Exe(program) = selector else { return None };
    let name = program.rsplit('/').next().unwrap_or_default();
    let is_named = |asked: &[u8]| asked == program.as_bytes() || asked == name.as_bytes();
    let matches = |asked: &[u8]| if is_named(asked) { Matching::Yes } else { Matching::No };
    let list = deny_list(options, &DenyFlags::default());
    let entry = list.entry_for(&[name.into(), name.into()], matches)?;
    let change = if options.denied.iter().flatten().any(|denied| denied == entry) {
        format!("remove \"{}\" from the list \"also\" in [deny] of {}", printable(entry.as_bytes()), shown(file))
    } else {
        format!("add except = [\"{}\"] to [deny] of {}", printable(name.as_bytes()), shown(file))
    };
    Some(format!("{selector} is left alone: on the deny list ({entry}); to merge it, {change}"))
}

/// If the daemon leaves all processes alone because they aren't dumpable: how to have them merged.
fn way_in(outcome: &Outcome, found: &[ProcessInfo], options: &Options, file: &Path) -> Option<String> {
    if !outcome.is_left_alone() || outcome.reason != Some(Exclusion::NotDumpable.to_string()) {
        return None;
    }
    let info = found.iter().find(|info| Some(info.pid()) == outcome.pid)?;
    let name = info.allowed_as(&deny_list(options, &DenyFlags::default()), &Roots::default())?;
    Some(format!("to merge processes that are not dumpable, add except = [\"{name}\"] to [deny] of {}", shown(file)))
}

/// Writes the list and makes the daemon read it, or starts the daemon.
fn change(args: &EnableArgs, file: &mut EnabledFile, list: Vec<Selector>) -> Result<DaemonState> {
    if let Some(scope) = reload(args, file, list)? {
        return Ok(DaemonState::Reloaded(scope));
    }
    let systemctl = ["/usr/bin/systemctl", "/bin/systemctl"].map(Path::new).into_iter().find(|path| path.exists());
    match systemctl {
        Some(systemctl) if is_booted_by_systemd() && args.is_file(Path::new(DEFAULT_FILE)) => start(systemctl)?,
        _ => return Ok(DaemonState::Absent),
    }
    Ok(DaemonState::Started)
}

/// Writes the list and makes the daemon read it. Returns the scope in force, `None` if no daemon is running. If the
/// daemon refuses the list, we write the former one again, and dropping `file` removes the files that it has created.
fn reload(args: &EnableArgs, file: &mut EnabledFile, list: Vec<Selector>) -> Result<Option<ScopeSpec>> {
    let former = file.list.clone();
    let scope = file.set(list)?;
    let refusal = match reload_when_ready() {
        Ok(reloaded) if args.is_file(&reloaded.file) && reloaded.scope == scope.to_string() => {
            file.keep();
            return Ok(Some(scope));
        }
        Ok(other) if args.is_file(&other.file) => {
            let line = format!(
                "nothing is changed: the running pagefold has another scope ({}), because it was started with one or \
                 sees other files",
                other.scope
            );
            Exit::new(exit::FAILURE, line).into()
        }
        Ok(other) => {
            let line = format!("the running pagefold reads {0}; add --config {0}", shown(&other.file));
            Exit::new(exit::FAILURE, line).into()
        }
        Err(error) if code_of(&error) == exit::NO_DAEMON && !preflight::is_running() => {
            file.keep();
            return Ok(None);
        }
        Err(error) => error,
    };
    if let Err(error) = file.set(former) {
        let line = format!("{refusal:#}; the change for {} could not be undone: {error:#}", shown(&args.config));
        return Err(Exit::new(exit::FAILURE, line).into());
    }
    // The daemon may have read the new list and answered too late, so make it read the former one.
    let _ = ask::<Reloaded>(&Request::Reload);
    Err(refusal)
}

/// Makes the daemon read its files. A daemon that is just starting doesn't answer yet, so we try again for a while.
fn reload_when_ready() -> Result<Reloaded> {
    let began = Instant::now();
    loop {
        match ask::<Reloaded>(&Request::Reload) {
            Err(error) if code_of(&error) == exit::NO_DAEMON && began.elapsed() < READY_LIMIT => {
                if !preflight::is_running() {
                    return Err(error);
                }
                std::thread::sleep(INTERVAL);
            }
            answer => return answer,
        }
    }
}

/// Starts the service, now and at each boot.
fn start(systemctl: &Path) -> Result<(), Exit> {
    let run = |args: &[&str]| {
        let mut command = Command::new(systemctl);
        command.args(["--no-ask-password", "--quiet"]).args(args).arg(SERVICE);
        command.env_clear().stdin(Stdio::null()).output()
    };
    // If a condition of the unit isn't met, systemctl succeeds without starting it.
    let is_active = || run(&["is-active"]).is_ok_and(|output| output.status.success());
    let why = match run(&["enable", "--now"]) {
        Ok(output) if output.status.success() && is_active() => return Ok(()),
        Ok(output) if output.status.success() => "a condition of the unit is not met".to_owned(),
        Ok(output) => spaced(&String::from_utf8_lossy(&output.stderr)),
        Err(error) => error.to_string(),
    };
    let line = format!(
        "the configuration is written, but {SERVICE} does not start: {why}; see systemctl status {SERVICE}, or start \
         pagefold with sudo pagefold run"
    );
    Err(Exit::new(exit::FAILURE, line))
}

/// Waits for the first saving in these processes, or until we know that there'll be none.
fn wait_for_saving(pids: &[i32]) -> Result<Outcome> {
    let progress = Progress::new();
    let began = Instant::now();
    let mut alone_since = None;
    loop {
        let outcome = outcome(pids, began)?;
        if outcome.is_left_alone() {
            alone_since.get_or_insert_with(Instant::now);
        } else {
            alone_since = None;
        }
        let is_over = alone_since.is_some_and(|since: Instant| since.elapsed() > LEFT_ALONE);
        if outcome.saved_bytes > 0 || is_over || began.elapsed() > SAVING_LIMIT {
            progress.clear();
            return Ok(outcome);
        }
        let expected = match outcome.done_in {
            Some(end) => format!("first saving within {end}"),
            None => "waiting for the first saving".to_owned(),
        };
        progress.show(&format!("{expected}: {}", outcome.doing), None);
        std::thread::sleep(INTERVAL);
    }
}

/// Waits until the daemon has unmerged these processes, which are out of scope now. It may have left some alone before,
/// with merged memory, for another reason. So at first only the reason "out of scope" counts.
fn wait_for_unmerging(pids: &[i32]) -> Result<Outcome> {
    let began = Instant::now();
    while !pids.is_empty() {
        let outcome = outcome(pids, began)?;
        let is_judged = outcome.out_of_scope == outcome.processes || began.elapsed() > LEFT_ALONE;
        if is_judged && outcome.unmerged == outcome.processes || began.elapsed() > UNMERGING_LIMIT {
            return Ok(outcome);
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(Outcome::default())
}

/// Asks the daemon for its status. A daemon that has just been started doesn't answer yet, so we try again for a while.
fn outcome(pids: &[i32], began: Instant) -> Result<Outcome> {
    loop {
        match ask::<Status>(&Request::Status) {
            Ok(status) => return Ok(Outcome::of(&status, pids)),
            Err(error) if code_of(&error) == exit::NO_DAEMON && began.elapsed() < UNMERGING_LIMIT => {
                std::thread::sleep(INTERVAL);
            }
            Err(error) => return Err(error.context("the configuration is written, but the daemon does not answer")),
        }
    }
}

fn describe_enabled(daemon: &DaemonState, outcome: Option<&Outcome>, flag: &str, style: Style) -> String {
    let mut text = String::new();
    match daemon {
        DaemonState::Reloaded(_) => text.line("The running pagefold has read it."),
        DaemonState::Started => text.line(format!("{SERVICE} is running, and starts at each boot.")),
        DaemonState::Absent => text.line(format!("No pagefold is running. To start one: sudo pagefold run{flag}")),
    }
    let Some(outcome) = outcome else { return text };
    let processes = style::count(outcome.processes, "process", "processes");
    let explain = outcome.pid.map(|pid| format!(" (see pagefold explain {pid})")).unwrap_or_default();
    match &outcome.reason {
        _ if outcome.saved_bytes > 0 => {
            let saved = format!("Saved so far: {} in {processes}.", style::human(outcome.saved_bytes));
            text.line(format!("{} pagefold top shows the rest live.", style.bold(&saved)));
        }
        Some(reason) if outcome.is_left_alone() => {
            text.line(style.bold(&format!("Nothing is saved: {processes} left alone, {reason}{explain}.")));
        }
        _ => {
            let line = format!("Nothing is saved yet in {processes}; pagefold is {}{explain}.", outcome.doing);
            text.line(style.bold(&line));
        }
    }
    text
}

/// `kept`: how many processes other selectors keep in scope.
fn describe_disabled(spec: &ScopeSpec, daemon: &DaemonState, outcome: &Outcome, kept: usize) -> String {
    let mut text = String::new();
    text.line(format!("Disabled {spec}."));
    let DaemonState::Reloaded(scope) = daemon else {
        text.line(format!("No pagefold is running. To unmerge what is merged: pagefold unmerge {spec}"));
        return text;
    };
    let late = outcome.processes - outcome.unmerged;
    if outcome.unmerged > 0 || late == 0 {
        let unmerged = style::count(outcome.unmerged, "process", "processes");
        text.line(format!("Their memory is unmerged: {unmerged}."));
    }
    if late > 0 {
        let late = style::count(late, "process", "processes");
        text.line(format!("Not done yet in {late}: pagefold keeps trying (see pagefold status)."));
    }
    if kept > 0 {
        let kept = style::count(kept, "process is", "processes are");
        text.line(format!("{kept} still in scope by other selectors: {scope}"));
    }
    if scope.0.is_empty() {
        text.line("Nothing is in scope any more.");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn spec() -> ScopeSpec {
        ScopeSpec::of(&[], &[("exe", &["redis-server".to_owned()])], false)
    }

    #[test]
    fn what_came_of_it_is_shown() {
        let unit = ScopeSpec::of(&[], &[("unit", &["nginx".to_owned()])], false);
        let reloaded = DaemonState::Reloaded(unit);
        let waiting = Outcome { processes: 3, pid: Some(4_001), doing: "reading".to_owned(), ..Outcome::default() };
        let saving = Outcome { saved_bytes: 264 << 20, ..waiting.clone() };
        let reason = Some("non-dumpable".to_owned());
        let alone = Outcome { left_alone: 3, reason, ..waiting.clone() };
        let mut text = String::new();
        for (daemon, outcome) in [
            (&reloaded, Some(&saving)),
            (&DaemonState::Started, Some(&waiting)),
            (&reloaded, Some(&alone)),
            (&DaemonState::Absent, None),
        ] {
            text += &describe_enabled(daemon, outcome, "", Style::plain_text());
            text.line("");
        }
        let late = Outcome { processes: 2, unmerged: 1, ..Outcome::default() };
        let done = Outcome { unmerged: 3, ..alone };
        text += &describe_disabled(&spec(), &reloaded, &late, 1);
        text += &describe_disabled(&spec(), &reloaded, &waiting, 0);
        text += &describe_disabled(&spec(), &DaemonState::Reloaded(ScopeSpec::default()), &done, 0);
        text += &describe_disabled(&spec(), &DaemonState::Absent, &waiting, 0);
        golden::check("enable.txt", &text);
    }

    #[test]
    fn a_program_on_the_deny_list_is_no_silent_success() {
        let file = Path::new(DEFAULT_FILE);
        let chromium = Selector::Exe("/usr/bin/chromium".to_owned());
        let warning = |options: &Options| denial(&chromium, options, file);
        let line = "--exe /usr/bin/chromium is left alone: on the deny list (chromium*); to merge it, \
                    add except = [\"chromium\"] to [deny] of /etc/pagefold/pagefold.toml";
        assert_eq!(warning(&Options::default()).as_deref(), Some(line));
        let allowed = Options { allowed: Some(vec!["chromium".to_owned()]), ..Options::default() };
        assert_eq!(warning(&allowed), None);
        let denied = Options { denied: Some(vec!["chromium".to_owned()]), ..allowed };
        assert!(warning(&denied).unwrap().contains("remove \"chromium\" from the list \"also\""));
        assert_eq!(denial(&spec().0[0], &Options::default(), file), None);
    }

    #[test]
    fn the_way_in_for_what_is_not_dumpable_is_named() {
        let found = resolve(&ScopeSpec::of_pids([own_pid()]), &Roots::default()).unwrap();
        let reason = Some(Exclusion::NotDumpable.to_string());
        let alone = Outcome { processes: 1, left_alone: 1, pid: Some(own_pid()), reason, ..Outcome::default() };
        let advice = |outcome: &Outcome| way_in(outcome, &found, &Options::default(), Path::new(DEFAULT_FILE));
        let name = found[0].allowed_as(&deny_list(&Options::default(), &DenyFlags::default()), &Roots::default());
        let Some(name) = name else { return pagefold_testkit::skip("others may write the test's executable") };
        assert!(advice(&alone).unwrap().contains(&format!("add except = [\"{name}\"] to [deny]")));
        assert_eq!(advice(&Outcome { reason: Some("traced".to_owned()), ..alone.clone() }), None);
        assert_eq!(advice(&Outcome { left_alone: 0, ..alone }), None);
    }

    #[test]
    fn systemctl_gets_an_array_of_arguments_and_its_failure_is_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let systemctl = dir.path().join("systemctl");
        let script = |text: &str| {
            fs::write(&systemctl, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        };
        let enabled = "[ \"$*\" = \"--no-ask-password --quiet enable --now pagefold.service\" ]";
        script(&format!("{enabled} || [ \"$3\" = is-active ]"));
        start(&systemctl).unwrap();
        script(enabled);
        assert!(start(&systemctl).unwrap_err().line.contains("a condition of the unit is not met"));
        script("echo Failed:\necho no unit >&2; exit 5");
        let refused = start(&systemctl).unwrap_err();
        assert!(refused.line.contains("does not start: no unit; see"), "{refused}");
        assert!(start(&dir.path().join("absent")).is_err());
    }
}
