//! Logs a daemon's steps to standard error, for people who need to know why it did something. The steps are `tracing`
//! events.
//!
//! Targets are words, not module paths: `cycle`, `decision` (each changed decision on a region), `event` (everything in
//! the list of events), `scope`, `read`, `inject`, `ksm`, `control`, `files`.

use pagefold_text::messages;
use std::fmt::{self, Debug, Display, Write};
use std::str::FromStr;
use std::sync::{LazyLock, PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;

const TARGETS: [&str; 9] = ["cycle", "decision", "event", "scope", "read", "inject", "ksm", "control", "files"];

/// The levels to log: one for all targets (`info`), or also for single targets (`warn,ksm=debug`).
#[derive(Clone, Debug, PartialEq)]
pub struct LogLevels {
    text: String,
    targets: Targets,
}

impl Eq for LogLevels {}

impl Default for LogLevels {
    fn default() -> Self {
        Self { text: "info".to_owned(), targets: Targets::new().with_default(Level::INFO) }
    }
}

impl FromStr for LogLevels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<Targets>() {
            // `Targets` accepts any word as the name of a target, so we check the names.
            Ok(targets) if targets.iter().all(|(target, _)| TARGETS.contains(&target)) => {
                Ok(Self { text: text.to_owned(), targets })
            }
            _ => Err(format!(
                "'{}' is not a level; give info or debug, or a level for each target, such as info,ksm=debug",
                text.escape_debug()
            )),
        }
    }
}

impl Display for LogLevels {
    /// The levels as the user wrote them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

static LEVELS: LazyLock<RwLock<Targets>> = LazyLock::new(RwLock::default);

/// Begins to log. `to_journal`: standard error goes to the journal, so we prefix lines with their level.
pub fn start(levels: &LogLevels, to_journal: bool) {
    set_levels(levels);
    // In each process only the first call has an effect. Tests call this again.
    let _ = set_global_default(Log { to_journal, write: messages::log });
}

/// Logs at these levels from now on.
pub fn set_levels(levels: &LogLevels) {
    *LEVELS.write().unwrap_or_else(PoisonError::into_inner) = levels.targets.clone();
    tracing::callsite::rebuild_interest_cache();
}

struct Log {
    to_journal: bool,
    /// Writes a line after a prefix with its rank. The line may contain any characters.
    write: fn(&str, &str),
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let levels = LEVELS.read().unwrap_or_else(PoisonError::into_inner);
        levels.would_enable(metadata.target(), metadata.level())
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let rank = if self.to_journal { journal_rank(*metadata.level()) } else { "" };
        let mut line = format!("{} {}:", metadata.level().as_str().to_ascii_lowercase(), metadata.target());
        event.record(&mut Fields(&mut line));
        (self.write)(rank, &line);
    }

    // We don't use spans.
    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// The ranks of sd-daemon(3).
fn journal_rank(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string can't fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use tracing::{debug, warn};

    static WRITTEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    #[test]
    fn levels_are_by_known_targets() {
        assert_eq!("info".parse(), Ok(LogLevels::default()));
        for good in ["debug", "warn,ksm=debug", "scope", "off,inject=trace"] {
            assert_eq!(good.parse::<LogLevels>().unwrap().to_string(), good);
        }
        for bad in ["loud", "info,kms=debug", "ksm=loud"] {
            let error = bad.parse::<LogLevels>().unwrap_err();
            assert!(error.contains("is not a level; give info or debug"), "{bad}");
        }
    }

    #[test]
    fn events_are_lines_with_their_fields_if_their_target_is_logged() {
        let write = |rank: &str, line: &str| WRITTEN.lock().unwrap().push(format!("{rank}{line}"));
        set_levels(&"info,scope=debug".parse().unwrap());
        tracing::subscriber::with_default(Log { to_journal: true, write }, || {
            debug!(target: "scope", pid = 7, name = %"redis", "in scope");
            debug!(target: "ksm", "not shown");
            warn!(target: "ksm", knob = ?Some("run"), "changed");
        });
        let wanted = ["<7>debug scope: in scope pid=7 name=redis", "<4>warn ksm: changed knob=Some(\"run\")"];
        assert_eq!(*WRITTEN.lock().unwrap(), wanted);
    }
}
