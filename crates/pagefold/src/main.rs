//! The program `pagefold`: see the library.

fn main() -> std::process::ExitCode {
    pagefold::main()
}
