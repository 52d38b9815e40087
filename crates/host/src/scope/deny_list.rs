//! The deny list: programs that we never mark, and its default entries.

use super::exe::Matching;
use super::opt_out::OptOut;
use super::workload::Workload;
use super::{Matcher, ProcessInfo, Selector};
use pagefold_procmem::Roots;

/// Programs that we never mark, because they hold keys, passwords or web pages. Also the names whose opt-outs the
/// administrator overrides. An entry is the base name of a program, a prefix followed by `*`, the path of a program or
/// of a link to it, or a workload with its kind, such as `container web1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenyList {
    /// The first entry that matches decides.
    entries: Vec<Entry>,
    /// The names whose opt-outs don't count.
    overridden: Vec<String>,
    /// Workloads that we never mark.
    workloads: Vec<Workload>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    denied: bool,
    /// The workload, if the entry is for all of its programs.
    workload: Option<Matcher>,
}

impl Default for DenyList {
    fn default() -> Self {
        Self::new(DEFAULT_DENIED.iter().map(|&entry| entry.to_owned()))
    }
}

/// Entries of the default [`DenyList`].
pub const DEFAULT_DENIED: &[&str] = &[
    // key agents and programs that handle keys
    "ssh-agent",
    "ssh-add",
    "ssh",
    "sshd",
    "sshd-*",
    "gpg",
    "gpg-agent",
    "keyboxd",
    "scdaemon",
    "gpgsm",
    "dirmngr",
    "gnome-keyring-d*",
    "kwalletd*",
    "ksecretd",
    "secret-tool",
    "oo7-daemon",
    "pinentry*",
    "polkitd",
    "polkit-agent-he*",
    "pcscd",
    "p11-kit-server",
    "vault",
    "bao",
    "sudo",
    "su",
    "login",
    "passwd",
    "cryptsetup",
    "systemd-cryptse*",
    "systemd-homed",
    "systemd-homewor*",
    "krb5kdc",
    "kadmind",
    "sssd*",
    // password managers
    "keepassxc*",
    "keepass2",
    "keepassxc-proxy",
    "1password*",
    "op",
    "bitwarden*",
    "bw",
    "vaultwarden",
    "enpass",
    "proton-pass*",
    "pass",
    // browsers, and mail programs with browser engines
    "firefox*",
    "plugin-containe*",
    "librewolf*",
    "waterfox*",
    "seamonkey*",
    "zen",
    "zen-bin",
    "thunderbird*",
    "chrome*",
    "chromium*",
    "google-chrome*",
    "brave*",
    "msedge*",
    "opera",
    "opera-*",
    "opera_*",
    "vivaldi*",
    "epiphany*",
    "WebKitWebProces*",
    "WebKitNetworkPr*",
    "konqueror",
    "qutebrowser",
    "QtWebEngineProc*",
    "tor",
    "tor-browser*",
    "signal-desktop*",
];

impl DenyList {
    pub fn new(entries: impl IntoIterator<Item = String>) -> Self {
        let entries = entries.into_iter().map(|name| Entry { name, denied: true, workload: None }).collect();
        Self { entries, overridden: Vec::new(), workloads: Vec::new() }
    }

    /// Adds entries that take precedence over the existing ones. Among the new entries, `denied` takes precedence over
    /// `allowed`. An allowed entry matches only executables that root alone can change (see [`super::exe`]), and
    /// workloads that root has named.
    #[must_use]
    pub fn with(mut self, denied: &[String], allowed: &[String], roots: &Roots) -> Self {
        let mut entries = Vec::new();
        for (names, denied) in [(denied, true), (allowed, false)] {
            for name in names {
                let workload = workload_entry(name).and_then(|selector| selector.resolve(roots).ok());
                entries.push(Entry { name: name.clone(), denied, workload });
            }
        }
        entries.append(&mut self.entries);
        Self { entries, ..self }
    }

    /// Overrides the opt-outs of these units, virtual machines and cgroups, and of programs with these base names.
    #[must_use]
    pub fn overriding(mut self, names: Vec<String>) -> Self {
        self.overridden.extend(names);
        self
    }

    #[must_use]
    pub fn denying(mut self, workloads: impl IntoIterator<Item = Workload>) -> Self {
        self.workloads.extend(workloads);
        self
    }

    /// The entry that denies a process, if any.
    pub(super) fn denies(&self, info: &ProcessInfo) -> Option<String> {
        match self.deciding_on(info) {
            Some(entry) if entry.denied => Some(entry.name.clone()),
            _ => Some(self.workloads.iter().find(|workload| workload.names(info))?.to_string()),
        }
    }

    /// Whether the administrator has allowed the program or its workload, which lets a process in even if it isn't
    /// dumpable.
    pub(super) fn allows(&self, info: &ProcessInfo) -> bool {
        self.deciding_on(info).is_some_and(|entry| !entry.denied)
    }

    /// Whether the administrator has overridden an opt-out of a process. `program` is the base name of its executable,
    /// if root alone can change the executable.
    pub fn overrides(&self, opt_out: &OptOut, program: Option<&[u8]>) -> bool {
        self.overridden.iter().any(|name| opt_out.is_called(name) || program == Some(name.as_bytes()))
    }

    /// The entry that denies a program, if any. The program goes by the base name of its executable and by its command
    /// name, and `matches` says how it matches other names and paths. A match of any of these denies it. Only a match
    /// that root alone can bring about ([`Matching::Yes`]) allows it. A name of 15 bytes may be a truncated command
    /// name, so longer entries that begin with it deny it, but don't allow it: the full name may differ.
    pub fn entry_for(&self, names: &[Vec<u8>; 2], matches: impl Fn(&[u8]) -> Matching) -> Option<&str> {
        match self.deciding(names, matches, |_, _| false) {
            Some(entry) if entry.denied => Some(&entry.name),
            _ => None,
        }
    }

    fn deciding_on(&self, info: &ProcessInfo) -> Option<&Entry> {
        let is_in = |entry: &Entry, workload: &Matcher| {
            if entry.denied { workload.matches_by_name(info) } else { workload.matches(info) == Matching::Yes }
        };
        self.deciding(&info.names(), |name| info.matches(name), is_in)
    }

    fn deciding(
        &self,
        names: &[Vec<u8>; 2],
        matches: impl Fn(&[u8]) -> Matching,
        is_in: impl Fn(&Entry, &Matcher) -> bool,
    ) -> Option<&Entry> {
        self.entries.iter().find(|entry| {
            if let Some(workload) = &entry.workload {
                return is_in(entry, workload);
            }
            let is_path = entry.name.starts_with('/');
            if entry.denied {
                let is_named = names.iter().any(|name| entry.matches(name));
                return is_named || is_path && matches(entry.name.as_bytes()) != Matching::No;
            }
            // The entry may name a link: python3 is a link to python3.11.
            let name: &[u8] = if entry.matches(&names[0]) { &names[0] } else { entry.name.as_bytes() };
            matches(name) == Matching::Yes
        })
    }
}

impl Entry {
    fn matches(&self, name: &[u8]) -> bool {
        const COMM_MOST: usize = 15;
        if let Some(start) = self.name.strip_suffix('*') {
            return name.starts_with(start.as_bytes());
        }
        let is_truncated = self.denied && name.len() == COMM_MOST && self.name.as_bytes().starts_with(name);
        is_truncated || name == self.name.as_bytes()
    }
}

/// The workload or cgroup that an entry names: a kind and a name, such as `container web1`.
pub fn workload_entry(entry: &str) -> Option<Selector> {
    match Selector::parse(entry)? {
        selector @ (Selector::Workload(_) | Selector::Cgroup(_)) => Some(selector),
        _ => None,
    }
}

/// If an entry is invalid because it would never match, says why.
pub fn unfit_entry(entry: &str) -> Option<&'static str> {
    match Selector::parse(entry) {
        Some(Selector::User(_) | Selector::Exe(_)) => return Some("is no program; give its base name or path"),
        Some(selector) => return selector.unfit(),
        None => {}
    }
    let name = entry.strip_suffix('*').unwrap_or(entry);
    let is_path = entry.starts_with('/') && !entry.ends_with(['/', '*']);
    if entry.is_empty() {
        Some("is empty; give the base name of a program")
    } else if name.contains('*') {
        Some("has an asterisk before its end; give the base name of a program, or a prefix and one asterisk")
    } else if name.contains('/') && !is_path || name.contains('\0') {
        Some("is neither a name nor an absolute path; give the base name or the path of a program")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scope::exe::Distrust;

    /// The entry that denies root's program of this name, started by this link.
    fn denied_as<'a>(list: &'a DenyList, program: &str, link: &str) -> Option<&'a str> {
        let matches = |name: &[u8]| {
            let is_ours = [program, link].iter().any(|own| own.as_bytes() == name);
            if is_ours { Matching::Yes } else { Matching::No }
        };
        list.entry_for(&[program.into(), link.into()], matches)
    }

    fn denied<'a>(list: &'a DenyList, program: &str) -> Option<&'a str> {
        denied_as(list, program, program)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn with(list: DenyList, denied: &[&str], allowed: &[&str]) -> DenyList {
        list.with(&names(denied), &names(allowed), &Roots::default())
    }

    #[test]
    fn deny_list_matches_names_prefixes_and_truncated_names() {
        let deny = DenyList::default();
        for name in [
            "sshd",
            "ssh-agent",
            "gpg-agent",
            "gnome-keyring-d",
            "gnome-keyring-daemon",
            "keepassxc",
            "1password",
            "bitwarden",
            "bitwarden-desktop",
            "firefox",
            "firefox-esr",
            "chrome",
            "chrome_crashpad_handler",
            "chromium",
            "bao",
            "vaultwarden",
            "kadmind",
            "seamonkey-bin",
            "opera",
            "opera-stable",
            "opera_crashrepo",
            "QtWebEngineProc",
            "QtWebEngineProcess",
        ] {
            assert!(denied(&deny, name).is_some(), "{name}");
        }
        for free in ["", "sshx", "bash", "redis-server", "qemu-system-x86_64", "java", "my-firefox", "opus", "operator"]
        {
            assert_eq!(denied(&deny, free), None, "{free}");
        }
        let list = DenyList::new(["a-very-long-program-name".into()]);
        assert!(denied(&list, "a-very-long-pro").is_some(), "truncated by the kernel");
        assert!(denied(&list, "a-very-long").is_none());
    }

    #[test]
    fn a_link_and_a_path_deny_the_program_behind_them() {
        let list = DenyList::new(names(&["redis-server", "py*", "/opt/key"]));
        for link in ["redis-server", "python"] {
            assert!(denied_as(&list, "behind", link).is_some(), "{link}");
        }
        assert_eq!(denied_as(&list, "behind", "redis"), None);
        let user = |_: &[u8]| Matching::NameOnly(Distrust::CommandName);
        assert_eq!(list.entry_for(&[b"key".into(), b"key".into()], user), Some("/opt/key"), "whoever owns the path");
    }

    #[test]
    fn added_entries_take_precedence() {
        let list = DenyList::default();
        let list = with(list, &["mine*"], &["vault", "chrome-headless"]);
        assert_eq!(denied(&list, "mine-2"), Some("mine*"));
        assert_eq!(denied(&list, "vault"), None);
        let vault = [b"vault".into(), b"vault".into()];
        assert_eq!(list.entry_for(&vault, |_| Matching::No), Some("vault"), "a program that its user named so");
        assert_eq!((denied(&list, "chrome-headless"), denied(&list, "chrome")), (None, Some("chrome*")));
        assert_eq!(denied(&list, "ssh-agent"), Some("ssh-agent"), "the others stay");
        let again = with(list, &["vault"], &["mine-2"]);
        assert_eq!((denied(&again, "vault"), denied(&again, "mine-2")), (Some("vault"), None), "later entries win");
        assert_eq!(denied(&again, "mine-3"), Some("mine*"));
        let allows = |list: &DenyList, name: &str, trusted: &[&str]| {
            let is_trusted = |asked: &[u8]| trusted.iter().any(|trusted| trusted.as_bytes() == asked);
            let matches = |asked: &[u8]| if is_trusted(asked) { Matching::Yes } else { Matching::No };
            list.deciding(&[name.into(), name.into()], matches, |_, _| false).is_some_and(|entry| !entry.denied)
        };
        assert!(allows(&again, "mine-2", &["mine-2"]) && !allows(&again, "mine-2", &[]));
        assert!(!allows(&again, "vault", &["vault"]) && !allows(&again, "redis", &["redis"]));
        // A link to the program is as good as its own name, unless that is denied first.
        let list = with(DenyList::new(names(&["python*"])), &[], &["python3"]);
        assert_eq!(denied_as(&list, "python3.11", "python3"), None);
        assert_eq!(denied(&list, "python3.11"), Some("python*"));
        let list = with(list, &["python3.11"], &[]);
        assert!(!allows(&list, "python3.11", &["python3", "python3.11"]));
        // A truncated name may belong to a program that isn't allowed.
        let list = with(DenyList::new(names(&["systemd-homewor*"])), &[], &["systemd-homeworks"]);
        assert_eq!(denied(&list, "systemd-homewor"), Some("systemd-homewor*"));
    }

    #[test]
    fn entries_that_would_never_match_are_refused() {
        for fit in ["vault", "a", "*", "wallet*", "with space", "/usr/bin/vault", "cgroup /a"] {
            assert_eq!(unfit_entry(fit), None, "{fit}");
        }
        for unfit in ["", "a*b", "**", "/usr/bin/va*", "/usr/bin/", "/", "bin/", "a\0", "pod shop*", "cgroup /../a"] {
            assert!(unfit_entry(unfit).is_some(), "{unfit:?}");
        }
    }
}
