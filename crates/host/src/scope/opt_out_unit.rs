//! The opt-out of a systemd unit: `MemoryKSM=no`.
//!
//! We find the unit by its cgroup. Below slices, it's the service, socket, mount or swap that systemd has put the
//! process into. Below a user's manager (`user@UID.service`), it's also the unit that this manager has put the process
//! into. Cgroups further down belong to the unit itself, such as a container, whose unit files aren't on this machine's
//! paths.
//!
//! We read the files of systemd.unit(5), in its order of precedence: a unit's main file comes from the first directory
//! that has one, and so does each drop-in. Drop-ins follow the main file in the order of their names, and the last
//! assignment counts. We read them as they are now, whether or not systemd has loaded them. We don't search drop-ins
//! under other names (aliases) of the unit, nor the home directories of users that aren't in /etc/passwd.

use super::opt_out::{FILE_MOST, OptOut, below, names_in, read_file};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Directories of the system's units, in the order of precedence.
const SYSTEM: &[&str] = &[
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
];
/// Directories of a user's units. `~` is the home directory, `@` the runtime directory.
const USER: &[&str] = &[
    "~/.config/systemd/user.control",
    "@/systemd/user.control",
    "@/systemd/transient",
    "@/systemd/generator.early",
    "~/.config/systemd/user",
    "/etc/xdg/systemd/user",
    "/etc/systemd/user",
    "@/systemd/user",
    "/run/systemd/user",
    "@/systemd/generator",
    "~/.local/share/systemd/user",
    "/usr/local/share/systemd/user",
    "/usr/share/systemd/user",
    "/usr/local/lib/systemd/user",
    "/usr/lib/systemd/user",
    "@/systemd/generator.late",
];
/// We search at most this many drop-in directories whose names are the beginning of the unit's name, up to a dash.
const PREFIXES_MOST: usize = 8;

/// If there are more files in these directories, or more drop-ins among them, we read none.
const NAMES_MOST: usize = 1_024;
const DROP_INS_MOST: usize = 64;
/// We read at most this much of /etc/passwd.
const PASSWD_MOST: u64 = 4 << 20;

/// The user whose manager started the processes in a cgroup.
pub(super) fn user_of(path: &str) -> Option<u32> {
    units_in(path).iter().find_map(|unit| unit.user)
}

/// The opt-outs of a cgroup's units.
pub(super) fn of_cgroup(path: &str, root: &Path) -> Vec<OptOut> {
    let mut found = Vec::new();
    for UnitName { user, name } in units_in(path) {
        let user = user.map(|uid| User::of(uid, root));
        match Unit::of(name, user.as_ref(), root).deciding_file() {
            Ok(Some(file)) => found.push(OptOut::Unit { unit: name.to_owned(), file }),
            Ok(None) => {}
            Err(NotReadable) => found.push(OptOut::Unknown { cgroup: path.to_owned() }),
        }
    }
    found
}

/// A unit. `user` is set if a user's manager runs it, rather than the system's.
struct UnitName<'a> {
    user: Option<u32>,
    name: &'a str,
}

/// The units that a cgroup is in.
fn units_in(path: &str) -> Vec<UnitName<'_>> {
    let mut units: Vec<UnitName<'_>> = Vec::new();
    let mut user = None;
    for part in path.split('/') {
        if part.is_empty() || part.strip_suffix(".slice").is_some() {
            continue;
        }
        // systemd puts an underscore before a name that the kernel could use itself.
        let name = part.strip_prefix('_').unwrap_or(part);
        units.push(UnitName { user, name });
        if user.is_none() {
            user = manager_of(name);
        }
        // Below the second unit, or a unit that isn't a user's manager, cgroups belong to the unit itself.
        if user.is_none() || units.len() == 2 {
            break;
        }
    }
    units.retain(|unit| section_of(unit.name).is_some());
    units
}

/// The user of a manager: `user@UID.service`.
fn manager_of(unit: &str) -> Option<u32> {
    unit.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok()
}

/// The section of a unit's file that has the setting.
fn section_of(unit: &str) -> Option<&'static str> {
    let (name, kind) = unit.rsplit_once('.')?;
    let section = match kind {
        "service" => "Service",
        "socket" => "Socket",
        "mount" => "Mount",
        "swap" => "Swap",
        _ => return None,
    };
    if name.is_empty() { None } else { Some(section) }
}

/// The folders where a user may put units.
struct User {
    home: Option<PathBuf>,
    runtime: PathBuf,
}

impl User {
    fn of(uid: u32, root: &Path) -> Self {
        Self { home: home_of(uid, root), runtime: PathBuf::from(format!("/run/user/{uid}")) }
    }

    /// Where the user's manager looks for units.
    fn directories(&self) -> Vec<PathBuf> {
        let mut directories = Vec::new();
        for directory in USER {
            match (directory.split_at(1), &self.home) {
                (("~", inner), Some(home)) => directories.push(home.join(&inner[1..])),
                (("~", _), None) => {}
                (("@", inner), _) => directories.push(self.runtime.join(&inner[1..])),
                _ => directories.push(PathBuf::from(directory)),
            }
        }
        directories
    }
}

fn home_of(uid: u32, root: &Path) -> Option<PathBuf> {
    let text = read_file(&below(root, Path::new("/etc/passwd")), &[], PASSWD_MOST).ok()?;
    for line in String::from_utf8_lossy(&text).lines() {
        let fields: Vec<&str> = line.split(':').collect();
        if let [_, _, user, _, _, home, ..] = fields[..] {
            if user.parse() == Ok(uid) {
                let home = PathBuf::from(home);
                return if home.is_absolute() && home != Path::new("/") { Some(home) } else { None };
            }
        }
    }
    None
}

/// There are more files than we read, or there's a file that we can't or mustn't read.
struct NotReadable;

struct Unit<'a> {
    name: &'a str,
    /// Directories where the unit's files may be, as paths on this machine.
    directories: Vec<PathBuf>,
    /// The user's folders among them, below `root`.
    folders: Vec<PathBuf>,
    root: &'a Path,
}

impl<'a> Unit<'a> {
    fn of(name: &'a str, user: Option<&User>, root: &'a Path) -> Self {
        let Some(user) = user else {
            let directories = SYSTEM.iter().map(PathBuf::from).collect();
            return Self { name, directories, folders: Vec::new(), root };
        };
        let mut folders = vec![below(root, &user.runtime)];
        if let Some(home) = &user.home {
            folders.push(below(root, home));
        }
        Self { name, directories: user.directories(), folders, root }
    }

    /// The file that sets `MemoryKSM` to no, if that's the assignment that counts.
    fn deciding_file(&self) -> Result<Option<PathBuf>, NotReadable> {
        let Some(section) = section_of(self.name) else { return Ok(None) };
        let mut decided = None;
        for file in self.main_file().into_iter().chain(self.drop_ins()?) {
            let text = read_file(&below(self.root, &file), &self.folders, FILE_MOST).map_err(|_| NotReadable)?;
            if let Some(setting) = memory_ksm(&text, section) {
                decided = if setting == Setting::No { Some(file) } else { None };
            }
        }
        Ok(decided)
    }

    fn main_file(&self) -> Option<PathBuf> {
        let mut names = vec![self.name.to_owned()];
        names.extend(template_of(self.name));
        for name in names {
            for directory in &self.directories {
                let file = directory.join(&name);
                if below(self.root, &file).symlink_metadata().is_ok() {
                    return Some(file);
                }
            }
        }
        None
    }

    /// The drop-ins, in the order we apply them.
    fn drop_ins(&self) -> Result<Vec<PathBuf>, NotReadable> {
        let kind = self.name.rsplit_once('.').unwrap_or_default().1;
        let names = names_of(self.name);
        let mut directories = Vec::new();
        // Directories for all units of this kind (`service.d`) come after all others.
        for names in [&names[..], &[kind.to_owned()]] {
            for directory in &self.directories {
                directories.extend(names.iter().map(|name| directory.join(format!("{name}.d"))));
            }
        }
        let mut files = BTreeMap::new();
        let mut room = NAMES_MOST;
        for directory in directories {
            for name in names_in(&below(self.root, &directory), &self.folders, &mut room).ok_or(NotReadable)? {
                if name.strip_suffix(".conf").is_some() {
                    let file = directory.join(&name);
                    // Of several drop-ins with the same name we keep the first.
                    files.entry(name).or_insert(file);
                }
            }
        }
        if files.len() > DROP_INS_MOST {
            return Err(NotReadable);
        }
        Ok(files.into_values().collect())
    }
}

/// `a@.service` for `a@b.service`.
fn template_of(unit: &str) -> Option<String> {
    let (name, kind) = unit.rsplit_once('.')?;
    let (prefix, instance) = name.split_once('@')?;
    if instance.is_empty() { None } else { Some(format!("{prefix}@.{kind}")) }
}

/// The names that we search a unit's drop-ins by: its own, its template's, and both of them cut at each dash:
/// `a-b-c.service`, `a-b-.service`, `a-.service`.
fn names_of(unit: &str) -> Vec<String> {
    let mut names = Vec::new();
    let Some((name, kind)) = unit.rsplit_once('.') else { return names };
    let (prefix, instance) = name.split_once('@').unwrap_or((name, ""));
    let mut prefixes = vec![prefix];
    for (dash, _) in prefix.trim_end_matches('-').rmatch_indices('-').take(PREFIXES_MOST) {
        prefixes.push(&prefix[..=dash]);
    }
    for prefix in prefixes {
        if name.contains('@') {
            names.push(format!("{prefix}@{instance}.{kind}"));
            names.push(format!("{prefix}@.{kind}"));
        } else {
            names.push(format!("{prefix}.{kind}"));
        }
    }
    names.dedup();
    names
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Yes,
    No,
    /// An empty value: as if nothing had been assigned.
    Reset,
}

/// The last assignment of `MemoryKSM` in this section of a unit's file.
pub fn memory_ksm(text: &[u8], section: &str) -> Option<Setting> {
    let mut last = None;
    let mut is_here = false;
    let mut line = Vec::new();
    for part in text.split(|&byte| byte == b'\n') {
        let part = part.trim_ascii();
        if part.starts_with(b"#") || part.starts_with(b";") {
            continue; // also between the parts of a line
        }
        if let Some(part) = part.strip_suffix(b"\\") {
            line.extend_from_slice(part);
            line.push(b' ');
            continue;
        }
        line.extend_from_slice(part);
        let text = String::from_utf8_lossy(line.trim_ascii()).into_owned();
        line.clear();
        if text.starts_with('[') && text.ends_with(']') {
            is_here = text[1..text.len() - 1] == *section;
            continue;
        }
        match text.split_once('=') {
            Some((key, value)) if is_here && key.trim() == "MemoryKSM" => last = assigned(value.trim()).or(last),
            _ => {}
        }
    }
    last
}

/// The setting that a value assigns. `None`: it's invalid, and systemd ignores it.
fn assigned(value: &str) -> Option<Setting> {
    match value.to_ascii_lowercase().as_str() {
        "" => Some(Setting::Reset),
        "1" | "yes" | "y" | "true" | "t" | "on" => Some(Setting::Yes),
        "0" | "no" | "n" | "false" | "f" | "off" => Some(Setting::No),
        _ => None,
    }
}
