//! Tests the pages and completions of any program. The parent module must provide `program()`, `write()` and `skip()`.

use super::{program, skip, write};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

pub fn written() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path()).unwrap();
    directory
}

/// A page's text without roff's escapes.
pub fn page_text(directory: &Path, program: &str, section: u32, name: &str) -> String {
    let path = directory.join(format!("{program}/share/man/man{section}/{name}.{section}"));
    fs::read_to_string(path).unwrap().replace("\\*(Aq", "'").replace('\\', "")
}

#[test]
fn every_command_has_a_page_with_all_its_options() {
    let directory = written();
    let program = program();
    let name = program.get_name();
    let main_page = page_text(directory.path(), name, 1, name);
    assert!(main_page.contains("SH \"EXIT STATUS\"") && main_page.contains("pagefold.toml"), "{main_page}");
    for subcommand in program.get_subcommands() {
        let name = format!("{name}-{}", subcommand.get_name());
        let section = if name == "pagefold-run" { 8 } else { 1 };
        assert!(main_page.contains(&format!("{name}({section})")), "{name}");
        let page = page_text(directory.path(), program.get_name(), section, &name);
        let has_examples = subcommand.get_after_long_help().is_some();
        assert_eq!(page.contains("SH EXAMPLES"), has_examples, "{name}");
        for nested in subcommand.get_subcommands() {
            let page = format!("{name}-{}", nested.get_name());
            assert!(page_text(directory.path(), program.get_name(), 1, &page).contains("SYNOPSIS"), "{page}");
        }
        let shown = subcommand.get_arguments().filter(|argument| !argument.is_hide_set());
        for flag in shown.filter_map(|argument| argument.get_long()) {
            assert!(page.contains(&format!("--{flag}")), "{name} --{flag}");
        }
    }
}

#[test]
fn man_finds_nothing_wrong_with_the_pages() {
    let directory = written();
    let sections = fs::read_dir(directory.path().join(program().get_name()).join("share/man")).unwrap();
    let folders = sections.map(|section| fs::read_dir(section.unwrap().path()).unwrap());
    let pages: Vec<PathBuf> = folders.flat_map(|pages| pages.map(|page| page.unwrap().path())).collect();
    assert!(pages.len() > program().get_subcommands().count(), "{pages:?}");
    for page in pages {
        let mut man = Process::new("man");
        man.args(["--warnings", "-E", "UTF-8", "-Tutf8", "-l"]).arg(&page);
        let Ok(output) = man.env("MANWIDTH", "80").env("LC_ALL", "C.UTF-8").output() else {
            return skip("man is not installed");
        };
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{}: {complaints}", page.display());
    }
}

#[test]
fn completions_offer_every_subcommand_and_option() {
    let directory = written();
    let program = program();
    let name = program.get_name();
    for file in [
        format!("bash-completion/completions/{name}"),
        format!("zsh/site-functions/_{name}"),
        format!("fish/vendor_completions.d/{name}.fish"),
    ] {
        let text = fs::read_to_string(directory.path().join(name).join("share").join(&file)).unwrap();
        assert!(!text.contains("injector\n"), "{file} has a hidden subcommand");
        for subcommand in program.get_subcommands() {
            assert!(text.contains(subcommand.get_name()), "{file}: {}", subcommand.get_name());
            for flag in subcommand.get_arguments().filter_map(|argument| argument.get_long()) {
                // The completions for fish have "-l flag".
                assert!(text.contains(&format!("--{flag}")) || text.contains(&format!("-l {flag}")), "{file}: {flag}");
            }
        }
    }
}
