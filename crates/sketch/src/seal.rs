//! The checksum of a file.
//!
//! Parquet has optional checksums for its pages and none for its metadata, which readers trust. So the last entry of
//! the key-value metadata is the XXH3-64 of the whole file, computed with zeros in place of its digits. If any byte has
//! changed, we refuse the file before we decode anything else in it.

use std::hash::Hasher;
use std::io::{self, Read, Seek, SeekFrom, Write};
use thiserror::Error;
use twox_hash::XxHash3_64;

const MARK: &[u8] = b"xxh3-64:";
const DIGITS: usize = 16;
/// Parquet's magic number at both ends of the file.
const MAGIC: &[u8] = b"PAR1";
/// The checksum is near the end: only the program's name, the columns' order and the footer's length follow it.
const TAIL_BYTES: u64 = 4096;

/// Why a file isn't as we wrote it.
#[derive(Debug, Error)]
pub enum SealError {
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("it is not a Parquet file")]
    NotParquet,
    #[error("it is cut off, or something follows its end")]
    CutOff,
    /// `ours`: pagefold wrote the file, so it should have a checksum.
    #[error("it has no checksum")]
    NoChecksum { ours: bool },
    #[error("its checksum is wrong")]
    Wrong,
}

/// Key of the schema's name in a file's metadata.
pub const KEY_SCHEMA: &str = "pagefold.schema";
/// Version of the program that wrote the file.
pub const KEY_VERSION: &str = "pagefold.version";
const KEY_CHECKSUM: &str = "pagefold.checksum";

/// The entries of a file's metadata, made by `entry`, with the checksum.
pub fn entries<T>(own: &[(&str, String)], entry: fn(String, String) -> T) -> Vec<T> {
    // The checksum comes last, because we search for it near the end of the file.
    let checksum = (KEY_CHECKSUM, blank());
    own.iter().chain([&checksum]).map(|(key, value)| entry((*key).to_owned(), value.clone())).collect()
}

/// The value of the checksum's entry before we know the checksum: all its digits are zeros.
pub fn blank() -> String {
    format!("{}{:0DIGITS$x}", String::from_utf8_lossy(MARK), 0)
}

/// A writer that computes the checksum of all bytes written.
pub struct Sealing<W> {
    inner: W,
    hasher: XxHash3_64,
    bytes: u64,
}

impl<W: Write> Sealing<W> {
    pub fn new(inner: W) -> Self {
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
    /// Writes the checksum over the [`blank`] one. Returns the inner writer and the number of bytes written.
    pub fn seal(mut self) -> io::Result<(W, u64)> {
        let place =
            find(&mut self.inner, self.bytes)?.ok_or_else(|| io::Error::other("the checksum's place is missing"))?;
        self.inner.seek(SeekFrom::Start(place))?;
        write!(self.inner, "{:0DIGITS$x}", self.hasher.finish())?;
        self.inner.flush()?;
        Ok((self.inner, self.bytes))
    }
}

/// The offset of the checksum's digits, which follow the last `xxh3-64:` in the file.
fn find<F: Read + Seek>(file: &mut F, bytes: u64) -> io::Result<Option<u64>> {
    let from = bytes.saturating_sub(TAIL_BYTES);
    let tail = read(file, from, TAIL_BYTES)?;
    let last = tail.windows(MARK.len() + DIGITS).rposition(|window| window.starts_with(MARK));
    Ok(last.map(|at| from + (at + MARK.len()) as u64))
}

/// Reads at most `bytes` bytes at `from`.
fn read<F: Read + Seek>(file: &mut F, from: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

/// Checks that the file is unchanged since it was written, and returns to its beginning.
pub fn check<F: Read + Seek>(file: &mut F) -> Result<(), SealError> {
    let bytes = file.seek(SeekFrom::End(0))?;
    if read(file, 0, MAGIC.len() as u64)? != MAGIC {
        return Err(SealError::NotParquet);
    }
    let tail = read(file, bytes.saturating_sub(TAIL_BYTES), TAIL_BYTES)?;
    if bytes < 2 * MAGIC.len() as u64 || !tail.ends_with(MAGIC) {
        return Err(SealError::CutOff);
    }
    let Some(place) = find(file, bytes)? else {
        return Err(SealError::NoChecksum { ours: tail.windows(8).any(|window| window == b"pagefold") });
    };
    let (checksum, written) = checksum(file, place)?;
    if written != format!("{checksum:0DIGITS$x}").as_bytes() {
        return Err(SealError::Wrong);
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(())
}

/// The checksum of a file with zeros in place of the digits at `place`, and the digits.
fn checksum<F: Read + Seek>(file: &mut F, place: u64) -> io::Result<(u64, Vec<u8>)> {
    let digits = read(file, place, DIGITS as u64)?;
    let mut hasher = XxHash3_64::new();
    file.seek(SeekFrom::Start(0))?;
    hash(&mut hasher, Read::by_ref(file).take(place))?;
    hasher.write(&[b'0'; DIGITS]);
    file.seek(SeekFrom::Start(place + DIGITS as u64))?;
    hash(&mut hasher, file)?;
    Ok((hasher.finish(), digits))
}

fn hash(hasher: &mut XxHash3_64, mut part: impl Read) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match part.read(&mut buffer)? {
            0 => return Ok(()),
            read => hasher.write(&buffer[..read]),
        }
    }
}

/// Corrects the checksum after bytes were changed, unless the change hid the checksum's place. For tests and
/// fuzzing of later checks.
pub fn reseal(bytes: &mut [u8]) -> io::Result<()> {
    let mut file = io::Cursor::new(bytes);
    let length = file.get_ref().len() as u64;
    let Some(place) = find(&mut file, length)? else { return Ok(()) };
    let (checksum, _) = checksum(&mut file, place)?;
    file.seek(SeekFrom::Start(place))?;
    write!(file, "{checksum:0DIGITS$x}")
}
