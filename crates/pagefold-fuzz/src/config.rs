//! The configuration file.

use pagefold_cli::config_file::parse;

/// A configuration: what is wrong with one is told in one printable line that begins with the file's name, and one that
/// is right stays the same with itself as an addition.
pub fn config(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    match parse(text, "FILE") {
        Ok(file) => assert_eq!(file.clone().then(file.clone()), file),
        Err(error) => {
            let error = error.to_string();
            assert!(error.starts_with("FILE") && !error.contains(char::is_control), "{error:?}");
            assert!(error.chars().count() < 1000, "{error:?}");
        }
    }
}
