//! Files of sketches: we read back our own, and refuse everything else by name.

use super::*;
use crate::Content;
use proptest::prelude::*;

fn sketch(contents: std::ops::Range<u64>) -> Sketch {
    Sketch::of(contents.map(|number| Content(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))))
}

fn row(workload: &str, contents: std::ops::Range<u64>) -> Row {
    let pages = contents.end - contents.start;
    Row {
        host: "node-1.example".into(),
        key: KeyId::parse("00112233445566aa").unwrap(),
        kind: Kind::Pod,
        workload: workload.into(),
        domain: "default".into(),
        time_us: 1_800_000_000_000_000,
        since_us: 1_799_999_000_000_000,
        anonymous_bytes: (pages + 30) * 4096,
        read_bytes: (pages + 20) * 4096,
        zero_bytes: 10 * 4096,
        pages: [pages, 2, 3, 4, 1],
        savable_bytes: 19 * 4096,
        saved_bytes: 11,
        take_back_bytes: 12,
        came_bytes: 13,
        went_bytes: 14,
        broken_bytes: 15,
        cpu_millicores: 16,
        host_memory_bytes: 17,
        host_cpu_millicores: 18,
        ..Row::blank(sketch(contents))
    }
}

fn small() -> SketchFile {
    SketchFile { rows: vec![row("web", 0..5000), row("bäckend", 1..2), row("idle", 7..7)] }
}

fn bytes_of(file: &SketchFile) -> Vec<u8> {
    write(Cursor::new(Vec::new()), &file.rows).unwrap().into_inner()
}

fn refused(file: &SketchFile) -> String {
    write(Cursor::new(Vec::new()), &file.rows).unwrap_err().to_string()
}

#[test]
fn a_file_is_read_back() {
    assert_eq!(read(bytes_of(&small())).unwrap(), small());
    assert_eq!(small().host(), Some("node-1.example"));
    assert_eq!(read(bytes_of(&SketchFile::default())).unwrap(), SketchFile::default());
    // Several row groups.
    let many = SketchFile { rows: (0..200).map(|at| row(&format!("w{at}"), at..at + 3 * at)).collect() };
    assert!(read(bytes_of(&many)).unwrap() == many);
}

#[test]
fn rows_that_no_host_reports_are_refused() {
    let with = |change: fn(&mut Row)| {
        let mut file = small();
        change(&mut file.rows[1]);
        refused(&file)
    };
    assert!(with(|row| row.workload = String::new()).contains("row 1: the name in workload has 0 bytes"));
    assert!(with(|row| row.domain = "x".repeat(1025)).contains("domain has 1025 bytes"));
    assert!(with(|row| row.host = "a\nb".into()).contains("control character"));
    assert!(with(|row| row.host = "b".into()).contains("another host"));
    assert!(with(|row| row.workload = "web".into()).contains("an earlier row has a pod of the same name"));
    assert!(with(|row| row.read_bytes = 1 << 40).contains("more than anonymous_bytes"));
    assert!(with(|row| row.zero_bytes = row.read_bytes + 1).contains("more pages"));
    assert!(with(|row| row.pages[0] = u64::MAX).contains("more pages"));
    assert!(with(|row| row.sketch = sketch(0..500)).contains("at least 500 contents"));
    assert!(with(|row| row.since_us = row.time_us + 1).contains("more than time_us"));
    let most = SketchFile { rows: (0..4097).map(|at| row(&format!("w{at}"), 0..0)).collect() };
    assert_eq!(refused(&most), "has 4097 workloads, and one host has at most 4096");
}

#[test]
fn numbers_have_a_limit() {
    // We write a number that's above the limit as the limit.
    let mut file = small();
    (file.rows[0].saved_bytes, file.rows[0].cpu_millicores) = (1 << 60, u64::MAX);
    let row = &read(bytes_of(&file)).unwrap().rows[0];
    assert_eq!((row.saved_bytes, row.cpu_millicores), (1 << 50, 1 << 50));
}

#[test]
fn other_files_are_refused_by_name() {
    let bytes = bytes_of(&small());
    let why = |bytes: &[u8]| read(bytes.to_vec()).unwrap_err().to_string();
    assert_eq!(why(b""), "is not a Parquet file");
    assert_eq!(why(b"PAR1"), "is cut off, or something follows its end");
    assert_eq!(why(&bytes[..bytes.len() / 2]), "is cut off, or something follows its end");
    let mut damaged = bytes.clone();
    damaged[1000] ^= 1;
    assert_eq!(why(&damaged), "is damaged: its checksum is wrong");
    // These changes have a correct checksum.
    let changed = |from: &[u8], to: &[u8]| {
        let mut bytes = bytes.clone();
        while let Some(at) = bytes.windows(from.len()).position(|window| window == from) {
            bytes[at..at + from.len()].copy_from_slice(to);
        }
        seal::reseal(&mut bytes).unwrap();
        why(&bytes)
    };
    assert!(changed(b"pagefold.sketch/1", b"pagefold.sketch/2").contains("schema pagefold.sketch/2"));
    assert!(changed(b"pagefold.sketch/1", b"someoneelse.tab/1").contains("is not a file of sketches"));
    assert!(changed(b"zero_bytes", b"hero_bytes").contains("columns differ"));
    assert!(changed(b"pod", b"pad").contains("row 0: its kind is unknown"));
    assert!(changed("bä".as_bytes(), b"b\xffx").contains("row 1: a name is not UTF-8"));
    assert!(changed(b"00112233445566aa", b"00112233445566AA").contains("row 0: its key is not 16 digits"));
    assert!(changed(&11_u64.to_le_bytes(), &u64::MAX.to_le_bytes()).contains("row 0: saved_bytes is not"));
    assert!(changed(&[0xcc, 0x93], &[0xcc, 0x94]).contains("row 0: its sketch"));
}

#[test]
fn columns_with_pages_in_common_are_refused() {
    let bytes = bytes_of(&SketchFile { rows: vec![row("a", 0..20)] });
    let file = SerializedFileReader::new(Bytes::from(bytes.clone())).unwrap();
    // We let one column of numbers point to the pages of another one, which have the same length.
    let [one, other] = [20, 21].map(|at| {
        let (from, _) = file.metadata().row_group(0).column(at).byte_range();
        let [low, high, ..] = (((from * 2) & 0x7f | 0x80) | (from >> 6) << 8).to_le_bytes();
        [0x26, low, high]
    });
    let mut changed = bytes.clone();
    for at in 0..changed.len() {
        if changed[at..].starts_with(&other) {
            changed[at..at + one.len()].copy_from_slice(&one);
        }
    }
    assert_ne!(changed, bytes);
    seal::reseal(&mut changed).unwrap();
    assert_eq!(read(changed).unwrap_err().to_string(), "is damaged: its columns are not one after the other");
}

/// Such footers would make the parquet crate reserve terabytes, or overflow the stack, which no guard catches.
#[test]
fn footers_that_would_end_the_process_are_refused() {
    let bytes = bytes_of(&SketchFile { rows: vec![row("a", 0..20)] });
    let empty = bytes_of(&SketchFile::default());
    let (schema, length) = (schema_of(&empty), bytes.len());
    let footer = usize::try_from(u32::from_le_bytes(bytes[length - 8..length - 4].try_into().unwrap())).unwrap();
    let data = &bytes[..length - 8 - footer];
    assert!(schema.len() > 300 && bytes[data.len()..].starts_with(schema));
    let with = |schema: &[u8], rest: &[u8]| {
        let named = [b"pagefold.sketch/1", seal::blank().as_bytes()].concat();
        let footer = [schema, rest, &named].concat();
        let footer_length = u32::try_from(footer.len()).unwrap().to_le_bytes();
        let mut bytes = [data, &footer, &footer_length, b"PAR1"].concat();
        seal::reseal(&mut bytes).unwrap();
        read(bytes).unwrap_err().to_string()
    };
    // 2^31 row groups for one row.
    let error = with(schema, &[0x16, 2, 0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 7]);
    assert_eq!(error, "is damaged: it has more groups than rows");
    let error = with(schema, &[0x16, 0xfe, 0xff, 0xff, 0xff, 0x0f, 0x19, 0xfc, 1]);
    assert!(error.contains("workloads, and one host has at most 4096"), "{error}");
    // A list of 2^31 booleans, which the crate would count one by one; the row groups a second time.
    let after_groups = |rest: &[u8]| with(schema, &[&[0x16, 2, 0x19, 0x0c], rest].concat());
    let malformed = "is damaged: its footer is not in the form that pagefold writes";
    assert_eq!(after_groups(&[0x69, 0xf1, 0xff, 0xff, 0xff, 0xff, 7, 0]), malformed);
    assert_eq!(after_groups(&[0x09, 8, 0xfc, 0xff, 0xff, 0xff, 0xff, 7, 0]), malformed);
    assert_eq!(after_groups(&[0x69, 0xf3, 0xff, 0xff, 0xff, 0xff, 7, 0]), malformed);
    assert_eq!(after_groups(&[&[0x6c; 100][..], &[0; 100]].concat()), malformed);
    // Lists within lists.
    assert_eq!(after_groups(&[&[0x69][..], &[0x19; 10_000]].concat()), malformed);
    // Parts that take much more memory than their own length, such as lists of numbers.
    let error = after_groups(&[&[0x69, 0xf6, 0xa0, 0x9c, 1][..], &vec![0; 20_000]].concat());
    assert_eq!(error, "is damaged: its footer is longer than its groups need");
    // Groups within groups of the schema.
    let deep = [&schema[..40], &vec![0x4c; 100_000]].concat();
    assert!(with(&deep, &[]).contains("columns differ"));
    assert!(with(schema, &[0x19]).contains("footer is not in the form that pagefold writes"));
    // Bytes that belong to no page.
    let mut moved = bytes.clone();
    moved.splice(4..4, *b"junk");
    seal::reseal(&mut moved).unwrap();
    assert_eq!(read(moved).unwrap_err().to_string(), "is damaged: its pages are not in the form that pagefold writes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_bytes_panic(at in 0..1_usize << 20, with in prop::collection::vec(any::<u8>(), 0..9), cut in 0..3_usize) {
        let mut bytes = bytes_of(&SketchFile { rows: vec![row("a", 0..20), row("b", 10..90)] });
        // We mostly change bytes of the footer.
        let from = if cut == 0 { 0 } else { bytes.len() * 2 / 3 };
        let at = from + at % (bytes.len() - from);
        for (byte, with) in bytes[at..].iter_mut().zip(with) {
            *byte = with;
        }
        seal::reseal(&mut bytes).unwrap();
        let _ = read(bytes);
    }
}
