//! The deny list: programs that we never mark, and its default entries.

use super::ProcessInfo;
use super::opt_out::OptOut;
use super::workload::Workload;

/// Programs that we never mark, because they hold keys, passwords or web pages. Also the names whose opt-outs the
/// administrator overrides. An entry is the base name of a program, or a prefix followed by `*`.
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
    "sudo",
    "su",
    "login",
    "passwd",
    "cryptsetup",
    "systemd-cryptse*",
    "systemd-homed",
    "systemd-homewor*",
    "krb5kdc",
    "sssd*",
    // password managers
    "keepassxc*",
    "keepass2",
    "keepassxc-proxy",
    "1password*",
    "op",
    "bitwarden*",
    "bw",
    "enpass",
    "proton-pass*",
    "pass",
    // browsers, and mail programs with browser engines
    "firefox*",
    "plugin-containe*",
    "librewolf*",
    "thunderbird*",
    "chrome*",
    "chromium*",
    "google-chrome*",
    "brave*",
    "msedge*",
    "opera*",
    "vivaldi*",
    "epiphany*",
    "WebKitWebProces*",
    "WebKitNetworkPr*",
    "tor",
    "tor-browser*",
    "signal-desktop*",
];

impl DenyList {
    pub fn new(entries: impl IntoIterator<Item = String>) -> Self {
        let entries = entries.into_iter().map(|name| Entry { name, denied: true }).collect();
        Self { entries, overridden: Vec::new(), workloads: Vec::new() }
    }

    /// Adds entries that take precedence over the existing ones. Among the new entries, `denied` takes precedence over
    /// `allowed`, which match only executables that root alone can change (see [`super::exe`]).
    #[must_use]
    pub fn with(mut self, denied: &[String], allowed: &[String]) -> Self {
        let mut entries = Self::new(denied.iter().cloned()).entries;
        for name in allowed {
            entries.push(Entry { name: name.clone(), denied: false });
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

    /// Denies these workloads, too.
    #[must_use]
    pub fn denying(mut self, workloads: impl IntoIterator<Item = Workload>) -> Self {
        self.workloads.extend(workloads);
        self
    }

    /// The workload of a process that we must not mark.
    pub(super) fn workload_of(&self, info: &ProcessInfo) -> Option<&Workload> {
        self.workloads.iter().find(|workload| workload.names(info))
    }

    /// Whether an opt-out of a process doesn't count. `program` is the base name of its executable, if root alone can
    /// change the executable.
    pub fn overrides(&self, opt_out: &OptOut, program: Option<&[u8]>) -> bool {
        self.overridden.iter().any(|name| opt_out.is_called(name) || program == Some(name.as_bytes()))
    }

    /// The entry that denies a program of this name, if any. A name of 15 bytes may be a truncated command name, so
    /// longer entries that begin with it deny it, but don't allow it: the full name may differ. `is_trusted` says
    /// whether only root can have given the program a name (its own, or the name of a link to it). Any user can give
    /// other files any name.
    pub fn entry_for(&self, name: &[u8], is_trusted: impl Fn(&[u8]) -> bool) -> Option<&str> {
        match self.deciding(name, is_trusted) {
            Some(entry) if entry.denied => Some(&entry.name),
            _ => None,
        }
    }

    /// Whether an entry allows a program of this name.
    pub fn allows(&self, name: &[u8], is_trusted: impl Fn(&[u8]) -> bool) -> bool {
        self.deciding(name, is_trusted).is_some_and(|entry| !entry.denied)
    }

    fn deciding(&self, name: &[u8], is_trusted: impl Fn(&[u8]) -> bool) -> Option<&Entry> {
        self.entries.iter().find(|entry| {
            if entry.matches(name) {
                return entry.denied || is_trusted(name);
            }
            // The entry may name a link: python3 is a link to python3.11.
            !entry.denied && is_trusted(entry.name.as_bytes())
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

/// If an entry is invalid because it would never match, says why.
pub fn unfit_entry(entry: &str) -> Option<&'static str> {
    let name = entry.strip_suffix('*').unwrap_or(entry);
    if entry.is_empty() {
        Some("is empty; give the base name of a program")
    } else if name.contains('*') {
        Some("has an asterisk before its end; give the base name of a program, or a prefix and one asterisk")
    } else if name.contains(['/', '\0']) {
        Some("is a path; give the base name of the program")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deny_list_matches_names_prefixes_and_truncated_names() {
        let deny = DenyList::default();
        for denied in [
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
        ] {
            assert!(deny.entry_for(denied.as_bytes(), |name| name == denied.as_bytes()).is_some(), "{denied}");
        }
        for free in ["", "sshx", "bash", "redis-server", "qemu-system-x86_64", "java", "my-firefox", "opus"] {
            assert_eq!(deny.entry_for(free.as_bytes(), |name| name == free.as_bytes()), None, "{free}");
        }
        let list = DenyList::new(["a-very-long-program-name".into()]);
        assert!(
            list.entry_for(b"a-very-long-pro", |name| name == b"a-very-long-pro").is_some(),
            "truncated by the kernel"
        );
        assert!(list.entry_for(b"a-very-long", |name| name == b"a-very-long").is_none());
    }

    #[test]
    fn added_entries_take_precedence() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let list = DenyList::default().with(&names(&["mine*"]), &names(&["vault", "chrome-headless"]));
        assert_eq!(list.entry_for(b"mine-2", |name| name == b"mine-2"), Some("mine*"));
        assert_eq!(list.entry_for(b"vault", |name| name == b"vault"), None);
        assert_eq!(list.entry_for(b"vault", |_| false), Some("vault"), "a program that its user named so");
        assert_eq!(
            (
                list.entry_for(b"chrome-headless", |name| name == b"chrome-headless"),
                list.entry_for(b"chrome", |name| name == b"chrome")
            ),
            (None, Some("chrome*"))
        );
        assert_eq!(list.entry_for(b"ssh-agent", |name| name == b"ssh-agent"), Some("ssh-agent"), "the others stay");
        let again = list.with(&names(&["vault"]), &names(&["mine-2"]));
        assert_eq!(
            (again.entry_for(b"vault", |name| name == b"vault"), again.entry_for(b"mine-2", |name| name == b"mine-2")),
            (Some("vault"), None),
            "later entries win"
        );
        assert_eq!(again.entry_for(b"mine-3", |name| name == b"mine-3"), Some("mine*"));
        let allows = |name: &[u8], trusted| again.allows(name, |asked| trusted && asked == name);
        assert!(
            allows(b"mine-2", true) && !allows(b"mine-2", false) && !allows(b"vault", true) && !allows(b"redis", true)
        );
        // A link to the program is as good as its own name, unless that is denied first.
        let linked = |name: &[u8]| [b"python3".as_slice(), b"python3.11"].contains(&name);
        let list = DenyList::new(names(&["python*"])).with(&[], &names(&["python3"]));
        assert_eq!(list.entry_for(b"python3.11", linked), None);
        assert_eq!(list.entry_for(b"python3.11", |name| name == b"python3.11"), Some("python*"));
        assert!(!list.with(&names(&["python3.11"]), &[]).allows(b"python3.11", linked));
        // A truncated name may belong to a program that isn't allowed.
        let list = DenyList::new(names(&["systemd-homewor*"])).with(&[], &names(&["systemd-homeworks"]));
        assert_eq!(list.entry_for(b"systemd-homewor", |name| name == b"systemd-homewor"), Some("systemd-homewor*"));
    }

    #[test]
    fn entries_that_would_never_match_are_refused() {
        for fit in ["vault", "a", "*", "wallet*", "with space"] {
            assert_eq!(unfit_entry(fit), None, "{fit}");
        }
        for unfit in ["", "a*b", "**", "/usr/bin/vault", "bin/", "a\0"] {
            assert!(unfit_entry(unfit).is_some(), "{unfit:?}");
        }
    }
}
