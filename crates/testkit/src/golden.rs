//! Golden files: texts that the program printed once, kept in the repository, and compared with what it prints today.

use std::fs;
use std::path::Path;

/// Compares a text with a file of the repository. With `PAGEFOLD_BLESS=1` it writes the file instead.
#[track_caller]
pub fn check(path: &Path, text: &str) {
    if std::env::var_os("PAGEFOLD_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        return fs::write(path, text).unwrap();
    }
    let kept = fs::read_to_string(path).unwrap_or_default();
    if kept == text {
        return;
    }
    let same = kept.lines().zip(text.lines()).take_while(|(kept, now)| kept == now).count();
    let line_of = |text: &str| text.lines().nth(same).unwrap_or("(the end)").to_owned();
    panic!(
        "{} differs from line {} on:\n- {}\n+ {}\nIf that is intended, write it again with PAGEFOLD_BLESS=1 and say why in the commit",
        path.display(),
        same + 1,
        line_of(&kept),
        line_of(text)
    );
}
