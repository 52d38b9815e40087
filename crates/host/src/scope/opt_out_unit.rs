//! The opt-out of a systemd unit: `MemoryKSM=no`.
//!
//! We know the unit by its cgroup: below slices, the service, socket, mount or swap that systemd has put the process
//! into, and below a user's manager (`user@UID.service`) also the unit that this manager has put it into. Cgroups below
//! belong to the unit itself, such as a container, and its files aren't on this machine's paths.
//!
//! We read the files of systemd.unit(5), in its order of precedence: the first directory with the unit in it gives its
//! main file, and the first one with a drop-in gives this drop-in. Drop-ins follow the main file in the order of their
//! names, and the last assignment counts. We read them as they are now, whether or not systemd has loaded them. We
//! don't search drop-ins under other names (aliases) of the unit, nor the home directories of users that aren't in
//! /etc/passwd.

use super::opt_out::{FILE_MOST, OptOut, below, names_in, read_file};
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
/// We search at most this many drop-in directories whose names begin as the unit's does, before a dash.
const PREFIXES_MOST: usize = 8;

/// If there are more files in these directories, or more drop-ins among them, we read none.
const NAMES_MOST: usize = 1_024;
const DROP_INS_MOST: usize = 64;
/// We read at most this much of /etc/passwd.
const PASSWD_MOST: u64 = 4 << 20;

/// The user whose manager started the processes in a cgroup.
pub(super) fn user_of(path: &str) -> Option<u32> {
    units_in(path).find_map(|(user, _)| user)
}

/// The opt-outs of a cgroup's units.
pub(super) fn of_cgroup(path: &str, root: &Path) -> Vec<OptOut> {
    let opt_out = |(user, name): (Option<u32>, &str)| {
        let unit = Unit { name, directories: directories(user, root), root };
        match unit.deciding_file() {
            Ok(file) => file.map(|file| OptOut::Unit { unit: name.to_owned(), file }),
            Err(TooMany) => Some(OptOut::Unknown { cgroup: path.to_owned() }),
        }
    };
    units_in(path).filter_map(opt_out).collect()
}

/// The units that a cgroup is in, with the user of their manager.
fn units_in(path: &str) -> impl Iterator<Item = (Option<u32>, &str)> {
    let mut parts = path.split('/').filter(|part| !part.is_empty() && part.strip_suffix(".slice").is_none());
    // systemd puts an underscore before a name that the kernel could use itself.
    let mut next = move || parts.next().map(|part| part.strip_prefix('_').unwrap_or(part));
    let first = next();
    let user = first.and_then(|unit| unit.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok());
    let second = user.and_then(|_: u32| next());
    let units = first.map(|unit| (None, unit)).into_iter().chain(second.map(|unit| (user, unit)));
    units.filter(|(_, unit)| section_of(unit).is_some())
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
    (!name.is_empty()).then_some(section)
}

/// Where units are, as paths on this machine.
fn directories(user: Option<u32>, root: &Path) -> Vec<PathBuf> {
    let Some(uid) = user else { return SYSTEM.iter().map(PathBuf::from).collect() };
    let (home, runtime) = (home_of(uid, root), PathBuf::from(format!("/run/user/{uid}")));
    let directory = |&directory: &&str| match directory.split_at(1) {
        ("~", inner) => home.as_ref().map(|home| home.join(&inner[1..])),
        ("@", inner) => Some(runtime.join(&inner[1..])),
        _ => Some(PathBuf::from(directory)),
    };
    USER.iter().filter_map(directory).collect()
}

fn home_of(uid: u32, root: &Path) -> Option<PathBuf> {
    let text = read_file(&below(root, Path::new("/etc/passwd")), PASSWD_MOST)?;
    let home = String::from_utf8_lossy(&text).lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next()?.parse() == Ok(uid)).then(|| fields.nth(2).map(PathBuf::from))?
    });
    home.filter(|home| home.is_absolute() && home != Path::new("/"))
}

/// There are more files than we read.
struct TooMany;

struct Unit<'a> {
    name: &'a str,
    directories: Vec<PathBuf>,
    root: &'a Path,
}

impl Unit<'_> {
    /// The file that sets it to no, if that's the assignment that counts.
    fn deciding_file(&self) -> Result<Option<PathBuf>, TooMany> {
        let Some(section) = section_of(self.name) else { return Ok(None) };
        let mut decided = None;
        for file in self.main_file().into_iter().chain(self.drop_ins()?) {
            let text = read_file(&below(self.root, &file), FILE_MOST).unwrap_or_default();
            if let Some(setting) = memory_ksm(&text, section) {
                decided = (setting == Setting::No).then_some(file);
            }
        }
        Ok(decided)
    }

    fn main_file(&self) -> Option<PathBuf> {
        let names = [Some(self.name.to_owned()), template_of(self.name)];
        names.into_iter().flatten().find_map(|name| {
            let mut files = self.directories.iter().map(|directory| directory.join(&name));
            files.find(|file| below(self.root, file).symlink_metadata().is_ok())
        })
    }

    /// The drop-ins, in the order we apply them.
    fn drop_ins(&self) -> Result<Vec<PathBuf>, TooMany> {
        let (names, kind) = (names_of(self.name), self.name.rsplit_once('.').map_or("", |(_, kind)| kind));
        let specific = self.directories.iter().flat_map(|directory| names.iter().map(move |name| directory.join(name)));
        // Drop-ins for all units of this kind give way to all others.
        let general = self.directories.iter().map(|directory| directory.join(kind));
        let (mut files, mut room): (Vec<(String, PathBuf)>, _) = (Vec::new(), NAMES_MOST);
        for directory in specific.chain(general) {
            let mut directory = directory.into_os_string();
            directory.push(".d");
            let directory = PathBuf::from(directory);
            for name in names_in(&below(self.root, &directory), &mut room).ok_or(TooMany)? {
                if name.strip_suffix(".conf").is_some() {
                    files.push((name.clone(), directory.join(name)));
                }
            }
        }
        // The sort is stable: of several with the same name the first one stays.
        files.sort_by(|(one, _), (other, _)| one.cmp(other));
        files.dedup_by(|(next, _), (kept, _)| next == kept);
        if files.len() > DROP_INS_MOST {
            return Err(TooMany);
        }
        Ok(files.into_iter().map(|(_, file)| file).collect())
    }
}

/// `a@.service` for `a@b.service`.
fn template_of(unit: &str) -> Option<String> {
    let (name, kind) = unit.rsplit_once('.')?;
    let (prefix, instance) = name.split_once('@')?;
    (!instance.is_empty()).then(|| format!("{prefix}@.{kind}"))
}

/// The names that we search a unit's drop-ins by: its own, its template's, and both of them cut at each dash:
/// `a-b-c.service`, `a-b-.service`, `a-.service`.
fn names_of(unit: &str) -> Vec<String> {
    let mut names = Vec::new();
    let Some((name, kind)) = unit.rsplit_once('.') else { return names };
    let (prefix, instance) = name.split_once('@').map_or((name, None), |(prefix, instance)| (prefix, Some(instance)));
    let dashes = prefix.trim_end_matches('-').rmatch_indices('-').take(PREFIXES_MOST);
    for prefix in std::iter::once(prefix).chain(dashes.map(|(at, _)| &prefix[..=at])) {
        match instance {
            Some(instance) => {
                names.push(format!("{prefix}@{instance}.{kind}"));
                names.push(format!("{prefix}@.{kind}"));
            }
            None => names.push(format!("{prefix}.{kind}")),
        }
    }
    names.dedup();
    names
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Yes,
    No,
    /// As if it had never been assigned.
    Reset,
}

/// The last assignment of `MemoryKSM` in this section of a unit's file.
pub fn memory_ksm(text: &[u8], section: &str) -> Option<Setting> {
    let (mut last, mut here, mut line) = (None, false, Vec::new());
    for part in text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii) {
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
        if let Some(name) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
            here = name == section;
        } else if let Some(value) = text.split_once('=').filter(|(key, _)| here && key.trim() == "MemoryKSM") {
            last = assigned(value.1.trim()).or(last);
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
