use super::*;
use proptest::prelude::*;
use std::io::Write;

/// A kpageflags file in which frame `n` has the flags `n * 3 + 1`.
fn flags_file(frames: u64) -> (tempfile::NamedTempFile, KpageFlags) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let words: Vec<u8> = (0..frames).flat_map(|frame| (frame * 3 + 1).to_ne_bytes()).collect();
    file.write_all(&words).unwrap();
    let flags = KpageFlags::open_at(file.path()).unwrap();
    (file, flags)
}

proptest! {
    #[test]
    fn every_frame_gets_its_own_flags(frames in prop::collection::vec(0u64..3000, 0..200)) {
        let (_file, mut flags) = flags_file(2900);
        let mut answers = vec![None; frames.len()];
        flags.look_up(frames.iter().copied(), |at, flags| assert_eq!(answers[at].replace(flags), None)).unwrap();
        for (frame, answer) in frames.iter().zip(answers) {
            let expected = if *frame < 2900 { frame * 3 + 1 } else { 0 };
            prop_assert_eq!(answer, Some(FrameFlags(expected)));
        }
    }
}

#[test]
fn more_adjacent_frames_than_one_read_holds_are_all_looked_up() {
    let (_file, mut flags) = flags_file(5000);
    let mut sum = 0;
    flags.look_up((0..5000).rev(), |_, flags| sum += flags.0).unwrap();
    assert_eq!(sum, (0..5000u64).map(|frame| frame * 3 + 1).sum::<u64>());
}
