#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagefold_fuzz::sketches(bytes));
