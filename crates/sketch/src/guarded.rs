//! Decoding without panics.

use std::cell::Cell;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Decodes with the parquet crate and turns its panics into errors, without the usual message.
///
/// Damaged files fail the checksum, but a crafted file can have a correct one, and the crate panics on some crafted
/// files (version 59: in 27 of the 10,700 cases that the test of records tries).
pub fn guarded<T, E: Display>(decode: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                before(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    // An error ends the reader, so we never use state that a panic left behind.
    let decoded = panic::catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(outer);
    match decoded {
        Ok(result) => result.map_err(|error| one_line(&error)),
        Err(_) => Err("its columns cannot be decoded".to_owned()),
    }
}

/// The text of an error without line breaks.
pub fn one_line(error: &dyn Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
