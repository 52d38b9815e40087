//! Decides which files of sketches count: the newest file of each host, if it's recent, made under the fleet's key, and
//! named after its host. We leave out all other files, and list these with the reason.

use crate::sources::EXTENSION;
use humantime::format_duration;
use pagefold_sketch::{KeyId, SketchFile};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use url::Url;

/// If a host's clock is this much ahead of ours, it's wrong.
const AHEAD: Duration = Duration::from_mins(5);

/// What a file says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub host: String,
    pub key: KeyId,
    /// Microseconds since 1970.
    pub time_us: u64,
    pub workloads: usize,
}

impl Header {
    pub fn of(file: &SketchFile) -> Result<Self, String> {
        let first = file.rows.first().ok_or("has no workload")?;
        Ok(Self { host: first.host.clone(), key: first.key, time_us: file.time_us(), workloads: file.rows.len() })
    }
}

/// A file with its header, or with the problem that it has.
#[derive(Clone, Debug)]
pub struct Seen {
    pub file: Url,
    pub header: Result<Header, String>,
}

/// The conditions under which files count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// The key. `None`: the key of most hosts.
    pub key: Option<KeyId>,
    /// Now, microseconds since 1970.
    pub now_us: u64,
    /// The age from which a host counts as gone.
    pub max_age: Duration,
}

/// A file that does not count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    pub file: String,
    pub host: Option<String>,
    /// A clause that continues a sentence about the file.
    pub why: String,
}

/// The files that count, and the others.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// The conditions, with the key that we've chosen.
    pub terms: Terms,
    pub chosen: Vec<(Url, Header)>,
    pub left_out: Vec<LeftOut>,
    /// How many files don't count because their host has a newer one.
    pub older: usize,
}

impl Inventory {
    pub fn of(seen: Vec<Seen>, terms: Terms) -> Self {
        let terms = Terms { key: terms.key.or_else(|| most_common_key(&seen, terms)), ..terms };
        let mut inventory = Self { terms, ..Self::default() };
        let mut by_host: BTreeMap<String, Vec<(Url, Header)>> = BTreeMap::new();
        for Seen { file, header } in seen {
            match header {
                Ok(header) => match terms.wrong(&file, &header) {
                    Some(why) => inventory.leave_out(&file, Some(header.host), why),
                    None => by_host.entry(header.host.clone()).or_default().push((file, header)),
                },
                Err(why) => inventory.leave_out(&file, None, why),
            }
        }
        for (host, mut files) in by_host {
            // Files with the same time are copies, of which we take the first.
            files.sort_by(|(a, of_a), (b, of_b)| (of_b.time_us, a).cmp(&(of_a.time_us, b)));
            inventory.older += files.len() - 1;
            let (file, header) = files.swap_remove(0);
            match terms.too_old(&header) {
                Some(why) => inventory.leave_out(&file, Some(host), why),
                None => inventory.chosen.push((file, header)),
            }
        }
        inventory
    }

    fn leave_out(&mut self, file: &Url, host: Option<String>, why: String) {
        self.left_out.push(LeftOut { file: name(file), host, why });
    }

    pub fn key(&self) -> Option<KeyId> {
        self.chosen.first().map(|(_, header)| header.key)
    }

    pub fn workloads(&self) -> usize {
        self.chosen.iter().map(|(_, header)| header.workloads).sum()
    }
}

impl Terms {
    /// Why a file doesn't count, apart from its age.
    fn wrong(&self, file: &Url, header: &Header) -> Option<String> {
        let ahead = Duration::from_micros(header.time_us.saturating_sub(self.now_us));
        match self.key {
            // Otherwise somebody who may write only one host's file could speak for another host.
            _ if !is_called_after(file, &header.host) => Some("is not named after its host (HOST.parquet)".to_owned()),
            Some(key) if key != header.key => Some(format!("was made under the key {}, not {key}", header.key)),
            _ if ahead > AHEAD => Some(format!("is {} ahead: its host's clock is wrong", rounded(ahead))),
            _ => None,
        }
    }

    fn too_old(&self, header: &Header) -> Option<String> {
        let age = Duration::from_micros(self.now_us.saturating_sub(header.time_us));
        if age <= self.max_age {
            return None;
        }
        Some(format!("is {} old: the host is gone, or writes no sketches", rounded(age)))
    }

    /// Why a file that counted before doesn't count any more: somebody may have replaced it.
    pub fn no_longer(&self, file: &Url, header: &Header) -> Option<String> {
        self.wrong(file, header).or_else(|| self.too_old(header))
    }
}

fn is_called_after(file: &Url, host: &str) -> bool {
    let name = file.path_segments().and_then(Iterator::last).unwrap_or_default();
    percent_decode_str(name).decode_utf8().is_ok_and(|name| name.strip_suffix(EXTENSION) == Some(host))
}

/// The key of most hosts, going by files that count otherwise. If two keys have equally many hosts, the lower one.
fn most_common_key(seen: &[Seen], terms: Terms) -> Option<KeyId> {
    let mut hosts: BTreeMap<KeyId, BTreeSet<&str>> = BTreeMap::new();
    for Seen { file, header } in seen {
        let Ok(header) = header else { continue };
        if terms.no_longer(file, header).is_none() {
            hosts.entry(header.key).or_default().insert(&header.host);
        }
    }
    hosts.into_iter().rev().max_by_key(|(_, hosts)| hosts.len()).map(|(key, _)| key)
}

fn rounded(time: Duration) -> impl std::fmt::Display {
    format_duration(Duration::from_secs(time.as_secs()))
}

/// A file's path if it's local, otherwise its URL. Always one line, whatever its name is.
pub fn name(file: &Url) -> String {
    match file.to_file_path() {
        Ok(path) if file.scheme() == "file" => path.display().to_string().replace(char::is_control, "?"),
        _ => file.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_US: u64 = 3_600_000_000;
    const NOW_US: u64 = 1_000_000 * HOUR_US;

    fn seen(file: &str, host: &str, key: u8, time_us: u64) -> Seen {
        let key = KeyId::parse(&format!("{key:016x}")).unwrap();
        let header = Header { host: host.into(), key, time_us, workloads: 2 };
        Seen { file: Url::parse(&format!("file:///s/{file}.parquet")).unwrap(), header: Ok(header) }
    }

    fn inventory(seen: Vec<Seen>, key: Option<u8>) -> (Vec<String>, Vec<(String, String)>, usize) {
        let key = key.map(|key| KeyId::parse(&format!("{key:016x}")).unwrap());
        let terms = Terms { key, now_us: NOW_US, max_age: Duration::from_hours(24) };
        let inventory = Inventory::of(seen, terms);
        let left_out = inventory.left_out.into_iter().map(|left| (left.file, left.why)).collect();
        (inventory.chosen.iter().map(|(file, _)| name(file)).collect(), left_out, inventory.older)
    }

    #[test]
    fn the_newest_file_of_a_host_counts() {
        let files = vec![
            seen("1/a", "a", 1, NOW_US - 3 * HOUR_US),
            seen("b", "b", 1, NOW_US),
            seen("2/a", "a", 1, NOW_US - HOUR_US),
            seen("2-copy/a", "a", 1, NOW_US - HOUR_US),
        ];
        assert_eq!(inventory(files, None), (vec!["/s/2-copy/a.parquet".into(), "/s/b.parquet".into()], vec![], 2));
    }

    #[test]
    fn files_that_do_not_count_are_named() {
        let broken = Seen { file: Url::parse("s3://bucket/x.parquet").unwrap(), header: Err("is cut off".into()) };
        let files = vec![
            seen("a", "a", 1, NOW_US),
            seen("b", "b", 1, NOW_US + HOUR_US / 60),
            seen("c/b", "a", 1, NOW_US),
            seen("ahead", "ahead", 1, NOW_US + HOUR_US),
            seen("gone", "gone", 1, NOW_US - 50 * HOUR_US),
            seen("other", "other", 2, NOW_US),
            broken,
        ];
        let (chosen, left_out, _) = inventory(files, None);
        assert_eq!(chosen, ["/s/a.parquet", "/s/b.parquet"]);
        let expected = [
            ("/s/c/b.parquet", "is not named after its host (HOST.parquet)"),
            ("/s/ahead.parquet", "is 1h ahead: its host's clock is wrong"),
            ("/s/other.parquet", "was made under the key 0000000000000002, not 0000000000000001"),
            ("s3://bucket/x.parquet", "is cut off"),
            ("/s/gone.parquet", "is 2days 2h old: the host is gone, or writes no sketches"),
        ];
        assert_eq!(left_out, expected.map(|(file, why)| (file.to_owned(), why.to_owned())));
    }

    #[test]
    fn a_host_has_one_vote_on_the_key_and_old_files_have_none() {
        let mut files = vec![seen("a", "a", 2, NOW_US), seen("b", "b", 2, NOW_US)];
        files.extend((0..5).map(|number| seen(&format!("{number}/c"), "c", 1, NOW_US)));
        files.extend((0..5).map(|number| seen("c", &format!("c{number}"), 1, NOW_US)));
        files.extend(["d", "e", "f"].map(|host| seen(host, host, 1, NOW_US - 50 * HOUR_US)));
        assert_eq!(inventory(files, None).0, ["/s/a.parquet", "/s/b.parquet"]);
    }

    #[test]
    fn the_key_can_be_named() {
        let files = vec![seen("a", "a", 1, NOW_US), seen("b", "b", 1, NOW_US), seen("c", "c", 2, NOW_US)];
        assert_eq!(inventory(files, Some(2)).0, ["/s/c.parquet"]);
    }

    #[test]
    fn a_clock_that_is_ahead_hides_no_good_file() {
        let files = vec![seen("old/a", "a", 1, NOW_US - HOUR_US), seen("ahead/a", "a", 1, NOW_US + HOUR_US)];
        let (chosen, left_out, older) = inventory(files, None);
        assert_eq!((chosen, left_out.len(), older), (vec!["/s/old/a.parquet".into()], 1, 0));
    }
}
