//! The programs whose memory we've marked.
//!
//! A mark outlives the run that made it, and forks inherit it. So we record each program in a file before we mark it,
//! and a later run knows which programs may have marks of ours. It doesn't look for marks of other programs: a program
//! that marks its own memory has chosen to do so, and mustn't be able to hold up merging with its marks.

use pagefold_engine::keys::DomainKey;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The name of the file, in the directory of KSM's state file.
pub(crate) const FILE_NAME: &str = "marked-programs";

/// The trust domain in which we marked each program, by the program's image.
#[derive(Debug, Default)]
pub(crate) struct MarkedPrograms {
    domains: HashMap<u64, DomainKey>,
    /// `None`: we mark nothing.
    record: Option<Record>,
}

#[derive(Debug)]
struct Record {
    path: PathBuf,
    file: File,
    lines: usize,
}

impl MarkedPrograms {
    /// Reads the record of earlier runs, and appends to it from now on. `key_of` gives a domain's key.
    pub(crate) fn open(path: PathBuf, mut key_of: impl FnMut(&str) -> DomainKey) -> io::Result<Self> {
        let mut options = File::options();
        let file = options.append(true).create(true).mode(0o600).open(&path)?;
        let text = fs::read(&path)?;
        let mut domains = HashMap::new();
        let mut lines = 0;
        for line in text.split(|&byte| byte == b'\n') {
            // The last line may be incomplete, if we were killed while we wrote it. Then we hadn't marked the program
            // yet.
            if let Ok((image, name)) = serde_json::from_slice::<(u64, String)>(line) {
                domains.insert(image, key_of(&name));
                lines += 1;
            }
        }
        Ok(Self { domains, record: Some(Record { path, file, lines }) })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.domains.is_empty()
    }

    pub(crate) fn domain(&self, image: u64) -> Option<DomainKey> {
        self.domains.get(&image).copied()
    }

    /// The domains of all recorded programs.
    pub(crate) fn domains(&self) -> impl Iterator<Item = DomainKey> {
        self.domains.values().copied()
    }

    /// Records a program that we're about to mark.
    pub(crate) fn add(&mut self, image: u64, domain: DomainKey, name: &str) -> io::Result<()> {
        if self.domain(image) == Some(domain) {
            return Ok(());
        }
        if let Some(record) = &mut self.record {
            // We begin a new line, because the last one may be incomplete.
            record.file.write_all(format!("\n{}\n", line(image, name)).as_bytes())?;
            record.lines += 1;
        }
        self.domains.insert(image, domain);
        Ok(())
    }

    /// Whether there are more than `most` programs, or more lines in the file.
    pub(crate) fn are_more_than(&self, most: usize) -> bool {
        self.domains.len() > most || self.record.as_ref().is_some_and(|record| record.lines > most)
    }

    /// Forgets all programs but the `running` ones. If we can't write the file, it still names the forgotten ones.
    pub(crate) fn keep(&mut self, running: &HashSet<u64>, names: &[String]) {
        self.domains.retain(|image, _| running.contains(image));
        let _ = self.rewrite(names);
    }

    fn rewrite(&mut self, names: &[String]) -> io::Result<()> {
        let Some(record) = &mut self.record else { return Ok(()) };
        let mut text = String::new();
        for (&image, domain) in &self.domains {
            let name = names.get(usize::from(domain.0)).map_or("", String::as_str);
            text += &line(image, name);
            text.push('\n');
        }
        let new = record.path.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut options = File::options();
        let mut file = options.append(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&new, &record.path)?;
        record.file = file;
        record.lines = self.domains.len();
        Ok(())
    }
}

fn line(image: u64, name: &str) -> String {
    serde_json::json!([image, name]).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 3] = ["default", "two\nlines", "user:1"];

    fn open(path: &std::path::Path) -> MarkedPrograms {
        let key_of = |name: &str| {
            let at = NAMES.iter().position(|known| *known == name).unwrap();
            DomainKey(u16::try_from(at).unwrap())
        };
        MarkedPrograms::open(path.to_owned(), key_of).unwrap()
    }

    #[test]
    fn the_next_run_knows_what_was_marked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let mut marked = open(&path);
        assert!(marked.is_empty());
        for (image, domain) in [(1, 0), (u64::MAX, 1), (1, 0), (1, 2)] {
            marked.add(image, DomainKey(domain), NAMES[usize::from(domain)]).unwrap();
        }
        // As if a run had been killed while it wrote a line.
        fs::write(&path, [&fs::read(&path).unwrap()[..], b"\n[7,\"us"].concat()).unwrap();
        let mut marked = open(&path);
        assert_eq!([1, u64::MAX, 7].map(|image| marked.domain(image)), [Some(DomainKey(2)), Some(DomainKey(1)), None]);
        marked.add(7, DomainKey(0), NAMES[0]).unwrap();
        assert!(marked.are_more_than(3) && !marked.are_more_than(4), "one image has two lines");
        let names = NAMES.map(str::to_owned);
        marked.keep(&[1, 7].into(), &names);
        assert!(!marked.are_more_than(2));
        marked.add(8, DomainKey(1), NAMES[1]).unwrap();
        let marked = open(&path);
        let found = [1, 7, 8, u64::MAX].map(|image| marked.domain(image).map(|domain| domain.0));
        assert_eq!(found, [Some(2), Some(0), Some(1), None]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
