//! The checksum of a record's file.
//!
//! Parquet has optional checksums for its pages and none for its metadata, which readers trust. Therefore the last entry
//! of the key-value metadata is the XXH3-64 of the whole file, computed with zeros in place of its digits. A file that
//! differs in any byte is refused before anything else in it is decoded.

use super::RecordError;
use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use twox_hash::XxHash3_64;

/// Prefix of the value.
const MARK: &[u8] = b"xxh3-64:";
/// Hexadecimal digits of the value.
const DIGITS: usize = 16;
/// Parquet's magic number at both ends of the file.
const MAGIC: &[u8] = b"PAR1";
/// The checksum is near the end: only the program's name, the columns' order and the footer's length follow it.
const TAIL_BYTES: u64 = 4096;

/// The placeholder until the checksum is known.
pub(crate) fn blank() -> String {
    format!("{}{:0DIGITS$x}", String::from_utf8_lossy(MARK), 0)
}

/// A writer that computes the checksum of all bytes written.
pub(crate) struct Sealing<W> {
    inner: W,
    hasher: XxHash3_64,
    bytes: u64,
}

impl<W: Write> Sealing<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, hasher: XxHash3_64::new(), bytes: 0 }
    }
}

impl<W: Write> Write for Sealing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.write(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<W: Write + Read + Seek> Sealing<W> {
    /// Replaces the [`blank`] checksum. Returns the inner writer and the number of bytes written.
    pub(crate) fn seal(mut self) -> io::Result<(W, u64)> {
        let place =
            find(&mut self.inner, self.bytes)?.ok_or_else(|| io::Error::other("the checksum's place is missing"))?;
        self.inner.seek(SeekFrom::Start(place))?;
        write!(self.inner, "{:0DIGITS$x}", self.hasher.finish())?;
        self.inner.flush()?;
        Ok((self.inner, self.bytes))
    }
}

/// The offset of the digits, after the last mark in the file.
fn find(file: &mut (impl Read + Seek), bytes: u64) -> io::Result<Option<u64>> {
    let from = bytes.saturating_sub(TAIL_BYTES);
    let tail = read(file, from, TAIL_BYTES)?;
    let last = tail.windows(MARK.len() + DIGITS).rposition(|window| window.starts_with(MARK));
    Ok(last.map(|at| from + (at + MARK.len()) as u64))
}

/// Reads at most `bytes` bytes at `from`.
fn read(file: &mut (impl Read + Seek), from: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

/// Checks that the file is unchanged since it was written.
pub(crate) fn check(path: &Path, file: &mut File) -> Result<(), RecordError> {
    let failed = |source| RecordError::Read { path: path.to_owned(), source };
    let damaged = |what: &str| RecordError::Damaged { path: path.to_owned(), what: what.to_owned() };
    let bytes = file.metadata().map_err(failed)?.len();
    if read(file, 0, MAGIC.len() as u64).map_err(failed)? != MAGIC {
        return Err(RecordError::NotParquet { path: path.to_owned() });
    }
    let tail = read(file, bytes.saturating_sub(TAIL_BYTES), TAIL_BYTES).map_err(failed)?;
    if bytes < 2 * MAGIC.len() as u64 || !tail.ends_with(MAGIC) {
        return Err(RecordError::CutOff { path: path.to_owned() });
    }
    let Some(place) = find(file, bytes).map_err(failed)? else {
        let ours = tail.windows(8).any(|window| window == b"pagefold");
        let what = "it has no checksum".to_owned();
        return Err(if ours { damaged(&what) } else { RecordError::NotARecord { path: path.to_owned(), what } });
    };
    let (checksum, written) = checksum(file, place).map_err(failed)?;
    if written != format!("{checksum:0DIGITS$x}").as_bytes() {
        return Err(damaged("its checksum is wrong"));
    }
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    Ok(())
}

/// The checksum of a file with zeros in place of the digits at `place`, and the digits.
fn checksum(file: &mut (impl Read + Seek), place: u64) -> io::Result<(u64, Vec<u8>)> {
    let digits = read(file, place, DIGITS as u64)?;
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = XxHash3_64::new();
    let mut buffer = vec![0; 1 << 20];
    let mut hash = |part: &mut dyn Read| -> io::Result<()> {
        loop {
            match part.read(&mut buffer)? {
                0 => return Ok(()),
                read => hasher.write(&buffer[..read]),
            }
        }
    };
    hash(&mut Read::by_ref(file).take(place))?;
    hash(&mut &[b'0'; DIGITS][..])?;
    file.seek(SeekFrom::Start(place + DIGITS as u64))?;
    hash(file)?;
    Ok((hasher.finish(), digits))
}

/// Corrects the checksum of changed bytes, if its place can still be found: for tests of later checks.
#[cfg(test)]
pub(super) fn reseal(bytes: &mut [u8]) {
    let mut file = io::Cursor::new(&mut *bytes);
    let length = file.get_ref().len() as u64;
    let Some(place) = find(&mut file, length).unwrap() else { return };
    let (checksum, _) = checksum(&mut file, place).unwrap();
    let place = usize::try_from(place).unwrap();
    bytes[place..place + DIGITS].copy_from_slice(format!("{checksum:0DIGITS$x}").as_bytes());
}
