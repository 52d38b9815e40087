//! ksmtuned as Debian packages it: we run the script unchanged, with its settings in the environment.
//!
//! The script turns KSM on when free memory, or the memory left beside machines started as `qemu-system-* -enable-kvm`,
//! falls below a threshold: the larger of `KSM_THRES_COEF` per cent of all memory and `KSM_THRES_CONST` KiB. It looks
//! every `KSM_MONITOR_INTERVAL` seconds, and scans more each time. We don't charge it for the programs that it runs to
//! look.

use super::{Policy, Stage};
use crate::interrupt::Interrupt;
use crate::programs::need;
use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pagefold_procmem::os::fields::kib;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The script reads this after our settings.
const CONFIGURATION: &str = "/etc/ksmtuned.conf";

/// Sets the threshold to all memory, so ksmtuned starts however much is free.
const ALWAYS: (&str, &str) = ("KSM_THRES_COEF", "100");

/// KSM under ksmtuned, with its defaults or with a threshold that starts it on any machine.
#[derive(Clone, Copy, Debug)]
pub struct Ksmtuned {
    pub always: bool,
    pub seconds: u64,
}

impl Policy for Ksmtuned {
    fn name(&self) -> String {
        let threshold = if self.always { format!(" {}={}", ALWAYS.0, ALWAYS.1) } else { String::new() };
        format!("ksmtuned{threshold}/{}s", self.seconds)
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        let interrupt = stage.setting.interrupt;
        let scanned_before = stage.ksm()?.ksm().counters()?.pages_scanned;
        let script = RunningScript::start(if self.always { &[ALWAYS] } else { &[] }, interrupt)?;
        interrupt.sleep(Duration::from_secs(self.seconds))?;
        drop(script);
        if stage.ksm()?.ksm().counters()?.pages_scanned == scanned_before {
            stage.run.remark = Some(never_started()?);
        }
        Ok(())
    }
}

/// A note for a ksmtuned that hasn't started ksmd, by its own count of free memory.
fn never_started() -> anyhow::Result<String> {
    let meminfo = fs::read("/proc/meminfo")?;
    let of = |key| kib(&meminfo, key).map_err(anyhow::Error::msg).context("/proc/meminfo");
    let free = (of("MemFree")? + of("Buffers")? + of("Cached")?) as f64 / of("MemTotal")? as f64;
    Ok(format!(
        "It never started ksmd: by default it does when less than 20 % of memory is free or cached, and {:.0} % was.",
        100.0 * free
    ))
}

/// The running script and its children, in a process group of their own. Dropping this ends the group.
#[derive(Debug)]
struct RunningScript {
    group: Pid,
    _scratch: TempDir,
}

impl RunningScript {
    /// Starts it. Whoever controls KSM must wait for its end before restoring the knobs.
    fn start(settings: &[(&str, &str)], interrupt: &Interrupt) -> anyhow::Result<Self> {
        let script = need("ksmtuned", "ksmtuned and procps")?;
        need("pgrep", "ksmtuned and procps")?;
        refuse_settings(&fs::read_to_string(CONFIGURATION).unwrap_or_default())?;
        Self::start_script(&script, settings, interrupt)
    }

    fn start_script(script: &Path, settings: &[(&str, &str)], interrupt: &Interrupt) -> anyhow::Result<Self> {
        let scratch = tempfile::tempdir()?;
        let mut child = Command::new("bash")
            .arg(script)
            .envs(settings.iter().copied())
            .env("PIDFILE", scratch.path().join("pid"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start ksmtuned")?;
        let started = Self { group: Pid::from_raw(i32::try_from(child.id())?), _scratch: scratch };
        // The script leaves its loop behind in the same group. While the loop lives, nobody else's group can get this
        // number.
        match interrupt.wait(Duration::from_secs(10), || anyhow::Ok(child.try_wait()?))? {
            Some(status) if status.success() => Ok(started),
            Some(status) => bail!("ksmtuned ended with {status}"),
            None => bail!("ksmtuned does not become a daemon"),
        }
    }
}

impl Drop for RunningScript {
    fn drop(&mut self) {
        // The group must be gone before we restore the knobs.
        for _ in 0..500 {
            if killpg(self.group, Signal::SIGKILL).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("ksmtuned does not end");
    }
}

/// Refuses settings in the configuration: with them, the policy's name would be wrong.
fn refuse_settings(configuration: &str) -> anyhow::Result<()> {
    let setting = configuration.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    match setting {
        Some(line) => bail!("{CONFIGURATION} has settings of its own ({line}); comment them out"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_ended_with_what_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let (script, out) = (dir.path().join("script"), dir.path().join("out"));
        // Like ksmtuned: a loop in the background that waits for a child.
        let text = "loop() { while true; do sleep 0.02 & wait $!; echo $KSM_THRES_COEF >>$OUT; done; }\nloop &\necho $! >$PIDFILE\n";
        fs::write(&script, text).unwrap();
        let settings = [ALWAYS, ("OUT", out.to_str().unwrap())];
        let running = RunningScript::start_script(&script, &settings, &Interrupt::default()).unwrap();
        let length = || fs::metadata(&out).map_or(0, |file| file.len());
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while length() == 0 {
            assert!(std::time::Instant::now() < end, "the loop does not run");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(fs::read_to_string(&out).unwrap().starts_with("100\n"));
        drop(running);
        let then = length();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(length(), then);
        fs::write(&script, "exit 3").unwrap();
        let error = RunningScript::start_script(&script, &[], &Interrupt::default()).unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    fn a_configuration_of_its_own_is_refused() {
        assert!(refuse_settings("").is_ok() && refuse_settings("# KSM_NPAGES_MIN=64\n\n  # x\n").is_ok());
        let error = refuse_settings("# a\nKSM_NPAGES_MAX=9\n").unwrap_err().to_string();
        assert!(error.contains("KSM_NPAGES_MAX=9"), "{error}");
    }
}
