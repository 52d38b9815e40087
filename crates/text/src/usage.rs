//! Usage errors: one line with the problem and a command line that would have worked.
//!
//! We replace the wrong word by the nearest right one and parse again. We only suggest a line that parses.

use crate::escape::shell_word;
use crate::misspelt::nearest;
use crate::table::spaced;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error, Parser};

/// How many words of a command line we replace, at most.
const MENDS_MOST: usize = 4;
/// How many candidate command lines we keep after each round of replacing words.
const LINES_MOST: usize = 16;
/// We never suggest these: they let in processes that would be left alone by default.
const NEVER_GUESSED: [&str; 3] = ["--all", "--allow", "--override-opt-out"];
/// One letter in this many may be wrong.
const LETTERS: usize = 3;

/// Flags and commands that people expect, with the ones that we have.
const SYNONYMS: &[(&str, &str)] = &[
    ("--comm", "--exe"),
    ("--docker", "--container"),
    ("--duration", "--for"),
    ("--disallow", "--deny"),
    ("--exclude", "--deny"),
    ("--guest", "--vm"),
    ("--name", "--exe"),
    ("--program", "--exe"),
    ("--service", "--unit"),
    ("--time", "--for"),
    ("--timeout", "--for"),
    ("--uid", "--user"),
    ("--verbose", "--log-level=debug"),
    ("-c", "--config"),
    ("-n", "--dry-run"),
    ("-p", "--pid"),
    ("-u", "--user"),
    ("-v", "--log-level=debug"),
    ("analyze", "scan"),
    ("check", "doctor"),
    ("continue", "resume"),
    ("list", "scan"),
    ("merge", "run"),
    ("monitor", "top"),
    ("ps", "top"),
    ("start", "run"),
    ("test", "check"),
    ("undo", "unmerge"),
    ("unexclude", "include"),
    ("unpause", "resume"),
    ("validate", "check"),
    ("version", "--version"),
    ("watch", "top"),
];

/// How a process gets into the background.
const START: &str = "start the service: systemctl start NAME, or NAME enable PROGRAM";

/// Commands and flags that systemd has instead of us, with the line that works. `NAME` stands for the program's name.
const SERVICE: &[(&str, &str)] = &[
    ("--background", START),
    ("--daemon", START),
    ("-d", START),
    ("daemon", START),
    ("reload", "reload the service by systemctl reload NAME"),
    ("restart", "restart the service by systemctl restart NAME"),
    ("stop", "stop a service by systemctl stop NAME, a run by Ctrl-C in its terminal"),
];

/// The line that we print for a usage error. `words` is the command line, with the program's name.
pub fn line<Cli: Parser>(error: &Error, words: &[String]) -> String {
    let text = error.render().to_string();
    let problem = text.split("\n\n").next().unwrap_or_default();
    let problem = spaced(problem.trim_start_matches("error: "));
    // Some of our value parsers suggest something better themselves.
    if problem.contains("; try ") {
        return problem;
    }
    let command = Cli::command();
    let leaf = leaf(&command, words);
    if let Some((_, advice)) = SERVICE.iter().find(|(theirs, _)| wrong_word(error).as_deref() == Some(*theirs)) {
        return format!("{problem}; {}", advice.replace("NAME", command.get_name()));
    }
    match mended::<Cli>(error, words).or_else(|| example::<Cli>(error, &leaf.command, words)) {
        Some(line) => format!("{problem}; try {line}"),
        None => format!("{problem}; see {} --help", leaf.path),
    }
}

/// A subcommand, with the words that name it.
struct Leaf {
    path: String,
    command: Command,
}

impl Leaf {
    fn name(&self) -> &str {
        self.command.get_name()
    }
}

fn leaf(command: &Command, words: &[String]) -> Leaf {
    let mut leaf = Leaf { path: command.get_name().to_owned(), command: command.clone() };
    for word in words.iter().skip(1) {
        let Some(next) = leaf.command.find_subcommand(word) else { break };
        leaf = Leaf { path: format!("{} {word}", leaf.path), command: next.clone() };
    }
    leaf
}

/// The command line with its wrong words replaced, if we can guess the right ones.
fn mended<Cli: Parser>(error: &Error, words: &[String]) -> Option<String> {
    let mut lines = guesses::<Cli>(error, words);
    // A right command may still lack an argument.
    let mut lacking = None;
    for _ in 0..MENDS_MOST {
        let mut next = Vec::new();
        for words in lines {
            let error = match Cli::try_parse_from(&words) {
                Err(error) if error.use_stderr() => error,
                _ => return Some(shown::<Cli>(&words)),
            };
            if lacking.is_none() && error.kind() == ErrorKind::MissingRequiredArgument {
                lacking = example::<Cli>(&error, &leaf(&Cli::command(), &words).command, &words);
            }
            next.extend(guesses::<Cli>(&error, &words));
        }
        next.truncate(LINES_MOST);
        lines = next;
    }
    lacking
}

fn shown<Cli: Parser>(words: &[String]) -> String {
    let mut line = Cli::command().get_name().to_owned();
    for word in &words[1..] {
        line = line + " " + &shell_word(word);
    }
    line
}

/// The unknown command or flag, or the flag with the invalid value. clap names that flag together with its value: "--pid
/// <PID>".
fn wrong_word(error: &Error) -> Option<String> {
    let kind = match error.kind() {
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => ContextKind::InvalidArg,
    };
    Some(context(error, kind).first()?.split(' ').next()?.to_owned())
}

/// The names that may stand in place of a wrong one: a command's long flags, or the commands below it.
fn names_like(wrong: &str, leaf: &Command) -> Vec<String> {
    let mut names = Vec::new();
    if wrong.starts_with('-') {
        for flag in leaf.get_arguments().filter(|argument| !argument.is_hide_set()) {
            names.extend(flag.get_long().map(|name| format!("--{name}")));
        }
    } else {
        let visible = leaf.get_subcommands().filter(|command| !command.is_hide_set());
        names.extend(visible.map(|command| command.get_name().to_owned()));
    }
    names
}

/// Command lines that replace one word of a wrong one, the most likely first.
fn guesses<Cli: Parser>(error: &Error, words: &[String]) -> Vec<Vec<String>> {
    let mut guesses = Vec::new();
    let Some(wrong) = wrong_word(error) else { return guesses };
    let wrong = wrong.as_str();
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            for (_, right) in SYNONYMS.iter().filter(|(theirs, _)| *theirs == wrong) {
                guesses.extend(replaced(words, wrong, right));
            }
            for word in words.iter().filter(|word| word.starts_with(wrong) && is_long_with_one_dash(word)) {
                guesses.extend(replaced(words, word, &format!("-{word}")));
            }
            let command = Cli::command();
            let leaf = leaf(&command, words);
            let known = names_like(wrong, &leaf.command);
            for right in nearest(wrong, known.iter().map(String::as_str), LETTERS) {
                if !NEVER_GUESSED.contains(&right) {
                    guesses.extend(replaced(words, wrong, right));
                }
            }
            // "status redis-server"
            if matches!(leaf.name(), "status" | "top") && !wrong.starts_with('-') {
                guesses.extend(replaced(words, leaf.name(), "explain"));
            }
            // A flag without a command belongs to the command after it, or to the first command that has it.
            if words.get(1).is_some_and(|word| word.starts_with("--")) {
                let after = words.iter().skip(1).position(|word| command.find_subcommand(word).is_some());
                if let Some(flags) = after {
                    let (before, rest) = words[1..].split_at(flags);
                    guesses.push([&words[..1], &rest[..1], before, &rest[1..]].concat());
                }
                for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
                    guesses.push([&words[..1], &[command.get_name().to_owned()], &words[1..]].concat());
                }
            }
        }
        ErrorKind::ValueValidation => {
            let Some(value) = context(error, ContextKind::InvalidValue).into_iter().next() else { return guesses };
            let is_number = value.parse::<f64>().is_ok();
            match wrong {
                // We suggest --exe only if the wrong word is the option's whole value, not one of several pids.
                "--pid" if !is_number && (words.contains(&value) || words.contains(&format!("--pid={value}"))) => {
                    guesses.extend(replaced(words, "--pid", "--exe"));
                }
                // A duration without its unit.
                _ if is_number && context(error, ContextKind::InvalidArg).concat().ends_with("<DURATION>") => {
                    guesses.extend(replaced(words, &value, &format!("{value}h")));
                    guesses.extend(replaced(words, &format!("{wrong}={value}"), &format!("{wrong}={value}h")));
                }
                _ => {}
            }
        }
        // "--json=true"
        ErrorKind::TooManyValues => {
            let value = context(error, ContextKind::InvalidValue).concat();
            guesses.extend(replaced(words, &format!("{wrong}={value}"), wrong));
        }
        _ => {}
    }
    guesses
}

/// Two command lines: one with the first occurrence of a word replaced, one with all. The word may have a value after
/// an equals sign.
fn replaced(words: &[String], from: &str, to: &str) -> Vec<Vec<String>> {
    let mut first: Option<Vec<String>> = None;
    let mut all = words.to_vec();
    for (at, word) in words.iter().enumerate().skip(1) {
        let rest = word.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('='));
        if let Some(rest) = rest {
            all[at] = format!("{to}{rest}");
            first.get_or_insert_with(|| all.clone());
        }
    }
    let Some(first) = first else { return Vec::new() };
    if first == all { vec![all] } else { vec![first, all] }
}

/// Whether a word looks like "-exe", a long flag with one dash.
fn is_long_with_one_dash(word: &str) -> bool {
    word.len() > 2 && word.starts_with('-') && !word.starts_with("--")
}

/// Finds the first example in the command's help that has the flag whose value is invalid, or the first of all if an
/// argument is missing. If the command line lacks only the example's value, returns the line with that value.
fn example<Cli: Parser>(error: &Error, command: &Command, words: &[String]) -> Option<String> {
    let lacking = match error.kind() {
        ErrorKind::MissingRequiredArgument => String::new(),
        ErrorKind::InvalidValue => context(error, ContextKind::InvalidArg).concat().split(' ').next()?.to_owned(),
        _ => return None,
    };
    let help = command.get_after_long_help()?.to_string();
    for line in help.lines() {
        match line.strip_prefix("  ") {
            Some(example) if !example.starts_with(' ') && example.contains(&lacking) => {
                let mut words = words.to_vec();
                let value = example.split(' ').skip_while(|word| *word != lacking).nth(1);
                if let (Some(at), Some(value)) = (words.iter().position(|word| *word == lacking), value) {
                    words.insert(at + 1, value.to_owned());
                }
                let completed = Cli::try_parse_from(&words).is_ok();
                return Some(if completed { shown::<Cli>(&words) } else { example.to_owned() });
            }
            _ => {}
        }
    }
    None
}

/// The strings of this kind that clap attached to an error.
fn context(error: &Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    #[command(name = "tool")]
    enum Cli {
        /// Look
        Scan {
            #[arg(long, value_parser = clap::value_parser!(i32))]
            pid: Vec<i32>,
            #[arg(long)]
            exe: Vec<String>,
            #[arg(long)]
            json: bool,
        },
        /// Take
        #[command(after_long_help = "Examples:\n  tool run --config a.toml x\n      Runs x")]
        Run {
            program: String,
            #[arg(long)]
            config: Option<String>,
        },
    }

    fn answer(words: &str) -> String {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let Err(error) = Cli::try_parse_from(&words) else { return "works".to_owned() };
        let line = line::<Cli>(&error, &words);
        let (_, advice) = line.rsplit_once("; ").unwrap();
        advice.to_owned()
    }

    #[test]
    fn wrong_words_are_replaced_by_the_nearest_right_ones() {
        for (words, advice) in [
            ("tool scan --exe a", "works"),
            ("tool scna --exee=a", "try tool scan --exe=a"),
            ("tool scan -exe a", "try tool scan --exe a"),
            ("tool list --program a b", "see tool --help"),
            ("tool scan --json=yes", "try tool scan --json"),
            ("tool --exe a", "try tool scan --exe a"),
            ("tool scan --pid a", "try tool scan --exe a"),
            ("tool scan --pid 1.5", "see tool scan --help"),
            ("tool scan --frobnicate", "see tool scan --help"),
            ("tool frobnicate", "see tool --help"),
            ("tool stop", "stop a service by systemctl stop tool, a run by Ctrl-C in its terminal"),
            ("tool inscan --exe a", "see tool --help"),
            ("tool scan --exe a --docker b --docker c", "see tool scan --help"),
            ("tool run", "try tool run --config a.toml x"),
            ("tool run x --config", "try tool run x --config a.toml"),
            ("tool --json scan", "try tool scan --json"),
            ("tool rnu", "try tool run --config a.toml x"),
        ] {
            assert_eq!(answer(words), advice, "{words}");
        }
    }
}
