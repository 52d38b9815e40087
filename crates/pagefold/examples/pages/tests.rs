use crate::program_tests::{page_text, written};
use pagefold::config::options::{SECTIONS, all};
use pagefold::metrics::families::FAMILIES;
use pagefold::reference::{self, SCHEMAS};
use std::fs;
use std::process::Command;

#[test]
fn every_option_is_on_the_page_of_the_configuration_file() {
    let directory = written();
    let file = page_text(directory.path(), "pagefold", 5, "pagefold.toml");
    for section in SECTIONS {
        assert!(file.contains(&format!("[{}]", section.name)), "{}", section.name);
    }
    for option in all() {
        assert!(file.contains(option.key) && file.contains(option.help), "{}", option.key);
        let value = option.default().unwrap_or_else(|| option.in_file());
        assert!(file.contains(value.lines().next().unwrap()), "{}: {value}", option.key);
    }
}

#[test]
fn every_json_field_and_every_metric_is_in_the_manual() {
    let directory = written();
    let json = page_text(directory.path(), "pagefold", 5, "pagefold-json");
    for schema in SCHEMAS {
        assert!(json.contains(&format!("SH {}", schema.name)) && json.contains(schema.about), "{}", schema.name);
        for (fields, meaning) in schema.fields {
            assert!(json.contains(fields) && json.contains(meaning), "{fields}");
        }
    }
    let metrics = page_text(directory.path(), "pagefold", 5, "pagefold-metrics");
    for metric in FAMILIES {
        assert!(metrics.contains(metric.name) && metrics.contains(metric.help), "{}", metric.name);
        assert!(metric.labels.iter().all(|label| metrics.contains(label)), "{}", metric.name);
    }
}

#[test]
fn the_page_of_the_daemon_has_its_files_signals_and_variables() {
    let directory = written();
    let page = page_text(directory.path(), "pagefold", 8, "pagefold-run");
    for (title, _, rows) in reference::TABLES {
        assert!(page.contains(&format!("SH {title}")), "{title}");
        for (item, meaning) in rows {
            assert!(page.contains(item) && page.contains(meaning), "{item}");
        }
    }
}

#[test]
fn bash_completes_a_command_line() {
    let directory = written();
    let script = "pagefold() { echo \"$1-$2 other\"; }; source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1))\n\
        _pagefold pagefold \"${@: -1}\" \"${@: -2:1}\"; echo \"${COMPREPLY[@]}\"";
    let complete = |words: &[&str]| {
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-uc", script, "bash"])
            .arg(directory.path().join("pagefold/share/bash-completion/completions/pagefold"))
            .args(words);
        let output = bash.output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete(&["pagefold", "st"]), "status\n");
    assert_eq!(complete(&["pagefold", "run", "--gov"]), "--governor\n");
    for kind in ["unit", "vm", "container", "pod"] {
        let names = complete(&["pagefold", "enable", &format!("--{kind}"), "comp"]);
        assert_eq!(names, format!("complete-{kind}\n"), "names of running workloads");
        for file in ["zsh/site-functions/_pagefold", "fish/vendor_completions.d/pagefold.fish"] {
            let text = fs::read_to_string(directory.path().join("pagefold/share").join(file)).unwrap();
            assert_eq!(
                text.matches(&format!("(pagefold complete {kind} ")).count(),
                9,
                "{file}: commands with a scope"
            );
        }
    }
}
