//! The settings in force, and the response to SIGHUP: we read the configuration files again and reopen the audit log.
//!
//! For a run on a terminal, or a run with neither file nor log, SIGHUP keeps its usual meaning: the terminal is gone,
//! and the run ends.

use super::progress::Progress;
use crate::audit::{Audit, Entry};
use crate::config::args::RunArgs;
use crate::config::scope::ScopeArgs;
use crate::config::settings::Settings;
use crate::events::Events;
use crate::log;
use crate::service::{self, Journal};
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_host::live::LiveHost;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use std::io::IsTerminal;
use std::path::{PathBuf, absolute};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The settings in force, the audit log, and the latest events for `status`. A dry run has events, but no audit log.
#[derive(Debug)]
pub struct ActiveSettings<'a> {
    pub args: &'a RunArgs,
    /// The settings as we last read them.
    pub settings: Settings,
    audit: Option<Audit>,
    pub events: Events,
    requested: Arc<AtomicBool>,
    /// Whether a reload has changed the scope, and the daemon hasn't noticed yet.
    pub is_scope_new: bool,
    /// The result of the last reload.
    pub reloaded: Result<(), Exit>,
}

impl<'a> ActiveSettings<'a> {
    /// Starts the log, and opens the audit log unless this is a dry run.
    pub fn new(args: &'a RunArgs, settings: Settings) -> Result<Self, Exit> {
        log::start(&settings.log, service::has_standard_error());
        let audit = match settings.audit.as_deref() {
            Some(path) if !args.dry_run => Some(Audit::open(path)?),
            _ => None,
        };
        Ok(Self {
            args,
            settings,
            audit,
            events: Events::new(Journal::of_environment(), args.dry_run),
            requested: Arc::default(),
            is_scope_new: false,
            reloaded: Ok(()),
        })
    }

    /// The flag that SIGHUP sets instead of ending the run. `None` if SIGHUP ends the run.
    pub fn on_hangup(&self) -> Option<Arc<AtomicBool>> {
        let reloads = self.settings.file.is_some() || self.audit.is_some();
        if !reloads || std::io::stdin().is_terminal() {
            return None;
        }
        Some(self.requested.clone())
    }

    /// Requests a reload, as SIGHUP does, and returns the configuration file. Fails if the scope is from the command
    /// line, as reading the file again wouldn't change it.
    pub fn request_reload(&mut self) -> Result<PathBuf, Exit> {
        match &self.settings.file {
            Some(file) if self.args.scope == ScopeArgs::default() => {
                self.requested.store(true, Ordering::SeqCst);
                Ok(absolute(file).unwrap_or_else(|_| file.clone()))
            }
            _ => {
                let pid = std::process::id();
                let line = format!(
                    "pagefold (pid {pid}) has its scope from its command line; stop it and run pagefold without a scope"
                );
                Err(Exit::new(exit::FAILURE, line))
            }
        }
    }

    /// Adds an event, and writes a line to the audit log.
    pub fn log(&mut self, entry: &Entry) {
        self.events.add_entry(entry);
        if let Some(audit) = &mut self.audit {
            audit.write(entry);
        }
    }

    /// Waits a moment until the audit log is written.
    pub fn finish(&mut self, progress: &Progress) {
        if let Some(audit) = &mut self.audit {
            audit.finish();
        }
        self.hear_audit(progress);
    }

    /// Reports lines that the audit log has lost.
    pub fn hear_audit(&mut self, progress: &Progress) {
        let Some(audit) = &mut self.audit else { return };
        for complaint in audit.complaints() {
            self.say(progress, "error", complaint);
        }
    }

    pub fn lost(&self) -> u64 {
        self.audit.as_ref().map_or(0, Audit::lost)
    }

    /// Reloads if SIGHUP has come since the last call. Returns the governor if it has changed.
    pub fn reload(&mut self, engine: &mut Engine, host: &mut LiveHost, progress: &Progress) -> Option<Governor> {
        if !self.requested.swap(false, Ordering::SeqCst) {
            return None;
        }
        if let Some(audit) = &self.audit {
            audit.reopen();
        }
        match self.settings.reread(self.args) {
            Ok(read) => {
                self.reloaded = Ok(());
                self.apply(read, engine, host, progress)
            }
            Err(error) => {
                self.say(progress, "error", format!("the settings are unchanged: {error}"));
                self.reloaded = Err(error);
                None
            }
        }
    }

    /// Prints a message, and adds it as an event of this kind.
    pub fn say(&mut self, progress: &Progress, what: &str, line: String) {
        progress.say(&line);
        self.events.note(what, line);
    }

    fn apply(
        &mut self,
        read: Settings,
        engine: &mut Engine,
        host: &mut LiveHost,
        progress: &Progress,
    ) -> Option<Governor> {
        let fixed = read.fixed_differences(&self.settings);
        if !fixed.is_empty() {
            progress.say(&format!("changes to {} take effect at the next start; restart the run", fixed.join(", ")));
        }
        if read.scope != self.settings.scope {
            host.set_scope(read.scope.spec());
            self.is_scope_new = true;
            let scope = if read.scope == ScopeArgs::default() { "empty".to_owned() } else { read.scope.to_string() };
            self.log(&Entry::Scope { scope: scope.clone() });
            self.say(progress, "settings", format!("the scope is now {scope}"));
        }
        self.settings.scope = read.scope;
        if read.deny != self.settings.deny {
            host.set_deny(read.deny.clone());
            self.say(progress, "settings", "the deny list has changed".to_owned());
        }
        self.settings.deny = read.deny;
        if read.log != self.settings.log {
            log::set_levels(&read.log);
            self.say(progress, "settings", format!("the log level is now {}", read.log));
        }
        self.settings.log = read.log;
        // The rules of trust domains can't change during a run, only which domain ksmd merges.
        let former = self.settings.domains.merged();
        self.settings.domains.merge = read.domains.merge;
        let merged = self.settings.domains.merged();
        if merged != former && host.merged_domain().is_some() {
            host.merge_only(&merged);
            let merged = printable(merged.as_bytes());
            let former = printable(former.as_bytes());
            self.say(
                progress,
                "settings",
                format!("trust domain {merged} will be merged as soon as the memory of {former} is unmarked"),
            );
        }
        let new = &read.config;
        let old = &self.settings.config;
        if new.limits != old.limits || new.groups != old.groups || read.groups != self.settings.groups {
            engine.set_limits(read.config.limits, read.config.groups.clone());
            host.set_groups(read.groups.clone());
            self.say(progress, "settings", "the limits have changed".to_owned());
        }
        self.settings.config.limits = read.config.limits;
        self.settings.config.groups = read.config.groups;
        self.settings.groups = read.groups;
        if read.config.reserve != self.settings.config.reserve {
            engine.set_reserve(read.config.reserve);
            progress.say("the reserve has changed");
        }
        self.settings.config.reserve = read.config.reserve;
        // If the file's governor is unchanged, we keep the one in force: `pagefold governor` may have set it.
        let governor = read.config.governor;
        if governor == self.settings.config.governor {
            return None;
        }
        self.settings.config.governor = governor;
        engine.set_governor(governor);
        progress.say(&format!("the governor is now {governor}"));
        Some(governor)
    }
}
