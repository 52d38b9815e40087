//! Finds out which processes a run would leave alone, before the run begins.

use crate::config::args::RunArgs;
use crate::config::flags::DenyFlags;
use crate::config::scope::ScopeArgs;
use crate::config::settings::Settings;
use crate::kept_out;
use crate::preflight;
use pagefold_engine::keys::DomainKey;
use pagefold_host::scope::ProcessInfo;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::domain::{DomainRules, Domains};
use pagefold_host::scope::exclude::{Exclusion, process_exclusion};
use pagefold_host::scope::kept_out::KeptOut;
use pagefold_inject::is_frozen;
use pagefold_procmem::Roots;
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::process::ReadError;
use pagefold_text::escape::shell_word;
use pagefold_text::exit::Exit;

/// The deny list, the trust domains, and the processes that an administrator has excluded.
#[derive(Debug)]
pub struct Bounds {
    deny: DenyList,
    domain_rules: DomainRules,
    domains: Domains,
    kept_out: KeptOut,
    /// Whether pages are merged by ksmd, which only merges one trust domain, or on request.
    by_ksmd: bool,
}

impl Bounds {
    /// The bounds of a run with these settings.
    ///
    /// # Errors
    /// We can't use the list of excluded processes.
    pub fn of(settings: &Settings, by_ksmd: bool) -> Result<Self, Exit> {
        Ok(Self {
            deny: settings.deny.clone(),
            domain_rules: settings.domains.clone(),
            domains: Domains::default(),
            kept_out: kept_out::read()?,
            by_ksmd,
        })
    }

    /// The bounds of a run with these flags and a scope on the command line. Such a run also obeys `[deny]` and
    /// `[domains]` of the default file.
    ///
    /// # Errors
    /// We can't use the file, or the list of excluded processes.
    pub fn with(flags: &DenyFlags) -> Result<Self, Exit> {
        let args = RunArgs { scope: ScopeArgs::all(), deny: flags.clone(), ..RunArgs::default() };
        let settings = Settings::from(&args, None)?;
        let device = match preflight::ksm() {
            Ok(ksm) => preflight::request_device(settings.mechanism, settings.placement.default, &ksm)?,
            Err(_) => None,
        };
        Self::of(&settings, device.is_none())
    }

    /// The trust domain of a process.
    pub fn domain(&mut self, scoped: &ProcessInfo) -> DomainKey {
        self.domains.assign(&self.domain_rules.domain_of(scoped, &mut Vec::new()))
    }

    /// Why a process in scope is left alone, if it is.
    ///
    /// # Errors
    /// We can't read the process.
    pub fn exclusion(&mut self, scoped: &ProcessInfo) -> Result<Option<Exclusion>, ReadError> {
        if let Some((by, _)) = self.kept_out.verdict(scoped, true, &Roots::default()) {
            return Ok(Some(Exclusion::KeptOut { by }));
        }
        let other_domain = if self.by_ksmd { self.domain_rules.excludes(scoped) } else { None };
        process_exclusion(scoped, &self.deny, other_domain)
    }

    /// Why a process in scope must be left alone now, if it must.
    pub fn refusal(&mut self, scoped: &ProcessInfo) -> Option<String> {
        match self.refused_for(scoped) {
            Ok(reason) => reason,
            Err(ReadError::Vanished { .. }) => Some("has ended".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    fn refused_for(&mut self, scoped: &ProcessInfo) -> Result<Option<String>, ReadError> {
        // We check this first: while a process can't run, we may not find out whether it's excluded.
        if scoped.process.stat()?.state == b'T' {
            return Ok(Some("stopped by a signal; continue it with kill -CONT".to_owned()));
        }
        // This read may block while the process is in execve, so a thread does it, which we can abandon.
        let process = scoped.process.clone();
        if run_abandonable(move || is_frozen(&process)).unwrap_or(false) {
            return Ok(Some("frozen by its cgroup; thaw the cgroup".to_owned()));
        }
        match self.exclusion(scoped)? {
            // If the process is too busy to tell us whether it's dumpable, the run tries again.
            None | Some(Exclusion::DumpableUnknown) => Ok(None),
            Some(exclusion) => Ok(Some(exclusion.to_string())),
        }
    }

    /// Tells how to have this process merged although we leave it alone for `reason`. The words come after the reason,
    /// and are empty if there's no way.
    pub fn way_in(&mut self, scoped: &ProcessInfo, reason: &str) -> String {
        if let Some((_, selector)) = self.kept_out.verdict(scoped, true, &Roots::default()) {
            return format!(" (pagefold include {selector} lets it in)");
        }
        match scoped.allowed_as(&self.deny, &Roots::default()) {
            Some(name) if reason == Exclusion::NotDumpable.to_string() => {
                format!(" (--allow {} lets it in)", shell_word(&name))
            }
            _ => String::new(),
        }
    }
}
