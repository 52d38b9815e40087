//! Files of sketches, and sketches in them, which come from hosts that may be hostile.

use pagefold_sketch::{FleetKey, Sketch};
use std::io::Cursor;

/// A file of sketches: nothing panics, even with a correct checksum, and a file that parses is the same after we write
/// and read it again. The same holds for a sketch alone, and for a key.
pub fn sketches(bytes: &[u8]) {
    let mut sealed = bytes.to_vec();
    pagefold_sketch::seal::reseal(&mut sealed).unwrap_or_else(|error| panic!("{error}"));
    for bytes in [bytes.to_vec(), sealed] {
        let Ok(file) = pagefold_sketch::read(bytes) else { continue };
        let written = pagefold_sketch::write(Cursor::new(Vec::new()), &file.rows);
        let written = written.unwrap_or_else(|error| panic!("{error}")).into_inner();
        assert_eq!(pagefold_sketch::read(written).unwrap_or_else(|error| panic!("{error}")), file);
    }
    if let Ok(sketch) = Sketch::from_bytes(bytes) {
        assert_eq!(sketch.to_bytes(), bytes);
        let all = sketch.contents();
        assert!(all.low <= all.contents && all.contents <= all.high);
        let both = sketch.common(&sketch);
        assert!((both.contents - all.contents).abs() <= 1e-6 * all.contents);
        assert!(sketch.without(&sketch).contents.abs() < 1e-9);
    }
    if let Some(key) = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<FleetKey>().ok()) {
        assert_eq!(pagefold_sketch::KeyId::parse(&key.id().to_string()), Some(key.id()));
    }
}
