//! What SIGHUP asks for while a run goes on: the configuration file read again, the audit log opened again.
//!
//! To a run in a terminal, or one that has neither, it means what it always meant: that the terminal has gone, and the
//! run with it.

use crate::audit::{Audit, Entry};
use crate::commands::run::RunArgs;
use crate::config::settings::Settings;
use pagefold_cli::exit::Exit;
use pagefold_core::engine::Engine;
use pagefold_core::governor::Governor;
use pagefold_linux::host::live::LiveHost;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The settings in force, and the log.
#[derive(Debug)]
pub struct Standing<'a> {
    args: &'a RunArgs,
    /// As they were read last.
    pub settings: Settings,
    audit: Option<Audit>,
    /// Set by SIGHUP.
    asked: Arc<AtomicBool>,
}

impl<'a> Standing<'a> {
    /// Opens the log, unless nothing will be marked.
    pub fn new(args: &'a RunArgs, settings: Settings) -> Result<Self, Exit> {
        let path = settings.audit.as_deref().filter(|_| !args.dry_run);
        let audit = path.map(Audit::open).transpose()?;
        Ok(Self { args, settings, audit, asked: Arc::default() })
    }

    /// What SIGHUP is to set instead of ending the run, if it has another meaning here.
    pub fn on_hangup(&self) -> Option<Arc<AtomicBool>> {
        let reloads = self.settings.file.is_some() || self.audit.is_some();
        (reloads && !std::io::stdin().is_terminal()).then(|| self.asked.clone())
    }

    /// Whether marks are written down.
    pub fn logs(&self) -> bool {
        self.audit.is_some()
    }

    /// Writes them down; what there is to complain about is returned once.
    pub fn log(&mut self, entry: &Entry) -> Option<String> {
        self.audit.as_mut()?.write(entry)
    }

    /// Lines of the log that were lost.
    pub fn lost(&self) -> u64 {
        self.audit.as_ref().map_or(0, Audit::lost)
    }

    /// Does what SIGHUP has asked for since the last call. Returns what there is to say, and the governor, if there is
    /// another one now.
    pub fn serve(&mut self, engine: &mut Engine, host: &mut LiveHost) -> (Vec<String>, Option<Governor>) {
        if !self.asked.swap(false, Ordering::SeqCst) {
            return (Vec::new(), None);
        }
        let mut lines = Vec::new();
        if let Some(Err(error)) = self.audit.as_mut().map(Audit::reopen) {
            lines.push(format!("the audit log goes on where it was: {error}"));
        }
        let governor = match self.settings.reread(self.args) {
            Ok(read) => self.take(read, engine, host, &mut lines),
            Err(error) => {
                lines.push(format!("the settings stay as they were: {error}"));
                None
            }
        };
        (lines, governor)
    }

    fn take(
        &mut self,
        read: Settings,
        engine: &mut Engine,
        host: &mut LiveHost,
        lines: &mut Vec<String>,
    ) -> Option<Governor> {
        let fixed = read.fixed_differences(&self.settings);
        if !fixed.is_empty() {
            lines.push(format!("changes of {} count from the next start; restart the run", fixed.join(", ")));
        }
        if read.deny != self.settings.deny {
            host.set_deny(read.deny.clone());
            lines.push("the deny list is another one from now on".to_owned());
        }
        self.settings.deny = read.deny;
        if read.config.limits != self.settings.config.limits {
            engine.set_limits(read.config.limits);
            lines.push("the limits are others from now on".to_owned());
        }
        self.settings.config.limits = read.config.limits;
        // Not if it is the same: `pagefold governor` may have chosen another meanwhile.
        let governor = (read.config.governor != self.settings.config.governor).then_some(read.config.governor)?;
        self.settings.config.governor = governor;
        engine.set_governor(governor);
        lines.push(format!("the governor is {governor} from now on"));
        Some(governor)
    }
}
