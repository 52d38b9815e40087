//! The configuration file.

use pagefold::config::config_file::parse;

/// A configuration: errors are one printable line that begins with the name of the file, and adding a valid
/// configuration to itself doesn't change it.
pub fn config(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    match parse(text, "FILE") {
        Ok(file) => assert_eq!(file.clone().then(file.clone()), file),
        Err(error) => {
            assert!(error.starts_with("FILE") && !error.contains(char::is_control), "{error:?}");
            assert!(error.chars().count() < 1000, "{error:?}");
        }
    }
}
