use super::*;

const NAME: &str = "/etc/pagefold/pagefold.toml";

#[track_caller]
fn refused(text: &str) -> String {
    let line = parse(text, NAME).expect_err("it should be refused").to_string();
    assert!(line.starts_with(NAME) && line.contains("; ") && !line.contains(char::is_control), "{line:?}");
    line.strip_prefix(NAME).unwrap().to_owned()
}

#[test]
fn an_empty_file_sets_nothing() {
    assert_eq!(parse("", NAME), Ok(Values::default()));
    assert_eq!(parse("# all by default\n[run]\n[deny]\n[numa.domains]\n", NAME), Ok(Values::default()));
}

#[test]
fn values_have_the_type_of_their_option() {
    let text = "[scope]\nusers = [\"redis\", 33]\nall = true\n[run]\ngovernor = \"auto\"\ntop-share = 0.5\nround = \"4s\"\n\
        [judgement]\nduplicate-threshold = \"20%\"\ncow-threshold = 100\nlifetime = \"2m\"\n\
        [limits]\nlongest-stop = \"1ms\"\n[[domains.rule]]\nname = \"a\"\nuser = 33\n\
        [numa]\nplacement = \"kernel\"\nremote-latency = \"200ns\"\n[numa.domains]\na = \"priority\"\n";
    let values = parse(text, NAME).unwrap();
    assert_eq!(
        (values.list("users"), values.get("all")),
        (vec!["redis".into(), "33".into()], Some(&Value::Switch(true)))
    );
    assert_eq!((values.text("governor"), values.text("placement")), (Some("auto"), Some("kernel")));
    let numbers = ["top-share", "round", "duplicate-threshold", "cow-threshold", "lifetime", "longest-stop", "levels"];
    assert_eq!(
        numbers.map(|key| values.number(key)),
        [Some(50), Some(4_000_000_000), Some(2_000), Some(10_000), Some(120_000_000_000), Some(1_000_000), None]
    );
    assert_eq!(values.number("remote-latency"), Some(200));
    assert_eq!(values.get("domains"), Some(&Value::Names([("a".to_owned(), "priority".to_owned())].into())));
    let rule = Rule { name: "a".into(), selector: "user", value: "33".into(), settings: Values::default() };
    assert_eq!(values.get("rule"), Some(&Value::Rules(vec![rule.clone()])));
    let group = "[[limits.group]]\nname = \"a\"\nuser = \"33\"\ngovernor = \"low\"\nstops-per-second = 3\n";
    let settings = parse("[run]\ngovernor = \"low\"\n[limits]\nstops-per-second = 3\n", NAME).unwrap();
    let rules = Value::Rules(vec![Rule { settings, ..rule }]);
    assert_eq!(parse(group, NAME).unwrap().get("group"), Some(&rules));
    let written = OPTIONS.iter().find(|option| option.key == "group").unwrap().written(&rules);
    assert_eq!(parse(&format!("[limits]\ngroup = {written}\n"), NAME).unwrap().get("group"), Some(&rules));
}

#[test]
fn errors_name_line_and_key() {
    for (text, expected) in [
        (
            "\n[run]\n# hm\ngoverment = \"full\"\n",
            " line 4: unknown key 'goverment' in [run]; it may be governor, preset, ",
        ),
        ("[rum]\n", " line 1: unknown key 'rum'; it may be scope, run, "),
        ("governor = \"full\"\n", " line 1: unknown key 'governor'; it may be scope"),
        (
            "[run]\ngovernor = \"turbo\"\n",
            " line 2: run.governor: there is no governor 'turbo'; choose full, medium, low, quiet or auto",
        ),
        (
            "[judgement]\n\ncow-threshold = 0\n",
            " line 3: judgement.cow-threshold: 0 % is out of range; it must be from 0.01 % to 100 %",
        ),
        ("[run]\nlevels = 9", " line 2: run.levels: 9 is out of range; it must be from 1 to 8"),
        ("[run]\nlevels = -1", " line 2: run.levels"),
        ("[run]\nround = 4", "'4' is not a time; give a number and a unit"),
        ("[run]\nround = \"1ms\"", "1ms is out of range; it must be from 20ms to 1h"),
        ("[run]\ntop-share = nan", " line 2: run.top-share"),
        ("[run]\ntop-share = [1]", " line 2: run.top-share: the value is neither a string nor a decimal number; "),
        ("[run]\ngovernor = full\n", " line 2: "),
        ("[run]\n[run]\n", " line 2: "),
        ("run = 1\n", " line 1: run is not a section; begin it with [run]"),
        ("[judgement]\nlifetime = \"2h\"", "it must be from 0s to 1h"),
        ("[limits]\nstops-per-second = 0", "0 is out of range; it must be from 1 to 10000"),
        ("[limits]\nlongest-stop = \"1us\"", "it must be from 100us to 10s"),
        ("[deny]\nalso = [\"a\",\n\"/usr/bin/vault\"]", " line 3: deny.also: '/usr/bin/vault' is a path; "),
        ("[deny]\nalso = [\"a*b\"]", "asterisk"),
        ("[deny]\nalso = \"a\"", " line 2: deny.also: the value is not a list"),
        ("[scope]\ncgroups = [\"\"]", " line 2: scope.cgroups"),
        ("[scope]\nall = 1", " line 2: scope.all: the value is neither true nor false"),
        ("[audit]\nfile = \"audit.jsonl\"", "'audit.jsonl' is a relative path; give an absolute one"),
        (
            "[numa.domains]\na = \"near\"\n",
            " line 2: numa.domains.a: there is no placement 'near'; choose fair, priority, ",
        ),
        ("[domains]\nby = \"group\"\n", " line 2: domains.by"),
        ("[[domains.rule]]\nname = \"a\"\n", "one of cgroup, user and exe"),
        ("[[domains.rule]]\nname = \"a\"\nuser = \"b\"\nexe = \"c\"\n", "'a' must have one of"),
        ("[[domains.rule]]\nuser = \"b\"\n", "domains.rule: a rule has no name"),
        ("[[limits.group]]\nname = \"a\"\nuser = 3\n", "the rule for 'a' sets nothing; give it one of governor, "),
        ("[[limits.group]]\nname = \"a\"\ngovernor = \"no\"\n", " line 3: limits.group.governor: there is no governor"),
        ("[[domains.rule]]\nname = \"a\"\ngovernor = \"low\"\n", " line 3: unknown key 'governor' in [[domains.rule]]"),
        (
            "[[domains.rule]]\nname = \"a\"\nuid = 3\n",
            " line 3: unknown key 'uid' in [[domains.rule]]; it may be name, ",
        ),
    ] {
        let line = refused(text);
        assert!(line.contains(expected), "{text:?}: {line}");
        assert!(!expected.starts_with(' ') || line.starts_with(expected), "{text:?}: {line}");
    }
}

#[test]
fn a_mistyped_key_is_recognized() {
    for (text, meant) in [
        ("[run]\ngoverner = \"full\"", "(did you mean governor?)"),
        ("[rum]\n", "(did you mean run?)"),
        ("governor = \"full\"", "(did you mean governor in [run]?)"),
        ("[run]\nplacement = \"fair\"", "(did you mean placement in [numa]?)"),
        ("[limits]\nlongest_stop = \"1ms\"", "(did you mean longest-stop?)"),
        ("[[domains.rule]]\nname = \"a\"\nusr = 1", "(did you mean user?)"),
    ] {
        let line = refused(text);
        assert!(line.ends_with(meant), "{line}");
    }
    assert!(!refused("[run]\nzzz = 1").contains("did you mean"));
}

#[test]
fn errors_are_short_and_printable_whatever_the_file_contains() {
    let line = refused(&format!("[run]\n\"{}\\u001b[2J\\n\" = 1\n", "x".repeat(9_000)));
    assert!(line.len() < 3 * PART_MOST, "{}", line.len());
    assert!(refused("[run]\n\"a\\u001b[2J\" = 1\n").contains("\\u{1b}"));
    assert!(!parse("=", "odd\nname").unwrap_err().to_string().contains('\n'));
    // Nested deeper than a recursive parser's stack.
    refused(&format!("a = {}", "[".repeat(100_000)));
}

#[test]
fn of_two_files_the_later_one_counts_key_by_key() {
    let first = "[scope]\nexes = [\"a\", \"b\"]\n[run]\ngovernor = \"low\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n";
    let later = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\n[audit]\nfile = \"/log\"\n";
    let both = parse(first, "1").unwrap().then(parse(later, "2").unwrap());
    let expected = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n[audit]\nfile = \"/log\"\n";
    assert_eq!(both, parse(expected, "3").unwrap());
    assert_eq!(Values::default().then(both.clone()), both);
    assert_eq!(both.clone().then(Values::default()), both);
}
