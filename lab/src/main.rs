//! The program `pagefold-lab`: see the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pagefold_lab::commands::main()
}
