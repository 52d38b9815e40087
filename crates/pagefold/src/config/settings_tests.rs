use super::*;
use crate::config::args::RunArgs;
use clap::Parser;
use pagefold_engine::limits::Limits;
use pagefold_engine::placement::policy::Latencies;
use pagefold_engine::units::Permyriad;
use pagefold_host::scope::Matcher;
use pagefold_host::scope::exe::Matching;
use pagefold_procmem::os::peer::own_uid;
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
}

/// A directory with a configuration in it.
struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new(text: &str) -> Self {
        let files = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(files.path(), text).unwrap();
        files
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("pagefold.toml")
    }

    fn add(&self, name: &str, text: &str) {
        let dir = self.dir.path().join("pagefold.toml.d");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), text).unwrap();
    }

    fn settings(&self, options: &[&str]) -> Result<Settings, Exit> {
        let path = self.path();
        let words = [&["run", "--config", path.to_str().unwrap()], options].concat();
        Settings::of(&Cli::try_parse_from(words).unwrap().run)
    }

    #[track_caller]
    fn refused(&self, says: &str) {
        let error = self.settings(&[]).unwrap_err();
        assert_eq!(error.code, exit::USAGE);
        assert!(error.line.contains(says) && error.line.contains("; "), "{}", error.line);
    }
}

/// The entry of the deny list that matches a program.
fn denied<'a>(settings: &'a Settings, program: &[u8]) -> Option<&'a str> {
    let matches = |name: &[u8]| if name == program { Matching::Yes } else { Matching::No };
    settings.deny.entry_for(&[program.into(), program.into()], matches)
}

#[test]
fn additions_are_read_in_order_and_the_command_line_overrides_them() {
    let files = Files::new("[scope]\nexes = [\"a\"]\n[run]\ngovernor = \"low\"\nlevels = 3\n[deny]\nalso = [\"x\"]\n");
    files.add("20-b.toml", "[run]\ngovernor = \"medium\"\n");
    files.add("10-a.toml", "[run]\ngovernor = \"quiet\"\n[deny]\nexcept = [\"vault\"]\n");
    files.add("30.toml.disabled", "no configuration");
    files.add(".40.toml", "no configuration either");
    let settings = files.settings(&[]).unwrap();
    assert_eq!((settings.config.governor, settings.config.levels), (Governor::Medium, 3));
    assert_eq!(settings.scope.to_string(), "--exe a");
    assert_eq!((denied(&settings, b"x"), denied(&settings, b"vault")), (Some("x"), None));
    assert_eq!(denied(&settings, b"ssh-agent"), Some("ssh-agent"));
    let settings = files.settings(&["--pid", "7", "--governor", "full", "--deny", "vault", "--allow", "x"]).unwrap();
    assert_eq!((settings.config.governor, settings.config.levels), (Governor::Full, 3));
    assert_eq!(settings.scope.to_string(), "--pid 7", "a scope replaces the file's");
    assert_eq!((denied(&settings, b"x"), denied(&settings, b"vault")), (None, Some("vault")));
}

#[test]
fn the_command_line_comes_before_the_file_and_both_before_the_preset() {
    let files =
        Files::new("[run]\ngovernor = \"low\"\nlevels = 3\npreset = \"sensitive\"\n[judgement]\ncow-threshold = 70\n");
    let config = files.settings(&["--levels", "5", "--round", "3s"]).unwrap().config;
    assert_eq!((config.governor, config.levels, config.cow_threshold), (Governor::Low, 5, Permyriad(7_000)));
    assert_eq!((config.lifetime_ns, config.round_ns), (0, Some(3_000_000_000)), "the preset's, and the flag's");
    let plain = Files::new("").settings(&[]).unwrap().config;
    assert_eq!(plain, Config { seed: plain.seed, ..Config::default() });
}

#[test]
fn parameters_are_in_tuning_and_where_they_were() {
    let new = "[tuning]\ntop-share = 30\nround = \"3s\"\nlevels = 5\nduplicate-threshold = 7\ncow-threshold = 70\n\
        lifetime = \"1s\"\nlocal-latency = \"80ns\"\nremote-latency = \"200ns\"\n";
    let old = "[run]\ntop-share = 30\nround = \"3s\"\nlevels = 5\n\
        [judgement]\nduplicate-threshold = 7\ncow-threshold = 70\nlifetime = \"1s\"\n\
        [numa]\nlocal-latency = \"80ns\"\nremote-latency = \"200ns\"\n";
    let flags = [
        "--top-share=30",
        "--round=3s",
        "--levels=5",
        "--duplicate-threshold=7",
        "--cow-threshold=70",
        "--lifetime=1s",
    ];
    let config = Files::new(new).settings(&[]).unwrap().config;
    let Latencies { local_ns, remote_ns } = config.latencies;
    assert_eq!((config.levels, local_ns, remote_ns), (5, 80, 200));
    let of_old = Files::new(old).settings(&[]).unwrap().config;
    assert_eq!(of_old, Config { seed: of_old.seed, ..config.clone() });
    let of_flags = Files::new("").settings(&flags).unwrap().config;
    assert_eq!(of_flags, Config { seed: of_flags.seed, latencies: Latencies::default(), ..config });
    Files::new("[numa]\nlevels = 5\n").refused("(did you mean levels in [tuning]?)");
}

#[test]
fn the_mechanism_is_chosen_by_file_or_flag() {
    let of = |text: &str, args: &[&str]| Files::new(text).settings(args).unwrap().mechanism;
    let file = "[run]\nmechanism = \"request\"\n";
    assert_eq!(of("", &[]), MechanismChoice::Auto);
    assert_eq!((of(file, &[]), of(file, &["--mechanism", "ksmd"])), (MechanismChoice::Request, MechanismChoice::Ksmd));
    Files::new("[run]\nmechanism = \"uksm\"\n").refused("there is no mechanism 'uksm'; choose auto, ksmd or request");
    let (one, mut other) = (Files::new(file).settings(&[]).unwrap(), Files::new("").settings(&[]).unwrap());
    other.config.seed = one.config.seed;
    assert_eq!(one.fixed_differences(&other), ["[run] (except the governor), [judgement] or [tuning]"]);
}

#[test]
fn a_fleet_is_set_in_the_file_and_ignored_by_a_dry_run() {
    let text = "[fleet]\ndirectory = \"/sketches\"\nkey = \"/key\"\nhost = \"n1\"\nsketch-interval = \"5m\"\n";
    let files = Files::new(text);
    let fleet = files.settings(&[]).unwrap().fleet;
    assert_eq!((fleet.directory, fleet.key), (Some("/sketches".into()), Some("/key".into())));
    assert_eq!((fleet.host.as_deref(), fleet.interval.as_secs()), (Some("n1"), 300));
    let dry = files.settings(&["--dry-run"]).unwrap().fleet;
    assert_eq!((dry.directory, dry.interval.as_secs()), (None, 3600));
    let dry = files.settings(&["--dry-run", "--sketches", "/other"]).unwrap().fleet;
    assert_eq!(dry.directory, Some("/other".into()));
    Files::new("[fleet]\ndirectory = \"sketches\"\n").refused("is a relative path");
    Files::new("[fleet]\nsketch-interval = \"1s\"\n").refused("out of range");
}

#[test]
fn a_deny_list_replaces_the_default_one() {
    let settings = Files::new("[deny]\nprograms = [\"mine\"]\n").settings(&[]).unwrap();
    assert_eq!((denied(&settings, b"mine"), denied(&settings, b"ssh-agent")), (Some("mine"), None));
}

#[test]
fn domains_and_limits_are_converted() {
    let text = "[domains]\nby = \"user\"\n[[domains.rule]]\nname = \"r\"\nuser = \"root\"\n[[domains.rule]]\nname = \"e\"\n\
        exe = \"redis-server\"\n[limits]\nstops-per-second = 7\n";
    let settings = Files::new(text).settings(&[]).unwrap();
    let rule = |name: &str, matcher| Rule { name: name.into(), matcher };
    let rules = vec![rule("r", Matcher::User(0)), rule("e", Matcher::Exe("redis-server".into()))];
    assert_eq!(settings.domains, DomainRules { by_user: true, rules, merge: None });
    assert_eq!(settings.config.limits, Limits { stops: 7, ..Limits::default() });
    let group =
        |governor: &str| format!("[[limits.group]]\nname = \"g\"\nuser = \"root\"\ngovernor = \"{governor}\"\n");
    let settings = Files::new(&group("quiet")).settings(&[]).unwrap();
    assert_eq!(settings.groups, [rule("g", Matcher::User(0))]);
    assert_eq!(settings.config.groups, [GroupLimits { share: Some(Permyriad(100)), ..GroupLimits::default() }]);
    Files::new(&group("auto")).refused("the limits of 'g' have the governor auto");
    Files::new("[limits]\nsamples-per-second = 1\n")
        .refused("limits.samples-per-second: 1 is out of range; it must be from 64 to 100000000");
    let nobody = Files::new("[[domains.rule]]\nname = \"n\"\nuser = \"nobody-such\"\n");
    nobody.refused("there is no user nobody-such");
}

#[test]
fn local_only_is_for_all_domains_or_none() {
    let of = |text: &str| Files::new(text).settings(&[]).map(|settings| settings.placement);
    let policies = of("[numa]\nplacement = \"kernel\"\n[numa.domains]\na = \"priority\"\n").unwrap();
    assert_eq!((policies.of("a"), policies.of("b")), (Placement::Priority, Placement::Kernel));
    assert_eq!(of("").unwrap(), Policies::default());
    assert!(of("[numa]\nplacement = \"local-only\"\n[numa.domains]\na = \"local-only\"\n").is_ok());
    for text in
        ["[numa.domains]\na = \"local-only\"\n", "[numa]\nplacement = \"local-only\"\n[numa.domains]\na = \"fair\"\n"]
    {
        Files::new(text).refused("local-only must be set for all trust domains or for none");
    }
    let files = Files::new("[numa]\nplacement = \"kernel\"\n");
    assert_eq!(files.settings(&["--placement", "priority"]).unwrap().placement.default, Placement::Priority);
}

#[test]
fn errors_name_the_file() {
    let files = Files::new("[run]\n");
    files.add("a.toml", "\n[run]\ngoverment = 1\n");
    files.refused("pagefold.toml.d/a.toml line 3: unknown key 'goverment' in [run]; ");
}

#[test]
fn files_that_other_users_may_write_are_refused() {
    let set = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let files = Files::new("");
    for mode in [0o666, 0o660, 0o602] {
        set(&files.path(), mode);
        files.refused("other users may write; run chmod go-w on it");
    }
    set(&files.path(), 0o644);
    files.settings(&[]).unwrap();
    files.add("a.toml", "");
    set(&files.dir.path().join("pagefold.toml.d/a.toml"), 0o666);
    files.refused("a.toml is a file that other users may write");
    set(&files.dir.path().join("pagefold.toml.d/a.toml"), 0o600);
    set(&files.dir.path().join("pagefold.toml.d"), 0o777);
    files.refused("directory that other users may write");
    fs::remove_dir_all(files.dir.path().join("pagefold.toml.d")).unwrap();
    set(files.dir.path(), 0o777);
    files.refused("directory that other users may write");
    set(files.dir.path(), 0o700);
    // Only root can give a file away.
    if std::os::unix::fs::chown(files.path(), Some(own_uid() + 1), None).is_ok() {
        files.refused("belongs to another user");
    } else {
        pagefold_testkit::skip("only root can give a file away");
    }
}

#[test]
fn unreadable_files_are_refused() {
    let files = Files::new("");
    std::os::unix::fs::symlink("nowhere", additions(&files.path())).unwrap();
    files.refused("cannot be read");
    fs::remove_file(additions(&files.path())).unwrap();
    assert!(has_layers(&files.path()));
    fs::remove_file(files.path()).unwrap();
    assert!(!has_layers(&files.path()));
    files.refused("cannot be read");
    std::os::unix::fs::symlink("nowhere", files.path()).unwrap();
    assert!(has_layers(&files.path()), "it may come back");
    fs::remove_file(files.path()).unwrap();
    fs::create_dir(additions(&files.path())).unwrap();
    assert!(has_layers(&files.path()));
    files.refused("cannot be read");
    fs::create_dir(files.path()).unwrap();
    files.refused("is not a regular file");
    fs::remove_dir(files.path()).unwrap();
    fs::write(files.path(), b"\xff").unwrap();
    files.refused("UTF-8");
    fs::write(files.path(), vec![b'\n'; 2 << 20]).unwrap();
    files.refused("longer than a megabyte");
}

#[test]
fn changes_that_need_a_restart_are_named() {
    let files = Files::new("[run]\ngovernor = \"low\"\n");
    let path = files.path();
    let args = Cli::try_parse_from(["run", "--config", path.to_str().unwrap()]).unwrap().run;
    let old = Settings::of(&args).unwrap();
    assert!(old.reread(&args).unwrap().fixed_differences(&old).is_empty());
    fs::write(&path, "[run]\ngovernor = \"full\"\n[deny]\nalso = [\"x\"]\n").unwrap();
    assert!(old.reread(&args).unwrap().fixed_differences(&old).is_empty());
    fs::write(&path, "[run]\nlevels = 2\n[scope]\nall = true\n").unwrap();
    let differences = old.reread(&args).unwrap().fixed_differences(&old);
    assert_eq!(differences, ["[run] (except the governor), [judgement] or [tuning]"]);
    fs::write(&path, "[judgement]\nlifetime = \"1s\"\n").unwrap();
    let differences = old.reread(&args).unwrap().fixed_differences(&old);
    assert_eq!(differences, ["[run] (except the governor), [judgement] or [tuning]"]);
    fs::write(&path, "nonsense").unwrap();
    assert!(old.reread(&args).is_err());
}
