use super::*;
use crate::config::options::all;
use crate::config::values::Rule;
use pagefold_engine::governor::Governor;
use pagefold_engine::placement::policy::Placement;
use pagefold_engine::units::Permyriad;
use pagefold_host::scope::Selector;
use std::fmt::Write;
use std::time::Duration;

const NAME: &str = "/etc/pagefold/pagefold.toml";

#[track_caller]
fn refused(text: &str) -> String {
    let line = parse(text, NAME).expect_err("it should be refused");
    assert!(line.starts_with(NAME) && line.contains("; ") && !line.contains(char::is_control), "{line:?}");
    line.strip_prefix(NAME).unwrap().to_owned()
}

#[test]
fn an_empty_file_sets_nothing() {
    assert_eq!(parse("", NAME), Ok(Options::default()));
    assert_eq!(parse("# all by default\n[run]\n[deny]\n[numa.domains]\n", NAME), Ok(Options::default()));
}

#[test]
fn values_have_the_type_of_their_option() {
    let text = "[scope]\nusers = [\"redis\", 33]\nall = true\n[run]\ngovernor = \"auto\"\ntop-share = 0.5\nround = \"4s\"\n\
        [judgement]\nduplicate-threshold = \"20%\"\ncow-threshold = 100\nlifetime = \"2m\"\n\
        [limits]\nlongest-stop = \"1ms\"\n[[domains.rule]]\nname = \"a\"\nuser = 33\n\
        [numa]\nplacement = \"kernel\"\nremote-latency = \"200ns\"\n[numa.domains]\na = \"priority\"\n";
    let rule = Rule { name: "a".into(), selector: Selector::User("33".into()), settings: Options::default() };
    let expected = Options {
        users: Some(vec!["redis".into(), "33".into()]),
        all: Some(true),
        governor: Some(Governor::Auto),
        top_share: Some(Permyriad(50)),
        round: Some(Duration::from_secs(4)),
        duplicate_threshold: Some(Permyriad(2_000)),
        cow_threshold: Some(Permyriad(10_000)),
        lifetime: Some(Duration::from_secs(120)),
        longest_stop: Some(Duration::from_millis(1)),
        domain_rules: Some(vec![rule.clone()]),
        placement: Some(Placement::Kernel),
        remote_latency: Some(Duration::from_nanos(200)),
        placements: Some([("a".to_owned(), Placement::Priority)].into()),
        ..Options::default()
    };
    assert_eq!(parse(text, NAME), Ok(expected));
    let group = "[[limits.group]]\nname = \"a\"\nuser = \"33\"\ngovernor = \"low\"\nstops-per-second = 3\n";
    let settings = Options { governor: Some(Governor::Low), stops_per_second: Some(3), ..Options::default() };
    let rules = vec![Rule { settings, ..rule }];
    let expected = Options { groups: Some(rules), ..Options::default() };
    assert_eq!(parse(group, NAME), Ok(expected.clone()));
    let written = all().find_map(|option| (option.written)(&expected)).unwrap();
    assert_eq!(parse(&format!("[limits]\ngroup = {written}\n"), NAME), Ok(expected));
}

#[test]
fn patterns_of_pods_that_would_never_match_are_refused() {
    for list in [
        "[scope]\npods = [\"P\"]",
        "[scope]\nenabled = [\"pod P\"]",
        "[deny]\nworkloads = [\"pod P\"]",
        "[deny]\nexcept = [\"pod P\"]",
        "[[domains.rule]]\nname = \"a\"\npod = \"P\"",
        "[[limits.group]]\nname = \"a\"\ngovernor = \"low\"\npod = \"P\"",
    ] {
        for pattern in ["*/x", "shop/c*t", "shop*"] {
            let line = refused(&list.replace('P', pattern));
            assert!(line.ends_with("at the end of NAMESPACE/NAME; give a name like shop/cart-* or shop/*"), "{line}");
        }
        for pattern in ["shop/*", "shop/cart-*", "shop/cart-0"] {
            parse(&list.replace('P', pattern), NAME).unwrap();
        }
    }
}

#[test]
fn errors_name_line_and_key_and_the_one_that_was_meant() {
    let mut lines = String::new();
    for text in [
        "\n[run]\n# hm\ngoverment = \"full\"",
        "[rum]",
        "governor = \"full\"",
        "[run]\ngovernor = \"turbo\"",
        "[judgement]\n\ncow-threshold = 0",
        "[tuning]\nlevels = 9",
        "[tuning]\nlevels = -1",
        "[tuning]\nround = \"4 parsecs\"",
        "[tuning]\nround = \"1ms\"",
        "[tuning]\ntop-share = nan",
        "[tuning]\ntop-share = [1]",
        "[run]\ngovernor = full",
        "[run]\n[run]",
        "run = 1",
        "[tuning]\nlifetime = \"2h\"",
        "[limits]\nstops-per-second = 0",
        "[limits]\nlongest-stop = \"1us\"",
        "[limits]\nlongest-stop = 10",
        "[deny]\nalso = [\"a\",\n\"bin/vault\"]",
        "[deny]\nalso = [\"a*b\"]",
        "[deny]\nalso = \"a\"",
        "[scope]\ncgroups = [\"\"]",
        "[scope]\nall = 1",
        "[audit]\nfile = \"audit.jsonl\"",
        "[numa.domains]\na = \"near\"",
        "[domains]\nby = \"group\"",
        "[[domains.rule]]\nname = \"a\"",
        "[[domains.rule]]\nname = \"a\"\nuser = \"b\"\nexe = \"c\"",
        "[[domains.rule]]\nuser = \"b\"",
        "[[limits.group]]\nname = \"a\"\nuser = 3",
        "[[limits.group]]\nname = \"a\"\ngovernor = \"no\"",
        "[[domains.rule]]\nname = \"a\"\ngovernor = \"low\"",
        "[[domains.rule]]\nname = \"a\"\nuid = 3",
        "[run]\ngoverner = \"full\"",
        "[run]\nplacement = \"fair\"",
        "[limits]\nlongest_stop = \"1ms\"",
        "[[domains.rule]]\nname = \"a\"\nusr = 1",
        "[run]\nzzz = 1",
    ] {
        let _ = writeln!(lines, "{}\n->{}\n", text.trim_start(), refused(text));
    }
    crate::golden::check("config-errors.txt", &lines);
}

#[test]
fn errors_are_short_and_printable_whatever_the_file_contains() {
    let line = refused(&format!("[run]\n\"{}\\u001b[2J\\n\" = 1\n", "x".repeat(9_000)));
    assert!(line.len() < 3 * PART_MOST, "{}", line.len());
    assert!(refused("[run]\n\"a\\u001b[2J\" = 1\n").contains("\\u{1b}"));
    assert!(!parse("=", "odd\nname").unwrap_err().contains('\n'));
    // This is nested too deeply for the stack of a recursive parser.
    refused(&format!("a = {}", "[".repeat(100_000)));
}

#[test]
fn of_two_files_the_later_one_counts_key_by_key() {
    let first = "[scope]\nexes = [\"a\", \"b\"]\n[run]\ngovernor = \"low\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n";
    let later = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\n[audit]\nfile = \"/log\"\n";
    let both = parse(first, "1").unwrap().then(parse(later, "2").unwrap());
    let expected = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n[audit]\nfile = \"/log\"\n";
    assert_eq!(both, parse(expected, "3").unwrap());
    assert_eq!(Options::default().then(both.clone()), both);
    assert_eq!(both.clone().then(Options::default()), both);
}
