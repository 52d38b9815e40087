use super::*;

const NAME: &str = "/etc/pagefold/pagefold.toml";

#[track_caller]
fn refused(text: &str) -> String {
    let line = parse(text, NAME).expect_err("it should be refused").to_string();
    assert!(line.starts_with(NAME) && line.contains("; ") && !line.contains(char::is_control), "{line:?}");
    line.strip_prefix(NAME).unwrap().to_owned()
}

#[test]
fn nothing_is_a_file_too() {
    assert_eq!(parse("", NAME), Ok(ConfigFile::default()));
    assert_eq!(parse("# all by default\n[run]\n[deny]\n", NAME), Ok(ConfigFile::default()));
}

#[test]
fn the_example_shows_every_key_and_is_right_when_its_comments_are_taken_off() {
    let example = include_str!("../../../../packaging/pagefold.toml");
    // As shipped it asks for nothing.
    assert_eq!(parse(example, NAME), Ok(ConfigFile::default()));
    // Settings are commented out by "#" without a space, remarks by "# ".
    let all: String = example
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.is_empty() && !setting.starts_with(' ') => format!("{setting}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let ConfigFile { scope, run, judgement, deny, limits, domains, numa, audit } = parse(&all, NAME).unwrap();
    assert!(scope.cgroups.is_some() && scope.users.is_some() && scope.exes.is_some() && scope.all.is_some());
    assert!(run.governor.is_some() && run.preset.is_some() && run.top_share.is_some());
    assert!(run.round.is_some() && run.levels.is_some());
    assert!(judgement.duplicate_threshold.is_some() && judgement.cow_threshold.is_some());
    assert!(judgement.lifetime.is_some());
    assert!(deny.programs.is_some() && deny.also.is_some() && deny.except.is_some());
    assert!(limits.samples_per_second_per_process.is_some() && limits.samples_per_second.is_some());
    assert!(limits.stops_per_second_per_process.is_some() && limits.stops_per_second.is_some());
    assert!(limits.moves_per_second.is_some() && limits.longest_stop.is_some());
    assert!(numa.placement.is_some() && numa.domains.is_some());
    assert!(numa.local_latency.is_some() && numa.remote_latency.is_some());
    assert!(domains.by.is_some() && audit.file.is_some());
    let rules = domains.rule.unwrap();
    assert!(rules.iter().any(|rule| matches!(rule.who, Who::Cgroup(_))));
    assert!(rules.iter().any(|rule| matches!(rule.who, Who::User(_))));
    assert!(rules.iter().any(|rule| matches!(rule.who, Who::Exe(_))));
}

#[test]
fn values_are_read_as_they_are_written() {
    let text = "[scope]\nusers = [\"redis\", 33]\n[run]\ngovernor = \"auto\"\ntop-share = 0.5\nround = \"4s\"\n\
        [judgement]\nduplicate-threshold = \"20%\"\ncow-threshold = 100\nlifetime = \"2m\"\n\
        [limits]\nlongest-stop = \"1ms\"\n[[domains.rule]]\nname = \"a\"\nuser = 33\n\
        [numa]\nplacement = \"kernel\"\nremote-latency = \"200ns\"\n[numa.domains]\na = \"priority\"\n";
    let file = parse(text, NAME).unwrap();
    assert_eq!(file.scope.users, Some(vec![Word("redis".into()), Word("33".into())]));
    assert_eq!((file.run.governor, file.run.top_share), (Some(Governor::Auto), Some(Permyriad(50))));
    assert_eq!(file.run.round, Some(Duration::from_secs(4)));
    assert_eq!(file.judgement.duplicate_threshold, Some(Permyriad(2_000)));
    assert_eq!(file.judgement.cow_threshold, Some(Permyriad(10_000)));
    assert_eq!(file.judgement.lifetime, Some(Duration::from_secs(120)));
    assert_eq!(file.limits.longest_stop, Some(Duration::from_millis(1)));
    assert_eq!(
        (file.numa.placement, file.numa.remote_latency),
        (Some(Placement::Kernel), Some(Duration::from_nanos(200)))
    );
    assert_eq!(file.numa.domains, Some([("a".to_owned(), Placement::Priority)].into()));
    assert_eq!(file.domains.rule, Some(vec![DomainRule { name: "a".into(), who: Who::User("33".into()) }]));
}

#[test]
fn what_is_wrong_is_told_with_its_line_and_key() {
    let line = refused("\n[run]\n# hm\ngoverment = \"full\"\n");
    assert!(line.starts_with(" line 4: unknown key 'goverment' in [run]; it may be governor, preset, "), "{line}");
    assert!(refused("[rum]\n").starts_with(" line 1: unknown key 'rum'; it may be scope, run, "));
    let line = refused("[run]\ngovernor = \"turbo\"\n");
    assert_eq!(line, " line 2: run.governor: there is no governor 'turbo'; choose full, medium, low, quiet or auto");
    let line = refused("[judgement]\n\ncow-threshold = 0\n");
    assert_eq!(line, " line 3: judgement.cow-threshold: the COW threshold is 0 %; it must be from 0.01 % to 100 %");
    assert!(refused("[run]\nlevels = 9").contains("run.levels: the number of levels is 9; it must be from 1 to 8"));
    let line = refused("[numa.domains]\na = \"near\"\n");
    assert!(line.contains("there is no placement 'near'; choose fair, priority, local-only or kernel"), "{line}");
    assert!(refused("[run]\nlevels = -1").contains("line 2: run.levels"));
    assert!(refused("[run]\nround = 4").contains("'4' is no time; give one with its unit"));
    assert!(refused("[run]\nround = \"1ms\"").contains("the round is 1 ms; it must be from 20 ms to 3600000 ms"));
    assert!(refused("[run]\ntop-share = nan").contains("line 2: run.top-share"));
    assert!(refused("[judgement]\nlifetime = \"2h\"").contains("it must be from 0 ms to 3600000 ms"));
    assert!(refused("[limits]\nstops-per-second = 0").contains("the rate is 0; it must be from 1 to 1000000000"));
    assert!(refused("[limits]\nlongest-stop = \"1us\"").contains("it must be from 100 us to 10 s"));
    assert!(refused("[deny]\nalso = [\"/usr/bin/vault\"]").contains("line 2: deny.also: '/usr/bin/vault' is a path; "));
    assert!(refused("[deny]\nalso = [\"a*b\"]").contains("asterisk"));
    assert!(refused("[scope]\ncgroups = [\"\"]").contains("line 2: scope.cgroups"));
    assert!(refused("[audit]\nfile = \"audit.jsonl\"").contains("give the whole path"));
    assert!(refused("[[domains.rule]]\nname = \"a\"\n").contains("one of cgroup, user and exe"));
    assert!(refused("[[domains.rule]]\nname = \"a\"\nuser = \"b\"\nexe = \"c\"\n").contains("'a' must have one of"));
    assert!(refused("[domains]\nby = \"group\"\n").contains("line 2: domains.by"));
    assert!(refused("[run]\ngovernor = full\n").contains(" line 2: "));
    assert!(refused("[run]\n[run]\n").contains(" line 2: "));
    assert!(refused("governor = \"full\"\n").contains("line 1: unknown key 'governor'; it may be scope"));
}

#[test]
fn a_complaint_is_short_and_printable_whatever_the_file_has() {
    let line = refused(&format!("[run]\n\"{}\\u001b[2J\\n\" = 1\n", "x".repeat(9_000)));
    assert!(line.len() < 3 * PART_MOST, "{}", line.len());
    assert!(refused("[run]\n\"a\\u001b[2J\" = 1\n").contains("\\u{1b}"));
    assert!(!parse("=", "odd\nname").unwrap_err().to_string().contains('\n'));
    // Deeper than any stack.
    refused(&format!("a = {}", "[".repeat(100_000)));
}

#[test]
fn of_two_files_the_later_counts_key_by_key() {
    let first = "[scope]\nexes = [\"a\", \"b\"]\n[run]\ngovernor = \"low\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n";
    let later = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\n[audit]\nfile = \"/log\"\n";
    let both = parse(first, "1").unwrap().then(parse(later, "2").unwrap());
    let wanted = "[scope]\nexes = [\"c\"]\n[run]\ngovernor = \"full\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n[audit]\nfile = \"/log\"\n";
    assert_eq!(both, parse(wanted, "3").unwrap());
    assert_eq!(ConfigFile::default().then(both.clone()), both);
    assert_eq!(both.clone().then(ConfigFile::default()), both);
}

#[test]
fn per_cent_are_read_as_they_are_written() {
    assert_eq!(percent("10"), Ok(Permyriad(1_000)));
    assert_eq!(percent("0.2%"), Ok(Permyriad(20)));
    assert_eq!(percent("140"), Ok(Permyriad(14_000)));
    assert!(percent("ten").is_err() && percent("-1").is_err() && percent("nan").is_err());
}
