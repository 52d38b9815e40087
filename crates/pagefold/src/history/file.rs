//! The history's file: a header, and two rings of slots.

use super::Moment;
use crate::config::ownership;
use crate::control::protocol::GROUP;
use crate::place::{Place, cannot_write, open_regular, unusable};
use pagefold_procmem::os::peer::group_id;
use pagefold_text::exit::Exit;
use std::fs::{File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, fchown};
use std::path::Path;
use std::time::Duration;

const WORDS: usize = 11;
const SLOT: usize = WORDS * 8;
/// The header, which takes the place of the first slot.
const HEADER: &[u8] = b"pagefold.history/1\n";
/// For each ring, the seconds from slot to slot, and the number of slots.
const RINGS: [(u64, u64); 2] = [(60, 1_440), (900, 2_880)];
const LENGTH: u64 = SLOT as u64 * (1 + RINGS[0].1 + RINGS[1].1);
/// A crash can tear the slots that we're writing, one in each ring. If more are torn, the file is damaged.
const TORN_MOST: usize = 2;
/// We accept moments this far in the future, seconds, since clocks get corrected.
const FUTURE_MOST: u64 = 120;

#[derive(Clone, Debug)]
pub struct HistoryFile(Place);

impl HistoryFile {
    /// Checks that no other user can redirect our writes, and makes the file unless it exists. We replace a damaged
    /// history, and return a sentence that says so.
    ///
    /// # Errors
    /// We can't use this path, something else is there, or other users could redirect our writes. The exit code is 2.
    pub fn open(path: &Path) -> Result<(Self, Option<String>), Exit> {
        let place = Place::of_ours(path, "pagefold.history/").map_err(|why| unusable("the history", path, &why))?;
        let file = Self(place);
        let said = file.check();
        Ok((file, said))
    }

    /// Empties slots that a crash has torn, and starts a new file if too many slots are torn or we can't use the file.
    /// Returns a sentence if there was a problem.
    fn check(&self) -> Option<String> {
        let found = open(&self.0.path, true).and_then(|file| Ok((contents(&file)?, file)));
        match found {
            Ok(((_, torn), file)) => {
                // Even if this fails, torn slots count as empty.
                for slot in torn {
                    let _ = file.write_all_at(&[0; SLOT], offset(slot));
                }
                None
            }
            Err(error) if error.kind() == ErrorKind::NotFound => self.begin().err(),
            Err(error) => Some(self.replace_unless_passing(&error)),
        }
    }

    /// Replaces a file that isn't a history of ours. Keeps it if reading only failed for a passing reason.
    fn replace_unless_passing(&self, why: &io::Error) -> String {
        let shown = ownership::shown(&self.0.path);
        if matches!(why.raw_os_error(), Some(libc::EIO | libc::ENOMEM | libc::EMFILE | libc::ENFILE)) {
            return format!("cannot read the history {shown}: {why} (pagefold tries again)");
        }
        match self.begin() {
            Ok(()) => format!("the history {shown} {why}; pagefold begins a new one"),
            Err(error) => error,
        }
    }

    /// Makes an empty file and allocates all its space now, so that later writes can't fail for lack of space.
    /// Replaces a symbolic link instead of following it.
    fn begin(&self) -> Result<(), String> {
        self.0.replace(0o600, fill_empty).map_err(|error| {
            let shown = ownership::shown(&self.0.path);
            format!("cannot write the history {shown}: {error}; free space or name another file (pagefold tries again)")
        })
    }

    /// Writes a moment. The error is a sentence: writing failed, or we had to begin a new file.
    pub fn write(&self, moment: &Moment) -> Result<(), String> {
        let said = match open(&self.0.path, true).and_then(|file| header(&file)) {
            Ok(()) => None,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.begin()?;
                None
            }
            Err(error) => Some(self.replace_unless_passing(&error)),
        };
        let written = open(&self.0.path, true).and_then(|file| {
            let words = encode(moment);
            // Each slot has its own checksum, so neither the order nor the time at which slots reach the disk matters.
            slots(moment.time).iter().try_for_each(|&slot| file.write_all_at(&words, offset(slot)))
        });
        match (said, written) {
            (Some(said), _) => Err(said),
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => Err(cannot_write("the history", &self.0.path, &error)),
        }
    }
}

fn fill_empty(file: &mut File) -> io::Result<()> {
    let mut empty = HEADER.to_vec();
    empty.resize(usize::try_from(LENGTH).unwrap_or(usize::MAX), 0);
    file.write_all(&empty)?;
    // The group whose members may ask for the status may read the history, too.
    if group_id(GROUP).is_some_and(|group| fchown(&*file, None, Some(group)).is_ok()) {
        file.set_permissions(Permissions::from_mode(0o640))?;
    }
    file.sync_all()
}

/// Reads a file's moments that are at most `since` older than `now`, the oldest first.
///
/// # Errors
/// We can't read the file, or it isn't a history.
pub fn read(path: &Path, since: Duration, now: u64) -> io::Result<Vec<Moment>> {
    let (mut moments, _) = contents(&open(path, false)?)?;
    let first = now.saturating_sub(since.as_secs());
    moments.retain(|moment| (first..=now + FUTURE_MOST).contains(&moment.time));
    moments.sort_by_key(|moment| moment.time);
    moments.dedup_by_key(|moment| moment.time);
    Ok(moments)
}

fn open(path: &Path, write: bool) -> io::Result<File> {
    let file = open_regular(path, write)?;
    let length = file.metadata()?.len();
    if length != LENGTH {
        return Err(io::Error::other(format!("is not a history: it has {length} bytes, not {LENGTH}")));
    }
    Ok(file)
}

fn header(file: &File) -> io::Result<()> {
    let mut found = [0; HEADER.len()];
    file.read_exact_at(&mut found, 0)?;
    if found == HEADER { Ok(()) } else { Err(io::Error::other("is not a history, or one of another version")) }
}

/// The moments, and the torn slots.
fn contents(mut file: &File) -> io::Result<(Vec<Moment>, Vec<u64>)> {
    header(file)?;
    let mut bytes = vec![0; usize::try_from(LENGTH).unwrap_or(usize::MAX)];
    file.read_exact(&mut bytes)?;
    let mut moments = Vec::new();
    let mut torn = Vec::new();
    for (slot, words) in (0..).zip(bytes.chunks_exact(SLOT)).skip(1) {
        match decode(words).filter(|moment| slots(moment.time).contains(&slot)) {
            Some(moment) => moments.push(moment),
            None if words.iter().all(|byte| *byte == 0) => {}
            None => torn.push(slot),
        }
    }
    if torn.len() > TORN_MOST {
        return Err(io::Error::other(format!("is damaged in {} places", torn.len())));
    }
    Ok((moments, torn))
}

/// The slots for a time, one in each ring.
fn slots(time: u64) -> [u64; 2] {
    let [(minute, minutes), (quarter, quarters)] = RINGS;
    [1 + time / minute % minutes, 1 + minutes + time / quarter % quarters]
}

const fn offset(slot: u64) -> u64 {
    slot * SLOT as u64
}

fn encode(moment: &Moment) -> [u8; SLOT] {
    let words = [
        moment.time,
        moment.pid,
        moment.dry_run.into(),
        moment.saved_bytes,
        moment.expected_bytes,
        moment.marked_bytes,
        moment.resident_bytes,
        moment.available_bytes,
        moment.pagefold_ns,
        moment.ksmd_ns,
    ];
    let mut bytes = [0; SLOT];
    let (figures, sum) = bytes.split_at_mut(8 * words.len());
    for (place, word) in figures.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    sum.copy_from_slice(&checksum(&words).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Moment> {
    let mut words = [0_u64; WORDS];
    for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(place.try_into().ok()?);
    }
    let (figures, sum) = words.split_at(WORDS - 1);
    if sum != [checksum(figures)] {
        return None;
    }
    Some(Moment {
        time: figures[0],
        pid: figures[1],
        dry_run: figures[2] != 0,
        saved_bytes: figures[3],
        expected_bytes: figures[4],
        marked_bytes: figures[5],
        resident_bytes: figures[6],
        available_bytes: figures[7],
        pagefold_ns: figures[8],
        ksmd_ns: figures[9],
    })
}

/// FNV-1a. Zeros don't hash to zero, so an empty slot never passes as a moment.
fn checksum(words: &[u64]) -> u64 {
    let mut sum: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in words.iter().flat_map(|word| word.to_le_bytes()) {
        sum = (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    sum
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
