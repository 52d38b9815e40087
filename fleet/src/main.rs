//! The program `pagefold-fleet`: see the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pagefold_fleet::commands::main()
}
